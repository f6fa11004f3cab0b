"""What a site says of an update and the syncer cannot count itself, and how much of it is believed.

- *steps*: those that there was time for since the site's updates before (:func:`believed_steps`).
  Norms are compared by the steps that are believed.  ``STEPS_RATIO_MAX`` times as many are implausible.
- *tokens*: of a step, ``TOKENS_RATIO_MAX`` times those of the site's first update, which has at most
  ``NEWCOMER_RATIO_MAX`` times those of the others.  More are implausible.  Where units of the data are leased, a step
  may read what counts no more, so that one says nothing of the next, and the bound is ``STEP_TOKENS_MAX``.
- *step_ns*: no less than a part of what is usual at the other sites (:func:`fastest_step_ns`), and where it makes a
  grace no more than the time between the site's updates (:func:`period_ns`).
- *cursor*: it moves the data of the site alone.  *spans*: ``unit_leases`` knows which units were leased to the site.
- The norm, the cosine and the digest of the values are the syncer's own.

An honest site is far from each bound.  Only the first update of a run has nothing to be compared with: its steps are
bounded by the time since its site joined, its tokens by ``STEP_TOKENS_MAX`` a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.sync.events import UpdateArrived
    from diloco.sync.options import OuterOptions
    from diloco.sync.state import Line, OuterState, Site

STEPS_RATIO_MAX = 64
"""Steps beside those that are believed: a syncer whose clock was wrong while it was away may believe too few."""
TOKENS_RATIO_MAX = 16
"""Batches grow in the course of a run, and a site may start again with others."""
NEWCOMER_RATIO_MAX = 64
STEP_TOKENS_MAX = 1 << 26
ARRIVALS_KEPT = 16
STEPS_MIN, STEP_NS_MIN = 1000, 10_000
"""Where nothing is usual yet: so many steps, and one for so much time, are always believed."""
AWAY_UNKNOWN_NS = 10 * 365 * 86_400 * 1_000_000_000
"""For how long there was no syncer where nobody has said it: what the sites say of that time is believed."""
UNEQUAL_MAX = 8
"""How many times the steps of an update, and the steps in the same time, of most other sites a site may have."""


def implausible(state: OuterState, options: OuterOptions, event: UpdateArrived) -> str:
    """Why what is said of an update cannot be true; empty where it can."""
    line = state.sites[event.site].lines[event.fragment]
    believed = believed_steps(state, options, event)
    if event.steps > STEPS_RATIO_MAX * believed:
        return f"steps is {event.steps}, and there was time for {believed}"
    others = _median([other.step_tokens for other in _others(state, event) if other.step_tokens])
    bound, why = STEP_TOKENS_MAX, "as at any site"
    if line.step_tokens and not options.unit_sequences:
        bound, why = TOKENS_RATIO_MAX * line.step_tokens, f"{TOKENS_RATIO_MAX} times its first {line.step_tokens}"
    elif others and not options.unit_sequences:
        bound, why = NEWCOMER_RATIO_MAX * others, f"{NEWCOMER_RATIO_MAX} times the {others} of others"
    if event.tokens > bound * believed:
        return f"tokens is {event.tokens}, and {believed} steps have at most {bound} each, {why}"
    return ""


def believed_steps(state: OuterState, options: OuterOptions, event: UpdateArrived) -> int:
    """How many of an update's steps are believed: those of a usual update, and of twice the time that there was.

    They were made after the update before was sealed, for which there had to be room: ``updates_in_flight_max`` before
    that one had come.  A site that could not send goes on training, also while no syncer runs
    (``SyncerStarted.away_ns``).
    """
    line = state.sites[event.site].lines[event.fragment]
    if event.steps <= line.usual_steps:
        return event.steps
    elsewhere = _median([each.usual_steps for each in _others(state, event) if each.usual_steps])
    usual_steps = min(line.usual_steps or elsewhere, UNEQUAL_MAX * (elsewhere or line.usual_steps)) or STEPS_MIN
    usual_ns = _median([site.step_ns for site in state.sites.values() if site.step_ns])
    step_ns = max(state.sites[event.site].step_ns, usual_ns // UNEQUAL_MAX) or STEP_NS_MIN
    since_ns = line.arrivals_ns[-options.updates_in_flight_max - 1 :] or [0]
    elapsed_ns = state.now_ns + state.away_ns - since_ns[0]
    return min(event.steps, usual_steps + 2 * elapsed_ns // step_ns)


def arrived(state: OuterState, event: UpdateArrived) -> None:
    """An update is accepted: the next one of its line is compared with it."""
    line = state.sites[event.site].lines[event.fragment]
    line.arrivals_ns = [*line.arrivals_ns, state.now_ns + state.away_ns][-ARRIVALS_KEPT:]
    line.step_tokens = line.step_tokens or -(-event.tokens // event.steps)


def fastest_step_ns(state: OuterState, live: Sequence[str]) -> int:
    """What an inner step takes at the fastest of the ``live`` sites; 0 before any is known."""
    known = [step_ns for name in live if (step_ns := state.sites[name].step_ns)]
    return max(min(known), _median(known) // UNEQUAL_MAX) if known else 0


def period_ns(site: Site, index: int) -> int:
    """The usual time between two updates of ``site``: what it says of its steps, and no more than the syncer has seen
    between its updates; 0 before any was merged."""
    return min(site.lines[index].usual_steps * site.step_ns, seen_ns(site, index))


def seen_ns(site: Site, index: int) -> int:
    """The time between the last updates of ``site``, and before the first; 0 before any came."""
    arrivals = site.lines[index].arrivals_ns
    return (arrivals[-1] - arrivals[0]) // (len(arrivals) - 1) if len(arrivals) > 1 else 0


def _others(state: OuterState, event: UpdateArrived) -> list[Line]:
    return [site.lines[event.fragment] for name, site in state.sites.items() if name != event.site]


def _median(values: Sequence[int]) -> int:
    return sorted(values)[len(values) // 2] if values else 0
