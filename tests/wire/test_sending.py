from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING, Any

import pytest

from diloco.wire.channel import Guard, Pacer, StallWatch
from diloco.wire.client import Pushing
from diloco.wire.convert import unpack_push
from diloco.wire.messages import (
    AGAINS_MAX,
    KIB,
    MIB,
    Frame,
    MalformedMessage,
    PushAdmitted,
    PushAgain,
    PushCommit,
    PushPart,
)
from diloco.wire.options import ClientOptions
from tests.wire.fake_syncer import push_header

if TYPE_CHECKING:
    from collections.abc import Iterator

PAYLOAD = bytes(range(256)) * 1024  # 256 KiB: four chunks
OPTIONS = ClientOptions(chunk_bytes=64 * KIB)
STALLS = StallWatch("never started")


def sending(sent: list[int], payload: bytes = PAYLOAD, *, streams: int = 1, **how: Any) -> Pushing:
    """A push of ``payload``, without a network."""
    bulk: Any = [None] * streams
    header, options = push_header(payload), how.pop("options", OPTIONS)
    return Pushing(bulk, header, memoryview(payload), options, STALLS, sent.append, Pacer(0), **how)


def all_of(requests: Iterator[bytes]) -> list[PushPart]:
    """Everything up to the commit."""
    parts: list[PushPart] = []
    while not (parts and isinstance(parts[-1], PushCommit)):
        parts.append(unpack_push(next(requests)))
    return parts


def test_the_header_goes_alone_until_admitted_then_everything_from_the_offset() -> None:
    for offset in (0, 1, 64 * KIB, len(PAYLOAD) - 1, len(PAYLOAD)):
        sent: list[int] = []
        push = sending(sent)
        requests = push.requests()
        assert unpack_push(next(requests)) == push_header(PAYLOAD, frames=True)
        push.admit(PushAdmitted(offset, True))
        *chunks, commit = all_of(requests)
        assert commit == PushCommit(len(PAYLOAD), push_header(PAYLOAD).digest)
        assert b"".join(chunk.data for chunk in chunks if isinstance(chunk, Frame)) == PAYLOAD[offset:]
        assert sum(sent) > len(PAYLOAD) - offset
        push.stop()
        assert not list(requests)


def test_what_is_wanted_again_goes_before_the_rest_and_before_another_commit() -> None:
    push = sending([])
    requests = push.requests()
    next(requests)
    push.admit(PushAdmitted(0, True))
    first = unpack_push(next(requests))
    assert isinstance(first, Frame)
    push.again(PushAgain(0, len(first.data)))
    assert unpack_push(next(requests)) == first
    *chunks, commit = all_of(requests)
    assert b"".join(chunk.data for chunk in chunks if isinstance(chunk, Frame)) == PAYLOAD[len(first.data) :]
    push.again(PushAgain(64 * KIB, 64 * KIB))  # It came damaged, and the commit was on its way already.
    assert all_of(requests) == [Frame(64 * KIB, memoryview(PAYLOAD)[64 * KIB : 128 * KIB]), commit]
    push.stop()
    assert not list(requests)


def test_after_breaks_no_more_is_on_its_way_than_can_be_spared() -> None:
    payload = bytes(MIB)
    header = push_header(payload)
    push = sending([], payload, breaks=9)
    requests = push.requests()
    assert unpack_push(next(requests)) == dataclasses.replace(header, frames=True, progress=True)
    push.admit(PushAdmitted(0, True))
    sent, committed = [0], threading.Event()

    def read() -> None:
        for raw in requests:
            part = unpack_push(raw)
            sent[0] += len(part.data) if isinstance(part, Frame) else 0
            if isinstance(part, PushCommit):
                committed.set()

    thread = threading.Thread(target=read)
    thread.start()
    for held in range(0, MIB - 192 * KIB, 64 * KIB):
        assert not committed.wait(0.02)
        assert held < sent[0] <= held + 128 * KIB
        push.held(held + 64 * KIB)
    push.held(MIB)
    assert committed.wait(10)
    push.stop()
    thread.join(10)
    assert sent[0] == MIB


def test_what_was_not_sent_is_not_wanted_again_nor_anything_without_end() -> None:
    push = sending([])
    with pytest.raises(MalformedMessage, match="were not sent"):
        push.again(PushAgain(0, 1))
    requests = push.requests()
    next(requests)
    push.admit(PushAdmitted(0, True))
    next(requests)
    with pytest.raises(MalformedMessage, match="offset is 65536"):
        push.again(PushAgain(64 * KIB, 1))
    for _ in range(AGAINS_MAX):
        push.again(PushAgain(0, 1))
    with pytest.raises(MalformedMessage, match="for the 65th time"):
        push.again(PushAgain(0, 1))


def test_a_stream_for_which_no_chunk_was_left_carries_none() -> None:
    push = sending([])
    requests = push.requests()
    next(requests)
    push.admit(PushAdmitted(0, True))
    guards = [Guard(STALLS, 1.0) for _ in range(3)]
    one, early, late = (push.beside(guard) for guard in guards)
    for beside in (one, early, late):
        push.join_in()
        next(beside)
    assert isinstance(unpack_push(next(one)), Frame)
    assert not push.carries(guards[1])
    assert not list(early), "it has broken off, so nothing is given to it any more"
    rest = [unpack_push(next(requests)) for _ in range(3)]
    assert all(isinstance(part, Frame) for part in rest)
    assert not list(late), "everything was given to others"
    assert not push.carries(guards[2]), "where it breaks off the push lacks nothing"
    assert push.carries(guards[0])


def test_streams_share_what_is_left() -> None:
    push = sending([], streams=2)
    requests = push.requests()
    next(requests)
    push.admit(PushAdmitted(0, True))
    push.join_in()
    beside = push.beside(Guard(STALLS, 1.0))
    assert unpack_push(next(beside)) == push_header(PAYLOAD, frames=True, beside=True, others=1)
    parts = [unpack_push(next(each)) for each in (requests, beside, beside, requests)]
    assert [part.offset for part in parts if isinstance(part, Frame)] == [0, 64 * KIB, 128 * KIB, 192 * KIB]
    assert not list(beside)
    push.stop()


def test_stop_before_admission_ends_the_waiting_thread() -> None:
    push = sending([])
    messages: list[bytes] = []
    thread = threading.Thread(target=lambda: messages.extend(push.requests()))
    thread.start()
    push.stop()
    thread.join(timeout=5)
    assert not thread.is_alive()
    assert len(messages) == 1


def test_stop_in_the_middle_sends_no_commit() -> None:
    push = sending([])
    requests = push.requests()
    next(requests)
    push.admit(PushAdmitted(0))
    next(requests)
    push.stop()
    assert not list(requests)


def test_however_often_connections_broke_one_chunk_may_always_be_on_its_way() -> None:
    payload = bytes(MIB)
    push = sending([], payload, options=ClientOptions(chunk_bytes=MIB), breaks=20)
    parts: list[PushPart] = []

    def run() -> None:
        for raw in push.requests():
            part = unpack_push(raw)
            parts.append(part)
            if isinstance(part, Frame):
                push.held(part.offset + len(part.data))
            if isinstance(part, PushCommit):
                return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    push.admit(PushAdmitted(0, frames=True))
    thread.join(20.0)
    push.stop()
    assert parts, "not even the header"
    assert isinstance(parts[-1], PushCommit), f"after {len(parts)} messages nothing more came"


def test_to_who_takes_it_everything_goes_at_once_and_what_is_held_is_left_out_when_known() -> None:
    header = push_header(PAYLOAD, others=1)
    push = sending([], streams=3, at_once=True)
    requests = push.requests()
    assert unpack_push(next(requests)) == dataclasses.replace(header, frames=True)
    assert unpack_push(next(requests)) == Frame(0, memoryview(PAYLOAD)[: 64 * KIB])
    assert not push.admitted
    push.join_in()
    push.admit(PushAdmitted(192 * KIB, True))
    assert push.admitted
    last, commit = all_of(requests)
    assert last == Frame(192 * KIB, memoryview(PAYLOAD)[192 * KIB :])
    assert isinstance(commit, PushCommit), "a stream beside it keeps nobody who was told of it from committing"


def test_an_admission_behind_what_was_sent_sends_nothing_twice() -> None:
    push = sending([], at_once=True)
    requests = push.requests()
    for _ in range(3):
        next(requests)
    push.admit(PushAdmitted(0, True))
    assert [part.offset for part in all_of(requests) if isinstance(part, Frame)] == [128 * KIB, 192 * KIB]
