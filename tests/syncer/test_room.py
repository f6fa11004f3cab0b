"""Room on the disk: asked before a byte is taken, told once at each edge."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from diloco.durable import locked
from diloco.syncer import core as room_module
from diloco.syncer.core import FolderLostError, Room, Unready, Want
from tests.syncer.building import Events, eventually, new_syncer, serving

MB = 1_000_000


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A data folder that this process has taken."""
    with locked(tmp_path / "syncer"):
        yield tmp_path / "syncer"


def with_free(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    free = {"bytes": 100 * MB}
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=free["bytes"] // 1000, f_frsize=1000))
    return free


def test_the_reserve_is_kept_free_and_an_edge_is_told_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free, told = with_free(monkeypatch), list[Want | None]()
    room = Room(folder, 64 * MB, told.append)
    room.look()
    assert (room.wanting(), told) == (None, [])
    assert room.wanting(36 * MB) is None
    assert room.wanting(37 * MB) == "disk full: 100 MB are free, 37 more and 64 MB in reserve are wanted"
    assert told == [], "that one update is too large is nobody else's matter"
    free["bytes"] = 63 * MB
    for _ in range(3):
        room.look()
    assert told == [Want(Unready.DISK_FULL, "disk full: 63 MB are free, 64 MB in reserve are wanted")]
    assert room.wanting() == told[0].text
    free["bytes"] = 64 * MB
    for _ in range(3):
        room.look()
    assert told[1:] == [None]


def test_what_the_loop_waits_for_counts_whatever_is_free(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free, told = with_free(monkeypatch), list[Want | None]()
    room = Room(folder, 64 * MB, told.append)
    quota = Want(Unready.DISK_FULL, "disk full: quota")
    room.held(quota)
    assert (room.wanting(), told) == ("disk full: quota", [quota])
    free["bytes"] = 0
    room.held(None)
    assert told == [quota], "still full, for another reason"
    free["bytes"] = 100 * MB
    room.look()
    assert told == [quota, None]


def test_that_something_else_is_wanting_now_is_a_change(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fills up while a standby is away: nobody had heard of that when the standby was back."""
    free, told = with_free(monkeypatch), list[Want | None]()
    room = Room(folder, 64 * MB, told.append)
    room.held(Want(Unready.STANDBY_AWAY, "the standby is away"))
    free["bytes"] = 63 * MB
    room.held(Want(Unready.STANDBY_AWAY, "no standby has followed"))
    room.held(None)
    room.held(Want(Unready.LEASE_LOST, "not renewed"))
    free["bytes"] = 100 * MB
    room.held(None)
    kinds = [want.kind if want is not None else None for want in told]
    assert kinds == [Unready.STANDBY_AWAY, Unready.DISK_FULL, Unready.LEASE_LOST, None]


def test_a_thread_that_cannot_look_any_more_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had ended without a word, and a full disk was never seen again."""
    monkeypatch.setattr(room_module, "LOOK_EVERY_S", 0.01)
    with_free(monkeypatch)["bytes"] = 0

    def broken(want: Want | None) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        Room(folder, 64 * MB, broken).run(threading.Event())


def test_without_a_reserve_the_disk_is_not_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch)["bytes"] = 0
    assert Room(folder, 0, lambda why: None).wanting(1 << 40) is None


def test_the_thread_sees_it_heal_when_nobody_comes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free, told = with_free(monkeypatch), list[Want | None]()
    monkeypatch.setattr(room_module, "LOOK_EVERY_S", 0.01)
    room, stopping = Room(folder, 64 * MB, told.append), threading.Event()
    thread = threading.Thread(target=room.run, args=(stopping,))
    thread.start()
    free["bytes"] = 0
    eventually(lambda: len(told) == 1, "it is seen to be full")
    free["bytes"] = 100 * MB
    eventually(lambda: len(told) == 2, "it is seen to have room")
    stopping.set()
    thread.join(10.0)
    assert not thread.is_alive()


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def replace(folder: Path) -> None:
    folder.rename(folder.with_name("away"))
    folder.mkdir()
    (folder / "lock").touch()


@pytest.mark.parametrize(
    ("lose", "words"),
    [
        (shutil.rmtree, "is gone, or was emptied, under this process"),
        (empty, "is gone, or was emptied, under this process"),
        (replace, "is another folder now than the one that this process serves from"),
    ],
)
def test_a_folder_that_is_lost_is_told_of_and_takes_nothing_in(
    lose: Callable[[Path], None], words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room_module, "LOOK_EVERY_S", 0.01)
    changes = list[Want | None]()
    room = Room(folder, 64 * MB, changes.append)
    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(room.run, threading.Event())
        assert room.wanting() is None
        lose(folder)
        assert str(looking.exception(10.0)) == f"{folder} {words}"
    assert room.wanting() == f"{folder} {words}"
    assert changes == [], "it is not full: nothing may be let go of in there"


def test_a_syncer_that_lost_its_folder_ends_in_words(tmp_path: Path) -> None:
    """It had gone on for the rest of the run, and had answered every update with a defect."""
    folder = tmp_path / "syncer"
    syncer = new_syncer(folder, Events().emit)
    syncer.start()
    shutil.rmtree(folder)
    with pytest.raises(FolderLostError, match="syncer is gone, or was emptied, under this process"):
        eventually(lambda: syncer.wait(0.1), "an end")
    syncer.stop(0.1)
    assert not folder.exists(), "nothing was written there afterwards"
    with serving(folder) as anew:
        assert anew.core.ask(lambda machine: machine.state.epoch) == 1
