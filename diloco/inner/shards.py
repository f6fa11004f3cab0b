"""Token shards as they are written: at most so many tokens each, and a note after each of how far the text is through.

So who goes on after a process that was killed begins with the document in which the last whole shard ended.  The note
of a shard is written when the shard is durable; a shard without a note, or a note without its shard, is written again.
Where the text comes as a stream, a mark among the notes says where that stood when all before it had been written.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

NOTES = "notes.jsonl"


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of tokens."""

    file: str
    tokens: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Note:
    """``shard`` of ``split`` ends behind ``documents`` whole documents and ``within`` tokens of the next."""

    split: str
    documents: int
    within: int
    shard: Shard


class Notes:
    """What a folder says of shards that were written there before, of the same text."""

    def __init__(self, folder: Path, text: str, width: int, *, marked: bool = False) -> None:
        """``text`` is all that decides the tokens; notes of another are thrown away, with their shards.

        ``width`` is how many bytes a token has.  ``marked``: what is behind the last mark counts for nothing.
        """
        self._path, self._text, self._width = folder / NOTES, text, width
        self.mark: dict[str, Any] | None = None
        """The last one, of whoever wrote there before."""
        self._notes = self._read(folder, marked)
        kept = {NOTES, *(note.shard.file for note in self._notes)}
        for left in [path for path in folder.iterdir() if path.name not in kept]:
            left.unlink()
        self._path.write_bytes(b"")  # Anew, without a line that was being written.
        for told in ({"text": text}, *(asdict(note) for note in self._notes)):
            self._append(told)
        if self.mark is not None:
            self.put(self.mark)

    def _read(self, folder: Path, marked: bool) -> list[Note]:
        found: list[Note] = []
        whole = 0
        try:
            first, *lines = self._path.read_bytes().splitlines()
            told = json.loads(first)
            told.pop("crc32", None)
            if told != {"text": self._text}:
                return []
            for line in lines:
                told = json.loads(line)
                known = told.pop("crc32", None)  # An earlier release wrote none.
                if known not in (None, _crc32(told)):
                    break
                if "mark" in told:
                    self.mark, whole = told["mark"], len(found)
                    continue
                note = Note(**{**told, "shard": Shard(**told["shard"])})
                if (folder / note.shard.file).stat().st_size != self._width * note.shard.tokens:
                    break
                found.append(note)
        except (OSError, ValueError, TypeError, KeyError):
            pass  # The last line was being written; what is before it holds.
        return found[:whole] if marked else found

    def of(self, split: str) -> list[Note]:
        """Those of one split, in order."""
        return [note for note in self._notes if note.split == split]

    def add(self, note: Note) -> None:
        """``note.shard`` is durable."""
        self._append(asdict(note))

    def put(self, mark: dict[str, Any]) -> None:
        """All shards up to where ``mark`` says are durable."""
        self._append({"mark": mark})

    def _append(self, told: dict[str, object]) -> None:
        with self._path.open("ab") as file:
            file.write(json.dumps({**told, "crc32": _crc32(told)}).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        """All is written."""
        self._path.unlink()


def _crc32(told: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(told, sort_keys=True).encode())


class ShardWriter:
    """Appends the ids of documents to shards of at most ``shard_tokens`` each, hashing on the way."""

    def __init__(self, directory: Path, split: str, shard_tokens: int, dtype: np.dtype[Any], notes: Notes) -> None:
        self._directory, self._split, self._shard_tokens, self._notes = directory, split, shard_tokens, notes
        self.dtype = dtype
        before = notes.of(split)
        self._shards = [note.shard for note in before]
        self.documents = before[-1].documents if before else 0
        """Whole documents that are written; the next one to be handed in."""
        self._within = before[-1].within if before else 0
        self._pending: list[NDArray[Any]] = []
        self._held = 0

    @property
    def held(self) -> int:
        """Tokens that are in no shard yet."""
        return self._held

    def write(self, ids: NDArray[Any]) -> None:
        """Append the ``ids`` of the next document; a shard that is full goes to disk."""
        at, self._within = self._within, 0
        while self._held + len(ids) - at >= self._shard_tokens:
            room = self._shard_tokens - self._held
            self._pending.append(ids[at : at + room])
            at += room
            self._flush(at)
        self._pending.append(ids[at:])
        self._held += len(ids) - at
        self.documents += 1

    def close(self) -> list[Shard]:
        """Write what is left and return all shards."""
        if self._held:
            self._flush(0)
        return self._shards

    def _flush(self, within: int) -> None:
        values = np.concatenate(self._pending).astype(self.dtype)
        content = values.tobytes()
        name = f"{self._split}-{len(self._shards):05d}.bin"
        with (self._directory / name).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        shard = Shard(name, len(values), hashlib.sha256(content).hexdigest())
        self._shards.append(shard)
        self._notes.add(Note(self._split, self.documents, within, shard))
        self._pending, self._held = [], 0
