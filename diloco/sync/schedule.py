"""When a fragment is due at a site, counted in the site's own inner steps."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=64)
def offsets(num_fragments: int, inner_steps: int) -> tuple[int, ...]:
    """The inner step, modulo ``inner_steps``, at which each fragment is due.

    Fragments are spread evenly over the period, so that the link carries a flat load instead of a burst (Streaming
    DiLoCo, arXiv 2501.18512, section 2.2).  The last fragment is due at 0, which with one fragment is DiLoCo's H.
    """
    assert 0 < num_fragments <= inner_steps, (num_fragments, inner_steps)
    return tuple(place * inner_steps // num_fragments % inner_steps for place in range(1, num_fragments + 1))


def local_steps(inner_steps: int, fastest_ns: int, own_ns: int, rounding: str = "down") -> int:
    """The inner steps that a site makes while the fastest makes ``inner_steps``: dynamic local updates, with which all
    come at about the same time, whatever their speed (arXiv 2401.09135, section 4.2).

    ``fastest_ns`` and ``own_ns`` are what an inner step takes; 0: not known yet, and then the site is as fast as any.
    ``rounding`` is ``down``, as there, or ``up``, as in HALoS' code (arXiv 2506.04531); at least one step either way.
    """
    if not (fastest_ns and own_ns):
        return inner_steps
    steps, rest = divmod(inner_steps * fastest_ns, own_ns)
    return min(inner_steps, max(1, steps + (rounding == "up" and rest > 0)))


def due(offsets: tuple[int, ...], inner_steps: int, step: int, steps: int = 1) -> tuple[int, ...]:
    """The fragments, of which these are the offsets, that are due right after inner step number ``step`` (counted from
    1), or after one of the ``steps`` that end with it."""
    return _due(offsets, inner_steps, step % inner_steps, min(steps, step))


def steps_to_due(offsets: tuple[int, ...], inner_steps: int, step: int) -> int:
    """The inner steps from ``step`` to the next after which any fragment is due; at least 1."""
    return _steps_to_due(offsets, inner_steps, step % inner_steps)


@lru_cache(maxsize=4096)
def _steps_to_due(offsets: tuple[int, ...], inner_steps: int, place: int) -> int:
    return min(inner_steps - (place - at) % inner_steps for at in offsets)


@lru_cache(maxsize=4096)
def _due(offsets: tuple[int, ...], inner_steps: int, place: int, steps: int) -> tuple[int, ...]:
    return tuple(each for each, at in enumerate(offsets) if (place - at) % inner_steps < steps)
