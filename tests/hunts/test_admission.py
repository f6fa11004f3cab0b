"""A share of the hunt for bad updates that enter and good ones that do not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from diloco.sim.site_process import Trainer
from diloco.sync import fates
from tests.hunts import admission, layouts, swarm
from tests.hunts.layouts import Found, run_of
from tests.hunts.reporting import Hunt
from tests.hunts.swarm import pieces

pytestmark = pytest.mark.slow  # What a hunt is worth is tried where the hunts run, in .ci/run.


def test_bad_updates_are_refused_or_bounded_and_clean_ones_enter(capsys: pytest.CaptureFixture[str]) -> None:
    assert admission.main(["--places", "4", "--rounds", "24"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["violations"], found["false_refusals"], found["updates"]) == (0, 0, 24 * 8)
    for kind in admission.ALWAYS_REFUSED:
        assert found[f"{kind}_refused"] == 4


def test_the_hunt_sees_a_syncer_that_admits_everything(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "HealthOptions", lambda: admission_of_all())
    assert admission.main(["--places", "1", "--rounds", "30"]) == 1
    assert ": scale of " in capsys.readouterr().out


def admission_of_all() -> object:
    from diloco.sync.options import HealthOptions

    return HealthOptions(policy="admit")


# ---  ----------------------------------------------------------------------------------------------------------------


def test_the_last_line_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert swarm.main(["--seeds", "3", "--seed", "5", "--jobs", "1"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["hunt"], found["seed"], found["ran"]["seeds"], found["violations"]) == ("swarm", 5, 3, 0)
    assert found["ran"]["events"] > 100


def test_a_violation_is_one_line_with_the_command_that_replays_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fates, "all_final", lambda turn, index: False)
    # The processes of the hunt are forked, so that they have what was put in here.
    assert swarm.main(["--seeds", "1", "--seed", "3", "--jobs", "1"]) == 1
    line, last = capsys.readouterr().out.splitlines()
    assert line.startswith("python -m tests.hunts.swarm --seed 3 --seeds 1  # liveness: ")
    assert json.loads(last)["violations"] == 1


def test_a_violation_among_several_syncers_is_replayed_among_several(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "complete", lambda self, ready: False)
    assert swarm.main(["--seeds", "1", "--seed", "3", "--jobs", "1", "--syncers", "several"]) == 1
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("python -m tests.hunts.swarm --seed 3 --seeds 1 --syncers several  # liveness: ")


def test_options_are_named_as_they_are_typed() -> None:
    hunt = Hunt("example", "An example.")
    hunt.asked([])
    hunt.violated("it broke", at_step="journal.sync", seed=7)
    assert hunt.violations == ["python -m tests.hunts.example --at-step journal.sync --seed 7  # it broke"]


def test_pieces_are_all_the_seeds_once() -> None:
    assert [seed for piece in pieces(7, 120) for seed in piece] == list(range(7, 127))


# --- The layouts of a site's ranks change no bit, in a short run of two of them and in a long one of all -------------


def test_two_sites_of_two_layouts_exchange_what_two_processes_do(tmp_path: Path) -> None:
    mixed = run_of(tmp_path / "mixed", {"a": ("fsdp", 2), "b": ("tp", 2)}, 2, "rebase")
    plain = run_of(tmp_path / "plain", {"a": ("plain", 1), "b": ("plain", 1)}, 2, "rebase")
    assert mixed.differs(plain) == []
    assert len(plain.payloads) == 2 * 3 * 2, "two sites, three fragments, two rounds"
    assert len(plain.versions) == 3 * 2
    assert len(plain.held) == 2 * 2 * 3, "two sites, two rounds of three steps"


@pytest.mark.hunt
@pytest.mark.parametrize("adopt", ["rebase", "overwrite"])
def test_sites_of_every_layout_and_of_four_together(adopt: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = layouts.main(["--rounds", "3", "--adopt", adopt, *(["--mixed"] if adopt == "overwrite" else [])])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (code, found["violations"], found["mismatches"]) == (0, 0, 0), found
    assert found["compared"] >= 80


def test_one_bit_in_one_place_is_a_difference() -> None:
    found = Found({("a", 0, 1): "p"}, {(0, 1): "v"}, {("a", 1): "h"})
    assert found.differs(found) == []
    assert found.differs(replace(found, payloads={("a", 0, 1): "q"})) == ["payloads ('a', 0, 1)"]
    assert found.differs(replace(found, versions={})) == ["versions (0, 1)"]
    assert found.differs(replace(found, held={("a", 1): "h", ("a", 2): "h"})) == ["held ('a', 2)"]
