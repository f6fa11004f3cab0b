"""A program of this package in a separate process, controlled by JSON lines on its standard input.

It is separate so that a program that uses a link cannot delay the link by holding the interpreter's lock.  A link never
outlives its owner: the child ends when its input does, even if the owner is killed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from diloco.wan.link import LinkOptions


ANSWER_TIMEOUT_S = 20.0
END_TIMEOUT_S = 5.0
WORDS_KEPT_BYTES = 2000


class ChildDiedError(RuntimeError):
    """The process has ended, or does not answer; the message has its exit code and the end of its standard error."""


class Child:
    """Starts ``python -m MODULE`` and sends it commands; a context manager, safe for threads.

    A command that the child refuses raises ``ValueError`` with the child's message. A child that has died, or does not
    answer within ``ANSWER_TIMEOUT_S``, raises ``ChildDiedError``. The child has its own session, so that a Ctrl-C meant
    for the run leaves the links up while the run drains.
    """

    module: ClassVar[str]
    """The module that ``python -m`` runs."""
    noun: ClassVar[str]
    """The child's name in error messages."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0
        self._unread = b""
        self._words: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        # The working directory puts this same package on the child's path, however the parent found it.
        self._child = subprocess.Popen(
            [sys.executable, "-m", self.module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            cwd=Path(__file__).resolve().parents[2],
            start_new_session=True,
            bufsize=0,
        )
        self.pid = self._child.pid

    def cpu_s(self) -> float:
        """Return the processor seconds that the child has used."""
        return float(self._do("cpu_s"))

    def close(self) -> None:
        """End the child: close its input, then send SIGTERM, then SIGKILL, waiting a bounded time after each."""
        with self._lock:
            assert self._child.stdin is not None
            assert self._child.stdout is not None
            self._child.stdin.close()
            for more in (self._child.terminate, self._child.kill):
                try:
                    self._child.wait(END_TIMEOUT_S)
                    break
                except subprocess.TimeoutExpired:
                    more()
            self._child.wait(END_TIMEOUT_S)
            self._child.stdout.close()
            self._words.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _do(self, what: str, **arguments: object) -> Any:
        with self._lock:
            assert self._child.stdin is not None
            if self._child.stdin.closed:
                raise ChildDiedError(f"the {self.noun} was closed")
            self._number += 1
            line = json.dumps({"number": self._number, "do": what, **arguments}) + "\n"
            try:
                self._child.stdin.write(line.encode())
            except BrokenPipeError:
                raise self._death() from None
            deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
            answer: dict[str, object] = {}
            while answer.get("number") != self._number:  # The answer to an earlier command that timed out comes first.
                answer = json.loads(self._read_line(deadline_s))
        if "refused" in answer:
            raise ValueError(str(answer["refused"]))
        return answer["value"]

    def _read_line(self, deadline_s: float) -> bytes:
        assert self._child.stdout is not None
        output = self._child.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline_s - time.monotonic())):
                    words = f"did not answer within {ANSWER_TIMEOUT_S:g} s"
                    raise ChildDiedError(f"the {self.noun} {self.pid} {words}")
                piece = os.read(output, 65536)
                if not piece:
                    raise self._death()
                self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _death(self) -> ChildDiedError:
        try:
            code: int | str = self._child.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = "none yet"
        self._words.seek(0)
        words = self._words.read()[-WORDS_KEPT_BYTES:].decode(errors="replace").strip()
        return ChildDiedError(f"the {self.noun} {self.pid} has ended (exit code {code}); it said: {words or '-'}")


# --- The links of ``relay`` ------------------------------------------------------------------------------------------


class RelayProcess(Child):
    """Starts ``python -m diloco.wan.relay`` and controls its links by name."""

    module = "diloco.wan.relay"
    noun = "relay process"

    def add(self, name: str, options: LinkOptions, target: str, *, listen: str = "127.0.0.1:0") -> str:
        """Make a link to ``target`` (``host:port``); return the ``host:port`` to connect to instead."""
        return str(self._do("add", name=name, options=dataclasses.asdict(options), target=target, listen=listen))

    def remove(self, name: str) -> None:
        """Close a link for good."""
        self._do("remove", name=name)

    def set(self, name: str, **changes: object) -> None:
        """Change options of a running link."""
        self._do("set", name=name, **changes)

    def partition(self, name: str, direction: str = "both") -> None:
        """Stop delivery in ``direction`` ("both", "up" or "down") until ``heal``."""
        self._do("partition", name=name, direction=direction)

    def heal(self, name: str) -> None:
        """End a partition."""
        self._do("heal", name=name)

    def reset(self, name: str) -> None:
        """Reset all open connections of a link at both sides."""
        self._do("reset", name=name)

    def refuse(self, name: str) -> None:
        """Refuse new connections."""
        self._do("refuse", name=name)

    def accept(self, name: str) -> None:
        """Accept new connections again."""
        self._do("accept", name=name)

    def stats(self) -> dict[str, dict[str, int | float]]:
        """Return the counts of each link, by name (see ``Relay.stats``)."""
        stats: dict[str, dict[str, int | float]] = self._do("stats")
        return stats
