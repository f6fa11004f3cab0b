"""The simulated syncer's disk: journal, snapshots and spool, written in the same order as the real ones.

The frames, marks, records and their replay are the product's own (``sync/journal.py``); the rest is a short form of
``syncer/store``: a payload is durable before its record, a record before its effects, a snapshot before anything older
is removed.  Recovery loads the newest snapshot that verifies and computes every outer step since then again from the
spool.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from diloco.sim import world
from diloco.sim.world import Damaged, Died, Storage, Value, sealed, unsealed
from diloco.sync.effects import StartOuterStep
from diloco.sync.events import LineageBegan, OuterStepDone, UpdateArrived
from diloco.sync.journal import (
    CHAIN_START,
    HEADER,
    MARK,
    JournalError,
    Record,
    decode_records,
    encode_header,
    encode_mark,
    read_segment,
    units,
)
from diloco.sync.syncer import OuterSync, Replay

if TYPE_CHECKING:
    from diloco.sim.world import Begin, OuterPlan
    from diloco.sync.effects import TakeVersion
    from diloco.sync.events import Fate
    from diloco.sync.leadership import Place

VERSIONS_KEPT = 4
"""How many versions of a fragment stay in memory: a site no further behind can follow the down-links."""


@dataclass(frozen=True, slots=True)
class Kept:
    """One version.  ``link`` is the decoded down-link from the version before."""

    theta: Value
    momentum: Value
    published: Value
    link: Value


ZERO = Kept(world.ZERO, world.ZERO, world.ZERO, world.ZERO)
Versions = list[dict[int, Kept]]


class Replayer(Replay):
    """A machine and its versions under replay; the payloads are read from ``disk``."""

    def __init__(self, machine: OuterSync, versions: Versions, disk: OuterDisk) -> None:
        super().__init__(machine)
        self.versions, self._disk = versions, disk

    def step_done(self, event: OuterStepDone, command: StartOuterStep | TakeVersion) -> None:
        """Compute the version again; raise ``Damaged`` when its digests differ from the journalled ones."""
        assert isinstance(command, StartOuterStep), "no region"
        made = self.made_again(command)
        if (digest(made.published), digest(made.link)) != (event.digest, event.downlink_digest):
            raise Damaged(f"version {event.version} of fragment {event.fragment} has another digest now")
        self.store(event.fragment, event.version, made)

    def lineage_began(self, event: LineageBegan) -> None:
        """Make the newest values the lineage's first versions."""
        self.versions = restored(self.versions)

    def made_again(self, command: StartOuterStep) -> Kept:
        """Compute the outer step ``command`` from the stored payloads, for the first time or again."""
        contributions = [
            (part.weight, [self._disk.payload(update.payload) for update in part.updates])
            for part in command.contributions
        ]
        before = self.versions[command.fragment][command.version - 1]
        rule, merged = self._disk.plan.rule, world.merged(contributions)
        theta, momentum = world.outer_step(before.theta, before.momentum, merged, rule, command.share)
        if rule.published_quantum == 1:
            return Kept(theta, momentum, theta, world.minus(theta, before.published))
        link = world.quantised(world.minus(theta, before.published), rule.published_quantum)
        return Kept(theta, momentum, world.plus(before.published, link), link)

    def store(self, fragment: int, version: int, made: Kept) -> None:
        """Store ``made`` as the newest version, and drop the version ``VERSIONS_KEPT`` before it."""
        self.versions[fragment][version] = made
        self.versions[fragment].pop(version - VERSIONS_KEPT, None)


def restored(versions: Versions) -> Versions:
    """Return the first versions of a new lineage: the newest values, without momentum.

    No site can follow a down-link to them: a site that has the version before has it from another lineage.
    """
    newest = [(max(kept), kept[max(kept)]) for kept in versions]
    return [{version + 1: Kept(kept.theta, world.ZERO, kept.published, world.ZERO)} for version, kept in newest]


def digest(value: Value) -> str:
    """Return the text that stands for a tensor's digest."""
    return f"{value[0]}:{value[1]}:{value[2]}"


SNAPSHOTS_KEPT = 2


class CrashPoint(Enum):
    """The points in the handling of an event at which the syncer can be made to die."""

    PAYLOAD_WRITTEN = "payload written"
    PAYLOAD_RENAMED = "payload renamed"
    BEFORE_WRITE = "before the record"
    TORN_WRITE = "in the record"
    AFTER_WRITE = "record written"
    AFTER_SYNC = "record synced"
    AMONG_EFFECTS = "among its effects"
    STEP_MADE = "outer step made"
    SNAPSHOT_WRITTEN = "snapshot written"
    SNAPSHOT_RENAMED = "snapshot renamed"
    SNAPSHOT_KEPT = "snapshot kept"


class OuterDisk:
    """The syncer's folder.  Methods call ``reached`` at every point at which the process may die."""

    def __init__(self, plan: OuterPlan) -> None:
        self.plan = plan
        self.doom: CrashPoint | None = None
        """The point at which the process that uses the folder dies next."""
        self.storage = Storage()
        self.chain = CHAIN_START
        self.segment = 0
        self.released: deque[tuple[int, str]] = deque()
        """The payloads of decided updates, each with the segment at which it was marked by ``release``."""

    def reached(self, where: str) -> None:
        """Let the process die here if it is doomed to."""
        if self.doom is not None and self.doom.value == where:
            raise Died(where)

    # --- writing -----------------------------------------------------------------------------------------------

    def keep_payload(self, payload: str, data: bytes) -> None:
        """Make the encoded bytes of an update's payload durable under its name."""
        self._put(f"spool/{payload}", data, "payload")

    def _put(self, name: str, data: bytes, what: str) -> None:
        """Write a file under a temporary name, sync it, rename it, and sync the name."""
        beside = f"partial/{name.removeprefix('spool/')}"
        self.storage.remove(beside)
        self.storage.append(beside, data)
        self.reached(f"{what} written")
        self.storage.sync(beside)
        self.storage.rename(beside, name)
        self.reached(f"{what} renamed")
        self.storage.sync_names()

    def release(self, payload: str) -> None:
        """Mark the payload of a decided update for removal with the last snapshot whose replay needs it."""
        self.released.append((self.segment, payload))

    def write(self, frame: bytes, chain: bytes) -> Place:
        """Make a frame durable and mark it; return the place where it ends."""
        name = journal_name(self.segment)
        self.reached("before the record")
        self.storage.append(name, frame[: len(frame) // 2])
        self.reached("in the record")
        self.storage.append(name, frame[len(frame) // 2 :])
        self.reached("record written")
        end = len(self.storage.read(name))
        self.storage.sync(name)
        self.reached("record synced")
        self.storage.append(name, encode_mark(chain))
        self.chain = chain
        return self.segment, end

    def decided(self, site: str, fate: Fate) -> None:
        """As ``release``, by the update's site and fate."""
        self.release(payload_name(site, fate.fragment, fate.sequence, fate.digest))

    def begin(self, begin: Begin, header: bytes) -> None:
        """Fill a standby's folder: payloads, the journal's header, then the snapshot.

        The journal comes before the snapshot: recovery takes a journal without events for a new folder, but it cannot
        begin from a snapshot without a journal.
        """
        for name in self.storage.names(""):
            self.storage.remove(name)  # Left by a failed attempt.
        self.storage.sync_names()
        for name, data in begin.payloads:
            self.keep_payload(name, data)
        (unit,) = units(header)
        assert unit.kind == HEADER
        assert begin.snapshot is not None
        self._begin_segment(begin.segment, header, unit.chain)
        self._put(*begin.snapshot, "snapshot")

    def snapshot(self, machine: OuterSync, versions: Versions) -> None:
        """Begin a journal segment, write a snapshot, then remove what no remaining snapshot needs."""
        if self.segment:
            self.storage.sync(journal_name(self.segment))  # Its last mark: only the last segment may end torn.
        self.storage.remove(journal_name(self.segment + 1))  # Begun earlier and never written to.
        self._begin_segment(self.segment + 1, *encode_header(self.segment + 1, self.chain, {}))
        newest = [kept[fragment.version] for kept, fragment in zip(versions, machine.state.fragments, strict=True)]
        facts = {
            "state": machine.snapshot(),
            "values": [[kept.theta, kept.momentum, kept.published, kept.link] for kept in newest],
            "segment": self.segment,
        }
        number = 1 + max((_number(name) for name in self.storage.names("snapshot-")), default=0)
        self._put(f"snapshot-{number:06d}", sealed(facts), "snapshot")
        self.reached("snapshot kept")
        self._prune()

    def _begin_segment(self, segment: int, header: bytes, chain: bytes) -> None:
        name = journal_name(segment)
        self.storage.append(name, header)
        self.storage.sync(name)
        self.storage.sync_names()
        self.storage.append(name, encode_mark(chain))
        self.segment, self.chain = segment, chain

    def end(self) -> Place:
        """Return the end of the journal's last unit that a standby gets: marks stay on this disk."""
        found = [unit.end for unit in units(self.storage.read(journal_name(self.segment))) if unit.kind != MARK]
        return self.segment, found[-1]

    def _prune(self) -> None:
        snapshots = self.storage.names("snapshot-")
        for name in snapshots[:-SNAPSHOTS_KEPT]:
            self.storage.remove(name)
        try:
            first = self.facts(self.storage.names("snapshot-")[0])["segment"]
        except Damaged:
            return  # The oldest snapshot is damaged: remove nothing else until it is gone.
        self.storage.sync_names()  # A snapshot that a power cut brought back would need the files removed below.
        for name in self.storage.names("journal-"):
            if _number(name) < first:
                self.storage.remove(name)
        self.storage.sync_names()
        while self.released and self.released[0][0] < first:
            self.storage.remove(f"spool/{self.released.popleft()[1]}")

    # --- reading -----------------------------------------------------------------------------------------------

    def payload(self, payload: str) -> Value:
        """Read an update's payload; raise ``Damaged`` when it does not verify."""
        name = f"spool/{payload}"
        first, second, third = unsealed(name, self.storage.read(name))
        return (first, second, third)

    def facts(self, name: str) -> dict[str, Any]:
        """Read a snapshot; raise ``Damaged`` when it does not verify."""
        return dict(unsealed(name, self.storage.read(name)))

    def recover(self) -> Replayer:
        """Recover the last process's machine and versions; ``Damaged`` says why when that is impossible."""
        damaged: dict[str, str] = {}
        for name in reversed(self.storage.names("snapshot-")):
            try:
                facts = self.facts(name)
            except Damaged as error:
                damaged[name] = str(error)
                continue
            machine = OuterSync.restore(self.plan.options, facts["state"])
            kept = [Kept(*((a, b, c) for a, b, c in row)) for row in facts["values"]]
            versions = [{part.version: each} for part, each in zip(machine.state.fragments, kept, strict=True)]
            replayer = Replayer(machine, versions, self)
            for record in self._records(facts["segment"]):
                replayer.apply(record)
            self._sweep(machine)
            for each in damaged:
                self.storage.remove(each)
            return replayer
        if damaged or any(read_segment(self.storage.read(name)).frames for name in self.storage.names("journal-")):
            raise Damaged(f"no snapshot is whole: {'; '.join(damaged.values()) or 'there is none'}")
        # Nothing was ever acknowledged here: the first snapshot comes before any acknowledgement.
        machine = OuterSync(self.plan.options)
        versions = [{0: ZERO} for _ in machine.state.fragments]
        self.chain, self.segment = CHAIN_START, 0
        self.snapshot(machine, versions)
        return Replayer(machine, versions, self)

    def _records(self, first: int) -> list[Record]:
        """Return the records from segment ``first`` on; cut off a frame that a crash left incomplete."""
        names = [journal_name(number) for number in range(first, 1 + _number(self.storage.names("journal-")[-1]))]
        found = [read_segment(self.storage.read(name)) for name in names]
        if found[-1].header is None and len(found) > 1:
            self.storage.remove(names.pop())  # A crash interrupted its creation: nothing in it was acknowledged.
            found.pop()
        for before, name, segment in zip([None, *found], names, found, strict=False):
            if segment.header is None:
                raise Damaged(f"{name} has no header")
            if before is not None and bytes.fromhex(segment.header.before) != before.chain:
                raise Damaged(f"{name} does not continue the segment before it")
            if segment is not found[-1] and segment.end < len(self.storage.read(name)):
                raise Damaged(f"{name} ends at byte {segment.end} and is not the last segment")
        self.storage.cut(names[-1], found[-1].end)
        self.chain, self.segment = found[-1].chain, _number(names[-1])
        if not found[-1].marked:
            self.storage.append(names[-1], encode_mark(self.chain))
        frames = [frame for segment in found for frame in segment.frames]
        return [record for frame in frames for record in decode_records(frame.body, frame.offset)]

    def _sweep(self, machine: OuterSync) -> None:
        """Remove payloads that were never accepted; mark the decided ones for removal by ``_prune``."""
        waiting = payloads_in(machine.snapshot())
        needed = set(waiting)
        # Include segments that no remaining snapshot needs: a standby may continue from there.
        first = _number(self.storage.names("journal-")[0])
        for name in self.storage.names("snapshot-"):
            try:
                facts = self.facts(name)
            except Damaged:
                continue
            needed |= payloads_in(facts["state"])
        names = [journal_name(number) for number in range(first, self.segment + 1)]
        try:
            frames = [frame for name in names for frame in read_segment(self.storage.read(name)).frames]
        except JournalError:
            return  # A segment older than those in use is damaged: remove nothing.
        events = [record.event for frame in frames for record in decode_records(frame.body, frame.offset)]
        needed |= {event.payload for event in events if isinstance(event, UpdateArrived)} - {""}
        for name in self.storage.names("spool/"):
            payload = name.removeprefix("spool/")
            if payload not in needed:
                self.storage.remove(name)
        self.released = deque((self.segment, payload) for payload in sorted(needed - waiting))


def payload_name(site: str, fragment: int, sequence: int, digest: str) -> str:
    """Return the name of an update's payload."""
    return f"{site}-{fragment}-{sequence}-{digest}"


def journal_name(number: int) -> str:
    """Return the file name of a segment."""
    return f"journal-{number:06d}"


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])


def payloads_in(state: object) -> set[str]:
    """Return the payloads of the accepted, undecided updates in ``state``."""
    assert isinstance(state, dict)
    lines = [line for site in state["sites"].values() for line in site["lines"]]
    return {pending["payload"] for line in lines for pending in line["undecided"]}
