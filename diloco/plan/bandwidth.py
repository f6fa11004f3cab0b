"""Simulate how fast a link must be for a given share of the time to be spent training.

``utilisation`` works layer by layer.  The forward pass takes a third of an inner step and the backward pass two thirds,
each evenly over the layers.  When a layer is due, its exchange starts once the backward pass of that step has passed
it.  One link carries the layers one after the other, in that order, and the forward pass of the step that uses a layer
waits for it.  This is the simulation behind table 1 of Streaming DiLoCo (arXiv 2501.18512), which is for two sites: in
an all-reduce each of N sites sends 2 (N - 1)/N copies, which is one copy for two sites.

``star_utilisation`` is for sites around a syncer, fragment by fragment: an update leaves when its inner step is over,
the merge waits for all sites, the version comes back, and the step that uses it waits for it.  In this project only
sites in lock-step wait so; the others train on, and a late version has a correspondingly higher staleness.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from diloco.sync.options import due, even_offsets

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FORWARD_SHARE = 1 / 3
GRID_GBPS = tuple(10 ** (-1 + 4 * index / 49) for index in range(50))
"""The bandwidths that the paper tried: 0.1 to 1000 Gbit/s, evenly spaced by logarithm."""
PERIODS = 3
"""How many exchanges of the whole model are simulated.  The first one warms up and is not counted."""
STEPS_MIN = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A model of ``layers`` equal layers; a site's inner step takes ``step_s`` without any exchange."""

    parameters: float
    layers: int
    step_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """``inner_steps`` between two exchanges of the same layer (1: data parallel), with ``bits`` for each parameter.

    ``fragments`` are strided over the layers and take turns; a layer exchanged after step s is used in step
    s + 1 + ``overlap_steps``.
    """

    inner_steps: int
    bits: float = 16.0
    fragments: int = 1
    overlap_steps: int = 0


def utilisation(model: Model, exchange: Exchange, gbps: float) -> float:
    """Return the share of the time that a site trains after warm-up, with a link of ``gbps`` (10^9 bit/s) each way.

    Counts whole periods of ``exchange.inner_steps`` from the end of the first one, so that each of them contains one
    wait for every layer.
    """
    assert model.layers >= exchange.fragments, (model, exchange)
    assert exchange.overlap_steps < exchange.inner_steps, exchange
    layers, firsts = range(model.layers), even_offsets(exchange.fragments, exchange.inner_steps)
    carry_s = model.parameters / model.layers * exchange.bits / (gbps * 1e9)
    forward_s = FORWARD_SHARE * model.step_s / model.layers
    backward_s = (1 - FORWARD_SHARE) * model.step_s / model.layers
    here_s, needed_in = [0.0] * model.layers, [0] * model.layers
    now_s = link_free_s = settled_s = 0.0
    periods = max(PERIODS, ceil(STEPS_MIN / exchange.inner_steps))
    for step in range(1, periods * exchange.inner_steps + 1):
        for layer in layers:
            if needed_in[layer] == step:
                now_s = max(now_s, here_s[layer])
            now_s += forward_s
        fragments = set(due(firsts, exchange.inner_steps, step))
        for layer in reversed(layers):
            now_s += backward_s
            if layer % exchange.fragments in fragments:
                link_free_s = max(link_free_s, now_s) + carry_s
                here_s[layer], needed_in[layer] = link_free_s, step + 1 + exchange.overlap_steps
        if step == exchange.inner_steps:
            settled_s = now_s
    period_s = exchange.inner_steps * model.step_s
    # A link that is slightly too slow falls behind for many periods before the site waits for it.
    carried_s = model.layers * carry_s
    return min((periods - 1) * period_s / (now_s - settled_s), period_s / max(carried_s, period_s))


def gbps_needed(model: Model, exchange: Exchange, share: float, grid: Sequence[float] = GRID_GBPS) -> float | None:
    """Return the least of ``grid``, in rising order, with which a site trains for ``share`` of the time, in Gbit/s;
    None: not even the last one is enough."""
    return least(grid, lambda gbps: utilisation(model, exchange, gbps) >= share)


def least(grid: Sequence[float], enough: Callable[[float], bool]) -> float | None:
    """Return the first value of ``grid`` that is ``enough``, by bisection; all after it must be too.  None: none is."""
    place = bisect_left(grid, True, key=enough)
    return grid[place] if place < len(grid) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Star:
    """The timing of sites around a syncer: ``inner_steps`` of ``step_s`` between two exchanges of a fragment.

    A version is used ``overlap_steps`` after the step that follows its update; ``merge_s`` is for one fragment.
    """

    inner_steps: int
    step_s: float
    fragments: int = 1
    overlap_steps: int = 0
    rtt_s: float = 0.0
    merge_s: float = 0.0

    @property
    def period_s(self) -> float:
        """The training time between two exchanges of the same fragment, in seconds."""
        return self.inner_steps * self.step_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Bits through one site's link while every fragment is exchanged once: updates first, then versions.

    A site that holds a part of the syncer also receives the other sites' updates and sends them versions.
    """

    updates_up: float
    updates_down: float = 0.0
    versions_up: float = 0.0
    versions_down: float

    @property
    def up(self) -> float:
        """Bits up, for updates and versions."""
        return self.updates_up + self.versions_up

    @property
    def down(self) -> float:
        """Bits down, for updates and versions."""
        return self.updates_down + self.versions_down


def star_utilisation(star: Star, load: Load, up_gbps: float, down_gbps: float) -> float:
    """Return the share of the time that a site trains after warm-up, with a link of ``up_gbps`` and ``down_gbps``."""
    assert star.overlap_steps < star.inner_steps, star
    share_up, share_down = 1e-9 / (up_gbps * star.fragments), 1e-9 / (down_gbps * star.fragments)
    updates_s = (load.updates_up * share_up, load.updates_down * share_down)
    versions_s = (load.versions_up * share_up, load.versions_down * share_down)
    due = set(even_offsets(star.fragments, star.inner_steps))
    free_s, here_s = [0.0, 0.0], dict[int, float]()
    waiting: deque[tuple[float, int]] = deque()  # Merged versions: when merged, and the step that uses them.
    now_s = settled_s = 0.0
    for step in range(1, PERIODS * star.inner_steps + 1):
        while waiting and waiting[0][1] <= step:
            since_s, used_in = waiting.popleft()
            here_s[used_in] = _carried(free_s, since_s, versions_s) + star.rtt_s / 2
        now_s = max(now_s, here_s.pop(step, 0.0)) + star.step_s
        if step == star.inner_steps:
            settled_s = now_s
        while waiting and waiting[0][0] <= now_s:
            since_s, used_in = waiting.popleft()
            here_s[used_in] = _carried(free_s, since_s, versions_s) + star.rtt_s / 2
        if step % star.inner_steps in due:
            merged_s = _carried(free_s, now_s, updates_s) + star.rtt_s / 2 + star.merge_s
            waiting.append((merged_s, step + 1 + star.overlap_steps))
    # A link that is slightly too slow falls behind for many periods before the site waits for it.
    busiest_s = max(load.up / up_gbps, load.down / down_gbps) * 1e-9
    return min((PERIODS - 1) * star.period_s / (now_s - settled_s), star.period_s / max(busiest_s, star.period_s))


def _carried(free_s: list[float], since_s: float, takes_s: tuple[float, float]) -> float:
    """Return when both directions have carried a load that waits since ``since_s``; update ``free_s``.

    ``takes_s`` is the time of the load up and down; a direction with 0 is skipped.
    """
    end_s = since_s
    for link, seconds in enumerate(takes_s):
        if seconds:
            free_s[link] = max(free_s[link], since_s) + seconds
            end_s = max(end_s, free_s[link])
    return end_s
