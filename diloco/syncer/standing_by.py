"""A standby on the network: it follows, says how it stands, and makes room for a syncer when it is to take over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.syncer.standby_api import StandbyApi
from diloco.syncer.succession import Succession
from diloco.wire.server import serve

if TYPE_CHECKING:
    from collections.abc import Callable

    from diloco.syncer.lease import Lease
    from diloco.syncer.standby import Standby, Warm
    from diloco.wire.options import ServerOptions
    from diloco.wire.security import SecurityOptions
    from diloco.wire.server import RunningServer

ANSWER_S = 0.5
"""Who asked for the promotion is answered within that, before the address is given up."""


class StandingBy:
    """Use: ``start``, then ``wait`` until it gives what a syncer on the same address goes on with; ``stop`` always.

    The address is served from the start, so that a setting that cannot work shows before it is needed, and sites that
    come too early are told where to ask.
    """

    def __init__(
        self,
        standby: Standby,
        primary: str,
        network: ServerOptions,
        security: SecurityOptions,
        note: Callable[[str, str], None] = lambda what, why: None,
        lease: Lease | None = None,
    ) -> None:
        """``note`` is told what the server says of who may come in (``wire.server.serve``)."""
        self.standby = standby
        self._succession = Succession(standby, lease, lambda: self.api.promoted.set())
        self.api = StandbyApi(standby, primary, self._succession)
        self._network, self._security, self._note = network, security, note
        self._server: RunningServer | None = None

    def start(self) -> str:
        """Begin to follow, and to answer; the address."""
        self.standby.start()
        try:
            self._server = serve(self.api, self._network, self._security, self._note, ready=False)
        except BaseException:
            self.standby.close()
            raise
        self.api.complaints = self._server.complaints
        self._succession.start()
        return self._server.address

    def wait(self, timeout_s: float) -> Warm | None:
        """What the standby hands over once it is promoted: the address is free then.  None: not yet.

        Raises what ended the following early, if anything did.
        """
        promoted = self.api.promoted.wait(timeout_s)
        if self.standby.failed is not None:
            raise self.standby.failed
        if not promoted:
            return None
        self._end_answering()
        return self._succession.hand_over(self.standby.promote(), lossy=self.api.lossy)

    @property
    def ended(self) -> bool:
        """Whether there is nothing left to stand by for: the run is over, and the syncer has stopped in order."""
        return self.standby.ended and not self.api.promoted.is_set()

    def stop(self) -> None:
        """Stop answering and following; what was handed over stays open."""
        self._end_answering()
        self._succession.stop()
        if not self.api.promoted.is_set():
            self.standby.close()

    def _end_answering(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.stop(ANSWER_S)
