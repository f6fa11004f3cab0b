"""The memory of a site's machine: its progress in every fragment, and an account of each token it read.

``SiteTurn`` is the handling of one event: the memory, the options, and the effects so far.

Units of the data: the site's list, what it asks for, and what its updates have consumed.  The place of a unit in the
list is the data cursor divided by the unit size, so the cursor alone locates a batch.  A site never waits for the
syncer: where its list ends it draws earlier units again.  Its updates do not name these, so that they are not counted
as other units, and the next request says how many there were.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from diloco.sync.data_units import SKIPPED, Piece, Span, UnitList, added, first_of, joined, pieces_at, size
from diloco.sync.effects import Fetch, Forget, LearnerEffect, Note, Release, StopTraining
from diloco.sync.events import Ending, StepDone, UnitsTold
from diloco.sync.options import LearnerOptions


@dataclass(slots=True)
class SiteUnits(UnitList):
    """The list at the site; the syncer has sent the places before ``known``.

    ``again`` counts the places at which the site had no new unit and drew an earlier one again.
    """

    known: int = 0
    again: int = 0
    spare: list[Span] = field(default_factory=list)
    """Some units that the site has drawn, for use when the list holds none."""

    def real(self) -> list[Span]:
        """Return the units that can be drawn again."""
        return added([(unit, unit + count) for unit, count in self.pieces if unit != SKIPPED], ()) or self.spare


class SentState(StrEnum):
    """The state of an update: being encoded, sealed in the outbox, or accepted by the syncer."""

    SEALING = "sealing"
    SEALED = "sealed"
    ACCEPTED = "accepted"


@dataclass(slots=True)
class Sent:
    """An update whose decoded pseudo-gradient the agent still holds.

    ``merged_version`` is set once it is known to be merged; it leaves the list when that version is adopted.
    ``since_adopt``: it was measured from the values of the latest adopt (matters to overwrite, blend and eager only).
    ``void``: it was still being encoded when the run was restored; its number is free when the encoding ends.
    ``unwanted``: still being encoded when an earlier number became free; its progress becomes unsent after that.
    ``outrun``: still being encoded when it turned out that an earlier process had sent later work; its tokens count as
    lost, so it has none any more.
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
        """Whether its encoded bytes may still have to be sent (again)."""
        return self.state is not SentState.ACCEPTED or self.kept


@dataclass(slots=True)
class Orphan:
    """An update of an earlier process, accepted and undecided, whose pseudo-gradient was lost with that process.

    ``epoch`` is that of the syncer that reported it.
    """

    sequence: int
    tokens: int
    epoch: int = 0


class Ledger(NamedTuple):
    """Where a site's tokens are.  ``processed`` is the sum of the others (DESIGN invariant 10)."""

    processed: int
    merged: int
    refused: int
    in_flight: int
    unsent: int
    overwritten: int
    lost: int

    def balanced(self) -> bool:
        """Return whether every token is in exactly one place."""
        processed, *parts = self
        return processed == sum(parts)


@dataclass(slots=True)
class Retaking:
    """A pending retake: the site discards unsent progress as soon as it has fetched ``version`` or a later one.

    ``cold``: until then the site has only its own initialisation, and must not train on it.  ``final``: it is the run's
    final version, and the site takes it once no update is undecided, so that its values are exactly the published ones.
    """

    version: int
    why: str
    cold: bool = False
    final: bool = False


@dataclass(slots=True)
class Doubt:
    """What the syncer had acknowledged when its answer to a join had less: the next answer must have it."""

    sequence: int
    version: int


@dataclass(slots=True)
class FragmentProgress:
    """A site's progress in one fragment.

    ``base_version`` is -1 until the first version of the lineage is here; an update measured from ``stale_base`` was
    refused as stale.  Before inner step ``held_until`` no version is adopted, because the exchange of the last update
    may take that long.  ``sealed_step`` is the inner step from which the steps to the next update count: that of the
    last update, or of a later retake or adopt that restarted the count.
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

    def overwrite_unsent(self) -> None:
        """Give up the unsent progress for a version; its data counts as consumed and is in the next update's spans."""
        self.tokens_overwritten += self.unsent_tokens
        self.unsent_tokens = self.unsent_steps = 0

    def take(self, version: int) -> tuple[int, ...]:
        """Make ``version`` the base; return the updates that it contains, which leave the list."""
        left = [sent for sent in self.in_flight if sent.merged_version is None or sent.merged_version > version]
        merged = tuple([sent.sequence for sent in self.in_flight if sent not in left])
        self.base_version, self.in_flight = version, left
        for sent in left:
            sent.since_adopt = False
        return merged

    def undecided(self) -> list[Sent]:
        """Return the updates without a known fate, in sequence order."""
        return [sent for sent in self.in_flight if sent.merged_version is None]

    def encoding(self) -> bool:
        """Return whether an update is still being encoded, so that its decoded values are not known yet."""
        return any(sent.state is SentState.SEALING for sent in self.in_flight)

    def unanswered(self) -> list[Sent]:
        """Return the updates without an answer of the syncer, in sequence order."""
        return [sent for sent in self.in_flight if sent.state is not SentState.ACCEPTED]

    def tokens_in_flight(self) -> int:
        """Return the tokens in updates without a known fate, those of earlier processes included."""
        return sum([sent.tokens for sent in self.undecided()]) + sum([orphan.tokens for orphan in self.orphans])

    def accounted(self) -> int:
        """Return the tokens that are accounted for; tokens processed beyond these are lost."""
        parts = self.tokens_merged + self.tokens_refused + self.tokens_overwritten
        return parts + self.tokens_in_flight() + self.unsent_tokens


@dataclass(slots=True)
class LearnerState:
    """All of a site machine's memory.

    ``stopping``: the training loop was told to end.  ``at_rest``: it has reached a boundary since, so that no step is
    under way.  ``closed``: the syncer accepts no more updates.  ``left``: the site has left or given up.  ``keep``: the
    syncer may acknowledge updates that its standby lacks, so bytes are kept until their fate is known.
    ``overlap_steps``: least inner steps from an update to the adoption of its version, from the next seal on.
    ``fastest_step_ns``: the inner step time of the fastest site, as the syncer last sent it.
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
    final_versions: list[int] = field(default_factory=list)
    """The versions with which the run has ended, by fragment; empty until the syncer has told them."""
    final_wanted: bool = False
    """Whether the training loop is over and the site is to end with the final versions."""
    elsewhere: tuple[int, int] | None = None
    """In lock-step with several syncers: the order key of the next fragment of the others (``TurnElsewhere``)."""


def ledger_of(state: LearnerState, index: int) -> Ledger:
    """Return the exact ledger of one fragment."""
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
    """Return the ledger of the site: the mean over its fragments."""
    return mean_ledger([ledger_of(state, index) for index in range(len(state.fragments))])


@dataclass(frozen=True, slots=True)
class Standing:
    """The status of a site or a region: its ledger (the mean over its fragments), its base versions, its inner steps
    (of a region: updates merged) since it began, and its inner step time."""

    ledger: Ledger
    versions: tuple[int, ...]
    steps: int
    step_ns: int


def standing_of(states: list[LearnerState]) -> Standing:
    """Return the standing of a site or region from the memory of all its machines."""
    ledgers = [ledger_of(state, index) for state in states for index in range(len(state.fragments))]
    versions = tuple([part.base_version for state in states for part in state.fragments])
    steps, step_ns = sum([state.step for state in states]), max([state.step_ns for state in states])
    return Standing(mean_ledger(ledgers), versions, steps, step_ns)


def mean_ledger(ledgers: list[Ledger]) -> Ledger:
    """Return the mean of ledgers, in whole tokens that still balance.

    Each fragment of a site counts every token once.  The mean of each part is rounded down; the missing tokens are
    added one by one to the parts with the largest remainders, ties in the order of the fields.
    """
    count = len(ledgers)
    processed, *sums = map(sum, zip(*ledgers, strict=True))
    parts, rests = [total // count for total in sums], [total % count for total in sums]
    by_rest = sorted(range(len(parts)), key=rests.__getitem__, reverse=True)  # Equal ones stay in order.
    for position in by_rest[: sum(rests) // count]:
        parts[position] += 1
    return Ledger(processed // count, *parts)


def combined(ledgers: list[Ledger]) -> Ledger:
    """Return the ledger of a site that has several syncers, from those of all its fragments.

    A machine that has ended gets no more steps: the tokens of these steps are added to its unsent ones.
    """
    processed = max(ledger.processed for ledger in ledgers)
    whole = [each._replace(processed=processed, unsent=each.unsent + processed - each.processed) for each in ledgers]
    return mean_ledger(whole)


@dataclass(slots=True)
class SiteTurn:
    """What the rules of a site's machine read and write; the mirror of ``Turn``."""

    options: LearnerOptions
    state: LearnerState
    effects: list[LearnerEffect] = field(default_factory=list)

    def note(self, what: str, why: str, fragment: int | None = None) -> None:
        """Log a decision and its reason."""
        self.effects.append(Note(what, why, fragment=fragment))

    def find(self, index: int, sequence: int) -> Sent | None:
        """Return the update with that sequence number in the in-flight list; None if there is none."""
        return next((sent for sent in self.state.fragments[index].in_flight if sent.sequence == sequence), None)

    def drop(self, index: int, sent: Sent) -> None:
        """Drop an update's decoded pseudo-gradient, and its bytes if they might still have to be sent (again)."""
        if sent.bytes_wanted:
            self.effects.append(Forget(index, sent.sequence))
        self.effects.append(Release(index, sent.sequence))

    def want(self, index: int) -> None:
        """Fetch the newest version unless it is here or being fetched."""
        part = self.state.fragments[index]
        have = max(part.fetched, part.base_version)
        if part.published > have and not part.fetching:
            part.fetching = True
            self.effects.append(Fetch(index, have))

    def end(self, ending: Ending | None, why: str) -> None:
        """Stop training in order: unsent progress still goes out."""
        self.state.ending = self.state.ending or ending
        if not self.state.stopping:
            self.state.stopping = True
            self.effects.append(StopTraining(ending, why))

    def stop(self, why: str) -> None:
        """Give up: this process must not, or cannot, continue."""
        self.state.stopping = self.state.left = True
        self.effects.append(StopTraining(None, why, failed=True))


REMEMBERED = 64
"""Places before the present one that a site keeps, to draw their units again."""
SPANS_MAX = 16
"""Most spans in one update; data beyond that counts as thrown away."""


@dataclass(frozen=True, slots=True)
class UnitAsk:
    """The figures of a request for units; the fields are those of ``UnitsAsked``."""

    known: int
    begin: int
    upto: int
    floor: int
    again: int


def ask_of(options: LearnerOptions, state: LearnerState) -> UnitAsk:
    """Return the request for units at the site's present data cursor."""
    unit, units = options.unit_sequences, state.units
    place = state.cursor // unit
    known, begin = units.known, units.end
    if units.end <= place:  # Ask for what another process of the site was leased here; lease no unit that has begun.
        known, begin = place, -(-state.cursor // unit)
    upto = begin if state.stopping else place + options.units_ahead
    if not units.real():  # Training cannot begin without a unit, at whatever place.
        upto = max(upto, begin + 1)
    starts = [state.cursor]
    for part in state.fragments:
        starts += [start for start, _ in part.unsent_spans]
        starts += [start for sent in part.undecided() for start, _ in sent.spans]
    # The floor is the first sequence whose progress is in an undecided update or still to be sent.
    return UnitAsk(known, begin, upto, min(starts), units.again)


def wants_soon(options: LearnerOptions, state: LearnerState) -> bool:
    """Return whether the list is so short that the site should ask now and not at its next heartbeat."""
    if state.stopping:
        return False
    place = state.cursor // options.unit_sequences
    return state.units.end - place < options.units_ahead // 2


def units_told(turn: SiteTurn, event: UnitsTold) -> None:
    """Append units that the syncer sent; places sent before, or drawn again meanwhile, stay as they are."""
    units = turn.state.units
    upto = UnitList(event.first, list(event.pieces)).end
    if upto <= units.end:
        units.known = max(units.known, upto)
        return
    if event.first > units.end or not units.pieces:
        units.first, units.pieces = event.first, []
    more = pieces_at(event.pieces, units.end - event.first)
    units.pieces, units.known = joined([*units.pieces, *more]), upto
    units.spare = first_of(units.real(), REMEMBERED)


def units_drawn(turn: SiteTurn, event: StepDone) -> None:
    """Record which sequences of leased units a step has read: every fragment's next update carries their progress."""
    options, state = turn.options, turn.state
    unit, place, named = options.unit_sequences, state.units.first, list[Span]()
    begin = event.cursor - (event.sequences or event.tokens // options.sequence_tokens)
    for first, count in state.units.pieces:
        if first != SKIPPED:
            # ``added`` drops a span that is empty because the step has read nothing of this piece.
            named.append((max(begin, place * unit), min(event.cursor, (place + count) * unit)))
        place += count
    for part in state.fragments:
        part.unsent_spans = added(part.unsent_spans, named)[-SPANS_MAX:]
    skip = event.cursor // unit - REMEMBERED - state.units.first
    if skip > 0:
        state.units.pieces = pieces_at(state.units.pieces, skip)
        state.units.first += skip


def units_start_over(options: LearnerOptions, state: LearnerState) -> None:
    """After a restore of the run: drop the places from the cursor on, as the restored syncer may not have leased them.

    The rest of a unit that has begun becomes a skipped place: the site draws an earlier unit for it, without naming it.
    """
    units, place = state.units, state.cursor // options.unit_sequences
    begun = [(SKIPPED, 1)] if state.cursor % options.unit_sequences and units.end > place >= units.first else []
    units.pieces = joined([*pieces_at(units.pieces, 0, place - units.first), *begun])
    units.known = min(units.known, units.end)


def units_from(state: LearnerState, place: int, count: int) -> tuple[list[Piece], bool]:
    """Return up to ``count`` units from ``place`` on (at least one), and whether they are repeats.

    There are fewer where fewer are known.  Where none is known, the site draws one again that it has drawn before.
    """
    units = state.units
    if place >= units.end:
        units.again += 1
        units.pieces = joined([*units.pieces, (SKIPPED, place + 1 - units.end)])
    skip = place - units.first
    here = pieces_at(units.pieces, skip, skip + count) if skip >= 0 else []
    skipped = [at for at, (unit, _) in enumerate(here) if unit == SKIPPED]
    if found := here[: min(skipped, default=len(here))]:
        return found, False
    real = units.real()
    assert real, "a site that was leased no unit does not train"
    ((first, _), *_) = pieces_at([(start, stop - start) for start, stop in real], place % size(real))
    return [(first, 1)], True
