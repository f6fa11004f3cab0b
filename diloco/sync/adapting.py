"""What a site sends by, chosen from what its link carries: the codec of its updates, over how many connections they go,
and how many inner steps their exchange may take before the version is adopted (``sync/overlap.py``).

The link is busy with updates for some share of the time in which a site makes them.  Above ``BUSY_PERCENT_MAX`` updates
come late, and grow staler with every one that waits: then the largest codec that fits is taken, or the smallest.  Where
the next larger codec would leave half of the time free, it is taken back.  In between nothing changes, and nothing
changes on one look alone: ``AGREEING`` looks in a row must say the same, so that an accident of the link moves nothing.

A connection more is opened where the rate is near what those that are open can hold on the way, for then it may be
they, and not the link, that bound it; one is closed again where far fewer would carry the same.

The choice is for the next update that is sealed, and for no other.  Nothing of it is kept: a site that starts again
begins as it is configured, and finds the same in a few updates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco.sync.links import SECOND_NS, WINDOW_SHARE_PERCENT, channels_for
from diloco.sync.options import require
from diloco.sync.overlap import exchange_ns, overlap_for, steps_of

if TYPE_CHECKING:
    from diloco.sync.links import LinkEstimate

BUSY_PERCENT_MAX = 80
ROOM_PERCENT = 50
AGREEING = 2
FULL_PERCENT = 70
"""Of what the windows of all connections hold: from there on one more is tried."""


@dataclass(frozen=True, slots=True)
class Way:
    """A codec that is allowed, and at most how many bytes one update of every fragment has in it."""

    codec: str
    update_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptOptions:
    """What may be chosen from.  One way, one channel and one number of steps: nothing."""

    ways: tuple[Way, ...]
    """The first is the configured one."""
    version_bytes: int = 0
    """That come down with a version of every fragment; 0: not known."""
    num_fragments: int = 1
    inner_steps: int = 1
    """Between two updates of one fragment."""
    channels: int = 1
    """That one begins with."""
    channels_max: int = 1
    window_bytes: int = 4 << 20
    """The largest buffer that the kernel gives a socket that sends."""
    overlap_steps: int = 0
    """That one begins with, and the fewest."""
    overlap_steps_max: int = 0

    def __post_init__(self) -> None:
        require(len(self.ways) >= 1, "ways", self.ways, "at least one")
        names = [way.codec for way in self.ways]
        require(len(set(names)) == len(names), "ways", names, "each codec once")
        for field in ("num_fragments", "inner_steps", "window_bytes"):
            require(getattr(self, field) >= 1, field, getattr(self, field), "at least 1")
        wanted = f"1 to channels_max={self.channels_max}"
        require(1 <= self.channels <= self.channels_max, "channels", self.channels, wanted)
        most = self.overlap_steps_max
        require(0 <= self.overlap_steps <= most, "overlap_steps", self.overlap_steps, f"0 to overlap_steps_max={most}")
        # Else the next update would be measured before the version that answers this one may be adopted.
        require(most < self.inner_steps, "overlap_steps_max", most, f"below inner_steps={self.inner_steps}")


@dataclass(frozen=True, slots=True)
class Choice:
    """``why`` is empty where everything is as it was configured."""

    codec: str
    channels: int
    overlap_steps: int = 0
    why: str = ""


class Adapter:
    """One site's choice, and how long something else has been better."""

    def __init__(self, options: AdaptOptions) -> None:
        self._options = options
        self._ways = sorted(options.ways, key=lambda way: (-way.update_bytes, way.codec))
        self._at = self._ways.index(options.ways[0])
        self._codecs, self._channels, self._overlaps = _Agreement(), _Agreement(), _Agreement()
        self.choice = Choice(options.ways[0].codec, options.channels, options.overlap_steps)

    def choose(self, link: LinkEstimate, step_ns: int, round_ns: int = 0) -> Choice:
        """The choice for an update that is sealed now.

        ``step_ns`` is what an inner step takes, ``round_ns`` what a round at the syncer does; 0: not known.
        """
        before, whys = self.choice, []
        if step_ns and link.up_bytes_per_s:
            at = self._wanted(link, step_ns)
            if self._codecs.reached(at - self._at):
                whys.append(self._why(at, link, step_ns))
                self._at = at
        channels = self._wanted_channels(link)
        if self._channels.reached(channels - before.channels):
            whys.append(f"{channels} connections for {_rate(link)} over {link.rtt_min_ns / 1e6:.0f} ms")
        else:
            channels = before.channels
        exchange = self._exchange_ns(link, round_ns)
        overlap = overlap_for(exchange, step_ns, before.overlap_steps, *self._overlap_range())
        if self._overlaps.reached(overlap - before.overlap_steps):
            whys.append(self._why_overlap(overlap, exchange, round_ns, step_ns))
        else:
            overlap = before.overlap_steps
        if whys:
            self.choice = Choice(self._ways[self._at].codec, channels, overlap, "; ".join(whys))
        return self.choice

    def exchange_steps(self, link: LinkEstimate, step_ns: int, round_ns: int = 0) -> int:
        """Inner steps that pass while one update goes up, is merged, and its version comes down; 0: not known.

        What a site trains in that time it trains on values that others have moved on from: τ of Streaming DiLoCo.
        """
        return steps_of(self._exchange_ns(link, round_ns), step_ns)

    def _exchange_ns(self, link: LinkEstimate, round_ns: int) -> int:
        """Of one fragment of the usual size."""
        options, up_bytes = self._options, self._ways[self._at].update_bytes
        count = options.num_fragments
        return exchange_ns(link, up_bytes // count, options.version_bytes // count, round_ns)

    def _overlap_range(self) -> tuple[int, int]:
        return self._options.overlap_steps, self._options.overlap_steps_max

    def _why_overlap(self, overlap: int, exchange: int, round_ns: int, step_ns: int) -> str:
        least, most = self._overlap_range()
        return (
            f"an exchange takes {exchange / 1e9:.3g} s, {round_ns / 1e9:.3g} of it at the syncer, and an inner step "
            f"{step_ns / 1e9:.3g} s: a version is adopted {overlap} steps after its update ({least} to {most} allowed)"
        )

    def _wanted(self, link: LinkEstimate, step_ns: int) -> int:
        busy = [self._busy_percent(way, link, step_ns) for way in self._ways]
        if busy[self._at] > BUSY_PERCENT_MAX:
            fits = (at for at in range(self._at + 1, len(busy)) if busy[at] <= BUSY_PERCENT_MAX)
            return next(fits, len(busy) - 1)
        if self._at > 0 and busy[self._at - 1] <= ROOM_PERCENT:
            return self._at - 1
        return self._at

    def _busy_percent(self, way: Way, link: LinkEstimate, step_ns: int) -> int:
        """Of the time between two updates of a fragment, in which one of every fragment goes up."""
        waiting_ns = 2 * link.rtt_min_ns * self._options.num_fragments
        up_ns = way.update_bytes * SECOND_NS // link.up_bytes_per_s + waiting_ns
        return 100 * up_ns // (step_ns * self._options.inner_steps)

    def _why(self, at: int, link: LinkEstimate, step_ns: int) -> str:
        old, new = (self._ways[index] for index in (self._at, at))
        shares = [self._busy_percent(way, link, step_ns) for way in (old, new)]
        every_s = step_ns * self._options.inner_steps / 1e9
        return (
            f"at {_rate(link)} updates in {old.codec} take {shares[0]} % of the {every_s:.3g} s between two of them, "
            f"in {new.codec} {shares[1]} %"
        )

    def _wanted_channels(self, link: LinkEstimate) -> int:
        options, now = self._options, self.choice.channels
        if not (link.rtt_min_ns and link.up_bytes_per_s):
            return now
        held = options.window_bytes * WINDOW_SHARE_PERCENT // 100
        # All in bytes that are on the way within a round trip, times a second.
        under_way, one = link.up_bytes_per_s * link.rtt_min_ns, held * SECOND_NS
        if now < options.channels_max and 100 * under_way >= FULL_PERCENT * now * one:
            return now + 1
        enough = channels_for(link.rtt_min_ns / 1e9, float(link.up_bytes_per_s), options.window_bytes)
        return now - 1 if enough < now and 2 * under_way < (now - 1) * one else now


class _Agreement:
    """How many looks in a row have wanted a change the same way."""

    def __init__(self) -> None:
        self._sign = 0
        self._count = 0

    def reached(self, change: int) -> bool:
        """One more look, which wants ``change`` (0: none); whether enough have wanted that."""
        sign = (change > 0) - (change < 0)
        self._count = self._count + 1 if sign and sign == self._sign else abs(sign)
        self._sign = sign
        if self._count < AGREEING:
            return False
        self._sign = self._count = 0
        return True


def _rate(link: LinkEstimate) -> str:
    return f"{link.up_bytes_per_s * 8 / 1e6:.3g} Mbit/s"
