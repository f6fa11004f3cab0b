"""What is asked of a syncer to see how one gets on with it; none of it is part of a run, and none of it changes one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from diloco.wire.calls import Calls
from diloco.wire.lines import Line
from diloco.wire.messages import Refused, Status, Unreachable

if TYPE_CHECKING:
    from types import TracebackType

    from diloco.wire.options import ClientOptions
    from diloco.wire.security import SecurityOptions

HEALTH_SERVICE = "grpc.health.v1.Health"


class Checkup:
    """One connection to one address.  Each method raises ``Refused`` or ``Unreachable``, and has a bound."""

    def __init__(self, address: str, security: SecurityOptions, options: ClientOptions) -> None:
        """``ValueError`` in words, or ``OSError``, for an address or files that cannot work."""
        self._options = options
        line = Line(address, security, options.channel_arguments())
        self._health = Calls(line, HEALTH_SERVICE)

    def __enter__(self) -> Checkup:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._health.close()

    def serving(self, service: str) -> bool | None:
        """Whether what goes by this name is served there ("": the process itself); None: there is no such thing."""
        try:
            raw = self._health.unary("Check", _question(service), self._options.control_timeout_s)
            return _is_serving(raw)
        except Refused as error:
            if error.status is Status.NOT_FOUND:
                return None
            raise

    def names(self) -> tuple[str, ...]:
        """All that is served there, by name; nothing from who does not tell."""
        try:
            raw = self._health.unary("List", b"", self._options.control_timeout_s)
            return tuple(sorted(health_pb2.HealthListResponse.FromString(raw).statuses))
        except DecodeError as error:
            raise Unreachable(f"List: the answer cannot be: {error}") from error
        except Refused:
            return ()

    def round_trips(self, count: int, limit_s: float) -> list[float]:
        """Seconds that each of ``count`` small calls took, fewer where ``limit_s`` is over; the first is not told,
        because it makes the connection."""
        until, taken = time.monotonic() + limit_s, []
        for index in range(count + 1):
            began = time.monotonic()
            self._health.unary("Check", b"", self._options.control_timeout_s)
            taken += [time.monotonic() - began] if index else []
            if time.monotonic() >= until:
                break
        return taken

    def come_in(self) -> None:
        """Ask for something that is open only to who is known; ``Refused`` says why one is not let in."""
        call = self._health.stream("Watch", _question(""), self._options.control_timeout_s)
        try:
            _is_serving(next(call))
        except StopIteration as error:
            raise Unreachable("Watch: the stream ended without an answer") from error
        except grpc.RpcError as error:
            raise self._health.failed("Watch", error) from error
        finally:
            call.cancel()


def _question(service: str) -> bytes:
    return bytes(health_pb2.HealthCheckRequest(service=service).SerializeToString())


def _is_serving(raw: bytes) -> bool:
    try:
        answer = health_pb2.HealthCheckResponse.FromString(raw)
    except DecodeError as error:
        raise Unreachable(f"Check: the answer cannot be: {error}") from error
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
