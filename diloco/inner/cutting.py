"""How torch cuts a model over ranks: tensor parallel for its matrices, and ``fully_shard`` for all that it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

    from diloco.inner.model import Transformer


def cut(model: Transformer, mesh: DeviceMesh) -> None:
    """Columns of what a layer reads with, rows of what it writes with: one sum over the ranks for each half of a block.

    The embedding is cut by words, the head likewise, so that a tied pair is cut alike and stays one matrix.
    """
    whole = Replicate()
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=whole),
        "head": ColwiseParallel(output_layouts=whole),
    }
    for index in range(len(model.blocks)):
        attention, feed_forward = f"blocks.{index}.attention", f"blocks.{index}.feed_forward"
        # Said once for a whole layer, the gradients of its input are summed once and not for each of its matrices.
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


def shard(model: Transformer, mesh: DeviceMesh) -> None:
    """Each block on its own, and the rest together: one block at a time is whole on a rank."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
