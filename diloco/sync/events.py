"""The events of the machines: past facts, frozen, made of plain values, so that a journal can hold them.

A region gets from the syncer above it the events that a site gets, and the ``Upstream`` events.  The shell chooses
``call`` numbers: the answer to a request is an effect with the same number.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from diloco.sync.data_units import Span
from diloco.sync.options import HealthOptions


class LearnerEvent:
    """An event of a site's machine."""

    __slots__ = ()


class OuterEvent:
    """An event of a syncer's machine, which its journal holds."""

    __slots__ = ()


class RegionEvent(OuterEvent):
    """An event of a region's machine about the syncer above it, to which the region is a site (``region.py``).

    One that is a ``LearnerEvent`` as well comes from the syncer above, for a region or for a plain site.
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class UpstreamStarted(RegionEvent):
    """A new process acts for the region towards the syncer above, as ``site`` there; its rules may differ from before.

    An update goes up for every ``updates`` merged updates of a fragment.  A version from above is blended into the
    region's values with weight ``alpha``.  At most ``in_flight_max`` updates may be undecided above.  ``outbox`` has
    (fragment, sequence, digest) of the updates whose bytes are stored here.  With ``from_blend`` the ``updates`` count
    from the last version taken from above, and no update goes up while one is in flight.
    """

    site: str
    updates: int
    alpha: float
    in_flight_max: int
    outbox: tuple[tuple[int, int, str], ...]
    from_blend: bool = False


@dataclass(frozen=True, slots=True)
class UpstreamAsked(RegionEvent):
    """A process of a finished region is about to start.  The run above may continue after a restore: the region asks it
    again whether it is over, and continues until the answer comes."""


@dataclass(frozen=True, slots=True)
class UpstreamFetched(RegionEvent):
    """The values of a version above are here, verified, and durable at ``payload``, as fp32 with that ``digest``.

    The region asked for it in ``lineage``; the syncer of ``epoch`` answered.
    """

    fragment: int
    version: int
    payload: str
    digest: str
    lineage: int
    epoch: int


class Reason(StrEnum):
    """Why an update or a request was refused.  With a reason in ``DISCARDING`` the site throws the progress away."""

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
    """The answer to a push."""

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
    """The fate of an accepted update: ``merged`` in ``version``, or refused at ``version`` for ``reason``."""

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
class SyncerStarted(OuterEvent):
    """A process took over the state with a larger ``epoch``; work that was under way is issued again.

    ``health`` are the rules of admission from now on; None keeps the present ones.  ``away_ns`` is how long no process
    ran, while the sites kept training; None where that is unknown.  At most ``sites_max`` sites may be in the run from
    now on; None keeps the present bound.
    """

    epoch: int
    health: HealthOptions | None = None
    away_ns: int | None = None
    sites_max: int | None = None


@dataclass(frozen=True, slots=True)
class LineageBegan(OuterEvent):
    """The run continues from restored values, for the reason ``why``: ``lineage`` is larger than any before.

    ``digests`` are those of every fragment's published values, which become its next version.  ``held`` lists what
    these values contain of each site, as (site, fragment, tokens, updates); they contain nothing of a pair that it does
    not list.  None: they contain all that was merged.
    """

    lineage: int
    digests: tuple[str, ...]
    why: str
    held: tuple[tuple[str, int, int, int], ...] | None = None


@dataclass(frozen=True, slots=True)
class JoinRequested(OuterEvent):
    """A learner process (``process`` is its random name) joins as ``site``; agreement was already checked.

    ``ticket`` is the number that an earlier answer asked it to repeat, 0 without one, None where its protocol has no
    tickets.  ``corpus`` identifies the text that it draws from, where units of it are leased.
    """

    call: int
    site: str
    process: str
    ticket: int | None = None
    corpus: str = ""


@dataclass(frozen=True, slots=True)
class UpdateArrived(OuterEvent):
    """An update is whole, verified, decoded once for its health, and durable at ``payload``.

    ``steps`` and ``tokens`` are the inner steps and tokens since this fragment's previous update, ``step_ns`` the
    site's usual step time, ``cursor`` the batches that the site has consumed.  ``final`` marks a site's last.

    ``norm`` is the L2 norm of the decoded values (0 when they are not finite, or not measured), ``cosine`` theirs with
    the fragment's outer momentum (None where there is none), ``intact`` whether they are what the site encoded.
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
class OuterStepDone(OuterEvent):
    """The outer step of ``fragment`` to ``version`` is computed and durable (or can be recomputed from the journal).

    ``digest`` is that of the published values, ``downlink_digest`` that of the encoded down-link.
    """

    fragment: int
    version: int
    digest: str
    downlink_digest: str


@dataclass(frozen=True, slots=True)
class OuterStepFailed(OuterEvent):
    """The outer step of ``fragment`` to ``version`` has no finite result; its updates are refused."""

    fragment: int
    version: int


@dataclass(frozen=True, slots=True)
class UnitsAsked(OuterEvent):
    """``site`` asks for units of the data, at the places of its list up to ``upto``.

    It knows the places before ``known``, and will draw no new unit at a place before ``begin``.  Of the data before
    sequence ``floor`` nothing more will be merged except what the syncer has accepted.  ``again`` counts the places
    so far at which it had no new unit and drew an earlier one again.
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
class SiteSilent(OuterEvent):
    """``site`` was not heard for a whole lease."""

    site: str


@dataclass(frozen=True, slots=True)
class SiteHeard(OuterEvent):
    """A silent ``site`` was heard again."""

    site: str


@dataclass(frozen=True, slots=True)
class SiteLeft(OuterEvent):
    """``site`` left: it has nothing left to send."""

    call: int
    site: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class SiteEvicted(OuterEvent):
    """An operator evicted ``site`` from the run."""

    call: int
    site: str


@dataclass(frozen=True, slots=True)
class SiteReadmitted(OuterEvent):
    """An operator lets an evicted ``site`` join again."""

    call: int
    site: str


@dataclass(frozen=True, slots=True)
class UpdateAdmitted(OuterEvent):
    """An operator lets a held update be merged."""

    call: int
    site: str
    fragment: int
    sequence: int


@dataclass(frozen=True, slots=True)
class UpdateWithdrawn(OuterEvent):
    """An operator withdraws an accepted update, which must not be merged."""

    call: int
    site: str
    fragment: int
    sequence: int


@dataclass(frozen=True, slots=True)
class DrainRequested(OuterEvent):
    """An operator asked for a pause: one last round, then all sites stop and can come back."""

    call: int


@dataclass(frozen=True, slots=True)
class StandbyDetached(OuterEvent):
    """The run continues without a standby; what follows is on one disk until a standby is attached again.

    ``call`` is that of an operator's request; 0 without one, as when a standby has taken over and has no standby.
    """

    call: int


@dataclass(frozen=True, slots=True)
class StandbyAttached(OuterEvent):
    """``standby`` has caught up: what follows is durable on two disks before the syncer publishes it."""

    standby: str


@dataclass(frozen=True, slots=True)
class DeadlinePassed(OuterEvent):
    """The instant that ``next_deadline_ns`` returned has come."""


# --- events of a site's machine --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FragmentStanding:
    """What the syncer knows about one (site, fragment); part of Join's reply.

    ``watermark`` is the last accepted sequence, ``tokens_merged`` and ``tokens_discarded`` are totals over all
    incarnations, ``undecided`` the (sequence, tokens) of accepted updates without a fate, ``cursor`` that of the last
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
class JoinAnswered(LearnerEvent, RegionEvent):
    """The syncer admitted the site.  ``progress_ppm`` is the run's progress in millionths.

    A ``lineage`` larger than the site's means that the run was restored: the versions that the site knows are void.
    ``keep``: the site keeps an update's bytes until its fate is known, because its ack does not wait for a standby.
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
class StepDone(LearnerEvent):
    """The site finished inner step ``step``, which took ``step_ns`` and read ``tokens``; it has consumed ``cursor``
    batches and is between two steps now.  ``sequences`` is the number of leased sequences that the step read; 0: derive
    it from ``tokens``.  ``passes``: the site handles no values at this boundary, whatever has arrived, because
    ``may_act`` was false and its ranks agreed on that.  Several ``steps``, all but the last of which passed, may be
    reported as one event, with the tokens of all and the time of one.  A region's step is one update of a site, and has
    as many ``inner_steps`` as that update."""

    step: int
    tokens: int
    step_ns: int
    cursor: int
    sequences: int = 0
    passes: bool = False
    steps: int = 1
    inner_steps: int = 0


@dataclass(frozen=True, slots=True)
class BoundaryReached(LearnerEvent):
    """The site is between two steps, without a new step: before the first, in lock-step, or after the last."""


@dataclass(frozen=True, slots=True)
class TurnElsewhere(LearnerEvent):
    """In lock-step with several syncers: ``turn`` is the order key (version, due inner step) of the next fragment that
    the site exchanges with the other syncers.  None: there is none, or none any more."""

    turn: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class OverlapChosen(LearnerEvent):
    """From the next update of each fragment on, its version is adopted at least ``steps`` inner steps after it."""

    steps: int


@dataclass(frozen=True, slots=True)
class Sealed(LearnerEvent, RegionEvent):
    """The pseudo-gradient is encoded and durable in the outbox; it may now be sent."""

    fragment: int
    sequence: int
    digest: str


@dataclass(frozen=True, slots=True)
class SealFailed(LearnerEvent, RegionEvent):
    """The pseudo-gradient is not finite: this site's own training failed; nothing was sent."""

    fragment: int
    sequence: int


@dataclass(frozen=True, slots=True)
class PushAnswered(LearnerEvent, RegionEvent):
    """The syncer of ``epoch`` gave its definite answer to the push of the update with this ``digest``.

    An empty ``digest`` or an ``epoch`` of 0: unknown.
    """

    fragment: int
    sequence: int
    outcome: Outcome
    reason: Reason | None
    digest: str = ""
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class FateTold(LearnerEvent, RegionEvent):
    """The syncer told a fate, over Watch or on re-ask."""

    fate: Fate


@dataclass(frozen=True, slots=True)
class VersionPublished(LearnerEvent, RegionEvent):
    """The syncer published ``version`` of ``fragment``.  ``fastest_step_ns`` is the fastest site's inner step time; it
    and ``lineage`` are 0 from a syncer that does not send them.
    """

    epoch: int
    fragment: int
    version: int
    run_tokens: int
    progress_ppm: int
    lineage: int = 0
    fastest_step_ns: int = 0


@dataclass(frozen=True, slots=True)
class VersionFetched(LearnerEvent):
    """The values of ``version`` are here, verified.  ``fates`` were read at the same instant as the values."""

    fragment: int
    version: int
    fates: tuple[Fate, ...]


@dataclass(frozen=True, slots=True)
class BaseDiffers(LearnerEvent):
    """This site's base values differ from ``version`` of ``fragment``: they were corrupted in its memory."""

    fragment: int
    version: int


@dataclass(frozen=True, slots=True)
class FetchFailed(LearnerEvent, RegionEvent):
    """A fetch failed; the shell backs off before it reports this event."""

    fragment: int


@dataclass(frozen=True, slots=True)
class UnitsTold(LearnerEvent):
    """The syncer sent the site's list of units from place ``first`` on, as ``pieces`` (``sync/data_units.py``)."""

    first: int
    pieces: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class FinalAnnounced(LearnerEvent, RegionEvent):
    """The last round has begun: finish the step, send unsent progress, stop.

    ``versions`` are the final versions by fragment, once the round is over; empty before.
    """

    ending: Ending
    versions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class FinalWanted(LearnerEvent):
    """The training loop is over, and the site must end with the final versions if the run is finished."""


@dataclass(frozen=True, slots=True)
class LeaveAsked(LearnerEvent):
    """The user asked this site to stop (Ctrl-C, SIGTERM): send unsent progress, leave, keep a checkpoint."""
