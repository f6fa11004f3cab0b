from __future__ import annotations

import json

import pytest

from diloco.sim.__main__ import main
from diloco.sim.several import Trainer
from diloco.sync import ending


def test_last_line_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "2", "--first", "8", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["seeds"], summary["first"], summary["failures"]) == (2, 8, [])
    assert summary["events"] > 100
    assert summary["updates"]["merged"] > 0


def test_failing_seed_is_one_line_with_the_command_that_replays_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "all_final", lambda turn, index: False)
    assert main(["--seeds", "1", "--first", "3"]) == 1
    line, summary = capsys.readouterr().out.splitlines()
    assert line.startswith("python -m diloco.sim --first 3 --seeds 1  # liveness: ")
    assert summary.startswith("1 seeds, 1 failed")


@pytest.mark.slow
def test_runs_of_several_syncers_are_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "complete", lambda self, ready: False)
    assert main(["--seeds", "1", "--first", "3", "--several"]) == 1
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("python -m diloco.sim --first 3 --seeds 1 --several  # liveness: versions stand at ")
