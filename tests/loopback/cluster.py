"""Toy processes and threads, started, watched and ended by the tests; every wait has a bound."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path

from diloco.learner.agent import Finished
from diloco.syncer.server import Syncer
from diloco.wire.client import AdminClient
from tests.forked import forkserver
from tests.loopback.toy import Toy, ToySite, Twin, main

_HELD = socket.socket()


def free_port(in_a_row: int = 1) -> int:
    """A free port; with ``in_a_row`` the first of several."""
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, OverflowError):
            first = 0
            for more in range(in_a_row):
                probe = stack.enter_context(socket.socket())
                probe.bind(("127.0.0.1", first and first + more))
                first = first or int(probe.getsockname()[1])
            return first


@functools.cache
def closed_port() -> int:
    """A port at which nothing listens: this process holds it, so that no other can take it."""
    _HELD.bind(("127.0.0.1", 0))
    return int(_HELD.getsockname()[1])


def drain(address: str) -> None:
    """As an operator does it."""
    with AdminClient(address) as operator:
        operator.drain()


def files_under(folder: Path) -> list[Path]:
    """The files under ``folder``, which a live process may change meanwhile: a folder that vanishes has none.

    ``Path.rglob`` raises of such a folder (Python 3.11).
    """
    return sorted(Path(place, name) for place, _, names in os.walk(folder) for name in names)


class Log:
    """Events in the order they came, from any thread; ``also`` is given each of them too."""

    def __init__(self, also: Callable[[str, dict[str, object]], None] | None = None) -> None:
        self._changed = threading.Condition()
        self._also = also
        self.events: list[dict[str, object]] = []

    def emit(self, what: str, fields: dict[str, object]) -> None:
        if self._also is not None:
            self._also(what, fields)
        with self._changed:
            self.events.append({"what": what, **fields})
            self._changed.notify_all()

    def of(self, what: str) -> list[dict[str, object]]:
        with self._changed:
            return [event for event in self.events if event["what"] == what]

    def wait_for(
        self,
        what: str,
        count: int,
        bound_s: float,
        since: int = 0,
        where: Callable[[dict[str, object]], object] = lambda event: True,
    ) -> list[dict[str, object]]:
        """At least ``count`` events named ``what``, from place ``since`` on; fails after ``bound_s``."""

        def found() -> list[dict[str, object]]:
            return [event for event in self.events[since:] if event["what"] == what and where(event)]

        with self._changed:
            enough = self._changed.wait_for(lambda: len(found()) >= count, bound_s)
            assert enough, f"{len(found())} of {count} {what} in {bound_s} s; last: {self.events[-5:]}"
            return found()

    def __len__(self) -> int:
        return len(self.events)


_STATUS = threading.Lock()
"""A start looks at every living process, and two threads that look at one at once lose its status (255)."""


class Process:
    """A toy process; what it says is in ``log``.  Forked where everything is imported: it starts at once."""

    def __init__(self, role: str, toy: Toy, death: tuple[str, int] | None = None, **mine: object) -> None:
        self.log = Log()
        context = forkserver()
        self._told, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=main, args=(role, toy, death, mine, theirs), name=role)
        with _STATUS:
            self._process.start()
        theirs.close()
        self._reader = threading.Thread(target=self._read, name=f"reads-{role}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        # A process that is killed in the middle of a message ends the pipe like any other.
        with contextlib.suppress(EOFError, OSError):
            while True:
                event = self._told.recv()
                self.log.emit(event.pop("what"), event)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def wait(self, bound_s: float) -> int | None:
        """The exit status, -9 after SIGKILL; None if it still runs after ``bound_s``."""
        if not wait([self._process.sentinel], bound_s):
            return None
        with _STATUS:
            status = self._process.exitcode
        self._reader.join(bound_s)
        return status

    @property
    def errors(self) -> str:
        return "".join(str(event["text"]) for event in self.log.of("error"))

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self.wait(20.0)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._told.close()
        self._process.close()


class SiteThread:
    """A toy site in a thread of the test's own process; in ``with``, it ends at the latest with the block."""

    def __init__(
        self,
        toy: Toy,
        site: str,
        address: str,
        also: Callable[[str, dict[str, object]], None] | None = None,
        **run: object,
    ) -> None:
        self.log = Log(also)
        self.site = site
        self.toy_site = ToySite(toy, site, address, self.log.emit)
        self.finished: Finished | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, kwargs=run, name=f"toy-{site}", daemon=True)
        self._thread.start()

    def _run(self, **run: object) -> None:
        try:
            self.finished = self.toy_site.run(**run)  # type: ignore[arg-type]
        except BaseException as error:
            self.error = error

    def join(self, bound_s: float) -> Finished:
        self._thread.join(bound_s)
        if self.error is not None:
            raise self.error
        assert self.finished is not None, f"site still runs after {bound_s} s: {self.log.events[-5:]}"
        return self.finished

    def __enter__(self) -> SiteThread:
        return self

    def __exit__(self, *_: object) -> None:
        self.toy_site.halt.set()
        # One that has seen the word already is done, and its agent is not.
        if self.finished is None or self.finished.ending == "halted":
            self.toy_site.agent.close()
        self._thread.join(20.0)


def shares(site: SiteThread, twin: Twin, windows: int, window_s: float) -> list[float]:
    """Steps of the site for each one of its twin's, window by window."""
    found = []
    for _ in range(windows):
        mine, twins = site.toy_site.trained, twin.trained
        time.sleep(window_s)
        found.append((site.toy_site.trained - mine) / max(1, twin.trained - twins))
    return found


@contextmanager
def serving(toy: Toy) -> Iterator[tuple[Syncer, str, Log]]:
    """A syncer in the test's own process, its address and its log."""
    log = Log()
    syncer = toy.syncer(log.emit)
    address = syncer.start()
    try:
        yield syncer, address, log
    finally:
        syncer.stop()


def eventually(condition: Callable[[], bool], bound_s: float, what: str) -> None:
    until = time.monotonic() + bound_s
    while not condition():
        assert time.monotonic() < until, f"not in {bound_s} s: {what}"
        time.sleep(0.02)
