"""The examples reach the expected loss in short runs, and the hunt detects one that does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy

from diloco.inner.model import Transformer
from diloco.outer.fragments import named_parameters_once
from examples.plain_loop import Model
from tests.hunts import examples
from tests.hunts.examples import ELSEWHERE, EXAMPLES, LIKE, MODEL, OURS, SHARE_MAX, loss_of, run_of, version0
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


@pytest.mark.parametrize("made", [Model, lambda: Transformer(MODEL)], ids=["plain_loop", OURS])
def test_a_published_model_is_evaluated_by_its_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Callable[[], torch.nn.Module]
) -> None:
    rows, model = torch.arange(40).reshape(4, 10), made()
    monkeypatch.setattr(examples, "prepare_corpus", lambda options, folder: None)
    monkeypatch.setattr(examples, "validation_batches", lambda *given: [(rows[:, :-1], rows[:, 1:])])
    save_file({name: each.detach() for name, each in named_parameters_once(model).items()}, tmp_path / "model")
    place: Any = SimpleNamespace(folder=tmp_path)
    with torch.no_grad():
        wanted = float(cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()))
    assert loss_of(place, tmp_path / "model") == pytest.approx(wanted, rel=1e-5)


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
