"""Ends streams on which nothing moves.

gRPC's sync API waits for the next message without a bound, and a connection may be alive while its application is
frozen; so every stream, at both ends, is guarded by its own clock of progress.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_TICK_S = 0.25


class Guard:
    """One guarded stream.  ``touch`` it when something moved; after ``limit_s`` without that, ``cancel`` is called."""

    def __init__(self, watch: StallWatch, limit_s: float, cancel: Callable[[], object] | None) -> None:
        self._watch = watch
        self._cancel = cancel
        self._limit_s: float | None = limit_s
        self._moved_at_s = time.monotonic()
        self.stalled = False

    def arm(self, cancel: Callable[[], object]) -> None:
        """Say what ends the stream, where that was not known at first."""
        self._cancel = cancel

    def touch(self) -> None:
        """Something moved."""
        self._moved_at_s = time.monotonic()

    def limit(self, limit_s: float | None) -> None:
        """From now on wait so long for the next move; None: this end is at work itself, and the other one waits."""
        self._moved_at_s = time.monotonic()
        self._limit_s = limit_s

    @property
    def limit_s(self) -> float | None:
        """The bound that holds now."""
        return self._limit_s

    def check(self, now_s: float) -> None:
        """Called by the watch's thread."""
        limit_s = self._limit_s
        if self._cancel is None or limit_s is None or self.stalled or now_s - self._moved_at_s < limit_s:
            return
        self.stalled = True
        self._cancel()

    def __enter__(self) -> Guard:
        self._watch.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._watch.remove(self)


class StallWatch:
    """One thread for all guarded streams of a client or a server; it sleeps while there are none."""

    def __init__(self, name: str) -> None:
        self._guards: dict[int, Guard] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._name = name

    def guard(self, limit_s: float, cancel: Callable[[], object] | None = None) -> Guard:
        """A guard to be used as ``with watch.guard(...) as guard``."""
        return Guard(self, limit_s, cancel)

    def add(self, guard: Guard) -> None:
        """Called by ``Guard``."""
        with self._changed:
            self._guards[id(guard)] = guard
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def remove(self, guard: Guard) -> None:
        """Called by ``Guard``."""
        with self._changed:
            self._guards.pop(id(guard), None)

    def close(self) -> None:
        """End the thread; streams that are still open are guarded no more."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(timeout=5.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._guards and not self._closed:
                    self._changed.wait()
                elif not self._closed:
                    self._changed.wait(_TICK_S)
                if self._closed:
                    return
            self._look()

    def _look(self) -> None:
        # A call of its own, so that nothing of a stream that is over is held until the next look.
        with self._changed:
            guards = list(self._guards.values())
        now_s = time.monotonic()
        for guard in guards:
            guard.check(now_s)
