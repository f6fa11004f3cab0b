"""The leading syncer's end of replication in the simulator (``syncer/replicator`` in short).

A standby gets what is durable here, read from the disk again: a snapshot first where it has nothing, then the journal's
units byte for byte, each frame with the payloads that it names.  What must wait for it, and when the lease may name it
as heir, are the product's rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco.sim.network import MILLISECOND_NS, Direction, Weather
from diloco.sim.outer_disk import Place, journal_name, payloads_in
from diloco.sim.storage import Damaged
from diloco.sync.events import UpdateArrived
from diloco.sync.frames import FRAME, MARK, units
from diloco.sync.journal import decode_records

if TYPE_CHECKING:
    from collections.abc import Iterator

    from diloco.sim.outer_disk import OuterDisk
    from diloco.sim.outer_process import OuterProcess
    from diloco.sim.standby_process import Stream

MODES = ("sync", "async")
START: Place = (0, 0)
NEAR_NS = 1000 * MILLISECOND_NS
"""A detached standby that is no further behind is waited for again."""


@dataclass(frozen=True, slots=True)
class ReplicationPlan:
    """How a run's standby follows, the paths between the three machines, and how long the lease lasts."""

    between: Weather
    to_lease: Weather
    mode: str = "sync"
    ttl_ns: int = 2000 * MILLISECOND_NS
    timeout_ns: int = 2000 * MILLISECOND_NS
    alive_ns: int = 500 * MILLISECOND_NS


@dataclass(frozen=True, slots=True)
class Begin:
    """The standby is to begin here.  ``snapshot`` and ``payloads`` are the files for one that has nothing."""

    anew: bool
    segment: int
    snapshot: tuple[str, bytes] | None = None
    payloads: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit of the journal byte for byte, where it ends, and the payloads that it names."""

    kind: bytes
    chain: bytes
    raw: bytes
    end: Place
    payloads: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True)
class Alive:
    """There is nothing new."""


@dataclass(frozen=True, slots=True)
class GoAway:
    """The standby's journal is not one that this one goes on from: it needs an empty folder."""


Part = Begin | Unit | Alive | GoAway


class Replicator:
    """What waits for a standby, and who may inherit."""

    def __init__(self, process: OuterProcess, plan: ReplicationPlan, *, detached: bool) -> None:
        self.process, self.plan = process, plan
        self.detached = detached
        self.durable = process.disk.end()
        self._acked = START
        self._acker = ""
        self._attaching = False
        self._heard_ns = process.heap.now_ns
        self._follower: Follower | None = None
        self._goal, self._goal_ns = START, self._heard_ns

    # --- the decision loop's side --------------------------------------------------------------------------------

    def wanting(self, end: Place) -> bool:
        """Whether nothing may be told yet of the turn that ends there."""
        if end > self.durable:
            self.durable = end
            if self._follower is not None:
                self._follower.pump()
        if self.detached:
            return self._may_inherit("")
        if self._acked >= end:
            return self._may_inherit(self._acker)
        if self.follows() or self.plan.mode == "sync":
            return True
        return self._may_inherit("")

    def _may_inherit(self, name: str) -> bool:
        leadership = self.process.leadership
        return leadership is not None and leadership.may_inherit(name)

    def follows(self) -> bool:
        """Whether a standby is heard."""
        return self._follower is not None and self.process.heap.now_ns - self._heard_ns <= self.plan.timeout_ns

    def rotated(self) -> None:
        """The journal goes on in another segment."""
        self.durable = self.process.disk.end()
        if self._follower is not None:
            self._follower.pump()

    def attached(self) -> None:
        """The record that says so is durable here and there: from now on the standby is waited for."""
        self.detached = self._attaching = False

    def caught_up(self) -> bool:
        """Whether the standby had everything of late, is waited for, and may inherit."""
        leadership = self.process.leadership
        heir = leadership is not None and leadership.is_heir(self._acker)
        return heir and not self.detached and self.follows()

    # --- a standby's side ----------------------------------------------------------------------------------------

    def follow(self, stream: Stream, chain: str, segment: int) -> None:
        """Serve a standby from where it is."""
        follower = Follower(self, stream)
        if not follower.begin(segment, chain):
            return
        self._follower, self._attaching = follower, False
        self._heard_ns = self.process.heap.now_ns
        self._acked, self._acker = follower.place, stream.name
        self._goal, self._goal_ns = self.durable, self._heard_ns
        follower.pump()
        follower.keep_alive()

    def heard(self, stream: Stream, place: Place) -> None:
        """The standby has everything up to ``place``."""
        if self._follower is None or self._follower.stream is not stream:
            return
        self._heard_ns = self.process.heap.now_ns
        self._acked = max(self._acked, place)
        near, caught_up = self._is_near(), self._acked >= self.durable
        if self.detached:
            if (near or caught_up) and not self._attaching:
                self._attaching = True
                self.process.attach(stream.name)
        elif caught_up and self.process.leadership is not None:
            self.process.leadership.name_heir(stream.name)
        self.process.go_on()

    def _is_near(self) -> bool:
        """Whether what was durable a short time ago is there now."""
        if self._acked < self._goal:
            return False
        near = self._heard_ns - self._goal_ns <= NEAR_NS
        self._goal, self._goal_ns = self.durable, self._heard_ns
        return near

    def gone(self, stream: Stream) -> None:
        """The stream has ended."""
        if self._follower is not None and self._follower.stream is stream:
            self._follower = None
            self._attaching = False
            self.process.go_on()

    def serves(self, follower: Follower) -> bool:
        """Whether this is the one that is being served."""
        return self._follower is follower


class Follower:
    """One standby being served."""

    def __init__(self, replicator: Replicator, stream: Stream) -> None:
        self.stream = stream
        self._replicator = replicator
        self._disk: OuterDisk = replicator.process.disk
        self.place = START
        self._at = START
        self._sent = 0

    def begin(self, segment: int, chain: str) -> bool:
        """Find where to begin, and say so; False when the standby must go away."""
        if segment == 0:
            name = self._disk.storage.names("snapshot-")[-1]
            facts = self._disk.facts(name)
            self._at = (int(str(facts["segment"])), 0)
            payloads = tuple(self._payloads(sorted(payloads_in(facts["state"]))))
            self._send(Begin(True, self._at[0], (name, self._disk.storage.read(name)), payloads))
            return True
        found = self._find(segment, chain)
        if found is None:
            self._send(GoAway())
            return False
        self.place = self._at = found
        self._send(Begin(False, segment))
        return True

    def _find(self, segment: int, chain: str) -> Place | None:
        name = journal_name(segment)
        if name in self._disk.storage.names("journal-"):
            for unit in units(self._disk.storage.read(name)):
                if unit.kind != MARK and unit.chain.hex() == chain:
                    return segment, unit.end
        return None

    def pump(self) -> None:
        """Send everything durable that was not sent yet."""
        while self._at < self._replicator.durable:
            segment, at = self._at
            last, end = self._replicator.durable
            try:
                data = self._disk.storage.read(journal_name(segment))
            except Damaged:
                self._send(GoAway())
                self._replicator.gone(self.stream)
                return
            for unit in units(data[:end] if segment == last else data, at):
                if unit.kind != MARK:
                    payloads = tuple(self._named_in(unit.body, at)) if unit.kind == FRAME else ()
                    self._send(Unit(unit.kind, unit.chain, data[at : unit.end], (segment, unit.end), payloads))
                at = unit.end
            self._at = (segment, at) if segment == last else (segment + 1, 0)
            if segment == last:
                return

    def _named_in(self, body: bytes, at: int) -> Iterator[tuple[str, bytes]]:
        events = [record.event for record in decode_records(body, at)]
        return self._payloads([event.payload for event in events if isinstance(event, UpdateArrived) and event.payload])

    def _payloads(self, names: list[str]) -> Iterator[tuple[str, bytes]]:
        for name in names:
            # One that is not there any more was refused: as long as a frame is kept, what it took in is.
            if self._disk.storage.names(f"spool/{name}"):
                yield name, self._disk.storage.read(f"spool/{name}")

    def keep_alive(self) -> None:
        """Say something every now and then for as long as it is served."""
        process = self._replicator.process

        def again() -> None:
            if self._replicator.serves(self):
                self._send(Alive())
                self.keep_alive()

        process.heap.after(self._replicator.plan.alive_ns, lambda: process.deliver(again))

    def _send(self, part: Part) -> None:
        number, stream, process = self._sent, self.stream, self._replicator.process
        self._sent += 1

        def broken() -> None:
            stream.broken()
            process.deliver(lambda: self._replicator.gone(stream))

        stream.link.send(Direction.DOWN, lambda: stream.arrived(number, part), lost=broken)
