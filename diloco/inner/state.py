"""A trainer's state as named tensors, and back: ``model/...``, ``optimizer/...`` and ``random/<rank>/...``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diloco.inner.checkpoint import Checkpoint, CheckpointError
from diloco.inner.precision import random_state, set_random_state

if TYPE_CHECKING:
    from torch import Tensor, nn

    from diloco.inner.optimizer import InnerOptimizers
    from diloco.inner.parallel import SiteGroup


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters (tied ones once, under their first name) and persistent buffers of the plain ``model``, no copies."""
    persistent = model.state_dict()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {**{name: parameter.detach() for name, parameter in model.named_parameters()}, **buffers}


def first_nonfinite(model: nn.Module) -> str:
    """Name of the first parameter or buffer that holds a NaN or an infinity; empty when there is none."""
    for name, tensor in model_tensors(model).items():
        if not bool(torch.isfinite(tensor).all()):
            return name
    return ""


def capture(model: nn.Module, optimizers: InnerOptimizers) -> tuple[dict[str, Tensor], dict[str, float | int | bool]]:
    """Tensors of the model and the optimizers (references) and the optimizers' plain values."""
    tensors, values = optimizers.state_dict()
    named = {f"model/{name}": tensor for name, tensor in model_tensors(model).items()}
    return {**named, **{f"optimizer/{name}": tensor for name, tensor in tensors.items()}}, values


def gather_random(group: SiteGroup) -> dict[str, Tensor]:
    """Every rank's random state, on every rank.  A collective."""
    gathered: dict[str, Tensor] = {}
    for kind, mine in random_state(group.device).items():
        for rank, theirs in enumerate(group.all_gather(mine)):
            gathered[f"random/{rank}/{kind}"] = theirs
    return gathered


def restore(found: Checkpoint, model: nn.Module, optimizers: InnerOptimizers, group: SiteGroup, seed: int) -> None:
    """Put a checkpoint's state into the live objects, in place.  CheckpointError when it is of another model.

    A rank that the checkpoint does not know (the site has grown) is seeded with ``seed`` + its number.
    """
    load_parameters(found, model)
    try:
        optimizers.load_state_dict(found.part("optimizer"), found.meta["optimizer"])
    except ValueError as error:
        raise CheckpointError(f"{found.path} is of another optimizer: {error}") from error
    mine = found.part(f"random/{group.rank}")
    if "cpu" in mine:
        set_random_state(mine, group.device)
    else:
        torch.manual_seed(seed + group.rank)


@torch.no_grad()
def load_parameters(found: Checkpoint, model: nn.Module) -> None:
    """Copy a checkpoint's model into ``model``, in place; CheckpointError names the first difference."""
    saved, live = found.part("model"), model_tensors(model)
    for name in sorted(saved.keys() | live.keys()):
        here = tuple(live[name].shape) if name in live else "nothing"
        there = tuple(saved[name].shape) if name in saved else "nothing"
        if here != there:
            raise CheckpointError(f"{found.path} is of another model: {name} is {here} here and {there} there")
    for name, tensor in live.items():
        tensor.copy_(saved[name])
