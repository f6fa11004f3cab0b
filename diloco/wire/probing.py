"""What a probe says: how one gets on with a syncer, and how fast, before anything of a run is exchanged.

A probe reads and changes nothing of the run.  It is bounded in bytes and in time, one caller makes one at a time, what
it carries counts against what the caller may carry, and it is answered by a standby as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from diloco.wire.messages import MIB

PROBE_BYTES_MAX = 64 * MIB
"""Of filler, each way."""
PROBE_NS_MAX = 10_000_000_000
"""That filler takes, each way."""
PROBES_PER_S = 0.1
PROBES_BURST_S = 30.0
"""With filler, of one caller: three at once, and then one in ten seconds."""
PROBES_MAX = 2
"""At once, of all callers."""


@dataclass(frozen=True, slots=True)
class ProbeAsk:
    """``run_id`` and ``layout_fingerprint`` may be empty: they are not compared then."""

    protocol: int
    run_id: str = ""
    layout_fingerprint: str = ""
    layout_json: bytes = b""
    shared_config: Mapping[str, str] = field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0
    limit_ns: int = PROBE_NS_MAX


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """``identity`` is whom the caller is taken for, ``time_ns`` the clock there, ``difference`` what a join would be
    refused for; ``standby_of`` is the syncer whose place this one would take, empty from the syncer itself;
    ``shared_config`` is what a join must say of the run, empty where it is not told."""

    protocol: int
    protocol_oldest: int
    run_id: str
    identity: str = ""
    time_ns: int = 0
    difference: str = ""
    standby_of: str = ""
    shared_config: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProbeTaken:
    """Filler that came to the syncer; ``bytes_per_s`` is over the later half of the time."""

    bytes: int
    duration_ns: int
    bytes_per_s: int


@dataclass(frozen=True, slots=True)
class Filler:
    """Bytes that mean nothing."""

    data: bytes


ProbePart = ProbeAsk | Filler
ProbeReply = ProbeAnswer | ProbeTaken | Filler
