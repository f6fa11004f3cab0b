"""The settings of both ends of the wire: files that are read again, TLS and tokens, gRPC and its limits.

Watched files.  Certificates, keys and tokens are read again when their files change, so that no process has to restart
for a new one.  The content of a file is replaced as a whole or not at all.  A file that is broken, half written or gone
leaves the last good content in force; the complaint is told once and kept for later readers.

Security.  Out of the box nothing is encrypted and no token is needed, and therefore the syncer binds to the loopback
address only.  Any other address is refused in words unless sites can be told apart over an encrypted connection: by a
token each (``tokens_file``), or by a client certificate whose only SPIFFE id is
``spiffe://<trust domain>/site/<site_id>`` (or ``.../observer``, ``.../admin``, ``.../standby``).  At the syncer each
new handshake gets the latest certificate.  At a site gRPC takes certificate and key once for each connection, so the
site opens a new connection (``channel.Line``).

Server and client.  The HTTP/2 settings were measured over 100 ms and 1 Gbit/s.  What is left alone (BDP probe,
look-ahead, frame and write-buffer sizes) made things worse or no better when it was set.

Two settings notice a connection that fell silent, and each needs its bound: ``keepalive_timeout_ms`` is TCP's
(TCP_USER_TIMEOUT: nothing acknowledges), ``http2.ping_timeout_ms`` is HTTP/2's own, without which a proxy that goes on
acknowledging keeps a dead path alive (seen with grpcio 1.85.1).
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
from diloco.wire.messages import (
    CHUNK_BYTES_MAX,
    CHUNK_BYTES_MIN,
    CONTROL_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    MIB,
    PAYLOAD_BYTES_MAX,
    REPLY_BYTES_MAX,
    STREAMS_MAX,
    WINDOW_BYTES,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")
_Mark = tuple[tuple[int, ...], ...]


class Watched(Generic[T]):
    """What ``read`` makes of ``paths``, now and after each change.  ``read`` raises ``ValueError`` or ``OSError``."""

    def __init__(self, what: str, paths: Sequence[str], read: Callable[[], T]) -> None:
        self.what = what
        self.complaint = ""
        self._paths = [Path(path) for path in paths]
        self._read = read
        # Marked before it is read: what changes in between is read once more.
        self._mark = self._marked()
        self.value = read()

    def refresh(self) -> str | None:
        """Read again if anything changed since the last look; what there is to say about it, None where nothing is."""
        mark = self._marked()
        if mark == self._mark:
            return None
        self._mark = mark
        try:
            self.value = self._read()
        except OSError as error:
            return self._complain(error.strerror or str(error))
        except ValueError as error:
            return self._complain(str(error))
        self.complaint = ""
        return f"{self.what} was read again"

    def _complain(self, why: str) -> str:
        self.complaint = f"{self.what} cannot be used, what was read before stays in force: {why}"
        return self.complaint

    def _marked(self) -> _Mark:
        return tuple(_mark_of(path) for path in self._paths)


def _mark_of(path: Path) -> tuple[int, ...]:
    """What no change of ``path`` leaves as it was; the change of its mode or owner counts too."""
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
    """Files and switches; every file is named by its path, PEM where it is a key or a certificate.

    Raises ``ValueError`` for combinations that cannot work.
    """

    tls_cert: str = ""
    """This end's certificate chain: the syncer's, or a site's own where client certificates are asked for."""
    tls_key: str = ""
    tls_ca: str = ""
    """At a site: who signed the syncer's certificate (``system``: the machine's roots); this turns TLS on.
    At the syncer: who signed the sites' certificates."""
    require_client_cert: bool = False
    """At the syncer: a connection without a certificate signed by ``tls_ca`` is not accepted."""
    trust_domain: str = ""
    """At the syncer: the one in which a client's SPIFFE id must be; empty: any that ``tls_ca`` signs."""
    revoked_file: str = ""
    """At the syncer: JSON ``{"certificates": [<SHA-256>], "ids": ["site/<site_id>"]}``, who is let in no more."""
    permissions: str = ""
    """At the syncer: what each identity may do (``identity.Permissions``); without it, what its role allows."""
    tokens_file: str = ""
    """At the syncer: JSON ``{"sites": {"<site_id>": "<token>"}, "observer": "<token>", "admin": "<token>"}``, mode
    0600.  A list of tokens in place of one: each of them is good."""
    token: str = field(default="", repr=False)
    """At a site, or with an operator: its own token."""
    token_file: str = ""
    """The same in a file, mode 0600, which is read again when it changes."""
    insecure_non_loopback: bool = False
    """Permit what is refused by default: a reachable address without encryption or without identities."""

    def __post_init__(self) -> None:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError(f"tls_cert is {self.tls_cert!r} and tls_key {self.tls_key!r}: give both or neither")
        if self.require_client_cert and not (self.tls_cert and self.tls_ca):
            raise ValueError("require_client_cert is True: it needs tls_cert, tls_key and tls_ca")
        if self.require_client_cert and self.tls_ca == SYSTEM_ROOTS:
            raise ValueError(
                "require_client_cert is True: tls_ca must name the file of the authority that signs the sites"
            )
        if self.token and not is_token(self.token):
            raise ValueError("token holds a blank or a character that is not printable ASCII")
        if self.token and self.token_file:
            raise ValueError(f"token_file is {self.token_file!r}: give it or token, not both")
        if (self.revoked_file or self.permissions) and not (self.tokens_file or self.require_client_cert):
            name = "revoked_file" if self.revoked_file else "permissions"
            raise ValueError(f"{name} is {getattr(self, name)!r}: it needs tokens_file or require_client_cert")


def is_loopback(address: str) -> bool:
    """Whether ``host:port`` can be reached from this machine only."""
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
    """Whether ``text`` can travel as a token."""
    return _TOKEN.fullmatch(text) is not None


def check_private(field: str, path: str) -> None:
    """``ValueError`` in words when the secret in ``path`` is not its owner's alone, or is neither ours nor root's."""
    found = Path(path).stat()
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise ValueError(f"{field} {path} can be read by others than its owner: chmod 600 {path}")
    if found.st_uid not in (0, os.geteuid()):
        raise ValueError(f"{field} {path} belongs to user {found.st_uid}: it must be that of this process, or root's")


def check_bind(address: str, options: SecurityOptions) -> None:
    """Refuse in words (``ValueError``) to listen on a reachable address without encryption or without identities.

    And at a port that is none, of which gRPC would take the remainder.
    """
    port = address.rpartition(":")[2]
    if not address.startswith("unix:") and not (":" in address and port.isdecimal() and int(port) <= PORT_MAX):
        raise ValueError(f"address is {address!r}: host:port wanted, with a port of 0 to {PORT_MAX}")
    if is_loopback(address):
        return
    _check_resolves(address)
    if options.insecure_non_loopback:
        return
    if not options.tls_cert:
        raise ValueError(
            f"address is {address!r}: not a loopback address, and there is no TLS. Give tls_cert and tls_key, "
            "or set insecure_non_loopback to accept that anyone on the network can read and change the run"
        )
    if not (options.tokens_file or options.require_client_cert):
        raise ValueError(
            f"address is {address!r}: not a loopback address, and sites cannot be told apart. Give tokens_file or "
            "require_client_cert, or set insecure_non_loopback to accept that anyone on the network can join"
        )


def _check_resolves(address: str) -> None:
    """Whoever has misspelt a name is to mend the name, and not to be shown how protection is switched off."""
    host, _, port = address.rpartition(":")
    try:
        socket.getaddrinfo(host.strip("[]") or None, int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"address is {address!r}: {host} does not resolve here: {why}") from error


class ServingCertificate:
    """The syncer's certificate, key and authority, for each new handshake as they are then."""

    def __init__(self, options: SecurityOptions) -> None:
        """Raises ``ValueError`` in words, or ``OSError``, for files that do not fit together."""
        self._options = options
        self._served: Any = None
        names = [options.tls_cert, options.tls_key, *([options.tls_ca] if options.require_client_cert else [])]
        self.watched: Watched[Any] = Watched("tls_cert, tls_key or tls_ca", names, self._read)

    def credentials(self) -> Any:
        """What gRPC's server takes."""
        self._served = self.watched.value
        return grpc.dynamic_ssl_server_credentials(self._served, self._latest, self._options.require_client_cert)

    def _latest(self) -> Any:
        """Called by gRPC before each handshake; None: nothing has changed."""
        latest = self.watched.value
        if latest is self._served:
            return None
        self._served = latest
        return latest

    def _read(self) -> Any:
        options = self._options
        cert, key = read_pair(options.tls_cert, options.tls_key)
        roots = read_authority(options.tls_ca) if options.require_client_cert else None
        return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=roots)


def read_pair(cert: str, key: str) -> tuple[bytes, bytes]:
    """Certificate chain and key, PEM.  ``ValueError`` when they do not belong together, or the key is not private."""
    check_private("tls_key", key)
    pair = Path(cert).read_bytes(), Path(key).read_bytes()
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=lambda: b"")
    except ssl.SSLError as error:
        raise ValueError(f"tls_cert {cert} and tls_key {key} are no certificate and its key: {error.reason}") from error
    return pair


def read_authority(path: str) -> bytes:
    """The certificates of an authority, PEM.  ``ValueError`` when there is none in the file."""
    authority = Path(path).read_bytes()
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except ssl.SSLError as error:
        raise ValueError(f"tls_ca {path} holds no certificate: {error.reason or error}") from error
    return authority


def read_token(path: str) -> str:
    """The token in a site's own file.  ``ValueError`` in words, which never hold the token."""
    check_private("token_file", path)
    token = Path(path).read_text("utf-8").strip()
    if not is_token(token):
        raise ValueError(f"token_file {path} is empty, or holds a blank or a character that is not printable ASCII")
    return token


def check_own_files(options: SecurityOptions) -> None:
    """``ValueError`` in words, or ``OSError``, for what a site would show and cannot."""
    if options.token_file:
        read_token(options.token_file)
    if options.tls_cert:
        read_pair(options.tls_cert, options.tls_key)
    if options.tls_ca and options.tls_ca != SYSTEM_ROOTS:
        read_authority(options.tls_ca)


MBPS_MIN = 0.1
MBPS_MAX = 1e6
CHECK_BYTES_MAX = 4 * MIB
"""Of a range of values: the payload of 512 Ki where there are kernels; without them 128 Ki, their payload, and the fp64
of the sums."""
FRAMES_KEPT = 8
"""Of a version that sites pull: each is made for the first that wants it, and is there for those right behind."""
STANDARD_STREAMS_MAX = 8
"""Streams of the health and reflection services open at once."""


@dataclass(kw_only=True, slots=True)
class ServerOptions:
    """The syncer's end.  Values of 0 are derived from ``sites_max``."""

    run_id: str
    address: str = "127.0.0.1:0"
    """``host:port``; port 0 lets the system choose."""
    sites_max: int = 16
    pushes_max: int = 0
    """Updates being received at once; 0: two for each site.  One more is told to come back."""
    pushes_per_site_max: int = 2
    checks_max: int = 2
    """Updates that are looked at at once, a range of values each, while they arrive; others wait for their turn."""
    pulls_max: int = 0
    """Streams; 0: eight for each site, so that observers find room too."""
    pulls_per_site_max: int = 8
    """The six that one pull may go over, and those of one that broke off and is still being ended."""
    watches_per_site_max: int = 2
    calls_per_caller_max: int = 24
    """Calls of one identity under way at once, of all kinds: three connections full of them."""
    calls_per_s: float = 0.0
    """Calls that one identity may begin, after a burst of two seconds' worth; 0: as many as it can."""
    chunk_bytes: int = MIB
    payload_bytes_max: int = PAYLOAD_BYTES_MAX
    header_timeout_s: float = 5.0
    """A push that has not declared itself by then is ended."""
    stall_s: float = 20.0
    """A stream that moved nothing for so long is ended."""
    alive_s: float = 3.0
    """A Watch stream says that it is alive this often."""
    pushback_ms: int = 500
    connection_age_s: float = 6 * 3600.0
    """Where callers show certificates: so old a connection takes no new calls and its Watch ends, because nobody looks
    at a certificate again, nor at the day on which it ends, while its connection lives."""
    keepalive_time_ms: int = 10_000
    keepalive_timeout_ms: int = 5_000
    """Also TCP_USER_TIMEOUT: raise it where a round trip takes more than 300 ms or much is lost."""

    def __post_init__(self) -> None:
        require(self.sites_max >= 1, "sites_max", self.sites_max, "at least 1")
        require(self.pushes_max >= 0, "pushes_max", self.pushes_max, "not negative")
        require(self.pulls_max >= 0, "pulls_max", self.pulls_max, "not negative")
        require(self.calls_per_s >= 0, "calls_per_s", self.calls_per_s, "not negative")
        limits = (
            "pushes_per_site_max",
            "pulls_per_site_max",
            "watches_per_site_max",
            "calls_per_caller_max",
            "checks_max",
        )
        for name in (*limits, "pushback_ms"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _require_chunk_bytes(self.chunk_bytes)
        wanted = f"1 to {PAYLOAD_BYTES_MAX}"
        require(1 <= self.payload_bytes_max <= PAYLOAD_BYTES_MAX, "payload_bytes_max", self.payload_bytes_max, wanted)
        for name in ("header_timeout_s", "stall_s", "alive_s", "connection_age_s"):
            require(getattr(self, name) > 0, name, getattr(self, name), "positive")

    def memory_bytes_max(self, payload_bytes: int, streams: int, unpack_bytes: int = 0) -> int:
        """What sites can make the syncer take in memory, beside what it takes at rest and for the outer steps.

        ``checks_max * (4 MiB + unpack_bytes) + streams * (min(1.5 * payload_bytes, 16 MiB) + 44 * 64 KiB)
        + push_credits * min(payload_bytes, 8 MiB) + 8 * chunk_bytes``

        The first term is what is being checked: one range of an update's values, what they lie in and what is computed
        of them; and where an encoding has an entropy stage, what it takes to unpack that (``unpack_bytes``).  The rest
        lies on disk, and costs what is on its way there: for each open stream gRPC's flow window, and one control
        message at the worst that parsing can make of it.  gRPC states no bound of the window, which grows with the
        path; the most that was seen is 12 MiB (``tests.hunts.crowd``).  ``streams`` are those that are open: no more
        than ``calls_max`` are let in, and no more than ``push_credits`` begin a push.  The term behind that is what
        came before its turn: over several streams, or behind a chunk that is sent again; the last one is frames that
        were made for one site and may be what the next one wants.
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
    def pull_credits(self) -> int:
        """Versions being sent at once."""
        return self.pulls_max or 8 * self.sites_max

    @property
    def watch_credits(self) -> int:
        """Watch streams open at once."""
        return self.watches_per_site_max * self.sites_max

    @property
    def calls_max(self) -> int:
        """Calls at once, which is also the number of threads: everybody at their own bound leaves room for everybody.

        Beside the sites there are observers, operators, a standby, and strangers, who have one place among them.
        """
        return self.calls_per_caller_max * (self.sites_max + 4) + STANDARD_STREAMS_MAX

    def channel_arguments(self) -> list[tuple[str, int]]:
        """gRPC's own settings for the listening end."""
        return [
            ("grpc.keepalive_time_ms", self.keepalive_time_ms),
            ("grpc.keepalive_timeout_ms", self.keepalive_timeout_ms),
            ("grpc.http2.ping_timeout_ms", self.keepalive_timeout_ms),
            ("grpc.keepalive_permit_without_calls", 1),
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
    """A site's or an operator's end."""

    chunk_bytes: int = MIB
    """The longest; a slow link gets shorter ones (``chunks.ChunkSize``), because one must pass within ``stall_s``."""
    payload_bytes_max: int = PAYLOAD_BYTES_MAX
    """A pull that declares more is refused before anything is allocated."""
    control_timeout_s: float = 5.0
    join_timeout_s: float = 15.0
    admin_timeout_s: float = 60.0
    stall_s: float = 10.0
    """A push or pull that moved nothing for so long is given up; so is a Watch that said nothing."""
    answer_s: float = 60.0
    """Longest wait for the answer to a commit, during which the syncer makes the update durable."""
    data_channels: int = 1
    """Connections for bulk.  One transfer goes over all of them at once: a long path with small TCP buffers needs
    several to be filled (``channels_for``)."""
    up_mbps: float = 0.0
    """What a site's link has, in 10^6 bits a second: pushes stay below, so that heartbeats find room; 0: what is
    learned of a far one (``client.Learned``), and no bound otherwise."""
    down_mbps: float = 0.0
    """The same for pulls."""
    keepalive_time_ms: int = 10_000
    keepalive_timeout_ms: int = 5_000

    def __post_init__(self) -> None:
        _require_chunk_bytes(self.chunk_bytes)
        require(self.payload_bytes_max >= 1, "payload_bytes_max", self.payload_bytes_max, "at least 1")
        require(1 <= self.data_channels <= STREAMS_MAX, "data_channels", self.data_channels, f"1 to {STREAMS_MAX}")
        for name in ("up_mbps", "down_mbps"):
            value = getattr(self, name)
            require(value == 0 or MBPS_MIN <= value <= MBPS_MAX, name, value, f"0, or {MBPS_MIN} to {MBPS_MAX}")
        for name in ("control_timeout_s", "join_timeout_s", "admin_timeout_s", "stall_s", "answer_s"):
            require(getattr(self, name) > 0, name, getattr(self, name), "positive")

    def channel_arguments(self) -> list[tuple[str, int]]:
        """gRPC's own settings for a connecting end.  Without the local pool equal channels would share a connection."""
        return [
            ("grpc.keepalive_time_ms", self.keepalive_time_ms),
            ("grpc.keepalive_timeout_ms", self.keepalive_timeout_ms),
            ("grpc.http2.ping_timeout_ms", self.keepalive_timeout_ms),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.min_reconnect_backoff_ms", 2_000),
            ("grpc.max_reconnect_backoff_ms", 3_000),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_retries", 0),
            ("grpc.max_receive_message_length", REPLY_BYTES_MAX),
        ]


def _require_chunk_bytes(chunk_bytes: int) -> None:
    wanted = f"{CHUNK_BYTES_MIN} to {CHUNK_BYTES_MAX}"
    require(CHUNK_BYTES_MIN <= chunk_bytes <= CHUNK_BYTES_MAX, "chunk_bytes", chunk_bytes, wanted)
