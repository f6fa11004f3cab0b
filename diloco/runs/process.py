"""What a process of a run sets up for itself (parent, signals, memory, exit), and the children that it starts.

``python -m diloco.runs.process PARENT command ...`` ties itself to its parent (``die_with_parent``) and becomes the
command, for programs that are not our own.

Each child is tied to this process (``process.die_with_parent``), so that it ends with it in any case.  Each has a
session of its own, so that a Ctrl-C on the terminal reaches only this process, which knows the order of stopping.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

from diloco.config.errors import ConfigError, ExitCode, VerbError
from diloco.durable import PLAIN_DISK, KillingDisk, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import FrameType, TracebackType

    from diloco.durable import Disk


LAST_WORDS_BYTES = 4000
BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 15.0
DEATHS_MAX = 5
PEACE_S = 30.0
"""A child that has lived this long since its last start has its death count reset."""
PROC = Path("/proc")


@dataclass(slots=True)
class Child:
    """One process that may be started again, and writes to one log."""

    name: str
    command: Sequence[str]
    log: Path
    niceness: int = 0
    wanted: bool = False
    """Whether it should run: false before its start, after an orderly end, and while a fault keeps it down."""
    proven: bool = False
    """Whether it has ever done its work; a child that ends before that is not restarted."""
    deaths: int = 0
    """How often in a row it ended unexpectedly."""
    started_s: float = 0.0
    """The monotonic instant of its latest start."""
    next_start_s: float = 0.0
    code: int | None = None
    _process: subprocess.Popen[bytes] | None = None
    _log_begins: int = 0
    _log_read: int = 0

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
        self.wanted, self.code, self.started_s = True, None, time.monotonic()
        with self.log.open("ab") as log:
            self._log_begins = self._log_read = log.tell()
            self._process = subprocess.Popen(
                list(self.command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )
        if self.niceness:
            with suppress(OSError):
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
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def error(self, text: str) -> VerbError:
        """Return the error of a verb that ends because this child did: with its exit code, if it is one of a verb."""
        return VerbError(ExitCode(self.code) if self.code in set(ExitCode) else ExitCode.FAILED, text)

    def backed_off(self, now_s: float) -> bool:
        """Count an unexpected end, and set when the child may be started again: an exponential back-off.

        Return False after more than ``DEATHS_MAX`` deaths in a row.
        """
        self.deaths = 1 if now_s - self.started_s > PEACE_S else self.deaths + 1
        self.next_start_s = now_s + min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** (self.deaths - 1))
        return self.deaths <= DEATHS_MAX

    def new_lines(self) -> list[str]:
        """Return the whole lines that its latest process has written since the last call."""
        with suppress(OSError), self.log.open("rb") as log:
            log.seek(self._log_read)
            whole, end, _ = log.read().rpartition(b"\n")
            self._log_read += len(whole + end)
            return whole.decode(errors="replace").splitlines()
        return []

    def last_words(self) -> str:
        """Return the last line that its latest process wrote, probably the reason of its end; "" without any."""
        with suppress(OSError), self.log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_begins, size - LAST_WORDS_BYTES))
            lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
            return lines[-1] if lines else ""
        return ""


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a child's environment: ours, the path to this package, and the parent whose death ends it.

    The kernel watches the parent's thread, so children are started from the main thread.
    """
    home = str(Path(__file__).resolve().parents[2])
    known = environment.get("PYTHONPATH")
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join([home, known]) if known else home,
        "PYTHONSAFEPATH": "1",  # A user's file in the working directory is no module of ours, whatever its name.
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
        with suppress(OSError, ValueError, IndexError):
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
        for number in (signal.SIGINT, signal.SIGTERM, *hangup()):
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


# --- What a process of a run sets up for itself ----------------------------------------------------------------------

PARENT_VARIABLE = "DILOCO_PARENT"
"""Names the environment variable with the id of the parent process: a child ends with it."""
PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when process ``parent`` ends; exit now if that has ended already.

    By ``PR_SET_PDEATHSIG``, which, unlike a watching thread, also reaches a stopped process.  Linux only; elsewhere
    this does nothing.  The kernel watches the parent's thread: a parent starts children from a thread that lives as
    long as the parent does.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def keep_what_is_loaded() -> None:
    """Exclude everything in memory now, which lives as long as the process, from all later garbage collections.

    With torch and gRPC loaded that is hundreds of thousands of objects; a full collection visits them all while every
    thread stands still, for some 30 ms.  Call it when all modules are loaded.
    """
    gc.collect()
    gc.freeze()


ARENAS_MAX = 2
_M_ARENA_MAX = -8


def limit_arenas() -> None:
    """Limit the C library to ``ARENAS_MAX`` malloc arenas; call it before the process has threads.

    glibc makes an arena for each new thread, up to eight a core, and a thread cannot use what is free in another arena.
    A syncer answers in many threads.  Measured under a fuzzer, 30 MiB of 250 MiB were free but unusable in 16 arenas,
    and still growing; with two arenas it is 8 MiB of 224 MiB, and constant.  Other C libraries have no arenas.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, ARENAS_MAX)


SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"


def let_workers_fork() -> None:
    """Tell gRPC that no process forked from this one, such as a data loader's worker, uses gRPC.

    Call it before gRPC is first imported.  Otherwise gRPC tries, at each fork, to prepare its threads for the child,
    gives up where they are busy, as an agent's are, and a lock that a worker has inherited may then abort the worker.
    A value that the user has set stays.
    """
    os.environ.setdefault(SUPPORT, "0")


def end_process(code: int) -> NoReturn:
    """End this process with ``code``; a rank of several ends without tearing down its interpreter.

    gloo's threads release the arguments of a collective late, and need the interpreter's lock to do so.  A thread that
    asks for the lock during the tear-down aborts the process, after all its work was done, and torchrun ends the other
    ranks with it.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # The reader is gone.
            stream.flush()
    os._exit(code)


KILL_VARIABLE = "DILOCO_KILL_AT"


def disk_from_environment() -> Disk:
    """Return the plain disk or, for tests, one that kills this process at the step that ``DILOCO_KILL_AT`` names.

    ``DILOCO_KILL_AT=journal.sync:7 diloco syncer ...`` ends that process by SIGKILL at the seventh passage of the step
    ``journal.sync`` (``diloco.durable.Step`` lists them).  Every operation counts twice, before and after it.
    """
    if not (text := os.environ.get(KILL_VARIABLE, "")):
        return PLAIN_DISK
    name, _, passage = text.partition(":")
    if name not in set(Step) or not passage.isascii() or not passage.isdigit() or int(passage) < 1:
        told = f"{text!r} is no place to be killed at: a step and a passage, like journal.sync:7"
        raise ConfigError(f"{KILL_VARIABLE}: {told}")
    return KillingDisk(Step(name), int(passage))


SAME_REQUEST_S = 0.2
"""A terminal and a parent may both pass on one Ctrl-C; so close together they are one request."""


def hangup() -> list[int]:
    """Return the signal of a closed terminal; nothing where this process was told to ignore it, as by ``nohup``."""
    return [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]


class Lasting:
    """A text stream for a verb that outlives the readers of its lines: what cannot be written is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write ``text`` if that is possible."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Hand on what was written; once the reader is gone, to nothing."""
        try:
            self._stream.flush()
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.EIO):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


class Stopping:
    """A context that handles Ctrl-C and SIGTERM: the first asks for an orderly stop, the second ends the process at
    once. SIGHUP hands over to another process.

    Until :meth:`ask` sets a callback, the first signal ends the verb as drained: there is nothing to lose yet.  Once an
    inner context has ended there is, so the outer one then only records the request.
    """

    def __init__(self, what_happens: str, hands_over: str = "") -> None:
        """``hands_over`` is the line printed on a SIGHUP; empty: that signal is not handled."""
        self._what_happens = what_happens
        self._hands_over = hands_over
        self.handing_over = False
        self._asked_at: float | None = None
        self._whom: Callable[[], None] | None = None
        self._before: dict[int, object] = {}

    @property
    def asked(self) -> bool:
        """Whether a stop was requested."""
        return self._asked_at is not None

    def ask(self, whom: Callable[[], None] = lambda: None) -> None:
        """Have the first signal call ``whom``, in the main thread between two instructions: it must be short.

        By default the signal is only recorded in ``asked``.
        """
        self._whom = whom
        if self.asked:
            whom()

    def __enter__(self) -> Stopping:
        for number in (signal.SIGINT, signal.SIGTERM, *(hangup() if self._hands_over else ())):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, before in self._before.items():
            outer = getattr(before, "__self__", None)
            if isinstance(outer, Stopping) and outer._whom is None:
                outer.ask()
            signal.signal(number, before)  # type: ignore[arg-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGHUP:
            self.handing_over = True
            self._say(self._hands_over)
        elif self._asked_at is None:
            self._asked_at = now
            if self._whom is None:
                raise VerbError(ExitCode.DRAINED, "stopped before it began")
            self._say(f"{self._what_happens}; again: stop at once")
            self._whom()
        elif now - self._asked_at > SAME_REQUEST_S:
            os._exit(ExitCode.FAILED)

    @staticmethod
    def _say(line: str) -> None:
        with suppress(OSError):  # The reader is gone: a ``| tee`` dies of the same Ctrl-C.
            os.write(sys.stderr.fileno(), f"{line}\n".encode())


LINUX_ONLY = frozenset(
    {"up", "syncer", "site", "train", "eval", "lab", "restore", "standby", "journal", "canary", "replay"}
)
"""The verbs that lock files, wait for the disk, watch children and read ``/proc`` by calls that macOS and Windows lack
in part; none of that is tested there."""


def refusal(platform: str) -> str:
    """Return in one line why a part of a run does not work on ``platform`` (``sys.platform``); "" on Linux."""
    if platform.startswith("linux"):
        return ""
    system = {"darwin": "macOS", "win32": "Windows"}.get(platform, platform)
    way = "WSL 2, " if platform == "win32" else ""
    return f"it needs Linux, and this is {system}: run it in {way}a container or a virtual machine"


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
