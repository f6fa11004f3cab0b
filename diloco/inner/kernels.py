"""What of the model is no product of matrices, and the kernels that compute it.

RMSNorm, rotary positions and SwiGLU are each some passes over memory when torch computes them, and one when a kernel
does; the loss is made with its gradients a part of the tokens at a time, and their logits never all exist.  The kernels
are liger-kernel's, an extra, for accelerators.  The values are the same within rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

KINDS = ("torch", "liger")


class KernelsError(RuntimeError):
    """The kernels that are asked for cannot be had here; the message says what to do."""


class Kernels:
    """By torch's own operations, on any device."""

    fused_loss: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    """Mean cross-entropy of x [tokens, dim], the head's matrix and the targets [tokens]; None: the model's own ways."""

    def normalised(self, norm: nn.RMSNorm, x: Tensor) -> Tensor:
        """What ``norm`` makes of ``x``."""
        found: Tensor = norm(x)
        return found

    def rotated(self, query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
        """Both turned by their positions, each [B, heads, T, head_dim]; what they held may be overwritten."""
        return rotate(query, cosines, sines), rotate(key, cosines, sines)

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up; what they held may be overwritten in the backward pass."""
        return functional.silu(gate) * up


class LigerKernels(Kernels):
    """By liger-kernel's; KernelsError where that is not installed."""

    def __init__(self) -> None:
        try:
            from liger_kernel import ops
        except ImportError as error:
            raise KernelsError(f"liger-kernel is not there ({error}): pip install 'diloco[fused]'") from error
        self._ops: Any = ops

    def normalised(self, norm: nn.RMSNorm, x: Tensor) -> Tensor:
        """In one pass; the sum of squares in fp32."""
        found: Tensor = self._ops.LigerRMSNormFunction.apply(x, norm.weight, norm.eps)
        return found

    def rotated(self, query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
        """Both in one pass, in place."""
        # The tables have each angle once; of the kernel's arguments the last says how wide a turned head is.
        width = query.shape[-1]
        turned: tuple[Tensor, Tensor] = self._ops.LigerRopeFunction.apply(query, key, cosines, sines, None, 1, width)
        return turned

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """In one pass; the backward one writes the gradients where gate and up were."""
        found: Tensor = self._ops.LigerSiLUMulFunction.apply(gate, up)
        return found

    def fused_loss(self, x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        """The gradients are made along with the loss, a part of the tokens at a time."""
        found: Tensor = self._ops.LigerFusedLinearCrossEntropyFunction.apply(x, head, targets)[0]
        return found


def kernels_of(kind: str, device: torch.device) -> Kernels:
    """Those that go by the name ``kind``; KernelsError where they cannot be had on ``device``."""
    if kind == "torch":
        return Kernels()
    if device.type == "cpu":
        raise KernelsError("its kernels are for accelerators, and this is a CPU: torch")
    return LigerKernels()


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn each pair (i, i + head_dim / 2) of ``x`` [B, heads, T, head_dim] by its position's angle; dtype kept.

    The fp32 tables promote the products, so the angles are never rounded to bf16.
    """
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
    return turned.to(x.dtype)
