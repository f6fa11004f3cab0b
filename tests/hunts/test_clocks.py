"""A short hunt finds nothing, each process is told its own time, and a status that no true clock gives is seen."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

import diloco.syncer.backups
from diloco.syncer import standby
from tests.hunts.clock import YEAR_S, follow, tell
from tests.hunts.clocks import main, untrue


@pytest.mark.slow
def test_clocks_jump_under_living_processes_and_nothing_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--jumps", "10"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (code, found["violations"]) == (0, 0), found
    assert (found["done"], found["runs"]) == (10, 1)
    assert found["backups_misdated"] > 0, "no process saw another time"


def test_the_product_is_told_the_time_of_the_file_and_others_the_true_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((standby, "time"), (diloco.syncer.backups, "datetime")):
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr("sys.modules", {each.__name__: each for each in (standby, diloco.syncer.backups)})
    clock = tmp_path / "clock"
    tell(clock, "true")
    follow(clock)
    for kind, ahead_s in (("+10 years", 10 * YEAR_S), ("-10 years", -10 * YEAR_S), ("+1 s", 1)):
        tell(clock, kind)
        assert abs(standby.time.time() - time.time() - ahead_s) < 0.5
        assert abs(diloco.syncer.backups.datetime.now(UTC).timestamp() - time.time() - ahead_s) < 0.5
    assert tell(clock, "1960") < 0
    assert diloco.syncer.backups.datetime.now(UTC).year == 1960
    tell(clock, "frozen")
    assert standby.time.time_ns() == standby.time.time_ns()
    assert abs(datetime.now(UTC).timestamp() - time.time()) < 0.5


def test_what_no_true_clock_gives_is_named() -> None:
    true = {"sites": [{"heard_seconds_ago": 0.0, "base_versions": [-1]}], "progress": None, "ended": False}
    assert list(untrue(true)) == []
    wrong = {"sites": [{"heard_seconds_ago": -1.0}], "loss": float("nan"), "backup": {"age_s": -3}}
    assert [text.split(" is ")[0] for text in untrue(wrong)] == [
        "status.sites[0].heard_seconds_ago",
        "status.loss",
        "status.backup.age_s",
    ]
