"""The model of one WAN link: computes when bytes that are sent at one end arrive at the other.

Pure: no clock, no sockets, no event loop.  Instants are integer nanoseconds and always an argument, so that a test can
run a whole link without waiting.

A byte that enters a direction is first serialised (all traffic of the direction shares the rate, first come first
served), then travels for half the round-trip time plus the jitter of that moment, and then may wait for a stall to end.
The order is kept.

The weather (jitter and stalls) is a function only of the seed, the direction and the time since the link was started.
How a program cuts its writes, or how the kernel cuts our reads, does not change it.  So two runs with the same seed see
the same weather, although they read different pieces.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Self

MILLISECOND_NS = 1_000_000
SECOND_NS = 1_000_000_000
JITTER_SLOT_NS = 10 * MILLISECOND_NS
SLOTS_PER_SECOND = SECOND_NS // JITTER_SLOT_NS
STALL_MS_MAX = 10_000.0
STALLED_SHARE_MAX = 0.5
RTT_MS_MAX = 60_000.0
SECONDS_KEPT_MAX = 8192
"""Most seconds of drawn weather in the cache, which all links and directions of the process share."""

READ_SPAN_NS = 2 * MILLISECOND_NS
READ_BYTES_MIN = 4 * 1024
READ_BYTES_MAX = 256 * 1024
UNLIMITED_WINDOW_BYTES = 64 * 1024 * 1024

DIRECTIONS = ("up", "down")

Item = TypeVar("Item")


def check_number(field: str, value: object, low: float, high: float, wanted: str) -> None:
    """Raise ValueError with ``field`` and ``wanted`` unless ``value`` is a number from ``low`` to ``high``."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # NaN fails both comparisons and is refused with the rest.
    if not (is_number and low <= value <= high):  # type: ignore[operator]
        raise ValueError(f"{field} is {value!r}: {wanted}")


def directions(named: str) -> tuple[str, ...]:
    """Return the directions that ``named`` stands for: "up", "down" or "both"; ``ValueError`` for another word."""
    if named not in ("both", *DIRECTIONS):
        raise ValueError(f"direction is {named!r}: one of both, {', '.join(DIRECTIONS)}")
    return DIRECTIONS if named == "both" else (named,)


@dataclass(kw_only=True, slots=True)
class CommonOptions:
    """The properties of a link in both emulations.  Its two directions share them, but each draws its own weather."""

    mbps_min: ClassVar[float]
    mbps_max: ClassVar[float]

    rtt_ms: float = 0.0
    """Round-trip time; each direction delays by half of it."""
    jitter_ms: float = 0.0
    """Half the width of the round trip's spread: each direction adds a uniform draw of +- half of this."""
    mbps: float = 0.0
    """Rate of each direction in 10^6 bits a second; 0 for no bound."""
    queue_kib: float = 0.0
    """Size of the queue in front of the link."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("rtt_ms", self.rtt_ms, 0, RTT_MS_MAX, f"0 to {RTT_MS_MAX:g}")
        check_number("jitter_ms", self.jitter_ms, 0, self.rtt_ms, f"0 to rtt_ms={self.rtt_ms!r}: no delay is negative")
        check_number("mbps", self.mbps, 0, self.mbps_max, f"0 (no bound) to {self.mbps_max:.0f}")
        if 0 < self.mbps < self.mbps_min:
            raise ValueError(f"mbps is {self.mbps!r}: 0 (no bound) or at least {self.mbps_min}")
        check_number("queue_kib", self.queue_kib, 0, 1 << 20, f"0 to {1 << 20}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ValueError(f"seed is {self.seed!r}: a whole number")

    def changed(self, changes: Mapping[str, object]) -> Self:
        """Return a copy with ``changes``, checked as a whole; ``ValueError`` names an unknown or invalid field."""
        known = asdict(self)
        for name in changes:
            if name not in known:
                raise ValueError(f"{name} is not an option of a link: one of {', '.join(known)}")
        return type(self)(**{**known, **changes})

    def serialise_ns(self, num_bytes: int) -> int:
        """Return how long ``num_bytes`` occupy the link, in ns."""
        return int(num_bytes * 8000 / self.mbps) if self.mbps else 0


@dataclass(kw_only=True, slots=True)
class LinkOptions(CommonOptions):
    """The properties of a relay's link.  ``mbps`` is a rate of payload: headers are not counted.

    The measured round trip of an idle link lies between ``rtt_ms - jitter_ms`` and ``rtt_ms + jitter_ms``.
    """

    mbps_min = 1e-3
    mbps_max = 1e6

    queue_kib: float = 1024.0
    """Size of the queue in front of the link, without the bytes in flight on it."""
    stall_percent: float = 0.0
    """Chance in each second that a direction stalls, as TCP does while it retransmits a lost segment."""
    stall_ms: float = 200.0
    """Duration of one stall (200 ms is the minimum retransmission timeout of Linux)."""

    def __post_init__(self) -> None:
        CommonOptions.__post_init__(self)  # Plain ``super()`` fails in a class with ``slots=True``.
        check_number("stall_percent", self.stall_percent, 0, 100, "0 to 100")
        check_number("stall_ms", self.stall_ms, 0, STALL_MS_MAX, f"0 to {STALL_MS_MAX:g}")
        stalled_share = self.stall_percent / 100 * self.stall_ms / 1000
        if stalled_share > STALLED_SHARE_MAX:
            raise ValueError(
                f"stall_percent is {self.stall_percent!r}: with stall_ms={self.stall_ms!r} the link would stand still "
                f"{stalled_share:.0%} of the time, and {STALLED_SHARE_MAX:.0%} is the most"
            )

    @property
    def read_bytes(self) -> int:
        """Most bytes to read from a socket at once: 2 ms of the link, so that senders share it in small turns."""
        if self.mbps == 0:
            return READ_BYTES_MAX
        return min(max(self._bytes_in(READ_SPAN_NS), READ_BYTES_MIN), READ_BYTES_MAX)

    @property
    def window_bytes(self) -> int:
        """Bytes that one direction may hold before its senders must wait: rate x delay plus the queue."""
        queue_bytes = max(int(self.queue_kib * 1024), 2 * self.read_bytes)
        if self.mbps == 0:
            return UNLIMITED_WINDOW_BYTES + queue_bytes
        longest_ns = int((self.rtt_ms + self.jitter_ms) * MILLISECOND_NS / 2)
        return self._bytes_in(longest_ns) + queue_bytes

    def _bytes_in(self, span_ns: int) -> int:
        return int(span_ns * self.mbps / 8000)


@dataclass(frozen=True, slots=True)
class _Second:
    """The weather in one second of a link's life."""

    stall_chance: float
    """In [0, 1): the second has a stall if this is below ``stall_percent / 100``."""
    stall_offset_ns: int
    jitter: tuple[float, ...]
    """One draw in [-1, 1] for each slot of ``JITTER_SLOT_NS``."""


@lru_cache(SECONDS_KEPT_MAX)
def _second(key: str, index: int) -> _Second:
    draws = random.Random(f"{key}/{index}")
    return _Second(
        stall_chance=draws.random(),
        stall_offset_ns=int(draws.random() * SECOND_NS),
        jitter=tuple(2 * draws.random() - 1 for _ in range(SLOTS_PER_SECOND)),
    )


class Weather:
    """Jitter and stalls of one direction, by seed and time since the start.

    Each second has its own generator, seeded by (seed, direction, second), which draws in this order: the chance of a
    stall, its offset in the second, one jitter for each of 100 slots.  It draws them even if the options do not use
    them, so a change of the options does not change later draws.  An idle hour costs nothing.
    """

    def __init__(self, seed: int, direction: str) -> None:
        self._key = f"{seed}/{direction}"

    def jitter(self, at_ns: int) -> float:
        """Return the draw in [-1, 1] for the instant ``at_ns`` since the start."""
        second, offset_ns = divmod(at_ns, SECOND_NS)
        return _second(self._key, second).jitter[offset_ns // JITTER_SLOT_NS]

    def delay_ns(self, at_ns: int, options: CommonOptions) -> int:
        """Return the travel time of an item that enters the link at ``at_ns``: half the round trip, plus the jitter."""
        delay_ns = int(options.rtt_ms * MILLISECOND_NS / 2)
        if options.jitter_ms:
            delay_ns += int(self.jitter(at_ns) * options.jitter_ms * MILLISECOND_NS / 2)
        return delay_ns

    def stall_at(self, at_ns: int, options: LinkOptions) -> tuple[int, int] | None:
        """Return (second, end in ns) of the latest-ending stall that covers ``at_ns``, or None."""
        stall_ns = int(options.stall_ms * MILLISECOND_NS)
        if options.stall_percent == 0 or stall_ns == 0:
            return None
        found: tuple[int, int] | None = None
        for second in range(max(0, (at_ns - stall_ns) // SECOND_NS), at_ns // SECOND_NS + 1):
            drawn = _second(self._key, second)
            begin_ns = second * SECOND_NS + drawn.stall_offset_ns
            stalls = drawn.stall_chance * 100 < options.stall_percent
            if stalls and begin_ns <= at_ns < begin_ns + stall_ns:
                # All stalls are equally long, so the one that began last ends last.
                found = (second, begin_ns + stall_ns)
        return found


@dataclass(slots=True)
class Passage(Generic[Item]):
    """One item on its way through a direction, from the queue to the other end.  Instants in ns."""

    item: Item
    num_bytes: int
    start_ns: int = 0
    """When the link begins to serialise it."""
    end_ns: int = 0
    """When the link has serialised all of it and is free for the next."""
    due_ns: int = 0
    """When it arrives at the other end."""


class Path(Generic[Item]):
    """One direction of a link: the items in flight on it, and when each one is due.

    First in, first out.  ``push`` plans an item, ``take_due`` removes those due, ``change`` and ``heal`` plan again.
    """

    def __init__(self, options: LinkOptions, direction: str, started_ns: int) -> None:
        self.options = options
        self.direction = direction
        self.blocked = False
        """True in a partition: items enter, none arrive, and none are lost."""
        self.in_flight_bytes = 0
        self.in_flight_bytes_peak = 0
        self.num_stalls = 0
        """Stalls that delayed an item."""
        self._started_ns = started_ns
        self._weather = Weather(options.seed, direction)
        self._passages: deque[Passage[Item]] = deque()
        self._free_ns = started_ns
        self._last_due_ns = started_ns
        self._last_stall_second = -1

    @property
    def room_bytes(self) -> int:
        """Bytes that may still be read before the senders must wait; zero or less if they must wait now."""
        return self.options.window_bytes - self.in_flight_bytes

    def push(self, item: Item, num_bytes: int, now_ns: int) -> None:
        """Append ``item`` to the queue; a signal (a close, a handshake) has 0 bytes and only keeps its place."""
        passage = Passage(item, num_bytes)
        self._plan(passage, now_ns)
        self._passages.append(passage)
        self.in_flight_bytes += num_bytes
        self.in_flight_bytes_peak = max(self.in_flight_bytes_peak, self.in_flight_bytes)

    def next_due_ns(self) -> int | None:
        """Return the instant at which ``take_due`` next has an item, or None while empty or blocked."""
        if self.blocked or not self._passages:
            return None
        return self._passages[0].due_ns

    def take_due(self, now_ns: int) -> list[Passage[Item]]:
        """Remove and return all items that have arrived by ``now_ns``, in order."""
        taken: list[Passage[Item]] = []
        while not self.blocked and self._passages and self._passages[0].due_ns <= now_ns:
            passage = self._passages.popleft()
            self.in_flight_bytes -= passage.num_bytes
            taken.append(passage)
        return taken

    def change(self, options: LinkOptions, now_ns: int) -> None:
        """Change the options.  Items whose serialisation has begun keep their instants; the rest is planned again."""
        self._weather = Weather(options.seed, self.direction)
        self.options = options
        self._plan_again(now_ns, begun_before_ns=now_ns)

    def heal(self, now_ns: int) -> None:
        """End a partition.  All items in flight cross the link again from the start, as TCP would retransmit them."""
        if self.blocked:
            self.blocked = False
            self._plan_again(now_ns, begun_before_ns=0)

    def drop(self, is_gone: Callable[[Item], bool]) -> None:
        """Remove all items for which ``is_gone`` is true; the others keep their instants."""
        self._passages = deque(passage for passage in self._passages if not is_gone(passage.item))
        self.in_flight_bytes = sum(passage.num_bytes for passage in self._passages)

    def _plan_again(self, now_ns: int, begun_before_ns: int) -> None:
        """Plan all items again, but for those whose serialisation has begun before ``begun_before_ns``."""
        self._free_ns = self._last_due_ns = now_ns
        for passage in self._passages:
            if passage.start_ns < begun_before_ns:
                self._free_ns = max(self._free_ns, passage.end_ns)
                self._last_due_ns = max(self._last_due_ns, passage.due_ns)
            else:
                self._plan(passage, now_ns)

    def _plan(self, passage: Passage[Item], now_ns: int) -> None:
        options = self.options
        passage.start_ns = max(self._free_ns, now_ns)
        passage.end_ns = passage.start_ns + options.serialise_ns(passage.num_bytes)
        self._free_ns = passage.end_ns
        due_ns = passage.end_ns + self._weather.delay_ns(passage.end_ns - self._started_ns, options)
        while (stall := self._weather.stall_at(due_ns - self._started_ns, options)) is not None:
            second, end_ns = stall
            if second > self._last_stall_second:
                self._last_stall_second = second
                self.num_stalls += 1
            due_ns = self._started_ns + end_ns
        passage.due_ns = self._last_due_ns = max(due_ns, self._last_due_ns)
