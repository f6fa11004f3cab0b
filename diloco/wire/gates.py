"""How many streams of a kind may be open, in all and for each site, and what was counted."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from diloco.wire.messages import Refusal, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SUPERSEDE_S = 2.0
_TELL_EVERY_S = 60.0
_GATHER_S = 1.0


class Counters:
    """Named totals since the start; what a refused message may change, and nothing else."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, int] = {}

    def add(self, name: str, count: int = 1) -> None:
        """Count."""
        with self._lock:
            self._totals[name] = self._totals.get(name, 0) + count

    def totals(self) -> dict[str, int]:
        """A copy, by name."""
        with self._lock:
            return dict(sorted(self._totals.items()))


class TurnedAway:
    """Counts who was turned away; tells of it a second after the first, and then once a minute while there are more."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._count = self._told = 0
        self._why = ""
        self._told_s, self._due_s = -_TELL_EVERY_S, 0.0

    def add(self, why: str, count: int = 1) -> None:
        """Count; ``why`` is the latest, and goes out with the next word."""
        with self._lock:
            if self._count == self._told:
                self._due_s = max(time.monotonic() + _GATHER_S, self._told_s + _TELL_EVERY_S)
            self._count += count
            self._why = why

    def tell(self) -> None:
        """To be called now and then, from one thread."""
        with self._lock:
            count, why, now_s = self._count, self._why, time.monotonic()
            if count == self._told or now_s < self._due_s:
                return
            self._told, self._told_s = count, now_s
        self._tell(f"connections hung up on so far: {count}; {why}")


class Gate:
    """At most ``total_max`` inside, and at most ``each_max`` for one site; nobody waits."""

    def __init__(self, what: str, total_max: int, each_max: int, pushback_ms: int) -> None:
        self._what = what
        self._total_max = total_max
        self._each_max = each_max
        self._pushback_ms = pushback_ms
        self._lock = threading.Lock()
        self._inside: dict[str, int] = {}

    @contextmanager
    def enter(self, site: str) -> Iterator[None]:
        """Be inside.  RESOURCE_EXHAUSTED with a time to come back when there is no room."""
        with self._lock:
            mine = self._inside.get(site, 0)
            if mine >= self._each_max or sum(self._inside.values()) >= self._total_max:
                whose = "of this site" if mine >= self._each_max else "in all"
                raise Refusal(
                    Status.RESOURCE_EXHAUSTED,
                    f"no room for one more {self._what} {whose}: come back",
                    self._pushback_ms,
                )
            self._inside[site] = mine + 1
        try:
            yield
        finally:
            with self._lock:
                if self._inside[site] > 1:
                    self._inside[site] -= 1
                else:
                    del self._inside[site]


class WaitingRoom:
    """At most ``total_max`` wait inside.  One more always finds room: who has waited longest is sent away for it.

    It is sent away from among those of the caller who has most of them here, so that whoever fills the room loses its
    own, and whoever waits for a moment only is never the one.
    """

    def __init__(self, total_max: int) -> None:
        self._total_max = total_max
        self._lock = threading.Lock()
        self._inside: dict[str, dict[object, Callable[[], object]]] = {}

    @contextmanager
    def enter(self, caller: str, cancel: Callable[[], object]) -> Iterator[None]:
        """Be inside; ``cancel`` is called, from another thread, when the room is needed for somebody else."""
        place = object()
        with self._lock:
            sent_away = self._longest() if sum(map(len, self._inside.values())) >= self._total_max else None
            self._inside.setdefault(caller, {})[place] = cancel
        if sent_away is not None:
            sent_away()
        try:
            yield
        finally:
            with self._lock:
                self._leave(caller, place)

    def _longest(self) -> Callable[[], object]:
        # max takes the first of equals, and callers stand in the order in which they came.
        caller = max(self._inside, key=lambda each: len(self._inside[each]))
        place, cancel = next(iter(self._inside[caller].items()))
        self._leave(caller, place)
        return cancel

    def _leave(self, caller: str, place: object) -> None:
        mine = self._inside.get(caller, {})
        mine.pop(place, None)
        if not mine:
            self._inside.pop(caller, None)


class _UnderWay:
    def __init__(self, incarnation: int, cancel: Callable[[], object]) -> None:
        self.incarnation = incarnation
        self.cancel = cancel
        self.gone = threading.Event()


class OneAtATime:
    """One stream for each key: a later one ends the one before it.

    A site whose connection broke comes back long before its old stream is known to be dead, and must find neither the
    old stream's room taken nor what it held open.
    """

    def __init__(self, what: str, pushback_ms: int) -> None:
        self._what = what
        self._pushback_ms = pushback_ms
        self._lock = threading.Lock()
        self._streams: dict[tuple[object, ...], _UnderWay] = {}

    @contextmanager
    def enter(self, key: tuple[object, ...], incarnation: int, cancel: Callable[[], object]) -> Iterator[None]:
        """Be the one stream of ``key``; ``cancel`` ends it when another takes over.

        FAILED_PRECONDITION when a newer incarnation is inside, RESOURCE_EXHAUSTED when the older one does not end soon.
        """
        mine = _UnderWay(incarnation, cancel)
        before = self._take(key, mine)
        if before is not None:
            before.cancel()
            if not before.gone.wait(_SUPERSEDE_S) or self._take(key, mine) is not None:
                text = f"an older {self._what} like this one is still being ended: come back"
                raise Refusal(Status.RESOURCE_EXHAUSTED, text, self._pushback_ms)
        try:
            yield
        finally:
            with self._lock:
                del self._streams[key]
            mine.gone.set()

    def _take(self, key: tuple[object, ...], mine: _UnderWay) -> _UnderWay | None:
        with self._lock:
            before = self._streams.get(key)
            if before is None:
                self._streams[key] = mine
            elif before.incarnation > mine.incarnation:
                text = f"fenced: a newer incarnation of this site has this {self._what}"
                raise Refusal(Status.FAILED_PRECONDITION, text)
            return before
