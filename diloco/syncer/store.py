"""The syncer's own disk: run.json, journal, snapshots, spool; and how a process takes them over.

What is durable when:

- an update: its file, then (before its ack) the journal record ``UpdateArrived`` that names it;
- a version: the journal record ``OuterStepDone`` with its digests, before any site hears of it;
- a fate: by the record that decided it, before it is told;
- values: by a snapshot, or by the snapshot before it and the journal, from which they are computed again.

Recovery = the newest snapshot that verifies + the journal from the segment it names, through the same machine and the
same arithmetic; every recomputed version is compared with the digest that was journalled, and every payload that is
still to be merged with the digest that was acknowledged.

Verification.  ``verify`` looks at everything that lies in a data folder, and touches nothing: is it what was written?
It checks three things that a start does not need: the journal behind older snapshots, those snapshots' tensors, and
payloads that are merged already.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco.durable import PLAIN_DISK, ReadingDisk, Step
from diloco.sync.events import UpdateArrived, UpstreamFetched
from diloco.sync.journal import JournalError
from diloco.sync.plain import PlainError, parse_json, shown
from diloco.sync.syncer import OuterSync
from diloco.syncer.holdings import Holdings
from diloco.syncer.images import Lineages
from diloco.syncer.journal_files import JournalEnd, JournalFiles, Position
from diloco.syncer.replaying import Replayer
from diloco.syncer.snapshots import (
    FILES_MAX,
    RECOVERY_ONLY,
    FragmentValues,
    NewerSnapshotError,
    Retention,
    Snapshot,
    SnapshotError,
    Snapshots,
)
from diloco.syncer.spool import Spool, SpoolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from diloco.durable import Disk
    from diloco.outer.rule import OuterRule
    from diloco.sync.events import Fate
    from diloco.sync.journal import Record
    from diloco.sync.options import OuterOptions
    from diloco.syncer.snapshots import Choice, Point


def payloads_in(state: object) -> dict[str, str]:
    """The payloads of the undecided updates in a machine's snapshot, with their digests; of a region also those of the
    versions above that it is not done with."""
    assert isinstance(state, dict)
    waiting = [pending for site in state["sites"].values() for line in site["lines"] for pending in line["undecided"]]
    parts = (state.get("upstream") or {}).get("parts", ())
    waiting += [part[name] for part in parts for name in ("base", "arrived", "taking") if part[name] is not None]
    return {each["payload"]: each["digest"] for each in waiting}


def payloads_named(records: Sequence[Record]) -> dict[str, str]:
    """The payloads that arrived in ``records``, with their digests."""
    events = [record.event for record in records if isinstance(record.event, UpdateArrived | UpstreamFetched)]
    return {event.payload: event.digest for event in events if event.payload}


FORMAT = 2
"""Of ``run.json``, and so of the folder: an earlier version refuses a folder of a later one.  1 is still read."""


STAGING = ".restoring"
"""Where ``restoring.py`` makes what it then moves into the folder."""

WAYS_OUT = (
    "put that file back from a standby's spool or a backup's, or have all that waits refused and go on with what is "
    "merged (`diloco replay RUN --out IMAGE`, then `diloco restore RUN --from IMAGE`)"
)
"""Of a payload that is damaged before it was merged."""


class StoreError(ValueError):
    """The folder holds no state that may be continued; the text says which file and why."""


@dataclass(frozen=True, slots=True)
class RunCard:
    """What a data folder is for; a process with another card does not touch it.

    The file has the folder's lineage as well: a process goes on under the one that it finds.
    """

    run_id: str
    layout_fingerprint: str
    shared_digest: str
    earlier_digest: str = ""
    """What an earlier release says for ``shared_digest``; no card says both."""

    def facts(self) -> dict[str, str]:
        """What the file says of the run, and what a standby says."""
        return {name: getattr(self, name) for name in ("run_id", "layout_fingerprint", "shared_digest")}

    def difference(self, theirs: Mapping[str, object]) -> str | None:
        """The first of the ``facts`` by which ``theirs`` are of another run."""
        for name, ours in self.facts().items():
            accepted = (ours, self.earlier_digest) if name == "shared_digest" else (ours,)
            if theirs.get(name) not in accepted:
                return name
        return None


@dataclass(slots=True)
class Recovered:
    """The state of an earlier process, to the bit: memory, and what it held; ``records`` were replayed."""

    machine: OuterSync
    holdings: Holdings
    records: int
    notes: list[str]


@dataclass(frozen=True, slots=True)
class _Decided:
    """A payload that only a replay may want; its update's fate is in the journal segment ``segment``, or before."""

    segment: int
    reference: str
    size: int


@dataclass(frozen=True, slots=True)
class Pin:
    """What a standby is being sent: the journal from ``segment`` on, and a snapshot (0: it has that)."""

    snapshot: int
    segment: int


class Store:
    """The data folder.  The caller holds its lock (``diloco.durable.locked``)."""

    def __init__(
        self,
        folder: Path,
        card: RunCard,
        disk: Disk = PLAIN_DISK,
        retention: Retention = RECOVERY_ONLY,
        note: Callable[[str], None] = lambda why: None,
    ) -> None:
        """``note`` is told in words when less of the past is kept than ``retention`` asks for."""
        self.folder = folder
        self.card = card
        self.disk = disk
        self._retention = retention
        self._note = note
        self.pinned: Callable[[], Pin | None] = lambda: None
        """What is kept for a standby although retention would let it go, up to retention's bound in bytes."""
        self._cut = False
        self._pruning = threading.Lock()
        disk.settle(folder, Step.FOLDER)
        self._check_staging()
        self._check_card(card)
        self.spool = Spool(folder / "spool", disk)
        run = {"run_id": card.run_id, "layout_fingerprint": card.layout_fingerprint}
        self.journal = JournalFiles(folder / "journal", run, disk)
        self.snapshots = Snapshots(folder / "snapshots", disk=disk)
        self.snapshots.sweep()
        self.lineages = Lineages(folder / "lineages", disk)
        self.lineages.sweep()
        for leftover in folder.glob(".*.tmp"):  # Of a process that died while it wrote a file of the folder itself.
            disk.remove(leftover, Step.FOLDER)
        disk.sync_folder(folder, Step.FOLDER)
        self._decided: deque[_Decided] = deque()

    def _check_staging(self) -> None:
        """A restore that was cut short has left nothing that a run may begin on; after its last move it was whole."""
        staging = self.folder / STAGING
        if staging.exists():
            if not any(self.folder.glob("snapshots/[0-9]*")):
                raise StoreError(f"{self.folder} is being restored, or was when that was cut short: restore it again")
            self.disk.remove(staging, Step.FOLDER)

    def _check_card(self, card: RunCard) -> None:
        path = self.folder / "run.json"
        ours = {"format": FORMAT, **card.facts()}
        if not path.exists():
            # Nothing else is here before it: where something is, it was lost, and the recovery says so.
            if not any(any((self.folder / name).glob("*")) for name in ("snapshots", "journal")):
                self._write_card({**ours, "lineage": 1})
            return
        try:
            theirs = dict(parse_json(path.read_bytes()))
        except (ValueError, TypeError) as error:
            raise StoreError(f"{path} is damaged: {error}") from error
        found = theirs.get("format")
        if type(found) is not int or not 1 <= found <= FORMAT:
            raise StoreError(f"{path} has format {shown(found)}, and this version reads up to {FORMAT}")
        if (name := card.difference(theirs)) is not None:
            raise StoreError(
                f"{path} has {name} {shown(theirs.get(name))} and this run has {getattr(card, name)!r}: "
                "another folder, please"
            )
        if {**theirs, **ours} != theirs:  # An earlier release has written it.
            self._write_card({"lineage": 1, **theirs, **ours})

    def _write_card(self, card: dict[str, object], step: Step = Step.CARD) -> None:
        text = json.dumps(card, indent=1, sort_keys=True).encode()
        self.disk.write_file(self.folder / "run.json", text, step)

    def write_lineage(self, lineage: int) -> None:
        """Say in ``run.json`` which lineage the run is in now."""
        self._write_card({"format": FORMAT, **self.card.facts(), "lineage": lineage}, Step.LINEAGE_CARD)

    def _mend_card(self, lineage: int) -> list[str]:
        """Have ``run.json`` say the lineage that journal and snapshots give; what it said instead, if it did."""
        path = self.folder / "run.json"
        try:
            said = dict(parse_json(path.read_bytes())).get("lineage")
        except FileNotFoundError:
            self.write_lineage(lineage)
            return [f"{path} was missing: it is written anew, with the lineage of the journal, {lineage}"]
        if type(said) is int and said == lineage:
            return []
        self.write_lineage(lineage)
        return [f"{path} said lineage {shown(said)}: the journal's is {lineage}, and is written there"]

    def is_new(self) -> bool:
        """Whether no process ever got as far as to acknowledge something here."""
        return not self.snapshots.numbers() and self.journal.is_blank()

    def begin(self, machine: OuterSync, values: Sequence[FragmentValues]) -> None:
        """Keep version 0: the first snapshot, and the first journal segment behind it."""
        place = self.journal.begin()
        self.snapshots.write(Snapshot(machine.snapshot(), tuple(values), place.segment, place.chain))

    def recover(
        self,
        options: OuterOptions,
        rule: OuterRule,
        down_codec: str,
        downlinks_kept: int = 32,
        *,
        merges: bool = True,
    ) -> Recovered:
        """The state that the last process had; ``StoreError`` when none is whole.

        Every payload that waits for its outer step is read and verified, unless the caller ``merges`` none of them.
        Payloads that neither a snapshot left nor the journal behind it names are dropped on the way.
        """
        notes: list[str] = []
        damaged: list[int] = []
        for number in reversed(self.snapshots.numbers()):
            try:
                snapshot = self.snapshots.load(number)
            except NewerSnapshotError as error:
                raise StoreError(str(error)) from error
            except SnapshotError as error:
                notes.append(f"{error}; the snapshot before it is used")
                damaged.append(number)
                continue
            try:
                replayer = self._replayed(snapshot, options, rule, down_codec, downlinks_kept)
                if merges:
                    self._check_waiting(replayer.machine)
            except (JournalError, SpoolError, PlainError) as error:
                raise StoreError(str(error)) from error
            except AssertionError as error:
                text = f"{self.journal.folder} does not fit: another version or other options ({error})"
                raise StoreError(text) from error
            notes += self.journal.take_over()
            notes += self._mend_card(replayer.machine.state.lineage)
            for each in damaged:
                self.snapshots.set_aside(each)
            recovered = Recovered(replayer.machine, replayer.holdings, replayer.records, notes)
            self._sweep_spool(recovered)
            return recovered
        raise StoreError(f"{self.snapshots.folder} has no whole snapshot: {'; '.join(notes) or 'it is empty'}")

    def _replayed(
        self,
        snapshot: Snapshot,
        options: OuterOptions,
        rule: OuterRule,
        down_codec: str,
        downlinks_kept: int,
    ) -> Replayer:
        machine = OuterSync.restore(options, snapshot.state)
        replayer = Replayer(machine, snapshot.fragments, self.spool, rule, down_codec, downlinks_kept, self.lineages)
        for record in self.journal.read(snapshot.journal_segment, snapshot.journal_chain):
            replayer.apply(record)
        return replayer

    def _check_waiting(self, machine: OuterSync) -> None:
        """``SpoolError`` names the update whose payload is not what was acknowledged: its outer step would fail."""
        waiting = [
            (f"update {pending.sequence} of fragment {fragment} from site {site}", pending.payload, pending.digest)
            for site, each in machine.state.sites.items()
            for fragment, line in enumerate(each.lines)
            for pending in line.undecided
        ]
        with ThreadPoolExecutor(max_workers=FILES_MAX) as pool:
            checks = [(update, pool.submit(self.spool.check, *payload)) for update, *payload in waiting]
            for update, check in checks:
                try:
                    check.result()
                except SpoolError as error:
                    raise SpoolError(
                        f"{error}; it is {update}, which is acknowledged and not merged: {WAYS_OUT}"
                    ) from error

    def decided(self, site: str, fate: Fate) -> None:
        """An update has its fate: once no snapshot that is kept is older than that, its payload may go."""
        self.release(self.spool.name(site, fate.fragment, fate.sequence, fate.digest))

    def release(self, reference: str) -> None:
        """Nothing that is still to come needs this payload; a replay from an older snapshot might."""
        self._decided.append(_Decided(self.journal.index, reference, self.spool.size(reference)))

    def snapshot_writer(
        self,
        machine: OuterSync,
        values: Sequence[FragmentValues],
        place: Position | None = None,
        check: Callable[[int, FragmentValues], None] = lambda index, values: None,
    ) -> Callable[[], int]:
        """Cut the journal here, or take it as cut at ``place``; returns the (long) rest, to be done beside the machine.

        ``DiskFullError`` when there is no room to begin: nothing has changed.

        The rest writes the snapshot, a fragment after the other, each when ``check`` has looked at it and not kept for
        longer: those first of which ``values``, which may go on, holds a newer version by then.  Then it lets go of the
        snapshots that retention does not keep, and of the journal segments and payloads that none of those left needs.
        """
        place = place or self.journal.rotate()
        snapshot = Snapshot(machine.snapshot(), (), place.segment, place.chain)
        held = dict(enumerate(values))

        def in_turn() -> Iterator[tuple[int, FragmentValues]]:
            while held:
                index = next((each for each in held if values[each] is not held[each]), min(held))
                check(index, held[index])
                yield index, held.pop(index)

        def write() -> int:
            size = self.snapshots.write(snapshot, in_turn())
            choice = self._prune(self._retention)
            if choice.cut and not self._cut:
                steps, most = self._retention.steps, self._retention.bytes_max
                self._note(f"less than the last {steps} outer steps can be replayed: {most} bytes do not hold them")
            self._cut = choice.cut or (self._cut and bool(choice.kept) and not choice.reaches(self._retention))
            return size

        return write

    def let_go_of_the_past(self) -> None:
        """Keep only what recovery needs: the disk is full, and a run that goes on is worth more."""
        before = self.snapshots.numbers()
        self._prune(RECOVERY_ONLY)
        gone = len(before) - len(self.snapshots.numbers())
        if gone:
            self._note(f"{gone} old snapshots and what is behind them went: the disk is full")

    def _prune(self, retention: Retention) -> Choice:
        """Drop what ``retention`` does not keep and no standby is being sent.

        Each kind has gone for good before what it needs goes: a power cut may bring back a name that was removed, and
        a snapshot without its journal, or a segment without its payloads, would then pass for kept.
        """
        with self._pruning:
            pin = self.pinned()
            if pin is not None and self._bytes_in(range(pin.segment, self.journal.index)) > retention.bytes_max:
                pin = None  # It is too slow, or the disk is full: its copy begins again.
            choice = self.snapshots.prune(retention, self._behind_bytes, pin.snapshot if pin is not None else 0)
            first = choice.kept[0].segment if choice.kept else 0
            first = first if pin is None else min(first, pin.segment)
            self.disk.sync_folder(self.snapshots.folder, Step.SNAPSHOT_PRUNE)
            self.journal.prune(first)
            self.disk.sync_folder(self.journal.folder, Step.JOURNAL_PRUNE)
            self.lineages.prune(self.snapshots.oldest_lineage())
            while self._decided and self._decided[0].segment < first:
                self.spool.drop(self._decided.popleft().reference)
            return choice

    def _behind_bytes(self, first: Point, last: Point) -> int:
        """Journal and decided payloads from one snapshot to another."""
        return self._bytes_in(range(first.segment, last.segment))

    def _bytes_in(self, between: range) -> int:
        payloads = sum(each.size for each in tuple(self._decided) if each.segment in between)
        return payloads + sum(self.journal.size(index) for index in self.journal.segments() if index in between)

    def _sweep_spool(self, recovered: Recovered) -> None:
        """Drop the payloads that neither a snapshot left nor the journal behind it names; note when the rest may go."""
        waiting = set(payloads_in(recovered.machine.snapshot()))
        needed = set(waiting)
        for number in self.snapshots.numbers():
            try:
                needed |= payloads_in(self.snapshots.peek(number)[0]).keys()
            except SnapshotError as error:
                recovered.notes.append(f"{error}; it is older than the one in use and is set aside")
                self.snapshots.set_aside(number)
        try:
            records = self.journal.read(min(self.journal.segments()))
        except JournalError as error:
            recovered.notes.append(f"{error}; it is older than the snapshot in use, and no payload is dropped for it")
            return
        needed |= payloads_named(records).keys()
        self.spool.sweep(needed)
        for reference in sorted(needed - waiting):
            self.release(reference)


@dataclass(slots=True)
class Verified:
    """What was found whole; ``torn_bytes`` at the end of the journal were being written when their process died."""

    segments: int = 0
    records: int = 0
    snapshots: int = 0
    payloads: int = 0
    torn_bytes: int = 0


def verify(folder: Path) -> Verified:
    """Check the data folder; the first damage raises ``JournalError``, ``SnapshotError`` or ``SpoolError``.

    May be called beside a syncer that runs: what it is writing at that moment counts as torn.
    """
    found = Verified()
    if not any((folder / "journal").glob("journal-*.log")):
        raise JournalError(f"{folder / 'journal'} holds no journal")
    disk = ReadingDisk()
    noted = JournalEnd(folder / "journal" / "journal.end", disk)
    for why in noted.damage():
        raise JournalError(f"{noted.path} is damaged: {why}")
    journal, snapshots = JournalFiles(folder / "journal", disk=disk), Snapshots(folder / "snapshots", disk=disk)
    numbers, segments = snapshots.numbers(), journal.segments()
    chains: dict[int, str] = {}
    wanted: dict[str, str] = {}
    for read in journal.walk(segments[0]):
        found.segments += 1
        found.records += len(read.records)
        found.torn_bytes += read.size - read.end
        if read.found is not None and read.found.header is not None:
            chains[read.index] = read.found.header.before
        wanted |= payloads_named(read.records)
    for number in numbers:
        snapshot = snapshots.load(number)
        found.snapshots += 1
        begins = f"snapshot {number:08d} goes on with segment {snapshot.journal_segment}"
        if snapshot.journal_segment not in segments:
            raise JournalError(f"{journal.path(snapshot.journal_segment)} is missing: {begins}")
        if snapshot.journal_chain and chains.get(snapshot.journal_segment) != snapshot.journal_chain:
            raise JournalError(
                f"{journal.path(snapshot.journal_segment)}: unit at byte 0 is of another chain: {begins}"
            )
        wanted |= payloads_in(snapshot.state)
    spool = Spool(folder / "spool", disk)
    for reference, digest in sorted(wanted.items()):
        spool.check(reference, digest)
        found.payloads += 1
    return found
