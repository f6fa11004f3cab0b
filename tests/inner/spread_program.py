"""One of four ranks, forked by test_holding: trains the same model in every layout.

Told: the folder of the prepared corpus, and the one for results.  Two ranks only go on from what four have saved.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import EllipsisType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from diloco.durable import PLAIN_DISK, Disk
from diloco.inner import checkpoint, precision
from diloco.inner.checkpoint import CheckpointError, LateError, names
from diloco.inner.data import TokenStream, load_manifest, validation_batches
from diloco.inner.evaluate import evaluate
from diloco.inner.holding import ParallelOptions, Spread
from diloco.inner.model import ComputeOptions, ModelOptions, Transformer, prepare
from diloco.inner.optimizer import InnerOptions, Muon, build_optimizers, whole
from diloco.inner.parallel import SiteGroup, is_cut, local, put
from diloco.inner.trainer import ExtraState, Log, StepInfo, Trainer, TrainerOptions
from tests.inner.conftest import NoRoom, damage, resumed, steps_of, written

SEQUENCES = 8
"""Of one micro-batch of the whole site, however many ranks draw it."""
STEPS, SAVED = 4, 3
EVEN = {"vocab_size": 257, "layers": 1, "dim": 24, "heads": 4, "context": 16, "ffn_dim": 36}
TIED = {**EVEN, "tied": True}
# Two rows of a key matrix over four ranks: two of them hold nothing of it.
FULL = {"activation_checkpoint": "full", "loss_chunk": 24}
SELECTIVE = {"activation_checkpoint": "selective", "loss_chunk": 50}
NAMES = ["step-0000000002", f"step-{SAVED:010d}-end"]
NARROW = {"vocab_size": 257, "layers": 1, "dim": 6, "heads": 3, "kv_heads": 1, "context": 16, "ffn_dim": 7}


@dataclass(frozen=True)
class Case:
    """A layout, and what is trained in it."""

    parallel: dict[str, Any]
    inner: dict[str, Any]
    model: dict[str, Any] = field(default_factory=lambda: EVEN)
    compute: dict[str, Any] = field(default_factory=dict)
    """How the ranks compute it; one process keeps to the plain way."""


CASES = {
    "ddp": Case({"parallel": "ddp"}, {"optimizer": "adamw", "accumulation": 2}),
    "fsdp": Case({"parallel": "fsdp"}, {"optimizer": "adamw", "accumulation": 2}),
    "fsdp-narrow": Case({"parallel": "fsdp"}, {"optimizer": "muon"}, NARROW, SELECTIVE),
    "hsdp": Case(
        {"parallel": "hsdp", "shard_ranks": 2}, {"optimizer": "muon", "accumulation": 2}, {**EVEN, "layers": 2}, FULL
    ),
    "tp": Case({"parallel": "tp"}, {"optimizer": "muon"}, TIED, SELECTIVE),
    "tp+fsdp": Case(
        {"parallel": "tp+fsdp", "tensor_ranks": 2}, {"optimizer": "muon", "muon_weight_decay": 0.1}, EVEN, FULL
    ),
    "tp+fsdp-tied": Case(
        {"parallel": "tp+fsdp", "tensor_ranks": 2}, {"optimizer": "sgd", "clip": 0.01, "lr": 0.5}, TIED
    ),
}


def build(
    case: Case,
    corpus: Path,
    group: SiteGroup,
    folder: Path | None = None,
    memory: Path | None = None,
    disk: Disk = PLAIN_DISK,
    seed: int = 5,
    log: Log | None = None,
    progress: Callable[[], float] | EllipsisType | None = ...,
    **changes: Any,
) -> Trainer:
    """A trainer of ``case`` for the ranks of ``group``; one rank alone draws the same batches.

    ``changes`` are of its options.
    """
    sharded = group.world > 1 and case.parallel["parallel"] != "ddp"
    with torch.device("meta") if sharded else contextlib.nullcontext():
        model = Transformer(ModelOptions(**case.model), seed)
    if group.world > 1:
        prepare(model, ComputeOptions(**case.compute), group.device)
    spread = Spread(model, group, ParallelOptions(**case.parallel) if group.world > 1 else None)
    inner = InnerOptions(**{"batch_sequences": SEQUENCES // spread.data_world, "warmup_steps": 2, **case.inner})
    place = {"rank": spread.data_rank, "world": spread.data_world}
    stream = TokenStream(load_manifest(corpus), "train", 16, inner.batch_sequences, **place)
    steps = {"checkpoint_steps": 2 if folder else 0, "memory_checkpoint_every_steps": 2 if memory else 0}
    options = TrainerOptions(**{"precision": "fp32", **steps, **changes})
    where: dict[str, Any] = {"checkpoint_dir": folder, "memory_dir": memory, "disk": disk, "log": log}
    if isinstance(progress, EllipsisType):
        progress = lambda: 0.5 if group.is_first else 0.0  # noqa: E731
    return Trainer(model, build_optimizers(model, inner), stream, options, spread, progress=progress, **where)


def trained(
    trainer: Trainer,
    until_step: int = STEPS,
    extra: ExtraState = lambda: ({}, {}),
    also: Callable[[StepInfo], object] = lambda info: None,
) -> list[tuple[float, float]]:
    """Train; loss and norm of the gradient at every step, after which ``also`` is called."""

    def after_writing(info: StepInfo) -> None:
        written(trainer)
        also(info)

    return [(info.loss, info.grad_norm) for info in steps_of(trainer, until_step, after_writing, extra)]


def gathered(value: Tensor) -> Tensor:
    """Return all of ``value`` on every rank, as Muon gathers a sharded gradient."""
    return whole(value.detach()) if is_cut(value) else value.detach()


def check_filled(trainer: Trainer, case: Case) -> None:
    """Ranks that never had the whole model begin with the values that it has in one process, to the bit."""
    plain = Transformer(ModelOptions(**case.model), seed=5)
    held = dict(trainer.model.named_parameters())
    assert list(held) == [name for name, _ in plain.named_parameters()]
    for name, parameter in plain.named_parameters():
        assert torch.equal(gathered(held[name]), parameter), name
    for name, buffer in plain.named_buffers():
        assert torch.equal(dict(trainer.model.named_buffers())[name], buffer), name


def check_memory(group: SiteGroup) -> None:
    """No rank ever holds the whole model: of 100 MB each of four needs less than half, to make it and to fill it."""
    options = ModelOptions(vocab_size=257, layers=8, dim=512, heads=8, context=16)
    small = Transformer(ModelOptions(vocab_size=257, layers=1, dim=64, heads=2, context=16))
    Spread(small, group, ParallelOptions(parallel="fsdp"))  # What torch loads for it at the first time is not counted.
    Path("/proc/self/clear_refs").write_text("5")  # The peak begins anew: a child's is its parent's at first.
    before = peak_bytes()
    with torch.device("meta"):
        model = Transformer(options)
    size = sum(parameter.numel() for parameter in model.parameters()) * 4
    Spread(model, group, ParallelOptions(parallel="fsdp"))
    grown = peak_bytes() - before
    assert size > 100e6
    assert 0 < grown < size / 2, f"{grown:,} bytes for a fourth of {size:,}"


def peak_bytes() -> int:
    """The most memory that this process has had."""
    (line,) = [each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def check_muon(trainer: Trainer) -> None:
    """With the same gradient a sharded matrix takes the very step of a whole one; only its addition may round once."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in trainer.model.named_parameters():
        if not isinstance(parameter, DTensor) or parameter.ndim != 2:
            continue
        values, gradient = (torch.randn(parameter.shape, generator=generator) for _ in range(2))
        results = []
        for like, kind in ((parameter, Muon), (values, torch.optim.Muon)):
            tensor = torch.nn.Parameter(torch.empty_like(like))
            put(tensor, values)
            tensor.grad = torch.empty_like(like)
            put(tensor.grad, gradient)
            kind([tensor], lr=0.1, weight_decay=0.1).step()  # type: ignore[no-untyped-call]
            results.append(gathered(tensor))
        assert torch.allclose(*results, rtol=1e-6, atol=1e-6), name


RESUMED = {"fsdp": "fsdp", "hsdp": "hsdp", "tp+fsdp": "tp+fsdp", "fsdp as tp+fsdp": "fsdp", "plain as fsdp": "plain"}
"""What is taken up again, and whose checkpoint that is."""


def check_format(trainer: Trainer, loss: float, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Under "auto" all ranks compute in one format, also where only some of them find bf16 fast."""
    group, options = trainer.group, replace(trainer.options, precision="auto")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision, "bf16_speed", lambda device: 2.0 if group.is_first else 0.5)
        assert evaluate(trainer.model, batches, precision="auto", together=trainer.spread) == loss
        again = Trainer(trainer.model, trainer.optimizers, trainer.stream, options, trainer.spread)
        assert again._dtype is None


def save_and_resume(corpus: Path, group: SiteGroup, out: Path) -> None:
    """Each layout is saved beside training, and taken up in the same one, in another, and by fewer ranks."""
    for name in ("fsdp", "hsdp", "tp+fsdp"):
        folder, notes = out / f"{name}-checkpoints", []
        log = lambda what, fields, notes=notes: notes.append((what, fields))  # noqa: E731
        trainer = build(CASES[name], corpus, group, folder, log=log)

        def extra() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
            return {f"mine.{group.rank}": torch.full((2,), float(group.rank))}, {"rank": group.rank}

        trained(trainer, SAVED, extra)
        assert [fields["name"] for what, fields in notes if what == "checkpoint"] == NAMES
        assert names(folder) == NAMES
        assert not list(folder.glob(".tmp-*"))
    for name, source in RESUMED.items():
        resume(name, source, corpus, group, out)


def resume(name: str, source: str, corpus: Path, group: SiteGroup, out: Path) -> None:
    """Take up the checkpoints of ``source`` in the layout of ``name`` and go on; the test compares the losses."""
    case = CASES["fsdp" if source == "plain" else source]
    if name.endswith("as tp+fsdp"):
        case = replace(case, parallel=CASES["tp+fsdp"].parallel)
    trainer = build(case, corpus, group)
    found = resumed(trainer, checkpoint.load(out / f"{source}-checkpoints" / NAMES[-1]))
    assert found.step == SAVED
    if source != "plain":
        mine = {f"mine.{rank}": [float(rank)] * 2 for rank in range(4)}
        assert {key: value.tolist() for key, value in found.tensors.items()} == mine
        assert found.meta == {"rank": 0}
    told = trained(trainer)
    if group.is_first:
        (out / f"resumed {name} by {group.world}.json").write_text(json.dumps(told))


def lose_one(corpus: Path, group: SiteGroup, out: Path) -> None:
    """One rank's full disk costs a checkpoint, not the training; at the end every rank says so."""
    folder, notes = out / "full", []
    disk = NoRoom() if group.rank == 2 else PLAIN_DISK
    trainer = build(CASES["fsdp"], corpus, group, folder, disk=disk, log=lambda *told: notes.append(told))
    with pytest.raises(CheckpointError, match=r"step-0000000004-end.*No space"):
        trained(trainer, 4)
    assert trainer.step == 4
    assert [fields["note"] for what, fields in notes if what == "note"] == ["checkpoint not written"] * 2
    group.all_reduce_sum([0.0])
    assert not list(folder.iterdir())


def outlast(corpus: Path, group: SiteGroup, out: Path) -> None:
    """Where one rank still writes when the run ends, every rank says so."""
    trainer, gate = build(CASES["fsdp"], corpus, group, out / "slow", checkpoint_wait_s=0.2), threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        if group.rank == 2:
            patch.setattr(checkpoint, "write_part", lambda *given: gate.wait(60))
        with pytest.raises(LateError, match="is still being written after"):
            steps_of(trainer, 2)
        assert names(out / "slow") == []
        gate.set()


def damage_one(corpus: Path, group: SiteGroup, out: Path) -> None:
    """Of a damaged checkpoint, the one before is taken by all ranks, in words."""
    folder = out / "damaged"
    trained(build(CASES["fsdp"], corpus, group, folder), SAVED)
    if group.is_first:
        damage(folder / NAMES[-1] / "rank-00002.safetensors")
    group.all_reduce_sum([0.0])
    notes: list[Any] = []
    assert resumed(build(CASES["fsdp"], corpus, group, folder, log=lambda *told: notes.append(told))).step == 2
    (whys,) = [fields["why"] for what, fields in notes if what == "note"]
    assert f"{NAMES[-1]}/rank-00002.safetensors is damaged" in whys


def main(group: SiteGroup, tell: Callable[[str], None], corpus: Path, out: Path) -> None:
    """Run as one rank; raises when anything differs."""
    if group.world == 2:  # after the four
        resume("fsdp", "fsdp", corpus, group, out)
        tell("done")
        return
    check_memory(group)
    for name, case in CASES.items():
        trainer = build(case, corpus, group)
        check_filled(trainer, case)
        told = trained(trainer)
        if name in ("fsdp-narrow", "tp+fsdp"):
            check_muon(trainer)
        values = {key: gathered(parameter) for key, parameter in trainer.model.named_parameters()}
        held = sum(local(parameter).numel() for parameter in trainer.model.parameters())
        if group.is_first:
            save_file({key: value.contiguous() for key, value in values.items()}, out / f"{name}.safetensors")
        batches = list(validation_batches(load_manifest(corpus), 16, 3, 5))
        loss = evaluate(trainer.model, batches, precision="fp32", together=trainer.spread)
        if name == "tp":
            check_format(trainer, loss, batches)
        (out / f"{name}-{group.rank}.json").write_text(json.dumps({"steps": told, "held": held, "loss": loss}))
        tell(name)
    save_and_resume(corpus, group, out)
    tell("saved")
    lose_one(corpus, group, out)
    outlast(corpus, group, out)
    damage_one(corpus, group, out)
    tell("done")
