"""What may happen to a machine.  Past facts, frozen, made of plain values, so that a journal can hold them.

A region hears of the syncer above it what a site hears, and the ``Upstream`` events beside.  ``call`` numbers are
chosen by the shell: the answer to a request is an effect that carries the same number.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from diloco.sync.data_units import Span
from diloco.sync.options import HealthOptions


@dataclass(frozen=True, slots=True)
class UpstreamStarted:
    """A process speaks for the region above from now on, as ``site`` there, by rules that may be others than before.

    An update goes up for every ``updates`` that are merged of a fragment; of what comes back a share ``alpha`` goes
    into the region's values; ``in_flight_max`` of its updates may be undecided above.  ``outbox`` has (fragment,
    sequence, digest) of those whose bytes are here.  With ``from_blend`` the ``updates`` count from the last version
    that was taken from above, and nothing more goes up until then.
    """

    site: str
    updates: int
    alpha: float
    in_flight_max: int
    outbox: tuple[tuple[int, int, str], ...]
    from_blend: bool = False


@dataclass(frozen=True, slots=True)
class UpstreamAsked:
    """A process of a region that has finished is about to start.  The run above may go on, restored: it is asked again
    whether it is over, and until it answers the region goes on as well."""


@dataclass(frozen=True, slots=True)
class UpstreamFetched:
    """The values of a version above are here, verified, and durable at ``payload``, as fp32 with that ``digest``.

    It was asked for in ``lineage``, and given by the syncer of ``epoch``.
    """

    fragment: int
    version: int
    payload: str
    digest: str
    lineage: int
    epoch: int


class Reason(StrEnum):
    """Why an update or a request was refused.  ``DISCARDING`` says which ones throw the progress away."""

    STALE = "stale"
    OVERLOAD = "overload"
    GAP = "gap"
    NON_FINITE = "non_finite"
    OUTLIER = "outlier"
    FENCED = "fenced"
    NOT_JOINED = "not_joined"
    EVICTED = "evicted"
    BAD_BASE = "bad_base"
    CONFLICT = "conflict"
    FORGOTTEN = "forgotten"
    FINISHED = "finished"
    SUPERSEDED = "superseded"
    FULL = "full"
    RESTORED = "restored"
    CORRUPT = "corrupt"
    WITHDRAWN = "withdrawn"
    OTHER_DATA = "other_data"
    IMPLAUSIBLE = "implausible"


DISCARDING = frozenset(
    {
        Reason.NON_FINITE,
        Reason.OUTLIER,
        Reason.EVICTED,
        Reason.RESTORED,
        Reason.CORRUPT,
        Reason.WITHDRAWN,
        Reason.IMPLAUSIBLE,
    }
)


class Outcome(StrEnum):
    """The one answer to a push."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    REFUSED = "refused"
    RETRY = "retry"


class Ending(StrEnum):
    """Why the last round was announced: the run is complete, or an operator asked for a pause."""

    FINISHED = "finished"
    DRAINED = "drained"


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of an accepted update: ``merged`` in ``version``, or refused at ``version`` for ``reason``."""

    fragment: int
    sequence: int
    version: int
    tokens: int
    digest: str
    reason: Reason | None = None

    @property
    def merged(self) -> bool:
        """Whether the update is part of ``version``."""
        return self.reason is None


# --- events of the outer machine -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SyncerStarted:
    """A process took over the state with a larger ``epoch``; work that was under way is issued again.

    ``health`` are the rules of admission from now on; None leaves them as they are.  ``away_ns`` is how long no process
    had the state, None where that is not known: the sites trained on.  ``sites_max`` sites may be in the run from now
    on; None leaves that as it is.
    """

    epoch: int
    health: HealthOptions | None = None
    away_ns: int | None = None
    sites_max: int | None = None


@dataclass(frozen=True, slots=True)
class LineageBegan:
    """The run goes on from restored values, for the reason ``why``: ``lineage`` is larger than any before.

    ``digests`` are those of every fragment's published values, which become its next version.  ``held`` is what those
    values hold of each site, as (site, fragment, tokens, updates), where that is not all that was merged: what it does
    not list, they hold nothing of.
    """

    lineage: int
    digests: tuple[str, ...]
    why: str
    held: tuple[tuple[str, int, int, int], ...] | None = None


@dataclass(frozen=True, slots=True)
class JoinRequested:
    """A learner process (``process`` is its random name) speaks for ``site``; agreement was already checked.

    ``ticket`` is what an earlier answer asked it to repeat, 0 when none did, and None where its protocol knows of none.
    ``corpus`` is the text that it draws from, where units of it are leased.
    """

    call: int
    site: str
    process: str
    ticket: int | None = None
    corpus: str = ""


@dataclass(frozen=True, slots=True)
class UpdateArrived:
    """An update is whole, verified, decoded once for its health, and durable at ``payload``.

    ``steps`` and ``tokens`` are the inner steps and tokens since this fragment's previous update, ``step_ns`` the
    site's usual step time, ``cursor`` the batches that the site has consumed.  ``final`` marks a site's last.

    ``norm`` is the L2 norm of the decoded values (0 when they are not finite, or nobody measured it), ``cosine``
    theirs with the fragment's outer momentum (None where there is none), ``intact`` whether they are the values that
    the site says it had encoded.
    """

    call: int
    site: str
    incarnation: int
    fragment: int
    sequence: int
    base_version: int
    tokens: int
    steps: int
    step_ns: int
    cursor: int
    digest: str
    payload: str
    encoding: str
    finite: bool
    final: bool
    norm: float = 0.0
    cosine: float | None = None
    intact: bool = True
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class OuterStepDone:
    """The outer step of ``fragment`` to ``version`` is computed and durable (or can be recomputed from the journal).

    ``digest`` is that of the published values, ``downlink_digest`` that of the encoded down-link.
    """

    fragment: int
    version: int
    digest: str
    downlink_digest: str


@dataclass(frozen=True, slots=True)
class OuterStepFailed:
    """The outer step of ``fragment`` to ``version`` has no finite result; its updates are refused."""

    fragment: int
    version: int


@dataclass(frozen=True, slots=True)
class UnitsAsked:
    """``site`` asks for units of the data, at the places of its list up to ``upto``.

    It knows those before ``known``, and will draw none that it has still to hear of before ``begin``.  Of what it drew
    before the sequence ``floor`` nothing is to be merged any more but what the syncer has accepted.  ``again`` counts
    the units that it has drawn over again so far, because it had no other.
    """

    call: int
    site: str
    incarnation: int
    known: int
    begin: int
    upto: int
    floor: int
    again: int


@dataclass(frozen=True, slots=True)
class SiteSilent:
    """Nothing was heard of ``site`` for a whole lease."""

    site: str


@dataclass(frozen=True, slots=True)
class SiteHeard:
    """A silent ``site`` was heard again."""

    site: str


@dataclass(frozen=True, slots=True)
class SiteLeft:
    """``site`` said goodbye: it has nothing left to send."""

    call: int
    site: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class SiteEvicted:
    """An operator put ``site`` out of the run."""

    call: int
    site: str


@dataclass(frozen=True, slots=True)
class SiteReadmitted:
    """An operator lets an evicted ``site`` join again."""

    call: int
    site: str


@dataclass(frozen=True, slots=True)
class UpdateAdmitted:
    """An operator lets a held update be merged."""

    call: int
    site: str
    fragment: int
    sequence: int


@dataclass(frozen=True, slots=True)
class UpdateWithdrawn:
    """An operator wants an accepted update never to be merged."""

    call: int
    site: str
    fragment: int
    sequence: int


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """An operator asked for a pause: one last round, then everybody stops and can come back."""

    call: int


@dataclass(frozen=True, slots=True)
class StandbyDetached:
    """The run goes on without a standby; what follows is on one disk until one is attached again.

    ``call`` is an operator's who lets it; 0 where nobody waits for an answer, as when a standby has taken over and has
    none of its own.
    """

    call: int


@dataclass(frozen=True, slots=True)
class StandbyAttached:
    """``standby`` has everything again: what follows is on two disks before it is told."""

    standby: str


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The instant that ``next_deadline_ns`` asked for has come."""


# --- events of a site's machine --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FragmentStanding:
    """What the syncer knows of one (site, fragment); part of Join's reply.

    ``watermark`` is the last accepted sequence, ``tokens_merged`` and ``tokens_discarded`` are totals over all
    incarnations, ``undecided`` the (sequence, tokens) accepted and without a fate, ``cursor`` that of the last
    accepted update, ``fates`` the most recent ones.
    """

    fragment: int
    version: int
    digest: str
    watermark: int
    cursor: int
    tokens_merged: int
    tokens_discarded: int
    undecided: tuple[tuple[int, int], ...]
    fates: tuple[Fate, ...]


@dataclass(frozen=True, slots=True)
class JoinAnswered:
    """The syncer took the site in.  ``progress_ppm`` is the run's progress in millionths.

    A ``lineage`` larger than the site's says that the run was restored: what the site knows of versions is void.
    ``keep``: the bytes of an update are kept until its fate is known, because its ack does not wait for a standby.
    """

    epoch: int
    incarnation: int
    standings: tuple[FragmentStanding, ...]
    run_tokens: int
    progress_ppm: int
    ending: Ending | None
    lineage: int = 1
    keep: bool = False


@dataclass(frozen=True, slots=True)
class StepDone:
    """The site finished inner step number ``step``: it took ``step_ns`` and read ``tokens``; the site has consumed
    ``cursor`` batches.  It stands between two steps now.  ``sequences`` is how many of them this step read, of data
    that are leased; 0: as many as its tokens say.  It ``passes`` by where nothing is done with values at this boundary,
    whatever has come meanwhile: its ranks have agreed so, because ``may_act`` saw nothing to do.  ``steps`` that all
    passed by, but for the last, may be told as one, with the tokens of all and the time of one.  A region's step is an
    update of a site's, and stands for as many ``inner_steps`` as that."""

    step: int
    tokens: int
    step_ns: int
    cursor: int
    sequences: int = 0
    passes: bool = False
    steps: int = 1
    inner_steps: int = 0


@dataclass(frozen=True, slots=True)
class BoundaryReached:
    """The site stands between two steps, without a new one: before the first, in lock-step, or after the last."""


@dataclass(frozen=True, slots=True)
class TurnElsewhere:
    """In lock-step with several syncers: of the fragments that the site exchanges with the others, the next one is at
    ``turn``: its version, and the inner step at which it is due.  None: there is none, or none any more."""

    turn: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class OverlapChosen:
    """From the next update of each fragment on, its version is adopted ``steps`` inner steps after it, or later."""

    steps: int


@dataclass(frozen=True, slots=True)
class Sealed:
    """The pseudo-gradient is encoded and durable in the outbox; it may now be sent."""

    fragment: int
    sequence: int
    digest: str


@dataclass(frozen=True, slots=True)
class SealFailed:
    """The pseudo-gradient is not finite: this site's own training went wrong; nothing was sent."""

    fragment: int
    sequence: int


@dataclass(frozen=True, slots=True)
class PushAnswered:
    """The syncer of ``epoch`` gave its definite answer to a push, of the update with this ``digest``.

    Empty or 0: not said.
    """

    fragment: int
    sequence: int
    outcome: Outcome
    reason: Reason | None
    digest: str = ""
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class FateTold:
    """The syncer told a fate, over Watch or on re-ask."""

    fate: Fate


@dataclass(frozen=True, slots=True)
class VersionPublished:
    """The syncer published ``version`` of ``fragment``; ``lineage`` is 0 from a syncer that does not say it, and
    ``fastest_step_ns``, which an inner step takes at the fastest site, from one that does not know.
    """

    epoch: int
    fragment: int
    version: int
    run_tokens: int
    progress_ppm: int
    lineage: int = 0
    fastest_step_ns: int = 0


@dataclass(frozen=True, slots=True)
class VersionFetched:
    """The values of ``version`` are here, verified.  ``fates`` were read at the same instant as the values."""

    fragment: int
    version: int
    fates: tuple[Fate, ...]


@dataclass(frozen=True, slots=True)
class BaseDiffers:
    """What this site holds for ``version`` of ``fragment`` is not that version: memory at this site has changed."""

    fragment: int
    version: int


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """A fetch ended without a version; the shell backs off before this event."""

    fragment: int


@dataclass(frozen=True, slots=True)
class UnitsTold:
    """The syncer told the site's list of units from place ``first`` on, in ``pieces`` (``sync/data_units.py``)."""

    first: int
    pieces: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class FinalAnnounced:
    """The last round: finish the step, send what is unsent, stop."""

    ending: Ending


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    """The user asked this site to stop (Ctrl-C, SIGTERM): send what is unsent, leave, keep a checkpoint."""


LearnerEvent = (
    JoinAnswered
    | StepDone
    | BoundaryReached
    | TurnElsewhere
    | OverlapChosen
    | Sealed
    | SealFailed
    | PushAnswered
    | FateTold
    | VersionPublished
    | VersionFetched
    | BaseDiffers
    | FetchFailed
    | UnitsTold
    | FinalAnnounced
    | LeaveAsked
)

Told = JoinAnswered | FateTold | VersionPublished | FinalAnnounced
Done = Sealed | SealFailed | PushAnswered | FetchFailed
RegionEvent = UpstreamAsked | UpstreamStarted | UpstreamFetched | Told | Done
"""What the machine of a region hears of the syncer above it, to which it is a site (``region.py``)."""

OuterEvent = (
    RegionEvent
    | SyncerStarted
    | LineageBegan
    | JoinRequested
    | UpdateArrived
    | OuterStepDone
    | OuterStepFailed
    | UnitsAsked
    | SiteSilent
    | SiteHeard
    | SiteLeft
    | SiteEvicted
    | SiteReadmitted
    | UpdateAdmitted
    | UpdateWithdrawn
    | DrainRequested
    | StandbyDetached
    | StandbyAttached
    | DeadlinePassed
)
