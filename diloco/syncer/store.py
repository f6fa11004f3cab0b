"""The syncer's own disk: run.json, journal, snapshots, spool; and how a process takes them over.

What is durable when:

- an update: its file, then (before its ack) the journal record ``UpdateArrived`` that names it;
- a version: the journal record ``OuterStepDone`` with its digests, before anybody hears of it;
- a fate: by the record that decided it, before it is told;
- values: by a snapshot, or by the snapshot before it and the journal, from which they are computed again.

Recovery = the newest snapshot that verifies + the journal from the segment it names, through the same machine and the
same arithmetic; every recomputed version is compared with the digest that was journalled.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from diloco.durable import write_file
from diloco.sync.effects import StartOuterStep
from diloco.sync.events import OuterStepDone, OuterStepFailed
from diloco.sync.journal import JournalError, Record, replay
from diloco.sync.syncer import OuterSync
from diloco.syncer.executor import OuterResult, run_outer_step
from diloco.syncer.journal_files import JournalFiles
from diloco.syncer.snapshots import FragmentValues, Snapshot, SnapshotError, Snapshots
from diloco.syncer.spool import Spool, SpoolError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from diloco.outer.optimizer import OuterOptimizerOptions
    from diloco.sync.events import Fate
    from diloco.sync.options import OuterOptions

FORMAT = 1


class StoreError(ValueError):
    """The folder holds no state that may be continued; the text says which file and why."""


@dataclass(frozen=True, slots=True)
class RunCard:
    """What a data folder is for; a process with another card does not touch it."""

    run_id: str
    lineage: int
    layout_fingerprint: str
    shared_digest: str


@dataclass(slots=True)
class Recovered:
    """The state of an earlier process, to the bit.

    ``downlinks`` are those that the replay computed again, each with its fragment; ``records`` were replayed.
    """

    machine: OuterSync
    values: list[FragmentValues]
    downlinks: list[tuple[OuterResult, int]]
    records: int
    notes: list[str]


class Store:
    """The data folder.  The caller holds its lock (``diloco.durable.locked``)."""

    def __init__(self, folder: Path, card: RunCard) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._check_card(card)
        self.spool = Spool(folder / "spool")
        self.journal = JournalFiles(folder / "journal")
        self.snapshots = Snapshots(folder / "snapshots")
        self._decided: list[tuple[int, str]] = []

    def _check_card(self, card: RunCard) -> None:
        path = self.folder / "run.json"
        ours = {"format": FORMAT, **asdict(card)}
        if not path.exists():
            write_file(path, json.dumps(ours, indent=1, sort_keys=True).encode())
            return
        try:
            theirs = json.loads(path.read_bytes())
        except ValueError as error:
            raise StoreError(f"{path} is damaged: {error}") from error
        for name, value in ours.items():
            if theirs.get(name) != value:
                raise StoreError(
                    f"{path} has {name} {theirs.get(name)!r} and this run has {value!r}: another folder, please"
                )

    def is_new(self) -> bool:
        """Whether nothing was ever kept here."""
        return not self.snapshots.numbers() and not self.journal.segments()

    def begin(self, machine: OuterSync, values: Sequence[FragmentValues]) -> None:
        """Keep version 0: the first snapshot, and the first journal segment behind it."""
        segment = self.journal.rotate()
        self.snapshots.write(Snapshot(machine.snapshot(), tuple(values), segment))

    def recover(self, options: OuterOptions, optimizer: OuterOptimizerOptions, down_codec: str) -> Recovered:
        """The state that the last process had; ``StoreError`` when none is whole."""
        notes: list[str] = []
        for number in reversed(self.snapshots.numbers()):
            try:
                snapshot = self.snapshots.load(number)
            except SnapshotError as error:
                notes.append(f"{error}; the snapshot before it is used")
                continue
            try:
                return self._replayed(snapshot, options, optimizer, down_codec, notes)
            except (JournalError, SpoolError) as error:
                raise StoreError(str(error)) from error
        raise StoreError(f"{self.snapshots.folder} has no whole snapshot: {'; '.join(notes) or 'it is empty'}")

    def _replayed(
        self,
        snapshot: Snapshot,
        options: OuterOptions,
        optimizer: OuterOptimizerOptions,
        down_codec: str,
        notes: list[str],
    ) -> Recovered:
        machine = OuterSync.restore(options, snapshot.state)
        values = list(snapshot.fragments)
        downlinks: list[tuple[OuterResult, int]] = []
        under_way = {
            index: machine.outer_step(index)
            for index, fragment in enumerate(machine.state.fragments)
            if fragment.merging_since_ns is not None
        }
        records = self.journal.read(snapshot.journal_segment)
        for record, effects in replay(machine, records):
            event = record.event
            if isinstance(event, OuterStepDone):
                command = under_way.pop(event.fragment)
                result = run_outer_step(command, values[event.fragment], self.spool, optimizer, down_codec)
                _compare(event, result)
                assert result is not None
                values[event.fragment] = result.values
                downlinks.append((result, event.fragment))
            elif isinstance(event, OuterStepFailed):
                del under_way[event.fragment]
            for effect in effects:
                if isinstance(effect, StartOuterStep):
                    under_way[effect.fragment] = effect
        return Recovered(machine, values, downlinks, len(records), notes)

    def append(self, record: Record) -> None:
        """Write a record; durable after ``journal.flush``."""
        self.journal.append(record)

    def decided(self, site: str, fate: Fate) -> None:
        """An update has its fate: once no snapshot is older than that, its payload may go."""
        self._decided.append((self.journal.index, self.spool.name(site, fate.fragment, fate.sequence, fate.digest)))

    def snapshot_writer(self, machine: OuterSync, values: Sequence[FragmentValues]) -> Callable[[], int]:
        """Cut the journal here and return the (long) rest of the work, to be done beside the machine.

        The rest writes the snapshot and then lets go of the journal segments and payloads that no snapshot left needs.
        """
        segment = self.journal.rotate()
        snapshot = Snapshot(machine.snapshot(), tuple(values), segment)

        def write() -> int:
            size = self.snapshots.write(snapshot)
            first = self.snapshots.prune()
            self.journal.prune(first)
            while self._decided and self._decided[0][0] < first:
                self.spool.drop(self._decided.pop(0)[1])
            return size

        return write

    def sweep_spool(self) -> int:
        """Drop the payloads that neither a snapshot left nor the journal behind it names.  At start only."""
        needed: set[str] = set()
        for number in self.snapshots.numbers():
            needed |= payloads_in(self.snapshots.load(number).state)
        first = min(self.journal.segments(), default=1)
        for record in self.journal.read(first):
            needed.add(getattr(record.event, "payload", ""))
        return self.spool.sweep(needed)


def payloads_in(state: object) -> set[str]:
    """The payload references of the undecided updates in a machine's snapshot."""
    assert isinstance(state, dict)
    return {
        pending["payload"]
        for site in state["sites"].values()
        for line in site["lines"]
        for pending in line["undecided"]
    }


def _compare(event: OuterStepDone, result: OuterResult | None) -> None:
    found = (result.values.digest, result.downlink_digest) if result else ("not finite", "")
    if found != (event.digest, event.downlink_digest):
        raise JournalError(
            f"version {event.version} of fragment {event.fragment} was {event.digest[:12]} when it was published and "
            f"is {found[0][:12]} when computed again: the spool, the options or the arithmetic changed"
        )
