"""The training loop.  Its one line to the outer world is ``verdict = after_step(info)`` between two steps.

Order within step k, binding for whoever keeps state beside the trainer: data, forward, backward, optimizer; then a
checkpoint if one is due; then ``after_step(k)``.  After a resume from that checkpoint ``after_step(k)`` is called once
more before step k + 1, so what it did the first time must have been saved by ``extra_state`` or be repeatable.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from diloco.durable import PLAIN_DISK
from diloco.inner import checkpoint, state
from diloco.inner.checkpoint import AsyncWriter, Checkpoint, CheckpointError
from diloco.inner.checks import require
from diloco.inner.model import next_token_loss
from diloco.inner.optimizer import InnerOptimizers, lr_factor
from diloco.inner.precision import PRECISIONS, autocast_dtype, deterministic

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import nn

    from diloco.durable import Disk
    from diloco.inner.data import TokenStream
    from diloco.inner.parallel import SiteGroup

SECOND_NS = 1_000_000_000
FOUND_NONE, FOUND_DAMAGED = -1, -2


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
    checkpoint_wait_s: float = 120.0
    """How long the end of a run waits for a write under way."""
    nonfinite_max: int = 3
    """Steps in a row with a non-finite loss or gradient after which training stops in words."""
    slowdown: float = 1.0
    """Emulates slower hardware for demonstrations: each step sleeps (slowdown - 1) times its own duration."""

    def __post_init__(self) -> None:
        require(self.precision in PRECISIONS, "precision", self.precision, f"one of {', '.join(PRECISIONS)}")
        require(self.checkpoint_steps >= 0, "checkpoint_steps", self.checkpoint_steps, "0 (none) or more")
        require(self.checkpoints_kept >= 1, "checkpoints_kept", self.checkpoints_kept, "at least 1")
        require(self.checkpoint_wait_s > 0, "checkpoint_wait_s", self.checkpoint_wait_s, "positive")
        require(self.nonfinite_max >= 1, "nonfinite_max", self.nonfinite_max, "at least 1")
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
    tensors: dict[str, Tensor]
    meta: dict[str, Any]
    skipped: tuple[str, ...]
    redo: StepInfo | None = None


AfterStep = Callable[[StepInfo], Verdict]
ExtraState = Callable[[], tuple[dict[str, Tensor], dict[str, Any]]]
Log = Callable[[str, dict[str, object]], None]


def go_on(info: StepInfo) -> Verdict:
    """The ``after_step`` of a site that trains alone."""
    return Verdict()


class Trainer:
    """Trains ``model`` (the plain module; it is wrapped here) on ``stream`` with the ranks of ``group``.

    Between two steps anyone may write into the model's parameters in place: neither the optimizers nor DDP nor
    autocast keeps a copy.  ``progress`` tells the run's share from 0 to 1 for the learning-rate schedule and is asked
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
        progress: Callable[[], float] | None = None,
        log: Log | None = None,
        disk: Disk = PLAIN_DISK,
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
        self._wrapped = group.wrap(model)
        self._dtype = autocast_dtype(options.precision, group.device)
        self._asked_progress = progress
        self._progress: float | None = None
        self._log: Log = log or (lambda what, fields: None)
        self._dir = checkpoint_dir
        self._writer: AsyncWriter | None = None
        if checkpoint_dir is not None:
            self._writer = AsyncWriter(checkpoint_dir, options.checkpoints_kept, options.deterministic, disk)
        self._checkpoint_due = False
        self._save_now = False
        self._saved_name = ""
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

        ``extra_state`` (asked on rank 0) puts the state of whoever stands behind ``after_step`` into each checkpoint.
        Raises TrainingError after ``nonfinite_max`` non-finite steps in a row, CheckpointError when a write failed or
        the folder holds checkpoints that were not resumed.
        """
        self._begin()
        with deterministic(self.options.deterministic):
            reason = self._resumed_verdict(after_step)
            while not reason:
                reason = self._bound_reached(until_step, until_tokens)
                if reason:
                    break
                info = self._train_step(self._share(until_step, until_tokens))
                self._checkpoint_if_due(extra_state)
                self._log("step", _facts(info))
                verdict = after_step(info)
                self._stop_if_lost(info)
                reason = (verdict.reason or "asked to stop") if verdict.stop else ""
            self._last_checkpoint(extra_state)
        return RunEnd(reason, self.step, self.tokens, self.nonfinite_steps)

    def skip_data(self, cursor: int) -> None:
        """Move the data cursor forward to ``cursor``, never back; on all ranks alike."""
        self.cursor = max(self.cursor, cursor)

    def resume(self, found: Checkpoint | None = None) -> Resumed | None:
        """Take up ``found``, or the newest whole checkpoint of the folder, on all ranks alike; None if there is none.

        The folder must be readable by every rank.  CheckpointError when all are damaged or it is of another model.
        """
        found = found or self._newest()
        if found is None:
            return None
        state.restore(found, self.model, self.optimizers, self.group, self.options.seed)
        told = found.meta["trainer"]
        self.step, self.tokens, self.cursor = told["step"], told["tokens"], told["cursor"]
        self.nonfinite_steps, self._progress = told["nonfinite_steps"], told["progress"]
        self._last = StepInfo(**told["last"])
        self._redo = None if told["after_step_done"] else self._last
        self._saved_name = found.path.name
        for words in found.skipped:
            self._log("note", {"note": "checkpoint skipped", "why": words})
        if told["data"] != self.stream.identity:
            self._log("note", {"note": "other data than before", "why": "text, split, sharing or seed has changed"})
        self._log("resumed", {"step": self.step, "tokens": self.tokens, "path": str(found.path)})
        extra = found.meta["extra"]
        return Resumed(self.step, self.tokens, self.cursor, found.part("extra"), extra, found.skipped, self._redo)

    # One step.

    def _begin(self) -> None:
        if self._last is None:
            left = checkpoint.names(self._dir) if self._dir else []
            if left:
                raise CheckpointError(
                    f"{self._dir} already holds {left[-1]}, and this run did not resume: do, or take another folder"
                )
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
        norm = float(self.optimizers.clip())
        loss, save_now = self._agree(loss)
        applied = math.isfinite(loss) and math.isfinite(norm)
        if applied:
            self.optimizers.step()
        self.optimizers.zero_grad()
        self.step += 1
        self.cursor += self.stream.sequences_per_batch * inner.accumulation
        tokens = self.stream.tokens_per_batch * inner.accumulation
        self.tokens += tokens
        self._nonfinite_in_row = 0 if applied else self._nonfinite_in_row + 1
        self.nonfinite_steps += not applied
        # A state that may hold NaN is not saved; the checkpoint waits for the next sound step.
        self._save_now = save_now and applied
        step_ns = self._until_finished(begin_ns)
        lr = self.optimizers.lr
        self._last = StepInfo(self.step, loss, tokens, self.tokens, step_ns, self.cursor, norm, lr, applied)
        return self._last

    def _accumulate_gradients(self, accumulation: int) -> float:
        """Run forward and backward over the micro-batches; this rank's mean loss in nats per token."""
        device = self.group.device
        total = torch.zeros((), device=device)
        for micro in range(accumulation):
            inputs, targets = self.stream.batch(self.cursor + micro * self.stream.sequences_per_batch)
            last = micro == accumulation - 1
            with nullcontext() if last else self.group.without_sync(self._wrapped):
                with torch.autocast(device.type, dtype=self._dtype, enabled=self._dtype is not None):
                    logits = self._wrapped(inputs.to(device))
                loss = next_token_loss(logits, targets.to(device)) / accumulation
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return float(total)

    def _agree(self, loss: float) -> tuple[float, bool]:
        """Make all ranks know the same loss, progress and whether to save, in one collective."""
        every = self.options.checkpoint_steps
        self._checkpoint_due = self._checkpoint_due or (every > 0 and (self.step + 1) % every == 0)
        ready = self._checkpoint_due and self._writer is not None
        mine = [loss, 0.0, 0.0]
        if self.group.is_first:
            # A write still under way makes the due checkpoint wait for a later step instead of blocking training.
            free = self._is_free() and ready
            mine = [loss, self._asked_progress() if self._asked_progress else 0.0, float(free)]
        total, progress, save_now = self.group.all_reduce_sum(mine)
        if self._asked_progress is not None:
            self._progress = progress
        return total / self.group.world, save_now > 0

    def _until_finished(self, begin_ns: int) -> int:
        if self.group.device.type == "cuda":
            torch.cuda.synchronize(self.group.device)
        worked_ns = time.perf_counter_ns() - begin_ns
        if self.options.slowdown > 1.0:
            time.sleep((self.options.slowdown - 1.0) * worked_ns / SECOND_NS)
        return time.perf_counter_ns() - begin_ns

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

    # Checkpoints.

    def _is_free(self) -> bool:
        """Whether a checkpoint can be written now.  One that could not be is said, and the next one is tried when it is
        due: the older ones are whole, and training need not end for want of room."""
        try:
            return self._writer is not None and not self._writer.busy
        except CheckpointError as error:
            self._not_written(error)
            return True

    def _not_written(self, error: CheckpointError) -> None:
        self._saved_name = ""
        self._log("note", {"note": "checkpoint not written", "why": str(error), "step": self.step})

    def _checkpoint_if_due(self, extra_state: ExtraState | None) -> None:
        if self._save_now:
            self._checkpoint_due = False
            try:
                self._save(extra_state, after_step_done=False)
            except CheckpointError as error:
                self._not_written(error)

    def _last_checkpoint(self, extra_state: ExtraState | None) -> None:
        """Save the state after ``after_step``, unless nothing happened since the last one or the last step was lost."""
        if self._writer is None or self._last is None or self._nonfinite_in_row > 0:
            return
        try:
            self._writer.wait(self.options.checkpoint_wait_s)
        except CheckpointError as error:
            if self._writer.busy:
                raise
            self._not_written(error)  # It was an earlier one; of the last one below, the error is the run's.
        if self._saved_name != _name(self.step, after_step_done=True):
            self._save(extra_state, after_step_done=True)
            self._writer.wait(self.options.checkpoint_wait_s)

    def _save(self, extra_state: ExtraState | None, after_step_done: bool) -> None:
        """Clone everything here, in the training thread, and hand it to the writer.  A collective; rank 0 writes."""
        assert self._writer is not None
        assert self._last is not None
        name = _name(self.step, after_step_done)
        random = state.gather_random(self.group)
        self._saved_name = name
        if not self.group.is_first:
            return
        lost = state.first_nonfinite(self.model)
        if lost:
            self._log("note", {"note": "checkpoint not written", "why": f"parameter {lost} is not finite"})
            return
        extra_tensors, extra_meta = extra_state() if extra_state else ({}, {})
        tensors, values = state.capture(self.model, self.optimizers)
        tensors |= random
        tensors |= {f"extra/{key}": tensor for key, tensor in extra_tensors.items()}
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
        clones = {key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items()}
        self._writer.submit(name, clones, {"trainer": told, "optimizer": values, "extra": extra_meta})
        self._log("checkpoint", {"step": self.step, "name": name})

    def _newest(self) -> Checkpoint | None:
        """The checkpoint that rank 0 finds newest and whole, read by every rank."""
        if self._dir is None:
            return None
        if not self.group.is_first:
            step, done = self.group.broadcast_small([])
            if step == FOUND_DAMAGED:
                raise CheckpointError(f"rank 0 found no whole checkpoint in {self._dir}")
            return None if step == FOUND_NONE else checkpoint.load(self._dir / _name(step, bool(done)))
        try:
            found = checkpoint.latest(self._dir)
        except CheckpointError:
            self.group.broadcast_small([FOUND_DAMAGED, 0])
            raise
        told = found.meta["trainer"] if found else {"step": FOUND_NONE, "after_step_done": False}
        self.group.broadcast_small([told["step"], int(told["after_step_done"])])
        return found


def _name(step: int, after_step_done: bool) -> str:
    """Name of a checkpoint; names sort by age."""
    return f"step-{step:010d}" + ("-end" if after_step_done else "")


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


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    precision: str = "auto",
    device: torch.device | None = None,
) -> float:
    """Mean loss of the plain ``model`` over all tokens of ``batches``, nats per token; ValueError without a batch."""
    where = device or next(model.parameters()).device
    dtype = autocast_dtype(precision, where)
    was_training = model.training
    model.eval()
    summed, tokens = 0.0, 0
    try:
        for inputs, targets in batches:
            with torch.autocast(where.type, dtype=dtype, enabled=dtype is not None):
                logits = model(inputs.to(where))
            summed += float(next_token_loss(logits, targets.to(where))) * targets.numel()
            tokens += targets.numel()
    finally:
        model.train(was_training)
    require(tokens > 0, "batches", tokens, "at least one batch to evaluate")
    return summed / tokens


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    """Loss in bits per byte of UTF-8, comparable between tokenizers."""
    return nats_per_token / math.log(2.0) / bytes_per_token
