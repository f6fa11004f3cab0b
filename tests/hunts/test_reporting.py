from __future__ import annotations

import json

import pytest

from diloco.sim.site_process import Trainer
from diloco.sync import fates
from tests.hunts.reporting import Hunt
from tests.hunts.swarm import main, pieces

pytestmark = pytest.mark.slow  # What a hunt is worth is tried where the hunts run, in .ci/run.


def test_the_last_line_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "3", "--seed", "5", "--jobs", "1"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["hunt"], found["seed"], found["ran"]["seeds"], found["violations"]) == ("swarm", 5, 3, 0)
    assert found["ran"]["events"] > 100


def test_a_violation_is_one_line_with_the_command_that_replays_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fates, "all_final", lambda turn, index: False)
    # The processes of the hunt are forked, so that they have what was put in here.
    assert main(["--seeds", "1", "--seed", "3", "--jobs", "1"]) == 1
    line, last = capsys.readouterr().out.splitlines()
    assert line.startswith("python -m tests.hunts.swarm --seed 3 --seeds 1  # liveness: ")
    assert json.loads(last)["violations"] == 1


def test_a_violation_among_several_syncers_is_replayed_among_several(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "complete", lambda self, ready: False)
    assert main(["--seeds", "1", "--seed", "3", "--jobs", "1", "--syncers", "several"]) == 1
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("python -m tests.hunts.swarm --seed 3 --seeds 1 --syncers several  # liveness: ")


def test_options_are_named_as_they_are_typed() -> None:
    hunt = Hunt("example", "An example.")
    hunt.asked([])
    hunt.violated("it broke", at_step="journal.sync", seed=7)
    assert hunt.violations == ["python -m tests.hunts.example --at-step journal.sync --seed 7  # it broke"]


def test_pieces_are_all_the_seeds_once() -> None:
    assert [seed for piece in pieces(7, 120) for seed in piece] == list(range(7, 127))
