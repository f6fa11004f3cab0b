"""What the outer machine remembers: plain records that a snapshot can hold and a stranger can read.

A region remembers its place at the syncer above it as well (``Upstream``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from diloco.sync.data_units import Span, Units
from diloco.sync.events import Ending, Fate
from diloco.sync.options import HealthOptions
from diloco.sync.progress import FragmentProgress, LearnerState


@dataclass(slots=True)
class VersionAbove:
    """A version of the syncer above, and where its values lie."""

    version: int
    payload: str
    digest: str


@dataclass(slots=True)
class Part:
    """One fragment.  Towards the one above it is a site with that fragment alone, whose inner step is an update merged
    here.

    ``base`` is the version that its values were last blended with, ``arrived`` one that waits for that, ``taking`` the
    one that is being blended now, of which ``share`` is taken.
    """

    learner: LearnerState = field(default_factory=lambda: LearnerState([FragmentProgress()]))
    base: VersionAbove | None = None
    arrived: VersionAbove | None = None
    taking: VersionAbove | None = None
    share: float = 0.0

    @property
    def progress(self) -> FragmentProgress:
        """Its place in the fragment."""
        return self.learner.fragments[0]

    def needs(self, payload: str) -> bool:
        """Whether these are the values of a version that is not done with."""
        return any(each is not None and each.payload == payload for each in (self.base, self.arrived, self.taking))


@dataclass(slots=True)
class Upstream:
    """All of it; but for the parts as ``UpstreamStarted`` has it."""

    parts: list[Part]
    site: str = ""
    updates: int = 1
    alpha: float = 0.0
    in_flight_max: int = 1
    from_blend: bool = False


@dataclass(frozen=True, slots=True)
class Vital:
    """The vital signs of one update: ``steps`` is how many inner steps are in it; ``cosine`` None without momentum."""

    steps: int
    norm: float
    cosine: float | None


class Status(StrEnum):
    """Where a site stands.  Only ``LIVE`` sites are waited for."""

    LIVE = "live"
    SILENT = "silent"
    LEFT = "left"
    EVICTED = "evicted"


class Phase(StrEnum):
    """``ENDING``: the last round is announced.  ``ENDED``: every fragment has its final version."""

    RUNNING = "running"
    ENDING = "ending"
    ENDED = "ended"


@dataclass(slots=True)
class Held:
    """Why an update waits for an operator's word, and since when."""

    since_ns: int
    norm: float
    cosine: float | None
    ratio: float | None
    z: float | None
    why: str


@dataclass(slots=True)
class Pending:
    """An accepted update without a fate.  ``merging``: an outer step that contains it is under way."""

    sequence: int
    base_version: int
    tokens: int
    steps: int
    digest: str
    payload: str
    encoding: str
    merging: bool = False
    held: Held | None = None
    spans: list[Span] = field(default_factory=list)
    arrival: int = 0
    """Its place among all that have come for the fragment."""


@dataclass(slots=True)
class Line:
    """One (site, fragment): its watermark, its undecided updates in sequence order, its latest fates.

    ``usual_tokens`` and ``usual_steps`` are what an update of it that was merged has, smoothed; 0 before the first.
    ``arrivals_ns`` is when its site joined and its last updates came, by ``OuterState.away_ns`` later than by the
    machine's time; ``step_tokens`` are the tokens of a step of its first.
    ``vitals`` are those of the updates that were admitted last; ``outliers`` are the digests of those that were refused
    for theirs under the number that comes next.
    """

    watermark: int = 0
    cursor: int = 0
    tokens_merged: int = 0
    tokens_discarded: int = 0
    updates_merged: int = 0
    usual_tokens: int = 0
    usual_steps: int = 0
    arrivals_ns: list[int] = field(default_factory=list)
    step_tokens: int = 0
    updates_refused: dict[str, int] = field(default_factory=dict)
    final: bool = False
    undecided: list[Pending] = field(default_factory=list)
    fates: list[Fate] = field(default_factory=list)
    vitals: list[Vital] = field(default_factory=list)
    outliers: list[str] = field(default_factory=list)

    def unmerged(self) -> list[Pending]:
        """The updates that no outer step has taken, in sequence order."""
        return [pending for pending in self.undecided if not pending.merging]

    def waiting(self) -> list[Pending]:
        """The updates that the next outer step will take: those before the first that is held."""
        found = []
        for pending in self.undecided:
            if pending.merging:
                continue
            if pending.held is not None:
                break
            found.append(pending)
        return found

    def holding(self) -> bool:
        """Whether an update waits for an operator's word."""
        return bool(self.undecided) and any(pending.held is not None for pending in self.undecided)


@dataclass(slots=True)
class Site:
    """A site's membership.  ``superseded`` are names of processes that a newer one has replaced.

    No ``process``: nobody has spoken for the site since the run was restored.  ``since`` is the first incarnation of
    the present lineage: what bears a smaller one was sent by who has not heard yet that the run was restored.
    """

    incarnation: int
    process: str
    status: Status
    lines: list[Line]
    superseded: list[str] = field(default_factory=list)
    step_ns: int = 0
    since: int = 0


@dataclass(slots=True)
class Round:
    """The window in which one fragment collects updates; it exists from its first update to its outer step."""

    members: list[str]
    opened_ns: int
    met_ns: int | None = None
    deadline_ns: int | None = None


@dataclass(slots=True)
class FragmentState:
    """A fragment's version and round.  ``merging_since_ns`` is set while its outer step is under way.

    ``full_round``, where steps are taken by their share, has the usual weight of an update of each site that the step
    has or could have had: of its sites and of those that were live and not held when its round closed.
    """

    version: int = 0
    digest: str = ""
    round: Round | None = None
    merging_since_ns: int | None = None
    full_round: dict[str, float] = field(default_factory=dict)
    quorum_ns: int = 0
    sync_ns: int = 0
    arrivals: int = 0
    """Updates accepted for the fragment so far."""


@dataclass(slots=True)
class OuterState:
    """All of the outer machine's memory."""

    fragments: list[FragmentState]
    lineage: int = 1
    epoch: int = 0
    now_ns: int = 0
    away_ns: int = 0
    """For how long no syncer ran, in all: the machine's time stood, and the sites trained on."""
    started_ns: int | None = None
    phase: Phase = Phase.RUNNING
    ending: Ending | None = None
    final_deadline_ns: int | None = None
    sites: dict[str, Site] = field(default_factory=dict)
    detached: bool = False
    """Where acknowledgements wait for a standby: an operator has said that they do not, for now."""
    health: HealthOptions = field(default_factory=HealthOptions)
    sites_max: int | None = None
    """What the last process that said it had room for; None: none has, and the options' holds."""
    units: Units | None = None
    """Where units of the data are leased to the sites."""
    upstream: Upstream | None = None
    """Of a region: the syncer above."""

    def live(self) -> list[str]:
        """The live sites, in site order."""
        return sorted(name for name, site in self.sites.items() if site.status is Status.LIVE)

    def awaited(self, fragment: int) -> list[str]:
        """The live sites for which the fragment's round waits: not those with an update that is held."""
        return [name for name in self.live() if not self.sites[name].lines[fragment].holding()]

    def arrived(self, fragment: int) -> list[str]:
        """The sites with an update waiting for the fragment's round, in site order."""
        return sorted(name for name, site in self.sites.items() if site.lines[fragment].waiting())

    def waiting(self, fragment: int) -> list[Pending]:
        """The updates that the fragment's next outer step may take, in the order in which they came."""
        waiting = [pending for site in self.sites.values() for pending in site.lines[fragment].waiting()]
        return sorted(waiting, key=lambda pending: pending.arrival)

    def run_tokens(self) -> int:
        """Tokens merged, averaged over the fragments: each fragment counts every token once."""
        merged = sum(line.tokens_merged for site in self.sites.values() for line in site.lines)
        return merged // len(self.fragments)
