"""Whatever bytes come: one definite status, never UNKNOWN or INTERNAL, and nothing has changed (invariant 15)."""

from __future__ import annotations

import contextlib
import random
import threading
from typing import TYPE_CHECKING, Any

import grpc

from diloco.wire.channel import ADMIN_SERVICE, SYNC_SERVICE, StallWatch
from diloco.wire.convert import pack_push
from diloco.wire.door import Connections, Counters, Door
from diloco.wire.handlers import SyncHandlers, admin_handler
from diloco.wire.identity import Authenticator
from diloco.wire.messages import Chunk, Frame, PushCommit
from diloco.wire.options import SecurityOptions, ServerOptions
from tests.wire.fake_syncer import RUN, FakeSyncer, push_header, sha256
from tests.wire.samples import everything
from tests.wire.test_convert import mutated
from tests.wire.test_handlers import chunk

if TYPE_CHECKING:
    from tests.wire.conftest import Wired

METHODS = {
    **{f"/{SYNC_SERVICE}/{name}": name for name in ("Join", "Report", "Leave", "Push", "Watch", "Pull", "Probe")},
    **{
        f"/{ADMIN_SERVICE}/{name}": name
        for name in ("Status", "Drain", "Evict", "Readmit", "Admit", "Refuse", "Snapshot")
    },
}
PAYLOAD = b"payload" * 100


class Aborted(Exception):
    """What ``abort`` raises here."""


class Context:
    """As much of gRPC's context as the handlers ask for."""

    def __init__(self) -> None:
        self.status = grpc.StatusCode.OK
        self.details = ""
        self.turns = 3

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def set_trailing_metadata(self, metadata: object) -> None:
        return

    def add_callback(self, callback: object) -> bool:
        return True

    def peer(self) -> str:
        return "fuzz"

    def cancel(self) -> None:
        self.turns = 0

    def is_active(self) -> bool:
        # A watch would go on for ever; this client goes away after a few events.
        self.turns -= 1
        return self.turns > 0

    def abort(self, status: grpc.StatusCode, details: str) -> None:
        self.status, self.details = status, details
        raise Aborted


class InProcess:
    """The handlers without a network."""

    def __init__(self) -> None:
        self.syncer = FakeSyncer()
        self.counters = Counters()
        self._stalls = StallWatch("fuzz")
        options = ServerOptions(run_id=RUN, alive_s=0.001)
        connections = Connections(8, self.counters, str)
        door = Door(Authenticator(SecurityOptions()), options, self.counters, connections, self._stalls)
        sync = SyncHandlers(self.syncer, options, door, threading.Event())
        self._handlers = (sync.generic_handler(), admin_handler(self.syncer, door))

    def call(self, path: str, raws: list[bytes]) -> Context:
        details = type("Details", (), {"method": path, "invocation_metadata": ()})()
        handler = next(found for each in self._handlers if (found := each.service(details)) is not None)
        context = Context()
        with contextlib.suppress(Aborted):
            list((handler.stream_stream or handler.stream_unary)(iter(raws), context))
        return context

    def close(self) -> None:
        self._stalls.close()


def whole_push(chance: random.Random) -> list[bytes]:
    """The messages of a good push with a random id, in chunks or in frames, which may come in any order."""
    frames = chance.random() < 0.5
    header = push_header(PAYLOAD, sequence=chance.randrange(1000), frames=frames)
    places = range(0, len(PAYLOAD), 300)
    pieces: list[Chunk | Frame] = [chunk(at, PAYLOAD[at : at + 300]) for at in places]
    if frames:
        pieces = [Frame(at, memoryview(PAYLOAD)[at : at + 300]) for at in places]
        chance.shuffle(pieces)
    return [pack_push(part) for part in (header, *pieces, PushCommit(len(PAYLOAD), sha256(PAYLOAD)))]


def attack(path: str, raws: list[bytes], chance: random.Random) -> list[bytes]:
    """What to say to ``path``."""
    if METHODS[path] != "Push":
        return [mutated(chance.choice(raws), raws, chance)]
    messages = whole_push(chance)
    for _ in range(chance.randint(1, 2)):
        at = chance.randrange(len(messages))
        match chance.randrange(4):
            case 0:
                del messages[at]
            case 1:
                messages.insert(at, messages[chance.randrange(len(messages))])
            case _:
                messages[at] = mutated(messages[at], raws, chance)
        messages = messages or [b""]
    return messages


def test_fuzz_every_method_in_process() -> None:
    seed = 77
    chance = random.Random(seed)
    raws = [pack(message) for message, pack, _ in everything()]
    wired = InProcess()
    seen: dict[str, int] = {}
    for turn in range(5000):
        path = chance.choice(sorted(METHODS))
        messages = attack(path, raws, chance)
        accepted, calls = dict(wired.syncer.accepted), list(wired.syncer.calls)
        status = (context := wired.call(path, messages)).status
        seen[status.name] = seen.get(status.name, 0) + 1
        where = f"seed {seed}, turn {turn}, {path}: {status} {context.details}"
        assert status not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL), where
        assert all(held == PAYLOAD for held in wired.syncer.accepted.values()), where
        if status is not grpc.StatusCode.OK:
            assert wired.syncer.accepted == accepted, where
            assert wired.syncer.calls == calls or METHODS[path] in ("Push", "Pull"), where
        assert "open" not in wired.syncer.endings, where
    wired.close()
    assert wired.counters.totals().get("internal", 0) == 0
    assert seen["INVALID_ARGUMENT"] > 1700, f"seed {seed}: {seen}: the fuzz does not reach far"
    assert seen["OK"] > 170, f"seed {seed}: {seen}: the fuzz never gets through"
    assert seen["DATA_LOSS"] > 17, f"seed {seed}: {seen}"


def test_fuzz_over_loopback(wired: Wired) -> None:
    seed = 78
    chance = random.Random(seed)
    raws = [pack(message) for message, pack, _ in everything()]
    channel = wired.channel()
    kinds: dict[str, Any] = {"Push": channel.stream_stream, "Pull": channel.unary_stream}
    # A Watch lasts, and so may a Probe that asks for filler which nobody reads.
    paths = [path for path, name in sorted(METHODS.items()) if name not in ("Watch", "Probe")]
    for turn in range(400):
        path = chance.choice(paths)
        messages = attack(path, raws, chance)
        before = wired.syncer.state()
        open_call = kinds.get(METHODS[path], channel.unary_unary)(path)
        status, details = status_of(open_call, messages, METHODS[path])
        where = f"seed {seed}, turn {turn}, {path}: {status} {details}"
        assert status in {"OK", "INVALID_ARGUMENT", "DATA_LOSS", "NOT_FOUND", "RESOURCE_EXHAUSTED"}, where
        if status != "OK" and METHODS[path] not in ("Push", "Pull"):
            assert wired.syncer.state() == before, where
    assert wired.server.counters().get("internal", 0) == 0
    assert all(held == PAYLOAD for held in wired.syncer.accepted.values()), f"seed {seed}"


def status_of(call: Any, messages: list[bytes], method: str) -> tuple[str, str]:
    """How a call over the network ends."""
    try:
        answer = call(iter(messages) if method == "Push" else messages[0], timeout=10)
        if method in ("Push", "Pull"):
            list(answer)
    except grpc.RpcError as error:
        return error.code().name, error.details()
    return "OK", ""
