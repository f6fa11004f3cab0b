"""How fast bulk goes over a far link whose rate nobody has told: as fast as it was seen to arrive, and no faster.

Connections that go on probing for more fill the queue in front of a link and lose what overflows it, and short
transfers give them no time to settle.  So bulk is held to what the link carried lately.  Where all of that arrives,
the next transfer tries a little more; where it does not, the rate of the link is found, and is left alone for some
transfers.
"""

from __future__ import annotations

from collections import deque

RECENT = 3
"""The fastest of so many transfers says what the link carries: anything may slow one down."""
MORE_PERCENT = 110
MORE_AT_FIRST_PERCENT = 130
"""Of what arrived lately: what is tried next, and what is as long as the rate of the link was never found."""
ALL_PERCENT = 95
"""Of what was sent at: a transfer that arrives so fast was held back by nothing else."""
FOUND_PERCENT = 98
"""Of what the link carries: what is sent at then, so that the queue in front of it empties."""
LEFT_ALONE = 5
"""Transfers at a rate that was found, before more is tried again."""
RATE_MAX = 400_000_000
"""Bytes a second; what is faster is bound by the machines at its ends and not by its queue, and is not held back."""
SPAN_MIN_NS = 200_000_000
"""A shorter transfer says more of the round trip than of the rate."""


class Pace:
    """One direction of a link; from the rates at which transfers arrived to the one at which to send."""

    def __init__(self) -> None:
        self.bytes_per_s = 0
        """0: not known yet, or more than one has to be careful with."""
        self._recent: deque[int] = deque(maxlen=RECENT)
        self._left_alone = 0
        self._more_percent = MORE_AT_FIRST_PERCENT

    def carried(self, bytes_per_s: int, sent_at: int) -> None:
        """A transfer that was sent at ``sent_at`` (0: unheld) arrived at so many bytes a second."""
        self._recent.append(max(1, bytes_per_s))
        best = max(self._recent)
        if best > RATE_MAX:
            self.bytes_per_s = self._left_alone = 0
        elif 100 * best < ALL_PERCENT * sent_at:
            self.bytes_per_s, self._left_alone = FOUND_PERCENT * best // 100, LEFT_ALONE
            self._more_percent = MORE_PERCENT
        elif self._left_alone:
            self._left_alone -= 1
        else:
            self.bytes_per_s = self._more_percent * best // 100
