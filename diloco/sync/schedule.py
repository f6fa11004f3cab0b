"""When a fragment is due at a site, counted in the site's own inner steps."""

from __future__ import annotations


def offset(fragment: int, num_fragments: int, inner_steps: int) -> int:
    """The inner step, modulo ``inner_steps``, at which ``fragment`` is due.

    Fragments are spread evenly over the period, so that the link carries a flat load instead of a burst (Streaming
    DiLoCo, arXiv 2501.18512, section 2.2).  The last fragment is due at 0, which with one fragment is DiLoCo's H.
    """
    assert 0 <= fragment < num_fragments <= inner_steps, (fragment, num_fragments, inner_steps)
    return ((fragment + 1) * inner_steps // num_fragments) % inner_steps


def local_steps(inner_steps: int, fastest_ns: int, own_ns: int) -> int:
    """The inner steps that a site makes while the fastest makes ``inner_steps``: dynamic local updates, with which all
    come at about the same time, whatever their speed (arXiv 2401.09135, section 4.2).

    ``fastest_ns`` and ``own_ns`` are what an inner step takes; 0: not known yet, and then the site is as fast as any.
    """
    if not (fastest_ns and own_ns):
        return inner_steps
    return min(inner_steps, max(1, inner_steps * fastest_ns // own_ns))


def is_due(step: int, offset: int, inner_steps: int, steps: int = 1) -> bool:
    """Whether a fragment with this ``offset`` is due right after inner step number ``step`` (counted from 1), or after
    one of the ``steps`` that end with it."""
    before = max(0, step - steps)
    return (step - offset) // inner_steps > (before - offset) // inner_steps
