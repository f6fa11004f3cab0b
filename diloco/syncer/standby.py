"""A standby: a second data folder that follows the syncer's, and a machine that is ready to take over.

One thread receives what the syncer sends and writes it in the syncer's order: a payload before the frame that names it,
and the frame synced and marked before it is acknowledged. ``Incoming`` receives each item: a file beside its final
place, or a unit of the journal in memory. A second thread replays the records, as a recovery would, so that every
version is computed and compared here. It writes a snapshot wherever the syncer's journal was cut for one. The folder is
a complete syncer's folder at every instant: a process that starts on it continues from there.

A full disk does not end a standby. The standby deletes the past that only a replay needs, stops following and so
acknowledging, reports that, and continues from its journal's end when there is space.

Succession. A standby becomes the leader by itself, as the heir of a lease that expired, or by an operator's command.
With a lease a thread polls it. An heir has everything that any site was told, so it takes the lease as soon as the
holder has let it expire, without a command. Any other standby takes over only by an operator's command (``lossy``),
once no process holds the lease. What it lacks is lost, so a new lineage begins with what it has.

Without a lease the operator's command alone decides. The standby refuses it while the syncer is still alive, or if the
syncer may have told sites what the standby lacks. So may one that has not heard the syncer since its own start: it
cannot know whether an operator detached it before. ``lossy`` overrides both, because a new lineage fences off the old
syncer. Nothing watches a standby whose thread has died, so any failure other than a lease error ends the standby, with
its reason.

Process. ``StandingBy`` follows, reports its status, sends every other caller to the syncer, and frees the address for a
syncer when it is to take over.
"""

from __future__ import annotations

import hashlib
import io
import queue
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NoReturn

from diloco.durable import PLAIN_DISK, Disk, DiskFullError, Step, full_in_words, is_full, locked
from diloco.sync.events import Ending, Sealed
from diloco.sync.journal import FRAME, HEADER, JournalError, Record, chain_after, decode_records, units
from diloco.sync.leadership import Standing, may_take_over
from diloco.sync.members import promoted_epoch
from diloco.sync.region import OUTBOX
from diloco.sync.state import OuterState, Phase
from diloco.sync.syncer import OuterSync
from diloco.syncer.api import probed
from diloco.syncer.core import LOOK_EVERY_S, Room
from diloco.syncer.journal_files import Position
from diloco.syncer.lease import Lease, LeaseError, LeaseHolder, remembered, try_to_lead
from diloco.syncer.options import RunPlan, SyncerOptions
from diloco.syncer.publish import Holdings
from diloco.syncer.restoring import Known, begin_lineage
from diloco.syncer.spool import SpoolError
from diloco.syncer.store import Store
from diloco.wire.chunks import ChunkError, check_next
from diloco.wire.client import FollowClient, FollowStream
from diloco.wire.messages import (
    STOPS,
    Alive,
    Chunk,
    FollowAck,
    Follows,
    FollowStart,
    Item,
    Refusal,
    Refused,
    Status,
    Unreachable,
)
from diloco.wire.options import SecurityOptions, ServerOptions
from diloco.wire.server import RunningServer

if TYPE_CHECKING:
    from diloco.syncer.replaying import Replayer
    from diloco.wire.messages import FollowPart, ProbeAnswer, ProbeAsk


class Incoming:
    """One incoming item. Raises ``DiskFullError`` when the disk is full: ``discard`` it, it will be sent again."""

    def __init__(self, store: Store, item: Item) -> None:
        self.item = item
        self._disk = disk = store.disk if item.name else PLAIN_DISK
        self._hash = hashlib.sha256()
        self._path: Path | None = None
        self._file: BinaryIO = io.BytesIO()  # For a unit of the journal, which stays in memory.
        if item.name:
            kind, folder, name = item.name.split("/")
            target = store.folder / kind / (f".incoming-{folder}" if kind == "snapshots" else folder)
            self._path, self._beside = target / name, target / f".{name}.tmp"
            with full_in_words():
                disk.make_folder(target, Step.STANDBY_FILE)
                disk.sync_folder(store.folder, Step.STANDBY_FILE)  # The first lineage creates the lineages folder.
                self._file = disk.open(self._beside, "wb", Step.STANDBY_FILE, buffering=0)
        self._offset = 0

    def accept(self, chunk: Chunk) -> None:
        """Append one chunk."""
        try:
            check_next(chunk, self._offset, self.item.item_bytes)
        except ChunkError as error:
            raise Unreachable(f"Follow: {error}") from error
        self._hash.update(chunk.data)
        with full_in_words():
            self._disk.write(self._file, chunk.data, Step.STANDBY_FILE)
        self._offset += len(chunk.data)

    @property
    def complete(self) -> bool:
        """Whether every byte has arrived."""
        return self._offset == self.item.item_bytes

    def finish(self) -> bytes:
        """Verify the digest. A file is durable under its name when this returns; a unit's bytes are returned."""
        if self._hash.hexdigest() != self.item.digest:
            raise Unreachable(f"Follow: {self.item.name or 'a unit'} is not what was declared")
        if self._path is None:
            self._file.seek(0)
            return self._file.read()
        self._disk.sync(self._file, Step.STANDBY_FILE)
        self._file.close()
        with full_in_words():
            self._disk.rename(self._beside, self._path, Step.STANDBY_FILE)
        self._disk.sync_folder(self._path.parent, Step.STANDBY_FILE)
        self._disk.sync_folder(self._path.parent.parent, Step.STANDBY_FILE)
        return b""

    def discard(self) -> None:
        """Delete the incomplete item."""
        self._file.close()
        if self._path is not None:
            self._disk.remove(self._beside, Step.STANDBY_FILE)


ANEW = "move {} away and run the same `diloco standby follow` again, which copies the whole run"
REPLICATES = "start that syncer with cluster.replication.mode=sync, or async"
BEHIND_MAX = 1024
"""Turns that are durable here and not replayed yet; at this many the standby takes nothing more: the syncer waits."""
PAUSE_S = 0.5
HEARS_TIMES = 2.0
"""A syncer with nothing new sends ``Alive`` every ``alive_s``; silent for this many times that, it counts as gone."""
HEARS_EVERY_S = 0.01


class StandbyError(RuntimeError):
    """The standby cannot continue to follow; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Warm:
    """The result of a promotion: the open folder with its lock, and the state as of its last record."""

    store: Store
    machine: OuterSync
    holdings: Holdings
    taken: ExitStack
    epoch: int = 0
    """The epoch to begin with if there is no lease to give one."""
    leadership: LeaseHolder | None = None
    """Set if the standby has taken the lease already."""
    mode: str = ""
    """The replication mode of the syncer that it followed; "" where it has not heard that since its own start."""


@dataclass(eq=False, repr=False)
class Standby:
    """Follows until it is stopped or promoted. Use: ``start``, perhaps ``promote``, and always ``close``."""

    name: str
    options: SyncerOptions
    plan: RunPlan
    client: FollowClient
    emit: Callable[[str, dict[str, object]], None]
    disk: Disk = PLAIN_DISK

    def __post_init__(self) -> None:
        self.identity = self.name
        """After ``start`` the folder's unique name."""
        self.folder = Path(self.options.folder)
        self._rules = self.plan.rules(self.options)
        self._taken = ExitStack()
        self._stopping = threading.Event()
        self._cancel: Callable[[], None] = lambda: None
        """Ends the present stream."""
        self._replayer: Replayer | None = None
        self._orders: queue.Queue[list[Record] | Position | None] = queue.Queue(BEHIND_MAX)
        self._threads: list[threading.Thread] = []
        self._incoming: Incoming | None = None
        self._began_at: Position | None = None
        self.connected = False
        self._waits: bool | None = None
        """Whether the syncer waits for a standby that is away; not known before this process has heard it."""
        self._at_earlier = False
        """Whether it sends the digest of an earlier release, because the syncer refused the present one."""
        self.left = False
        """Whether the syncer's last message was that it stops."""
        self._trouble: str | None = None
        self.acked = (0, 0)
        self.heard_s = time.monotonic()
        self.failed: BaseException | None = None

    # --- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Lock the folder, recover it up to its last record, and begin to follow.

        Raises ``LockedError`` when another process has the folder, ``StoreError`` when it cannot be continued.
        """
        self._taken.enter_context(locked(self.folder))
        self._room = Room(self.folder, self.options.disk_reserve_mb * 1_000_000, lambda why: None)
        self.identity = remembered(self.folder, self.disk, self.name).name
        self.store = Store(self.folder, self.plan.card, self.disk, self.options.retention, self.emit)
        self._taken.callback(self.store.journal.close)
        if not self.store.is_new():
            self._replayer = self.store.recover(self._rules)
        for work in (self._run, self._carry_out, self._look_after_folder):
            thread = threading.Thread(target=self._guarded, args=(work,), name="standby", daemon=True)
            self._threads.append(thread)
            thread.start()

    def state(self) -> OuterState | None:
        """A recent state of the run; None while there is none to continue from."""
        replayer = self._replayer
        return replayer.machine.state if replayer is not None and self.failed is None else None

    def still_hears(self) -> bool:
        """Return whether the syncer sends anything within the time in which it must; do not call this in the thread
        that follows."""
        asked_s = time.monotonic()
        while self.connected and time.monotonic() - asked_s < HEARS_TIMES * self.options.replication.alive_s:
            if self.heard_s > asked_s:
                return True
            time.sleep(HEARS_EVERY_S)
        return False

    def may_lack(self) -> str | None:
        """Return why the syncer may have told sites something that this standby lacks; None if it cannot have."""
        state = self.state()
        if state is not None and state.detached:
            return "the syncer did not wait for this standby when it last sent anything"
        if self._waits is None:
            return (
                f"this standby has not heard the syncer in the {time.monotonic() - self.heard_s:.0f} s since its own "
                "start, and before that the run may have gone on without it, by an operator's detach (`diloco standby "
                "status` shows the versions that it has)"
            )
        if not self._waits:
            return "the syncer goes on without a standby that is away, because it does not replicate in mode sync"
        return None

    def promote(self) -> Warm:
        """Stop following and return what a syncer needs; raise ``StandbyError`` if there is no state to continue."""
        self._end()
        if self.failed is not None or self._replayer is None:
            raise StandbyError(
                f"standby {self.name} has no state to continue from: {self.failed or 'it has followed no syncer'}"
            )
        machine = self._replayer.machine
        epoch = promoted_epoch(machine.state.epoch, int(time.time()))
        mode = "" if self._waits is None else "sync" if self._waits else "async"
        return Warm(self.store, machine, self._replayer.holdings, self._taken.pop_all(), epoch, mode=mode)

    def close(self) -> None:
        """Stop following; release the folder, unless it was handed over."""
        self._end()
        self._taken.close()

    def _end(self) -> None:
        self._stopping.set()
        self._cancel()
        self.client.close()
        for thread in self._threads:
            thread.join()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.fail(error)

    def _look_after_folder(self) -> None:
        """Raise ``StandbyError`` once the folder is not the locked one any more: what is acknowledged would be lost."""
        while not self._stopping.wait(LOOK_EVERY_S):
            if (lost := self._room.lost()) is not None:
                raise StandbyError(lost)

    def fail(self, error: BaseException) -> None:
        """Record a fatal error, which ``StandingBy.wait`` then raises; any thread may call this."""
        if (lost := self._room.lost()) is not None:  # It explains whichever file was missing first.
            error = StandbyError(lost)
        self.failed = self.failed or error
        self.emit("failed", {"why": str(error) or repr(error)})
        self._stopping.set()
        self._cancel()

    def status(self) -> dict[str, object]:
        """The standby's status, for ``diloco status``."""
        replayer = self._replayer
        versions = [fragment.version for fragment in replayer.machine.state.fragments] if replayer is not None else []
        return {
            "role": "standby",
            "name": self.name,
            "following": self.connected,
            "heard_seconds_ago": round(time.monotonic() - self.heard_s, 1),
            "versions": versions,
            "epoch": replayer.machine.state.epoch if replayer is not None else 0,
            "turns_behind": self._orders.qsize(),
            "trouble": self._trouble,
            "failed": str(self.failed) if self.failed is not None else None,
        }

    # --- following ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    self._follow()
                except Unreachable as error:
                    self.left = STOPS in error.why or (self.left and not self.connected)
                    self._lost(error.why)
                except DiskFullError as error:
                    self._wait_for_room(error)
                except Refused as error:
                    # A syncer of an earlier release has another digest for the same run.
                    may_be = "shared_digest" in error.text and bool(self.plan.earlier_digest)
                    self._at_earlier = may_be and not self._at_earlier
                    if self._replayer is not None and "empty folder" in error.text:
                        raise StandbyError(f"{error.text}; {ANEW.format(self.folder)}") from error
                    if error.final:  # Another standby follows.
                        raise StandbyError(error.text) from error
                    if error.status is Status.UNIMPLEMENTED:
                        self._lost(f"{self.client.address} replicates to no standby: {REPLICATES}")
                    elif not self._at_earlier:
                        self._lost(error.text)
        finally:
            self._orders.put(None)
            self._let_go()

    def _lost(self, why: str) -> None:
        if self.connected:
            self.emit("disconnected", {"why": why})
        elif why != self._trouble and not self._stopping.is_set():
            self.emit("note", {"note": "not_following", "why": why})
        self.connected, self._trouble = False, why
        self._let_go()
        self._stopping.wait(PAUSE_S)

    def _let_go(self) -> int:
        """Discard the incoming item; return its size in bytes."""
        incoming, self._incoming = self._incoming, None
        if incoming is None:
            return 0
        incoming.discard()
        return incoming.item.item_bytes

    def _wait_for_room(self, error: DiskFullError) -> None:
        """Wait for disk space. The stream has ended, so nothing is acknowledged until it begins again."""
        wanted = self._let_go()
        self.store.let_go_of_the_past()
        self.emit("note", {"note": "disk_full", "why": f"disk full: {error.strerror}; the standby does not follow"})
        self.connected, self._trouble = False, f"disk full: {error.strerror}"
        while not self._stopping.wait(LOOK_EVERY_S) and (why := self._room.wanting(wanted)) is not None:
            self._trouble = why

    def _follow(self) -> None:
        self.store.journal.flush()  # The last mark may have found no space ...
        if self._replayer is None and not self.store.is_new():  # ... or the first one.
            self._replayer = self.store.recover(self._rules)
        card, journal = self.store.card, self.store.journal
        end = (journal.index, journal.chain.hex()) if self._replayer is not None else (0, "")
        shared = card.earlier_digest if self._at_earlier else card.shared_digest
        start = FollowStart(card.run_id, self.identity, card.layout_fingerprint, shared, *end)
        with self.client.follow(start) as stream:
            self._cancel = stream.cancel
            for part in stream:
                if self._stopping.is_set():
                    return
                self.heard_s = time.monotonic()
                self._take(part, stream)

    def _take(self, part: FollowPart, stream: FollowStream) -> None:
        match part:
            case Follows():
                if part.anew != (self._replayer is None):
                    raise StandbyError(f"the syncer did not begin where it was asked to: {ANEW.format(self.folder)}")
                self._began_at = Position(part.segment, part.chain) if part.anew else None
                for leftover in self.store.snapshots.folder.glob(".incoming-*"):
                    self.disk.remove(leftover, Step.SNAPSHOT_PRUNE)
                self.connected, self.left, self._trouble = True, False, None
                self._waits = part.waits
                self.emit("connected", {"anew": part.anew, "syncer": self.client.address})
            case Item():
                self._incoming = Incoming(self.store, part)
            case Chunk():
                if self._incoming is None:
                    raise StandbyError("a chunk arrived without an item")
                self._incoming.accept(part)
            case Alive():
                stream.ack(FollowAck(*self.acked))
        if self._incoming is not None and self._incoming.complete:
            incoming, data = self._incoming, self._incoming.finish()
            self._incoming = None
            if not incoming.item.name:
                self._unit(incoming.item, data)
                self.acked = (incoming.item.segment, incoming.item.offset + incoming.item.item_bytes)
                stream.ack(FollowAck(*self.acked))

    def _unit(self, item: Item, data: bytes) -> None:
        """Write one unit of the journal; it is durable when this returns."""
        found = list(units(data))
        if len(found) != 1 or found[0].end != len(data):
            raise StandbyError(f"unit at byte {item.offset} of segment {item.segment} is not whole")
        (unit,) = found
        journal = self.store.journal
        if unit.kind == HEADER and self._began_at is not None:
            self._begin(self._began_at)
            self._began_at = None
        elif unit.kind == HEADER:
            self._orders.put(journal.rotate())
        elif unit.kind == FRAME and chain_after(journal.chain, unit.body) == unit.chain:
            records = decode_records(unit.body, item.offset)
            journal.append_body(unit.body)
            try:
                journal.flush()
            finally:
                self._orders.put(records)  # Also if only its mark finds no space: the frame is written.
        if journal.chain != unit.chain:
            raise StandbyError(
                f"byte {item.offset} of segment {item.segment} does not continue the journal here: "
                f"{ANEW.format(self.folder)}"
            )

    def _begin(self, place: Position) -> None:
        """Make a syncer's folder from the complete snapshot and an empty journal after it.

        The journal first: a folder with only an empty journal counts as new, a snapshot without a journal does not.
        """
        self.store.journal.begin(place)
        self.store.journal.close()
        folder = self.store.snapshots.folder
        for path in sorted(folder.glob(".incoming-*")):
            self.disk.rename(path, folder / path.name.removeprefix(".incoming-"), Step.SNAPSHOT_RENAME)
        self.disk.sync_folder(folder, Step.SNAPSHOT_FOLDER)
        self._replayer = self.store.recover(self._rules)

    # --- carrying out ------------------------------------------------------------------------------------------------

    def _carry_out(self) -> None:
        """Replay the received records. Runs in the second thread."""
        while (order := self._orders.get()) is not None:
            if self.failed is not None:
                continue  # Already durable; only empty the queue, so that the first thread can end.
            replayer = self._replayer
            assert replayer is not None
            try:
                if isinstance(order, Position):
                    self._snapshot(replayer, order)
                    continue
                for record in order:
                    self.store.carried_out(replayer.apply(record))
                    if isinstance(record.event, Sealed):
                        self._clear_outbox(replayer.machine.state, record.event)
            except (JournalError, SpoolError) as error:
                # The record is durable, but a standby that computes other bits must not continue.
                self.fail(StandbyError(str(error)))
            except Exception as error:
                self.fail(error)

    def _clear_outbox(self, state: OuterState, sealed: Sealed) -> None:
        """Delete a region's updates for the syncer above that are no longer in flight.

        Only those before ``sealed``: their numbers are not used again. A file with a later number may be a new one that
        the other thread has just written.
        """
        assert state.upstream is not None, sealed
        listed = state.upstream.parts[sealed.fragment].progress.in_flight
        kept = {sent.sequence for sent in listed}
        for path in (self.folder / OUTBOX).glob(f"{sealed.fragment}-*.update"):
            sequence = int(path.stem.partition("-")[2])
            if sequence < sealed.sequence and sequence not in kept:
                self.disk.remove(path, Step.OUTBOX_DROP)

    def _snapshot(self, replayer: Replayer, place: Position) -> None:
        began = time.monotonic()
        try:
            size = self.store.snapshot_writer(replayer.machine, list(replayer.values), place)()
        except DiskFullError as error:  # The journal has its contents, and another will follow.
            self.emit("note", {"note": "snapshot_put_off", "why": f"disk full: {error.strerror}"})
            self.store.let_go_of_the_past()
            return
        self.emit("snapshot", {"seconds": round(time.monotonic() - began, 4), "bytes": size})


LOOK_SHARE = 1 / 20
LOSSY = "an operator promoted {name}, which may have lacked what was acknowledged before"


def begun_anew(warm: Warm, why: str, clock_s: int) -> Warm:
    """Return ``warm`` in a new lineage, which begins with its values as every fragment's next version."""
    machine, values = warm.machine, warm.holdings.values
    begin_lineage(warm.store, machine, values, None, why, Known(clock_s))
    warm.holdings.begin_again([replace(each, version=each.version + 1) for each in values])
    return warm


ANSWER_S = 0.5
"""The operator's promotion call is answered within this time, before the address is released."""


@dataclass(eq=False, repr=False)
class StandingBy:
    """A standby's process. Use: ``start``, ``wait`` until it returns what a syncer continues with, and always ``stop``.

    It serves the address from the start, so that a setting that cannot work shows before it is needed, and sites that
    come too early learn where to go: it satisfies ``wire.handlers.SyncerApi`` itself.
    """

    standby: Standby
    primary: str
    network: ServerOptions
    security: SecurityOptions
    lease: Lease | None = None

    def __post_init__(self) -> None:
        self.promoted = threading.Event()
        """Set when an operator or the lease makes the standby take over."""
        self.lossy = False
        self._server: RunningServer | None = None
        self._leadership: LeaseHolder | None = None
        self._standing: Standing | None = None
        self._vacant = False
        self._trouble: str | None = None
        self._taken = ExitStack()  # What an end stops, the last first.
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(self.lease,), name="succession", daemon=True)

    def start(self) -> str:
        """Begin to follow and to serve; return the address."""
        self.standby.start()
        emit = self.standby.emit
        self._server = RunningServer(
            self, self.network, self.security, lambda what, why: emit("note", {"note": what, "why": why})
        )
        self._taken.callback(self._server.stop, ANSWER_S)
        self._server.start(ready=False)
        if self.lease is not None:
            self._thread.start()
            self._taken.callback(self._thread.join)
            self._taken.callback(self._stopping.set)
        return self._server.address

    def wait(self, timeout_s: float) -> Warm | None:
        """Return what the standby hands over once it is promoted (the address is free then), or None if it is not yet.

        Raises the error that ended the following early, if any.
        """
        promoted = self.promoted.wait(timeout_s)
        if self.standby.failed is not None:
            raise self.standby.failed
        if not promoted:
            return None
        self._taken.close()
        warm = self.standby.promote()
        leadership, self._leadership = self._leadership, None
        if leadership is not None:
            return replace(warm, leadership=leadership)
        return begun_anew(warm, LOSSY.format(name=self.standby.identity), int(time.time())) if self.lossy else warm

    @property
    def ended(self) -> bool:
        """Whether the standby may end: the run is over, and the syncer has said that it stops."""
        state = self.standby.state()
        is_over = state is not None and state.phase is Phase.ENDED and state.ending is Ending.FINISHED
        return is_over and self.standby.left and not self.promoted.is_set()

    def stop(self) -> None:
        """Stop serving and following. What was handed over stays open; a lease that was not is left to expire."""
        self._taken.close()
        if self._leadership is not None:
            self._leadership.stop(release=False)
        self.standby.close()

    # --- the lease ---------------------------------------------------------------------------------------------------

    def _watch(self, lease: Lease) -> None:
        """Take over once the lease is free for this standby. Runs in its own thread."""
        try:
            while self._leadership is None and not self._stopping.wait(lease.ttl_s * LOOK_SHARE):
                self._look(lease)
            if self._leadership is not None:
                self.promoted.set()
        except Exception as error:
            text = f"this standby no longer watches the lease {lease.place}: {type(error).__name__}: {error}"
            self.standby.fail(StandbyError(text))

    def _look(self, lease: Lease) -> None:
        """Take the lease if it is free for this standby."""
        standby, why = self.standby, None
        try:
            self._standing, self._vacant = lease.read()
            state = standby.state()
            if state is not None and may_take_over(self._standing, standby.identity):  # Most standbys cannot at first.
                self._leadership = try_to_lead(lease, standby.store, state, by_itself=True)
        except LeaseError as error:
            why = str(error)
        except OSError as error:
            if not is_full(error):
                raise
            why = f"disk full: {error.strerror}"  # Taken or not, a retry is safe.
        if why is not None and self._trouble is None:
            standby.emit("note", {"note": "lease", "why": why})
        self._trouble = why

    def refusal(self, *, lossy: bool) -> str | None:
        """Return why an operator's command to take over cannot be followed now; None when it can."""
        anew = "promote this one with --lossy, which begins a new lineage with what it has"
        if self.lease is None:
            if lossy:
                return None
            if self.standby.still_hears():
                return (
                    "this standby still hears the syncer that it follows: stop that first, so that never two lead; or "
                    f"{anew}, and everything that the other tells from then on is lost"
                )
            why = self.standby.may_lack()
            return why and f"{why}, so that this standby may lack what was told: start that one again; or {anew}"
        if self._trouble is not None or self._standing is None:
            return f"the state of the lease {self.lease.place} is not known: {self._trouble or 'it was not read yet'}"
        standing, name = self._standing, self.standby.identity
        if not self._vacant:
            itself = ", and this standby takes over by itself then" if standing.heir == name else ""
            return (
                f"{standing.holder} holds the lease {self.lease.place}: stop it, or wait until it has expired{itself}"
            )
        if not lossy and name not in (standing.heir, standing.holder):
            return (
                f"{name} is not the heir of {standing.holder} and may lack what was acknowledged there: start that, "
                f"or {anew}"
            )
        return None

    # --- answers -----------------------------------------------------------------------------------------------------

    def elsewhere(self, *asked: object, **named: object) -> NoReturn:
        """Refuse: only the syncer knows what it has told sites, and that may not have arrived here yet."""
        del asked, named
        raise Refusal(Status.UNAVAILABLE, f"this is the standby of {self.primary}: ask there")

    join = open_push = watch = pull = has_newer = report = leave = elsewhere
    drain = evict = readmit = admit = refuse = snapshot = detach = elsewhere

    def probe(self, ask: ProbeAsk) -> ProbeAnswer:
        """Answer a probe: a site tests the connection that it needs once this standby takes over."""
        return replace(probed(self.standby.plan, ask), standby_of=self.primary)

    def status(self) -> dict[str, object]:
        """The standby's status, with the lease as it sees it."""
        server, standing = self._server, self._standing or Standing(0, 0, "")
        lease: dict[str, object] | None = None
        if self.lease is not None:
            lease = {
                "place": self.lease.place,
                "epoch": standing.epoch,
                "holder": standing.holder,
                "is_heir": standing.heir == self.standby.identity,
                "vacant": self._vacant,
                "trouble": self._trouble,
            }
        return {
            **self.standby.status(),
            "primary": self.primary,
            "lease": lease,
            "identity_complaints": server.complaints() if server is not None else [],
        }

    def promote(self, *, lossy: bool) -> None:
        """Take over as soon as everything received is replayed."""
        if self.standby.state() is None:
            raise Refusal(Status.FAILED_PRECONDITION, "this standby has no state to continue from yet")
        if (why := self.refusal(lossy=lossy)) is not None:
            raise Refusal(Status.FAILED_PRECONDITION, why)
        self.lossy = lossy
        self.promoted.set()
