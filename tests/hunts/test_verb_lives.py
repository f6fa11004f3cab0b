"""One death of the real syncer verb, and the audit of the run that goes on after it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from diloco.durable import Step
from tests.hunts.verb_lives import DEATHS, VerbLives


@pytest.mark.slow
def test_a_syncer_verb_that_is_killed_loses_nothing(tmp_path: Path) -> None:
    killed: Counter[str] = Counter({f"diloco syncer: {step}": 1 for step in DEATHS["syncer"] if step is not Step.ACK})
    before = killed.total()
    assert VerbLives(tmp_path, 1, killed, deaths=1).run() > 0
    assert killed.total() == before + 2
    assert killed["diloco syncer: syncer.ack"] == 1
