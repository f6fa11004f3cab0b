"""A site of a run that has several syncers: a process for each of them, and one training loop that steps them all.

The processes are whole ones, with their own disk, link and machine, for the fragments that their syncer holds; they
live and die together.  What is one for the site is its step and its data cursor: a step begins when no part is in the
middle of one, and each part that still trains is told of it at the same instant.


One model held by several syncers, in the simulator: each with its own faults, the sites with theirs.

A site may be cut off from one syncer while it reaches the others, from its start or later, and one syncer may be set
back to an old backup while the others go on.  Over each outer machine stand the same checkers as in a run that has one,
with the site processes that talk to it.  ``Across`` stands over all of them: a site's steps and books are one, it ends
when all syncers have said so, and a syncer that is away stops no other.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from diloco.sim.checkers import Checkers, Violation
from diloco.sim.cluster import RESTART_NS, Syncers
from diloco.sim.outer_process import CrashPoint
from diloco.sim.plan import GENTLE, SwarmPlan, draw_plan
from diloco.sim.site_checkers import CHECKERS, History
from diloco.sim.site_process import SiteDisk, SitePlan, SiteProcess, Trouble
from diloco.sim.swarm import END_NS, ERRORS, EVENTS_MAX, LINEAGES_MAX, RISE_NS, Outcome, in_words
from diloco.sim.world import MILLISECOND_NS, Direction, Heap, Link, OuterPlan, Weather
from diloco.sync.effects import LearnerEffect, StopTraining
from diloco.sync.options import SECOND_NS
from diloco.sync.progress import combined, ledger_of
from diloco.sync.state import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from diloco.sim.checkers import Checker
    from diloco.sync.options import OuterOptions
    from diloco.sync.progress import Ledger
    from diloco.sync.state import OuterState
    from diloco.sync.syncer import OuterSync


class PartProcess(SiteProcess):
    """A site's process towards one of the syncers; ``trainer`` is that of the site."""

    trainer: Trainer

    def kill(self) -> None:
        """End as by SIGKILL."""
        super().kill()
        self.trainer.look()

    def take_step(self, step_ns: int) -> None:
        """A step that all parts made."""
        self._step(step_ns)

    def rest(self) -> None:
        """There will be no step any more."""
        self._next_step()

    def _begin_step(self) -> None:
        self.trainer.ready(self)

    def _carry_out(self, effect: LearnerEffect) -> None:
        super()._carry_out(effect)
        if isinstance(effect, StopTraining):
            self.trainer.look()


class Trainer:
    """The training loop of one life of a site."""

    def __init__(self, heap: Heap, random: Random, stepped: Callable[[Sequence[PartProcess]], None]) -> None:
        """``stepped`` is shown who has just made a step."""
        self._heap, self._random, self._stepped = heap, random, stepped
        self.parts: list[PartProcess] = []
        self._waiting: list[PartProcess] = []

    def ready(self, part: PartProcess) -> None:
        """``part`` stands between two steps and would go on."""
        self._waiting.append(part)
        self.look()

    def look(self) -> None:
        """Begin the next step if every part that will ever make one is ready for it."""
        stopped = [part for part in self._waiting if part.alive and part.stopping]
        self._waiting = [part for part in self._waiting if self.goes_on(part)]
        for part in stopped:
            part.deliver(part.rest)
        if not self._waiting or not self.complete(self._waiting):
            return
        takers, self._waiting = self._waiting, []
        # A part whose syncer had finished heard of no step after that, and begins again from an earlier one.
        step, cursor = max(part.step for part in takers), max(part.cursor for part in takers)
        plan = takers[0].plan
        step_ns = int(plan.step_ns * (1 + plan.step_jitter * self._random.random()))
        for part in takers:
            part.step, part.cursor = step, cursor
            part.checkers.step_begun(part, step_ns)
        self._heap.after(step_ns, lambda: self._step(takers, step_ns))

    def goes_on(self, part: PartProcess) -> bool:
        """Whether ``part`` trains, or will."""
        return part.alive and not part.stopping

    def complete(self, ready: Sequence[PartProcess]) -> bool:
        """Whether nobody else is to be waited for: one who cannot reach its syncer trains on like the others."""
        return all(part in ready for part in self.parts if self.goes_on(part))

    def _step(self, takers: Sequence[PartProcess], step_ns: int) -> None:
        for part in takers:
            part.deliver(lambda part=part: part.take_step(step_ns))  # type: ignore[misc]
        self._stepped(takers)


FAULTS = (*GENTLE, "split", "kill", "restore")
DOWNS_MS = (50, 400, 2000, 6000)
AGES_MS = (400, 2000, 6000, 12_000)
"""Of a backup, when a syncer is set back to it."""
EVENTS_EACH_MAX = 2 * EVENTS_MAX


@dataclass(frozen=True, slots=True)
class SeveralPlan:
    """What a seed decides: a run of one syncer, and how many of the fragments each of several has."""

    whole: SwarmPlan
    outers: tuple[OuterPlan, ...]
    sites: tuple[tuple[SitePlan, ...], ...]
    """For each site its plan towards each syncer."""
    reached_ns: tuple[tuple[int, ...], ...]
    """When each site first reaches each syncer; 0: it always has.  Each reaches one of them from its start."""
    faults: tuple[str, ...]


def draw_several(seed: int) -> SeveralPlan:
    """The plan of ``seed``, always the same: never in lock-step, and without standbys."""
    whole, random = draw_plan(seed), Random(f"{seed}/several")
    sizes = [random.randint(1, 2) for _ in range(random.choice((2, 2, 3)))]
    total, apart = sum(sizes), Random(f"{seed}/apart")
    options = dataclasses.replace(whole.outer.options, run_ns=0, token_budget=_budget(apart, whole.sites))
    outers = [_outer(whole.outer, options, size, leases=index == 0) for index, size in enumerate(sizes)]
    split = ("split",) if apart.random() < 0.6 else ()
    return SeveralPlan(
        whole,
        tuple(outers),
        tuple(_site(site, sizes, total) for site in whole.sites),
        tuple(_reached_ns(apart, start_ns, len(sizes)) for start_ns in whole.starts_ns),
        tuple(kind for kind in whole.faults if kind in FAULTS) + split or ("outer_crash",),
    )


def _budget(random: Random, sites: Sequence[SitePlan]) -> int:
    """In six runs of ten what the sites train on in some seconds: each syncer ends when it has merged that."""
    seconds, ends = random.randint(1, 12), random.random() < 0.6
    return (
        seconds * SECOND_NS * sum(site.tokens for site in sites) // max(site.step_ns for site in sites) if ends else 0
    )


def _outer(plan: OuterPlan, options: OuterOptions, size: int, *, leases: bool) -> OuterPlan:
    """One of the syncers; units of the data are leased by the first of them."""
    unit = options.unit_sequences if leases else 0
    own = dataclasses.replace(options, num_fragments=size, unit_sequences=unit)
    return dataclasses.replace(plan, options=own, replication=None)


def _reached_ns(random: Random, start_ns: int, num_syncers: int) -> tuple[int, ...]:
    """Three sites of ten reach only some of the syncers when they start."""
    if random.random() > 0.3:
        return (0,) * num_syncers
    near = random.randrange(num_syncers)
    late = [random.randint(1, 15) * SECOND_NS if random.random() < 0.7 else 0 for _ in range(num_syncers)]
    return tuple(start_ns + ns if ns and at != near else 0 for at, ns in enumerate(late))


def _site(site: SitePlan, sizes: Sequence[int], total: int) -> tuple[SitePlan, ...]:
    steps = max(site.options.inner_steps, total)
    all_of_them = dataclasses.replace(site.options, num_fragments=total, inner_steps=steps, lock_step=False)
    found, first = list[SitePlan](), 0
    for size in sizes:
        offsets = all_of_them.due_at[first : first + size]
        first += size
        unit = 0 if found else all_of_them.unit_sequences
        part = dataclasses.replace(all_of_them, num_fragments=size, offsets=offsets, unit_sequences=unit)
        found.append(dataclasses.replace(site, options=part))
    return tuple(found)


@dataclass(slots=True)
class Machine:
    """One of the syncers, and who watches it."""

    syncers: Syncers
    checkers: Checkers
    history: History


@dataclass(slots=True)
class Place:
    """A site: towards each syncer its plan, link and disk, and the processes that live there now."""

    name: str
    plans: tuple[SitePlan, ...]
    links: list[Link]
    randoms: list[Random]
    disks: list[SiteDisk]
    trouble: Trouble = field(default_factory=Trouble)
    processes: list[PartProcess] = field(default_factory=list)
    lives: int = 0
    wanted: bool = True

    def running(self) -> bool:
        """Whether anything lives here."""
        return any(process.alive for process in self.processes)


class Across:
    """What must hold over all the syncers of a run."""

    name = "across"
    mutation = "a step is told only to the parts that are connected"

    def __init__(self) -> None:
        self.undone: dict[tuple[str, int, int], int] = {}
        """By site, syncer and fragment: tokens that were merged after the backup that the syncer was set back to."""

    def require(self, holds: bool, *parts: object) -> None:
        """Raise ``Violation`` with ``parts`` unless it ``holds``."""
        if not holds:
            raise Violation(self.name, " ".join(str(part) for part in parts))

    def stepped(self, takers: Sequence[PartProcess]) -> None:
        """All parts of a site have made the same steps and were told of them, whomever of the syncers they reach."""
        there = [part for part in takers[0].trainer.parts if part.alive and not part.frozen and not part.stopping]
        made = {(part.step, part.machine.state.step) for part in there}
        self.require(len(made) <= 1, takers[0].site, "has parts that made other steps:", sorted(made))

    def site_ended(self, place: Place) -> None:
        """A site ends when every syncer has said so."""
        endings = [process.machine.state.ending for process in place.processes]
        self.require(None not in endings, place.name, "ends, and was told", endings)

    def set_back(self, at: int, was: OuterState, now: OuterState) -> None:
        """Syncer number ``at`` knew ``was`` and goes on from its backup, ``now``: count what it has undone."""
        for name, site in was.sites.items():
            for index, line in enumerate(site.lines):
                kept = now.sites[name].lines[index].tokens_merged if name in now.sites else 0
                key = (name, at, index)
                self.undone[key] = self.undone.get(key, 0) + line.tokens_merged - kept

    def at_end(self, place: Place, machines: Sequence[OuterSync]) -> None:
        """What a site counts as merged, over all its fragments, is what the syncers have merged of it, and a site that
        went on without a restart has lost nothing but what restored syncers had merged after their backups."""
        ledgers: list[Ledger] = []
        merged = there = 0
        leasing = [at for at, machine in enumerate(machines) if machine.state.units is not None]
        self.require(leasing in ([], [0]), "units are leased by", leasing)
        for at, (process, machine) in enumerate(zip(place.processes, machines, strict=True)):
            for index, part in enumerate(process.machine.state.fragments):
                undone = self.undone.get((place.name, at, index), 0)
                explained = place.lives > 1 or part.tokens_lost <= undone
                self.require(
                    explained, place.name, "lost", part.tokens_lost, "and syncer", at, f"undid {undone} of {index}"
                )
                line = machine.state.sites[place.name].lines[index]
                fates = {fate.sequence: fate for fate in line.fates if fate.merged}
                waiting = [s.sequence for s in part.in_flight if s.merged_version is None and not s.outrun]
                waiting += [orphan.sequence for orphan in part.orphans]
                merged += part.tokens_merged + sum(fates[each].tokens for each in waiting if each in fates)
                there += line.tokens_merged
                ledgers.append(ledger_of(process.machine.state, index))
        whole = combined(ledgers)
        self.require(merged == there, place.name, "counts", merged, "merged tokens, the syncers", there)
        self.require(whole.balanced(), place.name, "has the ledger", whole)
        spread = abs(whole.merged * len(ledgers) - sum(ledger.merged for ledger in ledgers))
        self.require(spread <= len(ledgers), place.name, "counts", whole.merged, "as the mean of", ledgers)


class Several:
    """A run under way."""

    def __init__(self, plan: SeveralPlan, only: Sequence[type[Checker]] = CHECKERS) -> None:
        seed = plan.whole.seed
        self.plan, self.random, self.heap = plan, Random(f"{seed}/faults"), Heap()
        self.across, self.outcome, self.calm = Across(), Outcome(seed), False
        self.machines = [self._machine(outer, f"{seed}/disk/{at}", only) for at, outer in enumerate(plan.outers)]
        self.places: dict[str, Place] = {}
        for index, plans in enumerate(plan.sites):
            name = "abcdefgh"[index]
            randoms = [Random(f"{seed}/{name}/{at}") for at, _ in enumerate(plans)]
            weather = plan.whole.weathers[index]
            links = [Link(self.heap, random, dataclasses.replace(weather)) for random in randoms]
            self.places[name] = Place(name, plans, links, randoms, [SiteDisk() for _ in plans])
            for link, reached_ns in zip(links, plan.reached_ns[index], strict=True):
                if reached_ns:
                    link.cut(*Direction)
                    self.heap.at(reached_ns, link.heal)
            self.outcome.partly_reached += any(plan.reached_ns[index])

    def _machine(self, outer: OuterPlan, disk: str, only: Sequence[type[Checker]]) -> Machine:
        history = History(outer)
        found = [kind(outer, conserving=self.plan.whole.conserving) for kind in only]
        checkers = Checkers([*found, history])
        return Machine(Syncers(self.heap, outer, checkers, Random(disk)), checkers, history)

    def run(self) -> Outcome:
        """Faults, then one machine after the other out of reach while the others must go on, then the end."""
        outcome = self.outcome
        try:
            self._safety()
            self._alone()
            self._apart()
            self._end()
        except ERRORS as error:
            outcome.failure, outcome.checker = in_words(error)
        if outcome.failure:
            outcome.failure = f"{outcome.failure} (at {self.heap.now_ns / 1e9:.3f} s)"
        outcome.digest = "".join(machine.history.hexdigest() for machine in self.machines)
        outcome.events, outcome.simulated_ns = self.heap.events, self.heap.now_ns
        for machine in self.machines:
            outcome.restarts += machine.syncers.restarts
            outcome.power_cuts += machine.syncers.power_cuts
            outcome.versions += sum(machine.syncers.versions())
            outcome.fates.update(machine.history.fates)
        return outcome

    # --- the phases --------------------------------------------------------------------------------------------

    def _safety(self) -> None:
        for machine in self.machines:
            machine.syncers.start()
        for name, start_ns in zip(self.places, self.plan.whole.starts_ns, strict=True):
            self.heap.at(start_ns, lambda name=name: self._start(name))  # type: ignore[misc]
        self.heap.after(self._pause_ns(), self._trouble)
        self.heap.run_until(self.plan.whole.safety_ns, self._too_much)

    def _alone(self) -> None:
        """Nothing goes wrong any more, but that one machine is switched off at a time."""
        self.calm = True
        for place in self.places.values():
            for link in place.links:
                link.calm()
            for process in place.processes:
                process.thaw()
        for machine in self.machines:
            machine.syncers.heal()
        old = self.random.choice(self.machines) if "restore" in self.plan.faults else None
        if old is not None:
            old.syncers.back_up()
        for name in self.places:
            self._start(name)
        self._rise(self.machines, "after the heal")
        # A site that has never begun needs the values of all syncers, and where all sites count they wait for it.
        self.heap.run_until(self.heap.now_ns + RISE_NS, lambda: self._too_much() or self._begun())
        if not self._begun():
            raise Violation("liveness", f"a site does not begin to train: {self._why()}")
        for down in self.machines:
            (seat,) = down.syncers.seats
            seat.up = False
            down.syncers.kill(seat)
            self._rise([each for each in self.machines if each is not down], "while another machine is down")
            down.syncers.bring_up(seat)
        self._rise(self.machines, "when all are up again")
        if old is not None:
            self._set_back(old)
            self._rise(self.machines, "after a machine was set back")

    def _apart(self) -> None:
        """Sites are cut off from one syncer each, and one starts again, maybe on an empty disk: a syncer that enough
        sites reach goes on."""
        places, reach = [place for place in self.places.values() if place.running()], Counter[int]()
        options, needs_all = self.plan.whole.outer.options, list[Place]()
        old = [place for place in places if all(disk.checkpoint is not None for disk in place.disks)]
        if old and not self.plan.whole.conserving:
            place = self.random.choice(old)
            # A new site trains once it reaches all syncers; where each site counts, those that it reaches wait for it.
            if options.quorum != "all" and not options.round_updates and self.random.random() < 0.5:
                place.disks, needs_all = [SiteDisk() for _ in place.disks], [place]
            self._end_life(place, RESTART_NS)
        for place in places:
            away = self.random.randrange(len(self.machines))
            place.links[away].cut(*Direction)
            self.outcome.pairs_cut += 1
            if place not in needs_all:
                reach.update(at for at, _ in enumerate(self.machines) if at != away)
        needed = max(options.quorum_min, options.quorum if isinstance(options.quorum, int) else 1)
        enough = [machine for at, machine in enumerate(self.machines) if reach[at] >= needed]
        self._rise(enough, "while sites are cut off from other machines")
        for place in places:
            for link in place.links:
                link.heal()
        self._rise(self.machines, "when all sites reach all again")

    def _begun(self) -> bool:
        processes = [process for place in self.places.values() for process in place.processes]
        return all(process.step > 0 or process.stopping for process in processes)

    def _rise(self, machines: Sequence[Machine], when: str) -> None:
        """Every version of ``machines`` rises, but of those whose run is finished."""
        before = [machine.syncers.versions() for machine in machines]

        def rose() -> bool:
            pairs = [
                pair
                for machine, was in zip(machines, before, strict=True)
                for pair in zip(machine.syncers.versions(), was, strict=True)
                if not machine.syncers.ended()
            ]
            return all(version > was for version, was in pairs)

        self.heap.run_until(self.heap.now_ns + RISE_NS, lambda: self._too_much() or rose())
        if not rose():
            raise Violation("liveness", f"versions stand at {before} {when}: {self._why()}")

    def _end(self) -> None:
        """An operator has those drained that are not finished; then everything is counted."""
        self._ask_for_the_end()
        self.heap.run_until(self.heap.now_ns + END_NS, lambda: self._too_much() or self._gone())
        if not self._gone():
            raise Violation("liveness", f"the run does not end: {self._why()}")
        ended = [machine.syncers.outer.machine for machine in self.machines if machine.syncers.outer is not None]
        places = [place for place in self.places.values() if place.processes]
        for at, (machine, state) in enumerate(zip(self.machines, ended, strict=True)):
            machine.checkers.at_end(state, [place.processes[at] for place in places])
        for place in places:
            self.across.at_end(place, ended)

    def _ask_for_the_end(self) -> None:
        for machine in self.machines:
            outer = machine.syncers.outer
            if outer is not None and not machine.syncers.ended():
                outer.ask(outer.drain)
        self.heap.after(2 * SECOND_NS, self._ask_for_the_end)

    def _gone(self) -> bool:
        return all(machine.syncers.ended() for machine in self.machines) and not any(
            place.running() or (place.wanted and place.lives) for place in self.places.values()
        )

    def _too_much(self) -> bool:
        if self.heap.events > EVENTS_EACH_MAX:
            raise Violation("liveness", f"more than {EVENTS_EACH_MAX} events: {self._why()}")
        return False

    def _why(self) -> str:
        versions = [machine.syncers.versions() for machine in self.machines]
        sites = {
            name: [(process.alive, process.stopping, process.step) for process in place.processes]
            for name, place in self.places.items()
        }
        return f"versions {versions}, sites {sites}, {[machine.syncers.why() for machine in self.machines]}"

    # --- the sites ---------------------------------------------------------------------------------------------

    def _start(self, name: str) -> None:
        """A new process towards every syncer, where none lives."""
        place = self.places[name]
        if place.running() or not place.wanted:
            return
        place.lives += 1
        trainer = Trainer(self.heap, place.randoms[0], self.across.stepped)
        place.processes = []
        for at, machine in enumerate(self.machines):
            process = PartProcess(
                name,
                f"{name}-{place.lives}",
                self.heap,
                place.links[at],
                place.disks[at],
                place.plans[at],
                place.trouble,
                place.randoms[at],
                machine.checkers,
                machine.syncers.addresses(),
                self._exited,
            )
            process.trainer = trainer
            place.processes.append(process)
        trainer.parts = list(place.processes)
        for process in trainer.parts:
            process.start()

    def _end_life(self, place: Place, down_ns: int) -> None:
        """All parts of a site die at one instant; the supervisor starts them again."""
        for process in place.processes:
            process.kill()
        self.outcome.restarts += 1
        self.heap.after(down_ns, lambda: self._start(place.name))

    def _exited(self, part: object, why: str) -> None:
        assert isinstance(part, PartProcess)
        place = self.places[part.site]
        if part not in place.processes:
            return
        if not why.startswith("left"):
            self._end_life(place, RESTART_NS)  # A site that has failed at one syncer is of no use to the others.
        elif not place.running():
            self.across.site_ended(place)
            place.wanted = False

    # --- faults ------------------------------------------------------------------------------------------------

    def _pause_ns(self) -> int:
        return int(self.random.expovariate(1 / self.plan.whole.fault_interval_ns))

    def _down_ns(self) -> int:
        return self.random.choice(DOWNS_MS) * MILLISECOND_NS

    def _trouble(self) -> None:
        if self.calm:
            return
        kind = self.random.choice(self.plan.faults)
        machine = self.random.choice(self.machines)
        running = [place for place in self.places.values() if place.running()]
        if running and getattr(self, f"_{kind}")(machine, self.random.choice(running)) is not False:
            self.outcome.faults[kind] += 1
        self.heap.after(self._pause_ns(), self._trouble)

    def _outer_crash(self, machine: Machine, place: Place, *, power: bool = False) -> None:
        del place
        (seat,) = machine.syncers.seats
        seat.restart_ns = self._down_ns()
        point = self.random.choice((None, *CrashPoint))
        if point is None:
            machine.syncers.kill(seat, power=power)
        else:
            machine.syncers.doom(seat, point, power=power)

    def _power_cut(self, machine: Machine, place: Place) -> None:
        self._outer_crash(machine, place, power=True)

    def _rot(self, machine: Machine, place: Place) -> bool:
        del place
        return machine.syncers.outer is not None and machine.syncers.disk.storage.rot(self.random)

    def _outer_freeze(self, machine: Machine, place: Place) -> bool:
        del place
        outer = machine.syncers.outer
        if outer is None:
            return False
        outer.freeze()
        self.heap.after(self._down_ns(), outer.thaw)
        return True

    def _freeze(self, machine: Machine, place: Place) -> None:
        """All parts of a site are one process of its machine."""
        del machine
        frozen = list(place.processes)
        for process in frozen:
            process.freeze()

        def thaw() -> None:
            for process in frozen:
                process.thaw()

        self.heap.after(self._down_ns(), thaw)

    def _kill(self, machine: Machine, place: Place) -> None:
        del machine
        self._end_life(place, self._down_ns())

    def _partition(self, machine: Machine, place: Place) -> None:
        self._cut(machine, place, tuple(Direction))

    def _half_partition(self, machine: Machine, place: Place) -> None:
        self._cut(machine, place, (self.random.choice(tuple(Direction)),))

    def _cut(self, machine: Machine, place: Place, directions: tuple[Direction, ...]) -> None:
        link = place.links[self.machines.index(machine)]
        link.cut(*directions)
        self.heap.after(self._down_ns(), link.heal)

    def _split(self, machine: Machine, place: Place) -> None:
        """Sites are cut off from some of the syncers and reach the others: any pair, several at once."""
        del machine, place
        for place in self.places.values():
            near = self.random.choice(self.machines)
            for machine in self.machines:
                if machine is not near and self.random.random() < 0.6:
                    self._partition(machine, place)
                    self.outcome.pairs_cut += 1

    def _restore(self, machine: Machine, place: Place) -> bool:
        """A syncer's disk is copied, and set back to the copy after a while: the sites are ahead of it then."""
        del place
        if machine.syncers.outer is not None and machine.syncers.lineage <= LINEAGES_MAX:
            machine.syncers.back_up()
            age_ns = self.random.choice(AGES_MS) * MILLISECOND_NS
            self.heap.after(age_ns, lambda: None if self.calm else self._set_back(machine))
        return False

    def _set_back(self, machine: Machine) -> None:
        was = machine.syncers.outer
        if was is None or was.machine.state.phase is not Phase.RUNNING:
            return  # Sites that were told of an end come back only when their operators start them.
        machine.syncers.restore()
        assert machine.syncers.outer is not None
        now = machine.syncers.outer.machine.state
        self.across.set_back(self.machines.index(machine), was.machine.state, now)
        self.outcome.faults["restore"] += 1
        self.outcome.undone += acknowledged(was.machine.state) - acknowledged(now)

    def _storm(self, machine: Machine, place: Place) -> None:
        link = place.links[self.machines.index(machine)]
        usual = self.plan.whole.weathers[list(self.places).index(place.name)]
        link.weather = Weather(usual.latency_ns, usual.jitter_ns + SECOND_NS, 0.5, 0.3)

        def clear() -> None:
            if not self.calm:
                link.weather = dataclasses.replace(usual)

        self.heap.after(self._down_ns(), clear)


def acknowledged(state: OuterState) -> int:
    """The number of updates that a syncer has taken in."""
    return sum(line.watermark for site in state.sites.values() for line in site.lines)


def run_several(seed: int, only: Sequence[type[Checker]] = CHECKERS) -> Outcome:
    """Run ``seed`` to its end or to the first thing that must not happen."""
    return Several(draw_several(seed), only).run()
