from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.hunts.poison import Poisoning, main


@pytest.mark.slow
def test_poison_is_taken_out_of_a_run_of_real_training(capsys: pytest.CaptureFixture[str]) -> None:
    """Shorter than the hunt: whether the loss comes within its bound is for that to say."""
    main(["--rounds", "6", "--at", "3", "--updates", "1"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["left_out"] >= 2
    assert found["loss_without"] < found["loss_when_stopped"]
    assert found["loss_restored"] < found["loss_without"]


def test_the_poison_is_where_it_was_asked_for() -> None:
    poisoning = Poisoning(Path(), seed=1, rounds=10, at=4, updates=3, strength=2.0)
    assert list(poisoning.versions) == [4, 5, 6]
    assert poisoning.tokens == 4 * 8 * 64 * 100
