"""What a link's figures ask of its two ends.

One connection carries no more in a round trip than its window holds: what the kernel lets one socket have on the way,
of which a part is taken by the kernel's own accounts.  A link whose rate times its round trip is more than that is
filled by several connections side by side, and by no other means that needs no privilege.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil, inf
from typing import TYPE_CHECKING

from diloco.sync.quorum import smoothed

if TYPE_CHECKING:
    from collections.abc import Sequence

SECOND_NS = 1_000_000_000
ROUND_TRIPS_KEPT = 64
TRANSFERS_KEPT = 3
"""The fastest of so many says what a link carries: what slows one down may be anything, and nothing makes one too fast.
Fewer would follow what is an accident, more would follow a link that has slowed down too late."""
TRANSFER_BYTES_MIN = 64 << 10
"""A smaller transfer says more of the round trip than of the rate."""

CHANNELS_MAX = 8
"""More connections gain nothing on any link that was measured, and each costs both ends memory."""
WINDOW_SHARE_PERCENT = 65
"""Of a socket's largest buffer, what is payload on the way: the rest are the kernel's own accounts of it."""


def channels_for(rtt_s: float, bytes_per_s: float, window_bytes: int) -> int:
    """How many connections fill a link of ``bytes_per_s`` over ``rtt_s``, from 1 to ``CHANNELS_MAX``.

    ``window_bytes`` is the largest buffer that the kernel gives one socket (``tcp_wmem``'s last figure where it sends,
    ``tcp_rmem``'s where it receives).  A link of which nothing is known yet (a figure of 0) gets one.
    """
    assert 0 <= rtt_s < inf, rtt_s
    assert 0 <= bytes_per_s < inf, bytes_per_s
    assert window_bytes >= 1, window_bytes
    needed = ceil(rtt_s * bytes_per_s * 100 / (WINDOW_SHARE_PERCENT * window_bytes))
    return min(max(needed, 1), CHANNELS_MAX)


def later_rate(seen: Sequence[tuple[int, int]]) -> float:
    """Bytes a second over the later half of the time in which bytes came; 0.0 where that is no time at all.

    ``seen`` has an instant (ns) and the bytes that had come by then, in order.  A connection begins slowly: what it
    carries later on is what the link can.
    """
    middle_ns = (seen[0][0] + seen[-1][0]) // 2
    # What had come by the middle counts from the last instant before it, so that few large steps are no less exact.
    began_ns, before = max((each for each in seen if each[0] <= middle_ns), key=lambda each: each[0])
    ended_ns, total = seen[-1]
    return (total - before) * SECOND_NS / (ended_ns - began_ns) if ended_ns > began_ns else 0.0


@dataclass(frozen=True, slots=True)
class LinkEstimate:
    """What a link was found to be lately; 0: not measured yet."""

    rtt_ns: int = 0
    """Of control calls, smoothed."""
    rtt_min_ns: int = 0
    """The shortest lately, in which nobody waits for anything but the way itself."""
    up_bytes_per_s: int = 0
    down_bytes_per_s: int = 0


class LinkEstimator:
    """Takes what was measured and says what the link is, in integers: the same samples give the same estimate.

    As BBR has it (Cardwell et al., ACM Queue 14(5), 2016), a path is its shortest round trip and its highest delivery
    rate, each over a window, because queues only lengthen the one and waiting only lowers the other.
    """

    def __init__(self) -> None:
        self._rtt_ns = 0
        self._round_trips: deque[int] = deque(maxlen=ROUND_TRIPS_KEPT)
        self._up: deque[int] = deque(maxlen=TRANSFERS_KEPT)
        self._down: deque[int] = deque(maxlen=TRANSFERS_KEPT)

    def answered(self, rtt_ns: int) -> None:
        """A control call was answered after ``rtt_ns``."""
        self._rtt_ns = smoothed(self._rtt_ns, max(1, rtt_ns))
        self._round_trips.append(max(1, rtt_ns))

    def carried_up(self, count: int, duration_ns: int) -> None:
        """``count`` bytes of an update went to the syncer, and its answer came, in ``duration_ns``."""
        self._carried(self._up, count, duration_ns, 1)

    def carried_down(self, count: int, duration_ns: int, round_trips: int = 1) -> None:
        """``count`` bytes of a version came in ``duration_ns``, from the question on, or without ``round_trips``."""
        self._carried(self._down, count, duration_ns, round_trips)

    def _carried(self, kept: deque[int], count: int, duration_ns: int, round_trips: int) -> None:
        """Round trips are none of the link's rate: the one until the answer to what was sent last, or asked first."""
        if count < TRANSFER_BYTES_MIN:
            return
        waited_ns = min(duration_ns // 2, round_trips * min(self._round_trips, default=0))
        kept.append(count * SECOND_NS // max(1, duration_ns - waited_ns))

    def estimate(self) -> LinkEstimate:
        """As far as it is known."""
        return LinkEstimate(
            self._rtt_ns, min(self._round_trips, default=0), max(self._up, default=0), max(self._down, default=0)
        )
