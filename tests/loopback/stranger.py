"""A third site that only ever pushes what the syncer throws away."""

from __future__ import annotations

import contextlib
import threading

from diloco.codec.registry import make_codec
from diloco.sync.options import PROTOCOL
from diloco.wire.messages import JoinAsk, PushHeader, Refused, Unreachable
from tests.loopback.toy import RUN, Toy

SITE, EVERY_S = "stranger", 0.1


class Stranger:
    """Joins and sends an update whose payload is not what it declares, again and again, in a thread of its own."""

    def __init__(self, toy: Toy, address: str) -> None:
        self._toy = toy
        self._client = toy.sync_client(SITE, address)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=SITE, daemon=True)

    def _run(self) -> None:
        while not self._stopping.wait(EVERY_S):
            with contextlib.suppress(Refused, Unreachable):
                self._push(self._join())

    def _join(self) -> int:
        agreement, layout = self._toy.agreement(), self._toy.layout()
        fields = (PROTOCOL, RUN, agreement.lineage, SITE, "5" * 16, layout.fingerprint)
        return self._client.join(JoinAsk(*fields, layout.to_json().encode(), agreement.shared)).incarnation

    def _push(self, incarnation: int) -> None:
        numel = self._toy.layout().fragments[0].numel
        payload = bytes(make_codec(self._toy.codec).payload_bytes(numel))
        where = (RUN, SITE, incarnation, 0, 1, 0)
        what = (10, 1, 1_000_000, 1, False, self._toy.codec, len(payload), numel, "0" * 64)
        self._client.push(PushHeader(*where, *what), payload)

    def __enter__(self) -> Stranger:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._client.close()
        self._thread.join(20.0)
