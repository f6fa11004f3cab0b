"""What links bring to the sites of a fleet, worked out once for all sites that have the same link.

A site of a fleet: its machine, its place in time, and its link.

Where an adopt keeps what was trained since (``ADOPT_KEEPS_UNSENT``) it makes no difference when, between two updates of
the fragment, it happens, unless somebody trains on it.  There a site that trains is not told of versions one by one:
what it would have fetched meanwhile, and when that would have been here, follows from when it was published and from
the link; it is worked out when something is due, and only the newest version is adopted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import replace
from heapq import heappop, heappush
from math import inf
from random import Random
from typing import TYPE_CHECKING

from diloco.sim.fleet_plan import SiteAccount
from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.learner import LearnerSync
from diloco.sync.options import ADOPT_KEEPS_UNSENT, SECOND_NS
from diloco.sync.updates import coming_due

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from diloco.sim.fleet import Fleet
    from diloco.sim.fleet_plan import FleetPlan, FleetSite

ANY = 1 << 62
"""Above every version."""


def carry_ns(size: int, mbps: float) -> int:
    """What so many bytes take of a link; 0 ``mbps`` is one without bound."""
    return round(size * 8e3 / mbps) if mbps else 0


def fetch_bytes(plan: FleetPlan, fragment: int, have: int, version: int) -> int:
    """What a version costs who has an earlier one: the differences, or all of it where that is less."""
    whole = 0 if have < 0 and plan.is_joined else plan.whole_bytes[fragment]
    return whole if have < 0 else min((version - have) * plan.version_bytes[fragment], whole)


class Arrivals:
    """When versions are there for who fetches each as soon as it is heard of, one at a time of a fragment."""

    def __init__(self, plan: FleetPlan, published_ns: Sequence[Sequence[int]], half_ns: int, mbps: float) -> None:
        """``published_ns`` are the instants of each fragment's versions, which may grow; ``half_ns`` is half an rtt."""
        self._plan, self._published_ns, self._half_ns, self._mbps = plan, published_ns, half_ns, mbps
        fragments = range(len(published_ns))
        self._have = [0 for _ in fragments]
        self._free_ns = 0
        self._asks: list[tuple[int, int]] = []
        self._here: list[list[tuple[int, int]]] = [[(0, 0)] for _ in fragments]

    def published(self, fragment: int) -> None:
        """There is a version; it is asked for unless an earlier one is on its way."""
        if self._have[fragment] + 2 == len(self._published_ns[fragment]):
            self._ask(fragment)

    def newest(self, fragment: int, now_ns: int) -> tuple[int, int]:
        """Since when the newest version is there, and which it is; ``now_ns`` never falls."""
        while self._asks and self._asks[0][0] + self._half_ns <= now_ns:
            self._carry(*heappop(self._asks))
        here = self._here[fragment]
        return here[bisect_right(here, (now_ns, ANY)) - 1]

    def _ask(self, fragment: int) -> None:
        heard_ns = self._published_ns[fragment][self._have[fragment] + 1] + self._half_ns
        heappush(self._asks, (max(heard_ns, self._here[fragment][-1][0]), fragment))

    def _carry(self, asked_ns: int, fragment: int) -> None:
        there_ns, have = asked_ns + self._half_ns, self._have[fragment]
        version = bisect_right(self._published_ns[fragment], there_ns) - 1
        size = fetch_bytes(self._plan, fragment, have, version)
        self._free_ns = max(self._free_ns, there_ns) + carry_ns(size, self._mbps)
        self._have[fragment] = version
        self._here[fragment].append((self._free_ns + self._half_ns, version))
        if version + 1 < len(self._published_ns[fragment]):
            self._ask(fragment)


class Site:
    """One site; ``fleet`` is the rest of the world."""

    def __init__(self, fleet: Fleet, index: int, site: FleetSite) -> None:
        self.fleet, self.index, self.site, self.heap, self.cargo = fleet, index, site, fleet.heap, fleet.cargo
        self.name = f"site-{index:05d}"
        self.account = SiteAccount()
        self.machine = LearnerSync(fleet.plan.learner)
        self._random = Random(f"{fleet.plan.seed}/{index}")
        self._half_ns = to_ns(site.rtt_s / 2)
        self._lives = 0
        self._is_there = False
        self._since_ns = 0
        self._there_ns: int | None = None
        self._gone_ns: int | None = None
        """When it was there for the first time, and when it left a run that goes on."""
        self._cut_from_ns = self._cut_until_ns = 0
        self._first_ns: int | None = None
        self._last_ns: int | None = None
        """When its first step began, and when its training ended."""
        self._began_ns: int | None = None
        self._step_ns = 0
        self._turn = 0
        self._steps_before = 0
        """Those before this stretch."""
        self._up_free_ns = self._down_free_ns = 0
        self._arrivals = fleet.arrivals(self._half_ns, site.down_mbps)
        self._ahead: int | None = None
        """The fragment of which the next version is waited for at the syncer: that of the update sent last."""
        self._coming: set[int] = set()
        """The fragments of which a version is on its way that was waited for there."""
        self._listens = fleet.cargo is not None or fleet.plan.learner.adopt not in ADOPT_KEEPS_UNSENT
        """Whether it is told of every version at once, also while it trains."""
        self._disk: dict[tuple[int, int], tuple[fx.Seal, str]] = {}
        self._lost: dict[int, ev.PushAnswered] = {}
        """Of each fragment the update that never arrives: it is part of the next, when that one is due."""
        self._mail: deque[tuple[int, ev.LearnerEvent]] = deque()
        """What it was told while it trained, and when that is here: it reads it at the next boundary."""
        self._is_due = False
        """Whether an update of a fragment would be made at the next boundary, if it might; known while it trains."""

    # --- coming and going -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The first process, and the calendar of its planned absences."""
        if self.site.starts_s < inf:
            self.heap.at(to_ns(self.site.starts_s), self._start)
        for begin_s, end_s in self.site.planned:
            away_ns = to_ns(end_s - begin_s)
            self.heap.at(to_ns(begin_s), lambda away_ns=away_ns: self.stop(away_ns))  # type: ignore[misc]
        self._fail_some_day()

    def _fail_some_day(self) -> None:
        if self.site.interruptions_per_s:
            self.heap.after(to_ns(self._random.expovariate(self.site.interruptions_per_s)), self._fails)

    def _fails(self) -> None:
        self.interrupted(to_ns(self.site.away_s))
        self._fail_some_day()

    def interrupted(self, away_ns: int) -> None:
        """It fails, by itself or with others."""
        self.account.interruptions += 1
        self.stop(away_ns)

    def start(self) -> None:
        """The first process of a site that was not there before."""
        if not self._lives:
            self._start()

    def asked_to_leave(self) -> None:
        """It sends what it has, and goes for good."""
        if self._is_there:
            self._hear(ev.LeaveAsked())

    def cut(self, lasts_ns: int) -> None:
        """Nothing crosses its link for so long; what is on its way comes when that is over."""
        self.disturbed()
        self._cut_from_ns, self._cut_until_ns = self.heap.now_ns, self.heap.now_ns + lasts_ns
        if lasts_ns > self.fleet.plan.outer.site_timeout_ns:
            self.heap.after(self.fleet.plan.outer.site_timeout_ns, self._unheard)
            self.heap.after(lasts_ns, self._heard)

    def _unheard(self) -> None:
        if self._lives and self.heap.now_ns < self._cut_until_ns:
            self.fleet.told(ev.SiteSilent(self.name))

    def _heard(self) -> None:
        if self._is_there and self.name in self.fleet.state.sites:
            self.fleet.told(ev.SiteHeard(self.name))

    def stop(self, away_ns: int | None) -> None:
        """It is away for so long, or for good."""
        if not self._is_there or self.machine.state.left:
            return
        if self._began_ns is not None:
            self._advance((self.heap.now_ns - self._began_ns) // self._step_ns)
        self._end_stretch()
        self._is_there, self._turn = False, self._turn + 1
        self._lost.clear()  # The next process sends again what it finds on its disk.
        self._mail.clear()
        self.fleet.resting.pop(self.index, None)
        self._since_ns = self.heap.now_ns
        life = self._lives
        timeout_ns = self.fleet.plan.outer.site_timeout_ns
        if away_ns is None or away_ns > timeout_ns:
            self.heap.after(timeout_ns, lambda: self._silent(life))
        if away_ns is not None:
            self.heap.after(away_ns, self._start)

    def _silent(self, life: int) -> None:
        if self._lives == life and not self._is_there:
            self.fleet.told(ev.SiteSilent(self.name))

    def _start(self) -> None:
        if not self._lives:
            self._there_ns = self.heap.now_ns
        else:
            self.account.away_s += (self.heap.now_ns - self._since_ns) / SECOND_NS
            outbox = {key: digest for key, (_, digest) in self._disk.items()}
            plain, processed = self.machine.snapshot(), self.machine.state.tokens_processed
            self.machine = LearnerSync.restore(self.fleet.plan.learner, plain, outbox, processed)
        self._lives += 1
        self._is_there, self._since_ns = True, self.heap.now_ns
        self._ahead = None
        self._coming.clear()
        self.fleet.resting[self.index] = self
        self._soon(self._join)

    def _join(self) -> None:
        asked = ev.JoinRequested(1, self.name, f"{self.name}/{self._lives}")
        (answer,) = (each for each in self.fleet.handle(asked) if isinstance(each, fx.AnswerJoin))
        state, machine = self.fleet.state, self.fleet.machine
        run = (machine.attendance.run_tokens(), machine.progress_ppm(), answer.ending, state.lineage)
        self.told(ev.JoinAnswered(state.epoch, answer.incarnation, answer.standings, *run))

    def close(self) -> None:
        """The time is over: what is under way counts as far as it came."""
        account, now_ns = self.account, self.heap.now_ns
        if self._began_ns is not None:
            account.steps += (now_ns - self._began_ns) // self._step_ns
        self._end_stretch()
        if self._lives and not self._is_there:
            account.away_s += (now_ns - self._since_ns) / SECOND_NS
        there_s = 0.0 if self._there_ns is None else ((self._gone_ns or now_ns) - self._there_ns) / SECOND_NS
        account.waited_s = max(0.0, there_s - account.trained_s - account.away_s)
        if self._first_ns is not None:
            account.training_s = ((now_ns if self._last_ns is None else self._last_ns) - self._first_ns) / SECOND_NS
            account.idle_s = max(0.0, account.training_s - account.trained_s - account.away_s)

    # --- training -------------------------------------------------------------------------------------------------

    def _may_train(self) -> bool:
        state = self.machine.state
        if state.stopping or state.left or self.machine.must_wait():
            return False
        return min([part.base_version for part in state.fragments]) >= 0

    def _train(self) -> None:
        """Go on until something is due, if this site may."""
        if not self._may_train():
            self._rest()
            return
        if not self._listens:
            self.fleet.resting.pop(self.index, None)
        if self._first_ns is None:
            self._first_ns = self.heap.now_ns
            self.fleet.first_step()
        steps = self.machine.steps_to_act()
        known = self.site.steps_s[self.account.steps : self.account.steps + steps]
        step_s = (sum(known) + (steps - len(known)) * self.site.step_s) / steps if known else self.site.step_s
        self._find_due()
        jitter = self.site.step_jitter and self.site.step_jitter * (2 * self._random.random() - 1)
        self._began_ns, self._step_ns = self.heap.now_ns, max(1, to_ns(step_s * (1 + jitter)))
        self._until(steps)

    def _rest(self) -> None:
        """Stand still, and hear of what was lost, and of what was published while there was no time to listen."""
        while self._lost:
            self.told(self._lost.popitem()[1])
        self._read_in_time()
        if self.index in self.fleet.resting:
            return
        self.fleet.resting[self.index] = self
        for fragment, part in enumerate(self.machine.state.fragments):
            if self.fleet.state.fragments[fragment].version > max(part.fetched, part.base_version):
                self.told(self.fleet.published(fragment))

    def _until(self, steps: int) -> None:
        """The boundary after so many steps from the beginning of this stretch is the next one."""
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
        """So many steps of this stretch are done, with what came in the meantime."""
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
                    self._take(fragment, version)
        step = self.machine.state.step + steps
        self.account.steps += steps
        if self.cargo is not None:
            self.cargo.trained(self.index, steps, self.fleet.progress_ppm())
        self._handle(ev.StepDone(step, steps * self.site.tokens_per_step, self._step_ns, step, steps=steps))
        self._steps_before = self.account.steps

    def steps_made(self) -> int:
        """Those of the stretch under way as well, the whole ones."""
        under_way = 0 if self._began_ns is None else (self.heap.now_ns - self._began_ns) // self._step_ns
        return self._steps_before + under_way

    def _catch_up(self) -> None:
        """The steps that are done by now, which nothing that is heard now changes any more."""
        if self._began_ns is None or not (done := (self.heap.now_ns - self._began_ns) // self._step_ns):
            return
        self._advance(done)
        self.account.trained_s += done * self._step_ns / SECOND_NS
        self._began_ns += done * self._step_ns
        self._until(self.machine.steps_to_act())

    def _came(self, coming: Collection[int], steps: int) -> list[tuple[int, int]]:
        """The newest version of each fragment of ``coming``, where one came in so many steps."""
        assert self._began_ns is not None
        state, until_ns = self.machine.state, self._began_ns + steps * self._step_ns
        came = []
        for fragment in coming:
            part = state.fragments[fragment]
            if part.fetching:
                continue
            crossed_ns = self._cut_from_ns if self._cut_from_ns <= until_ns < self._cut_until_ns else until_ns
            _, version = self._arrivals.newest(fragment, crossed_ns)
            have = max(part.fetched, part.base_version)
            if version > have:
                came.append((fragment, version))
                self.account.bytes_down += fetch_bytes(self.fleet.plan, fragment, have, version)
        return came

    def _coming_due(self, steps: int) -> Collection[int]:
        """The fragments of which an update may be made after so many steps, in order."""
        options, state = self.fleet.plan.learner, self.machine.state
        if options.dynamic_steps or options.lock_step or state.stopping:
            return range(options.num_fragments)
        coming = coming_due(options, state, state.step + steps, steps)
        if not self._is_due:
            return coming
        return [index for index, part in enumerate(state.fragments) if part.due or index in coming]

    # --- versions -------------------------------------------------------------------------------------------------

    def _take(self, fragment: int, version: int) -> None:
        """A version that was asked for beside training is here."""
        self._handle(ev.VersionFetched(fragment, version, self._fates(fragment)))
        if self.fleet.plan.learner.dynamic_steps:  # Nobody else looks at what the news of a version says beside it.
            self._handle(replace(self.fleet.published(fragment), version=version))

    def published(self, news: ev.VersionPublished) -> None:
        """The syncer tells a site that stands still of a version, and sends it where it is waited for."""
        self.told(news)
        if self._ahead == news.fragment and self._is_there and news.fragment not in self._coming:
            self._ahead = None
            self._coming.add(news.fragment)
            self._fetch(news.fragment)

    def _fetch(self, fragment: int) -> None:
        """A site's question is at the syncer now."""
        plan, part = self.fleet.plan, self.machine.state.fragments[fragment]
        version = self.fleet.state.fragments[fragment].version
        size = fetch_bytes(plan, fragment, max(part.fetched, part.base_version), version)
        self.account.bytes_down += size
        self._down_free_ns = max(self._down_free_ns, self.heap.now_ns) + carry_ns(size, self.site.down_mbps)
        values = self.cargo.published(fragment) if self.cargo is not None else None
        self._over(self._down_free_ns + self._half_ns, lambda: self._fetched(fragment, version, values))

    def _fetched(self, fragment: int, version: int, values: object) -> None:
        if self.cargo is not None:
            self.cargo.fetched(self.index, fragment, version, values)
        self._coming.discard(fragment)
        self._hear(ev.VersionFetched(fragment, version, self._fates(fragment)))

    def _fates(self, fragment: int) -> tuple[ev.Fate, ...]:
        """What became of the updates that wait for a word, which comes with a version."""
        waits = [sent.sequence for sent in self.machine.state.fragments[fragment].undecided()]
        if not waits:
            return ()
        fates = self.fleet.state.sites[self.name].lines[fragment].fates
        return tuple(fate for fate in fates if fate.sequence in waits)

    # --- the machine ----------------------------------------------------------------------------------------------

    def told(self, event: ev.LearnerEvent) -> None:
        """The syncer says something."""
        if self._is_there:
            self._soon(lambda: self._hear(event))

    def told_in_passing(self, event: ev.LearnerEvent) -> None:
        """The same of what changes nothing before the next boundary where nothing is due."""
        if not self._is_there:
            return
        if self._listens or self._began_ns is None or self._is_due:
            self.told(event)
        else:
            self._mail.append((self.heap.now_ns + self._half_ns, event))

    def _find_due(self) -> None:
        """What is due waits for a word, which then is heard when it comes."""
        self._is_due = True in [part.due for part in self.machine.state.fragments]
        if self._is_due:
            self._read_in_time()

    def _read(self, until_ns: int) -> None:
        """Take in what was here by then."""
        while self._mail and self._mail[0][0] <= until_ns:
            self._handle(self._mail.popleft()[1])

    def _read_in_time(self) -> None:
        """From now on what was told in passing is heard when it comes."""
        while self._mail:
            here_ns, event = self._mail.popleft()
            self._over(here_ns, lambda event=event: self._hear(event))  # type: ignore[misc]

    def disturbed(self) -> None:
        """What is on its way may take longer from now on."""
        self._read(self.heap.now_ns)
        self._read_in_time()

    def _hear(self, event: ev.LearnerEvent) -> None:
        self._read(self.heap.now_ns)
        state = self.machine.state
        is_due = isinstance(event, ev.FinalAnnounced | ev.LeaveAsked)
        for part in state.fragments:
            is_due = is_due or part.due
        if is_due:
            self._catch_up()
        self._handle(event)
        acts = state.stopping
        for part in state.fragments:
            acts = acts or part.fetched > part.base_version or (part.due and self._began_ns is not None)
        if self._began_ns is None:
            if acts:
                self._handle(ev.BoundaryReached())
            self._train()
            return
        self._find_due()
        if acts:
            # It is adopted, or an update made, at the boundary after the step that is under way.
            passed = -(-(self.heap.now_ns - self._began_ns) // self._step_ns)
            self._until(max(1, passed))

    def _handle(self, event: ev.LearnerEvent) -> None:
        """Tell the machine, and carry out what it wants."""
        for effect in self.machine.handle(event, self.heap.now_ns):
            match effect:  # The usual ones first.
                case fx.Seal():
                    self._seal(effect)
                case fx.Send():
                    self._send((effect.fragment, effect.sequence))
                case fx.Forget() | fx.Release():
                    self._disk.pop((effect.fragment, effect.sequence), None)
                    if self.cargo is not None and isinstance(effect, fx.Release):
                        self.cargo.released(self.index, effect)
                case fx.Adopt():
                    if self.cargo is not None:
                        self.cargo.adopted(self.index, effect)
                case fx.Retake() if self.cargo is not None:
                    self.cargo.retaken(self.index, effect)
                case fx.Fetch() if effect.fragment not in self._coming:
                    fragment = effect.fragment
                    self._soon(lambda fragment=fragment: self._fetch(fragment))  # type: ignore[misc]
                case fx.Join():
                    self._soon(self._join)
                case fx.StopTraining():
                    self._last_ns = self.heap.now_ns
                case fx.Leave():
                    self._gone_ns = self.heap.now_ns if effect.ending is None else None
                    self._soon(self._leave)

    def _seal(self, seal: fx.Seal) -> None:
        if self.cargo is not None:
            self.cargo.sealed(self.index, seal)
        digest = f"{self.name}:{seal.fragment}:{seal.sequence}:{self._lives}"
        self._disk[seal.fragment, seal.sequence] = (seal, digest)
        made, life = ev.Sealed(seal.fragment, seal.sequence, digest), self._lives
        if not self.site.seal_s:
            self._handle(made)
            return
        done_ns = to_ns(self.site.seal_s)
        self.heap.after(done_ns, lambda: self._hear(made) if self._lives == life and self._is_there else None)

    def _send(self, key: tuple[int, int]) -> None:
        size = self.fleet.plan.update_bytes[key[0]]
        self.account.bytes_up += size
        self._up_free_ns = max(self._up_free_ns, self.heap.now_ns) + carry_ns(size, self.site.up_mbps)
        self._over(self._up_free_ns + self._half_ns, lambda: self._pushed(key))

    def _pushed(self, key: tuple[int, int]) -> None:
        if key not in self._disk:
            return
        if self.site.lost_share and self._random.random() < self.site.lost_share:
            refused = ev.PushAnswered(*key, ev.Outcome.REFUSED, ev.Reason.OVERLOAD)
            if self._began_ns is None:
                self.told(refused)
            else:
                self._lost[key[0]] = refused
            return
        seal, digest = self._disk[key]
        whose = (1, self.name, self.machine.state.incarnation)
        numbers = (*key, seal.base_version, seal.tokens, seal.steps, seal.step_ns, seal.cursor)
        update = ev.UpdateArrived(*whose, *numbers, digest, digest, encoding="", finite=True, final=seal.final)
        (answer,) = (each for each in self.fleet.handle(update) if isinstance(each, fx.AnswerPush))
        self._ahead = seal.fragment
        answered = ev.PushAnswered(*key, answer.outcome, answer.reason)
        if answer.outcome is ev.Outcome.ACCEPTED:
            self.told_in_passing(answered)
        else:
            self.told(answered)

    def _leave(self) -> None:
        self.fleet.handle(ev.SiteLeft(1, self.name, self.machine.state.incarnation))

    def _soon(self, do: Callable[[], None]) -> None:
        """When what is said now has crossed the link."""
        self._over(self.heap.now_ns + self._half_ns, do)

    def _over(self, instant_ns: int, do: Callable[[], None]) -> None:
        """``do`` when what crosses the link arrives, which waits for the link and for the syncer."""

        life = self._lives

        def arrive() -> None:
            if self._lives != life or not self._is_there:
                return  # Who asked, or was to be told, has ended.
            now_ns, paused_ns = self.heap.now_ns, self.fleet.paused_until_ns
            if now_ns < self._cut_until_ns or now_ns < paused_ns:
                self._over(max(self._cut_until_ns, paused_ns) + self._half_ns, do)
            else:
                do()

        self.heap.at(instant_ns, arrive)


def to_ns(seconds: float) -> int:
    """Whole nanoseconds."""
    return round(seconds * SECOND_NS)
