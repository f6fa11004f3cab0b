"""``events.jsonl``: what happened, one JSON object a line, written by several processes at once.

Every line is ``{"at": unix seconds, "who": "site-a", "what": "step", ...}``.  A line goes to the file in one write that
the kernel appends as a whole, so that processes which share the file never mix their lines.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Event = dict[str, object]
CLOSE_WAIT_S = 5.0
WAITING_MAX = 100_000
"""Events that wait for a disk that stands, or for a follower; those beyond are left out, and counted."""


class EventLog:
    """Appends to ``path`` in a thread of its own, so that whoever emits never waits for a file.

    ``also`` is called in that thread with every event, for lines on a terminal.  Events of one emitter keep their
    order.  When the disk refuses, the first error is kept in ``error`` and the run goes on: the log is for people.  A
    follower that raises is a defect, told once and counted in ``failures``; it ends neither the log nor the others.
    """

    def __init__(self, path: Path, who: str, also: Callable[[Event], None] | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.error: OSError | None = None
        self.failures = 0
        self._left_out = 0
        self._lock = threading.RLock()  # A signal handler may emit while its thread does.
        self._who = who
        self._followers = [also] if also is not None else []
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._queue: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="event-log", daemon=True)
        self._thread.start()

    def follow(self, take: Callable[[Event], None]) -> None:
        """Call ``take`` with every event from now on, as ``also`` is."""
        self._followers.append(take)

    def emit(self, what: str, fields: dict[str, object] | None = None) -> None:
        """Note that ``what`` happened now.  ``fields`` hold what JSON can carry; NaN and infinity become null."""
        if self._queue.qsize() < WAITING_MAX:
            self._queue.put(self._event(what, fields or {}))
            return
        with self._lock:
            self._left_out += 1

    def _event(self, what: str, fields: dict[str, object]) -> Event:
        return {"at": round(time.time(), 6), "who": self._who, "what": what, **fields}

    def close(self) -> None:
        """Write what was emitted so far, waiting at most a few seconds for a slow disk."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(CLOSE_WAIT_S)

    def _write_all(self) -> None:
        while (event := self._queue.get()) is not None:
            self._write(event)
            for follow in list(self._followers):
                self._tell(follow, event)
            with self._lock:
                left_out, self._left_out = self._left_out, 0
            if left_out:
                self._write(self._event("note", {"note": "events_left_out", "count": left_out}))
        os.close(self._file)

    def _tell(self, follow: Callable[[Event], None], event: Event) -> None:
        try:
            follow(event)
        except Exception as error:
            self.failures += 1
            if self.failures == 1:
                logging.getLogger(__name__).exception("an event could not be followed")
                self._write(self._event("note", {"note": "follower_failed", "why": repr(error)}))

    def _write(self, event: Event) -> None:
        line = memoryview((json.dumps(finite(event), allow_nan=False, default=repr) + "\n").encode())
        try:
            while line:
                line = line[os.write(self._file, line) :]
        except OSError as error:
            self.error = self.error or error


def finite(value: object) -> object:
    """``value`` with every NaN and infinity replaced by None, which JSON can carry."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def read_events(path: Path, offset: int = 0) -> tuple[list[Event], int]:
    """The whole lines of ``path`` from byte ``offset`` on, and the offset to go on from; none where there is no file.

    A line that is no event (a write that a full disk cut short) is passed over.
    """
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return [], offset
    whole = data[: data.rfind(b"\n") + 1]
    return [event for line in whole.splitlines() if (event := _parsed(line)) is not None], offset + len(whole)


def _parsed(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and {"at", "who", "what"} <= event.keys() else None
