"""Checkpoints on disk: safetensors and a manifest, written atomically, verified on read, without pickle.

Names of checkpoints sort by age.  A manifest is a JSON file that contains its own sha256, to detect damage.

Reading.  ``Checkpoint`` is an open checkpoint: it lists the tensors, and reads any box of any of them on demand.
There are two formats, and either can be read into any layout.

Format 1 is written by one rank (``save``).  ``<root>/<name>/manifest.json`` holds the caller's ``meta`` and the size
and sha256 of each tensor file; ``part.safetensors`` holds each whole tensor named ``part/rest``, under ``rest``.

Format 2 is written by all ranks of a site that holds its model in parts (``PartWriter``): ``rank-00003.safetensors``
holds rank 3's part, and ``rank-00003.json`` lists which box of which tensor each of its values is.

Writing in parts.  Every rank writes its two files into the checkpoint's temporary folder, in the background; the JSON
also has the digest of the other file.  The ranks report that their files are durable in the collective of the training
step.  When all have, rank 0 writes ``manifest.json`` with the digests of the ranks' manifests and renames the folder to
its final name.  No rank waits for the disk of another one, nothing is gathered, and before the rename there is no
checkpoint.  All ranks must see the same folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import threading
from collections.abc import Mapping
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diloco.durable import PLAIN_DISK, Step
from diloco.inner import require
from diloco.inner.parallel import Box, SiteGroup, box_of, is_keeper, local, whole_box

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from pathlib import Path

    from diloco.durable import Disk
    from diloco.inner.holding import Spread


TEMPORARY = ".tmp-"
NAMED = re.compile(r"step-\d+(-end)?")
"""The names of checkpoints: steps in digits of one width, so that names sort as steps do."""
MANIFEST = "manifest.json"


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read; the message names the file."""


class LateError(CheckpointError):
    """A checkpoint is still being written when the wait for it ends."""


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn errors of reading the file ``path`` into CheckpointError."""
    try:
        yield
    except (OSError, SafetensorError, LookupError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors of writing the checkpoint ``path`` into CheckpointError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the checkpoint {path} could not be written: {error}") from error


@contextlib.contextmanager
def failing_alike(group: SiteGroup) -> Iterator[None]:
    """Raise a CheckpointError of any rank's body on all ranks: its own, or else that of the first.  A collective."""
    own: CheckpointError | None = None
    try:
        yield
    except CheckpointError as error:
        own = error
    told = group.all_gather_json([str(own or ""), isinstance(own, LateError)])
    whys = [why for why, _ in told if why]
    if whys:
        kind = LateError if any(late for _, late in told) else CheckpointError
        raise kind(str(own or whys[0])) from own


@contextlib.contextmanager
def attempting(root: Path, name: str, disk: Disk) -> Iterator[None]:
    """As ``writing``; a failed attempt is also removed, so that several do not fill a full disk further."""
    try:
        with writing(root / name):
            yield
    except CheckpointError:
        discard(root, name, disk)
        raise


def discard(root: Path, name: str, disk: Disk) -> None:
    """Remove what was written of ``root/name`` before its publication, if that is possible."""
    with contextlib.suppress(OSError):
        disk.remove(root / f"{TEMPORARY}{name}", Step.CHECKPOINT_PRUNE)


def write_sealed(path: Path, told: Mapping[str, Any], disk: Disk) -> None:
    """Write ``told`` and its sha256 to ``path`` and fsync the file; its name is durable once its folder is synced."""
    text = json.dumps({**told, "sha256": _digest(told)}, indent=1, allow_nan=False)
    disk.make(path, lambda file: file.write_text(text), Step.CHECKPOINT_FILE)
    disk.sync_file(path, Step.CHECKPOINT_FILE)


def read_sealed(path: Path) -> dict[str, Any]:
    """Return what ``write_sealed`` wrote; CheckpointError names the file that is missing or damaged."""
    try:
        told: dict[str, Any] = json.loads(path.read_text())
        undamaged = told.pop("sha256") == _digest(told)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not undamaged:
        raise CheckpointError(f"{path} is damaged: its own sha256 does not match")
    return told


def digest_of_file(file: Path) -> str:
    """Return the sha256 hex of the file's content."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def check_digest(file: Path, digest: str) -> None:
    """Raise CheckpointError unless the file has the ``digest`` given in its manifest."""
    with reading(file):
        found = digest_of_file(file)
    if found != digest:
        raise CheckpointError(f"{file} is damaged: its sha256 differs from the manifest")


def _digest(told: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


WHOLE, PARTS = 1, 2
"""Formats 1 and 2 (see the module's docstring)."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: its full shape, and which file holds which box of it."""

    shape: tuple[int, ...]
    stretches: list[tuple[str, Box]]

    def meets(self, wanted: Box) -> list[tuple[str, Box, Box]]:
        """Return the files to read for the box ``wanted``, each with the box that it holds and their intersection.

        Without any (an empty box or tensor) it is the first file with an empty box, from which to read the dtype.
        """
        met = [(file, held, meet) for file, held in self.stretches for meet in [held.within(wanted)] if meet]
        file, held = self.stretches[0]
        return met or [(file, held, Box(held.starts, (0,) * len(self.shape)))]


class Checkpoint:
    """An open checkpoint.  Opening reads only its manifests; values read before ``verify`` may be damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.digests: dict[str, str] = {}
        """Sha256 hex of each tensor file; in format 2 one file for each rank that wrote it."""
        self._boxes: dict[str, list[tuple[str, tuple[int, ...], Box]]] = {}
        manifest = path / MANIFEST
        told = read_sealed(manifest)
        try:
            form = told["format"]
            self.meta: dict[str, Any] = told["meta"]
            """The writer's plain values, as JSON."""
            if form not in (WHOLE, PARTS):
                raise CheckpointError(f"{manifest} has format {form!r}, and this program reads 1 and 2")
            if form == WHOLE:
                self.digests = {f"{part}.safetensors": str(facts["sha256"]) for part, facts in told["files"].items()}
                return
            for rank, digest in told["ranks"].items():
                listed, file = files_of(path, rank)
                check_digest(listed, digest)
                own = read_sealed(listed)
                self.digests[file.name] = str(own["sha256_of_file"])
                self._boxes[file.name] = [
                    (name, tuple(facts["shape"]), Box(tuple(facts["starts"]), tuple(facts["sizes"])))
                    for name, facts in own["tensors"].items()
                ]
        except (LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{manifest} cannot be read: {error}") from error

    def verify(self, rank: int = 0, world: int = 1) -> None:
        """Read every file and compare its digest; CheckpointError names the first that is damaged.

        With ``world`` ranks the work is shared: each checks every ``world``-th file.
        """
        for file in sorted(self.digests)[rank::world]:
            check_digest(self.path / file, self.digests[file])

    @cached_property
    def entries(self) -> Mapping[str, Entry]:
        """All tensors by name."""
        found: dict[str, Entry] = {}
        for file in sorted(self.digests):
            for name, shape, box in self._boxes[file] if file in self._boxes else self._listed(file):
                entry = found.setdefault(name, Entry(shape, []))
                if entry.shape != shape:
                    raise CheckpointError(f"{self.path} holds {name} in two shapes, {entry.shape} and {shape}")
                entry.stretches.append((file, box))
        for name, entry in found.items():
            if sum(math.prod(box.sizes) for _, box in entry.stretches) != math.prod(entry.shape):
                raise CheckpointError(f"{self.path} does not hold every value of {name} once")
        return found

    def part(self, name: str) -> Mapping[str, Tensor]:
        """Return the tensors under ``name/``, without that prefix, each read on access."""
        return Prefixed(self.entries, f"{name}/", self.read)

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Return the values in ``box`` of the tensor ``name``, or all of them, as a new tensor on the CPU."""
        entry = self.entries[name]
        wanted = box or whole_box(entry.shape)
        values: Tensor | None = None
        for file, held, meet in entry.meets(wanted):
            path = self.path / file
            with reading(path), safe_open(path, "pt") as tensors:
                found: Tensor = tensors.get_slice(name.removeprefix(f"{path.stem}/"))[meet.seen_from(held).slices]
            if values is None:
                values = torch.empty(wanted.sizes, dtype=found.dtype)
            values[meet.seen_from(wanted).slices] = found
        assert values is not None, "an entry has a file"
        return values

    def _listed(self, file: str) -> Iterator[tuple[str, tuple[int, ...], Box]]:
        path = self.path / file
        with reading(path), safe_open(path, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118  (it is no dictionary)
                shape = tuple(tensors.get_slice(key).get_shape())
                yield f"{path.stem}/{key}", shape, whole_box(shape)


class Prefixed(Mapping[str, "Tensor"]):
    """The tensors of ``names`` that begin with ``prefix``, by the rest of their names; each is read on access."""

    def __init__(self, names: Collection[str], prefix: str, read: Callable[[str], Tensor]) -> None:
        self._names, self._prefix, self._read = names, prefix, read

    def __getitem__(self, name: str) -> Tensor:
        if name not in self:
            raise KeyError(name)
        return self._read(self._prefix + name)

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in self._names if name.startswith(self._prefix))

    def __contains__(self, name: object) -> bool:
        return f"{self._prefix}{name}" in self._names

    def __len__(self) -> int:
        return sum(1 for _ in self)


def save(
    root: Path,
    name: str,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    keep: int = 3,
    disk: Disk = PLAIN_DISK,
) -> Path:
    """Write ``root/name``, delete all but the newest ``keep`` checkpoints, and return its path.

    Once it returns, the checkpoint survives a power cut; if it dies before, the older ones are untouched.
    ``tensors`` are named ``part/rest``, on any device, and share no memory.  CheckpointError if it cannot be written.
    """
    path, temporary = root / name, root / f"{TEMPORARY}{name}"
    with attempting(root, name, disk):
        disk.settle(root, Step.CHECKPOINT_FOLDER)
        disk.remove(temporary, Step.CHECKPOINT_PRUNE)
        disk.make_folder(temporary, Step.CHECKPOINT_BEGIN)
        files = {}
        parts: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            part, slash, rest = key.partition("/")
            require(bool(slash and rest and part.isidentifier()), "tensor name", key, "part/rest")
            parts.setdefault(part, {})[rest] = tensor.detach().contiguous()
        for part, named in parts.items():
            file = temporary / f"{part}.safetensors"
            digest = _write_tensors(file, named, disk)
            files[part] = {"bytes": file.stat().st_size, "sha256": digest}
        write_sealed(temporary / MANIFEST, {"format": WHOLE, "files": files, "meta": dict(meta)}, disk)
        publish(root, name, keep, disk)
    return path


def publish(root: Path, name: str, keep: int, disk: Disk) -> None:
    """Rename the temporary folder, whose files are durable, to ``root/name``; delete all but the newest ``keep``."""
    path, temporary, replaced = root / name, root / f"{TEMPORARY}{name}", root / f"{TEMPORARY}old-{name}"
    disk.remove(replaced, Step.CHECKPOINT_PRUNE)
    disk.sync_folder(temporary, Step.CHECKPOINT_FOLDER)
    if path.exists():
        disk.rename(path, replaced, Step.CHECKPOINT_RENAME)
    disk.rename(temporary, path, Step.CHECKPOINT_RENAME)
    disk.sync_folder(root, Step.CHECKPOINT_FOLDER)
    disk.remove(replaced, Step.CHECKPOINT_PRUNE)
    for old in names(root)[:-keep]:
        if old != name:
            disk.remove(root / old, Step.CHECKPOINT_PRUNE)


def names(root: Path) -> list[str]:
    """List the checkpoints below ``root``, oldest first: what else is there, such as a copy, is a user's own."""
    if not root.is_dir():
        return []
    return sorted(entry.name for entry in root.iterdir() if entry.is_dir() and NAMED.fullmatch(entry.name))


def load(path: Path, *, verify: bool = True) -> Checkpoint:
    """Open one checkpoint and, with ``verify``, check all its files; CheckpointError names one missing or damaged."""
    found = Checkpoint(path)
    if verify:
        found.verify()
    return found


def latest(root: Path, *, verify: bool = True) -> Checkpoint | None:
    """Return the newest valid checkpoint, as ``load`` opens it, or None.

    CheckpointError if there are checkpoints and all are damaged: starting from nothing would be a silent loss.
    """
    found, _ = newest(root, SiteGroup(device="cpu"), verify=verify)
    return found


def newest(
    root: Path, group: SiteGroup, *, after: str = "", verify: bool = True
) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest valid checkpoint of a name above ``after``, and a message for each damaged one above that.

    A collective: the ranks share the verification.  CheckpointError as in ``latest``, unless there is an ``after``.
    """
    left = [name for name in names(root) if name > after] if group.is_first else []
    skipped: list[str] = []
    while name := group.all_gather_json(left.pop() if left else "")[0]:
        try:
            with failing_alike(group):
                found = Checkpoint(root / name)
                if verify:
                    found.verify(group.rank, group.world)
                    assert found.entries is not None
            return found, skipped
        except CheckpointError as error:
            skipped.append(str(error))
    if skipped and not after:
        raise CheckpointError(f"no checkpoint in {root} is valid: {'; '.join(skipped)}")
    return None, skipped


def _write_tensors(file: Path, tensors: dict[str, Tensor], disk: Disk) -> str:
    """Write ``tensors`` to ``file``, fsync it and return its digest."""
    disk.make(file, partial(safetensors.torch.save_file, tensors), Step.CHECKPOINT_FILE)
    disk.sync_file(file, Step.CHECKPOINT_FILE)
    return digest_of_file(file)


@dataclass(frozen=True, slots=True)
class Part:
    """The box at ``starts`` of a tensor of ``shape``.  ``values`` are on the CPU and must not change."""

    values: Tensor
    starts: tuple[int, ...]
    shape: tuple[int, ...]


def kept(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], place: Mapping[str, int]) -> dict[str, Part]:
    """Copy what the rank at ``place`` writes: its box of each tensor that it keeps (``is_keeper``), and all ``own``."""
    found: dict[str, Part] = {}
    for name, tensor in (*tensors.items(), *own.items()):
        box = box_of(tensor, name)
        if name in own or (is_keeper(tensor, place) and not box.is_empty):
            values = local(tensor).to("cpu", copy=True).contiguous()
            found[name] = Part(values, box.starts, tuple(tensor.shape))
    return found


def write_part(root: Path, name: str, rank: int, parts: Mapping[str, Part], disk: Disk = PLAIN_DISK) -> str:
    """Write the ``parts`` of ``rank`` into the temporary folder of ``root/name``; durable when it returns.

    Returns the digest of the rank's own manifest.
    """
    folder = root / f"{TEMPORARY}{name}"
    listed, file = files_of(folder, rank_name(rank))
    boxes = {
        key: {"starts": part.starts, "sizes": tuple(part.values.shape), "shape": part.shape}
        for key, part in parts.items()
    }
    with writing(root / name):
        disk.make_folder(folder, Step.CHECKPOINT_BEGIN)
        digest = _write_tensors(file, {key: part.values for key, part in parts.items()}, disk)
        told = {"format": PARTS, "sha256_of_file": digest, "tensors": boxes}
        write_sealed(listed, told, disk)
        disk.sync_folder(folder, Step.CHECKPOINT_FOLDER)
        return digest_of_file(listed)


def commit(root: Path, name: str, digests: Sequence[str], meta: Mapping[str, Any], keep: int, disk: Disk) -> None:
    """Publish what the ranks have written as ``root/name``; delete all but the newest ``keep``.

    ``digests`` are what ``write_part`` returned on each rank.
    """
    ranks = {rank_name(rank): digest for rank, digest in enumerate(digests)}
    with attempting(root, name, disk):
        told = {"format": PARTS, "ranks": ranks, "meta": dict(meta)}
        write_sealed(root / f"{TEMPORARY}{name}" / MANIFEST, told, disk)
        publish(root, name, keep, disk)


def files_of(folder: Path, rank: str) -> list[Path]:
    """Return the paths of the two files of the rank named ``rank`` (``rank_name``)."""
    return [folder / f"{rank}{end}" for end in (".json", ".safetensors")]


def rank_name(rank: int) -> str:
    """Return the name of the files of ``rank``, without extension."""
    return f"rank-{rank:05d}"


@dataclass(frozen=True, slots=True)
class State:
    """What a checkpoint holds; the tensors are references, which a writer copies."""

    tensors: Mapping[str, Tensor]
    """The model's and the optimizers', which the ranks hold together."""
    extra: Mapping[str, Tensor]
    """Those of this rank alone."""
    random: Mapping[str, Tensor]
    """The state of this rank's generators."""
    meta: Mapping[str, Any]
    """Plain values; only those of rank 0 are kept."""


class Writer:
    """One rank's side of writing a site's checkpoints into a folder, in a background thread, one at a time.

    All ranks call all methods alike; those that communicate are marked.  An error of the background write is raised by
    the next call that asks for it.  ``synchronous`` writes in the caller's thread, for deterministic runs.
    Each kind of writer adds ``submit``, which copies a state and starts to write it.
    """

    in_memory = False
    """Whether the folder is in memory, and the checkpoints are removed at the end of the run."""

    def __init__(self, root: Path, keep: int, synchronous: bool, wait_s: float, spread: Spread, disk: Disk) -> None:
        self._root, self._keep, self.synchronous, self._wait_s, self._disk = root, keep, synchronous, wait_s, disk
        self.group, self._place = spread.group, spread.place
        self._tidies = self.group.is_first
        """Whether this rank is the one that publishes and removes in its folder."""
        self._written: Future[object] | None = None

    def begin(self, *, resumed: bool) -> None:
        """Prepare the folder before the first step.  A collective.

        CheckpointError if it cannot be used, or holds checkpoints and the run did not resume from one.
        """
        left = names(self._root) if not resumed else []
        if left:
            raise CheckpointError(
                f"{self._root} already holds {left[-1]}, and this run did not resume: resume, or use another folder"
            )

    def words(self) -> list[float]:
        """Return this rank's numbers for the collective at the end of a step; ``heard`` gets the sums of all but the
        first, which is whether a checkpoint can begin.

        Raises the error of the last checkpoint if this rank could not finish it, once.
        """
        return [float(not self.busy)]

    def heard(self, words: Sequence[float]) -> str:
        """Take the sums of all ranks' ``words``.  Return why a checkpoint could not be written, if one could not."""
        return ""

    def settle(self) -> None:
        """Wait until no rank is writing.  A collective.

        CheckpointError if a write failed, LateError if one is not done in time.
        """
        with failing_alike(self.group):
            self.wait()

    # The thread.

    @property
    def busy(self) -> bool:
        """Whether a write is under way; raises the error of the last one if it failed."""
        written = self._written
        if written is None or not written.done():
            return written is not None
        self._written = None
        written.result()
        return False

    def start(self, write: Callable[[], object]) -> None:
        """Start ``write``; must not be called while ``busy``.  The caller must not change what is written."""
        assert not self.busy, "one checkpoint at a time: check busy first"
        written: Future[object] = Future()
        self._written = written

        def run() -> None:
            try:
                written.set_result(write())
            except BaseException as error:  # of any kind, also a Rust library's panic: the caller's thread raises it
                written.set_exception(error)

        if self.synchronous:
            run()
        else:
            # A daemon, so that a disk that hangs cannot keep a dying process alive; wait() is the orderly end.
            threading.Thread(target=run, name="checkpoint-writer", daemon=True).start()

    def wait(self) -> None:
        """Wait for the write under way; LateError after ``wait_s`` seconds, CheckpointError if the write failed."""
        if self._written is not None:
            futures.wait([self._written], self._wait_s)
        if self.busy:
            raise LateError(f"a checkpoint in {self._root} is still being written after {self._wait_s:g} s")


class WholeWriter(Writer):
    """Rank 0 writes each checkpoint (format 1): every rank holds the whole model."""

    def submit(self, name: str, state: State) -> None:
        """Copy ``state`` and start to write it as ``name``.  A collective."""
        states = {
            f"random/{rank}/{kind}": theirs
            for kind, mine in state.random.items()
            for rank, theirs in enumerate(self.group.all_gather(mine))
        }
        if self.group.is_first:
            held = {**state.tensors, **state.extra, **states}
            clones = {key: tensor.detach().to("cpu", copy=True) for key, tensor in held.items()}
            self.start(partial(save, self._root, name, clones, state.meta, self._keep, self._disk))


class PartWriter(Writer):
    """Each rank writes its own part (format 2)."""

    _name = ""
    """Name of the checkpoint whose parts are being written; empty if none."""
    _meta: Mapping[str, Any] = MappingProxyType({})
    _why = ""
    """Why this rank's part could not be written; empty if it has not failed."""

    def begin(self, *, resumed: bool) -> None:
        """See ``Writer``; what writers that died have left is removed."""
        with failing_alike(self.group):
            try:
                if self._tidies:
                    self._tidy()
            except OSError as error:
                how = "kept in memory, in" if self.in_memory else "written in"
                raise CheckpointError(f"no checkpoint can be {how} {self._root}: {error}") from error
        super().begin(resumed=resumed)

    def _tidy(self) -> None:
        """Make this machine's folder, and remove what is left in it of checkpoints that were not published."""
        self._disk.settle(self._root, Step.CHECKPOINT_FOLDER)
        for left in sorted(self._root.glob(f"{TEMPORARY}*")):
            self._disk.remove(left, Step.CHECKPOINT_PRUNE)

    def words(self) -> list[float]:
        """See ``Writer``; the others are whether this rank's part is done, and whether it failed."""
        if not self._name:
            return [*super().words(), 0.0, 0.0]
        done = False
        try:
            done = not self._why and not self.busy
        except CheckpointError as error:
            self._why = str(error)
        return [0.0, float(done), float(self._why != "")]

    def submit(self, name: str, state: State) -> None:
        """Copy this rank's part of ``state`` and start to write it."""
        rank = self.group.rank
        own = {**state.extra, **{f"random/{rank}/{kind}": mine for kind, mine in state.random.items()}}
        parts = kept(state.tensors, own, self._place)
        self._name, self._meta = name, state.meta
        self.start(lambda: self._write_part(name, parts))

    def heard(self, words: Sequence[float]) -> str:
        """See ``Writer``; publishes once all parts are done."""
        done, failed = words
        if not self._name or done + failed < self.group.world:
            return ""
        name, why = self._name, self._why
        self._name = self._why = ""
        if failed:
            if self._tidies:
                discard(self._root, name, self._disk)
            return why or f"another rank could not write its part of {self._root / name}"
        self._finish(name, self._meta)
        return ""

    def _write_part(self, name: str, parts: Mapping[str, Part]) -> None:
        """Make this rank's part durable; runs in the background."""
        write_part(self._root, name, self.group.rank, parts, self._disk)

    def _finish(self, name: str, meta: Mapping[str, Any]) -> None:
        """Publish the checkpoint; all ranks call it once all parts are durable."""
        if self._tidies:
            self.start(lambda: commit(self._root, name, self._digests(name), meta, self._keep, self._disk))

    def _digests(self, name: str) -> list[str]:
        """Return what ``write_part`` returned on each rank, from the files, which all ranks must see."""
        folder = self._root / f"{TEMPORARY}{name}"
        with writing(self._root / name):
            return [digest_of_file(folder / f"{rank_name(rank)}.json") for rank in range(self.group.world)]

    def settle(self) -> None:
        """See ``Writer``; waits for the parts, and then for their publication."""
        try:
            with failing_alike(self.group):
                self.wait()
                if self._why:
                    raise CheckpointError(self._why)
        except CheckpointError:
            self.heard([0.0, self.group.world])
            raise
        self.heard([self.group.world, 0.0])
        super().settle()
