"""Muon (Keller Jordan, https://kellerjordan.github.io/posts/muon), for whole matrices and for sharded ones.

torch's own Muon makes its Newton-Schulz steps in bf16 everywhere, which a CPU without bf16 emulates at a fiftieth of
the speed of fp32: here the caller chooses the format.  And it multiplies DTensors with 11 to 16 collectives for one
matrix (torch 2.13), other roundings in every layout, and an error where there are more ranks than rows.  Here the
momentum stays where its rows are; the matrix that it makes is gathered, one at a time and once, every rank makes the
same steps with it, as it would under ddp, and keeps its own part.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from diloco.inner.pieces import box_of, is_cut, local, sides_cut

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


class Muon(torch.optim.Muon):
    """Takes DTensors and plain matrices.  Its state is that of torch's Muon: ``momentum_buffer``, sharded alike."""

    def __init__(self, matrices: Iterable[Tensor], *, dtype: torch.dtype = torch.bfloat16, **options: Any) -> None:
        """``dtype`` is that of the Newton-Schulz steps; ``options`` are those of torch's Muon."""
        super().__init__(matrices, **options)
        self._dtype = dtype

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
                update = whole(gradient.lerp(buffer, momentum) if group["nesterov"] else buffer)
                moved = orthogonalize(update, self._dtype, group["ns_coefficients"], group["ns_steps"], group["eps"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                lr = adjusted_lr(group["lr"], group["adjust_lr_fn"], *update.shape)
                local(parameter).add_(moved[box_of(parameter).slices], alpha=-lr)


def orthogonalize(
    matrix: Tensor, dtype: torch.dtype, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Return U V^T of ``matrix`` = U S V^T, with singular values within about .5 and 1.5 of 1, in ``dtype``.

    ``steps`` Newton-Schulz steps of the fifth order, those of Jordan's and torch's Muon.
    """
    a, b, c = coefficients
    rows, columns = matrix.shape
    x = matrix.to(dtype)
    x = x.T if rows > columns else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if rows > columns else x


def adjusted_lr(lr: float, rule: str | None, rows: int, columns: int) -> float:
    """Return the learning rate of a [rows, columns] matrix under torch's ``adjust_lr_fn``."""
    if rule == "match_rms_adamw":  # "Muon is Scalable for LLM Training", arXiv 2502.16982.
        return lr * 0.2 * math.sqrt(max(rows, columns))
    return lr * math.sqrt(max(1, rows / columns))


def whole(value: Tensor) -> Tensor:
    """All of ``value``, on every rank.  A collective."""
    if not is_cut(value):
        return value
    from torch.distributed.tensor import Replicate  # 2 s, as in ``pieces``.

    placements = list(value.placements)
    for side in reversed(sides_cut(value)):  # What was cut last is put together first.
        placements[side] = Replicate()
        value = value.redistribute(placements=placements)
    return value.to_local()
