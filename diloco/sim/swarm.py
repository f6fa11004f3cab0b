"""Run a seed: a safety phase under faults, then all faults are healed and the run must finish (as in TigerBeetle).

``Run`` is the common part of runs of one syncer and of several (``Several``).

A site has a whole process for each syncer, and one ``Trainer`` steps them all.  A site may be cut off from one syncer
while it reaches the others, from its start or later, and one syncer may be restored from an old backup while the others
continue.  Each syncer and its site processes have the same checkers as in a run of one syncer.  ``Several`` checks all
syncers together: a site has one step count and one ledger, it ends when all syncers have said so, and an absent syncer
stops no other.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from diloco.sim.checkers import Checker, Checkers, Staleness, Violation
from diloco.sim.cluster import Cluster, Site
from diloco.sim.outer_disk import CrashPoint
from diloco.sim.outer_process import RESTART_NS
from diloco.sim.plan import GENTLE, PAIR, SwarmPlan, draw_plan, inject_pair_fault
from diloco.sim.site_checkers import CHECKERS, History
from diloco.sim.site_state import SitePlan
from diloco.sim.world import MILLISECOND_NS, Direction, OuterPlan, Weather
from diloco.sync.events import DrainRequested, Ending, SiteEvicted, UpdateAdmitted, UpdateWithdrawn
from diloco.sync.options import SECOND_NS
from diloco.sync.progress import combined, ledger_of
from diloco.sync.state import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from diloco.sim.checkers import Checker
    from diloco.sim.cluster import Syncers
    from diloco.sim.outer_process import OuterProcess
    from diloco.sim.site_process import SiteProcess
    from diloco.sync.options import OuterOptions
    from diloco.sync.progress import Ledger
    from diloco.sync.state import OuterState
    from diloco.sync.syncer import OuterSync


RISE_NS = 30 * SECOND_NS
"""Every fragment must get a new version within this time after the heal."""
END_NS = 60 * SECOND_NS
"""The run must end and every site must leave within this time after the operator's drain."""
EVENTS_MAX = 60_000
DOWNS_MS = (50, 400, 2000, 6000)
TROUBLES: Mapping[str, tuple[float, ...]] = {
    "poison": (0.0, 0.02, 0.2),
    "outlier": (0.0, 0.3, 0.6),
    "ruin": (0.0, 0.1, 0.5),
}
"""The shares of a site's steps or updates that are drawn for ``Site.trouble``."""
LINEAGES_MAX = 4
ERRORS = (Violation, ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
"""The exceptions that end a run: a violation, or a bug in the product or in the simulator."""


APART = ("pairs_cut", "partly_reached", "undone")
"""How often a site was cut off from one syncer while it reached another; sites that reached only some syncers when they
started; accepted updates that a restore from a backup undid."""


@dataclass(slots=True)
class Outcome:
    """The result of a seed.  ``failure`` is empty when no invariant broke; ``checker`` names the one that failed."""

    seed: int
    failure: str = ""
    checker: str = ""
    digest: str = ""
    staleness_worst: int = 0
    ran: Counter[str] = field(default_factory=Counter)
    """Events, restarts, versions, promotions and simulated seconds.  In runs of several syncers also ``APART``."""
    faults: Counter[str] = field(default_factory=Counter)
    fates: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What a seed decides: a run of one syncer, and how its fragments are divided where there are several."""

    whole: SwarmPlan
    outers: tuple[OuterPlan, ...]
    sites: tuple[tuple[SitePlan, ...], ...]
    """For each site, its plan towards each syncer."""
    reached_ns: tuple[tuple[int, ...], ...] = ()
    """For several syncers: when each site first reaches each of them; 0: from its start.  Each site reaches one of them
    from its start."""


class Run(Cluster):
    """A simulated run with faults; the base of ``Swarm`` and ``Several``."""

    events_max = EVENTS_MAX

    def __init__(self, plan: RunPlan, only: Sequence[type[Checker]]) -> None:
        self.plan, seed = plan.whole, plan.whole.seed
        ways = [f"/{at}" for at, _ in enumerate(plan.outers)] if len(plan.outers) > 1 else [""]
        self.random, self.outcome, self.calm = Random(f"{seed}/faults"), Outcome(seed), False
        checkers = [Checkers(outer, (*only, History)) for outer in plan.outers]
        super().__init__(plan.outers, checkers, [Random(f"{seed}/disk{way}") for way in ways])
        for name, site, weather in zip("abcdefgh"[: len(plan.sites)], plan.sites, self.plan.weathers, strict=True):
            self.add_site(name, site, weather, [Random(f"{seed}/{name}{way}") for way in ways])

    def run(self) -> Outcome:
        """Run all phases, up to the first violation, and return the outcome."""
        outcome = self.outcome
        try:
            self.safety()
            self.liveness()
            self.end()
        except ERRORS as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            outcome.failure, outcome.checker = f"error: {error!r} in {place.name}, line {place.lineno}", "error"
            if isinstance(error, Violation):
                outcome.failure, outcome.checker = str(error), error.checker
            outcome.failure += f" (at {self.heap.now_ns / 1e9:.3f} s)"
        outcome.ran += Counter(
            events=self.heap.events, restarts=self.restarts, simulated_seconds=self.heap.now_ns // SECOND_NS
        )
        for syncers in self.syncers:
            outcome.ran += Counter(promotions=syncers.promotions, versions=sum(syncers.versions()))
            for checker in syncers.checkers.all:
                if isinstance(checker, History):
                    outcome.digest += checker.digest.hexdigest()
                    outcome.fates += checker.fates
                if isinstance(checker, Staleness):
                    outcome.staleness_worst = max(outcome.staleness_worst, checker.worst)
        return outcome

    # --- the phases --------------------------------------------------------------------------------------------

    def safety(self) -> None:
        """Run under faults."""
        for syncers in self.syncers:
            syncers.start()
        for name, start_ns in zip(self.sites, self.plan.starts_ns, strict=True):
            self.heap.at(start_ns, lambda name=name: self.start_site(name))  # type: ignore[misc]
        if self.plan.faults:
            self.heap.after(self._pause_ns(), self._trouble)
        self.heap.run_until(self.plan.safety_ns, self.too_much)

    def liveness(self) -> None:
        """End all faults."""
        self.calm = True
        self.heal()

    def end(self) -> None:
        """Ask the run to end, wait until every site has left, and run the final checks."""
        self._ask_for_the_end()
        self.wait_for(self._gone, END_NS, "the run does not end")
        for at, syncers in enumerate(self.syncers):
            assert syncers.outer is not None
            syncers.checkers.at_end(
                syncers.outer.machine, [site.parts[at] for site in self.sites.values() if site.parts]
            )

    def wait_for(
        self, what: Callable[[], bool], for_ns: int, wrong: str, must: Callable[[], bool] = lambda: True
    ) -> None:
        """Run until ``what()`` is true; raise ``Violation`` with ``wrong`` if it ``must()`` be, and is not in time."""
        self.heap.run_until(self.heap.now_ns + for_ns, lambda: self.too_much() or what())
        if not what() and must():
            raise Violation("liveness", f"{wrong}: {self.why()}")

    def rise(self, which: Sequence[Syncers], when: str, for_ns: int = RISE_NS) -> None:
        """Wait until every version of ``which`` rises, except at syncers whose run has ended."""
        before = [syncers.versions() for syncers in which]

        def rose() -> bool:
            return all(
                syncers.ended() or all(version > old for version, old in zip(syncers.versions(), was, strict=True))
                for syncers, was in zip(which, before, strict=True)
            )

        self.wait_for(rose, for_ns, f"versions stand at {before} {when}", self.can_rise)

    def can_rise(self) -> bool:
        """Return whether there are enough sites for a round; in a run of several syncers no site leaves early."""
        return True

    def too_much(self) -> bool:
        """Raise ``Violation`` after ``events_max`` events; otherwise return False."""
        if self.heap.events > self.events_max:
            raise Violation("liveness", f"more than {self.events_max} events: {self.why()}")
        return False

    def _gone(self) -> bool:
        sites = self.sites.values()
        alive = any(process.alive for site in sites for process in (*site.parts, *site.twins))
        return all(each.ended() for each in self.syncers) and not alive and not any(s.wanted for s in sites if s.lives)

    def _ask_for_the_end(self) -> None:
        """Drain every syncer whose run has not ended, and check again every two seconds."""
        for syncers in self.syncers:
            outer = syncers.outer
            if outer is not None and not syncers.ended():
                outer.ask(lambda outer=outer: outer.order(DrainRequested))  # type: ignore[misc]
        # Repeat also after the end: a standby that takes over then resumes the run.
        self.heap.after(2 * SECOND_NS, self._ask_for_the_end)

    def why(self) -> str:
        """Describe the state of sites and syncers, for a failure message."""
        sites = {
            name: (site.why, site.wanted, [(part.alive, part.stopping, part.step) for part in site.parts])
            for name, site in self.sites.items()
        }
        return f"sites {sites}, {'; '.join(syncers.why() for syncers in self.syncers)}"

    # --- faults ------------------------------------------------------------------------------------------------

    def _pause_ns(self) -> int:
        return int(self.random.expovariate(1 / self.plan.fault_interval_ns))

    def _down_ns(self) -> int:
        return self.random.choice(DOWNS_MS) * MILLISECOND_NS

    def _trouble(self) -> None:
        if self.calm:
            return
        kind = self.random.choice(self.plan.faults)
        syncers = self.random.choice(self.syncers) if len(self.syncers) > 1 else self.syncers[0]
        running = [site for site in self.sites.values() if site.running()]
        if kind in PAIR:
            self.outcome.faults[kind] += inject_pair_fault(syncers, self.random, kind)
        elif running:
            self.outcome.faults[kind] += self.inject(kind, syncers, self.random.choice(running))
        self.heap.after(self._pause_ns(), self._trouble)

    def inject(self, kind: str, syncers: Syncers, site: Site) -> bool:
        """Inject fault ``kind`` at ``syncers`` or ``site``; return whether that was possible."""
        link = site.sides[self.syncers.index(syncers)].link
        match kind:
            case "outer_crash" | "power_cut":
                seat, power = syncers.seat_of_outer(), kind == "power_cut"
                seat.restart_ns = self._down_ns()
                point = self.random.choice((None, *CrashPoint))
                if point is None:
                    syncers.kill(seat, power=power)
                else:
                    syncers.doom(seat, point, power=power)
            case "rot":
                # Only while a process is alive: the journal cannot find rot in a last frame without its mark.
                return syncers.outer is not None and syncers.disk.storage.rot(self.random)
            case "outer_freeze":
                if syncers.outer is None:
                    return False
                syncers.outer.freeze(self._down_ns())
            case "freeze":  # All parts of a site together: they stand for one process of its machine.
                for_ns = self._down_ns()
                for part in site.parts:
                    part.freeze(for_ns)
            case "partition" | "half_partition":
                half = kind == "half_partition"
                link.cut(*((self.random.choice(tuple(Direction)),) if half else Direction))
                self.heap.after(self._down_ns(), link.heal)
            case "storm":
                usual = self.plan.weathers[list(self.sites).index(site.name)]
                link.weather = Weather(usual.latency_ns, usual.jitter_ns + SECOND_NS, 0.5, 0.3)

                def clear() -> None:
                    if not self.calm:
                        link.weather = usual

                self.heap.after(self._down_ns(), clear)
            case "kill":
                self.kill_site(site.name, self._down_ns())
            case _:
                raise LookupError(kind)
        return True


class Swarm(Run):
    """A run of one syncer, perhaps with a standby."""

    def __init__(self, plan: SwarmPlan, only: Sequence[type[Checker]] = CHECKERS) -> None:
        super().__init__(RunPlan(plan, (plan.outer,), tuple((site,) for site in plan.sites)), only)

    def liveness(self) -> None:
        """Check that versions rise and that the standby catches up."""
        super().liveness()
        (syncers,) = self.syncers
        if self.can_rise() and not syncers.ended():
            # A site in lock-step waits out the limit for each of its fragments in turn before it is in step again.
            self.rise(self.syncers, "since the heal", RISE_NS * (4 if self.plan.sites[0].options.lock_step else 1))
        self.wait_for(syncers.caught_up, RISE_NS, "the standby does not catch up")

    def can_rise(self) -> bool:
        """Return whether there are enough sites for a round."""
        return sum(site.wanted for site in self.sites.values()) >= needed(self.plan.outer.options)

    # --- faults ------------------------------------------------------------------------------------------------

    def inject(self, kind: str, syncers: Syncers, site: Site) -> bool:
        """As ``Run.inject``, with the faults that only runs of one syncer have."""
        outer, random = syncers.outer, self.random
        match kind:
            case "wipe":
                self.wipe_site(site.name, self._down_ns())
            case "twin":
                self.twin_site(site.name)
            case "leave":
                for part in site.parts:
                    part.ask_to_leave()
                if random.random() < 0.6:
                    self.heap.after(8 * SECOND_NS, lambda: None if self.calm else self.come_back(site.name))
            case "evict":
                if outer is None or self.outcome.faults["evict"] or random.random() < 0.5:
                    return False
                outer.ask(lambda: outer.order(lambda call: SiteEvicted(call, site.name)))
            case "restore":  # Back up the syncer's disk; at a later call restore it, with a new lineage.
                if outer is None or syncers.lineage > LINEAGES_MAX:
                    return False
                if syncers.backup is None or random.random() < 0.5:
                    syncers.back_up()
                    return False
                syncers.restore()
            case "poison" | "outlier" | "ruin":
                site.trouble[kind] = random.choice(TROUBLES[kind])
            case "word":
                return outer is not None and self._decide_for_an_operator(outer)
            case "drain":  # Drain in mid-run; once all sites have left, restart the syncer and the sites.
                if outer is None or self.outcome.faults["drain"]:
                    return False
                outer.ask(lambda: outer.order(DrainRequested))
                self.heap.after(SECOND_NS, lambda: self._resume(syncers))
            case _:
                return super().inject(kind, syncers, site)
        return True

    def _decide_for_an_operator(self, outer: OuterProcess) -> bool:
        """Admit or withdraw an update for an operator: a held one or, if there is none, a waiting one."""
        waiting = [
            (pending.held is None, name, index, pending.sequence)
            for name, member in sorted(outer.machine.state.sites.items())
            for index, line in enumerate(member.lines)
            for pending in line.undecided
        ]
        if waiting:
            _, name, index, sequence = min(waiting)
            word = self.random.choice((UpdateAdmitted, UpdateWithdrawn))
            outer.ask(lambda: outer.order(lambda call: word(call, name, index, sequence)))
        return bool(waiting)

    def _resume(self, syncers: Syncers) -> None:
        outer = syncers.outer
        if self.calm:
            return
        if outer is None or outer.final is None or any(site.running() for site in self.sites.values()):
            self.heap.after(SECOND_NS, lambda: self._resume(syncers))
        elif outer.final.ending is Ending.DRAINED:
            syncers.kill(syncers.seat_of_outer())
            for name, site in self.sites.items():
                if site.lives:
                    self.come_back(name)


def needed(options: OuterOptions) -> int:
    """Return the least number of sites for a round."""
    return max(options.quorum_min, options.quorum if isinstance(options.quorum, int) else 1)


# --- Simulated runs of one model held by several syncers, each with its own faults, and sites with theirs ------------

FAULTS = (*GENTLE, "split", "kill", "restore")
AGES_MS = (400, 2000, 6000, 12_000)
"""The possible ages of a backup when a syncer is restored from it."""


def draw_several(seed: int) -> RunPlan:
    """Draw the plan of ``seed``, deterministically; never in lock-step, and without standbys."""
    whole, random = draw_plan(seed), Random(f"{seed}/several")
    sizes = [random.randint(1, 2) for _ in range(random.choice((2, 2, 3)))]
    total, apart = sum(sizes), Random(f"{seed}/apart")
    # In six runs of ten a token budget: what the sites train on in some seconds.  A syncer ends when it has merged it.
    seconds, ends = apart.randint(1, 12), apart.random() < 0.6
    tokens, step_ns = sum(site.tokens for site in whole.sites), max(site.step_ns for site in whole.sites)
    budget = seconds * SECOND_NS * tokens // step_ns if ends else 0
    options = dataclasses.replace(whole.outer.options, run_ns=0, token_budget=budget)
    outers = [_outer(whole.outer, options, size, leases=index == 0) for index, size in enumerate(sizes)]
    split = ("split",) if apart.random() < 0.6 else ()
    faults = tuple(kind for kind in whole.faults if kind in FAULTS) + split
    return RunPlan(
        dataclasses.replace(whole, faults=faults or ("outer_crash",)),
        tuple(outers),
        tuple(_site(site, sizes, total) for site in whole.sites),
        tuple(_reached_ns(apart, start_ns, len(sizes)) for start_ns in whole.starts_ns),
    )


def _outer(plan: OuterPlan, options: OuterOptions, size: int, *, leases: bool) -> OuterPlan:
    """Return the plan of one syncer with ``size`` fragments; only the first syncer ``leases`` data units."""
    unit = options.unit_sequences if leases else 0
    own = dataclasses.replace(options, num_fragments=size, unit_sequences=unit)
    return dataclasses.replace(plan, options=own, replication=None)


def _reached_ns(random: Random, start_ns: int, num_syncers: int) -> tuple[int, ...]:
    """Draw when a site first reaches each syncer: three sites of ten reach only some of them when they start."""
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
        found.append(dataclasses.replace(site, options=part, ranks=False))
    return tuple(found)


class Several(Run):
    """A run of several syncers."""

    events_max = 2 * EVENTS_MAX

    def __init__(self, plan: RunPlan, only: Sequence[type[Checker]] = CHECKERS) -> None:
        self.tokens_undone: Counter[tuple[str, int, int]] = Counter()
        """By site, syncer and fragment: tokens merged after the backup from which the syncer was restored."""
        super().__init__(plan, only)
        for site, reached_ns in zip(self.sites.values(), plan.reached_ns, strict=True):
            self.outcome.ran["partly_reached"] += any(reached_ns)
            for side, instant_ns in zip(site.sides, reached_ns, strict=True):
                if instant_ns:
                    side.link.cut(*Direction)
                    self.heap.at(instant_ns, side.link.heal)

    # --- the phases --------------------------------------------------------------------------------------------

    def liveness(self) -> None:
        """Take down one syncer after the other while the others must go on; then cut sites off."""
        super().liveness()
        old = self.random.choice(self.syncers) if "restore" in self.plan.faults else None
        if old is not None:
            old.back_up()
        self.rise(self.syncers, "after the heal")
        # A site that has not begun needs the values of all syncers; where rounds count every site, they wait for it.
        self.wait_for(self._begun, RISE_NS, "a site does not begin to train")
        for down in self.syncers:
            (seat,) = down.seats
            seat.up = False
            down.kill(seat)
            self.rise([each for each in self.syncers if each is not down], "while another machine is down")
            down.bring_up(seat)
        self.rise(self.syncers, "when all are up again")
        if old is not None:
            self._set_back(old)
            self.rise(self.syncers, "after a syncer was restored")
        self._apart()

    def _apart(self) -> None:
        """Cut each site off from one syncer, and restart one site, maybe on an empty disk: each syncer that enough
        sites reach must go on."""
        sites, reach = [site for site in self.sites.values() if site.running()], Counter[int]()
        options, needs_all = self.plan.outer.options, list[Site]()
        old = [site for site in sites if all(side.disk.checkpoint is not None for side in site.sides)]
        if old and not self.plan.outer.conserving:
            site = self.random.choice(old)
            # A new site trains only once it reaches all syncers; where rounds count every site, they wait for it.
            if options.quorum != "all" and not options.round_updates and self.random.random() < 0.5:
                needs_all = [site]
                self.wipe_site(site.name, RESTART_NS)
            else:
                self.kill_site(site.name, RESTART_NS)
        for site in sites:
            away = self.random.randrange(len(self.syncers))
            site.sides[away].link.cut(*Direction)
            self.outcome.ran["pairs_cut"] += 1
            if site not in needs_all:
                reach.update(at for at, _ in enumerate(self.syncers) if at != away)
        enough = [syncers for at, syncers in enumerate(self.syncers) if reach[at] >= needed(options)]
        self.rise(enough, "while sites are cut off from other machines")
        for site in sites:
            for side in site.sides:
                side.link.heal()
        self.rise(self.syncers, "when all sites reach all again")

    def _begun(self) -> bool:
        return all(part.step > 0 or part.stopping for site in self.sites.values() for part in site.parts)

    def end(self) -> None:
        """End the run, and check that the sites and the syncers have counted the same."""
        super().end()
        ended = [syncers.outer.machine for syncers in self.syncers if syncers.outer is not None]
        for site in self.sites.values():
            if site.parts:
                self.site_at_end(site, ended)

    # --- checks across all syncers -----------------------------------------------------------------------------

    def require(self, holds: bool, *parts: object) -> None:
        """Raise ``Violation`` with ``parts`` unless it ``holds``."""
        if not holds:
            raise Violation("across", *parts)

    def stepped(self, parts: Sequence[SiteProcess]) -> None:
        """All training parts of a site, and their machines, have made the same steps, whichever syncers they reach."""
        there = [part for part in parts[0].trainer.parts if part.alive and not part.frozen and not part.stopping]
        made = {(part.step, part.machine.state.step) for part in there}
        self.require(len(made) <= 1, parts[0].site, "has parts that made other steps:", sorted(made))

    def site_ended(self, site: Site) -> None:
        """A site ends only when every syncer has told it so."""
        endings = [process.machine.state.ending for process in site.parts]
        self.require(None not in endings, site.name, "ends, and was told", endings)

    def site_at_end(self, site: Site, machines: Sequence[OuterSync]) -> None:
        """The site and the syncers count the same merged tokens, over all fragments, and a site that never restarted
        has lost only tokens that restored syncers had merged after their backups."""
        ledgers: list[Ledger] = []
        merged = there = 0
        leasing = [at for at, machine in enumerate(machines) if machine.state.units is not None]
        self.require(leasing in ([], [0]), "units are leased by", leasing)
        for at, (process, machine) in enumerate(zip(site.parts, machines, strict=True)):
            for index, part in enumerate(process.machine.state.fragments):
                undone = self.tokens_undone[site.name, at, index]
                explained = site.lives > 1 or part.tokens_lost <= undone
                self.require(
                    explained, site.name, "lost", part.tokens_lost, "and syncer", at, f"undid {undone} of {index}"
                )
                line = machine.state.sites[site.name].lines[index]
                fates = {fate.sequence: fate for fate in line.fates if fate.merged}
                waiting = [s.sequence for s in part.in_flight if s.merged_version is None and not s.outrun]
                waiting += [orphan.sequence for orphan in part.orphans]
                merged += part.tokens_merged + sum(fates[each].tokens for each in waiting if each in fates)
                there += line.tokens_merged
                ledgers.append(ledger_of(process.machine.state, index))
        whole = combined(ledgers)
        self.require(merged == there, site.name, "counts", merged, "merged tokens, the syncers", there)
        self.require(whole.balanced(), site.name, "has the ledger", whole)
        spread = abs(whole.merged * len(ledgers) - sum(ledger.merged for ledger in ledgers))
        self.require(spread <= len(ledgers), site.name, "counts", whole.merged, "as the mean of", ledgers)

    # --- faults ------------------------------------------------------------------------------------------------

    def inject(self, kind: str, syncers: Syncers, site: Site) -> bool:
        """As ``Run.inject``, with the faults that runs of several syncers have or inject in another way."""
        if kind == "split":  # Cut sites off from some syncers while they reach the others: any pair, several at once.
            for each in self.sites.values():
                near = self.random.choice(self.syncers)
                for far in self.syncers:
                    if far is not near and self.random.random() < 0.6:
                        super().inject("partition", far, each)
                        self.outcome.ran["pairs_cut"] += 1
            return True
        if kind == "restore":  # Copy a syncer's disk, and restore the copy later, when the sites are ahead of it.
            if syncers.outer is not None and syncers.lineage <= LINEAGES_MAX:
                syncers.back_up()
                age_ns = self.random.choice(AGES_MS) * MILLISECOND_NS
                self.heap.after(age_ns, lambda: None if self.calm else self._set_back(syncers))
            return False  # It counts when the copy is restored.
        return super().inject(kind, syncers, site)

    def _set_back(self, syncers: Syncers) -> None:
        was = syncers.outer
        if was is None or was.machine.state.phase is not Phase.RUNNING:
            return  # Once the run is ending, sites come back only when their operators start them.
        syncers.restore()
        assert syncers.outer is not None
        now, at = syncers.outer.machine.state, self.syncers.index(syncers)
        for name, site in was.machine.state.sites.items():
            for index, line in enumerate(site.lines):
                kept = now.sites[name].lines[index].tokens_merged if name in now.sites else 0
                self.tokens_undone[name, at, index] += line.tokens_merged - kept
        self.outcome.faults["restore"] += 1
        self.outcome.ran["undone"] += acknowledged(was.machine.state) - acknowledged(now)


def acknowledged(state: OuterState) -> int:
    """Return the number of updates that a syncer has accepted."""
    return sum(line.watermark for site in state.sites.values() for line in site.lines)
