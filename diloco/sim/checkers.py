"""How a property is checked while a simulation runs: the hooks, and who calls whom.

A checker keeps its own book from what it is shown and never believes the machine's.  ``mutation`` names a change of the
product that it must notice; ``tests/sim/test_mutants.py`` makes that change and sees it noticed.


What must hold at the syncer at every event (DESIGN section 6); ``site_checkers`` has what must hold at the sites."""

from __future__ import annotations

import copy
from collections import deque
from itertools import combinations
from math import inf
from typing import TYPE_CHECKING, ClassVar

from diloco.sim import values
from diloco.sync.effects import AnswerPush, PublishVersion, StartOuterStep, TellFate
from diloco.sync.events import (
    LineageBegan,
    Outcome,
    OuterStepDone,
    OuterStepFailed,
    PushAnswered,
    SiteEvicted,
    UpdateArrived,
)
from diloco.sync.members import PROCESSES_REMEMBERED_MAX, is_gone
from diloco.sync.options import smoothed
from diloco.sync.rounds import of_its_age, raw_weight
from diloco.sync.syncer import OuterSync

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from diloco.sim.outer_disk import Kept
    from diloco.sim.site_process import SiteProcess
    from diloco.sim.values import Value
    from diloco.sim.world import OuterPlan, Storage, Unit
    from diloco.sync.effects import LearnerEffect, OuterEffect, Seal
    from diloco.sync.events import Fate, LearnerEvent, OuterEvent


class Violation(Exception):
    """Something that must hold did not; ``checker`` is who saw it."""

    def __init__(self, checker: str, text: str) -> None:
        super().__init__(f"{checker}: {text}")
        self.checker = checker


class Checker:
    """One property.  The simulator calls every hook; a checker has those that it needs."""

    name: ClassVar[str]
    mutation: ClassVar[str]
    of_the_disk: ClassVar[tuple[str, ...]] = ()
    """The attributes that are a book of what lies on the syncer's disk: a restore sets them back with it."""

    def __init__(self, plan: OuterPlan, *, conserving: bool = False) -> None:
        """``conserving``: nothing in this run throws progress away, and the outer step is the plain mean."""
        self.plan, self.conserving = plan, conserving
        self._backup: dict[str, object] = {}

    def require(self, holds: bool, *parts: object) -> None:
        """Raise ``Violation`` with ``parts`` unless it ``holds``."""
        if not holds:
            raise Violation(self.name, " ".join(str(part) for part in parts))

    def outer(self, now_ns: int, event: OuterEvent, effects: Sequence[OuterEffect], machine: OuterSync) -> None:
        """``event`` is in the journal and none of its ``effects`` was carried out yet."""

    def recovered(self, machine: OuterSync) -> None:
        """A new process of the syncer has read the disk."""

    def told(self, machine: OuterSync, chain: bytes | None, effects: Sequence[OuterEffect]) -> None:
        """A process is about to carry out ``effects``, or (no ``chain``) to answer who only asked."""

    def told_with_an_heir(self, chain: bytes) -> None:
        """The same, at an instant at which the lease of that process names a standby as heir."""

    def replicated(self, storage: Storage, journal: str, unit: Unit) -> None:
        """A standby is about to acknowledge a frame."""

    def resumed(self, storage: Storage, journal: str, chain: bytes) -> None:
        """A standby is about to ask for what follows the frame with this chain value."""

    def stands_alone(self) -> None:
        """From now on no standby is waited for: an operator has said so, or it was promoted itself."""

    def backed_up(self) -> None:
        """The syncer's disk was copied."""
        self._backup = {name: copy.deepcopy(getattr(self, name)) for name in self.of_the_disk}

    def set_back(self) -> None:
        """The syncer's disk is the copy again, and no process has read it yet."""
        for name, book in self._backup.items():
            setattr(self, name, copy.deepcopy(book))

    def restored(self, lineage: int, made: Sequence[Kept]) -> None:
        """``made`` are going to be the first versions of ``lineage``, by fragment."""

    def stored(self, effect: StartOuterStep, made: Kept) -> None:
        """An outer step was computed."""

    def process_started(self, site: SiteProcess) -> None:
        """A learner process has read its checkpoint, or begins cold."""

    def learner(self, site: SiteProcess, event: LearnerEvent, effects: Sequence[LearnerEffect]) -> None:
        """The site's machine took ``event``; its ``effects`` are not carried out yet."""

    def carried_out(self, site: SiteProcess, event: LearnerEvent) -> None:
        """The effects of ``event`` are carried out."""

    def step_begun(self, site: SiteProcess, step_ns: int) -> None:
        """An inner step begins that takes ``step_ns``."""

    def stepped(self, site: SiteProcess, step_ns: int, learned: Sequence[int]) -> None:
        """An inner step is done; the machine has not heard of it."""

    def sealed(self, site: SiteProcess, seal: Seal, gradient: Value) -> None:
        """``gradient`` was measured for ``seal``."""

    def encoded(self, site: SiteProcess, fragment: int, digest: str, decoded: Value) -> None:
        """An update is in the outbox; the syncer would decode it to ``decoded``."""

    def fetched(self, site: SiteProcess, fragment: int, version: int, value: Value) -> None:
        """A site got the ``value`` of ``version``."""

    def at_end(self, machine: OuterSync, sites: Sequence[SiteProcess]) -> None:
        """Everything is over; ``sites`` are the last processes of all sites, those that failed included."""


class Checkers(Checker):
    """All checkers of a run behind one face: each hook reaches those that have it, in order."""

    def __init__(self, checkers: Sequence[Checker]) -> None:
        self.all = tuple(checkers)
        self._outer = self._having("outer")
        self._recovered = self._having("recovered")
        self._told = self._having("told")
        self._told_with_an_heir = self._having("told_with_an_heir")
        self._replicated = self._having("replicated")
        self._restored = self._having("restored")
        self._stored = self._having("stored")
        self._process_started = self._having("process_started")
        self._learner = self._having("learner")
        self._carried_out = self._having("carried_out")
        self._step_begun = self._having("step_begun")
        self._stepped = self._having("stepped")
        self._sealed = self._having("sealed")
        self._encoded = self._having("encoded")
        self._fetched = self._having("fetched")

    def _having(self, hook: str) -> tuple[Checker, ...]:
        return tuple(each for each in self.all if getattr(type(each), hook) is not getattr(Checker, hook))

    def outer(self, now_ns: int, event: OuterEvent, effects: Sequence[OuterEffect], machine: OuterSync) -> None:
        """Tell those who have this hook."""
        for each in self._outer:
            each.outer(now_ns, event, effects, machine)

    def recovered(self, machine: OuterSync) -> None:
        """Tell those who have this hook."""
        for each in self._recovered:
            each.recovered(machine)

    def told(self, machine: OuterSync, chain: bytes | None, effects: Sequence[OuterEffect]) -> None:
        """Tell those who have this hook."""
        for each in self._told:
            each.told(machine, chain, effects)

    def told_with_an_heir(self, chain: bytes) -> None:
        """Tell those who have this hook."""
        for each in self._told_with_an_heir:
            each.told_with_an_heir(chain)

    def replicated(self, storage: Storage, journal: str, unit: Unit) -> None:
        """Tell those who have this hook."""
        for each in self._replicated:
            each.replicated(storage, journal, unit)

    def resumed(self, storage: Storage, journal: str, chain: bytes) -> None:
        """Tell all."""
        for each in self.all:
            each.resumed(storage, journal, chain)

    def stands_alone(self) -> None:
        """Tell all."""
        for each in self.all:
            each.stands_alone()

    def backed_up(self) -> None:
        """Tell all."""
        for each in self.all:
            each.backed_up()

    def set_back(self) -> None:
        """Tell all."""
        for each in self.all:
            each.set_back()

    def restored(self, lineage: int, made: Sequence[Kept]) -> None:
        """Tell those who have this hook."""
        for each in self._restored:
            each.restored(lineage, made)

    def stored(self, effect: StartOuterStep, made: Kept) -> None:
        """Tell those who have this hook."""
        for each in self._stored:
            each.stored(effect, made)

    def process_started(self, site: SiteProcess) -> None:
        """Tell those who have this hook."""
        for each in self._process_started:
            each.process_started(site)

    def learner(self, site: SiteProcess, event: LearnerEvent, effects: Sequence[LearnerEffect]) -> None:
        """Tell those who have this hook."""
        for each in self._learner:
            each.learner(site, event, effects)

    def carried_out(self, site: SiteProcess, event: LearnerEvent) -> None:
        """Tell those who have this hook."""
        for each in self._carried_out:
            each.carried_out(site, event)

    def step_begun(self, site: SiteProcess, step_ns: int) -> None:
        """Tell those who have this hook."""
        for each in self._step_begun:
            each.step_begun(site, step_ns)

    def stepped(self, site: SiteProcess, step_ns: int, learned: Sequence[int]) -> None:
        """Tell those who have this hook."""
        for each in self._stepped:
            each.stepped(site, step_ns, learned)

    def sealed(self, site: SiteProcess, seal: Seal, gradient: Value) -> None:
        """Tell those who have this hook."""
        for each in self._sealed:
            each.sealed(site, seal, gradient)

    def encoded(self, site: SiteProcess, fragment: int, digest: str, decoded: Value) -> None:
        """Tell those who have this hook."""
        for each in self._encoded:
            each.encoded(site, fragment, digest, decoded)

    def fetched(self, site: SiteProcess, fragment: int, version: int, value: Value) -> None:
        """Tell those who have this hook."""
        for each in self._fetched:
            each.fetched(site, fragment, version, value)

    def at_end(self, machine: OuterSync, sites: Sequence[SiteProcess]) -> None:
        """Tell those who have this hook."""
        for each in self.all:
            each.at_end(machine, sites)


EVENTS_OF_A_TURN = 8
"""No more are usual."""
Id = tuple[str, int, int]
"""(site, fragment, sequence) of an accepted update."""


def accepted(event: OuterEvent, effects: Sequence[OuterEffect]) -> UpdateArrived | None:
    """``event`` if it is an update that was taken in."""
    if isinstance(event, UpdateArrived):
        for effect in effects:
            if isinstance(effect, AnswerPush):
                return event if effect.outcome is Outcome.ACCEPTED else None
    return None


def ids_of(step: StartOuterStep) -> set[Id]:
    """The updates that an outer step merges."""
    return {(part.site, step.fragment, update.sequence) for part in step.contributions for update in part.updates}


class ExactlyOnce(Checker):
    """Invariant 9: a sequence is accepted once, merged at most once, and gets exactly one fate."""

    name = "exactly_once"
    mutation = "an update that was accepted before is admitted again"
    of_the_disk = ("accepted", "fates", "under_way")

    def __init__(self, plan: OuterPlan, *, conserving: bool = False) -> None:
        super().__init__(plan, conserving=conserving)
        self.accepted: dict[Id, str] = {}
        self.fates: dict[Id, Fate] = {}
        self.under_way: dict[int, StartOuterStep] = {}

    def outer(self, now_ns: int, event: OuterEvent, effects: Sequence[OuterEffect], machine: OuterSync) -> None:
        """Follow every update from its acceptance to its fate."""
        del now_ns, machine
        merged: set[Id] = set()
        if isinstance(event, LineageBegan):
            self.under_way.clear()
        elif isinstance(event, OuterStepDone):
            merged = ids_of(self.under_way.pop(event.fragment))
        elif isinstance(event, OuterStepFailed):
            self.under_way.pop(event.fragment)
        update = accepted(event, effects)
        if update is not None:
            key = (update.site, update.fragment, update.sequence)
            self.require(key not in self.accepted, key, "was accepted twice")
            self.accepted[key] = update.digest
        for effect in effects:
            if isinstance(effect, TellFate):
                self._decided(effect, merged)
            elif isinstance(effect, StartOuterStep):
                self._starting(effect)
        self.require(not merged, "merged and not told:", sorted(merged))

    def _starting(self, effect: StartOuterStep) -> None:
        again = self.under_way.get(effect.fragment)
        self.require(again in (None, effect), "an outer step was", again, "and is now", effect)
        self.under_way[effect.fragment] = effect
        self.require(bool(effect.contributions), "a version is made of nothing")
        for part in effect.contributions:
            for update in part.updates:
                key = (part.site, effect.fragment, update.sequence)
                self.require(self.accepted.get(key) == update.digest, key, "is merged and was not accepted")
                self.require(key not in self.fates, key, "is merged and had", self.fates.get(key))

    def _decided(self, effect: TellFate, merged: set[Id]) -> None:
        fate = effect.fate
        key = (effect.site, fate.fragment, fate.sequence)
        self.require(key not in self.fates, key, "has", self.fates.get(key), "and then", fate)
        self.require(self.accepted.get(key) == fate.digest, key, "has a fate and was not accepted")
        self.require(fate.merged == (key in merged), key, "is told", fate, "and merged was", sorted(merged))
        merged.discard(key)
        self.fates[key] = fate

    def at_end(self, machine: OuterSync, sites: Sequence[SiteProcess]) -> None:
        """Once the run has ended every accepted update has its fate, and its site was told or is gone."""
        lost = sorted(set(self.accepted) - set(self.fates))
        self.require(not lost, "the run has ended and these have no fate:", lost)
        for site in sites:
            if site.machine.state.lineage != machine.state.lineage:
                continue  # It ended before the run was restored.
            for index, part in enumerate(site.machine.state.fragments):
                # By number: what a process on a copy of the disk has sent under one of these counts as well, until the
                # site hears of its fate, sees by the digest that it was outrun, and joins again.
                waiting = {s.sequence for s in part.in_flight if s.merged_version is None and not s.outrun}
                waiting |= {orphan.sequence for orphan in part.orphans}
                fates = [self.fates.get((site.site, index, sequence)) for sequence in waiting]
                known = sum(fate.tokens for fate in fates if fate is not None and fate.merged)
                member = machine.state.sites.get(site.site)
                there = member.lines[index].tokens_merged if member else 0
                fenced = member is not None and member.incarnation != site.machine.state.incarnation
                self.require(
                    fenced or part.tokens_merged + known == there,
                    f"{site.site} counts {part.tokens_merged} + {known} merged tokens of {index}, the syncer {there}",
                )


class Versions(Checker):
    """Invariant 9: versions rise by one, are announced as they rise, and (lineage, version) never goes back."""

    name = "versions"
    mutation = "a restarted syncer begins from the version before its newest"
    of_the_disk = ("version",)

    def __init__(self, plan: OuterPlan, *, conserving: bool = False) -> None:
        super().__init__(plan, conserving=conserving)
        self.version = [0] * plan.options.num_fragments
        self.based: dict[tuple[str, int], tuple[int, int]] = {}

    def outer(self, now_ns: int, event: OuterEvent, effects: Sequence[OuterEffect], machine: OuterSync) -> None:
        """Exactly the outer step that is done is announced."""
        del now_ns, machine
        published = [(effect.fragment, effect.version) for effect in effects if isinstance(effect, PublishVersion)]
        expected = []
        if isinstance(event, OuterStepDone):
            self.version[event.fragment] += 1
            expected = [(event.fragment, self.version[event.fragment])]
        elif isinstance(event, LineageBegan):
            self.version = [version + 1 for version in self.version]
            expected = list(enumerate(self.version))
        self.require(published == expected, "published", published, "and not", expected)

    def told(self, machine: OuterSync, chain: bytes | None, effects: Sequence[OuterEffect]) -> None:
        """At the end of a turn the machine has the versions of the book."""
        del chain, effects
        self.recovered(machine)

    def carried_out(self, site: SiteProcess, event: LearnerEvent) -> None:
        """The base of a process is never one of before."""
        del event
        for index, part in enumerate(site.machine.state.fragments):
            if part.base_version >= 0:
                now = (site.machine.state.lineage, part.base_version)
                before = self.based.get((site.name, index), now)
                self.require(now >= before, site.name, f"fragment {index} stood on", before, "and now on", now)
                self.based[site.name, index] = now

    def recovered(self, machine: OuterSync) -> None:
        """A restart changes no version."""
        found = [fragment.version for fragment in machine.state.fragments]
        self.require(found == self.version, "versions are", found, "and should be", self.version)


class Acknowledged(Checker):
    """Invariant 9: what a site was told is accepted is there after any crash of the syncer."""

    name = "acknowledged"
    mutation = "the syncer answers before the record is synced"
    of_the_disk = ("acked",)

    def __init__(self, plan: OuterPlan, *, conserving: bool = False) -> None:
        super().__init__(plan, conserving=conserving)
        self.acked: dict[tuple[str, int], int] = {}
        self.lineage = 1

    def restored(self, lineage: int, made: Sequence[Kept]) -> None:
        """What is acknowledged from now on is known in this lineage."""
        del made
        self.lineage = lineage

    def learner(self, site: SiteProcess, event: LearnerEvent, effects: Sequence[LearnerEffect]) -> None:
        """Remember the last sequence of a fragment that its site was told is accepted."""
        del effects
        answered = isinstance(event, PushAnswered) and site.machine.state.lineage == self.lineage
        if isinstance(event, PushAnswered) and answered and event.outcome in (Outcome.ACCEPTED, Outcome.DUPLICATE):
            key = (site.site, event.fragment)
            self.acked[key] = max(self.acked.get(key, 0), event.sequence)

    def recovered(self, machine: OuterSync) -> None:
        """The watermark has not fallen behind what was told; who follows each update to its fate is ExactlyOnce."""
        for (name, index), sequence in self.acked.items():
            member = machine.state.sites.get(name)
            watermark = member.lines[index].watermark if member else 0
            self.require(watermark >= sequence, name, index, sequence, "was acknowledged; the watermark is", watermark)


class Recovery(Checker):
    """Invariant 11 (a): after recovery the state is that of a machine that has applied the same journal."""

    name = "recovery"
    mutation = "a recovered syncer does not know what was merging"
    of_the_disk = ("twin", "made")

    def __init__(self, plan: OuterPlan, *, conserving: bool = False) -> None:
        super().__init__(plan, conserving=conserving)
        self.twin = OuterSync(plan.options)
        self.made: dict[tuple[int, int], Kept] = {}

    def outer(self, now_ns: int, event: OuterEvent, effects: Sequence[OuterEffect], machine: OuterSync) -> None:
        """Feed the twin, which never crashes."""
        found = self.twin.handle(event, now_ns)
        self.require(found == effects, "after", event, "the twin says", found, "and the machine", effects)

    def recovered(self, machine: OuterSync) -> None:
        """Nothing differs."""
        self.require(machine.state == self.twin.state, "recovered", machine.state, "and not", self.twin.state)

    def stored(self, effect: StartOuterStep, made: Kept) -> None:
        """An outer step that is done again gives the same bits."""
        before = self.made.setdefault((effect.fragment, effect.version), made)
        self.require(before == made, effect, "gave", before, "and then", made)

    def at_end(self, machine: OuterSync, sites: Sequence[SiteProcess]) -> None:
        """The machine that went through all crashes and the twin that went through none are the same."""
        del sites
        self.recovered(machine)


class Weights(Checker):
    """Invariant 10: the weights of a merge sum to 1 and are in proportion to the rule's, of what an update holds, or,
    where there are shares, of what is usual at its site.

    What is weighed is a site, with all its updates, or an update, with the age of its own base.
    A step's share is the usual weight of its sites over that of its sites and all others that it could have had.
    """

    name = "weights"
    mutation = "weights are not divided by their sum, updates of a site are one, or a share counts who is not there"
    of_the_disk = ("usual", "under_way")

    def __init__(self, plan: OuterPlan, *, conserving: bool = False) -> None:
        super().__init__(plan, conserving=conserving)
        self.work: dict[Id, tuple[int, int]] = {}
        self.usual: dict[tuple[str, int], tuple[int, int]] = {}
        self.under_way: dict[int, tuple[set[Id], float, list[float]]] = {}
        self.awaited: list[deque[set[str]]] = [
            deque([set()], EVENTS_OF_A_TURN) for _ in range(plan.options.num_fragments)
        ]

    def outer(self, now_ns: int, event: OuterEvent, effects: Sequence[OuterEffect], machine: OuterSync) -> None:
        """Weigh every contribution again."""
        del now_ns
        if isinstance(event, OuterStepDone | OuterStepFailed):
            ids, *_ = self.under_way.pop(event.fragment, (set(), 1.0, []))
            for site, index, sequence in sorted(ids) if isinstance(event, OuterStepDone) else ():
                now, before = self.work[site, index, sequence], self.usual.get((site, index), (0, 0))
                tokens, steps = (min(new, 2 * old) if old else new for new, old in zip(now, before, strict=True))
                self.usual[site, index] = (smoothed(before[0], tokens), smoothed(before[1], steps))
        elif isinstance(event, LineageBegan):
            self.under_way.clear()
        update = accepted(event, effects)
        if update is not None:
            self.work[update.site, update.fragment, update.sequence] = (update.tokens, update.steps)
        for effect in effects:
            if isinstance(effect, StartOuterStep):
                self._check(effect, machine)
        for index, lately in enumerate(self.awaited):
            lately.append({*machine.state.awaited(index)})

    def _check(self, step: StartOuterStep, machine: OuterSync) -> None:
        by_update = self.plan.options.merge_by == "update"
        terms = [(part.site, part.updates[0].sequence if by_update else 0) for part in step.contributions]
        whole = not by_update or all(len(part.updates) == 1 for part in step.contributions)
        self.require(whole and len(set(terms)) == len(terms), "what is weighed is", step.contributions)
        found = [part.weight for part in step.contributions]
        self.require(abs(sum(found) - 1) < 1e-12, "weights", found, "sum to", sum(found))
        told, before = (ids_of(step), step.share, found), self.under_way.get(step.fragment)
        if before is not None:  # Another process does it again, when others may be there.
            self.require(told == before, "it is", told, "again and was", before)
            return
        self.under_way[step.fragment] = told
        wanted = list(self._wanted(step, machine))
        near = any(
            abs(share - step.share) < 1e-12
            and all(abs(weight - each / sum(raw)) < 1e-12 for weight, each in zip(found, raw, strict=True))
            for raw, share in wanted
        )
        self.require(near, "weights are", found, "and the share", step.share, "and should be of", wanted)
        self.require(0 < step.share <= 1, "the share is", step.share)

    def _wanted(self, step: StartOuterStep, machine: OuterSync) -> Iterator[tuple[list[float], float]]:
        """What the weights, before they sum to 1, and the share may be: the state is that after all events of a turn,
        of which one may have closed the round while another made a site come or go."""
        options, index, parts = self.plan.options, step.fragment, step.contributions
        aged = [of_its_age(step.version - 1 - part.base_version, options.staleness_power) for part in parts]
        work = [[self.work[part.site, index, each.sequence] for each in part.updates] for part in parts]
        if not options.share_weighted:
            raw = [raw_weight(options.weights, sum(t for t, _ in each), sum(s for _, s in each)) for each in work]
            yield [weight * age for weight, age in zip(raw, aged, strict=True)], 1.0
            return
        usual = {site: raw_weight(options.weights, *work) for (site, of), work in self.usual.items() if of == index}
        firsts = {part.site: raw_weight(options.weights, *each[0]) for part, each in zip(parts, work, strict=True)}
        lately = [{*machine.state.awaited(index)}, *self.awaited[index]]
        unsure = sorted(set.union(*lately) - {*firsts})
        for some in (each for count in range(len(unsure) + 1) for each in combinations(unsure, count)):
            known = {name: usual[name] for name in (*firsts, *some) if name in usual}
            most = max(known.values(), default=inf)
            known = {name: min(first, most) for name, first in firsts.items()} | known
            mean, merged = sum(known.values()) / len(known), [known[name] for name in firsts]
            others = sum(known.get(name, mean) for name in some)
            raw = [weight * age for weight, age in zip(merged, aged, strict=True)]
            yield raw, sum(merged) / (sum(merged) + others)


class Staleness(Checker):
    """Nothing older than the bound is merged, judged when the round closes."""

    name = "staleness"
    mutation = "updates are judged by a laxer bound than the run's"

    def __init__(self, plan: OuterPlan, *, conserving: bool = False) -> None:
        super().__init__(plan, conserving=conserving)
        self.base: dict[Id, int] = {}
        self.worst = 0

    def outer(self, now_ns: int, event: OuterEvent, effects: Sequence[OuterEffect], machine: OuterSync) -> None:
        """Look at the base of everything that is merged."""
        del now_ns, machine
        update = accepted(event, effects)
        if update is not None:
            self.base[update.site, update.fragment, update.sequence] = update.base_version
        for effect in effects:
            if isinstance(effect, StartOuterStep):
                for key in sorted(ids_of(effect)):
                    staleness = effect.version - 1 - self.base[key]
                    self.worst = max(self.worst, staleness)
                    self.require(staleness <= self.plan.options.staleness_max, key, "is merged at staleness", staleness)


class Grace(Checker):
    """Invariant 14: once the quorum is met a round waits no longer than the grace, and for nobody when all are here."""

    name = "grace"
    mutation = "the grace is twice as long as allowed"
    of_the_disk = ("met_ns",)

    def __init__(self, plan: OuterPlan, *, conserving: bool = False) -> None:
        super().__init__(plan, conserving=conserving)
        self.met_ns: dict[int, tuple[int, int, int]] = {}
        """When the round of a fragment was opened, and when its quorum was met."""
        self.live: list[str] = []
        """After the turn before."""

    def outer(self, now_ns: int, event: OuterEvent, effects: Sequence[OuterEffect], machine: OuterSync) -> None:
        """A round that stands open although its quorum was met long ago waits too long."""
        del effects
        if isinstance(event, SiteEvicted):  # What it takes along may have met a quorum that another meets anew at once.
            self.met_ns.clear()
        options, state = self.plan.options, machine.state
        for index, fragment in enumerate(state.fragments):
            arrived = set(state.arrived(index))
            if fragment.round is None:
                met = False
            elif options.round_updates:
                most = max(1, len(state.awaited(index))) * options.updates_in_flight_max
                met = len(state.waiting(index)) >= min(options.round_updates, most)
            elif options.quorum == "all":
                met = len(arrived) >= options.quorum_min and arrived >= set(fragment.round.members)
            else:
                met = isinstance(options.quorum, int) and len(arrived) >= max(options.quorum, options.quorum_min)
            if not met:
                self.met_ns.pop(index, None)
                continue
            opened_ns = fragment.round.opened_ns if fragment.round else 0
            if self.met_ns.get(index, (-1, 0, 0))[0] != opened_ns:
                self.met_ns[index] = (opened_ns, now_ns, self._bound_ns(machine, index))
            waited_ns, grace_ns = now_ns - self.met_ns[index][1], self.met_ns[index][2]
            if fragment.merging_since_ns is None:
                self.require(waited_ns < grace_ns, f"fragment {index} waits since {waited_ns} ns with", sorted(arrived))
                self.require(not arrived >= set(state.awaited(index)), f"fragment {index} waits although all are here")
        self.live = state.live()

    def _bound_ns(self, machine: OuterSync, index: int) -> int:
        """Of the grace that begins now: what is set, or its share of the fastest live site's period.

        The state is that after all events of a turn.  Where they made sites come or go, the quorum may have been met
        while any of those was there.
        """
        options, periods_ns, live = self.plan.options, [], {*machine.state.live()}
        fastest = min if live == {*self.live} else max
        for site in (site for name, site in machine.state.sites.items() if name in live.union(self.live)):
            line = site.lines[index]
            periods_ns.append((line.usual_steps or sum([first.steps for first in line.undecided[:1]])) * site.step_ns)
        share_ns = fastest([each for each in periods_ns if each], default=0) * options.grace_period_percent // 100
        return 0 if options.round_updates else max(options.grace_ns, share_ns * (options.grace == "adaptive"))


class Merging(Checker):
    """Each version is the outer step of the one before with exactly its updates, and all sites get the same values."""

    name = "same_versions"
    mutation = "the syncer publishes a version without what its codec rounded off"
    of_the_disk = ("theta", "newest")

    def __init__(self, plan: OuterPlan, *, conserving: bool = False) -> None:
        super().__init__(plan, conserving=conserving)
        self.value: dict[tuple[int, str], Value] = {}
        self.theta = {(index, 0): (values.ZERO, values.ZERO) for index in range(plan.options.num_fragments)}
        self.published = {(1, index, 0): values.ZERO for index in range(plan.options.num_fragments)}
        """By lineage, fragment and version: who has not joined again gets what it gets from the lineage before."""
        self.newest = [0] * plan.options.num_fragments
        self.lineage = 1

    def restored(self, lineage: int, made: Sequence[Kept]) -> None:
        """A lineage begins with whole versions."""
        self.lineage = lineage
        for index, kept in enumerate(made):
            self.newest[index] += 1
            self.theta[index, self.newest[index]] = (kept.theta, kept.momentum)
            self.published[lineage, index, self.newest[index]] = kept.published

    def outer(self, now_ns: int, event: OuterEvent, effects: Sequence[OuterEffect], machine: OuterSync) -> None:
        """A version counts when its record is there; one that was only computed may be computed again."""
        del now_ns, effects, machine
        if isinstance(event, OuterStepDone):
            self.newest[event.fragment] = event.version

    def encoded(self, site: SiteProcess, fragment: int, digest: str, decoded: Value) -> None:
        """Remember what each update says."""
        del site
        self.value[fragment, digest] = decoded

    def stored(self, effect: StartOuterStep, made: Kept) -> None:
        """Make the version from the sites' own words."""
        index, version = effect.fragment, effect.version
        contributions = [
            (part.weight, [self.value[index, update.digest] for update in part.updates])
            for part in effect.contributions
        ]
        theta, momentum = self.theta[index, version - 1]
        merged = values.merged(contributions)
        expected = values.outer_step(theta, momentum, merged, self.plan.rule, effect.share)
        self.require((made.theta, made.momentum) == expected, effect, "made", made, "and not", expected)
        self.theta[index, version] = expected
        self.published[self.lineage, index, version] = made.published

    def fetched(self, site: SiteProcess, fragment: int, version: int, value: Value) -> None:
        """Compare what a site has followed to with what was published."""
        published = self.published[site.machine.state.lineage, fragment, version]
        self.require(
            value == published, site.name, "has", value, f"of fragment {fragment} version {version} and not", published
        )


class Lineages(Checker):
    """Nothing that was measured before the run was restored is taken in afterwards."""

    name = "lineages"
    mutation = "a site goes on after a restore as if the syncer had only been away"

    def __init__(self, plan: OuterPlan, *, conserving: bool = False) -> None:
        super().__init__(plan, conserving=conserving)
        self.sealing: dict[tuple[str, int], int] = {}
        self.measured: dict[tuple[int, str], int] = {}

    def sealed(self, site: SiteProcess, seal: Seal, gradient: Value) -> None:
        """One update of a fragment is encoded at a time."""
        del gradient
        self.sealing[site.name, seal.fragment] = site.machine.state.lineage

    def encoded(self, site: SiteProcess, fragment: int, digest: str, decoded: Value) -> None:
        """Remember the lineage of the base."""
        del decoded
        self.measured[fragment, digest] = self.sealing[site.name, fragment]

    def outer(self, now_ns: int, event: OuterEvent, effects: Sequence[OuterEffect], machine: OuterSync) -> None:
        """Look at everything that is taken in."""
        del now_ns
        update = accepted(event, effects)
        if update is not None:
            measured = self.measured[update.fragment, update.digest]
            self.require(measured == machine.state.lineage, update, "is of lineage", measured)


class Bounds(Checker):
    """Every collection has its bound, at the syncer and at the sites."""

    name = "bounds"
    mutation = "more updates may wait than the run allows"

    def outer(self, now_ns: int, event: OuterEvent, effects: Sequence[OuterEffect], machine: OuterSync) -> None:
        """Count what the outer machine remembers."""
        del now_ns, event, effects
        options = self.plan.options
        sites = [name for name, site in machine.state.sites.items() if not is_gone(site)]
        self.require(len(sites) <= options.sites_max, "sites:", sites)
        for name, site in machine.state.sites.items():
            self.require(len(site.superseded) <= PROCESSES_REMEMBERED_MAX, name, "superseded:", len(site.superseded))
            for line in site.lines:
                self.require(
                    len(line.undecided) <= options.updates_in_flight_max, name, "waiting:", len(line.undecided)
                )
                self.require(len(line.vitals) <= machine.state.health.history, name, "vitals:", len(line.vitals))
                self.require(len(line.fates) <= options.fates_kept_max, name, "fates:", len(line.fates))

    def carried_out(self, site: SiteProcess, event: LearnerEvent) -> None:
        """Count what a site holds."""
        del event
        options = self.plan.options
        undecided_max = site.plan.options.updates_in_flight_max
        for part in site.machine.state.fragments:
            self.require(len(part.undecided()) <= undecided_max, site.name, "undecided:", len(part.undecided()))
            held_max = undecided_max * (options.staleness_max + 2)
            self.require(len(part.in_flight) <= held_max, site.name, "in flight:", len(part.in_flight))
            self.require(len(part.orphans) <= options.updates_in_flight_max, site.name, "orphans:", len(part.orphans))
        self.require(len(site.disk.outbox) <= len(site.theta), site.name, "outbox:", sorted(site.disk.outbox))
