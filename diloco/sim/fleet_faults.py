"""What goes wrong in a fleet beside its sites' own failures: at a time that is told, or to several sites at once."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from diloco.sim.fleet_site import Site, to_ns

if TYPE_CHECKING:
    from diloco.sim.fleet import Fleet
    from diloco.sim.fleet_plan import FleetFault, Region

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
