"""A small model of odd shapes, distributed over several ranks in every layout that torch offers.

torch's own functions distribute, fill and read it, so that the product is compared with torch.
"""

from __future__ import annotations

import faulthandler
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from diloco.inner.parallel import SiteGroup
from tests.forked import forkserver
from tests.loopback.cluster import free_port

BOUND_S = 60.0


class Odd(nn.Module):
    """A model with parameters that four ranks can divide evenly, and others that they cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 12)
        self.norm = nn.LayerNorm(12)
        self.down = nn.Linear(12, 3)
        self.cube = nn.Parameter(torch.zeros(5, 3, 7))
        self.scale = nn.Parameter(torch.zeros(1))
        self.wide = nn.Parameter(torch.zeros(6, 8))

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.down(self.norm(self.up(self.embed(tokens))))
        return found


SHAPES = {name: tuple(value.shape) for name, value in Odd().named_parameters()}


def _by_columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if tuple(parameter.shape) == SHAPES["wide"] else None


def plain(model: Odd, world: int) -> nn.Module:
    return model


def ddp(model: Odd, world: int) -> nn.Module:
    return DistributedDataParallel(model) if world > 1 else model


def fsdp(model: Odd, world: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh, shard_placement_fn=_by_columns)
    return model


def hsdp(model: Odd, world: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copies", "parts"))
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def tp(model: Odd, world: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (world,))
    plan = {"embed": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def tp_fsdp(model: Odd, world: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("fsdp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model.up, mesh=mesh["fsdp"])
    fully_shard(model.down, mesh=mesh["fsdp"])
    return model


def by_hand(model: Odd, world: int) -> nn.Module:
    """Shard as no engine does: one dimension twice, the last dimension, two at once, unevenly."""
    mesh = init_device_mesh("cpu", (2, world // 2))
    cuts = {
        "cube": (Shard(2), Shard(0)),
        "wide": (Shard(0), Shard(0)),
        "up.weight": (Shard(1), Replicate()),
        "embed.weight": (Replicate(), Shard(0)),
        "scale": (Replicate(), Replicate()),
        "norm.bias": (Shard(0), Shard(0)),
    }
    for name, placements in cuts.items():
        owner, _, last = name.rpartition(".")
        held = distribute_tensor(model.get_parameter(name).data, mesh, placements)
        model.get_submodule(owner).register_parameter(last, nn.Parameter(held))
    return model


LAYOUTS: Mapping[str, Callable[[Odd, int], nn.Module]] = {
    made.__name__: made for made in (plain, ddp, fsdp, hsdp, tp, tp_fsdp, by_hand)
}


def dice(what: str, seed: int = 0) -> dict[str, Tensor]:
    """Return random values for every parameter, the same in every process."""
    drawn = {}
    for at, (name, shape) in enumerate(sorted(SHAPES.items())):
        generator = torch.Generator().manual_seed(1000 * seed + 31 * at + sum(what.encode()))
        drawn[name] = torch.randn(shape, generator=generator)
    return drawn


def part_of(parameter: Tensor, values: Tensor) -> Tensor:
    """Return this rank's part of ``values`` under the layout of ``parameter``, without communication."""
    if not isinstance(parameter, DTensor):
        return values
    held = values
    mesh, placements = parameter.device_mesh, parameter.placements
    for at, placement in enumerate(placements):
        if not isinstance(placement, Replicate):
            chunks, _ = placement._split_tensor(held, mesh.size(at), with_padding=False)
            held = chunks[mesh.get_coordinate()[at]]  # type: ignore[index]
    return held


@torch.no_grad()
def fill(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy this rank's part of ``values`` into ``parameters``."""
    for name, parameter in parameters.items():
        mine = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        mine.copy_(part_of(parameter, values[name]))


@torch.no_grad()
def whole(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return all values on every rank, gathered by torch."""
    return {
        name: (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).clone()
        for name, parameter in parameters.items()
    }


def same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal bit for bit."""
    return one.shape == other.shape and torch.equal(one.view(torch.int32), other.view(torch.int32))


# --- processes --------------------------------------------------------------------------------------------------------

Rank = Callable[..., None]


def run_rank(program: Rank, rank: int, world: int, port: int, told: Connection, mine: tuple[Any, ...]) -> None:
    """Run a rank from start to end, and send its parent any error."""
    faulthandler.enable()
    torch.set_num_threads(1)
    try:
        group = SiteGroup(rank, rank, world, master_port=port, device="cpu", timeout_s=BOUND_S)
        program(group, told.send, *mine)
        group.close()
    except BaseException:
        told.send({"error": f"rank {rank}: {traceback.format_exc()}"})
        raise SystemExit(1) from None


@contextmanager
def ranks(program: Rank, world: int, *mine: Any) -> Iterator[list[Connection]]:
    """Start ``world`` processes that run ``program``, forked with everything imported; yield their pipes, by rank."""
    context = forkserver()
    port = free_port()
    with ExitStack() as stack:
        found = []
        for rank in range(world):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=run_rank, args=(program, rank, world, port, there, mine))
            process.start()
            there.close()
            stack.callback(process.join, BOUND_S)
            stack.callback(process.kill)
            found.append(stack.enter_context(here))
        yield found


def heard(end: Connection) -> Any:
    """Return the next message of a rank; fail on silence or an error."""
    assert end.poll(BOUND_S), "a rank says nothing"
    said = end.recv()
    assert not (isinstance(said, dict) and "error" in said), said["error"]
    return said
