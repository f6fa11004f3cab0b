"""A share of the hunt for bad updates that enter and good ones that do not."""

from __future__ import annotations

import json

import pytest

from tests.hunts import admission

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
