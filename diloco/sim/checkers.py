"""The base of all checkers, and the invariants of the syncer, checked at every event of a simulation (DESIGN 6).

A checker keeps its own record of the events that it sees and never trusts the machine's.  ``mutation`` names a change
of the product that it must detect; ``tests/sim/test_outer_disk.py`` makes that change and checks that it is detected.
``site_checkers`` has the invariants of the sites.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, ClassVar

from diloco.sim import world
from diloco.sim.world import OuterPlan
from diloco.sync.effects import AnswerPush, PublishVersion, StartOuterStep, TellFate
from diloco.sync.events import (
    Fate,
    LineageBegan,
    Outcome,
    OuterStepDone,
    OuterStepFailed,
    PushAnswered,
    UpdateArrived,
)
from diloco.sync.members import PROCESSES_REMEMBERED_MAX, is_gone
from diloco.sync.options import smoothed
from diloco.sync.rounds import of_its_age, raw_weight
from diloco.sync.state import Attendance
from diloco.sync.syncer import OuterSync

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from collections.abc import Set as AbstractSet

    from diloco.sim.outer_disk import Kept
    from diloco.sim.site_state import SiteState
    from diloco.sim.world import Storage, Unit, Value
    from diloco.sync.effects import LearnerEffect, OuterEffect, Seal
    from diloco.sync.events import LearnerEvent, OuterEvent
    from diloco.sync.state import OuterState


class Violation(Exception):
    """An invariant is broken, as ``parts`` say; ``checker`` is the name of the checker that found it."""

    def __init__(self, checker: str, *parts: object) -> None:
        super().__init__(f"{checker}: {' '.join(str(part) for part in parts)}")
        self.checker = checker


@dataclass(eq=False)
class Checker:
    """One invariant.  The simulator calls every hook; a checker overrides those that it needs."""

    mutation: ClassVar[str]
    of_the_disk: ClassVar[tuple[str, ...]] = ()
    """The attributes that record what is on the syncer's disk: a restore of the disk restores them too."""

    plan: OuterPlan

    def __post_init__(self) -> None:
        """Begin the records, where they depend on the plan."""

    def require(self, holds: bool, *parts: object) -> None:
        """Raise ``Violation`` with ``parts`` unless it ``holds``."""
        if not holds:
            raise Violation(type(self).__name__, *parts)

    def outer(self, now_ns: int, event: OuterEvent, effects: Sequence[OuterEffect], machine: OuterSync) -> None:
        """``event`` is in the journal and none of its ``effects`` is carried out yet.

        ``machine`` is the twin, which never crashes: it has handled what is in the journal, up to this event.
        """

    def decided_again(self, event: OuterEvent, effects: Sequence[OuterEffect], again: Sequence[OuterEffect]) -> None:
        """A process has decided ``effects`` on ``event``, and the twin ``again``."""

    def recovered(self, machine: OuterSync) -> None:
        """A new process of the syncer has read the disk."""

    def told(self, machine: OuterSync, chain: bytes | None, effects: Sequence[OuterEffect]) -> None:
        """A process is about to carry out a turn's ``effects``; ``chain`` None: the turn only answers read requests."""

    def told_with_an_heir(self, chain: bytes) -> None:
        """As ``told``, while the lease of that process names a standby as heir."""

    def replicated(self, storage: Storage, journal: str, unit: Unit) -> None:
        """A standby is about to acknowledge a frame."""

    def resumed(self, storage: Storage, journal: str, chain: bytes) -> None:
        """A standby is about to ask for what follows the frame with this chain value."""

    def stands_alone(self) -> None:
        """The syncer waits for no standby from now on: an operator detached it, or the syncer was itself promoted."""

    def restored(self, lineage: int, made: Sequence[Kept]) -> None:
        """``made`` become the first versions of ``lineage``, by fragment."""

    def stored(self, effect: StartOuterStep, made: Kept) -> None:
        """An outer step was computed."""

    def process_started(self, site: SiteState) -> None:
        """A learner process has read its checkpoint, or begins cold."""

    def learner(self, site: SiteState, event: LearnerEvent, effects: Sequence[LearnerEffect]) -> None:
        """The site's machine handled ``event``; its ``effects`` are not carried out yet."""

    def carried_out(self, site: SiteState, event: LearnerEvent) -> None:
        """The effects of ``event`` are carried out."""

    def step_begun(self, site: SiteState, step_ns: int) -> None:
        """An inner step begins that takes ``step_ns``."""

    def stepped(self, site: SiteState, step_ns: int, learned: Sequence[int]) -> None:
        """An inner step is done; the machine has not been told yet."""

    def sealed(self, site: SiteState, seal: Seal, gradient: Value) -> None:
        """``gradient`` is the pseudo-gradient measured for ``seal``."""

    def encoded(self, site: SiteState, fragment: int, digest: str, decoded: Value) -> None:
        """An update is in the outbox; the syncer would decode it to ``decoded``."""

    def fetched(self, site: SiteState, fragment: int, version: int, value: Value) -> None:
        """A site received ``version`` with this ``value``."""

    def at_end(self, machine: OuterSync, sites: Sequence[SiteState]) -> None:
        """The run has ended; ``sites`` are the last processes of all sites, including failed ones."""


HOOKS = tuple(
    name for name, member in vars(Checker).items() if callable(member) and name[0] != "_" and name != "require"
)


class Checkers(Checker):
    """All checkers of a run as one: each hook calls, in order, the checkers that override it."""

    def __init__(self, plan: OuterPlan, kinds: Sequence[type[Checker]]) -> None:
        super().__init__(plan)
        self.all = tuple(kind(plan) for kind in kinds)
        self.twin = OuterSync(plan.options)
        for hook in HOOKS:
            having = [each for each in self.all if getattr(type(each), hook) is not getattr(Checker, hook)]
            hooks: list[Callable[..., None]] = [getattr(each, hook) for each in having]
            setattr(self, hook, lambda *what, hooks=hooks: [each(*what) for each in hooks])

    def journalled(self, now_ns: int, event: OuterEvent, effects: Sequence[OuterEffect]) -> None:
        """``event`` is in the journal: the twin handles it, then the checkers see it."""
        self.decided_again(event, effects, self.twin.handle(event, now_ns))
        self.outer(now_ns, event, effects, self.twin)

    def back_up(self) -> None:
        """The syncer's disk was copied: copy the checkers' records of it."""
        records = [{name: getattr(each, name) for name in each.of_the_disk} for each in self.all]
        self._backup = copy.deepcopy((self.twin, records))

    def set_back(self) -> None:
        """The syncer's disk was restored from the copy, and no process has read it yet: restore the records."""
        self.twin, records = copy.deepcopy(self._backup)
        for each, books in zip(self.all, records, strict=True):
            for name, book in books.items():
                setattr(each, name, book)


Id = tuple[str, int, int]
"""(site, fragment, sequence) of an accepted update."""


def accepted(event: OuterEvent, effects: Sequence[OuterEffect]) -> UpdateArrived | None:
    """Return ``event`` if it is an update that the syncer accepted, otherwise None."""
    if not isinstance(event, UpdateArrived):
        return None
    taken = any(isinstance(effect, AnswerPush) and effect.outcome is Outcome.ACCEPTED for effect in effects)
    return event if taken else None


def ids_of(step: StartOuterStep) -> set[Id]:
    """Return the ids of the updates that an outer step merges."""
    return {(part.site, step.fragment, update.sequence) for part in step.contributions for update in part.updates}


@dataclass(eq=False)
class ExactlyOnce(Checker):
    """Invariant 9: an update is accepted once, merged at most once, and gets exactly one fate."""

    mutation = "an update that was accepted before is admitted again"
    of_the_disk = ("accepted", "fates", "under_way")

    accepted: dict[Id, str] = field(default_factory=dict)
    fates: dict[Id, Fate] = field(default_factory=dict)
    under_way: dict[int, StartOuterStep] = field(default_factory=dict)

    def outer(self, now_ns: int, event: OuterEvent, effects: Sequence[OuterEffect], machine: OuterSync) -> None:
        """Follow every update from its acceptance to its fate."""
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
        self.require(not merged, "merged, but no fate was told:", sorted(merged))

    def _starting(self, effect: StartOuterStep) -> None:
        again = self.under_way.get(effect.fragment)
        self.require(again in (None, effect), "an outer step was", again, "and is now", effect)
        self.under_way[effect.fragment] = effect
        self.require(bool(effect.contributions), "an outer step has no contribution")
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
        self.require(fate.merged == (key in merged), key, "has the fate", fate, "and merged are", sorted(merged))
        merged.discard(key)
        self.fates[key] = fate

    def at_end(self, machine: OuterSync, sites: Sequence[SiteState]) -> None:
        """Once the run has ended, every accepted update has a fate, and its site was told it or is gone."""
        lost = sorted(set(self.accepted) - set(self.fates))
        self.require(not lost, "the run has ended, and these updates have no fate:", lost)
        for site in sites:
            if site.machine.state.lineage != machine.state.lineage:
                continue  # It ended before the run was restored.
            for index, part in enumerate(site.machine.state.fragments):
                # By sequence number: an update that a twin (on a copy of the disk) sent under the same number counts
                # too, until the site learns its fate, sees by the digest that the twin was first, and rejoins.
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
    """Invariant 9: versions rise by one, each is published once, and (lineage, version) never goes back."""

    mutation = "a restarted syncer begins from the version before its newest"
    of_the_disk = ("version",)

    def __post_init__(self) -> None:
        self.version = [0] * self.plan.options.num_fragments
        self.based: dict[tuple[str, int], tuple[int, int]] = {}

    def outer(self, now_ns: int, event: OuterEvent, effects: Sequence[OuterEffect], machine: OuterSync) -> None:
        """A turn publishes exactly the outer steps that are done."""
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
        """At the end of a turn the machine has the recorded versions."""
        self.recovered(machine)

    def carried_out(self, site: SiteState, event: LearnerEvent) -> None:
        """A site's base version never goes back."""
        for index, part in enumerate(site.machine.state.fragments):
            if part.base_version >= 0:
                now = (site.machine.state.lineage, part.base_version)
                before = self.based.get((site.name, index), now)
                self.require(now >= before, site.name, f"fragment {index} had base", before, "and now has", now)
                self.based[site.name, index] = now

    def recovered(self, machine: OuterSync) -> None:
        """A restart changes no version."""
        found = [fragment.version for fragment in machine.state.fragments]
        self.require(found == self.version, "versions are", found, "and should be", self.version)


@dataclass(eq=False)
class Acknowledged(Checker):
    """Invariant 9: an acknowledged update survives any crash of the syncer."""

    mutation = "the syncer answers before the record is synced"
    of_the_disk = ("acked",)

    acked: dict[tuple[str, int], int] = field(default_factory=dict)
    lineage: int = 1

    def restored(self, lineage: int, made: Sequence[Kept]) -> None:
        """Record acknowledgements of this lineage only from now on."""
        self.lineage = lineage

    def learner(self, site: SiteState, event: LearnerEvent, effects: Sequence[LearnerEffect]) -> None:
        """Record the last acknowledged sequence of each fragment of a site."""
        answered = isinstance(event, PushAnswered) and site.machine.state.lineage == self.lineage
        if isinstance(event, PushAnswered) and answered and event.outcome in (Outcome.ACCEPTED, Outcome.DUPLICATE):
            key = (site.site, event.fragment)
            self.acked[key] = max(self.acked.get(key, 0), event.sequence)

    def recovered(self, machine: OuterSync) -> None:
        """No watermark is below an acknowledged sequence; ``ExactlyOnce`` follows each update to its fate."""
        for (name, index), sequence in self.acked.items():
            member = machine.state.sites.get(name)
            watermark = member.lines[index].watermark if member else 0
            self.require(watermark >= sequence, name, index, sequence, "was acknowledged; the watermark is", watermark)


class Recovery(Checker):
    """Invariant 11 (a): after recovery the state equals that of a machine that has applied the same journal."""

    mutation = "a recovered syncer does not know what was merging"
    of_the_disk = ("twin", "made")

    def __post_init__(self) -> None:
        self.twin = OuterSync(self.plan.options)
        self.made: dict[tuple[int, int], Kept] = {}

    def decided_again(self, event: OuterEvent, effects: Sequence[OuterEffect], again: Sequence[OuterEffect]) -> None:
        """The twin decides the same."""
        self.require(again == effects, "after", event, "the twin says", again, "and the machine", effects)

    def outer(self, now_ns: int, event: OuterEvent, effects: Sequence[OuterEffect], machine: OuterSync) -> None:
        """Keep the twin, to compare with."""
        self.twin = machine

    def recovered(self, machine: OuterSync) -> None:
        """The recovered state equals the twin's."""
        self.require(machine.state == self.twin.state, "recovered", machine.state, "and not", self.twin.state)

    def stored(self, effect: StartOuterStep, made: Kept) -> None:
        """An outer step that is computed again gives the same bits."""
        before = self.made.setdefault((effect.fragment, effect.version), made)
        self.require(before == made, effect, "gave", before, "and then", made)

    def at_end(self, machine: OuterSync, sites: Sequence[SiteState]) -> None:
        """The machine, after all its crashes, equals the twin, which had none."""
        self.recovered(machine)


@dataclass(eq=False)
class Weights(Checker):
    """Invariant 10: the weights of a merge sum to 1 and are proportional to the rule's: of the updates' own tokens and
    steps or, with ``share_weighted``, of the site's usual ones.

    A weight is a site's, with all its updates, or (``merge_by`` "update") one update's; it falls with its base's age.
    A step's share is the usual weight of its sites, divided by that of its sites and the others that it waited for.
    """

    mutation = "weights are not divided by their sum, a site's updates are one, or a share counts absent sites"
    of_the_disk = ("usual", "checked")

    work: dict[Id, tuple[int, int]] = field(default_factory=dict)
    usual: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    checked: dict[int, StartOuterStep] = field(default_factory=dict)

    def outer(self, now_ns: int, event: OuterEvent, effects: Sequence[OuterEffect], machine: OuterSync) -> None:
        """Compute every contribution's weight again."""
        update = accepted(event, effects)
        if update is not None:
            self.work[update.site, update.fragment, update.sequence] = (update.tokens, update.steps)
        for effect in effects:
            if isinstance(effect, TellFate) and effect.fate.merged:
                line = (effect.site, effect.fate.fragment)
                now, before = self.work[*line, effect.fate.sequence], self.usual.get(line, (0, 0))
                tokens, steps = (min(new, 2 * old) if old else new for new, old in zip(now, before, strict=True))
                self.usual[line] = (smoothed(before[0], tokens), smoothed(before[1], steps))
            elif isinstance(effect, StartOuterStep):
                self._check(effect, machine.state)

    def _check(self, step: StartOuterStep, state: OuterState) -> None:
        if self.checked.get(step.fragment) == step:
            return  # A restarted process issues it again, when other sites may be live.
        self.checked[step.fragment] = step
        by_update = self.plan.options.merge_by == "update"
        terms = [(part.site, part.updates[0].sequence if by_update else 0) for part in step.contributions]
        whole = not by_update or all(len(part.updates) == 1 for part in step.contributions)
        self.require(whole and len(set(terms)) == len(terms), "the contributions are", step.contributions)
        found = [part.weight for part in step.contributions]
        self.require(abs(sum(found) - 1) < 1e-12, "weights", found, "sum to", sum(found))
        raw, share = self._wanted(step, Attendance(state).awaited(step.fragment))
        wanted = [weight / sum(raw) for weight in raw]
        near = all(abs(a - b) < 1e-12 for a, b in zip([step.share, *found], [share, *wanted], strict=True))
        self.require(near, "weights are", found, "and not", wanted, "and the share is", step.share, "of", share)
        self.require(0 < step.share <= 1, "the share is", step.share)

    def _wanted(self, step: StartOuterStep, awaited: AbstractSet[str]) -> tuple[list[float], float]:
        """Return the weights before normalising, and the share, of a round that waited for the sites ``awaited``."""
        options, index, parts = self.plan.options, step.fragment, step.contributions
        aged = [of_its_age(step.version - 1 - part.base_version, options.staleness_power) for part in parts]
        work = [[self.work[part.site, index, each.sequence] for each in part.updates] for part in parts]
        if not options.share_weighted:
            raw = [raw_weight(options.weights, sum(t for t, _ in each), sum(s for _, s in each)) for each in work]
            return [weight * age for weight, age in zip(raw, aged, strict=True)], 1.0
        firsts = {part.site: raw_weight(options.weights, *each[0]) for part, each in zip(parts, work, strict=True)}
        others = awaited - firsts.keys()
        lines = [(name, (name, index)) for name in (*firsts, *others)]
        usual = {name: raw_weight(options.weights, *self.usual[line]) for name, line in lines if line in self.usual}
        most = max(usual.values(), default=inf)
        known = {name: min(first, most) for name, first in firsts.items()} | usual
        mean, merged = sum(known.values()) / len(known), [known[name] for name in firsts]
        raw = [weight * age for weight, age in zip(merged, aged, strict=True)]
        return raw, sum(merged) / (sum(merged) + sum(known.get(name, mean) for name in others))


@dataclass(eq=False)
class Staleness(Checker):
    """No update staler than the bound is merged; its staleness counts when the round closes."""

    mutation = "updates are judged by a laxer bound than the run's"

    base: dict[Id, int] = field(default_factory=dict)
    worst: int = 0

    def outer(self, now_ns: int, event: OuterEvent, effects: Sequence[OuterEffect], machine: OuterSync) -> None:
        """Check the base version of every merged update."""
        update = accepted(event, effects)
        if update is not None:
            self.base[update.site, update.fragment, update.sequence] = update.base_version
        for effect in effects:
            if isinstance(effect, StartOuterStep):
                for key in sorted(ids_of(effect)):
                    staleness = effect.version - 1 - self.base[key]
                    self.worst = max(self.worst, staleness)
                    self.require(staleness <= self.plan.options.staleness_max, key, "is merged at staleness", staleness)


@dataclass(eq=False)
class Grace(Checker):
    """Invariant 14: once its quorum is met, a round waits at most the grace, and not at all once all sites are in."""

    mutation = "the grace is twice as long as allowed"
    of_the_disk = ("met_ns",)

    met_ns: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """By fragment: when its round opened, when its quorum was met, and the grace that began then, in ns."""

    def outer(self, now_ns: int, event: OuterEvent, effects: Sequence[OuterEffect], machine: OuterSync) -> None:
        """A round must not stay open longer than the grace after its quorum was met."""
        state, present = machine.state, Attendance(machine.state)
        for index, fragment in enumerate(state.fragments):
            arrived = {name for name, _ in present.waiting(index)}
            if fragment.round is None or not self._is_met(present, index, fragment.round.members, arrived):
                self.met_ns.pop(index, None)
                continue
            if self.met_ns.get(index, (-1, 0, 0))[0] != fragment.round.opened_ns:
                self.met_ns[index] = (fragment.round.opened_ns, now_ns, self._bound_ns(state, present, index))
            waited_ns, grace_ns = now_ns - self.met_ns[index][1], self.met_ns[index][2]
            if fragment.merging_since_ns is None:
                self.require(waited_ns < grace_ns, f"fragment {index} has waited {waited_ns} ns with", sorted(arrived))
                self.require(not arrived >= present.awaited(index), f"fragment {index} waits although all arrived")

    def _is_met(self, present: Attendance, index: int, members: Sequence[str], arrived: set[str]) -> bool:
        """Return whether updates of the sites in ``arrived`` are the quorum of the fragment's round."""
        options = self.plan.options
        if options.round_updates:
            most = max(1, len(present.awaited(index))) * options.updates_in_flight_max
            return len(present.waiting(index)) >= min(options.round_updates, most)
        wanted = max(options.quorum_min, options.quorum if isinstance(options.quorum, int) else 0)
        return len(arrived) >= wanted and (options.quorum != "all" or arrived >= set(members))

    def _bound_ns(self, state: OuterState, present: Attendance, index: int) -> int:
        """Return the longest grace that may begin now: the configured one or a share of the fastest site's period."""
        options, periods_ns = self.plan.options, []
        for site in (state.sites[name] for name in sorted(present.live)):
            line = site.lines[index]
            steps = line.usual_steps or sum([first.steps for first in line.undecided[:1]])
            periods_ns.append(steps * site.step_ns)
        share_ns = min(filter(None, periods_ns), default=0) * options.grace_period_percent // 100
        return 0 if options.round_updates else max(options.grace_ns, share_ns * (options.grace == "adaptive"))


class Merging(Checker):
    """Each version is one outer step from the version before, with exactly its updates; all sites get equal values."""

    mutation = "the syncer publishes a version without the rounding error of its codec"
    of_the_disk = ("theta", "newest")

    def __post_init__(self) -> None:
        self.value: dict[tuple[int, str], Value] = {}
        self.theta = {(index, 0): (world.ZERO, world.ZERO) for index in range(self.plan.options.num_fragments)}
        self.published = {(1, index, 0): world.ZERO for index in range(self.plan.options.num_fragments)}
        """By lineage, fragment and version: a site that has not rejoined gets its versions from the lineage before."""
        self.newest = [0] * self.plan.options.num_fragments
        self.lineage = 1

    def restored(self, lineage: int, made: Sequence[Kept]) -> None:
        """Record the versions that begin a lineage."""
        self.lineage = lineage
        for index, kept in enumerate(made):
            self.newest[index] += 1
            self.theta[index, self.newest[index]] = (kept.theta, kept.momentum)
            self.published[lineage, index, self.newest[index]] = kept.published

    def outer(self, now_ns: int, event: OuterEvent, effects: Sequence[OuterEffect], machine: OuterSync) -> None:
        """A version counts once its record is journalled; one that was only computed may be computed again."""
        if isinstance(event, OuterStepDone):
            self.newest[event.fragment] = event.version

    def encoded(self, site: SiteState, fragment: int, digest: str, decoded: Value) -> None:
        """Record each update's decoded value."""
        self.value[fragment, digest] = decoded

    def stored(self, effect: StartOuterStep, made: Kept) -> None:
        """Compute the version again from the sites' own updates."""
        index, version = effect.fragment, effect.version
        theta, momentum = self.theta[index, version - 1]
        parts = effect.contributions
        merged = world.merged([(part.weight, [self.value[index, u.digest] for u in part.updates]) for part in parts])
        expected = world.outer_step(theta, momentum, merged, self.plan.rule, effect.share)
        self.require((made.theta, made.momentum) == expected, effect, "made", made, "and not", expected)
        self.theta[index, version] = expected
        self.published[self.lineage, index, version] = made.published

    def fetched(self, site: SiteState, fragment: int, version: int, value: Value) -> None:
        """Compare the value that a site reconstructed with the published one."""
        published = self.published[site.machine.state.lineage, fragment, version]
        self.require(
            value == published, site.name, "has", value, f"of fragment {fragment} version {version}, not", published
        )


@dataclass(eq=False)
class Lineages(Checker):
    """No update that was measured before a restore is accepted after it."""

    mutation = "a site continues after a restore as if the syncer had only been away"

    sealing: dict[tuple[str, int], int] = field(default_factory=dict)
    measured: dict[tuple[int, str], int] = field(default_factory=dict)

    def sealed(self, site: SiteState, seal: Seal, gradient: Value) -> None:
        """One update of a fragment is encoded at a time."""
        self.sealing[site.name, seal.fragment] = site.machine.state.lineage

    def encoded(self, site: SiteState, fragment: int, digest: str, decoded: Value) -> None:
        """Record the lineage of the base."""
        self.measured[fragment, digest] = self.sealing[site.name, fragment]

    def outer(self, now_ns: int, event: OuterEvent, effects: Sequence[OuterEffect], machine: OuterSync) -> None:
        """Check the lineage of every accepted update."""
        update = accepted(event, effects)
        if update is not None:
            measured = self.measured[update.fragment, update.digest]
            self.require(measured == machine.state.lineage, update, "is of lineage", measured)


class Bounds(Checker):
    """Every collection stays within its bound, at the syncer and at the sites."""

    mutation = "more updates may wait than the run allows"

    def outer(self, now_ns: int, event: OuterEvent, effects: Sequence[OuterEffect], machine: OuterSync) -> None:
        """Check the sizes of the syncer's collections."""
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

    def carried_out(self, site: SiteState, event: LearnerEvent) -> None:
        """Check the sizes of a site's collections."""
        options = self.plan.options
        undecided_max = site.plan.options.updates_in_flight_max
        for part in site.machine.state.fragments:
            self.require(len(part.undecided()) <= undecided_max, site.name, "undecided:", len(part.undecided()))
            held_max = undecided_max * (options.staleness_max + 2)
            self.require(len(part.in_flight) <= held_max, site.name, "in flight:", len(part.in_flight))
            self.require(len(part.orphans) <= options.updates_in_flight_max, site.name, "orphans:", len(part.orphans))
        self.require(len(site.disk.outbox) <= len(site.theta), site.name, "outbox:", sorted(site.disk.outbox))
