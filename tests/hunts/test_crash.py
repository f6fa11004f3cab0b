"""The hunt's tables are complete, and a short hunt finds nothing."""

from __future__ import annotations

import json

import pytest

from diloco.durable import Step
from tests.hunts.crash import EVERY_CASE, NEVER, main


def test_every_step_has_a_kill_case() -> None:
    killed_at = {name.partition(": ")[2] for name in EVERY_CASE}
    missing = {str(step) for step in set(Step) - set(NEVER)} - killed_at
    assert not missing, f"steps without a kill case in tests/hunts: {sorted(missing)}"
    assert not killed_at & {str(step) for step in NEVER}


@pytest.mark.hunt
def test_a_short_hunt_finds_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--kills", "40", "--seed", "4"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (code, found["violations"]) == (0, 0), found
    assert found["kills"] >= 40
    assert found["kills"] == sum(found["killed_at"].values())
    assert found["steps_named"] == len(Step) - len(NEVER) == len(found["kills_by_step"])
    assert 0 < found["steps_killed_at"] <= found["steps_named"]
    assert found["rounds"].keys() >= {"lock-step", "standby"}
