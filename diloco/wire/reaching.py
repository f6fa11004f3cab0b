"""How far one gets towards an address before gRPC is asked: a name, a connection, a handshake, a first word.

gRPC says of all that goes wrong there that it is UNAVAILABLE.  Here each step is made by itself, by the system's own
sockets and TLS, with what this end would show; each has a bound, and nothing that was said is looked at further than
its first bytes.
"""

from __future__ import annotations

import socket
import ssl
import time
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from diloco.wire.security import SYSTEM_ROOTS

if TYPE_CHECKING:
    from diloco.wire.security import SecurityOptions

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
