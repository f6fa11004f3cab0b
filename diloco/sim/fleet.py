"""Sites and a syncer without tensors, for weeks at a time: who trains, who waits, who is away, and what crosses links.

The machines are the real ones, so quorum, grace, staleness, windows and fates are what they are in a run; the rest is
time.  A site's inner steps pass as one as long as nothing is due; an update takes its place on the site's up-link, and
a version on its down-link, one after the other; a site fails as often as its chips do, is away for as long as it takes
to go on without the lost one, and goes on from where it was.

What this does not have, and ``swarm`` does: messages that are lost, come twice or overtake each other, disks, and a
syncer that dies.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from diloco.sim.network import Heap
from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.learner import LearnerSync
from diloco.sync.options import SECOND_NS, LearnerOptions, OuterOptions
from diloco.sync.state import Phase
from diloco.sync.syncer import OuterSync

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

YEAR_S = 365.25 * 24 * 3600
STILL_S = 24 * 3600.0
"""A run that ends by its tokens and makes no version for so long, or in ten periods of its slowest site, never ends."""


class EndlessError(ValueError):
    """The run that was to be simulated to its end has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetSite:
    """One site.  ``mbps`` 0 is a link without bound; ``interruptions_per_s`` are of the whole site (its chips'
    together), each of which stops it for ``away_s``.

    Interruptions that come while it is stopped are part of the same one: what starts again starts without those too.
    """

    step_s: float
    tokens_per_step: int = 1
    step_jitter: float = 0.0
    up_mbps: float = 0.0
    down_mbps: float = 0.0
    rtt_s: float = 0.0
    interruptions_per_s: float = 0.0
    away_s: float = 0.0
    planned: tuple[tuple[float, float], ...] = ()
    """(begin, end) of maintenance, in seconds from the start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetPlan:
    """``update_bytes`` and ``version_bytes`` are those of each fragment; ``whole_bytes`` of one for who has none."""

    sites: tuple[FleetSite, ...]
    outer: OuterOptions
    learner: LearnerOptions
    update_bytes: tuple[int, ...]
    version_bytes: tuple[int, ...]
    whole_bytes: tuple[int, ...]
    merge_s: float = 0.0
    seconds: float | None = 3600.0
    """None: until the run ends by itself, which it may do earlier as well."""
    seed: int = 0


@dataclass(slots=True)
class SiteAccount:
    """Where a site's time has gone, in seconds, and what crossed its link; ``rounds`` are its updates merged."""

    trained_s: float = 0.0
    away_s: float = 0.0
    waited_s: float = 0.0
    steps: int = 0
    rounds: int = 0
    tokens_merged: int = 0
    interruptions: int = 0
    bytes_up: int = 0
    bytes_down: int = 0


@dataclass(frozen=True, slots=True)
class FleetResult:
    """``goodput`` is the share of all sites' time that was spent on inner steps, of ``seconds`` that passed."""

    sites: tuple[SiteAccount, ...]
    versions: tuple[int, ...]
    seconds: float
    sites_per_version: float

    @property
    def goodput(self) -> float:
        """Of all sites together."""
        return sum(site.trained_s for site in self.sites) / (self.seconds * len(self.sites))

    @property
    def site_rounds(self) -> int:
        """Updates merged, over all sites and fragments."""
        return sum(site.rounds for site in self.sites)


def simulate(plan: FleetPlan) -> FleetResult:
    """Let ``plan.seconds`` pass, or the run end.  The same plan gives the same result."""
    fleet = _Fleet(plan)
    if plan.seconds is not None:
        fleet.heap.run_until(_ns(plan.seconds), fleet.is_over)
    else:
        _run_to_the_end(fleet)
    return fleet.result()


def _run_to_the_end(fleet: _Fleet) -> None:
    plan = fleet.plan
    still_s = max(STILL_S, 10 * plan.learner.inner_steps * max(site.step_s for site in plan.sites))
    while not fleet.is_over():
        closed = fleet.closed
        fleet.heap.run_until(fleet.heap.now_ns + _ns(still_s), fleet.is_over)
        if fleet.closed == closed and not fleet.is_over() and not plan.outer.run_ns:
            merged = f"{fleet.machine.state.run_tokens()} of {plan.outer.token_budget} tokens are merged"
            raise EndlessError(f"no version in the last {still_s / 3600:g} h, and {merged}")


class _Fleet:
    """The syncer, the links and the clock."""

    def __init__(self, plan: FleetPlan) -> None:
        self.plan = plan
        self.heap = Heap()
        self.machine = OuterSync(plan.outer)
        self.sites = [_Site(self, index, site) for index, site in enumerate(plan.sites)]
        self.by_name = {site.name: site for site in self.sites}
        self._planned_ns: int | None = None
        self.closed = self._merged = 0
        self.handle(ev.SyncerStarted(1))
        for site in self.sites:
            site.begin()

    def handle(self, event: ev.OuterEvent) -> list[fx.OuterEffect]:
        """Tell the syncer, and do what it wants that is no answer to this one."""
        effects = self.machine.handle(event, self.heap.now_ns)
        fates: dict[str, list[ev.Fate]] = defaultdict(list)
        for effect in effects:
            if isinstance(effect, fx.StartOuterStep):
                self.closed += 1
                self._merged += len(effect.contributions)
                done = ev.OuterStepDone(effect.fragment, effect.version, "v", "d")
                self.heap.after(_ns(self.plan.merge_s), partial(self.handle, done))
            elif isinstance(effect, fx.TellFate):
                fates[effect.site].append(effect.fate)
            elif isinstance(effect, fx.AnnounceFinal):
                for site in self.sites:
                    site.told_of_the_end(effect.ending)
        for effect in effects:
            if isinstance(effect, fx.PublishVersion):
                for site in self.sites:
                    site.told(effect, tuple(fates.get(site.name, ())))
                fates = defaultdict(list)
        for name, told in fates.items():
            for fate in told:
                self.by_name[name].hear(ev.FateTold(fate))
        self._wait()
        return effects

    def is_over(self) -> bool:
        """Whether every fragment has its final version."""
        return self.machine.state.phase is Phase.ENDED

    def result(self) -> FleetResult:
        """As of now."""
        for site in self.sites:
            site.close()
        state = self.machine.state
        for site in self.sites:
            lines = state.sites[site.name].lines if site.name in state.sites else []
            site.account.rounds = sum(line.updates_merged for line in lines)
            site.account.tokens_merged = sum(line.tokens_merged for line in lines) // len(state.fragments)
        versions = tuple(fragment.version for fragment in state.fragments)
        return FleetResult(
            tuple(site.account for site in self.sites),
            versions,
            self.heap.now_ns / SECOND_NS,
            self._merged / max(1, self.closed),
        )

    def left(self, site: _Site) -> None:
        """A site says goodbye."""
        self.handle(ev.SiteLeft(1, site.name, site.machine.state.incarnation))

    def _wait(self) -> None:
        wanted = self.machine.next_deadline_ns()
        if wanted is None or (self._planned_ns is not None and self.heap.now_ns < self._planned_ns <= wanted):
            return
        self._planned_ns = wanted
        self.heap.at(wanted, lambda: self._pass(wanted))

    def _pass(self, instant_ns: int) -> None:
        if self._planned_ns == instant_ns:
            self._planned_ns = None
            self.handle(ev.DeadlinePassed())


class _Site:
    """A site's machine, its place in time, and its link."""

    def __init__(self, fleet: _Fleet, index: int, site: FleetSite) -> None:
        self.fleet, self.site, self.heap = fleet, site, fleet.heap
        self.name = f"site-{index:05d}"
        self.account = SiteAccount()
        self.machine = LearnerSync(fleet.plan.learner)
        self.random = Random(f"{fleet.plan.seed}/{index}")
        self.lives = 0
        self.is_there = False
        self.since_ns = 0
        self.began_ns: int | None = None
        self.step_ns = 0
        self.turn = 0
        self.up_free_ns = self.down_free_ns = 0
        self.disk: dict[tuple[int, int], tuple[fx.Seal, str]] = {}

    # --- coming and going -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The first process, and the calendar of its planned absences."""
        self._start()
        for begin_s, end_s in self.site.planned:
            self.heap.at(_ns(begin_s), partial(self._stop, _ns(end_s - begin_s)))
        self._fail_some_day()

    def _fail_some_day(self) -> None:
        if self.site.interruptions_per_s:
            self.heap.after(_ns(self.random.expovariate(self.site.interruptions_per_s)), self._interrupted)

    def _interrupted(self) -> None:
        self.account.interruptions += 1
        if self.is_there:
            self._stop(_ns(self.site.away_s))
        self._fail_some_day()

    def _stop(self, away_ns: int) -> None:
        if not self.is_there or self.machine.state.left:
            return
        self._account_training()
        self.is_there, self.began_ns, self.turn = False, None, self.turn + 1
        self.since_ns = self.heap.now_ns
        life = self.lives
        timeout_ns = self.fleet.plan.outer.site_timeout_ns
        if away_ns > timeout_ns:
            self.heap.after(timeout_ns, lambda: self._silent(life))
        self.heap.after(away_ns, self._start)

    def _silent(self, life: int) -> None:
        if self.lives == life and not self.is_there:
            self.fleet.handle(ev.SiteSilent(self.name))

    def _start(self) -> None:
        if self.lives:
            self.account.away_s += (self.heap.now_ns - self.since_ns) / SECOND_NS
            outbox = {key: digest for key, (_, digest) in self.disk.items()}
            plain, processed = self.machine.snapshot(), self.machine.state.tokens_processed
            self.machine = LearnerSync.restore(self.fleet.plan.learner, plain, outbox, processed)
        self.lives += 1
        self.is_there, self.since_ns = True, self.heap.now_ns
        self._soon(self._join)

    def _join(self) -> None:
        asked = ev.JoinRequested(1, self.name, f"{self.name}/{self.lives}")
        (answer,) = (each for each in self.fleet.handle(asked) if isinstance(each, fx.AnswerJoin))
        state, progress = self.fleet.machine.state, self.fleet.machine.progress_ppm()
        joined = ev.JoinAnswered(
            state.epoch,
            answer.incarnation,
            answer.standings,
            state.run_tokens(),
            progress,
            answer.ending,
            state.lineage,
        )
        self.hear(joined)

    def close(self) -> None:
        """The time is over: what is under way counts as far as it came."""
        if self.is_there:
            self._account_training()
        else:
            self.account.away_s += (self.heap.now_ns - self.since_ns) / SECOND_NS
        whole_s = self.heap.now_ns / SECOND_NS
        self.account.waited_s = max(0.0, whole_s - self.account.trained_s - self.account.away_s)

    # --- training -------------------------------------------------------------------------------------------------

    def _may_train(self) -> bool:
        state = self.machine.state
        if state.stopping or state.left:
            return False
        if any(part.base_version < 0 for part in state.fragments):
            return False
        lock_step = self.fleet.plan.learner.lock_step
        return not (lock_step and any(part.in_flight for part in state.fragments))

    def _train(self) -> None:
        """Go on until something is due, if this site may."""
        if not self.is_there or self.began_ns is not None or not self._may_train():
            return
        jitter = 1 + self.site.step_jitter * (2 * self.random.random() - 1)
        self.began_ns, self.step_ns = self.heap.now_ns, max(1, _ns(self.site.step_s * jitter))
        self._until(self.machine.steps_to_act())

    def _until(self, steps: int) -> None:
        """The boundary after so many steps from the beginning of this stretch is the next one."""
        self.turn += 1
        turn = self.turn
        assert self.began_ns is not None
        self.heap.at(self.began_ns + steps * self.step_ns, lambda: self._boundary(turn, steps))

    def _boundary(self, turn: int, steps: int) -> None:
        if turn != self.turn or not self.is_there:
            return
        self._account_training()
        self.began_ns = None
        state = self.machine.state
        step, tokens = state.step + steps, steps * self.site.tokens_per_step
        self.account.steps += steps
        self.hear(ev.StepDone(step, tokens, self.step_ns, step, steps=steps))
        self._train()

    def _account_training(self) -> None:
        if self.began_ns is not None:
            self.account.trained_s += (self.heap.now_ns - self.began_ns) / SECOND_NS

    # --- the machine ----------------------------------------------------------------------------------------------

    def told(self, version: fx.PublishVersion, fates: Sequence[ev.Fate]) -> None:
        """The syncer publishes, and tells fates first."""
        if not self.is_there:
            return
        state = self.fleet.machine.state
        run = (state.run_tokens(), self.fleet.machine.progress_ppm(), state.lineage, state.fastest_step_ns())
        for fate in fates:
            self.hear(ev.FateTold(fate))
        published = ev.VersionPublished(state.epoch, version.fragment, version.version, *run)
        self._soon(lambda: self.hear(published))

    def told_of_the_end(self, ending: ev.Ending) -> None:
        """The last round begins."""
        self._soon(lambda: self.hear(ev.FinalAnnounced(ending)))

    def hear(self, event: ev.LearnerEvent) -> None:
        """Tell the machine, and carry out what it wants."""
        if not self.is_there:
            return
        for effect in self.machine.handle(event, self.heap.now_ns):
            self._carry_out(effect)
        if self.began_ns is None:
            if self._acts_at_rest():
                self._boundary_at_rest()
            self._train()
        elif self.machine.state.stopping or isinstance(event, ev.VersionFetched):
            # It is adopted, or the last update made, at the boundary after the step that is under way.
            passed = -(-(self.heap.now_ns - self.began_ns) // self.step_ns)
            self._until(max(1, passed))

    def _acts_at_rest(self) -> bool:
        """Whether there may be something to do for a site that stands between two steps."""
        state = self.machine.state
        return state.stopping or any(part.fetched > part.base_version for part in state.fragments)

    def _boundary_at_rest(self) -> None:
        for effect in self.machine.handle(ev.BoundaryReached(), self.heap.now_ns):
            self._carry_out(effect)

    def _carry_out(self, effect: fx.LearnerEffect) -> None:
        plan = self.fleet.plan
        match effect:
            case fx.Join():
                self._soon(self._join)
            case fx.Seal():
                digest = f"{self.name}:{effect.fragment}:{effect.sequence}:{self.lives}"
                self.disk[effect.fragment, effect.sequence] = (effect, digest)
                self.heap.after(0, self._mine(lambda: self.hear(ev.Sealed(effect.fragment, effect.sequence, digest))))
            case fx.Send():
                size = plan.update_bytes[effect.fragment]
                self.account.bytes_up += size
                self.up_free_ns = max(self.up_free_ns, self.heap.now_ns) + _carry_ns(size, self.site.up_mbps)
                key = (effect.fragment, effect.sequence)
                self.heap.at(self.up_free_ns + _ns(self.site.rtt_s / 2), self._mine(lambda: self._pushed(key)))
            case fx.Forget() | fx.Release():
                self.disk.pop((effect.fragment, effect.sequence), None)
            case fx.Leave():
                self._soon(lambda: self.fleet.left(self))
            case fx.Fetch():
                behind = self.machine.state.fragments[effect.fragment].base_version < 0
                size = (plan.whole_bytes if behind else plan.version_bytes)[effect.fragment]
                self.account.bytes_down += size
                free = max(self.down_free_ns, self.heap.now_ns + _ns(self.site.rtt_s / 2))
                self.down_free_ns = free + _carry_ns(size, self.site.down_mbps)
                here = self.down_free_ns + _ns(self.site.rtt_s / 2)
                self.heap.at(here, self._mine(lambda: self._fetched(effect.fragment)))

    def _pushed(self, key: tuple[int, int]) -> None:
        if key not in self.disk:
            return
        seal, digest = self.disk[key]
        state = self.machine.state
        update = ev.UpdateArrived(
            1,
            self.name,
            state.incarnation,
            seal.fragment,
            seal.sequence,
            seal.base_version,
            seal.tokens,
            seal.steps,
            seal.step_ns,
            seal.cursor,
            digest,
            digest,
            "",
            True,
            seal.final,
        )
        (answer,) = (each for each in self.fleet.handle(update) if isinstance(each, fx.AnswerPush))
        pushed = ev.PushAnswered(*key, answer.outcome, answer.reason)
        self._soon(lambda: self.hear(pushed))

    def _fetched(self, fragment: int) -> None:
        state = self.fleet.machine.state
        waits = {sent.sequence for sent in self.machine.state.fragments[fragment].in_flight}
        fates = tuple(fate for fate in state.sites[self.name].lines[fragment].fates if fate.sequence in waits)
        self.hear(ev.VersionFetched(fragment, state.fragments[fragment].version, fates))

    def _soon(self, do: Callable[[], None]) -> None:
        """When what is said now has crossed the link."""
        self.heap.after(_ns(self.site.rtt_s / 2), self._mine(do))

    def _mine(self, do: Callable[[], None]) -> Callable[[], None]:
        """``do``, unless this process has ended by then."""
        life = self.lives
        return lambda: do() if self.lives == life and self.is_there else None


def _ns(seconds: float) -> int:
    return round(seconds * SECOND_NS)


def _carry_ns(size: int, mbps: float) -> int:
    return round(size * 8e3 / mbps) if mbps else 0
