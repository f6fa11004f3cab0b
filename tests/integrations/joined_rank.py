"""One rank of a site whose loop is a user's own, under torchrun: trains a model, and writes down what it then holds.

Arguments: the syncer's address, the folder for results, the layout: ddp, fsdp, frozen (fsdp with a layer that is not
trained), leased (ddp on leased data), or stages, where each of two ranks has a layer.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import diloco
from diloco.runs.process import end_process
from tests.integrations.serving import backward, cold_model, small_model, supplied
from tests.runs.processes import wait_for


def wrapped(model: nn.Module, layout: str) -> nn.Module:
    if layout == "stages":
        mine = ("0", "2")[dist.get_rank()]
        return nn.ModuleDict({mine: model.get_submodule(mine)})
    if layout not in ("fsdp", "frozen"):
        return DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    fully_shard(model[0])  # type: ignore[index]
    return fully_shard(model)


def main() -> None:
    address, folder, layout = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = cold_model()
    if layout == "frozen":
        model[0] = small_model(1)[0].requires_grad_(False)
    model = wrapped(model, layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data: dict[str, Any] = {"data": "essays", "samples": 400, "samples_per_step": 2 * world}
    leased = data if layout == "leased" else {}
    given, by = ([model], piped) if layout == "stages" else (model, backward)
    outer = diloco.join(given, optimizer, syncer=address, site="fra", folder=folder / "fra", **leased)
    if layout == "held":
        return refused(outer, folder, rank, world)
    progress, read = [], []
    with outer:
        batches = outer.batches(2) if leased else iter([])
        while not outer.should_stop:
            if leased:
                supplied(outer, 4)
                read.append(next(batches))
            outer.tokens(5, loss=by(model, world * outer.steps + rank))  # Another batch on every rank.
            optimizer.step()
            optimizer.zero_grad()
            progress.append(outer.progress)
    held = {name: _whole(each).tolist() for name, each in model.named_parameters()}
    facts = {"ledger": outer.ledger, "steps": outer.steps, "why": outer.why, "progress": progress, "final": outer.final}
    facts |= {"held": held, "read": read}
    (folder / f"rank-{rank}.json").write_text(json.dumps(facts))
    end_process(0)  # gloo's threads may still hold what the line with ``_whole`` gathered.


def refused(outer: diloco.Outer, folder: Path, rank: int, world: int) -> None:
    try:
        outer.start()
    except ValueError as error:
        (folder / f"rank-{rank}.json").write_text(json.dumps(str(error)))
    # The end of this process would be told to the others as well.
    wait_for(lambda: all((folder / f"rank-{each}.json").is_file() for each in range(world)), "the other ranks")


def piped(stage: nn.Module, step: int) -> float:
    """As ``backward`` of the whole model, of which the first rank has the first layer; one batch for both."""
    rank, hidden = dist.get_rank(), torch.empty(16, 16)
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(step // 2))
    if rank == 0:
        hidden = torch.tanh(stage.get_submodule("0")(inputs))
        dist.send(hidden.detach(), 1)
        slope = torch.empty_like(hidden)
        dist.recv(slope, 1)
        hidden.backward(slope)
        return math.nan
    dist.recv(hidden, 0)
    hidden.requires_grad_()
    loss = (stage.get_submodule("2")(hidden) - inputs.sum(1, keepdim=True).sin()).square().mean()
    loss.backward()
    assert hidden.grad is not None
    dist.send(hidden.grad, 0)
    return float(loss.detach())


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor().detach() if hasattr(value, "full_tensor") else value.detach()


if __name__ == "__main__":
    main()
