"""All readers of bytes from outside, each with valid inputs and the exceptions that it may raise.

A ``Reader`` either raises one of its ``words`` or accepts the bytes, after a check of what it has read.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import zstandard
from torch import Tensor

from diloco.codec.base import DecodeError, bytes_of
from diloco.codec.registry import CODEC_NAMES, make_codec
from diloco.config.errors import ConfigError
from diloco.config.model_files import read_options, read_values, write_folder
from diloco.inner import checkpoint
from diloco.inner.checkpoint import CheckpointError
from diloco.inner.model import ModelOptions, Transformer
from diloco.inner.tokenizer import make_tokenizer
from diloco.learner.seal import Outbox, OutboxError
from diloco.outer.fragments import Layout, plan_layout
from diloco.sync.journal import (
    FRAME,
    FRAME_1,
    UNIT,
    JournalError,
    Record,
    _unit,
    chain_after,
    decode_records,
    encode_frame,
    encode_header,
    encode_mark,
    encode_records,
    read_records,
    read_segment,
)
from diloco.sync.leadership import Claim
from diloco.syncer.journal_files import read_file
from diloco.syncer.lease import FileLease, LeaseError, LeaseRefusedError
from diloco.syncer.replaying import Rules
from diloco.syncer.restoring import Kept, KeptError
from diloco.syncer.snapshots import (
    Image,
    SnapshotError,
    Snapshots,
    read_image,
    write_image,
)
from diloco.syncer.store import RunCard, Store, StoreError
from diloco.wire import convert
from diloco.wire.chunks import DamagedChunk
from diloco.wire.convert import FRAME_HEAD_BYTES
from diloco.wire.identity import Authenticator, read_permissions, read_revoked, read_tokens
from diloco.wire.messages import CHUNK_BYTES_MAX, PAYLOAD_BYTES_MAX, Frame, MalformedMessage, Refusal
from diloco.wire.options import SecurityOptions
from tests.hunts.mutating import drawn, edited, json_spoiled, spoiled
from tests.sync.format_1 import encode_record
from tests.sync.test_journal import a_run
from tests.syncer.building import update
from tests.syncer.desk import CARD, OUTER, RULE, Desk
from tests.syncer.test_snapshots import snapshot
from tests.syncer.test_store import Story
from tests.syncer.test_store_formats import FIXTURE, card_of, toy_of
from tests.wire.samples import everything

Spoil = Callable[[bytes, random.Random], bytes]
Words = tuple[type[Exception], ...]
BLOCKS = {
    **dict.fromkeys(("fp32", "bf16"), ("",)),
    **dict.fromkeys(("int8", "int4"), ("", ":2", ":64")),
    **dict.fromkeys(("e3m0", "int2", "sign"), ("", ":8", ":64")),
    "topk": ("", ":256x4", ":65536x1024"),
}
"""The suffixes that each kind's name may have."""


@dataclass(frozen=True)
class Reader:
    """``read`` raises ``AssertionError`` where the product accepted bytes that it must refuse."""

    samples: list[bytes]
    read: Callable[[bytes], object]
    words: Words
    spoil: Spoil | None = None
    """A mutation that knows the format, used beside random ones."""
    weight: float = 1.0


def codecs() -> Iterator[tuple[str, Reader]]:
    """Yield a reader for every registered codec, in several sizes, with and without the entropy stage."""
    dice = torch.Generator().manual_seed(1)
    for kind in CODEC_NAMES:
        for block in BLOCKS[kind]:
            for stage in ("", "+zstd", "+auto19"):
                codec = make_codec(kind + block + stage)
                for numel in (1, 33, 700):
                    values = torch.randn(numel, generator=dice) * 10.0 ** (numel % 7 - 3)
                    samples = [codec.encode(each) for each in (values, torch.zeros(numel), values * 1e30)]

                    def read(raw: bytes, codec: Any = codec, numel: int = numel) -> object:
                        found = codec.decode(raw, numel)
                        assert found.shape == (numel,), found.shape
                        assert found.dtype == torch.float32
                        assert bool(torch.isfinite(found).all()), "not finite, but accepted"
                        return True

                    spoil = lying_frame(codec.payload_bytes(numel)) if stage else not_finite
                    yield f"codec {codec.name} of {numel}", Reader(samples, read, (DecodeError,), spoil)


def not_finite(raw: bytes, chance: random.Random) -> bytes:
    """Write a NaN or an infinity of fp32 or bf16 at a random place, which may be a scale."""
    pattern = chance.choice(
        (b"\x00\x00\x80\x7f", b"\x01\x00\x80\xff", b"\xc0\x7f", b"\x80\xff", b"\x01\x00", b"\x00\x80")
    )
    at = chance.randrange(0, max(1, len(raw) - len(pattern) + 1), len(pattern))
    return raw[:at] + pattern + raw[at + len(pattern) :]


def lying_frame(expected: int) -> Spoil:
    """Return a mutation that makes foreign zstd frames: wrong declared sizes, bombs, huge windows, two frames."""

    def spoil(raw: bytes, chance: random.Random) -> bytes:
        content = bytes(chance.choice((0, 1, expected - 1, expected, expected + 1, 1 << 20)))
        honest = chance.random() < 0.5
        window = chance.choice((10, 20, 23, 24, 27))
        parameters = zstandard.ZstdCompressionParameters(window_log=window, write_content_size=honest)
        frame = bytearray(zstandard.ZstdCompressor(compression_params=parameters).compress(content))
        match chance.randrange(5):
            case 0:
                frame *= 2
            case 1:
                frame = b"\x50\x2a\x4d\x18" + (len(frame)).to_bytes(4, "little") + frame
            case 2:  # A single segment that declares a wrong size in eight bytes.
                size = chance.choice((expected, 1 << 34, 1 << 62, (1 << 64) - 1))
                frame[4:] = b"\xe0" + size.to_bytes(8, "little") + frame[6:]
            case 3:
                frame = bytearray(spoiled(bytes(frame), [raw], chance))
        return b"\x01" + bytes(frame)

    return spoil


# --- the journal -----------------------------------------------------------------------------------------------


def shuffled(frame: struct.Struct, length_at: int) -> Spoil:
    """Return a mutation that drops, doubles or reorders whole units of a journal."""

    def spoil(raw: bytes, chance: random.Random) -> bytes:
        units, at = [], 0
        while at < len(raw):
            end = at + frame.size + int(frame.unpack_from(raw, at)[length_at])
            units.append(raw[at:end])
            at = end
        for _ in range(chance.randint(1, 2)):
            place = chance.randrange(len(units))
            match chance.randrange(3):
                case 0 if len(units) > 1:
                    del units[place]
                case 1:
                    units.insert(chance.randrange(len(units)), units[place])
                case 2:
                    units.insert(chance.randrange(len(units)), units.pop(place))
        return b"".join(units)

    return spoil


def crafted(body: bytes, chance: random.Random) -> bytes:
    """Mutate nodes of a record's JSON; the caller adds a correct checksum."""
    return json_spoiled(body.split(b"\n")[0], chance)


def journals() -> Iterator[tuple[str, Reader]]:
    """Yield the readers of both formats, for mutated bytes and for invalid records with right checksums and chains."""
    records = a_run().records

    def first(raw: bytes) -> object:
        found, end = read_records(raw)
        assert end <= len(raw)
        assert all(record in records for record in found), "a record that was never written"
        return found

    def crafted_first(raw: bytes) -> object:
        return read_records(FRAME_1.pack(len(raw), zlib.crc32(raw)) + raw)

    bodies = [encode_record(record)[FRAME_1.size :] for record in records]
    written = [b"".join(map(encode_record, records[:count])) for count in (1, 3, len(records))]
    yield "journal 1", Reader(written, first, (JournalError,), shuffled(FRAME_1, 0), 3)
    yield "record of journal 1", Reader(bodies, crafted_first, (JournalError,), crafted, 2)

    segments = [segment(records, turns) for turns in (1, 2, 4)]
    known = [read_segment(each) for each in segments]

    def second(raw: bytes) -> object:
        found = read_segment(raw)
        assert found.end <= len(raw)
        told = [frame.body for frame in found.frames]
        if not told and found.header is None:
            return found
        whole = [[frame.body for frame in each.frames] for each in known]
        assert any(told == bodies[: len(told)] for bodies in whole), "frames that were never written in this order"
        return [decode_records(frame.body, frame.offset) for frame in found.frames]

    def crafted_header(raw: bytes) -> object:
        return read_segment(_unit(b"\xd1JH\x02", chain_after(bytes(32), raw), raw))

    header_body = segments[0][UNIT.size : segments[0].index(FRAME[:2], UNIT.size)]
    yield "journal 2", Reader(segments, second, (JournalError,), shuffled(UNIT, 1), 3)
    crafted_second = lambda raw: decode_records(raw, 0)  # noqa: E731
    yield "turn of journal 2", Reader([encode_records(records[:3])], crafted_second, (JournalError,), crafted, 2)
    yield "header of journal 2", Reader([header_body], crafted_header, (JournalError,), crafted)


def segment(records: list[Record], turns: int) -> bytes:
    """Return a segment with ``turns`` frames."""
    header, chain = encode_header(1, bytes(32), {"run_id": "small"})
    pieces = [header, encode_mark(chain)]
    for turn in range(turns):
        frame, chain = encode_frame(encode_records(records[2 * turn : 2 * turn + 2]), chain)
        pieces += [frame, encode_mark(chain)]
    return b"".join(pieces)


# --- messages --------------------------------------------------------------------------------------------------


def messages() -> Iterator[tuple[str, Reader]]:
    """Yield a reader for every converter of the wire, with its samples; what it accepts can be packed again."""
    for message, pack, unpack in everything():
        raw = pack(message)
        kind = proto_of(unpack)

        def read(raw: bytes, pack: Any = pack, unpack: Any = unpack) -> object:
            return pack(unpack(raw))

        spoil = None if kind is None else message_spoiled(kind)
        # Only a frame can detect its own damage, in the two converters that may receive one.
        bulk = unpack in (convert.unpack_push, convert.unpack_pull_part)
        words = (MalformedMessage, DamagedChunk) if bulk else (MalformedMessage,)
        spoil = frame_spoiled if isinstance(message, Frame) else spoil
        name = kind.DESCRIPTOR.name if kind is not None else unpack.__name__
        yield f"{name} {type(message).__name__}", Reader([raw], read, words, spoil, 0.5)


def proto_of(unpack: Callable[[bytes], object]) -> Any:
    """Return the generated class that ``unpack`` parses, recorded by a replaced ``parse``."""
    with mock.patch.object(convert, "parse", side_effect=MalformedMessage) as parse, suppress(MalformedMessage):
        unpack(b"")
    return parse.call_args.args[0] if parse.called else None


def message_spoiled(kind: Any) -> Spoil:
    """Return a mutation that works field by field."""

    def spoil(raw: bytes, chance: random.Random) -> bytes:
        message = kind()
        if chance.random() < 0.3:
            message = drawn(kind.DESCRIPTOR, chance)
        else:
            message.ParseFromString(raw)
            edited(message, chance)
        return bytes(message.SerializeToString())

    return spoil


def frame_spoiled(raw: bytes, chance: random.Random) -> bytes:
    """Return a frame with a correct checksum of its head, and a wrong kind, an impossible offset or a bad length."""
    kind, reserved = chance.choice((0, 1, 1, 2, 255)), chance.choice((0, 0, 1, 0xFFFF))
    offset = chance.choice((0, 5, PAYLOAD_BYTES_MAX, PAYLOAD_BYTES_MAX + 1, (1 << 64) - 1))
    length = chance.choice((0, 1, len(raw) - FRAME_HEAD_BYTES, CHUNK_BYTES_MAX, CHUNK_BYTES_MAX + 1))
    place = struct.pack("<QQ", offset, chance.getrandbits(64))
    return struct.pack("<BBHI", 0, kind, reserved, zlib.crc32(place)) + place + bytes(length)


# --- files -----------------------------------------------------------------------------------------------------


def texts() -> Iterator[tuple[str, Reader]]:
    """Yield the readers of JSON or text that is not in a file."""
    layouts = [plan_layout((("a", (6, 4)), ("b", (10,)), ("c", (7,))), count) for count in (1, 2, 3)]

    def layout(raw: bytes) -> object:
        found = Layout.from_json(raw.decode())
        assert Layout.from_json(found.to_json()).fingerprint == found.fingerprint
        return [found.first_difference(each) for each in layouts]

    samples = [each.to_json().encode() for each in layouts]
    yield "layout", Reader(samples, layout, (ValueError,), json_spoiled, 3)

    authenticator = Authenticator(SecurityOptions(require_client_cert=True, tls_cert="c", tls_key="k", tls_ca="a"))

    def certificate(raw: bytes) -> object:
        identity = authenticator.identify(_Certified([raw]))
        text = raw.decode("utf-8", "replace")
        assert text.startswith("spiffe://"), text
        assert text.endswith(f"/{identity.name}"), text
        return identity

    names = [b"spiffe://example.org/site/a.b-c_1", b"spiffe://example.org/admin", b"spiffe://x/observer"]
    yield "SPIFFE id", Reader(names, certificate, (Refusal,), weight=3)


class _Certified:
    """The parts of gRPC's context that ``Authenticator`` uses."""

    def __init__(self, ids: list[bytes]) -> None:
        self._ids = ids

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"peer_spiffe_id": self._ids, "ssl_tls_version": [b"TLSv1.3"]}

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()


def replaced(path: Path, read: Callable[[], object], words: Words, weight: float = 1.0) -> Reader:
    """Return a reader that gives ``read`` the bytes as the file ``path``, and restores it afterwards."""
    good = path.read_bytes()

    def reading(raw: bytes) -> object:
        path.write_bytes(raw)
        try:
            return read()
        finally:
            path.write_bytes(good)

    return Reader([good], reading, words, json_spoiled if path.suffix == ".json" else None, weight)


def kept(
    folder: Path, read: Callable[[], object], words: Words, name: str, weight: float = 0.5, heavy: float = 0.5
) -> Iterator[tuple[str, Reader]]:
    """Yield a reader of each file in ``folder``, of weight ``heavy`` for JSON, that takes only what is there now."""
    written = plain(read())

    def reading() -> object:
        found = read()
        assert plain(found) == written, "other facts than were written"
        return found

    for path in sorted(folder.iterdir()):
        yield f"{name} {path.name}", replaced(path, reading, words, heavy if path.suffix == ".json" else weight)


def plain(value: Any) -> Any:
    """Return what can be compared of a value with tensors in it."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape, bytes(bytes_of(value))
    if is_dataclass(value):
        return plain({each.name: getattr(value, each.name) for each in fields(value)})
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def files(folder: Path) -> Iterator[tuple[str, Reader]]:
    """Yield the readers of our folders' files; ``folder`` should be in memory."""
    card = RunCard("small", "f" * 64, "shared")
    run = folder / "run"
    Store(run, card).journal.close()
    yield "run.json", replaced(run / "run.json", lambda: Store(run, card).journal.close(), (StoreError,), 0.5)
    snapshots = Snapshots(folder / "snapshots")
    snapshots.write(snapshot(1))
    read = lambda: snapshots.load(1)  # noqa: E731
    yield from kept(folder / "snapshots/00000001", read, (SnapshotError,), "snapshot's", 0.3, 1.0)
    yield "outbox", outbox(folder / "outbox")
    yield from credentials(folder)


def credentials(folder: Path) -> Iterator[tuple[str, Reader]]:
    """Yield the readers of tokens, permissions and revocations."""
    table = {"sites": {"a": "token-of-site-a-0123", "b": "b" * 40}, "observer": "o" * 16, "admin": "a" * 16}
    granted = {"fragments": [0, 1], "update_bytes_max": 40_000_000, "bytes_per_s": 5e6, "pull_bytes_per_s": 9}
    permissions = {"default": "deny", "sites": {"a": granted, "b": {"may_push": False}}, "roles": ["observer"]}
    revoked = {"certificates": ["0" * 64], "ids": ["site/a", "admin"]}
    files = [("tokens", table, read_tokens), ("permissions", permissions, read_permissions)]
    for name, good, reading in (*files, ("revoked", revoked, read_revoked)):
        path = folder / f"{name}.json"
        path.write_text(json.dumps(good))
        path.chmod(0o600)
        yield name, replaced(path, partial(reading, str(path)), (ValueError,))


def outbox(folder: Path) -> Reader:
    """Return a reader of a sealed update with a replaced file; what it accepts equals what was put there."""
    box = Outbox(folder)
    header, payload = update()
    box.put(header, payload)
    box.get(header.fragment, header.sequence)  # Later ones read the file.

    def read() -> object:
        known = box.digests()
        assert known in ({}, {(header.fragment, header.sequence): header.digest}), known
        found, view = box.get(header.fragment, header.sequence)
        assert (found, bytes(view)) == (header, payload), "another update than was put there"
        return True

    return replaced(next(folder.glob("*.update")), read, (OutboxError,), 0.5)


# --- Readers of whole folders, one file of which is replaced ---------------------------------------------------------

RULES = Rules(OUTER, RULE, "int8")


def folders(folder: Path) -> Iterator[tuple[str, Reader]]:
    """Yield the readers of all kinds of folders; ``folder`` should be in memory."""
    desk = told(folder / "past")
    yield from past(folder / "past", RULES, "kept")
    yield from image(folder, desk)
    yield from format_1(folder / "old")
    yield from checkpoints(folder / "checkpoints")
    yield "lease", lease(folder / "lease.json")


def told(folder: Path) -> Desk:
    """Make a short run that keeps its snapshots, with records after the last one."""
    desk = Desk(folder)
    desk.store.snapshots.prune = lambda retention, behind, pinned: ([], False)  # type: ignore[method-assign]
    desk.begin()
    story = Story(desk, 4)
    for turn in range(24):
        story.tell()
        if turn in (7, 15):
            desk.snapshot()
    desk.close()
    return desk


def past(folder: Path, rules: Rules, name: str) -> Iterator[tuple[str, Reader]]:
    """Yield readers that replay the folder; a truncated journal gives an earlier state, always of known versions."""
    whole = Kept(folder).replay(rules)
    digests = {(at, values.version): values.digest for at, values in enumerate(whole.values)}
    for point in Kept(folder).points():
        kept = Kept(folder).snapshots.load(point.number)
        digests |= {(at, values.version): values.digest for at, values in enumerate(kept.fragments)}
    newest = [values.version for values in whole.values]

    def read() -> object:
        found = Kept(folder).replay(rules, verify=True)
        for at, values in enumerate(found.values):
            assert values.version <= newest[at], "a version that was never published"
            assert digests.get((at, values.version), values.digest) == values.digest, (
                "other values than those published"
            )
        return found

    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "lock"]
    for path in files:
        where = path.relative_to(folder).as_posix()
        weight = 0.5 if "journal" in where or path.name in ("run.json", "manifest.json") else 0.05
        yield f"{name} {where}", replaced(path, read, (KeptError,), weight)


def image(folder: Path, desk: Desk) -> Iterator[tuple[str, Reader]]:
    path = folder / "image"
    written = Image(asdict(CARD), tuple(desk.values), {("a", 1): (300, 3)}, {"from": "a test", "left_out": [1, 2]})
    write_image(path, written)

    yield from kept(path, lambda: read_image(path), (SnapshotError,), "image's", 0.3, 2.0)


def format_1(folder: Path) -> Iterator[tuple[str, Reader]]:
    """Yield the readers of the first release's files: its syncer's folder, and a site's checkpoint."""
    shutil.copytree(FIXTURE, folder)
    toy = toy_of(folder)
    outer, rule = toy.rules()
    yield from past(folder / "syncer", Rules(outer, rule, toy.codec), "format 1, kept")
    for path in sorted((folder / "syncer" / "journal").iterdir()):

        def journal(path: Path = path) -> object:
            found = read_file(path).records
            # Frames of format 1 are independent: one from another journal is readable too, and only a replay finds a
            # wrong order.
            assert len(found) <= path.read_bytes().count(b'"at_ns":'), "more records than are there"
            return found

        yield f"format 1, {path.name}", replaced(path, journal, (JournalError,), 1.0)
    snapshots = Snapshots(folder / "syncer" / "snapshots")
    third = folder / "syncer/snapshots/00000003"
    yield from kept(third, lambda: snapshots.load(3), (SnapshotError,), "format 1, snapshot's")
    run_json = lambda: Store(folder / "syncer", card_of(toy)).journal.close()  # noqa: E731
    yield "format 1, run.json", replaced(folder / "syncer" / "run.json", run_json, (StoreError,), 0.5)
    first = folder / "a/checkpoints/00000001"
    yield from kept(first, lambda: checkpoint_in(first), (CheckpointError,), "format 1, checkpoint's")


def checkpoints(folder: Path) -> Iterator[tuple[str, Reader]]:
    tensors = {"model/a": torch.arange(12.0).view(3, 4), "random/cpu": torch.arange(9, dtype=torch.uint8)}
    checkpoint.save(folder, "1", tensors, {"steps": 3, "names": ["a"], "none": None})
    yield from kept(folder / "1", lambda: checkpoint_in(folder / "1"), (CheckpointError,), "checkpoint's")


def checkpoint_in(folder: Path) -> object:
    found = checkpoint.load(folder)
    return found.meta, {name: found.read(name) for name in found.entries}


def lease(path: Path) -> Reader:
    """Return a reader of a held lease: no damage may show another holder, or that it is free."""
    file = FileLease(path, "run-1", 5.0)
    assert file.acquire(Claim("syncer-1", 1, 1, anew=True)) is not None
    standing, _ = file.read()
    assert json.loads(path.read_bytes())["lease"]

    def read() -> object:
        found, _ = FileLease(path, "run-1", 5.0).read()
        assert found == standing, f"the lease was read as {found}"
        return found

    return replaced(path, read, (LeaseError, LeaseRefusedError))


# --- Readers of foreign models and tokenizers ------------------------------------------------------------------------

OPTIONS = ModelOptions(vocab_size=257, layers=1, dim=8, heads=2, ffn_dim=32, context=8)


def models(folder: Path) -> Iterator[tuple[str, Reader]]:
    """Yield a reader for every file of a folder in Hugging Face's form, and of torch's."""
    whole, parts, parallel = folder / "whole", folder / "parts", folder / "parallel"
    for where, shard_bytes in ((whole, 1 << 20), (parts, 4096), (parallel, 1)):
        values = {name: value.detach() for name, value in Transformer(OPTIONS).named_parameters()}
        tokenizer, dcp = make_tokenizer("bytes"), where is parallel
        write_folder(where, values, OPTIONS, tokenizer, dcp=dcp, shard_bytes=shard_bytes)

    def taken(where: Path) -> Callable[[], object]:
        def read() -> object:
            shapes = {name: value.shape for name, value in read_values(str(where), OPTIONS).items()}
            assert shapes.keys() == {name for name, _ in Transformer(OPTIONS).named_parameters()}
            return shapes

        return read

    def words() -> object:
        found = make_tokenizer(str(whole / "tokenizer.json"))
        return [found.decode(ids.tolist()) for ids in found.encode_batch(["a b\n", "é"])]

    refused: Words = (ConfigError,)
    yield "config.json", replaced(whole / "config.json", lambda: read_options(str(whole)), refused, 0.5)
    yield "config.json of values", replaced(whole / "config.json", taken(whole), refused, 0.5)
    yield "model.safetensors", replaced(whole / "model.safetensors", taken(whole), refused, 0.5)
    yield "a part of a model", replaced(min(parts.glob("*.safetensors")), taken(parts), refused, 0.5)
    yield "model.safetensors.index.json", replaced(parts / "model.safetensors.index.json", taken(parts), refused, 0.5)
    yield "DCP metadata", replaced(parallel / ".metadata", taken(parallel), refused, 0.5)
    yield "DCP values", replaced(parallel / "__0_0.distcp", taken(parallel), refused, 0.5)
    yield "tokenizer.json", replaced(whole / "tokenizer.json", words, (ValueError,), 0.5)
    yield "tokenizer_config.json", replaced(whole / "tokenizer_config.json", words, (ValueError,), 0.5)
