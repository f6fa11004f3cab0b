"""Readers of whole folders, one file of which is replaced: images, a run's past, checkpoints, a lease, and format 1.

What is taken is what was written, or the beginning of it where an end that was cut off cannot show.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from diloco.inner import checkpoint
from diloco.inner.checkpoint import CheckpointError
from diloco.sync.journal import JournalError
from diloco.sync.leadership import Claim
from diloco.syncer.journal_files import read_file
from diloco.syncer.lease import FileLease, LeaseError, LeaseRefusedError
from diloco.syncer.replaying import Rules
from diloco.syncer.restoring import Kept, KeptError
from diloco.syncer.snapshots import (
    Choice,
    Image,
    ImageError,
    SnapshotError,
    Snapshots,
    read_image,
    same_values,
    write_image,
)
from diloco.syncer.store import Store, StoreError
from tests.hunts.inputs import Reader
from tests.hunts.mutating import json_spoiled
from tests.syncer.desk import CARD, OUTER, RULE, Desk
from tests.syncer.test_store import Story
from tests.syncer.test_store_formats import FIXTURE, card_of, toy_of

RULES = Rules(OUTER, RULE, "int8")
Words = tuple[type[Exception], ...]


def folders(folder: Path) -> Iterator[tuple[str, Reader]]:
    """All of them; ``folder`` should be in memory."""
    desk = told(folder / "past")
    yield from past(folder / "past", RULES, "kept")
    yield from image(folder, desk)
    yield from format_1(folder / "old")
    yield from checkpoints(folder / "checkpoints")
    yield "lease", lease(folder / "lease")


def replaced(path: Path, read: Callable[[], object], words: Words, weight: float) -> Reader:
    """A reader of what ``path`` is a part of; the file is as it was afterwards."""
    good = path.read_bytes()

    def reading(raw: bytes) -> object:
        path.write_bytes(raw)
        try:
            return read()
        finally:
            path.write_bytes(good)

    return Reader([good], reading, words, json_spoiled if path.suffix == ".json" else None, weight)


def told(folder: Path) -> Desk:
    """A short run with snapshots that are kept, and something after the last one."""
    desk = Desk(folder)
    desk.store.snapshots.prune = lambda retention, behind, pinned: Choice((), cut=False)  # type: ignore[method-assign]
    desk.begin()
    story = Story(desk, 4)
    for turn in range(24):
        story.tell()
        if turn in (7, 15):
            desk.snapshot()
    desk.close()
    return desk


def past(folder: Path, rules: Rules, name: str) -> Iterator[tuple[str, Reader]]:
    """A replay of the folder; an end that was cut off gives an earlier state, and every state is of a known version."""
    whole = Kept(folder).replay(rules)
    digests = {(at, values.version): values.digest for at, values in enumerate(whole.values)}
    for point in Kept(folder).points():
        kept = Kept(folder).snapshots.load(point.number)
        digests |= {(at, values.version): values.digest for at, values in enumerate(kept.fragments)}
    newest = [values.version for values in whole.values]

    def read() -> object:
        found = Kept(folder).replay(rules, verify=True)
        for at, values in enumerate(found.values):
            assert values.version <= newest[at], "a version that nobody published"
            assert digests.get((at, values.version), values.digest) == values.digest, "other values than published"
        return found

    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "lock"]
    for path in files:
        where = path.relative_to(folder).as_posix()
        weight = 0.5 if "journal" in where or path.name in ("run.json", "manifest.json") else 0.05
        yield f"{name} {where}", replaced(path, read, (KeptError,), weight)


def image(folder: Path, desk: Desk) -> Iterator[tuple[str, Reader]]:
    path = folder / "image"
    written = Image(asdict(CARD), tuple(desk.values), {("a", 1): (300, 3)}, {"from": "a test", "left_out": [1, 2]})
    write_image(path, written)

    def read() -> object:
        found = read_image(path)
        assert (found.card, found.held, found.facts) == (written.card, written.held, written.facts), "other facts"
        assert all(same_values(one, other) for one, other in zip(found.fragments, written.fragments, strict=True))
        return found

    for each in sorted(path.iterdir()):
        yield f"image's {each.name}", replaced(each, read, (ImageError,), 2.0 if each.suffix == ".json" else 0.3)


def format_1(folder: Path) -> Iterator[tuple[str, Reader]]:
    """What the first release has left: its syncer's folder, and a site's checkpoint."""
    shutil.copytree(FIXTURE, folder)
    toy = toy_of(folder)
    outer, rule = toy.rules()
    yield from past(folder / "syncer", Rules(outer, rule, toy.codec), "format 1, kept")
    for path in sorted((folder / "syncer" / "journal").iterdir()):

        def journal(path: Path = path) -> object:
            found = read_file(path).records
            # Each frame of format 1 stands by itself: one that another journal had reads as well as its own, and what
            # is wrong with the order is found by a replay.
            assert len(found) <= path.read_bytes().count(b'"at_ns":'), "more records than are there"
            return found

        yield f"format 1, {path.name}", replaced(path, journal, (JournalError,), 1.0)
    snapshots = Snapshots(folder / "syncer" / "snapshots")
    written = snapshots.load(3)
    for path in sorted((folder / "syncer" / "snapshots" / "00000003").iterdir()):

        def snapshot() -> object:
            found = snapshots.load(3)
            assert (found.state, found.journal_segment) == (written.state, written.journal_segment)
            assert all(same_values(one, other) for one, other in zip(found.fragments, written.fragments, strict=True))
            return found

        yield f"format 1, snapshot's {path.name}", replaced(path, snapshot, (SnapshotError,), 0.5)

    def run_json() -> object:
        return Store(folder / "syncer", card_of(toy)).journal.close()

    yield "format 1, run.json", replaced(folder / "syncer" / "run.json", run_json, (StoreError,), 0.5)
    yield from checkpoint_files(folder / "a" / "checkpoints" / "00000001", "format 1, ")


def checkpoints(folder: Path) -> Iterator[tuple[str, Reader]]:
    tensors = {"model/a": torch.arange(12.0).view(3, 4), "random/cpu": torch.arange(9, dtype=torch.uint8)}
    checkpoint.save(folder, "1", tensors, {"steps": 3, "names": ["a"], "none": None})
    yield from checkpoint_files(folder / "1", "")


def checkpoint_files(folder: Path, prefix: str) -> Iterator[tuple[str, Reader]]:
    written = checkpoint.load(folder)

    def read() -> object:
        found = checkpoint.load(folder)
        assert found.meta == written.meta, "other facts"
        assert found.tensors.keys() == written.tensors.keys()
        assert all(bool((found.tensors[name] == kept).all()) for name, kept in written.tensors.items())
        return found

    for path in sorted(folder.iterdir()):
        yield f"{prefix}checkpoint's {path.name}", replaced(path, read, (CheckpointError,), 0.5)


def lease(path: Path) -> Reader:
    """A lease that somebody holds; nobody is to be told that somebody else does, or that it is free."""
    file = FileLease(path, "run-1", 5.0)
    assert file.acquire(Claim("syncer-1", 1, 1, anew=True)) is not None
    standing = file.read()
    good = path.read_bytes()
    assert json.loads(good)["lease"]

    def read(raw: bytes) -> object:
        path.write_bytes(raw)
        found = FileLease(path, "run-1", 5.0).read()
        assert found == standing, f"{found} holds it"
        return found

    return Reader([good], read, (LeaseError, LeaseRefusedError), json_spoiled)
