"""What a link's figures ask of its two ends.

One connection carries no more in a round trip than its window holds: what the kernel lets one socket have on the way,
of which a part is taken by the kernel's own accounts.  A link whose rate times its round trip is more than that is
filled by several connections side by side, and by no other means that needs no privilege.
"""

from __future__ import annotations

from math import ceil, inf

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
