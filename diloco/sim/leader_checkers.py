"""What must hold where two machines may lead: one at a time, and never without what the other has told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.sim.checking import Checker
from diloco.sync.effects import PublishVersion
from diloco.sync.events import StandbyAttached, StandbyDetached, SyncerStarted
from diloco.sync.frames import MARK, units

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.sim.outer_process import OuterPlan
    from diloco.sim.replicator import Unit
    from diloco.sim.storage import Storage
    from diloco.sync.effects import OuterEffect
    from diloco.sync.events import OuterEvent
    from diloco.sync.syncer import OuterSync


class OneLeader(Checker):
    """Epochs rise, who tells anything has the largest that has told anything, and a version has one digest."""

    name = "one_leader"
    mutation = "a process does not ask for its lease before it tells anything"

    def __init__(self, plan: OuterPlan, *, conserving: bool = False) -> None:
        super().__init__(plan, conserving=conserving)
        self.started = self.spoke = (1, 0)
        self.published: dict[tuple[int, int, int], str] = {}

    def outer(self, now_ns: int, event: OuterEvent, effects: Sequence[OuterEffect], machine: OuterSync) -> None:
        """Each start has a larger epoch."""
        del now_ns, effects
        if isinstance(event, SyncerStarted):
            started = (machine.state.lineage, event.epoch)
            self.require(started > self.started, "a start of (lineage, epoch)", started, "came after", self.started)
            self.started = started

    def told(self, machine: OuterSync, chain: bytes | None, effects: Sequence[OuterEffect]) -> None:
        """Nobody speaks after who came later has spoken."""
        del chain
        speaks = (machine.state.lineage, machine.state.epoch)
        self.require(speaks >= self.spoke, "(lineage, epoch)", speaks, "tells something after", self.spoke)
        self.spoke = speaks
        for effect in effects:
            if isinstance(effect, PublishVersion):
                key = (machine.state.lineage, effect.fragment, effect.version)
                before = self.published.setdefault(key, effect.digest)
                self.require(before == effect.digest, key, "was published as", before, "and now as", effect.digest)


class Replicated(Checker):
    """Replication "sync": what anybody is told is in the standby's journal, unless an operator has detached that."""

    name = "replicated"
    mutation = "the syncer tells what the standby does not have yet"

    def __init__(self, plan: OuterPlan, *, conserving: bool = False) -> None:
        super().__init__(plan, conserving=conserving)
        self.there: set[bytes] = set()
        self.alone = self.will_be_alone = plan.replication is None

    def replicated(self, storage: Storage, journal: str, unit: Unit) -> None:
        """What a standby acknowledges would survive a power cut there."""
        self.require(
            storage.is_safe(journal, unit.raw), "the standby acknowledges a frame that is not durable in", journal
        )
        for name, data in unit.payloads:
            self.require(storage.is_safe(f"spool/{name}", data), "the standby acknowledges a frame without", name)
        self.there.add(unit.chain)

    def resumed(self, storage: Storage, journal: str, chain: bytes) -> None:
        """What a standby has read again when it was started counts as acknowledged when it says where it is."""
        at, data = 0, storage.read(journal)
        for unit in units(data):
            if unit.kind != MARK and unit.chain == chain:
                durable = storage.is_safe(journal, data[at : unit.end])
                self.require(durable, "the standby goes on from a frame that is not durable in", journal)
                self.there.add(chain)
            at = unit.end

    def stands_alone(self) -> None:
        """Told by who knows, before it is in any journal."""
        self.alone = self.will_be_alone = True

    def outer(self, now_ns: int, event: OuterEvent, effects: Sequence[OuterEffect], machine: OuterSync) -> None:
        """Follow whether a standby is waited for."""
        del now_ns, effects, machine
        if isinstance(event, StandbyAttached | StandbyDetached):
            self.will_be_alone = isinstance(event, StandbyDetached)

    def recovered(self, machine: OuterSync) -> None:
        """A word that did not reach the journal is forgotten."""
        self.alone = self.will_be_alone = self.plan.replication is None or machine.state.detached

    def told(self, machine: OuterSync, chain: bytes | None, effects: Sequence[OuterEffect]) -> None:
        """Look for the turn in the standby's book."""
        del machine
        if chain is not None and not self.alone and self.plan.replication and self.plan.replication.mode == "sync":
            self.require(chain in self.there, "told without the standby:", list(effects)[:3])
        self.alone = self.will_be_alone  # From the turn after the one that says so on.
