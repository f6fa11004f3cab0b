"""One seed, one run: a safety phase under faults, then everything is healed and must finish (TigerBeetle's way)."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from diloco.sim.checkers import Checker, Checkers, Staleness, Violation
from diloco.sim.cluster import Cluster
from diloco.sim.outer_process import CrashPoint
from diloco.sim.plan import PAIR, PairFaults, SwarmPlan, draw_plan
from diloco.sim.site_checkers import CHECKERS, History
from diloco.sim.world import MILLISECOND_NS, Direction, Weather
from diloco.sync.events import Ending, UpdateAdmitted, UpdateWithdrawn
from diloco.sync.options import SECOND_NS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.sim.cluster import Seat

RISE_NS = 30 * SECOND_NS
"""Within this, after the heal, every fragment gets a new version."""
END_NS = 60 * SECOND_NS
"""Within this, after the operator's word, the run has ended and every site has left."""
EVENTS_MAX = 60_000
LINEAGES_MAX = 4
ERRORS = (Violation, ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
"""That end a run: what must not happen, or a mistake in the product or here."""


@dataclass(slots=True)
class Outcome:
    """What came of a seed.  ``failure`` is empty when nothing was broken; ``checker`` says who saw it."""

    seed: int
    failure: str = ""
    checker: str = ""
    digest: str = ""
    events: int = 0
    simulated_ns: int = 0
    restarts: int = 0
    power_cuts: int = 0
    promotions: int = 0
    damage_found: int = 0
    staleness_worst: int = 0
    versions: int = 0
    pairs_cut: int = 0
    """Of several syncers: how often a site was cut off from one while it reached another."""
    partly_reached: int = 0
    """Of several: sites that reached only some of them when they started."""
    undone: int = 0
    """Of several: updates that lay after the backup to which their syncer was set back."""
    faults: Counter[str] = field(default_factory=Counter)
    fates: Counter[str] = field(default_factory=Counter)

    def apart(self) -> Counter[str]:
        """The figures that runs with several syncers have besides."""
        return Counter(pairs_cut=self.pairs_cut, partly_reached=self.partly_reached, undone=self.undone)


def run_seed(seed: int, only: Sequence[type[Checker]] = CHECKERS) -> Outcome:
    """Run ``seed`` to its end or to the first thing that must not happen."""
    return Swarm(draw_plan(seed), only).run()


class Swarm:
    """A run under way."""

    def __init__(self, plan: SwarmPlan, only: Sequence[type[Checker]] = CHECKERS) -> None:
        self.plan = plan
        self.random = Random(f"{plan.seed}/faults")
        self.history = History(plan.outer)
        self.staleness = Staleness(plan.outer)
        checkers = [kind(plan.outer, conserving=plan.conserving) for kind in only]
        self.cluster = Cluster(
            plan.outer, Checkers([*checkers, self.staleness, self.history]), Random(f"{plan.seed}/disk")
        )
        self.pair_faults = PairFaults(self.cluster.syncers, self.random)
        self.outcome = Outcome(plan.seed)
        self.calm = False
        for index, (site, weather) in enumerate(zip(plan.sites, plan.weathers, strict=True)):
            name = "abcdefgh"[index]
            self.cluster.add_site(name, site, dataclasses.replace(weather), Random(f"{plan.seed}/{name}"))

    def run(self) -> Outcome:
        """Both phases."""
        outcome, heap = self.outcome, self.cluster.heap
        try:
            self._safety()
            self._liveness()
        except ERRORS as error:
            outcome.failure, outcome.checker = in_words(error)
        if outcome.failure:
            outcome.failure = f"{outcome.failure} (at {heap.now_ns / 1e9:.3f} s)"
        outcome.digest = self.history.hexdigest()
        outcome.events, outcome.simulated_ns = heap.events, heap.now_ns
        outcome.restarts = self.cluster.restarts
        outcome.power_cuts, outcome.damage_found = self.cluster.syncers.power_cuts, self.cluster.syncers.damage_found
        outcome.promotions = self.cluster.syncers.promotions
        outcome.staleness_worst = self.staleness.worst
        outcome.fates.update(self.history.fates)
        outcome.versions = sum(self.cluster.syncers.versions())
        return outcome

    # --- the two phases ----------------------------------------------------------------------------------------

    def _safety(self) -> None:
        cluster, heap = self.cluster, self.cluster.heap
        cluster.syncers.start()
        for name, start_ns in zip(cluster.sites, self.plan.starts_ns, strict=True):
            heap.at(start_ns, lambda name=name: cluster.start_site(name))  # type: ignore[misc]
        if self.plan.faults:
            heap.after(self._pause_ns(), self._trouble)
        heap.run_until(self.plan.safety_ns, self._too_much)

    def _liveness(self) -> None:
        """Nothing goes wrong any more: versions rise, the run ends when asked to, everybody says goodbye."""
        cluster, heap = self.cluster, self.cluster.heap
        self.calm = True
        cluster.heal()
        for site in cluster.sites.values():
            if site.wanted and not site.running():
                cluster.start_site(site.name)
        before = cluster.syncers.versions()
        if self._can_rise():
            # A site in lock-step gives up waiting for each of its fragments in turn before it is in step again.
            bound_ns = RISE_NS * (4 if self.plan.sites[0].options.lock_step else 1)
            heap.run_until(
                heap.now_ns + bound_ns, lambda: self._too_much() or cluster.syncers.ended() or self._rose(before)
            )
            if self._can_rise() and not self._rose(before):
                raise Violation("liveness", f"versions stand at {before} since the heal: {self._why()}")
        heap.run_until(heap.now_ns + RISE_NS, lambda: self._too_much() or cluster.syncers.caught_up())
        if not cluster.syncers.caught_up():
            raise Violation("liveness", f"the standby does not catch up: {self._why()}")
        self._ask_for_the_end()
        heap.run_until(heap.now_ns + END_NS, lambda: self._too_much() or self._gone())
        if not self._gone():
            raise Violation("liveness", f"the run does not end: {self._why()}")
        assert cluster.outer is not None
        last = [site.process for site in cluster.sites.values() if site.process is not None]
        cluster.checkers.at_end(cluster.outer.machine, last)

    def _too_much(self) -> bool:
        if self.cluster.heap.events > EVENTS_MAX:
            raise Violation("liveness", f"more than {EVENTS_MAX} events: {self._why()}")
        return False

    def _can_rise(self) -> bool:
        options = self.plan.outer.options
        needed = options.quorum_min if options.quorum == "all" else max(int(options.quorum), options.quorum_min)
        return sum(site.wanted for site in self.cluster.sites.values()) >= needed and not self.cluster.syncers.ended()

    def _rose(self, before: list[int]) -> bool:
        now = self.cluster.syncers.versions()
        return all(version > was for version, was in zip(now, before, strict=True))

    def _gone(self) -> bool:
        sites = self.cluster.sites.values()
        alone = not any(process.alive for site in sites for process in (site.process, *site.twins) if process)
        return self.cluster.syncers.ended() and alone and not any(site.wanted for site in sites if site.lives)

    def _ask_for_the_end(self) -> None:
        """An operator asks for a pause until the run has ended, and starts sites that went too early no more."""
        cluster = self.cluster
        if cluster.outer is not None and not cluster.syncers.ended():
            outer = cluster.outer
            outer.ask(outer.drain)
        # Once more also after the end: who takes over after that takes the run up again.
        cluster.heap.after(2 * SECOND_NS, self._ask_for_the_end)

    def _why(self) -> str:
        outer = self.cluster.outer
        if outer is None:
            return f"no syncer, {self.cluster.syncers.why()}"
        rounds = [
            (fragment.version, fragment.round, fragment.merging_since_ns) for fragment in outer.machine.state.fragments
        ]
        sites = {
            name: (site.why, site.running(), site.process and site.process.stopping)
            for name, site in self.cluster.sites.items()
        }
        syncers = self.cluster.syncers.why()
        members = {name: site.status.value for name, site in outer.machine.state.sites.items()}
        return f"{outer.machine.state.phase.value}, rounds {rounds}, sites {sites}, members {members}, {syncers}"

    # --- faults ------------------------------------------------------------------------------------------------

    def _pause_ns(self) -> int:
        return int(self.random.expovariate(1 / self.plan.fault_interval_ns))

    def _trouble(self) -> None:
        if self.calm:
            return
        kind = self.random.choice(self.plan.faults)
        running = [name for name, site in self.cluster.sites.items() if site.running()]
        if kind in PAIR:
            self.outcome.faults[kind] += self.pair_faults.inject(kind)
        elif running and getattr(self, f"_{kind}")(self.random.choice(running)) is not False:
            self.outcome.faults[kind] += 1
        self.cluster.heap.after(self._pause_ns(), self._trouble)

    def _down_ns(self) -> int:
        return self.random.choice((50, 400, 2000, 6000)) * MILLISECOND_NS

    def _outer_crash(self, name: str, *, power: bool = False) -> None:
        del name
        self._crash(self.cluster.syncers.seat_of_outer(), power=power)

    def _crash(self, seat: Seat, *, power: bool) -> None:
        seat.restart_ns = self._down_ns()
        point = self.random.choice((None, *CrashPoint))
        if point is None:
            self.cluster.syncers.kill(seat, power=power)
        else:
            self.cluster.syncers.doom(seat, point, power=power)

    def _power_cut(self, name: str) -> None:
        self._outer_crash(name, power=True)

    def _rot(self, name: str) -> bool:
        del name
        # Not while no process lives: rot in a last frame whose mark a power cut took is not claimed to be found.
        return self.cluster.outer is not None and self.cluster.syncers.disk.storage.rot(self.random)

    def _outer_freeze(self, name: str) -> bool:
        del name
        outer = self.cluster.outer
        if outer is None:
            return False
        outer.freeze()
        self.cluster.heap.after(self._down_ns(), outer.thaw)
        return True

    def _freeze(self, name: str) -> None:
        process = self.cluster.sites[name].process
        assert process is not None
        process.freeze()
        self.cluster.heap.after(self._down_ns(), process.thaw)

    def _partition(self, name: str) -> None:
        self.cluster.cut(name, (Direction.UP, Direction.DOWN), self._down_ns())

    def _half_partition(self, name: str) -> None:
        self.cluster.cut(name, (self.random.choice(tuple(Direction)),), self._down_ns())

    def _storm(self, name: str) -> None:
        link = self.cluster.sites[name].link
        usual = self.plan.weathers[list(self.cluster.sites).index(name)]
        link.weather = Weather(usual.latency_ns, usual.jitter_ns + SECOND_NS, 0.5, 0.3)

        def clear() -> None:
            if not self.calm:
                link.weather = dataclasses.replace(usual)

        self.cluster.heap.after(self._down_ns(), clear)

    def _kill(self, name: str) -> None:
        self.cluster.kill_site(name, self._down_ns())

    def _wipe(self, name: str) -> None:
        self.cluster.wipe_site(name, self._down_ns())

    def _twin(self, name: str) -> None:
        self.cluster.twin_site(name)

    def _leave(self, name: str) -> None:
        process = self.cluster.sites[name].process
        assert process is not None
        process.ask_to_leave()
        if self.random.random() < 0.6:
            self.cluster.heap.after(8 * SECOND_NS, lambda: self._come_back(name))

    def _come_back(self, name: str) -> None:
        if not self.calm:
            self.cluster.come_back(name)

    def _evict(self, name: str) -> bool:
        outer = self.cluster.outer
        if outer is None or self.outcome.faults["evict"] or self.random.random() < 0.5:
            return False
        outer.ask(lambda: outer.evict(name))
        return True

    def _restore(self, name: str) -> bool:
        """The syncer's disk is copied, and some time later set back to the copy, with a new lineage."""
        del name
        outer = self.cluster.outer
        if outer is None or self.cluster.syncers.lineage > LINEAGES_MAX:
            return False
        if self.cluster.syncers.backup is None or self.random.random() < 0.5:
            self.cluster.syncers.back_up()
            return False
        self.cluster.syncers.restore()
        return True

    def _poison(self, name: str) -> None:
        trouble = self.cluster.sites[name].trouble
        trouble.poisoned = self.random.choice((0.0, 0.02, 0.2))

    def _outlier(self, name: str) -> None:
        trouble = self.cluster.sites[name].trouble
        trouble.outlying = self.random.choice((0.0, 0.3, 0.6))

    def _word(self, name: str) -> bool:
        """An operator decides on an update that is held, or on one that only waits."""
        del name
        outer = self.cluster.outer
        if outer is None:
            return False
        waiting = [
            (pending.held is None, site, index, pending.sequence)
            for site, member in sorted(outer.machine.state.sites.items())
            for index, line in enumerate(member.lines)
            for pending in line.undecided
        ]
        if not waiting:
            return False
        _, site, index, sequence = min(waiting)
        word = self.random.choice((UpdateAdmitted, UpdateWithdrawn))
        outer.ask(lambda: outer.say(word, site, index, sequence))
        return True

    def _ruin(self, name: str) -> None:
        trouble = self.cluster.sites[name].trouble
        trouble.ruined = self.random.choice((0.0, 0.1, 0.5))

    def _drain(self, name: str) -> bool:
        """A pause in mid-run: once everybody is gone the syncer and the sites are started again."""
        del name
        outer = self.cluster.outer
        if outer is None or self.outcome.faults["drain"]:
            return False
        outer.ask(outer.drain)
        self.cluster.heap.after(SECOND_NS, self._resume)
        return True

    def _resume(self) -> None:
        cluster = self.cluster
        outer = cluster.outer
        if self.calm:
            return
        if outer is None or outer.final is None or any(site.running() for site in cluster.sites.values()):
            cluster.heap.after(SECOND_NS, self._resume)
        elif outer.final.ending is Ending.DRAINED:
            cluster.syncers.kill(cluster.syncers.seat_of_outer())
            for name, site in cluster.sites.items():
                if site.lives:
                    cluster.come_back(name)


def in_words(error: Exception) -> tuple[str, str]:
    """What went wrong, and which checker saw it."""
    if isinstance(error, Violation):
        return str(error), error.checker
    return f"error: {error!r} {_place(error)}", "error"


def _place(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f"in {trace.tb_frame.f_code.co_name}, line {trace.tb_lineno}"
