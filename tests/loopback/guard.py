"""Raises where a thread that must not wait calls the kernel: files, sockets, sleeps, waits, and gRPC's calls.

Python tells a profile function of every C function before it is called, so nothing has to be listed by name: all of
``posix``, of the sockets, of ``select`` and of the file objects is forbidden, but for what does no input or output.
"""

from __future__ import annotations

import _io
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, ModuleType
from typing import Any

import grpc._channel
import pytest

FORBIDDEN = frozenset({"posix", "io", "_io", "_socket", "socket", "_ssl", "select", "fcntl", "_posixsubprocess"})
HARMLESS = frozenset({"getpid", "urandom", "fspath", "cpu_count", "sched_getaffinity"})
IN_MEMORY = (_io.BytesIO, _io.StringIO)
WAITS = frozenset({("time", "sleep"), ("_queue", "get"), ("_thread", "start_new_thread")})
GRPC_CALLS = ("_UnaryUnaryMultiCallable", "_UnaryStreamMultiCallable", "_StreamStreamMultiCallable")


class Waited(AssertionError):
    """A thread that must not wait was about to."""


class Guard:
    """``forbidden`` says of the thread that asks whether it must not wait now."""

    def __init__(self, forbidden: Callable[[], bool]) -> None:
        self.forbidden = forbidden
        self.seen: list[str] = []
        self.calls = 0
        self._waiting: CodeType = threading.Condition.wait.__code__
        self._mine = threading.local()

    def profile(self, frame: FrameType, event: str, function: Any) -> None:
        """What Python calls; ``function`` is the C function of a ``c_call``."""
        if event not in ("c_call", "call") or getattr(self._mine, "busy", False):
            return
        self._mine.busy = True
        try:
            if self.forbidden():
                self.calls += 1
                self._check(frame, event, function)
        finally:
            self._mine.busy = False

    def _check(self, frame: FrameType, event: str, function: Any) -> None:
        if event == "call":
            if frame.f_code is self._waiting:
                self.caught("threading.Condition.wait")
            return
        owner = getattr(function, "__self__", None)
        name = str(function.__name__)
        if isinstance(owner, ModuleType) or owner is None:
            modules = {str(getattr(owner, "__name__", function.__module__))}
        else:
            modules = {cls.__module__ for cls in type(owner).__mro__}
        if (modules & FORBIDDEN and name not in HARMLESS and not isinstance(owner, IN_MEMORY)) or any(
            (module, name) in WAITS for module in modules
        ):
            self.caught(f"{function.__qualname__} of {', '.join(sorted(modules))}")

    def caught(self, what: str) -> None:
        self.seen.append(what)
        raise Waited(what)


@contextmanager
def guarding(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> Iterator[Guard]:
    """Watch this thread and every one that begins inside."""
    for name in GRPC_CALLS:
        owner = getattr(grpc._channel, name)
        for method in ("__call__", "with_call", "future"):
            if hasattr(owner, method):
                monkeypatch.setattr(owner, method, _watched(getattr(owner, method), f"gRPC's {name}", guard))
    threading.setprofile(guard.profile)
    sys.setprofile(guard.profile)
    try:
        yield guard
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def _watched(original: Callable[..., object], what: str, guard: Guard) -> Callable[..., object]:
    def calling(*args: object, **kwargs: object) -> object:
        if guard.forbidden():
            guard.caught(what)
        return original(*args, **kwargs)

    return calling
