"""Syncers, sites and their links under one clock, with a supervisor that restarts dead processes, and an operator.

A syncer without replication has one machine and no lease; with replication it has two machines.  A restarted syncer
that finds that the other has led since becomes a standby: on its old folder or, when that cannot follow, on an empty
one.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from diloco.sim.checkers import Violation
from diloco.sim.outer_disk import OuterDisk
from diloco.sim.outer_process import RESTART_NS, Machines, OuterProcess, Seat, take_lease
from diloco.sim.site_process import SiteProcess, Trainer
from diloco.sim.site_state import Side, SiteDisk, SitePlan, Trouble
from diloco.sim.standby_process import StandbyProcess
from diloco.sim.world import Heap, Lease, LeaseLine, Link, OuterPlan, Process, Weather
from diloco.sync.journal import JournalError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from diloco.sim.checkers import Checkers
    from diloco.sim.outer_disk import CrashPoint
    from diloco.sim.outer_process import Term


class Syncers(Machines):
    """One syncer machine, or two with a lease."""

    def __init__(self, heap: Heap, plan: OuterPlan, checkers: Checkers, random: Random) -> None:
        """``random`` decides the outcome of power cuts and the behaviour of the links between the machines."""
        super().__init__(heap, plan, checkers)
        self._random = random
        self.seats.append(Seat("p", OuterDisk(plan), leads=True))
        self.lease: Lease | None = None
        if plan.replication is not None:
            self.lease = Lease(heap, plan.replication.ttl_ns)
            self.between = Link(heap, random, plan.replication.between)
            self.seats.append(Seat("q", OuterDisk(plan), leads=False))
            for seat in self.seats:
                seat.line = LeaseLine(self.lease, Link(heap, random, plan.replication.to_lease))
        self.backup: OuterDisk | None = None
        self.lineage = 1
        self.restarts = self.damage_found = self.power_cuts = self.promotions = 0
        self._versions = [0] * plan.options.num_fragments

    # --- roles ---------------------------------------------------------------------------------------------------

    @property
    def outer(self) -> OuterProcess | None:
        """The live syncer process: of two, the one with the larger epoch; None when there is none."""
        leading = [seat.process for seat in self.seats if isinstance(seat.process, OuterProcess)]
        alive = [process for process in leading if process.alive]
        return max(alive, key=lambda process: process.leadership.epoch if process.leadership else 0, default=None)

    def seat_of_outer(self) -> Seat:
        """Return the machine of ``outer``; the first machine when no syncer is alive."""
        outer = self.outer
        return next((seat for seat in self.seats if outer is not None and seat.process is outer), self.seats[0])

    @property
    def disk(self) -> OuterDisk:
        """The folder on that machine."""
        return self.seat_of_outer().disk

    def versions(self) -> list[int]:
        """Return every fragment's version at the live syncer, or at the last one."""
        outer = self.outer
        if outer is not None:
            self._versions = [fragment.version for fragment in outer.machine.state.fragments]
        return list(self._versions)

    def ended(self) -> bool:
        """Return whether a live syncer says that the run has ended."""
        outer = self.outer
        return outer is not None and outer.over()

    def caught_up(self) -> bool:
        """Return whether the standby has everything; True in runs without one."""
        outer = self.outer
        return self.lease is None or bool(outer and outer.replicator and outer.replicator.caught_up())

    def why(self) -> str:
        """Describe the state of the syncers, for a failure message."""
        seats = [(seat.folder(), seat.leads, seat.up, type(seat.process).__name__) for seat in self.seats]
        machines, outer = f"machines {seats}, {self.lease}", self.outer
        if outer is None:
            return f"no syncer, {machines}"
        state = outer.machine.state
        rounds = [(fragment.version, fragment.round, fragment.merging_since_ns) for fragment in state.fragments]
        members = {name: site.status.value for name, site in state.sites.items()}
        return f"{state.phase.value}, rounds {rounds}, members {members}, {machines}"

    # --- lives ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a process on every machine."""
        for seat in self.seats:
            self._start(seat)

    def _start(self, seat: Seat) -> None:
        if not seat.up or (seat.process is not None and seat.process.alive):
            return
        if seat.line is None:
            self._lead(seat, None)
        elif seat.leads:
            self._run_for_lead(seat, seat.line)
        else:
            self._follow(seat, seat.line)

    def _lead(self, seat: Seat, term: Term | None, *, promoted: bool = False, lineage: int = 0) -> object:
        """Start a syncer on the folder; where the folder is damaged, restore the files from a copy and start later.

        Return the state that a ``promoted`` syncer began with, otherwise None.
        """
        try:
            process = OuterProcess(self, seat, term, promoted=promoted)
        except JournalError as error:
            if not seat.disk.storage.rotten:
                raise Violation("storage", f"a disk on which nothing has rotted is damaged: {error}") from error
            self.damage_found += 1
            seat.disk.storage.mend()
            self.heap.after(seat.restart_ns, lambda: self._start(seat))
            return None
        seat.process = process
        found = process.machine.snapshot() if promoted else None
        process.start(lineage)
        return found

    def _run_for_lead(self, seat: Seat, line: LeaseLine) -> None:
        candidate = seat.process = Process(self.heap, lambda: self.died(seat, candidate))

        def taken(term: Term) -> None:
            candidate.kill()
            self._lead(seat, term)

        def refused() -> None:
            candidate.kill()
            seat.leads = False
            if self._random.random() < 0.5:
                self.empty(seat)
            self._start(seat)

        take_lease(candidate, line, seat.folder(), taken, refused)

    def _follow(self, seat: Seat, line: LeaseLine) -> None:
        standby = seat.process = StandbyProcess(self, seat)

        def taken(term: Term) -> None:
            assert standby.replayer is not None
            standby.kill()
            seat.leads = True
            self.promotions += 1
            warm = standby.replayer.machine.snapshot()
            if self._lead(seat, term, promoted=True) != warm:
                raise Violation("Replicated", "a standby's folder and its memory are not the same")

        standby.deliver(standby.follow)
        standby.deliver(lambda: take_lease(standby, line, seat.folder(), taken))

    def died(self, seat: Seat, process: Process) -> None:
        """Restart after a while: on an empty folder, if a standby can no longer follow on this one."""
        if seat.process is not process:
            return
        self.versions()
        self.restarts += 1
        if seat.power:
            self.power_cuts += 1
            # The journal cannot tell rot in its last frame from a power cut that took that frame's mark.
            seat.disk.storage.mend()
            seat.disk.storage.power_cut(self._random)
        seat.power = False
        if isinstance(process, StandbyProcess) and process.useless:
            self.empty(seat)
        seat.process = None
        self.heap.after(seat.restart_ns, lambda: self._start(seat))

    # --- faults --------------------------------------------------------------------------------------------------

    def kill(self, seat: Seat, *, power: bool = False) -> None:
        """Kill the process, by SIGKILL or a ``power`` cut; the supervisor restarts it."""
        seat.power = power
        process = seat.process
        if process is not None and process.alive:
            process.kill()
            self.died(seat, process)

    def doom(self, seat: Seat, point: CrashPoint, *, power: bool = False) -> None:
        """Make the process there die when it next reaches ``point``."""
        seat.power = power
        if isinstance(seat.process, OuterProcess | StandbyProcess):
            seat.disk.doom = point

    def lose(self, seat: Seat) -> None:
        """Lose the machine with its folder; a new machine takes its place."""
        assert seat.line is not None
        seat.line.machine += 1
        self.empty(seat)
        self.kill(seat)

    def bring_up(self, seat: Seat) -> None:
        """Bring a lost machine back and start a process on it."""
        seat.up = True
        self._start(seat)

    def empty(self, seat: Seat) -> None:
        """Lose the folder with everything in it; the next process there is a standby."""
        seat.disk = OuterDisk(self.plan)
        seat.folders += 1
        seat.leads = False

    def may_be_lost(self, seat: Seat) -> bool:
        """Return whether all acknowledged data is on the other machine: that is the confirmed heir or the leader."""
        standing = self.lease.standing if self.lease is not None else None
        if standing is None or self.outer is None:
            return False
        if seat.process is self.outer:
            (heir,) = (each.folder() for each in self.seats if each is not seat)
            leadership = self.outer.leadership
            return standing.heir == heir and leadership is not None and leadership.machine.has_heir(heir)
        return standing.holder == self.seat_of_outer().folder()

    def back_up(self) -> None:
        """Copy the syncer's disk to a place without faults."""
        self.backup = copy.deepcopy(self.disk)
        self.backup.storage.mend()  # A real backup reads the files and verifies them.
        self.checkers.back_up()

    def restore(self) -> None:
        """Restore the syncer's disk from the backup; a new process begins a new lineage there."""
        assert self.backup is not None
        (seat,) = self.seats
        if seat.process is not None:
            seat.process.kill()
        seat.power = False
        seat.disk = copy.deepcopy(self.backup)
        self.checkers.set_back()
        self.lineage += 1
        self.restarts += 1
        self.untold.clear()
        self._lead(seat, None, lineage=self.lineage)

    def heal(self) -> None:
        """End all faults: machines, links and disks work from now on."""
        links = [seat.line.link for seat in self.seats if seat.line is not None]
        for link in [*links, self.between] if self.between is not None else links:
            link.calm()
        for seat in self.seats:
            seat.power, seat.up, seat.restart_ns = False, True, RESTART_NS
            seat.disk.storage.mend()
            seat.disk.doom = None
            if seat.process is not None:
                seat.process.thaw()
        self.start()


@dataclass(slots=True)
class Site:
    """A site: its side towards each syncer, and one process for each side, kept alive by the supervisor."""

    name: str
    sides: list[Side]
    trouble: Trouble = field(default_factory=lambda: Trouble(float))
    parts: list[SiteProcess] = field(default_factory=list)
    twins: list[SiteProcess] = field(default_factory=list)
    lives: int = 0
    wanted: bool = True
    """Whether the supervisor restarts the site's processes."""
    why: str = ""
    """Why the last process ended."""

    def running(self) -> bool:
        """Return whether a process is alive here."""
        return any(part.alive for part in self.parts)


class Cluster:
    """The whole simulated run: syncers, each with a part of the model, and the sites, which train all of it."""

    def __init__(self, plans: Sequence[OuterPlan], checkers: Sequence[Checkers], randoms: Sequence[Random]) -> None:
        """Each argument has one item for every syncer."""
        self.heap = Heap()
        self.syncers = [Syncers(self.heap, *each) for each in zip(plans, checkers, randoms, strict=True)]
        self.sites: dict[str, Site] = {}
        self._restarts = 0

    @property
    def restarts(self) -> int:
        """The number of restarts of processes of all kinds."""
        return self._restarts + sum(each.restarts for each in self.syncers)

    def add_site(self, name: str, plans: Sequence[SitePlan], weather: Weather, randoms: Sequence[Random]) -> Site:
        """Add a site without a process; ``plans`` and ``randoms`` have one item for each syncer."""
        links = [Link(self.heap, random, weather) for random in randoms]
        site = self.sites[name] = Site(name, [Side(*each) for each in zip(plans, links, randoms, strict=True)])
        return site

    # --- sites -------------------------------------------------------------------------------------------------

    def start_site(self, name: str) -> None:
        """Start a process towards every syncer, unless the site has one or is not wanted."""
        site = self.sites[name]
        if site.running() or not site.wanted:
            return
        site.lives += 1
        trainer = Trainer(self.heap, site.sides[0].random, self.stepped, self._exited)
        site.parts = [
            SiteProcess(name, f"{name}-{site.lives}", side, site.trouble, syncers, trainer)
            for syncers, side in zip(self.syncers, site.sides, strict=True)
        ]
        trainer.parts = list(site.parts)
        for part in trainer.parts:
            part.deliver(part.start)

    def kill_site(self, name: str, down_ns: int) -> None:
        """Kill all of the site's processes at one instant; the supervisor restarts them after ``down_ns``."""
        for part in self.sites[name].parts:
            part.kill()
        self._restarts += 1
        self.heap.after(down_ns, lambda: self.start_site(name))

    def wipe_site(self, name: str, down_ns: int) -> None:
        """Lose the site's machine with its disk; a new empty one starts under the old name."""
        site = self.sites[name]
        for side in site.sides:
            side.disk = SiteDisk()
        self.kill_site(name, down_ns)

    def twin_site(self, name: str) -> None:
        """Start a second process on a copy of the disk while the first one, believed dead, still runs."""
        site = self.sites[name]
        if site.running():
            for old, side in zip(site.parts, site.sides, strict=True):
                old.twin, side.disk = True, replace(side.disk, outbox=dict(side.disk.outbox))
            site.twins += site.parts
            site.parts = []
            self.start_site(name)

    def stepped(self, parts: Sequence[SiteProcess]) -> None:
        """Hook: the ``parts`` of a site have just made a step."""

    def site_ended(self, site: Site) -> None:
        """Hook: all parts of a site have left."""

    def _exited(self, part: SiteProcess, why: str) -> None:
        site = self.sites[part.site]
        if part not in site.parts:
            return
        site.why = why
        if not why.startswith("left") and "evicted" not in why:
            self.kill_site(site.name, RESTART_NS)  # A site that failed at one syncer cannot go on with the others.
        elif not site.running():
            self.site_ended(site)
            site.wanted = False

    def come_back(self, name: str) -> None:
        """Start a site again that had left, unless it was evicted."""
        site = self.sites[name]
        if "evicted" not in site.why:
            site.wanted = True
            self.start_site(name)

    def heal(self) -> None:
        """End all faults of links, processes and values, and start every wanted site."""
        for site in self.sites.values():
            for side in site.sides:
                side.link.calm()
            site.trouble.clear()
            for process in (*site.parts, *site.twins):
                process.thaw()
        for syncers in self.syncers:
            syncers.heal()
        for name in self.sites:
            self.start_site(name)
