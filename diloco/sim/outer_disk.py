"""What of the simulated syncer outlives its process: journal, snapshots and spool, in the order of the real one.

The frames, marks and records are the product's own (``sync/frames.py``); the rest is ``syncer/store`` in short: a
payload is safe before its record, a record before its effects, a snapshot before anything older goes.  Recovery is the
newest snapshot that verifies, and every outer step since then computed again from the spool.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco.sim import values
from diloco.sim.storage import Damaged, Storage, sealed, unsealed
from diloco.sim.values import Value
from diloco.sync.effects import StartOuterStep
from diloco.sync.events import LineageBegan, OuterStepDone, OuterStepFailed, UpdateArrived
from diloco.sync.frames import CHAIN_START, encode_frame, encode_header, encode_mark, read_segment
from diloco.sync.journal import JournalError, Record, decide_again, decode_records, encode_records
from diloco.sync.plain import canonical
from diloco.sync.syncer import OuterSync

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from diloco.sim.values import OuterRule
    from diloco.sync.effects import OuterEffect
    from diloco.sync.frames import Frame, Segment
    from diloco.sync.options import OuterOptions
    from diloco.sync.state import FragmentState

VERSIONS_KEPT = 4
"""Of each fragment, in memory: so far may a site be behind and still follow the down-links."""
SNAPSHOTS_KEPT = 2


@dataclass(frozen=True, slots=True)
class Kept:
    """One version.  ``link`` is the decoded down-link from the version before."""

    theta: Value
    momentum: Value
    published: Value
    link: Value


ZERO = Kept(values.ZERO, values.ZERO, values.ZERO, values.ZERO)
Versions = list[dict[int, Kept]]


@dataclass(slots=True)
class Recovered:
    """A machine with its versions, as a new process finds them.

    ``last`` is the last record that was replayed; ``notes`` say what was not as it should be.
    """

    machine: OuterSync
    versions: Versions
    last: Record | None
    notes: list[str]


class OuterDisk:
    """The syncer's folder.  ``reached`` is told every instant at which the process may die."""

    def __init__(self, options: OuterOptions, rule: OuterRule) -> None:
        self.options, self.rule = options, rule
        self.storage = Storage()
        self._chain = CHAIN_START
        self._segment = 0
        self._decided: deque[tuple[int, str]] = deque()
        self.unsettled: tuple[Record, Sequence[OuterEffect]] | None = None
        """The record that a process was writing when it died; only the next one knows whether it is there."""

    # --- writing -----------------------------------------------------------------------------------------------

    def keep_payload(self, payload: str, value: Value, reached: Callable[[str], None]) -> None:
        """Make an update's payload durable under its name."""
        beside = f"partial/{payload}"
        self.storage.remove(beside)
        self.storage.append(beside, sealed(canonical(value)))
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
        self._decided.append((self._segment, payload))

    def write(self, record: Record, reached: Callable[[str], None]) -> None:
        """Make one record durable, and mark it."""
        name = _journal(self._segment)
        frame, chain = encode_frame(encode_records([record]), self._chain)
        reached("before the record")
        self.storage.append(name, frame[: len(frame) // 2])
        reached("in the record")
        self.storage.append(name, frame[len(frame) // 2 :])
        reached("record written")
        self.storage.sync(name)
        reached("record synced")
        self.storage.append(name, encode_mark(chain))
        self._chain = chain

    def snapshot(self, machine: OuterSync, versions: Versions, reached: Callable[[str], None]) -> None:
        """Cut the journal, keep everything, then let go of what no snapshot left needs."""
        self._rotate()
        newest = [kept[fragment.version] for kept, fragment in zip(versions, machine.state.fragments, strict=True)]
        facts = {
            "state": machine.snapshot(),
            "values": [[kept.theta, kept.momentum, kept.published, kept.link] for kept in newest],
            "segment": self._segment,
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
        if self._segment:
            self.storage.sync(_journal(self._segment))  # Its last mark: only the last segment may end torn.
        self._segment += 1
        name = _journal(self._segment)
        header, chain = encode_header(self._segment, self._chain, {})
        self.storage.remove(name)  # One that was begun and never written to.
        self.storage.append(name, header)
        self.storage.sync(name)
        self.storage.sync_names()
        self.storage.append(name, encode_mark(chain))
        self._chain = chain

    def _prune(self) -> None:
        snapshots = self.storage.names("snapshot-")
        for name in snapshots[:-SNAPSHOTS_KEPT]:
            self.storage.remove(name)
        try:
            first = int(str(self._facts(self.storage.names("snapshot-")[0])["segment"]))
        except Damaged:
            return  # Until it goes, nothing else does.
        for name in self.storage.names("journal-"):
            if _number(name) < first:
                self.storage.remove(name)
        while self._decided and self._decided[0][0] < first:
            self.storage.remove(f"spool/{self._decided.popleft()[1]}")

    # --- reading -----------------------------------------------------------------------------------------------

    def payload(self, payload: str) -> Value:
        """An update's payload; ``Damaged`` when it is not what was kept."""
        name = f"spool/{payload}"
        first, second, third = json.loads(unsealed(name, self.storage.read(name)))
        return (first, second, third)

    def _facts(self, name: str) -> dict[str, object]:
        facts = json.loads(unsealed(name, self.storage.read(name)))
        assert isinstance(facts, dict)
        return facts

    def recover(self, again: Callable[[Versions, StartOuterStep], Kept]) -> Recovered:
        """What the last process had; ``again`` computes an outer step once more.  ``Damaged`` says why it cannot be."""
        damaged: dict[str, str] = {}
        for name in reversed(self.storage.names("snapshot-")):
            try:
                facts = self._facts(name)
            except Damaged as error:
                damaged[name] = str(error)
                continue
            found = self._replayed(facts, again)
            found.notes += damaged.values()
            for each in damaged:
                self.storage.remove(each)
            return found
        if damaged or any(self._read(name).frames for name in self.storage.names("journal-")):
            raise Damaged(f"no snapshot is whole: {'; '.join(damaged.values()) or 'there is none'}")
        # Nothing was ever acknowledged: before that there is a first snapshot.
        machine = OuterSync(self.options)
        versions: Versions = [{0: ZERO} for _ in machine.state.fragments]
        self._chain, self._segment = CHAIN_START, 0
        self.snapshot(machine, versions, lambda _: None)
        return Recovered(machine, versions, None, [])

    def _replayed(self, facts: dict[str, object], again: Callable[[Versions, StartOuterStep], Kept]) -> Recovered:
        machine = OuterSync.restore(self.options, facts["state"])
        versions = _versions(machine.state.fragments, facts["values"])
        under_way = {
            index: machine.outer_step(index)
            for index, fragment in enumerate(machine.state.fragments)
            if fragment.merging_since_ns is not None
        }
        records = self._records(int(str(facts["segment"])))
        try:
            for number, record in enumerate(records):
                effects = decide_again(machine, record, number)
                event = record.event
                if isinstance(event, OuterStepDone):
                    made = again(versions, under_way.pop(event.fragment))
                    if (digest(made.published), digest(made.link)) != (event.digest, event.downlink_digest):
                        raise Damaged(f"version {event.version} of fragment {event.fragment} is another one now")
                    store(versions, event.fragment, event.version, made)
                elif isinstance(event, OuterStepFailed):
                    del under_way[event.fragment]
                elif isinstance(event, LineageBegan):
                    versions, under_way = restored(versions), {}
                under_way |= {effect.fragment: effect for effect in effects if isinstance(effect, StartOuterStep)}
        except JournalError as error:
            raise Damaged(str(error)) from error
        self._sweep(machine)
        return Recovered(machine, versions, records[-1] if records else None, [])

    def _records(self, first: int) -> list[Record]:
        """The records from segment ``first`` on; what a crash has cut short is cut off."""
        names = [_journal(number) for number in range(first, 1 + _number(self.storage.names("journal-")[-1]))]
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
        self._chain, self._segment = found[-1].chain, _number(names[-1])
        if not found[-1].marked:
            self.storage.append(names[-1], encode_mark(self._chain))
        return [record for segment in found for frame in segment.frames for record in _in(frame)]

    def _read(self, name: str) -> Segment:
        try:
            return read_segment(self.storage.read(name))
        except JournalError as error:
            raise Damaged(f"{name}: {error}") from error

    def _sweep(self, machine: OuterSync) -> None:
        """Drop payloads that were never accepted; the others wait for a snapshot again."""
        waiting = _payloads(machine.snapshot())
        needed = set(waiting)
        first = self._segment
        for name in self.storage.names("snapshot-"):
            try:
                facts = self._facts(name)
            except Damaged:
                continue
            needed |= _payloads(facts["state"])
            first = min(first, int(str(facts["segment"])))
        try:
            kept = [self._read(_journal(number)) for number in range(first, self._segment + 1)]
        except Damaged:
            return  # It is older than what is in use, and nothing is dropped for it.
        events = [record.event for segment in kept for frame in segment.frames for record in _in(frame)]
        needed |= {event.payload for event in events if isinstance(event, UpdateArrived)}
        for name in self.storage.names("spool/"):
            payload = name.removeprefix("spool/")
            if payload not in needed:
                self.storage.remove(name)
        self._decided = deque((self._segment, payload) for payload in sorted(needed - waiting))


def store(versions: Versions, fragment: int, version: int, made: Kept) -> None:
    """``made`` is the newest version; the oldest one of too many goes."""
    versions[fragment][version] = made
    versions[fragment].pop(version - VERSIONS_KEPT, None)


def restored(versions: Versions) -> Versions:
    """The first versions of a new lineage: the newest values again, and nothing of the momentum.

    No site can follow a down-link to them: whoever has the version before has it from another lineage.
    """
    newest = [(max(kept), kept[max(kept)]) for kept in versions]
    return [{version + 1: Kept(kept.theta, values.ZERO, kept.published, values.ZERO)} for version, kept in newest]


def digest(value: Value) -> str:
    """What stands for the digest of a tensor."""
    return f"{value[0]}:{value[1]}:{value[2]}"


def _in(frame: Frame) -> list[Record]:
    return decode_records(frame.body, frame.offset)


def _journal(number: int) -> str:
    return f"journal-{number:06d}"


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])


def _versions(fragments: Sequence[FragmentState], plain: object) -> Versions:
    assert isinstance(plain, list)
    rows = [[(a, b, c) for a, b, c in row] for row in plain]
    return [{part.version: Kept(*row)} for part, row in zip(fragments, rows, strict=True)]


def _payloads(state: object) -> set[str]:
    assert isinstance(state, dict)
    lines = [line for site in state["sites"].values() for line in site["lines"]]
    return {pending["payload"] for line in lines for pending in line["undecided"]}
