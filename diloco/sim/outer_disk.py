"""The simulated syncer's disk: journal, snapshots and spool, written in the same order as the real ones.

The frames, marks, records and their replay are the product's own (``sync/journal.py``); the rest is a short form of
``syncer/store``: a payload is durable before its record, a record before its effects, a snapshot before anything older
is removed.  Recovery loads the newest snapshot that verifies and computes every outer step since then again from the
spool.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco.sim import world
from diloco.sim.world import Damaged, Storage, Value, sealed, unsealed
from diloco.sync.effects import StartOuterStep
from diloco.sync.events import LineageBegan, OuterStepDone, UpdateArrived
from diloco.sync.journal import (
    CHAIN_START,
    MARK,
    JournalError,
    Record,
    canonical,
    decode_records,
    encode_frame,
    encode_header,
    encode_mark,
    encode_records,
    read_segment,
    units,
)
from diloco.sync.syncer import OuterSync, Replay

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from diloco.sim.world import OuterRule
    from diloco.sync.effects import TakeVersion
    from diloco.sync.events import Fate
    from diloco.sync.journal import Frame, Segment
    from diloco.sync.leadership import Place
    from diloco.sync.options import OuterOptions
    from diloco.sync.state import FragmentState

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
    """A machine and its versions under replay.  ``payload`` reads an update's value, or raises ``Damaged``."""

    def __init__(
        self, machine: OuterSync, versions: Versions, payload: Callable[[str], Value], rule: OuterRule
    ) -> None:
        super().__init__(machine)
        self.versions, self._payload, self._rule = versions, payload, rule

    def step_done(self, event: OuterStepDone, command: StartOuterStep | TakeVersion) -> None:
        """Compute the version again; raise ``Damaged`` when its digests differ from the journalled ones."""
        assert isinstance(command, StartOuterStep), "no region"
        made = self.made_again(command)
        if (digest(made.published), digest(made.link)) != (event.digest, event.downlink_digest):
            raise Damaged(f"version {event.version} of fragment {event.fragment} is another one now")
        self.store(event.fragment, event.version, made)

    def lineage_began(self, event: LineageBegan) -> None:
        """Make the newest values the lineage's first versions."""
        self.versions = restored(self.versions)

    def made_again(self, command: StartOuterStep) -> Kept:
        """Compute the outer step ``command`` from the stored payloads, for the first time or again."""
        contributions = [
            (part.weight, [self._payload(update.payload) for update in part.updates]) for part in command.contributions
        ]
        before = self.versions[command.fragment][command.version - 1]
        return self.made(before, contributions, command.share)

    def made(self, before: Kept, contributions: list[tuple[float, list[Value]]], share: float = 1) -> Kept:
        """Return the version after ``before``."""
        rule, merged = self._rule, world.merged(contributions)
        theta, momentum = world.outer_step(before.theta, before.momentum, merged, rule, share)
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


class OuterDisk:
    """The syncer's folder.  Methods call ``reached`` at every point at which the process may die."""

    def __init__(self, options: OuterOptions, rule: OuterRule) -> None:
        self.options, self.rule = options, rule
        self.storage = Storage()
        self.chain = CHAIN_START
        self.segment = 0
        self.notes: list[str] = []
        """The damage that the last recovery found and got past."""
        self._decided: deque[tuple[int, str]] = deque()

    # --- writing -----------------------------------------------------------------------------------------------

    def keep_payload(self, payload: str, value: Value, reached: Callable[[str], None]) -> None:
        """Make an update's payload durable under its name."""
        self.keep_file(payload, sealed(canonical(value)), reached)

    def keep_file(self, payload: str, data: bytes, reached: Callable[[str], None]) -> None:
        """Make a payload's encoded bytes durable under its name."""
        self._put(f"spool/{payload}", data, "payload", reached)

    def _put(self, name: str, data: bytes, what: str, reached: Callable[[str], None]) -> None:
        """Write a file under a temporary name, sync it, rename it, and sync the name."""
        beside = f"partial/{name.removeprefix('spool/')}"
        self.storage.remove(beside)
        self.storage.append(beside, data)
        reached(f"{what} written")
        self.storage.sync(beside)
        self.storage.rename(beside, name)
        reached(f"{what} renamed")
        self.storage.sync_names()

    def drop_payload(self, payload: str) -> None:
        """Remove the payload of an update that was not accepted under this name."""
        self.storage.remove(f"spool/{payload}")

    def release(self, payload: str) -> None:
        """Mark the payload of a decided update: it goes with the last snapshot whose replay needs it."""
        self._decided.append((self.segment, payload))

    def is_decided(self, payload: str) -> bool:
        """Return whether the payload is marked by ``release``."""
        return any(name == payload for _, name in self._decided)

    def frame(self, records: Sequence[Record]) -> tuple[bytes, bytes]:
        """Return the journal's next frame and its chain value."""
        return encode_frame(encode_records(records), self.chain)

    def write(self, frame: bytes, chain: bytes, reached: Callable[[str], None]) -> Place:
        """Make a frame durable and mark it; return the place where it ends."""
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
        """Return the name of the current segment's file."""
        return journal_name(self.segment)

    def decided(self, site: str, fate: Fate) -> None:
        """As ``release``, by the update's site and fate."""
        self.release(payload_name(site, fate.fragment, fate.sequence, fate.digest))

    def begin(
        self,
        segment: int,
        header: bytes,
        snapshot: tuple[str, bytes],
        payloads: Sequence[tuple[str, bytes]],
        reached: Callable[[str], None],
    ) -> None:
        """Fill a standby's folder: payloads, the journal's header, then the snapshot.

        The journal comes before the snapshot: recovery takes a journal without events for a new folder, but it cannot
        begin from a snapshot without a journal.
        """
        for name in self.storage.names(""):
            self.storage.remove(name)  # Left by an attempt that failed.
        self.storage.sync_names()
        for name, data in payloads:
            self.keep_file(name, data, reached)
        (unit,) = units(header)
        self._begin_segment(segment, header, unit.chain)
        self._put(*snapshot, "snapshot", reached)

    def snapshot(self, machine: OuterSync, versions: Versions, reached: Callable[[str], None]) -> None:
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
        self._put(f"snapshot-{number:06d}", sealed(canonical(facts)), "snapshot", reached)
        reached("snapshot kept")
        self._prune()

    def _begin_segment(self, segment: int, header: bytes, chain: bytes) -> None:
        name = journal_name(segment)
        self.storage.append(name, header)
        self.storage.sync(name)
        self.storage.sync_names()
        self.storage.append(name, encode_mark(chain))
        self.segment, self.chain = segment, chain

    def end(self) -> Place:
        """Return where the journal's last unit ends that a standby gets; marks stay on this disk."""
        found = [unit.end for unit in units(self.storage.read(self.journal_name())) if unit.kind != MARK]
        return self.segment, found[-1]

    def _prune(self) -> None:
        snapshots = self.storage.names("snapshot-")
        for name in snapshots[:-SNAPSHOTS_KEPT]:
            self.storage.remove(name)
        try:
            first = int(str(self.facts(self.storage.names("snapshot-")[0])["segment"]))
        except Damaged:
            return  # The oldest snapshot is damaged: remove nothing else until it is gone.
        self.storage.sync_names()  # A snapshot that a power cut brought back would need the files removed below.
        for name in self.storage.names("journal-"):
            if _number(name) < first:
                self.storage.remove(name)
        self.storage.sync_names()
        while self._decided and self._decided[0][0] < first:
            self.storage.remove(f"spool/{self._decided.popleft()[1]}")

    # --- reading -----------------------------------------------------------------------------------------------

    def payload(self, payload: str) -> Value:
        """Read an update's payload; raise ``Damaged`` when it does not verify."""
        name = f"spool/{payload}"
        first, second, third = json.loads(unsealed(name, self.storage.read(name)))
        return (first, second, third)

    def facts(self, name: str) -> dict[str, object]:
        """Read a snapshot; raise ``Damaged`` when it does not verify."""
        facts = json.loads(unsealed(name, self.storage.read(name)))
        assert isinstance(facts, dict)
        return facts

    def is_new(self) -> bool:
        """Return whether the folder has no snapshot; then no process has ever acknowledged anything here."""
        return not self.storage.names("snapshot-")

    def recover(self) -> Replayer:
        """Recover the last process's machine and versions; ``Damaged`` says why when that is impossible."""
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
        # Nothing was ever acknowledged here: the first snapshot comes before any acknowledgement.
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
        """Return the records from segment ``first`` on; cut off a frame that a crash left incomplete."""
        names = [journal_name(number) for number in range(first, 1 + _number(self.storage.names("journal-")[-1]))]
        found = [self._read(name) for name in names]
        if found[-1].header is None and len(found) > 1:
            self.storage.remove(names.pop())  # A crash interrupted its creation: nothing in it was acknowledged.
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
        return read_segment(self.storage.read(name))

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
        try:
            kept = [self._read(journal_name(number)) for number in range(first, self.segment + 1)]
        except JournalError:
            return  # A segment older than those in use is damaged: remove nothing.
        events = [record.event for segment in kept for frame in segment.frames for record in _in(frame)]
        needed |= {event.payload for event in events if isinstance(event, UpdateArrived)} - {""}
        for name in self.storage.names("spool/"):
            payload = name.removeprefix("spool/")
            if payload not in needed:
                self.storage.remove(name)
        self._decided = deque((self.segment, payload) for payload in sorted(needed - waiting))


def payload_name(site: str, fragment: int, sequence: int, digest: str) -> str:
    """Return the name of an update's payload."""
    return f"{site}-{fragment}-{sequence}-{digest}"


def _in(frame: Frame) -> list[Record]:
    return decode_records(frame.body, frame.offset)


def journal_name(number: int) -> str:
    """Return the file name of a segment."""
    return f"journal-{number:06d}"


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])


def _versions(fragments: Sequence[FragmentState], plain: object) -> Versions:
    assert isinstance(plain, list)
    rows = [[(a, b, c) for a, b, c in row] for row in plain]
    return [{part.version: Kept(*row)} for part, row in zip(fragments, rows, strict=True)]


def payloads_in(state: object) -> set[str]:
    """Return the payloads of the accepted, undecided updates in ``state``."""
    assert isinstance(state, dict)
    lines = [line for site in state["sites"].values() for line in site["lines"]]
    return {pending["payload"] for line in lines for pending in line["undecided"]}
