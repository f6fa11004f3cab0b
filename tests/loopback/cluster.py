"""Toy processes and threads, started, watched and ended by the tests; every wait has a bound."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from diloco.learner.agent import Finished
from tests.loopback.toy import Toy, ToySite

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Log:
    """Events in the order they came, from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.events: list[dict[str, object]] = []

    def emit(self, what: str, fields: dict[str, object]) -> None:
        with self._changed:
            self.events.append({"what": what, **fields})
            self._changed.notify_all()

    def of(self, what: str) -> list[dict[str, object]]:
        with self._changed:
            return [event for event in self.events if event["what"] == what]

    def wait_for(self, what: str, count: int, bound_s: float) -> list[dict[str, object]]:
        """The first ``count`` events named ``what``; fails after ``bound_s``."""
        until = time.monotonic() + bound_s
        with self._changed:
            while True:
                found = [event for event in self.events if event["what"] == what]
                if len(found) >= count:
                    return found
                left = until - time.monotonic()
                assert left > 0, f"{len(found)} of {count} {what} in {bound_s} s; last: {self.events[-5:]}"
                self._changed.wait(left)


class Process:
    """A toy process; its lines are in ``log``."""

    def __init__(self, role: str, toy: Toy, die_at: tuple[str, int] | None = None, **mine: object) -> None:
        spec = json.dumps({**asdict(toy), "die_at": die_at, "mine": mine})
        self.log = Log()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.loopback.toy", role, spec],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self._errors: list[str] = []
        self._threads = [threading.Thread(target=self._read), threading.Thread(target=self._read_errors)]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            self.log.emit(event.pop("what"), event)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        self._errors.append(self._process.stderr.read())

    def wait(self, bound_s: float) -> int:
        """The exit status; -9 after SIGKILL."""
        status = self._process.wait(bound_s)
        for thread in self._threads:
            thread.join(bound_s)
        return status

    @property
    def errors(self) -> str:
        return "".join(self._errors)

    def alive(self) -> bool:
        return self._process.poll() is None

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self.wait(20.0)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class SiteThread:
    """A toy site in a thread of the test's own process."""

    def __init__(self, toy: Toy, site: str, address: str, **run: object) -> None:
        self.log = Log()
        self.toy_site = ToySite(toy, site, address, self.log.emit)
        self.finished: Finished | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, kwargs=run)
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


def eventually(condition: Callable[[], bool], bound_s: float, what: str) -> None:
    until = time.monotonic() + bound_s
    while not condition():
        assert time.monotonic() < until, f"not in {bound_s} s: {what}"
        time.sleep(0.02)
