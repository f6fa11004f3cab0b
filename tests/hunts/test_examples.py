"""The examples reach the expected loss in short runs, and the hunt detects one that does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

from tests.hunts import examples
from tests.hunts.examples import ELSEWHERE, EXAMPLES, LIKE, OURS, SHARE_MAX, run_of, version0
from tests.runs.processes import ROOT, Place, place_in

TOKENS = 80_000


@pytest.fixture(scope="module")
def loss(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], float]]:
    """The loss of an example, which runs once."""
    with place_in(tmp_path_factory.mktemp("examples")) as place:
        version0(place)
        yield cache(lambda example: run_of(place, example, TOKENS))


@pytest.mark.hunt
@pytest.mark.parametrize("example", sorted(LIKE))
def test_an_example_reaches_the_loss_of_what_trains_the_same(loss: Callable[[str], float], example: str) -> None:
    wanted = loss(LIKE[example])
    assert wanted < 4.0, "untrained: 5.6"
    print("losses:", wanted, loss(example))
    assert loss(example) == pytest.approx(wanted, rel=SHARE_MAX)


def test_every_example_is_hunted_and_short() -> None:
    files = sorted((ROOT / "examples").glob("*.py"))
    assert sorted(EXAMPLES + ELSEWHERE) == [file.stem for file in files]
    for file in files:
        lines = file.read_text("utf-8").splitlines()
        assert len(lines) <= 90, f"{file.name} has {len(lines)} lines"


def test_another_loss_and_an_example_that_fails_are_violations(
    monkeypatch: pytest.MonkeyPatch, hunted: Callable[..., Any]
) -> None:
    def found(place: Place, example: str, tokens: int) -> float:
        assert example != "hf_trainer", "it ended with code 1"
        return {OURS: 2.0, "fsdp_loop": 5.11}.get(example, 5.0)

    monkeypatch.setattr(examples, "version0", lambda place: {})
    monkeypatch.setattr(examples, "loss_of", lambda place, file: 6.9)
    monkeypatch.setattr(examples, "run_of", found)
    row, told = hunted(examples)
    assert row["violations"] == 2
    assert "fsdp_loop: loss 5.1100, that of plain_loop is 5.0000" in told
    assert "it ended with code 1" in told
