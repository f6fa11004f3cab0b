"""A way in for whoever knows a key.  Nobody else is heard, and who says nothing keeps nobody waiting.

For processes of one site, over its own network: what is said afterwards is not encrypted.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections import deque
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

KNOCKING_MAX = 64
"""Connections that have not shown yet that they know the key; the oldest of them makes room for another."""
CLOSE_S = 10.0
NEAR = "127.0.0.1"


class Door:
    """Listens, and puts into ``come`` who knows the key.  A context; at its end nobody waits before it any more."""

    def __init__(self, key: bytes, host: str = "", port: int = 0) -> None:
        """``host`` is the address of which it listens, empty: all of them; ``port`` 0: the system chooses.

        OSError where that cannot be.
        """
        self.come: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self._key = key
        self._knocking: deque[Connection] = deque()
        self._changing = threading.Lock()
        self._socket = _listening(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._listen, name="door", daemon=True)
        self._thread.start()

    def __enter__(self) -> Door:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # Wakes the thread, which closing does not.
        self._thread.join(CLOSE_S)
        self._socket.close()
        with self._changing:
            for each in self._knocking:
                shut(each)
            self._knocking.clear()
        while not self.come.empty():
            self.come.get().close()

    def _listen(self) -> None:
        while True:
            try:
                accepted, _ = self._socket.accept()
            except ConnectionError:
                continue  # Gone before it was let in.
            except OSError:
                return  # Closed.
            connection = Connection(accepted.detach())
            with self._changing:
                if len(self._knocking) == KNOCKING_MAX:
                    shut(self._knocking.popleft())
                self._knocking.append(connection)
            threading.Thread(target=self._ask, args=(connection,), name="door", daemon=True).start()

    def _ask(self, connection: Connection) -> None:
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            known = True
        except (AssertionError, AuthenticationError, EOFError, OSError):
            known = False  # A stranger, or shut.
        with self._changing:
            known = known and connection in self._knocking
            with contextlib.suppress(ValueError):
                self._knocking.remove(connection)
            if known:
                self.come.put(connection)
        if not known:
            connection.close()


def knock(host: str, port: int, key: bytes, bound_s: float) -> Connection:
    """A connection to who has opened a door there.

    OSError where there is none in ``bound_s``; AuthenticationError where it is another's, which knows another key.
    """
    with socket.create_connection((host, port), timeout=bound_s) as made:
        made.settimeout(None)
        connection = Connection(made.detach())
    over = threading.Timer(bound_s, shut, [connection])
    over.daemon = True
    over.start()
    try:
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
    except (AssertionError, EOFError, OSError) as error:
        connection.close()
        if isinstance(error, AssertionError):
            raise AuthenticationError("no door of ours") from error
        raise ConnectionError(f"{host}:{port} does not answer: {error!r}") from error
    except AuthenticationError:
        connection.close()
        raise
    finally:
        over.cancel()
    return connection


def shut(connection: Connection) -> None:
    """End it for whoever reads from it, in whatever thread, and at the other end."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.shutdown(socket.SHUT_RDWR)


def _listening(host: str, port: int) -> socket.socket:
    if host:
        return socket.create_server((host, port), backlog=KNOCKING_MAX)
    if socket.has_dualstack_ipv6():
        # Where the kernel knows IPv6 and has it switched off there is no address to bind.
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=KNOCKING_MAX, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=KNOCKING_MAX)
