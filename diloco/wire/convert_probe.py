"""The messages of Probe to bytes and back; ``convert`` has those of the control calls."""

from __future__ import annotations

from diloco.wire import messages as m
from diloco.wire import probing as p
from diloco.wire.bounds import check
from diloco.wire.convert import checked, parse
from diloco.wire.v1 import sync_pb2


def pack_probe(part: p.ProbePart) -> bytes:
    """``ProbeRequest``."""
    check(part)
    if isinstance(part, p.Filler):
        return sync_pb2.ProbeRequest(filler=part.data).SerializeToString()
    ask = sync_pb2.ProbeAsk(
        protocol=part.protocol,
        run_id=part.run_id,
        layout_fingerprint=part.layout_fingerprint,
        layout_json=part.layout_json,
        shared_config=dict(part.shared_config),
        bytes_up=part.bytes_up,
        bytes_down=part.bytes_down,
        limit_ns=part.limit_ns,
    )
    return sync_pb2.ProbeRequest(ask=ask).SerializeToString()


def unpack_probe(raw: bytes) -> p.ProbePart:
    """``ProbeRequest``."""
    proto = parse(sync_pb2.ProbeRequest, raw, m.MESSAGE_BYTES_MAX)
    match proto.WhichOneof("part"):
        case "filler":
            return checked(p.Filler(proto.filler))
        case "ask":
            return checked(_ask_in(proto.ask))
        case _:
            raise m.MalformedMessage("part is not set: an ask or filler wanted")


def _ask_in(ask: sync_pb2.ProbeAsk) -> p.ProbeAsk:
    return p.ProbeAsk(
        protocol=ask.protocol,
        run_id=ask.run_id,
        layout_fingerprint=ask.layout_fingerprint,
        layout_json=ask.layout_json,
        shared_config=dict(ask.shared_config),
        bytes_up=ask.bytes_up,
        bytes_down=ask.bytes_down,
        limit_ns=ask.limit_ns,
    )


def pack_probe_reply(reply: p.ProbeReply) -> bytes:
    """``ProbeResponse``."""
    check(reply)
    match reply:
        case p.Filler():
            return sync_pb2.ProbeResponse(filler=reply.data).SerializeToString()
        case p.ProbeAnswer():
            answer = sync_pb2.ProbeAnswer(
                protocol=reply.protocol,
                protocol_oldest=reply.protocol_oldest,
                run_id=reply.run_id,
                identity=reply.identity,
                time_ns=reply.time_ns,
                difference=reply.difference,
                standby_of=reply.standby_of,
                shared_config=dict(reply.shared_config),
            )
            return sync_pb2.ProbeResponse(answer=answer).SerializeToString()
        case p.ProbeTaken():
            taken = sync_pb2.ProbeTaken(bytes=reply.bytes, duration_ns=reply.duration_ns, bytes_per_s=reply.bytes_per_s)
            return sync_pb2.ProbeResponse(taken=taken).SerializeToString()


def unpack_probe_reply(raw: bytes) -> p.ProbeReply:
    """``ProbeResponse``."""
    proto = parse(sync_pb2.ProbeResponse, raw, m.MESSAGE_BYTES_MAX)
    match proto.WhichOneof("part"):
        case "filler":
            return checked(p.Filler(proto.filler))
        case "taken":
            taken = proto.taken
            return checked(p.ProbeTaken(taken.bytes, taken.duration_ns, taken.bytes_per_s))
        case "answer":
            answer = proto.answer
            return checked(
                p.ProbeAnswer(
                    answer.protocol,
                    answer.protocol_oldest,
                    answer.run_id,
                    answer.identity,
                    answer.time_ns,
                    answer.difference,
                    answer.standby_of,
                    dict(answer.shared_config),
                )
            )
        case _:
            raise m.MalformedMessage("part is not set: an answer, what was taken, or filler wanted")
