"""Snapshots: every fragment with its momentum, and the machine's memory, in a folder of their own.

    snapshots/00000012/  fragment-0.safetensors ...  state.json  manifest.json (sizes and SHA-256 of the others)

Written into a temporary folder, every file made durable, then renamed: a folder with that name is whole.  On reading
every file is verified; a damaged snapshot is named and the one before it is used, with the longer journal.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safetensors.torch import load, save
from torch import Tensor

from diloco.durable import sync_folder, write_file

if TYPE_CHECKING:
    from pathlib import Path


FORMAT = 1


class SnapshotError(ValueError):
    """A snapshot is damaged; the text names the file."""


@dataclass(frozen=True, slots=True)
class FragmentValues:
    """A fragment at one version, flat fp32: ``theta`` (Θ), ``published`` (Θ̂), ``momentum`` or None.

    ``digest`` is that of ``published``.  The tensors are never written to again: a new version is a new object.
    """

    version: int
    theta: Tensor
    published: Tensor
    momentum: Tensor | None
    digest: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """``state`` is ``OuterSync.snapshot()``; ``journal_segment`` is the first one to replay."""

    state: object
    fragments: tuple[FragmentValues, ...]
    journal_segment: int


class Snapshots:
    """The folder of snapshots."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder = folder
        self.keep = keep
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".*.tmp"):
            shutil.rmtree(leftover)

    def numbers(self) -> list[int]:
        """The snapshots that exist, rising."""
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdigit())

    def write(self, snapshot: Snapshot) -> int:
        """Write ``snapshot`` durably; returns its size in bytes."""
        number = max(self.numbers(), default=0) + 1
        beside = self.folder / f".{number:08d}.tmp"
        beside.mkdir()
        files = {f"fragment-{index}.safetensors": _pack(values) for index, values in enumerate(snapshot.fragments)}
        state = {"state": snapshot.state, "journal_segment": snapshot.journal_segment}
        files["state.json"] = json.dumps(state, sort_keys=True).encode()
        manifest = {
            "format": FORMAT,
            "files": {
                name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()
            },
        }
        for name, data in files.items():
            write_file(beside / name, data)
        write_file(beside / "manifest.json", json.dumps(manifest, sort_keys=True, indent=1).encode())
        beside.rename(self.folder / f"{number:08d}")
        sync_folder(self.folder)
        return sum(len(data) for data in files.values())

    def load(self, number: int) -> Snapshot:
        """Read and verify one snapshot; ``SnapshotError`` names the file that is missing or damaged."""
        folder = self.folder / f"{number:08d}"
        try:
            manifest = json.loads((folder / "manifest.json").read_bytes())
            if manifest["format"] != FORMAT:
                raise SnapshotError(f"{folder} has format {manifest['format']!r}: {FORMAT} wanted")
            files = {name: _verified(folder / name, facts) for name, facts in sorted(manifest["files"].items())}
            state = json.loads(files["state.json"])
            count = len(files) - 1
            fragments = tuple(_unpack(files[f"fragment-{index}.safetensors"]) for index in range(count))
            return Snapshot(state["state"], fragments, int(state["journal_segment"]))
        except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise SnapshotError(f"{folder} is damaged: {error}") from error

    def prune(self) -> int:
        """Drop all but the newest ``keep``; returns the first journal segment that the oldest one left needs."""
        for number in self.numbers()[: -self.keep]:
            shutil.rmtree(self.folder / f"{number:08d}")
        oldest = self.folder / f"{self.numbers()[0]:08d}"
        return int(json.loads((oldest / "state.json").read_bytes())["journal_segment"])


def _verified(path: Path, facts: dict[str, object]) -> bytes:
    data = path.read_bytes()
    if len(data) != facts["bytes"] or hashlib.sha256(data).hexdigest() != facts["sha256"]:
        raise SnapshotError(f"{path} is damaged: it is not what was written")
    return data


def _pack(values: FragmentValues) -> bytes:
    tensors = {"theta": values.theta, "published": values.published}
    if values.momentum is not None:
        tensors["momentum"] = values.momentum
    if values.published.data_ptr() == values.theta.data_ptr():
        tensors["published"] = values.published.clone()
    return save(tensors, metadata={"version": str(values.version), "digest": values.digest})


def _unpack(data: bytes) -> FragmentValues:
    tensors = load(data)
    length = int.from_bytes(data[:8], "little")
    facts = json.loads(data[8 : 8 + length])["__metadata__"]
    return FragmentValues(
        int(facts["version"]), tensors["theta"], tensors["published"], tensors.get("momentum"), facts["digest"]
    )
