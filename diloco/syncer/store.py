"""The syncer's data folder: run.json, journal, snapshots, spool; and how a process takes it over.

These are durable:

- an update: by its payload file, then, before its ack, by the journal record ``UpdateArrived`` that names the file;
- a version: by the journal record ``OuterStepDone`` with its digests, before any site hears of it;
- a fate: by the journal record that decided it, before the site hears of it;
- values: by a snapshot, or by the snapshot before it and the journal, from which they are computed again.

Recovery loads the newest snapshot that verifies and replays the journal from the segment that the snapshot names,
through the same machine and the same arithmetic. It compares every recomputed version with the digest in the journal,
and every payload that is still to be merged with the digest that was acknowledged.

``verify`` checks, without writing, that every file in a data folder is as it was written. It covers three things that a
start does not need: the journal behind older snapshots, those snapshots' tensors, and payloads that are merged already.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.codec.base import digest
from diloco.durable import PLAIN_DISK, Disk, ReadingDisk, Step
from diloco.outer.optimizer import NOTHING
from diloco.outer.pseudo_gradient import is_finite
from diloco.sync.effects import LetGo, OuterEffect, TellFate
from diloco.sync.events import UpdateArrived, UpstreamFetched
from diloco.sync.journal import JournalError, PlainError, Record, parse_json, shown
from diloco.sync.syncer import OuterSync
from diloco.syncer.replaying import DataFolder, Replayer, Rules
from diloco.syncer.snapshots import (
    FILES_MAX,
    RECOVERY_ONLY,
    FragmentValues,
    NewerSnapshotError,
    Point,
    Retention,
    Snapshot,
    SnapshotError,
)
from diloco.syncer.spool import SpoolError

if TYPE_CHECKING:
    from torch import Tensor

    from diloco.sync.state import Pending
    from diloco.syncer.journal_files import Position


def payloads_in(state: object) -> dict[str, str]:
    """Return the payloads of the undecided updates in a machine's snapshot, with their digests. For a region also
    return the payloads of the versions above that it still uses."""
    assert isinstance(state, dict)
    waiting = [pending for site in state["sites"].values() for line in site["lines"] for pending in line["undecided"]]
    parts = (state.get("upstream") or {}).get("parts", ())
    waiting += [part[name] for part in parts for name in ("base", "arrived", "taking") if part[name] is not None]
    return {each["payload"]: each["digest"] for each in waiting}


def payloads_named(records: Sequence[Record]) -> dict[str, str]:
    """Return the payloads that arrived in ``records``, with their digests."""
    events = [record.event for record in records if isinstance(record.event, UpdateArrived | UpstreamFetched)]
    return {event.payload: event.digest for event in events if event.payload}


FORMAT = 2
"""The format of ``run.json``, and so of the folder: an older release refuses a newer format. Format 1 is still read."""


STAGING = ".restoring"
"""The subfolder in which ``restoring.py`` builds the files that it then moves into the folder."""

WAYS_OUT = (
    "copy that file back from the spool of a standby or a backup, or refuse all waiting updates and continue with what "
    "is merged (`diloco replay RUN --out IMAGE`, then `diloco restore RUN --from IMAGE`)"
)
"""The remedies for a payload that was damaged before it was merged; part of an error text."""


class StoreError(ValueError):
    """The folder holds no state that can be continued; the text names the file and the reason."""


@dataclass(frozen=True, slots=True)
class RunCard:
    """The identity of the run in a data folder; a process with another card does not touch the folder.

    The file also holds the folder's lineage: a process continues under the lineage that it finds.
    """

    run_id: str
    layout_fingerprint: str
    shared_digest: str
    earlier_digest: str = ""
    """The ``shared_digest`` as an earlier release computes it; no card file has both."""

    def facts(self) -> dict[str, str]:
        """Return the fields as ``run.json`` has them and as a standby sends them."""
        return {name: getattr(self, name) for name in ("run_id", "layout_fingerprint", "shared_digest")}

    def difference(self, theirs: Mapping[str, object]) -> str | None:
        """Return the first of the ``facts`` in which ``theirs`` names another run; None if it is the same run."""
        for name, ours in self.facts().items():
            accepted = (ours, self.earlier_digest) if name == "shared_digest" else (ours,)
            if theirs.get(name) not in accepted:
                return name
        return None


@dataclass(eq=False, repr=False)
class Store(DataFolder):
    """The data folder.  The caller holds its lock (``diloco.durable.locked``).

    ``emit`` receives a note of each repair by a recovery, and when ``retention`` cannot be met.
    """

    folder: Path
    card: RunCard
    disk: Disk = PLAIN_DISK
    retention: Retention = RECOVERY_ONLY
    emit: Callable[[str, dict[str, object]], None] = lambda what, facts: None

    def __post_init__(self) -> None:
        folder, card, disk = self.folder, self.card, self.disk
        self.pinned: Callable[[], tuple[int, int] | None] = lambda: None
        """Returns what to keep for a standby beyond retention, up to retention's bound in bytes: a snapshot (0: none),
        and the journal from a segment on."""
        self._cut = False
        self._pruning = threading.Lock()
        self._card_file: dict[str, object] = {}
        """The run card as the file has it, with keys of other releases: they stay."""
        disk.settle(folder, Step.FOLDER)
        staging = folder / STAGING
        if staging.exists():
            if not any(folder.glob("snapshots/[0-9]*")):
                raise StoreError(f"{folder} holds an unfinished restore: restore it again")
            disk.remove(staging, Step.FOLDER)  # Left by a restore that is complete.
        self._check_card(card)
        super().__init__(folder, {"run_id": card.run_id, "layout_fingerprint": card.layout_fingerprint}, disk)
        disk.sweep(self.snapshots.folder, Step.SNAPSHOT_PRUNE)
        disk.sweep(self.lineages.folder, Step.LINEAGE_PRUNE)
        disk.sweep(folder, Step.FOLDER)
        disk.sync_folder(folder, Step.FOLDER)
        self._decided: deque[tuple[int, str]] = deque()
        """Payloads that only a replay may need, each behind a journal segment: its fate is in that one, or before."""

    def _check_card(self, card: RunCard) -> None:
        path = self.folder / "run.json"
        if not path.exists():
            # It is the first file in a folder: if others exist, it was lost, and the recovery says so.
            if not any(any((self.folder / name).glob("*")) for name in ("snapshots", "journal")):
                self.write_lineage(1, Step.CARD)
            return
        try:
            theirs = self._card_file = dict(parse_json(path.read_bytes()))
        except (ValueError, TypeError) as error:
            raise StoreError(f"{path} is damaged: {error}") from error
        found = theirs.get("format")
        if type(found) is not int or not 1 <= found <= FORMAT:
            raise StoreError(f"{path} has format {shown(found)}, and this version reads up to {FORMAT}")
        if (name := card.difference(theirs)) is not None:
            raise StoreError(
                f"{path} has {name} {shown(theirs.get(name))} and this run has {getattr(card, name)!r}: "
                "use another folder"
            )
        if {**theirs, "format": FORMAT, **card.facts()} != theirs:  # An earlier release wrote it.
            self.write_lineage(theirs.get("lineage", 1), Step.CARD)

    def _note(self, note: str, why: str) -> None:
        self.emit("note", {"note": note, "why": why})

    def write_lineage(self, lineage: object, step: Step = Step.LINEAGE_CARD) -> None:
        """Write ``run.json`` with the run's present lineage."""
        card = self._card_file | {"format": FORMAT, **self.card.facts(), "lineage": lineage}
        self.disk.write_file(self.folder / "run.json", json.dumps(card, indent=1, sort_keys=True).encode(), step)
        self._card_file = card

    def _mend_card(self, lineage: int) -> None:
        """Make ``run.json`` name the lineage that journal and snapshots give; note a different or missing value."""
        path, said = self.folder / "run.json", self._card_file.get("lineage")
        if type(said) is int and said == lineage:
            return
        why = f"{path} had lineage {shown(said)}: now it has the journal's, {lineage}"
        if not self._card_file:
            why = f"{path} was missing: it is written again, with the journal's lineage, {lineage}"
        self.write_lineage(lineage)
        self._note("recovery", why)

    def is_new(self) -> bool:
        """Return whether no process has ever acknowledged anything in this folder."""
        return not self.snapshots.numbers() and self.journal.is_blank()

    def begin(self, machine: OuterSync, values: Sequence[FragmentValues]) -> None:
        """Store version 0: the first snapshot, and the first journal segment after it."""
        place = self.journal.begin()
        self.snapshots.write(Snapshot(machine.snapshot(), tuple(values), place.segment, place.chain))

    def recover(self, rules: Rules, *, merges: bool = True) -> Replayer:
        """Return the state of the last process, bit for bit; raise ``StoreError`` when no complete state exists.

        Reads and verifies every payload that waits for its outer step, unless ``merges`` is False: the caller then
        merges none of them. Drops payloads that no remaining snapshot and no journal record after it names.
        """
        notes: list[str] = []
        damaged: list[int] = []
        for number in reversed(self.snapshots.numbers()):
            try:
                snapshot = self.snapshots.load(number)
                machine = OuterSync.restore(rules.outer, snapshot.state)
                replayer = Replayer(machine, snapshot.fragments, self, rules)
                for record in self.journal.read(snapshot.journal_segment, snapshot.journal_chain):
                    replayer.apply(record)
                if merges:
                    self._check_waiting(replayer.machine)
            except (NewerSnapshotError, JournalError, SpoolError, PlainError) as error:
                raise StoreError(str(error)) from error
            except SnapshotError as error:
                notes.append(f"{error}; the snapshot before it is used")
                damaged.append(number)
                continue
            except AssertionError as error:
                text = f"{self.journal.folder} does not fit: another version or other options ({error})"
                raise StoreError(text) from error
            for note in [*notes, *self.journal.take_over()]:
                self._note("recovery", note)
            self._mend_card(replayer.machine.state.lineage)
            for each in damaged:
                self.snapshots.set_aside(each)
            self._sweep_spool(replayer.machine)
            return replayer
        raise StoreError(f"{self.snapshots.folder} has no whole snapshot: {'; '.join(notes) or 'it is empty'}")

    def _check_waiting(self, machine: OuterSync) -> None:
        """Raise ``SpoolError``, naming the update, if its payload is not as acknowledged: its outer step would fail."""

        def check(site: str, fragment: int, pending: Pending) -> None:
            try:
                self.spool.check(pending.payload, pending.digest)
            except SpoolError as error:
                update = f"update {pending.sequence} of fragment {fragment} from site {site}"
                raise SpoolError(
                    f"{error}; it is {update}, which is acknowledged and not merged: {WAYS_OUT}"
                ) from error

        with ThreadPoolExecutor(max_workers=FILES_MAX) as pool:
            checks = [
                pool.submit(check, site, fragment, pending)
                for site, each in machine.state.sites.items()
                for fragment, line in enumerate(each.lines)
                for pending in line.undecided
            ]
        for each in checks:
            each.result()

    def carried_out(self, effects: Iterable[OuterEffect]) -> None:
        """Note the payloads that no future step needs after ``effects``: of updates that got their fate, and let go."""
        for effect in effects:
            if isinstance(effect, TellFate):
                fate = effect.fate
                self.release(self.spool.reference(effect.site, fate.fragment, fate.sequence, fate.digest))
            elif isinstance(effect, LetGo):
                self.release(effect.payload)

    def release(self, reference: str) -> None:
        """Note that no future step needs this payload. A replay might: it goes once every kept snapshot is newer."""
        self._decided.append((self.journal.index, reference))

    def snapshot_writer(
        self,
        machine: OuterSync,
        values: Sequence[FragmentValues],
        place: Position | None = None,
        check: Callable[[int, FragmentValues], None] = lambda index, values: None,
    ) -> Callable[[], int]:
        """Cut the journal here, or use the cut at ``place``; return the (long) rest, to be run beside the machine.

        Raises ``DiskFullError`` when there is no space to begin: nothing has changed.

        The rest writes the snapshot fragment by fragment, each after ``check``, and then releases the fragment; those
        of which ``values`` holds a newer version by then come first. Then it deletes the snapshots that retention does
        not keep, and the journal segments and payloads that no remaining snapshot needs.
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
            kept, cut = self._prune(self.retention)
            if cut and not self._cut:
                steps, most = self.retention.steps, self.retention.bytes_max
                self._note(
                    "retention",
                    f"less than the last {steps} outer steps can be replayed: they need more than {most} bytes",
                )
            # Noted again only after all that retention asks for could be replayed.
            falls_short = bool(kept) and kept[0].steps > 0 and kept[-1].steps - kept[0].steps < self.retention.steps
            self._cut = cut or (self._cut and falls_short)
            return size

        return write

    def let_go_of_the_past(self) -> None:
        """Delete all that recovery does not need: the disk is full, and continuing the run is worth more."""
        before = self.snapshots.numbers()
        self._prune(RECOVERY_ONLY)
        gone = len(before) - len(self.snapshots.numbers())
        if gone:
            self._note("retention", f"{gone} old snapshots and the journal behind them are deleted: the disk is full")

    def _prune(self, retention: Retention) -> tuple[list[Point], bool]:
        """Delete what ``retention`` does not keep and no standby is being sent.

        Each kind is durably deleted before the files that it needs: a power cut may bring back a removed name, and a
        snapshot without its journal, or a segment without its payloads, would then count as kept.
        """
        with self._pruning:
            spared, needed = self.pinned() or (0, self.journal.index)
            if self._bytes_in(range(needed, self.journal.index)) > retention.bytes_max:
                # The standby is too slow, or the disk is full: its copy starts over.
                spared, needed = 0, self.journal.index
            kept, cut = self.snapshots.prune(retention, self._bytes_in, spared)
            first = min(needed, kept[0].segment) if kept else 0
            self.disk.sync_folder(self.snapshots.folder, Step.SNAPSHOT_PRUNE)
            self.journal.prune(first)
            self.disk.sync_folder(self.journal.folder, Step.JOURNAL_PRUNE)
            if kept:
                self.lineages.prune(self.snapshots.point(self.snapshots.numbers()[0]).lineage)
            while self._decided and self._decided[0][0] < first:
                self.spool.drop(self._decided.popleft()[1])
            return kept, cut

    def _bytes_in(self, segments: range) -> int:
        """Return the bytes of these segments of the journal, and of the payloads that were decided in them."""
        payloads = [self.spool.folder / reference for at, reference in tuple(self._decided) if at in segments]
        journal = [self.journal.path(index) for index in self.journal.segments() if index in segments]
        return sum(path.stat().st_size for path in [*payloads, *journal] if path.exists())

    def _sweep_spool(self, machine: OuterSync) -> None:
        """Drop the payloads that no remaining snapshot or record names; register those that only a replay needs."""
        waiting = set(payloads_in(machine.snapshot()))
        needed = set(waiting)
        for number in self.snapshots.numbers():
            try:
                needed |= payloads_in(self.snapshots.load(number, whole=False).state).keys()
            except SnapshotError as error:
                self._note("recovery", f"{error}; it is older than the one in use and is set aside")
                self.snapshots.set_aside(number)
        try:
            records = self.journal.read(min(self.journal.segments()))
        except JournalError as error:
            why = f"{error}; it is older than the snapshot in use, so no payload is dropped"
            self._note("recovery", why)
            return
        needed |= payloads_named(records).keys()
        self.spool.sweep(needed)
        for reference in sorted(needed - waiting):
            self.release(reference)


def begun(store: Store, rules: Rules, version_zero: Sequence[Tensor]) -> Replayer:
    """Store version 0 in a new folder and return its state; raise ``StoreError`` if a value is not finite."""
    values = [FragmentValues(0, first, first, NOTHING, digest(first)) for first in version_zero]
    for index, first in enumerate(values):
        if not is_finite(first.theta):
            raise StoreError(f"version 0 of fragment {index} holds a NaN or an infinity")
    machine = OuterSync(rules.outer)
    for fragment, first in zip(machine.state.fragments, values, strict=True):
        fragment.digest = first.digest
    store.begin(machine, values)
    return Replayer(machine, values, store, rules)


@dataclass(slots=True)
class Verified:
    """Counts of what is intact; ``torn_bytes`` at the journal's end were being written when their process died."""

    segments: int = 0
    records: int = 0
    snapshots: int = 0
    payloads: int = 0
    torn_bytes: int = 0


def verify(folder: Path) -> Verified:
    """Check the data folder; raise ``JournalError``, ``SnapshotError`` or ``SpoolError`` for the first damage.

    It may run beside a running syncer: what the syncer is writing at that moment counts as torn.
    """
    found = Verified()
    data = DataFolder(folder, {}, ReadingDisk())
    journal, snapshots = data.journal, data.snapshots
    numbers, segments = snapshots.numbers(), journal.segments()
    if not segments:
        raise JournalError(f"{journal.folder} holds no journal")
    for why in journal.noted.damage():
        raise JournalError(f"{journal.noted.path} is damaged: {why}")
    chains: dict[int, str] = {}
    wanted: dict[str, str] = {}
    for read in journal.walk(segments[0]):
        found.segments += 1
        found.records += len(read.records)
        found.torn_bytes += read.torn_bytes
        if read.found.header is not None:
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
    for reference, wanted_digest in sorted(wanted.items()):
        data.spool.check(reference, wanted_digest)
        found.payloads += 1
    return found
