"""A trainer's state as named tensors, and back: ``model/...``, ``optimizer/...`` and ``random/<rank>/...``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diloco.inner.checkpoint import Checkpoint, CheckpointError
from diloco.inner.parts import rank_name
from diloco.inner.pieces import Box, alike, box_of, local
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
    """Name of the first parameter or buffer of which this rank holds a NaN or an infinity; empty without one."""
    for name, tensor in model_tensors(model).items():
        if not bool(torch.isfinite(local(tensor)).all()):
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


def own_random(group: SiteGroup) -> dict[str, Tensor]:
    """This rank's random state."""
    return {f"random/{group.rank}/{kind}": mine for kind, mine in random_state(group.device).items()}


def restore(found: Checkpoint, model: nn.Module, optimizers: InnerOptimizers, group: SiteGroup, seed: int) -> None:
    """Put a checkpoint's state into the live objects, in place.  CheckpointError when it is of another model.

    A rank that the checkpoint does not know (the site has grown) is seeded with ``seed`` + its number.
    """
    load_parameters(found, model)
    try:
        optimizers.load_state_dict(_optimizer_tensors(found, model), found.meta["optimizer"])
    except ValueError as error:
        raise CheckpointError(f"{found.path} is of another optimizer: {error}") from error
    mine = found.part(f"random/{group.rank}")
    if "cpu" in mine:
        set_random_state(mine, group.device)
    else:
        torch.manual_seed(seed + group.rank)


@torch.no_grad()
def load_parameters(found: Checkpoint, model: nn.Module) -> None:
    """Copy a checkpoint's model into ``model``, in place, whatever layout either is in.

    Each rank reads its part only.  CheckpointError names the first difference.
    """
    saved, live = found.part("model"), model_tensors(model)
    for name in sorted(saved.keys() | live.keys()):
        here = tuple(live[name].shape) if name in live else "nothing"
        there = found.entries[f"model/{name}"].shape if name in saved else "nothing"
        if here != there:
            raise CheckpointError(f"{found.path} is of another model: {name} is {here} here and {there} there")
    for name, tensor in live.items():
        local(tensor).copy_(found.read(f"model/{name}", box_of(tensor)))


def files_read(found: Checkpoint, model: nn.Module, group: SiteGroup) -> set[str]:
    """The files of a checkpoint in parts that ``restore`` reads on this rank, and who takes up the rest of it after.

    What stands behind ``after_step`` had given this rank what lies in its part, as long as the ranks are as many.
    """
    live = {f"model/{name}": tensor for name, tensor in model_tensors(model).items()}
    own, as_many = f"{rank_name(group.rank)}.safetensors", found.num_parts == group.world
    files: set[str] = set()
    for name, entry in found.entries.items():
        kind, _, path = name.partition("/")
        lies_in = {file for file, _ in entry.stretches}
        if kind == "random":
            files |= lies_in if path.startswith(f"{group.rank}/") else set()
        elif kind == "extra":
            files |= lies_in & {own} if as_many else lies_in
        else:
            tensor = live.get(name if kind == "model" else f"model/{path.partition('/')[2].rpartition('/')[0]}")
            whole = Box((0,) * len(entry.shape), entry.shape)
            box = whole if tensor is None or tuple(tensor.shape) != entry.shape else box_of(tensor)
            files |= {file for file, _, _ in entry.meets(box)}
    return files


def _optimizer_tensors(found: Checkpoint, model: nn.Module) -> dict[str, Tensor]:
    """The optimizers' tensors: those of a parameter's shape in this rank's part of it, the others whole."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    for path in found.part("optimizer"):
        name = path.partition("/")[2].rpartition("/")[0]
        parameter, key = parameters.get(name), f"optimizer/{path}"
        if parameter is not None and tuple(parameter.shape) == found.entries[key].shape:
            part = found.read(key, box_of(parameter)).to(local(parameter).device)
            tensors[path] = alike(parameter, part)
        else:
            tensors[path] = found.read(key)
    return tensors
