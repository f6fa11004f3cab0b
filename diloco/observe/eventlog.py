"""``events.jsonl``: the run's events, one JSON object a line, written by several processes at once.

Every line is ``{"at": unix seconds, "who": "site-a", "what": "step", ...}``.  Each line is one write that the kernel
appends as a whole, so processes that share the file never mix their lines.

A full disk loses only the lines that it refuses: the next line begins on a new line after one that was cut short.

A file that reaches ``FILE_BYTES_MAX`` is renamed to ``events.jsonl.N``, N one above the last, and a new file begins;
of more than ``FILES_MAX`` files the oldest are removed.  A program that moves the file away, such as logrotate, has the
same effect; such a file is read no more.
"""

from __future__ import annotations

import errno
import itertools
import json
import logging
import math
import os
import queue
import re
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from diloco.durable import lock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

Event = dict[str, object]
BEGIN = b'{"at": '
"""Every line begins with this."""
CLOSE_WAIT_S = 5.0
FILE_BYTES_MAX = 1 << 28
FILES_MAX = 8
"""Maximum number of files of lines with the current one: eight sites write some 50 MB of events a day."""
BLOCK_BYTES = 1 << 20
RECENT_BYTES, RECENT_BYTES_MAX = 1 << 20, 1 << 26
WAITING_MAX = 100_000
"""Maximum number of events queued for a stalled disk or follower; later ones are dropped and counted."""


class LineWriter:
    """Writes whole lines and never raises: lines that the disk refuses are dropped and counted.

    When the disk accepts lines again, the first is the one that ``missing`` makes from the count and the reason.
    """

    def __init__(self, write: Callable[[memoryview], int | None], missing: Callable[[int, str], str]) -> None:
        self.left_out = 0
        """Lines dropped since the last ``missing`` line."""
        self._write, self._missing = write, missing
        self._why = ""
        self._is_cut = False

    def write(self, line: str) -> None:
        """Write ``line``, which ends with a newline."""
        if self.left_out:
            self._catch_up()
        if self.left_out or not self._put(line):
            self.left_out += 1

    def _catch_up(self) -> None:
        """Write the ``missing`` line."""
        if self._put(self._missing(self.left_out, self._why)):
            self.left_out = 0

    def _put(self, line: str) -> bool:
        """Write ``line`` and return whether the disk accepted all of it."""
        text = "\n" + line if self._is_cut else line
        left = memoryview(text.encode(errors="backslashreplace"))
        try:
            while left:
                if not (written := self._write(left)):
                    raise BlockingIOError(errno.EAGAIN, "it accepts no data now")
                self._is_cut, left = True, left[written:]
        except OSError as error:
            self._why = error.strerror or repr(error)
            return False
        self._is_cut = False
        return True


class FileLines(LineWriter):
    """Appends lines to ``path`` until ``close``, on a new line if the last one was cut short.

    A file of ``FILE_BYTES_MAX`` is renamed, and a new file begins.
    """

    def __init__(self, path: Path, missing: Callable[[int, str], str]) -> None:
        super().__init__(lambda data: os.write(self._file, data), missing)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._open()

    def write(self, line: str) -> None:
        """Write ``line``, which ends with a newline, into a new file if this one is full or was moved."""
        with suppress(OSError):  # A file that cannot be moved or created again keeps growing.
            here = os.fstat(self._file)
            if here.st_size >= FILE_BYTES_MAX:
                lock(self._file)  # Of the processes that share the file, only one moves it.
                if _is_at(here, self._path):
                    *older, (number, _) = _files(self._path)
                    self._path.replace(_older(self._path, number))
                    for _, oldest in older[: -(FILES_MAX - 2)]:
                        oldest.unlink(missing_ok=True)
            if not _is_at(here, self._path):  # This process has moved it, or another one.
                before = self._file
                self._open()
                os.close(before)
        super().write(line)

    def close(self) -> None:
        """Write the last ``missing`` line, if the disk accepts it now, and close the file."""
        if self.left_out:
            self._catch_up()
        os.close(self._file)

    def _open(self) -> None:
        self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._file).st_size
        self._is_cut = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"


class EventLog:
    """Appends events to ``path`` in its own thread, so that the emitter never waits for a file.

    ``also`` is called in that thread with every event, for lines on a terminal.  Events of one emitter keep their
    order.  When the disk refuses writes, the run continues, and the number of missing events is written as soon as
    possible.  A follower that raises is a defect: the first error is logged, all are counted in ``failures``, and the
    log and the other followers continue.
    """

    def __init__(self, path: Path, who: str, also: Callable[[Event], None] | None = None) -> None:
        self.path, self.who = path, who
        self.failures = 0
        self._left_out = 0
        self._lock = threading.RLock()  # A signal handler may emit while its own thread is emitting.
        self._followers = [also] if also is not None else []
        self._lines = FileLines(path, self._not_written)
        self._queue: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="event-log", daemon=True)
        self._thread.start()

    def follow(self, take: Callable[[Event], None]) -> None:
        """Call ``take`` with every event from now on, in the log's thread, like ``also``."""
        self._followers.append(take)

    def emit(self, what: str, fields: dict[str, object] | None = None) -> None:
        """Log that ``what`` happened now.  ``fields`` hold JSON values; NaN and infinity become null."""
        if self._queue.qsize() < WAITING_MAX:
            self._queue.put(self._event(what, fields or {}))
            return
        with self._lock:
            self._left_out += 1

    def _event(self, what: str, fields: dict[str, object]) -> Event:
        return {"at": round(time.time(), 6), "who": self.who, "what": what, **fields}

    def close(self) -> None:
        """Write the events emitted so far, waiting at most ``CLOSE_WAIT_S`` for a slow disk."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(CLOSE_WAIT_S)

    def _write_all(self) -> None:
        while (event := self._queue.get()) is not None:
            self._lines.write(_line(event))
            for follow in list(self._followers):
                try:
                    follow(event)
                except Exception as error:
                    self.failures += 1
                    if self.failures == 1:
                        logging.getLogger(__name__).exception("a follower failed on an event")
                        self._lines.write(_line(self._event("note", {"note": "follower_failed", "why": repr(error)})))
            with self._lock:
                left_out, self._left_out = self._left_out, 0
            if left_out:
                self._lines.write(_line(self._event("note", {"note": "events_left_out", "count": left_out})))
        self._lines.close()

    def _not_written(self, count: int, why: str) -> str:
        told = {"note": "events_not_written", "count": count, "why": f"events missing here: {count} ({why})"}
        return _line(self._event("note", told))


def _line(event: Event) -> str:
    return json.dumps(finite(event), allow_nan=False, default=repr) + "\n"


def finite(value: object) -> object:
    """Return ``value`` with every NaN and infinity replaced by None, for JSON."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def _older(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def _files(path: Path) -> list[tuple[int, Path]]:
    """Return the files of the lines of ``path``, the oldest first; the last is ``path``, with its number to be."""
    named, numbers = re.compile(re.escape(path.name) + r"\.([1-9][0-9]{0,5})"), list[int]()
    with suppress(FileNotFoundError):
        numbers = sorted(int(found[1]) for name in os.listdir(path.parent) if (found := named.fullmatch(name)))
    return [*((number, _older(path, number)) for number in numbers), (max(numbers, default=0) + 1, path)]


def _size(path: Path) -> int:
    with suppress(FileNotFoundError):  # It may be missing between two files.
        return path.stat().st_size
    return 0


def _is_at(here: os.stat_result, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(here, path.stat())
    return False


def event_blocks(path: Path, last_bytes: int | None = None) -> Iterator[list[Event]]:
    """Yield the events of ``path`` in blocks, those of older files first; [] whenever there are no more yet.

    With ``last_bytes``, begin that many bytes before the present end.  A missing file has no events.  A line that is no
    event is skipped, and the last line is left until it is whole.  Where a full disk cut a line short and another
    process continued on the same line, only the cut part is skipped.
    """
    read, skipped = 0, 0  # The number of the last file that was read, and the bytes to leave out of the next one.
    if last_bytes is not None:
        for number, place in reversed(_files(path)):
            size = _size(place)
            read, skipped = number - 1, max(0, size - last_bytes)
            last_bytes -= size
            if last_bytes <= 0:
                break
    while True:
        files = _files(path)
        number, place = next((each for each in files if each[0] > read), files[-1])
        try:
            file = place.open("rb")
        except FileNotFoundError:
            if place is path:  # There is none yet, or it is missing between two files.
                yield []
            continue
        with file:
            if place is path and _files(path)[-1][0] != number:
                continue  # A new file has begun since the look: the one before comes first.
            file.seek(skipped)
            rest, read, skipped = b"", number, 0
            while True:
                is_current = _is_at(os.fstat(file.fileno()), path)  # Before the read: nothing is written after a turn.
                if data := file.read(BLOCK_BYTES):
                    *lines, rest = (rest + data).split(b"\n")
                    if events := [event for line in lines if (event := _parsed(line)) is not None]:
                        yield events
                elif is_current:
                    yield []
                else:
                    break


def new_events(blocks: Iterator[list[Event]]) -> Iterator[Event]:
    """Yield the events of ``event_blocks`` that are there and were not yielded yet."""
    return itertools.chain.from_iterable(iter(blocks.__next__, []))


def read_events(path: Path) -> Iterator[Event]:
    """Yield the events that are in the files of ``path`` now."""
    return new_events(event_blocks(path))


def recent_events(path: Path, what: str) -> tuple[list[Event], Iterator[list[Event]]]:
    """Return the last events of ``path``, reaching back at least to one of kind ``what``, and the blocks after them.

    Read 1 MiB, or as much more as that takes, up to 64 MiB: many events may lie between two of that kind.
    """
    there = sum(_size(place) for _, place in _files(path))
    wanted = RECENT_BYTES
    while True:
        blocks = event_blocks(path, wanted)
        events = list(new_events(blocks))
        if wanted >= min(there, RECENT_BYTES_MAX) or any(event.get("what") == what for event in events):
            return events, blocks
        wanted *= 8


def _parsed(line: bytes) -> Event | None:
    begin = 0
    while begin >= 0:
        try:
            event = json.loads(line[begin:])
        except ValueError:
            begin = line.find(BEGIN, begin + 1)
            continue
        return event if isinstance(event, dict) and {"at", "who", "what"} <= event.keys() else None
    return None
