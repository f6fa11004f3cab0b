"""The records of a ``RunHistory``: series, spans, rounds, faults, and the state of one site."""

from __future__ import annotations

from dataclasses import dataclass, field

SERIES_MAX = 4000


class Series:
    """Points over time, halved whenever there are ``SERIES_MAX``, with breaks between two processes."""

    def __init__(self) -> None:
        self.points: list[tuple[float, ...] | None] = []
        self.last: tuple[float, ...] | None = None
        self._stride = 1
        self._skipped = 0

    def add(self, *point: float) -> None:
        """Append a point."""
        self.last = point
        self._skipped += 1
        if self._skipped >= self._stride:
            self._skipped = 0
            self.points.append(point)
        if len(self.points) >= SERIES_MAX:
            self._stride *= 2
            # Breaks stay: a line must not be drawn across the time in which a process was gone.
            self.points = [kept for index, kept in enumerate(self.points) if index % 2 or kept is None]

    def cut(self) -> None:
        """Add a break: the next point does not continue the last one."""
        if self.points and self.points[-1] is not None:
            self.points.append(None)

    def whole(self) -> list[tuple[float, ...] | None]:
        """Return all points kept, and the last one in any case."""
        if self.last is None or self.points[-1:] == [self.last]:
            return self.points
        return [*self.points, self.last]


@dataclass(slots=True)
class Span:
    """A stretch of time; ``end_s`` is None while it lasts."""

    start_s: float
    end_s: float | None = None


@dataclass(slots=True)
class Standstill:
    """A stretch of time in which a syncer made no version of a fragment although updates waited for it."""

    syncer: str
    fragment: int
    start_s: float
    why: str
    end_s: float | None = None


@dataclass(slots=True)
class Fault:
    """One fault of the scenario.  ``healed_s`` is None for a fault that was not healed, or cannot be."""

    what: str
    target: str
    at_s: float
    seconds: float | None = None
    healed_s: float | None = None


@dataclass(slots=True)
class Round:
    """One outer step: its fragment and version, the sites in it, when quorum was met, when it was published."""

    fragment: int
    version: int
    at_s: float
    met_s: float | None = None
    published_s: float | None = None
    weights: dict[str, float] = field(default_factory=dict)
    staleness: dict[str, int] = field(default_factory=dict)
    norm: float | None = None
    seconds: float | None = None
    lineage: int = 1
    """Versions are numbered anew in the lineage that a restore begins."""


@dataclass(slots=True)
class Evaluation:
    """The score of the published values on the validation set."""

    at_s: float
    tokens: int
    val_loss: float
    val_bits_per_byte: float | None
    versions: list[int]


@dataclass(slots=True)
class SiteHistory:
    """The history of one site."""

    name: str
    process: str = ""
    """The state of its process, from ``up``: started, ended, killed; empty without ``up``."""
    frozen: bool = False
    joined: bool = False
    connected: bool = False
    """Whether it hears from every syncer."""
    out_of_reach: set[int] = field(default_factory=set)
    """Of several syncers: the numbers of those that it has lost."""
    cut: str = ""
    """The fault that is on its link now."""
    products: str = ""
    """The number format of its matrix products."""
    step: int = 0
    tokens: int = 0
    tokens_per_s: float = 0.0
    loss: float | None = None
    losses: Series = field(default_factory=Series)
    """(seconds, tokens, nats per token)."""
    base_versions: dict[int, int] = field(default_factory=dict)
    incarnation: int = 0
    meters: dict[int, dict[str, float]] = field(default_factory=dict)
    """The last meter of each incarnation."""
    restarts: int = 0
    merges: int = 0
    merges_since_fault: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    tokens_discarded: int = 0
    links: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Bytes (up, down) counted at its link in each session."""
    spans: list[Span] = field(default_factory=list)
    """When its process lived."""
    done: dict[str, int] | None = None
    left_with: dict[str, int] | None = None
    """The ledger of its last process that reported one.

    It holds until another process trains, which has joined first, or until the run is restored."""
    done_reason: str = ""
    left: bool = False

    def meter(self, name: str) -> float:
        """Return the sum of a meter's field over all incarnations."""
        return sum(meter.get(name, 0.0) for meter in self.meters.values())

    def meter_max(self, name: str) -> float:
        """Return the largest value of a meter's field over all incarnations."""
        return max((meter.get(name, 0.0) for meter in self.meters.values()), default=0.0)

    def meter_by_steps(self, name: str) -> float:
        """Return the mean of a meter's field over the incarnations, weighted by their steps."""
        steps = self.meter("inner_steps")
        total = sum(meter.get(name, 0.0) * meter.get("inner_steps", 0.0) for meter in self.meters.values())
        return total / steps if steps else 0.0

    @property
    def in_flight(self) -> int:
        """Updates in flight, by the site's last report."""
        return int(self.meters.get(self.incarnation, {}).get("in_flight", 0))

    @property
    def bytes_up(self) -> int:
        """Bytes that its link carried to the syncer; without an emulated link, the site's own count."""
        return sum(up for up, _ in self.links.values()) if self.links else int(self.meter("bytes_up"))

    @property
    def bytes_down(self) -> int:
        """The same from the syncer."""
        return sum(down for _, down in self.links.values()) if self.links else int(self.meter("bytes_down"))

    def state(self) -> str:
        """Return the site's state in one word, for a table."""
        if self.done is not None:
            return "done"
        if self.left:
            return "left"
        if self.process in ("ended", "killed"):
            return self.process
        if self.frozen:
            return "frozen"
        if not self.joined:
            return "starting" if self.process else "waiting"
        return "training" if self.connected else "alone"
