"""The effects of the machines: commands to the shell, imperative, frozen, made of plain values.

The shell carries them out in the order given, after the event that caused them is durable.
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco.sync.data_units import Span
from diloco.sync.events import Ending, Fate, FragmentStanding, Outcome, Reason


class LearnerEffect:
    """An effect of a site's machine."""

    __slots__ = ()


class OuterEffect:
    """An effect of a syncer's machine."""

    __slots__ = ()


class RegionEffect(OuterEffect):
    """An effect of a region's machine towards the syncer above (``region.py``).

    One that is a ``LearnerEffect`` as well is an effect of a plain site towards its syncer.
    """

    __slots__ = ()


# --- effects of the outer machine ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AnswerJoin(OuterEffect):
    """Answer a join: ``incarnation`` and ``standings`` when admitted, else ``reason``."""

    call: int
    site: str
    incarnation: int
    standings: tuple[FragmentStanding, ...]
    ending: Ending | None
    reason: Reason | None


@dataclass(frozen=True, slots=True)
class AskToConfirm(OuterEffect):
    """Answer a join: another process acts for the site; a join repeated with ``ticket`` replaces it."""

    call: int
    site: str
    ticket: int


@dataclass(frozen=True, slots=True)
class AnswerPush(OuterEffect):
    """Answer a push.  ``version`` is the fragment's version at that moment; ``fate`` is the update's, where known."""

    call: int
    outcome: Outcome
    version: int
    reason: Reason | None = None
    fate: Fate | None = None


@dataclass(frozen=True, slots=True)
class AnswerDone(OuterEffect):
    """Answer a Leave, Evict or Drain: it took effect."""

    call: int
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class AnswerUnits(OuterEffect):
    """Answer a request for units: the site's list from place ``first`` on, as far as one answer carries it."""

    call: int
    first: int
    pieces: tuple[tuple[int, int], ...]
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class UpdateRef:
    """One update of a contribution; ``payload`` is where its bytes are durable."""

    sequence: int
    payload: str
    encoding: str
    digest: str


@dataclass(frozen=True, slots=True)
class Contribution:
    """All updates of one site in one round, in sequence order, or one of them (``merge_by``), and their weight.

    ``weight`` is positive; the weights of one outer step sum to 1 (to 1e-12).  ``base_version`` is the oldest base
    version of its updates.
    """

    site: str
    weight: float
    base_version: int
    updates: tuple[UpdateRef, ...]


@dataclass(frozen=True, slots=True)
class StartOuterStep(OuterEffect):
    """Merge ``contributions`` (by site and sequence), step the outer optimizer, make ``version`` of ``fragment``.

    ``share``, above 0 and at most 1, is the part of a full round that the contributions make up.
    """

    fragment: int
    version: int
    contributions: tuple[Contribution, ...]
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class PublishVersion(OuterEffect):
    """Make ``version`` visible to all sites."""

    fragment: int
    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class TellFate(OuterEffect):
    """Tell ``site`` the fate of its update."""

    site: str
    fate: Fate


@dataclass(frozen=True, slots=True)
class AnnounceFinal(OuterEffect):
    """Tell every site that the last round has begun."""

    ending: Ending


@dataclass(frozen=True, slots=True)
class MarkFinal(OuterEffect):
    """Every fragment has its final version; the run (or this part of it) is over."""

    ending: Ending
    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DropSite(OuterEffect):
    """End ``site``'s streams: it was evicted, or a newer process has replaced this one."""

    site: str
    incarnation: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Note(LearnerEffect, OuterEffect):
    """A decision and its reason, for the log and for ``events.jsonl``; ``what`` is a short stable name."""

    what: str
    why: str
    site: str | None = None
    fragment: int | None = None
    version: int | None = None


@dataclass(frozen=True, slots=True)
class TakeVersion(RegionEffect):
    """Make ``version`` of ``fragment`` without an update: blend the present values with a version of the syncer above,
    which has weight ``share`` (``outer.pseudo_gradient.blend``).

    The values above are durable at ``payload``, as fp32 with that ``digest``.  The outer optimizer's state stays as it
    is, and the next update for the syncer above is measured from the result.
    """

    fragment: int
    version: int
    share: float
    payload: str
    digest: str

    @property
    def contributions(self) -> tuple[Contribution, ...]:
        """Always empty; ``StartOuterStep`` has the same attribute."""
        return ()


@dataclass(frozen=True, slots=True)
class LetGo(RegionEffect):
    """Release the values of the syncer above at ``payload``: no later effect needs them."""

    payload: str


# --- effects of a site's machine -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Join(LearnerEffect, RegionEffect):
    """Join again: the syncer and this site disagree on which updates were accepted."""

    why: str


@dataclass(frozen=True, slots=True)
class Seal(LearnerEffect, RegionEffect):
    """At this step boundary: copy the fragment's values, then (beside training) encode and store the update.

    The pseudo-gradient is measured from the base and the in-flight list *as they are now*: ``in_flight`` names the
    updates to subtract, by sequence number, in order; ``spans`` the sequences of data it trained on.
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
class Send(LearnerEffect, RegionEffect):
    """Send a sealed update until the syncer gives a definite answer."""

    fragment: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Forget(LearnerEffect):
    """Delete the encoded bytes of an update: it is accepted, or it will never be sent."""

    fragment: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Release(LearnerEffect, RegionEffect):
    """Drop the decoded pseudo-gradient of an update that left the in-flight list without being merged."""

    fragment: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Fetch(LearnerEffect, RegionEffect):
    """Fetch a version newer than ``have_version`` of ``fragment``."""

    fragment: int
    have_version: int


@dataclass(frozen=True, slots=True)
class Adopt(LearnerEffect):
    """At this step boundary: adopt ``version``.  ``merged`` are the own in-flight updates (sequence numbers) that it
    contains, in order; they leave the list (rebase: r ← (θ − Θ̂_b) + Σ d over ``merged``; θ ← Θ̂_v + r; DESIGN 5).

    Under eager only: ``fresh`` are the in-flight updates, merged or not, that were measured since the last adopt, and
    ``under_way`` those that the version lacks.
    """

    fragment: int
    version: int
    merged: tuple[int, ...]
    fresh: tuple[int, ...] = ()
    under_way: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Retake(LearnerEffect):
    """At this step boundary: discard unsent progress: θ ← Θ̂_version − Σ d of ``keep`` (usually none).

    Every in-flight update that is not in ``keep`` leaves the list.
    """

    fragment: int
    version: int
    keep: tuple[int, ...]
    why: str


@dataclass(frozen=True, slots=True)
class StartOver(LearnerEffect, RegionEffect):
    """Drop the latest version of ``fragment`` and any fetch of it: the run was restored, or the values held here differ
    from those published.

    The model keeps its values until the ``Retake`` that follows once a whole version is here.
    """

    fragment: int


@dataclass(frozen=True, slots=True)
class SkipData(LearnerEffect):
    """Move the data cursor forward to ``cursor`` batches: accepted updates have consumed the batches before."""

    cursor: int


@dataclass(frozen=True, slots=True)
class StopTraining(LearnerEffect, RegionEffect):
    """End the training loop.  ``ending`` is None when only this site stops, for ``why``; ``failed``: the site gave up
    (exit code 1) and was not asked to stop."""

    ending: Ending | None
    why: str
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Leave(LearnerEffect, RegionEffect):
    """Leave the run and end: every update sent is decided, or will be decided without this site."""

    ending: Ending | None
