"""Records become the state that they led to: the machine decides again, and every outer step is computed again.

Recovery does so with what it finds, a standby with what it is sent; who leads uses the same arithmetic.


What of the simulated syncer outlives its process: journal, snapshots and spool, in the order of the real one.

The frames, marks and records are the product's own (``sync/journal.py``); the rest is ``syncer/store`` in short: a
payload is safe before its record, a record before its effects, a snapshot before anything older goes.  Recovery is the
newest snapshot that verifies, and every outer step since then computed again from the spool.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco.sim import values
from diloco.sim.values import Value
from diloco.sim.world import Damaged, Storage, sealed, unsealed
from diloco.sync.effects import StartOuterStep
from diloco.sync.events import LineageBegan, OuterStepDone, OuterStepFailed, UpdateArrived
from diloco.sync.journal import (
    CHAIN_START,
    MARK,
    JournalError,
    Record,
    decide_again,
    decode_records,
    encode_frame,
    encode_header,
    encode_mark,
    encode_records,
    read_segment,
    units,
)
from diloco.sync.plain import canonical
from diloco.sync.syncer import OuterSync

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from diloco.sim.values import OuterRule
    from diloco.sync.effects import OuterEffect
    from diloco.sync.events import Fate
    from diloco.sync.journal import Frame, Segment
    from diloco.sync.options import OuterOptions
    from diloco.sync.replication import Place
    from diloco.sync.state import FragmentState

VERSIONS_KEPT = 4
"""Of each fragment, in memory: so far may a site be behind and still follow the down-links."""


@dataclass(frozen=True, slots=True)
class Kept:
    """One version.  ``link`` is the decoded down-link from the version before."""

    theta: Value
    momentum: Value
    published: Value
    link: Value


ZERO = Kept(values.ZERO, values.ZERO, values.ZERO, values.ZERO)
Versions = list[dict[int, Kept]]


class Replayer:
    """A machine with its versions.  ``payload`` reads an update's values, or raises ``Damaged``."""

    def __init__(
        self, machine: OuterSync, versions: Versions, payload: Callable[[str], Value], rule: OuterRule
    ) -> None:
        self.machine, self.versions = machine, versions
        self._payload, self._rule = payload, rule
        self._under_way = {
            index: machine.outer_step(index)
            for index, fragment in enumerate(machine.state.fragments)
            if fragment.merging_since_ns is not None
        }
        self._records = 0

    def apply(self, record: Record) -> list[OuterEffect]:
        """What the machine says to the next record; ``Damaged`` when it is not what it said when that was written."""
        try:
            effects = decide_again(self.machine, record, self._records)
        except JournalError as error:
            raise Damaged(str(error)) from error
        self._records += 1
        event = record.event
        if isinstance(event, OuterStepDone):
            made = self.made_again(self._under_way.pop(event.fragment))
            if (digest(made.published), digest(made.link)) != (event.digest, event.downlink_digest):
                raise Damaged(f"version {event.version} of fragment {event.fragment} is another one now")
            self.store(event.fragment, event.version, made)
        elif isinstance(event, OuterStepFailed):
            del self._under_way[event.fragment]
        elif isinstance(event, LineageBegan):
            self.versions, self._under_way = restored(self.versions), {}
        self._under_way |= {effect.fragment: effect for effect in effects if isinstance(effect, StartOuterStep)}
        return effects

    def made_again(self, command: StartOuterStep) -> Kept:
        """The outer step ``command``, also long after it was computed for the first time."""
        contributions = [
            (part.weight, [self._payload(update.payload) for update in part.updates]) for part in command.contributions
        ]
        before = self.versions[command.fragment][command.version - 1]
        return self.made(before, contributions, command.share)

    def made(self, before: Kept, contributions: list[tuple[float, list[Value]]], share: float = 1) -> Kept:
        """The version after ``before``."""
        rule, merged = self._rule, values.merged(contributions)
        theta, momentum = values.outer_step(before.theta, before.momentum, merged, rule, share)
        if rule.published_quantum == 1:
            return Kept(theta, momentum, theta, values.minus(theta, before.published))
        link = values.quantised(values.minus(theta, before.published), rule.published_quantum)
        return Kept(theta, momentum, values.plus(before.published, link), link)

    def store(self, fragment: int, version: int, made: Kept) -> None:
        """``made`` is the newest version; the oldest one of too many goes."""
        self.versions[fragment][version] = made
        self.versions[fragment].pop(version - VERSIONS_KEPT, None)


def restored(versions: Versions) -> Versions:
    """The first versions of a new lineage: the newest values again, and nothing of the momentum.

    No site can follow a down-link to them: whoever has the version before has it from another lineage.
    """
    newest = [(max(kept), kept[max(kept)]) for kept in versions]
    return [{version + 1: Kept(kept.theta, values.ZERO, kept.published, values.ZERO)} for version, kept in newest]


def digest(value: Value) -> str:
    """What stands for the digest of a tensor."""
    return f"{value[0]}:{value[1]}:{value[2]}"


SNAPSHOTS_KEPT = 2


class OuterDisk:
    """The syncer's folder.  ``reached`` is told every instant at which the process may die."""

    def __init__(self, options: OuterOptions, rule: OuterRule) -> None:
        self.options, self.rule = options, rule
        self.storage = Storage()
        self.chain = CHAIN_START
        self.segment = 0
        self.notes: list[str] = []
        """What was not as it should be when it was recovered last."""
        self._decided: deque[tuple[int, str]] = deque()

    # --- writing -----------------------------------------------------------------------------------------------

    def keep_payload(self, payload: str, value: Value, reached: Callable[[str], None]) -> None:
        """Make an update's payload durable under its name."""
        self.keep_file(payload, sealed(canonical(value)), reached)

    def keep_file(self, payload: str, data: bytes, reached: Callable[[str], None]) -> None:
        """The same for bytes that are a payload already."""
        beside = f"partial/{payload}"
        self.storage.remove(beside)
        self.storage.append(beside, data)
        reached("payload written")
        self.storage.sync(beside)
        self.storage.rename(beside, f"spool/{payload}")
        reached("payload renamed")
        self.storage.sync_names()

    def drop_payload(self, payload: str) -> None:
        """An update was not accepted by this name: nothing can need its payload."""
        self.storage.remove(f"spool/{payload}")

    def release(self, payload: str) -> None:
        """An update has its fate: its payload goes with the last snapshot from which a replay would want it."""
        self._decided.append((self.segment, payload))

    def is_decided(self, payload: str) -> bool:
        """Whether it only waits for a snapshot."""
        return any(name == payload for _, name in self._decided)

    def frame(self, records: Sequence[Record]) -> tuple[bytes, bytes]:
        """The next frame of the journal, and its chain value."""
        return encode_frame(encode_records(records), self.chain)

    def write(self, frame: bytes, chain: bytes, reached: Callable[[str], None]) -> Place:
        """Make a frame durable, and mark it; where it ends."""
        name = journal_name(self.segment)
        reached("before the record")
        self.storage.append(name, frame[: len(frame) // 2])
        reached("in the record")
        self.storage.append(name, frame[len(frame) // 2 :])
        reached("record written")
        end = len(self.storage.read(name))
        self.storage.sync(name)
        reached("record synced")
        self.storage.append(name, encode_mark(chain))
        self.chain = chain
        return self.segment, end

    def journal_name(self) -> str:
        """The file that is being written."""
        return journal_name(self.segment)

    def decided(self, site: str, fate: Fate) -> None:
        """``release`` by the update's name."""
        self.release(payload_name(site, fate.fragment, fate.sequence, fate.digest))

    def begin(
        self,
        segment: int,
        header: bytes,
        snapshot: tuple[str, bytes],
        payloads: Sequence[tuple[str, bytes]],
        reached: Callable[[str], None],
    ) -> None:
        """Make an empty folder the one that a snapshot and the journal behind it are of.

        The journal first: one without an event is taken for a folder that is new, a snapshot without one is not.
        """
        for name in self.storage.names(""):
            self.storage.remove(name)  # Of an attempt that came to nothing.
        self.storage.sync_names()
        for name, data in payloads:
            self.keep_file(name, data, reached)
        (unit,) = units(header)
        self.segment, self.chain = segment, unit.chain
        self.storage.append(journal_name(segment), header)
        self.storage.sync(journal_name(segment))
        self.storage.sync_names()
        self.storage.append(journal_name(segment), encode_mark(unit.chain))
        self.storage.append("partial/snapshot", snapshot[1])
        reached("snapshot written")
        self.storage.sync("partial/snapshot")
        self.storage.rename("partial/snapshot", snapshot[0])
        reached("snapshot renamed")
        self.storage.sync_names()

    def snapshot(self, machine: OuterSync, versions: Versions, reached: Callable[[str], None]) -> None:
        """Cut the journal, keep everything, then let go of what no snapshot left needs."""
        self._rotate()
        newest = [kept[fragment.version] for kept, fragment in zip(versions, machine.state.fragments, strict=True)]
        facts = {
            "state": machine.snapshot(),
            "values": [[kept.theta, kept.momentum, kept.published, kept.link] for kept in newest],
            "segment": self.segment,
        }
        number = 1 + max((_number(name) for name in self.storage.names("snapshot-")), default=0)
        beside = f"partial/snapshot-{number:06d}"
        self.storage.remove(beside)
        self.storage.append(beside, sealed(canonical(facts)))
        reached("snapshot written")
        self.storage.sync(beside)
        self.storage.rename(beside, f"snapshot-{number:06d}")
        reached("snapshot renamed")
        self.storage.sync_names()
        reached("snapshot kept")
        self._prune()

    def _rotate(self) -> None:
        if self.segment:
            self.storage.sync(journal_name(self.segment))  # Its last mark: only the last segment may end torn.
        self.segment += 1
        name = journal_name(self.segment)
        header, chain = encode_header(self.segment, self.chain, {})
        self.storage.remove(name)  # One that was begun and never written to.
        self.storage.append(name, header)
        self.storage.sync(name)
        self.storage.sync_names()
        self.storage.append(name, encode_mark(chain))
        self.chain = chain

    def end(self) -> Place:
        """Where the last unit of the journal ends that a standby gets; a mark after it is this disk's own."""
        found = [unit.end for unit in units(self.storage.read(self.journal_name())) if unit.kind != MARK]
        return self.segment, found[-1]

    def _prune(self) -> None:
        snapshots = self.storage.names("snapshot-")
        for name in snapshots[:-SNAPSHOTS_KEPT]:
            self.storage.remove(name)
        try:
            first = int(str(self.facts(self.storage.names("snapshot-")[0])["segment"]))
        except Damaged:
            return  # Until it goes, nothing else does.
        self.storage.sync_names()  # None of what is dropped next may be wanted by what a power cut brings back.
        for name in self.storage.names("journal-"):
            if _number(name) < first:
                self.storage.remove(name)
        self.storage.sync_names()
        while self._decided and self._decided[0][0] < first:
            self.storage.remove(f"spool/{self._decided.popleft()[1]}")

    # --- reading -----------------------------------------------------------------------------------------------

    def payload(self, payload: str) -> Value:
        """An update's payload; ``Damaged`` when it is not what was kept."""
        name = f"spool/{payload}"
        first, second, third = json.loads(unsealed(name, self.storage.read(name)))
        return (first, second, third)

    def facts(self, name: str) -> dict[str, object]:
        """A snapshot; ``Damaged`` when it is not what was kept."""
        facts = json.loads(unsealed(name, self.storage.read(name)))
        assert isinstance(facts, dict)
        return facts

    def is_new(self) -> bool:
        """Whether no process ever kept a snapshot here; then nothing was ever acknowledged here either."""
        return not self.storage.names("snapshot-")

    def recover(self) -> Replayer:
        """What the last process had.  ``Damaged`` says why it cannot be."""
        damaged: dict[str, str] = {}
        for name in reversed(self.storage.names("snapshot-")):
            try:
                facts = self.facts(name)
            except Damaged as error:
                damaged[name] = str(error)
                continue
            found = self._replayed(facts)
            self.notes = list(damaged.values())
            for each in damaged:
                self.storage.remove(each)
            return found
        if damaged or any(self._read(name).frames for name in self.storage.names("journal-")):
            raise Damaged(f"no snapshot is whole: {'; '.join(damaged.values()) or 'there is none'}")
        # Nothing was ever acknowledged: before that there is a first snapshot.
        machine = OuterSync(self.options)
        versions: Versions = [{0: ZERO} for _ in machine.state.fragments]
        self.chain, self.segment = CHAIN_START, 0
        self.snapshot(machine, versions, lambda _: None)
        return self._replayer(machine, versions)

    def _replayer(self, machine: OuterSync, versions: Versions) -> Replayer:
        return Replayer(machine, versions, self.payload, self.rule)

    def _replayed(self, facts: dict[str, object]) -> Replayer:
        machine = OuterSync.restore(self.options, facts["state"])
        replayer = self._replayer(machine, _versions(machine.state.fragments, facts["values"]))
        for record in self._records(int(str(facts["segment"]))):
            replayer.apply(record)
        self._sweep(machine)
        return replayer

    def _records(self, first: int) -> list[Record]:
        """The records from segment ``first`` on; what a crash has cut short is cut off."""
        names = [journal_name(number) for number in range(first, 1 + _number(self.storage.names("journal-")[-1]))]
        found = [self._read(name) for name in names]
        if found[-1].header is None and len(found) > 1:
            self.storage.remove(names.pop())  # It was being begun: nothing in it was ever acknowledged.
            found.pop()
        for before, name, segment in zip([None, *found], names, found, strict=False):
            if segment.header is None:
                raise Damaged(f"{name} has no header")
            if before is not None and bytes.fromhex(segment.header.before) != before.chain:
                raise Damaged(f"{name} does not go on from the segment before it")
            if segment is not found[-1] and segment.end < len(self.storage.read(name)):
                raise Damaged(f"{name} ends at byte {segment.end} and is not the last segment")
        self.storage.cut(names[-1], found[-1].end)
        self.chain, self.segment = found[-1].chain, _number(names[-1])
        if not found[-1].marked:
            self.storage.append(names[-1], encode_mark(self.chain))
        return [record for segment in found for frame in segment.frames for record in _in(frame)]

    def _read(self, name: str) -> Segment:
        try:
            return read_segment(self.storage.read(name))
        except JournalError as error:
            raise Damaged(f"{name}: {error}") from error

    def _sweep(self, machine: OuterSync) -> None:
        """Drop payloads that were never accepted; the others wait for a snapshot again."""
        waiting = payloads_in(machine.snapshot())
        needed = set(waiting)
        # What is kept of the journal, also where no snapshot left needs it: a standby may go on from there.
        first = _number(self.storage.names("journal-")[0])
        for name in self.storage.names("snapshot-"):
            try:
                facts = self.facts(name)
            except Damaged:
                continue
            needed |= payloads_in(facts["state"])
        try:
            kept = [self._read(journal_name(number)) for number in range(first, self.segment + 1)]
        except Damaged:
            return  # It is older than what is in use, and nothing is dropped for it.
        events = [record.event for segment in kept for frame in segment.frames for record in _in(frame)]
        needed |= {event.payload for event in events if isinstance(event, UpdateArrived)} - {""}
        for name in self.storage.names("spool/"):
            payload = name.removeprefix("spool/")
            if payload not in needed:
                self.storage.remove(name)
        self._decided = deque((self.segment, payload) for payload in sorted(needed - waiting))


def payload_name(site: str, fragment: int, sequence: int, digest: str) -> str:
    """The name of an update's payload."""
    return f"{site}-{fragment}-{sequence}-{digest}"


def _in(frame: Frame) -> list[Record]:
    return decode_records(frame.body, frame.offset)


def journal_name(number: int) -> str:
    """The file of a segment."""
    return f"journal-{number:06d}"


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])


def _versions(fragments: Sequence[FragmentState], plain: object) -> Versions:
    assert isinstance(plain, list)
    rows = [[(a, b, c) for a, b, c in row] for row in plain]
    return [{part.version: Kept(*row)} for part, row in zip(fragments, rows, strict=True)]


def payloads_in(state: object) -> set[str]:
    """What is accepted and not decided in ``state``."""
    assert isinstance(state, dict)
    lines = [line for site in state["sites"].values() for line in site["lines"]]
    return {pending["payload"] for line in lines for pending in line["undecided"]}
