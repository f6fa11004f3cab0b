"""Copies of the syncer's state to another place, made beside the run and never in its way.

A backup is the newest whole snapshot, the journal from it on as far as it reads at that instant, and every payload that
snapshot or journal name: what a recovery needs, and as new as the moment in which it was made.  It is read from the
data folder; the decision loop is never asked for anything.  Damage is not copied: every snapshot, payload and image is
compared with the digest that it was written with, before an older backup may go.

A failure is told and tried again; it ends nothing.  How old the last good backup is stands in the status.

A backup is named after how far it goes in the run, and older ones are dropped in that order: wall time, which may jump,
is in it for display only.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.durable import PLAIN_DISK
from diloco.sync.events import LineageBegan, SyncerStarted
from diloco.syncer.images import digests as image_digests
from diloco.syncer.kept import Kept
from diloco.syncer.vault import FORMAT, BackupError, BackupFacts, DamagedError, Vault
from diloco.syncer.verifying import payloads_in, payloads_named

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from diloco.durable import Disk
    from diloco.syncer.journal_files import SegmentRead
    from diloco.syncer.kept import Point

NAME = "{:010d}-{:010d}-{:06d}-{:012d}"
"""Of a backup: its ``reach``."""
RETRY_S = 30.0
"""Longest wait after a failure before the next attempt."""
STOP_S = 5.0
"""Longest wait, when the process stops, for a copy that is under way; what is left of it is no backup."""


@dataclass(kw_only=True, slots=True)
class BackupOptions:
    """``url`` is a folder or what fsspec makes of it; empty: no backups."""

    url: str = ""
    every_s: float = 600.0
    keep: int = 3

    def __post_init__(self) -> None:
        if self.every_s <= 0:
            raise ValueError(f"backup_every_s is {self.every_s!r}: positive")
        if self.keep < 1:
            raise ValueError(f"backup_keep is {self.keep!r}: at least 1")
        if self.url:
            Vault(self.url)


def back_up(folder: Path, vault: Vault, note: Callable[[str], None] = lambda why: None) -> tuple[str, BackupFacts]:
    """Copy the data folder as it is now; the name of the backup, and what it says of itself.

    Every file that has a digest is compared with that as it is copied.  Where a snapshot is damaged the one before it
    is copied, with the longer journal, and ``note`` is told why; anything else that is damaged is no backup
    (``DamagedError``).  ``KeptError``, ``BackupError`` or an error of the place itself when it cannot be done, or when
    what is copied goes meanwhile.
    """
    kept = Kept(folder, note)
    for point in reversed(kept.points()):
        segments = kept.segments(point.segment)
        name = NAME.format(*_reach(point, segments))
        there = vault.backups(kept.card.run_id).get(name)
        if isinstance(there, BackupFacts):
            return name, there  # It holds the same journal.
        if there is not None:
            vault.drop(kept.card.run_id, name)
        try:
            return name, _copied(kept, point, segments, vault, name)
        except DamagedError as error:
            vault.drop(kept.card.run_id, name)
            if not error.relative.startswith("snapshots/"):
                raise
            note(f"{error}; the snapshot before it is copied")
    raise BackupError(f"{folder / 'snapshots'} has no whole snapshot: there is nothing to copy")


def _reach(point: Point, segments: Sequence[SegmentRead]) -> tuple[int, int, int, int]:
    """How far the folder goes, as ``BackupFacts.reach``; lineage and epoch are those at the journal's end."""
    lineage, epoch = point.state.lineage, point.state.epoch
    for event in (record.event for read in segments for record in read.records):
        if isinstance(event, LineageBegan):
            lineage = event.lineage
        elif isinstance(event, SyncerStarted):
            epoch = event.epoch
    return lineage, epoch, segments[-1].index, segments[-1].end


def _copied(kept: Kept, point: Point, segments: Sequence[SegmentRead], vault: Vault, name: str) -> BackupFacts:
    folder = kept.folder
    files: dict[str, Path | bytes] = {"run.json": (folder / "run.json").read_bytes()}
    digests: dict[str, str] = {}

    def add(path: Path, known: Mapping[str, str]) -> None:
        relative = path.relative_to(folder).as_posix()
        files[relative] = path
        if path.name in known:
            digests[relative] = known[path.name]

    written = kept.snapshots.digests(point.number)
    for path in sorted((folder / "snapshots" / f"{point.number:08d}").iterdir()):
        add(path, written)
    payloads = payloads_in(kept.snapshots.peek(point.number)[0])
    for read in segments:
        path = folder / "journal" / f"journal-{read.index:06d}.log"
        files[path.relative_to(folder).as_posix()] = path.read_bytes()[: read.end]
        payloads |= payloads_named(read.records)
    for reference, digest in sorted(payloads.items()):
        add(kept.spool.folder / reference, {Path(reference).name: digest})
    for began in kept.lineages.numbers():
        if began > point.state.lineage:
            written = image_digests(kept.lineages.folder / str(began))
            for path in sorted((kept.lineages.folder / str(began)).iterdir()):
                add(path, written)
    state = point.state
    lineage, epoch, *_ = _reach(point, segments)
    facts = BackupFacts(
        format=FORMAT,
        run_id=kept.card.run_id,
        lineage=lineage,
        epoch=epoch,
        versions=tuple(fragment.version for fragment in state.fragments),
        run_tokens=state.run_tokens(),
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        files={},
    )
    return vault.put(kept.card.run_id, name, files, facts, digests)


class Backups:
    """Makes them, one every ``every_s``, in a thread of its own."""

    def __init__(
        self,
        options: BackupOptions,
        folder: Path,
        run_id: str,
        emit: Callable[[str, dict[str, object]], None],
        disk: Disk = PLAIN_DISK,
    ) -> None:
        self._options, self._folder, self._run_id, self._emit = options, folder, run_id, emit
        self._vault = Vault(options.url, disk)
        self._stopping = threading.Event()
        self._good_s: float | None = None
        self._last = ""
        self._failing = ""
        # A place that never answers must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="backups", daemon=True)

    def start(self) -> None:
        """Begin; the first one is made after ``every_s``."""
        self._thread.start()

    def stop(self) -> None:
        """Begin no other one."""
        self._stopping.set()
        self._thread.join(STOP_S)

    def status(self) -> dict[str, object]:
        """For ``diloco status``: ``age_s`` is that of the last good one of this process, None before it."""
        good_s = self._good_s
        age_s = None if good_s is None else round(time.monotonic() - good_s, 1)
        return {"url": self._options.url, "age_s": age_s, "last": self._last, "failing": self._failing}

    def _run(self) -> None:
        wait_s = self._options.every_s
        while not self._stopping.wait(wait_s):
            try:
                self._once()
                self._failing = ""
                wait_s = self._options.every_s
            except Exception as error:  # Libraries of object stores raise what they like, and nothing here may end.
                self._failing = str(error) or repr(error)
                if self._stopping.is_set():
                    return
                self._emit("note", {"note": "backup_failed", "why": self._failing})
                wait_s = min(self._options.every_s, RETRY_S)

    def _once(self) -> None:
        began = time.monotonic()
        for died in self._vault.leftovers(self._run_id):  # First, so that failures do not gather.
            self._vault.drop(self._run_id, died)
        there = self._vault.names(self._run_id)
        name, facts = back_up(self._folder, self._vault, self._damaged)
        self._good_s, self._last = began, name
        if name in there:
            return  # Nothing has happened since it was made.
        self._prune()
        size = sum(each.bytes for each in facts.files.values())
        seconds = round(time.monotonic() - began, 3)
        self._emit("backup", {"name": name, "versions": list(facts.versions), "bytes": size, "seconds": seconds})

    def _prune(self) -> None:
        """Drop all but the newest ``keep``; never the one just made, and none that cannot be read."""
        found = self._vault.backups(self._run_id)
        for damaged in found.values():
            if isinstance(damaged, BackupError):
                self._emit("note", {"note": "backup_damaged", "why": str(damaged)})
        names = [name for name, facts in found.items() if isinstance(facts, BackupFacts)]
        if names[-1] != self._last:
            why = f"{self._last} is made, and {names[-1]} there goes further: a restore takes that unless it is told"
            self._emit("note", {"note": "backup_behind", "why": why})
        for old in names[: -self._options.keep]:
            if old != self._last:
                self._vault.drop(self._run_id, old)

    def _damaged(self, why: str) -> None:
        self._emit("note", {"note": "backup_of_less", "why": why})
