"""Sealed updates on disk: durable before their first byte is sent, so that a new process can send the same bytes.

One file an update, ``<fragment>-<sequence>.update``: one line of JSON (the header's fields), then the payload.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from diloco.durable import write_file
from diloco.wire.messages import PushHeader

if TYPE_CHECKING:
    from pathlib import Path


class OutboxError(ValueError):
    """A file of the outbox is damaged; the text names it."""


class Outbox:
    """The folder of sealed updates of one site."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".*.tmp"):
            leftover.unlink()

    def _path(self, fragment: int, sequence: int) -> Path:
        return self.folder / f"{fragment}-{sequence}.update"

    def put(self, header: PushHeader, payload: bytes) -> None:
        """Make an update durable, in place of an earlier one of the same number."""
        line = json.dumps(asdict(header), sort_keys=True).encode() + b"\n"
        write_file(self._path(header.fragment, header.sequence), line + payload)

    def get(self, fragment: int, sequence: int, incarnation: int) -> tuple[PushHeader, memoryview]:
        """The update, its header stamped with the ``incarnation`` that sends it now; ``OutboxError`` if damaged."""
        path = self._path(fragment, sequence)
        header, payload = _read(path)
        if hashlib.sha256(payload).hexdigest() != header.digest:
            raise OutboxError(f"{path} is damaged: its digest is not the one it was sealed with")
        return replace(header, incarnation=incarnation), payload

    def drop(self, fragment: int, sequence: int) -> None:
        """The update is needed no more."""
        self._path(fragment, sequence).unlink(missing_ok=True)

    def digests(self) -> dict[tuple[int, int], str]:
        """The digest of every whole update here, by (fragment, sequence); what is damaged is left out."""
        found: dict[tuple[int, int], str] = {}
        for path in sorted(self.folder.glob("*.update")):
            try:
                header, payload = _read(path)
            except OutboxError:
                continue  # A machine that wanted it takes the progress back as unsent; nothing is lost by that.
            if hashlib.sha256(payload).hexdigest() == header.digest:
                found[header.fragment, header.sequence] = header.digest
        return found

    def clear(self, keep: set[tuple[int, int]]) -> None:
        """Drop everything that is not in ``keep``."""
        for path in self.folder.glob("*.update"):
            fragment, _, sequence = path.stem.partition("-")
            if (int(fragment), int(sequence)) not in keep:
                path.unlink()


def _read(path: Path) -> tuple[PushHeader, memoryview]:
    data = path.read_bytes()
    line, newline, _ = data.partition(b"\n")
    try:
        if not newline:
            raise ValueError("it has no header")
        return PushHeader(**json.loads(line)), memoryview(data)[len(line) + 1 :]
    except (ValueError, TypeError) as error:
        raise OutboxError(f"{path} is damaged: {error}") from error
