"""Simulate weeks of a syncer and its sites without tensors: training, waiting, absences, and bytes on the links.

The machines are the real ones, so quorum, grace, staleness, windows and fates are those of a run; only time is
simulated.  A site's inner steps pass as one stretch until something is due.  A link carries updates up, or versions
down, one after the other.  A site fails as often as its chips do, is away until it can go on without the lost chip, and
resumes where it stopped.  ``Faults`` of the plan come in addition, at set times or to several sites at once.

The simulation has no tensors of its own.  With a ``Cargo`` it trains a model, by the same machines and at the same
virtual instants.

A site may be a region (``RegionalSyncer``): a syncer with a fleet of its own below it, whose machine decides what goes
up and when (``sync/region.py``).  Neither syncer fails; the sites of a region do.

Under the adopt rules ``ADOPT_KEEPS_UNSENT`` a site keeps its unsent progress; without tensors it then makes no
difference when an adopt happens between two updates of the fragment.  So a training site is not told of each version.
When an update is due, the site computes from the instants of publication and the link (``Arrivals``) which versions it
would have fetched meanwhile, and when, and adopts only the newest.

Unlike ``swarm``, this has no lost, duplicated or reordered messages, no disks, and no syncer that dies (it may pause).
"""

from __future__ import annotations

import gc
from collections import deque
from dataclasses import replace
from functools import partial
from math import inf
from random import Random
from typing import TYPE_CHECKING

from diloco.sim.fleet_link import Arrivals, carry_ns, fetch_bytes, to_ns
from diloco.sim.fleet_plan import Cargo, FleetPlan, FleetResult, FleetSite, Region, SiteAccount
from diloco.sim.world import Heap, join_answered, update_arrived
from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.learner import LearnerSync
from diloco.sync.options import ADOPT_KEEPS_UNSENT, SECOND_NS
from diloco.sync.state import Phase
from diloco.sync.syncer import OuterSync
from diloco.sync.updates import coming_due

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from diloco.sim.fleet_plan import FleetFault


class Fleet:
    """A syncer, its sites, and their faults, under one clock."""

    def __init__(self, plan: FleetPlan, cargo: Cargo | None = None, heap: Heap | None = None) -> None:
        self.plan, self.cargo, self.heap = plan, cargo, heap or Heap()
        self.above: Callable[[fx.OuterEffect], None] | None = None
        """Of a region: the function that carries out its machine's effects towards the syncer above."""
        self.machine = OuterSync(plan.outer)
        self.published_ns: list[list[int]] = [[0] for _ in range(plan.outer.num_fragments)]
        """By fragment: when each version was published."""
        self.resting: dict[int, Member] = {}
        """The sites that are told of each version at once: those that stand still, and those for which the instant of
        an adopt matters (``Site._listens``).  The others look when an update is due."""
        self.arrivals: dict[tuple[int, float], Arrivals] = {}
        """The arrivals over a link, by half its rtt and its bandwidth: shared by all sites that have such a link."""
        self.closed = self.merged = 0
        self._planned_ns: int | None = None
        self._is_drained = False
        self.paused_until_ns = 0
        """Until then the syncer does nothing and is not reachable."""
        self._behind_ns = 0
        """How far the syncer's clock is behind, because it was down."""
        self.handle(ev.SyncerStarted(1))
        self.sites = [self._site(index, site) for index, site in enumerate(plan.sites)]
        self.by_name = {site.name: site for site in self.sites}
        for site in self.sites:
            site.begin()
        self.faults = Faults(self)

    def _site(self, index: int, site: FleetSite) -> Member:
        if site.region is None:
            return Site(self, index, site)
        assert self.cargo is None, "the sites of a region train no model here"
        assert not self.plan.faults, "they happen to sites"
        assert not self.plan.tokens_trained, "they are counted at sites"
        seed = Random(f"{self.plan.seed}/below/{index}").getrandbits(32)  # Regions must not fail together.
        return RegionalSyncer(self, index, site, Fleet(replace(site.region.plan, seed=seed), heap=self.heap))

    def handle(self, event: ev.OuterEvent) -> list[fx.OuterEffect]:
        """Give ``event`` to the syncer's machine, carry out its effects except answers, and return all of them."""
        effects = self.machine.handle(event, self.heap.now_ns - self._behind_ns)
        for effect in effects:
            match effect:  # The usual ones first.
                case fx.AnswerPush():
                    pass  # The caller finds it among the returned effects.
                case fx.StartOuterStep():
                    self.closed += 1
                    self.merged += len({part.site for part in effect.contributions})
                    self.heap.after(to_ns(self.plan.merge_s), partial(self._made, effect))
                case fx.TellFate():
                    told = ev.FateTold(effect.fate)
                    site = self.by_name[effect.site]
                    if effect.fate.merged:
                        site.told_in_passing(told)
                    else:
                        site.told(told)
                case fx.PublishVersion():
                    self.published_ns[effect.fragment].append(self.heap.now_ns)
                    for arrivals in self.arrivals.values():
                        arrivals.published(effect.fragment)
                    if self.resting:
                        published = self.published(effect.fragment)
                        for index in sorted(self.resting):
                            self.resting[index].published(published)
                case fx.AnnounceFinal():
                    for site in self.sites:
                        site.told(ev.FinalAnnounced(effect.ending))
                case fx.TakeVersion():
                    done = ev.OuterStepDone(effect.fragment, effect.version, "v", "d")
                    self.heap.after(to_ns(self.plan.merge_s), partial(self.told, done))
                case _ if self.above is not None:
                    self.above(effect)
        wanted = self.machine.next_deadline_ns()
        if wanted is not None:
            wanted += self._behind_ns
            if self._planned_ns is None or not self.heap.now_ns < self._planned_ns <= wanted:
                self._planned_ns = wanted
                self.heap.at(wanted, partial(self._pass, wanted))
        return effects

    def _made(self, command: fx.StartOuterStep) -> None:
        if self.heap.now_ns < self.paused_until_ns:
            self.heap.at(self.paused_until_ns, partial(self._made, command))
            return
        if self.cargo is not None:
            self.cargo.merged(command, self.heap.now_ns / SECOND_NS, self.progress_ppm())
        self.handle(ev.OuterStepDone(command.fragment, command.version, "v", "d"))

    def stepped(self) -> None:
        """Handle steps of a site: drain the run once ``tokens_trained`` is reached."""
        bound = self.plan.tokens_trained
        if bound and not self._is_drained and self._tokens_trained() >= bound:
            self._is_drained = True
            self.told(ev.DrainRequested(1))

    def progress_ppm(self) -> int:
        """Return the run's progress: by ``tokens_trained`` where that is set, otherwise by what is merged."""
        bound = self.plan.tokens_trained
        return min(1_000_000, self._tokens_trained() * 1_000_000 // bound) if bound else self.machine.progress_ppm()

    def _tokens_trained(self) -> int:
        return sum(site.steps_made() * site.site.tokens_per_step for site in self.sites)

    def told(self, event: ev.OuterEvent) -> None:
        """As ``handle``, for an event without an answer; it waits while the syncer is paused."""
        if self.heap.now_ns < self.paused_until_ns:
            self.heap.at(self.paused_until_ns, partial(self.told, event))
        else:
            self.handle(event)

    def pause(self, lasts_ns: int, *, is_there: bool) -> None:
        """Pause the syncer; events wait meanwhile.  Without ``is_there`` it is down: its clock stands still as well."""
        for site in self.sites:
            site.disturbed()
        before_ns = max(self.paused_until_ns, self.heap.now_ns)
        self.paused_until_ns = max(before_ns, self.heap.now_ns + lasts_ns)
        if not is_there:
            self._behind_ns += self.paused_until_ns - before_ns

    def published(self, fragment: int) -> ev.VersionPublished:
        """Return the announcement of the fragment's newest version."""
        return self.machine.announced(fragment, self.machine.state.fragments[fragment].version)

    def _pass(self, instant_ns: int) -> None:
        if self._planned_ns == instant_ns:
            self._planned_ns = None
            self.told(ev.DeadlinePassed())

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


class Member:
    """A site as the syncer of its ``fleet`` sees it: a real one or a region."""

    def __init__(self, fleet: Fleet, index: int, site: FleetSite) -> None:
        self.fleet, self.index, self.site, self.heap = fleet, index, site, fleet.heap
        self.name = f"site-{index:05d}"
        self.account = SiteAccount()
        self._half_ns = to_ns(site.rtt_s / 2)
        self._up_free_ns = self._down_free_ns = 0
        self.lives = 0
        self._is_there = False
        self._ahead: int | None = None
        """The fragment of the update sent last: a request for its next version waits at the syncer."""
        self._coming: set[int] = set()
        """The fragments whose next version is under way."""
        self._disk: dict[tuple[int, int], tuple[fx.Seal, str]] = {}
        self._cut_from_ns = self._cut_until_ns = 0

    def begin(self) -> None:
        """Plan the site's appearance."""
        raise NotImplementedError

    def told(self, event: ev.LearnerEvent) -> None:
        """Send an event of the syncer to the site."""
        raise NotImplementedError

    def told_in_passing(self, event: ev.LearnerEvent) -> None:
        """As ``told``, for an event that changes nothing before the next boundary unless an update is due."""
        self.told(event)

    def published(self, news: ev.VersionPublished) -> None:
        """Announce a version to the site, and send it where the site's request waits for it."""
        self.told(news)
        if self._ahead == news.fragment and self._is_there and news.fragment not in self._coming:
            self._ahead = None
            self._coming.add(news.fragment)
            self._fetch(news.fragment)

    def disturbed(self) -> None:
        """Hook: messages under way may be delayed from now on."""

    def steps_made(self) -> int:
        """Return the site's own inner steps; a region has none."""
        return 0

    def close(self) -> None:
        """End the account: steps under way count as far as they came."""
        raise NotImplementedError

    def _have(self, fragment: int) -> int:
        """Return the newest version that the site has received, or that it began with; -1 for none."""
        raise NotImplementedError

    def _fetched(self, fragment: int, version: int, values: object) -> None:
        """Handle a version that has arrived."""
        raise NotImplementedError

    def _fetch(self, fragment: int) -> None:
        """Answer, at the syncer, the site's request for the newest version."""
        version, cargo = self.fleet.machine.state.fragments[fragment].version, self.fleet.cargo
        here_ns = self._carry_down(fragment, self._have(fragment), version)
        values = cargo.published(fragment) if cargo is not None else None
        self._over(here_ns, lambda: self._fetched(fragment, version, values))

    def _join(self) -> None:
        """Give the join request to the syncer, and send the answer to the site."""
        asked = ev.JoinRequested(1, self.name, f"{self.name}/{self.lives}")
        (answer,) = (each for each in self.fleet.handle(asked) if isinstance(each, fx.AnswerJoin))
        self.told(join_answered(self.fleet.machine, answer))

    def _sealed(self, seal: fx.Seal) -> ev.Sealed:
        """Store the update that ``seal`` asks for; return the event for the machine that asked."""
        digest = f"{self.name}:{seal.fragment}:{seal.sequence}:{self.lives}"
        self._disk[seal.fragment, seal.sequence] = (seal, digest)
        return ev.Sealed(seal.fragment, seal.sequence, digest)

    def _push(self, key: tuple[int, int]) -> ev.PushAnswered:
        """Give an update to the syncer; return the answer."""
        update = update_arrived(self._disk[key][0], self.name, self._incarnation(), self._disk[key][1])
        (answer,) = (each for each in self.fleet.handle(update) if isinstance(each, fx.AnswerPush))
        self._ahead = key[0]
        return ev.PushAnswered(*key, answer.outcome, answer.reason)

    def _leave(self) -> None:
        """Give the site's goodbye to the syncer."""
        self.fleet.handle(ev.SiteLeft(1, self.name, self._incarnation()))

    def _incarnation(self) -> int:
        return self.fleet.machine.state.sites[self.name].incarnation

    def _carry_up(self, fragment: int) -> int:
        """Send an update; return when it arrives, in ns."""
        size = self.fleet.plan.update_bytes[fragment]
        self.account.bytes_up += size
        self._up_free_ns = max(self._up_free_ns, self.heap.now_ns) + carry_ns(size, self.site.up_mbps)
        return self._up_free_ns + self._half_ns

    def _carry_down(self, fragment: int, have: int, version: int) -> int:
        """Send ``version`` to the site, which has version ``have``; return when it arrives, in ns."""
        size = fetch_bytes(self.fleet.plan, fragment, have, version)
        self.account.bytes_down += size
        self._down_free_ns = max(self._down_free_ns, self.heap.now_ns) + carry_ns(size, self.site.down_mbps)
        return self._down_free_ns + self._half_ns

    def _soon(self, do: Callable[[], object]) -> None:
        """Run ``do`` when a message sent now has crossed the link."""
        self._over(self.heap.now_ns + self._half_ns, do)

    def _over(self, instant_ns: int, do: Callable[[], object]) -> None:
        """Run ``do`` at ``instant_ns``, or later while the link is cut or the syncer paused."""

        life = self.lives

        def arrive() -> None:
            if self.lives != life or not self._is_there:
                return  # The process that sent the message, or was to get it, has ended.
            now_ns, paused_ns = self.heap.now_ns, self.fleet.paused_until_ns
            if now_ns < self._cut_until_ns or now_ns < paused_ns:
                self._over(max(self._cut_until_ns, paused_ns) + self._half_ns, do)
            else:
                do()

        self.heap.at(instant_ns, arrive)


ENDS = ev.FinalAnnounced | ev.LeaveAsked
"""Events after which a site trains no further than the step under way."""


class Site(Member):
    """A site that trains, with its machine, its absences and its link."""

    def __init__(self, fleet: Fleet, index: int, site: FleetSite) -> None:
        super().__init__(fleet, index, site)
        self.cargo = fleet.cargo
        self.machine = LearnerSync(fleet.plan.learner)
        self.random = Random(f"{fleet.plan.seed}/{index}")
        self._since_ns = 0
        self._there_ns: int | None = None
        self._gone_ns: int | None = None
        """When the site appeared for the first time, and when it left a run that went on."""
        self._first_ns: int | None = None
        self._last_ns: int | None = None
        """When its first step began, and when its training ended."""
        self._began_ns: int | None = None
        self._step_ns = 0
        self._turn = 0
        self._steps_before = 0
        """The steps made before the stretch under way."""
        link = (self._half_ns, site.down_mbps)
        self._arrivals = fleet.arrivals.setdefault(link, Arrivals(fleet.plan, fleet.published_ns, *link))
        self._listens = fleet.cargo is not None or fleet.plan.learner.adopt not in ADOPT_KEEPS_UNSENT
        """Whether the site is told of every version at once, also while it trains."""
        self._lost: dict[int, ev.PushAnswered] = {}
        """By fragment, the refusal of an update that was lost; handled when the fragment's next update is due."""
        self._mail: deque[tuple[int, ev.LearnerEvent]] = deque()
        """Events sent while the site trains, each with its instant of arrival; read at the next boundary."""
        self._is_due = False
        """Whether a fragment's update is due but must wait; set while the site trains."""

    # --- coming and going -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Plan the first process and the planned absences."""
        if self.site.starts_s < inf:
            self.heap.at(to_ns(self.site.starts_s), self.start)
        for begin_s, end_s in self.site.planned:
            away_ns = to_ns(end_s - begin_s)
            self.heap.at(to_ns(begin_s), partial(self.stop, away_ns))

    def asked_to_leave(self) -> None:
        """Send what is unsent, and leave for good."""
        if self._is_there:
            self._hear(ev.LeaveAsked())

    def cut(self, lasts_ns: int) -> None:
        """Cut the link for ``lasts_ns``; messages under way arrive after that."""
        self.disturbed()
        self._cut_from_ns, self._cut_until_ns = self.heap.now_ns, self.heap.now_ns + lasts_ns
        if lasts_ns > self.fleet.plan.outer.site_timeout_ns:
            self.heap.after(self.fleet.plan.outer.site_timeout_ns, self._unheard)
            self.heap.after(lasts_ns, self._heard)

    def _unheard(self) -> None:
        if self._is_known() and self.heap.now_ns < self._cut_until_ns:
            self.fleet.told(ev.SiteSilent(self.name))

    def _heard(self) -> None:
        if self._is_there and self._is_known():
            self.fleet.told(ev.SiteHeard(self.name))

    def stop(self, away_ns: int | None) -> None:
        """Stop for ``away_ns``, or for good."""
        if not self._is_there or self.machine.state.left:
            return
        if self._began_ns is not None:
            self._advance((self.heap.now_ns - self._began_ns) // self._step_ns)
        self._end_stretch()
        self._is_there, self._turn = False, self._turn + 1
        self._lost.clear()  # The next process resends the updates on its disk.
        self._mail.clear()
        self.fleet.resting.pop(self.index, None)
        self._since_ns = self.heap.now_ns
        life = self.lives
        timeout_ns = self.fleet.plan.outer.site_timeout_ns
        if away_ns is None or away_ns > timeout_ns:
            self.heap.after(timeout_ns, lambda: self._silent(life))
        if away_ns is not None:
            self.heap.after(away_ns, self.start)

    def _silent(self, life: int) -> None:
        if self.lives == life and not self._is_there and self._is_known():
            self.fleet.told(ev.SiteSilent(self.name))

    def _is_known(self) -> bool:
        """Return whether the site's join has reached the syncer."""
        return self.name in self.fleet.machine.state.sites

    def start(self) -> None:
        """Start a process: the first one, or the one after an absence."""
        if not self.lives:
            self._there_ns = self.heap.now_ns
        else:
            self.account.away_s += (self.heap.now_ns - self._since_ns) / SECOND_NS
            outbox = {key: digest for key, (_, digest) in self._disk.items()}
            self.machine = LearnerSync.restore(self.fleet.plan.learner, self.machine.snapshot(), outbox, 0)
        self.lives += 1
        self._is_there, self._since_ns = True, self.heap.now_ns
        self._ahead = None
        self._coming.clear()
        self.fleet.resting[self.index] = self
        self._soon(self._join)

    def close(self) -> None:
        """End the account: steps under way count as far as they came."""
        account, now_ns = self.account, self.heap.now_ns
        if self._began_ns is not None:
            account.steps += (now_ns - self._began_ns) // self._step_ns
        self._end_stretch()
        if self.lives and not self._is_there:
            account.away_s += (now_ns - self._since_ns) / SECOND_NS
        there_s = 0.0 if self._there_ns is None else ((self._gone_ns or now_ns) - self._there_ns) / SECOND_NS
        account.waited_s = max(0.0, there_s - account.trained_s - account.away_s)
        if self._first_ns is not None:
            account.training_s = ((now_ns if self._last_ns is None else self._last_ns) - self._first_ns) / SECOND_NS
            account.idle_s = max(0.0, account.training_s - account.trained_s - account.away_s)

    # --- training -------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        """Begin a stretch of steps up to the next boundary at which something is due, if the site may train."""
        state = self.machine.state
        # -1: a fragment has no version yet.
        if state.stopping or state.left or self.machine.must_wait() or -1 in [p.base_version for p in state.fragments]:
            self._rest()
            return
        if not self._listens:
            self.fleet.resting.pop(self.index, None)
        if self._first_ns is None:
            self._first_ns = self.heap.now_ns
            self.fleet.faults.first_step()
        steps = self.machine.steps_to_act()
        known = self.site.steps_s[self.account.steps : self.account.steps + steps]
        step_s = (sum(known) + (steps - len(known)) * self.site.step_s) / steps if known else self.site.step_s
        self._find_due()
        jitter = self.site.step_jitter and self.site.step_jitter * (2 * self.random.random() - 1)
        self._began_ns, self._step_ns = self.heap.now_ns, max(1, to_ns(step_s * (1 + jitter)))
        self._until(steps)

    def _rest(self) -> None:
        """Stand still; handle lost updates, and the versions published while the site trained."""
        while self._lost:
            self.told(self._lost.popitem()[1])
        self._read_in_time()
        if self.index in self.fleet.resting:
            return
        self.fleet.resting[self.index] = self
        for fragment in range(len(self.machine.state.fragments)):
            if self.fleet.machine.state.fragments[fragment].version > self._have(fragment):
                self.told(self.fleet.published(fragment))

    def _until(self, steps: int) -> None:
        """Plan the next boundary, ``steps`` steps after the beginning of the stretch."""
        self._turn += 1
        turn = self._turn
        assert self._began_ns is not None
        self.heap.at(self._began_ns + steps * self._step_ns, lambda: self._boundary(turn, steps))

    def _boundary(self, turn: int, steps: int) -> None:
        if turn == self._turn:
            self._advance(steps)
            self._end_stretch()
            if self.machine.state.stopping:
                self._last_ns = self.heap.now_ns
            self.fleet.stepped()
            self._train()

    def _end_stretch(self) -> None:
        if self._began_ns is not None:
            self.account.trained_s += (self.heap.now_ns - self._began_ns) / SECOND_NS
            self._began_ns = None

    def _advance(self, steps: int) -> None:
        """Account for the first ``steps`` steps of the stretch, and handle what arrived during them."""
        if not steps:
            return
        assert self._began_ns is not None
        self._read(self._began_ns + steps * self._step_ns)
        if self._lost or not self._listens:
            coming = self._coming_due(steps)
            for fragment in [each for each in self._lost if each in coming]:
                self._handle(self._lost.pop(fragment))
            if not self._listens:
                for fragment, version in self._came(coming, steps):
                    self._handle(ev.VersionFetched(fragment, version, self._fates(fragment)))
                    if self.fleet.plan.learner.dynamic_steps:  # They alone use the announcement's other fields.
                        self._handle(replace(self.fleet.published(fragment), version=version))
        step = self.machine.state.step + steps
        self.account.steps += steps
        if self.cargo is not None:
            self.cargo.trained(self.index, steps, self.fleet.progress_ppm())
        self._handle(ev.StepDone(step, steps * self.site.tokens_per_step, self._step_ns, step, steps=steps))
        self._steps_before = self.account.steps

    def steps_made(self) -> int:
        """Return the steps made, including the whole ones of the stretch under way."""
        under_way = 0 if self._began_ns is None else (self.heap.now_ns - self._began_ns) // self._step_ns
        return self._steps_before + under_way

    def _catch_up(self) -> None:
        """Account for the whole steps made by now: an event that arrives now cannot change them."""
        if self._began_ns is None or not (done := (self.heap.now_ns - self._began_ns) // self._step_ns):
            return
        self._advance(done)
        self.account.trained_s += done * self._step_ns / SECOND_NS
        self._began_ns += done * self._step_ns
        self._until(self.machine.steps_to_act())

    def _came(self, coming: Collection[int], steps: int) -> list[tuple[int, int]]:
        """Return (fragment, version) for each of ``coming`` whose newest version arrived within ``steps`` steps."""
        assert self._began_ns is not None
        state, until_ns = self.machine.state, self._began_ns + steps * self._step_ns
        came = []
        for fragment in coming:
            part = state.fragments[fragment]
            if part.fetching:
                continue
            crossed_ns = self._cut_from_ns if self._cut_from_ns <= until_ns < self._cut_until_ns else until_ns
            _, version = self._arrivals.newest(fragment, crossed_ns)
            have = self._have(fragment)
            if version > have:
                came.append((fragment, version))
                self.account.bytes_down += fetch_bytes(self.fleet.plan, fragment, have, version)
        return came

    def _coming_due(self, steps: int) -> Collection[int]:
        """Return the fragments whose update may be due within ``steps`` steps, in order."""
        options, state = self.fleet.plan.learner, self.machine.state
        if options.dynamic_steps or options.lock_step or state.stopping:
            return range(options.num_fragments)
        coming = coming_due(options, state, state.step + steps, steps)
        if not self._is_due:
            return coming
        return [index for index, part in enumerate(state.fragments) if part.due or index in coming]

    # --- versions -------------------------------------------------------------------------------------------------

    def _have(self, fragment: int) -> int:
        part = self.machine.state.fragments[fragment]
        return max(part.fetched, part.base_version)

    def _fetched(self, fragment: int, version: int, values: object) -> None:
        if self.cargo is not None:
            self.cargo.fetched(self.index, fragment, version, values)
        self._coming.discard(fragment)
        self._hear(ev.VersionFetched(fragment, version, self._fates(fragment)))

    def _fates(self, fragment: int) -> tuple[ev.Fate, ...]:
        """Return the fates of the site's undecided updates, which come with a version."""
        waits = [sent.sequence for sent in self.machine.state.fragments[fragment].undecided()]
        if not waits:
            return ()
        fates = self.fleet.machine.state.sites[self.name].lines[fragment].fates
        return tuple(fate for fate in fates if fate.sequence in waits)

    # --- the machine ----------------------------------------------------------------------------------------------

    def told(self, event: ev.LearnerEvent) -> None:
        """Send an event of the syncer to the site, if it is there."""
        if self._is_there:
            self._soon(lambda: self._hear(event))

    def told_in_passing(self, event: ev.LearnerEvent) -> None:
        """As ``told``, but while the site trains and no update is due, the event waits for the next boundary."""
        if not self._is_there:
            return
        if self._listens or self._began_ns is None or self._is_due:
            self.told(event)
        else:
            self._mail.append((self.heap.now_ns + self._half_ns, event))

    def _find_due(self) -> None:
        """Set ``_is_due``; a due update waits for an event, so mail is then handled when it arrives."""
        self._is_due = True in [part.due for part in self.machine.state.fragments]
        if self._is_due:
            self._read_in_time()

    def _read(self, until_ns: int) -> None:
        """Handle the mail that has arrived by ``until_ns``."""
        while self._mail and self._mail[0][0] <= until_ns:
            self._handle(self._mail.popleft()[1])

    def _read_in_time(self) -> None:
        """Plan the handling of all mail for its instants of arrival."""
        while self._mail:
            here_ns, event = self._mail.popleft()
            self._over(here_ns, partial(self._hear, event))

    def disturbed(self) -> None:
        """Handle the mail that has arrived; the rest may be delayed from now on."""
        self._read(self.heap.now_ns)
        self._read_in_time()

    def _hear(self, event: ev.LearnerEvent) -> None:
        self._read(self.heap.now_ns)
        state = self.machine.state
        if self._began_ns is not None and (isinstance(event, ENDS) or True in [part.due for part in state.fragments]):
            self._catch_up()
        self._handle(event)
        acts = state.stopping or True in [part.fetched > part.base_version for part in state.fragments]
        if self._began_ns is None:
            if acts:
                self._handle(ev.BoundaryReached())
            self._train()
            return
        self._find_due()
        if acts or self._is_due:
            # The site adopts or seals at the boundary after the step under way.
            passed = -(-(self.heap.now_ns - self._began_ns) // self._step_ns)
            self._until(max(1, passed))

    def _handle(self, event: ev.LearnerEvent) -> None:
        """Give ``event`` to the site's machine, and carry out its effects."""
        for effect in self.machine.handle(event, self.heap.now_ns):
            if self.cargo is not None:
                self.cargo.carry_out(self.index, effect)
            match effect:  # The usual ones first.
                case fx.Seal():
                    self._seal(effect)
                case fx.Send():
                    arrived = partial(self._pushed, (effect.fragment, effect.sequence))
                    self._over(self._carry_up(effect.fragment), arrived)
                case fx.Forget() | fx.Release():
                    self._disk.pop((effect.fragment, effect.sequence), None)
                case fx.Fetch() if effect.fragment not in self._coming:
                    self._soon(partial(self._fetch, effect.fragment))
                case fx.Join():
                    self._soon(self._join)
                case fx.StopTraining():
                    self._last_ns = self.heap.now_ns
                case fx.Leave():
                    self._gone_ns = self.heap.now_ns if effect.ending is None else None
                    self._soon(self._leave)

    def _seal(self, seal: fx.Seal) -> None:
        made, life = self._sealed(seal), self.lives
        if not self.site.seal_s:
            self._handle(made)
            return
        done_ns = to_ns(self.site.seal_s)
        self.heap.after(done_ns, lambda: self._hear(made) if self.lives == life and self._is_there else None)

    def _pushed(self, key: tuple[int, int]) -> None:
        if key not in self._disk:
            return
        if self.site.lost_share and self.random.random() < self.site.lost_share:
            refused = ev.PushAnswered(*key, ev.Outcome.REFUSED, ev.Reason.OVERLOAD)
            if self._began_ns is None:
                self.told(refused)
            else:
                self._lost[key[0]] = refused
            return
        answered = self._push(key)
        if answered.outcome is ev.Outcome.ACCEPTED:
            self.told_in_passing(answered)
        else:
            self.told(answered)


class RegionalSyncer(Member):
    """A region: one site of ``fleet``, above, with the fleet ``below`` of its own sites."""

    def __init__(self, fleet: Fleet, index: int, site: FleetSite, below: Fleet) -> None:
        assert site.region is not None, site
        super().__init__(fleet, index, site)
        self.below = below
        self.lives, self._is_there = 1, True
        self._has_left = False
        self._received = [-1 for _ in below.machine.state.fragments]
        below.above = self._order
        region, in_flight_max = site.region, fleet.plan.outer.updates_in_flight_max
        below.handle(ev.UpstreamStarted(self.name, region.updates, region.alpha, in_flight_max, (), region.from_blend))

    # --- the side of the fleet above ------------------------------------------------------------------------------

    def begin(self) -> None:
        """Join, and hear of every version from then on."""
        self.fleet.resting[self.index] = self
        self._soon(self._join)

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
                self.heap.after(0, partial(self._hear, self._sealed(effect)))
            case fx.Send():
                self._over(self._carry_up(effect.fragment), partial(self._pushed, (effect.fragment, effect.sequence)))
            case fx.Release():
                self._disk.pop((effect.fragment, effect.sequence), None)
            case fx.Fetch() if effect.fragment not in self._coming:
                self._coming.add(effect.fragment)
                self._soon(lambda: self._fetch(effect.fragment))
            case fx.Join():
                self._soon(self._join)
            case fx.Leave():
                self._soon(self._leave)
            case fx.StopTraining():
                raise AssertionError(effect.why)

    def _hear(self, event: ev.RegionEvent) -> None:
        if not self._has_left:
            self.below.handle(event)

    def _have(self, fragment: int) -> int:
        return self._received[fragment]

    def _fetched(self, fragment: int, version: int, values: object) -> None:
        self._coming.discard(fragment)
        self._received[fragment] = version
        name, state = f"{fragment}.{version}", self.fleet.machine.state
        self._hear(ev.UpstreamFetched(fragment, version, name, name, state.lineage, state.epoch))

    def _pushed(self, key: tuple[int, int]) -> None:
        if key in self._disk:
            self.told(self._push(key))

    def _leave(self) -> None:
        self._has_left = True
        super()._leave()


LOOK_S = 1.0
"""The interval between two checks of the run's progress, while a fault waits for a share of it."""


class Faults:
    """Plays the faults of a plan on its fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._waiting = list(fleet.plan.faults)
        self._have_begun = False
        for site in fleet.sites:
            if isinstance(site, Site):
                rate, away_s = site.site.interruptions_per_s, site.site.away_s
                alone = Region(sites=(site.index,), interruptions_per_s=rate, away_s=away_s)
                self._fail_some_day(alone, site.random)
        for number, region in enumerate(fleet.plan.regions):
            self._fail_some_day(region, Random(f"{fleet.plan.seed}/region/{number}"))

    def first_step(self) -> None:
        """Handle the fleet's first training step: faults with a time count from here."""
        if self._have_begun:
            return
        self._have_begun, heap = True, self._fleet.heap
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
        def fail() -> None:
            for index in region.sites:
                site = self._one(index)
                site.account.interruptions += 1
                site.stop(to_ns(region.away_s))
            self._fail_some_day(region, random)

        if region.interruptions_per_s:
            self._fleet.heap.after(to_ns(random.expovariate(region.interruptions_per_s)), fail)

    def _one(self, index: int) -> Site:
        site = self._fleet.sites[index]
        assert isinstance(site, Site), "nothing happens to a region's own process"
        return site


STILL_S = 24 * 3600.0
"""After this time without a version, or ten periods of its slowest site if longer, a run is endless, unless it is by
time and a site has joined."""
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
            state = fleet.machine.state
            if fleet.closed > closed or fleet.is_over() or (plan.outer.run_ns and state.started_ns is not None):
                continue  # The time of a run by time begins with its first site.
            why = f"{state.run_tokens()} of {plan.outer.token_budget} tokens are merged"
            if state.started_ns is None:
                why = "no site has joined"
            raise EndlessError(f"no version in the last {still_s / 3600:g} h, and {why}")
        return fleet.result()
    finally:
        gc.set_threshold(threshold, *others)


def _period_s(plan: FleetPlan, site: FleetSite) -> float:
    """Return the time between two updates, in seconds; a region's updates may all come from its slowest site."""
    if site.region is None:
        return plan.learner.inner_steps * site.step_s
    return site.region.updates * max(_period_s(site.region.plan, each) for each in site.region.plan.sites)
