"""Links in a process of their own, so that what uses them cannot make them late by holding the interpreter."""

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
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from diloco.wan.link import LinkOptions

ANSWER_TIMEOUT_S = 20.0
END_TIMEOUT_S = 5.0
WORDS_KEPT_BYTES = 2000
ANY_PORT = "127.0.0.1:0"

Stats = dict[str, int | float]


class RelayDiedError(RuntimeError):
    """The relay process has ended, or does not answer; the text has its exit code and its last words."""


class RelayProcess:
    """Starts ``python -m diloco.wan.relay`` and controls its links by name; a context manager, safe for threads.

    Commands that the relay refuses raise ``ValueError`` with its words. A process that has died or is silent for
    ``answer_timeout_s`` raises ``RelayDiedError``. The child ends when its input closes, so it never outlives this
    process; it is in a session of its own, so that a Ctrl-C meant for the run leaves the links up while the run drains.
    """

    def __init__(self, *, answer_timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self._answer_timeout_s = answer_timeout_s
        self._lock = threading.Lock()
        self._number = 0
        self._unread = b""
        self._words: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        # The working directory puts this very package on the child's path, however ours was found.
        self._child = subprocess.Popen(
            [sys.executable, "-m", "diloco.wan.relay"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            cwd=Path(__file__).resolve().parents[2],
            start_new_session=True,
            bufsize=0,
        )

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._child.pid

    def is_alive(self) -> bool:
        """Whether the child still runs."""
        return self._child.poll() is None

    def add(
        self, name: str, options: LinkOptions, target: str, *, listen: str = ANY_PORT, allow_remote: bool = False
    ) -> str:
        """Make a link to ``target`` (``host:port``); returns the ``host:port`` to connect to instead."""
        return str(
            self._do(
                "add",
                name=name,
                options=dataclasses.asdict(options),
                target=target,
                listen=listen,
                allow_remote=allow_remote,
            )
        )

    def remove(self, name: str) -> None:
        """Close a link for good."""
        self._do("remove", name=name)

    def set(self, name: str, **changes: object) -> None:
        """Change options of a running link."""
        self._do("set", name=name, **changes)

    def partition(self, name: str, direction: str = "both") -> None:
        """Let nothing come out in ``direction`` ("both", "up" or "down")."""
        self._do("partition", name=name, direction=direction)

    def heal(self, name: str) -> None:
        """End a partition."""
        self._do("heal", name=name)

    def reset(self, name: str) -> None:
        """Reset all present connections of a link at both sides."""
        self._do("reset", name=name)

    def refuse(self, name: str) -> None:
        """Refuse new connections."""
        self._do("refuse", name=name)

    def accept(self, name: str) -> None:
        """Take new connections again."""
        self._do("accept", name=name)

    def stats(self) -> dict[str, Stats]:
        """The counts of each link, by name (see ``Relay.stats``)."""
        value = self._do("stats")
        assert isinstance(value, dict)
        return value

    def cpu_s(self) -> float:
        """Processor seconds that the child has used."""
        return float(str(self._do("cpu_s")))

    def close(self) -> None:
        """End the child, by its closed input, by SIGTERM, by SIGKILL, each in bounded time."""
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

    def __enter__(self) -> RelayProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _do(self, what: str, **arguments: object) -> object:
        with self._lock:
            assert self._child.stdin is not None
            if self._child.stdin.closed:
                raise RelayDiedError("the relay process was closed")
            self._number += 1
            line = json.dumps({"number": self._number, "do": what, **arguments}) + "\n"
            try:
                self._child.stdin.write(line.encode())
            except BrokenPipeError:
                raise self._death() from None
            answer = self._answer_to(self._number)
        if "refused" in answer:
            raise ValueError(str(answer["refused"]))
        return answer["value"]

    def _answer_to(self, number: int) -> dict[str, object]:
        deadline_s = time.monotonic() + self._answer_timeout_s
        while True:
            answer: dict[str, object] = json.loads(self._read_line(deadline_s))
            # An answer to an earlier command that was given up on may come first.
            if answer["number"] == number:
                return answer

    def _read_line(self, deadline_s: float) -> bytes:
        assert self._child.stdout is not None
        output = self._child.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline_s - time.monotonic())):
                    raise RelayDiedError(
                        f"the relay process {self.pid} did not answer within {self._answer_timeout_s:g} s"
                    )
                piece = os.read(output, 65536)
                if not piece:
                    raise self._death()
                self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _death(self) -> RelayDiedError:
        try:
            code: int | str = self._child.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = "none yet"
        self._words.seek(0)
        words = self._words.read()[-WORDS_KEPT_BYTES:].decode(errors="replace").strip()
        return RelayDiedError(f"the relay process {self.pid} has ended (exit code {code}); it said: {words or '-'}")
