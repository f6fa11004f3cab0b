from __future__ import annotations

import pytest

from diloco.wire import messages as m
from diloco.wire.convert import (
    pack_pull,
    pack_pull_part,
    pack_push,
    unpack_pull,
    unpack_pull_part,
    unpack_push,
    unpack_push_reply,
)
from diloco.wire.v1 import sync_pb2


@pytest.mark.parametrize("size", [1, 127, 128, 16_383, 16_384, m.CHUNK_BYTES_MAX])
@pytest.mark.parametrize("offset", [0, 1, 127, 128, 2**21, m.PAYLOAD_BYTES_MAX])
@pytest.mark.parametrize("checksum", [{"crc32": 0xDEADBEEF}, {"xxh3": 0xDEADBEEFDEADBEEF}, {"xxh3": 0}])
def test_protobuf_reads_the_hand_written_chunk_as_its_own(size: int, offset: int, checksum: dict[str, int]) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    chunk = m.Chunk(offset, memoryview(data)[:size], **{"crc32": 0, **checksum})
    generated = sync_pb2.Chunk(offset=offset, data=data[:size], **checksum)
    assert sync_pb2.PushRequest.FromString(pack_push(chunk)) == sync_pb2.PushRequest(chunk=generated)
    assert sync_pb2.PullResponse.FromString(pack_pull_part(chunk)) == sync_pb2.PullResponse(chunk=generated)


def test_chunks_have_bounds() -> None:
    for size in (0, m.CHUNK_BYTES_MAX + 1):
        with pytest.raises(m.MalformedMessage, match="data"):
            pack_push(m.Chunk(0, bytes(size), 0))
        raw = sync_pb2.PushRequest(chunk=sync_pb2.Chunk(data=bytes(size))).SerializeToString()
        with pytest.raises(m.MalformedMessage, match="data"):
            unpack_push(raw)
    far = sync_pb2.PullResponse(chunk=sync_pb2.Chunk(offset=2**63, data=b"a")).SerializeToString()
    with pytest.raises(m.MalformedMessage, match="offset"):
        unpack_pull_part(far)


def test_an_asker_that_says_nothing_of_its_protocol_speaks_2() -> None:
    ask = m.PullAsk("run", "", 0, -1)
    assert unpack_pull(pack_pull(ask)) == ask
    raw = sync_pb2.PullRequest(run_id="run", have_version=-1).SerializeToString()
    assert unpack_pull(raw) == m.PullAsk("run", "", 0, -1, protocol=2)


@pytest.mark.parametrize("unpack", [unpack_push, unpack_push_reply, unpack_pull_part])
def test_an_empty_message_is_malformed(unpack: object) -> None:
    with pytest.raises(m.MalformedMessage, match="part is not set"):
        unpack(b"")  # type: ignore[operator]


def test_a_result_needs_an_outcome() -> None:
    raw = sync_pb2.PushResponse(result=sync_pb2.PushResult(version=1)).SerializeToString()
    with pytest.raises(m.MalformedMessage, match="outcome"):
        unpack_push_reply(raw)
