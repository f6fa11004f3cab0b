"""Checkpoints on disk: safetensors and a manifest, whole or not there, verified on read, without pickle.

``<root>/<name>/manifest.json`` holds the caller's ``meta`` and the size and sha256 of each tensor file; tensors named
``part/rest`` lie in ``part.safetensors`` under ``rest``.  Names sort by age.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from diloco.durable import PLAIN_DISK, Step
from diloco.inner.checks import require

if TYPE_CHECKING:
    from collections.abc import Mapping

    from diloco.durable import Disk

FORMAT = 1
TEMPORARY = ".tmp-"


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read; the message names the file."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint in memory.  ``meta`` is plain JSON."""

    path: Path
    tensors: dict[str, Tensor]
    meta: dict[str, Any]
    skipped: tuple[str, ...] = ()
    """In words: newer checkpoints that were passed over, and why."""

    def part(self, name: str) -> dict[str, Tensor]:
        """Tensors under ``name/``, without that prefix."""
        return {key[len(name) + 1 :]: tensor for key, tensor in self.tensors.items() if key.startswith(f"{name}/")}


def save(
    root: Path,
    name: str,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    keep: int = 3,
    disk: Disk = PLAIN_DISK,
) -> Path:
    """Write ``root/name`` and delete all but the newest ``keep`` (0: none); returns its path.

    After it returns the checkpoint survives a power cut; whenever it dies before, the older ones are untouched.
    ``tensors`` are named ``part/rest``, on any device, and do not share memory.  CheckpointError in words.
    """
    require(keep >= 0, "keep", keep, "0 (all) or more")
    path, temporary, replaced = root / name, root / f"{TEMPORARY}{name}", root / f"{TEMPORARY}old-{name}"
    try:
        disk.settle(root, Step.CHECKPOINT_FOLDER)
        for left in (temporary, replaced):
            disk.remove(left, Step.CHECKPOINT_PRUNE)
        disk.make_folder(temporary, Step.CHECKPOINT_BEGIN)
        files = {part: _write_part(temporary, part, named, disk) for part, named in _by_part(tensors).items()}
        told = {"format": FORMAT, "files": files, "meta": dict(meta)}
        text = json.dumps({**told, "sha256": _digest(told)}, indent=1, allow_nan=False)
        disk.make(temporary / "manifest.json", lambda manifest: manifest.write_text(text), Step.CHECKPOINT_FILE)
        disk.sync_file(temporary / "manifest.json", Step.CHECKPOINT_FILE)
        disk.sync_folder(temporary, Step.CHECKPOINT_FOLDER)
        if path.exists():
            disk.rename(path, replaced, Step.CHECKPOINT_RENAME)
        disk.rename(temporary, path, Step.CHECKPOINT_RENAME)
        disk.sync_folder(root, Step.CHECKPOINT_FOLDER)
        disk.remove(replaced, Step.CHECKPOINT_PRUNE)
        for old in names(root)[:-keep] if keep else []:
            if old != name:
                disk.remove(root / old, Step.CHECKPOINT_PRUNE)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):  # A full disk does not get fuller with every attempt.
            disk.remove(temporary, Step.CHECKPOINT_PRUNE)
        raise CheckpointError(f"the checkpoint {path} could not be written: {error}") from error
    return path


def names(root: Path) -> list[str]:
    """Names of the checkpoints below ``root``, oldest first; temporary folders of a writer that died are not listed."""
    if not root.is_dir():
        return []
    return sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def load(path: Path) -> Checkpoint:
    """Read and verify one checkpoint; CheckpointError names the file that is missing or damaged."""
    manifest = path / "manifest.json"
    try:
        told = json.loads(manifest.read_text())
        digest = told.pop("sha256")
        files, meta = told["files"], told["meta"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{manifest} cannot be read: {error}") from error
    if digest != _digest(told):
        raise CheckpointError(f"{manifest} is damaged: its own sha256 does not match")
    if told.get("format") != FORMAT:
        raise CheckpointError(f"{manifest} has format {told.get('format')!r}, and this program reads {FORMAT}")
    tensors: dict[str, Tensor] = {}
    for part, facts in files.items():
        for key, tensor in _read_part(path / f"{part}.safetensors", facts["sha256"]).items():
            tensors[f"{part}/{key}"] = tensor
    return Checkpoint(path, tensors, meta)


def latest(root: Path) -> Checkpoint | None:
    """The newest valid checkpoint, its ``skipped`` saying which newer ones were damaged; None when there is none.

    CheckpointError when there are some and all are damaged: starting from nothing would be a silent loss.
    """
    skipped: list[str] = []
    for name in reversed(names(root)):
        try:
            found = load(root / name)
        except CheckpointError as error:
            skipped.append(str(error))
            continue
        return Checkpoint(found.path, found.tensors, found.meta, tuple(skipped))
    if skipped:
        raise CheckpointError(f"no checkpoint in {root} is whole: {'; '.join(skipped)}")
    return None


def _by_part(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        part, slash, rest = key.partition("/")
        require(bool(slash and rest and part.isidentifier()), "tensor name", key, "part/rest")
        parts.setdefault(part, {})[rest] = tensor.detach().contiguous()
    return parts


def _write_part(directory: Path, part: str, tensors: dict[str, Tensor], disk: Disk) -> dict[str, Any]:
    file = directory / f"{part}.safetensors"
    disk.make(file, lambda path: safetensors.torch.save_file(tensors, path), Step.CHECKPOINT_FILE)
    disk.sync_file(file, Step.CHECKPOINT_FILE)
    return {"bytes": file.stat().st_size, "sha256": _digest_of_file(file)}


def _read_part(file: Path, wanted: str) -> dict[str, Tensor]:
    try:
        if _digest_of_file(file) != wanted:
            raise CheckpointError(f"{file} is damaged: its sha256 differs from the manifest")
        return safetensors.torch.load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def _digest_of_file(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _digest(told: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


class AsyncWriter:
    """Writes checkpoints beside training, one at a time.

    The caller gives tensors that nobody changes any more (clones).  An error of the background write is raised by
    the next call here.  ``synchronous`` writes in the caller's thread, for deterministic runs.
    """

    def __init__(self, root: Path, keep: int = 3, synchronous: bool = False, disk: Disk = PLAIN_DISK) -> None:
        self.root, self._keep, self._synchronous, self._disk = root, keep, synchronous, disk
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    @property
    def busy(self) -> bool:
        """Whether a write is under way; raises the error of the last one if it failed."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread.join()
            self._thread = None
        if self._thread is None and self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._thread is not None

    def submit(self, name: str, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Start writing ``root/name``; must not be called while ``busy``."""
        assert not self.busy, "one checkpoint at a time: ask busy first"
        if self._synchronous:
            save(self.root, name, tensors, meta, self._keep, self._disk)
            return
        # A daemon, so that a disk that hangs cannot keep a dying process alive; wait() is the orderly end.
        self._thread = threading.Thread(
            target=self._write, args=(name, tensors, meta), name="checkpoint-writer", daemon=True
        )
        self._thread.start()

    def wait(self, bound_s: float) -> None:
        """Return when nothing is under way; CheckpointError after ``bound_s`` or if the write failed."""
        if self._thread is not None:
            self._thread.join(bound_s)
        if self.busy:
            raise CheckpointError(f"a checkpoint in {self.root} is still being written after {bound_s:g} s")

    def _write(self, name: str, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        try:
            save(self.root, name, tensors, meta, self._keep, self._disk)
        except Exception as error:  # kept and raised in the caller's thread, whatever it is
            self._error = error
