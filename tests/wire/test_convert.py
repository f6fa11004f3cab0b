from __future__ import annotations

import random
import struct
from typing import TYPE_CHECKING

import pytest

from diloco.sync.data_units import SKIPPED
from diloco.sync.events import Ending, Reason, UnitsTold
from diloco.wire import convert
from diloco.wire import messages as m
from diloco.wire.chunks import DamagedChunk
from diloco.wire.convert import (
    FRAME_HEAD_BYTES,
    pack_follow,
    pack_follow_part,
    pack_frame,
    pack_pull,
    pack_pull_part,
    pack_push,
    pack_report_reply,
    spans_in,
    spans_out,
    unpack_follow,
    unpack_follow_part,
    unpack_frame,
    unpack_pull,
    unpack_pull_part,
    unpack_push,
    unpack_push_reply,
    unpack_report_reply,
)
from diloco.wire.messages import CHUNK_BYTES_MAX, PAYLOAD_BYTES_MAX, FollowStart, Frame, Item, MalformedMessage
from diloco.wire.v1 import admin_pb2, sync_pb2
from tests.wire.fake_syncer import RUN, join_ask, report_info
from tests.wire.samples import everything

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(("message", "pack", "unpack"), everything(), ids=lambda value: type(value).__name__)
def test_round_trip(message: object, pack: object, unpack: object) -> None:
    assert unpack(pack(message)) == message  # type: ignore[operator]


def test_enums_have_the_same_members_on_both_sides() -> None:
    for ours, theirs, prefix in (
        (Reason, sync_pb2.Reason, "REASON_"),
        (Ending, sync_pb2.Ending, "ENDING_"),
        (m.Outcome, sync_pb2.Outcome, "OUTCOME_"),
    ):
        assert {prefix + member.name for member in ours} | {prefix + "UNSPECIFIED"} == set(theirs.keys())


def test_an_unknown_member_of_an_enum_is_malformed() -> None:
    raw = sync_pb2.WatchResponse(dropped=sync_pb2.Dropped(reason=99)).SerializeToString()  # type: ignore[arg-type]
    with pytest.raises(m.MalformedMessage, match="99"):
        convert.unpack_watch_event(raw)


@pytest.mark.parametrize(
    "event",
    [
        sync_pb2.WatchResponse(),
        sync_pb2.WatchResponse(dropped=sync_pb2.Dropped()),
        sync_pb2.WatchResponse(final=sync_pb2.Final()),
        sync_pb2.WatchResponse(fate=sync_pb2.Fate()),
    ],
)
def test_events_that_say_nothing_are_malformed(event: sync_pb2.WatchResponse) -> None:
    with pytest.raises(m.MalformedMessage):
        convert.unpack_watch_event(event.SerializeToString())


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), float("-inf")])
def test_a_loss_that_is_not_finite_travels_as_unknown(loss: float) -> None:
    assert convert.unpack_report(convert.pack_report(report_info(loss=loss))).loss is None


def test_the_length_is_compared_before_parsing() -> None:
    nonsense = b"\xff" * (m.CONTROL_BYTES_MAX + 1)
    with pytest.raises(m.MalformedMessage, match="65537 bytes long"):
        convert.unpack_report(nonsense)
    with pytest.raises(m.MalformedMessage, match="bytes long"):
        convert.unpack_join(b"\xff" * (m.JOIN_BYTES_MAX + 1))


def test_the_largest_join_fits() -> None:
    config = {f"outer.key_{index}": "v" * 40 for index in range(1000)}
    ask = join_ask(layout_json=b"x" * m.LAYOUT_BYTES_MAX, shared_config=config)
    assert convert.unpack_join(convert.pack_join(ask)) == ask


@pytest.mark.parametrize("json", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_status_must_be_a_json_object(json: bytes) -> None:
    with pytest.raises(m.MalformedMessage, match="json"):
        convert.unpack_status(admin_pb2.StatusResponse(json=json).SerializeToString())


def test_bad_messages_are_refused_on_the_senders_side_too() -> None:
    with pytest.raises(m.MalformedMessage, match="site_id"):
        convert.pack_watch(m.WatchAsk(RUN, "a b", 0))


def mutated(raw: bytes, others: list[bytes], chance: random.Random) -> bytes:
    """``raw`` with bits flipped, cut, stretched, spliced with another message, or replaced by noise."""
    out = bytearray(raw or b"\x00")
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(out)) if out else 0
        match chance.randrange(7):
            case 0 if out:
                out[at] ^= 1 << chance.randrange(8)
            case 1:
                del out[at:]
            case 2:
                out[at:at] = chance.randbytes(chance.randint(1, 12))
            case 3:
                out += chance.choice(others)[: chance.randint(1, 200)]
            case 4:
                out[at:at] = b"\xff" * 9 + b"\x01"
            case 5:
                out = bytearray(chance.randbytes(chance.randint(0, 64)))
            case 6:
                out[at : at + 4] = out[at : at + 4] * 3
    return bytes(out)


def test_fuzz_only_malformed_message_comes_out() -> None:
    seed = 41
    chance = random.Random(seed)
    samples = everything()
    raws = [pack(message) for message, pack, _ in samples]
    for turn in range(10_000):
        raw = mutated(chance.choice(raws), raws, chance)
        for unpack in {chance.choice(samples)[2], samples[turn % len(samples)][2], convert.unpack_empty}:
            told = words(unpack, raw)
            assert len(told) < 400, f"seed {seed}, turn {turn}"


def words(unpack: Callable[[bytes], object], raw: bytes) -> str:
    """What the refusal says; anything but a refusal passes through and shows the bytes."""
    try:
        unpack(raw)
    except m.MalformedMessage as error:
        return str(error)
    except DamagedChunk as error:
        assert raw[:1] == b"\0", raw  # Only a frame says by itself that it was damaged.
        return str(error)
    except Exception as error:
        raise AssertionError(f"{unpack} of {raw!r}") from error
    return ""


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


# --- What is said of units of the data, on the wire ------------------------------------------------------------------


def test_what_is_said_comes_back() -> None:
    reply = m.ReportReply(1, 2, 3, True, None, units=UnitsTold(9, ((0, 4), (SKIPPED, 2), (7, 1))))
    raw = pack_report_reply(reply)
    assert unpack_report_reply(raw) == reply
    told = sync_pb2.ReportResponse.FromString(raw).units
    assert (told.first, list(told.units), list(told.counts)) == (9, [1, 0, 8], [4, 2, 1])
    assert spans_in(spans_out([(0, 4), (7, 9)])) == ((0, 4), (7, 9))


def test_half_of_a_run_or_a_span_is_refused() -> None:
    half = sync_pb2.ReportResponse(units=sync_pb2.UnitList(units=[1, 2], counts=[1]))
    with pytest.raises(m.MalformedMessage, match="units has 2 runs"):
        unpack_report_reply(half.SerializeToString())
    with pytest.raises(m.MalformedMessage, match="spans has 3 numbers"):
        spans_in([0, 4, 7])
    with pytest.raises(m.MalformedMessage, match="spans has 20000 numbers"):
        spans_in(range(20_000))


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


# --- Messages between a standby and the syncer -----------------------------------------------------------------------

HEX = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "spool/../../etc/passwd",
        "/etc/passwd",
        "spool/a/../b",
        "lineages/x/manifest.json",
        "run.json",
        "spool/.partial/x",
        "above/run.json",
        "above/outbox/.0-7.update.tmp",
        "journal/a/b",
        "x" * 400,
    ],
)
def test_a_file_is_one_of_the_data_folder(name: str) -> None:
    with pytest.raises(MalformedMessage, match="name is"):
        unpack_follow_part(pack_follow_part(Item(name, 0, 0, 1, HEX)))


@pytest.mark.parametrize(
    ("start", "field"),
    [
        (FollowStart("", "s", HEX, HEX, 0, ""), "run_id"),
        (FollowStart("r", "a b", HEX, HEX, 0, ""), "standby"),
        (FollowStart("r", "s", "x", HEX, 0, ""), "layout_fingerprint"),
        (FollowStart("r", "s", HEX, "", 0, ""), "shared_digest"),
        (FollowStart("r", "s", HEX, HEX, 3, ""), "chain"),
        (FollowStart("r", "s", HEX, HEX, 0, HEX), "segment"),
        (FollowStart("r", "s", HEX, HEX, 3, "no"), "chain"),
    ],
)
def test_a_start_that_cannot_be(start: FollowStart, field: str) -> None:
    with pytest.raises(MalformedMessage, match=f"{field} is"):
        unpack_follow(pack_follow(start))


@pytest.mark.parametrize("raw", [b"", b"\xff\xff", b"\x0a\xff"])
def test_bytes_that_are_no_message(raw: bytes) -> None:
    with pytest.raises(MalformedMessage):
        unpack_follow(raw)
    with pytest.raises(MalformedMessage):
        unpack_follow_part(raw)
