"""Muon for matrices of which each rank holds a part.

Its step takes a matrix as a whole.  torch's own Muon can multiply DTensors, with 11 to 16 collectives for one matrix
(torch 2.13), other roundings in every layout, and an error where there are more ranks than rows.  Here the momentum
stays where its rows are; the matrix that it makes is gathered, one at a time and once, every rank takes torch's step
with it, as it would under ddp, and keeps its own part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import Replicate

from diloco.inner.pieces import is_cut, put, sides_cut

if TYPE_CHECKING:
    from torch import Tensor


class GatheredMuon(torch.optim.Muon):
    """Takes DTensors and plain matrices.  Its state is that of torch's Muon: ``momentum_buffer``, sharded alike."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step.  A collective of the ranks that share a matrix."""
        assert closure is None, "the trainer has its gradients already"
        for group in self.param_groups:
            momentum = group["momentum"]
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(gradient)
                buffer = state["momentum_buffer"]
                buffer.lerp_(gradient, 1 - momentum)
                moved = _stepped(whole(gradient.lerp(buffer, momentum) if group["nesterov"] else buffer), group)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                part = torch.empty_like(parameter)
                put(part, moved)
                parameter.add_(part)


def whole(value: Tensor) -> Tensor:
    """All of ``value``, on every rank.  A collective."""
    if not is_cut(value):
        return value
    placements = list(value.placements)
    for side in reversed(sides_cut(value)):  # What was cut last is put together first.
        placements[side] = Replicate()
        value = value.redistribute(placements=placements)
    return value.to_local()


def _stepped(update: Tensor, group: dict[str, Any]) -> Tensor:
    """What torch's Muon makes of a zero matrix with ``update`` for its gradient: the step that it would add."""
    stand_in = torch.nn.Parameter(torch.zeros_like(update))
    stand_in.grad = update
    rest = {key: group[key] for key in ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
    torch.optim.Muon([stand_in], weight_decay=0.0, momentum=0.0, nesterov=False, **rest).step()  # type: ignore[no-untyped-call]
    return stand_in.detach()
