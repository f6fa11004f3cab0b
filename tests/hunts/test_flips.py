"""A flipped bit is named or harmless, and one with which a start went on wrongly would be told."""

from __future__ import annotations

import json

import pytest

from diloco.syncer.store import Store
from tests.hunts import flips

pytestmark = pytest.mark.slow  # What a hunt is worth is tried where the hunts run, in .ci/run.


def test_every_damage_is_named_or_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    assert flips.main(["--flips", "80", "--seed", "7"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["found"]["named"] > 50
    assert found["found"]["still to be merged"] > 12


def test_a_start_that_goes_on_with_another_state_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flips, "looked_at", lambda folder: "")
    started = flips.started
    monkeypatch.setattr(flips, "started", lambda folder, copy, wanted: (started(folder, copy, wanted)[0], False))
    assert flips.main(["--flips", "5"]) == 1


def test_a_start_that_does_not_look_at_what_it_is_still_to_merge_is_a_violation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Store, "_check_waiting", lambda store, machine: None)
    assert flips.main(["--flips", "40", "--seed", "7"]) == 1
    assert "goes on with another state" in capsys.readouterr().out
