"""What comes of the syncer's files is whole under its name, or not there."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from diloco.durable import PLAIN_DISK, Disk, DiskFullError
from diloco.syncer.standby import Incoming
from diloco.wire.chunks import cut
from diloco.wire.messages import Chunk, Item, Unreachable

DATA = bytes(range(200))
NAME = "spool/a/0-1-d.update"


def an_item(name: str, digest: str = hashlib.sha256(DATA).hexdigest()) -> Item:
    return Item(name, 0, 0, len(DATA), digest)


def incoming(folder: Path, item: Item, disk: Disk = PLAIN_DISK) -> Incoming:
    rooms = ("spool", "snapshots", "lineages")
    store = SimpleNamespace(folder=folder, **{name: SimpleNamespace(folder=folder / name) for name in rooms})
    return Incoming(store, item, disk)  # type: ignore[arg-type]


def bring(found: Incoming) -> None:
    for piece in cut([DATA], 0, len(DATA), lambda: 64):
        found.accept(Chunk.of(*piece))


def bring_whole(found: Incoming) -> None:
    bring(found)
    found.finish()


@pytest.mark.parametrize(
    ("name", "path"),
    [
        (NAME, NAME),
        ("snapshots/00000007/state.json", "snapshots/.incoming-00000007/state.json"),
        ("lineages/1795000000/manifest.json", "lineages/1795000000/manifest.json"),
        ("spool/.above/0-1-d.update", "spool/.above/0-1-d.update"),
        ("above/outbox/0-7.update", "above/outbox/0-7.update"),
    ],
)
def test_a_file_has_its_name_when_it_is_whole(tmp_path: Path, name: str, path: str) -> None:
    found = incoming(tmp_path, an_item(name))
    assert not found.complete
    bring(found)
    assert found.complete
    assert not (tmp_path / path).exists()
    assert found.finish() == b""
    assert (tmp_path / path).read_bytes() == DATA
    assert [each.name for each in (tmp_path / path).parent.iterdir()] == [(tmp_path / path).name]


def test_a_unit_is_handed_over(tmp_path: Path) -> None:
    found = incoming(tmp_path, an_item(""))
    bring(found)
    assert found.finish() == DATA
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_what_was_declared_gets_no_name(tmp_path: Path) -> None:
    found = incoming(tmp_path, an_item(NAME, "0" * 64))
    bring(found)
    with pytest.raises(Unreachable, match="is not what was declared"):
        found.finish()
    found.discard()
    assert list((tmp_path / "spool" / "a").iterdir()) == []
    damaged = incoming(tmp_path, an_item(NAME))
    with pytest.raises(Unreachable, match="Follow: "):
        damaged.accept(Chunk(0, memoryview(DATA), 1))
    damaged.discard()


class Failing(Disk):
    """One operation fails."""

    def __init__(self, operation: str) -> None:
        def fails(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        setattr(self, operation, fails)


@pytest.mark.parametrize("operation", ["make_folder", "open"])
def test_it_may_find_no_room_to_begin(tmp_path: Path, operation: str) -> None:
    (tmp_path / "spool" / "a").mkdir(parents=True)
    with pytest.raises(DiskFullError):
        incoming(tmp_path, an_item(NAME), Failing(operation))


@pytest.mark.parametrize("operation", ["write", "rename"])
def test_where_there_is_no_room_nothing_is_left(tmp_path: Path, operation: str) -> None:
    found = incoming(tmp_path, an_item(NAME), Failing(operation))
    with pytest.raises(DiskFullError):
        bring_whole(found)
    found.discard()
    assert list((tmp_path / "spool" / "a").iterdir()) == []


def test_a_sync_that_fails_is_final_whatever_it_fails_for(tmp_path: Path) -> None:
    found = incoming(tmp_path, an_item(NAME), Failing("sync"))
    bring(found)
    with pytest.raises(OSError, match="No space left") as failed:
        found.finish()
    assert not isinstance(failed.value, DiskFullError)
    found.discard()
