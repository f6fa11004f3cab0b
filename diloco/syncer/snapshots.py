"""Snapshots: every fragment, its outer optimizer's state, and the machine's state, each snapshot in its own folder.

    snapshots/00000012/  fragment-0.safetensors ...  state.json  manifest.json (size and SHA-256 of each, its own too)

A snapshot is written into a temporary folder, every file made durable, then renamed: a folder with that name is
complete. Every file is verified on reading. The error names a damaged snapshot; it is set aside as
``00000012.damaged``, and recovery uses the one before it, with the longer journal.

Retention decides how much of the past a data folder keeps: which snapshots may go, and with them the journal and
payloads behind them. The newest two snapshots always stay: recovery needs one, and another if that is damaged. Beyond
those, the past is kept from one snapshot on, the *anchor*: everything from it to now can be replayed. The anchor is the
newest snapshot that is at least ``steps`` outer steps old. Of the snapshots after it, only as many stay as keep the
next anchor close. If all that takes more than ``bytes_max``, the oldest goes first.

Writing. Safetensors files are written straight from the tensors' memory: no copy is made, whatever their size. The
library's own writer joins all tensors to one string first, which at a billion parameters takes as much memory as the
model. This writer has its own code for the format, and every reader of safetensors reads its files.

Reading. Large files are read once, into the memory that they stay in, and hashed on the way, several files at a time.
This bounds the time of a restart: reading and SHA-256 take about equally long, so one piece is read while the one
before it is hashed, both without the interpreter's lock.

Images. An image is the values of every fragment at one instant, in a folder from which a later lineage can begin.

    IMAGE/  fragment-0.safetensors ...  image.json (what it is, sizes and SHA-256 of the others)

An image is written into a temporary folder beside its place, every file made durable, then renamed: a folder with an
``image.json`` is complete. On reading every file is verified, ``image.json`` by its own digest, and every fragment
against the digest of its published values.

Lineages. ``Lineages`` keeps the values that each lineage of a run began with, until no snapshot is older than its
beginning.

    lineages/1795234567/  an image

They are durable before the journal record ``LineageBegan``, so that every reader of that record finds them: the
recovery of an interrupted restore, and a replay from before it.

Export. ``export`` writes the final version as one safetensors file: full parameters under their own names.

Memory. Nothing writes to a version's values once it is published, so a changed digest means a flipped bit: in memory
without ECC, or by a defect. Damaged values must reach neither a site nor a snapshot. The check cannot see a bit that
flips and is used by an outer step before its fragment's turn comes. That version then differs from the one that the
journal gives, and the next start reports it and refuses to run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from diloco.codec.base import bytes_of, digest
from diloco.durable import PLAIN_DISK, Disk, DiskFullError, Step, full_in_words
from diloco.outer.fragments import BUFFERS, FROZEN, Layout
from diloco.outer.optimizer import OuterState, evaluated
from diloco.sync.journal import JournalError, canonical, from_plain, parse_json, shown

if TYPE_CHECKING:
    import threading

    from diloco.sync.events import LineageBegan


NEWEST = 2


@dataclass(frozen=True, slots=True)
class Retention:
    """Keep ``steps`` outer steps over all fragments (0: what recovery needs), in ``bytes_max`` beyond that need."""

    steps: int = 0
    bytes_max: int = 0


RECOVERY_ONLY = Retention()


@dataclass(frozen=True, slots=True)
class Point:
    """A snapshot: the outer steps over all fragments before it, the first journal segment after it, its size in bytes,
    and the lineage in which it was taken."""

    number: int
    steps: int
    segment: int
    size: int
    lineage: int


def choose(points: Sequence[Point], retention: Retention, bytes_in: Callable[[range], int]) -> tuple[list[Point], bool]:
    """Return which ``points`` (oldest first) stay, and whether the bound took one that retention would have kept.

    ``bytes_in``: the size of journal segments and their payloads.
    """
    newest = list(points[-NEWEST:])
    past = list(points[:-NEWEST]) if retention.steps else []
    if not past:
        return newest, False
    now = points[-1].steps
    old_enough = [point for point in [*past, *newest] if now - point.steps >= retention.steps]
    anchor = old_enough[-1] if old_enough else past[0]
    kept: list[Point] = []
    for point in past:
        # Half of ``steps`` apart: few stay, and the anchor is hardly ever twice as old as it must be.
        if point.steps >= anchor.steps and (not kept or point.steps - kept[-1].steps >= retention.steps / 2):
            kept.append(point)
    cut = False
    while kept:
        behind = range(kept[0].segment, newest[0].segment)
        if sum(point.size for point in kept) + bytes_in(behind) <= retention.bytes_max:
            break
        kept.pop(0)
        cut = True
    return [*kept, *newest], cut


PIECE_BYTES = 16 << 20
"""Bytes written, and hashed, at a time."""
ALIGNMENT = 8
"""Alignment of the first value in the file, in bytes."""
DTYPES = MappingProxyType({torch.float32: "F32", torch.bfloat16: "BF16"})
"""The dtypes that are written, with their names in the format."""


def tensor_file(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Iterator[memoryview]:
    """Yield the file of ``tensors`` (fp32 or bf16, contiguous), in order of their names, as views of them."""
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


FILES_MAX = 4
"""Files read at the same time, at most: more would only compete for the disk."""


class SnapshotError(ValueError):
    """A snapshot or an image is not as it was written, or not one at all; the text names the file."""


class NewerSnapshotError(SnapshotError):
    """The snapshot's format is newer than this version; it is not damaged."""


Facts = dict[str, dict[str, Any]]
"""By file name, each file's length in bytes and SHA-256, as a manifest holds them."""


def read_verified(folder: Path, facts: Facts, names: Sequence[str]) -> list[Tensor]:
    """Return each file's content as a uint8 tensor; ``SnapshotError`` names one that is not as ``facts`` say."""
    with ThreadPoolExecutor(max_workers=min(FILES_MAX, os.cpu_count() or 1, len(names) or 1)) as pool:
        return list(pool.map(lambda name: _read_one(folder / name, facts[name]["bytes"], facts[name]["sha256"]), names))


def _read_one(path: Path, size: int, wanted: str) -> Tensor:
    if path.stat().st_size == size:
        found, data = hashlib.sha256(), torch.empty(size, dtype=torch.uint8)
        pieces = [data[start : start + PIECE_BYTES].numpy().data for start in range(0, size, PIECE_BYTES)]
        with path.open("rb") as source, ThreadPoolExecutor(max_workers=1) as reader:
            for piece, count in zip(pieces, reader.map(source.readinto, pieces), strict=True):
                found.update(piece[:count])
        if found.hexdigest() == wanted:
            return data
    raise SnapshotError(f"{path} is damaged: it is not what was written")


def _write_files(
    disk: Disk,
    folder: Path,
    files: Iterable[tuple[str, Iterable[bytes | memoryview]]],
    manifest: str,
    content: dict[str, object],
    step: Step,
) -> None:
    """Write ``files``, and last their ``manifest``: ``content``, their facts, its own digest."""
    facts: Facts = {}
    for name, parts in files:
        found = hashlib.sha256()
        disk.write_parts(folder / name, _hashed(parts, found), step)
        facts[name] = {"bytes": (folder / name).stat().st_size, "sha256": found.hexdigest()}
    disk.write_file(folder / manifest, sealed({**content, "files": facts}), step)


def _hashed(parts: Iterable[bytes | memoryview], found: hashlib._Hash) -> Iterator[bytes | memoryview]:
    for part in parts:
        found.update(part)
        yield part


def _fragment_file(index: int) -> str:
    return f"fragment-{index}.safetensors"


def sealed(manifest: dict[str, Any]) -> bytes:
    """Return the text of a manifest, with its own digest in it."""
    return json.dumps({**manifest, "sha256": digest_of(manifest)}, sort_keys=True, indent=1).encode()


def digest_of(manifest: Mapping[str, object]) -> str:
    """Return the digest that a manifest holds of itself."""
    return hashlib.sha256(canonical(manifest)).hexdigest()


def _read_manifest(path: Path) -> dict[str, Any]:
    """Read a manifest; its own digest is verified first, so that a flipped bit is not taken for a future format.

    Format 1 has no such digest and is not checked. Raises ``SnapshotError`` if the digest does not match.
    """
    text = path.read_bytes()
    try:
        manifest = dict(parse_json(text))
        told = {name: value for name, value in manifest.items() if name != "sha256"}
        is_old = told == manifest and manifest["format"] == 1
        if is_old or sealed(told) == text:
            return manifest
    except (LookupError, TypeError, ValueError) as error:
        raise SnapshotError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    raise SnapshotError(f"{path} is damaged: its own digest does not match")


def digests_in(manifest: Path) -> dict[str, str]:
    """Return by name each file's SHA-256 from the manifest of a snapshot or an image, without reading the files."""
    return {name: facts["sha256"] for name, facts in _read_manifest(manifest)["files"].items()}


@contextlib.contextmanager
def _reading(what: Path) -> Iterator[None]:
    """Raise every error of reading ``what`` as damage."""
    try:
        yield
    except SnapshotError:
        raise
    except (OSError, LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise SnapshotError(f"{what} is damaged: {type(error).__name__}: {str(error)[:200]}") from error


MANIFEST = "manifest.json"
FORMAT = 2
"""The format of the manifest. Format 1, without the chain value of the journal, is still read."""


@dataclass(frozen=True, slots=True)
class FragmentValues:
    """A fragment at one version, flat fp32: ``theta`` (Θ), ``published`` (Θ̂), and its outer ``optimizer`` state.

    ``digest`` is that of ``published``. A region measures its updates from ``reference``: its values right after it
    took the last version of the syncer above. The tensors are never written to again: a new version is a new
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
        """The values to use as the model: ``published``, or the average where the outer optimizer keeps one."""
        return evaluated(self.published, self.optimizer)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot's contents; ``state`` is ``OuterSync.snapshot()``.

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

    def path(self, number: int) -> Path:
        """Return a snapshot's folder."""
        return self.folder / f"{number:08d}"

    def numbers(self) -> list[int]:
        """Return the numbers of the existing snapshots, rising."""
        return sorted(int(path.name) for path in self.folder.glob("*") if path.name.isdigit())

    def write(self, snapshot: Snapshot, fragments: Iterable[tuple[int, FragmentValues]] | None = None) -> int:
        """Write ``snapshot`` durably, without copying its values; return its size in bytes.

        ``fragments`` are its (index, values), if it holds none itself. Each is requested only when the one before it is
        written, so that a fragment which has a newer version by then is released early.

        Raises ``DiskFullError`` when there is no space: nothing remains of it, and the caller may try again.
        """
        number = max((int(path.name[:8]) for path in self.folder.glob("[0-9]*")), default=0) + 1
        beside = self.folder / f".{number:08d}.tmp"
        own = enumerate(snapshot.fragments) if fragments is None else fragments
        packed = ((_fragment_file(index), pack(values)) for index, values in own)
        state = {name: getattr(snapshot, name) for name in ("state", "journal_segment", "journal_chain")}
        rest = [("state.json", [json.dumps(state, sort_keys=True).encode()])]
        files: Iterable[tuple[str, Iterable[bytes | memoryview]]] = chain(packed, rest)
        try:
            with full_in_words():
                self._disk.make_folder(beside, Step.SNAPSHOT_BEGIN)
                _write_files(self._disk, beside, files, MANIFEST, {"format": FORMAT}, Step.SNAPSHOT_FILE)
                self._disk.rename(beside, self.path(number), Step.SNAPSHOT_RENAME)
                self._disk.sync_folder(self.folder, Step.SNAPSHOT_FOLDER)
        except DiskFullError:
            self._disk.remove(beside, Step.SNAPSHOT_PRUNE)
            raise
        return self._note_point(number, snapshot).size

    def load(self, number: int, *, whole: bool = True) -> Snapshot:
        """Read and verify one snapshot, without its fragments if not ``whole``.

        Raises ``SnapshotError``, naming the file, if one is missing or damaged.
        """
        folder = self.path(number)
        with _reading(folder):
            manifest = _read_manifest(folder / MANIFEST)
            found = manifest["format"]
            if type(found) is int and found > FORMAT:
                raise NewerSnapshotError(f"{folder} has format {shown(found)}, and this version reads up to {FORMAT}")
            facts: Facts = dict(manifest["files"])
            odd = set(facts) ^ {path.name for path in folder.iterdir()} ^ {MANIFEST}
            if odd:
                words = ", ".join(sorted(odd))[:200]
                raise SnapshotError(f"{folder} is damaged: its manifest and its files differ in {words}")
            (data,) = read_verified(folder, facts, ["state.json"])
            plain = parse_json(data.numpy().tobytes())
            fragments = _read_fragments(folder, facts, len(facts) - 1) if whole else ()
            chain = str(plain.get("journal_chain", ""))
            return Snapshot(plain["state"], fragments, int(plain["journal_segment"]), chain)

    def check(self, number: int) -> Snapshot:
        """Like ``load`` without the fragments, but verify their files too, each a piece at a time."""
        found, folder = self.load(number, whole=False), self.path(number)
        with _reading(folder):
            for name, wanted in digests_in(folder / MANIFEST).items():
                with (folder / name).open("rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != wanted:
                        raise SnapshotError(f"{folder / name} is damaged: it is not what was written")
        return found

    def set_aside(self, number: int) -> None:
        """Rename a damaged snapshot, so that it stays for inspection (until the next one) but no longer counts."""
        for earlier in self.folder.glob("*.damaged"):
            self._disk.remove(earlier, Step.SNAPSHOT_ASIDE)
        self._disk.rename(self.path(number), self.folder / f"{number:08d}.damaged", Step.SNAPSHOT_ASIDE)
        self._points.pop(number, None)

    def point(self, number: int) -> Point:
        """Return what retention needs to know of a snapshot."""
        return self._points.get(number) or self._note_point(number, self.load(number, whole=False))

    def _note_point(self, number: int, snapshot: Snapshot) -> Point:
        state = snapshot.state
        assert isinstance(state, dict)
        steps = sum(int(fragment["version"]) for fragment in state.get("fragments", ()))
        size = sum(path.stat().st_size for path in self.path(number).iterdir())
        self._points[number] = Point(number, steps, snapshot.journal_segment, size, int(state.get("lineage", 1)))
        return self._points[number]

    def prune(self, retention: Retention, bytes_in: Callable[[range], int], spared: int) -> tuple[list[Point], bool]:
        """Delete the snapshots that ``retention`` does not keep, except ``spared``; return what ``choose`` does.

        If a snapshot turns out to be damaged, nothing is deleted and the result is empty; a load reports the damage
        when the snapshot is needed.
        """
        try:
            points = [self.point(number) for number in self.numbers()]
        except SnapshotError:
            return [], False
        kept, cut = choose(points, retention, bytes_in)
        for number in [point.number for point in points if point not in kept and point.number != spared]:
            # Renamed first: a process that dies here leaves no half-deleted snapshot under that name.
            doomed = self.folder / f".{number:08d}.tmp"
            self._disk.rename(self.path(number), doomed, Step.SNAPSHOT_PRUNE)
            self._disk.remove(doomed, Step.SNAPSHOT_PRUNE)
            del self._points[number]
        return kept, cut


def _read_fragments(folder: Path, facts: Facts, count: int) -> tuple[FragmentValues, ...]:
    names = [_fragment_file(index) for index in range(count)]
    return tuple(unpack(data) for data in read_verified(folder, facts, names))


def same_values(left: FragmentValues, right: FragmentValues) -> bool:
    """Return whether both are the same version, bit for bit, the optimizer's state included."""
    if (left.version, left.digest, left.optimizer.steps) != (right.version, right.digest, right.optimizer.steps):
        return False
    mine, other = _tensors(left), _tensors(right)
    return mine.keys() == other.keys() and all(bytes_of(mine[name]) == bytes_of(other[name]) for name in mine)


def pack(values: FragmentValues) -> Iterator[memoryview]:
    """Yield a fragment as one safetensors file, in pieces; ``published`` is written even where it is Θ itself."""
    facts = {"version": str(values.version), "digest": values.digest, "optimizer_steps": str(values.optimizer.steps)}
    return tensor_file(_tensors(values), facts)


def _tensors(values: FragmentValues) -> dict[str, Tensor]:
    reference = {} if values.reference is None else {"reference": values.reference}
    return {"theta": values.theta, "published": values.published, **reference, **values.optimizer.tensors}


def unpack(held: Tensor) -> FragmentValues:
    """Return the fragment that ``pack`` wrote, from a uint8 tensor of the file: its values are views of that."""
    begin = 8 + int.from_bytes(held[:8].numpy().tobytes(), "little")
    if not 8 < begin <= len(held):
        raise ValueError(f"its header claims to end at byte {begin} of {len(held)}")
    header = parse_json(held[8:begin].numpy().tobytes())
    facts = header.pop("__metadata__")
    tensors = {name: _values(held[begin:], told) for name, told in header.items()}
    version, theta, published = int(facts["version"]), tensors.pop("theta"), tensors.pop("published")
    reference = tensors.pop("reference", None)
    # Older files lack the steps; their optimizers had only momentum and do not use them.
    steps = float(facts.get("optimizer_steps", version if tensors else 0))
    optimizer = OuterState(int(steps) if steps.is_integer() else steps, tensors)
    return FragmentValues(version, theta, published, optimizer, facts["digest"], reference)


def _values(held: Tensor, told: dict[str, object]) -> Tensor:
    begin, end = from_plain(list[int], told["data_offsets"], "data_offsets")
    if told["dtype"] != "F32" or told["shape"] != [(end - begin) // 4] or not 0 <= begin < end <= len(held):
        raise ValueError(f"no flat fp32 values within the file: {shown(told)}")
    return held[begin:end].view(torch.float32)


Held = dict[tuple[str, int], tuple[int, int]]
"""(site, fragment) to the tokens and updates of that site that some values hold."""
IMAGE_FORMAT = 2
"""Format 1 had no digest of itself, and was never released."""
IMAGE_MANIFEST = "image.json"
MODEL = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Image:
    """The values, the tokens and updates they hold of each site, their run's ``card``; ``facts`` tell their origin."""

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
    """Write ``image`` durably as ``folder``, which must not exist; with ``parameters``, also as one model file.

    A caller whose state relies on the image passes its own ``step``.
    """
    if folder.exists():
        raise SnapshotError(f"{folder} exists already: an image gets its own folder")
    beside = folder.with_name(f".{folder.name}.tmp")
    disk.remove(beside, step)
    disk.make_folder(beside, step)
    if parameters is not None:
        disk.write_parts(beside / MODEL, tensor_file(parameters), step)
    manifest: dict[str, object] = {
        "format": IMAGE_FORMAT,
        "card": image.card,
        "versions": [values.version for values in image.fragments],
        "digests": [values.digest for values in image.fragments],
        "momentum": all(values.optimizer.tensors for values in image.fragments),
        "held": [[site, index, *counts] for (site, index), counts in sorted(image.held.items())],
        "facts": image.facts,
    }
    files = ((_fragment_file(index), pack(values)) for index, values in enumerate(image.fragments))
    _write_files(disk, beside, files, IMAGE_MANIFEST, manifest, step)
    disk.rename(beside, folder, step)
    disk.sync_folder(folder.parent, step)


def read_image(folder: Path) -> Image:
    """Read and verify the image in ``folder``; raise ``SnapshotError``, naming what is missing or damaged."""
    with _reading(folder):
        try:
            manifest = _read_manifest(folder / IMAGE_MANIFEST)
            if manifest["format"] != IMAGE_FORMAT:
                found = shown(manifest["format"])
                raise SnapshotError(f"{folder / IMAGE_MANIFEST} has format {found}: {IMAGE_FORMAT} wanted")
            versions, digests = manifest["versions"], manifest["digests"]
            fragments = _read_fragments(folder, manifest["files"], len(versions))
        except FileNotFoundError as error:
            raise SnapshotError(f"{folder} is no image: {error.filename} is missing") from error
        for index, (values, version, told) in enumerate(zip(fragments, versions, digests, strict=True)):
            if (values.version, values.digest, digest(values.published, told)) != (version, told, told):
                path = folder / _fragment_file(index)
                raise SnapshotError(f"{path} is not the version {version} that {IMAGE_MANIFEST} names")
        held = {(str(site), int(at)): (int(tokens), int(updates)) for site, at, tokens, updates in manifest["held"]}
        return Image(dict(manifest["card"]), fragments, held, dict(manifest["facts"]))


@dataclass(frozen=True, slots=True)
class Lineages:
    """The folder with the first values of each lineage. It exists once a run was restored."""

    folder: Path
    disk: Disk = PLAIN_DISK

    def numbers(self) -> list[int]:
        """Return the lineages whose first values are kept, rising."""
        return sorted(int(path.name) for path in self.folder.glob("*") if path.name.isdigit())

    def keep(self, lineage: int, image: Image) -> None:
        """Store the values of a lineage that is about to begin, durably."""
        self.disk.make_folder(self.folder, Step.LINEAGE_FOLDER)
        self.disk.sync_folder(self.folder.parent, Step.LINEAGE_FOLDER)
        path = self.folder / str(lineage)
        self.disk.remove(path, Step.LINEAGE_PRUNE)  # Left by an attempt that ended before the journal record.
        write_image(path, image, disk=self.disk, step=Step.LINEAGE_IMAGE)

    def values(self, event: LineageBegan) -> tuple[FragmentValues, ...]:
        """Return the values that ``event`` names, verified; ``JournalError`` names what is missing or damaged."""
        path = self.folder / str(event.lineage)
        try:
            image = read_image(path)
        except SnapshotError as error:
            raise JournalError(f"the values that lineage {event.lineage} began with are not here: {error}") from error
        if tuple(values.digest for values in image.fragments) != event.digests:
            raise JournalError(f"{path} holds other values than those that lineage {event.lineage} began with")
        return image.fragments

    def prune(self, lineage: int) -> None:
        """Delete the first values of all lineages up to and including ``lineage``: every snapshot left is newer."""
        for number in self.numbers():
            if number <= lineage:
                self.disk.remove(self.folder / str(number), Step.LINEAGE_PRUNE)


FINAL = "final.json"


def export(disk: Disk, folder: Path, layout: Layout, values: Sequence[FragmentValues]) -> None:
    """Write ``model.safetensors`` and then ``final.json``, which describes it, into ``folder``.

    Raises ``DiskFullError`` when there is no space; the caller may then try again.
    """
    with full_in_words():
        disk.make_folder(folder, Step.EXPORT)
        disk.sweep(folder, Step.EXPORT)
        parameters = full_parameters(layout, [each.evaluated for each in values])
        about = {FROZEN: layout.frozen} if layout.frozen else {}
        about |= {BUFFERS: json.dumps(layout.buffers)} if layout.buffers else {}
        disk.write_parts(folder / "model.safetensors", tensor_file(parameters, about or None), Step.EXPORT)
        disk.write_file(folder / FINAL, _exported_facts(values), Step.EXPORT)


def exported(folder: Path, values: Sequence[FragmentValues]) -> bool:
    """Return whether ``export`` has written these values into ``folder``."""
    path = folder / FINAL
    return path.is_file() and path.read_bytes() == _exported_facts(values)


def _exported_facts(values: Sequence[FragmentValues]) -> bytes:
    facts = {"versions": [each.version for each in values], "digests": [each.digest for each in values]}
    return json.dumps(facts, indent=1).encode()


def full_parameters(layout: Layout, fragments: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return full fp32 parameters by name from the flat values of every fragment.

    A parameter in a single piece, as all of ``plan_layout`` are, is a view of its fragment; do not write to it.
    """
    shapes = dict(layout.parameters)
    parameters: dict[str, Tensor] = {}
    for fragment, values in zip(layout.fragments, fragments, strict=True):
        parts = torch.split(values, [piece.stop - piece.start for piece in fragment.pieces])
        for piece, part in zip(fragment.pieces, parts, strict=True):
            shape = shapes[piece.name]
            if len(part) == prod(shape):
                parameters[piece.name] = part.view(shape)
            else:
                whole = parameters.setdefault(piece.name, torch.empty(shape))
                whole.view(-1)[piece.start : piece.stop] = part
    return parameters


IDLE_SHARE = 50
"""Pause per unit of hashing time: hashing takes at most 2 % of one core, however large the model."""


class MemoryDamaged(RuntimeError):
    """Values in memory were corrupted; the run may continue only from disk."""


@dataclass(frozen=True, slots=True)
class MemoryCheck:
    """Checks one fragment after the other for corrupted memory; ``check`` may also be called from any thread.

    ``values`` always holds the present versions; ``every_s`` is the pause between two fragments.
    """

    values: Sequence[FragmentValues]
    every_s: float
    seen: dict[int, tuple[int, dict[str, str]]] = field(default_factory=dict)

    def run(self, stopping: threading.Event) -> None:
        """Check fragments in turn until ``stopping``; raise ``MemoryDamaged``. Runs in its own thread."""
        pause_s, turn = self.every_s, 0
        while not stopping.wait(pause_s):
            began_s = time.monotonic()
            self.check(turn, self.values[turn])
            turn = (turn + 1) % len(self.values)
            pause_s = max(self.every_s, IDLE_SHARE * (time.monotonic() - began_s))

    def check(self, fragment: int, held: FragmentValues) -> None:
        """Raise ``MemoryDamaged`` if published values do not match their digest, or others changed since last seen."""
        others = {"the parameters": held.theta, "what a region measures from": held.reference}
        others |= {f"the optimizer's {name}": each for name, each in held.optimizer.tensors.items()}
        damaged = "what is published" if digest(held.published, held.digest) != held.digest else None
        own = (held.version, {name: digest(each) for name, each in others.items() if each is not None})
        seen = self.seen.get(fragment, own)
        if damaged is None and seen[0] == held.version and seen != own:
            damaged = next(name for name in own[1] if seen[1].get(name) != own[1][name])
        if damaged is not None:
            raise MemoryDamaged(
                f"{damaged} of version {held.version} of fragment {fragment} changed in this process's memory: this "
                "machine corrupts data; started again, here or elsewhere, the syncer continues from its disk"
            )
        self.seen[fragment] = own
