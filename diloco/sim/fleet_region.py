"""A region of a fleet: a syncer with sites of its own, and a site of the fleet's syncer (``sync/upstream.py``).

What goes up, and when, its own machine decides.  Here is its link to the syncer above, and what time that takes.  Both
syncers are always there; the sites of a region fail.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.sim.fleet_link import carry_ns, fetch_bytes
from diloco.sim.fleet_plan import SiteAccount
from diloco.sim.fleet_site import to_ns
from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.upstream_events import UpstreamFetched, UpstreamStarted

if TYPE_CHECKING:
    from collections.abc import Callable

    from diloco.sim.fleet import Fleet
    from diloco.sim.fleet_plan import FleetSite


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
