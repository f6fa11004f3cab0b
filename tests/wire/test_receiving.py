"""The bytes of one push on their way in, without a network."""

from __future__ import annotations

import random
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import pytest

from diloco.wire import handlers as receiving_module
from diloco.wire.chunks import ChunkError, DamagedChunk
from diloco.wire.handlers import Receiving, Receivings
from diloco.wire.messages import (
    AGAINS_MAX,
    KIB,
    MIB,
    STREAMS_MAX,
    WINDOW_BYTES,
    Chunk,
    Frame,
    MalformedMessage,
    PushAgain,
)
from tests.wire.fake_syncer import FakeSession, FakeSyncer, push_header
from tests.wire.relay import wait_until

SEED = 32
PAYLOAD = random.Random(SEED).randbytes(1000)


def opened(payload: bytes = PAYLOAD, held: int = 0) -> tuple[Receiving, FakeSession]:
    header = push_header(payload, frames=True)
    session = FakeSession(FakeSyncer(), header, bytearray(payload[:held]))
    return Receiving(header, session), session


def complete(receiving: Receiving) -> bool:
    """What a commit finds; it waits as long as the sender is there."""
    return receiving.await_rest(lambda: None, lambda: True)


def frame(offset: int, length: int = 100, *, intact: bool = True, payload: bytes = PAYLOAD) -> Frame:
    return Frame(offset, memoryview(payload)[offset : offset + length], intact)


def test_frames_in_any_order_reach_the_session_in_theirs() -> None:
    for seed in range(20):
        receiving, session = opened(held=100)
        places = list(range(100, 1000, 100))
        random.Random(seed).shuffle(places)
        for offset in places:
            assert receiving.frame(frame(offset)) is None
            assert session.held == PAYLOAD[: len(session.held)]
        assert complete(receiving)
        assert session.held == PAYLOAD


def test_only_a_damaged_frame_is_wanted_again_and_a_commit_before_it_counts_for_nothing() -> None:
    receiving, session = opened()
    receiving.frame(frame(0))
    assert receiving.frame(frame(100, intact=False)) == PushAgain(100, 100)
    for offset in range(200, 1000, 100):
        assert receiving.frame(frame(offset)) is None
    assert not complete(receiving)
    assert receiving.offset == 100
    assert receiving.frame(frame(100, intact=False)) == PushAgain(100, 100)
    assert receiving.frame(frame(100)) is None
    assert complete(receiving)
    assert session.held == PAYLOAD


def test_a_path_that_damages_everything_is_given_up() -> None:
    receiving, session = opened()
    for _ in range(AGAINS_MAX):
        assert receiving.frame(frame(0, intact=False)) is not None
    with pytest.raises(DamagedChunk, match="damaged on the way, as 64 before it"):
        receiving.frame(frame(0, intact=False))
    assert not session.held


def test_what_came_already_is_passed_over_and_never_wanted_again() -> None:
    receiving, session = opened()
    receiving.frame(frame(0, 500))
    assert receiving.frame(frame(100)) is None
    assert receiving.frame(frame(100, intact=False)) is None
    assert receiving.frame(frame(450)) is None
    assert session.held == PAYLOAD[:550]


def test_what_finds_no_room_is_wanted_again_and_memory_is_bounded() -> None:
    payload = bytes(3 * WINDOW_BYTES)
    receiving, session = opened(payload)
    answers = [receiving.frame(frame(offset, MIB, payload=payload)) for offset in range(MIB, 2 * WINDOW_BYTES, MIB)]
    kept = answers.count(None)
    assert kept * MIB == WINDOW_BYTES
    assert answers[kept:] == [PushAgain((kept + 1 + at) * MIB, MIB) for at in range(len(answers) - kept)]
    assert receiving.frame(frame(0, MIB, payload=payload)) is None
    assert len(session.held) == WINDOW_BYTES + MIB


def test_a_stream_that_is_ahead_waits_for_one_that_is_behind() -> None:
    payload = random.Random(SEED).randbytes(2 * WINDOW_BYTES)
    receiving, session = opened(payload)
    with receiving.stream_beside():
        answers: list[object] = []
        size = len(payload)

        def run_ahead() -> None:
            answers.extend(receiving.frame(frame(offset, MIB, payload=payload)) for offset in range(MIB, size, MIB))

        thread = threading.Thread(target=run_ahead)
        thread.start()
        thread.join(0.3)
        assert thread.is_alive(), "it ran further ahead than the window is long"
        receiving.frame(frame(0, MIB, payload=payload))
        thread.join(20)
        assert not thread.is_alive()
    assert set(answers) == {None}
    assert session.held == payload


def test_a_stream_that_waits_too_long_lets_fall_what_it_brought(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving_module, "ROOM_WAIT_S", 0.05)
    payload = bytes(2 * WINDOW_BYTES)
    receiving, _ = opened(payload)
    with receiving.stream_beside():
        for offset in range(MIB, WINDOW_BYTES + MIB, MIB):
            assert receiving.frame(frame(offset, MIB, payload=payload)) is None
        late = frame(WINDOW_BYTES + MIB, MIB, payload=payload)
        assert receiving.frame(late) == PushAgain(late.offset, MIB)


def test_bounds() -> None:
    receiving, session = opened()
    with pytest.raises(ChunkError, match="ends at 1001 of 1000"):
        receiving.frame(Frame(901, memoryview(PAYLOAD)[:100]))
    with pytest.raises(ChunkError, match="ends at 1001 of 1000"):
        receiving.frame(Frame(901, memoryview(PAYLOAD)[:100], intact=False))
    with ExitStack() as streams:
        for _ in range(STREAMS_MAX - 1):
            streams.enter_context(receiving.stream_beside())
        with pytest.raises(MalformedMessage, match="at most 6 streams"):
            streams.enter_context(receiving.stream_beside())
    assert not session.held


def test_chunks_of_an_earlier_protocol_come_in_order_or_not_at_all() -> None:
    receiving, session = opened()
    receiving.chunk(Chunk(0, PAYLOAD[:10], zlib.crc32(PAYLOAD[:10])))
    with pytest.raises(ChunkError, match="the next byte is 10"):
        receiving.chunk(Chunk(11, PAYLOAD[11:20], zlib.crc32(PAYLOAD[11:20])))
    with pytest.raises(DamagedChunk, match="offset 10"):
        receiving.chunk(Chunk(10, PAYLOAD[10:20], 1))
    assert session.held == PAYLOAD[:10]


def test_streams_find_the_push_that_they_belong_to_as_long_as_it_is() -> None:
    receivings = Receivings()
    header = push_header(PAYLOAD, frames=True)
    session = FakeSession(FakeSyncer(), header, bytearray())
    beside = replace(header, beside=True)
    with pytest.raises(DamagedChunk, match="is over"):
        receivings.of(beside, 0.0, lambda: True)
    with receivings.open(header, session) as receiving:
        assert receivings.of(beside, 0.0, lambda: True) is receiving
        for other in ({"incarnation": 2}, {"digest": "0" * 64}, {"sequence": 2}):
            with pytest.raises(DamagedChunk, match="is over"):
                receivings.of(replace(beside, **other), 0.0, lambda: True)
    with pytest.raises(DamagedChunk, match="is over"):
        receivings.of(beside, 0.0, lambda: True)
    with pytest.raises(DamagedChunk, match="is over"):
        receiving.frame(frame(0))
    assert not session.held, "a session that is closed was written to"


def test_the_window_holds_the_longest_chunk_of_every_stream() -> None:
    assert WINDOW_BYTES >= (STREAMS_MAX - 1) * MIB >= 64 * KIB


def test_a_stream_beside_a_push_that_is_not_admitted_yet_waits_for_it() -> None:
    receivings, header = Receivings(), push_header(PAYLOAD, frames=True, others=1)
    session, beside = FakeSession(FakeSyncer(), header, bytearray()), replace(header, beside=True)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(receivings.of, beside, 20.0, lambda: True)
        assert not wait_until(found.done, seconds=0.1)
        with receivings.open(header, session) as receiving:
            assert found.result(20) is receiving
    active = [True, True, False]
    with pytest.raises(DamagedChunk, match="is over"):
        receivings.of(beside, 20.0, lambda: active.pop(0))
    with pytest.raises(DamagedChunk, match="is over"):
        receivings.of(beside, 0.05, lambda: True)


def test_a_commit_before_the_last_chunks_waits_for_them() -> None:
    header = push_header(PAYLOAD, frames=True, others=1)
    receiving = Receiving(header, FakeSession(FakeSyncer(), header, bytearray()))
    moved: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(receiving.await_rest, lambda: moved.append(1), lambda: True)
        receiving.frame(frame(0, 500))
        assert not wait_until(rest.done, seconds=0.1)
        receiving.frame(frame(500, 500))
        assert rest.result(20)
    assert moved


@pytest.mark.parametrize("others", [0, 1])
def test_a_commit_waits_for_nothing_that_cannot_come(others: int) -> None:
    header = push_header(PAYLOAD, frames=True, others=others)
    receiving = Receiving(header, FakeSession(FakeSyncer(), header, bytearray()))
    receiving.frame(frame(0, 500))
    with pytest.raises(DamagedChunk, match="ends at 500"):
        receiving.await_rest(lambda: None, lambda: others == 0)
    if others:
        assert receiving.frame(frame(500, 500, intact=False)) == PushAgain(500, 500)
        assert not complete(receiving)
