from __future__ import annotations

import threading

from xxhash import xxh3_64_intdigest

from diloco.wire.convert_bulk import unpack_push
from diloco.wire.messages import KIB, Chunk, PushCommit
from diloco.wire.options import ClientOptions
from diloco.wire.sending import Sending
from diloco.wire.stall import StallWatch
from tests.wire.fake_syncer import push_header

PAYLOAD = bytes(range(256)) * 1024  # 256 KiB: four chunks
OPTIONS = ClientOptions(chunk_bytes=64 * KIB)


def sending(sent: list[int]) -> Sending:
    guard = StallWatch("never started").guard(1.0)
    return Sending(push_header(PAYLOAD), memoryview(PAYLOAD), OPTIONS, guard, sent.append)


def test_the_header_goes_alone_until_admitted_then_everything_from_the_offset() -> None:
    for offset in (0, 1, 64 * KIB, len(PAYLOAD) - 1, len(PAYLOAD)):
        sent: list[int] = []
        push = sending(sent)
        requests = push.requests()
        assert unpack_push(next(requests)) == push_header(PAYLOAD)
        push.admit(offset)
        *chunks, commit = map(unpack_push, requests)
        assert commit == PushCommit(len(PAYLOAD), push_header(PAYLOAD).digest)
        assert b"".join(chunk.data for chunk in chunks if isinstance(chunk, Chunk)) == PAYLOAD[offset:]
        assert all(isinstance(chunk, Chunk) and chunk.xxh3 == xxh3_64_intdigest(chunk.data) for chunk in chunks)
        assert sum(sent) > len(PAYLOAD) - offset


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
    push.admit(0)
    next(requests)
    push.stop()
    assert not list(requests)
