"""Everything that lies in a data folder, looked at and not touched: is it what was written?

Three things are checked that a start does not need: the journal behind older snapshots, those snapshots' tensors, and
payloads that are merged already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco.durable import ReadingDisk
from diloco.sync.events import UpdateArrived
from diloco.sync.journal import JournalError
from diloco.sync.upstream_events import UpstreamFetched
from diloco.syncer.journal_end import JournalEnd
from diloco.syncer.journal_files import JournalFiles
from diloco.syncer.snapshots import Snapshots
from diloco.syncer.spool import Spool

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from diloco.sync.journal import Record


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
