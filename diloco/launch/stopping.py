"""Ctrl-C and SIGTERM: once is "stop when it is good to stop", twice is at once.  SIGHUP makes room for another."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING

from diloco.launch.errors import ExitCode, VerbError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType

SAME_REQUEST_S = 0.2
"""A terminal and a parent may both pass one Ctrl-C on; so close together they are one request."""


class Stopping:
    """A context in which the two signals are ours.

    Until :meth:`ask` says whom to ask, the first signal ends the verb as drained: there is nothing to lose yet.  In a
    context inside another one there was; the outer one, while it ends with that, is only asked.
    """

    def __init__(self, what_happens: str, hands_over: str = "") -> None:
        """``hands_over`` is what a SIGHUP brings about; empty: that signal is not ours."""
        self._what_happens = what_happens
        self._hands_over = hands_over
        self.handing_over = False
        self._asked_at: float | None = None
        self._whom: Callable[[], None] | None = None
        self._before: dict[int, object] = {}

    @property
    def asked(self) -> bool:
        """Whether somebody asked us to stop."""
        return self._asked_at is not None

    def ask(self, whom: Callable[[], None]) -> None:
        """From now on the first signal calls ``whom``, in the main thread between two instructions: be short there."""
        self._whom = whom
        if self.asked:
            whom()

    def __enter__(self) -> Stopping:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._on_signal)
        if self._hands_over:
            self._before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._on_hangup)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, before in self._before.items():
            outer = getattr(before, "__self__", None)
            if isinstance(outer, Stopping) and outer._whom is None:
                outer.ask(lambda: None)
            signal.signal(number, before)  # type: ignore[arg-type]

    def _on_hangup(self, number: int, frame: FrameType | None) -> None:
        self.handing_over = True
        os.write(sys.stderr.fileno(), f"{self._hands_over}\n".encode())

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
            if self._whom is None:
                raise VerbError(ExitCode.DRAINED, "stopped before it began")
            os.write(sys.stderr.fileno(), f"{self._what_happens}; once more: at once\n".encode())
            self._whom()
        elif now - self._asked_at > SAME_REQUEST_S:
            os._exit(ExitCode.FAILED)
