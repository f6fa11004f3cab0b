"""Backups: copies of the syncer's state in another place, made beside the run without delaying it.

A backup is the newest intact snapshot, the journal after it as far as it is readable at that instant, and every payload
that either names: all that a recovery needs, as of the moment of the copy. It is read from the data folder; the
decision loop is never involved. Damage is not copied: every snapshot, payload and image is compared with the digest
that it was written with, before an older backup may be deleted.

A failure is reported and retried; it never ends the process. The status gives the age of the last good backup. When a
run ends, its process makes a last backup after the last snapshot.

Vault. The place where backups are stored: a folder or any object store that fsspec knows, with the same layout in each.

    URL/RUN/0000000001-0000000004-000012-000000123456/  run.json  snapshots/...  journal/...  spool/...  backup.json

An object store cannot rename, so ``backup.json`` marks a backup as complete: it is written last, when every other file
has been read back and has the digest that it names. A folder without it was left by an attempt that died.

Order. Backups are ordered by ``BackupFacts.reach``, how far each goes in the run, which is also their name, and the
oldest in that order are deleted first. Clocks play no part: wall time, which may jump, is in a backup for display only.
An earlier release named backups by wall time; those are ordered in the same way.
"""

from __future__ import annotations

import hashlib
import io
import re
import threading
import time
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import urlsplit

from diloco.codec.base import Hasher
from diloco.durable import PLAIN_DISK, Disk, Step
from diloco.sync.events import LineageBegan, SyncerStarted
from diloco.sync.journal import PlainError, from_plain, parse_json, shown
from diloco.syncer.restoring import Kept, Point
from diloco.syncer.snapshots import IMAGE_MANIFEST, MANIFEST, digest_of, digests_in, sealed
from diloco.syncer.store import payloads_in, payloads_named

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from diloco.syncer.journal_files import SegmentRead
    from diloco.syncer.store import Store

FORMAT = 1
MARKER = "backup.json"
JOURNAL = re.compile(r"journal/journal-(\d+)\.log")
PIECE_BYTES = 4 << 20


class BackupError(ValueError):
    """A backup cannot be made or read; the text names the file and says why."""


class DamagedError(BackupError):
    """A file to be copied differs from what was written; ``relative`` is its name in the backup."""

    def __init__(self, relative: str, content: Path | bytes) -> None:
        path = relative if isinstance(content, bytes) else content
        super().__init__(f"{path} is damaged: its digest is not the one that it was written with")
        self.relative = relative


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Size in bytes and SHA-256 of a file of a backup."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class BackupFacts:
    """The contents of ``backup.json``. ``versions`` and ``run_tokens`` are those of its snapshot; the journal after it
    has more. ``at`` is wall time, for display only."""

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
        """How far the backup goes: lineage, epoch, the journal's last segment and that segment's bytes."""
        found = [(JOURNAL.fullmatch(name), facts.bytes) for name, facts in self.files.items()]
        journal = max(((int(segment[1]), size) for segment, size in found if segment), default=(0, 0))
        return self.lineage, self.epoch, *journal


def files_of(url: str, called: str) -> tuple[Any, str]:
    """Return fsspec's file system of ``url`` and the path there.

    Raises ``BackupError`` if no library on this machine can reach ``url``, or if it contains a password.
    """
    for each in url.split("::"):
        if (parts := urlsplit(each)).password is not None:
            variable = f"FSSPEC_{parts.scheme.upper()}_PASSWORD"
            raise BackupError(f"{called} is a URL with a password, which others would see: export {variable} instead")
    import fsspec  # type: ignore[import-untyped]  # Slow, and most runs need none.

    try:
        files, root = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError, OSError) as error:
        raise BackupError(f"{url!r} cannot be reached from here: {error}") from error
    return files, root.rstrip("/")


class Vault:
    """All backups below one URL."""

    def __init__(self, url: str, disk: Disk = PLAIN_DISK) -> None:
        """Raises ``BackupError`` as ``files_of`` does."""
        self.url = url.rstrip("/") or "/"
        self._disk = disk
        self._files, self._root = files_of(self.url, "backup")
        from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

        self._is_folder = isinstance(self._files, LocalFileSystem)

    def backups(self, run_id: str) -> dict[str, BackupFacts | BackupError]:
        """Return a run's complete backups, oldest first, after those whose marker cannot be read, with the reason."""
        damaged: dict[str, BackupFacts | BackupError] = {}
        good: dict[str, BackupFacts] = {}
        for name in self._folders(run_id):
            if self._files.exists(self._at(run_id, name, MARKER)):
                try:
                    good[name] = self.facts(run_id, name)
                except BackupError as error:
                    damaged[name] = error
        return damaged | dict(sorted(good.items(), key=lambda each: (each[1].reach, each[0])))

    def leftovers(self, run_id: str) -> list[str]:
        """Return the folders without a marker: failed attempts, and what others keep there."""
        return [name for name in self._folders(run_id) if not self._files.exists(self._at(run_id, name, MARKER))]

    def folder(self, run_id: str) -> Path | None:
        """Return the folder of a run's backups; None where they are in an object store."""
        return Path(self._at(run_id)) if self._is_folder else None

    def facts(self, run_id: str, name: str) -> BackupFacts:
        """Read and verify a backup's marker."""
        where = f"{self.url}/{run_id}/{name}/{MARKER}"
        try:
            plain = dict(parse_json(self._files.cat_file(self._at(run_id, name, MARKER))))
            known = plain.pop("sha256", None)  # Earlier releases wrote none.
            if (written := plain.get("format")) != FORMAT:
                raise BackupError(f"it has format {shown(written)}, and {FORMAT} is wanted")
            if known not in (None, digest_of(plain)):
                raise BackupError("its own digest does not match")
            found: BackupFacts = from_plain(BackupFacts, plain, "backup")
        except FileNotFoundError as error:
            raise BackupError(f"{where} is missing") from error
        except (ValueError, TypeError, PlainError) as error:
            raise BackupError(f"{where} is damaged: {error}") from error
        return found

    def put(
        self,
        run_id: str,
        name: str,
        files: Mapping[str, tuple[Path | bytes, str]],
        facts: BackupFacts,
    ) -> BackupFacts:
        """Copy ``files`` there and read them back, then write the marker from ``facts``, which come without files.

        Raises ``DamagedError`` when a file, as it is copied, does not have the digest that comes with it ("": none is
        known).
        """
        told: dict[str, FileFacts] = {}
        for above in sorted({self._files._parent(self._at(run_id, name, relative)) for relative in files}):
            if self._is_folder:
                self._disk.settle(Path(above), Step.BACKUP_FILE)
            else:
                self._files.makedirs(above, exist_ok=True)
        for relative, (content, known) in files.items():
            path = self._at(run_id, name, relative)
            seen = Hasher(known)  # An update's digest is in the form in which it was sent.
            told[relative] = self._copy(content, path, Step.BACKUP_FILE, seen)
            if known and seen.text() != known:
                raise DamagedError(relative, content)
            with self._files.open(path, "rb") as there:
                found = _poured(there)
            if found != told[relative]:
                raise BackupError(f"{self.url}/{run_id}/{name}/{relative} is not what was written there a moment ago")
        whole = replace(facts, files=told)
        self._copy(sealed(asdict(whole)), self._at(run_id, name, MARKER), Step.BACKUP_WHOLE, Hasher())
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
        """Copy a backup into ``folder``, verified and durable; ``BackupError`` names a damaged or missing file."""
        facts, made = self.facts(run_id, name), set[Path]()
        for relative, wanted in sorted(facts.files.items()):
            parts = PurePosixPath(relative).parts
            if not parts or ".." in parts or relative.startswith("/"):
                raise BackupError(f"{self.url}/{run_id}/{name}/{MARKER} names {relative!r}, outside of the backup")
            target = folder.joinpath(*parts)
            if target.parent not in made:
                disk.settle(target.parent, Step.RESTORE_FETCH)
                made.add(target.parent)
            disk.keep(target, partial(self._fetch, run_id, name, relative, wanted), Step.RESTORE_FETCH)
        return facts

    # --- files there ---------------------------------------------------------------------------------------------

    def _at(self, *parts: str) -> str:
        return "/".join([self._root, *parts])

    def _folders(self, run_id: str) -> list[str]:
        self._files.invalidate_cache()
        try:
            found = self._files.ls(self._at(run_id), detail=True)
        except FileNotFoundError:
            return []
        return sorted(entry["name"].rstrip("/").rpartition("/")[2] for entry in found if entry["type"] == "directory")

    def _copy(self, content: Path | bytes, path: str, step: Step, seen: Hasher) -> FileFacts:
        """Copy a file there, updating ``seen``; return its facts as read here."""

        def write(piece: bytes) -> None:
            there.write(piece)
            self._disk.reached(step)
            seen.update(piece)

        self._disk.reached(step)
        source = io.BytesIO(content) if isinstance(content, bytes) else content.open("rb")
        beside = f"{path}.tmp" if self._is_folder else path  # A file there has its name before its content.
        with source as here, self._files.open(beside, "wb") as there:
            facts = _poured(here, write)
        if self._is_folder:  # A power cut must not remove files of a complete backup.
            self._disk.sync_file(Path(beside), step)
            self._disk.rename(Path(beside), Path(path), step)
            self._disk.sync_folder(Path(path).parent, step)
        return facts

    def _fetch(self, run_id: str, name: str, relative: str, wanted: FileFacts, path: Path) -> None:
        where = f"{self.url}/{run_id}/{name}/{relative}"
        try:
            with self._files.open(self._at(run_id, name, relative), "rb") as there, path.open("wb") as here:
                found = _poured(there, here.write)
        except FileNotFoundError as error:
            raise BackupError(f"{where} is missing") from error
        if found != wanted:
            raise BackupError(
                f"{where} is damaged: {found.bytes} bytes with SHA-256 {found.sha256[:12]}, and {wanted.bytes} with "
                f"{wanted.sha256[:12]} were written"
            )


def _poured(source: IO[bytes], write: Callable[[bytes], object] = lambda piece: None) -> FileFacts:
    """Pass all of ``source`` to ``write``, a piece at a time; return its facts."""
    hashed, size = hashlib.sha256(), 0
    while piece := source.read(PIECE_BYTES):
        write(piece)
        hashed.update(piece)
        size += len(piece)
    return FileFacts(size, hashed.hexdigest())


NAME = "{:010d}-{:010d}-{:06d}-{:012d}"
"""A backup's name: its ``reach``."""
NAMED = re.compile(r"(\d{10,})-(\d{10,})-\d{6,}-\d{12,}|\d{8}T\d{6}\.\d{6}Z")
"""The names that backups have, those by wall time of an earlier release among them."""
RETRY_S = 30.0
"""Seconds to wait, at most, before the next attempt after a failure."""
STOP_S, LAST_S = 5.0, 60.0
"""Seconds to wait, at most, when the process stops: for a running copy, and for the last one of a run that has ended.
An unfinished copy is no backup."""


@dataclass(kw_only=True, slots=True)
class BackupOptions:
    """``url`` is a folder or any URL that fsspec opens; empty: no backups."""

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
    """Copy the data folder as it is now; return the backup's name and facts.

    Compares every file that has a digest with it during the copy. If a snapshot is damaged, the one before it is
    copied, with the longer journal, and ``note`` gets the reason. Other damage raises ``DamagedError`` and leaves no
    backup. Raises ``KeptError``, ``BackupError`` or the store's own error when the copy is impossible, or when a file
    disappears meanwhile.
    """
    kept = Kept(folder, note)
    for point in reversed(kept.points()):
        segments = kept.segments(point.segment)
        lineage, epoch = point.state.lineage, point.state.epoch
        for event in (record.event for read in segments for record in read.records):
            if isinstance(event, LineageBegan):
                lineage = event.lineage
            elif isinstance(event, SyncerStarted):
                epoch = event.epoch
        name = NAME.format(lineage, epoch, segments[-1].index, segments[-1].found.end)
        there = vault.backups(kept.card.run_id).get(name)
        if isinstance(there, BackupFacts):
            return name, there  # That backup holds the same journal.
        if there is not None:
            vault.drop(kept.card.run_id, name)
        try:
            return name, _copied(kept, point, segments, vault, name, lineage, epoch)
        except DamagedError as error:
            vault.drop(kept.card.run_id, name)
            if not error.relative.startswith("snapshots/"):
                raise
            note(f"{error}; the snapshot before it is copied")
    raise BackupError(f"{folder / 'snapshots'} has no whole snapshot: there is nothing to copy")


def _copied(
    kept: Kept, point: Point, segments: Sequence[SegmentRead], vault: Vault, name: str, lineage: int, epoch: int
) -> BackupFacts:
    """Copy a snapshot and the journal after it, at whose end the run is in this ``lineage`` and ``epoch``."""
    folder, state = kept.folder, point.state
    files: dict[str, tuple[Path | bytes, str]] = {"run.json": ((folder / "run.json").read_bytes(), "")}
    images = [kept.lineages.folder / str(began) for began in kept.lineages.numbers() if began > state.lineage]
    manifests = [kept.snapshots.path(point.number) / MANIFEST, *(image / IMAGE_MANIFEST for image in images)]
    for manifest in manifests:
        within = manifest.parent.relative_to(folder).as_posix()
        known = digests_in(manifest)
        for path in sorted(manifest.parent.iterdir()):
            files[f"{within}/{path.name}"] = path, known.get(path.name, "")
    payloads = payloads_in(kept.snapshots.load(point.number, whole=False).state)
    for read in segments:
        name_there = f"journal/journal-{read.index:06d}.log"
        files[name_there] = (folder / name_there).read_bytes()[: read.found.end], ""
        payloads |= payloads_named(read.records)
    for reference, digest in sorted(payloads.items()):
        files[f"spool/{reference}"] = kept.spool.folder / reference, digest
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
    return vault.put(kept.card.run_id, name, files, facts)


class Backups:
    """Makes a backup every ``every_s`` seconds, in its own thread."""

    def __init__(self, options: BackupOptions, store: Store, lineage: int, epoch: int) -> None:
        """``lineage`` and ``epoch`` are those of this process."""
        self._options, self._folder, self._run_id, self._emit = options, store.folder, store.card.run_id, store.emit
        self._vault = Vault(options.url, store.disk)
        self._stopping = threading.Event()
        self._began_s = time.monotonic()
        self._own = (lineage, epoch)
        self._good_s: float | None = None
        self._last = ""
        self._failing = ""
        self.behind = ""
        """Why this process or its folder is outdated, according to the backups at ``url``; empty if it is not."""
        self._makes_last = False
        # A store that never answers must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="backups", daemon=True)

    def start(self) -> None:
        """Look for backups of another syncer; make the first one after ``every_s``."""
        self._thread.start()

    def stop(self, *, last: bool) -> None:
        """Wait for a running copy at most ``STOP_S``; or make a ``last`` one, in at most ``LAST_S``. Begin no other."""
        self._makes_last = last
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(LAST_S if last else STOP_S)
        if last and self._thread.is_alive():
            self._failing = f"the last backup was not complete after {LAST_S:g} s"

    def status(self) -> dict[str, object]:
        """Status for ``diloco status``; ``age_s`` is the age of this process's last good backup, None before it;
        ``without_s`` are the seconds since then, or since the process began."""
        good_s = self._good_s
        without_s = round(time.monotonic() - (self._began_s if good_s is None else good_s), 1)
        age_s = None if good_s is None else without_s
        facts = {"url": self._options.url, "age_s": age_s, "last": self._last, "failing": self._failing}
        return {**facts, "without_s": without_s}

    def _run(self) -> None:
        wait_s, looked = 0.0, False
        while not (ends := self._stopping.wait(wait_s)) or self._makes_last:
            try:
                if looked or ends:
                    self._once()
                else:
                    self._compare(self._vault.backups(self._run_id), self._own)
                self._failing = ""
                wait_s = self._options.every_s
            except Exception as error:  # Object store libraries raise anything, and this thread must go on.
                self._failing = str(error) or repr(error)
                if self._makes_last or not self._stopping.is_set():
                    self._emit("note", {"note": "backup_failed", "why": self._failing})
                wait_s = min(self._options.every_s, RETRY_S)
            if ends:
                return
            looked = True

    def _once(self) -> None:
        """Make a backup, and delete all but the newest ``keep``: never this one, nor one with an unreadable marker."""
        began = time.monotonic()
        for died in self._vault.leftovers(self._run_id):  # First, so that leftovers do not accumulate.
            if (of := NAMED.fullmatch(died)) is None:
                continue  # No attempt of a syncer left it.
            if of[1] is None or (int(of[1]), int(of[2])) <= self._own:  # A later syncer may be writing its own now.
                self._vault.drop(self._run_id, died)
        before = self._vault.backups(self._run_id)
        name, facts = back_up(
            self._folder, self._vault, lambda why: self._emit("note", {"note": "backup_of_less", "why": why})
        )
        self._good_s, self._last = began, name
        if name in before:
            return  # The run has not changed since it was made.
        found = self._vault.backups(self._run_id)
        for damaged in found.values():
            if isinstance(damaged, BackupError):
                self._emit("note", {"note": "backup_damaged", "why": str(damaged)})
        self._compare(found, facts.reach, name)
        names = [each for each, there in found.items() if isinstance(there, BackupFacts)]
        for old in names[: -self._options.keep]:
            if old != name:
                self._vault.drop(self._run_id, old)
        size = sum(each.bytes for each in facts.files.values())
        seconds = round(time.monotonic() - began, 3)
        self._emit("backup", {"name": name, "versions": list(facts.versions), "bytes": size, "seconds": seconds})

    def _compare(self, found: dict[str, BackupFacts | BackupError], reach: tuple[int, ...], made: str = "") -> None:
        """Note whether a backup goes further than ``reach``, that of this process or of the backup that it ``made``.

        A backup of a later epoch is from a syncer that has taken over; this one was started again in the old folder.
        """
        name, newest = next(reversed(found.items()), ("", None))
        behind = ""
        if isinstance(newest, BackupFacts) and newest.reach[:2] > reach[:2]:
            theirs, ours = (f"lineage {lineage}, epoch {epoch}" for lineage, epoch in (newest.reach[:2], reach[:2]))
            behind = f"a backup in {self._vault.url} is of {theirs}, and this syncer is of {ours}: "
            behind += "if another syncer leads the run now, end this one"
        elif made and name != made:
            behind = f"{made} is made, and {name} there goes further: a restore takes that unless you name another"
        if behind and behind != self.behind:
            self._emit("note", {"note": "backup_behind", "why": behind})
        self.behind = behind
