"""What goes wrong in a fleet beside its sites' own failures: at a time that is told, or to several sites at once.

A region of a fleet: a syncer with sites of its own, and a site of the fleet's syncer (``sync/region.py``).

What goes up, and when, its own machine decides.  Here is its link to the syncer above, and what time that takes.  Both
syncers are always there; the sites of a region fail.


Sites and a syncer without tensors, for weeks at a time: who trains, who waits, who is away, and what crosses links.

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

from diloco.sim.fleet_plan import Cargo, FleetPlan, FleetResult, FleetSite, SiteAccount
from diloco.sim.fleet_site import Arrivals, Site, carry_ns, fetch_bytes, to_ns
from diloco.sim.world import Heap
from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.admission import fastest_step_ns
from diloco.sync.events import UpstreamFetched, UpstreamStarted
from diloco.sync.options import SECOND_NS
from diloco.sync.state import Phase
from diloco.sync.syncer import OuterSync

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from diloco.sim.fleet_plan import FleetFault, Region
    from diloco.sync.state import OuterState

LOOK_S = 1.0
"""Between two looks at what share of the run is done, as long as a fault waits for one."""


class Faults:
    """Those of a plan, played on its fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._waiting = list(fleet.plan.faults)
        for number, region in enumerate(fleet.plan.regions):
            self._fail_some_day(region, Random(f"{fleet.plan.seed}/region/{number}"))

    def first_step(self) -> None:
        """A site trains for the first time: what has a time counts from here."""
        heap = self._fleet.heap
        for fault in self._waiting:
            if fault.at_s is not None:
                heap.after(to_ns(fault.at_s), lambda fault=fault: self._play(fault))  # type: ignore[misc]
        self._waiting = [fault for fault in self._waiting if fault.at_s is None]
        self._look()

    def _look(self) -> None:
        share = self._fleet.share_done()
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
            case "start":
                site.start()
            case "leave":
                site.asked_to_leave()

    def _fail_some_day(self, region: Region, random: Random) -> None:
        if region.interruptions_per_s:
            after_ns = to_ns(random.expovariate(region.interruptions_per_s))
            self._fleet.heap.after(after_ns, lambda: self._fail(region, random))

    def _fail(self, region: Region, random: Random) -> None:
        for index in region.sites:
            self._one(index).interrupted(to_ns(region.away_s))
        self._fail_some_day(region, random)

    def _one(self, index: int) -> Site:
        site = self._fleet.sites[index]
        assert isinstance(site, Site), "nothing happens to a region's own process"
        return site


class RegionalSyncer:
    """One region; ``fleet`` is what it is a site of, ``below`` the fleet of its own sites."""

    def __init__(self, fleet: Fleet, index: int, site: FleetSite, below: Fleet) -> None:
        assert site.region is not None, site
        self.fleet, self.index, self.site, self.below, self.heap = fleet, index, site, below, fleet.heap
        self.name = f"site-{index:05d}"
        self.account = SiteAccount()
        self._half_ns = to_ns(site.rtt_s / 2)
        self._up_free_ns = self._down_free_ns = 0
        self._incarnation = 0
        self._sealed: dict[tuple[int, int], fx.Seal] = {}
        self._have = [-1 for _ in below.state.fragments]
        """The version above of each fragment that came last."""
        self._ahead: int | None = None
        """The fragment of which the next version is waited for at the syncer above: that of the update sent last."""
        self._coming: set[int] = set()
        self._has_left = False
        below.above = self._order
        region, in_flight_max = site.region, fleet.plan.outer.updates_in_flight_max
        below.handle(UpstreamStarted(self.name, region.updates, region.alpha, in_flight_max, (), region.from_blend))

    # --- as the fleet above knows a site --------------------------------------------------------------------------

    def begin(self) -> None:
        """Join, and listen from then on."""
        self.fleet.resting[self.index] = self
        self._over(self.heap.now_ns, self._join)

    def told(self, event: ev.LearnerEvent) -> None:
        """The syncer above says something."""
        assert isinstance(event, ev.RegionEvent), event
        self._over(self.heap.now_ns, lambda: self._hear(event))

    def told_in_passing(self, event: ev.LearnerEvent) -> None:
        """The same of an update that is merged."""
        self.told(event)

    def published(self, news: ev.VersionPublished) -> None:
        """There is a version above, which is sent at once where it is waited for."""
        self.told(news)
        if self._ahead == news.fragment and news.fragment not in self._coming:
            self._ahead = None
            self._coming.add(news.fragment)
            self._fetch(news.fragment)

    def disturbed(self) -> None:
        """Nothing here waits for a word."""

    def steps_made(self) -> int:
        """A region counts none: its sites do."""
        return 0

    def close(self) -> None:
        """The time is over."""
        self.account.region = self.below.result()

    # --- what the region's machine orders -------------------------------------------------------------------------

    def _order(self, effect: fx.OuterEffect) -> None:
        match effect:
            case fx.Seal():
                self._sealed[effect.fragment, effect.sequence] = effect
                made = ev.Sealed(effect.fragment, effect.sequence, self._digest(effect.fragment, effect.sequence))
                self.heap.after(0, lambda: self._hear(made))
            case fx.Send():
                self._send((effect.fragment, effect.sequence))
            case fx.Release():
                self._sealed.pop((effect.fragment, effect.sequence), None)
            case fx.Fetch() if effect.fragment not in self._coming:
                self._coming.add(effect.fragment)
                self._over(self.heap.now_ns, lambda: self._fetch(effect.fragment))
            case fx.Join():
                self._over(self.heap.now_ns, self._join)
            case fx.Leave():
                self._over(self.heap.now_ns, self._leave)
            case fx.StopTraining():
                raise AssertionError(effect.why)

    def _hear(self, event: ev.RegionEvent) -> None:
        if not self._has_left:
            self.below.handle(event)

    def _join(self) -> None:
        asked = ev.JoinRequested(1, self.name, f"{self.name}/1")
        (answer,) = (each for each in self.fleet.handle(asked) if isinstance(each, fx.AnswerJoin))
        self._incarnation = answer.incarnation
        state, machine = self.fleet.state, self.fleet.machine
        run = (machine.attendance.run_tokens(), machine.progress_ppm(), answer.ending, state.lineage)
        self.told(ev.JoinAnswered(state.epoch, answer.incarnation, answer.standings, *run))

    def _fetch(self, fragment: int) -> None:
        """The region's question is at the syncer above now."""
        state = self.fleet.state
        version = state.fragments[fragment].version
        size = fetch_bytes(self.fleet.plan, fragment, self._have[fragment], version)
        self.account.bytes_down += size
        self._down_free_ns = max(self._down_free_ns, self.heap.now_ns) + carry_ns(size, self.site.down_mbps)
        self._over(self._down_free_ns, lambda: self._fetched(fragment, version, state.lineage, state.epoch))

    def _fetched(self, fragment: int, version: int, lineage: int, epoch: int) -> None:
        self._coming.discard(fragment)
        self._have[fragment] = version
        values = f"{fragment}.{version}"
        self._hear(UpstreamFetched(fragment, version, values, values, lineage, epoch))

    def _send(self, key: tuple[int, int]) -> None:
        size = self.fleet.plan.update_bytes[key[0]]
        self.account.bytes_up += size
        self._up_free_ns = max(self._up_free_ns, self.heap.now_ns) + carry_ns(size, self.site.up_mbps)
        self._over(self._up_free_ns, lambda: self._pushed(key))

    def _pushed(self, key: tuple[int, int]) -> None:
        if key not in self._sealed:
            return
        seal, digest = self._sealed[key], self._digest(*key)
        whose = (1, self.name, self._incarnation)
        numbers = (*key, seal.base_version, seal.tokens, seal.steps, seal.step_ns, seal.cursor)
        update = ev.UpdateArrived(*whose, *numbers, digest, digest, encoding="", finite=True, final=seal.final)
        (answer,) = (each for each in self.fleet.handle(update) if isinstance(each, fx.AnswerPush))
        self._ahead = seal.fragment
        self.told(ev.PushAnswered(*key, answer.outcome, answer.reason))

    def _leave(self) -> None:
        self._has_left = True
        self.fleet.handle(ev.SiteLeft(1, self.name, self._incarnation))

    def _digest(self, fragment: int, sequence: int) -> str:
        return f"{self.name}:{fragment}:{sequence}"

    def _over(self, instant_ns: int, do: Callable[[], None]) -> None:
        """``do`` when what is sent at that instant has crossed the link."""
        self.heap.at(instant_ns + self._half_ns, do)


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
