"""The syncer's process: connects store, decision loop and network, from start to last version.

``Api`` (``api.py``) answers the network. ``Syncer`` owns the life of the process and carries out the machine's effects.
At its end the process lingers (``linger``) until its sites know the fates of their updates.

``Keeper`` decides when a snapshot is due, and has the thread that writes it. A snapshot that finds no disk space is
postponed, with a note, and tried again with a later version; the journal holds everything that would be in it. Any
other failure ends the process.

A region is a syncer that is a site of another; ``sync/region.py`` says which of the two shells does what, and neither
imports the other.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from diloco.codec import kernel_library
from diloco.codec.base import Buffers
from diloco.durable import PLAIN_DISK, Disk, DiskFullError, Step, locked, when_there_is_room
from diloco.outer.optimizer import TENSORS_KEPT
from diloco.sync.effects import (
    AnnounceFinal,
    DropSite,
    LetGo,
    MarkFinal,
    Note,
    OuterEffect,
    PublishVersion,
    RegionEffect,
    Seal,
    StartOuterStep,
    StopTraining,
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
    VersionPublished,
)
from diloco.sync.members import places_taken
from diloco.sync.region import Above, has_joined, standing
from diloco.sync.rounds import standstill
from diloco.sync.state import Part, Phase
from diloco.sync.state import Status as SiteStatus
from diloco.syncer.api import Api
from diloco.syncer.backups import Backups
from diloco.syncer.core import HELD, LOOK_EVERY_S, Core, CoreHeld, CoreStopped, Readiness, Room, Unready, Want
from diloco.syncer.lease import Lease, LeaseError, lead
from diloco.syncer.options import VERSIONS_MAX, RunPlan, SyncerOptions, memory_bytes_max
from diloco.syncer.outer_step import (
    OuterResult,
    merged_into,
    outer_step_facts,
    run_outer_step,
    start_facts,
)
from diloco.syncer.publish import published
from diloco.syncer.replicator import Replicator
from diloco.syncer.snapshots import MemoryCheck, export, exported
from diloco.syncer.status import describe, resident_bytes
from diloco.syncer.store import Store, StoreError, begun
from diloco.wire.messages import Refusal, Status
from diloco.wire.options import SecurityOptions, ServerOptions
from diloco.wire.server import RunningServer

if TYPE_CHECKING:
    from diloco.sync.events import RegionEvent
    from diloco.sync.progress import Standing
    from diloco.sync.state import OuterState
    from diloco.sync.syncer import OuterSync
    from diloco.syncer.lease import LeaseHolder
    from diloco.syncer.snapshots import FragmentValues
    from diloco.syncer.standby import Warm


LOOK_S = 0.05
LINGERS_MAX = 100
"""A site that reads the last version ever so slowly does not keep the syncer."""


START_WAIT_S = 10.0
"""Seconds that a start waits for disk space (a process that never served need not wait longer), and that a region which
had finished waits for an answer from the syncer above."""


@dataclass(eq=False, repr=False)
class Syncer:
    """One syncer process.  Use: ``start``, then ``wait`` until it returns the ending, then ``stop``."""

    options: SyncerOptions
    plan: RunPlan
    version_zero: Callable[[], Sequence[Tensor]]
    """Makes the fragments' first values, for a new run only."""
    network: ServerOptions
    security: SecurityOptions
    emit: Callable[[str, dict[str, object]], None]
    disk: Disk = PLAIN_DISK
    lease: Lease | None = None
    make_above: Callable[[], Above[Tensor]] | None = None
    """Makes the client to the syncer above, where this one is a site of another; called once the folder is locked."""

    def __post_init__(self) -> None:
        self.region: Region | None = None
        self.leadership: LeaseHolder | None = None
        self._candidates: dict[tuple[int, int], OuterResult] = {}
        self._versions = threading.BoundedSemaphore(VERSIONS_MAX)
        # The tensors and the down-link of the version that is replaced: the next one takes their memory.
        self._buffers = Buffers(3 + len(TENSORS_KEPT[self.plan.rule.optimizer.kind]))
        self._ended = threading.Event()
        self.ending: Ending | None = None
        self._final = Path(self.options.folder) / "final"
        self.readiness = Readiness()
        self._taken = ExitStack()  # A stop releases these, the last first.
        self._server: RunningServer | None = None
        self.failed: BaseException | None = None
        self.backups: Backups | None = None

    # --- life --------------------------------------------------------------------------------------------------

    def start(self, warm: Warm | None = None) -> str:
        """Lock the folder, recover, and serve; return the address that sites dial.

        ``warm`` is what a standby hands over; it needs no recovery. Raises ``LockedError`` when another process has the
        folder, ``StoreError`` when its contents cannot be continued, ``LeaseError`` when another process leads the run.
        """
        try:
            return self._start(warm)
        except BaseException as error:
            self._taken.close()
            if isinstance(error, CoreStopped) and self.failed is not None:
                raise self.failed from error
            raise

    def _start(self, warm: Warm | None) -> str:
        machine, records, away_ns = self._open(warm)
        places = max(self.network.sites_max, places_taken(machine.state))  # Also if the limit is lower than before.
        self.network = replace(self.network, sites_max=places)
        epoch = self._lead(machine.state, warm)
        alone = warm is not None or machine.state.detached  # A newly promoted syncer has no standby.
        self._make_loop(machine, alone)
        is_region, was = self.make_above is not None, machine.state
        if (records or warm is not None) and was.ending is not None:
            # The process before did not linger for the sites that have left: they may rejoin for fates.
            for name, site in was.sites.items():
                if site.status is SiteStatus.LEFT:
                    self.api.feeds.says(name, lacks=True)
        had_finished = is_region and was.phase is Phase.ENDED and was.ending is Ending.FINISHED
        if had_finished:
            self.core.post(UpstreamAsked())
        # Before the loop starts: it would otherwise act on a passed deadline first, and issue its step twice.
        self.core.post(SyncerStarted(epoch, self.plan.health, away_ns, self.plan.outer.sites_max))
        updates_above = 0
        if self.make_above is None:
            check_site(machine.state, "")
        else:
            self.region = Region(self.make_above(), self)
            updates_above = self.region.begin(machine)
        if alone and not machine.state.detached and self.options.replication.mode != "off":
            self.core.post(StandbyDetached(0))
        if self.options.backup.url:
            self.backups = backups = Backups(self.options.backup, self.store, machine.state.lineage, epoch)
            # Runs after keeper.finish: the last backup has the last snapshot. Only a run that has ended gets one.
            self._taken.callback(lambda: backups.stop(last=self.ending is not None and self.failed is None))
        self.core.start()
        self._taken.callback(self.keeper.finish)  # Runs after core.stop: no other snapshot begins.
        self._taken.callback(self.core.stop)
        if self.region is not None:
            self._taken.callback(self.region.above.close)
        facts = self._first_answer()
        self.memory_bytes_max = memory_bytes_max(self.options, self.plan, self.network, updates_above)
        more = {"recovered": records, "kernels": kernel_library.description()}
        self.emit("syncer_started", {**facts, **more, "memory_bytes_max": self.memory_bytes_max})
        if "ending" in facts and exported(self._final, self.holdings.values):
            self.ending = Ending(str(facts["ending"]))
            self._ended.set()
        follow = self.replicator if self.options.replication.mode != "off" else None
        self._server = RunningServer(self.api, self.network, self.security, self.emit_note, follow)
        self._server.start(ready=False)
        self._in_thread("room", self.room.run)
        self._in_thread("standstill", self._say_standstill)
        if had_finished:
            self._in_thread("word-above", self._await_word)
        self.readiness.tell = self._server.ready
        self.readiness.change(ends=[Unready.STARTING])
        if self.backups is not None:
            self.backups.start()
        return self._server.address

    def _make_loop(self, machine: OuterSync, alone: bool) -> None:
        """Make the decision loop and the objects it works with; ``_start`` starts it later."""
        memory = MemoryCheck(self.holdings.values, self.options.memory_check_s)
        if self.options.memory_check_s:
            self._in_thread("memory-check", memory.run)
        self.room = Room(Path(self.options.folder), self.options.disk_reserve_mb * 1_000_000, self._room_changed)
        self.replicator = Replicator(self.options.replication, self.store, self.leadership)
        self.core = Core(
            machine,
            self.store,
            self._carry_out,
            on_failure=self.fail,
            on_held=self.room.held,
            replicated=self.replicator.replicated,
            leads=self.leadership.wanting if self.leadership is not None else lambda: None,
            acks_first=self.options.replication.mode == "async",
        )
        self.replicator.begin(self.core, detached=alone)
        self.keeper = Keeper(self, memory)
        self.api = Api(
            self.options,
            self.plan,
            self.network,
            self.core,
            self.holdings,
            self.room,
            self.replicator,
            status=self.status,
            snapshot=self.keeper.now,
        )

    def _open(self, warm: Warm | None) -> tuple[OuterSync, int, int | None]:
        """Lock the folder; recover or begin the run. Or take over the folder, machine and values that a standby holds.

        Return the machine, the number of records replayed, and how long ago the last process wrote its journal, by the
        wall clock; None if that clock went back. The machine's own time stood still meanwhile. It uses this only as a
        bound on what it assumes of the sites' steps.
        """
        if warm is not None:
            self._taken.enter_context(warm.taken)
            self.store, self.holdings = warm.store, warm.holdings
            self.store.emit = self.emit  # Not the standby's any more.
            return warm.machine, 0, 0
        folder, options, rules = Path(self.options.folder), self.options, self.plan.rules(self.options)
        self._taken.enter_context(locked(folder))
        written_ns = max((path.stat().st_mtime_ns for path in folder.glob("journal/journal-*.log")), default=None)
        away_ns = time.time_ns() - written_ns if written_ns is not None else 0
        self.store = Store(folder, self.plan.card, self.disk, options.retention, self.emit)
        self._taken.callback(self._close_journal)
        is_new = self.store.is_new()
        found = begun(self.store, rules, self.version_zero()) if is_new else self.store.recover(rules)
        self.holdings = found.holdings
        return found.machine, found.records, away_ns if away_ns >= 0 else None

    def _lead(self, state: OuterState, warm: Warm | None) -> int:
        """Take the lease, where there is one; return the epoch of this start."""
        taken = warm.leadership if warm is not None else None
        leadership = self.leadership = taken or lead(self.lease, self.store, state)
        if leadership is None:
            return warm.epoch if warm is not None else state.epoch + 1
        leadership.emit = self.emit
        # After a failure it is not released: it expires, and an heir takes over.
        self._taken.callback(lambda: leadership.stop(release=self.failed is None))
        return leadership.epoch

    def _first_answer(self) -> dict[str, object]:
        """Return ``start_facts`` once the start is journalled; ``DiskFullError`` or ``LeaseError`` if it never is."""
        until = time.monotonic() + START_WAIT_S
        while True:
            try:
                return self.core.ask(start_facts)
            except CoreHeld as held:
                if held.kind is Unready.STANDBY_AWAY:  # A standby can follow only once this process serves.
                    return self.core.ask(start_facts, early=True)
                if time.monotonic() > until and held.kind is Unready.LEASE_LOST:
                    raise LeaseError(held.text) from held
                if time.monotonic() > until:
                    raise DiskFullError(errno.ENOSPC, held.text, self.options.folder) from held
                time.sleep(LOOK_EVERY_S / 10)

    def _await_word(self, stopping: threading.Event) -> None:
        """Finish again a region that had finished before, unless the syncer above answers. Runs in its own thread."""
        while not stopping.wait(START_WAIT_S):
            with suppress(CoreHeld, CoreStopped):
                if not self.core.ask(lambda machine: has_joined(machine.state)):
                    why = f"the syncer above gave no answer in {START_WAIT_S:g} s"
                    why += ": if the run above goes on, start its syncer, then this one again"
                    self.emit_note("stays_finished", why)
                    self.core.post(FinalAnnounced(Ending.FINISHED))
                return

    def _in_thread(self, name: str, work: Callable[[threading.Event], None]) -> None:
        """Run ``work`` in a thread until the stop, which sets the event that it gets.

        If ``work`` fails, the process ends with its error.
        """

        def run() -> None:
            try:
                work(stopping)
            except Exception as error:
                self.fail(error)

        def end() -> None:
            stopping.set()
            thread.join()

        stopping, thread = threading.Event(), threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        self._taken.callback(end)

    def _room_changed(self, want: Want | None) -> None:
        """Update readiness and emit a note, once per change of kind. Runs in the loop's or the room's thread."""
        self.readiness.change(begins=[want.kind] if want is not None else [], ends=HELD)
        if want is None:
            held = self.options.replication.mode != "off" or self.leadership is not None
            self.emit("note", {"note": "goes_on" if held else "disk_has_room"})
        elif want.kind is Unready.DISK_FULL:
            self.store.let_go_of_the_past()
            self.emit_note("disk_full", want.text)
        else:
            self.emit_note("held", want.text)

    def emit_note(self, what: str, why: str) -> None:
        """Emit the note ``what``."""
        self.emit("note", {"note": what, "why": why})

    def wait(self, timeout_s: float) -> Ending | None:
        """Wait at most ``timeout_s`` for the last version; return the ending, or None when the run still goes on, or a
        finished one is not in ``final/`` yet.

        Raises the error that ended the process early, if any.
        """
        has_ended = self._ended.wait(timeout_s)
        if self.failed is not None:
            raise self.failed
        return self.ending if has_ended else None

    def status(self) -> dict[str, object]:
        """Return the run's status for the admin service; raise ``CoreStopped`` before the start and after the end."""
        if (server := self._server) is None:
            raise CoreStopped
        return self.core.ask(
            lambda machine: {
                "run_id": self.plan.agreement.run_id,
                "held": list(self.plan.held),
                "up_seconds": round(time.monotonic() - self.api.tally.began_s, 1),
                "refused_at_the_door": self.api.tally.refusals(),
                "not_ready": self.readiness.reasons(),
                "calls": server.counters(),
                "payloads_decoded": sum(each.counts["payloads_decoded"] for each in self.api.tally.sites().values()),
                "identity_complaints": server.complaints(),
                "kernels": kernel_library.description(),
                "memory_bytes": resident_bytes(),
                "memory_bytes_max": self.memory_bytes_max,
                "disk_free_bytes": self.room.free_bytes(),
                "journal": dict(zip(("segment", "bytes"), self.replicator.end(), strict=True)),
                "wanting": self.room.wanting(),
                "replication": self.replicator.status(),
                "lease": self.leadership.status() if self.leadership is not None else None,
                "backup": self.backups.status() if self.backups is not None else None,
                "behind": self.api.old_copy
                or self.api.behind
                or (self.backups.behind if self.backups is not None else ""),
                "standstill": standstill(machine, self.core.now_ns()),
                "staleness_max": machine.options.staleness_max,
                **describe(machine, self.api.tally, self.core.now_ns()),
            },
            early=True,
        )

    def linger(self) -> None:
        """After the last version: wait until every live site has left, has got its fates and has closed its streams; at
        most ``linger_s`` after bytes of a version were sent, and ``LINGERS_MAX`` times that in all.

        Raises the error that ends the process meanwhile, if any.
        """
        if self.region is not None:
            self.region.above.finish()  # The region's own last update, after those of its sites.

        def wanted(machine: OuterSync) -> bool:
            streams, unheard = self.api.feeds.standing()
            return streams > 0 or any(
                site.status is SiteStatus.LIVE or (site.status is SiteStatus.LEFT and name in unheard)
                for name, site in machine.state.sites.items()
            )

        sent, linger_s, now = self._bytes_out(), self.options.linger_s, time.monotonic()
        until, end = now + linger_s, now + LINGERS_MAX * linger_s
        while self.failed is None and (now := time.monotonic()) < min(until, end):
            if sent < (out := self._bytes_out()):
                sent, until = out, now + linger_s
            # A held loop decides nothing, so no site can leave; why one has ended comes in ``failed``.
            with suppress(CoreHeld, CoreStopped):
                if not self.core.ask(wanted):
                    break
            time.sleep(LOOK_S)
        if self.failed is not None:
            raise self.failed

    def _bytes_out(self) -> int:
        return self._server.counters().get("payload_bytes_out", 0) if self._server is not None else 0

    def drain(self) -> bool:
        """Begin the last round of this part of the run; return False if the loop is held and cannot begin it."""
        with suppress(CoreHeld):
            self.api.drain()
            return True
        return False

    def stop(self, grace_s: float = 2.0) -> None:
        """Stop serving, write a last snapshot, release the folder. After a failure: the same without the snapshot."""
        had_failed = self.failed is not None
        try:
            if self._server is not None:
                self._server.stop(grace_s)
                if self.failed is None:
                    # A last snapshot. A site may still be answered after it: the journal goes on.
                    with suppress(Refusal):  # The loop has ended, or waits for disk space: the journal has it all.
                        self.keeper.finish()
                        self.core.do(self.keeper.begin)
        finally:
            self._taken.close()
        if not had_failed and self.failed is not None:
            raise self.failed  # No other call reports a failure of the stop itself, as of the last snapshot.

    def _close_journal(self) -> None:
        try:
            self.store.journal.close()
        except OSError:
            if self.failed is None:  # Otherwise ``wait`` has raised the same error already.
                raise

    # --- effects, in the decision loop's thread ----------------------------------------------------------------

    def _carry_out(self, effect: OuterEffect) -> None:
        match effect:
            case StartOuterStep() | TakeVersion():
                values = self.holdings.values[effect.fragment]
                self.emit("outer_step_started", {"fragment": effect.fragment, "version": effect.version})
                future = self.core.worker.submit(self._outer_step, effect, values)
                future.add_done_callback(lambda done: None if done.cancelled() else self.fail(done.exception()))
            case PublishVersion():
                self._publish(effect)
            case TellFate():
                self.store.carried_out([effect])
                self.disk.reached(Step.FATE)
                self.api.feeds.tell(FateTold(effect.fate), effect.site)
                if (reason := effect.fate.reason) is not None:
                    update = {"fragment": effect.fate.fragment, "sequence": effect.fate.sequence}
                    self.emit("refused", {"site": effect.site, **update, "reason": reason.value})
            case AnnounceFinal():
                self.readiness.change(begins=[Unready.DRAINING])
                self.api.feeds.tell(FinalAnnounced(effect.ending))
            case MarkFinal():
                self.ending = effect.ending
                self.api.feeds.tell(FinalAnnounced(effect.ending, effect.versions))
                self.emit("final", {"ending": effect.ending.value, "versions": list(effect.versions)})
                if effect.ending is Ending.FINISHED:
                    # A large model takes long to write, and sites still need answers meanwhile.
                    self._in_thread("export", self._export)
                else:
                    self._ended.set()
            case DropSite():
                self.api.feeds.drop(effect.site, effect.incarnation, effect.reason)
            case Note():
                if effect.what == "standby_attached":
                    self.replicator.attached()
                facts = {name: value for name, value in asdict(effect).items() if value is not None}
                self.emit(str(facts.pop("what")), facts)
            case _:
                assert isinstance(effect, RegionEffect), effect
                assert self.region is not None, "this syncer is no region"
                self.region.carry_out(effect)

    def fail(self, error: BaseException | None) -> None:
        """Record a fatal error: ``wait`` returns at once and raises it."""
        if error is not None:
            self.failed = self.failed or error
            self.emit("failed", {"why": str(error) or repr(error)})
            self._ended.set()

    def _outer_step(self, command: StartOuterStep | TakeVersion, values: FragmentValues) -> None:
        """Compute the version, then post the event that says so. Runs in the worker thread."""
        while not self._versions.acquire(timeout=LOOK_EVERY_S / 10):
            if not self.core.thread.is_alive():
                return  # The loop has ended: no candidate will be published any more.
        spool, rule, down_codec = self.store.spool, self.plan.rule, self.options.down_codec
        threads, buffers = self.options.threads_used, self._buffers
        with self.disk.passing(Step.MERGE):
            result = run_outer_step(command, values, spool, rule, down_codec, threads=threads, buffers=buffers)
        if result is None:
            self._versions.release()
            self.core.post(OuterStepFailed(command.fragment, command.version))
            return
        self._candidates[command.fragment, command.version] = result
        self.emit("outer_step", outer_step_facts(command, result, self.api.tally.stepped(command, result)))
        self.core.post(OuterStepDone(command.fragment, command.version, result.values.digest, result.downlink_digest))

    def _publish(self, effect: PublishVersion) -> None:
        result = self._candidates.pop((effect.fragment, effect.version))
        machine = self.core.machine
        with self.disk.passing(Step.PUBLISH):
            self.holdings.take(effect.fragment, result)
            self._versions.release()
            self.api.feeds.tell(published(machine, effect.fragment, effect.version, effect.digest))
            facts: dict[str, object] = {
                "fragment": effect.fragment,
                "version": effect.version,
                "digest": effect.digest,
                "lineage": machine.state.lineage,
                "merged": merged_into(machine.state, effect.fragment, effect.version),
                "run_tokens": machine.state.run_tokens(),
                "progress_ppm": machine.progress_ppm(),
                **self.api.tally.published(effect.fragment),
                "bytes": len(result.downlink),
            }
            self.emit("published", facts)
        self.keeper.published()

    def _say_standstill(self, stopping: threading.Event) -> None:
        """Report a standstill (updates wait, no version is made), and again when other sites are missing.

        Runs in its own thread.
        """
        said: tuple[object, ...] = ()
        while not stopping.wait(LOOK_EVERY_S):
            with suppress(CoreHeld, CoreStopped):
                found = self.core.ask(lambda machine: standstill(machine, self.core.now_ns())) or {}
                told = (found.get("fragment"), found.get("waits_for"))
                if found and told != said:
                    self.emit("standstill", found)
                said = told

    def _export(self, stopping: threading.Event) -> None:
        """Write the final model to ``final/``. The values of the last version no longer change."""

        def put_off(full: OSError | None) -> None:
            if full is not None:
                self.emit_note("export_put_off", f"disk full: {full.strerror}")

        write = partial(export, self.disk, self._final, self.plan.layout, self.holdings.values)
        when_there_is_room(write, stopping, LOOK_EVERY_S, put_off)
        self._ended.set()


@dataclass(eq=False)
class Keeper:
    """Writes one snapshot at a time: every ``snapshot_every`` outer steps and on request."""

    syncer: Syncer
    memory: MemoryCheck
    _thread: threading.Thread | None = None
    _steps: int = 0
    _due: bool = False
    _put_off: str | None = None

    def published(self) -> None:
        """Count one outer step. Runs in the decision loop's thread."""
        self._steps += 1
        if self._steps >= self.syncer.options.snapshot_every and not self._due:
            # Not here: the machine may be ahead of the effects carried out so far, and a snapshot holds both.
            self._due = True
            self.syncer.core.do_soon(self.begin)

    def begin(self, machine: OuterSync) -> bool:
        """Start a snapshot's thread, or put it off; return False, without either, while there is another.

        Runs in the loop's thread, between two turns.
        """
        self._due = False
        if self._thread is not None and self._thread.is_alive():
            return False
        try:
            write = self.syncer.store.snapshot_writer(machine, self.syncer.holdings.values, check=self.memory.check)
        except DiskFullError as error:
            self._later(error)
            return True
        self._steps = 0
        thread = threading.Thread(target=self._run, args=(write,), name="snapshot")
        thread.start()
        self._thread = thread  # Only now: ``finish`` joins it, so it must be started.
        return True

    def _run(self, write: Callable[[], int]) -> None:
        began = time.monotonic()
        try:
            size = write()
        except DiskFullError as error:
            self._later(error)
        except Exception as error:
            self.syncer.fail(error)
        else:
            self._put_off = None
            self.syncer.emit("snapshot", {"seconds": round(time.monotonic() - began, 4), "bytes": size})

    def _later(self, error: DiskFullError) -> None:
        why = f"disk full: {error.strerror}"
        if self._put_off is None:
            self.syncer.emit_note("snapshot_put_off", why)
        self._put_off = why
        self._steps = max(self._steps, self.syncer.options.snapshot_every)  # The next version retries.

    def now(self) -> None:
        """Write a snapshot and wait until it is durable; raise ``Refusal`` (UNAVAILABLE) when it cannot be."""
        while not self.syncer.core.do(self.begin):
            self.finish()
        self.finish()
        if (error := self.syncer.failed) is not None:
            raise Refusal(Status.UNAVAILABLE, f"the snapshot could not be kept: {error}")
        if self._put_off is not None:
            raise Refusal(Status.UNAVAILABLE, self._put_off)

    def finish(self) -> None:
        """Wait for the snapshot that is being written, if any."""
        if self._thread is not None:
            self._thread.join()


# --- A syncer that is a site of another ------------------------------------------------------------------------------


class UpstreamRefusedError(Exception):
    """The syncer above has refused this region for good; the text says why."""


@dataclass(eq=False)
class Region:
    """Connects the decision loop with ``above``."""

    above: Above[Tensor]
    syncer: Syncer
    _published: dict[int, VersionPublished] = field(default_factory=dict)
    _published_lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, machine: OuterSync) -> int:
        """Before the loop begins: queue the region's first event, after ``SyncerStarted``, and the client's start.

        Returns how many updates may be in flight to the syncer above.

        ``StoreError`` if the state is that of another site, or of no region.
        """
        state = machine.state
        known = [Part() for _ in state.fragments] if state.upstream is None else state.upstream.parts
        found = self.above.begin(self, known)
        check_site(state, found.site)
        self.syncer.core.post(found)
        # Once that is durable, also at a standby: a syncer that was replaced must not act for the region above.
        self.syncer.core.do_soon(lambda machine: self.above.start())
        return found.in_flight_max

    # --- called by the client to the syncer above; any thread --------------------------------------------------------

    def tell(self, event: RegionEvent) -> None:
        """Pass an event to the machine.

        While the loop waits for disk space, the syncer above keeps publishing versions. So the queue holds at most one
        unprocessed version of each fragment, the newest.
        """
        if not isinstance(event, VersionPublished):
            self.syncer.core.post(event)
            return
        with self._published_lock:
            waits = event.fragment in self._published
            self._published[event.fragment] = event
        if not waits:
            self.syncer.core.do_soon(lambda machine: self._post_newest(event.fragment))

    def _post_newest(self, fragment: int) -> None:
        with self._published_lock:
            newest = self._published.pop(fragment)
        self.syncer.core.post(newest)

    def keep(self, fragment: int, values: memoryview, digest: str) -> str:
        """Store the values of a version above durably; return their payload reference."""
        return self.syncer.store.spool.put_above(fragment, values, digest)

    def standing(self) -> Standing | None:
        """Return the region's state; None while the loop gives no answer."""
        with suppress(Refusal):
            return self.syncer.core.ask(lambda machine: standing(machine.state), early=True)
        return None

    def give_up(self, why: str) -> None:
        """End the process with ``why``."""
        self.syncer.fail(UpstreamRefusedError(why))

    # --- effects, in the decision loop's thread ----------------------------------------------------------------------

    def carry_out(self, effect: RegionEffect) -> None:
        """Carry out the machine's effect towards the syncer above."""
        match effect:
            case LetGo():
                self.syncer.store.carried_out([effect])
            case StopTraining():
                self.give_up(effect.why)
            case Seal():
                values = self.syncer.holdings.values[effect.fragment]
                assert values.reference is not None, "an update needs a reference to be measured from"
                self.above.seal(effect, values.reference, values.theta)
            case _:
                self.above.order(effect)


def check_site(state: OuterState, site: str) -> None:
    """Raise ``StoreError`` if a run would become a region, cease to be one (``site`` is empty) or change its site."""
    if state.upstream is None:
        if site and any(fragment.version for fragment in state.fragments):
            raise StoreError(
                f"upstream.site_id is {site!r}, and this run has begun without a syncer above, whose values would "
                "replace its own: take another run.name"
            )
    elif state.upstream.site and state.upstream.site != site:
        now = f"upstream.site_id is {site!r}" if site else "upstream.endpoint is null"
        raise StoreError(f"{now}, and this run is the region {state.upstream.site!r} of a run above: it stays that")
