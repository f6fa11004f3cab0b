"""Connectivity checks for an operator: name, connection, TLS, and a few calls to the syncer that change nothing.

TLS.  ``speaks_tls`` finds out whether an address speaks TLS.  When a plaintext call reaches a TLS port, gRPC reports
only that the socket was closed; with this the user learns the reason.

Connection.  gRPC reports every failure before a call as UNAVAILABLE.  ``resolve`` and ``greet`` take each step
separately with the system's own sockets and TLS, and with this end's certificate: name, connection, handshake, HTTP/2
preface.  Each connection step has a timeout, and only the first bytes of an answer are read.

Checkup.  ``Checkup`` asks a syncer whether this end fits it.  None of its calls is part of a run, and none changes one.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

from grpc_health.v1 import health_pb2

from diloco.wire.channel import SYNC_SERVICE, Arrival, ServiceClient, Stream, filler
from diloco.wire.convert import pack_probe, parse, unpack_probe_reply
from diloco.wire.messages import REPLY_BYTES_MAX, ProbeAnswer, ProbeTaken, Refused, Status, Unreachable
from diloco.wire.options import SYSTEM_ROOTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from diloco.wire.messages import ProbeAsk
    from diloco.wire.options import SecurityOptions

KNOCK_S = 2.0


def speaks_tls(address: str) -> bool | None:
    """Return whether the server at ``host:port`` speaks TLS; None if that is not known within ``KNOCK_S``.

    Sends no certificate and does not verify the server's.
    """
    host, _, port = address.rpartition(":")
    if address.startswith("unix:") or not port.isdecimal():
        return None
    try:
        _certificate(host.strip("[]"), int(port), KNOCK_S)
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # An alert is TLS too: the server refuses by it.
    except (OSError, OverflowError, UnicodeError):  # Nothing listens there, or the address is invalid.
        return None
    return True


ADDRESSES_MAX = 8
"""Most addresses of one name that are checked."""
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_SETTINGS = 4
_FRAME_HEAD = 9
_TLS_ALERT = 0x15


class Heard(Enum):
    """What answered the HTTP/2 preface."""

    HTTP2 = "HTTP/2"
    HTTP1 = "HTTP/1"
    TLS = "a TLS alert"
    CLOSED = "nothing: it closed the connection"
    SILENCE = "nothing"
    OTHER = "something that is not HTTP"


@dataclass(frozen=True, slots=True)
class Greeting:
    """How a connection began.  ``alert`` is OpenSSL's reason why TLS failed; ``shown`` is the server's certificate
    (DER), even if it was not accepted."""

    connect_s: float
    handshake_s: float = 0.0
    tls_version: str = ""
    shown: bytes = b""
    alert: str = ""
    unverified: bool = False
    """The server's certificate was refused, for the reason ``alert``; otherwise the handshake itself failed."""
    heard: Heard | None = None
    """The answer to the HTTP/2 preface; None where TLS failed."""


def resolve(host: str, port: int) -> tuple[str, ...]:
    """Return the addresses of ``host``, at most ``ADDRESSES_MAX``, in the order in which the system would try them.

    ``OSError`` or ``UnicodeError`` where there are none.  The only timeout is that of the system's resolver.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))[:ADDRESSES_MAX]


def greet(address: str, port: int, host: str, security: SecurityOptions, limit_s: float) -> Greeting:
    """Connect to ``address``, begin TLS for ``host`` if ``tls_ca`` is given, and send the HTTP/2 preface.

    ``OSError`` where no connection can be made within ``limit_s``, which is also the timeout of each later step.
    """
    began = time.monotonic()
    with socket.create_connection((address, port), timeout=limit_s) as plain:
        connect_s = time.monotonic() - began
        if not security.tls_ca:
            return Greeting(connect_s, heard=_first_word(plain))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.set_alpn_protocols(["h2"])
        if security.tls_ca == SYSTEM_ROOTS:
            context.load_default_certs()
        else:
            context.load_verify_locations(security.tls_ca)
        if security.tls_cert:
            context.load_cert_chain(security.tls_cert, security.tls_key)
        try:
            with context.wrap_socket(plain, server_hostname=host) as line:
                handshake_s = time.monotonic() - began - connect_s
                shown, version = line.getpeercert(binary_form=True) or b"", line.version() or ""
                greeting = Greeting(connect_s, handshake_s, version, shown)
                try:
                    return replace(greeting, heard=_first_word(line))
                except ssl.SSLError as error:  # In TLS 1.3 a server refuses our certificate only after the handshake.
                    return replace(greeting, alert=error.reason or str(error))
        except ssl.SSLCertVerificationError as error:
            shown = b""
            with suppress(OSError):
                shown = _certificate(address, port, limit_s)
            return Greeting(connect_s, shown=shown, alert=error.verify_message, unverified=True)
        except OSError as error:
            return Greeting(connect_s, alert=getattr(error, "reason", "") or str(error) or type(error).__name__)


def _certificate(address: str, port: int, limit_s: float) -> bytes:
    """Return the server's certificate (DER), unverified.  ``OSError`` where that fails."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with socket.create_connection((address, port), timeout=limit_s) as plain, context.wrap_socket(plain) as line:
        return line.getpeercert(binary_form=True) or b""


def _first_word(line: socket.socket) -> Heard:
    """Send the HTTP/2 preface and classify the answer, within the socket's own timeout."""
    told = b""
    try:
        line.sendall(_PREFACE)
        with line.makefile("rb") as answer:
            told = answer.read(_FRAME_HEAD)
    except TimeoutError:
        return Heard.SILENCE
    except OSError as error:
        if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
            raise
    if not told:
        return Heard.CLOSED
    if told.startswith(b"HTTP/"):
        return Heard.HTTP1
    if told[0] == _TLS_ALERT:
        return Heard.TLS
    return Heard.HTTP2 if len(told) == _FRAME_HEAD and told[3] == _SETTINGS else Heard.OTHER


_CHECK, _LIST, _WATCH = (f"/grpc.health.v1.Health/{name}" for name in ("Check", "List", "Watch"))


@dataclass(frozen=True, slots=True)
class Probed:
    """The result of a probe.  ``ahead_ns``: the lead of the syncer's clock over ours, accurate to ``round_s / 2``."""

    answer: ProbeAnswer
    round_s: float
    ahead_ns: int
    up: ProbeTaken | None
    down: ProbeTaken | None


class Checkup(ServiceClient):
    """One connection to one address.  Each method raises ``Refused`` or ``Unreachable``, and has a timeout."""

    service = SYNC_SERVICE

    def serving(self, service: str) -> bool | None:
        """Return whether ``service`` ("": the process itself) is SERVING there; None: it is unknown there."""
        ask = bytes(health_pb2.HealthCheckRequest(service=service).SerializeToString())
        try:
            return self._line.unary(_CHECK, ask, _is_serving)
        except Refused as error:
            if error.status is Status.NOT_FOUND:
                return None
            raise

    def names(self) -> tuple[str, ...]:
        """Return the names of all services there; empty where the server refuses to list them."""
        unpack = partial(parse, health_pb2.HealthListResponse, bytes_max=REPLY_BYTES_MAX)
        try:
            return tuple(sorted(self._line.unary(_LIST, b"", unpack).statuses))
        except Refused:
            return ()

    def round_trips(self, count: int, limit_s: float) -> list[float]:
        """Return the seconds that each of ``count`` small calls took, or of fewer when ``limit_s`` is over.  An extra
        first call, which opens the connection, is not included."""
        until, taken = time.monotonic() + limit_s, []
        for index in range(count + 1):
            began = time.monotonic()
            self._line.unary(_CHECK, b"", bytes)
            taken += [time.monotonic() - began] if index else []
            if time.monotonic() >= until:
                break
        return taken

    def probe(self, ask: ProbeAsk) -> Probed:
        """Ask, send ``ask.bytes_up`` of filler, and receive ``ask.bytes_down``."""
        answered = threading.Event()
        limit_s = self.options.control_timeout_s + 3 * ask.limit_ns / 1e9
        began_ns, asked_at = time.time_ns(), time.monotonic()
        answer: ProbeAnswer | None = None
        taken, here_ns, round_s = None, 0, 0.0
        arrival = Arrival()

        def requests() -> Iterator[bytes]:
            """Yield the ask and, after its answer, the filler for at most ``ask.limit_ns``.

            gRPC asks for no more once the call is over.
            """
            yield pack_probe(ask)
            answered.wait()
            for _, raw in filler(ask.bytes_up, ask.limit_ns, pack_probe):
                yield raw

        try:
            with Stream(self._line, "Probe", requests(), unpack_probe_reply, timeout_s=limit_s) as stream:
                for part in stream:
                    if isinstance(part, ProbeAnswer):
                        answer, round_s = part, time.monotonic() - asked_at
                        here_ns = (began_ns + time.time_ns()) // 2
                        answered.set()
                    elif isinstance(part, ProbeTaken):
                        taken = part
                    else:
                        arrival.more(len(part.data))
        finally:
            answered.set()
        if answer is None:
            raise Unreachable("Probe: the stream ended without an answer")
        down = arrival.taken()
        return Probed(answer, round_s, answer.time_ns - here_ns, taken, down if down.bytes else None)

    def come_in(self) -> None:
        """Make a call that needs authentication; ``Refused`` says why this end is not admitted."""
        with Stream(self._line, _WATCH, b"", _is_serving, timeout_s=self.options.control_timeout_s) as stream:
            if next(stream, None) is None:
                raise Unreachable("Watch: the stream ended without an answer")


def _is_serving(raw: bytes) -> bool:
    answer = parse(health_pb2.HealthCheckResponse, raw, REPLY_BYTES_MAX)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
