"""The training loop.  Its one line to the outer world is ``verdict = after_step(info)`` between two steps.

Order within step k, binding for whoever keeps state beside the trainer: data, forward, backward, optimizer; then a
checkpoint if one is due; then ``after_step(k)``.  After a resume from that checkpoint ``after_step(k)`` is called once
more before step k + 1, so what it did the first time must have been saved by ``extra_state`` or be repeatable.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from diloco.durable import PLAIN_DISK
from diloco.inner import saving
from diloco.inner.checks import require
from diloco.inner.memory import MemoryWriter
from diloco.inner.model import Transformer, flops_per_token
from diloco.inner.optimizer import InnerOptimizers, lr_factor
from diloco.inner.precision import PRECISIONS, autocast_dtype, deterministic
from diloco.inner.saving import Captured, Log, Saving, newest_of
from diloco.inner.sharding import Spread

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from diloco.durable import Disk
    from diloco.inner.checkpoint import Checkpoint
    from diloco.inner.data import TokenStream
    from diloco.inner.parallel import SiteGroup

SECOND_NS = 1_000_000_000


class TrainingError(RuntimeError):
    """Training cannot go on; the message says why."""


@dataclass(kw_only=True, slots=True)
class TrainerOptions:
    """How the loop runs, beside what a step does (``InnerOptions``)."""

    precision: str = "auto"
    """``bf16``: autocast; ``fp32``; ``auto``: bf16 where the hardware has it."""
    deterministic: bool = False
    """Only kernels that give the same bits twice, and checkpoints written in the training thread."""
    seed: int = 0
    """Of torch's global generators at the first step; each rank adds its number."""
    checkpoint_steps: int = 0
    """Inner steps between two checkpoints; 0 for none."""
    checkpoints_kept: int = 3
    memory_checkpoint_every_steps: int = 0
    """The same of those in the machines' memory (``memory``), where there is a folder for them; 0 for none."""
    checkpoint_wait_s: float = 120.0
    """How long the end of a run waits for a write under way."""
    nonfinite_max: int = 3
    """Steps in a row with a non-finite loss or gradient after which training stops in words."""
    peak_tflops: float = 0.0
    """What one rank's device can do at most, in 10^12 operations a second at ``precision``; 0 where nobody knows."""
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
    """What one inner step was.  Numbers are those of the whole site, equal on all its ranks but for ``step_ns``."""

    step: int
    """Finished steps, this one included: the first step is 1."""
    loss: float
    """Nats per token, the mean over the step's tokens; may be NaN, see ``applied``."""
    tokens: int
    """Target tokens of this step."""
    tokens_total: int
    """Target tokens of all steps of this lineage of checkpoints, this one included."""
    step_ns: int
    """Data, forward, backward, optimizer (and emulated slowness); not the checkpoint nor ``after_step``."""
    cursor: int
    """Sequences the site has drawn, this step's included: where the next step reads."""
    grad_norm: float
    lr: float
    applied: bool
    """False when the loss or the gradient was not finite, so that the parameters were left as they were."""
    sequences: int = 0
    """That this step read, where another number than its tokens say: a loop of somebody's own counts as it likes."""
    passes: bool = False
    """Whether the ranks have agreed in this step that nothing is done with the model's values after it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outer world's answer to a step.  Must be equal on all ranks of a site."""

    stop: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RunEnd:
    """Why ``run`` returned, and where it stood."""

    reason: str
    step: int
    tokens: int
    nonfinite_steps: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a checkpoint gave back.  ``tensors`` and ``meta`` are what ``extra_state`` had given.

    ``redo`` is the step for which ``after_step`` will be called once more, None after a checkpoint at a run's end.
    """

    step: int
    tokens: int
    cursor: int
    tensors: Mapping[str, Tensor]
    meta: dict[str, Any]
    skipped: tuple[str, ...]
    redo: StepInfo | None = None


AfterStep = Callable[[StepInfo], Verdict]
ExtraState = Callable[[], tuple[dict[str, Tensor], dict[str, Any]]]


def go_on(info: StepInfo) -> Verdict:
    """The ``after_step`` of a site that trains alone."""
    return Verdict()


class Trainer:
    """Trains ``model`` on ``stream`` with the ranks of ``group``, which hold it as ``spread`` says.

    Without ``spread`` it is the plain module, and all ranks hold all of it: it is wrapped here.  Between two steps
    anyone may write into the model's parameters in place: neither the optimizers nor DDP nor autocast keeps a copy.
    ``progress`` tells the run's share from 0 to 1 for the learning-rate schedule and is asked
    on rank 0 at the end of each step; without it the share is that of ``run``'s own bound.  ``log`` gets facts as
    (what, fields) on every rank: step, checkpoint, resumed, note.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: InnerOptimizers,
        stream: TokenStream,
        options: TrainerOptions,
        group: SiteGroup,
        *,
        checkpoint_dir: Path | None = None,
        memory_dir: Path | None = None,
        progress: Callable[[], float] | None = None,
        log: Log | None = None,
        disk: Disk = PLAIN_DISK,
        spread: Spread | None = None,
    ) -> None:
        require(
            options.checkpoint_steps == 0 or checkpoint_dir is not None,
            "checkpoint_steps",
            options.checkpoint_steps,
            "0, because no checkpoint folder was given",
        )
        self.model, self.optimizers, self.stream, self.options, self.group = model, optimizers, stream, options, group
        self.step = 0
        self.tokens = 0
        self.cursor = 0
        self.nonfinite_steps = 0
        self._nonfinite_in_row = 0
        self.spread = spread or Spread(model, group)
        self._dtype = autocast_dtype(options.precision, group.device, group)
        self._asked_progress = progress
        self.may_act: Callable[[], bool] = lambda: True
        """Asked on rank 0 at the end of each step: whether ``after_step`` may do anything with the model's values."""
        self._progress: float | None = None
        self._log: Log = log or (lambda what, fields: None)
        self.saving = Saving(
            checkpoint_dir,
            options.checkpoint_steps,
            options.checkpoints_kept,
            options.checkpoint_wait_s,
            options.deterministic,
            self.spread,
            self._log,
            disk,
        )
        every = options.memory_checkpoint_every_steps
        self._savings, self._memory = [self.saving], None
        if memory_dir is not None and every:
            wait_s, synchronous = options.checkpoint_wait_s, options.deterministic
            self._memory = MemoryWriter(memory_dir, synchronous, wait_s, group, disk)
            hot = Saving(None, every, 0, wait_s, synchronous, self.spread, self._log, disk, self._memory)
            self._savings.append(hot)
        self._last: StepInfo | None = None
        self._redo: StepInfo | None = None

    def run(
        self,
        *,
        until_step: int | None = None,
        until_tokens: int | None = None,
        after_step: AfterStep = go_on,
        extra_state: ExtraState | None = None,
    ) -> RunEnd:
        """Train until a bound is reached or ``after_step`` says stop; then a last checkpoint, if there is a folder.

        ``extra_state`` puts the state of whoever stands behind ``after_step`` into each checkpoint.  It is asked on
        rank 0, and where ranks hold the model in parts on each that gives one: its tensors are named differently on
        each rank, and the plain values of rank 0 count.
        Raises TrainingError after ``nonfinite_max`` non-finite steps in a row, CheckpointError when a write failed or
        the folder holds checkpoints that were not resumed.
        """
        self._begin()

        def capture(in_parts: bool, after_step_done: bool) -> Captured | None:
            return self._capture(extra_state, in_parts, after_step_done)

        with deterministic(self.options.deterministic):
            reason = self._resumed_verdict(after_step)
            while not reason:
                reason = self._bound_reached(until_step, until_tokens)
                if reason:
                    break
                info = self._train_step(self._share(until_step, until_tokens))
                for saving in self._savings:
                    saving.if_due(self.step, self.model, capture)
                self._log("step", {**_facts(info), **self._utilisation(info)})
                verdict = after_step(info)
                self._stop_if_lost(info)
                reason = (verdict.reason or "asked to stop") if verdict.stop else ""
            if self._last is not None and self._nonfinite_in_row == 0:
                self.saving.at_end(self.step, self.model, capture)
            if self._memory is not None:
                self._memory.end()
        return RunEnd(reason, self.step, self.tokens, self.nonfinite_steps)

    def skip_data(self, cursor: int) -> None:
        """Move the data cursor forward to ``cursor``, never back; on all ranks alike."""
        self.cursor = max(self.cursor, cursor)

    def resume(self, found: Checkpoint | None = None) -> Resumed | None:
        """Take up ``found``, or the newest whole checkpoint there is, on all ranks alike; None if there is none.

        It may be of another layout, or of another number of ranks.  The folder must be readable by every rank.
        CheckpointError when all are damaged or it is of another model.
        """
        began = time.perf_counter()
        reads = lambda hot: saving.files_read(hot, self.model, self.group)  # noqa: E731
        found, skipped = (found, found.skipped) if found else newest_of(self.saving, self._memory, reads)
        for words in skipped:
            self._log("note", {"note": "checkpoint skipped", "why": words})
        if found is None:
            return None
        saving.restore(found, self.model, self.optimizers, self.group, self.options.seed)
        told = found.meta["trainer"]
        self.step, self.tokens, self.cursor = told["step"], told["tokens"], told["cursor"]
        self.nonfinite_steps, self._progress = told["nonfinite_steps"], told["progress"]
        self._last = StepInfo(**told["last"])
        # Once more: whoever is told of it now may have something to do after it.
        self._redo = None if told["after_step_done"] else replace(self._last, passes=False)
        self.saving.written = found.path.name
        if told["data"] != self.stream.identity:
            self._log("note", {"note": "other data than before", "why": "text, split, sharing or seed has changed"})
        facts = {"step": self.step, "tokens": self.tokens, "path": str(found.path)}
        self._log("resumed", {**facts, "read_s": time.perf_counter() - began})
        extra = found.meta["extra"]
        return Resumed(self.step, self.tokens, self.cursor, found.part("extra"), extra, tuple(skipped), self._redo)

    # One step.

    def _begin(self) -> None:
        for each in self._savings:
            each.begin()
        if self._last is None:
            self.saving.refuse_leftovers()
            torch.manual_seed(self.options.seed + self.group.rank)
        if self._asked_progress is not None and self._progress is None:
            mine = self._asked_progress() if self.group.is_first else 0.0
            self._progress = self.group.all_reduce_sum([mine])[0]

    def _share(self, until_step: int | None, until_tokens: int | None) -> float:
        """Progress of the run: as told at the end of the step before, or of this call's own bounds."""
        if self._progress is not None:
            return self._progress
        by_step = self.step / until_step if until_step else 0.0
        by_tokens = self.tokens / until_tokens if until_tokens else 0.0
        return max(by_step, by_tokens)

    def _train_step(self, progress: float) -> StepInfo:
        begin_ns = time.perf_counter_ns()
        inner = self.optimizers.options
        self.optimizers.set_lr_factor(lr_factor(inner, progress, self.step))
        loss = self._accumulate_gradients(inner.accumulation)
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
        step_ns = self._until_finished(begin_ns)
        lr = self.optimizers.lr
        facts = (self.step, loss, tokens, self.tokens, step_ns, self.cursor, norm, lr, applied)
        self._last = StepInfo(*facts, passes=passes)
        return self._last

    def _accumulate_gradients(self, accumulation: int) -> float:
        """Run forward and backward over the micro-batches; this rank's mean loss in nats per token."""
        device = self.group.device
        total = torch.zeros((), device=device)
        for micro in range(accumulation):
            inputs, targets = self.stream.batch(self.cursor + micro * self.stream.sequences_per_batch)
            last = micro == accumulation - 1
            with self.spread.micro_batch(last):
                with torch.autocast(device.type, dtype=self._dtype, enabled=self._dtype is not None):
                    loss = self.spread.module(inputs.to(device), targets.to(device)) / accumulation
                loss.backward()
            total += loss.detach()
        return float(total)

    def _agree(self, loss: float, norm: float) -> tuple[float, bool, bool]:
        """Make all ranks know the same loss, progress, whether to save and whether to act, in one collective.

        The loss, whether the step is sound, so that it may be applied, and whether nothing is done after it.
        """
        told = [saving.words(self.step + 1) for saving in self._savings]
        mine = [loss, 0.0, 0.0, *(word for words in told for word in words)]
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

    def _until_finished(self, begin_ns: int) -> int:
        if self.group.device.type == "cuda":
            torch.cuda.synchronize(self.group.device)
        worked_ns = time.perf_counter_ns() - begin_ns
        if self.options.slowdown > 1.0:
            time.sleep((self.options.slowdown - 1.0) * worked_ns / SECOND_NS)
        return time.perf_counter_ns() - begin_ns

    def _utilisation(self, info: StepInfo) -> dict[str, object]:
        """Model FLOPs utilisation (PaLM, arXiv 2204.02311, appendix B), where the device's peak was told.

        What the model needs, however it is computed: operations that are done again for want of memory do not count.
        """
        peak = self.options.peak_tflops * 1e12 * self.group.world
        if not peak or not isinstance(self.model, Transformer):
            return {}
        operations = flops_per_token(self.model.options, self.stream.sequence_length) * info.tokens
        return {"mfu": operations / (info.step_ns / SECOND_NS) / peak}

    # How a run ends.

    def _resumed_verdict(self, after_step: AfterStep) -> str:
        """Call ``after_step`` for the resumed step, which its checkpoint had not seen; the reason to stop, if any."""
        if self._redo is None:
            return ""
        info, self._redo = self._redo, None
        verdict = after_step(info)
        return (verdict.reason or "asked to stop") if verdict.stop else ""

    def _bound_reached(self, until_step: int | None, until_tokens: int | None) -> str:
        if until_step is not None and self.step >= until_step:
            return f"reached step {until_step}"
        if until_tokens is not None and self.tokens >= until_tokens:
            return f"reached {until_tokens} tokens"
        return ""

    def _stop_if_lost(self, info: StepInfo) -> None:
        if info.applied:
            return
        why = f"loss {info.loss}, gradient norm {info.grad_norm}"
        self._log("note", {"note": "step not applied", "why": why, "step": info.step})
        if self._nonfinite_in_row >= self.options.nonfinite_max:
            raise TrainingError(
                f"steps {info.step - self._nonfinite_in_row + 1} to {info.step} gave no finite loss and gradient "
                f"({why}), nonfinite_max={self.options.nonfinite_max}: lower the learning rate, or look at the data"
            )

    def _capture(self, extra_state: ExtraState | None, in_parts: bool, after_step_done: bool) -> Captured | None:
        """The state as tensors (references) and plain values.  A collective; None on a rank that writes nothing."""
        assert self._last is not None
        own = saving.own_random(self.group) if in_parts else saving.gather_random(self.group)
        if not in_parts and not self.group.is_first:
            return None
        extra_tensors, extra_meta = extra_state() if extra_state else ({}, {})
        tensors, values = saving.capture(self.model, self.optimizers)
        own |= {f"extra/{key}": tensor for key, tensor in extra_tensors.items()}
        told = {
            "step": self.step,
            "tokens": self.tokens,
            "cursor": self.cursor,
            "nonfinite_steps": self.nonfinite_steps,
            "progress": self._progress,
            "after_step_done": after_step_done,
            "data": self.stream.identity,
            "last": asdict(self._last),
        }
        return tensors, own, {"trainer": told, "optimizer": values, "extra": extra_meta}


def _facts(info: StepInfo) -> dict[str, object]:
    """A step as one line of a log."""
    step_s = info.step_ns / SECOND_NS
    return {
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
