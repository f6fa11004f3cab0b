"""Backups: copies of the syncer's state in another place, made beside the run and never in its way.

A backup is the newest whole snapshot, the journal from it on as far as it reads at that instant, and every payload that
snapshot or journal name: what a recovery needs, and as new as the moment in which it was made.  It is read from the
data folder; the decision loop is never asked for anything.  Damage is not copied: every snapshot, payload and image is
compared with the digest that it was written with, before an older backup may go.

A failure is told and tried again; it ends nothing.  The status says how old the last good backup is.

Vault.  The place where backups lie: a folder or any object store that fsspec knows, in one form for all of them.

    URL/RUN/0000000001-0000000004-000012-000000123456/  run.json  snapshots/...  journal/...  spool/...  backup.json

An object store cannot rename, so ``backup.json`` is what makes a backup one: it is written last, when every other file
has been read back and has the digest that it names.  A folder without it was left by an attempt that died.

Order.  Backups are ordered by ``BackupFacts.reach``, how far each goes in the run, which is also the name that they
get, and older ones are dropped in that order.  No clock has a part in it: wall time, which may jump, is in a backup for
display only.  An earlier release named backups by wall time, and those are ordered in the same way.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from diloco.codec.base import hasher
from diloco.durable import PLAIN_DISK, Step
from diloco.sync.events import LineageBegan, SyncerStarted
from diloco.sync.plain import PlainError, canonical, from_plain, parse_json, shown
from diloco.syncer.images import digests as image_digests
from diloco.syncer.restoring import Kept
from diloco.syncer.store import payloads_in, payloads_named

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from diloco.codec.base import Hasher
    from diloco.durable import Disk
    from diloco.syncer.journal_files import SegmentRead
    from diloco.syncer.restoring import Point

FORMAT = 1
MARKER = "backup.json"
JOURNAL = re.compile(r"journal/journal-(\d+)\.log")
PIECE_BYTES = 4 << 20


class BackupError(ValueError):
    """A backup cannot be made or read; the text names the file and says why."""


class DamagedError(BackupError):
    """What was to be copied is not what was once written there; ``relative`` is its name in the backup."""

    def __init__(self, relative: str, content: Path | bytes) -> None:
        path = relative if isinstance(content, bytes) else content
        super().__init__(f"{path} is damaged: its digest is not the one that it was written with")
        self.relative = relative


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What a file of a backup must be."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class BackupFacts:
    """What ``backup.json`` says.  ``versions`` and ``run_tokens`` are those of the snapshot in it; more is in the
    journal behind it.  ``at`` is wall time, for display only."""

    format: int
    run_id: str
    lineage: int
    epoch: int
    versions: tuple[int, ...]
    run_tokens: int
    at: str
    files: dict[str, FileFacts]

    @property
    def reach(self) -> tuple[int, int, int, int]:
        """How far the backup goes: lineage, epoch, the journal's last segment and the bytes of that."""
        found = [(JOURNAL.fullmatch(name), facts.bytes) for name, facts in self.files.items()]
        journal = max(((int(segment[1]), size) for segment, size in found if segment), default=(0, 0))
        return self.lineage, self.epoch, *journal


class Vault:
    """All backups below one URL."""

    def __init__(self, url: str, disk: Disk = PLAIN_DISK) -> None:
        """``BackupError`` where no library on this machine can reach ``url``, or it would tell a password."""
        for each in url.split("::"):
            if (parts := urlsplit(each)).password is not None:
                variable = f"FSSPEC_{parts.scheme.upper()}_PASSWORD"
                raise BackupError(f"backup is a URL with a password, which others would see: export {variable} instead")
        import fsspec.implementations.local  # type: ignore[import-untyped]  # Slow, and most runs need none.

        self.url = url.rstrip("/") or "/"
        self._disk = disk
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.url)
        except (ValueError, ImportError, OSError) as error:
            raise BackupError(f"{url!r} cannot be reached from here: {error}") from error
        self._is_folder = isinstance(self._files, fsspec.implementations.local.LocalFileSystem)

    def backups(self, run_id: str) -> dict[str, BackupFacts | BackupError]:
        """The whole backups of a run, oldest first; before them those whose marker cannot be read, with the reason."""
        damaged: dict[str, BackupFacts | BackupError] = {}
        good: dict[str, BackupFacts] = {}
        for name in self._folders(run_id):
            if self._files.exists(self._at(run_id, name, MARKER)):
                try:
                    good[name] = self.facts(run_id, name)
                except BackupError as error:
                    damaged[name] = error
        return damaged | dict(sorted(good.items(), key=lambda each: (each[1].reach, each[0])))

    def names(self, run_id: str) -> list[str]:
        """The names of ``backups``, in their order."""
        return list(self.backups(run_id))

    def leftovers(self, run_id: str) -> list[str]:
        """What attempts left that came to nothing."""
        return [name for name in self._folders(run_id) if not self._files.exists(self._at(run_id, name, MARKER))]

    def facts(self, run_id: str, name: str) -> BackupFacts:
        """What a backup says of itself."""
        where = f"{self.url}/{run_id}/{name}/{MARKER}"
        try:
            plain = dict(parse_json(self._read(run_id, name, MARKER)))
            known = plain.pop("sha256", None)  # One of an earlier release has none.
            if (written := plain.get("format")) != FORMAT:
                raise BackupError(f"it has format {shown(written)}, and {FORMAT} is wanted")
            if known not in (None, _digest_of(plain)):
                raise BackupError("its own digest does not match")
            found: BackupFacts = from_plain(BackupFacts, plain, "backup")
        except (ValueError, TypeError, PlainError) as error:
            raise BackupError(f"{where} is damaged: {error}") from error
        return found

    def put(
        self,
        run_id: str,
        name: str,
        files: Mapping[str, Path | bytes],
        facts: BackupFacts,
        digests: Mapping[str, str] = MappingProxyType({}),
    ) -> BackupFacts:
        """Copy ``files`` there and make them a backup; ``facts`` without files.  Everything is read back first.

        ``DamagedError`` when a file is not, when it is copied, what ``digests`` says that it must be.
        """
        told: dict[str, FileFacts] = {}
        made: set[str] = set()
        for relative, content in files.items():
            path = self._at(run_id, name, relative)
            self._make_folder(self._files._parent(path), made)
            known = digests.get(relative, "")
            seen = hasher(known)  # What is known of an update is in the form in which it was sent.
            told[relative] = self._copy(content, path, Step.BACKUP_FILE, seen)
            if known and seen.text() != known:
                raise DamagedError(relative, content)
            found = self._facts_of(path)
            if found != told[relative]:
                raise BackupError(f"{self.url}/{run_id}/{name}/{relative} is not what was written there a moment ago")
        whole = BackupFacts(**{**{each: getattr(facts, each) for each in facts.__slots__}, "files": told})
        plain, path = asdict(whole), self._at(run_id, name, MARKER)
        marker = json.dumps({**plain, "sha256": _digest_of(plain)}, indent=1, sort_keys=True).encode()
        if self._is_folder:  # There a file has its name before it has its content.
            self._disk.write_file(Path(path), marker, Step.BACKUP_WHOLE)
        else:
            self._copy(marker, path, Step.BACKUP_WHOLE, hasher())
        return whole

    def drop(self, run_id: str, name: str) -> None:
        """Remove a backup, its marker first."""
        marker = self._at(run_id, name, MARKER)
        self._disk.reached(Step.BACKUP_DROP)
        if self._files.exists(marker):
            self._files.rm(marker)
        self._disk.reached(Step.BACKUP_DROP)
        self._files.rm(self._at(run_id, name), recursive=True)
        self._disk.reached(Step.BACKUP_DROP)

    def fetch(self, run_id: str, name: str, folder: Path, disk: Disk = PLAIN_DISK) -> BackupFacts:
        """Copy a backup into ``folder``, verified and durable; ``BackupError`` names a file that is not what it was."""
        facts, made = self.facts(run_id, name), set[Path]()
        for relative, wanted in sorted(facts.files.items()):
            parts = PurePosixPath(relative).parts
            if not parts or ".." in parts or relative.startswith("/"):
                raise BackupError(f"{self.url}/{run_id}/{name}/{MARKER} names {relative!r}: outside of it")
            target = folder.joinpath(*parts)
            if target.parent not in made:
                disk.settle(target.parent, Step.RESTORE_FETCH)
                made.add(target.parent)
            disk.keep(target, lambda path, at=relative: self._fetch(run_id, name, at, path), Step.RESTORE_FETCH)  # type: ignore[misc]
            if (found := _facts_of_local(target)) != wanted:
                raise BackupError(
                    f"{self.url}/{run_id}/{name}/{relative} is damaged: {found.bytes} bytes with SHA-256 "
                    f"{found.sha256[:12]}, and {wanted.bytes} with {wanted.sha256[:12]} were written"
                )
        return facts

    # --- files there ---------------------------------------------------------------------------------------------

    def _at(self, *parts: str) -> str:
        return "/".join([self._root.rstrip("/"), *parts])

    def _make_folder(self, path: str, made: set[str]) -> None:
        """Make it, unless it is one of those that were ``made``; durably where that is for this process to do."""
        if path in made:
            return
        made.add(path)
        if self._is_folder:
            self._disk.settle(Path(path), Step.BACKUP_FILE)
        else:
            self._files.makedirs(path, exist_ok=True)

    def _folders(self, run_id: str) -> list[str]:
        self._files.invalidate_cache()
        try:
            found = self._files.ls(self._at(run_id), detail=True)
        except FileNotFoundError:
            return []
        return sorted(entry["name"].rstrip("/").rpartition("/")[2] for entry in found if entry["type"] == "directory")

    def _read(self, *parts: str) -> bytes:
        try:
            data: bytes = self._files.cat_file(self._at(*parts))
        except FileNotFoundError as error:
            raise BackupError(f"{self.url}/{'/'.join(parts)} is missing") from error
        return data

    def _copy(self, content: Path | bytes, path: str, step: Step, seen: Hasher) -> FileFacts:
        """Write a file there; what it was here, which ``seen`` takes too."""
        hashed, size = hashlib.sha256(), 0
        self._disk.reached(step)
        with self._files.open(path, "wb") as there:
            for piece in _pieces(content):
                there.write(piece)
                self._disk.reached(step)
                hashed.update(piece)
                seen.update(piece)
                size += len(piece)
        if self._is_folder:  # A power cut must not take what is called whole.
            self._disk.sync_file(Path(path), step)
            self._disk.sync_folder(Path(path).parent, step)
        return FileFacts(size, hashed.hexdigest())

    def _facts_of(self, path: str) -> FileFacts:
        with self._files.open(path, "rb") as there:
            return _facts_of_open(there)

    def _fetch(self, run_id: str, name: str, relative: str, path: Path) -> None:
        try:
            with self._files.open(self._at(run_id, name, relative), "rb") as there, path.open("wb") as here:
                while piece := there.read(PIECE_BYTES):
                    here.write(piece)
        except FileNotFoundError as error:
            raise BackupError(f"{self.url}/{run_id}/{name}/{relative} is missing") from error


def _digest_of(plain: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical(plain)).hexdigest()


def _pieces(content: Path | bytes) -> Any:
    if isinstance(content, bytes):
        yield content
        return
    with content.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece


def _facts_of_local(path: Path) -> FileFacts:
    with path.open("rb") as file:
        return _facts_of_open(file)


def _facts_of_open(file: Any) -> FileFacts:
    hashed, size = hashlib.sha256(), 0
    while piece := file.read(PIECE_BYTES):
        hashed.update(piece)
        size += len(piece)
    return FileFacts(size, hashed.hexdigest())


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
