"""A JSON file that says of itself whether it is whole."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from diloco.durable import Disk, Step


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read; the message names the file."""


def write_sealed(path: Path, told: Mapping[str, Any], disk: Disk, step: Step) -> None:
    """Make the file ``path``, durable itself; its name is after its folder was synced."""
    text = json.dumps({**told, "sha256": _digest(told)}, indent=1, allow_nan=False)
    disk.make(path, lambda file: file.write_text(text), step)
    disk.sync_file(path, step)


def read_sealed(path: Path) -> dict[str, Any]:
    """What ``write_sealed`` was told; CheckpointError names the file that is missing or damaged."""
    try:
        told: dict[str, Any] = json.loads(path.read_text())
        undamaged = told.pop("sha256") == _digest(told)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not undamaged:
        raise CheckpointError(f"{path} is damaged: its own sha256 does not match")
    return told


def digest_of_file(file: Path) -> str:
    """Sha256 hex of its content."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _digest(told: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
