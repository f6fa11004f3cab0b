"""Asks a syncer how the run stands, and passes a request to drain on, in a thread of its own."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from diloco.wire.client import AdminClient
from diloco.wire.messages import Refused, Unreachable

if TYPE_CHECKING:
    from diloco.wire.security import SecurityOptions

Status = dict[str, object]
EVERY_S = 1.0
EVERY_S_AT_THE_END = 0.15
CLOSE_WAIT_S = 15.0


class StatusWatch:
    """``latest`` is the newest answer.

    The last one before the syncer ends holds the final counts, which is why it is asked more often towards the end.
    """

    def __init__(self, address: str, security: SecurityOptions) -> None:
        self.latest: Status | None = None
        self.drain_accepted = False
        self.drain_refused = ""
        self._client = AdminClient(address, security)
        self._drain = False
        self._every_s = EVERY_S
        self._ended = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status-watch", daemon=True)
        self._thread.start()

    def hurry(self) -> None:
        """The end is near: ask several times a second."""
        self._every_s = EVERY_S_AT_THE_END
        self._wake.set()

    def drain(self) -> None:
        """Ask for the last round, again and again until the syncer has heard it."""
        self._drain = True
        self._wake.set()

    def close(self) -> None:
        """End the thread."""
        self._ended = True
        self._wake.set()
        self._client.close()
        self._thread.join(CLOSE_WAIT_S)

    def _run(self) -> None:
        while not self._ended:
            self._wake.clear()
            try:
                if self._drain and not self.drain_accepted:
                    self._client.drain()
                    self.drain_accepted = True
                self.latest = self._client.status()
            except Unreachable:
                pass  # It starts, it was killed by the scenario, or it has ended: the next turn asks again.
            except Refused as error:
                self.drain_refused = error.text
            self._wake.wait(self._every_s)
