from __future__ import annotations

import random
import struct

import pytest

from diloco.wire.chunks import DamagedChunk
from diloco.wire.convert import FRAME_HEAD_BYTES, pack_frame, unpack_frame, unpack_push
from diloco.wire.messages import CHUNK_BYTES_MAX, PAYLOAD_BYTES_MAX, Frame, MalformedMessage
from diloco.wire.v1 import sync_pb2
from tests.wire.samples import everything

SEED = 31
DATA = random.Random(SEED).randbytes(200)


@pytest.mark.parametrize("offset", [0, 1, 1 << 33, PAYLOAD_BYTES_MAX])
def test_what_was_packed_comes_out_as_a_view(offset: int) -> None:
    raw = pack_frame(offset, memoryview(DATA))
    assert unpack_frame(raw) == Frame(offset, memoryview(DATA), intact=True)
    assert unpack_frame(raw).data.obj is raw
    assert len(raw) == FRAME_HEAD_BYTES + len(DATA)


def test_every_flipped_bit_is_noticed_and_the_place_is_known_where_the_head_is_good() -> None:
    raw = pack_frame(77, DATA)
    for bit in range(8 * len(raw)):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        if bit >= 8 * FRAME_HEAD_BYTES:
            frame = unpack_frame(bytes(damaged))
            assert (frame.offset, len(frame.data), frame.intact) == (77, len(DATA), False)
        else:
            with pytest.raises((DamagedChunk, MalformedMessage)):
                unpack_frame(bytes(damaged))


def test_good_data_in_another_place_are_not_intact() -> None:
    moved, stayed = pack_frame(78, DATA), pack_frame(77, DATA)
    assert moved[FRAME_HEAD_BYTES:] == stayed[FRAME_HEAD_BYTES:]
    assert not unpack_frame(pack_frame(78, DATA)[:FRAME_HEAD_BYTES] + DATA[:-1] + b"?").intact
    with pytest.raises(DamagedChunk):
        unpack_frame(stayed[:8] + moved[8:16] + stayed[16:])


def test_bounds() -> None:
    for length in (0, CHUNK_BYTES_MAX + 1):
        with pytest.raises(MalformedMessage, match=f"data is {length} bytes long"):
            pack_frame(0, bytes(length))
        with pytest.raises(MalformedMessage, match=f"frame is {FRAME_HEAD_BYTES + length} bytes long"):
            unpack_frame(bytes(FRAME_HEAD_BYTES + length))
    with pytest.raises(MalformedMessage, match=f"offset is {PAYLOAD_BYTES_MAX + 1}"):
        unpack_frame(pack_frame(PAYLOAD_BYTES_MAX + 1, DATA))
    for short in range(FRAME_HEAD_BYTES):
        with pytest.raises(MalformedMessage):
            unpack_frame(pack_frame(0, DATA)[:short])


def test_no_message_is_taken_for_a_frame() -> None:
    """Not even an empty one, nor one that another end would send."""
    for message, pack, _ in everything():
        raw = pack(message)
        assert (raw[:1] == b"\0") == isinstance(message, Frame)
    with pytest.raises(MalformedMessage, match="a header, a chunk or a commit wanted"):
        unpack_push(b"")
    with pytest.raises(Exception, match=r".*"):
        sync_pb2.PushRequest.FromString(pack_frame(0, DATA))


def test_the_layout_is_what_the_contract_says() -> None:
    from zlib import crc32

    from xxhash import xxh3_64_intdigest

    raw = pack_frame(5, DATA)
    assert raw[:4] == b"\x00\x01\x00\x00"
    assert struct.unpack_from("<I", raw, 4) == (crc32(raw[8:24]),)
    assert struct.unpack_from("<QQ", raw, 8) == (5, xxh3_64_intdigest(DATA, seed=5))
    assert raw[24:] == DATA
