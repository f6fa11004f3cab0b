"""A trainer's state as named tensors and back, and when its checkpoints are written and taken up again.

The tensors are ``model/...``, ``optimizer/...`` and ``random/<rank>/...``.

``Saving`` decides when a checkpoint is written, and ``newest_of`` which one the trainer takes up again; all ranks
decide alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from diloco.inner import checkpoint
from diloco.inner.checkpoint import AsyncWriter, Checkpoint, CheckpointError, PartWriter, kept, rank_name
from diloco.inner.parallel import Box, alike, box_of, local
from diloco.inner.precision import random_state, set_random_state

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import nn

    from diloco.durable import Disk
    from diloco.inner.memory import MemoryWriter
    from diloco.inner.optimizer import InnerOptimizers
    from diloco.inner.parallel import SiteGroup
    from diloco.inner.sharding import Spread


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters (tied ones once, under their first name) and persistent buffers of the plain ``model``, no copies."""
    persistent = model.state_dict()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {**{name: parameter.detach() for name, parameter in model.named_parameters()}, **buffers}


def first_nonfinite(model: nn.Module) -> str:
    """Name of the first parameter or buffer of which this rank holds a NaN or an infinity; empty without one."""
    for name, tensor in model_tensors(model).items():
        if not bool(torch.isfinite(local(tensor)).all()):
            return name
    return ""


def capture(model: nn.Module, optimizers: InnerOptimizers) -> tuple[dict[str, Tensor], dict[str, float | int | bool]]:
    """Tensors of the model and the optimizers (references) and the optimizers' plain values."""
    tensors, values = optimizers.state_dict()
    named = {f"model/{name}": tensor for name, tensor in model_tensors(model).items()}
    return {**named, **{f"optimizer/{name}": tensor for name, tensor in tensors.items()}}, values


def gather_random(group: SiteGroup) -> dict[str, Tensor]:
    """Every rank's random state, on every rank.  A collective."""
    gathered: dict[str, Tensor] = {}
    for kind, mine in random_state(group.device).items():
        for rank, theirs in enumerate(group.all_gather(mine)):
            gathered[f"random/{rank}/{kind}"] = theirs
    return gathered


def own_random(group: SiteGroup) -> dict[str, Tensor]:
    """This rank's random state."""
    return {f"random/{group.rank}/{kind}": mine for kind, mine in random_state(group.device).items()}


def restore(found: Checkpoint, model: nn.Module, optimizers: InnerOptimizers, group: SiteGroup, seed: int) -> None:
    """Put a checkpoint's state into the live objects, in place.  CheckpointError when it is of another model.

    A rank that the checkpoint does not know (the site has grown) is seeded with ``seed`` + its number.
    """
    load_parameters(found, model)
    try:
        optimizers.load_state_dict(_optimizer_tensors(found, model), found.meta["optimizer"])
    except ValueError as error:
        raise CheckpointError(f"{found.path} is of another optimizer: {error}") from error
    mine = found.part(f"random/{group.rank}")
    if "cpu" in mine:
        set_random_state(mine, group.device)
    else:
        torch.manual_seed(seed + group.rank)


@torch.no_grad()
def load_parameters(found: Checkpoint, model: nn.Module) -> None:
    """Copy a checkpoint's model into ``model``, in place, whatever layout either is in.

    Each rank reads its part only.  CheckpointError names the first difference.
    """
    saved, live = found.part("model"), model_tensors(model)
    for name in sorted(saved.keys() | live.keys()):
        here = tuple(live[name].shape) if name in live else "nothing"
        there = found.entries[f"model/{name}"].shape if name in saved else "nothing"
        if here != there:
            raise CheckpointError(f"{found.path} is of another model: {name} is {here} here and {there} there")
    for name, tensor in live.items():
        local(tensor).copy_(found.read(f"model/{name}", box_of(tensor)))


def files_read(found: Checkpoint, model: nn.Module, group: SiteGroup) -> set[str]:
    """The files of a checkpoint in parts that ``restore`` reads on this rank, and who takes up the rest of it after.

    What stands behind ``after_step`` had given this rank what lies in its part, as long as the ranks are as many.
    """
    live = {f"model/{name}": tensor for name, tensor in model_tensors(model).items()}
    own, as_many = f"{rank_name(group.rank)}.safetensors", found.num_parts == group.world
    files: set[str] = set()
    for name, entry in found.entries.items():
        kind, _, path = name.partition("/")
        lies_in = {file for file, _ in entry.stretches}
        if kind == "random":
            files |= lies_in if path.startswith(f"{group.rank}/") else set()
        elif kind == "extra":
            files |= lies_in & {own} if as_many else lies_in
        else:
            tensor = live.get(name if kind == "model" else f"model/{path.partition('/')[2].rpartition('/')[0]}")
            whole = Box((0,) * len(entry.shape), entry.shape)
            box = whole if tensor is None or tuple(tensor.shape) != entry.shape else box_of(tensor)
            files |= {file for file, _, _ in entry.meets(box)}
    return files


def _optimizer_tensors(found: Checkpoint, model: nn.Module) -> dict[str, Tensor]:
    """The optimizers' tensors: those of a parameter's shape in this rank's part of it, the others whole."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    for path in found.part("optimizer"):
        name = path.partition("/")[2].rpartition("/")[0]
        parameter, key = parameters.get(name), f"optimizer/{path}"
        if parameter is not None and tuple(parameter.shape) == found.entries[key].shape:
            part = found.read(key, box_of(parameter)).to(local(parameter).device)
            tensors[path] = alike(parameter, part)
        else:
            tensors[path] = found.read(key)
    return tensors


Captured = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]
Capture = Callable[[bool, bool], Captured | None]
"""Asked whether every rank writes its part, and whether ``after_step`` has seen the step: the tensors that the site has
together, those that are this rank's own (references), and plain values.  A collective; None on a rank that writes
nothing."""
Log = Callable[[str, dict[str, object]], None]


class Saving:
    """The checkpoints of one trainer in the folder ``root``; with None there are none.

    Where every rank holds the whole model rank 0 writes; where it holds a part, each rank writes its own.  Those in
    ``memory`` are always in parts.
    """

    def __init__(
        self,
        root: Path | None,
        every_steps: int,
        num_kept: int,
        wait_s: float,
        synchronous: bool,
        spread: Spread,
        log: Log,
        disk: Disk,
        memory: MemoryWriter | None = None,
    ) -> None:
        """With ``memory`` they lie there, and ``root`` is None."""
        self._root, self._every_steps, self._wait_s, self._synchronous = root, every_steps, wait_s, synchronous
        self._spread, self._group, self._log = spread, spread.group, log
        self._memory = memory
        self._parts: PartWriter | None = memory
        self.writer: AsyncWriter | None = memory.writer if memory is not None else None
        if root is not None and spread.is_sharded:
            self._parts = PartWriter(root, num_kept, synchronous, wait_s, spread.group, disk)
            self.writer = self._parts.writer
        elif root is not None:
            self.writer = AsyncWriter(root, num_kept, synchronous, disk)
        self._num_writing = spread.group.world if self._parts is not None else 1
        self.written = ""
        """The name of the newest checkpoint that is written or being written."""
        self._due = False
        self._now = False

    def begin(self) -> None:
        """Before the first step.  A collective."""
        if self._parts is not None:
            self._parts.begin()

    def refuse_leftovers(self) -> None:
        """CheckpointError when the folder holds checkpoints, of which none was taken up."""
        left = checkpoint.names(self._root) if self._root else []
        if left:
            raise CheckpointError(
                f"{self._root} already holds {left[-1]}, and this run did not resume: do, or take another folder"
            )

    def words(self, step: int) -> list[float]:
        """What this rank has to say before the end of ``step``; the sums over the ranks go to ``heard``."""
        self._due = self._due or (self._every_steps > 0 and step % self._every_steps == 0)
        # A write still under way makes the due checkpoint wait for a later step instead of blocking training.
        writes = self._parts is not None or self._group.is_first
        free = float(writes and self._is_free(step) and self._due)
        return [free, *(self._parts.words() if self._parts is not None else ())]

    def heard(self, step: int, words: Sequence[float], sound: bool) -> None:
        """The sums.  A state that may hold NaN (not ``sound``) is not saved; the checkpoint waits for the next step."""
        if self._parts is not None:
            why = self._parts.heard(words[1:])
            if why:
                self._not_written(step, why)
            self._say_fresh()
        self._now = words[0] == self._num_writing and sound

    def if_due(self, step: int, model: nn.Module, capture: Capture) -> None:
        """Save the state before ``after_step`` where that is due.  One that could not be written is said."""
        if self._now:
            self._due = False
            try:
                self._save(step, model, capture, after_step_done=False)
            except CheckpointError as error:
                self._not_written(step, str(error))

    def at_end(self, step: int, model: nn.Module, capture: Capture) -> None:
        """Save the state after ``after_step``, unless nothing happened since the last one, and wait until it is."""
        if self.writer is None:
            return
        try:
            self._settle()
        except CheckpointError as error:
            if self._still_writes(self.writer.busy):
                raise
            # It was an earlier one; of the last one below, the error is the run's.
            self._not_written(step, str(error))
        if self.written != _name(step, after_step_done=True):
            self._save(step, model, capture, after_step_done=True)
            self._settle()

    def newest_name(self) -> str:
        """That of the newest checkpoint on the disk, whole or not; empty without one.  A collective."""
        there = checkpoint.names(self._root)[-1:] if self._root and self._group.is_first else []
        return self._told("".join(there))[0]

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole, its files verified by the ranks in shares.  A collective.

        CheckpointError when there are some and all are damaged: starting from nothing would be a silent loss.
        """
        if self._root is None:
            return None
        left = checkpoint.names(self._root) if self._group.is_first else []
        skipped: list[str] = []
        while name := self._told(left.pop() if left else "")[0]:
            why, found = "", None
            try:
                found = Checkpoint(self._root / name, tuple(skipped))
                found.verify(self._group.rank, self._group.world)
                assert found.entries is not None
            except CheckpointError as error:
                why = str(error)
            whys = [each for each in self._told(why) if each]
            if found is not None and not whys:
                return found
            skipped.append(whys[0])
        if skipped:
            raise CheckpointError(f"no checkpoint in {self._root} is whole: {'; '.join(skipped)}")
        return None

    def _told(self, text: str) -> list[str]:
        """What every rank says.  A collective."""
        return [each[1:].decode() for each in self._group.all_gather_bytes(b" " + text.encode())]

    def _settle(self) -> None:
        """Wait until nothing is being written; CheckpointError when it came to nothing."""
        assert self.writer is not None
        if self._parts is not None:
            self._parts.settle()
        else:
            self.writer.wait(self._wait_s)

    def _still_writes(self, busy: bool) -> bool:
        """Whether this rank is ``busy``; where ranks hold parts whether any is, since all go on or none does."""
        return any(self._group.all_reduce_sum([float(busy)])) if self._parts is not None else busy

    def _is_free(self, step: int) -> bool:
        """Whether a checkpoint can be written now.  One that could not be is said, and the next one is tried when it is
        due: the older ones are whole, and training need not end for want of room."""
        try:
            if self._parts is not None:
                return self._parts.is_free
            return self.writer is not None and not self.writer.busy
        except CheckpointError as error:
            self._not_written(step, str(error))
            return True

    def _not_written(self, step: int, why: str) -> None:
        self.written = ""
        what = "checkpoint not written" if self._memory is None else "memory checkpoint not written"
        self._log("note", {"note": what, "why": why, "step": step})

    def _say_fresh(self) -> None:
        if self._memory is not None and (fresh := self._memory.fresh()):
            self._log("memory_checkpoint", {"name": self.written, **fresh})

    def _save(self, step: int, model: nn.Module, capture: Capture, after_step_done: bool) -> None:
        """Clone everything here, in the training thread, and hand it to the writer.  A collective."""
        assert self.writer is not None
        self.written = name = _name(step, after_step_done)
        lost = first_nonfinite(model) if self._parts is not None or self._group.is_first else ""
        if lost:
            self._log("note", {"note": "checkpoint not written", "why": f"parameter {lost} is not finite"})
        if any(self._group.all_reduce_sum([float(bool(lost))])):
            return
        captured = capture(self._parts is not None, after_step_done)
        if captured is None:
            return
        tensors, own, meta = captured
        if self._parts is not None:
            self._parts.submit(name, kept(tensors, own, self._spread.place), meta)
            if self._synchronous:
                self._parts.settle()
                self._say_fresh()
        else:
            clones = {key: tensor.detach().to("cpu", copy=True) for key, tensor in {**tensors, **own}.items()}
            self.writer.submit(name, clones, meta)
        if self._memory is None:
            self._log("checkpoint", {"step": step, "name": name})


def newest_of(
    saving: Saving, memory: MemoryWriter | None, reads: Callable[[Checkpoint], set[str]]
) -> tuple[Checkpoint | None, Sequence[str]]:
    """The newest checkpoint that is whole, of those in memory and those on the disk, and in words which were passed
    over.  A collective.

    The disk's are not read where memory has one as new.  ``reads`` says which files of one this rank will read.
    """
    hot, skipped = memory.newest(reads) if memory is not None else (None, [])
    if hot is not None and hot.path.name >= saving.newest_name():
        return hot, skipped
    try:
        found = saving.newest()
    except CheckpointError as error:
        if hot is None:
            raise
        return hot, [*skipped, str(error)]
    if found is None or (hot is not None and hot.path.name > found.path.name):
        return hot, [*skipped, *(found.skipped if found is not None else ())]
    return found, [*skipped, *found.skipped]


def _name(step: int, after_step_done: bool) -> str:
    """Name of a checkpoint; names sort by age."""
    return f"step-{step:010d}" + ("-end" if after_step_done else "")
