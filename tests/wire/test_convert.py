"""The messages as bytes: what was packed comes back, and other bytes are refused in words."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pytest
from google.protobuf.message import DecodeError, Message
from xxhash import xxh3_64_intdigest

from diloco.sync.data_units import SKIPPED
from diloco.sync.events import Ending, Reason, UnitsTold
from diloco.wire import convert
from diloco.wire import messages as m
from diloco.wire.chunks import DamagedChunk
from diloco.wire.convert import (
    FRAME_HEAD_BYTES,
    pack_frame,
    pack_probe,
    pack_pull_part,
    pack_push,
    pack_report_reply,
    spans_in,
    unpack_follow_part,
    unpack_frame,
    unpack_join,
    unpack_probe,
    unpack_probe_reply,
    unpack_pull,
    unpack_pull_part,
    unpack_push,
    unpack_push_reply,
    unpack_report,
    unpack_report_reply,
    unpack_status,
    unpack_watch_event,
)
from diloco.wire.messages import CHUNK_BYTES_MAX, PAYLOAD_BYTES_MAX, Frame, MalformedMessage
from diloco.wire.v1 import admin_pb2, sync_pb2
from tests.hunts.mutating import spoiled
from tests.wire.fake_syncer import RUN, join_ask, report_info
from tests.wire.samples import everything


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


def test_requests_that_are_packed_alike_have_the_same_fields() -> None:
    alike = ((sync_pb2.WatchRequest, sync_pb2.LeaveRequest), (admin_pb2.EvictRequest, admin_pb2.ReadmitRequest))
    for kinds in alike:
        one, other = ([(each.name, each.number, each.type) for each in kind.DESCRIPTOR.fields] for kind in kinds)
        assert one == other


EVENT, STATUS, REPORT_REPLY = sync_pb2.WatchResponse, admin_pb2.StatusResponse, sync_pb2.ReportResponse
BAD_BYTES: list[tuple[Callable[[bytes], object], bytes | Message, str]] = [
    *((unpack, b"", "part is not set") for unpack in (unpack_push_reply, unpack_pull_part)),
    *((unpack, b"", "part is not set") for unpack in (unpack_probe, unpack_probe_reply, unpack_follow_part)),
    (unpack_push, b"", "one of header, chunk, commit wanted"),
    (unpack_probe, b"\xff", "cannot be parsed"),
    # The length is compared before parsing.
    (unpack_report, b"\xff" * (m.CONTROL_BYTES_MAX + 1), "65537 bytes long"),
    (unpack_join, b"\xff" * (m.JOIN_BYTES_MAX + 1), "bytes long"),
    (unpack_probe_reply, bytes(m.MESSAGE_BYTES_MAX + 1), "bytes long"),
    (unpack_watch_event, EVENT(dropped=sync_pb2.Dropped(reason=99)), "99"),  # type: ignore[arg-type]
    (unpack_watch_event, b"", "event is not set"),
    (unpack_watch_event, EVENT(final=sync_pb2.Final()), "ending is"),
    (unpack_watch_event, EVENT(fate=sync_pb2.Fate()), "digest is"),
    (unpack_push_reply, sync_pb2.PushResponse(result=sync_pb2.PushResult(version=1)), "outcome"),
    (unpack_pull_part, sync_pb2.PullResponse(chunk=sync_pb2.Chunk(offset=2**63, data=b"a")), "offset"),
    (unpack_report_reply, REPORT_REPLY(units=sync_pb2.UnitList(units=[1, 2], counts=[1])), "units has 2 runs"),
    *((unpack_status, STATUS(json=json), "json") for json in (b"", b"[]", b"{", b"\xff", b"[" * 100_000)),
]


def test_bytes_that_are_no_message_are_refused_in_words_and_bad_messages_on_the_senders_side_too() -> None:
    for unpack, said, words in BAD_BYTES:
        with pytest.raises(MalformedMessage, match=words):
            unpack(said if isinstance(said, bytes) else said.SerializeToString())
    for count in (3, 20_000):
        with pytest.raises(MalformedMessage, match=f"spans has {count} numbers"):
            spans_in(range(count))
    for message, pack, words in (
        (m.MemberAsk(RUN, "a b", 0), convert.pack_member, "site_id"),
        (m.Filler(bytes(CHUNK_BYTES_MAX + 1)), pack_probe, "data"),
    ):
        with pytest.raises(MalformedMessage, match=words):
            pack(message)  # type: ignore[operator]


def test_a_loss_that_is_not_finite_travels_as_unknown_and_the_largest_join_fits() -> None:
    for loss in (float("nan"), float("inf"), float("-inf")):
        assert convert.unpack_report(convert.pack_report(report_info(loss=loss))).loss is None
    config = {f"outer.key_{index}": "v" * 40 for index in range(1000)}
    ask = join_ask(layout_json=b"x" * m.LAYOUT_BYTES_MAX, shared_config=config)
    assert convert.unpack_join(convert.pack_join(ask)) == ask


def test_fuzz_only_malformed_message_comes_out() -> None:
    seed = 41
    chance = random.Random(seed)
    samples = everything()
    raws = [pack(message) for message, pack, _ in samples]
    for turn in range(1_000):
        raw = spoiled(chance.choice(raws), raws, chance)
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


def test_a_chunk_is_sent_as_the_contract_says() -> None:
    data = bytes(range(256)) * (CHUNK_BYTES_MAX // 256)
    for checksum in ({"crc32": 0xDEADBEEF}, {"xxh3": 0xDEADBEEFDEADBEEF}, {"xxh3": 0}):
        for size, offset in ((1, 0), (127, PAYLOAD_BYTES_MAX), (16_384, 128), (CHUNK_BYTES_MAX, 2**21)):
            chunk = m.Chunk(offset, memoryview(data)[:size], **{"crc32": 0, **checksum})
            generated = sync_pb2.Chunk(offset=offset, data=data[:size], **checksum)
            assert sync_pb2.PushRequest.FromString(pack_push(chunk)) == sync_pb2.PushRequest(chunk=generated)
            assert sync_pb2.PullResponse.FromString(pack_pull_part(chunk)) == sync_pb2.PullResponse(chunk=generated)


def test_an_asker_that_says_nothing_of_its_protocol_speaks_2() -> None:
    raw = sync_pb2.PullRequest(run_id="run", have_version=-1).SerializeToString()
    assert unpack_pull(raw) == m.PullAsk("run", "", 0, -1, protocol=2)


def test_units_are_told_in_runs_with_0_for_what_was_skipped() -> None:
    reply = m.ReportReply(1, 2, 3, True, None, units=UnitsTold(9, ((0, 4), (SKIPPED, 2), (7, 1))))
    told = sync_pb2.ReportResponse.FromString(pack_report_reply(reply)).units
    assert (told.first, list(told.units), list(told.counts)) == (9, [1, 0, 8], [4, 2, 1])


SEED = 31
DATA = random.Random(SEED).randbytes(200)


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


def test_chunks_and_frames_have_bounds() -> None:
    for length in (0, CHUNK_BYTES_MAX + 1):
        with pytest.raises(MalformedMessage, match="data"):
            pack_push(m.Chunk(0, bytes(length), 0))
        with pytest.raises(MalformedMessage, match="data"):
            unpack_push(sync_pb2.PushRequest(chunk=sync_pb2.Chunk(data=bytes(length))).SerializeToString())
        with pytest.raises(MalformedMessage, match=f"data is {length} bytes long"):
            pack_frame(0, bytes(length))
        with pytest.raises(MalformedMessage, match=f"frame is {FRAME_HEAD_BYTES + length} bytes long"):
            unpack_frame(bytes(FRAME_HEAD_BYTES + length))
    with pytest.raises(MalformedMessage, match=f"offset is {PAYLOAD_BYTES_MAX + 1}"):
        unpack_frame(pack_frame(PAYLOAD_BYTES_MAX + 1, DATA))
    for short in range(FRAME_HEAD_BYTES):
        with pytest.raises(MalformedMessage):
            unpack_frame(pack_frame(0, DATA)[:short])


def test_the_layout_of_a_frame_is_what_the_contract_says_and_no_message_is_taken_for_one() -> None:
    for message, pack, _ in everything():
        assert (pack(message)[:1] == b"\0") == isinstance(message, Frame)
    with pytest.raises(DecodeError):
        sync_pb2.PushRequest.FromString(pack_frame(0, DATA))
    raw = pack_frame(5, DATA)
    assert raw[:4] == b"\x00\x01\x00\x00"
    assert struct.unpack_from("<I", raw, 4) == (crc32(raw[8:24]),)
    assert struct.unpack_from("<QQ", raw, 8) == (5, xxh3_64_intdigest(DATA, seed=5))
    assert raw[24:] == DATA
    assert unpack_frame(raw).data.obj is raw


ROOT = Path(__file__).resolve().parents[2]
VERSION = "1.76.0"


def compiler() -> str | None:
    """A Python that has the compiler in the right version: this one's, or that of ``make protos``."""
    ask = "from importlib.metadata import version; print(version('grpcio-tools'))"
    for python in (sys.executable, str(ROOT / ".venv-protos" / "bin" / "python")):
        if Path(python).exists():
            said = subprocess.run([python, "-c", ask], capture_output=True, text=True, timeout=60, check=False)
            if said.stdout.strip() == VERSION:
                return python
    return None


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    python = compiler()
    if python is None:
        pytest.skip(f"grpcio-tools {VERSION} is not installed: `make protos` brings it")
    protos = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "protos").rglob("*.proto"))
    flags = ["--proto_path=protos", *(f"--{kind}={tmp_path}" for kind in ("python_out", "pyi_out"))]
    subprocess.run([python, "-m", "grpc_tools.protoc", *flags, *protos], cwd=ROOT, check=True, timeout=120)
    made = {path.relative_to(tmp_path): path.read_text("utf-8") for path in tmp_path.rglob("*_pb2*")}
    kept = {path.relative_to(ROOT): path.read_text("utf-8") for path in (ROOT / "diloco/wire/v1").glob("*_pb2*")}
    assert sorted(made) == sorted(kept)
    for path, text in made.items():
        assert kept[path] == text, f"{path} is not what protos/ says: run `make protos`"
