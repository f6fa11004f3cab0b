"""Children of ``diloco up``: started, watched, signalled by their own process ids, and never left behind.

Each child is tied to this process (``tether``), so that it ends with it however that ends; and it is in a session of
its own, so that a Ctrl-C on the terminal reaches only us, who know in which order to stop.
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

import diloco
from diloco.launch.tether import PARENT_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import FrameType, TracebackType

LAST_WORDS_BYTES = 4000
BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 15.0
SAME_REQUEST_S = 0.2
PROC = Path("/proc")


@dataclass(slots=True)
class Child:
    """One process that is started, may be started again, and writes to one log."""

    name: str
    command: Sequence[str]
    log: Path
    niceness: int = 0
    is_site: bool = False
    wanted: bool = False
    """Whether it should run: false before its time, after a goodbye, and while a fault keeps it down."""
    proven: bool = False
    """Whether it has ever done its work; one that ends before it has is not started again."""
    deaths: int = 0
    """How often it ended unasked."""
    next_start_s: float = 0.0
    code: int | None = None
    _process: subprocess.Popen[bytes] | None = None
    _log_begins: int = 0

    @property
    def pid(self) -> int:
        """Its process id, of the latest process."""
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
        """Whether it has ended since the last call; its exit code (negative for a signal) is then ``code``."""
        if self._process is None or self.code is not None:
            return False
        self.code = self._process.poll()
        return self.code is not None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it and, for those that a process cannot pass on, to its descendants."""
        if not self.running:
            return
        whole = number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT)
        for pid in [self.pid, *(descendants(self.pid) if whole else [])]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def backed_off(self, now_s: float) -> None:
        """Note an unasked end, and when it may be started again."""
        self.deaths += 1
        self.next_start_s = now_s + min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** (self.deaths - 1))

    def last_words(self) -> str:
        """The last line that its latest process wrote, which says why it ended if anything does."""
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
    """What a child sees: ours, the way to this very package, and whose death ends it.

    The parent's thread counts for the kernel, so children are started from the main thread.
    """
    home = str(Path(diloco.__file__).resolve().parents[1])
    known = environment.get("PYTHONPATH")
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join([home, known]) if known else home,
        "PYTHONUNBUFFERED": "1",
        PARENT_VARIABLE: str(os.getpid()),
    }


def verb(name: str, *arguments: str) -> list[str]:
    """The command line of one of our verbs, under this very interpreter."""
    return [sys.executable, "-m", "diloco", name, *arguments]


def descendants(pid: int) -> list[int]:
    """All processes below ``pid``, nearest first; none where the system has no ``/proc``."""
    parents: dict[int, list[int]] = {}
    for stat in PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name stands in brackets and may hold anything; the parent's id is the second field behind it.
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(stat.parent.name))
    found, waiting = [], [pid]
    while waiting:
        below = parents.get(waiting.pop(0), [])
        found += below
        waiting += below
    return found


def end_all(children: Iterable[Child], grace_s: float) -> None:
    """End every child: SIGTERM and ``grace_s`` to obey (with 0 none), then SIGKILL; returns when all have ended."""
    running = [child for child in children if child.running]
    if grace_s > 0:
        for child in running:
            # A stopped process would not hear the second before the first.
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
    """How often somebody asked us to stop, by Ctrl-C, SIGTERM or a closed terminal; a context.

    A terminal and a parent may pass one Ctrl-C on both, so that what comes close together counts once.
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
            # The second was not obeyed; the kernel ends the children with us.
            os._exit(1)
