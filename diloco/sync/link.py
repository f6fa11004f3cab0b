"""What a site measures of its link, and what it chooses by that: rates, connections, codec and overlap.

Connections.  One connection carries no more in a round trip than its window holds: what the kernel lets one socket have
on the way, of which a part is taken by the kernel's own accounts.  A link whose rate times its round trip is more than
that is filled by several connections side by side, and by no other means that needs no privilege.

Pace.  Over a far link of unknown rate bulk goes as fast as it was seen to arrive, and no faster.  Connections that go
on probing for more fill the queue in front of a link and lose what overflows it, and short transfers give them no time
to settle.  So bulk is held to what the link carried lately.  Where all of that arrives, the next transfer tries a
little more; where it does not, the rate of the link is found, and is left alone for some transfers.

Overlap (τ): the inner steps that an exchange takes, and that a site lets pass before it adopts the result.  From the
instant at which an update is measured the others go on, and so does the site.  What an exchange costs is its bytes both
ways, three round trips, and the round at the syncer, in which it waits for others and steps.  A site that adapts lets
as many of its own steps pass as that takes, within what it is allowed: a version is then adopted at about the same step
of each period, with all that was published meanwhile, and in one pass over the model instead of several.  A version
that comes later is adopted when it is here.

More is taken at once (when two looks agree); less only where an exchange that took a quarter longer would still fit, so
that a link between two figures does not move it to and fro.

Choice.  The link is busy with updates for some share of the time in which a site makes them.  Above
``BUSY_PERCENT_MAX`` updates come late, and grow staler with every one that waits: then the largest codec that fits is
taken, or the smallest.  Where the next larger codec would leave half of the time free, it is taken back.  In between
nothing changes, and nothing changes on one look alone: ``AGREEING`` looks in a row must say the same, so that an
accident of the link moves nothing.

A connection more is opened where the rate is near what those that are open can hold on the way, for then it may be
they, and not the link, that bound it; one is closed again where far fewer would carry the same.

The choice is for the next update that is sealed, and for no other.  Nothing of it is kept: a site that starts again
begins as it is configured, and finds the same in a few updates.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil, inf
from typing import TYPE_CHECKING

from diloco.sync.events import FateTold, JoinAnswered, Outcome, PushAnswered, VersionFetched
from diloco.sync.options import require, smoothed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.sync.events import Fate, LearnerEvent

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
