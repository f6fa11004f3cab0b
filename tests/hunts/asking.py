"""Valid requests for every method, from a site that knows the state of its run."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import pkgutil
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import torch
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from diloco.codec.registry import make_codec
from diloco.sync.options import PROTOCOL
from diloco.wire import convert, v1
from diloco.wire.channel import ADMIN_SERVICE, SYNC_SERVICE
from diloco.wire.chunks import checksum
from diloco.wire.convert import pack_pull, pack_push, unpack_push_reply
from diloco.wire.messages import (
    Chunk,
    EvictAsk,
    JoinAsk,
    MalformedMessage,
    MemberAsk,
    PullAsk,
    PushCommit,
    PushHeader,
    PushResult,
)
from diloco.wire.v1 import admin_pb2, sync_pb2
from tests.hunts import statuses
from tests.loopback.test_hostile import report
from tests.loopback.toy import RUN

SYNC, ADMIN, HEALTH = f"/{SYNC_SERVICE}/", f"/{ADMIN_SERVICE}/", "/grpc.health.v1.Health/"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
FOR_STRANGERS = (f"{HEALTH}Check", f"{HEALTH}List")
STREAMS = ("Push", "ServerReflectionInfo")


@dataclass
class Call:
    """One call by the caller ``who``; its answer must be in ``row`` of the table, or in ``allowed`` if that is set."""

    row: str
    path: str
    messages: list[bytes]
    who: str = ""
    allowed: frozenset[str] = frozenset()
    metadata: tuple[tuple[str, str], ...] = ()
    compression: Any = None

    @property
    def method(self) -> str:
        return self.path.rpartition("/")[2]


@dataclass
class World:
    """An attacker's knowledge of a run in which its site has pushed updates and seen versions."""

    site: str
    other: str
    layout: Any
    agreement: Any
    process: str = "f00dfeedf00dfeed"
    incarnation: int = 0
    watermarks: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    last: dict[int, tuple[PushHeader, bytes]] = field(default_factory=dict)

    def join(self, **changes: Any) -> JoinAsk:
        layout, shared = self.layout, dict(self.agreement.shared)
        text = layout.to_json().encode()
        ask = JoinAsk(PROTOCOL, RUN, 1, self.site, self.process, layout.fingerprint, text, shared)
        return replace(ask, **changes)

    def enter(self, call: Callable[[bytes], bytes]) -> None:
        """Join by ``call``, with the reply's ticket where another process holds the site, and learn the run's state."""
        reply = convert.unpack_join_reply(call(convert.pack_join(self.join())))
        while reply.ticket:
            reply = convert.unpack_join_reply(call(convert.pack_join(self.join(ticket=reply.ticket))))
        self.incarnation = reply.incarnation
        self.versions = [standing.version for standing in reply.standings]
        self.watermarks = [standing.watermark for standing in reply.standings]

    def update(self, chance: random.Random, encoding: str = "fp32", **changes: Any) -> tuple[PushHeader, bytes]:
        """Return the next update of one of the fragments, valid except for ``changes``."""
        fragment = changes.get("fragment", chance.randrange(len(self.versions)))
        numel = self.layout.fragments[fragment].numel
        payload = changes.pop("payload", None)
        if payload is None:
            dice = torch.Generator().manual_seed(chance.getrandbits(32))
            payload = make_codec(encoding).encode(torch.randn(numel, generator=dice))
        here = (RUN, self.site, self.incarnation, fragment, self.watermarks[fragment] + 1, self.versions[fragment])
        digest = hashlib.sha256(payload).hexdigest()
        header = PushHeader(*here, 50, 5, 1_000_000, 5, False, encoding, len(payload), numel, digest)
        return replace(header, **changes), payload


def pushed(header: PushHeader, payload: bytes, at: int = 0) -> list[bytes]:
    """Return all messages of an update's push, from byte ``at`` on."""
    parts = [Chunk(at, memoryview(payload)[at:], checksum((payload[at:],)))] if payload[at:] else []
    return [pack_push(part) for part in (header, *parts, PushCommit(header.payload_bytes, header.digest))]


def parsed(path: str, raw: bytes) -> tuple[Any, Any]:
    """Return a request to ``path`` as protobuf's own message, and the part of it that has the fields."""
    message: Any = GetMessageClass(methods()[path])()
    message.ParseFromString(raw)
    return message, message.header if path.endswith("Push") else message


def changed(path: str, raw: bytes, **changes: Any) -> bytes:
    """Return a request with other fields, packed without checks, as no client of ours would send it."""
    message, inside = parsed(path, raw)
    for name, value in changes.items():
        setattr(inside, name, value)
    return bytes(message.SerializeToString())


def methods() -> dict[str, Any]:
    """Return every method that a site, an operator or any caller may use, with the type of its request."""
    return _methods([sync_pb2, admin_pb2, health_pb2, reflection_pb2])


def other_methods() -> dict[str, Any]:
    """Return the methods of all our other services, which the attackers here may not call."""
    names = [module.name for module in pkgutil.iter_modules(v1.__path__) if module.name.endswith("_pb2")]
    found = _methods([importlib.import_module(f"{v1.__name__}.{name}") for name in sorted(names)])
    return {path: kind for path, kind in found.items() if path not in methods()}


def _methods(files: list[Any]) -> dict[str, Any]:
    return {
        f"/{service.full_name}/{method.name}": method.input_type
        for file in files
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }


def good(world: World, chance: random.Random) -> dict[str, tuple[object, bytes]]:
    """Return a valid, idempotent request for each method: (dataclass if there is one, bytes)."""
    asks: dict[str, tuple[object, bytes]] = {}
    for name, ask, pack in (
        (f"{SYNC}Join", world.join(), convert.pack_join),
        (f"{SYNC}Watch", MemberAsk(RUN, world.site, world.incarnation), convert.pack_member),
        (f"{SYNC}Pull", PullAsk(RUN, world.site, chance.randrange(len(world.versions)), -1), pack_pull),
        (f"{SYNC}Leave", MemberAsk(RUN, world.site, world.incarnation), convert.pack_member),
        (f"{ADMIN}Evict", EvictAsk("ghost"), convert.pack_evict),
    ):
        asks[name] = ask, pack(ask)  # type: ignore[operator]
    raw = report(site_id=world.site, incarnation=world.incarnation, versions=tuple(world.versions), loss=None)
    asks[f"{SYNC}Report"] = convert.unpack_report(raw), raw
    header, _ = world.update(chance)
    asks[f"{SYNC}Push"] = header, pack_push(header)
    asks[f"{HEALTH}Check"] = None, health_pb2.HealthCheckRequest(service=RUN).SerializeToString()
    asks[f"{HEALTH}Watch"] = None, health_pb2.HealthCheckRequest(service=RUN).SerializeToString()
    asks[REFLECTION] = None, reflection_pb2.ServerReflectionRequest(list_services="x").SerializeToString()
    return {path: asks.get(path, (None, b"")) for path in methods()}


def asked_by(path: str, world: World) -> str:
    """Return the caller that may call this method."""
    return "admin" if path.startswith(ADMIN) else world.site


# --- How an attacker reaches the syncer ------------------------------------------------------------------------------

CALL_S = 30.0


class Access:
    """The channels of one attacker; ``shown`` has each caller's credentials, as ``target.guarded`` returned them."""

    def __init__(self, address: str, shown: dict[str, Any]) -> None:
        self._address = address
        self.shown = shown
        self._channels: dict[str, Any] = {}
        self._authority = Path(shown["ca"]).read_bytes() if "ca" in shown else None

    @property
    def has_certificates(self) -> bool:
        """Whether certificates, rather than tokens, identify callers."""
        return "token" not in self.shown["unknown"]

    def can_show(self, who: str) -> bool:
        """Return whether the caller ``who`` exists in this variant."""
        return who in self.shown or (not self.has_certificates and who in _ODD_TOKENS)

    def channel(self, who: str) -> Any:
        """Return the channel of ``who``; all callers with tokens share one."""
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
        """Return the metadata with the credentials of ``who``."""
        if not self.has_certificates and who in _ODD_TOKENS:
            return tuple(("authorization", value) for value in _ODD_TOKENS[who])
        token = self.shown.get(who, {}).get("token")
        return (("authorization", f"Bearer {token}"),) if token else ()

    def make(self, call: Call) -> tuple[str, str]:
        """Make ``call``; return its answer in the table's words, and the details."""
        channel, metadata = self.channel(call.who), self.metadata(call.who) + call.metadata
        options: dict[str, Any] = {"metadata": metadata, "timeout": CALL_S, "compression": call.compression}
        try:
            if call.method in STREAMS or len(call.messages) != 1:
                answers = list(channel.stream_stream(call.path)(iter(call.messages), **options))
                return (_result(answers), "") if call.method == "Push" else ("OK", "")
            stream = channel.unary_stream(call.path)(call.messages[0], **options)
            if call.method == "Watch":
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
    """Return the outcome in the last reply to a push."""
    try:
        last = unpack_push_reply(answers[-1]) if answers else None
    except MalformedMessage as error:
        return f"a malformed answer: {error}"
    if not isinstance(last, PushResult):
        return "OK without a result"
    return last.outcome.value + (f"/{last.reason.value}" if last.reason is not None else "")


def due(call: Call, access: Access) -> frozenset[str]:
    """Return the allowed answers to ``call`` here: without a certificate of ours a caller gets no status at all."""
    if access.has_certificates and call.who in ("nobody", "unknown"):
        return statuses.ROWS[statuses.TLS_FAILS]
    return call.allowed or statuses.ROWS[call.row]
