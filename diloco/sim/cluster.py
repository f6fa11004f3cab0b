"""The syncers, the sites and their links under one clock, and a supervisor that starts again what has died."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from diloco.sim.network import Direction, Heap, Link, Weather
from diloco.sim.site_process import SiteDisk, SitePlan, SiteProcess, Trouble
from diloco.sim.syncers import RESTART_NS, Syncers

if TYPE_CHECKING:
    from diloco.sim.checking import Checkers
    from diloco.sim.outer_process import OuterPlan, OuterProcess


@dataclass(slots=True)
class Site:
    """A place: its link, its disk, and the process that the supervisor keeps alive there."""

    name: str
    plan: SitePlan
    link: Link
    random: Random
    trouble: Trouble = field(default_factory=Trouble)
    disk: SiteDisk = field(default_factory=SiteDisk)
    process: SiteProcess | None = None
    twins: list[SiteProcess] = field(default_factory=list)
    lives: int = 0
    wanted: bool = True
    """Whether the supervisor starts a process when there is none."""
    why: str = ""
    """How the last process ended."""

    def running(self) -> bool:
        """Whether a process lives here."""
        return self.process is not None and self.process.alive


class Cluster:
    """The whole simulated run."""

    def __init__(self, plan: OuterPlan, checkers: Checkers, random: Random) -> None:
        """``random`` is for the syncers."""
        self.heap = Heap()
        self.plan, self.checkers = plan, checkers
        self.syncers = Syncers(self.heap, plan, checkers, random)
        self.sites: dict[str, Site] = {}
        self._restarts = 0

    @property
    def outer(self) -> OuterProcess | None:
        """The syncer that leads."""
        return self.syncers.outer

    @property
    def restarts(self) -> int:
        """Processes that were started again, of all kinds."""
        return self._restarts + self.syncers.restarts

    def add_site(self, name: str, plan: SitePlan, weather: Weather, random: Random) -> Site:
        """A place without a process yet."""
        site = self.sites[name] = Site(name, plan, Link(self.heap, random, weather), random)
        return site

    # --- sites -------------------------------------------------------------------------------------------------

    def start_site(self, name: str) -> None:
        """A new process at a place that has none."""
        site = self.sites[name]
        if site.running() or not site.wanted:
            return
        site.lives += 1
        site.process = SiteProcess(
            name,
            f"{name}-{site.lives}",
            self.heap,
            site.link,
            site.disk,
            site.plan,
            site.trouble,
            site.random,
            self.checkers,
            self.syncers.addresses(),
            self._exited,
        )
        site.process.start()

    def kill_site(self, name: str, down_ns: int) -> None:
        """SIGKILL; the supervisor starts it again after ``down_ns``."""
        site = self.sites[name]
        if site.process is not None and site.process.alive:
            site.process.kill()
            self._restarts += 1
            self.heap.after(down_ns, lambda: self.start_site(name))

    def wipe_site(self, name: str, down_ns: int) -> None:
        """Lose the machine with its disk; a new one comes up empty under the old name."""
        self.sites[name].disk = SiteDisk()
        self.kill_site(name, down_ns)

    def twin_site(self, name: str) -> None:
        """Start a second process on a copy of the disk, while the first one, thought dead, goes on."""
        site = self.sites[name]
        old = site.process
        if old is not None and old.alive:
            old.twin = True
            site.twins.append(old)
            site.disk = site.disk.copy()
            site.process = None
            self.start_site(name)

    def _exited(self, process: SiteProcess, why: str) -> None:
        site = self.sites[process.site]
        if site.process is not process:
            return
        site.why = why
        if why in ("left", "left without a word") or "evicted" in why:
            site.wanted = False
        else:
            self._restarts += 1
            self.heap.after(RESTART_NS, lambda: self.start_site(process.site))

    def come_back(self, name: str) -> None:
        """A site that had left is started again."""
        site = self.sites[name]
        if "evicted" not in site.why:
            site.wanted = True
            self.start_site(name)

    # --- weather -----------------------------------------------------------------------------------------------

    def cut(self, name: str, directions: tuple[Direction, ...], for_ns: int) -> None:
        """A partition of one site for ``for_ns``."""
        link = self.sites[name].link
        link.cut(*directions)
        self.heap.after(for_ns, link.heal)

    def heal(self) -> None:
        """Everything works again from now on: links, processes, and the values."""
        for site in self.sites.values():
            site.link.calm()
            site.trouble.poisoned = site.trouble.ruined = site.trouble.outlying = 0.0
            for process in (site.process, *site.twins):
                if process is not None:
                    process.thaw()
        self.syncers.heal()
