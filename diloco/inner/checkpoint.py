"""Checkpoints on disk: safetensors and a manifest, whole or not there, verified on read, without pickle.

``<root>/<name>/manifest.json`` holds the caller's ``meta`` and the size and sha256 of each tensor file; tensors named
``part/rest`` lie in ``part.safetensors`` under ``rest``.  Names sort by age.  ``parts`` writes those of a site that
holds its model in parts, ``opened`` reads both.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import safetensors.torch
from safetensors import SafetensorError

from diloco.durable import PLAIN_DISK, Step
from diloco.inner.checks import require
from diloco.inner.opened import WHOLE, Checkpoint
from diloco.inner.sealed import CheckpointError, digest_of_file, write_sealed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

    from diloco.durable import Disk

__all__ = ["AsyncWriter", "Checkpoint", "CheckpointError", "latest", "load", "names", "publish", "save"]

TEMPORARY = ".tmp-"


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
    path, temporary = root / name, root / f"{TEMPORARY}{name}"
    try:
        disk.settle(root, Step.CHECKPOINT_FOLDER)
        disk.remove(temporary, Step.CHECKPOINT_PRUNE)
        disk.make_folder(temporary, Step.CHECKPOINT_BEGIN)
        files = {part: _write_part(temporary, part, named, disk) for part, named in _by_part(tensors).items()}
        told = {"format": WHOLE, "files": files, "meta": dict(meta)}
        write_sealed(temporary / "manifest.json", told, disk, Step.CHECKPOINT_FILE)
        publish(root, name, keep, disk)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):  # A full disk does not get fuller with every attempt.
            disk.remove(temporary, Step.CHECKPOINT_PRUNE)
        raise CheckpointError(f"the checkpoint {path} could not be written: {error}") from error
    return path


def publish(root: Path, name: str, keep: int, disk: Disk) -> None:
    """Give the checkpoint in the temporary folder, whose files are durable, its name; delete all but ``keep``."""
    path, temporary, replaced = root / name, root / f"{TEMPORARY}{name}", root / f"{TEMPORARY}old-{name}"
    disk.remove(replaced, Step.CHECKPOINT_PRUNE)
    disk.sync_folder(temporary, Step.CHECKPOINT_FOLDER)
    if path.exists():
        disk.rename(path, replaced, Step.CHECKPOINT_RENAME)
    disk.rename(temporary, path, Step.CHECKPOINT_RENAME)
    disk.sync_folder(root, Step.CHECKPOINT_FOLDER)
    disk.remove(replaced, Step.CHECKPOINT_PRUNE)
    for old in names(root)[:-keep] if keep else []:
        if old != name:
            disk.remove(root / old, Step.CHECKPOINT_PRUNE)


def names(root: Path) -> list[str]:
    """Names of the checkpoints below ``root``, oldest first; temporary folders of a writer that died are not listed."""
    if not root.is_dir():
        return []
    return sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def load(path: Path, *, verify: bool = True) -> Checkpoint:
    """Open one checkpoint, and verify it unless no value is wanted; CheckpointError names the file that is missing or
    damaged."""
    found = Checkpoint(path)
    if verify:
        found.verify()
    return found


def latest(root: Path, *, verify: bool = True) -> Checkpoint | None:
    """The newest valid checkpoint, as ``load`` opens it, or None.  Its ``skipped`` says which newer ones were damaged.

    CheckpointError when there are some and all are damaged: starting from nothing would be a silent loss.
    """
    skipped: list[str] = []
    for name in reversed(names(root)):
        try:
            found = load(root / name, verify=verify)
        except CheckpointError as error:
            skipped.append(str(error))
            continue
        found.skipped = tuple(skipped)
        return found
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
    return {"bytes": file.stat().st_size, "sha256": digest_of_file(file)}


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
        self.start(lambda: save(self.root, name, tensors, meta, self._keep, self._disk))

    def start(self, write: Callable[[], object]) -> None:
        """Start ``write``; must not be called while ``busy``."""
        assert not self.busy, "one checkpoint at a time: ask busy first"
        if self._synchronous:
            write()
            return
        # A daemon, so that a disk that hangs cannot keep a dying process alive; wait() is the orderly end.
        self._thread = threading.Thread(target=self._write, args=(write,), name="checkpoint-writer", daemon=True)
        self._thread.start()

    def wait(self, bound_s: float) -> None:
        """Return when nothing is under way; CheckpointError after ``bound_s`` or if the write failed."""
        if self._thread is not None:
            self._thread.join(bound_s)
        if self.busy:
            raise CheckpointError(f"a checkpoint in {self.root} is still being written after {bound_s:g} s")

    def _write(self, write: Callable[[], object]) -> None:
        try:
            write()
        except Exception as error:  # kept and raised in the caller's thread, whatever it is
            self._error = error
