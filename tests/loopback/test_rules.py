"""Every kind of correction, merge and outer optimizer, over real gRPC, killed in the middle and taken up again."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from diloco.outer.merge import Correction
from tests.loopback.test_kill import long_enough, the_syncer_dies

RULES: dict[str, dict[str, object]] = {
    "delayed_nesterov, one by one": {
        "optimizer": {"kind": "delayed_nesterov", "lr": 0.5, "momentum": 0.5, "window": 2},
        "rules": {"quorum": 1, "round_updates": 1, "weights": "uniform", "staleness_max": 20},
    },
    "adamw on rda": {"optimizer": {"kind": "adamw", "lr": 0.05, "momentum": 0.9}, "merge": "rda"},
    "schedule_free on the median": {
        "optimizer": {"kind": "schedule_free", "lr": 0.7, "momentum": 0.9},
        "merge": "geometric_median",
    },
    "gpa on what is clipped, a buffer of three, eager": {
        "optimizer": {"kind": "gpa", "lr": 0.7, "momentum": 0.5},
        "merge": "clip",
        "adopt": "eager",
        "rules": {"quorum": 1, "round_updates": 3, "staleness_power": 0.5},
    },
    "a buffer of three, update by update": {
        "optimizer": {"kind": "sgd", "lr": 0.7, "momentum": 0.0},
        "rules": {"quorum": 1, "round_updates": 3, "merge_by": "update", "weights": "uniform"},
    },
    "nesterov_ema on what is trimmed": {
        "optimizer": {"kind": "nesterov_ema", "lr": 0.5, "momentum": 0.5},
        "merge": "trimmed_mean",
    },
    "heloco, one by one": {
        "optimizer": {"kind": "nesterov_ema", "lr": 0.25, "momentum": 0.9},
        "correction": Correction(kind="heloco"),
        "rules": {"quorum": 1, "round_updates": 1, "weights": "uniform", "staleness_max": 20},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_invariant_11_a_syncer_that_dies_goes_on_to_the_bits_of_its_journal_whatever_the_rule(
    tmp_path: Path, rule: str
) -> None:
    long_enough(tmp_path, partial(the_syncer_dies, "merging", **RULES[rule]))
