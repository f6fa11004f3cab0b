"""What is asked of a syncer to see how one gets on with it; none of it is part of a run, and none of it changes one."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from diloco.sync.links import later_rate
from diloco.wire.calls import SYNC_SERVICE, Calls
from diloco.wire.convert_probe import pack_probe, unpack_probe_reply
from diloco.wire.lines import Line
from diloco.wire.messages import CHUNK_BYTES_MIN, MalformedMessage, Refused, Status, Unreachable
from diloco.wire.probing import Filler, ProbeAnswer, ProbeTaken

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from diloco.wire.options import ClientOptions
    from diloco.wire.probing import ProbeAsk
    from diloco.wire.security import SecurityOptions

HEALTH_SERVICE = "grpc.health.v1.Health"


@dataclass(frozen=True, slots=True)
class Probed:
    """What a probe brought.  ``ahead_ns`` is how far the clock there is before ours, to half of ``round_s``."""

    answer: ProbeAnswer
    round_s: float
    ahead_ns: int
    up: ProbeTaken | None
    down: ProbeTaken | None


class Checkup:
    """One connection to one address.  Each method raises ``Refused`` or ``Unreachable``, and has a bound."""

    def __init__(self, address: str, security: SecurityOptions, options: ClientOptions) -> None:
        """``ValueError`` in words, or ``OSError``, for an address or files that cannot work."""
        self._options = options
        line = Line(address, security, options.channel_arguments())
        self._health = Calls(line, HEALTH_SERVICE)
        self._sync = Calls(line, SYNC_SERVICE)

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

    def probe(self, ask: ProbeAsk) -> Probed:
        """Ask, send the filler that ``ask`` promises, and take what it wants."""
        answered, ended = threading.Event(), threading.Event()
        limit_s = self._options.control_timeout_s + 3 * ask.limit_ns / 1e9
        began_ns, asked_at = time.time_ns(), time.monotonic()
        call = self._sync.exchange("Probe", _requests(ask, answered, ended), limit_s)
        answer: ProbeAnswer | None = None
        taken, here_ns, round_s = None, 0, 0.0
        came: list[tuple[int, int]] = []
        try:
            for raw in call:
                part = unpack_probe_reply(raw)
                if isinstance(part, ProbeAnswer):
                    answer, round_s = part, time.monotonic() - asked_at
                    here_ns = (began_ns + time.time_ns()) // 2
                    answered.set()
                elif isinstance(part, ProbeTaken):
                    taken = part
                else:
                    came.append((time.monotonic_ns(), (came[-1][1] if came else 0) + len(part.data)))
        except MalformedMessage as error:
            raise Unreachable(f"Probe: the syncer's answer cannot be: {error}") from error
        except grpc.RpcError as error:
            raise self._sync.failed("Probe", error) from error
        finally:
            ended.set()
            answered.set()
            call.cancel()
        if answer is None:
            raise Unreachable("Probe: the stream ended without an answer")
        down = ProbeTaken(came[-1][1], came[-1][0] - came[0][0], int(later_rate(came))) if came else None
        return Probed(answer, round_s, answer.time_ns - here_ns, taken, down)

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


def _requests(ask: ProbeAsk, answered: threading.Event, ended: threading.Event) -> Iterator[bytes]:
    """The ask, and when it was answered the filler, for no longer than it may take."""
    yield pack_probe(ask)
    answered.wait()
    left, block = ask.bytes_up, os.urandom(min(CHUNK_BYTES_MIN, max(ask.bytes_up, 1)))
    whole, until = pack_probe(Filler(block)), time.monotonic_ns() + ask.limit_ns
    while left and not ended.is_set() and time.monotonic_ns() < until:
        count = min(len(block), left)
        yield whole if count == len(block) else pack_probe(Filler(block[:count]))
        left -= count


def _question(service: str) -> bytes:
    return bytes(health_pb2.HealthCheckRequest(service=service).SerializeToString())


def _is_serving(raw: bytes) -> bool:
    try:
        answer = health_pb2.HealthCheckResponse.FromString(raw)
    except DecodeError as error:
        raise Unreachable(f"Check: the answer cannot be: {error}") from error
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
