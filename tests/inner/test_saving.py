from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diloco.durable import PLAIN_DISK
from diloco.inner import checkpoint
from diloco.inner.checkpoint import CheckpointError, names
from diloco.inner.holding import Spread
from diloco.inner.parallel import SiteGroup
from diloco.inner.trainer import Captured, Saving, TrainerOptions

Facts = list[tuple[str, dict[str, object]]]


def make(root: Path | None, facts: Facts, every_steps: int = 2) -> Saving:
    def log(what: str, fields: dict[str, object]) -> None:
        facts.append((what, fields))

    spread = Spread(torch.nn.Linear(2, 2), SiteGroup(device="cpu"))
    return Saving(root, every_steps, options(20.0, deterministic=True), spread, log, PLAIN_DISK)


def options(wait_s: float, *, deterministic: bool) -> TrainerOptions:
    return TrainerOptions(checkpoint_wait_s=wait_s, deterministic=deterministic)


def step(saving: Saving, number: int, model: torch.nn.Module, sound: bool = True) -> None:
    """What a trainer does with it in one step."""

    def capture(in_parts: bool, after_step_done: bool) -> Captured:
        told: dict[str, Any] = {"step": number, "after_step_done": after_step_done}
        return {"model/x": torch.full((2,), float(number))}, {}, {"trainer": told}

    saving.heard(number, saving.words(number), sound)
    saving.if_due(number, model, capture)


def test_what_is_due_waits_for_a_sound_step(tmp_path: Path) -> None:
    facts: Facts = []
    saving, model = make(tmp_path, facts), torch.nn.Linear(2, 2)
    for number, sound in ((1, True), (2, False), (3, True), (4, True), (5, True)):
        step(saving, number, model, sound)
    assert names(tmp_path) == ["step-0000000003", "step-0000000004"]
    found, _ = saving.newest(None, lambda _: set())
    assert found is not None
    assert found.tensors["model/x"].tolist() == [4.0, 4.0]


def test_a_model_with_a_nan_is_not_saved(tmp_path: Path) -> None:
    facts: Facts = []
    saving, model = make(tmp_path, facts), torch.nn.Linear(2, 2)
    with torch.no_grad():
        model.bias[0] = torch.nan
    step(saving, 2, model)
    assert names(tmp_path) == []
    assert facts == [("note", {"note": "checkpoint not written", "why": "parameter bias is not finite"})]


def test_no_folder_means_no_checkpoints_and_a_fresh_start_wants_an_empty_one(tmp_path: Path) -> None:
    saving, model = make(None, []), torch.nn.Linear(2, 2)
    saving.refuse_leftovers()
    step(saving, 2, model)
    assert saving.newest(None, lambda _: set()) == (None, [])
    saving = make(tmp_path, [])
    saving.refuse_leftovers()
    step(saving, 2, model)
    with pytest.raises(CheckpointError, match="already holds step-0000000002, and this run did not resume"):
        saving.refuse_leftovers()


class Rank:
    """One of two threads as a rank that holds a part."""

    world = 2

    def __init__(self, rank: int, shared: dict[int, Sequence[float]], barrier: threading.Barrier) -> None:
        self.rank, self.is_first, self._shared, self._barrier = rank, rank == 0, shared, barrier

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        self._shared[self.rank] = list(values)
        self._barrier.wait(20.0)
        found = [sum(each) for each in zip(*self._shared.values(), strict=True)]
        self._barrier.wait(20.0)
        return found


def test_where_one_rank_still_writes_at_the_end_all_ranks_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, real = threading.Event(), checkpoint.write_part

    def slow(root: Path, name: str, rank: int, *rest: Any) -> None:
        assert rank == 0 or gate.wait(60)
        real(root, name, rank, *rest)

    monkeypatch.setattr(checkpoint, "write_part", slow)
    shared: dict[int, Sequence[float]] = {}
    barrier, said = threading.Barrier(2), dict[int, BaseException | None]()

    def run(rank: int) -> None:
        group, model = Rank(rank, shared, barrier), torch.nn.Linear(2, 2)
        spread: Any = SimpleNamespace(is_sharded=True, group=group, place={"shard": rank})
        saving = Saving(tmp_path, 2, options(0.2, deterministic=False), spread, lambda what, fields: None, PLAIN_DISK)

        def capture(in_parts: bool, after_step_done: bool) -> Captured:
            return {}, {f"extra/{rank}": torch.ones(2)}, {}

        try:
            saving.heard(2, group.all_reduce_sum(saving.words(2)), True)
            saving.if_due(2, model, capture)
            saving.at_end(2, model, capture)
            said[rank] = None
        except Exception as error:
            said[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    gate.set()
    assert [type(said[rank]) for rank in (0, 1)] == [CheckpointError, CheckpointError], said
    assert "still being written" in str(said[1])
    assert names(tmp_path) == []
