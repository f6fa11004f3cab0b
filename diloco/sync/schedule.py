"""When a fragment is due at a site, counted in the site's own inner steps."""

from __future__ import annotations


def offset(fragment: int, num_fragments: int, inner_steps: int) -> int:
    """The inner step, modulo ``inner_steps``, at which ``fragment`` is due.

    Fragments are spread evenly over the period, so that the link carries a flat load instead of a burst (Streaming
    DiLoCo, arXiv 2501.18512, section 2.2).  The last fragment is due at 0, which with one fragment is DiLoCo's H.
    """
    assert 0 <= fragment < num_fragments <= inner_steps, (fragment, num_fragments, inner_steps)
    return ((fragment + 1) * inner_steps // num_fragments) % inner_steps


def is_due(step: int, offset: int, inner_steps: int) -> bool:
    """Whether a fragment with this ``offset`` is due right after inner step number ``step`` (counted from 1)."""
    return step > 0 and step % inner_steps == offset
