"""The invariants of the sites, checked at every event (DESIGN section 6), and the list of all checkers.

Also the invariants of outlier updates (only an operator's decision merges a held one), of two machines that may lead
(one at a time, and never without what the other has acknowledged), and of leased data units (each counts once, and each
is in one place).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from diloco.sim import world
from diloco.sim.checkers import (
    Acknowledged,
    Bounds,
    Checker,
    ExactlyOnce,
    Grace,
    Id,
    Lineages,
    Merging,
    Recovery,
    Staleness,
    Versions,
    Weights,
    accepted,
    ids_of,
)
from diloco.sync.admission import judge
from diloco.sync.data_units import SKIPPED, common, size
from diloco.sync.effects import (
    AnswerDone,
    AnswerPush,
    AnswerUnits,
    Leave,
    Note,
    PublishVersion,
    Release,
    Retake,
    Seal,
    StartOuterStep,
    StopTraining,
    TellFate,
)
from diloco.sync.events import (
    Ending,
    FinalAnnounced,
    JoinAnswered,
    PushAnswered,
    Reason,
    Sealed,
    StandbyAttached,
    StandbyDetached,
    StepDone,
    SyncerStarted,
    UnitsAsked,
    UpdateAdmitted,
    UpdateArrived,
)
from diloco.sync.fates import columns_of, in_hand
from diloco.sync.journal import MARK, units
from diloco.sync.progress import ledger_of, site_ledger
from diloco.sync.state import Vital

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.sim.site_state import Drawn, SiteState
    from diloco.sim.world import Storage, Unit, Value
    from diloco.sync.effects import LearnerEffect, OuterEffect
    from diloco.sync.events import LearnerEvent, OuterEvent
    from diloco.sync.syncer import OuterSync


@dataclass(eq=False)
class Admission(Checker):
    """A flagged update is refused, noted, or held until an operator admits it; each decision leaves a note.

    A refused update is never accepted later.  The checker trusts the figures that sites give of their updates.
    """

    mutation = "a held update is merged with those that wait"
    of_the_disk = ("usual", "held", "refused")

    usual: dict[tuple[str, int], list[Vital]] = field(default_factory=dict)
    held: dict[Id, Vital] = field(default_factory=dict)
    refused: set[tuple[str, int, int, str]] = field(default_factory=set)

    def outer(self, now_ns: int, event: OuterEvent, effects: Sequence[OuterEffect], machine: OuterSync) -> None:
        """Judge every update again, from the checker's own records."""
        if isinstance(event, UpdateArrived):
            self._arrived(event, effects)
        if isinstance(event, UpdateAdmitted) and any(isinstance(e, AnswerDone) and e.reason is None for e in effects):
            vital = self.held.pop((event.site, event.fragment, event.sequence), None)
            if vital is not None:
                self._remember(event.site, event.fragment, vital)
        for effect in effects:
            if isinstance(effect, TellFate):
                key = (effect.site, effect.fate.fragment, effect.fate.sequence)
                self.require(not effect.fate.merged or key not in self.held, key, "is merged and was held")
                self.held.pop(key, None)
            elif isinstance(effect, StartOuterStep):
                ids, held = ids_of(effect), self.held
                self.require(ids.isdisjoint(held), "held, and merged with no decision:", sorted(ids & set(held)))
                behind = [key for key in ids if any(key[:2] == each[:2] and key[2] > each[2] for each in held)]
                self.require(not behind, "merged before an earlier update that is held:", behind)

    def _arrived(self, event: UpdateArrived, effects: Sequence[OuterEffect]) -> None:
        answer = next(effect for effect in effects if isinstance(effect, AnswerPush))
        notes = [effect.what for effect in effects if isinstance(effect, Note)]
        taken = accepted(event, effects) is not None
        key = (event.site, event.fragment, event.sequence, event.digest)
        self.require(not taken or key not in self.refused, event, "was refused as an outlier and is accepted")
        if "outlier_again" in notes:
            self.require(key in self.refused, event, "was never refused as an outlier")
            return
        self.require(answer.reason is not Reason.IMPLAUSIBLE, event, "is plausible and was refused")
        self.require(answer.reason is not Reason.OUTLIER or "outlier_refused" in notes, event, "is refused silently")
        if answer.reason is Reason.OUTLIER:
            self.refused.add(key)
        if not taken and answer.reason is not Reason.OUTLIER:
            return
        vital = Vital(event.steps, event.norm, event.cosine)
        own = self.usual.get((event.site, event.fragment), [])
        others = [
            each
            for (site, fragment), window in sorted(self.usual.items())
            if fragment == event.fragment and site != event.site
            for each in window
        ]
        flagged = bool(judge(self.plan.health, vital, own, others).why)
        self.require(flagged or taken, event, "is like the others and refused as an outlier")
        policy = self.plan.health.policy_of(event.site)
        self.require(not flagged or taken == (policy != "refuse"), event, "is an outlier under", policy, "and", answer)
        self.require(not flagged or not {"update_held", "outlier_refused", "outlier_admitted"}.isdisjoint(notes), event)
        if flagged and policy == "hold":
            self.held[event.site, event.fragment, event.sequence] = vital
        elif taken:
            self._remember(event.site, event.fragment, vital)

    def _remember(self, site: str, fragment: int, vital: Vital) -> None:
        window = self.usual.setdefault((site, fragment), [])
        window.append(vital)
        del window[: -self.plan.health.history]


@dataclass(eq=False)
class OneLeader(Checker):
    """Epochs rise, a version has one digest, and no process tells anything after one with a larger (lineage, epoch)."""

    mutation = "a process does not check its lease before it tells anything"

    started: tuple[int, int] = (1, 0)
    spoke: tuple[int, int] = (1, 0)
    published: dict[tuple[int, int, int], str] = field(default_factory=dict)

    def outer(self, now_ns: int, event: OuterEvent, effects: Sequence[OuterEffect], machine: OuterSync) -> None:
        """Each start has a larger epoch."""
        if isinstance(event, SyncerStarted):
            started = (machine.state.lineage, event.epoch)
            self.require(started > self.started, "a start of (lineage, epoch)", started, "came after", self.started)
            self.started = started

    def told(self, machine: OuterSync, chain: bytes | None, effects: Sequence[OuterEffect]) -> None:
        """No process tells anything after one with a larger (lineage, epoch) has."""
        speaks = (machine.state.lineage, machine.state.epoch)
        self.require(speaks >= self.spoke, "(lineage, epoch)", speaks, "tells something after", self.spoke)
        self.spoke = speaks
        for effect in effects:
            if isinstance(effect, PublishVersion):
                key = (machine.state.lineage, effect.fragment, effect.version)
                before = self.published.setdefault(key, effect.digest)
                self.require(before == effect.digest, key, "was published as", before, "and now as", effect.digest)


class Replicated(Checker):
    """Replication "sync": every turn that is told is in the standby's journal, unless an operator has detached it."""

    mutation = "the syncer tells effects of a turn that the standby lacks"

    def __post_init__(self) -> None:
        self.there: set[bytes] = set()
        self.alone = self.will_be_alone = self.plan.replication is None

    def replicated(self, storage: Storage, journal: str, unit: Unit) -> None:
        """A standby acknowledges only what would survive a power cut there."""
        self.require(
            storage.is_safe(journal, unit.raw), "the standby acknowledges a frame that is not durable in", journal
        )
        for name, data in unit.payloads:
            self.require(storage.is_safe(f"spool/{name}", data), "the standby acknowledges a frame without", name)
        self.there.add(unit.chain)

    def resumed(self, storage: Storage, journal: str, chain: bytes) -> None:
        """A restarted standby acknowledges what it has on disk when it reports its place."""
        at, data = 0, storage.read(journal)
        for unit in units(data):
            if unit.kind != MARK and unit.chain == chain:
                durable = storage.is_safe(journal, data[at : unit.end])
                self.require(durable, "the standby resumes from a frame that is not durable in", journal)
                self.there.add(chain)
            at = unit.end

    def stands_alone(self) -> None:
        """A detach or a promotion counts at once, before it is in any journal."""
        self.alone = self.will_be_alone = True

    def outer(self, now_ns: int, event: OuterEvent, effects: Sequence[OuterEffect], machine: OuterSync) -> None:
        """Track whether the syncer waits for a standby."""
        if isinstance(event, StandbyAttached | StandbyDetached):
            self.will_be_alone = isinstance(event, StandbyDetached)

    def recovered(self, machine: OuterSync) -> None:
        """A detach that did not reach the journal is forgotten."""
        self.alone = self.will_be_alone = self.plan.replication is None or machine.state.detached

    def told(self, machine: OuterSync, chain: bytes | None, effects: Sequence[OuterEffect]) -> None:
        """The turn must be among those that the standby has acknowledged."""
        if chain is not None and not self.alone and self.plan.replication and self.plan.replication.mode == "sync":
            self.require(chain in self.there, "told without the standby:", list(effects)[:3])
        self.alone = self.will_be_alone  # A detach or attach counts from the next turn on.

    def told_with_an_heir(self, chain: bytes) -> None:
        """The heir, which may take over by itself, has everything that was told."""
        self.require(chain in self.there, "told while the lease names an heir that lacks it")


Place = tuple[str, int, int]
"""(site, unit, index of the sequence in the unit)."""


class CountedOnce(Checker):
    """A unit is merged once all its sequences are, in every fragment; merged again, it counts as a repeat.

    The record comes from the data that each site really trained on, which no site reports to the syncer.
    """

    mutation = "a unit counts as soon as one fragment has it"
    of_the_disk = ("times", "listed")

    def __post_init__(self) -> None:
        self.drawn: dict[tuple[str, int, int], list[tuple[int, Drawn | None]]] = {}
        self.carried: dict[tuple[int, int, str], list[tuple[int, Drawn]]] = {}
        self.times: list[dict[Place, int]] = [{} for _ in range(self.plan.options.num_fragments)]
        self.listed: dict[str, set[int]] = {}

    def sealed(self, site: SiteState, seal: Seal, gradient: Value) -> None:
        """Record which sequences the update was trained on."""
        if self.plan.options.unit_sequences:
            key = (site.name, seal.fragment, seal.sequence)
            self.drawn[key] = [(at, site.drawn.get(at)) for start, stop in seal.spans for at in range(start, stop)]

    def learner(self, site: SiteState, event: LearnerEvent, effects: Sequence[LearnerEffect]) -> None:
        """The update has its digest now: record its sequences by that digest."""
        key = (site.name, event.fragment, event.sequence) if isinstance(event, Sealed) else None
        if isinstance(event, Sealed) and key in self.drawn:
            pairs = self.drawn.pop(key)
            named = all(drawn and not drawn[1] for _, drawn in pairs)
            self.require(named, key, "names sequences not drawn, or drawn again:", pairs)
            self.carried[event.fragment, event.sequence, event.digest] = [(at, drawn) for at, drawn in pairs if drawn]

    def outer(self, now_ns: int, event: OuterEvent, effects: Sequence[OuterEffect], machine: OuterSync) -> None:
        """Count merged sequences, and check the units that are leased."""
        if machine.state.units is None:
            return
        for effect in effects:
            if isinstance(effect, TellFate) and effect.fate.merged:
                fate, unit = effect.fate, self.plan.options.unit_sequences
                times = self.times[fate.fragment]
                for at, (number, _) in self.carried[fate.fragment, fate.sequence, fate.digest]:
                    key = (effect.site, number, at % unit)
                    times[key] = times.get(key, 0) + 1
            elif isinstance(effect, AnswerUnits) and isinstance(event, UnitsAsked):
                self._leased(event.site, effect)

    def told(self, machine: OuterSync, chain: bytes | None, effects: Sequence[OuterEffect]) -> None:
        """The machine counts only merged units, and counts all repeats."""
        units = machine.state.units
        if units is None or chain is None or not effects:
            return
        found = self._complete()
        counted = {unit for start, stop in units.over for unit in range(start, stop)}
        wrong = counted - set(found)
        self.require(len(wrong) <= units.partly, "counted as merged, but not merged:", sorted(wrong))
        again = sum(times - 1 for times in found.values())
        self.require(again <= units.repeated, again, "were merged again, and", units.repeated, "are counted")

    def _complete(self) -> dict[int, int]:
        """Return how often single sites merged each unit as a whole; parts merged by other sites do not count."""
        offsets, found = range(self.plan.options.unit_sequences), dict[int, int]()
        for site, number in {(site, number) for site, number, _ in self.times[0]}:
            least = min(times.get((site, number, at), 0) for times in self.times for at in offsets)
            found[number] = found.get(number, 0) + least
        return {number: times for number, times in found.items() if times}

    def _leased(self, site: str, told: AnswerUnits) -> None:
        """No part of a unit is merged when a site leases it for the first time."""
        before = self.listed.setdefault(site, set())
        begun = {number for times in self.times for _, number, _ in times}
        for start, count in told.pieces:
            new = set(range(start, start + count)) - before if start != SKIPPED else set()
            self.require(not new & begun, site, "leases", sorted(new & begun), "of which parts are merged")
            before |= new


class Balanced(Checker):
    """Every unit that was ever leased is in exactly one place: merged, partly merged, in hand or given back."""

    mutation = "units that were given back stay so when their site comes back"

    def told(self, machine: OuterSync, chain: bytes | None, effects: Sequence[OuterEffect]) -> None:
        """No unit is in two places."""
        units = machine.state.units
        if units is None or chain is None or not effects:
            return
        found = columns_of(machine)
        self.require(found.balanced(), "after", effects, found)
        held = in_hand(machine)
        for name, pair in {
            "merged and given back": (units.over, units.free),
            "merged and in hand": (units.over, held),
            "given back and in hand": (units.free, held),
            "begun and given back": (units.begun, units.free),
            "begun and merged": (units.begun, units.over),
        }.items():
            self.require(not common(*pair), "after", effects, name, common(*pair))
        self.require(size(units.begun) <= sum(h.end - h.first for h in units.holders.values()), "begun:", units.begun)

    def at_end(self, machine: OuterSync, sites: Sequence[SiteState]) -> None:
        """When all sites have left, no unit is in hand."""
        if machine.state.units is not None and all(site.status != "live" for site in machine.state.sites.values()):
            found = columns_of(machine)
            silent = any(site.status == "silent" for site in machine.state.sites.values())
            self.require(silent or found.in_hand == 0, "the run has ended, and units are in hand:", found)


@dataclass(eq=False)
class Ledger(Checker):
    """Invariant 10: every token a site has read is in exactly one place, and none becomes "lost" without a cause."""

    mutation = "an update that is refused takes its tokens with it"

    processed: dict[str, int] = field(default_factory=dict)
    before: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """By process and fragment: the tokens lost, and the number of orphans, before the event."""

    def process_started(self, site: SiteState) -> None:
        """A new process begins with the counts of its odometer and checkpoint."""
        self.processed[site.name] = site.machine.state.tokens_processed
        self._remember(site)

    def _remember(self, site: SiteState) -> None:
        self.before[site.name] = [(part.tokens_lost, len(part.orphans)) for part in site.machine.state.fragments]

    def learner(self, site: SiteState, event: LearnerEvent, effects: Sequence[LearnerEffect]) -> None:
        """Check the sums of every fragment and of the site."""
        state = site.machine.state
        if isinstance(event, StepDone):
            self.processed[site.name] += event.tokens
        elif isinstance(event, JoinAnswered):
            # The syncer may know work of an earlier process that the site has forgotten: its count rises then.
            self.processed[site.name] = max(self.processed[site.name], *(part.accounted() for part in state.fragments))
        self.require(
            state.tokens_processed == self.processed[site.name],
            f"{site.name} read {self.processed[site.name]} tokens and counts {state.tokens_processed}",
        )
        for index, part in enumerate(state.fragments):
            ledger = ledger_of(state, index)
            counts = (ledger.merged, ledger.refused, ledger.in_flight, ledger.unsent, ledger.overwritten, ledger.lost)
            self.require(ledger.balanced() and min(counts) >= 0, site.name, f"fragment {index} after", event, ledger)
            lost, orphans = self.before[site.name][index]
            explained = isinstance(event, JoinAnswered) or len(part.orphans) < orphans
            self.require(part.tokens_lost == lost or explained, site.name, "lost tokens at", event, ledger)
        if isinstance(event, StepDone | JoinAnswered):  # Derived from the fragments' ledgers: rare checks suffice.
            whole = site_ledger(state)
            self.require(whole.balanced(), site.name, whole)
        self._remember(site)


class Carried(Checker):
    """Invariant 10: an update carries the progress of exactly the tokens that it declares."""

    mutation = "an update is measured without the updates in flight"

    def sealed(self, site: SiteState, seal: Seal, gradient: Value) -> None:
        """The second number of every value counts tokens."""
        self.require(-gradient[1] == seal.tokens, site.name, seal, "carries the progress of", -gradient[1], "tokens")
        self.require(site.base[seal.fragment][0] == seal.base_version, site.name, seal, "is not measured from its base")


class Cold(Checker):
    """Invariant 16: the values that a site had before its first version are never part of an update."""

    mutation = "a new site continues from its own initialisation instead of the version it took"

    def sealed(self, site: SiteState, seal: Seal, gradient: Value) -> None:
        """The third number marks values that come from no version."""
        self.require(gradient[2] == 0 and seal.base_version >= 0, site.name, seal, "carries a cold start", gradient)


@dataclass(eq=False)
class Independence(Checker):
    """Invariant 14: between two steps a site stands still only while it is frozen, or in lock-step."""

    mutation = "a site waits after each update until its fate is known"

    ended_ns: dict[str, int] = field(default_factory=dict)

    def step_begun(self, site: SiteState, step_ns: int) -> None:
        """A step begins at the instant at which the one before ended."""
        ended_ns = self.ended_ns.get(site.name)
        if ended_ns is not None and not site.plan.options.lock_step:
            idle_ns = site.heap.now_ns - ended_ns
            self.require(idle_ns == 0, site.name, "stood still for", idle_ns, "ns before step", site.step + 1)

    def stepped(self, site: SiteState, step_ns: int, learned: Sequence[int]) -> None:
        """A step ends."""
        self.ended_ns[site.name] = site.heap.now_ns


@dataclass(eq=False)
class Farewell(Checker):
    """A site stops for a valid reason: no answer contradicts an earlier one, and a site leaves with nothing unsent."""

    mutation = "the last step before a leave is not sent"

    stopped: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)

    def learner(self, site: SiteState, event: LearnerEvent, effects: Sequence[LearnerEffect]) -> None:
        """Check how a site stops and leaves."""
        refused = isinstance(event, PushAnswered) and event.reason is Reason.FINISHED
        told = isinstance(event, FinalAnnounced) and event.ending is Ending.FINISHED and event.versions
        if refused or (told and site.plan.final):  # Nothing is merged any more, and it takes what was.
            self.finished.add(site.name)
        for effect in effects:
            if isinstance(effect, StopTraining):
                contradicted = effect.failed and ("forgotten" in effect.why or "another update" in effect.why)
                self.require(not contradicted or site.twin, site.name, "stops:", effect.why)
                self.stopped.add(site.name)
            elif isinstance(effect, Leave):
                self.require(site.name in self.stopped, site.name, "leaves and continues to train")
                self.require(site.at_rest or not site.training, site.name, "leaves in the middle of a step")
                unanswered = [part for part in site.machine.state.fragments if part.unanswered()]
                self.require(not unanswered, site.name, "leaves and waits for an answer:", unanswered)
                unsent = sum(part.unsent_tokens for part in site.machine.state.fragments)
                self.require(unsent == 0 or site.name in self.finished, site.name, "leaves", unsent, "tokens unsent")


class Final(Checker):
    """A site that ends with the final versions of a finished run holds exactly these."""

    mutation = "a site keeps at the end what the codec rounded off"

    def carried_out(self, site: SiteState, event: LearnerEvent) -> None:
        """Nothing of the site's own is in its values."""
        if site.machine.is_final():
            versions, held = site.machine.state.final_versions, [version for version, _ in site.base]
            self.require(held == versions, site.name, "ends with versions", held, "and the run with", versions)
            own = [theta for theta, (_, value) in zip(site.theta, site.base, strict=True) if theta != value]
            self.require(not own, site.name, "has beside the final versions", own)

    def at_end(self, machine: OuterSync, sites: Sequence[SiteState]) -> None:
        """They are the syncer's."""
        versions = [fragment.version for fragment in machine.state.fragments]
        for site in sites:
            if site.machine.is_final() and site.machine.state.lineage == machine.state.lineage:
                self.require(site.machine.state.final_versions == versions, site.name, "was told others than", versions)


@dataclass(eq=False)
class Cursor(Checker):
    """No process of a site reads a batch again after the update with its progress was accepted."""

    mutation = "a restarted site does not skip the batches that its accepted updates have consumed"

    consumed: dict[str, int] = field(default_factory=dict)

    def carried_out(self, site: SiteState, event: LearnerEvent) -> None:
        """The answer to a join gives the cursor of the site's accepted updates."""
        if isinstance(event, JoinAnswered):
            self.consumed[site.name] = max(standing.cursor for standing in event.standings)

    def stepped(self, site: SiteState, step_ns: int, learned: Sequence[int]) -> None:
        """A step reads one batch."""
        consumed = self.consumed.get(site.name, 0)
        self.require(site.cursor > consumed, site.name, f"reads batch {site.cursor} again: {consumed} are consumed")


class Conservation(Checker):
    """Invariant 17: all progress of a site is merged, in flight or unsent, to the last bit.

    Checked in runs that are drawn ``conserving``: no rebase then discards progress on purpose.
    """

    mutation = "an adopt forgets that the version contains an update of the site's own"

    def __post_init__(self) -> None:
        self.unsent: dict[str, list[Value]] = {}
        self.learned = [world.ZERO] * self.plan.options.num_fragments
        self.merged = [world.ZERO] * self.plan.options.num_fragments
        self.value: dict[tuple[int, str], Value] = {}

    def carry(self, site: SiteState, index: int) -> Value:
        """Return r, the unsent progress: the site's values minus its base, plus the pseudo-gradients that it holds."""
        held = [value for key, value in [*site.sent.items(), *site.sealing.items()] if key[0] == index]
        return world.plus(world.minus(site.theta[index], site.base[index][1]), world.total(held))

    def process_started(self, site: SiteState) -> None:
        """The record begins with what the checkpoint holds."""
        self.unsent[site.name] = [self.carry(site, index) for index in range(len(site.theta))]

    def stepped(self, site: SiteState, step_ns: int, learned: Sequence[int]) -> None:
        """Add the step's progress; there is no other source of it."""
        book = self.unsent[site.name]
        for index, gain in enumerate(learned):
            made = (gain, site.plan.tokens, 0)
            book[index] = world.plus(book[index], made)
            self.learned[index] = world.plus(self.learned[index], made)

    def sealed(self, site: SiteState, seal: Seal, gradient: Value) -> None:
        """The whole measured gradient leaves r."""
        book = self.unsent[site.name]
        book[seal.fragment] = world.plus(book[seal.fragment], gradient)

    def encoded(self, site: SiteState, fragment: int, digest: str, decoded: Value) -> None:
        """Record the decoded value; ``learner`` returns the codec's rounding error to r."""
        self.value[fragment, digest] = decoded

    def learner(self, site: SiteState, event: LearnerEvent, effects: Sequence[LearnerEffect]) -> None:
        """Record what an event moves between r and the in-flight list."""
        book = self.unsent[site.name]
        if isinstance(event, Sealed):
            book[event.fragment] = world.plus(book[event.fragment], site.rounded)
        for effect in effects:
            if isinstance(effect, Release):
                key = (effect.fragment, effect.sequence)
                released = site.sent.get(key, site.sealing.get(key, world.ZERO))
                book[effect.fragment] = world.minus(book[effect.fragment], released)
            elif isinstance(effect, Retake):
                book[effect.fragment] = world.ZERO

    def carried_out(self, site: SiteState, event: LearnerEvent) -> None:
        """The record equals r, and the machine's in-flight list equals the updates that the site holds."""
        if site.plan.options.adopt != "rebase":
            return
        for index, part in enumerate(site.machine.state.fragments):
            listed = [sent.sequence for sent in part.in_flight]
            held = sorted(key[1] for key in (*site.sent, *site.sealing) if key[0] == index)
            self.require(
                listed == held, site.name, f"fragment {index} after", event, "lists", listed, "and holds", held
            )
            if part.base_version >= 0:
                book, found = self.unsent[site.name][index], self.carry(site, index)
                self.require(found == book, site.name, f"fragment {index} after", event, "r is", found, "and not", book)
            else:
                self.unsent[site.name][index] = self.carry(site, index)

    def outer(self, now_ns: int, event: OuterEvent, effects: Sequence[OuterEffect], machine: OuterSync) -> None:
        """Add up the merged updates, in full."""
        for fate in (effect.fate for effect in effects if isinstance(effect, TellFate) and effect.fate.merged):
            value = self.value[fate.fragment, fate.digest]
            self.merged[fate.fragment] = world.minus(self.merged[fate.fragment], value)

    def at_end(self, machine: OuterSync, sites: Sequence[SiteState]) -> None:
        """All progress ever made equals what is merged, in flight or unsent."""
        if not self.plan.conserving:
            return
        for index in range(len(self.learned)):
            there = self.merged[index]
            for site in sites:
                part = site.machine.state.fragments[index]
                fates = {fate.sequence: fate for fate in machine.state.sites[site.site].lines[index].fates}
                there = world.plus(there, self.unsent[site.name][index])
                for sent in part.in_flight:
                    fate = fates.get(sent.sequence)
                    if sent.merged_version is None and not (fate and fate.merged and fate.digest == sent.digest):
                        there = world.minus(there, site.sent[index, sent.sequence])
            learned = self.learned[index]
            self.require(there == learned, f"of fragment {index}", learned, "was learned and", there, "is found")


@dataclass(eq=False)
class History(Checker):
    """Not an invariant: a digest over all events of a run, and the counts of fates."""

    mutation = "the network draws its delays from something else than the seed"

    fates: Counter[str] = field(default_factory=Counter)
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)
    """Two runs of one seed have the same."""

    def outer(self, now_ns: int, event: OuterEvent, effects: Sequence[OuterEffect], machine: OuterSync) -> None:
        """Add the syncer's event to the digest, and count its fates."""
        self.digest.update(f"{now_ns} {event} {effects}".encode())
        for effect in effects:
            if isinstance(effect, TellFate):
                self.fates[effect.fate.reason.value if effect.fate.reason else "merged"] += 1

    def learner(self, site: SiteState, event: LearnerEvent, effects: Sequence[LearnerEffect]) -> None:
        """Add the site's event to the digest."""
        self.digest.update(f"{site.heap.now_ns} {site.name} {site.theta} {event} {effects}".encode())


CHECKERS: tuple[type[Checker], ...] = (
    ExactlyOnce,
    Versions,
    Acknowledged,
    Recovery,
    Weights,
    Staleness,
    Grace,
    Merging,
    Lineages,
    Admission,
    Bounds,
    Ledger,
    Carried,
    Cold,
    Independence,
    Farewell,
    Final,
    Cursor,
    Conservation,
    OneLeader,
    Replicated,
    CountedOnce,
    Balanced,
)
