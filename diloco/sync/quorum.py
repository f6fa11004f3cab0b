"""Whether a round may close: who is needed, who arrived, and how long it waits for more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from diloco.sync.options import OuterOptions


@dataclass(frozen=True, slots=True)
class QuorumStanding:
    """``met``: enough distinct sites arrived.  ``complete``: every member did, so waiting for more is pointless."""

    met: bool
    complete: bool
    why: str


def standing(
    options: OuterOptions, members: Collection[str], live: Collection[str], arrived: Collection[str], waiting: int
) -> QuorumStanding:
    """Judge a round.

    ``members`` are the sites of the round (live when it opened and not lost since), ``live`` those live now,
    ``arrived`` those with at least one update waiting: an update counts even when its site has died meanwhile.
    ``waiting`` is how many updates wait.
    """
    if options.round_updates:
        # More than the live sites may send without a fate cannot be waited for.
        wanted = min(options.round_updates, max(1, len(live)) * options.updates_in_flight_max)
        return QuorumStanding(
            waiting >= wanted, waiting >= wanted, f"{waiting} updates are here, {wanted} make a round"
        )
    missing = sorted(set(live) - set(arrived))
    complete = not missing
    if len(arrived) < options.quorum_min:
        return QuorumStanding(False, False, f"{len(arrived)} of at least quorum_min={options.quorum_min} sites arrived")
    if options.quorum == "all":
        absent = sorted(set(members) - set(arrived))
        if absent:
            return QuorumStanding(False, False, f"waiting for {', '.join(absent)} of all {len(members)} members")
        return QuorumStanding(True, complete, f"all {len(members)} members arrived")
    assert isinstance(options.quorum, int)
    if len(arrived) < options.quorum:
        return QuorumStanding(False, False, f"{len(arrived)} of quorum={options.quorum} sites arrived")
    return QuorumStanding(True, complete, f"quorum={options.quorum} met by {', '.join(sorted(arrived))}")


def grace_ns(options: OuterOptions, step_ns: int, quorum_ns: int, sync_ns: int) -> int:
    """How long to wait for more sites once the quorum is met.

    Adaptive grace takes a share of the slack that the overlap leaves (Decoupled DiLoCo, arXiv 2604.21428:
    slack = τ·ξ_step − (ξ_quorum + ξ_sync)); it never exceeds ``options.grace_ns``.  ``step_ns`` is the slowest live
    site's usual step, ``quorum_ns`` the usual time to the quorum, ``sync_ns`` that of an outer step.
    """
    if options.grace == "fixed":
        return options.grace_ns
    slack_ns = options.overlap_steps * step_ns - (quorum_ns + sync_ns)
    return min(options.grace_ns, max(0, slack_ns) * options.grace_share_percent // 100)


def smoothed(previous_ns: int, sample_ns: int) -> int:
    """An exponential mean with factor one half, in integers so that a replay gives the same value."""
    return sample_ns if previous_ns == 0 else (previous_ns + sample_ns) // 2
