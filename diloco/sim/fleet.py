"""Simulate weeks of a syncer and its sites without tensors: training, waiting, absences, and bytes on the links.

The machines are the real ones, so quorum, grace, staleness, windows and fates are those of a run; only time is
simulated.  A site's inner steps pass as one stretch until something is due.  A link carries updates up, or versions
down, one after the other.  A site fails as often as its chips do, is away until it can go on without the lost chip, and
resumes where it stopped.  ``Faults`` of the plan come in addition, at set times or to several sites at once.

The simulation has no tensors of its own.  With a ``Cargo`` it trains a model, by the same machines and at the same
virtual instants.

A site may be a region (``RegionalSyncer``): a syncer with a fleet of its own below it, whose machine decides what goes
up and when (``sync/region.py``).  Neither syncer fails; the sites of a region do.

Unlike ``swarm``, this has no lost, duplicated or reordered messages, no disks, and no syncer that dies (it may pause).
"""

from __future__ import annotations

import gc
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from diloco.sim.fleet_plan import Cargo, FleetPlan, FleetResult, FleetSite, Region
from diloco.sim.fleet_site import Hub, Member, Site, to_ns
from diloco.sim.world import Heap
from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.options import SECOND_NS
from diloco.sync.state import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from diloco.sim.fleet_plan import FleetFault

LOOK_S = 1.0
"""The interval between two checks of the run's progress, while a fault waits for a share of it."""


class Faults:
    """Plays the faults of a plan on its fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._waiting = list(fleet.plan.faults)
        for site in fleet.sites:
            if isinstance(site, Site):
                rate, away_s = site.site.interruptions_per_s, site.site.away_s
                alone = Region(sites=(site.index,), interruptions_per_s=rate, away_s=away_s)
                self._fail_some_day(alone, site.random)
        for number, region in enumerate(fleet.plan.regions):
            self._fail_some_day(region, Random(f"{fleet.plan.seed}/region/{number}"))

    def first_step(self) -> None:
        """Handle the fleet's first training step: faults with a time count from here."""
        heap = self._fleet.heap
        for fault in self._waiting:
            if fault.at_s is not None:
                heap.after(to_ns(fault.at_s), lambda fault=fault: self._play(fault))  # type: ignore[misc]
        self._waiting = [fault for fault in self._waiting if fault.at_s is None]
        self._look()

    def _look(self) -> None:
        fleet, seconds = self._fleet, self._fleet.plan.seconds
        # The share of the run, by its tokens or its time, or of the simulated time, whichever is larger.
        share = max(fleet.machine.progress_ppm() / 1e6, fleet.heap.now_ns / to_ns(seconds) if seconds else 0.0)
        for fault in [fault for fault in self._waiting if fault.at_share is not None and fault.at_share <= share]:
            self._waiting.remove(fault)
            self._play(fault)
        if self._waiting:
            self._fleet.heap.after(to_ns(LOOK_S), self._look)

    def _play(self, fault: FleetFault) -> None:
        lasts_ns = None if fault.lasts_s is None else to_ns(fault.lasts_s)
        if fault.site is None:
            assert lasts_ns is not None, fault
            self._fleet.pause(lasts_ns, is_there=fault.kind != "down")
            return
        site = self._one(fault.site)
        match fault.kind:
            case "away":
                site.stop(lasts_ns)
            case "cut":
                assert lasts_ns is not None, fault
                site.cut(lasts_ns)
            case "start" if not site.lives:
                site.start()
            case "leave":
                site.asked_to_leave()

    def _fail_some_day(self, region: Region, random: Random) -> None:
        if region.interruptions_per_s:
            after_ns = to_ns(random.expovariate(region.interruptions_per_s))
            self._fleet.heap.after(after_ns, lambda: self._fail(region, random))

    def _fail(self, region: Region, random: Random) -> None:
        for index in region.sites:
            site = self._one(index)
            site.account.interruptions += 1
            site.stop(to_ns(region.away_s))
        self._fail_some_day(region, random)

    def _one(self, index: int) -> Site:
        site = self._fleet.sites[index]
        assert isinstance(site, Site), "nothing happens to a region's own process"
        return site


class RegionalSyncer(Member):
    """A region: one site of ``fleet``, above, with the fleet ``below`` of its own sites."""

    def __init__(self, fleet: Hub, index: int, site: FleetSite, below: Fleet) -> None:
        assert site.region is not None, site
        super().__init__(fleet, index, site)
        self.below = below
        self.lives, self._is_there = 1, True
        self._incarnation = 0
        self._sealed: dict[tuple[int, int], fx.Seal] = {}
        self._have = [-1 for _ in below.machine.state.fragments]
        """The newest version received from above, by fragment."""
        self._has_left = False
        below.above = self._order
        region, in_flight_max = site.region, fleet.plan.outer.updates_in_flight_max
        below.handle(ev.UpstreamStarted(self.name, region.updates, region.alpha, in_flight_max, (), region.from_blend))

    # --- the side of the fleet above ------------------------------------------------------------------------------

    def begin(self) -> None:
        """Join, and hear of every version from then on."""
        self.fleet.resting[self.index] = self
        self._soon(self._ask_to_join)

    def told(self, event: ev.LearnerEvent) -> None:
        """Send an event of the syncer above to the region."""
        assert isinstance(event, ev.RegionEvent), event
        self._soon(lambda: self._hear(event))

    def close(self) -> None:
        """Record the result of the fleet below."""
        self.account.region = self.below.result()

    # --- effects of the region's machine --------------------------------------------------------------------------

    def _order(self, effect: fx.OuterEffect) -> None:
        match effect:
            case fx.Seal():
                self._sealed[effect.fragment, effect.sequence] = effect
                made = ev.Sealed(effect.fragment, effect.sequence, self._digest(effect.fragment, effect.sequence))
                self.heap.after(0, lambda: self._hear(made))
            case fx.Send():
                key = (effect.fragment, effect.sequence)
                self.heap.at(self._carry_up(effect.fragment), lambda: self._pushed(key))
            case fx.Release():
                self._sealed.pop((effect.fragment, effect.sequence), None)
            case fx.Fetch() if effect.fragment not in self._coming:
                self._coming.add(effect.fragment)
                self._soon(lambda: self._fetch(effect.fragment))
            case fx.Join():
                self._soon(self._ask_to_join)
            case fx.Leave():
                self._soon(self._leave)
            case fx.StopTraining():
                raise AssertionError(effect.why)

    def _hear(self, event: ev.RegionEvent) -> None:
        if not self._has_left:
            self.below.handle(event)

    def _ask_to_join(self) -> None:
        self._incarnation = self._join()

    def _fetch(self, fragment: int) -> None:
        """Answer, at the syncer above, the region's request for a version."""
        state = self.fleet.machine.state
        version = state.fragments[fragment].version
        here_ns = self._carry_down(fragment, self._have[fragment], version)
        self.heap.at(here_ns, lambda: self._fetched(fragment, version, state.lineage, state.epoch))

    def _fetched(self, fragment: int, version: int, lineage: int, epoch: int) -> None:
        self._coming.discard(fragment)
        self._have[fragment] = version
        values = f"{fragment}.{version}"
        self._hear(ev.UpstreamFetched(fragment, version, values, values, lineage, epoch))

    def _pushed(self, key: tuple[int, int]) -> None:
        if key not in self._sealed:
            return
        self.told(self._push(self._sealed[key], self._digest(*key), self._incarnation))

    def _leave(self) -> None:
        self._has_left = True
        self.fleet.handle(ev.SiteLeft(1, self.name, self._incarnation))

    def _digest(self, fragment: int, sequence: int) -> str:
        return f"{self.name}:{fragment}:{sequence}"

    def _soon(self, do: Callable[[], None]) -> None:
        """Run ``do`` when a message sent now has crossed the link."""
        self.heap.after(self._half_ns, do)


STILL_S = 24 * 3600.0
"""After this time without a version, or ten periods of its slowest site if longer, a run by tokens is endless."""
COLLECT_EVERY = 100_000
"""The number of new objects after which Python's cycle collector runs."""


class EndlessError(ValueError):
    """The run would never end, although it is to be simulated to its end."""


def simulate(plan: FleetPlan, cargo: Cargo | None = None) -> FleetResult:
    """Simulate ``plan.seconds``, or up to the end of the run.  The same plan gives the same result.

    Raises ``EndlessError`` when ``plan.seconds`` is None and the run never ends.
    """
    threshold, *others = gc.get_threshold()
    if cargo is None:
        # Machines and events make no cycles, and their state lives long: with a thousand sites the default, a
        # collection every 700 objects, takes an eighth of the time.  A cycle of a cargo's tensors may be large.
        gc.set_threshold(COLLECT_EVERY, *others)
    try:
        fleet = Fleet(plan, cargo)
        if plan.seconds is not None:
            fleet.heap.run_until(to_ns(plan.seconds), fleet.is_over)
            return fleet.result()
        still_s = max(STILL_S, 10 * max(_period_s(plan, site) for site in plan.sites))
        while not fleet.is_over():
            closed = fleet.closed
            fleet.heap.run_until(fleet.heap.now_ns + to_ns(still_s), fleet.is_over)
            if fleet.closed == closed and not fleet.is_over() and not plan.outer.run_ns:
                merged = f"{fleet.machine.state.run_tokens()} of {plan.outer.token_budget} tokens are merged"
                raise EndlessError(f"no version in the last {still_s / 3600:g} h, and {merged}")
        return fleet.result()
    finally:
        gc.set_threshold(threshold, *others)


def _period_s(plan: FleetPlan, site: FleetSite) -> float:
    """Return the time between two updates, in seconds; a region's updates may all come from its slowest site."""
    if site.region is None:
        return plan.learner.inner_steps * site.step_s
    return site.region.updates * max(_period_s(site.region.plan, each) for each in site.region.plan.sites)


class Fleet(Hub):
    """A syncer, its sites, and their faults."""

    def __init__(self, plan: FleetPlan, cargo: Cargo | None = None, heap: Heap | None = None) -> None:
        super().__init__(plan, cargo, Heap() if heap is None else heap)
        self.sites = [self._site(index, site) for index, site in enumerate(plan.sites)]
        self.by_name = {site.name: site for site in self.sites}
        for site in self.sites:
            site.begin()
        self._faults: Faults | None = Faults(self)

    def _site(self, index: int, site: FleetSite) -> Member:
        if site.region is None:
            return Site(self, index, site)
        assert self.cargo is None, "the sites of a region train no model here"
        assert not self.plan.faults, "they happen to sites"
        assert not self.plan.tokens_trained, "they are counted at sites"
        seed = Random(f"{self.plan.seed}/below/{index}").getrandbits(32)  # Regions must not fail together.
        return RegionalSyncer(self, index, site, Fleet(replace(site.region.plan, seed=seed), heap=self.heap))

    def first_step(self) -> None:
        """Start the faults when the first site begins to train."""
        if self._faults is not None:
            faults, self._faults = self._faults, None
            faults.first_step()

    def is_over(self) -> bool:
        """Return whether every fragment has its final version."""
        return self.machine.state.phase is Phase.ENDED

    def result(self) -> FleetResult:
        """Return the result as of now."""
        state = self.machine.state
        for site in self.sites:
            site.close()
            lines = state.sites[site.name].lines if site.name in state.sites else []
            site.account.rounds = sum(line.updates_merged for line in lines)
            site.account.tokens_merged = sum(line.tokens_merged for line in lines) // len(state.fragments)
        return FleetResult(
            tuple(site.account for site in self.sites),
            tuple(fragment.version for fragment in state.fragments),
            self.heap.now_ns / SECOND_NS,
            self.merged / max(1, self.closed),
        )
