"""How an attacker reaches the syncer: one channel for each thing that can be shown, and what came of a call."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import grpc

from diloco.wire.convert import unpack_push_reply
from diloco.wire.messages import MalformedMessage, PushResult
from tests.hunts import statuses
from tests.hunts.asking import STREAMS, Call

CALL_S = 30.0
WATCHES = ("Watch",)


class Access:
    """The channels of one attacker; ``shown`` is by caller what ``target.guarded`` gave."""

    def __init__(self, address: str, shown: dict[str, Any]) -> None:
        self._address = address
        self.shown = shown
        self._channels: dict[str, Any] = {}
        self._authority = Path(shown["ca"]).read_bytes() if "ca" in shown else None

    @property
    def has_certificates(self) -> bool:
        """Whether callers are told apart by certificates rather than tokens."""
        return "token" not in self.shown["unknown"]

    def can_show(self, who: str) -> bool:
        """Whether there is such a caller in this variant."""
        return who in self.shown or (not self.has_certificates and who in _ODD_TOKENS)

    def channel(self, who: str) -> Any:
        """The channel on which ``who`` calls; tokens of all callers travel on one."""
        pair = self.shown.get(who, {}).get("certificate")
        name = who if pair else ""
        if name not in self._channels:
            private = [("grpc.use_local_subchannel_pool", 1)]
            if self._authority is None:
                self._channels[name] = grpc.insecure_channel(self._address, private)
            else:
                chain, key = (Path(path).read_bytes() for path in pair) if pair else (None, None)
                credentials = grpc.ssl_channel_credentials(self._authority, key, chain)
                self._channels[name] = grpc.secure_channel(self._address, credentials, private)
        return self._channels[name]

    def metadata(self, who: str) -> tuple[tuple[str, str], ...]:
        """What ``who`` sends along."""
        if not self.has_certificates and who in _ODD_TOKENS:
            return tuple(("authorization", value) for value in _ODD_TOKENS[who])
        token = self.shown.get(who, {}).get("token")
        return (("authorization", f"Bearer {token}"),) if token else ()

    def make(self, call: Call) -> tuple[str, str]:
        """Make ``call``: its answer in the table's words, and the details."""
        channel, metadata = self.channel(call.who), self.metadata(call.who) + call.metadata
        options: dict[str, Any] = {"metadata": metadata, "timeout": CALL_S, "compression": call.compression}
        try:
            if call.method in STREAMS or len(call.messages) != 1:
                answers = list(channel.stream_stream(call.path)(iter(call.messages), **options))
                return (_result(answers), "") if call.method == "Push" else ("OK", "")
            stream = channel.unary_stream(call.path)(call.messages[0], **options)
            if call.method in WATCHES:
                list(itertools.islice(stream, 1))
                stream.cancel()
            else:
                list(stream)
        except grpc.RpcError as error:
            return error.code().name, error.details() or ""
        return "OK", ""

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()


_ODD_TOKENS = {
    "two tokens": ("Bearer aaaaaaaaaaaaaaaaaaaa", "Bearer bbbbbbbbbbbbbbbbbbbb"),
    "no bearer": ("Basic dXNlcjpwYXNz",),
    "odd token": ("Bearer ",),
}


def _result(answers: list[bytes]) -> str:
    """What a push was told last."""
    try:
        last = unpack_push_reply(answers[-1]) if answers else None
    except MalformedMessage as error:
        return f"an answer that is none: {error}"
    if not isinstance(last, PushResult):
        return "OK without a result"
    return last.outcome.value + (f"/{last.reason.value}" if last.reason is not None else "")


def due(call: Call, access: Access) -> frozenset[str]:
    """What may be answered to ``call`` here: somebody whose certificate is not ours does not get as far as a status."""
    if access.has_certificates and call.who in ("nobody", "unknown"):
        return statuses.ROWS[statuses.TLS_FAILS]
    return call.allowed or statuses.ROWS[call.row]
