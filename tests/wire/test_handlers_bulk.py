"""Bulk within the syncer: the bytes of a push on their way in, the deals and frames of a version on its way out."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from diloco.wire import convert, handlers
from diloco.wire.chunks import ChunkError, DamagedChunk
from diloco.wire.convert import FRAME_HEAD_BYTES, pack_frame
from diloco.wire.handlers import ASKERS_KEPT, DEALS_KEPT, Deals, Receiving, Receivings, Repeats
from diloco.wire.messages import (
    KIB,
    MIB,
    STREAMS_MAX,
    WINDOW_BYTES,
    Frame,
    MalformedMessage,
    PullAsk,
    PushAgain,
    Unreachable,
)
from diloco.wire.options import FRAMES_KEPT
from diloco.wire.pulling import PullSink
from tests.wire.conftest import Aside, Patch, Start, Wired
from tests.wire.fake_syncer import RUN, FakeSession, FakeSyncer, push_header
from tests.wire.relay import WAIT_S, Relay, wait_until
from tests.wire.samples import MARK, MARKS, PULL
from tests.wire.samples import PAYLOAD as LINES

SEED = 32
PAYLOAD = random.Random(SEED).randbytes(1000)
BIG = random.Random(SEED).randbytes(3 * WINDOW_BYTES)


def opened(payload: bytes = PAYLOAD, held: int = 0, **changes: Any) -> tuple[Receiving, FakeSession]:
    header = push_header(payload, frames=True, **changes)
    session = FakeSession(FakeSyncer(), header, bytearray(payload[:held]))
    return Receiving(header, session), session


def frame(offset: int, length: int = 100, *, intact: bool = True) -> Frame:
    return Frame(offset, memoryview(PAYLOAD)[offset : offset + length], intact)


def big(offset: int) -> Frame:
    return Frame(offset, memoryview(BIG)[offset : offset + MIB])


def test_frames_in_any_order_reach_the_session_in_theirs() -> None:
    for seed in range(20):
        receiving, session = opened(held=100)
        places = list(range(100, 1000, 100))
        random.Random(seed).shuffle(places)
        for offset in places:
            assert receiving.take(frame(offset)) is None
            assert session.held == PAYLOAD[: len(session.held)]
        assert receiving.await_rest(lambda: None, lambda: True)
        assert session.held == PAYLOAD
    receiving, session = opened(held=500)  # What came already is passed over and never wanted again.
    for came in (frame(100), frame(100, intact=False), frame(450)):
        assert receiving.take(came) is None
    assert session.held == PAYLOAD[:550]


def test_what_finds_no_room_is_wanted_again_and_memory_is_bounded() -> None:
    receiving, session = opened(BIG)
    began_s = time.monotonic()
    answers = [receiving.take(big(offset)) for offset in range(MIB, 2 * WINDOW_BYTES, MIB)]
    assert time.monotonic() - began_s < handlers.ROOM_WAIT_S, "no other stream can bring what is missing"
    kept = answers.count(None)
    assert kept * MIB == WINDOW_BYTES
    assert answers[kept:] == [PushAgain((kept + 1 + at) * MIB, MIB) for at in range(len(answers) - kept)]
    assert receiving.take(big(0)) is None
    assert len(session.held) == WINDOW_BYTES + MIB


def test_a_stream_that_is_ahead_waits_for_one_that_is_behind_but_not_too_long(aside: Aside, monkeypatch: Patch) -> None:
    receiving, session = opened(BIG)
    with receiving.stream_beside():
        ahead = aside(lambda: [receiving.take(big(offset)) for offset in range(MIB, 2 * WINDOW_BYTES, MIB)])
        assert not wait_until(ahead.done, seconds=0.3), "it ran further ahead than the window is long"
        receiving.take(big(0))
        assert set(ahead.result(WAIT_S)) == {None}
        assert session.held == BIG[: 2 * WINDOW_BYTES]
        monkeypatch.setattr(handlers, "ROOM_WAIT_S", 0.05)

    receiving, _ = opened(BIG)
    with receiving.stream_beside():
        for offset in range(MIB, WINDOW_BYTES + MIB, MIB):
            assert receiving.take(big(offset)) is None
        late = big(WINDOW_BYTES + MIB)
        assert receiving.take(late) == PushAgain(late.offset, MIB), "it lets fall what it brought"


def test_a_push_has_bounds() -> None:
    receiving, session = opened()
    for intact in (True, False):
        with pytest.raises(ChunkError, match="ends at 1001 of 1000"):
            receiving.take(Frame(901, memoryview(PAYLOAD)[:100], intact=intact))
    with ExitStack() as streams:
        for _ in range(STREAMS_MAX - 1):
            streams.enter_context(receiving.stream_beside())
        with pytest.raises(MalformedMessage, match="at most 6 streams"):
            streams.enter_context(receiving.stream_beside())
    assert not session.held


def test_streams_find_the_push_that_they_belong_to_as_long_as_it_is(aside: Aside) -> None:
    receivings, header = Receivings(), push_header(PAYLOAD, frames=True, others=1)
    session = FakeSession(FakeSyncer(), header, bytearray())

    def find(wait_s: float = 0.0, active: Callable[[], bool] = lambda: True, **changes: Any) -> Receiving:
        return receivings.of(replace(header, beside=True, **changes), wait_s, active)

    early = aside(find, 20.0)
    assert not wait_until(early.done, seconds=0.1), "it waits until the push is admitted"
    with receivings.open(header, session) as receiving:
        assert early.result(WAIT_S) is find() is receiving
        for other in ({"incarnation": 2}, {"digest": "0" * 64}, {"sequence": 2}):
            with pytest.raises(DamagedChunk, match="is over"):
                find(**other)
    looks = [True, True, False]
    for late in (find, lambda: find(0.05), lambda: find(20.0, lambda: looks.pop(0)), lambda: receiving.take(frame(0))):
        with pytest.raises(DamagedChunk, match="is over"):
            late()
    assert not session.held, "a session that is closed was written to"


def test_a_commit_before_the_last_chunks_waits_for_them_and_for_nothing_that_cannot_come(aside: Aside) -> None:
    moved: list[int] = []
    receiving, _ = opened(others=1)
    rest = aside(receiving.await_rest, lambda: moved.append(1), lambda: True)
    receiving.take(frame(0, 500))
    assert not wait_until(rest.done, seconds=0.1)
    receiving.take(frame(500, 500))
    assert rest.result(WAIT_S)
    assert moved
    for others in (0, 1):
        receiving, _ = opened(others=others)
        receiving.take(frame(0, 500))
        with pytest.raises(DamagedChunk, match="ends at 500"):
            receiving.await_rest(lambda: None, lambda others=others: others == 0)
    assert receiving.take(frame(500, 500, intact=False)) == PushAgain(500, 500)
    assert not receiving.await_rest(lambda: None, lambda: True)


ASK = PullAsk(RUN, "site-a", 3, 7, deal=5)
LONG = replace(PULL, payload_bytes=20 * MIB + 7)


def test_another_asker_another_number_and_another_version_are_other_deals_with_a_rate_for_all_streams() -> None:
    deals, whole = Deals(1), (0, LONG.payload_bytes)
    for asker, ask, header in (
        ("site-a", ASK, LONG),
        ("site-b", ASK, LONG),
        ("site-a", replace(ASK, deal=6, bytes_per_s=1 << 20), LONG),
        ("site-a", ASK, replace(LONG, version=10)),
    ):
        first = deals.join(asker, ask, header)
        assert first.next(LONG.payload_bytes) == whole
        second = deals.join(asker, ask, header)
        assert second.next(MIB) is None, "it would bring something twice"
        assert first.pacer is second.pacer
        assert (first.pacer.chunk_bytes(MIB) < MIB) == (ask.bytes_per_s > 0)
    deals = Deals(1)  # So many of an asker are remembered.
    for number in range(1, DEALS_KEPT + 2):
        deals.join("site-a", replace(ASK, deal=number), LONG).next(LONG.payload_bytes)
    assert deals.join("site-a", replace(ASK, deal=2), LONG).next(MIB) is None
    assert deals.join("site-a", replace(ASK, deal=1), LONG).next(MIB) is not None


@pytest.mark.parametrize("sites", [1, ASKERS_KEPT])
def test_the_deals_of_so_many_askers_are_remembered_and_those_of_all_sites(sites: int) -> None:
    deals, most = Deals(sites), max(ASKERS_KEPT, 2 * sites)
    deals.join("first", ASK, LONG).next(LONG.payload_bytes)
    for others, remembered in ((most - 1, True), (most, False)):
        for count in range(others):
            deals.join(f"invented-{count}", ASK, LONG)
        assert (deals.join("first", ASK, LONG).next(MIB) is None) == remembered


DATA = memoryview(bytes(range(100)))
CHUNK = 64 * KIB
SHORT = LINES[: 2 * CHUNK] + MARKS + LINES[2 * CHUNK : 4 * CHUNK]
CUTS = [*range(0, 4 * CHUNK, CHUNK), 4 * CHUNK]
FRAME = FRAME_HEAD_BYTES + 10


def made(repeats: Repeats, at: int, name: str = "v") -> bytes:
    return repeats.frame(name, at, DATA[at : at + 10])


def test_the_oldest_make_room_and_so_does_what_is_forgotten() -> None:
    repeats = Repeats(2 * FRAME)
    first, second, _ = (made(repeats, at) for at in (0, 10, 20))
    assert made(repeats, 10) is second
    assert made(repeats, 0) is not first
    alone = Repeats(FRAME - 1)
    assert made(alone, 0) is not made(alone, 0), "it has no room for one"
    repeats = Repeats(2 * FRAME)
    for _ in range(3):
        repeats.asked("v", "a", 0)
        first, second = (made(repeats, at) for at in (0, 10))
    assert (made(repeats, 0) is first, made(repeats, 10) is second) == (True, True)


def test_one_that_begins_once_more_and_the_next_ones_get_frames_that_are_made_anew() -> None:
    repeats = Repeats(1000)

    def frames() -> list[bytes]:
        return [made(repeats, at, name) for name, at in (("v3", 0), ("v3", 10), ("v4", 0))]

    def are_kept(before: list[bytes]) -> list[bool]:
        return [one is other for one, other in zip(before, frames(), strict=True)]

    kept = frames()
    for asker, attempt in (("a", 7), ("a", 7), ("b", 0), ("c", 8), ("a", 7)):
        repeats.asked("v3", asker, attempt)
        assert are_kept(kept) == [True] * 3, (asker, attempt)
    repeats.asked("v4", "a", 9)
    assert are_kept(kept) == [True] * 3, "it had not begun with this one"
    for asker, attempt in (("a", 9), ("b", 0), ("b", 0)):
        kept = frames()
        repeats.asked("v3", asker, attempt)
        assert are_kept(kept) == [False, False, True], (asker, attempt)


def test_so_many_are_known_to_have_begun() -> None:
    for others, kept in ((ASKERS_KEPT - 1, False), (ASKERS_KEPT, True)):
        repeats = Repeats(1000)
        repeats.asked("v", "first", 0)
        frame = made(repeats, 0)
        for count in range(others):
            repeats.asked("v", str(count), 0)
        repeats.asked("v", "first", 0)
        assert (made(repeats, 0) is frame) == kept


@pytest.fixture
def offsets(monkeypatch: Patch) -> list[int]:
    """The offset of each frame that a server has made, in order."""
    offsets: list[int] = []
    watched = lambda offset, data: (offsets.append(offset), pack_frame(offset, data))[1]  # noqa: E731
    monkeypatch.setattr(convert, "pack_frame", watched)
    return offsets


@pytest.fixture
def short(start: Start) -> Wired:
    """A server that cuts short, and a version whose frames are all kept."""
    assert len(CUTS) <= FRAMES_KEPT
    wired = start(chunk_bytes=CHUNK)
    wired.syncer.publish(SHORT)
    return wired


def pull(wired: Wired, site: str, address: str = "", sink: PullSink | None = None) -> bytes:
    client = wired.client(site, address)
    return b"".join(client.pull(PullAsk(RUN, site, 0, 2), sink or PullSink()).parts)


def test_sites_that_pull_a_version_are_sent_the_same_frames_but_for_one_that_is_asked_for_again(
    short: Wired, offsets: list[int]
) -> None:
    for epoch, site in enumerate(("site-a", "site-b", "site-c")):
        short.syncer.version = replace(short.syncer.version, fates=short.syncer.version.fates[epoch:], epoch=epoch)
        assert pull(short, site) == SHORT
    assert offsets == CUTS
    relay = Relay(short.server.address)
    relay.damage(MARK, 1)
    assert pull(short, "site-d", relay.address) == SHORT
    relay.close()
    assert relay.damaged == 1
    assert offsets == [*CUTS, 2 * CHUNK], "it may have been damaged here"
    short.syncer.publish(SHORT[::-1])
    assert pull(short, "site-e") == SHORT[::-1], "it has the same length and another checksum"


def test_a_payload_that_was_read_wrong_is_read_again_for_those_that_ask_again(short: Wired, offsets: list[int]) -> None:
    sink = PullSink()
    short.syncer.parts = (SHORT[:-1] + bytes([SHORT[-1] ^ 1]),)
    for site in ("site-a", "site-b"):
        with pytest.raises(Unreachable, match="whole payload differs"):
            pull(short, site, sink=sink)
    assert offsets == CUTS
    short.syncer.parts = (SHORT,)
    assert pull(short, "site-a", sink=sink) == SHORT
    assert pull(short, "site-c") == SHORT
    assert offsets == 2 * CUTS


def test_streams_that_bring_a_payload_together_are_one_attempt(wired: Wired, monkeypatch: Patch) -> None:
    begun: list[tuple[str, int]] = []
    monkeypatch.setattr(Repeats, "asked", lambda repeats, name, asker, attempt: begun.append((asker, attempt)))
    wired.syncer.publish(LINES[: 4 * MIB])
    wired.client(data_channels=3).pull(PullAsk(RUN, "site-a", 0, 2), PullSink())
    assert len(begun) == 3
    assert len(set(begun)) == 1
    assert begun[0][0] == "site-a"
    assert begun[0][1] != 0
