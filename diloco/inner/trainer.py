"""The training loop.  It calls outside code at one place: ``verdict = after_step(info)`` between two steps.

The order within step k is binding for code that keeps state beside the trainer: data, forward, backward, optimizer;
then a checkpoint if one is due; then ``after_step(k)``.  After a resume from that checkpoint the trainer calls
``after_step(k)`` again before step k + 1.  So that call must be repeatable from the state that ``extra_state`` saved.

A checkpoint has the trainer's state as named tensors, ``model/...``, ``optimizer/...`` and ``random/<rank>/...``.
``Saving`` decides when to write one.  All ranks decide alike, also on the one to resume from.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from diloco.durable import PLAIN_DISK
from diloco.inner import checkpoint, require
from diloco.inner.checkpoint import (
    Checkpoint,
    CheckpointError,
    Entry,
    LateError,
    PartWriter,
    State,
    WholeWriter,
    rank_name,
)
from diloco.inner.memory import MemoryWriter
from diloco.inner.model import Transformer, flops_per_token
from diloco.inner.optimizer import InnerOptimizers, lr_factor
from diloco.inner.parallel import alike, box_of, local, whole_box
from diloco.inner.precision import PRECISIONS, autocast_dtype, deterministic, random_state, set_random_state

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import nn

    from diloco.durable import Disk
    from diloco.inner.data import TokenStream
    from diloco.inner.holding import Spread

SECOND_NS = 1_000_000_000


class TrainingError(RuntimeError):
    """Training cannot continue; the message says why."""


@dataclass(kw_only=True, slots=True)
class TrainerOptions:
    """Settings of the training loop; those of a single step are in ``InnerOptions``."""

    precision: str = "auto"
    """``bf16``: autocast; ``fp32``; ``auto``: bf16 where the hardware has it."""
    deterministic: bool = False
    """Use only kernels that give the same bits twice, and write checkpoints in the training thread."""
    seed: int = 0
    """Seed of torch's global generators at the first step; each rank adds its rank number."""
    checkpoint_steps: int = 0
    """Inner steps between two checkpoints on disk; 0 for none."""
    checkpoints_kept: int = 3
    memory_checkpoint_every_steps: int = 0
    """Inner steps between two checkpoints in memory (module ``memory``), if they have a folder; 0 for none."""
    checkpoint_wait_s: float = 120.0
    """How long the end of a run waits for a checkpoint write that is still running."""
    nonfinite_max: int = 3
    """Steps in a row with a non-finite loss or gradient after which training stops with ``TrainingError``."""
    peak_tflops: float = 0.0
    """Peak of one rank's device at ``precision``, in 10^12 operations a second; 0 if unknown."""
    slowdown: float = 1.0
    """Emulates slower hardware for demonstrations: each step sleeps (slowdown - 1) times its own duration."""

    def __post_init__(self) -> None:
        require(self.precision in PRECISIONS, "precision", self.precision, f"one of {', '.join(PRECISIONS)}")
        require(self.checkpoint_steps >= 0, "checkpoint_steps", self.checkpoint_steps, "0 (none) or more")
        every = self.memory_checkpoint_every_steps
        require(every >= 0, "memory_checkpoint_every_steps", every, "0 (none) or more")
        require(self.checkpoints_kept >= 1, "checkpoints_kept", self.checkpoints_kept, "at least 1")
        require(self.checkpoint_wait_s > 0, "checkpoint_wait_s", self.checkpoint_wait_s, "positive")
        require(self.nonfinite_max >= 1, "nonfinite_max", self.nonfinite_max, "at least 1")
        require(0.0 <= self.peak_tflops < math.inf, "peak_tflops", self.peak_tflops, "0 (not known) or more")
        require(1.0 <= self.slowdown < math.inf, "slowdown", self.slowdown, "1 (full speed) or more")


@dataclass(frozen=True, slots=True)
class StepInfo:
    """The results of one inner step.  They describe the whole site and are equal on all ranks, except ``step_ns``."""

    step: int
    """Finished steps, this one included: the first step is 1."""
    loss: float
    """Nats per token, the mean over the step's tokens; may be NaN, see ``applied``."""
    tokens: int
    """Target tokens of this step."""
    tokens_total: int
    """Target tokens of all steps, this one and those before a resume included."""
    step_ns: int
    """Duration of data, forward, backward, optimizer and emulated slowness, without checkpoint and ``after_step``."""
    cursor: int
    """Sequences that the site has drawn, this step's included; the next step reads from there."""
    grad_norm: float
    lr: float
    applied: bool
    """False if the loss or the gradient was not finite; the parameters are then unchanged."""
    sequences: int = 0
    """Sequences that this step read, if ``tokens`` does not give their number: a user's own loop may count freely."""
    passes: bool = False
    """Whether the ranks agreed in this step that ``after_step`` leaves the model's values alone."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What ``after_step`` returns.  Must be equal on all ranks of a site."""

    stop: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The state restored from a checkpoint.  ``tensors`` and ``meta`` are what ``extra_state`` returned at its writing.

    ``redo`` is the step for which ``after_step`` will be called again; None for a checkpoint of a run's end.
    """

    step: int
    tensors: Mapping[str, Tensor]
    meta: dict[str, Any]
    redo: StepInfo | None = None


AfterStep = Callable[[StepInfo], Verdict]
ExtraState = Callable[[], tuple[dict[str, Tensor], dict[str, Any]]]


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters (tied ones once, under their first name) and persistent buffers of a plain model, no copies."""
    persistent = model.state_dict()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {**{name: parameter.detach() for name, parameter in model.named_parameters()}, **buffers}


def capture_state(model: nn.Module, optimizers: InnerOptimizers) -> dict[str, Tensor]:
    """Return the tensors of the model and the optimizers (references)."""
    named = {f"model/{name}": tensor for name, tensor in model_tensors(model).items()}
    return named | {f"optimizer/{name}": tensor for name, tensor in optimizers.state_dict().items()}


def alike_in(live: Mapping[str, Tensor], name: str, entry: Entry) -> Tensor | None:
    """Return the tensor of the model that the ranks hold as they hold ``entry``, the tensor ``name`` of a checkpoint.

    It is of the same parameter and shape.  None if there is none; then a rank reads all of ``entry``.
    """
    kind, _, path = name.partition("/")
    if kind == "optimizer":  # It names the optimizer, the parameter and the field.
        path = path.partition("/")[2].rpartition("/")[0]
    found = live.get(path) if kind in ("model", "optimizer") else None
    return found if found is not None and tuple(found.shape) == entry.shape else None


@torch.no_grad()
def load_parameters(found: Checkpoint, model: nn.Module) -> None:
    """Copy a checkpoint's model into ``model``, in place; their layouts may differ.

    Each rank reads only its part.  CheckpointError names the first difference.
    """
    saved, live = found.part("model"), model_tensors(model)
    for name in sorted(saved.keys() | live.keys()):
        here = tuple(live[name].shape) if name in live else "nothing"
        there = found.entries[f"model/{name}"].shape if name in saved else "nothing"
        if here != there:
            raise CheckpointError(f"{found.path} is of another model: {name} is {here} here and {there} there")
    for name, tensor in live.items():
        local(tensor).copy_(found.read(f"model/{name}", box_of(tensor, name)))


Log = Callable[[str, dict[str, object]], None]


Capture = Callable[[bool], State | None]
"""Returns what a checkpoint holds, None if it may not be saved.  It is told whether ``after_step`` was called for the
step.  A collective."""


class Saving:
    """Decides when ``writer`` writes a checkpoint of a trainer's state.  All ranks decide alike."""

    def __init__(self, writer: WholeWriter | PartWriter, every_steps: int, capture: Capture, log: Log) -> None:
        self.writer, self._every_steps, self._capture, self._log = writer, every_steps, capture, log
        self.written = ""
        """Name of the newest checkpoint that is written or being written."""
        self._due = False
        self._now = False

    def words(self, step: int) -> list[float]:
        """Return this rank's numbers for the collective at the end of ``step``; ``heard`` gets their sums."""
        self._due = self._due or (self._every_steps > 0 and step % self._every_steps == 0)
        try:
            free, *others = self.writer.words()
        except CheckpointError as error:
            # The next one is tried when it is due.  The older ones are valid: a full disk does not end training.
            self._not_written(step, str(error))
            free, *others = self.writer.words()
        # A write still under way makes the due checkpoint wait for a later step instead of blocking training.
        return [float(free and self._due), *others]

    def heard(self, step: int, words: Sequence[float], sound: bool) -> None:
        """Take the sums of all ranks' ``words``, and decide whether to save now.

        A state that may hold NaN (not ``sound``) is not saved; the checkpoint waits for the next step.
        """
        why = self.writer.heard(words[1:])
        if why:
            self._not_written(step, why)
        self._now = words[0] == self.writer.group.world and sound

    def if_due(self, step: int) -> None:
        """Save the state before ``after_step`` if ``heard`` decided so.  A failed write is logged, not raised."""
        if self._now:
            self._due = False
            try:
                self._save(step, after_step_done=False)
            except CheckpointError as error:
                self._not_written(step, str(error))

    def at_end(self, step: int) -> None:
        """Save the state after ``after_step``, unless that checkpoint exists, and wait until it is written."""
        try:
            self.writer.settle()
        except LateError:
            raise
        except CheckpointError as error:
            # An earlier checkpoint failed: log it.  If the last one, below, fails, the run fails.
            self._not_written(step, str(error))
        if self.written != _name(step, after_step_done=True):
            self._save(step, after_step_done=True)
            self.writer.settle()

    def _not_written(self, step: int, why: str) -> None:
        self.written = ""
        what = "memory checkpoint not written" if self.writer.in_memory else "checkpoint not written"
        self._log("note", {"note": what, "why": why, "step": step})

    def _save(self, step: int, after_step_done: bool) -> None:
        """Hand the state to the writer.  A collective."""
        self.written = name = _name(step, after_step_done)
        state = self._capture(after_step_done)
        if state is None:
            return
        self.writer.submit(name, state)
        if self.writer.synchronous:
            self.writer.settle()
        if not self.writer.in_memory:
            self._log("checkpoint", {"step": step, "name": name})


def _name(step: int, after_step_done: bool) -> str:
    """Return the name of a checkpoint; names sort by age."""
    return f"step-{step:010d}" + ("-end" if after_step_done else "")


class Trainer:
    """Trains ``model`` on ``stream`` with the ranks that hold it in the layout of ``spread``.

    Between two steps any code may write the parameters in place: the optimizers, DDP and autocast keep no copies.
    ``progress`` returns the run's progress from 0 to 1 for the learning-rate schedule; rank 0 calls it at the end of
    each step.  Without it, progress is measured against the bounds given to ``run``.  ``log`` is called as
    (what, fields) on every rank: step, checkpoint, memory_checkpoint, resumed, note.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: InnerOptimizers,
        stream: TokenStream,
        options: TrainerOptions,
        spread: Spread,
        *,
        checkpoint_dir: Path | None = None,
        memory_dir: Path | None = None,
        progress: Callable[[], float] | None = None,
        log: Log | None = None,
        disk: Disk = PLAIN_DISK,
    ) -> None:
        steps = options.checkpoint_steps
        wanted = "0, because no checkpoint folder was given"
        require(steps == 0 or checkpoint_dir is not None, "checkpoint_steps", steps, wanted)
        self.model, self.optimizers, self.stream, self.options = model, optimizers, stream, options
        self.spread, self.group = spread, spread.group
        self.step = 0
        self.tokens = 0
        self.cursor = 0
        self.nonfinite_steps = 0
        self._nonfinite_in_row = 0
        self._dtype = autocast_dtype(options.precision, self.group.device, self.group)
        self._asked_progress = progress
        self.may_act: Callable[[], bool] = lambda: True
        """Rank 0 calls it at the end of each step: whether ``after_step`` may read or write the model's values."""
        self._progress: float | None = None
        self._log: Log = log or (lambda what, fields: None)
        self._checkpoint_dir = checkpoint_dir
        how = (options.deterministic, options.checkpoint_wait_s, spread)
        self.saving: Saving | None = None
        if checkpoint_dir is not None:
            kind = PartWriter if spread.is_sharded else WholeWriter
            writer = kind(checkpoint_dir, options.checkpoints_kept, *how, disk)
            self.saving = Saving(writer, steps, self._capture, self._log)
        self._savings = [self.saving] if self.saving is not None else []
        self._memory: MemoryWriter | None = None
        every = options.memory_checkpoint_every_steps
        if memory_dir is not None and every:
            self._memory = MemoryWriter(memory_dir, *how, self._log, disk)
            self._savings.append(Saving(self._memory, every, self._capture, self._log))
        self._last: StepInfo | None = None
        self._redo: StepInfo | None = None

    def run(
        self,
        *,
        until_step: float = math.inf,
        until_tokens: float = math.inf,
        after_step: AfterStep = lambda info: Verdict(),
        extra_state: ExtraState = lambda: ({}, {}),
    ) -> str:
        """Train until a bound is reached or ``after_step`` returns stop; then write a last checkpoint, if enabled.

        Returns why it stopped.

        ``extra_state`` returns the caller's state, which each checkpoint includes.  It is called on every rank.  Its
        tensors have different names on each rank; a checkpoint written by rank 0 alone has only those of rank 0.  Only
        rank 0's plain values are kept.
        Raises TrainingError after ``nonfinite_max`` non-finite steps in a row.  Raises CheckpointError if the last
        checkpoint cannot be written, the folder cannot be used, or it holds checkpoints that were not resumed.
        """
        for saving in self._savings:
            saving.writer.begin(resumed=self._last is not None)
        if self._last is None:
            torch.manual_seed(self.options.seed + self.group.rank)
        if self._asked_progress is not None and self._progress is None:
            mine = self._asked_progress() if self.group.is_first else 0.0
            self._progress = self.group.all_reduce_sum([mine])[0]
        self._extra_state = extra_state
        with deterministic(self.options.deterministic):
            redo, self._redo = self._redo, None
            verdict = after_step(redo) if redo is not None else Verdict()
            while not verdict.stop:
                if self.step >= until_step:
                    verdict = Verdict(stop=True, reason=f"reached step {until_step}")
                    break
                if self.tokens >= until_tokens:
                    verdict = Verdict(stop=True, reason=f"reached {until_tokens} tokens")
                    break
                info = self._train_step(until_step, until_tokens)
                for saving in self._savings:
                    saving.if_due(self.step)
                self._log("step", self._facts(info))
                verdict = after_step(info)
                if info.applied:
                    continue
                why = f"loss {info.loss}, gradient norm {info.grad_norm}"
                self._log("note", {"note": "step not applied", "why": why, "step": info.step})
                if self._nonfinite_in_row >= self.options.nonfinite_max:
                    first = info.step - self._nonfinite_in_row + 1
                    raise TrainingError(
                        f"steps {first} to {info.step} gave no finite loss and gradient ({why}), nonfinite_max="
                        f"{self.options.nonfinite_max}: lower the learning rate, or check the data"
                    )
            if self.saving is not None and self._last is not None and self._nonfinite_in_row == 0:
                self.saving.at_end(self.step)
            if self._memory is not None:
                self._memory.end()
        return verdict.reason or "asked to stop"

    def skip_data(self, cursor: int) -> None:
        """Move the data cursor forward to ``cursor``, never back.  Call it on all ranks alike."""
        self.cursor = max(self.cursor, cursor)

    def resume(self, found: Checkpoint | None = None) -> Resumed | None:
        """Resume from ``found``, or from the newest valid checkpoint, on all ranks alike; return None if there is none.

        Its layout and number of ranks may differ from this run's.  Every rank must be able to read the folder.
        CheckpointError if all checkpoints are damaged or it is of another model.
        """
        began = time.perf_counter()
        found, skipped = (found, []) if found else self._newest()
        for words in skipped:
            self._log("note", {"note": "checkpoint skipped", "why": words})
        if found is None:
            return None
        self._restore(found)
        told = found.meta["trainer"]
        self.step, self.tokens, self.cursor = told["step"], told["tokens"], told["cursor"]
        self.nonfinite_steps, self._progress = told["nonfinite_steps"], told["progress"]
        self._last = StepInfo(**told["last"])
        # ``passes`` was agreed before the restart: this time ``after_step`` may use the model's values.
        self._redo = None if told["after_step_done"] else replace(self._last, passes=False)
        if self.saving is not None:
            self.saving.written = found.path.name
        if told["data"] != self.stream.identity:
            self._log("note", {"note": "other data than before", "why": "text, split, sharing or seed has changed"})
        facts = {"step": self.step, "tokens": self.tokens, "path": str(found.path)}
        self._log("resumed", {**facts, "read_s": time.perf_counter() - began})
        return Resumed(self.step, found.part("extra"), found.meta["extra"], self._redo)

    def _newest(self) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest valid checkpoint in memory or on disk, and messages about newer ones that were skipped.

        A collective.  Of the disk only checkpoints newer than the one in memory are read.
        """
        hot, skipped = self._memory.newest(self._files_read) if self._memory is not None else (None, [])
        if self._checkpoint_dir is None:
            return hot, skipped
        found, damaged = checkpoint.newest(self._checkpoint_dir, self.group, after=hot.path.name if hot else "")
        return found or hot, skipped + damaged

    def _files_read(self, found: Checkpoint) -> set[str]:
        """Return the files of a checkpoint in parts that this rank reads to resume.

        If as many ranks wrote it, a rank's extra state is in its own file; otherwise it is read from all files.
        """
        rank, live, files = self.group.rank, model_tensors(self.model), set[str]()
        own = {f"{rank_name(rank)}.safetensors"} if len(found.digests) == self.group.world else found.digests.keys()
        for name, entry in found.entries.items():
            kind, _, path = name.partition("/")
            if kind == "random" and not path.startswith(f"{rank}/"):
                continue
            like = alike_in(live, name, entry)
            lies_in = {file for file, _, _ in entry.meets(whole_box(entry.shape) if like is None else box_of(like))}
            files |= lies_in & own if kind == "extra" else lies_in
        return files

    def _restore(self, found: Checkpoint) -> None:
        """Load a checkpoint into the live objects, in place.  CheckpointError if it is of another model or optimizer.

        A rank reads its part of an optimizer's tensor of its parameter's shape, and others whole.  A rank without a
        random state in the checkpoint (the site has grown) is seeded with the seed + its rank.
        """
        load_parameters(found, self.model)
        live, tensors = model_tensors(self.model), dict[str, Tensor]()
        for path in found.part("optimizer"):
            name = f"optimizer/{path}"
            like = alike_in(live, name, found.entries[name])
            if like is None:
                tensors[path] = found.read(name)
            else:
                tensors[path] = alike(like, found.read(name, box_of(like)).to(local(like).device))
        try:
            self.optimizers.load_state_dict(tensors)
        except ValueError as error:
            raise CheckpointError(f"{found.path} is of another optimizer: {error}") from error
        mine = found.part(f"random/{self.group.rank}")
        if "cpu" in mine:
            set_random_state(mine, self.group.device)
        else:
            torch.manual_seed(self.options.seed + self.group.rank)

    # One step.

    def _train_step(self, until_step: float, until_tokens: float) -> StepInfo:
        begin_ns = time.perf_counter_ns()
        inner, device = self.optimizers.options, self.group.device
        progress = self._progress
        if progress is None:  # Then measure it against the bounds of ``run``.
            progress = max(self.step / until_step, self.tokens / until_tokens)
        lr = self.optimizers.set_lr_factor(lr_factor(inner, progress, self.step))
        summed = torch.zeros((), device=device)
        for micro in range(inner.accumulation):
            inputs, targets = self.stream.batch(self.cursor + micro * self.stream.sequences_per_batch)
            with self.spread.micro_batch(last=micro == inner.accumulation - 1):
                with torch.autocast(device.type, dtype=self._dtype, enabled=self._dtype is not None):
                    mean = self.spread.module(inputs.to(device), targets.to(device)) / inner.accumulation
                mean.backward()
            summed += mean.detach()
        loss = float(summed)
        norm = self.optimizers.clip(self.group)
        loss, applied, passes = self._agree(loss, norm)
        if applied:
            self.optimizers.step()
        self.optimizers.zero_grad()
        self.step += 1
        self.cursor += self.stream.sequences_per_batch * inner.accumulation
        tokens = self.stream.tokens_per_batch * inner.accumulation
        self.tokens += tokens
        self._nonfinite_in_row = 0 if applied else self._nonfinite_in_row + 1
        self.nonfinite_steps += not applied
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if self.options.slowdown > 1.0 and self.group.is_first:  # The others wait for it in the next step.
            time.sleep((self.options.slowdown - 1.0) * (time.perf_counter_ns() - begin_ns) / SECOND_NS)
        step_ns = time.perf_counter_ns() - begin_ns
        facts = (self.step, loss, tokens, self.tokens, step_ns, self.cursor, norm, lr, applied)
        self._last = StepInfo(*facts, passes=passes)
        return self._last

    def _agree(self, loss: float, norm: float) -> tuple[float, bool, bool]:
        """Agree among the ranks on loss, progress, saving and acting, in one collective.

        Returns the mean loss, whether the step may be applied (loss and norm are finite), and ``StepInfo.passes``.
        """
        told = [saving.words(self.step + 1) for saving in self._savings]
        mine = [loss, 0.0, 0.0, *chain(*told)]
        if self.group.is_first:
            mine[1] = self._asked_progress() if self._asked_progress is not None else 0.0
            mine[2] = float(self.may_act())
        total, progress, acts, *sums = self.group.all_reduce_sum(mine)
        if self._asked_progress is not None:
            self._progress = progress
        mean = total / self.group.world
        applied = math.isfinite(mean) and math.isfinite(norm)
        for each, words in zip(self._savings, told, strict=True):
            heard, sums = sums[: len(words)], sums[len(words) :]
            each.heard(self.step + 1, heard, applied)
        return mean, applied, not acts

    def _facts(self, info: StepInfo) -> dict[str, object]:
        """Return the fields of a step's log line.

        ``mfu``, where the peak is known, is the model FLOPs utilisation (PaLM, arXiv 2204.02311, appendix B).  It
        counts the operations that the model needs: recomputation to save memory does not count.
        """
        step_s = info.step_ns / SECOND_NS
        facts: dict[str, object] = {
            "step": info.step,
            "loss": info.loss,
            "tokens": info.tokens,
            "tokens_total": info.tokens_total,
            "tokens_per_s": info.tokens / step_s,
            "lr": info.lr,
            "grad_norm": info.grad_norm,
            "step_s": step_s,
            "applied": info.applied,
        }
        peak = self.options.peak_tflops * 1e12 * self.group.world
        if peak and isinstance(self.model, Transformer):
            operations = flops_per_token(self.model.options, self.stream.sequence_length) * info.tokens
            facts["mfu"] = operations / step_s / peak
        return facts

    def _capture(self, after_step_done: bool) -> State | None:
        """Return what a checkpoint holds; None if a parameter of any rank is not finite.  A collective."""
        assert self._last is not None
        held = model_tensors(self.model).items()
        lost = next((name for name, value in held if not bool(torch.isfinite(local(value)).all())), "")
        if lost:
            self._log("note", {"note": "checkpoint not written", "why": f"parameter {lost} is not finite"})
        if any(self.group.all_reduce_sum([float(bool(lost))])):
            return None
        extra_tensors, extra_meta = self._extra_state()
        told = {
            "step": self.step,
            "tokens": self.tokens,
            "cursor": self.cursor,
            "nonfinite_steps": self.nonfinite_steps,  # Earlier releases read it.
            "progress": self._progress,
            "after_step_done": after_step_done,
            "data": self.stream.identity,
            "last": asdict(self._last),
        }
        extra = {f"extra/{key}": tensor for key, tensor in extra_tensors.items()}
        meta = {"trainer": told, "optimizer": {}, "extra": extra_meta}  # Earlier releases read "optimizer".
        tensors = capture_state(self.model, self.optimizers)
        return State(tensors, extra, random_state(self.group.device), meta)
