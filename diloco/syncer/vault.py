"""The place where backups lie: a folder or any object store that fsspec knows, in one form for all of them.

    URL/RUN/0000000001-0000000004-000012-000000123456/  run.json  snapshots/...  journal/...  spool/...  backup.json

An object store cannot rename, so ``backup.json`` is what makes a backup one: it is written last, when every other file
has been read back and has the digest that it names.  A folder without it is what an attempt left that died.

Backups are ordered by ``BackupFacts.reach``, how far each goes in the run, which is also the name that they get.  No
clock has a part in it; an earlier release named them by wall time, and those are ordered in the same way.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from diloco.codec.digests import hasher
from diloco.durable import PLAIN_DISK, Step
from diloco.sync.plain import PlainError, canonical, from_plain, parse_json, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from diloco.codec.digests import Hasher
    from diloco.durable import Disk

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
        """``BackupError`` where no library on this machine can reach ``url``."""
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
