"""How many inner steps an exchange takes, and how many a site lets pass before it adopts what came of it: τ.

From the instant at which an update is measured the others go on, and so does the site.  What an exchange costs is its
bytes both ways, three round trips, and the round at the syncer, in which it waits for others and steps.  A site that
adapts lets as many of its own steps pass as that takes, within what it is allowed: a version is then adopted at about
the same step of each period, with all that was published meanwhile, and in one pass over the model instead of several.
Nobody waits for a version that comes later: it is adopted when it is here.

More is taken at once (when two looks agree); less only where an exchange that took a quarter longer would still fit,
so that a link between two figures does not move it to and fro.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from diloco.sync.events import FateTold, JoinAnswered, Outcome, PushAnswered, VersionFetched

if TYPE_CHECKING:
    from diloco.sync.events import Fate, LearnerEvent
    from diloco.sync.links import LinkEstimate

SECOND_NS = 1_000_000_000
ROUND_TRIPS = 3
"""To be let in, to be answered after the last byte, and to ask for the version."""
ROUNDS_KEPT = 5
STEPS_MAX = 1_000_000
SPARE_PERCENT = 25
"""By so much an exchange may grow before fewer steps than now would be too few again."""


def exchange_ns(link: LinkEstimate, up_bytes: int, down_bytes: int, round_ns: int) -> int:
    """From the seal of an update of ``up_bytes`` until its version, of ``down_bytes``, is here; 0: not known yet.

    ``round_ns`` is the time between its acceptance and its fate; 0 where none was seen yet.
    """
    if not (link.up_bytes_per_s and link.down_bytes_per_s):
        return 0
    up_ns = up_bytes * SECOND_NS // link.up_bytes_per_s
    down_ns = down_bytes * SECOND_NS // link.down_bytes_per_s
    return up_ns + down_ns + round_ns + ROUND_TRIPS * link.rtt_min_ns


def steps_of(duration_ns: int, step_ns: int) -> int:
    """Inner steps that pass in ``duration_ns``, the last one counted whole; 0 where a figure is not known."""
    return min(-(-duration_ns // step_ns), STEPS_MAX) if step_ns else 0


def overlap_for(exchange_ns: int, step_ns: int, now: int, least: int, most: int) -> int:
    """The inner steps to let pass, from ``least`` to ``most``, where it is ``now`` so many.

    With the same ``now`` a longer exchange never gives fewer.  A figure that is not known (0) moves nothing.
    """
    assert 0 <= least <= now <= most, (least, now, most)
    if not (exchange_ns and step_ns):
        return now
    needed = steps_of(exchange_ns, step_ns)
    if needed > now:
        return min(needed, most)
    spared = steps_of(exchange_ns * (100 + SPARE_PERCENT) // 100, step_ns)
    return max(min(spared, now), least)


class RoundTimes:
    """How long the syncer keeps an update before its version is there, by the events that a site is told anyway.

    Both words come the same way, so that the way itself is not in it.
    """

    def __init__(self) -> None:
        self._accepted: dict[int, tuple[int, int]] = {}
        """For each fragment the sequence of the update that was accepted last, and when."""
        self._rounds: deque[int] = deque(maxlen=ROUNDS_KEPT)

    def heard(self, event: LearnerEvent, now_ns: int) -> None:
        """One of the site's events."""
        if isinstance(event, PushAnswered):
            if event.outcome is Outcome.ACCEPTED:
                self._accepted[event.fragment] = (event.sequence, now_ns)
        elif isinstance(event, FateTold):
            self._decided(event.fate, now_ns)
        elif isinstance(event, VersionFetched):
            for fate in event.fates:
                self._decided(fate, now_ns)
        elif isinstance(event, JoinAnswered):
            self._accepted.clear()  # A restored run gives the same numbers again.

    def _decided(self, fate: Fate, now_ns: int) -> None:
        sequence, since_ns = self._accepted.get(fate.fragment, (0, 0))
        if sequence and sequence == fate.sequence:
            del self._accepted[fate.fragment]
            if fate.merged:
                self._rounds.append(max(1, now_ns - since_ns))

    def usual_ns(self) -> int:
        """The middle one of the last; 0: none yet."""
        return sorted(self._rounds)[len(self._rounds) // 2] if self._rounds else 0
