"""The syncer's process: store, decision loop and network put together, from start to last version.

``Api`` (``api.py``) answers the network; ``Syncer`` owns the life of the process and carries out the machine's effects.
At its end the process lingers (``linger``): it stays until its sites know what became of their work.
"""

from __future__ import annotations

import errno
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.codec import native
from diloco.codec.buffers import Buffers
from diloco.durable import PLAIN_DISK, DiskFullError, Step, locked, when_there_is_room
from diloco.sync.admission import fastest_step_ns
from diloco.sync.effects import (
    AnnounceFinal,
    DropSite,
    MarkFinal,
    Note,
    OuterEffect,
    PublishVersion,
    RegionEffect,
    StartOuterStep,
    TakeVersion,
    TellFate,
)
from diloco.sync.events import (
    Ending,
    FateTold,
    FinalAnnounced,
    OuterStepDone,
    OuterStepFailed,
    StandbyDetached,
    SyncerStarted,
    UpstreamAsked,
)
from diloco.sync.members import places_taken
from diloco.sync.region import has_joined
from diloco.sync.state import Phase, Status
from diloco.syncer.api import Api
from diloco.syncer.backups import Backups
from diloco.syncer.core import Core, CoreHeld, CoreStopped
from diloco.syncer.images import export, full_parameters
from diloco.syncer.keeping import Keeper, MemoryCheck
from diloco.syncer.lease import LeaseError, lead
from diloco.syncer.opening import begun, open_store, recovered
from diloco.syncer.options import VERSIONS_MAX, memory_bytes_max, spare_max
from diloco.syncer.outer_step import (
    OuterResult,
    RoundCosts,
    merged_into,
    outer_step_facts,
    refusal_facts,
    run_outer_step,
    standstill_facts,
    start_facts,
)
from diloco.syncer.publish import Feeds, Made
from diloco.syncer.readiness import LOOK_EVERY_S, Readiness, Room, Unready, Want
from diloco.syncer.region import Region, check_site
from diloco.syncer.replicator import Replicator
from diloco.wire.messages import Published
from diloco.wire.server import RunningServer, serve

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import Tensor

    from diloco.durable import Disk
    from diloco.sync.region import Above
    from diloco.sync.state import OuterState
    from diloco.sync.syncer import OuterSync
    from diloco.syncer.lease import Lease, LeaseHolder
    from diloco.syncer.options import RunPlan, SyncerOptions
    from diloco.syncer.snapshots import FragmentValues
    from diloco.syncer.standby import Warm
    from diloco.wire.options import SecurityOptions, ServerOptions

LOOK_S = 0.05


def linger(core: Core, feeds: Feeds, linger_s: float) -> None:
    """Wait until every live site has said goodbye, and every one that has said so has heard its fates and gone."""

    def wanted(machine: OuterSync) -> bool:
        streams, unheard = feeds.standing()
        waited_for = (
            site.status is Status.LIVE or (site.status is Status.LEFT and name in unheard)
            for name, site in machine.state.sites.items()
        )
        return streams > 0 or any(waited_for)

    until = time.monotonic() + linger_s
    while time.monotonic() < until and _asked(core, wanted):
        time.sleep(LOOK_S)


def _asked(core: Core, wanted: Callable[[OuterSync], bool]) -> bool:
    try:
        return core.ask(wanted)
    except CoreHeld:
        return True  # Nobody can say goodbye while nothing is decided.


def not_told(state: OuterState, *, crashed: bool) -> list[str]:
    """The sites that may be on their way back for fates which the process before had decided.

    One that was stopped in order had lingered for them.  And where the run goes on, they have all the time they need.
    """
    over = crashed and state.ending is not None
    return [name for name, site in state.sites.items() if over and site.status is Status.LEFT]


START_WAIT_S = 10.0
"""For room on the disk, at a start; a process that never served need not wait for it.  And for a word from the syncer
above, where the region had finished."""


class Syncer:
    """One syncer process.  Use: ``start``, then ``wait`` until it returns the ending, then ``stop``."""

    def __init__(
        self,
        options: SyncerOptions,
        plan: RunPlan,
        version_zero: Callable[[], Sequence[Tensor]],
        network: ServerOptions,
        security: SecurityOptions,
        emit: Callable[[str, dict[str, object]], None],
        disk: Disk = PLAIN_DISK,
        lease: Lease | None = None,
        above: Callable[[], Above[Tensor]] | None = None,
    ) -> None:
        """``version_zero`` makes the fragments' first values, for a new run only; ``above``, once the folder is taken,
        makes who speaks for this syncer where it is a site of another."""
        self.options = options
        self.plan = plan
        self._version_zero = version_zero
        self.network = network
        self._security = security
        self._emit = emit
        self._disk = disk
        self._lease = lease
        self._make_above = above
        self._above: Above[Tensor] | None = None
        self.region: Region | None = None
        self.leadership: LeaseHolder | None = None
        self._candidates: dict[tuple[int, int], OuterResult] = {}
        self._versions = threading.BoundedSemaphore(VERSIONS_MAX)
        self._buffers = Buffers(spare_max(plan))
        self._ended = threading.Event()
        self._export_thread: threading.Thread | None = None
        self.ending: Ending | None = None
        self.feeds = Feeds()
        self.made = Made()
        self.costs = RoundCosts()
        self.readiness = Readiness()
        self._taken = ExitStack()  # What a stop has to give back, the last first.
        self._server: RunningServer | None = None
        self._stopping = threading.Event()
        self.failed: BaseException | None = None
        self.backups: Backups | None = None

    # --- life --------------------------------------------------------------------------------------------------

    def start(self, warm: Warm | None = None) -> str:
        """Take the folder over, recover, and serve; returns the address that sites dial.

        What a standby hands over (``warm``) needs no recovery.  ``LockedError`` when another process has the folder,
        ``StoreError`` when what lies there cannot be continued, ``LeaseError`` when the run is another's to lead.
        """
        try:
            return self._start(warm)
        except BaseException as error:
            self._taken.close()
            if isinstance(error, CoreStopped) and self.core.failed is not None:
                raise self.core.failed from error
            raise

    def _start(self, warm: Warm | None) -> str:
        away_ns = _since_last_record_ns(Path(self.options.folder) / "journal") if warm is None else 0
        machine, records = self._open() if warm is None else self._take(warm)
        self._begin_memory_check()
        self.room = Room(Path(self.options.folder), self.options.disk_reserve_mb * 1_000_000, self._room_changed)
        self.network = _with_places(self.network, machine.state)
        epoch = self._lead(machine.state, warm)
        self.replicator = Replicator(
            self.options.replication, self.store, lambda: machine.state.lineage, self._emit, self.leadership
        )
        self.core = Core(
            machine,
            self.store,
            self._carry_out,
            on_failure=self._fail,
            on_held=self.room.held,
            replicated=self.replicator.replicated,
            leads=self.leadership.wanting if self.leadership is not None else lambda: None,
            acks_first=self.replicator.acks_first,
        )
        alone = warm is not None or machine.state.detached  # Who has just been promoted has no standby of its own.
        self.replicator.begin(self.core, detached=alone)
        self.keeper = Keeper(
            self.store, self.core, self.holdings, self._memory, self.options.snapshot_every, self._emit, self._fail
        )
        self.api = Api(self)
        self.feeds.miss(not_told(machine.state, crashed=records > 0 or warm is not None))
        is_region, was = self._make_above is not None, machine.state
        had_finished = is_region and was.phase is Phase.ENDED and was.ending is Ending.FINISHED
        if had_finished:
            self.core.post(UpstreamAsked())
        # Before the loop begins: a deadline that has passed would be acted on first, and its step issued twice.
        self.core.post(SyncerStarted(epoch, self.plan.health, away_ns, self.plan.outer.sites_max))
        self._begin_region(machine)
        if alone and not machine.state.detached and self.options.replication.mode != "off":
            self.core.post(StandbyDetached(0))
        self.core.start()
        self._taken.callback(self._stop_core)
        if self._above is not None:
            self._taken.callback(self._above.close)
        facts, ended = self._first_answer()
        updates_above = self.region.updates_max if self.region is not None else 0
        self.memory_bytes_max = memory_bytes_max(self.options, self.plan, self.network, updates_above)
        bound = {"memory_bytes_max": self.memory_bytes_max}
        self._emit("syncer_started", {**facts, "recovered": records, "kernels": native.description(), **bound})
        if ended is not None:
            self.ending = ended
            self._ended.set()
            self.readiness.begins(Unready.DRAINING)
        self._server = serve(
            self.api,
            self.network,
            self._security,
            lambda what, why: self._emit("note", {"note": what, "why": why}),
            self.replicator if self.options.replication.mode != "off" else None,
            ready=False,
        )
        self._in_thread("room", lambda stopping: self.room.run(stopping, self._fail))
        self._in_thread("standstill", self._say_standstill)
        if had_finished:
            self._in_thread("word-above", self._await_word)
        self.readiness.told_to(self._server.ready)
        self.readiness.ends(Unready.STARTING)
        if self.options.backup.url:
            self.backups = Backups(
                self.options.backup, self.store.folder, self.plan.agreement.run_id, self._emit, self._disk
            )
            self.backups.start()
            self._taken.callback(self.backups.stop)
        return self._server.address

    def _open(self) -> tuple[OuterSync, int]:
        """Take the folder itself, and what is in it."""
        self._taken.enter_context(locked(Path(self.options.folder)))
        self.store = open_store(self.options, self.plan, self._disk, self._emit)
        self._taken.callback(self._close_journal)
        if self.store.is_new():
            found = begun(self.store, self.options, self.plan, self._version_zero)
        else:
            found = recovered(self.store, self.options, self.plan, self._emit)
        self.holdings = found.holdings
        return found.machine, found.records

    def _take(self, warm: Warm) -> tuple[OuterSync, int]:
        """Go on with what a standby has open."""
        self._taken.enter_context(warm.taken)
        self.store, self.holdings = warm.store, warm.holdings
        return warm.machine, 0

    def _lead(self, state: OuterState, warm: Warm | None) -> int:
        """Take the lease, where there is one; the epoch of this start."""
        taken = warm.leadership if warm is not None else None
        self.leadership = taken or lead(self._lease, Path(self.options.folder), self._disk, state, self._emit)
        if self.leadership is None:
            return warm.epoch if warm is not None else state.epoch + 1
        self._taken.callback(self._end_lead)
        return self.leadership.epoch

    def _end_lead(self) -> None:
        """After a failure the lease is not given back: it runs out, and an heir takes over."""
        assert self.leadership is not None
        self.leadership.stop(release=self.failed is None)

    def _begin_region(self, machine: OuterSync) -> None:
        if self._make_above is None:
            check_site(machine.state, "")
            return
        self._above = above = self._make_above()
        self.region = Region(above, self.core, self.store, lambda: self.holdings, self._fail)
        self.core.post(self.region.begin(machine))
        # Once that is safe, also at a standby: a syncer whose place another has taken must not speak for it above.
        self.core.do_soon(lambda machine: above.start())

    def _first_answer(self) -> tuple[dict[str, object], Ending | None]:
        """How the run stands once the start is in the journal; ``DiskFullError`` or ``LeaseError`` if never."""
        until = time.monotonic() + START_WAIT_S
        while True:
            try:
                return self.core.ask(start_facts)
            except CoreHeld as held:
                if held.kind is Unready.STANDBY_AWAY:  # A standby is waited for, and can only follow who is served.
                    return self.core.ask(start_facts, early=True)
                if time.monotonic() > until and held.kind is Unready.LEASE_LOST:
                    raise LeaseError(held.text) from held
                if time.monotonic() > until:
                    raise DiskFullError(errno.ENOSPC, held.text, self.options.folder) from held
                time.sleep(LOOK_EVERY_S / 10)

    def _await_word(self, stopping: threading.Event) -> None:
        """The thread of a region that had finished: so it stays where the syncer above does not answer."""
        while not stopping.wait(START_WAIT_S):
            with suppress(CoreHeld, CoreStopped):
                if not self.core.ask(lambda machine: has_joined(machine.state)):
                    why = f"the syncer above gave no answer in {START_WAIT_S:g} s"
                    why += ": if the run above goes on, start its syncer, then this one again"
                    self._emit("note", {"note": "stays_finished", "why": why})
                    self.core.post(FinalAnnounced(Ending.FINISHED))
                return

    def _begin_memory_check(self) -> None:
        self._memory = MemoryCheck(self.holdings.values, self.options.memory_check_s)
        if self.options.memory_check_s:
            self._in_thread("memory-check", lambda stopping: self._memory.run(stopping, self._fail))

    def _in_thread(self, name: str, work: Callable[[threading.Event], None]) -> None:
        """Have ``work`` go on beside everything else until the stop, which it hears of by the event."""
        stopping = threading.Event()
        thread = threading.Thread(target=work, args=(stopping,), name=name, daemon=True)
        thread.start()
        self._taken.callback(thread.join)
        self._taken.callback(stopping.set)

    def _room_changed(self, want: Want | None) -> None:
        """From the decision loop's thread or the one that looks at the disk; each change of kind is told once."""
        if want is not None:
            self.readiness.begins(want.kind)
        for kind in (Unready.DISK_FULL, Unready.STANDBY_AWAY, Unready.LEASE_LOST):
            if want is None or kind is not want.kind:
                self.readiness.ends(kind)
        if want is None:
            held = self.replicator.options.mode != "off" or self.leadership is not None
            self._emit("note", {"note": "goes_on" if held else "disk_has_room"})
        elif want.kind is Unready.DISK_FULL:
            self.store.let_go_of_the_past()
            self._emit("note", {"note": "disk_full", "why": want.text})
        else:
            self._emit("note", {"note": "held", "why": want.text})

    def wait(self, timeout_s: float) -> Ending | None:
        """Wait for the last version, at most ``timeout_s``; the ending, or None when the run still goes on.

        Raises what ended the process early, if anything did.
        """
        self._ended.wait(timeout_s)
        self._check()
        return self.ending

    def _check(self) -> None:
        if self.failed is not None:
            raise self.failed

    def complaints(self) -> list[str]:
        """Files of identities and certificates that cannot be used as they are now."""
        return self._server.complaints() if self._server is not None else []

    def status(self) -> dict[str, object]:
        """As the admin service tells it; ``CoreStopped`` before the start and after the end."""
        if self._server is None:
            raise CoreStopped
        return self.api.status()

    def calls(self) -> dict[str, int]:
        """What the network's end has counted: refusals by status, bytes, streams that broke off, defects."""
        return self._server.counters() if self._server is not None else {}

    def linger(self) -> None:
        """After the last version: stay until every live site has left and heard its fates, at most ``linger_s``."""
        if self._above is not None:
            self._above.finish()  # Its own last update, after those of its sites.
        linger(self.core, self.feeds, self.options.linger_s)

    def drain(self) -> bool:
        """Begin the last round of this part of the run; False while nothing is decided, and so not that either."""
        try:
            self.api.drain()
        except CoreHeld:
            return False
        return True

    def stop(self, grace_s: float = 2.0) -> None:
        """Stop serving, keep a last snapshot, let go of the folder; also after a failure, then without the snapshot."""
        self._stopping.set()
        try:
            if self._server is not None:
                self._server.stop(grace_s)
                if self.failed is None:
                    self.keeper.last()
        finally:
            had_failed = self.failed is not None
            self._taken.close()
        if not had_failed:
            self._check()  # What went wrong in the last snapshot is nobody else's to tell.

    def _stop_core(self) -> None:
        self.core.stop()
        if self._export_thread is not None:
            self._export_thread.join()
        self.keeper.finish()  # The loop begins no other one now.

    def _close_journal(self) -> None:
        try:
            self.store.journal.close()
        except OSError:
            if self.failed is None:  # Otherwise it is what ``wait`` has raised already, met a second time.
                raise

    # --- effects, in the decision loop's thread ----------------------------------------------------------------

    def _carry_out(self, effect: OuterEffect) -> None:
        match effect:
            case StartOuterStep() | TakeVersion():
                self._start_outer_step(effect)
            case PublishVersion():
                self._publish(effect)
            case TellFate():
                self.store.decided(effect.site, effect.fate)
                self._disk.reached(Step.FATE)
                self.feeds.tell(FateTold(effect.fate), effect.site)
                if effect.fate.reason is not None:
                    self._emit("refused", refusal_facts(effect))
            case AnnounceFinal():
                self.readiness.begins(Unready.DRAINING)
                self.feeds.tell(FinalAnnounced(effect.ending))
            case MarkFinal():
                self._mark_final(effect)
            case DropSite():
                self.feeds.drop(effect.site, effect.incarnation, effect.reason)
            case Note():
                if effect.what == "standby_attached":
                    self.replicator.attached()
                facts = {name: value for name, value in asdict(effect).items() if value is not None}
                self._emit(str(facts.pop("what")), facts)
            case _:
                assert isinstance(effect, RegionEffect), effect
                assert self.region is not None, "this syncer is no region"
                self.region.carry_out(effect)

    def _start_outer_step(self, command: StartOuterStep | TakeVersion) -> None:
        values = self.holdings.values[command.fragment]
        self._emit("outer_step_started", {"fragment": command.fragment, "version": command.version})
        future = self.core.worker.submit(self._outer_step, command, values)
        future.add_done_callback(lambda done: None if done.cancelled() else self._fail(done.exception()))

    def _fail(self, error: BaseException | None) -> None:
        """Something that nothing can go on without has failed: ``wait`` returns at once and raises it."""
        if error is not None:
            self.failed = self.failed or error
            self._emit("failed", {"why": str(error) or repr(error)})
            self._ended.set()

    def _outer_step(self, command: StartOuterStep | TakeVersion, values: FragmentValues) -> None:
        """In the worker thread: the arithmetic, then the event that says so."""
        while not self._versions.acquire(timeout=LOOK_EVERY_S / 10):
            if not self.core.alive:
                return  # Those that are made will never be published, and nor would this one.
        self._disk.reached(Step.MERGE)
        spool, rule, down_codec = self.store.spool, self.plan.rule, self.options.down_codec
        threads, buffers = self.options.threads_used, self._buffers
        result = run_outer_step(command, values, spool, rule, down_codec, threads=threads, buffers=buffers)
        self._disk.reached(Step.MERGE)
        if result is None:
            self._versions.release()
            self.core.post(OuterStepFailed(command.fragment, command.version))
            return
        self._candidates[command.fragment, command.version] = result
        self._emit("outer_step", outer_step_facts(command, result, self.costs.stepped(command, result)))
        self.core.post(OuterStepDone(command.fragment, command.version, result.values.digest, result.downlink_digest))

    def _publish(self, effect: PublishVersion) -> None:
        result = self._candidates.pop((effect.fragment, effect.version))
        self._disk.reached(Step.PUBLISH)
        self.holdings.take(effect.fragment, result)
        self.made.tell()
        self._versions.release()
        machine = self.core.machine
        self.feeds.tell(self.published(machine, effect.fragment, effect.version, effect.digest))
        facts = {"fragment": effect.fragment, "version": effect.version, "digest": effect.digest}
        facts |= {
            "lineage": machine.state.lineage,
            "merged": merged_into(machine.state, effect.fragment, effect.version),
        }
        tokens: dict[str, object] = {"run_tokens": machine.state.run_tokens(), "progress_ppm": machine.progress_ppm()}
        tokens |= self.costs.published(effect.fragment)
        self._emit("published", {**facts, **tokens, "bytes": len(result.downlink)})
        self._disk.reached(Step.PUBLISH)
        self.keeper.published()

    def published(self, machine: OuterSync, fragment: int, version: int, digest: str) -> Published:
        """The event that tells of a version, with how the run stands."""
        state = machine.state
        fastest_ns = fastest_step_ns(state, machine.attendance.live)
        run = (state.run_tokens(), machine.progress_ppm(), state.lineage, fastest_ns)
        return Published(state.epoch, fragment, version, digest, *run)

    def _say_standstill(self, stopping: threading.Event) -> None:
        """The thread that says when no version is made although updates wait, and when it is for other sites."""
        said: tuple[object, ...] = ()
        while not stopping.wait(LOOK_EVERY_S):
            with suppress(CoreHeld, CoreStopped):
                found = self.core.ask(lambda machine: standstill_facts(machine, self.core.now_ns())) or {}
                told = (found.get("fragment"), found.get("waits_for"))
                if found and told != said:
                    self._emit("standstill", found)
                said = told

    def note(self, what: str, why: str, site: str) -> None:
        """Say something about ``site`` that the machine does not know of; from any thread."""
        self._emit("note", {"note": what, "why": why, "site": site})

    def snapshot_now(self) -> None:
        """Write a snapshot and wait until it is durable; UNAVAILABLE when it cannot be."""
        self.keeper.now(lambda: self.failed)

    def _mark_final(self, effect: MarkFinal) -> None:
        self.ending = effect.ending
        self._emit("final", {"ending": effect.ending.value, "versions": list(effect.versions)})
        if effect.ending is not Ending.FINISHED:
            self._ended.set()
            return
        # A large model takes long to write, and the sites are still to be answered meanwhile.
        self._export_thread = threading.Thread(target=self._exported, args=(effect,), name="export")
        self._export_thread.start()

    def _exported(self, effect: MarkFinal) -> None:
        """In a thread of its own; the values of the last version are never written to again."""
        folder = Path(self.options.folder) / "final"
        try:
            when_there_is_room(
                lambda: export(self._disk, folder, self.plan.layout, self.holdings.values, effect.versions),
                self._stopping,
                LOOK_EVERY_S,
                self._put_off,
            )
        except Exception as error:
            self._fail(error)
        self._ended.set()

    def _put_off(self, full: OSError | None) -> None:
        if full is not None:
            self._emit("note", {"note": "export_put_off", "why": f"disk full: {full.strerror}"})

    def parameters(self) -> dict[str, torch.Tensor]:
        """The published values as full parameters, fp32."""
        return full_parameters(self.plan.layout, [values.evaluated for values in self.holdings.values])


def _with_places(network: ServerOptions, state: OuterState) -> ServerOptions:
    """``network`` with room for each site that is there, also where fewer may join than before."""
    return replace(network, sites_max=max(network.sites_max, places_taken(state)))


def _since_last_record_ns(folder: Path) -> int | None:
    """For how long no process has written to the journal in ``folder``, by the wall clock; None where that went back.

    The machine's own time stood meanwhile, and it only bounds by this what it believes of the sites' steps.
    """
    written_ns = [path.stat().st_mtime_ns for path in folder.glob("journal-*.log")]
    away_ns = time.time_ns() - max(written_ns) if written_ns else 0
    return away_ns if away_ns >= 0 else None
