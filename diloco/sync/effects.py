"""What a machine asks of the world.  Imperatives, frozen, made of plain values.

The shell carries them out in the order given, after the event that caused them is durable.
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco.sync.data_units import Span
from diloco.sync.events import Ending, Fate, FragmentStanding, Outcome, Reason

# --- effects of the outer machine ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AnswerJoin:
    """Answer a join: ``incarnation`` and ``standings`` when taken in, else ``reason``."""

    call: int
    site: str
    incarnation: int
    standings: tuple[FragmentStanding, ...]
    ending: Ending | None
    reason: Reason | None


@dataclass(frozen=True, slots=True)
class AskToConfirm:
    """Answer a join: another process speaks for the site; whoever asks again with ``ticket`` replaces it."""

    call: int
    site: str
    ticket: int


@dataclass(frozen=True, slots=True)
class AnswerPush:
    """Answer a push.  ``version`` is the fragment's version at that moment; a known ``fate`` comes along."""

    call: int
    outcome: Outcome
    version: int
    reason: Reason | None = None
    fate: Fate | None = None


@dataclass(frozen=True, slots=True)
class AnswerDone:
    """Answer a Leave, Evict or Drain: it took effect."""

    call: int
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class AnswerUnits:
    """Answer an ask for units: the site's list from place ``first`` on, as far as one answer carries it."""

    call: int
    first: int
    pieces: tuple[tuple[int, int], ...]
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class UpdateRef:
    """One update inside a contribution; ``payload`` is where its bytes are durable."""

    sequence: int
    payload: str
    encoding: str
    digest: str


@dataclass(frozen=True, slots=True)
class Contribution:
    """All updates of one site in one round, in sequence order, or one of them (``merge_by``), and what it counts.

    ``weight`` is positive; the weights of one outer step sum to 1 (to 1e-12).  ``base_version`` is the oldest one that
    an update of it was measured from.
    """

    site: str
    weight: float
    base_version: int
    updates: tuple[UpdateRef, ...]


@dataclass(frozen=True, slots=True)
class StartOuterStep:
    """Merge ``contributions`` (by site and sequence), step the outer optimizer, make ``version`` of ``fragment``.

    ``share``, above 0 and at most 1, is the part of a full round that they are.
    """

    fragment: int
    version: int
    contributions: tuple[Contribution, ...]
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class PublishVersion:
    """Make ``version`` visible to everybody."""

    fragment: int
    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class TellFate:
    """Tell ``site`` what became of its update."""

    site: str
    fate: Fate


@dataclass(frozen=True, slots=True)
class AnnounceFinal:
    """Tell every site that the last round has begun."""

    ending: Ending


@dataclass(frozen=True, slots=True)
class MarkFinal:
    """Every fragment has its final version; the run (or this part of it) is over."""

    ending: Ending
    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DropSite:
    """End ``site``'s streams: it was evicted, or a newer process speaks for it."""

    site: str
    incarnation: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Note:
    """A decision and its reason, for the log and for ``events.jsonl``; ``what`` is a short stable name."""

    what: str
    why: str
    site: str | None = None
    fragment: int | None = None
    version: int | None = None


@dataclass(frozen=True, slots=True)
class TakeVersion:
    """Make ``version`` of ``fragment``, without an update: ``share`` of a version of the syncer above, and the rest of
    what is here (``outer.pseudo_gradient.blend``).

    The values above are durable at ``payload``, as fp32 with that ``digest``.  What the outer optimizer remembers stays
    as it is, and the next update for the one above is measured from what comes out.
    """

    fragment: int
    version: int
    share: float
    payload: str
    digest: str

    @property
    def contributions(self) -> tuple[Contribution, ...]:
        """None, where an outer step has some."""
        return ()


@dataclass(frozen=True, slots=True)
class LetGo:
    """Nothing that is still to come needs the values of the syncer above at ``payload``."""

    payload: str


# --- effects of a site's machine -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Join:
    """Join again: the syncer and this site do not agree on what was accepted."""

    why: str


@dataclass(frozen=True, slots=True)
class Seal:
    """At this step boundary: copy the fragment's values, then (beside training) encode and store the update.

    The pseudo-gradient is measured from the base and the in-flight list *as they are now*: ``in_flight`` names the
    sequences to subtract, in order; ``spans`` those of the data whose progress the update carries.
    """

    fragment: int
    sequence: int
    base_version: int
    in_flight: tuple[int, ...]
    tokens: int
    steps: int
    step_ns: int
    cursor: int
    final: bool
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class Send:
    """Send a sealed update until the syncer gives a definite answer."""

    fragment: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Forget:
    """The encoded bytes of an update are needed no more (it is accepted, or it will never be sent)."""

    fragment: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Release:
    """An update left the in-flight list without being merged: drop its decoded pseudo-gradient."""

    fragment: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Get a version newer than ``have_version`` of ``fragment``."""

    fragment: int
    have_version: int


@dataclass(frozen=True, slots=True)
class Adopt:
    """At this step boundary: take ``version``.  ``merged`` are own in-flight sequences that it contains, in order;
    they leave the list (rebase: r ← (θ − Θ̂_b) + Σ d over ``merged``; θ ← Θ̂_v + r; DESIGN section 5).

    Under eager alone: ``fresh`` are those, merged or not, that were measured since the last adopt, and ``under_way``
    those that the version lacks.
    """

    fragment: int
    version: int
    merged: tuple[int, ...]
    fresh: tuple[int, ...] = ()
    under_way: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Retake:
    """At this step boundary: throw unsent progress away: θ ← Θ̂_version − Σ d of ``keep`` (usually none).

    Everything in flight that is not in ``keep`` leaves the list.
    """

    fragment: int
    version: int
    keep: tuple[int, ...]
    why: str


@dataclass(frozen=True, slots=True)
class StartOver:
    """Forget the latest version of ``fragment`` and whatever is being fetched of it: the run was restored, or what is
    held here is not what was published.

    The model keeps its values until the ``Retake`` that follows once a whole version is here.
    """

    fragment: int


@dataclass(frozen=True, slots=True)
class SkipData:
    """Move the data cursor on to ``cursor`` batches: accepted updates have consumed what came before."""

    cursor: int


@dataclass(frozen=True, slots=True)
class StopTraining:
    """End the training loop.  ``ending`` is None when this site alone stops, for ``why``; ``failed`` says that the
    site gave up (exit code 1) rather than being asked to stop."""

    ending: Ending | None
    why: str
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Leave:
    """Everything sent is decided (or will be without us): say goodbye to the syncer and end."""

    ending: Ending | None


LearnerEffect = (
    Join | Seal | Send | Forget | Release | Fetch | Adopt | Retake | StartOver | SkipData | StopTraining | Leave | Note
)

Upward = Seal | Send | Release | Fetch | StartOver | Join | Leave | StopTraining
RegionEffect = TakeVersion | LetGo | Upward
"""What the machine of a region asks for towards the syncer above (``region.py``)."""

OuterEffect = (
    RegionEffect
    | AnswerJoin
    | AskToConfirm
    | AnswerPush
    | AnswerDone
    | AnswerUnits
    | StartOuterStep
    | PublishVersion
    | TellFate
    | AnnounceFinal
    | MarkFinal
    | DropSite
    | Note
)
