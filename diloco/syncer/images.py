"""An image: the values of every fragment at one instant, in a folder that a later lineage can begin from.

    IMAGE/  fragment-0.safetensors ...  image.json (what it is, sizes and SHA-256 of the others)

Written into a temporary folder beside its place, every file made durable, then renamed: a folder with an ``image.json``
is whole.  On reading every file is verified, ``image.json`` by a digest of its own, and every fragment against the
digest of its published values.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from diloco.codec.contract import digest
from diloco.durable import PLAIN_DISK, Step
from diloco.sync.plain import canonical, parse_json, shown
from diloco.syncer.snapshots import FragmentValues, pack, unpack
from diloco.syncer.tensor_files import Written, tensor_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from diloco.durable import Disk

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

    card: dict[str, str | int]
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
    disk.write_file(beside / MANIFEST, _text({**manifest, "sha256": _digest_of(manifest)}), step)
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
    if manifest.get("sha256") != _digest_of(told) or _text(manifest) != text:
        raise ImageError(f"{path} is damaged: its own digest does not match")
    return manifest


def _text(manifest: dict[str, Any]) -> bytes:
    return json.dumps(manifest, sort_keys=True, indent=1).encode()


def _digest_of(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(canonical(manifest)).hexdigest()
