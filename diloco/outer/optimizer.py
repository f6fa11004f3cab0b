"""The outer optimizer: one step on one fragment, as a pure function.

The form is torch's.  Three forms go under the name of Nesterov (see HeLoCo, arXiv 2606.00271, for another), and a
learning rate tuned in one is wrong in the next by up to 1/(1 - momentum).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

OUTER_KINDS = ("sgd", "nesterov")


@dataclass(kw_only=True, slots=True)
class OuterOptimizerOptions:
    """``kind`` "sgd" (heavy-ball momentum, if any) or "nesterov"; the defaults are DiLoCo's (arXiv 2311.08105)."""

    kind: str = "nesterov"
    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if self.kind not in OUTER_KINDS:
            raise ValueError(f"kind is {self.kind!r}: one of {', '.join(OUTER_KINDS)}")
        if not (isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"lr is {self.lr!r}: must be above 0")
        if not (isfinite(self.momentum) and 0 <= self.momentum < 1):
            raise ValueError(f"momentum is {self.momentum!r}: must be at least 0 and below 1")
        if self.kind == "nesterov" and self.momentum == 0:
            raise ValueError('momentum is 0.0: kind "nesterov" needs some, kind "sgd" does without')


def outer_step(
    theta: Tensor, g: Tensor, momentum: Tensor | None, options: OuterOptimizerOptions
) -> tuple[Tensor, Tensor | None]:
    """Return (theta', momentum') after one step along the merged pseudo-gradient ``g``; the inputs stay as they are.

    All flat fp32 of one shape.  ``momentum`` is None before the first step and stays None where there is none::

        m <- mu m + g          (m <- g at the first step)
        theta <- theta - lr (g + mu m)     for "nesterov",     theta - lr m     for "sgd"

    Bit for bit ``torch.optim.SGD``: the additions with ``alpha`` are those of torch, one rounding where the processor
    has a fused multiply-add.  Bits are therefore equal on machines of one kind, for any number of threads.
    """
    if options.momentum == 0:
        return torch.add(theta, g, alpha=-options.lr), None
    following = g.clone() if momentum is None else momentum.mul(options.momentum).add_(g)
    direction = following if options.kind == "sgd" else torch.add(g, following, alpha=options.momentum)
    return torch.add(theta, direction, alpha=-options.lr), following
