"""Settings of both ends of the wire.

The HTTP/2 settings were measured over 100 ms and 1 Gbit/s; what is left alone (BDP probe, look-ahead, frame and
write-buffer sizes) made things worse or no better when it was set.

A connection that fell silent is noticed in two ways that need one bound each: ``keepalive_timeout_ms`` is TCP's word
(TCP_USER_TIMEOUT: nothing acknowledges), ``http2.ping_timeout_ms`` is HTTP/2's own, without which a proxy that goes on
acknowledging keeps a dead path alive (seen with grpcio 1.85.1).
"""

from __future__ import annotations

from dataclasses import dataclass

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

MBPS_MIN = 0.1
MBPS_MAX = 1e6
CHECK_BYTES_MAX = 4 * MIB
"""Of a range of values: the payload of 512 Ki where there are kernels; without them 128 Ki, their payload, and the fp64
of the sums."""
FRAMES_KEPT = 8
"""Of a version that sites pull: each is made for the first that wants it, and is there for those right behind."""
STANDARD_STREAMS_MAX = 8
"""Streams of the health and reflection services open at once."""


def require(condition: bool, field: str, value: object, wanted: str) -> None:
    """Raise ``ValueError`` naming ``field``, the ``value`` it has and what was ``wanted``."""
    if not condition:
        raise ValueError(f"{field} is {value!r}: {wanted}")


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
        for field in (*limits, "pushback_ms"):
            require(getattr(self, field) >= 1, field, getattr(self, field), "at least 1")
        _require_chunk_bytes(self.chunk_bytes)
        wanted = f"1 to {PAYLOAD_BYTES_MAX}"
        require(1 <= self.payload_bytes_max <= PAYLOAD_BYTES_MAX, "payload_bytes_max", self.payload_bytes_max, wanted)
        for field in ("header_timeout_s", "stall_s", "alive_s", "connection_age_s"):
            require(getattr(self, field) > 0, field, getattr(self, field), "positive")

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
    learned of a far one (``learned``), and no bound otherwise."""
    down_mbps: float = 0.0
    """The same for pulls."""
    keepalive_time_ms: int = 10_000
    keepalive_timeout_ms: int = 5_000

    def __post_init__(self) -> None:
        _require_chunk_bytes(self.chunk_bytes)
        require(self.payload_bytes_max >= 1, "payload_bytes_max", self.payload_bytes_max, "at least 1")
        require(1 <= self.data_channels <= STREAMS_MAX, "data_channels", self.data_channels, f"1 to {STREAMS_MAX}")
        for field in ("up_mbps", "down_mbps"):
            value = getattr(self, field)
            require(value == 0 or MBPS_MIN <= value <= MBPS_MAX, field, value, f"0, or {MBPS_MIN} to {MBPS_MAX}")
        for field in ("control_timeout_s", "join_timeout_s", "admin_timeout_s", "stall_s", "answer_s"):
            require(getattr(self, field) > 0, field, getattr(self, field), "positive")

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
