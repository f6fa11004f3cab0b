"""Checks of the way to a syncer, for an operator: name, connection, TLS, and then a few calls that change nothing.

Knock.  ``speaks_tls`` says whether an address speaks TLS.  gRPC says of a plaintext call to a TLS port only that the
socket was closed; this tells a user whose calls end there what is wrong.

Reach.  gRPC reports all that goes wrong before a call as UNAVAILABLE.  ``greet`` takes each step by itself with the
system's own sockets and TLS, and with what this end would show: a name, a connection, a handshake, a first word.  Each
step has a bound, and of an answer only the first bytes are looked at.

Checkup.  ``Checkup`` asks a syncer how this end fits it.  None of its calls is part of a run, and none changes one.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from diloco.sync.link import later_rate
from diloco.wire.channel import SYNC_SERVICE, Calls, Line
from diloco.wire.convert import pack_probe, unpack_probe_reply
from diloco.wire.messages import (
    CHUNK_BYTES_MIN,
    Filler,
    MalformedMessage,
    ProbeAnswer,
    ProbeTaken,
    Refused,
    Status,
    Unreachable,
)
from diloco.wire.options import SYSTEM_ROOTS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from diloco.wire.messages import ProbeAsk
    from diloco.wire.options import ClientOptions, SecurityOptions

KNOCK_S = 2.0


def speaks_tls(address: str) -> bool | None:
    """Whether whoever listens at ``host:port`` speaks TLS; None where that cannot be told within two seconds.

    Nothing is shown, and whom one talks to is not looked at.
    """
    host, _, port = address.rpartition(":")
    if address.startswith("unix:") or not port.isdecimal():
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_S) as line:
            context.wrap_socket(line).close()
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # An alert is TLS too: it says why not.
    except (OSError, OverflowError, UnicodeError):  # Nobody is there, or it is no address at all.
        return None
    return True


ADDRESSES_MAX = 8
"""Of one name, that are looked at."""
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_SETTINGS = 4
_FRAME_HEAD = 9
_TLS_ALERT = 0x15


class Heard(Enum):
    """What answered the first word of HTTP/2."""

    HTTP2 = "HTTP/2"
    HTTP1 = "HTTP/1"
    TLS = "a TLS alert"
    CLOSED = "nothing: it closed the connection"
    SILENCE = "nothing"
    OTHER = "something that is no HTTP"


@dataclass(frozen=True, slots=True)
class Greeting:
    """How a connection began.  ``alert`` is why TLS did not stand, in OpenSSL's words; ``shown`` the other end's
    certificate, DER, also where it was not accepted."""

    connect_s: float
    handshake_s: float = 0.0
    tls_version: str = ""
    shown: bytes = b""
    alert: str = ""
    unverified: bool = False
    """The certificate was looked at and refused, by ``alert``; otherwise the handshake itself failed."""
    heard: Heard | None = None
    """None where TLS did not stand."""


def resolve(host: str, port: int) -> tuple[str, ...]:
    """The addresses of ``host``, at most ``ADDRESSES_MAX``, in the order in which the system would try them.

    ``OSError`` or ``UnicodeError`` where there are none.  The system's resolver has a bound of its own, and no other.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))[:ADDRESSES_MAX]


def greet(address: str, port: int, host: str, security: SecurityOptions, limit_s: float) -> Greeting:
    """Connect to ``address``, begin TLS as for ``host`` where ``tls_ca`` is given, and say the first word of HTTP/2.

    ``OSError`` where no connection can be made within ``limit_s``, which each later step is given as well.
    """
    began = time.monotonic()
    with socket.create_connection((address, port), timeout=limit_s) as plain:
        connect_s = time.monotonic() - began
        if not security.tls_ca:
            return Greeting(connect_s, heard=_first_word(plain))
        context = _context(security)
        try:
            with context.wrap_socket(plain, server_hostname=host) as line:
                handshake_s = time.monotonic() - began - connect_s
                shown, version = line.getpeercert(binary_form=True) or b"", line.version() or ""
                return _encrypted(line, Greeting(connect_s, handshake_s, version, shown))
        except ssl.SSLCertVerificationError as error:
            shown = _certificate(address, port, limit_s)
            return Greeting(connect_s, shown=shown, alert=error.verify_message, unverified=True)
        except ssl.SSLError as error:
            return Greeting(connect_s, alert=error.reason or str(error))
        except OSError as error:
            return Greeting(connect_s, alert=str(error) or type(error).__name__)


def _context(security: SecurityOptions) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["h2"])
    if security.tls_ca == SYSTEM_ROOTS:
        context.load_default_certs()
    else:
        context.load_verify_locations(security.tls_ca)
    if security.tls_cert:
        context.load_cert_chain(security.tls_cert, security.tls_key)
    return context


def _encrypted(line: ssl.SSLSocket, greeting: Greeting) -> Greeting:
    """What was heard over TLS 1.3, where the other end refuses a caller's certificate only after the handshake."""
    try:
        heard, alert = _first_word(line), ""
    except ssl.SSLError as error:
        heard, alert = None, error.reason or str(error)
    return Greeting(
        greeting.connect_s, greeting.handshake_s, greeting.tls_version, greeting.shown, alert=alert, heard=heard
    )


def _certificate(address: str, port: int, limit_s: float) -> bytes:
    """What the other end shows, not looked at; empty where that cannot be had."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with (
            socket.create_connection((address, port), timeout=limit_s) as plain,
            context.wrap_socket(plain) as line,
        ):
            return line.getpeercert(binary_form=True) or b""
    except OSError:
        return b""


def _first_word(line: socket.socket) -> Heard:
    """Say it, and wait for the answer as long as the socket's own bound allows."""
    try:
        line.sendall(_PREFACE)
        told = b""
        while len(told) < _FRAME_HEAD:
            more = line.recv(_FRAME_HEAD - len(told))
            if not more:
                break
            told += more
    except TimeoutError:
        return Heard.SILENCE
    except ssl.SSLEOFError:
        return Heard.CLOSED
    except ssl.SSLError:
        raise
    except OSError:
        return Heard.CLOSED
    if not told:
        return Heard.CLOSED
    if told.startswith(b"HTTP/"):
        return Heard.HTTP1
    if told[0] == _TLS_ALERT:
        return Heard.TLS
    return Heard.HTTP2 if len(told) == _FRAME_HEAD and told[3] == _SETTINGS else Heard.OTHER


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
