"""The syncer's end of replication: what a standby gets, and what waits for it.

A standby gets what is durable here, read from the disk again: the journal's units byte for byte, before each of them
the payloads that it names, and for a standby that has nothing a snapshot first.  A region's payloads are also the
versions above that it has fetched, and its updates for there, which the heir may have to send again.  So there is one
way for the one that is far behind and for the one that is not, and nothing is buffered for either.

What is told when is decided in ``sync/replication``.
"""

from __future__ import annotations

import hashlib
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from diloco.sync.events import LineageBegan, Sealed, StandbyAttached, UpdateArrived, UpstreamFetched
from diloco.sync.journal import FRAME, HEADER, MARK, JournalError, chain_after, decode_records, units
from diloco.sync.region import OUTBOX, outbox_file
from diloco.sync.replication import MODES, Place, Replication
from diloco.syncer.snapshots import SnapshotError
from diloco.syncer.store import Pin, payloads_in
from diloco.wire.chunks import cut
from diloco.wire.messages import Alive, Chunk, Refusal, Status
from diloco.wire.replication import FollowAck, Follows, Item

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from diloco.syncer.core import Core
    from diloco.syncer.journal_files import Turn
    from diloco.syncer.lease import LeaseHolder
    from diloco.syncer.store import Store
    from diloco.wire.replication import FollowPart, FollowStart

CHUNK_BYTES = 512 * 1024


@dataclass(kw_only=True, slots=True)
class ReplicationOptions:
    """What waits for a standby.  One that says nothing for ``timeout_s`` is away; ``alive_s`` is how often it is asked
    when there is nothing new."""

    mode: str = "off"
    timeout_s: float = 5.0
    alive_s: float = 1.0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode is {self.mode!r}: one of {', '.join(MODES)}")
        if not 0 < self.alive_s < self.timeout_s:
            raise ValueError(
                f"timeout_s is {self.timeout_s!r}: longer than alive_s={self.alive_s!r}, which is positive"
            )


class Replicator:
    """Satisfies ``wire.replication.Following``.

    ``replicated`` is the decision loop's question about each turn (``Core``); the other methods are for any thread.
    """

    def __init__(
        self,
        options: ReplicationOptions,
        store: Store,
        lineage: Callable[[], int],
        emit: Callable[[str, dict[str, object]], None],
        leadership: LeaseHolder | None = None,
    ) -> None:
        """``lineage`` is the run's when it is asked."""
        self.options = options
        self.store = store
        self.lineage = lineage
        self._emit = emit
        self._leadership = leadership
        self.changed = threading.Condition()

    @property
    def acks_first(self) -> bool:
        """Whether an update is acknowledged before a standby has it."""
        return self.options.mode == "async"

    def begin(self, core: Core, *, detached: bool) -> None:
        """Before the first turn: the loop that waits for the standby, and how it was left."""
        self._core = core
        journal = self.store.journal
        end = (journal.index, journal.path(journal.index).stat().st_size)
        timeout_ns = round(self.options.timeout_s * 1e9)
        self.machine = Replication(self.options.mode, timeout_ns, end, time.monotonic_ns(), detached=detached)
        self.store.pinned = self._pinned

    # --- the decision loop's side ------------------------------------------------------------------------------------

    def replicated(self, turn: Turn) -> str | None:
        """Why nothing may be told of ``turn`` yet, or None."""
        with self.changed:
            durable, slow = self.machine.durable, self.machine.slow
            why, heir = self.machine.may_tell((turn.segment, turn.offset + len(turn.data)), time.monotonic_ns())
            if self.machine.durable > durable:
                self.changed.notify_all()
            if self.machine.slow and not slow:
                self._emit("standby_slow", {"standby": self.machine.standby})
            if why is None and self._leadership is not None:
                why = self._leadership.heir_is(heir)
            return why

    def detach(self) -> bool:
        """An operator's word, to be journalled by whoever calls this, right after; False when it is nothing new."""
        with self.changed:
            is_new = self.machine.detach()
        self._core.nudge()
        return is_new

    def attached(self) -> None:
        """The record that says so is durable here and there: from now on the standby is waited for."""
        with self.changed:
            self.machine.attached()

    def status(self) -> dict[str, object]:
        """For ``diloco status``."""
        with self.changed:
            machine, (segment, end) = self.machine, self.end()
            away_ns = machine.away_ns(time.monotonic_ns())
            return {
                "mode": self.options.mode,
                "standby": machine.standby if machine.follower is not None else "",
                "following": away_ns is None,
                "slow": machine.slow,
                "away_seconds": None if away_ns is None else round(away_ns / 1e9, 1),
                "detached": machine.detached,
                "behind_bytes": max(0, end - machine.acked[1]) if machine.acked[0] == segment else None,
            }

    def end(self) -> Place:
        """Up to where the journal is durable; also where no turn has come since a segment began."""
        return max(self.machine.durable, self.store.journal.begun)

    def _pinned(self) -> Pin | None:
        follower = self.machine.follower
        return follower.pin() if isinstance(follower, Follower) else None

    def waiting(self) -> set[str]:
        """The payloads of the updates that have no fate yet."""
        return set(self._core.ask(lambda machine: payloads_in(machine.snapshot()), early=True))

    # --- a standby's side --------------------------------------------------------------------------------------------

    def follow(self, start: FollowStart) -> Follower:
        """Serve a standby from where it is."""
        card = self.store.card
        if (name := card.difference(asdict(start))) is not None:
            theirs, ours = getattr(start, name)[:12], getattr(card, name)[:12]
            raise Refusal(Status.FAILED_PRECONDITION, f"{name} is {theirs} at the standby and {ours} here: another run")
        follower = Follower(self, start)
        with self.changed:
            self.machine.followed(follower, follower.name, follower.place, time.monotonic_ns())
        self._emit("standby_follows", {"standby": start.standby, "anew": start.segment == 0})
        return follower

    def heard(self, follower: Follower, place: Place) -> None:
        """``follower`` has everything up to ``place``."""
        with self.changed:
            attach, heir = self.machine.heard(follower, place, time.monotonic_ns())
            if heir and self._leadership is not None:
                self._leadership.name_heir(follower.name)
        if attach:
            self._core.post(StandbyAttached(follower.name))
        self._core.nudge()

    def gone(self, follower: Follower) -> None:
        """The stream of ``follower`` has ended."""
        with self.changed:
            was_served = self.machine.gone(follower)
        if was_served:
            self._emit("standby_away", {"standby": follower.name})
            self._core.nudge()


class Follower:
    """One standby being served; satisfies ``wire.replication.Followed``."""

    def __init__(self, replicator: Replicator, start: FollowStart) -> None:
        self.name = start.standby
        self._replicator = replicator
        self._store = replicator.store
        self._closed = False
        self._wrong: str | None = None
        self._anew = self._copying = start.segment == 0
        if self._anew:
            self._snapshot = self._newest()
            state, self._segment, self._chain = self._snapshot[1:]
            self._waiting = sorted(payloads_in(state))
            self._at = 0
        else:
            self._chain = start.chain
            self._segment, self._at = self._find(start)

    @property
    def place(self) -> Place:
        """What the standby has as it begins."""
        return (0, 0) if self._anew else (self._segment, self._at)

    def parts(self) -> Iterator[FollowPart]:
        """A snapshot if it is needed, then the journal for as long as the standby listens."""
        waits = self._replicator.options.mode == "sync"
        yield Follows(self._anew, self._segment, self._chain, self._replicator.lineage(), waits)
        if self._anew:
            yield from self._whole_snapshot()
            self._copying = False
        while not self._closed:
            yield from self._new_units()
            if not self._wait():
                yield Alive()
        if self._wrong is not None:
            raise Refusal(Status.INVALID_ARGUMENT, self._wrong)

    def pin(self) -> Pin:
        """What is still to be sent."""
        return Pin(int(self._snapshot[0].name) if self._anew and self._copying else 0, self._segment)

    def acknowledged(self, ack: FollowAck) -> None:
        """The standby has everything up to there.  One that says so of what there is not is believed nothing more."""
        place, end = (ack.segment, ack.offset), self._replicator.end()
        if place > end:
            self._wrong = (
                f"standby {self.name} acknowledged byte {ack.offset} of segment {ack.segment}, and the journal ends at "
                f"byte {end[1]} of segment {end[0]}"
            )
            self.close()
        else:
            self._replicator.heard(self, place)

    def close(self) -> None:
        """The standby is gone."""
        self._closed = True
        with self._replicator.changed:
            self._replicator.changed.notify_all()
        self._replicator.gone(self)

    def _wait(self) -> bool:
        """Wait for something new, a bounded time; whether there is."""
        replicator = self._replicator
        with replicator.changed:
            return replicator.changed.wait_for(
                lambda: self._closed or replicator.end() > (self._segment, self._at), replicator.options.alive_s
            )

    # --- what is sent ------------------------------------------------------------------------------------------------

    def _newest(self) -> tuple[Path, object, int, str]:
        for number in reversed(self._store.snapshots.numbers()):
            try:
                snapshot = self._store.snapshots.load(number)
            except SnapshotError:
                continue  # It is named when the syncer starts on it; a standby wants one that is whole.
            if snapshot.journal_chain:
                folder = self._store.snapshots.folder / f"{number:08d}"
                return folder, snapshot.state, snapshot.journal_segment, snapshot.journal_chain
        raise Refusal(Status.UNAVAILABLE, "there is no snapshot yet that a standby could begin with: come back")

    def _whole_snapshot(self) -> Iterator[FollowPart]:
        folder = self._snapshot[0]
        try:
            paths = sorted(folder.iterdir())
        except FileNotFoundError:
            raise self._too_slow(f"snapshots/{folder.name}") from None
        for path in paths:
            yield from self._file(f"snapshots/{folder.name}/{path.name}", path)
        for payload in self._waiting:
            yield from self._file(f"spool/{payload}", self._store.spool.folder / payload)
        for path in sorted((self._store.folder / OUTBOX).glob("*.update")):
            yield from self._update_for_above(f"{OUTBOX}/{path.name}")

    def _file(self, name: str, path: Path) -> Iterator[FollowPart]:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise self._too_slow(name) from None
        yield from _named(name, data)

    def _too_slow(self, name: str) -> Refusal:
        """``name`` went although it was pinned: the disk is full, or what the standby has kept here is too much."""
        if self._anew:
            return Refusal(Status.UNAVAILABLE, f"{name} is not kept any more: the copy begins again from what is")
        text = f"{name} is not kept any more: the standby is too far behind, give it an empty folder"
        return Refusal(Status.FAILED_PRECONDITION, text)

    def _find(self, start: FollowStart) -> Place:
        """Where the standby's next unit begins."""
        for unit in units(self._segment_bytes(start.segment)):
            if unit.kind != MARK and unit.chain.hex() == start.chain:
                return start.segment, unit.end
        for unit in units(self._segment_bytes(start.segment + 1)):  # The one before it may not be kept any more.
            if unit.kind == HEADER and chain_after(bytes.fromhex(start.chain), unit.body) == unit.chain:
                return start.segment + 1, 0
            break
        other = f"standby {start.standby} has a journal that this one does not go on from: give it an empty folder"
        raise Refusal(Status.FAILED_PRECONDITION, other)

    def _segment_bytes(self, segment: int) -> bytes:
        """A whole segment; nothing where it is not kept."""
        try:
            return self._store.journal.path(segment).read_bytes()
        except FileNotFoundError:
            return b""

    def _new_units(self) -> Iterator[FollowPart]:
        """Everything durable that was not sent yet."""
        while not self._closed and (self._segment, self._at) < (durable := self._replicator.end()):
            segment, end = durable
            path = self._store.journal.path(self._segment)
            try:
                with path.open("rb") as file:
                    file.seek(self._at)
                    data = file.read(end - self._at if segment == self._segment else -1)
            except FileNotFoundError:
                raise self._too_slow(f"journal/{path.name}") from None
            sent = 0
            for unit in units(data):
                if unit.kind == FRAME:
                    yield from self._payloads(unit.body, self._at + sent)
                if unit.kind != MARK:
                    raw = data[sent : unit.end]
                    digest = hashlib.sha256(raw).hexdigest()
                    yield from _item(Item("", self._segment, self._at + sent, len(raw), digest), raw)
                sent = unit.end
            self._at += sent
            if segment == self._segment:
                return
            self._segment, self._at = self._segment + 1, 0

    def _payloads(self, body: bytes, at: int) -> Iterator[FollowPart]:
        try:
            records = decode_records(body, at)
        except JournalError as error:
            raise Refusal(Status.FAILED_PRECONDITION, str(error)) from error
        for record in records:
            if isinstance(record.event, LineageBegan):
                yield from self._beginning(record.event.lineage)
            if isinstance(record.event, UpdateArrived | UpstreamFetched) and record.event.payload:
                yield from self._payload(record.event.payload)
            if isinstance(record.event, Sealed):
                yield from self._update_for_above(outbox_file(record.event.fragment, record.event.sequence))

    def _beginning(self, lineage: int) -> Iterator[FollowPart]:
        """The values that a lineage began with, before its record is sent: who has that cannot go back."""
        folder = self._store.lineages.folder / str(lineage)
        if not folder.exists():
            text = f"lineage {lineage} began with values that are not kept any more: give the standby an empty folder"
            raise Refusal(Status.FAILED_PRECONDITION, text)
        for path in sorted(folder.iterdir()):
            yield from self._file(f"lineages/{lineage}/{path.name}", path)

    def _payload(self, reference: str) -> Iterator[FollowPart]:
        """A payload that is here; that of an update that was not taken in is not, and nobody needs it."""
        name, path = f"spool/{reference}", self._store.spool.folder / reference
        if path.exists():
            yield from self._file(name, path)
        elif reference in self._replicator.waiting():
            text = f"{name} is missing on the syncer's disk, and its update has no fate yet: nothing can follow it"
            raise Refusal(Status.FAILED_PRECONDITION, text)

    def _update_for_above(self, name: str) -> Iterator[FollowPart]:
        """A sealed update; one that is not there any more is in flight no more."""
        with suppress(FileNotFoundError):
            data = (self._store.folder / name).read_bytes()
            yield from _named(name, data)


def _named(name: str, data: bytes) -> Iterator[FollowPart]:
    yield from _item(Item(name, 0, 0, len(data), hashlib.sha256(data).hexdigest()), data)


def _item(item: Item, data: bytes) -> Iterator[FollowPart]:
    yield item
    for each in cut([data], CHUNK_BYTES):
        yield Chunk(*each)
