"""What a site's machine remembers: its place in every fragment, and where each token it read has gone.

``SiteTurn`` is one handling of an event: the memory, the rules, and what the site must do so far.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from diloco.sync.data_units import Piece, Span, units_at
from diloco.sync.effects import Fetch, LearnerEffect, Note, StopTraining
from diloco.sync.events import Ending, Fate
from diloco.sync.options import LearnerOptions

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(slots=True)
class SiteUnits:
    """A list from place ``first`` on; the syncer has told of the places before ``known``.

    ``again`` counts the places at which there was no unit to draw but those that were drawn before.
    """

    first: int = 0
    pieces: list[Piece] = field(default_factory=list)
    known: int = 0
    again: int = 0
    spare: list[Span] = field(default_factory=list)
    """Some units that it has drawn, for when there is no other in the list."""

    @property
    def end(self) -> int:
        """The first place that has no unit yet."""
        return self.first + sum(count for _, count in self.pieces)

    def real(self) -> list[Span]:
        """The units that can be drawn over again."""
        return units_at(self.first, self.pieces, [(self.first, self.end)]) or self.spare


class SentState(StrEnum):
    """An update is being encoded, is sealed in the outbox, or was accepted by the syncer."""

    SEALING = "sealing"
    SEALED = "sealed"
    ACCEPTED = "accepted"


@dataclass(slots=True)
class Sent:
    """An update whose decoded pseudo-gradient the agent still holds.

    ``merged_version`` is set once it is known to be merged; it leaves the list when that version is adopted.
    ``since_adopt``: it was measured from the values of the latest adopt (matters to overwrite and blend only).
    ``void``: it was still being encoded when the run was restored; its number is free once that is over.
    ``unwanted``: the same, because a number before it is free again; its progress is unsent then.
    ``outrun``: the same, because an earlier process has sent later work; its tokens are lost, and none of it any more.
    ``kept``: it was accepted, by a syncer of ``epoch``, and its bytes are still in the outbox.
    ``spans``: the sequences whose progress it carries, in the site's own count, where units of the data are leased.
    """

    sequence: int
    base_version: int
    tokens: int
    steps: int
    digest: str = ""
    state: SentState = SentState.SEALING
    merged_version: int | None = None
    since_adopt: bool = True
    void: bool = False
    unwanted: bool = False
    outrun: bool = False
    kept: bool = False
    epoch: int = 0
    spans: list[Span] = field(default_factory=list)

    @property
    def bytes_wanted(self) -> bool:
        """Whether its encoded bytes may still have to be sent."""
        return self.state is not SentState.ACCEPTED or self.kept


@dataclass(slots=True)
class Orphan:
    """An update of an earlier process, accepted and undecided, whose pseudo-gradient was lost with that process.

    ``epoch`` is that of the syncer which told of it.
    """

    sequence: int
    tokens: int
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where a site's tokens are.  ``processed`` is the sum of the others (DESIGN invariant 10)."""

    processed: int
    merged: int
    refused: int
    in_flight: int
    unsent: int
    overwritten: int
    lost: int

    def balanced(self) -> bool:
        """Whether every token is in exactly one place."""
        parts = self.merged + self.refused + self.in_flight + self.unsent + self.overwritten + self.lost
        return self.processed == parts


@dataclass(slots=True)
class Retaking:
    """Unsent progress is to be thrown away as soon as ``version`` or a later one is here.

    ``cold``: the site has its own initialisation until then, and must not train on it.
    """

    version: int
    why: str
    cold: bool = False


@dataclass(slots=True)
class Doubt:
    """What the syncer had acknowledged when a join's answer knew less: the next answer must know it."""

    sequence: int
    version: int


@dataclass(slots=True)
class FragmentProgress:
    """A site's place in one fragment.

    ``base_version`` is -1 until the first version of the lineage is here; an update measured from ``stale_base`` was
    too old.  ``held_until`` is the inner step before which no version is adopted, because an exchange may take so long;
    ``sealed_step`` the one after which its last update was made, or from which the steps to the next are counted anew.
    """

    base_version: int = -1
    stale_base: int = -1
    next_sequence: int = 1
    published: int = -1
    fetched: int = -1
    fetching: bool = False
    due: bool = False
    discards: int = 0
    unsent_tokens: int = 0
    unsent_steps: int = 0
    tokens_merged: int = 0
    tokens_refused: int = 0
    tokens_overwritten: int = 0
    tokens_lost: int = 0
    updates_merged: int = 0
    updates_refused: dict[str, int] = field(default_factory=dict)
    retaking: Retaking | None = None
    doubt: Doubt | None = None
    in_flight: list[Sent] = field(default_factory=list)
    orphans: list[Orphan] = field(default_factory=list)
    held_until: int = 0
    sealed_step: int = 0
    unsent_spans: list[Span] = field(default_factory=list)

    def undecided(self) -> list[Sent]:
        """The updates without a known fate, in sequence order."""
        return [sent for sent in self.in_flight if sent.merged_version is None]

    def contradicted(self, fates: Iterable[Fate]) -> bool:
        """Whether a number of the list was used by another process of the site, for something else."""
        told = {fate.sequence: fate.digest for fate in fates}
        listed = [sent for sent in self.in_flight if not sent.outrun]
        return any(told.get(sent.sequence, sent.digest) != sent.digest for sent in listed)

    def encoding(self) -> bool:
        """Whether an update's decoded values are not known yet."""
        return any(sent.state is SentState.SEALING for sent in self.in_flight)

    def unanswered(self) -> bool:
        """Whether an update is on its way to the syncer's answer."""
        return any(sent.state is not SentState.ACCEPTED for sent in self.in_flight)

    def tokens_in_flight(self) -> int:
        """Tokens in updates without a known fate, those of earlier processes included."""
        return sum(sent.tokens for sent in self.undecided()) + sum(orphan.tokens for orphan in self.orphans)

    def accounted(self) -> int:
        """The tokens that are somewhere; what was processed beyond them is lost."""
        parts = self.tokens_merged + self.tokens_refused + self.tokens_overwritten
        return parts + self.tokens_in_flight() + self.unsent_tokens


@dataclass(slots=True)
class LearnerState:
    """All of a site machine's memory.

    ``stopping``: the training loop was told to end; ``at_rest``: it has been at a boundary since, so that no step is
    under way any more; ``closed``: the syncer takes nothing any more; ``left``: goodbye is said; ``keep``: the syncer
    acknowledges what its standby may lack, so that bytes are kept until their fate is known; ``overlap_steps``: inner
    steps from an update to the adoption of its version, at least, from the next seal on; ``fastest_step_ns``: what an
    inner step takes at the fastest site, as last told.
    """

    fragments: list[FragmentProgress]
    lineage: int = 1
    epoch: int = 0
    incarnation: int = 0
    step: int = 0
    cursor: int = 0
    tokens_processed: int = 0
    step_ns: int = 0
    fastest_step_ns: int = 0
    run_tokens: int = 0
    progress_ppm: int = 0
    ending: Ending | None = None
    stopping: bool = False
    at_rest: bool = False
    closed: bool = False
    left: bool = False
    keep: bool = False
    overlap_steps: int = 0
    units: SiteUnits = field(default_factory=SiteUnits)
    elsewhere: tuple[int, int] | None = None
    """In lock-step with several syncers: the place of the next fragment of the others (``TurnElsewhere``)."""


def ledger_of(state: LearnerState, index: int) -> Ledger:
    """The ledger of one fragment, exact."""
    part = state.fragments[index]
    return Ledger(
        processed=state.tokens_processed,
        merged=part.tokens_merged,
        refused=part.tokens_refused,
        in_flight=part.tokens_in_flight(),
        unsent=part.unsent_tokens,
        overwritten=part.tokens_overwritten,
        lost=part.tokens_lost,
    )


def site_ledger(state: LearnerState) -> Ledger:
    """The ledger of the site: the mean over its fragments."""
    return mean_ledger([ledger_of(state, index) for index in range(len(state.fragments))])


def mean_ledger(ledgers: Sequence[Ledger]) -> Ledger:
    """The mean of ledgers, in whole tokens that still balance.

    Each fragment of a site counts every token once.  The mean of each part is rounded down and what rounding took away
    is given back one by one to the parts that lost most, in the order of the fields.
    """
    count = len(ledgers)
    names = ("merged", "refused", "in_flight", "unsent", "overwritten", "lost")
    sums = [sum(getattr(ledger, name) for ledger in ledgers) for name in names]
    parts = [total // count for total in sums]
    missing = (sum(sums) - count * sum(parts)) // count
    order = sorted(range(len(names)), key=lambda position: (-(sums[position] % count), position))
    for position in order[:missing]:
        parts[position] += 1
    return Ledger(sum(ledger.processed for ledger in ledgers) // count, *parts)


def combined(ledgers: Sequence[Ledger]) -> Ledger:
    """The ledger of a site that has several syncers, from those of all its fragments.

    A part that had ended was not told of the steps after that: what it has not heard of is unsent there.
    """
    processed = max(ledger.processed for ledger in ledgers)
    whole = [
        replace(ledger, processed=processed, unsent=ledger.unsent + processed - ledger.processed) for ledger in ledgers
    ]
    return mean_ledger(whole)


@dataclass(slots=True)
class SiteTurn:
    """What the rules of a site's machine read and write; the mirror of ``Turn``."""

    options: LearnerOptions
    state: LearnerState
    effects: list[LearnerEffect] = field(default_factory=list)

    def note(self, what: str, why: str, fragment: int | None = None) -> None:
        """Say a decision and its reason."""
        self.effects.append(Note(what, why, fragment=fragment))

    def find(self, index: int, sequence: int) -> Sent | None:
        """The update of the in-flight list with that number."""
        for sent in self.state.fragments[index].in_flight:
            if sent.sequence == sequence:
                return sent
        return None

    def want(self, index: int) -> None:
        """Fetch the newest version unless it is here or on its way."""
        part = self.state.fragments[index]
        have = max(part.fetched, part.base_version)
        if part.published > have and not part.fetching:
            part.fetching = True
            self.effects.append(Fetch(index, have))

    def end(self, ending: Ending | None, why: str) -> None:
        """Stop training in good order: what is unsent still goes out."""
        self.state.ending = self.state.ending or ending
        if not self.state.stopping:
            self.state.stopping = True
            self.effects.append(StopTraining(ending, why))

    def stop(self, why: str) -> None:
        """Give up: this process must not, or cannot, go on."""
        self.state.stopping = self.state.left = True
        self.effects.append(StopTraining(None, why, failed=True))
