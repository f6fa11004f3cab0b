"""The syncer's end of replication: what it sends to a standby, and what waits for the standby.

A standby gets what is durable here, read from the disk again: the journal's units byte for byte, before each of them
the payloads that it names, and, if it has nothing, a snapshot first. A region's payloads also include the versions
above that it has fetched, and its updates for the syncer above, which the heir may have to send again. So a standby far
behind and one close behind are served the same way, and nothing is buffered for either.

``sync/leadership.py`` decides what may be told when.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from diloco.sync.events import LineageBegan, Sealed, StandbyAttached, UpdateArrived, UpstreamFetched
from diloco.sync.journal import FRAME, HEADER, MARK, JournalError, chain_after, decode_records, units
from diloco.sync.leadership import MODES, Place, Replication
from diloco.sync.region import OUTBOX, outbox_file
from diloco.syncer.snapshots import SnapshotError
from diloco.syncer.store import Store, payloads_in
from diloco.wire.chunks import cut
from diloco.wire.messages import Alive, Chunk, FollowAck, FollowPart, Follows, FollowStart, Item, Refusal, Status

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from diloco.syncer.core import Core
    from diloco.syncer.lease import LeaseHolder

CHUNK_BYTES = 512 * 1024


@dataclass(kw_only=True, slots=True)
class ReplicationOptions:
    """What waits for a standby. A standby silent for ``timeout_s`` is away; with nothing new the syncer asks it every
    ``alive_s``."""

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
    """Serves standbys; it is a ``wire.handlers.Follow``.

    The decision loop calls ``replicated`` for each turn (``Core``); any thread may call the other methods.
    """

    def __init__(self, options: ReplicationOptions, store: Store, leadership: LeaseHolder | None = None) -> None:
        self.options = options
        self.store = store
        self.leadership = leadership
        self.changed = threading.Condition()
        self._begins = ""
        """The standby whose copy is being checked."""

    def begin(self, core: Core, *, detached: bool) -> None:
        """Connect the loop that waits for the standby, before its first turn; ``detached``: the run has no standby."""
        self.core = core
        journal = self.store.journal
        end = (journal.index, journal.path(journal.index).stat().st_size)
        timeout_ns = round(self.options.timeout_s * 1e9)
        self.machine = Replication(self.options.mode, timeout_ns, end, time.monotonic_ns(), detached=detached)
        self.store.pinned = self._pinned

    # --- the decision loop's side ------------------------------------------------------------------------------------

    def replicated(self, end: Place) -> str | None:
        """Return why the syncer must not tell anything yet of the turn whose records end at ``end``, or None."""
        with self.changed:
            durable, slow = self.machine.durable, self.machine.slow
            why, heir = self.machine.may_tell(end, time.monotonic_ns())
            if self.machine.durable > durable:
                self.changed.notify_all()
            if self.machine.slow and not slow:
                self.store.emit("standby_slow", {"standby": self.machine.standby})
            if why is None and self.leadership is not None:
                why = self.leadership.heir_is(heir)
            return why

    def detach(self) -> bool:
        """Detach by an operator's command, which the caller journals right after; False if already detached."""
        with self.changed:
            is_new = self.machine.detach()
        self.core.nudge()
        return is_new

    def attached(self) -> None:
        """Wait for the standby from now on: the record of its attachment is durable here and there."""
        with self.changed:
            self.machine.attached()

    def status(self) -> dict[str, object]:
        """The state of replication, for ``diloco status``."""
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
        """Return the journal's durable end, even if the loop has made no turn since a segment began."""
        return max(self.machine.durable, self.store.journal.begun)

    def _pinned(self) -> tuple[int, int] | None:
        follower = self.machine.follower
        return follower.pin() if isinstance(follower, Follower) else None

    # --- a standby's side --------------------------------------------------------------------------------------------

    def admit(self, start: FollowStart) -> None:
        """Refuse a standby of another run, and one of another name while one begins, copies or follows."""
        card = self.store.card
        if (name := card.difference(asdict(start))) is not None:
            theirs, ours = getattr(start, name)[:12], getattr(card, name)[:12]
            raise Refusal(Status.FAILED_PRECONDITION, f"{name} is {theirs} at the standby and {ours} here: another run")
        with self.changed:
            copying = isinstance(follower := self.machine.follower, Follower) and follower.copying
            follows = copying or self.machine.away_ns(time.monotonic_ns()) is None
            other = self._begins or (self.machine.standby if follows else "")
        if other and other != start.standby:  # The same one again is a restart from its folder.
            raise Refusal(Status.ALREADY_EXISTS, f"standby {other} follows already: stop that first")

    def follow(self, start: FollowStart) -> Follower:
        """Serve an admitted standby from the end of its journal."""
        self._begins = start.standby
        try:
            follower = Follower(self, start)
        finally:
            self._begins = ""
        with self.changed:
            self.machine.followed(follower, follower.name, follower.place, time.monotonic_ns())
        self.store.emit("standby_follows", {"standby": start.standby, "anew": start.segment == 0})
        return follower


class Follower:
    """One standby being served; satisfies ``wire.handlers.Followed``."""

    def __init__(self, replicator: Replicator, start: FollowStart) -> None:
        self.name = start.standby
        self._replicator = replicator
        self._store = replicator.store
        self._closed = False
        self._wrong: str | None = None
        self._anew = self.copying = start.segment == 0
        self.place: Place = (0, 0)
        """Where the standby's journal ends as it begins."""
        if self._anew:
            for number in reversed(self._store.snapshots.numbers()):
                # The next start reports a damaged one; a standby needs an intact one.
                with contextlib.suppress(SnapshotError):
                    snapshot = self._store.snapshots.check(number)
                    if snapshot.journal_chain:
                        break
            else:
                raise Refusal(Status.UNAVAILABLE, "there is no snapshot yet to begin with: try again later")
            self._snapshot = self._store.snapshots.path(number)
            self._segment, self._chain = snapshot.journal_segment, snapshot.journal_chain
            self._waiting = sorted(payloads_in(snapshot.state))
            self._at = 0
        else:
            self._chain = start.chain
            self.place = self._segment, self._at = self._find(start)

    def parts(self) -> Iterator[FollowPart]:
        """Yield a snapshot if the standby needs one, then the journal for as long as it listens."""
        replicator = self._replicator
        lineage = replicator.core.machine.state.lineage  # It changes only with a new process.
        yield Follows(self._anew, self._segment, self._chain, lineage, replicator.options.mode == "sync")
        if self._anew:
            try:
                paths = sorted(self._snapshot.iterdir())
            except FileNotFoundError:
                raise self._too_slow(f"snapshots/{self._snapshot.name}") from None
            for path in [*paths, *(self._store.spool.folder / payload for payload in self._waiting)]:
                yield from self._file(path)
            for path in sorted((self._store.folder / OUTBOX).glob("*.update")):
                yield from self._file(path, may_be_gone=True)
            self.copying = False
        while not self._closed:
            yield from self._new_units()
            with replicator.changed:
                is_new = replicator.changed.wait_for(
                    lambda: self._closed or replicator.end() > (self._segment, self._at), replicator.options.alive_s
                )
            if not is_new:
                yield Alive()
        if self._wrong is not None:
            raise Refusal(Status.INVALID_ARGUMENT, self._wrong)

    def pin(self) -> tuple[int, int]:
        """Return what is still to be sent: a snapshot (0: none), and the journal from a segment on."""
        return int(self._snapshot.name) if self.copying else 0, self._segment

    def acknowledged(self, ack: FollowAck) -> None:
        """Note that the standby has everything up to there. A claim beyond the journal's end ends the stream."""
        replicator, place = self._replicator, (ack.segment, ack.offset)
        if place > (end := replicator.end()):
            self._wrong = (
                f"standby {self.name} acknowledged byte {ack.offset} of segment {ack.segment}, and the journal ends at "
                f"byte {end[1]} of segment {end[0]}"
            )
            self.close()
            return
        with replicator.changed:
            attach, heir = replicator.machine.heard(self, place, time.monotonic_ns())
            if heir and replicator.leadership is not None:
                replicator.leadership.name_heir(self.name)
        if attach:
            replicator.core.post(StandbyAttached(self.name))
        replicator.core.nudge()

    def close(self) -> None:
        """End serving the standby."""
        self._closed = True
        replicator = self._replicator
        with replicator.changed:
            replicator.changed.notify_all()
            was_served = replicator.machine.gone(self)
        if was_served:
            self._store.emit("standby_away", {"standby": self.name})
            replicator.core.nudge()

    # --- what is sent ------------------------------------------------------------------------------------------------

    def _file(self, path: Path, *, may_be_gone: bool = False) -> Iterator[FollowPart]:
        """Yield a file of the folder, which no code changes, reading it twice: in memory is only the piece being sent.

        A missing sealed update (``may_be_gone``) is no longer in flight: skip it.
        """
        name = path.relative_to(self._store.folder).as_posix()
        try:
            file = path.open("rb")
        except FileNotFoundError:
            if may_be_gone:
                return
            raise self._too_slow(name) from None
        with file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            yield Item(name, 0, 0, file.tell(), digest)
            file.seek(0)
            at = 0
            while piece := file.read(CHUNK_BYTES):
                yield Chunk.of(at, piece)
                at += len(piece)

    def _too_slow(self, name: str) -> Refusal:
        """Refuse: ``name`` was deleted although pinned, as the disk is full or the pin held too many bytes."""
        if self._anew:
            return Refusal(Status.UNAVAILABLE, f"{name} was deleted meanwhile: the copy starts over")
        text = f"{name} was deleted meanwhile: the standby is too far behind, give it an empty folder"
        return Refusal(Status.FAILED_PRECONDITION, text)

    def _find(self, start: FollowStart) -> Place:
        """Return where the standby's next unit begins."""
        for unit in units(self._segment_bytes(start.segment)):
            if unit.kind != MARK and unit.chain.hex() == start.chain:
                return start.segment, unit.end
        for unit in units(self._segment_bytes(start.segment + 1)):  # The standby's own segment may be deleted.
            if unit.kind == HEADER and chain_after(bytes.fromhex(start.chain), unit.body) == unit.chain:
                return start.segment + 1, 0
            break
        lineage = self._replicator.core.machine.state.lineage
        other = f"standby {start.standby} has a journal that this one, of lineage {lineage}, does not continue"
        raise Refusal(Status.FAILED_PRECONDITION, f"{other}: give it an empty folder")

    def _segment_bytes(self, segment: int) -> bytes:
        """Return a whole segment; empty if it is not kept."""
        try:
            return self._store.journal.path(segment).read_bytes()
        except FileNotFoundError:
            return b""

    def _new_units(self) -> Iterator[FollowPart]:
        """Yield everything durable that was not sent yet."""
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
                    yield from _unit(data[sent : unit.end], self._segment, self._at + sent)
                sent = unit.end
            self._at += sent
            if segment == self._segment:
                return
            self._segment, self._at = self._segment + 1, 0

    def _payloads(self, body: bytes, at: int) -> Iterator[FollowPart]:
        """Yield what the records of a frame need to be replayed."""
        try:
            records = decode_records(body, at)
        except JournalError as error:
            raise Refusal(Status.FAILED_PRECONDITION, str(error)) from error
        for event in (record.event for record in records):
            if isinstance(event, LineageBegan):
                # Its first values go before its record: a standby with the record cannot go back.
                folder = self._store.lineages.folder / str(event.lineage)
                if not folder.exists():
                    text = f"lineage {event.lineage} began with values that were deleted"
                    raise Refusal(Status.FAILED_PRECONDITION, f"{text}: give the standby an empty folder")
                for path in sorted(folder.iterdir()):
                    yield from self._file(path)
            if isinstance(event, UpdateArrived | UpstreamFetched) and event.payload:
                path = self._store.spool.folder / event.payload
                if path.exists():
                    yield from self._file(path)
                elif event.payload in self._replicator.core.ask(lambda it: payloads_in(it.snapshot()), early=True):
                    # The payload of an update that was not accepted may be missing: nothing needs it.
                    why = f"spool/{event.payload} is missing on the syncer's disk, and its update has no fate yet"
                    raise Refusal(Status.FAILED_PRECONDITION, f"{why}: no standby can follow")
            if isinstance(event, Sealed):
                path = self._store.folder / outbox_file(event.fragment, event.sequence)
                yield from self._file(path, may_be_gone=True)


def _unit(data: bytes, segment: int, offset: int) -> Iterator[FollowPart]:
    yield Item("", segment, offset, len(data), hashlib.sha256(data).hexdigest())
    for piece in cut([data], 0, len(data), lambda: CHUNK_BYTES):
        yield Chunk.of(*piece)
