"""The machines on which a syncer and its standby run, a supervisor that starts what has died, and an operator.

Without replication there is one machine and no lease.  With it there are two.  A syncer that is started and finds that
another has led since becomes a standby: on its old folder, or, when that cannot go on from there, on an empty one.


The syncers, the sites and their links under one clock, and a supervisor that starts again what has died."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from diloco.sim.checkers import Violation
from diloco.sim.outer_disk import OuterDisk
from diloco.sim.outer_process import CrashPoint, LeaseHolder, OuterProcess, Turn, take_lease
from diloco.sim.site_process import SiteDisk, SitePlan, SiteProcess, Trouble
from diloco.sim.standby_process import StandbyProcess
from diloco.sim.world import (
    MILLISECOND_NS,
    Damaged,
    Direction,
    Heap,
    Lease,
    LeaseLine,
    Link,
    OuterPlan,
    Process,
    Weather,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from diloco.sim.checkers import Checkers
    from diloco.sim.world import ReplicationPlan

RESTART_NS = 300 * MILLISECOND_NS


@dataclass(slots=True)
class Seat:
    """One machine: its folder, and the process that is there.  ``up``: whether the supervisor starts one."""

    name: str
    disk: OuterDisk
    leads: bool
    """Whether what is started here is the syncer, and not a standby."""
    line: LeaseLine | None = None
    folders: int = 1
    process: Process | None = None
    up: bool = True
    power: bool = False
    """Whether the next death is by power cut."""
    restart_ns: int = RESTART_NS

    def folder(self) -> str:
        """The name by which the lease knows the folder; an empty one gets another."""
        return f"{self.name}{self.folders}"

    def running(self) -> bool:
        """Whether a process lives here."""
        return self.process is not None and self.process.alive


class Syncers:
    """One machine, or two with a lease."""

    def __init__(self, heap: Heap, plan: OuterPlan, checkers: Checkers, random: Random) -> None:
        """``random`` is what becomes of a disk in a power cut, and what the paths between the machines do."""
        self.heap, self.plan, self.checkers = heap, plan, checkers
        self._random = random
        self._untold: dict[bytes, Turn] = {}
        self.seats = [Seat("p", self._empty(), leads=True)]
        self.lease: Lease | None = None
        self.between: Link | None = None
        if plan.replication is not None:
            self._add_standby(plan.replication)
        self.backup: OuterDisk | None = None
        self.lineage = 1
        self.restarts = self.damage_found = self.power_cuts = self.promotions = 0
        self._versions = [0] * plan.options.num_fragments

    def _add_standby(self, replication: ReplicationPlan) -> None:
        self.lease = Lease(self.heap, replication.ttl_ns)
        self.between = Link(self.heap, self._random, copy.copy(replication.between))
        self.seats.append(Seat("q", self._empty(), leads=False))
        for seat in self.seats:
            seat.line = LeaseLine(self.lease, Link(self.heap, self._random, copy.copy(replication.to_lease)))

    def _empty(self) -> OuterDisk:
        return OuterDisk(self.plan.options, self.plan.rule)

    # --- who is who ----------------------------------------------------------------------------------------------

    @property
    def outer(self) -> OuterProcess | None:
        """The process that leads, or did last: of two, the one with the larger epoch."""
        leading = [seat.process for seat in self.seats if isinstance(seat.process, OuterProcess)]
        alive = [process for process in leading if process.alive]
        return max(alive, key=lambda process: process.leadership.epoch if process.leadership else 0, default=None)

    def seat_of_outer(self) -> Seat:
        """Its machine; the first one where nobody leads."""
        outer = self.outer
        return next((seat for seat in self.seats if outer is not None and seat.process is outer), self.seats[0])

    @property
    def disk(self) -> OuterDisk:
        """Its folder."""
        return self.seat_of_outer().disk

    def standby_seat(self) -> Seat | None:
        """The other machine, while somebody leads."""
        leading = self.seat_of_outer()
        return next((seat for seat in self.seats if seat is not leading), None) if self.outer is not None else None

    def addresses(self) -> list[Callable[[], OuterProcess | StandbyProcess | None]]:
        """Whoever answers at each machine."""
        return [lambda seat=seat: _answering(seat) for seat in self.seats]  # type: ignore[misc]

    def versions(self) -> list[int]:
        """Every fragment's version, as the syncer has it or had it last."""
        outer = self.outer
        if outer is not None:
            self._versions = [fragment.version for fragment in outer.machine.state.fragments]
        return list(self._versions)

    def ended(self) -> bool:
        """Whether the run has ended, as the syncer says."""
        outer = self.outer
        return outer is not None and outer.over()

    def caught_up(self) -> bool:
        """Whether there is a standby that has everything, where there is to be one."""
        outer = self.outer
        return self.lease is None or bool(outer and outer.replicator and outer.replicator.caught_up())

    def why(self) -> str:
        """How the machines stand, for who looks for a reason."""
        seats = [(seat.folder(), seat.leads, seat.up, type(seat.process).__name__) for seat in self.seats]
        return f"machines {seats}, {self.lease}"

    # --- lives ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """A process on every machine."""
        for seat in self.seats:
            self._start(seat)

    def _start(self, seat: Seat) -> None:
        if seat.running() or not seat.up:
            return
        if seat.line is None:
            self._lead(seat, None)
        elif seat.leads:
            self._run_for_lead(seat, seat.line)
        else:
            self._follow(seat, seat.line)

    def _lead(self, seat: Seat, leadership: LeaseHolder | None, *, promoted: bool = False, lineage: int = 0) -> object:
        """A syncer on the folder; where that is damaged, an operator brings the files from a copy.

        The state that it began with, of one that was ``promoted``.
        """

        def died() -> None:
            self._died(seat, process)

        try:
            process = OuterProcess(
                self.heap, seat.disk, self.plan, self.checkers, self._untold, died, leadership, promoted=promoted
            )
        except Damaged as error:
            if not seat.disk.storage.is_rotten():
                raise Violation("storage", f"a disk on which nothing has rotted is damaged: {error}") from error
            self.damage_found += 1
            seat.disk.storage.mend()
            self.heap.after(seat.restart_ns, lambda: self._start(seat))
            return None
        seat.process = process
        found = process.machine.snapshot() if promoted else None
        if lineage:
            process.begin_lineage(lineage)
        process.start()
        return found

    def _run_for_lead(self, seat: Seat, line: LeaseLine) -> None:
        candidate = seat.process = Process(lambda: self._died(seat, candidate))

        def taken(leadership: LeaseHolder) -> None:
            candidate.kill()
            self._lead(seat, leadership)

        def refused(why: str) -> None:
            del why
            candidate.kill()
            seat.leads = False
            if self._random.random() < 0.5:
                self.empty(seat)
            self._start(seat)

        take_lease(candidate, line, seat.folder(), taken, refused, by_itself=False)

    def _follow(self, seat: Seat, line: LeaseLine) -> None:
        assert self.between is not None
        (other,) = (each for each in self.seats if each is not seat)
        standby = seat.process = StandbyProcess(
            self.heap,
            seat.folder(),
            seat.disk,
            self.plan,
            self.checkers,
            self.between,
            line,
            lambda: other.process if isinstance(other.process, OuterProcess) else None,
            lambda: self._died(seat, standby),
        )

        def taken(leadership: LeaseHolder) -> None:
            assert standby.replayer is not None
            standby.kill()
            seat.leads = True
            self.promotions += 1
            warm = standby.replayer.machine.snapshot()
            if self._lead(seat, leadership, promoted=True) != warm:
                raise Violation("replicated", "a standby's folder and its memory are not the same")

        standby.start(taken)

    def _died(self, seat: Seat, process: Process) -> None:
        if seat.process is not process:
            return
        self.versions()
        self.restarts += 1
        if seat.power:
            self.power_cuts += 1
            # What the journal does not claim to tell apart: rot in the last frame and a power cut that took its mark.
            seat.disk.storage.mend()
            seat.disk.storage.power_cut(self._random)
        seat.power = False
        if isinstance(process, StandbyProcess) and process.useless:
            self.empty(seat)
        seat.process = None
        self.heap.after(seat.restart_ns, lambda: self._start(seat))

    # --- what goes wrong -----------------------------------------------------------------------------------------

    def kill(self, seat: Seat, *, power: bool = False) -> None:
        """SIGKILL, or the machine loses power; the supervisor starts it again."""
        seat.power = power
        process = seat.process
        if process is not None and process.alive:
            process.kill()
            self._died(seat, process)

    def doom(self, seat: Seat, point: CrashPoint, *, power: bool = False) -> None:
        """Let the process there die when it next comes to ``point``."""
        seat.power = power
        if isinstance(seat.process, OuterProcess | StandbyProcess):
            seat.process.doom = point

    def lose(self, seat: Seat) -> None:
        """The machine dies and its folder is gone; another one takes its place."""
        assert seat.line is not None
        seat.line.machine += 1
        self.empty(seat)
        self.kill(seat)

    def bring_up(self, seat: Seat) -> None:
        """A machine that was gone is there again."""
        seat.up = True
        self._start(seat)

    def empty(self, seat: Seat) -> None:
        """The folder is lost with everything in it; what is started there next is a standby."""
        seat.disk = self._empty()
        seat.folders += 1
        seat.leads = False

    def may_be_lost(self, seat: Seat) -> bool:
        """Whether what anybody was told is on the other machine too, or would be if that took over."""
        standing = self.lease.standing if self.lease is not None else None
        if standing is None or self.outer is None:
            return False
        if seat.process is self.outer:
            (heir,) = (each.folder() for each in self.seats if each is not seat)
            leadership = self.outer.leadership
            return standing.heir == heir and leadership is not None and leadership.machine.has_heir(heir)
        return standing.holder == self.seat_of_outer().folder()

    def back_up(self) -> None:
        """Copy the syncer's disk to where nothing happens to it."""
        self.backup = copy.deepcopy(self.disk)
        self.backup.storage.mend()  # Who makes a copy reads what is there, and compares it.
        self.checkers.backed_up()

    def restore(self) -> None:
        """Set the syncer's disk back to the backup; a new process begins a new lineage there."""
        assert self.backup is not None
        (seat,) = self.seats
        if seat.process is not None:
            seat.process.kill()
        seat.power = False
        seat.disk = copy.deepcopy(self.backup)
        self.checkers.set_back()
        self.lineage += 1
        self.restarts += 1
        self._untold.clear()
        self._lead(seat, None, lineage=self.lineage)

    def heal(self) -> None:
        """Everything works again from now on: machines, links and disks."""
        links = [seat.line.link for seat in self.seats if seat.line is not None]
        for link in [*links, self.between] if self.between is not None else links:
            link.calm()
        for seat in self.seats:
            seat.power, seat.up, seat.restart_ns = False, True, RESTART_NS
            seat.disk.storage.mend()
            if isinstance(seat.process, OuterProcess | StandbyProcess):
                seat.process.doom = None
            if seat.process is not None:
                seat.process.thaw()
        self.start()


def _answering(seat: Seat) -> OuterProcess | StandbyProcess | None:
    return seat.process if isinstance(seat.process, OuterProcess | StandbyProcess) else None


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
