"""What must hold at every site at every event (DESIGN section 6), and the list of all checkers."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from diloco.sim import values
from diloco.sim.admission_checkers import Admission
from diloco.sim.checkers import (
    Acknowledged,
    Bounds,
    ExactlyOnce,
    Grace,
    Lineages,
    Merging,
    Recovery,
    Staleness,
    Versions,
    Weights,
)
from diloco.sim.checking import Checker
from diloco.sim.leader_checkers import OneLeader, Replicated
from diloco.sim.unit_checkers import Balanced, CountedOnce
from diloco.sync.effects import Leave, Release, Retake, Seal, StartOuterStep, StopTraining, TellFate
from diloco.sync.events import (
    JoinAnswered,
    OuterStepDone,
    OuterStepFailed,
    PushAnswered,
    Reason,
    Sealed,
    StepDone,
)
from diloco.sync.progress import ledger_of, site_ledger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.sim.outer_process import OuterPlan
    from diloco.sim.site_process import SiteProcess
    from diloco.sim.values import Value
    from diloco.sync.effects import LearnerEffect, OuterEffect
    from diloco.sync.events import LearnerEvent, OuterEvent
    from diloco.sync.syncer import OuterSync


class Ledger(Checker):
    """Invariant 10: every token a site has read is in exactly one place, and nothing vanishes into "lost" silently."""

    name = "ledger"
    mutation = "an update that is refused takes its tokens with it"

    def __init__(self, plan: OuterPlan, *, conserving: bool = False) -> None:
        super().__init__(plan, conserving=conserving)
        self.processed: dict[str, int] = {}
        self.lost: dict[str, list[int]] = {}
        self.orphans: dict[str, list[int]] = {}

    def process_started(self, site: SiteProcess) -> None:
        """A new process begins from what its odometer and its checkpoint say."""
        self.processed[site.name] = site.machine.state.tokens_processed
        self._remember(site)

    def _remember(self, site: SiteProcess) -> None:
        self.lost[site.name] = [part.tokens_lost for part in site.machine.state.fragments]
        self.orphans[site.name] = [len(part.orphans) for part in site.machine.state.fragments]

    def learner(self, site: SiteProcess, event: LearnerEvent, effects: Sequence[LearnerEffect]) -> None:
        """Add up every fragment and the site."""
        del effects
        state = site.machine.state
        if isinstance(event, StepDone):
            self.processed[site.name] += event.tokens
        elif isinstance(event, JoinAnswered):
            # Work of an earlier life that only the syncer remembers: the site learns that it has read more.
            self.processed[site.name] = max(self.processed[site.name], *(part.accounted() for part in state.fragments))
        self.require(
            state.tokens_processed == self.processed[site.name],
            f"{site.name} read {self.processed[site.name]} tokens and counts {state.tokens_processed}",
        )
        for index, part in enumerate(state.fragments):
            ledger = ledger_of(state, index)
            counts = (ledger.merged, ledger.refused, ledger.in_flight, ledger.unsent, ledger.overwritten, ledger.lost)
            self.require(ledger.balanced() and min(counts) >= 0, site.name, f"fragment {index} after", event, ledger)
            before = self.lost[site.name][index]
            explained = isinstance(event, JoinAnswered) or len(part.orphans) < self.orphans[site.name][index]
            self.require(part.tokens_lost == before or explained, site.name, "lost tokens at", event, ledger)
        if isinstance(event, StepDone | JoinAnswered):  # It is made of the others; looking now and then is enough.
            whole = site_ledger(state)
            self.require(whole.balanced(), site.name, whole)
        self._remember(site)


class Carried(Checker):
    """Invariant 10: the tokens that an update declares are those whose progress it carries."""

    name = "carried"
    mutation = "an update is measured without what is in flight"

    def sealed(self, site: SiteProcess, seal: Seal, gradient: Value) -> None:
        """The second number of every value counts tokens."""
        self.require(-gradient[1] == seal.tokens, site.name, seal, "carries the progress of", -gradient[1], "tokens")
        self.require(site.base[seal.fragment][0] == seal.base_version, site.name, seal, "is not measured from its base")


class Cold(Checker):
    """Invariant 16: the values a site had before it took a version never reach anybody."""

    name = "cold"
    mutation = "a new site goes on from its own initialisation instead of the version it took"

    def sealed(self, site: SiteProcess, seal: Seal, gradient: Value) -> None:
        """The third number marks values that come from no version."""
        self.require(gradient[2] == 0 and seal.base_version >= 0, site.name, seal, "carries a cold start", gradient)


class Independence(Checker):
    """Invariant 14: between two steps of a site there is nothing but the site's own freezes (lock-step apart)."""

    name = "independence"
    mutation = "a site waits after each update until its fate is known"

    def __init__(self, plan: OuterPlan, *, conserving: bool = False) -> None:
        super().__init__(plan, conserving=conserving)
        self.ended_ns: dict[str, int] = {}

    def step_begun(self, site: SiteProcess, step_ns: int) -> None:
        """A step begins at the instant at which the one before ended."""
        del step_ns
        ended_ns = self.ended_ns.get(site.name)
        if ended_ns is not None and not site.plan.options.lock_step:
            idle_ns = site.heap.now_ns - ended_ns
            self.require(idle_ns == 0, site.name, "stood still for", idle_ns, "ns before step", site.step + 1)

    def stepped(self, site: SiteProcess, step_ns: int, learned: Sequence[int]) -> None:
        """A step ends."""
        del step_ns, learned
        self.ended_ns[site.name] = site.heap.now_ns


class Farewell(Checker):
    """A site ends for a good reason: nobody contradicts what it was told, and a goodbye leaves nothing behind."""

    name = "farewell"
    mutation = "the last step before a goodbye is not sent"

    def __init__(self, plan: OuterPlan, *, conserving: bool = False) -> None:
        super().__init__(plan, conserving=conserving)
        self.stopped: set[str] = set()
        self.finished: set[str] = set()

    def learner(self, site: SiteProcess, event: LearnerEvent, effects: Sequence[LearnerEffect]) -> None:
        """Look at the last words of a site."""
        if isinstance(event, PushAnswered) and event.reason is Reason.FINISHED:
            self.finished.add(site.name)
        for effect in effects:
            if isinstance(effect, StopTraining):
                contradicted = effect.failed and ("forgotten" in effect.why or "another update" in effect.why)
                self.require(not contradicted or site.twin, site.name, "stops:", effect.why)
                self.stopped.add(site.name)
            elif isinstance(effect, Leave):
                self.require(site.name in self.stopped, site.name, "says goodbye and goes on training")
                self.require(site.at_rest or not site.training, site.name, "says goodbye in the middle of a step")
                unanswered = [part for part in site.machine.state.fragments if part.unanswered()]
                self.require(not unanswered, site.name, "says goodbye and waits for an answer:", unanswered)
                unsent = sum(part.unsent_tokens for part in site.machine.state.fragments)
                self.require(unsent == 0 or site.name in self.finished, site.name, "leaves", unsent, "tokens unsent")


class Cursor(Checker):
    """No batch whose work was accepted is read again, whichever process read it first."""

    name = "cursor"
    mutation = "a restarted site is not told to skip what its accepted updates have consumed"

    def __init__(self, plan: OuterPlan, *, conserving: bool = False) -> None:
        super().__init__(plan, conserving=conserving)
        self.consumed: dict[str, int] = {}

    def carried_out(self, site: SiteProcess, event: LearnerEvent) -> None:
        """A join says how far the site's accepted updates have read."""
        if isinstance(event, JoinAnswered):
            self.consumed[site.name] = max(standing.cursor for standing in event.standings)

    def stepped(self, site: SiteProcess, step_ns: int, learned: Sequence[int]) -> None:
        """A step reads one batch."""
        del step_ns, learned
        consumed = self.consumed.get(site.name, 0)
        self.require(site.cursor > consumed, site.name, f"reads batch {site.cursor} again: {consumed} are consumed")


class Conservation(Checker):
    """Invariant 17: what a site has learned is merged, in flight or unsent, to the last bit, whatever happens."""

    name = "conservation"
    mutation = "an adopt forgets that the version contains an update of the site's own"
    of_the_disk = ("under_way",)

    def __init__(self, plan: OuterPlan, *, conserving: bool = False) -> None:
        super().__init__(plan, conserving=conserving)
        self.unsent: dict[str, list[Value]] = {}
        self.learned = [values.ZERO] * plan.options.num_fragments
        self.merged = [values.ZERO] * plan.options.num_fragments
        self.averaged = [values.ZERO] * plan.options.num_fragments
        self.value: dict[tuple[int, str], Value] = {}
        self.under_way: dict[int, StartOuterStep] = {}

    def carry(self, site: SiteProcess, index: int) -> Value:
        """r: what the site has learned, is in no update, and stands on the values it has."""
        held = [value for key, value in [*site.sent.items(), *site.sealing.items()] if key[0] == index]
        return values.plus(values.minus(site.theta[index], site.base[index][1]), values.total(held))

    def process_started(self, site: SiteProcess) -> None:
        """What a checkpoint holds is where the book begins."""
        self.unsent[site.name] = [self.carry(site, index) for index in range(len(site.theta))]

    def stepped(self, site: SiteProcess, step_ns: int, learned: Sequence[int]) -> None:
        """Progress is made here and nowhere else."""
        del step_ns
        book = self.unsent[site.name]
        for index, gain in enumerate(learned):
            made = (gain, site.plan.tokens, 0)
            book[index] = values.plus(book[index], made)
            self.learned[index] = values.plus(self.learned[index], made)

    def sealed(self, site: SiteProcess, seal: Seal, gradient: Value) -> None:
        """What is measured leaves r whole."""
        book = self.unsent[site.name]
        book[seal.fragment] = values.plus(book[seal.fragment], gradient)

    def encoded(self, site: SiteProcess, fragment: int, digest: str, decoded: Value) -> None:
        """What the codec rounded off comes back."""
        self.value[fragment, digest] = decoded

    def learner(self, site: SiteProcess, event: LearnerEvent, effects: Sequence[LearnerEffect]) -> None:
        """Write down what an event moves between r and the in-flight list."""
        book = self.unsent[site.name]
        if isinstance(event, Sealed):
            book[event.fragment] = values.plus(book[event.fragment], site.rounded)
        for effect in effects:
            if isinstance(effect, Release):
                key = (effect.fragment, effect.sequence)
                released = site.sent.get(key, site.sealing.get(key, values.ZERO))
                book[effect.fragment] = values.minus(book[effect.fragment], released)
            elif isinstance(effect, Retake):
                book[effect.fragment] = values.ZERO

    def carried_out(self, site: SiteProcess, event: LearnerEvent) -> None:
        """The book and the values agree, and the machine's list is the list of what is held."""
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
        """Count what is merged, in full and as far as the mean takes it."""
        del now_ns, machine
        if isinstance(event, OuterStepFailed):
            self.under_way.pop(event.fragment)
        elif isinstance(event, OuterStepDone):
            step = self.under_way.pop(event.fragment)
            parts = [
                (part.weight, [self.value[step.fragment, update.digest] for update in part.updates])
                for part in step.contributions
            ]
            whole = values.total(each for _, updates in parts for each in updates)
            self.merged[step.fragment] = values.minus(self.merged[step.fragment], whole)
            away = values.minus(values.merged(parts), whole)
            self.averaged[step.fragment] = values.plus(self.averaged[step.fragment], away)
        for effect in effects:
            if isinstance(effect, StartOuterStep):
                self.under_way[effect.fragment] = effect

    def at_end(self, machine: OuterSync, sites: Sequence[SiteProcess]) -> None:
        """All progress ever made, and where it is."""
        if not self.conserving:
            return
        for index in range(len(self.learned)):
            there = self.merged[index]
            for site in sites:
                part = site.machine.state.fragments[index]
                fates = {fate.sequence: fate for fate in machine.state.sites[site.site].lines[index].fates}
                there = values.plus(there, self.unsent[site.name][index])
                for sent in part.in_flight:
                    fate = fates.get(sent.sequence)
                    if sent.merged_version is None and not (fate and fate.merged and fate.digest == sent.digest):
                        there = values.minus(there, site.sent[index, sent.sequence])
            learned = self.learned[index]
            self.require(there == learned, f"of fragment {index}", learned, "was learned and", there, "is somewhere")


class History(Checker):
    """Not a property: a digest over everything that happened, and the figures of a run."""

    name = "history"
    mutation = "the network draws its delays from something else than the seed"

    def __init__(self, plan: OuterPlan, *, conserving: bool = False) -> None:
        super().__init__(plan, conserving=conserving)
        self.fates: dict[str, int] = {}
        self._digest = hashlib.sha256()

    def outer(self, now_ns: int, event: OuterEvent, effects: Sequence[OuterEffect], machine: OuterSync) -> None:
        """Something happened at the syncer."""
        del machine
        self._digest.update(f"{now_ns} {event} {effects}".encode())
        for effect in effects:
            if isinstance(effect, TellFate):
                what = effect.fate.reason.value if effect.fate.reason else "merged"
                self.fates[what] = self.fates.get(what, 0) + 1

    def learner(self, site: SiteProcess, event: LearnerEvent, effects: Sequence[LearnerEffect]) -> None:
        """Something happened at a site."""
        self._digest.update(f"{site.heap.now_ns} {site.name} {site.theta} {event} {effects}".encode())

    def hexdigest(self) -> str:
        """Two runs of a seed have the same."""
        return self._digest.hexdigest()


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
    Cursor,
    Conservation,
    OneLeader,
    Replicated,
    CountedOnce,
    Balanced,
)
