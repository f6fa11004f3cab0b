"""A site's measurements of its link, and the choices it makes by them: rate, connections, codec and overlap.

Connections.  One connection carries at most its window in a round trip: the bytes that the kernel lets one socket have
in flight, part of which is the kernel's own overhead.  A link with a larger bandwidth-delay product needs several
parallel connections; no other means works without privileges.

Pace.  Over a far link of unknown rate a site sends bulk data as fast as it was seen to arrive, and no faster.
Connections that keep probing for more fill the queue in front of a link and lose what overflows it, and short transfers
give them no time to settle.  So bulk data is limited to the rate that the link carried lately.  If all of it arrives at
that rate, the next transfer tries a little more; if not, the rate of the link is found, and is kept for some transfers.

Overlap (τ): the inner steps that an exchange takes, and that a site lets pass before it adopts the result.  All sites
keep training after an update is measured.  An exchange costs its bytes both ways, three round trips, and the round at
the syncer, which waits for other sites and computes the outer step.  A site that adapts lets as many of its own steps
pass as the exchange takes, within its bounds: it then adopts a version at about the same step of each period, together
with all versions published meanwhile, in one pass over the model instead of several.  A version that comes later is
adopted when it arrives.

The overlap grows at once (when two samples agree).  It shrinks only where an exchange that took a quarter longer would
still fit, so that a link between two values does not make it alternate.

Choice.  Updates keep the link busy for some share of the time between them.  Above ``BUSY_PERCENT_MAX`` updates come
late, and each waiting one makes the next staler: then the site takes the largest codec that fits, or the smallest.
Where the next larger codec would leave half of the time free, the site returns to it.  In between nothing changes, and
one sample alone changes nothing: ``AGREEING`` samples in a row must agree, so that a short disturbance has no effect.

The site opens one more connection where the rate is near what the open ones can hold in flight, because then they and
not the link may be the limit.  It closes one where far fewer would carry the same.

The choice applies only to the next update that is sealed, and is not stored: a restarted site begins with its
configuration, and finds the same choice in a few updates.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from math import ceil, inf
from statistics import median_high

from diloco.sync.events import FateTold, JoinAnswered, LearnerEvent, Outcome, PushAnswered, VersionFetched
from diloco.sync.options import SECOND_NS, Count, check_bounds, require, smoothed

ROUND_TRIPS_KEPT = 64
TRANSFERS_KEPT = 3
"""The fastest of this many transfers gives the link's rate: many causes slow a transfer, none makes it too fast.  Fewer
would react to accidents; more would react too late to a link that has slowed down."""
TRANSFER_BYTES_MIN = 64 << 10
"""A smaller transfer measures the round trip more than the rate."""

CHANNELS_MAX = 6
"""Most connections of one transfer: each costs both ends memory and calls."""
WINDOW_SHARE_PERCENT = 45
"""Payload that crosses within a round trip, as a share of a socket's largest buffer.

Measured with a loss in every round trip (.1 % of the packets at 1 Gbit/s and 100 ms): 46 %, because what arrives after
a lost packet stays in the sender's buffer for another round trip.  Without losses more crosses.
"""


def channels_for(rtt_s: float, bytes_per_s: float, window_bytes: int) -> int:
    """Return how many connections fill a link of ``bytes_per_s`` over ``rtt_s``, from 1 to ``CHANNELS_MAX``.

    ``window_bytes`` is the largest buffer that the kernel gives one socket (``tcp_wmem``'s last figure where it sends,
    ``tcp_rmem``'s where it receives).  A link with an unknown figure (0) gets one.
    """
    assert 0 <= rtt_s < inf, rtt_s
    assert 0 <= bytes_per_s < inf, bytes_per_s
    assert window_bytes >= 1, window_bytes
    needed = ceil(rtt_s * bytes_per_s * 100 / (WINDOW_SHARE_PERCENT * window_bytes))
    return min(max(needed, 1), CHANNELS_MAX)


def later_rate(seen: list[tuple[int, int]]) -> float:
    """Return the bytes a second over the later half of a transfer's time; 0.0 where that takes no time.

    ``seen`` has pairs of an instant (ns) and the bytes received by then, in order.  A connection begins slowly: its
    later half shows what the link can carry.
    """
    middle_ns = (seen[0][0] + seen[-1][0]) // 2
    # The later half begins at the last instant before the middle, so that a few large steps are no less exact.
    began_ns, before = seen[bisect_right(seen, (middle_ns, inf)) - 1]
    ended_ns, total = seen[-1]
    return (total - before) * SECOND_NS / (ended_ns - began_ns) if ended_ns > began_ns else 0.0


@dataclass(frozen=True, slots=True)
class LinkEstimate:
    """Recent measurements of a link; 0: not measured yet."""

    rtt_ns: int = 0
    """Smoothed round trip of control calls."""
    rtt_min_ns: int = 0
    """Shortest recent round trip: the propagation delay without queues."""
    up_bytes_per_s: int = 0
    down_bytes_per_s: int = 0


@dataclass(slots=True)
class LinkEstimator:
    """Estimates a link from measurements, in integers: the same samples give the same estimate.

    As in BBR (Cardwell et al., ACM Queue 14(5), 2016), a path is described by its shortest round trip and its highest
    delivery rate, each over a window, because queues only lengthen the former and waiting only lowers the latter.
    """

    _rtt_ns: int = 0
    _round_trips: deque[int] = field(default_factory=lambda: deque(maxlen=ROUND_TRIPS_KEPT))
    _up: deque[int] = field(default_factory=lambda: deque(maxlen=TRANSFERS_KEPT))
    _down: deque[int] = field(default_factory=lambda: deque(maxlen=TRANSFERS_KEPT))

    def answered(self, rtt_ns: int) -> None:
        """Record a control call that was answered after ``rtt_ns``."""
        self._rtt_ns = smoothed(self._rtt_ns, max(1, rtt_ns))
        self._round_trips.append(max(1, rtt_ns))

    def carried(self, count: int, duration_ns: int, *, up: bool, round_trips: int = 1) -> None:
        """Record ``count`` bytes in ``duration_ns``: of an update sent ``up`` and answered, or of a version fetched.

        ``round_trips`` of the duration do not count for the rate: waiting for the last answer, or for the first byte.
        """
        if count < TRANSFER_BYTES_MIN:
            return
        waited_ns = min(duration_ns // 2, round_trips * min(self._round_trips, default=0))
        (self._up if up else self._down).append(count * SECOND_NS // max(1, duration_ns - waited_ns))

    def estimate(self) -> LinkEstimate:
        """Return the estimate from the samples so far."""
        return LinkEstimate(
            self._rtt_ns, min(self._round_trips, default=0), max(self._up, default=0), max(self._down, default=0)
        )


MORE_PERCENT = 110
MORE_AT_FIRST_PERCENT = 130
"""Next rate as a share of the recent arrival rate; the second one applies until the link's rate is first found."""
ALL_PERCENT = 95
"""A transfer that arrives at this share of its sending rate was limited only by that rate."""
FOUND_PERCENT = 98
"""Sending rate as a share of the found rate of the link, so that the queue in front of it empties."""
LEFT_ALONE = 5
"""Transfers at a found rate before a higher one is tried again."""
RATE_MAX = 400_000_000
"""Bytes a second; a faster link is limited by the machines at its ends and not by a queue, so it is not paced."""
SPAN_MIN_NS = 200_000_000
"""A shorter transfer measures the round trip more than the rate."""


@dataclass(slots=True)
class Pace:
    """The sending rate for one direction of a link, from the rates at which transfers arrived."""

    bytes_per_s: int = 0
    """Rate at which to send; 0: do not pace, because the rate is unknown or above ``RATE_MAX``."""
    _recent: deque[int] = field(default_factory=lambda: deque(maxlen=TRANSFERS_KEPT))
    _left_alone: int = 0
    _more_percent: int = MORE_AT_FIRST_PERCENT

    def carried(self, bytes_per_s: int, sent_at: int) -> None:
        """Record a transfer that was sent at ``sent_at`` (0: not paced) and arrived at ``bytes_per_s``."""
        self._recent.append(bytes_per_s)
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
"""For the admission of the push, the answer after its last byte, and the request for the version."""
ROUNDS_KEPT = 5
STEPS_MAX = 1_000_000
SPARE_PERCENT = 25
"""The overlap shrinks only so far that an exchange longer by this much still fits."""


def steps_of(duration_ns: int, step_ns: int) -> int:
    """Return the inner steps that pass in ``duration_ns``, rounded up; 0 where a figure is not known."""
    return min(-(-duration_ns // step_ns), STEPS_MAX) if step_ns else 0


def overlap_for(exchange_ns: int, step_ns: int, now: int, least: int, most: int) -> int:
    """Return the overlap in inner steps, from ``least`` to ``most``, where the present one is ``now``.

    With the same ``now`` a longer exchange never gives fewer steps.  An unknown figure (0) changes nothing.
    """
    assert 0 <= least <= now <= most, (least, now, most)
    if not (exchange_ns and step_ns):
        return now
    needed = steps_of(exchange_ns, step_ns)
    if needed > now:
        return min(needed, most)
    spared = steps_of(exchange_ns * (100 + SPARE_PERCENT) // 100, step_ns)
    return max(min(spared, now), least)


@dataclass(slots=True)
class RoundTimes:
    """The time from an update's acceptance to its version at the syncer, measured from events that a site gets anyway.

    Both events travel the same path, so the network delay cancels out.
    """

    _accepted: dict[int, tuple[int, int]] = field(default_factory=dict)
    """For each fragment the sequence number of the update accepted last, and the instant."""
    _rounds: deque[int] = field(default_factory=lambda: deque(maxlen=ROUNDS_KEPT))

    def heard(self, event: LearnerEvent, now_ns: int) -> None:
        """Take in one of the site's events."""
        if isinstance(event, PushAnswered) and event.outcome is Outcome.ACCEPTED:
            self._accepted[event.fragment] = (event.sequence, now_ns)
        elif isinstance(event, FateTold | VersionFetched):
            for fate in (event.fate,) if isinstance(event, FateTold) else event.fates:
                sequence, since_ns = self._accepted.get(fate.fragment, (0, 0))
                if sequence and sequence == fate.sequence:
                    del self._accepted[fate.fragment]
                    if fate.merged:
                        self._rounds.append(max(1, now_ns - since_ns))
        elif isinstance(event, JoinAnswered):
            self._accepted.clear()  # A restored run reuses sequence numbers.

    def usual_ns(self) -> int:
        """Return the median of the last rounds; 0: none yet."""
        return median_high(self._rounds) if self._rounds else 0


BUSY_PERCENT_MAX = 80
ROOM_PERCENT = 50
AGREEING = 2
FULL_PERCENT = 70
"""Use of the windows of all connections at which one more connection is tried."""


@dataclass(frozen=True, slots=True)
class Way:
    """An allowed codec, and the most bytes that one update of every fragment together has in it."""

    codec: str
    update_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptOptions:
    """The choices of an ``Adapter``.  With one way, one channel and one number of steps there is no choice."""

    ways: tuple[Way, ...]
    """At least one, each codec once; the first is the configured one."""
    version_bytes: int = 0
    """Bytes of one version of every fragment together; 0: not known."""
    num_fragments: Count = 1
    inner_steps: Count = 1
    """Inner steps between two updates of one fragment."""
    channels: int = 1
    """Connections to begin with."""
    channels_max: int = 1
    window_bytes: Count = 4 << 20
    """The largest send buffer that the kernel gives a socket."""
    overlap_steps: int = 0
    """Overlap to begin with, and the smallest."""
    overlap_steps_max: int = 0

    def __post_init__(self) -> None:
        check_bounds(self)
        wanted = f"1 to channels_max={self.channels_max}"
        require(1 <= self.channels <= self.channels_max, "channels", self.channels, wanted)
        # Below ``inner_steps``: otherwise the site would measure its next update before it may adopt the version with
        # this one.  Settings that say otherwise were refused by their names.
        assert 0 <= self.overlap_steps <= self.overlap_steps_max < self.inner_steps, self


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice of codec, connections and overlap; ``why`` is empty where all are as configured."""

    codec: str
    channels: int
    overlap_steps: int = 0
    why: str = ""


class Adapter:
    """One site's choice, and how many samples in a row have favoured another one."""

    def __init__(self, options: AdaptOptions) -> None:
        self._options = options
        self._ways = sorted(options.ways, key=lambda way: (-way.update_bytes, way.codec))
        self._at = self._ways.index(options.ways[0])
        self._codecs, self._channels, self._overlaps = _Agreement(), _Agreement(), _Agreement()
        self.choice = Choice(options.ways[0].codec, options.channels, options.overlap_steps)

    def choose(self, link: LinkEstimate, step_ns: int, round_ns: int = 0) -> Choice:
        """Return the choice for an update that is sealed now.

        ``step_ns`` is the inner step time, ``round_ns`` the time of a round at the syncer; 0: not known.
        """
        channels, overlap, whys = self.choice.channels, self.choice.overlap_steps, []
        if step_ns and link.up_bytes_per_s:
            at = self._wanted(link, step_ns)
            if self._codecs.reached(at - self._at):
                old, new = self._ways[self._at], self._ways[at]
                shares = [self._busy_percent(way, link, step_ns) for way in (old, new)]
                every_s = step_ns * self._options.inner_steps / 1e9
                whys.append(
                    f"at {megabits(link.up_bytes_per_s)} updates in {old.codec} take {shares[0]} % of the "
                    f"{every_s:.3g} s between two of them, in {new.codec} {shares[1]} %"
                )
                self._at = at
        wanted = self._wanted_channels(link)
        if self._channels.reached(wanted - channels):
            channels, rate = wanted, megabits(link.up_bytes_per_s)
            whys.append(f"{channels} connections for {rate} over {link.rtt_min_ns / 1e6:.0f} ms")
        exchange = self._exchange_ns(link, round_ns)
        least, most = self._options.overlap_steps, self._options.overlap_steps_max
        wanted = overlap_for(exchange, step_ns, overlap, least, most)
        if self._overlaps.reached(wanted - overlap):
            overlap = wanted
            whys.append(
                f"an exchange takes {exchange / 1e9:.3g} s, {round_ns / 1e9:.3g} of it at the syncer, and an inner "
                f"step {step_ns / 1e9:.3g} s: a version is adopted {overlap} steps after its update ({least} to {most} "
                "allowed)"
            )
        if whys:
            self.choice = Choice(self._ways[self._at].codec, channels, overlap, "; ".join(whys))
        return self.choice

    def exchange_steps(self, link: LinkEstimate, step_ns: int, round_ns: int = 0) -> int:
        """Return the inner steps during one exchange: an update goes up, is merged, its version comes down; 0: unknown.

        This is τ of Streaming DiLoCo: in these steps a site trains on values that are outdated elsewhere.
        """
        return steps_of(self._exchange_ns(link, round_ns), step_ns)

    def _exchange_ns(self, link: LinkEstimate, round_ns: int) -> int:
        """Return the time from sealing an update of a fragment of average size to having its version; 0: unknown."""
        if not (link.up_bytes_per_s and link.down_bytes_per_s):
            return 0
        count = self._options.num_fragments
        up_ns = self._ways[self._at].update_bytes // count * SECOND_NS // link.up_bytes_per_s
        down_ns = self._options.version_bytes // count * SECOND_NS // link.down_bytes_per_s
        return up_ns + down_ns + round_ns + ROUND_TRIPS * link.rtt_min_ns

    def _wanted(self, link: LinkEstimate, step_ns: int) -> int:
        busy = [self._busy_percent(way, link, step_ns) for way in self._ways]
        if busy[self._at] > BUSY_PERCENT_MAX:
            fits = (at for at in range(self._at + 1, len(busy)) if busy[at] <= BUSY_PERCENT_MAX)
            return next(fits, len(busy) - 1)
        if self._at > 0 and busy[self._at - 1] <= ROOM_PERCENT:
            return self._at - 1
        return self._at

    def _busy_percent(self, way: Way, link: LinkEstimate, step_ns: int) -> int:
        """Return the share of the time between two updates of a fragment that sending one of every fragment takes."""
        waiting_ns = 2 * link.rtt_min_ns * self._options.num_fragments
        up_ns = way.update_bytes * SECOND_NS // link.up_bytes_per_s + waiting_ns
        return 100 * up_ns // (step_ns * self._options.inner_steps)

    def _wanted_channels(self, link: LinkEstimate) -> int:
        options, now = self._options, self.choice.channels
        if not (link.rtt_min_ns and link.up_bytes_per_s):
            return now
        held = options.window_bytes * WINDOW_SHARE_PERCENT // 100
        # Both are bytes in flight within a round trip, times nanoseconds a second.
        under_way, one = link.up_bytes_per_s * link.rtt_min_ns, held * SECOND_NS
        if now < options.channels_max and 100 * under_way >= FULL_PERCENT * now * one:
            return now + 1
        enough = channels_for(link.rtt_min_ns / 1e9, float(link.up_bytes_per_s), options.window_bytes)
        return now - 1 if enough < now and 2 * under_way < (now - 1) * one else now


@dataclass(slots=True)
class _Agreement:
    """The samples in a row that wanted a change in the same direction: ``count`` is below 0 where they wanted less."""

    count: int = 0

    def reached(self, change: int) -> bool:
        """Count a sample that wants ``change`` (0: none); return whether ``AGREEING`` in a row wanted its direction."""
        sign = (change > 0) - (change < 0)
        self.count = self.count + sign if self.count * sign > 0 else sign
        if abs(self.count) < AGREEING:
            return False
        self.count = 0
        return True


def megabits(bytes_per_s: float) -> str:
    """Format a rate in bytes per second as Mbit/s or Gbit/s."""
    number, unit = (bytes_per_s * 8 / 1e6, "Mbit/s") if bytes_per_s < 1.25e9 else (bytes_per_s * 8 / 1e9, "Gbit/s")
    return f"{number:,.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"
