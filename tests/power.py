"""Simulate what a power cut may leave: a disk that records every operation, and a model of what survives.

After a cut, any part of the unsynced writes may be on the disk: none, all, a later write without an earlier one, a
write torn at a byte, or one with zeros in its place.  Creating, renaming or removing a name is certain only after its
folder was synced.  Before that, a rename inside one folder happened or did not, and one between two folders may leave
both names.  ext4, xfs and btrfs promise more than that, so that what survives here survives there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from diloco.durable import Disk, Step

PAGE = 4096
ALONE_MAX = 2
"""The newest unsynced changes of one file or folder that are lost and kept one by one."""
TORN_MAX = 4
"""The newest unsynced changes that are torn."""


@dataclass(frozen=True)
class Written:
    """Writes ``data`` at ``offset`` of a file; an ``offset`` of None truncates the file to ``size``."""

    file: int
    offset: int | None
    data: bytes = b""
    size: int = 0


@dataclass(frozen=True)
class Named:
    """Sets the nodes that some names of a folder refer to; None: the name is removed."""

    folder: int
    names: tuple[tuple[str, int | None], ...]


Change = Written | Named


@dataclass(frozen=True)
class Synced:
    """Makes all earlier changes to ``node``, a file or a folder, durable."""

    node: int
    step: Step


@dataclass(frozen=True)
class Told:
    """Records that everything up to ``level`` was acknowledged: no cut may lose it."""

    level: int


Operation = Change | Synced | Told


class QuietDisk(Disk):
    """A disk whose power is never cut: it skips all syncs."""

    def sync(self, file: BinaryIO, step: Step) -> None:
        file.flush()

    def sync_file(self, path: Path, step: Step) -> None:
        pass

    def sync_folder(self, folder: Path, step: Step) -> None:
        pass


class ForgetfulDisk(Disk):
    """Skips the syncs of one step, as a program with that bug would."""

    def __init__(self, forgotten: Step) -> None:
        self._forgotten = forgotten

    def sync(self, file: BinaryIO, step: Step) -> None:
        if step is not self._forgotten:
            super().sync(file, step)

    def sync_file(self, path: Path, step: Step) -> None:
        if step is not self._forgotten:
            super().sync_file(path, step)

    def sync_folder(self, folder: Path, step: Step) -> None:
        if step is not self._forgotten:
            super().sync_folder(folder, step)


class RecordingDisk(QuietDisk):
    """Carries out operations in ``root`` and records them; ``root`` itself is already durable."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log: list[Operation] = []
        self.folders = {0}
        self._nodes: dict[Path, int] = {root: 0}
        self._next = 1
        self._open: dict[int, tuple[int, bool]] = {}
        self._sizes: dict[int, int] = {}

    def tell(self, level: int) -> None:
        self.log.append(Told(level))

    def _made(self, path: Path) -> int:
        node = self._next
        self._next += 1
        self._nodes[path] = node
        self.log.append(Named(self._nodes[path.parent], ((path.name, node),)))
        return node

    def _write(self, node: int, offset: int, data: bytes) -> None:
        self._sizes[node] = max(self._sizes.get(node, 0), offset + len(data))
        self.log.append(Written(node, offset, data))

    def _cut(self, node: int, size: int) -> None:
        self._sizes[node] = size
        self.log.append(Written(node, None, size=size))

    def open(self, path: Path, mode: str, step: Step, buffering: int = -1) -> BinaryIO:
        node = self._nodes[path] if path in self._nodes else self._made(path)
        if mode == "wb" and self._sizes.get(node, 0):
            self._cut(node, 0)
        file = super().open(path, mode, step, buffering)
        self._open[id(file)] = (node, "a" in mode)
        return file

    def write(self, file: BinaryIO, data: bytes | memoryview, step: Step) -> None:
        node, is_appending = self._open[id(file)]
        self._write(node, self._sizes.get(node, 0) if is_appending else file.tell(), bytes(data))
        super().write(file, data, step)

    def make(self, path: Path, write: Callable[[Path], object], step: Step) -> None:
        super().make(path, write, step)
        node = self._nodes[path] if path in self._nodes else self._made(path)
        if self._sizes.get(node, 0):
            self._cut(node, 0)
        self._write(node, 0, path.read_bytes())

    def cut(self, path: Path, size: int, step: Step) -> None:
        super().cut(path, size, step)
        self._cut(self._nodes[path], size)

    def sync(self, file: BinaryIO, step: Step) -> None:
        super().sync(file, step)
        self.log.append(Synced(self._open[id(file)][0], step))

    def sync_file(self, path: Path, step: Step) -> None:
        self.log.append(Synced(self._nodes[path], step))

    def sync_folder(self, folder: Path, step: Step) -> None:
        if folder in self._nodes:
            self.log.append(Synced(self._nodes[folder], step))

    def make_folder(self, path: Path, step: Step) -> None:
        missing = [each for each in [path, *path.parents] if each not in self._nodes and self.root in each.parents]
        super().make_folder(path, step)
        for each in reversed(missing):
            self.folders.add(self._made(each))

    def rename(self, path: Path, target: Path, step: Step) -> None:
        super().rename(path, target, step)
        node, folders = self._nodes[path], (self._nodes[path.parent], self._nodes[target.parent])
        names: tuple[tuple[str, int | None], ...] = ((path.name, None), (target.name, node))
        if folders[0] == folders[1]:
            self.log.append(Named(folders[0], names))
        else:
            self.log += [Named(folders[1], names[1:]), Named(folders[0], names[:1])]
        moved = {each: known for each, known in self._nodes.items() if each == path or path in each.parents}
        for each in moved:
            del self._nodes[each]
        self._nodes |= {target / each.relative_to(path): known for each, known in moved.items()}

    def remove(self, path: Path, step: Step) -> None:
        inside = sorted((each for each in self._nodes if path in each.parents), reverse=True)
        for each in [*inside, *([path] if path in self._nodes else [])]:
            self.log.append(Named(self._nodes[each.parent], ((each.name, None),)))
            del self._nodes[each]
        super().remove(path, step)


@dataclass(frozen=True)
class Cut:
    """A state after a cut: after the first ``at`` operations, with those unsynced changes that are in ``kept``.

    ``torn`` is (number of the change, bytes of it that are there, whether zeros fill the rest).
    """

    at: int
    kept: frozenset[int]
    torn: tuple[int, int, bool] | None = None


def cuts_at(log: Sequence[Operation], at: int, dice: random.Random, drawn: int) -> Iterator[Cut]:
    """Yield cuts after the first ``at`` operations: the extremes, each change alone or alone missing, torn writes, and
    ``drawn`` random ones."""
    pending = pending_at(log, at)
    everything = frozenset(pending)
    yield Cut(at, frozenset())
    yield Cut(at, everything)
    # Changes that are never synced accumulate; of each file and folder only the newest ones matter.
    nodes = [node_of(log[number]) for number in pending]
    pending = [number for place, number in enumerate(pending) if nodes[place:].count(nodes[place]) <= ALONE_MAX]
    if len(pending) > 1:
        for number in pending:
            yield Cut(at, frozenset([number]))
            yield Cut(at, everything - {number})
    for number in pending[-TORN_MAX:]:
        change = log[number]
        if isinstance(change, Written) and len(change.data) > 1:
            size = len(change.data)
            in_page = PAGE - (change.offset or 0) % PAGE
            for part in sorted({1, size // 2, size - 1, in_page} & set(range(1, size))):
                yield Cut(at, everything, (number, part, False))
            yield Cut(at, everything, (number, 0, True))
            yield Cut(at, everything, (number, size // 2, True))
    for _ in range(drawn if len(pending) > 2 else 0):
        yield Cut(at, frozenset(number for number in everything if dice.random() < 0.5))


def pending_at(log: Sequence[Operation], at: int) -> list[int]:
    """Return the numbers of the changes before ``at`` that are not durable yet."""
    pending: list[int] = []
    for number, operation in enumerate(log[:at]):
        if isinstance(operation, Synced):
            pending = [each for each in pending if node_of(log[each]) != operation.node]
        elif isinstance(operation, Change):
            pending.append(number)
    return pending


def node_of(change: Operation) -> int:
    return change.file if isinstance(change, Written) else change.folder if isinstance(change, Named) else -1


@dataclass
class Tree:
    """Files and folders by node."""

    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {0: {}})
    files: dict[int, bytearray] = field(default_factory=dict)

    def apply(self, change: Change, torn: tuple[int, int, bool] | None) -> None:
        if isinstance(change, Named):
            names = self.folders.setdefault(change.folder, {})
            for name, node in change.names:
                if node is None:
                    names.pop(name, None)
                else:
                    names[name] = node
            return
        content = self.files.setdefault(change.file, bytearray())
        if change.offset is None:
            del content[change.size :]
            return
        data = change.data
        if torn is not None:
            _, part, zeros = torn
            data = data[:part] + bytes(len(data) - part if zeros else 0)
        if data:
            content.extend(bytes(max(0, change.offset + len(data) - len(content))))
            content[change.offset : change.offset + len(data)] = data

    def paths(self, folders: set[int], node: int = 0, at: str = "") -> Iterator[tuple[str, bytes | None]]:
        """Yield every reachable path with its content; None for a folder."""
        for name, inner in sorted(self.folders.get(node, {}).items()):
            path = f"{at}{name}"
            if inner in folders:
                yield path, None
                yield from self.paths(folders, inner, f"{path}/")
            else:
                yield path, bytes(self.files.get(inner, b""))


def state_after(log: Sequence[Operation], folders: set[int], cut: Cut) -> dict[str, bytes | None]:
    """Return the files and folders that ``cut`` leaves."""
    lost = set(pending_at(log, cut.at)) - cut.kept
    tree = Tree()
    for number, operation in enumerate(log[: cut.at]):
        if isinstance(operation, Change) and number not in lost:
            torn = cut.torn is not None and cut.torn[0] == number
            tree.apply(operation, cut.torn if torn else None)
    return dict(tree.paths(folders))


def lay_out(state: dict[str, bytes | None], folder: Path) -> None:
    """Create the files and folders of ``state`` in the empty ``folder``."""
    for name, content in state.items():
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content)


def told_at(log: Sequence[Operation], at: int) -> int:
    """Return the highest level acknowledged in the first ``at`` operations, -1 for none."""
    return max((operation.level for operation in log[:at] if isinstance(operation, Told)), default=-1)


def without_syncs(log: Sequence[Operation], step: Step) -> list[Operation]:
    """Return the operations of a program that forgets the syncs of ``step``."""
    return [operation for operation in log if not (isinstance(operation, Synced) and operation.step is step)]
