"""Whether a round may close: who is needed, who arrived, and how long it waits for more."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from collections.abc import Set as AbstractSet

    from diloco.sync.options import OuterOptions


class QuorumStanding(NamedTuple):
    """``met``: enough distinct sites arrived.  ``complete``: every member did, so waiting for more is pointless."""

    met: bool
    complete: bool
    why: Callable[[], str]
    """In words, which take longer than to judge."""


def standing(
    options: OuterOptions,
    members: Sequence[str],
    live: AbstractSet[str],
    arrived: AbstractSet[str],
    waiting: int,
) -> QuorumStanding:
    """Judge a round.

    ``members`` are the sites of the round (live when it opened and not lost since), ``live`` those live now,
    ``arrived`` those with at least one update waiting: an update counts even when its site has died meanwhile.
    ``waiting`` is how many updates wait.
    """
    here = len(arrived)
    if options.round_updates:
        # More than the live sites may send without a fate cannot be waited for.
        wanted = min(options.round_updates, max(1, len(live)) * options.updates_in_flight_max)
        enough = waiting >= wanted
        return QuorumStanding(enough, enough, lambda: f"{waiting} updates are here, {wanted} make a round")
    complete = live <= arrived
    if here < options.quorum_min:
        least = options.quorum_min
        return QuorumStanding(False, False, lambda: f"{here} of at least quorum_min={least} sites arrived")
    if options.quorum == "all":
        if len(members) > here or not arrived >= set(members):
            return QuorumStanding(False, False, lambda: _absent(members, arrived))
        return QuorumStanding(True, complete, lambda: f"all {len(members)} members arrived")
    quorum = options.quorum
    assert isinstance(quorum, int)
    if here < quorum:
        return QuorumStanding(False, False, lambda: f"{here} of quorum={quorum} sites arrived")
    return QuorumStanding(True, complete, lambda: f"quorum={quorum} met by {', '.join(sorted(arrived))}")


def _absent(members: Sequence[str], arrived: AbstractSet[str]) -> str:
    absent = sorted(set(members) - arrived)
    return f"waiting for {', '.join(absent)} of all {len(members)} members"


def grace_ns(options: OuterOptions, step_ns: int, quorum_ns: int, sync_ns: int, period_ns: int = 0) -> int:
    """How long to wait for more sites once the quorum is met.

    Adaptive grace takes a share of the slack that the overlap leaves (Decoupled DiLoCo, arXiv 2604.21428:
    slack = τ·ξ_step − (ξ_quorum + ξ_sync)), at most ``options.grace_ns``, but no less than ``grace_period_percent`` of
    a period, which is what it takes to bring equal sites into one round.  ``step_ns`` is the slowest live site's usual
    step, ``quorum_ns`` the usual time to the quorum, ``sync_ns`` that of an outer step, ``period_ns`` the fastest live
    site's usual time between two updates.
    """
    if options.grace == "fixed":
        return options.grace_ns
    slack_ns = options.overlap_steps * step_ns - (quorum_ns + sync_ns)
    wanted_ns = max(0, slack_ns) * options.grace_share_percent // 100
    return max(min(options.grace_ns, wanted_ns), period_ns * options.grace_period_percent // 100)


def smoothed(previous_ns: int, sample_ns: int) -> int:
    """An exponential mean with factor one half, in integers so that a replay gives the same value."""
    return sample_ns if previous_ns == 0 else (previous_ns + sample_ns) // 2
