"""How fast a link must be for a share of the time to be spent training, layer by layer.

The forward pass takes a third of an inner step and the backward pass two thirds, each evenly over the layers.  What is
exchanged of a layer leaves when the backward pass of the step in which it is due has passed it, in the order in which
layers come by, over one link that carries one after the other; and the forward pass of the step that uses it waits for
it.  This is the simulation behind table 1 of Streaming DiLoCo (arXiv 2501.18512), which is for two sites: in an
all-reduce each of N sends 2 (N - 1)/N copies, and with two of them that is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco.sync.schedule import is_due, offset

if TYPE_CHECKING:
    from collections.abc import Sequence

FORWARD_SHARE = 1 / 3
GRID_GBPS = tuple(10 ** (-1 + 4 * index / 49) for index in range(50))
"""The bandwidths that the paper tried: 0.1 to 1000 Gbit/s, evenly by their logarithm."""
PERIODS = 3
"""After so many exchanges of everything the rhythm has settled."""
STEPS_MIN = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """``parameters`` over ``layers`` of one size; a site's inner step takes ``step_s`` without any exchange."""

    parameters: float
    layers: int
    step_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """``inner_steps`` between two exchanges of the same layer (1: data parallel), ``bits`` of each parameter.

    ``fragments`` are strided over the layers and take turns; what was exchanged in a step is used ``overlap_steps``
    after the next one.
    """

    inner_steps: int
    bits: float = 16.0
    fragments: int = 1
    overlap_steps: int = 0


def utilisation(model: Model, exchange: Exchange, gbps: float) -> float:
    """The share of the time that a site trains, where its link carries ``gbps`` each way."""
    assert model.layers >= exchange.fragments, (model, exchange)
    layers = range(model.layers)
    carry_s = model.parameters / model.layers * exchange.bits / (gbps * 1e9)
    forward_s = FORWARD_SHARE * model.step_s / model.layers
    backward_s = (1 - FORWARD_SHARE) * model.step_s / model.layers
    here_s, needed_in = [0.0] * model.layers, [0] * model.layers
    now_s = link_free_s = 0.0
    steps = max(STEPS_MIN, PERIODS * exchange.inner_steps)
    for step in range(1, steps + 1):
        for layer in layers:
            if needed_in[layer] == step:
                now_s = max(now_s, here_s[layer])
            now_s += forward_s
        due = set(_due(exchange, layers, step))
        for layer in reversed(layers):
            now_s += backward_s
            if layer in due:
                link_free_s = max(link_free_s, now_s) + carry_s
                here_s[layer], needed_in[layer] = link_free_s, step + 1 + exchange.overlap_steps
    return steps * model.step_s / now_s


def gbps_needed(model: Model, exchange: Exchange, share: float, grid: Sequence[float] = GRID_GBPS) -> float | None:
    """The least of ``grid``, in rising order, with which a site trains for ``share`` of the time; None: not even the
    last one is enough."""
    low, high = 0, len(grid)
    while low < high:
        middle = (low + high) // 2
        if utilisation(model, exchange, grid[middle]) >= share:
            high = middle
        else:
            low = middle + 1
    return grid[low] if low < len(grid) else None


def _due(exchange: Exchange, layers: range, step: int) -> list[int]:
    """The layers that are exchanged after ``step``."""
    found: list[int] = []
    for fragment in range(exchange.fragments):
        if is_due(step, offset(fragment, exchange.fragments, exchange.inner_steps), exchange.inner_steps):
            found += layers[fragment :: exchange.fragments]
    return found
