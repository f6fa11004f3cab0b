"""A standby as a process of the simulator: a second folder that follows the first, and a warm machine.

The standby writes in the syncer's order: a payload before the frame that names it; it syncs and marks the frame before
it acknowledges it.  Then it applies the records, so that it computes every version too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.sim.checkers import Violation
from diloco.sim.outer_disk import journal_name
from diloco.sim.outer_process import OuterProcess
from diloco.sim.world import MILLISECOND_NS, Begin, Died, Direction, GoAway, Process, Stream, Unit
from diloco.sync.effects import TellFate
from diloco.sync.journal import HEADER, JournalError, chain_after, decode_records, units

if TYPE_CHECKING:
    from diloco.sim.outer_disk import Replayer
    from diloco.sim.outer_process import Machines, Replicator, Seat
    from diloco.sim.world import Part
    from diloco.sync.leadership import Place


PAUSE_NS = 500 * MILLISECOND_NS


class StandbyProcess(Process):
    """One life of a standby.  The constructor recovers the folder."""

    def __init__(self, machines: Machines, seat: Seat) -> None:
        assert machines.between is not None
        assert machines.plan.replication is not None
        super().__init__(machines.heap, lambda: machines.died(seat, self))
        self.disk, self.checkers = seat.disk, machines.checkers
        self.useless = False
        """Whether this folder can no longer follow: the standby then restarts on an empty one."""
        self._name, self._link, self._timeout_ns = seat.folder(), machines.between, machines.plan.replication.timeout_ns
        (self._other,) = (each for each in machines.seats if each is not seat)
        self._stream: Stream | None = None
        self._began_at: Begin | None = None
        self._heard_ns = self.heap.now_ns
        self._place: Place = (0, 0)
        self.disk.doom = None
        # Without a snapshot no process has ever acknowledged anything in this folder.
        self.replayer: Replayer | None = self.disk.recover() if self.disk.storage.names("snapshot-") else None

    def follow(self) -> None:
        """Ask the syncer for the units of its journal that this folder lacks."""
        stream = self._stream = Stream(self._name, self._link, self, self.take, self.lost)
        self._heard_ns = self.heap.now_ns
        segment, chain = 0, ""
        if self.replayer is not None:
            segment, chain = self.disk.segment, self.disk.chain.hex()
            self.checkers.resumed(self.disk.storage, journal_name(segment), self.disk.chain)

        def receive() -> None:
            replicator = self._replicator()
            if replicator is not None:
                replicator.process.deliver(lambda: replicator.follow(stream, chain, segment))
            else:
                self._link.send(Direction.DOWN, stream.broken)  # No syncer runs there.

        self._link.send(Direction.UP, receive, stream.broken)
        self._watch(stream)

    def _replicator(self) -> Replicator | None:
        """Return the other end of replication, if a syncer runs there."""
        primary = self._other.process
        return primary.replicator if isinstance(primary, OuterProcess) else None

    def _watch(self, stream: Stream) -> None:
        def look() -> None:
            if self._stream is stream:
                if self.heap.now_ns - self._heard_ns > self._timeout_ns:
                    self.lost(stream)
                else:
                    self._watch(stream)

        self.after(self._timeout_ns // 2, look)

    def lost(self, stream: Stream) -> None:
        """The stream broke or the syncer fell silent: follow again after ``PAUSE_NS``."""
        if self._stream is stream:
            self._stream = None
            self.after(PAUSE_NS, self.follow)

    def take(self, stream: Stream, part: Part) -> None:
        """Handle the stream's next part."""
        if self._stream is not stream:
            return
        self._heard_ns = self.heap.now_ns
        match part:
            case GoAway():
                self.useless = True
                raise Died("an empty folder is needed")
            case Begin():
                self._began_at = part if part.snapshot is not None else None
            case Unit():
                self._unit(part, stream)
            case None:
                self._ack(stream)

    def _ack(self, stream: Stream) -> None:
        place = self._place

        def receive() -> None:
            replicator = self._replicator()
            if replicator is not None:
                replicator.process.deliver(lambda: replicator.heard(stream, place))

        self._link.send(Direction.UP, receive, stream.broken)

    def _unit(self, part: Unit, stream: Stream) -> None:
        """Write a unit of the journal durably, acknowledge it, then apply its records."""
        (unit,) = units(part.raw)
        if self._began_at is not None:
            self.disk.begin(self._began_at, part.raw)
            self._began_at = None
            self.replayer = self.disk.recover()
        elif unit.kind == HEADER:
            assert self.replayer is not None
            self.disk.snapshot(self.replayer.machine, self.replayer.versions)
        else:
            assert chain_after(self.disk.chain, unit.body) == unit.chain, "a frame does not continue the journal here"
            for name, data in part.payloads:
                self.disk.keep_payload(name, data)
            self.disk.write(part.raw, part.chain)
            self.checkers.replicated(self.disk.storage, journal_name(self.disk.segment), part)
        assert self.disk.chain == part.chain, "the journal here differs from the syncer's"
        self._place = part.end
        self._ack(stream)
        if unit.kind == HEADER:
            return
        assert self.replayer is not None
        for record in decode_records(unit.body, 0):
            try:
                effects = self.replayer.apply(record)
            except JournalError as error:
                raise Violation("Replicated", f"the standby decides otherwise than the syncer: {error}") from error
            for effect in effects:
                if isinstance(effect, TellFate):
                    self.disk.decided(effect.site, effect.fate)
