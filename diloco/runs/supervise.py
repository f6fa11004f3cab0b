"""Children of ``diloco up``: started, watched, signalled by their own process ids, and never left behind.

Each child is tied to this process (``process.die_with_parent``), so that it ends with it in any case.  Each has a
session of its own, so that a Ctrl-C on the terminal reaches only this process, which knows the order of stopping.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from diloco.runs.process import PARENT_VARIABLE, SAME_REQUEST_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import FrameType, TracebackType

LAST_WORDS_BYTES = 4000
BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 15.0
PROC = Path("/proc")


@dataclass(slots=True)
class Child:
    """One process that may be started again, and writes to one log."""

    name: str
    command: Sequence[str]
    log: Path
    niceness: int = 0
    is_site: bool = False
    wanted: bool = False
    """Whether it should run: false before its time, after an orderly end, and while a fault keeps it down."""
    proven: bool = False
    """Whether it has ever done its work; a child that ends before is not started again."""
    deaths: int = 0
    """How often it ended unexpectedly."""
    next_start_s: float = 0.0
    code: int | None = None
    _process: subprocess.Popen[bytes] | None = None
    _log_begins: int = 0

    @property
    def pid(self) -> int:
        """The id of its latest process; 0 if there was none."""
        return self._process.pid if self._process is not None else 0

    @property
    def running(self) -> bool:
        """Whether it was started and has not been seen to end."""
        return self._process is not None and self.code is None

    def start(self, environment: Mapping[str, str]) -> None:
        """Start it; output goes to the end of its log."""
        assert not self.running, f"{self.name} runs already"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.wanted, self.code = True, None
        with self.log.open("ab") as log:
            self._log_begins = log.tell()
            self._process = _popen(self.command, log, environment)
        if self.niceness:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self._process.pid, self.niceness)

    def ended(self) -> bool:
        """Return whether it has ended since the last call; sets ``code`` to its exit code (negative for a signal)."""
        if self._process is None or self.code is not None:
            return False
        self.code = self._process.poll()
        return self.code is not None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it and, for signals that a process cannot pass on, to its descendants."""
        if not self.running:
            return
        whole = number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT)
        for pid in [self.pid, *(descendants(self.pid) if whole else [])]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def backed_off(self, now_s: float) -> None:
        """Count an unexpected end, and set when the child may be started again: an exponential back-off."""
        self.deaths += 1
        self.next_start_s = now_s + min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** (self.deaths - 1))

    def last_words(self) -> str:
        """Return the last line that its latest process wrote, probably the reason of its end; "" without any."""
        with contextlib.suppress(OSError), self.log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_begins, size - LAST_WORDS_BYTES))
            lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
            return lines[-1] if lines else ""
        return ""


def _popen(command: Sequence[str], log: IO[bytes], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=dict(environment),
        start_new_session=True,
    )


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a child's environment: ours, the path to this package, and the parent whose death ends it.

    The kernel watches the parent's thread, so children are started from the main thread.
    """
    home = str(Path(__file__).resolve().parents[2])
    known = environment.get("PYTHONPATH")
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join([home, known]) if known else home,
        "PYTHONUNBUFFERED": "1",
        PARENT_VARIABLE: str(os.getpid()),
    }


def verb(name: str, *arguments: str) -> list[str]:
    """Return the command line of one of our verbs, under this interpreter."""
    return [sys.executable, "-m", "diloco", name, *arguments]


def descendants(pid: int) -> list[int]:
    """Return all processes below ``pid``, nearest first; none where the system has no ``/proc``."""
    parents: dict[int, list[int]] = {}
    for stat in PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name stands in brackets and may hold anything; the parent's id is the second field after it.
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(stat.parent.name))
    found, waiting = [], [pid]
    while waiting:
        below = parents.get(waiting.pop(0), [])
        found += below
        waiting += below
    return found


def end_all(children: Iterable[Child], grace_s: float) -> None:
    """End every child: SIGTERM and ``grace_s`` to obey (0: no SIGTERM), then SIGKILL; return when all have ended."""
    running = [child for child in children if child.running]
    if grace_s > 0:
        for child in running:
            # A stopped process does not act on SIGTERM before SIGCONT.
            child.signal(signal.SIGCONT)
            child.signal(signal.SIGTERM)
        until = time.monotonic() + grace_s
        while time.monotonic() < until and not all(child.ended() or not child.running for child in running):
            time.sleep(0.05)
    for child in running:
        child.signal(signal.SIGKILL)
    for child in running:
        while child.running and not child.ended():
            time.sleep(0.01)


@dataclass(slots=True)
class Interrupts:
    """Count the requests to stop, by Ctrl-C, SIGTERM or a closed terminal; a context.

    A terminal and a parent may both pass on one Ctrl-C, so requests that come close together count once.
    """

    count: int = 0
    _last_s: float = 0.0
    _before: dict[int, object] = field(default_factory=dict)

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._last_s > SAME_REQUEST_S or self.count == 0:
            self.count += 1
        self._last_s = now
        if self.count > 2:
            # The second request had no effect; the kernel ends the children with this process.
            os._exit(1)
