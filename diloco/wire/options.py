"""The settings of both ends of the wire: watched files, TLS and tokens, gRPC and its limits.

Watched files.  Certificates, keys and tokens are read again when their files change, so a new one needs no restart.
The content of a file is replaced as a whole or not at all.  A file that is broken, half written or gone leaves the last
good content in force; the complaint is reported once and kept for later readers.

Security.  By default nothing is encrypted and no token is needed, so the syncer binds to the loopback address only.
Any other address is refused unless the connection is encrypted and each site authenticates: by its own token
(``tokens_file``), or by a client certificate whose only SPIFFE id is ``spiffe://<trust domain>/site/<site_id>`` (or
``.../observer``, ``.../admin``, ``.../standby``).  At the syncer each new handshake uses the latest certificate.  At a
site gRPC reads certificate and key once for each connection, so the site opens a new connection (``channel.Line``).

Server and client.  The HTTP/2 settings were measured over 100 ms and 1 Gbit/s.  The settings left at their defaults
(BDP probe, look-ahead, frame and write-buffer sizes) were no better, or worse, when set.

Two timeouts detect a silent connection, and both are needed: ``keepalive_timeout_ms`` is TCP's (TCP_USER_TIMEOUT:
nothing is acknowledged), ``http2.ping_timeout_ms`` is HTTP/2's own, without which a proxy that still acknowledges keeps
a dead path alive (seen with grpcio 1.85.1).
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import ssl
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import grpc

from diloco.sync.options import require
from diloco.wire.messages import CONTROL_BYTES_MAX, MESSAGE_BYTES_MAX, MIB, REPLY_BYTES_MAX, STREAMS_MAX, WINDOW_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")


class Watched(Generic[T]):
    """Holds as ``value`` the result of ``read``, called again when one of the files ``paths`` changes.

    ``read`` raises ``ValueError`` or ``OSError`` for unusable files; the constructor passes these on.
    """

    def __init__(self, what: str, paths: Sequence[str], read: Callable[[], T]) -> None:
        self.what = what
        self.complaint = ""
        self.paths = list(map(Path, paths))
        self._read = read
        # The mark is taken before the read, so a change in between causes another read.
        self._mark = list(map(_mark_of, self.paths))
        self.value = read()

    @classmethod
    def where(cls, what: str, path: str, read: Callable[[str], T], otherwise: T) -> Watched[T]:
        """Watch the single file at ``path``; where ``path`` is empty, hold ``otherwise``."""
        return cls(what, [path] if path else [], lambda: read(path) if path else otherwise)

    def refresh(self) -> str | None:
        """Read again if a file has changed since the last check; return a message about it, None without a change."""
        mark = list(map(_mark_of, self.paths))
        if mark == self._mark:
            return None
        self._mark = mark
        try:
            self.value = self._read()
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            self.complaint = f"{self.what} cannot be used, its last good content stays in force: {why}"
            return self.complaint
        self.complaint = ""
        return f"{self.what} was read again"


def _mark_of(path: Path) -> tuple[int, ...]:
    """Return a fingerprint that every change of ``path`` alters, including one of its mode or owner."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


SYSTEM_ROOTS = "system"
PORT_MAX = 65535
_TOKEN = re.compile(r"[\x21-\x7e]+")


@dataclass(kw_only=True, slots=True)
class SecurityOptions:
    """Security files, given by path (keys and certificates in PEM), and switches.

    Raises ``ValueError`` for combinations that cannot work.
    """

    tls_cert: str = ""
    """This end's certificate chain: the syncer's, or a site's own where client certificates are required."""
    tls_key: str = ""
    tls_ca: str = ""
    """At a site: the CA of the syncer's certificate (``system``: the machine's roots); this turns TLS on.
    At the syncer: the CA of the sites' certificates."""
    require_client_cert: bool = False
    """At the syncer: refuse connections without a certificate signed by ``tls_ca``."""
    trust_domain: str = ""
    """At the syncer: the trust domain required in a client's SPIFFE id; empty: any that ``tls_ca`` signs."""
    revoked_file: str = ""
    """At the syncer: JSON ``{"certificates": [<SHA-256>], "ids": ["site/<site_id>"]}``, the revoked credentials."""
    permissions: str = ""
    """At the syncer: the file of permissions (``identity.Permissions``); without it, a caller's role decides."""
    tokens_file: str = ""
    """At the syncer: JSON ``{"sites": {"<site_id>": "<token>"}, "observer": "<token>", "admin": "<token>"}``, mode
    0600.  A list of tokens may stand in place of one: each of them is valid."""
    token: str = field(default="", repr=False)
    """At a site or at an operator: its own token."""
    token_file: str = ""
    """The same in a file, mode 0600, which is read again when it changes."""
    insecure_non_loopback: bool = False
    """Permit what is refused by default: a reachable address without encryption or without authentication."""

    def __post_init__(self) -> None:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError(f"tls_cert is {self.tls_cert!r} and tls_key {self.tls_key!r}: give both or neither")
        if self.require_client_cert and not (self.tls_cert and self.tls_ca):
            raise ValueError("require_client_cert is True: it needs tls_cert, tls_key and tls_ca")
        if self.require_client_cert and self.tls_ca == SYSTEM_ROOTS:
            raise ValueError(
                "require_client_cert is True: tls_ca must name the file of the CA that signs the sites' certificates"
            )
        if self.token and not is_token(self.token):
            raise ValueError("token holds a blank or a character that is not printable ASCII")
        if self.token and self.token_file:
            raise ValueError(f"token_file is {self.token_file!r}: give it or token, not both")
        if (self.revoked_file or self.permissions) and not (self.tokens_file or self.require_client_cert):
            name = "revoked_file" if self.revoked_file else "permissions"
            raise ValueError(f"{name} is {getattr(self, name)!r}: it needs tokens_file or require_client_cert")


def is_loopback(address: str) -> bool:
    """Return whether ``host:port`` can be reached from this machine only."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_token(text: str) -> bool:
    """Return whether ``text`` is a valid token: printable ASCII without blanks."""
    return _TOKEN.fullmatch(text) is not None


def check_private(field: str, path: str) -> None:
    """Raise ``ValueError`` when the secret in ``path`` is open to others, or is owned by neither this user nor root."""
    found = Path(path).stat()
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise ValueError(f"{field} {path} can be read by others than its owner: chmod 600 {path}")
    if found.st_uid not in (0, os.geteuid()):
        raise ValueError(f"{field} {path} belongs to user {found.st_uid}: this process's user or root must own it")


def check_bind(address: str, options: SecurityOptions) -> None:
    """Raise ``ValueError`` for a reachable listening address without encryption or without authentication.

    Also for an invalid port, which gRPC would take modulo 65536, and for a host that does not resolve: a user who has
    misspelt the name gets that error before one that says how to switch protection off.
    """
    host, _, port = address.rpartition(":")
    if not address.startswith("unix:") and not (":" in address and port.isdecimal() and int(port) <= PORT_MAX):
        raise ValueError(f"address is {address!r}: host:port wanted, with a port of 0 to {PORT_MAX}")
    if is_loopback(address):
        return
    try:
        socket.getaddrinfo(host.strip("[]") or None, int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"address is {address!r}: {host} does not resolve here: {why}") from error
    if options.insecure_non_loopback:
        return
    if not options.tls_cert:
        raise ValueError(
            f"address is {address!r}: not a loopback address, and there is no TLS. Give tls_cert and tls_key "
            "(diloco certs makes them), or set insecure_non_loopback to accept that anyone on the network can read and "
            "change the run"
        )
    if not (options.tokens_file or options.require_client_cert):
        raise ValueError(
            f"address is {address!r}: not a loopback address, and sites cannot be told apart. Give tokens_file or "
            "require_client_cert, or set insecure_non_loopback to accept that anyone on the network can join"
        )


def serving_credentials(options: SecurityOptions) -> tuple[Watched[Any], Any]:
    """Return the files of the syncer's certificate, key and CA, and credentials in the form that gRPC's server takes.

    Each new handshake uses their latest content.  ``ValueError`` or ``OSError`` for files that do not fit together.
    """

    def read() -> Any:
        cert, key = read_pair(options.tls_cert, options.tls_key)
        roots = read_authority(options.tls_ca) if options.require_client_cert else None
        return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=roots)

    names = [options.tls_cert, options.tls_key, *([options.tls_ca] if options.require_client_cert else [])]
    watched = Watched("tls_cert, tls_key or tls_ca", names, read)
    served = watched.value

    def latest() -> Any:
        """Return the latest configuration, None if unchanged.  gRPC calls it before each handshake."""
        nonlocal served
        now = watched.value
        if now is served:
            return None
        served = now
        return now

    return watched, grpc.dynamic_ssl_server_credentials(served, latest, options.require_client_cert)


def read_pair(cert: str, key: str) -> tuple[bytes, bytes]:
    """Read certificate chain and key, PEM.  ``ValueError`` when they do not match, or the key file is not private."""
    check_private("tls_key", key)
    pair = Path(cert).read_bytes(), Path(key).read_bytes()
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=lambda: b"")
    except ssl.SSLError as error:
        raise ValueError(f"tls_cert {cert} and tls_key {key} are not a pair: {error.reason}") from error
    return pair


def read_authority(path: str) -> bytes:
    """Read the certificates of a CA, PEM.  ``ValueError`` when the file holds none."""
    authority = Path(path).read_bytes()
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except ssl.SSLError as error:
        raise ValueError(f"tls_ca {path} holds no certificate: {error.reason or error}") from error
    return authority


def read_token(path: str) -> str:
    """Read the token in a site's own file.  ``ValueError``, whose text never contains the token."""
    check_private("token_file", path)
    token = Path(path).read_text("utf-8").strip()
    if not is_token(token):
        raise ValueError(f"token_file {path} is empty, or holds a blank or a character that is not printable ASCII")
    return token


def client_credentials(options: SecurityOptions) -> Any:
    """Return gRPC's credentials of a client; None without TLS.  ``ValueError`` or ``OSError`` for unusable files."""
    cert, key = read_pair(options.tls_cert, options.tls_key) if options.tls_cert else (None, None)
    roots = read_authority(options.tls_ca) if options.tls_ca not in ("", SYSTEM_ROOTS) else None
    return grpc.ssl_channel_credentials(roots, key, cert) if options.tls_ca else None


def check_own_files(options: SecurityOptions) -> None:
    """Raise ``ValueError`` or ``OSError`` for credential files of a site that cannot be used."""
    if options.token_file:
        read_token(options.token_file)
    client_credentials(options)


MBPS_MIN = 0.1
MBPS_MAX = 1e6
CHECK_BYTES_MAX = 4 * MIB
"""Memory to check one range of values: with kernels, the payload of 512 Ki values; without them 128 Ki values, their
payload, and the fp64 sums."""
FRAMES_KEPT = 8
"""Frames in the cache of pulled versions: made for the first site, and reused for the sites that pull soon after."""
STANDARD_STREAMS_MAX = 8
"""Streams of the health and reflection services open at once."""


@dataclass(kw_only=True, slots=True)
class ServerOptions:
    """The settings of the syncer's end."""

    run_id: str
    address: str = "127.0.0.1:0"
    """``host:port``; port 0 lets the system choose."""
    sites_max: int = 16
    pushes_max: int = 0
    """Updates being received at once; 0: two for each site.  One more is refused with a retry delay."""
    pushes_per_site_max: int = 2
    checks_max: int = 2
    """Updates whose values are checked at once while they arrive, one range of each at a time; others wait."""
    pulls_per_site_max: int = 8
    """Room for the six streams of one pull, and for those of an interrupted one that have not ended yet."""
    watches_per_site_max: int = 2
    calls_per_caller_max: int = 24
    """Concurrent calls of one identity, of all kinds: as many as three connections carry."""
    calls_per_s: float = 0.0
    """Rate limit of one identity's calls, after a burst of two seconds' worth; 0: none."""
    chunk_bytes: int = MIB
    header_timeout_s: float = 5.0
    """Longest wait for the first message of a call, such as the header of a push."""
    stall_s: float = 20.0
    """A stream without progress for so long is ended."""
    alive_s: float = 3.0
    """Interval of the ``Alive`` events on an idle Watch stream."""
    pushback_ms: int = 500
    connection_age_s: float = 6 * 3600.0
    """With client certificates: an older connection takes no new calls and its Watch ends, because a certificate and
    its expiry are checked only when the connection is made."""
    keepalive_time_ms: int = 10_000
    keepalive_timeout_ms: int = 5_000
    """Also TCP_USER_TIMEOUT: raise it where a round trip takes more than 300 ms or many packets are lost."""

    def __post_init__(self) -> None:
        require(self.sites_max >= 1, "sites_max", self.sites_max, "at least 1")
        require(self.calls_per_s >= 0, "calls_per_s", self.calls_per_s, "not negative")

    def memory_bytes_max(self, payload_bytes: int, streams: int, unpack_bytes: int = 0) -> int:
        """Return the bound on the memory that sites can make the syncer use, beyond idle use and the outer steps.

        ``checks_max * (4 MiB + unpack_bytes) + streams * (min(1.5 * payload_bytes, 16 MiB) + 44 * 64 KiB)
        + push_credits * min(payload_bytes, 8 MiB) + 8 * chunk_bytes``

        The first term is for checks: one range of an update's values, their payload and what is computed from them;
        and, for an encoding with an entropy stage, the memory to unpack it (``unpack_bytes``).  The rest of an update
        is on disk, and costs only what is in flight: for each open stream gRPC's flow window, and one control message
        at the worst that parsing can make of it.  gRPC states no bound of the window, which grows with the path; the
        largest observed is 12 MiB (``tests.hunts.crowd``).  ``streams`` are the open ones: at most ``calls_max`` are
        admitted, and at most ``push_credits`` begin a push.  The third term is for bytes that arrive early: over
        several streams, or after a chunk that is sent again.  The last one is the cache of frames for pulls.
        """
        window, parsed = min(3 * payload_bytes // 2, 16 * MIB), 44 * CONTROL_BYTES_MAX
        early = self.push_credits * min(payload_bytes, WINDOW_BYTES)
        kept = FRAMES_KEPT * self.chunk_bytes
        return self.checks_max * (CHECK_BYTES_MAX + unpack_bytes) + streams * (window + parsed) + early + kept

    @property
    def push_credits(self) -> int:
        """Updates being received at once."""
        return self.pushes_max or 2 * self.sites_max

    @property
    def calls_max(self) -> int:
        """Calls at once, which is also the number of threads: enough for every caller to reach its own limit.

        Besides the sites, 4 callers count: observers, operators, a standby, and all unauthenticated callers together.
        """
        return self.calls_per_caller_max * (self.sites_max + 4) + STANDARD_STREAMS_MAX

    def channel_arguments(self) -> list[tuple[str, int]]:
        """Return gRPC's own settings for the listening end."""
        return [
            *_keepalive(self),
            ("grpc.http2.min_ping_interval_without_data_ms", min(5_000, self.keepalive_time_ms // 2)),
            ("grpc.http2.max_ping_strikes", 2),
            ("grpc.server_handshake_timeout_ms", 5_000),
            ("grpc.so_reuseport", 0),
            ("grpc.max_concurrent_streams", 8),
            ("grpc.compression_enabled_algorithms_bitset", 1),
            ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ]


@dataclass(kw_only=True, slots=True)
class ClientOptions:
    """The settings of a site's or an operator's end."""

    chunk_bytes: int = MIB
    """Longest chunk; a slow link gets shorter ones (``chunks.ChunkSize``), as each must pass within ``stall_s``."""
    control_timeout_s: float = 5.0
    join_timeout_s: float = 15.0
    admin_timeout_s: float = 60.0
    stall_s: float = 10.0
    """A push or pull without progress for so long is abandoned; so is a Watch without any event, ``Alive`` included."""
    answer_s: float = 60.0
    """Longest wait for the answer to a commit, during which the syncer makes the update durable."""
    data_channels: int = 1
    """Connections for bulk.  One transfer uses all of them at once: only several connections fill a long path if TCP's
    buffers are small (``sync.link.channels_for``)."""
    up_mbps: float = 0.0
    """Capacity of the site's link, in 10^6 bits a second: pushes stay below it, to leave room for heartbeats.  0: the
    learned rate of a long-distance link (``client.Learned``), and no limit on others."""
    down_mbps: float = 0.0
    """The same for pulls."""
    keepalive_time_ms: int = 10_000
    keepalive_timeout_ms: int = 5_000

    def __post_init__(self) -> None:
        require(1 <= self.data_channels <= STREAMS_MAX, "data_channels", self.data_channels, f"1 to {STREAMS_MAX}")
        for name in ("up_mbps", "down_mbps"):
            value = getattr(self, name)
            require(value == 0 or MBPS_MIN <= value <= MBPS_MAX, name, value, f"0, or {MBPS_MIN} to {MBPS_MAX}")

    def channel_arguments(self) -> list[tuple[str, int]]:
        """Return gRPC's own settings for a client.  Without the local pool, equal channels would share a connection."""
        return [
            *_keepalive(self),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.min_reconnect_backoff_ms", 2_000),
            ("grpc.max_reconnect_backoff_ms", 3_000),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_retries", 0),
            ("grpc.max_receive_message_length", REPLY_BYTES_MAX),
        ]


def _keepalive(options: ServerOptions | ClientOptions) -> list[tuple[str, int]]:
    return [
        ("grpc.keepalive_time_ms", options.keepalive_time_ms),
        ("grpc.keepalive_timeout_ms", options.keepalive_timeout_ms),
        ("grpc.http2.ping_timeout_ms", options.keepalive_timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
    ]
