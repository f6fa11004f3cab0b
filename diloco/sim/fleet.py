"""Sites and a syncer without tensors, for weeks at a time: who trains, who waits, who is away, and what crosses links.

The machines are the real ones, so quorum, grace, staleness, windows and fates are what they are in a run; the rest is
time.  A site's inner steps pass as one as long as nothing is due; an update takes its place on the site's up-link, and
a version on its down-link, one after the other; a site fails as often as its chips do, is away for as long as it takes
to go on without the lost one, and goes on from where it was.

It has no tensors of its own.  ``Cargo`` is what it calls where there are any: then a model is trained, by the same
machines and at the same virtual instants.

A site may be a region, which is a fleet of its own below this one (``fleet_region.py``).

What this does not have, and ``swarm`` does: messages that are lost, come twice or overtake each other, disks, and a
syncer that dies (it may do nothing for a while).
"""

from __future__ import annotations

import gc
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from diloco.sim.fleet_faults import Faults
from diloco.sim.fleet_link import Arrivals
from diloco.sim.fleet_plan import Cargo, FleetPlan, FleetResult, FleetSite
from diloco.sim.fleet_region import RegionalSyncer
from diloco.sim.fleet_site import Site, to_ns
from diloco.sim.network import Heap
from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.claims import fastest_step_ns
from diloco.sync.options import SECOND_NS
from diloco.sync.state import Phase
from diloco.sync.syncer import OuterSync

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from diloco.sync.state import OuterState

STILL_S = 24 * 3600.0
"""A run that ends by its tokens and makes no version for so long, or in ten periods of its slowest site, never ends."""
COLLECT_EVERY = 100_000
"""So many objects more than before, and Python looks for circular garbage among them."""


class EndlessError(ValueError):
    """The run that was to be simulated to its end has none."""


def simulate(plan: FleetPlan, cargo: Cargo | None = None) -> FleetResult:
    """Let ``plan.seconds`` pass, or the run end.  The same plan gives the same result."""
    with _collecting_seldom() if cargo is None else nullcontext():  # A circle of tensors may be large.
        fleet = Fleet(plan, cargo)
        if plan.seconds is not None:
            fleet.heap.run_until(to_ns(plan.seconds), fleet.is_over)
        else:
            _run_to_the_end(fleet)
        return fleet.result()


@contextmanager
def _collecting_seldom() -> Iterator[None]:
    """Machines and events make no circles, and what they remember lives long: with a thousand sites an eighth of the
    time goes by looking at it over and over, every 700 objects."""
    before = gc.get_threshold()
    gc.set_threshold(COLLECT_EVERY, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _run_to_the_end(fleet: Fleet) -> None:
    plan = fleet.plan
    still_s = max(STILL_S, 10 * max(_period_s(plan, site) for site in plan.sites))
    while not fleet.is_over():
        closed = fleet.closed
        fleet.heap.run_until(fleet.heap.now_ns + to_ns(still_s), fleet.is_over)
        if fleet.closed == closed and not fleet.is_over() and not plan.outer.run_ns:
            merged = f"{fleet.machine.state.run_tokens()} of {plan.outer.token_budget} tokens are merged"
            raise EndlessError(f"no version in the last {still_s / 3600:g} h, and {merged}")


def _period_s(plan: FleetPlan, site: FleetSite) -> float:
    """What the steps of an update take; a region waits for so many updates, at worst of its slowest site alone."""
    if site.region is None:
        return plan.learner.inner_steps * site.step_s
    return site.region.updates * max(_period_s(site.region.plan, each) for each in site.region.plan.sites)


class Fleet:
    """The syncer and the clock."""

    def __init__(self, plan: FleetPlan, cargo: Cargo | None = None, heap: Heap | None = None) -> None:
        self.plan, self.cargo = plan, cargo
        self.heap = Heap() if heap is None else heap
        self.above: Callable[[fx.OuterEffect], None] | None = None
        """Of a region: what carries out what its machine wants towards the syncer above."""
        self.machine = OuterSync(plan.outer)
        self.published_ns: list[list[int]] = [[0] for _ in range(plan.outer.num_fragments)]
        """For each fragment when each version was published."""
        self.resting: dict[int, Site | RegionalSyncer] = {}
        """The sites that stand still: they are told at once, and who trains looks when it has an update to make, unless
        it matters to its steps or to what becomes of them when it hears."""
        self._arrivals: dict[tuple[int, float], Arrivals] = {}
        self.closed = self._merged = 0
        self._planned_ns: int | None = None
        self._is_drained = False
        self.paused_until_ns = 0
        """Until then the syncer does nothing, and nobody reaches it."""
        self._behind_ns = 0
        """What has not passed for the syncer, which was not there."""
        self.handle(ev.SyncerStarted(1))
        self.sites = [self._site(index, site) for index, site in enumerate(plan.sites)]
        self._by_name = {site.name: site for site in self.sites}
        for site in self.sites:
            site.begin()
        self._faults: Faults | None = Faults(self)

    def _site(self, index: int, site: FleetSite) -> Site | RegionalSyncer:
        if site.region is None:
            return Site(self, index, site)
        assert self.cargo is None, "the sites of a region train no model here"
        assert not self.plan.faults, "they happen to sites"
        assert not self.plan.tokens_trained, "they are counted at sites"
        seed = Random(f"{self.plan.seed}/below/{index}").getrandbits(32)  # Or the sites of all would fail together.
        return RegionalSyncer(self, index, site, Fleet(replace(site.region.plan, seed=seed), heap=self.heap))

    @property
    def state(self) -> OuterState:
        """The syncer's memory."""
        return self.machine.state

    def handle(self, event: ev.OuterEvent) -> list[fx.OuterEffect]:
        """Tell the syncer, and do what it wants that is no answer to this one."""
        effects = self.machine.handle(event, self.heap.now_ns - self._behind_ns)
        for effect in effects:
            match effect:  # The usual ones first.
                case fx.AnswerPush():
                    pass  # Who asked looks for it.
                case fx.StartOuterStep():
                    self.closed += 1
                    self._merged += len({part.site for part in effect.contributions})
                    self.heap.after(to_ns(self.plan.merge_s), partial(self._made, effect))
                case fx.TellFate():
                    told = ev.FateTold(effect.fate)
                    site = self._by_name[effect.site]
                    if effect.fate.merged:
                        site.told_in_passing(told)
                    else:
                        site.told(told)
                case fx.PublishVersion():
                    self.published_ns[effect.fragment].append(self.heap.now_ns)
                    for arrivals in self._arrivals.values():
                        arrivals.published(effect.fragment)
                    if self.resting:
                        published = self.published(effect.fragment)
                        for index in sorted(self.resting):
                            self.resting[index].published(published)
                case fx.AnnounceFinal():
                    for site in self.sites:
                        site.told(ev.FinalAnnounced(effect.ending))
                case fx.TakeVersion():
                    self.heap.after(to_ns(self.plan.merge_s), partial(self._taken, effect))
                case _ if self.above is not None:
                    self.above(effect)
        self._wait()
        return effects

    def _made(self, command: fx.StartOuterStep) -> None:
        if self.heap.now_ns < self.paused_until_ns:
            self.heap.at(self.paused_until_ns, partial(self._made, command))
            return
        if self.cargo is not None:
            self.cargo.merged(command, self.heap.now_ns / SECOND_NS, self.progress_ppm())
        self.handle(ev.OuterStepDone(command.fragment, command.version, "v", "d"))

    def _taken(self, command: fx.TakeVersion) -> None:
        self.told(ev.OuterStepDone(command.fragment, command.version, "v", "d"))

    def stepped(self) -> None:
        """A site has made steps."""
        bound = self.plan.tokens_trained
        if bound and not self._is_drained and self._tokens_trained() >= bound:
            self._is_drained = True
            self.told(ev.DrainRequested(1))

    def progress_ppm(self) -> int:
        """Of the run: of the bound on what is trained where there is one, else of what is merged."""
        bound = self.plan.tokens_trained
        return min(1_000_000, self._tokens_trained() * 1_000_000 // bound) if bound else self.machine.progress_ppm()

    def _tokens_trained(self) -> int:
        return sum(site.steps_made() * site.site.tokens_per_step for site in self.sites)

    def told(self, event: ev.OuterEvent) -> None:
        """The same of what nobody is answered, when the syncer does anything again."""
        if self.heap.now_ns < self.paused_until_ns:
            self.heap.at(self.paused_until_ns, partial(self.told, event))
        else:
            self.handle(event)

    def pause(self, lasts_ns: int, *, is_there: bool) -> None:
        """The syncer does nothing for so long; what is told to it waits.  If it is not there, no time passes for it."""
        for site in self.sites:
            site.disturbed()
        before_ns = max(self.paused_until_ns, self.heap.now_ns)
        self.paused_until_ns = max(before_ns, self.heap.now_ns + lasts_ns)
        if not is_there:
            self._behind_ns += self.paused_until_ns - before_ns

    def first_step(self) -> None:
        """A site begins to train."""
        if self._faults is not None:
            faults, self._faults = self._faults, None
            faults.first_step()

    def share_done(self) -> float:
        """Of the run: by its tokens or its time, or of the time that is simulated."""
        share = self.machine.progress_ppm() / 1e6
        return max(share, self.heap.now_ns / to_ns(self.plan.seconds)) if self.plan.seconds else share

    def arrivals(self, half_ns: int, mbps: float) -> Arrivals:
        """What comes over a link like that, which is the same for all sites that have one."""
        known = self._arrivals.get((half_ns, mbps))
        if known is None:
            known = self._arrivals[half_ns, mbps] = Arrivals(self.plan, self.published_ns, half_ns, mbps)
        return known

    def published(self, fragment: int) -> ev.VersionPublished:
        """The news of the fragment's newest version."""
        state, merged = self.machine.state, self.machine.attendance.run_tokens()
        run = (merged, self.machine.progress_ppm(), state.lineage, fastest_step_ns(state, self.machine.attendance.live))
        return ev.VersionPublished(state.epoch, fragment, state.fragments[fragment].version, *run)

    def is_over(self) -> bool:
        """Whether every fragment has its final version."""
        return self.machine.state.phase is Phase.ENDED

    def result(self) -> FleetResult:
        """As of now."""
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
            self._merged / max(1, self.closed),
        )

    def _wait(self) -> None:
        wanted = self.machine.next_deadline_ns()
        wanted = None if wanted is None else wanted + self._behind_ns
        if wanted is None or (self._planned_ns is not None and self.heap.now_ns < self._planned_ns <= wanted):
            return
        self._planned_ns = wanted
        self.heap.at(wanted, lambda: self._pass(wanted))

    def _pass(self, instant_ns: int) -> None:
        if self._planned_ns == instant_ns:
            self._planned_ns = None
            self.told(ev.DeadlinePassed())
