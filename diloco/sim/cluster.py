"""A syncer, its sites and their links under one clock, and a supervisor that starts again what has died."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from diloco.sim.checking import Violation
from diloco.sim.network import MILLISECOND_NS, Direction, Heap, Link, Weather
from diloco.sim.outer_disk import OuterDisk
from diloco.sim.outer_process import CrashPoint, OuterPlan, OuterProcess
from diloco.sim.site_process import SiteDisk, SitePlan, SiteProcess, Trouble
from diloco.sim.storage import Damaged

if TYPE_CHECKING:
    from diloco.sim.checking import Checkers

RESTART_NS = 300 * MILLISECOND_NS


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
        """``random`` is what becomes of the syncer's disk in a power cut."""
        self.heap = Heap()
        self.plan, self.checkers = plan, checkers
        self._random = random
        self.outer_disk = OuterDisk(plan.options, plan.rule)
        self.outer: OuterProcess | None = None
        self.outer_restart_ns = RESTART_NS
        self.backup: OuterDisk | None = None
        self.lineage = 1
        self.sites: dict[str, Site] = {}
        self.restarts = 0
        self.damage_found = 0
        self.power_cuts = 0
        self._power = False
        self._versions = [0] * plan.options.num_fragments

    def add_site(self, name: str, plan: SitePlan, weather: Weather, random: Random) -> Site:
        """A place without a process yet."""
        site = self.sites[name] = Site(name, plan, Link(self.heap, random, weather), random)
        return site

    # --- the syncer --------------------------------------------------------------------------------------------

    def start_outer(self) -> None:
        """A new process on the syncer's disk; where that is damaged, an operator brings the files from a copy."""
        if self.outer is not None:
            return
        try:
            self.outer = OuterProcess(self.heap, self.outer_disk, self.plan, self.checkers, self._outer_died)
        except Damaged as error:
            if not self.outer_disk.storage.is_rotten():
                raise Violation("storage", f"a disk on which nothing has rotted is damaged: {error}") from error
            self.damage_found += 1
            self.outer_disk.storage.mend()
            self.heap.after(self.outer_restart_ns, self.start_outer)
            return
        self.outer.start()

    def kill_outer(self, *, power: bool = False) -> None:
        """SIGKILL, or the machine loses power; the supervisor starts it again."""
        self._power = power
        if self.outer is not None:
            self.outer.kill()
            self._outer_died()

    def doom_outer(self, point: CrashPoint, *, power: bool = False) -> None:
        """Let the syncer die when it next comes to ``point``."""
        self._power = power
        if self.outer is not None:
            self.outer.doom = point

    def back_up_outer(self) -> None:
        """Copy the syncer's disk to where nothing happens to it."""
        self.backup = copy.deepcopy(self.outer_disk)
        self.backup.storage.mend()  # Who makes a copy reads what is there, and compares it.
        self.checkers.backed_up()

    def restore_outer(self) -> None:
        """Set the syncer's disk back to the backup; a new process begins a new lineage there."""
        assert self.backup is not None
        if self.outer is not None:
            self.outer.kill()
        self._power = False
        self.outer_disk = copy.deepcopy(self.backup)
        self.checkers.set_back()
        self.lineage += 1
        self.restarts += 1
        try:
            self.outer = OuterProcess(self.heap, self.outer_disk, self.plan, self.checkers, self._outer_died)
        except Damaged as error:
            raise Violation("storage", f"a copy of a whole disk is damaged: {error}") from error
        self.outer.begin_lineage(self.lineage)
        self.outer.start()

    def _outer_died(self) -> None:
        self._versions = self.versions()
        self.outer = None
        self.restarts += 1
        if self._power:
            self.power_cuts += 1
            # What the journal does not claim to tell apart: rot in the last frame and a power cut that took its mark.
            self.outer_disk.storage.mend()
            self.outer_disk.storage.power_cut(self._random)
        self._power = False
        self.heap.after(self.outer_restart_ns, self.start_outer)

    def versions(self) -> list[int]:
        """Every fragment's version, as the syncer has it or had it last."""
        if self.outer is not None:
            self._versions = [fragment.version for fragment in self.outer.machine.state.fragments]
        return list(self._versions)

    def ended(self) -> bool:
        """Whether the run has ended, as the syncer says."""
        return self.outer is not None and self.outer.over()

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
            lambda: self.outer,
            self._exited,
        )
        site.process.start()

    def kill_site(self, name: str, down_ns: int) -> None:
        """SIGKILL; the supervisor starts it again after ``down_ns``."""
        site = self.sites[name]
        if site.process is not None and site.process.alive:
            site.process.kill()
            self.restarts += 1
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
            self.restarts += 1
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
            site.link.heal()
            site.link.weather = Weather(site.link.weather.latency_ns, site.link.weather.jitter_ns)
            site.trouble.poisoned = site.trouble.ruined = site.trouble.outlying = 0.0
            for process in (site.process, *site.twins):
                if process is not None:
                    process.thaw()
        self._power = False
        self.outer_disk.storage.mend()
        if self.outer is not None:
            self.outer.doom = None
            self.outer.thaw()
