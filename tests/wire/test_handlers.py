"""What the syncer's end does with what sites send, whatever bytes come."""

from __future__ import annotations

import inspect
import random
import time
import zlib
from collections import Counter
from typing import Any

import grpc
import pytest

from diloco.sync.events import Outcome, Reason
from diloco.wire.channel import SYNC_SERVICE
from diloco.wire.convert import (
    pack_join,
    pack_member,
    pack_pull,
    pack_push,
    unpack_pull_part,
    unpack_push_reply,
    unpack_watch_event,
)
from diloco.wire.handlers import PushSession, SyncerApi, WatchFeed
from diloco.wire.messages import (
    PAYLOAD_BYTES_MAX,
    Alive,
    Chunk,
    Dropped,
    Frame,
    MemberAsk,
    PullAsk,
    PushAdmitted,
    PushCommit,
    PushPart,
    PushReply,
    PushResult,
    Refusal,
    Status,
)
from diloco.wire.v1 import sync_pb2
from tests.hunts.mutating import spoiled
from tests.wire.conftest import Patch, Start, Talk, Wired, ended, refused
from tests.wire.fake_syncer import (
    RUN,
    FakeFeed,
    FakeSession,
    FakeSyncer,
    join_ask,
    push_header,
    sha256,
)
from tests.wire.relay import WAIT_S
from tests.wire.samples import everything

SEED = 8
PAYLOAD = random.Random(SEED).randbytes(10_000)
HEADER = push_header(PAYLOAD)
ACCEPTED = PushResult(Outcome.ACCEPTED, 3)


def chunk(offset: int, data: bytes = PAYLOAD) -> Chunk:
    return Chunk(offset, data, zlib.crc32(data))


def commit(payload: bytes = PAYLOAD) -> PushCommit:
    return PushCommit(len(payload), sha256(payload))


def say(wired: Wired, *messages: PushPart | bytes) -> list[PushReply]:
    """A push of just these messages, then the end of the stream."""
    raws = [message if isinstance(message, bytes) else pack_push(message) for message in messages]
    push = wired.talk(f"/{SYNC_SERVICE}/Push", *raws)
    push.close()
    return [unpack_push_reply(raw) for raw in push.call]


FULL, INVALID, LOST = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DATA_LOSS
FENCED, CANCELLED = grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.CANCELLED
NOT_FOUND = grpc.StatusCode.NOT_FOUND


VAST = sync_pb2.PushRequest.FromString(pack_push(HEADER))
VAST.header.payload_bytes = PAYLOAD_BYTES_MAX + 1
BEYOND = f"payload_bytes is {PAYLOAD_BYTES_MAX + 1}: a number from 1 to {PAYLOAD_BYTES_MAX}"
SPECKS: list[PushPart | bytes] = [chunk(at, PAYLOAD[at : at + 10]) for at in range(0, 1000, 10)]
BAD_PUSHES: dict[str, tuple[grpc.StatusCode, str, list[PushPart | bytes]]] = {
    "nothing": (LOST, "before the header", []),
    "noise": (INVALID, "cannot be parsed", [b"\xff\xff\xff"]),
    "chunk first": (INVALID, "header", [chunk(0)]),
    "too much declared": (INVALID, BEYOND, [VAST.SerializeToString(), chunk(0)]),
    "two headers": (INVALID, "header", [HEADER, HEADER]),
    "commit too early": (LOST, "ends at 9 of 10000", [HEADER, chunk(0, PAYLOAD[:9]), commit()]),
    "no commit": (LOST, "before the commit", [HEADER, chunk(0)]),
    "another commit": (INVALID, "commit", [HEADER, chunk(0), commit(b"x")]),
    "a hole": (INVALID, "chunk at offset 1, and the next byte is 0", [HEADER, chunk(1, PAYLOAD[1:])]),
    "a chunk again": (INVALID, "the next byte is 9", [HEADER, chunk(0, PAYLOAD[:9]), chunk(0, PAYLOAD[:9])]),
    "too many bytes": (INVALID, "over the 10000 declared", [HEADER, chunk(0, PAYLOAD + b"x")]),
    "damaged chunk": (LOST, "offset 0 was damaged on the way", [HEADER, Chunk(0, PAYLOAD, 1)]),
    "wrong bytes": (LOST, "digest of the payload differs", [HEADER, chunk(0, bytes(10_000)), commit()]),
    "specks": (INVALID, "bytes", [HEADER, *SPECKS]),
}


@pytest.mark.parametrize("name", BAD_PUSHES)
def test_a_bad_push_changes_nothing_and_says_why(wired: Wired, name: str) -> None:
    status, words, messages = BAD_PUSHES[name]
    assert words in refused(lambda: say(wired, *messages), status).details()
    assert not wired.syncer.accepted
    assert wired.server.counters()[f"refused_{status.name.lower()}"] == 1
    assert wired.server.counters().get("internal", 0) == 0
    assert "committed" not in wired.syncer.endings
    assert wired.syncer.commits == (name == "wrong bytes")
    admitted = name not in ("nothing", "noise", "chunk first", "too much declared")
    assert wired.syncer.calls == ["open_push"] * admitted
    assert wired.server.counters().get("payload_bytes_in", 0) == 0 or admitted, "a byte was read before it was admitted"


def held(wired: Wired, **changes: object) -> Talk:
    """A push that was admitted and says nothing more yet."""
    talk = wired.talk(f"/{SYNC_SERVICE}/Push", pack_push(push_header(PAYLOAD, **changes)))
    assert unpack_push_reply(next(talk.call)) == PushAdmitted(0)
    return talk


def test_a_site_that_comes_back_ends_its_own_old_push_and_waits_no_longer(start: Start, monkeypatch: Patch) -> None:
    monkeypatch.setattr("diloco.wire.door._SUPERSEDE_S", 3 * WAIT_S)
    wired, began_s = start(pushes_max=1), time.monotonic()
    old = held(wired, incarnation=4)
    refused(lambda: say(wired, push_header(PAYLOAD, incarnation=3)), FENCED)
    assert say(wired, push_header(PAYLOAD, incarnation=5), chunk(0), commit())[-1] == ACCEPTED
    refused(lambda: next(old.call), CANCELLED)
    assert time.monotonic() - began_s < 2 * WAIT_S
    assert wired.syncer.endings == ["broken off", "committed"]


def test_a_push_that_stalls_is_ended_and_its_bytes_are_kept(start: Start) -> None:
    wired = start(stall_s=0.4)
    push = held(wired)
    push.say(pack_push(chunk(0, PAYLOAD[:5000])))
    refused(lambda: list(push.call), CANCELLED)
    assert wired.syncer.ended.wait(WAIT_S)
    assert wired.syncer.endings == ["broken off"]
    assert len(wired.syncer.spool["site-a", 0, 1]) == 5000


def join(channel: Any) -> Any:
    return channel.unary_unary(f"/{SYNC_SERVICE}/Join").future(pack_join(join_ask()), timeout=WAIT_S)


def test_join_is_refused_with_the_shells_words_in_one_short_line(wired: Wired) -> None:
    wired.syncer.join_fails = Refusal(Status.FAILED_PRECONDITION, "model.dim is 64 here\r\nand 128 there" + "x" * 5000)
    error = refused(join(wired.channel()).result, FENCED)
    assert error.details().startswith("model.dim is 64 here and 128 therex")
    assert len(error.details()) == 1024


def test_a_defect_of_ours_is_internal_logged_and_counted_and_says_nothing_of_the_inside(
    wired: Wired, logged: list[str]
) -> None:
    wired.syncer.join_fails = ZeroDivisionError("secret path /etc/x")
    assert "secret" not in refused(join(wired.channel()).result, grpc.StatusCode.INTERNAL).details()
    assert wired.server.counters()["internal"] == 1
    assert "ZeroDivisionError: secret" in "".join(logged)


def test_what_no_method_takes_is_refused_by_grpc(wired: Wired) -> None:
    for method, raw, status in (("Report", bytes(3_000_000), FULL), ("Nothing", b"", grpc.StatusCode.UNIMPLEMENTED)):
        call = wired.channel().unary_unary(f"/{SYNC_SERVICE}/{method}")
        refused(lambda call=call, raw=raw: call(raw, timeout=WAIT_S), status)
    assert wired.syncer.calls == []


def watch(wired: Wired, incarnation: int = 1) -> Any:
    ask = pack_member(MemberAsk(RUN, "site-a", incarnation))
    return wired.channel().unary_stream(f"/{SYNC_SERVICE}/Watch")(ask, timeout=30)


def test_watch_says_that_it_is_alive_and_ends_when_dropped(start: Start) -> None:
    wired = start(alive_s=0.2)
    stream = watch(wired)
    begun_s = time.monotonic()
    assert [unpack_watch_event(next(stream)) for _ in range(3)] == [Alive()] * 3
    assert 0.3 < time.monotonic() - begun_s < 5
    wired.syncer.feeds[0].events.put(Dropped(Reason.EVICTED))
    assert [event for event in map(unpack_watch_event, stream) if event != Alive()] == [Dropped(Reason.EVICTED)]
    assert wired.syncer.feeds[0].closed.wait(WAIT_S)
    stream = watch(start(alive_s=0.9))
    next(stream)
    begun_s = time.monotonic()
    next(stream)
    assert time.monotonic() - begun_s > 0.7, "it looks for events more often than it says that it is alive"


def test_a_new_watch_ends_the_old_one_and_an_older_incarnation_is_fenced(wired: Wired) -> None:
    old = watch(wired, 1)
    next(old)
    new = watch(wired, 2)
    assert unpack_watch_event(next(new)) == Alive()
    refused(lambda: list(old), CANCELLED)
    assert wired.syncer.feeds[0].closed.wait(WAIT_S)
    refused(lambda: list(watch(wired, 1)), FENCED)
    new.cancel()
    assert wired.syncer.feeds[1].closed.wait(WAIT_S), "its client is gone"


def pull(wired: Wired, ask: PullAsk) -> list[Any]:
    call = wired.channel().unary_stream(f"/{SYNC_SERVICE}/Pull")(pack_pull(ask), timeout=WAIT_S)
    return [unpack_pull_part(raw) for raw in call]


def test_a_pull_goes_on_from_an_offset_and_what_is_not_there_is_refused(wired: Wired) -> None:
    wired.syncer.publish(PAYLOAD, b"xyz")
    for offset in (0, 1, 9_999, 10_000, 10_001, 10_003):
        header, *chunks = pull(wired, PullAsk(RUN, "site-a", 0, 1, offset=offset))
        assert header == wired.syncer.version
        assert b"".join(part.data for part in chunks) == (PAYLOAD + b"xyz")[offset:]
    _, *rest = pull(wired, PullAsk(RUN, "site-a", 0, 1, offset=9_999, length=20_000))
    assert b"".join(part.data for part in rest) == (PAYLOAD + b"xyz")[9_999:], "no more than there is"
    before = wired.server.counters()["payload_bytes_out"]
    for ask in (
        PullAsk(RUN, "site-a", 5, 1),
        PullAsk("run-2", "site-a", 0, 1),
        PullAsk(RUN, "site-a", 0, 1, 2, 3),
        PullAsk(RUN, "site-a", 0, 1, 0, 100_000),
    ):
        refused(lambda ask=ask: pull(wired, ask), NOT_FOUND)
    assert wired.server.counters()["payload_bytes_out"] == before


def test_the_fake_has_the_signatures_of_the_contract() -> None:
    for contract, fake in ((SyncerApi, FakeSyncer), (PushSession, FakeSession), (WatchFeed, FakeFeed)):
        for name, method in inspect.getmembers(contract, inspect.isfunction):
            if not name.startswith("_"):
                assert list(inspect.signature(getattr(fake, name)).parameters) == list(
                    inspect.signature(method).parameters
                ), name


SHORT = b"payload" * 100


def whole_push(chance: random.Random) -> list[bytes]:
    """The messages of a good push with a random id, in chunks or in frames, which may come in any order."""
    frames = chance.random() < 0.5
    header = push_header(SHORT, sequence=chance.randrange(1000), frames=frames)
    places = range(0, len(SHORT), 300)
    pieces: list[Chunk | Frame] = [chunk(at, SHORT[at : at + 300]) for at in places]
    if frames:
        pieces = [Frame(at, memoryview(SHORT)[at : at + 300]) for at in places]
        chance.shuffle(pieces)
    return [pack_push(part) for part in (header, *pieces, commit(SHORT))]


def test_a_fuzzed_push_changes_nothing_or_is_accepted_whole(wired: Wired) -> None:
    seed = 77
    chance = random.Random(seed)
    raws = [pack(message) for message, pack, _ in everything()]
    syncer, push, seen = wired.syncer, wired.channel().stream_stream(f"/{SYNC_SERVICE}/Push"), Counter[str]()
    for turn in range(1000):
        accepted, messages = dict(syncer.accepted), whole_push(chance)
        for _ in range(chance.randint(1, 2)):
            at = chance.randrange(len(messages))
            match chance.randrange(4):
                case 0:
                    del messages[at]
                case 1:
                    messages.insert(at, messages[chance.randrange(len(messages))])
                case _:
                    messages[at] = spoiled(messages[at], raws, chance)
        status, details = ended(push(iter(messages), timeout=WAIT_S))
        seen[status] += 1
        where = f"seed {seed}, turn {turn}: {status} {details}"
        assert status in ("OK", "INVALID_ARGUMENT", "DATA_LOSS", "NOT_FOUND", "FAILED_PRECONDITION"), where
        assert all(held == SHORT for held in syncer.accepted.values()), where
        assert status == "OK" or syncer.accepted == accepted, where
    assert wired.server.counters().get("internal", 0) == 0
    for status, least in (("INVALID_ARGUMENT", 300), ("OK", 50), ("DATA_LOSS", 10)):
        assert seen[status] > least, f"seed {seed}: {seen}: the fuzz does not reach far"
