"""One of two ranks, forked by test_memory: dies, and takes up what is in the memory of one machine or two.

Told: the folder of the prepared corpus, and the one for results.  Two machines are two folders.  A death
is an error in ``after_step`` and another trainer; what a rank trains then is compared with what it trains undisturbed.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.durable import PLAIN_DISK, Disk
from diloco.inner import memory
from diloco.inner.checkpoint import CheckpointError, names
from diloco.inner.memory import Machines
from diloco.inner.parallel import SiteGroup, local
from diloco.inner.trainer import StepInfo, Trainer, capture_state
from tests.inner import spread_program
from tests.inner.conftest import NoRoom, damage, resumed
from tests.inner.spread_program import CASES, build

Facts = list[tuple[str, dict[str, object]]]
DIES, END = 5, 6
NEWEST = ["step-0000000002", "step-0000000004"]


class DeadError(Exception):
    """What ends a life."""


def trained(trainer: Trainer, until: int, *, dies: bool) -> None:
    """Train; each checkpoint in memory is written before the next step begins."""

    def also(info: StepInfo) -> None:
        trainer.group.all_reduce_sum([0.0])
        if dies and info.step == until:
            raise DeadError

    def extra() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        return {f"mine.{trainer.group.rank}": torch.full((2,), trainer.step)}, {"at": trainer.step}

    with pytest.raises(DeadError) if dies else contextlib.nullcontext():
        spread_program.trained(trainer, until, extra, also)


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Copies of all that a rank holds."""
    tensors = capture_state(trainer.model, trainer.optimizers)
    return {name: local(tensor).clone() for name, tensor in tensors.items()}


class Life:
    """Lives of one site in one layout, and what it is without a death."""

    def __init__(self, case: str, corpus: Path, group: SiteGroup, memory: Path) -> None:
        self.case, self.corpus, self.group, self.memory = CASES[case], corpus, group, memory
        whole = build(self.case, corpus, group)
        trained(whole, END, dies=False)
        self.whole = state_of(whole)
        self.facts: Facts = []

    def begin(self, disk: Disk = PLAIN_DISK, folder: Path | None = None) -> Trainer:
        """A new life, and what it says."""
        self.facts = []
        log = lambda *told: self.facts.append(told)  # noqa: E731
        return build(self.case, self.corpus, self.group, folder, self.memory, disk, log=log)

    def said(self, what: str) -> list[dict[str, object]]:
        return [fields for name, fields in self.facts if name == what]

    def goes_on(self, step: int, *, dies: bool) -> None:
        """A life that goes on from ``step`` in memory; one that does not die ends as if there had been no death."""
        trainer = self.begin()
        found = resumed(trainer)
        assert (found.step, found.meta) == (step, {"at": step})
        assert found.tensors[f"mine.{self.group.rank}"].tolist() == [step, step]
        assert str(self.memory) in str(self.said("resumed")[0]["path"])
        trained(trainer, DIES if dies else END, dies=dies)
        if dies:
            return
        mine = state_of(trainer)
        assert mine.keys() == self.whole.keys()
        assert all(torch.equal(mine[name], self.whole[name]) for name in mine)
        self.group.all_reduce_sum([0.0])
        assert not self.memory.exists(), "nothing is left in memory at the end"


def lose_a_machine(life: Life, out: list[Path], lost: int) -> None:
    """The folder of one machine is gone: all that was in it comes from the other, to the bit."""
    trained(life.begin(), DIES, dies=True)
    assert names(life.memory) == NEWEST
    told = life.said("memory_checkpoint")
    assert [(each["name"], each["copies"]) for each in told] == [(name, 2) for name in NEWEST]
    assert all(int(str(each["bytes"])) > 1000 for each in told)
    life.group.all_reduce_sum([0.0])
    if life.group.is_first:
        shutil.rmtree(out[lost])
    life.group.all_reduce_sum([0.0])
    life.goes_on(4, dies=False)


def damage_copies(life: Life, out: list[Path]) -> None:
    """One damaged copy is made good by the other; two of the same part cost a checkpoint, in words."""
    rank = life.group.rank
    trained(life.begin(), DIES, dies=True)
    life.group.all_reduce_sum([0.0])
    if rank == 0:
        damage(out[0] / NEWEST[1] / "rank-00000.safetensors")
        (out[0] / ".tmp-step-0000000006").mkdir()
        (out[0] / ".tmp-step-0000000006" / "rank-00000.safetensors").write_bytes(b"half")
    life.group.all_reduce_sum([0.0])
    life.goes_on(4, dies=True)
    assert not list(life.memory.glob(".tmp-*"))
    trained(life.begin(), DIES, dies=True)  # A life that did not look for what there is begins with nothing.
    assert names(life.memory) == NEWEST
    life.group.all_reduce_sum([0.0])
    if rank == 0:
        for folder in out:
            damage(folder / NEWEST[1] / "rank-00001.safetensors")
    life.group.all_reduce_sum([0.0])
    life.goes_on(2, dies=False)
    (note,) = life.said("note")
    assert note["note"] == "checkpoint skipped"
    assert "rank-00001.safetensors is damaged" in str(note["why"])


def fill_memory(life: Life) -> None:
    """One rank has no room: training goes on, each time in words on both, and nothing is left half written."""
    trainer = life.begin(NoRoom() if life.group.rank == 1 else PLAIN_DISK)
    trained(trainer, DIES, dies=True)
    assert names(life.memory) == []
    notes = life.said("note")
    assert [each["note"] for each in notes] == ["memory checkpoint not written"] * 2
    assert ("No space left" if life.group.rank == 1 else "was not received") in str(notes[0]["why"])
    assert not life.said("memory_checkpoint")
    life.group.all_reduce_sum([0.0])
    trained(life.begin(), END, dies=False)
    life.group.all_reduce_sum([0.0])
    assert not life.memory.exists()


def exchange_files(group: SiteGroup, out: list[Path]) -> None:
    """Files of several pieces, an empty one, two that cannot be read and one that cannot be written; all at once."""
    mine, theirs = out[group.rank], out[1 - group.rank]
    for folder in out if group.is_first else []:
        folder.mkdir()
    group.all_reduce_sum([0.0])
    between = Machines(group, mine)
    assert (between.ranks, between.second) == ([[0], [1]], {0: 1, 1: 0})
    content = bytes(range(256)) * (100 + group.rank)
    (mine / "large").write_bytes(content)
    (mine / "empty").write_bytes(b"")
    (mine / "folder").mkdir()
    sent = [mine / kind for kind in ("large", "absent", "folder", "empty", "large")]
    come = [mine / name for name in ("come", "nothing", "never", "none", "large/x")]
    with pytest.raises(CheckpointError, match=r"nothing was not received.*never was not.*large/x cannot be written"):
        between.exchange({1 - group.rank: sent}, {1 - group.rank: come}, PLAIN_DISK)
    group.all_reduce_sum([0.0])
    assert (mine / "come").read_bytes() == (theirs / "large").read_bytes()
    assert (mine / "none").read_bytes() == b""
    group.all_reduce_sum([0.0])


def main(group: SiteGroup, tell: Callable[[str], None], corpus: Path, out: Path) -> None:
    """Run as one rank; raises when anything differs."""
    memory.CHUNK_BYTES = 5000  # So that a file is many pieces.
    exchange_files(group, [out / "a", out / "b"])
    two = [out / "machine-0", out / "machine-1"]
    life = Life("fsdp", corpus, group, two[group.rank])
    lose_a_machine(life, two, 1)
    damage_copies(life, two)
    fill_memory(life)
    tell("filled")
    lose_a_machine(Life("ddp", corpus, group, two[group.rank]), two, 0)
    life.memory = out / "one-machine"
    trained(life.begin(), DIES, dies=True)
    assert life.said("memory_checkpoint")[-1]["copies"] == 1
    life.goes_on(4, dies=True)  # And what it leaves is taken up by one process.
    tell("done")
