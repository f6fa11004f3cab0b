"""A version that is asked for before it is there, so that it sets out for the site at the moment at which it is made.

Otherwise a round costs one round trip more: the syncer tells that there is a version, and is then asked for it.  What
goes wrong here is nobody's loss, for the version is asked for once more when it is told of.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from diloco.wire.messages import Refused, Unreachable
from diloco.wire.pulling import Patience

if TYPE_CHECKING:
    from diloco.wire.client import SyncClient
    from diloco.wire.messages import PullAsk
    from diloco.wire.pulled import PulledVersion, PullSink

WAIT_S = 60.0
"""A round that takes longer is not much longer by a round trip."""


class Ahead:
    """One pull that waits, in a thread of its own from ``begin`` to ``take``; both are for any thread."""

    def __init__(self, client: SyncClient, ask: PullAsk, sink: PullSink) -> None:
        self.ask = ask
        self._client = client
        self._sink = sink
        self._patience = Patience(WAIT_S)
        self._pulled: PulledVersion | None = None
        self.carried_s = 0.0
        """How long the version took to come, once it was there."""
        self._thread = threading.Thread(target=self._run, name="pull-ahead", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._pulled = self._client.pull(self.ask, self._sink, self._patience)
        except (Refused, Unreachable):
            return
        self.carried_s = self._patience.carried_s

    @property
    def over(self) -> bool:
        """Whether it waits no more and brings nothing."""
        return not self._thread.is_alive() and (self._pulled is None or not self._pulled.parts)

    def take(self) -> PulledVersion | None:
        """The version, which is known to be there by now; None when it has to be asked for."""
        self._patience.due()
        self._thread.join()
        return self._pulled if self._pulled is not None and self._pulled.parts else None
