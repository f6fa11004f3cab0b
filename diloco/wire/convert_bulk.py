"""The messages of Push and Pull to bytes and back; ``convert`` has those of the control calls."""

from __future__ import annotations

from diloco.sync.events import Outcome
from diloco.wire import messages as m
from diloco.wire.bounds import check
from diloco.wire.convert import checked, enum_name, enum_number, fate_in, fate_out, parse, reason_in, reason_out
from diloco.wire.convert_units import spans_in, spans_out
from diloco.wire.frames import is_frame, pack_frame, unpack_frame
from diloco.wire.v1 import sync_pb2


def pack_push(part: m.PushPart) -> bytes:
    """``PushRequest``, or a frame."""
    match part:
        case m.Frame():
            return pack_frame(part.offset, part.data)
        case m.Chunk():
            return _pack_chunk(part)
        case m.PushHeader():
            check(part)
            return sync_pb2.PushRequest(
                header=sync_pb2.PushHeader(
                    run_id=part.run_id,
                    site_id=part.site_id,
                    incarnation=part.incarnation,
                    fragment=part.fragment,
                    sequence=part.sequence,
                    base_version=part.base_version,
                    tokens=part.tokens,
                    steps=part.steps,
                    step_ns=part.step_ns,
                    cursor=part.cursor,
                    final=part.final,
                    encoding=part.encoding,
                    payload_bytes=part.payload_bytes,
                    numel=part.numel,
                    digest=part.digest,
                    values_digest=part.values_digest,
                    frames=part.frames,
                    beside=part.beside,
                    progress=part.progress,
                    others=part.others,
                    spans=spans_out(part.spans),
                    lineage=part.lineage,
                )
            ).SerializeToString()
        case m.PushCommit():
            check(part)
            commit = sync_pb2.PushCommit(payload_bytes=part.payload_bytes, digest=part.digest)
            return sync_pb2.PushRequest(commit=commit).SerializeToString()


def unpack_push(raw: bytes) -> m.PushPart:
    """``PushRequest``, or a frame."""
    if is_frame(raw):
        return unpack_frame(raw)
    proto = parse(sync_pb2.PushRequest, raw, m.MESSAGE_BYTES_MAX)
    match proto.WhichOneof("part"):
        case "chunk":
            return _chunk_in(proto.chunk)
        case "header":
            if len(raw) > m.CONTROL_BYTES_MAX:
                raise m.MalformedMessage(f"header is {len(raw)} bytes long: at most {m.CONTROL_BYTES_MAX} wanted")
            return checked(_header_in(proto.header))
        case "commit":
            return checked(m.PushCommit(proto.commit.payload_bytes, proto.commit.digest))
        case _:
            raise m.MalformedMessage("part is not set: a header, a chunk or a commit wanted")


def _header_in(header: sync_pb2.PushHeader) -> m.PushHeader:
    return m.PushHeader(
        run_id=header.run_id,
        site_id=header.site_id,
        incarnation=header.incarnation,
        fragment=header.fragment,
        sequence=header.sequence,
        base_version=header.base_version,
        tokens=header.tokens,
        steps=header.steps,
        step_ns=header.step_ns,
        cursor=header.cursor,
        final=header.final,
        encoding=header.encoding,
        payload_bytes=header.payload_bytes,
        numel=header.numel,
        digest=header.digest,
        values_digest=header.values_digest,
        frames=header.frames,
        beside=header.beside,
        progress=header.progress,
        others=header.others,
        spans=spans_in(header.spans),
        lineage=header.lineage,
    )


def _pack_chunk(chunk: m.Chunk) -> bytes:
    """A ``PushRequest`` or ``PullResponse`` that holds a chunk, which is field 2 in both.

    Written by hand because the generated code copies the data three times, at 1 MiB each time into fresh memory; this
    is one copy.  A test sees that protobuf reads it as its own.
    """
    if not 1 <= len(chunk.data) <= m.CHUNK_BYTES_MAX:
        raise m.MalformedMessage(f"data is {len(chunk.data)} bytes long: 1 to {m.CHUNK_BYTES_MAX} wanted")
    checksum = b"\x15" + chunk.crc32.to_bytes(4, "little")
    if chunk.xxh3 is not None:
        checksum = b"\x21" + chunk.xxh3.to_bytes(8, "little")
    fields = b"\x08%b%b\x1a%b" % (_varint(chunk.offset), checksum, _varint(len(chunk.data)))
    return b"".join((b"\x12", _varint(len(fields) + len(chunk.data)), fields, chunk.data))


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _chunk_in(chunk: sync_pb2.Chunk) -> m.Chunk:
    data = chunk.data
    if not 1 <= len(data) <= m.CHUNK_BYTES_MAX:
        raise m.MalformedMessage(f"data is {len(data)} bytes long: 1 to {m.CHUNK_BYTES_MAX} wanted")
    if chunk.offset > m.PAYLOAD_BYTES_MAX:
        raise m.MalformedMessage(f"offset is {chunk.offset}: at most {m.PAYLOAD_BYTES_MAX} wanted")
    return m.Chunk(chunk.offset, data, chunk.crc32, chunk.xxh3 if chunk.HasField("xxh3") else None)


def pack_push_reply(reply: m.PushReply) -> bytes:
    """``PushResponse``."""
    check(reply)
    if isinstance(reply, m.PushAdmitted):
        admitted = sync_pb2.PushAdmitted(offset=reply.offset, frames=reply.frames)
        return sync_pb2.PushResponse(admitted=admitted).SerializeToString()
    if isinstance(reply, m.PushAgain):
        again = sync_pb2.PushAgain(offset=reply.offset, length=reply.length)
        return sync_pb2.PushResponse(again=again).SerializeToString()
    result = sync_pb2.PushResult(
        outcome=enum_number(sync_pb2.Outcome, f"OUTCOME_{reply.outcome.name}"),
        reason=reason_out(reply.reason),
        version=reply.version,
        fate=None if reply.fate is None else fate_out(reply.fate),
        text=reply.text,
        epoch=reply.epoch,
    )
    return sync_pb2.PushResponse(result=result).SerializeToString()


def unpack_push_reply(raw: bytes) -> m.PushReply:
    """``PushResponse``."""
    proto = parse(sync_pb2.PushResponse, raw, m.CONTROL_BYTES_MAX)
    match proto.WhichOneof("part"):
        case "admitted":
            return checked(m.PushAdmitted(proto.admitted.offset, proto.admitted.frames))
        case "again":
            return checked(m.PushAgain(proto.again.offset, proto.again.length))
        case "result":
            result = proto.result
            outcome = enum_name(sync_pb2.Outcome, result.outcome, "OUTCOME_")
            if outcome == "UNSPECIFIED":
                raise m.MalformedMessage("outcome is not set")
            return checked(
                m.PushResult(
                    outcome=Outcome[outcome],
                    version=result.version,
                    reason=reason_in(result.reason),
                    fate=fate_in(result.fate) if result.HasField("fate") else None,
                    text=result.text,
                    epoch=result.epoch,
                )
            )
        case _:
            raise m.MalformedMessage("part is not set: an admission, bytes wanted again or a result wanted")


def pack_pull(ask: m.PullAsk) -> bytes:
    """``PullRequest``."""
    check(ask)
    return sync_pb2.PullRequest(
        run_id=ask.run_id,
        site_id=ask.site_id,
        fragment=ask.fragment,
        have_version=ask.have_version,
        want_version=ask.want_version,
        offset=ask.offset,
        protocol=ask.protocol,
        length=ask.length,
        deal=ask.deal,
        bytes_per_s=ask.bytes_per_s,
        wait_ns=ask.wait_ns,
    ).SerializeToString()


def unpack_pull(raw: bytes) -> m.PullAsk:
    """``PullRequest``."""
    proto = parse(sync_pb2.PullRequest, raw, m.CONTROL_BYTES_MAX)
    return checked(
        m.PullAsk(
            proto.run_id,
            proto.site_id,
            proto.fragment,
            proto.have_version,
            proto.want_version,
            proto.offset,
            proto.protocol or 2,
            proto.length,
            proto.deal,
            proto.bytes_per_s,
            proto.wait_ns,
        )
    )


def pack_pull_part(part: m.PullPart) -> bytes:
    """``PullResponse``, or a frame."""
    if isinstance(part, m.Frame):
        return pack_frame(part.offset, part.data)
    if isinstance(part, m.Chunk):
        return _pack_chunk(part)
    check(part)
    return sync_pb2.PullResponse(
        header=sync_pb2.PullHeader(
            fragment=part.fragment,
            from_version=part.from_version,
            version=part.version,
            whole=part.whole,
            encoding=part.encoding,
            numel=part.numel,
            payload_bytes=part.payload_bytes,
            part_bytes=part.part_bytes,
            digest=part.digest,
            payload_crc32=part.payload_crc32,
            fates=[fate_out(fate) for fate in part.fates],
            epoch=part.epoch,
            frames=part.frames,
            sites=part.sites,
        )
    ).SerializeToString()


def unpack_pull_part(raw: bytes) -> m.PullPart:
    """``PullResponse``, or a frame."""
    if is_frame(raw):
        return unpack_frame(raw)
    proto = parse(sync_pb2.PullResponse, raw, m.MESSAGE_BYTES_MAX)
    match proto.WhichOneof("part"):
        case "chunk":
            return _chunk_in(proto.chunk)
        case "header":
            header = proto.header
            return checked(
                m.PullHeader(
                    fragment=header.fragment,
                    from_version=header.from_version,
                    version=header.version,
                    whole=header.whole,
                    encoding=header.encoding,
                    numel=header.numel,
                    payload_bytes=header.payload_bytes,
                    part_bytes=tuple(header.part_bytes),
                    digest=header.digest,
                    payload_crc32=header.payload_crc32,
                    fates=tuple(fate_in(fate) for fate in header.fates),
                    epoch=header.epoch,
                    frames=header.frames,
                    sites=header.sites,
                )
            )
        case _:
            raise m.MalformedMessage("part is not set: a header or a chunk wanted")
