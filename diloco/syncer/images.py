"""Images: the values of every fragment at one instant, in a folder that a later lineage can begin from.

    IMAGE/  fragment-0.safetensors ...  image.json (what it is, sizes and SHA-256 of the others)

An image is written into a temporary folder beside its place, every file made durable, then renamed: a folder with an
``image.json`` is whole.  On reading every file is verified, ``image.json`` by a digest of its own, and every fragment
against the digest of its published values.

Lineages.  ``Lineages`` keeps the values that each lineage of a run began with, until no snapshot is older than its
beginning.

    lineages/1795234567/  an image

They are durable before the journal says ``LineageBegan``, so that every reader of that record finds them: a recovery of
a restore that was cut short, and a replay from before it.

Export.  ``export`` writes the final version as one file that anything can read: full parameters under their own names.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from diloco.codec.base import digest
from diloco.durable import PLAIN_DISK, DiskFullError, Step, is_full
from diloco.sync.journal import JournalError
from diloco.sync.plain import parse_json, shown
from diloco.syncer.snapshots import FragmentValues, Written, digest_of, pack, tensor_file, unpack

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from diloco.durable import Disk
    from diloco.outer.fragments import Layout
    from diloco.sync.events import LineageBegan

Held = dict[tuple[str, int], tuple[int, int]]
"""(site, fragment) to the tokens and updates of it that some values hold."""
FORMAT = 2
"""Format 1 had no digest of its own, and was never released."""
MANIFEST = "image.json"
MODEL = "model.safetensors"


class ImageError(ValueError):
    """A folder is no image, or is a damaged one; the text names the file."""


@dataclass(frozen=True, slots=True)
class Image:
    """The values, what they hold of each site, and the ``card`` of their run.  ``facts`` say where they come from."""

    card: dict[str, str]
    fragments: tuple[FragmentValues, ...]
    held: Held = field(default_factory=dict)
    facts: dict[str, object] = field(default_factory=dict)


def write_image(
    folder: Path,
    image: Image,
    parameters: Mapping[str, Tensor] | None = None,
    disk: Disk = PLAIN_DISK,
    step: Step = Step.FILE,
) -> None:
    """Write ``image`` durably as ``folder``, which must not exist; with ``parameters``, also as one file for people.

    Nothing rests on an image that somebody asked for; what does says so by ``step``.
    """
    if folder.exists():
        raise ImageError(f"{folder} exists already: an image gets a folder of its own")
    beside = folder.with_name(f".{folder.name}.tmp")
    disk.remove(beside, step)
    disk.make_folder(beside, step)
    files: dict[str, dict[str, object]] = {}
    for index, values in enumerate(image.fragments):
        written = Written(pack(values))
        disk.write_parts(beside / f"fragment-{index}.safetensors", written, step)
        files[f"fragment-{index}.safetensors"] = written.facts()
    if parameters is not None:
        disk.write_parts(beside / MODEL, tensor_file(parameters), step)
    manifest = {
        "format": FORMAT,
        "card": image.card,
        "versions": [values.version for values in image.fragments],
        "digests": [values.digest for values in image.fragments],
        "momentum": all(values.optimizer.tensors for values in image.fragments),
        "held": [[site, index, *counts] for (site, index), counts in sorted(image.held.items())],
        "facts": image.facts,
        "files": files,
    }
    disk.write_file(beside / MANIFEST, _text({**manifest, "sha256": digest_of(manifest)}), step)
    disk.rename(beside, folder, step)
    disk.sync_folder(folder.parent, step)


def read_image(folder: Path) -> Image:
    """The image in ``folder``, verified; ``ImageError`` names what is missing or damaged."""
    try:
        manifest = _manifest(folder / MANIFEST)
        fragments = []
        for index, (version, told) in enumerate(zip(manifest["versions"], manifest["digests"], strict=True)):
            path = folder / f"fragment-{index}.safetensors"
            data, facts = path.read_bytes(), manifest["files"][path.name]
            if len(data) != facts["bytes"] or hashlib.sha256(data).hexdigest() != facts["sha256"]:
                raise ImageError(f"{path} is damaged: it is not what was written")
            values = unpack(data)
            if (values.version, values.digest, digest(values.published, told)) != (version, told, told):
                raise ImageError(f"{path} is not the version {version} that {MANIFEST} speaks of")
            fragments.append(values)
        held = {(str(site), int(at)): (int(tokens), int(updates)) for site, at, tokens, updates in manifest["held"]}
        return Image(dict(manifest["card"]), tuple(fragments), held, dict(manifest["facts"]))
    except FileNotFoundError as error:
        raise ImageError(f"{folder} is no image: {error.filename} is missing") from error
    except ImageError:
        raise
    except (OSError, LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ImageError(f"{folder} is damaged: {type(error).__name__}: {error}") from error


def digests(folder: Path) -> dict[str, str]:
    """The SHA-256 that each file of fragments was written with, by its name; ``ImageError`` where that is damaged."""
    try:
        return {str(name): str(facts["sha256"]) for name, facts in _manifest(folder / MANIFEST)["files"].items()}
    except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise ImageError(f"{folder} is damaged: {type(error).__name__}: {error}") from error


def _manifest(path: Path) -> dict[str, Any]:
    text = path.read_bytes()
    manifest = dict(parse_json(text))
    if manifest.get("format") != FORMAT:
        raise ImageError(f"{path} has format {shown(manifest.get('format'))}: {FORMAT} wanted")
    told = {name: value for name, value in manifest.items() if name != "sha256"}
    if manifest.get("sha256") != digest_of(told) or _text(manifest) != text:
        raise ImageError(f"{path} is damaged: its own digest does not match")
    return manifest


def _text(manifest: dict[str, Any]) -> bytes:
    return json.dumps(manifest, sort_keys=True, indent=1).encode()


class Lineages:
    """The folder of them.  It is there once a run was restored."""

    def __init__(self, folder: Path, disk: Disk = PLAIN_DISK) -> None:
        self.folder = folder
        self._disk = disk

    def sweep(self) -> None:
        """Remove what a process that died has left half written; for the process that has the folder now."""
        for leftover in self.folder.glob(".*.tmp"):
            self._disk.remove(leftover, Step.LINEAGE_PRUNE)

    def numbers(self) -> list[int]:
        """The lineages whose beginning is kept, rising."""
        return sorted(int(path.name) for path in self.folder.glob("*") if path.name.isdigit())

    def keep(self, lineage: int, image: Image) -> None:
        """Make the values of a lineage that is about to begin durable."""
        self._disk.make_folder(self.folder, Step.LINEAGE_FOLDER)
        self._disk.sync_folder(self.folder.parent, Step.LINEAGE_FOLDER)
        path = self.folder / str(lineage)
        self._disk.remove(path, Step.LINEAGE_PRUNE)  # Of an attempt that ended before the journal said so.
        write_image(path, image, disk=self._disk, step=Step.LINEAGE_IMAGE)

    def values(self, event: LineageBegan) -> tuple[FragmentValues, ...]:
        """The values that ``event`` speaks of, verified; ``JournalError`` names what is missing or damaged."""
        path = self.folder / str(event.lineage)
        try:
            image = read_image(path)
        except ImageError as error:
            raise JournalError(f"the values that lineage {event.lineage} began with are not here: {error}") from error
        if tuple(values.digest for values in image.fragments) != event.digests:
            raise JournalError(f"{path} holds other values than those that lineage {event.lineage} began with")
        return image.fragments

    def prune(self, lineage: int) -> None:
        """Drop the beginnings up to and with ``lineage``: every snapshot left is of a later instant."""
        for number in self.numbers():
            if number <= lineage:
                self._disk.remove(self.folder / str(number), Step.LINEAGE_PRUNE)


def export(disk: Disk, folder: Path, layout: Layout, values: Sequence[FragmentValues], versions: Sequence[int]) -> None:
    """Write ``model.safetensors`` and then ``final.json``, which says what it is, into ``folder``.

    ``DiskFullError`` when there is no room for them: then it may be tried again.
    """
    try:
        disk.make_folder(folder, Step.EXPORT)
        for leftover in folder.glob(".*.tmp"):  # Of a process that died while it wrote.
            disk.remove(leftover, Step.EXPORT)
        parameters = full_parameters(layout, [each.evaluated for each in values])
        disk.write_parts(folder / "model.safetensors", tensor_file(parameters), Step.EXPORT)
        facts = {"versions": list(versions), "digests": [each.digest for each in values]}
        disk.write_file(folder / "final.json", json.dumps(facts, indent=1).encode(), Step.EXPORT)
    except OSError as error:
        if is_full(error):
            raise DiskFullError(error.errno, error.strerror) from error
        raise


def full_parameters(layout: Layout, fragments: Sequence[Tensor]) -> dict[str, Tensor]:
    """Full fp32 parameters by name from the flat values of every fragment.

    One that lies in a single piece, as all of ``plan_layout`` do, is a view of its fragment; nobody may write to it.
    """
    shapes = dict(layout.parameters)
    parameters: dict[str, Tensor] = {}
    for fragment, values in zip(layout.fragments, fragments, strict=True):
        at = 0
        for piece in fragment.pieces:
            size = piece.stop - piece.start
            part = values[at : at + size]
            at += size
            if size == prod(shapes[piece.name]):
                parameters[piece.name] = part.view(shapes[piece.name])
                continue
            if piece.name not in parameters:
                parameters[piece.name] = torch.empty(shapes[piece.name])
            parameters[piece.name].view(-1)[piece.start : piece.stop] = part
    return parameters
