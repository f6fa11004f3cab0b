"""What a link's figures ask of its two ends.

One connection carries no more in a round trip than its window holds: what the kernel lets one socket have on the way,
of which a part is taken by the kernel's own accounts.  A link whose rate times its round trip is more than that is
filled by several connections side by side, and by no other means that needs no privilege.
"""

from __future__ import annotations

from math import ceil, inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

SECOND_NS = 1_000_000_000

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
