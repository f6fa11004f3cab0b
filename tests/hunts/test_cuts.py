"""A share of the hunt, and the proof that it can find something."""

from __future__ import annotations

import json

import pytest

from tests.hunts import cuts


@pytest.mark.hunt
def test_many_cuts_cost_a_small_share(capsys: pytest.CaptureFixture[str]) -> None:
    assert cuts.main(["--cuts", "8", "--mib", "192", "--seed", "3"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["push_cuts"], found["pull_cuts"]) == (8, 8)


def test_what_goes_over_the_wire_twice_is_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cuts, "EXTRA_SHARE_MAX", 0.0)
    assert cuts.main(["--cuts", "2", "--mib", "4"]) == 1
    assert "push" in (said := capsys.readouterr().out)
    assert "% more than its bytes went over the wire" in said


def test_what_does_not_arrive_is_a_violation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cuts, "arrived", lambda way, answer, payload: False)
    assert cuts.main(["--cuts", "1", "--mib", "4"]) == 1
    assert "what arrived is not what was sent" in capsys.readouterr().out
