from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.hunts.poison import Poisoning, main

SMALL = (
    "model.layers=2 model.dim=32 model.heads=2 model.context=64 data=stdlib_bytes inner.batch_sequences=8 "
    "inner.precision=fp32 outer.inner_steps=5 network=loopback"
)


@pytest.mark.hunt
def test_poison_is_taken_out_of_a_run_of_real_training(capsys: pytest.CaptureFixture[str]) -> None:
    """Shorter than the hunt: what harm the poison does, and what is left of it, is for that to say."""
    main(["--tokens", "60000", "--at", "2", "--updates", "1", "--settings", SMALL])
    said = capsys.readouterr().out
    found = json.loads(said.splitlines()[-1])
    assert "left_out" in found, said
    assert found["left_out"] >= 1
    assert found["tokens_restored"] >= 60000
    assert found["loss_restored"] < found["loss_without"]


def test_the_poison_is_where_it_was_asked_for() -> None:
    poisoning = Poisoning(Path(), seed=1, tokens=1000, at=4, updates=3, strength=2.0)
    assert list(poisoning.sequences) == [4, 5, 6]


def test_a_site_that_was_to_send_poison_and_did_not_is_noticed(tmp_path: Path) -> None:
    """The hunt had gone on without any, once the code that it bends had moved."""
    poisoning = Poisoning(tmp_path, seed=1, tokens=10**9, at=1, updates=1, strength=2.0)
    poisoning.check_sent([[], [1], []])
    for sent in ([[], [], []], [[1], [1], []], [[], [1, 2], []]):
        with pytest.raises(AssertionError, match="was to be sent by one site"):
            poisoning.check_sent(sent)
