"""The outer machine's memory: plain records that a snapshot can hold and a person can read.

For a region the memory includes its state as a site of the syncer above it (``Upstream``).

``Turn`` is the handling of one event by the outer machine: its memory, its options, and the effects so far.

``Attendance`` caches what every event needs (which sites are live, have an update in a fragment, or wait for an
operator), so that an event costs about the same however many sites there are.  It is derived from the state and not
stored: rules change a site's status through it and notify it of a changed line.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import takewhile
from typing import TYPE_CHECKING

from diloco.sync.data_units import Span, Units
from diloco.sync.effects import Note, OuterEffect
from diloco.sync.events import Ending, Fate
from diloco.sync.options import HealthOptions, OuterOptions
from diloco.sync.progress import FragmentProgress, LearnerState

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet


@dataclass(slots=True)
class VersionAbove:
    """A version of the syncer above, and where its values are stored."""

    version: int
    payload: str
    digest: str


@dataclass(slots=True)
class Part:
    """A region's state for one fragment.  To the syncer above it is a site with that fragment alone, whose inner step
    is one update merged in the region.

    ``base`` is the version above last blended into the values, ``arrived`` one that waits to be blended, ``taking`` the
    one being blended now, with weight ``share``.
    """

    learner: LearnerState = field(default_factory=lambda: LearnerState([FragmentProgress()]))
    base: VersionAbove | None = None
    arrived: VersionAbove | None = None
    taking: VersionAbove | None = None
    share: float = 0.0

    @property
    def progress(self) -> FragmentProgress:
        """The progress of that site in the fragment."""
        return self.learner.fragments[0]


@dataclass(slots=True)
class Upstream:
    """A region's state towards the syncer above; all but ``parts`` are as in ``UpstreamStarted``."""

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
    """A site's membership status.  Rounds wait only for ``LIVE`` sites."""

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
    """Why an update waits for an operator's decision, and since when."""

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
    """Its number in the order of arrival for the fragment."""


@dataclass(slots=True)
class Line:
    """One (site, fragment): its watermark, its undecided updates in sequence order, its latest fates.

    ``usual_tokens`` and ``usual_steps`` are the smoothed figures of its merged updates; 0 before the first.
    ``arrivals_ns`` are the instants at which its site joined and its last updates came: the machine's time plus
    ``OuterState.away_ns``.  ``step_tokens`` are the tokens per step of its first update.
    ``vitals`` are those of the updates admitted last; ``outliers`` are the digests of updates that were refused as
    outliers under the next sequence number.
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
        """Return the updates that no outer step has taken, in sequence order."""
        return [pending for pending in self.undecided if not pending.merging]

    def waiting(self) -> list[Pending]:
        """Return the updates that the next outer step will take: those before the first that is held."""
        before_held = takewhile(lambda pending: pending.held is None, self.undecided)
        return [pending for pending in before_held if not pending.merging]

    def holding(self) -> bool:
        """Return whether an update waits for an operator's decision."""
        return bool(self.undecided) and any(pending.held is not None for pending in self.undecided)


@dataclass(slots=True)
class Site:
    """A site's membership.  ``superseded`` are names of processes that a newer one has replaced.

    An empty ``process``: no process of the site has joined since the run was restored.  ``since`` is the first
    incarnation of the present lineage: a smaller one belongs to a process that does not know of the restore yet.
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

    ``full_round``, with ``share_weighted``, has the usual weight of an update of each site that the step has or could
    have had: its own sites, and those that were live and not held when its round closed.
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
    """Total time without a running syncer: the machine's time stood still while the sites kept training."""
    started_ns: int | None = None
    phase: Phase = Phase.RUNNING
    ending: Ending | None = None
    final_deadline_ns: int | None = None
    sites: dict[str, Site] = field(default_factory=dict)
    detached: bool = False
    """Acknowledgements do not wait for the standby for now, at an operator's request."""
    health: HealthOptions = field(default_factory=HealthOptions)
    sites_max: int | None = None
    """The bound of the last ``SyncerStarted`` that has one; None: no process has set one, and the options' holds."""
    units: Units | None = None
    """The units of the data, where they are leased to the sites."""
    upstream: Upstream | None = None
    """A region's state towards the syncer above."""

    def run_tokens(self) -> int:
        """Return the tokens merged, averaged over the fragments: each fragment counts every token once."""
        merged = sum(line.tokens_merged for site in self.sites.values() for line in site.lines)
        return merged // len(self.fragments)


class Attendance:
    """The sites of an ``OuterState`` by status; its sets are tested and counted, and iterated only when sorted."""

    def __init__(self, state: OuterState) -> None:
        fragments = range(len(state.fragments))
        self._state = state
        self.live = {name for name, site in state.sites.items() if site.status is Status.LIVE}
        self.arrived: list[set[str]] = [set() for _ in fragments]
        """For each fragment the sites with an update that waits for its round."""
        self.undecided: list[set[str]] = [set() for _ in fragments]
        """For each fragment the sites with an update that has no fate."""
        self.holding: list[set[str]] = [set() for _ in fragments]
        """For each fragment the sites with a held update."""
        self.missed = [True for _ in fragments]
        """For each fragment whether a member of its round may have gone since ``rounds`` last checked."""
        self.tokens_merged = sum(line.tokens_merged for site in state.sites.values() for line in site.lines)
        """Of all sites and fragments."""
        for name in state.sites:
            for index in fragments:
                self.line_changed(name, index)

    def set_status(self, name: str, status: Status) -> None:
        """Give a site, which may be new, its status and account for it."""
        self._state.sites[name].status = status
        if status is Status.LIVE:
            self.live.add(name)
        elif name in self.live:
            self.live.remove(name)
            self.missed = [True for _ in self.missed]

    def line_changed(self, name: str, index: int) -> None:
        """Account for an update of the site that arrived, is being merged, has its fate, or is no longer held."""
        line = self._state.sites[name].lines[index]
        undecided, arrived, holds = self.undecided[index], self.arrived[index], self.holding[index]
        waiting, holding = line.waiting(), line.holding()
        if holding or (not waiting and name in arrived):
            self.missed[index] = True
        (undecided.add if line.undecided else undecided.discard)(name)
        (arrived.add if waiting else arrived.discard)(name)
        (holds.add if holding else holds.discard)(name)

    def awaited(self, index: int) -> AbstractSet[str]:
        """Return the live sites for which the fragment's round waits: not those with a held update."""
        return self.live - self.holding[index] if self.holding[index] else self.live

    def run_tokens(self) -> int:
        """Like ``OuterState.run_tokens``."""
        return self.tokens_merged // len(self._state.fragments)

    def waiting(self, index: int) -> list[tuple[str, Pending]]:
        """Return the updates that the fragment's next outer step may take, each with its site, in order of arrival."""
        sites = self._state.sites
        found = [(name, each) for name in self.arrived[index] for each in sites[name].lines[index].waiting()]
        return sorted(found, key=lambda pair: (pair[1].arrival, pair[0]))

    def updates(self, index: int) -> list[tuple[str, Pending]]:
        """Return the fragment's updates that have no fate, each with its site, by site and sequence."""
        sites, names = self._state.sites, sorted(self.undecided[index])
        return [(name, each) for name in names for each in sites[name].lines[index].undecided]

    def merging(self, index: int) -> list[tuple[str, Pending]]:
        """Return the updates of the outer step that is under way, each with its site, in the order of the merge."""
        return [(name, each) for name, each in self.updates(index) if each.merging]


@dataclass(slots=True, eq=False, repr=False)
class Machine:
    """What the rules of the outer machine read: ``OuterSync`` between two events, or a ``Turn``."""

    options: OuterOptions
    state: OuterState
    attendance: Attendance


@dataclass(slots=True, eq=False)
class Turn(Machine):
    """What the rules of the outer machine read and write; ``effects`` are carried out in the order added."""

    effects: list[OuterEffect] = field(default_factory=list)

    def note(
        self, what: str, why: str, *, site: str | None = None, fragment: int | None = None, version: int | None = None
    ) -> None:
        """Log a decision and its reason."""
        self.effects.append(Note(what, why, site, fragment, version))
