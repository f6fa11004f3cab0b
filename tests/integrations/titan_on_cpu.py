"""A job of torchtitan's on a machine without an accelerator, with a small Llama and text of ours; one rank of it.

torchtitan takes a machine's accelerator for granted.  Here it is told that the CPU is one, before anything of it is
imported: its command line, trainer, optimizers, schedules, checkpoints and loop are its own.

Under torchrun: titan_on_cpu.py FOLDER TORCHTITAN'S ARGUMENTS, with ``--module diloco.titan --config
tests.integrations.titan_on_cpu.small``.  Each rank writes what it then holds to FOLDER/rank-N.json.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
import torch.distributed.distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

FAILS_AT = "TITAN_FAILS_AT"
"""The cursor at which the text cannot be read any more."""


def stand_in() -> None:
    """Make the CPU what torchtitan finds."""
    memory = SimpleNamespace(total_memory=1 << 30)
    there: dict[str, Any] = {
        "get_device_name": lambda *_: "cpu",
        "get_device_properties": lambda *_: memory,
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda *_: None,
        "memory_stats": lambda *_: {},
        "current_device": lambda: 0,  # torch's own is "cpu", and torchtitan wants a number
    }
    for name, each in there.items():
        setattr(torch.cpu, name, each)
    torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[attr-defined]
    if not hasattr(torch.distributed, "set_timeout"):  # torch 2.13 has it under another name.
        torch.distributed.set_timeout = torch.distributed.distributed_c10d._set_pg_timeout  # type: ignore[attr-defined]
        PipelineScheduleSingle.step = PipelineScheduleMulti.step = step  # type: ignore[assignment]


def step(schedule: Any, *, losses: Any, return_outputs: bool, loss_kwargs: Any, **microbatches: Any) -> None:
    """One step of a pipeline on a batch that torchtitan has cut: torch 2.13's own cuts a whole one
    (https://github.com/pytorch/pytorch/pull/188500)."""
    for stage in [schedule._stage] if isinstance(schedule, PipelineScheduleSingle) else schedule._stages:
        stage.has_backward = True
        stage.clear_runtime_states()
    schedule._step_microbatches(**microbatches, losses=losses, return_outputs=return_outputs, loss_kwargs=loss_kwargs)


def small() -> Any:
    """The example's config, of two blocks; attention is torch's own, since flex attention has no backward on a CPU."""
    from torchtitan.models.common.attention import ScaledDotProductAttention

    from examples.torchtitan_site import Text, tiny

    class Failing(Text):
        """Text that ends badly."""

        def __iter__(self) -> Any:
            for batch in super().__iter__():
                if self.cursor > int(os.environ.get(FAILS_AT, "1000000000")):
                    raise OSError("the text's disk is gone")
                yield batch

    config = tiny()
    Text.Config._owner = Failing
    model = config.model_spec.model
    model.layers = model.layers[:2]
    for block in model.layers:
        block.attention.inner_attention = ScaledDotProductAttention.Config()
    config.training.local_batch_size, config.training.seq_len = 4, 16
    config.training.disable_cuda_graphs = True
    config.optimizer.implementation = "for-loop"
    config.activation_checkpoint = None
    return config


def main() -> None:
    """As ``python -m torchtitan.train``, whose trainer is looked at before it is closed."""
    stand_in()
    from torchtitan.config import ConfigManager

    folder, losses = Path(sys.argv[1]), defaultdict[int, float](float)
    trainer = ConfigManager().parse_args(sys.argv[2:]).build()
    trains = trainer.forward_backward_step

    def observed(**batch: Any) -> torch.Tensor:
        loss = trains(**batch)
        losses[trainer.step] += float(loss)
        return loss

    trainer.forward_backward_step = observed
    for part in [each for whole in trainer.model_parts for each in whole.modules()]:
        if isinstance(part, FSDPModule):  # gloo has no sum with a factor in it.
            part.set_force_sum_reduction_for_comms(True)
    try:
        trainer.train()
        if trainer.outer is not None:
            told = {**facts(trainer), "losses": list(losses.values())}
            (folder / f"rank-{torch.distributed.get_rank()}.json").write_text(json.dumps(told))
    finally:
        trainer.close()
    torch.distributed.destroy_process_group()


def facts(trainer: Any) -> dict[str, Any]:
    """What a rank knows at the end."""
    outer = trainer.outer
    held = {name: each for part in trainer.model_parts for name, each in part.named_parameters()}
    whole = {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in held.items()}
    sums = {name: float(each.detach().double().square().sum()) for name, each in whole.items()}
    told = {"why": outer.why, "steps": outer.steps, "ledger": outer.ledger, "progress": outer.progress}
    return {**told, "step": trainer.step, "sums": sums, "lr": trainer.lr_schedulers.get_metrics()}


if __name__ == "__main__":
    main()
