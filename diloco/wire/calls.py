"""Calls over one channel, with raw bytes in and out, and gRPC's failures in our words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from diloco.sync.events import Reason
from diloco.wire.messages import Refused, Status, Unreachable, WireError
from diloco.wire.v1 import admin_pb2, replication_pb2, sync_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

    from diloco.wire.lines import Line
    from diloco.wire.stall import Guard

SYNC_SERVICE: str = sync_pb2.DESCRIPTOR.services_by_name["SyncService"].full_name
ADMIN_SERVICE: str = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
REPLICATION_SERVICE: str = replication_pb2.DESCRIPTOR.services_by_name["ReplicationService"].full_name
PUSHBACK_KEY = "grpc-retry-pushback-ms"
REASON_KEY = "diloco-reason"

# After these the same request may be sent again: no answer came, the bytes were damaged, or the other end had a defect.
_AGAIN = frozenset(
    {
        Status.UNAVAILABLE,
        Status.DEADLINE_EXCEEDED,
        Status.CANCELLED,
        Status.DATA_LOSS,
        Status.INTERNAL,
        Status.UNKNOWN,
        Status.ABORTED,
    }
)

_FULL = "Concurrent RPC limit exceeded!"
"""What gRPC says, without a time to come back, for a server that has more calls at once than it has threads.  Its other
RESOURCE_EXHAUSTED are of messages too large, which no second attempt makes smaller."""


class Calls:
    """The methods of ``service`` on ``line``; messages are bytes."""

    def __init__(self, line: Line, service: str) -> None:
        self._line = line
        self._service = service

    def unary(self, method: str, request: bytes, timeout_s: float) -> bytes:
        """One message there, one back.  Raises ``Refused`` or ``Unreachable``."""
        try:
            reply: bytes = self._open("unary_unary", method)(request, timeout=timeout_s, metadata=self._line.metadata())
        except grpc.RpcError as error:
            raise self.failed(method, error) from error
        except ValueError as error:
            raise Unreachable(f"{method}: {error}") from error
        return reply

    def stream(self, method: str, request: bytes, timeout_s: float | None = None) -> Any:
        """One message there, many back: gRPC's call, to be iterated and cancelled.

        What moves is never cut because it is long: bulk has no deadline, and a guard ends what does not move.
        """
        try:
            return self._open("unary_stream", method)(request, timeout=timeout_s, metadata=self._line.metadata())
        except ValueError as error:
            raise Unreachable(f"{method}: {error}") from error

    def exchange(self, method: str, requests: Iterator[bytes], timeout_s: float | None = None) -> Any:
        """Many messages both ways: gRPC's call, to be iterated and cancelled; bulk has no deadline here either."""
        try:
            return self._open("stream_stream", method)(requests, timeout=timeout_s, metadata=self._line.metadata())
        except ValueError as error:
            raise Unreachable(f"{method}: {error}") from error

    def close(self) -> None:
        """End everything under way."""
        self._line.close()

    def failed(self, method: str, error: Any, guard: Guard | None = None) -> WireError:
        """What a failed call means to the caller (``wire_error``), after which this end may show something newer."""
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            self._line.lost()
        return wire_error(method, error, guard)

    def _open(self, kind: str, method: str) -> Any:
        # gRPC raises ValueError for a channel that was closed, here or at the call.
        return getattr(self._line.channel, kind)(f"/{self._service}/{method}")


def wire_error(method: str, error: Any, guard: Guard | None = None) -> WireError:
    """What a failed call means to the caller: ``Refused`` or ``Unreachable``."""
    if guard is not None and guard.stalled:
        return Unreachable(f"{method}: nothing moved for {guard.limit_s:g} s")
    status = Status(error.code().name)
    text = error.details() or str(status)
    metadata = error.trailing_metadata() or ()
    retry_after_s = _pushback_s(metadata)
    if status in _AGAIN or retry_after_s is not None or (status is Status.RESOURCE_EXHAUSTED and text == _FULL):
        return Unreachable(f"{method}: {text} ({status})", retry_after_s)
    return Refused(status, text, _reason(metadata))


def _reason(metadata: Any) -> Reason | None:
    """What the syncer gave with its refusal; None also for one that only a later release knows."""
    told = [value for key, value in metadata if key == REASON_KEY]
    return next((reason for reason in Reason if [reason.value] == told), None)


def _pushback_s(metadata: Any) -> float | None:
    for key, value in metadata:
        if key == PUSHBACK_KEY and isinstance(value, str) and value.isdigit() and len(value) <= 8:
            return int(value) / 1000.0
    return None
