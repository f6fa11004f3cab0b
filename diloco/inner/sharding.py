"""How the ranks of one site hold one model: each all of it, or each a part.

``ddp``      every rank all of it, and all ranks the same (``parallel``).
``fsdp``     parameters, gradients and optimizer state in parts, gathered block by block while they are used (torch's
             ``fully_shard``; ZeRO stage 3, arXiv 1910.02054).
``hsdp``     the same within each ``shard_ranks`` neighbours, and the like between those groups as under ddp.
``tp``       each matrix of a block in parts that multiply on their own, all ranks on the same text (the plan of
             Megatron-LM, arXiv 1909.08053, section 3).
``tp+fsdp``  both: ``tensor_ranks`` neighbours multiply together, and what they hold is sharded over the others.

Where the model was made without memory (on torch's meta device) each rank gets memory for its part only, and the whole
of one parameter at a time while it is filled.

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

from diloco.inner.checks import require
from diloco.inner.model import ModelOptions, Transformer

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.fsdp import FSDPModule

    from diloco.inner.parallel import SiteGroup

KINDS = ("ddp", "fsdp", "hsdp", "tp", "tp+fsdp")
DIMENSIONS = ("replicate", "shard", "tensor")


@dataclass(kw_only=True, slots=True)
class ParallelOptions:
    """How a site's ranks hold the model.  Sizes of 0 are derived where there is one answer."""

    parallel: str = "ddp"
    tensor_ranks: int = 0
    """Ranks that multiply one matrix together; 0 under ``tp``: all."""
    shard_ranks: int = 0
    """Ranks over which a parameter is sharded; 0 under ``fsdp`` and ``tp+fsdp``: all that there are."""

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
        """Copies x shards x tensor ranks of a site with ``world`` ranks; ValueError where they do not come out even."""
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
    """ValueError unless ``tensor`` ranks can each take an equal part of every block's matrices."""
    parts = {"heads": options.heads, "kv_heads": options.kv_heads_used, "ffn_dim": options.ffn_dim_used}
    for name, value in parts.items():
        require(value % tensor == 0, "tensor_ranks", tensor, f"a divisor of the model's {name}={value}")
    require(tensor <= options.vocab_size, "tensor_ranks", tensor, f"at most the {options.vocab_size} words")


class Spread:
    """One model, held by the ranks of a site.  Made before the optimizers are, because it may replace parameters."""

    def __init__(self, model: nn.Module, group: SiteGroup, options: ParallelOptions | None = None) -> None:
        self.options = options or ParallelOptions()
        self.group, self.sizes = group, self.options.sizes(group.world)
        copies, shards, tensor = self.sizes
        self.is_sharded = shards > 1 or tensor > 1
        self.data_rank, self.data_world = group.rank // tensor, copies * shards
        """This rank's place among those that draw text: ranks that multiply together draw the same."""
        at = (group.rank // (shards * tensor), group.rank // tensor % shards, group.rank % tensor)
        self.place = dict(zip(DIMENSIONS, at, strict=True))
        """This rank's place in the grid of the site's ranks."""
        if not self.is_sharded:
            self.module = group.wrap(model)
            return
        assert isinstance(model, Transformer), "the plan is that of our own model"
        check_cut(model.options, tensor)
        is_empty = model.cosines.is_meta
        if not is_empty:
            model.to(group.device)
        with group.bounded("sharding the model"):
            from diloco.inner import cutting  # With torch's DTensor: 2 s, as in ``pieces``.

            mesh = _mesh(group, self.sizes)
            if tensor > 1:
                cutting.cut(model, mesh["tensor"])
            if shards > 1:
                cutting.shard(model, mesh["replicate", "shard"] if copies > 1 else mesh["shard"])
        if is_empty:
            model.take_shape(group.device)
        self.module = model
        """What the trainer calls."""

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Inside, a backward pass adds to the gradients what all ranks need to see only after the ``last`` one.

        Between copies nothing is sent before that.  Shards are reduced each time: what would wait is a whole model's
        gradients on every rank, and that they do not fit is why somebody shards.
        """
        if self.is_sharded:
            if self.sizes[0] > 1:
                cast("FSDPModule", self.module).set_requires_all_reduce(last)
            return nullcontext()
        return nullcontext() if last else self.group.without_sync(self.module)

    def put_away(self) -> None:
        """After a forward pass without a backward one: give back what was gathered for it."""
        if self.sizes[1] > 1:
            cast("FSDPModule", self.module).reshard()


def _mesh(group: SiteGroup, sizes: tuple[int, int, int]) -> DeviceMesh:
    """The ranks as a grid without sides of 1; its groups keep the site's own bound, which torch's default would not."""
    kept = [(size, name) for size, name in zip(sizes, DIMENSIONS, strict=True) if size > 1]
    grid = torch.arange(group.world).reshape([size for size, _ in kept])
    groups = []
    for side, (size, _) in enumerate(kept):
        rows = grid.movedim(side, -1).reshape(-1, size).tolist()
        bound = timedelta(seconds=group.timeout_s)
        mine, _ = dist.new_subgroups_by_enumeration(rows, timeout=bound)  # type: ignore[no-untyped-call]
        groups.append(mine)
    names = tuple(name for _, name in kept)
    # A grid of one side is told by its group alone; with more, torch wants to know how they lie.
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], group.device.type, mesh_dim_names=names)
    return DeviceMesh.from_group(groups, group.device.type, mesh=grid, mesh_dim_names=names)
