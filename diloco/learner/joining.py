"""How a site joins: the first time, with a bound, and again whenever the syncer was away."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

from diloco.codec import native
from diloco.learner.couriers import Pause
from diloco.learner.outcome import JoinFailed
from diloco.sync.events import JoinAnswered
from diloco.wire.messages import JoinAsk, Refused, Status, Unreachable

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from diloco.outer.fragments import Layout
    from diloco.sync.agreement import Agreement
    from diloco.sync.progress import LearnerState
    from diloco.wire.client import SyncClient
    from diloco.wire.messages import JoinReply


class Joiner:
    """One process of a site at the syncer's door; it has one name there as long as it lives."""

    def __init__(
        self,
        client: SyncClient,
        agreement: Agreement,
        layout: Layout,
        site_id: str,
        state: LearnerState,
        joined: Callable[[JoinReply], None],
        encodes: Callable[[], str],
        emit: Callable[[str, dict[str, object]], None],
        stopping: threading.Event,
    ) -> None:
        """``joined`` hears the answer before the machine's own event of it is given to the caller."""
        self._client, self._agreement, self._layout = client, agreement, layout
        self._site_id, self._process, self._state = site_id, secrets.token_hex(8), state
        self._joined, self._encodes, self._emit, self._stopping = joined, encodes, emit, stopping

    def attempt(self) -> JoinAnswered:
        """One attempt; raises ``Unreachable`` or ``Refused``."""
        agreement = self._agreement
        reply: JoinReply = self._client.join(
            JoinAsk(
                agreement.protocol,
                agreement.run_id,
                self._state.lineage,
                self._site_id,
                self._process,
                agreement.layout_fingerprint,
                self._layout.to_json().encode(),
                agreement.shared,
            ),
            self._state.epoch,
        )
        self._joined(reply)
        versions = [standing.version for standing in reply.standings]
        facts: dict[str, object] = {"incarnation": reply.incarnation, "epoch": reply.epoch, "versions": versions}
        how = {"syncer": self._client.address, "kernels": native.description(), "encodes": self._encodes()}
        self._emit("joined", {**facts, **how})
        return JoinAnswered(
            reply.epoch,
            reply.incarnation,
            reply.standings,
            reply.run_tokens,
            reply.progress_ppm,
            reply.ending,
            reply.lineage,
            reply.settings.keep_until_decided,
        )

    def first(self, until: float, join: Callable[[], None]) -> None:
        """Try ``join`` until the instant ``until``, or the site stops; ``JoinFailed`` says why it did not work."""
        pause = Pause(self._stopping)
        said = ""
        while True:
            try:
                return join()
            except Refused as error:
                mismatch = error.status is Status.FAILED_PRECONDITION
                raise JoinFailed("mismatch" if mismatch else "refused", error.text) from error
            except Unreachable as error:
                if error.refused and error.refused != said:
                    said = error.refused
                    self._emit("note", {"note": "join_refused", "why": error.why})
                if time.monotonic() >= until:
                    raise JoinFailed("refused" if error.refused else "unreachable", error.why) from error
                pause.wait(error.retry_after_s)
                if self._stopping.is_set():
                    raise JoinFailed("unreachable", f"the site is stopping; last: {error.why}") from error
