"""A standby: a second data folder that follows the first, and a machine that is warm when it is needed.

One thread takes what the syncer sends and lays it down as the syncer did: a payload before the frame that names it, the
frame synced and marked before it is acknowledged.  ``Incoming`` takes each item: a file beside its place, or a unit of
the journal in memory.  A second thread carries the records out, as a recovery would, so that every version is computed
and compared here; it writes a snapshot where the syncer's journal was cut for one.  The folder is a syncer's folder at
every instant: a process that starts on it goes on from there.

A full disk ends no standby.  It lets go of the past that only a replay wants, stops following and so acknowledging, in
words, and goes on from where its journal ends when there is room.
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.durable import PLAIN_DISK, DiskFullError, Step, is_full, locked
from diloco.sync.effects import LetGo, TellFate
from diloco.sync.events import Ending, Sealed
from diloco.sync.journal import FRAME, HEADER, JournalError, chain_after, decode_records, units
from diloco.sync.members import promoted_epoch
from diloco.sync.region import OUTBOX
from diloco.sync.state import Phase
from diloco.sync.syncer import OuterSync
from diloco.syncer.holdings import Holdings
from diloco.syncer.journal_files import Position
from diloco.syncer.lease import LeaseHolder, remembered
from diloco.syncer.opening import open_store, recovered
from diloco.syncer.readiness import LOOK_EVERY_S, Room
from diloco.syncer.replaying import Replayer
from diloco.syncer.spool import SpoolError
from diloco.syncer.store import Store, StoreError
from diloco.wire.chunks import Assembler, ChunkError
from diloco.wire.messages import Alive, Chunk, Refused, Unreachable
from diloco.wire.replication import STOPS, FollowAck, Follows, FollowStart, Item

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import BinaryIO

    from diloco.durable import Disk
    from diloco.sync.journal import Record
    from diloco.sync.state import OuterState
    from diloco.syncer.options import RunPlan, SyncerOptions
    from diloco.wire.replication import FollowClient, FollowPart, FollowStream


class Incoming:
    """One item.  ``DiskFullError`` when a file finds no room: ``discard`` it, it will be sent again."""

    def __init__(self, store: Store, item: Item, disk: Disk) -> None:
        self.item = item
        self._disk = disk
        self._hash = hashlib.sha256()
        self._held = bytearray()
        self._path: Path | None = None
        self._file: BinaryIO | None = None
        if item.name:
            kind, folder, name = item.name.split("/")
            rooms = {"spool": store.spool.folder, "lineages": store.lineages.folder, "above": store.folder / "above"}
            above = rooms.get(kind, store.snapshots.folder)
            target = above / (f".incoming-{folder}" if kind == "snapshots" else folder)
            self._path = target / name
            with _full_in_words():
                disk.make_folder(target, Step.STANDBY_FILE)
                disk.sync_folder(above.parent, Step.STANDBY_FILE)  # The first lineage makes the folder of them.
                self._file = disk.open(self._beside(self._path), "wb", Step.STANDBY_FILE, buffering=0)
        self._assembler = Assembler(item.item_bytes, self._write)

    def _beside(self, path: Path) -> Path:
        return path.with_name(f".{path.name}.tmp")

    def _write(self, offset: int, data: memoryview) -> None:
        del offset
        self._hash.update(data)
        if self._file is None:
            self._held += data
            return
        with _full_in_words():
            self._disk.write(self._file, data, Step.STANDBY_FILE)

    def accept(self, chunk: Chunk) -> None:
        """Take one chunk."""
        try:
            self._assembler.accept(chunk.offset, chunk.data, chunk.crc32, chunk.xxh3)
        except ChunkError as error:
            raise Unreachable(f"Follow: {error}") from error

    @property
    def complete(self) -> bool:
        """Whether every byte is here."""
        return self._assembler.offset == self.item.item_bytes

    def finish(self) -> bytes:
        """Check the whole; a file is durable under its name when this returns, a unit is returned."""
        if self._hash.hexdigest() != self.item.digest:
            raise Unreachable(f"Follow: {self.item.name or 'a unit'} is not what was declared")
        if self._file is None or self._path is None:
            return bytes(self._held)
        self._disk.sync(self._file, Step.STANDBY_FILE)
        self._file.close()
        with _full_in_words():
            self._disk.rename(self._beside(self._path), self._path, Step.STANDBY_FILE)
        self._disk.sync_folder(self._path.parent, Step.STANDBY_FILE)
        self._disk.sync_folder(self._path.parent.parent, Step.STANDBY_FILE)
        return b""

    def discard(self) -> None:
        """The rest will not come: nothing of it is left."""
        if self._file is not None and self._path is not None:
            self._file.close()
            self._disk.remove(self._beside(self._path), Step.STANDBY_FILE)


@contextlib.contextmanager
def _full_in_words() -> Iterator[None]:
    """A failed sync is not among these: it is final, whatever it failed for."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise DiskFullError(error.errno, error.strerror) from error


BEHIND_MAX = 1024
"""Turns that are durable here and not carried out yet; then nothing more is taken, and the syncer waits."""
PAUSE_S = 0.5
HEARS_TIMES = 2.0
"""A syncer with nothing new says so every ``alive_s``: one that is silent for so many times that is not heard."""
HEARS_EVERY_S = 0.01


class StandbyError(RuntimeError):
    """The standby cannot go on following; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Warm:
    """What a promoted standby hands over: the open folder with its lock, and the state as of its last record."""

    store: Store
    machine: OuterSync
    holdings: Holdings
    taken: ExitStack
    epoch: int = 0
    """The one to begin with where there is no lease to give it."""
    leadership: LeaseHolder | None = None
    """Where the standby has taken the lease already."""


class Standby:
    """Follows until it is told to stop or to take over.  Use: ``start``, then ``promote`` or ``close``."""

    def __init__(
        self,
        name: str,
        options: SyncerOptions,
        plan: RunPlan,
        client: FollowClient,
        emit: Callable[[str, dict[str, object]], None],
        disk: Disk = PLAIN_DISK,
    ) -> None:
        self.name = self.identity = name
        """Once it has started the identity is its folder's own, by which no other one goes."""
        self.folder = Path(options.folder)
        self._options, self.plan, self._client, self.emit, self.disk = options, plan, client, emit, disk
        self._taken = ExitStack()
        self._stopping = threading.Event()
        self._stream: FollowStream | None = None
        self._replayer: Replayer | None = None
        self._orders: queue.Queue[list[Record] | Position | None] = queue.Queue(BEHIND_MAX)
        self._threads: list[threading.Thread] = []
        self._incoming: Incoming | None = None
        self._began_at: Position | None = None
        self.connected = False
        self._waits = options.replication.mode == "sync"  # Until the syncer says how it is there.
        self._at_earlier = False
        """Whether it goes by the digest of an earlier release, because the present one was refused."""
        self._left = False
        """Whether the syncer said that it stops, the last time that it said anything."""
        self._trouble: str | None = None
        self.acked = (0, 0)
        self.heard_s = time.monotonic()
        self.failed: BaseException | None = None

    # --- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Take the folder, bring what is there up to its last record, and begin to follow.

        ``LockedError`` when another process has the folder, ``StoreError`` when it cannot be continued.
        """
        try:
            self._taken.enter_context(locked(self.folder))
            self.identity = remembered(self.folder, self.disk, self.name).name
            self.store = open_store(self._options, self.plan, self.disk, self.emit)
            self._taken.callback(self.store.journal.close)
            if not self.store.is_new():
                self._recover()
        except BaseException:
            self._taken.close()
            raise
        for work in (self._run, self._carry_out):
            self._threads.append(threading.Thread(target=self._guarded, args=(work,), name="standby", daemon=True))
        for thread in self._threads:
            thread.start()

    def _recover(self) -> None:
        options, plan = self._options, self.plan
        found = recovered(self.store, options, plan, self.emit)
        replayer = Replayer(
            found.machine,
            found.holdings.values,
            self.store.spool,
            plan.rule,
            options.down_codec,
            options.downlinks_kept,
            self.store.lineages,
        )
        replayer.holdings = found.holdings
        self._replayer = replayer

    @property
    def ready(self) -> bool:
        """Whether there is a state to take over with."""
        return self.state() is not None

    def state(self) -> OuterState | None:
        """How the run stood at some instant of late; None while there is nothing to take over with."""
        replayer = self._replayer
        return replayer.machine.state if replayer is not None and self.failed is None else None

    def still_hears(self) -> bool:
        """Whether the syncer says anything, within the time in which it would; not to be asked in the thread that
        follows."""
        asked_s = time.monotonic()
        while self.connected and time.monotonic() - asked_s < HEARS_TIMES * self._options.replication.alive_s:
            if self.heard_s > asked_s:
                return True
            time.sleep(HEARS_EVERY_S)
        return False

    def may_lack(self) -> str | None:
        """Why the syncer may have told what is not here, as far as can be known here; None where it cannot have."""
        state = self.state()
        if state is not None and state.detached:
            return "the syncer did not wait for this standby when it was last heard"
        if not self._waits:
            return "the syncer goes on without a standby that is away, because it does not replicate in mode sync"
        return None

    def promote(self) -> Warm:
        """Stop following and hand everything over; ``StandbyError`` when there is nothing that could go on."""
        self._end()
        if self.failed is not None or self._replayer is None:
            self._taken.close()
            raise StandbyError(
                f"standby {self.name} has no state to go on from: {self.failed or 'it has followed nobody'}"
            )
        machine = self._replayer.machine
        epoch = promoted_epoch(machine.state.epoch, int(time.time()))
        return Warm(self.store, machine, self._replayer.holdings, self._taken, epoch)

    def close(self) -> None:
        """Stop following and let go of the folder."""
        self._end()
        self._taken.close()

    def _end(self) -> None:
        self._stopping.set()
        stream = self._stream
        if stream is not None:
            stream.cancel()
        self._client.close()
        for thread in self._threads:
            thread.join()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Nothing can go on: whoever waits for the standby raises ``error``; from any thread."""
        self.failed = self.failed or error
        self.emit("failed", {"why": str(error) or repr(error)})
        self._stopping.set()
        if self._stream is not None:
            self._stream.cancel()

    @property
    def ended(self) -> bool:
        """Whether the run is over and the syncer has stopped in order: there is nothing left to stand by for."""
        state = self.state()
        return self._left and state is not None and state.phase is Phase.ENDED and state.ending is Ending.FINISHED

    def status(self) -> dict[str, object]:
        """How it stands, for ``diloco status``."""
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
                    self._left = STOPS in error.why or (self._left and not self.connected)
                    self._lost(error.why)
                except DiskFullError as error:
                    self._wait_for_room(error)
                except Refused as error:
                    self._at_earlier = not self._at_earlier and self._is_of_earlier(error)
                    if self._at_earlier:
                        continue
                    if self._replayer is None or "empty folder" not in error.text:
                        self._lost(error.text)
                        continue
                    raise StandbyError(error.text) from error
        finally:
            self._orders.put(None)
            self._let_go()

    def _is_of_earlier(self, error: Refused) -> bool:
        """Whether the syncer may be of an earlier release, which has another digest for the same run."""
        return "shared_digest" in error.text and bool(self.plan.earlier_digest)

    def _lost(self, why: str) -> None:
        if self.connected:
            self.emit("disconnected", {"why": why})
        elif why != self._trouble:
            self.emit("note", {"note": "not_following", "why": why})
        self.connected, self._trouble = False, why
        self._let_go()
        self._stopping.wait(PAUSE_S)

    def _let_go(self) -> int:
        """Of what was on its way in; its size."""
        incoming, self._incoming = self._incoming, None
        if incoming is None:
            return 0
        incoming.discard()
        return incoming.item.item_bytes

    def _wait_for_room(self, error: DiskFullError) -> None:
        """The stream is over, and so nothing is acknowledged until it begins again."""
        wanted = self._let_go()
        if self._replayer is not None:
            self.store.let_go_of_the_past()
        self.emit("note", {"note": "disk_full", "why": f"disk full: {error.strerror}; the standby does not follow"})
        self.connected, self._trouble = False, f"disk full: {error.strerror}"
        room = Room(self.folder, self._options.disk_reserve_mb * 1_000_000, lambda why: None)
        while not self._stopping.wait(LOOK_EVERY_S) and (why := room.wanting(wanted)) is not None:
            self._trouble = why

    def _follow(self) -> None:
        self.store.journal.flush()  # The last mark may have found no room ...
        if self._replayer is None and not self.store.is_new():  # ... or the first one.
            self._recover()
        segment, chain = (
            (0, "") if self._replayer is None else (self.store.journal.index, self.store.journal.chain.hex())
        )
        card = self.store.card
        shared = card.earlier_digest if self._at_earlier else card.shared_digest
        start = FollowStart(card.run_id, self.identity, card.layout_fingerprint, shared, segment, chain)
        with self._client.follow(start) as stream:
            self._stream = stream
            for part in stream:
                if self._stopping.is_set():
                    return
                self.heard_s = time.monotonic()
                self._take(part, stream)

    def _take(self, part: FollowPart, stream: FollowStream) -> None:
        match part:
            case Follows():
                if part.anew != (self._replayer is None):
                    raise StandbyError(
                        "the syncer began somewhere else than was asked: give the standby an empty folder"
                    )
                self._began_at = Position(part.segment, part.chain) if part.anew else None
                for leftover in self.store.snapshots.folder.glob(".incoming-*"):
                    self.disk.remove(leftover, Step.SNAPSHOT_PRUNE)
                self.connected, self._left, self._trouble = True, False, None
                self._waits = part.waits
                self.emit("connected", {"anew": part.anew})
            case Item():
                self._incoming = Incoming(self.store, part, self.disk)
            case Chunk():
                if self._incoming is None:
                    raise StandbyError("a chunk came of nothing")
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
        """One unit of the journal: durable when this returns."""
        found = list(units(data))
        if len(found) != 1 or found[0].end != len(data):
            raise StandbyError(f"unit at byte {item.offset} of segment {item.segment} is not whole")
        (unit,) = found
        journal = self.store.journal
        if unit.kind == HEADER and self._began_at is not None:
            self._begin(self._began_at)
            self._began_at = None
        elif unit.kind == HEADER:
            place = journal.rotate()
            self._orders.put(place)
        elif unit.kind == FRAME and chain_after(journal.chain, unit.body) == unit.chain:
            records = decode_records(unit.body, item.offset)
            journal.append_body(unit.body)
            try:
                journal.flush()
            finally:
                self._orders.put(records)  # Also where only its mark finds no room: it is in the journal.
        if journal.chain != unit.chain:
            raise StandbyError(
                f"byte {item.offset} of segment {item.segment} does not go on from the journal here: "
                "give the standby an empty folder"
            )

    def _begin(self, place: Position) -> None:
        """The snapshot is here whole: it and an empty journal behind it are a syncer's folder.

        The journal first: one without an event is taken for a folder that is new, a snapshot without a journal is not.
        """
        self.store.journal.begin(place)
        self.store.journal.close()
        folder = self.store.snapshots.folder
        for path in sorted(folder.glob(".incoming-*")):
            self.disk.rename(path, folder / path.name.removeprefix(".incoming-"), Step.SNAPSHOT_RENAME)
        self.disk.sync_folder(folder, Step.SNAPSHOT_FOLDER)
        self._recover()

    # --- carrying out ------------------------------------------------------------------------------------------------

    def _carry_out(self) -> None:
        """The second thread."""
        while (order := self._orders.get()) is not None:
            if self.failed is not None:
                continue  # What comes is durable; the first thread must find room to end.
            replayer = self._replayer
            assert replayer is not None
            try:
                if isinstance(order, Position):
                    self._snapshot(replayer, order)
                    continue
                for record in order:
                    for effect in replayer.apply(record):
                        if isinstance(effect, TellFate):
                            self.store.decided(effect.site, effect.fate)
                        elif isinstance(effect, LetGo):
                            self.store.release(effect.payload)
                    if isinstance(record.event, Sealed):
                        self._clear_outbox(replayer.machine.state, record.event)
            except (JournalError, SpoolError) as error:
                # It is durable here all the same; but whoever computes other bits than the syncer must not go on.
                self.fail(StandbyError(str(error)))
            except Exception as error:
                self.fail(error)

    def _clear_outbox(self, state: OuterState, sealed: Sealed) -> None:
        """Drop a region's updates for above that are in flight no more.

        Only those before ``sealed``: their numbers do not come again, and one that does may lie here anew already, laid
        down by the other thread.
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
        except DiskFullError as error:  # The journal has everything that would be in it, and another one will come.
            self.emit("note", {"note": "snapshot_put_off", "why": f"disk full: {error.strerror}"})
            self.store.let_go_of_the_past()
            return
        self.emit("snapshot", {"seconds": round(time.monotonic() - began, 4), "bytes": size})


__all__ = ["Standby", "StandbyError", "StoreError", "Warm"]
