"""How the ranks of one site hold one model: each all of it, or each a part.

``ddp``      every rank holds the whole model, with the same values (``parallel``).
``fsdp``     parameters, gradients and optimizer state are sharded, and gathered block by block for use (torch's
             ``fully_shard``; ZeRO stage 3, arXiv 1910.02054).
``hsdp``     as fsdp within each group of ``shard_ranks`` neighbours, with copies between the groups as under ddp.
``tp``       each matrix of a block is cut into parts that multiply on their own, all ranks on the same text (the plan
             of Megatron-LM, arXiv 1909.08053, section 3).
``tp+fsdp``  both: ``tensor_ranks`` neighbours multiply together, and their parts are sharded over the other ranks.

If the model was made on torch's meta device, each rank allocates memory for its part only, and for the whole of one
parameter at a time during initialisation.

A sharded parameter is a DTensor under its plain name, fp32, and may be written in place between two steps.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from diloco.inner.checks import require
from diloco.inner.model import ModelOptions, Transformer

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor.parallel import ParallelStyle

    from diloco.inner.parallel import SiteGroup

KINDS = ("ddp", "fsdp", "hsdp", "tp", "tp+fsdp")
DIMENSIONS = ("replicate", "shard", "tensor")


@dataclass(kw_only=True, slots=True)
class ParallelOptions:
    """How a site's ranks hold the model.  A size of 0 is derived if only one value is possible."""

    parallel: str = "ddp"
    tensor_ranks: int = 0
    """Ranks that multiply one matrix together; 0 under ``tp``: all."""
    shard_ranks: int = 0
    """Ranks over which a parameter is sharded; 0 under ``fsdp`` and ``tp+fsdp``: all that are available."""

    def __post_init__(self) -> None:
        require(self.parallel in KINDS, "parallel", self.parallel, f"one of {', '.join(KINDS)}")
        for name, where in (("tensor_ranks", ("tp", "tp+fsdp")), ("shard_ranks", ("fsdp", "hsdp", "tp+fsdp"))):
            value = getattr(self, name)
            require(value >= 0, name, value, "0 (derived) or more")
            require(value == 0 or self.parallel in where, name, value, f"only under {', '.join(where)}")
        require(self.parallel != "hsdp" or self.shard_ranks > 0, "shard_ranks", self.shard_ranks, "to be said for hsdp")
        require(
            self.parallel != "tp+fsdp" or self.tensor_ranks > 0,
            "tensor_ranks",
            self.tensor_ranks,
            "to be said for tp+fsdp",
        )

    def sizes(self, world: int) -> tuple[int, int, int]:
        """Return (copies, shards, tensor ranks) for ``world`` ranks; ValueError if they do not divide evenly."""
        if self.parallel == "ddp":
            return world, 1, 1
        tensor = (self.tensor_ranks or world) if "tp" in self.parallel else 1
        require(world % tensor == 0, "tensor_ranks", tensor, f"a divisor of the site's {world} rank(s)")
        left = world // tensor
        require(self.parallel != "tp" or left == 1, "tensor_ranks", tensor, f"all {world} ranks, or tp+fsdp")
        shards = self.shard_ranks or left
        require(left % shards == 0, "shard_ranks", shards, f"a divisor of {left} (the ranks by tensor_ranks={tensor})")
        require(
            left == shards or self.parallel != "fsdp", "shard_ranks", shards, f"all {world} ranks, or hsdp for copies"
        )
        require(shards > 1 or left == 1, "shard_ranks", shards, "at least 2; copies alone are ddp")
        return left // shards, shards, tensor


def check_cut(options: ModelOptions, tensor: int) -> None:
    """Raise ValueError unless ``tensor`` ranks can each take an equal part of every block's matrices."""
    parts = {"heads": options.heads, "kv_heads": options.kv_heads_used, "ffn_dim": options.ffn_dim_used}
    for name, value in parts.items():
        require(value % tensor == 0, "tensor_ranks", tensor, f"a divisor of the model's {name}={value}")
    require(tensor <= options.vocab_size, "tensor_ranks", tensor, f"at most the {options.vocab_size} words")


class Spread:
    """One model, held by the ranks of a site.  Make it before the optimizers, because it may replace parameters."""

    def __init__(self, model: nn.Module, group: SiteGroup, options: ParallelOptions | None = None) -> None:
        self.options = options or ParallelOptions()
        self.group, self.sizes = group, self.options.sizes(group.world)
        copies, shards, tensor = self.sizes
        self.is_sharded = shards > 1 or tensor > 1
        self.data_rank, self.data_world = group.rank // tensor, copies * shards
        """This rank's index among the groups that draw different text: ranks that multiply together draw the same."""
        at = (group.rank // (shards * tensor), group.rank // tensor % shards, group.rank % tensor)
        self.place = dict(zip(DIMENSIONS, at, strict=True))
        """This rank's coordinates in the grid of the site's ranks, by the names in ``DIMENSIONS``."""
        if not self.is_sharded:
            self.module = group.wrap(model)
            return
        assert isinstance(model, Transformer), "the plan is that of our own model"
        check_cut(model.options, tensor)
        is_empty = model.cosines.is_meta
        if not is_empty:
            model.to(group.device)
        with group.bounded("sharding the model"):
            mesh = _mesh(group, self.sizes)
            if tensor > 1:
                cut_by_tensor(model, mesh["tensor"])
            if shards > 1:
                cut_by_shard(model, mesh["replicate", "shard"] if copies > 1 else mesh["shard"])
        if is_empty:
            model.take_shape(group.device)
        self.module = model
        """The module that the trainer calls."""

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Inside, a backward pass reduces gradients between copies of the model only if it is the ``last`` one.

        Between shards it reduces every time: to wait, every rank would have to keep a whole model's gradients, and a
        model is sharded because those do not fit.
        """
        if self.is_sharded:
            if self.sizes[0] > 1:
                cast("FSDPModule", self.module).set_requires_all_reduce(last)
            return nullcontext()
        if last or not isinstance(self.module, DistributedDataParallel):
            return nullcontext()
        return cast("AbstractContextManager[None]", self.module.no_sync())

    def put_away(self) -> None:
        """Free the parameters gathered for a forward pass that no backward pass followed."""
        if self.sizes[1] > 1:
            cast("FSDPModule", self.module).reshard()


def _mesh(group: SiteGroup, sizes: tuple[int, int, int]) -> DeviceMesh:
    """Return the ranks as a mesh without dimensions of size 1; its groups have the site's timeout, not torch's."""
    kept = [(size, name) for size, name in zip(sizes, DIMENSIONS, strict=True) if size > 1]
    grid = torch.arange(group.world).reshape([size for size, _ in kept])
    groups = []
    for side, (size, _) in enumerate(kept):
        rows = grid.movedim(side, -1).reshape(-1, size).tolist()
        bound = timedelta(seconds=group.timeout_s)
        mine, _ = dist.new_subgroups_by_enumeration(rows, timeout=bound)  # type: ignore[no-untyped-call]
        groups.append(mine)
    names = tuple(name for _, name in kept)
    # torch derives a mesh of one dimension from its group; with more it needs the grid of ranks.
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], group.device.type, mesh_dim_names=names)
    return DeviceMesh.from_group(groups, group.device.type, mesh=grid, mesh_dim_names=names)


def cut_by_tensor(model: Transformer, mesh: DeviceMesh) -> None:
    """Shard a layer's input matrices by columns and its output matrices by rows: one sum over the ranks per half block.

    The embedding and the head are both cut by vocabulary, so that a tied pair is cut alike and stays one matrix.
    """
    # These import torch's DTensor, which takes 2 s, as in ``parallel.is_cut``.
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    whole = Replicate()
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=whole),
        "head": ColwiseParallel(output_layouts=whole),
    }
    for index in range(len(model.blocks)):
        attention, feed_forward = f"blocks.{index}.attention", f"blocks.{index}.feed_forward"
        # Declared once for a whole layer, so that the gradients of its input are summed once, not once per matrix.
        plan[attention] = PrepareModuleInput(
            input_layouts=(whole, None, None), desired_input_layouts=(whole, None, None)
        )
        plan[feed_forward] = PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(whole,))
        for name in ("query", "key", "value"):
            plan[f"{attention}.{name}"] = ColwiseParallel()
        for name in ("gate", "up"):
            plan[f"{feed_forward}.{name}"] = ColwiseParallel()
        plan[f"{attention}.output"] = plan[f"{feed_forward}.down"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)
    if model.options.tied:
        model.head.weight = model.embedding.weight


def cut_by_shard(model: Transformer, mesh: DeviceMesh) -> None:
    """Shard each block on its own and the rest together, so that a rank gathers one block at a time."""
    from torch.distributed.fsdp import fully_shard  # Takes 2 s too.

    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
