"""A relay between a client and the server that can fall silent without closing anything, and can damage bytes."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from diloco.wire.messages import Unreachable

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
WAIT_S = 20.0


class Relay:
    """Passes bytes on; ``hold`` makes it fall silent, for all connections or for those that carry bulk."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self._hold_above_bytes: int | None = None
        self._counting = threading.Lock()
        self.carried_up = 0
        self.carried_down = 0
        self._cut_at: int | None = None
        self._mark = b""
        self._to_damage = 0
        self.damaged = 0
        self._ended = threading.Event()
        self._sockets: list[socket.socket] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def hold(self, above_bytes: int = 0) -> None:
        """Connections that have carried more than that wait, until ``cut``: nothing more arrives at either end."""
        self._ended.clear()
        self._hold_above_bytes = above_bytes

    def damage(self, mark: bytes, times: int) -> None:
        """Flip a bit of ``mark``, wherever it goes by whole in one read, so many times."""
        self._mark = mark
        self._to_damage = times
        self.damaged = 0

    def cut_after(self, count: int) -> None:
        """End every connection once so many more bytes have come from clients and the server together."""
        self._cut_at = self.carried_up + self.carried_down + count

    @property
    def waits_to_cut(self) -> bool:
        """Whether a cut is still to come."""
        return self._cut_at is not None

    def cut(self) -> None:
        """End every connection; new ones pass everything on."""
        self._hold_above_bytes = None
        self._ended.set()
        for each in self._sockets:
            # What was passed on still arrives; a bare close could take it back.
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._sockets.clear()

    def close(self) -> None:
        # A bare close would leave the thread in its accept, on a number that the next socket gets.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join(20.0)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            self._sockets += [near, far]
            self.connections += 1
            total = [0]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(source, sink, total, source is near), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, total: list[int], up: bool) -> None:
        try:
            while data := source.recv(65536):
                total[0] += len(data)
                self._count(len(data), up)
                if self.damaged < self._to_damage and self._mark in data:
                    data = self._damaged(data)
                if self._hold_above_bytes is not None and total[0] > self._hold_above_bytes:
                    self._ended.wait(60)
                    return
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def _count(self, count: int, up: bool) -> None:
        with self._counting:
            self.carried_up += count if up else 0
            self.carried_down += 0 if up else count
            due = self._cut_at is not None and self.carried_up + self.carried_down >= self._cut_at
            self._cut_at = None if due else self._cut_at
        if due:
            self.cut()

    def _damaged(self, data: bytes) -> bytes:
        at = data.index(self._mark)
        self.damaged += 1
        return data[:at] + bytes((data[at] ^ 1,)) + data[at + 1 :]


def wait_until(there: Callable[[], object], seconds: float = WAIT_S) -> bool:
    """Whether ``there`` came to be in time."""
    until_s = time.monotonic() + seconds
    while not there():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.01)
    return True


def until_reached(call: Callable[[], T]) -> T:
    """What ``call`` gives once the connection is back."""
    until_s = time.monotonic() + WAIT_S
    while True:
        try:
            return call()
        except Unreachable:
            assert time.monotonic() < until_s
            time.sleep(0.05)
