"""Dataclasses to bytes and back, with every bound checked in both directions.

``pack_*`` and ``unpack_*`` raise ``MalformedMessage`` and nothing else for a message that breaks the contract; the
length is compared before anything is parsed, because parsing can cost 44 times a message's length in memory.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from google.protobuf.message import DecodeError

from diloco.sync.events import Ending, Fate, FateTold, FinalAnnounced, FragmentStanding, Reason
from diloco.sync.plain import parse_json
from diloco.wire import messages as m
from diloco.wire.bounds import check
from diloco.wire.convert_units import unit_ask_in, unit_ask_out, unit_list_in, unit_list_out
from diloco.wire.v1 import admin_pb2, sync_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class _Proto(Protocol):
    def ParseFromString(self, serialized: bytes) -> int: ...  # noqa: N802 — protobuf's name


P = TypeVar("P", bound=_Proto)
M = TypeVar("M")


def parse(kind: Callable[[], P], raw: bytes, bytes_max: int) -> P:
    """A generated message of ``kind``, not yet checked."""
    if len(raw) > bytes_max:
        raise m.MalformedMessage(f"message is {len(raw)} bytes long: at most {bytes_max} wanted")
    message = kind()
    try:
        message.ParseFromString(raw)
    except DecodeError as error:
        raise m.MalformedMessage("message is not what its method takes: it cannot be parsed") from error
    return message


def checked(message: M) -> M:
    """``message``, when every bound holds."""
    check(message)
    return message


# --- enums, fates, standings -----------------------------------------------------------------------------------


def reason_out(reason: Reason | None) -> Any:
    """UNSPECIFIED for None."""
    return enum_number(sync_pb2.Reason, "REASON_UNSPECIFIED" if reason is None else f"REASON_{reason.name}")


def reason_in(number: int) -> Reason | None:
    """None for UNSPECIFIED."""
    name = enum_name(sync_pb2.Reason, number, "REASON_")
    return None if name == "UNSPECIFIED" else Reason[name]


def _ending_out(ending: Ending | None) -> Any:
    return enum_number(sync_pb2.Ending, "ENDING_UNSPECIFIED" if ending is None else f"ENDING_{ending.name}")


def _ending_in(number: int) -> Ending | None:
    name = enum_name(sync_pb2.Ending, number, "ENDING_")
    return None if name == "UNSPECIFIED" else Ending[name]


def enum_number(enum: Any, name: str) -> Any:
    """The member ``name`` of a generated enum; the stubs and the runtime do not agree on its type."""
    return enum.Value(name)


def enum_name(enum: Any, number: int, prefix: str) -> str:
    """The member's name without ``prefix``."""
    try:
        name: str = enum.Name(number)
    except ValueError as error:
        raise m.MalformedMessage(f"{prefix.rstrip('_').lower()} is {number}: not known here") from error
    return name.removeprefix(prefix)


def fate_out(fate: Fate) -> sync_pb2.Fate:
    """A fate, to be checked by the caller."""
    return sync_pb2.Fate(
        fragment=fate.fragment,
        sequence=fate.sequence,
        version=fate.version,
        tokens=fate.tokens,
        digest=fate.digest,
        reason=reason_out(fate.reason),
    )


def fate_in(fate: sync_pb2.Fate) -> Fate:
    """A fate, not yet checked."""
    return Fate(fate.fragment, fate.sequence, fate.version, fate.tokens, fate.digest, reason_in(fate.reason))


def _fates_in(fates: Iterable[sync_pb2.Fate]) -> tuple[Fate, ...]:
    return tuple(fate_in(fate) for fate in fates)


def _standing_out(standing: FragmentStanding) -> sync_pb2.Standing:
    return sync_pb2.Standing(
        fragment=standing.fragment,
        version=standing.version,
        digest=standing.digest,
        watermark=standing.watermark,
        cursor=standing.cursor,
        tokens_merged=standing.tokens_merged,
        tokens_discarded=standing.tokens_discarded,
        undecided=[sync_pb2.Undecided(sequence=sequence, tokens=tokens) for sequence, tokens in standing.undecided],
        fates=[fate_out(fate) for fate in standing.fates],
    )


def _standing_in(standing: sync_pb2.Standing) -> FragmentStanding:
    return FragmentStanding(
        fragment=standing.fragment,
        version=standing.version,
        digest=standing.digest,
        watermark=standing.watermark,
        cursor=standing.cursor,
        tokens_merged=standing.tokens_merged,
        tokens_discarded=standing.tokens_discarded,
        undecided=tuple((item.sequence, item.tokens) for item in standing.undecided),
        fates=_fates_in(standing.fates),
    )


# --- Join ------------------------------------------------------------------------------------------------------


def pack_join(ask: m.JoinAsk) -> bytes:
    """``JoinRequest``."""
    check(ask)
    return sync_pb2.JoinRequest(
        protocol=ask.protocol,
        run_id=ask.run_id,
        lineage=ask.lineage,
        site_id=ask.site_id,
        process=ask.process,
        layout_fingerprint=ask.layout_fingerprint,
        layout_json=ask.layout_json,
        shared_config=dict(ask.shared_config),
        ticket=ask.ticket,
    ).SerializeToString()


def unpack_join(raw: bytes) -> m.JoinAsk:
    """``JoinRequest``."""
    proto = parse(sync_pb2.JoinRequest, raw, m.JOIN_BYTES_MAX)
    return checked(
        m.JoinAsk(
            protocol=proto.protocol,
            run_id=proto.run_id,
            lineage=proto.lineage,
            site_id=proto.site_id,
            process=proto.process,
            layout_fingerprint=proto.layout_fingerprint,
            layout_json=proto.layout_json,
            shared_config=dict(proto.shared_config),
            ticket=proto.ticket,
        )
    )


def pack_join_reply(reply: m.JoinReply) -> bytes:
    """``JoinResponse``."""
    check(reply)
    return sync_pb2.JoinResponse(
        epoch=reply.epoch,
        incarnation=reply.incarnation,
        lineage=reply.lineage,
        standings=[_standing_out(standing) for standing in reply.standings],
        run_tokens=reply.run_tokens,
        progress_ppm=reply.progress_ppm,
        ending=_ending_out(reply.ending),
        settings=sync_pb2.LearnerSettings(
            heartbeat_ns=reply.settings.heartbeat_ns,
            chunk_bytes=reply.settings.chunk_bytes,
            updates_in_flight_max=reply.settings.updates_in_flight_max,
            site_timeout_ns=reply.settings.site_timeout_ns,
            keep_until_decided=reply.settings.keep_until_decided,
        ),
        protocol=reply.protocol,
        ticket=reply.ticket,
    ).SerializeToString()


def unpack_join_reply(raw: bytes) -> m.JoinReply:
    """``JoinResponse``."""
    proto = parse(sync_pb2.JoinResponse, raw, m.REPLY_BYTES_MAX)
    settings = proto.settings
    return checked(
        m.JoinReply(
            epoch=proto.epoch,
            incarnation=proto.incarnation,
            lineage=proto.lineage,
            standings=tuple(_standing_in(standing) for standing in proto.standings),
            run_tokens=proto.run_tokens,
            progress_ppm=proto.progress_ppm,
            ending=_ending_in(proto.ending),
            settings=m.LearnerSettings(
                heartbeat_ns=settings.heartbeat_ns,
                chunk_bytes=settings.chunk_bytes,
                updates_in_flight_max=settings.updates_in_flight_max,
                site_timeout_ns=settings.site_timeout_ns,
                keep_until_decided=settings.keep_until_decided,
            ),
            protocol=proto.protocol,
            ticket=proto.ticket,
        )
    )


# --- Watch -----------------------------------------------------------------------------------------------------


def pack_watch(ask: m.WatchAsk) -> bytes:
    """``WatchRequest``."""
    check(ask)
    return sync_pb2.WatchRequest(
        run_id=ask.run_id, site_id=ask.site_id, incarnation=ask.incarnation
    ).SerializeToString()


def unpack_watch(raw: bytes) -> m.WatchAsk:
    """``WatchRequest``."""
    proto = parse(sync_pb2.WatchRequest, raw, m.CONTROL_BYTES_MAX)
    return checked(m.WatchAsk(proto.run_id, proto.site_id, proto.incarnation))


def pack_watch_event(event: m.WatchEvent) -> bytes:
    """``WatchResponse``."""
    check(event)
    proto = sync_pb2.WatchResponse()
    match event:
        case m.Published():
            proto.published.epoch = event.epoch
            proto.published.fragment = event.fragment
            proto.published.version = event.version
            proto.published.digest = event.digest
            proto.published.run_tokens = event.run_tokens
            proto.published.progress_ppm = event.progress_ppm
            proto.published.lineage = event.lineage
            proto.published.fastest_step_ns = event.fastest_step_ns
        case FateTold():
            proto.fate.CopyFrom(fate_out(event.fate))
        case FinalAnnounced():
            proto.final.ending = _ending_out(event.ending)
        case m.Dropped():
            proto.dropped.reason = reason_out(event.reason)
        case m.Alive():
            proto.alive.SetInParent()
    return proto.SerializeToString()


def unpack_watch_event(raw: bytes) -> m.WatchEvent:
    """``WatchResponse``."""
    proto = parse(sync_pb2.WatchResponse, raw, m.CONTROL_BYTES_MAX)
    match proto.WhichOneof("event"):
        case "published":
            seen = proto.published
            return checked(
                m.Published(
                    epoch=seen.epoch,
                    fragment=seen.fragment,
                    version=seen.version,
                    digest=seen.digest,
                    run_tokens=seen.run_tokens,
                    progress_ppm=seen.progress_ppm,
                    lineage=seen.lineage,
                    fastest_step_ns=seen.fastest_step_ns,
                )
            )
        case "fate":
            return checked(FateTold(fate_in(proto.fate)))
        case "final":
            ending = _ending_in(proto.final.ending)
            if ending is None:
                raise m.MalformedMessage("ending is not set in a final event")
            return FinalAnnounced(ending)
        case "dropped":
            reason = reason_in(proto.dropped.reason)
            if reason is None:
                raise m.MalformedMessage("reason is not set in a dropped event")
            return m.Dropped(reason)
        case "alive":
            return m.Alive()
        case _:
            raise m.MalformedMessage("event is not set, or of a kind that is not known here")


# --- Report, Leave, admin --------------------------------------------------------------------------------------


def pack_report(report: m.ReportInfo) -> bytes:
    """``ReportRequest``."""
    check(report)
    proto = sync_pb2.ReportRequest(
        run_id=report.run_id,
        site_id=report.site_id,
        incarnation=report.incarnation,
        step=report.step,
        tokens_processed=report.tokens_processed,
        tokens_unsent=report.tokens_unsent,
        tokens_in_flight=report.tokens_in_flight,
        tokens_overwritten=report.tokens_overwritten,
        tokens_lost=report.tokens_lost,
        tokens_per_s=report.tokens_per_s,
        step_ns=report.step_ns,
        train_ns=report.train_ns,
        stall_ns=report.stall_ns,
        bytes_up=report.bytes_up,
        bytes_down=report.bytes_down,
        versions=report.versions,
        digests=report.digests,
    )
    if report.units is not None:
        proto.units.CopyFrom(unit_ask_out(report.units))
    if report.link is not None:
        proto.link.CopyFrom(_link_out(report.link))
    if report.loss is not None and math.isfinite(report.loss):
        proto.loss = report.loss
    return proto.SerializeToString()


def unpack_report(raw: bytes) -> m.ReportInfo:
    """``ReportRequest``."""
    proto = parse(sync_pb2.ReportRequest, raw, m.CONTROL_BYTES_MAX)
    return checked(
        m.ReportInfo(
            run_id=proto.run_id,
            site_id=proto.site_id,
            incarnation=proto.incarnation,
            step=proto.step,
            tokens_processed=proto.tokens_processed,
            tokens_unsent=proto.tokens_unsent,
            tokens_in_flight=proto.tokens_in_flight,
            tokens_overwritten=proto.tokens_overwritten,
            tokens_lost=proto.tokens_lost,
            loss=proto.loss if proto.HasField("loss") and math.isfinite(proto.loss) else None,
            tokens_per_s=proto.tokens_per_s,
            step_ns=proto.step_ns,
            train_ns=proto.train_ns,
            stall_ns=proto.stall_ns,
            bytes_up=proto.bytes_up,
            bytes_down=proto.bytes_down,
            versions=tuple(proto.versions),
            digests=tuple(proto.digests),
            link=_link_in(proto.link) if proto.HasField("link") else None,
            units=unit_ask_in(proto.units) if proto.HasField("units") else None,
        )
    )


def _link_out(link: m.LinkInfo) -> sync_pb2.LinkReport:
    return sync_pb2.LinkReport(**{name: getattr(link, name) for name in m.LinkInfo.__slots__})


def _link_in(link: sync_pb2.LinkReport) -> m.LinkInfo:
    return m.LinkInfo(**{name: getattr(link, name) for name in m.LinkInfo.__slots__})


def pack_report_reply(reply: m.ReportReply) -> bytes:
    """``ReportResponse``."""
    check(reply)
    return sync_pb2.ReportResponse(
        epoch=reply.epoch,
        run_tokens=reply.run_tokens,
        progress_ppm=reply.progress_ppm,
        known=reply.known,
        ending=_ending_out(reply.ending),
        retake=reply.retake,
        units=unit_list_out(reply.units) if reply.units is not None else None,
    ).SerializeToString()


def unpack_report_reply(raw: bytes) -> m.ReportReply:
    """``ReportResponse``."""
    proto = parse(sync_pb2.ReportResponse, raw, m.CONTROL_BYTES_MAX)
    return checked(
        m.ReportReply(
            epoch=proto.epoch,
            run_tokens=proto.run_tokens,
            progress_ppm=proto.progress_ppm,
            known=proto.known,
            ending=_ending_in(proto.ending),
            retake=tuple(proto.retake),
            units=unit_list_in(proto.units) if proto.HasField("units") else None,
        )
    )


def pack_leave(ask: m.LeaveAsk) -> bytes:
    """``LeaveRequest``."""
    check(ask)
    return sync_pb2.LeaveRequest(
        run_id=ask.run_id, site_id=ask.site_id, incarnation=ask.incarnation
    ).SerializeToString()


def unpack_leave(raw: bytes) -> m.LeaveAsk:
    """``LeaveRequest``."""
    proto = parse(sync_pb2.LeaveRequest, raw, m.CONTROL_BYTES_MAX)
    return checked(m.LeaveAsk(proto.run_id, proto.site_id, proto.incarnation))


def pack_evict(ask: m.EvictAsk) -> bytes:
    """``EvictRequest``, and ``ReadmitRequest``, which has the same field."""
    check(ask)
    return admin_pb2.EvictRequest(site_id=ask.site_id).SerializeToString()


def unpack_evict(raw: bytes) -> m.EvictAsk:
    """``EvictRequest``, and ``ReadmitRequest``, which has the same field."""
    return checked(m.EvictAsk(parse(admin_pb2.EvictRequest, raw, m.CONTROL_BYTES_MAX).site_id))


def pack_update(ask: m.UpdateAsk) -> bytes:
    """``AdmitRequest`` and ``RefuseRequest``, which have the same fields."""
    check(ask)
    return admin_pb2.AdmitRequest(site_id=ask.site_id, fragment=ask.fragment, sequence=ask.sequence).SerializeToString()


def unpack_update(raw: bytes) -> m.UpdateAsk:
    """``AdmitRequest`` and ``RefuseRequest``."""
    proto = parse(admin_pb2.AdmitRequest, raw, m.CONTROL_BYTES_MAX)
    return checked(m.UpdateAsk(proto.site_id, proto.fragment, proto.sequence))


def pack_promote(*, lossy: bool) -> bytes:
    """``PromoteRequest``."""
    return admin_pb2.PromoteRequest(lossy=lossy).SerializeToString()


def unpack_promote(raw: bytes) -> bool:
    """``PromoteRequest``: whether it may be lossy."""
    return parse(admin_pb2.PromoteRequest, raw, m.CONTROL_BYTES_MAX).lossy


def unpack_empty(raw: bytes) -> None:
    """A request that is empty (Status, Drain, Snapshot, Detach): nothing that this end knows, but it must parse."""
    parse(admin_pb2.StatusRequest, raw, m.CONTROL_BYTES_MAX)


def pack_status(status: dict[str, object]) -> bytes:
    """``StatusResponse``.  ``ValueError`` or ``TypeError`` for what JSON cannot carry."""
    text = json.dumps(status, allow_nan=False, separators=(",", ":"))
    return admin_pb2.StatusResponse(json=text.encode("utf-8")).SerializeToString()


def unpack_status(raw: bytes) -> dict[str, object]:
    """``StatusResponse``."""
    proto = parse(admin_pb2.StatusResponse, raw, m.REPLY_BYTES_MAX)
    try:
        status = parse_json(proto.json)
    except ValueError as error:
        raise m.MalformedMessage("json is not JSON") from error
    if not isinstance(status, dict):
        raise m.MalformedMessage("json is not an object")
    return status
