"""How a model is computed, which changes its speed and the room that it takes but not what it learns.

Everything here is set on a model of ours before its ranks take their parts of it, and leaves its parameters and their
names alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from diloco.inner.checks import require
from diloco.inner.kernels import KINDS, kernels_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from diloco.inner.model import Transformer

KEPT = ("none", "full", "selective")


@dataclass(kw_only=True, slots=True)
class ComputeOptions:
    """What is kept of a forward pass, what is compiled, and how much of the logits there is at once."""

    activation_checkpoint: str = "none"
    """``full``: of each block only its input is kept for the backward pass, and all of it computed again (arXiv
    1604.06174).  ``selective``: what its matrices and its attention made is kept as well, and the rest computed again
    (arXiv 2205.05198)."""
    compile: bool = False
    """Whether each block goes through ``torch.compile``."""
    loss_chunk: int = 0
    """Tokens of which the logits exist at the same time; 0: all of a micro-batch."""
    kernels: str = "torch"
    """What computes RMSNorm, rotary positions, SwiGLU and the loss: ``torch``, or ``liger``'s fused kernels."""

    def __post_init__(self) -> None:
        kept = self.activation_checkpoint
        require(kept in KEPT, "activation_checkpoint", kept, f"one of {', '.join(KEPT)}")
        require(
            kept != "selective" or not self.compile,
            "activation_checkpoint",
            kept,
            "full or none with compile=true, which decides by itself what of a block it keeps",
        )
        require(self.loss_chunk >= 0, "loss_chunk", self.loss_chunk, "0 (all at once) or more")
        require(self.kernels in KINDS, "kernels", self.kernels, f"one of {', '.join(KINDS)}")
        if self.kernels == "torch":
            return
        # A kernel of theirs turns queries where they lie, which selective would have kept as they were.
        require(kept != "selective", "kernels", self.kernels, "torch with activation_checkpoint=selective")
        require(not self.compile, "kernels", self.kernels, "torch with compile=true, which fuses the same by itself")
        require(not self.loss_chunk, "kernels", self.kernels, "torch with loss_chunk: its loss is in parts in any case")


class CompileError(RuntimeError):
    """torch.compile does not work on this machine; the message says what it lacks."""


def prepare(model: Transformer, options: ComputeOptions, device: torch.device) -> None:
    """Set ``options`` on ``model``; CompileError and KernelsError where what is asked for cannot be had."""
    model.loss_chunk = options.loss_chunk
    model.compute_by(kernels_of(options.kernels, device))
    if options.compile:
        _try_compile(device)
    for block in model.layers:
        block.keeps = options.activation_checkpoint
        if options.compile:
            block.layer = torch.compile(block.layer)  # type: ignore[method-assign]


def _try_compile(device: torch.device) -> None:
    """Compile something small: whatever is missing is found now and not in the first step."""
    try:
        torch.compile(_small)(torch.ones(8, device=device))
    except Exception as error:  # whatever a compiler, or the lack of one, may raise
        why = " ".join(str(error).split())
        raise CompileError(f"torch.compile does not work here on {device.type}: {why[:300]}") from error


def _small(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(x) * 2.0


def contexts() -> Callable[[], Any]:
    """For ``selective``: what is expensive to make and not large is kept."""
    aten = torch.ops.aten
    kept = [
        aten.mm.default,
        aten.bmm.default,
        aten.addmm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    ]
    return partial(create_selective_checkpoint_contexts, kept)
