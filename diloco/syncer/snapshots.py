"""Snapshots: every fragment, what its outer optimizer remembers, and the machine's memory, in a folder of their own.

    snapshots/00000012/  fragment-0.safetensors ...  state.json  manifest.json (size and SHA-256 of each, its own too)

A snapshot is written into a temporary folder, every file made durable, then renamed: a folder with that name is whole.
On reading every file is verified; a damaged snapshot is named, set aside as ``00000012.damaged``, and the one before it
is used, with the longer journal.

Retention.  How much of the past a data folder keeps: which snapshots may go, and with them the journal and payloads
behind them.  Whatever happens, the newest two snapshots stay: recovery needs one, and another if that is damaged.
Beyond those, the past is kept from one snapshot on, the *anchor*: everything from it to now can be replayed.  The
anchor is the newest snapshot that is at least ``steps`` outer steps old; of those behind it only so many stay that the
next anchor is never far.  Where all that takes more than ``bytes_max``, the oldest goes first.

Writing.  Safetensors files are written from where the values lie: no copy of them is made, whatever their size.  The
library's own writer joins all tensors to one string first, which at a billion parameters is as much memory as the model
takes.  The format is its own, and every reader of safetensors reads what is written here.

Reading.  Large files are read once, into the memory that they stay in, and hashed on the way; several of them at a
time.  A restart is as fast as this is: reading and SHA-256 each take about as long as the other, so that one piece is
read while the one before it is hashed, both without the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import typing
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diloco.codec.base import bytes_of
from diloco.durable import PLAIN_DISK, DiskFullError, Step, is_full
from diloco.outer.optimizer import OuterState, evaluated
from diloco.sync.plain import canonical, from_plain, parse_json, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import BinaryIO

    from diloco.durable import Disk

NEWEST = 2


@dataclass(frozen=True, slots=True)
class Retention:
    """``steps`` outer steps over all fragments, 0 for what recovery needs; ``bytes_max`` bounds what is beyond that."""

    steps: int = 0
    bytes_max: int = 0


RECOVERY_ONLY = Retention()


@dataclass(frozen=True, slots=True)
class Point:
    """A snapshot: the outer steps made before it, the first journal segment behind it, and its size."""

    number: int
    steps: int
    segment: int
    size: int


@dataclass(frozen=True, slots=True)
class Choice:
    """The snapshots that stay, oldest first; ``cut`` is whether the bound took one that retention would have kept."""

    kept: tuple[Point, ...]
    cut: bool

    def reaches(self, retention: Retention) -> bool:
        """Whether all that ``retention`` asks for can be replayed, or all that ever was."""
        oldest, newest = self.kept[0], self.kept[-1]
        return oldest.steps == 0 or newest.steps - oldest.steps >= retention.steps


def choose(points: Sequence[Point], retention: Retention, behind_bytes: Callable[[Point, Point], int]) -> Choice:
    """Which of ``points``, oldest first, stay; ``behind_bytes`` are the journal and payloads between two of them."""
    newest = list(points[-NEWEST:])
    past = list(points[:-NEWEST]) if retention.steps else []
    if not past:
        return Choice(tuple(newest), cut=False)
    now = points[-1].steps
    old_enough = [point for point in [*past, *newest] if now - point.steps >= retention.steps]
    anchor = old_enough[-1] if old_enough else past[0]
    kept: list[Point] = []
    for point in past:
        # Half of what is kept at most lies between two of them, so that the anchor is never twice as old as it must be.
        if point.steps >= anchor.steps and (not kept or point.steps - kept[-1].steps >= retention.steps / 2):
            kept.append(point)
    cut = False
    while kept and sum(point.size for point in kept) + behind_bytes(kept[0], newest[0]) > retention.bytes_max:
        kept.pop(0)
        cut = True
    return Choice((*kept, *newest), cut)


PIECE_BYTES = 16 << 20
"""Written, and hashed, at a time."""
ALIGNMENT = 8
"""Of the first value in the file."""
DTYPES = MappingProxyType({torch.float32: "F32", torch.bfloat16: "BF16"})
"""What is written, as the format calls it."""


def tensor_file(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Iterator[memoryview]:
    """The file of ``tensors`` (fp32 or bf16, contiguous), in order of their names, in pieces: views of them."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, tensor in sorted(tensors.items()):
        assert tensor.dtype in DTYPES, f"{name} is {tensor.dtype}"
        size = tensor.element_size() * tensor.numel()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for _, tensor in sorted(tensors.items()):
        values = bytes_of(tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor)
        for start in range(0, len(values), PIECE_BYTES):
            yield values[start : start + PIECE_BYTES]


class Written:
    """Hands pieces on, and says at the end how many bytes they had and their SHA-256."""

    def __init__(self, parts: Iterable[bytes | memoryview]) -> None:
        self._parts = parts
        self._hash = hashlib.sha256()
        self.size = 0

    def __iter__(self) -> Iterator[bytes | memoryview]:
        for part in self._parts:
            self._hash.update(part)
            self.size += len(part)
            yield part

    def facts(self) -> dict[str, object]:
        """As a manifest has them."""
        return {"bytes": self.size, "sha256": self._hash.hexdigest()}


FILES_MAX = 4
"""Read at the same time, at most: more of them only take turns at the disk."""


class NotAsWritten(ValueError):
    """A file has another length or another digest than what was written."""


def read_verified(files: Sequence[tuple[Path, int, str]]) -> list[Tensor]:
    """The content of each (path, length, SHA-256), as bytes in a tensor of its own; ``NotAsWritten`` names the file."""
    with ThreadPoolExecutor(max_workers=min(FILES_MAX, os.cpu_count() or 1, len(files) or 1)) as pool:
        return list(pool.map(_read_one, files))


def _read_one(file: tuple[Path, int, str]) -> Tensor:
    path, size, wanted = file
    with path.open("rb", buffering=0) as source, ThreadPoolExecutor(max_workers=1) as reader:
        if os.fstat(source.fileno()).st_size != size:
            raise NotAsWritten(f"{path} is damaged: it is not what was written")
        data = torch.empty(size, dtype=torch.uint8)
        pieces = [
            data[start : start + PIECE_BYTES].numpy().data.cast("B") if size else memoryview(b"")
            for start in range(0, size, PIECE_BYTES)
        ]
        found = hashlib.sha256()
        read = [reader.submit(_fill, source, piece) for piece in pieces[:2]]
        for index, piece in enumerate(pieces):
            whole = read[index].result()
            if index + 2 < len(pieces):
                read.append(reader.submit(_fill, source, pieces[index + 2]))
            if not whole:
                break  # Cut short while it was read: the digest will say so.
            found.update(piece)
    if found.hexdigest() != wanted:
        raise NotAsWritten(f"{path} is damaged: it is not what was written")
    return data


def _fill(source: BinaryIO, piece: memoryview) -> bool:
    at = 0
    while at < len(piece):
        count = source.readinto(piece[at:])  # type: ignore[attr-defined]
        if not count:
            return False
        at += count
    return True


FORMAT = 2
"""Of the manifest.  Those of format 1, without the chain value of the journal, are still read."""


class SnapshotError(ValueError):
    """A snapshot is damaged; the text names the file."""


class NewerSnapshotError(SnapshotError):
    """A snapshot is of a format that this version does not know; it is not damaged."""


@dataclass(frozen=True, slots=True)
class FragmentValues:
    """A fragment at one version, flat fp32: ``theta`` (Θ), ``published`` (Θ̂), what the outer ``optimizer`` remembers.

    ``digest`` is that of ``published``.  A region measures what it sends up from its ``reference``: its values right
    after it took the last version of the syncer above.  The tensors are never written to again: a new version is a new
    object.
    """

    version: int
    theta: Tensor
    published: Tensor
    optimizer: OuterState
    digest: str
    reference: Tensor | None = None

    @property
    def evaluated(self) -> Tensor:
        """What stands for the model: what is published, or the average where the outer optimizer keeps one."""
        return evaluated(self.published, self.optimizer)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """``state`` is ``OuterSync.snapshot()``.

    ``journal_segment`` is the first one to replay, and ``journal_chain`` the chain value of the journal before it,
    empty in a snapshot of format 1.
    """

    state: object
    fragments: tuple[FragmentValues, ...]
    journal_segment: int
    journal_chain: str = ""


class Snapshots:
    """The folder of snapshots."""

    def __init__(self, folder: Path, disk: Disk = PLAIN_DISK) -> None:
        self.folder = folder
        self._disk = disk
        self._points: dict[int, Point] = {}
        disk.make_folder(folder, Step.FOLDER)

    def sweep(self) -> None:
        """Remove what a process that died has left half written; for the process that has the folder now."""
        for leftover in self.folder.glob(".*.tmp"):
            self._disk.remove(leftover, Step.SNAPSHOT_PRUNE)

    def numbers(self) -> list[int]:
        """The snapshots that exist, rising."""
        return sorted(int(path.name) for path in self.folder.glob("*") if path.name.isdigit())

    def write(self, snapshot: Snapshot, fragments: Iterable[tuple[int, FragmentValues]] | None = None) -> int:
        """Write ``snapshot`` durably; returns its size in bytes.  Nothing of the values is copied on the way.

        ``fragments`` are its own, each with its index, where it holds none itself: one is asked for when the one before
        it is written, so that a fragment that has a newer version by then need not be kept any longer.

        ``DiskFullError when there is no room for it: nothing of it is left, and it may be tried again.
        """
        number = max((int(path.name[:8]) for path in self.folder.glob("[0-9]*")), default=0) + 1
        beside = self.folder / f".{number:08d}.tmp"
        try:
            own = enumerate(snapshot.fragments) if fragments is None else fragments
            return self._write(snapshot, own, number, beside)
        except OSError as error:
            if not is_full(error):
                raise
            self._disk.remove(beside, Step.SNAPSHOT_PRUNE)
            raise DiskFullError(error.errno, error.strerror) from error

    def _write(
        self, snapshot: Snapshot, fragments: Iterable[tuple[int, FragmentValues]], number: int, beside: Path
    ) -> int:
        self._disk.make_folder(beside, Step.SNAPSHOT_BEGIN)
        files: dict[str, dict[str, object]] = {}
        size = 0
        for name, parts in _files(snapshot, fragments):
            written = Written(parts)
            self._disk.write_parts(beside / name, written, Step.SNAPSHOT_FILE)
            files[name] = written.facts()
            size += written.size
        manifest: dict[str, object] = {"format": FORMAT, "files": files}
        manifest["sha256"] = digest_of(manifest)
        text = json.dumps(manifest, sort_keys=True, indent=1).encode()
        self._disk.write_file(beside / "manifest.json", text, Step.SNAPSHOT_FILE)
        self._disk.rename(beside, self._path(number), Step.SNAPSHOT_RENAME)
        self._disk.sync_folder(self.folder, Step.SNAPSHOT_FOLDER)
        self._points[number] = Point(number, _steps(snapshot.state), snapshot.journal_segment, size)
        return size

    def load(self, number: int) -> Snapshot:
        """Read and verify one snapshot; ``SnapshotError`` names the file that is missing or damaged."""
        with self._reading(number) as facts:
            folder = self._path(number)
            state, segment, chain = _state(folder, facts)
            names = [f"fragment-{index}.safetensors" for index in range(len(facts) - 1)]
            files = [(folder / name, int(str(facts[name]["bytes"])), str(facts[name]["sha256"])) for name in names]
            return Snapshot(state, tuple(unpack(data) for data in read_verified(files)), segment, chain)

    def peek(self, number: int) -> tuple[object, int]:
        """The state and the journal segment of one snapshot, verified; its tensors are not looked at."""
        with self._reading(number) as facts:
            return _state(self._path(number), facts)[:2]

    def digests(self, number: int) -> dict[str, str]:
        """The SHA-256 that each file of one snapshot was written with, by its name; nothing but that is looked at."""
        with self._reading(number) as facts:
            return {name: str(each["sha256"]) for name, each in facts.items()}

    def set_aside(self, number: int) -> None:
        """Keep a damaged snapshot for whoever wants to look at it, where it counts as one no more."""
        for earlier in self.folder.glob("*.damaged"):
            self._disk.remove(earlier, Step.SNAPSHOT_ASIDE)
        self._disk.rename(self._path(number), self.folder / f"{number:08d}.damaged", Step.SNAPSHOT_ASIDE)
        self._points.pop(number, None)

    def point(self, number: int) -> Point:
        """What there is to know of a snapshot when it is asked whether it may go."""
        if number not in self._points:
            with self._reading(number) as facts:
                state, segment, _ = _state(self._path(number), facts)
                size = sum(int(str(each["bytes"])) for each in facts.values())
                self._points[number] = Point(number, _steps(state), segment, size)
        return self._points[number]

    def prune(self, retention: Retention, behind_bytes: Callable[[Point, Point], int], spared: int = 0) -> Choice:
        """Drop the snapshots that ``retention`` does not keep; says which stay, none where nothing may go at all.

        The one with the number ``spared`` does not go either.

        One that turns out damaged where it lies is named if it is ever needed, and until then nothing goes on its word.
        """
        try:
            points = [self.point(number) for number in self.numbers()]
        except SnapshotError:
            return Choice((), cut=False)
        choice = choose(points, retention, behind_bytes)
        kept = {point.number for point in choice.kept} | {spared}
        for number in sorted({point.number for point in points} - kept):
            # Renamed first, so that a process that dies here leaves no folder that is half a snapshot.
            doomed = self.folder / f".{number:08d}.tmp"
            self._disk.rename(self._path(number), doomed, Step.SNAPSHOT_PRUNE)
            self._disk.remove(doomed, Step.SNAPSHOT_PRUNE)
            del self._points[number]
        return choice

    def oldest_lineage(self) -> int:
        """The lineage in which the oldest snapshot was taken; 0 when that cannot be read."""
        try:
            state = self.peek(self.numbers()[0])[0]
        except SnapshotError:
            return 0
        return int(state.get("lineage", 1)) if isinstance(state, dict) else 0

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:08d}"

    @contextlib.contextmanager
    def _reading(self, number: int) -> Iterator[dict[str, dict[str, object]]]:
        """The manifest's facts by file name; whatever does not fit while they are used is damage."""
        folder = self._path(number)
        try:
            files = dict(_read_manifest(folder)["files"])
            odd = set(files) ^ {path.name for path in folder.iterdir()} ^ {"manifest.json"}
            if odd:
                words = ", ".join(sorted(odd))[:200]
                raise SnapshotError(f"{folder} is damaged: its manifest and what lies there differ in {words}")
            yield files
        except SnapshotError:
            raise
        except NotAsWritten as error:
            raise SnapshotError(str(error)) from error
        except (OSError, LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise SnapshotError(f"{folder} is damaged: {type(error).__name__}: {str(error)[:200]}") from error


def _files(
    snapshot: Snapshot, fragments: Iterable[tuple[int, FragmentValues]]
) -> Iterator[tuple[str, Iterable[bytes | memoryview]]]:
    for index, values in fragments:
        yield f"fragment-{index}.safetensors", pack(values)
    state = {
        "state": snapshot.state,
        "journal_segment": snapshot.journal_segment,
        "journal_chain": snapshot.journal_chain,
    }
    yield "state.json", [json.dumps(state, sort_keys=True).encode()]


def _state(folder: Path, facts: dict[str, dict[str, object]]) -> tuple[object, int, str]:
    plain = parse_json(_verified(folder / "state.json", facts["state.json"]))
    return plain["state"], int(plain["journal_segment"]), str(plain.get("journal_chain", ""))


def _read_manifest(folder: Path) -> dict[str, typing.Any]:
    """Verified by its own digest before anything else, so that a flipped bit is not taken for a format to come."""
    path = folder / "manifest.json"
    text = path.read_bytes()
    try:
        manifest = dict(parse_json(text))
        found = manifest["format"]
        if found == 1 and "sha256" not in manifest:
            return manifest
        told = {name: value for name, value in manifest.items() if name != "sha256"}
        is_whole = manifest["sha256"] == digest_of(told)
        is_whole = is_whole and json.dumps(manifest, sort_keys=True, indent=1).encode() == text
    except (LookupError, TypeError, ValueError) as error:
        raise SnapshotError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if not is_whole:
        raise SnapshotError(f"{path} is damaged: its own digest does not match")
    if type(found) is int and found > FORMAT:
        raise NewerSnapshotError(f"{folder} has format {shown(found)}, and this version reads up to {FORMAT}")
    if found != FORMAT:
        raise SnapshotError(f"{path} is damaged: it has format {shown(found)}")
    return manifest


def digest_of(manifest: Mapping[str, object]) -> str:
    """The digest that a manifest has of itself."""
    return hashlib.sha256(canonical(manifest)).hexdigest()


def _steps(state: object) -> int:
    """Outer steps made before a snapshot, over all fragments."""
    assert isinstance(state, dict)
    return sum(int(fragment["version"]) for fragment in state.get("fragments", ()))


def _verified(path: Path, facts: dict[str, object]) -> bytes:
    data = path.read_bytes()
    if len(data) != facts["bytes"] or hashlib.sha256(data).hexdigest() != facts["sha256"]:
        raise SnapshotError(f"{path} is damaged: it is not what was written")
    return data


def same_values(left: FragmentValues, right: FragmentValues) -> bool:
    """Whether both are one version with the same bits, what the optimizer remembers included."""
    if (left.version, left.digest, left.optimizer.steps) != (right.version, right.digest, right.optimizer.steps):
        return False
    mine, other = _tensors(left), _tensors(right)
    return mine.keys() == other.keys() and all(bytes_of(mine[name]) == bytes_of(other[name]) for name in mine)


def pack(values: FragmentValues) -> Iterator[memoryview]:
    """A fragment as one safetensors file, in pieces; what is published is in it also where it is Θ itself."""
    facts = {"version": str(values.version), "digest": values.digest, "optimizer_steps": str(values.optimizer.steps)}
    return tensor_file(_tensors(values), facts)


def _tensors(values: FragmentValues) -> dict[str, Tensor]:
    reference = {} if values.reference is None else {"reference": values.reference}
    return {"theta": values.theta, "published": values.published, **reference, **values.optimizer.tensors}


def unpack(data: bytes | Tensor) -> FragmentValues:
    """What ``pack`` made of a fragment.  The values lie where ``data`` does if that is a tensor, and are not copied."""
    held = torch.frombuffer(bytearray(data), dtype=torch.uint8) if isinstance(data, bytes) else data
    begin = 8 + int.from_bytes(held[:8].numpy().tobytes(), "little")
    if not 8 < begin <= len(held):
        raise ValueError(f"the header is said to end at byte {begin} of {len(held)}")
    header = parse_json(held[8:begin].numpy().tobytes())
    facts = header.pop("__metadata__")
    tensors = {name: _values(held[begin:], told) for name, told in header.items()}
    version, theta, published = int(facts["version"]), tensors.pop("theta"), tensors.pop("published")
    reference = tensors.pop("reference", None)
    # Written before the steps were: by an optimizer with nothing but momentum, which does not ask for them.
    steps = float(facts.get("optimizer_steps", version if tensors else 0))
    return FragmentValues(
        version,
        theta,
        published,
        OuterState(int(steps) if steps.is_integer() else steps, tensors),
        facts["digest"],
        reference,
    )


def _values(held: Tensor, told: dict[str, object]) -> Tensor:
    begin, end = from_plain(list[int], told["data_offsets"], "data_offsets")
    if told["dtype"] != "F32" or told["shape"] != [(end - begin) // 4] or not 0 <= begin < end <= len(held):
        raise ValueError(f"no flat fp32 values within the file: {shown(told)}")
    return held[begin:end].view(torch.float32)
