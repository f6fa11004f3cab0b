"""Room on the disk: asked before a byte is taken, told once at each edge."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from diloco.syncer import room as room_module
from diloco.syncer.room import Room
from tests.syncer.building import eventually

MB = 1_000_000


def with_free(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    free = {"bytes": 100 * MB}
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=free["bytes"] // 1000, f_frsize=1000))
    return free


def test_the_reserve_is_kept_free_and_an_edge_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free, told = with_free(monkeypatch), list[str | None]()
    room = Room(tmp_path, 64 * MB, told.append)
    room.look()
    assert (room.wanting(), told) == (None, [])
    assert room.wanting(36 * MB) is None
    assert room.wanting(37 * MB) == "disk full: 100 MB are free, 37 more and 64 MB in reserve are wanted"
    assert told == [], "that one update is too large is nobody else's matter"
    free["bytes"] = 63 * MB
    for _ in range(3):
        room.look()
    assert told == [room.wanting()] == ["disk full: 63 MB are free, 64 MB in reserve are wanted"]
    free["bytes"] = 64 * MB
    for _ in range(3):
        room.look()
    assert told[1:] == [None]


def test_what_the_loop_waits_for_counts_whatever_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free, told = with_free(monkeypatch), list[str | None]()
    room = Room(tmp_path, 64 * MB, told.append)
    room.held("disk full: quota")
    assert (room.wanting(), told) == ("disk full: quota", ["disk full: quota"])
    free["bytes"] = 0
    room.held(None)
    assert told == ["disk full: quota"], "still full, for another reason"
    free["bytes"] = 100 * MB
    room.look()
    assert told == ["disk full: quota", None]


def test_without_a_reserve_the_disk_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch)["bytes"] = 0
    assert Room(tmp_path, 0, lambda why: None).wanting(1 << 40) is None


def test_the_thread_sees_it_heal_when_nobody_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free, told = with_free(monkeypatch), list[str | None]()
    monkeypatch.setattr(room_module, "LOOK_EVERY_S", 0.01)
    room, stopping = Room(tmp_path, 64 * MB, told.append), threading.Event()
    thread = threading.Thread(target=room.run, args=(stopping,))
    thread.start()
    free["bytes"] = 0
    eventually(lambda: len(told) == 1, "it is seen to be full")
    free["bytes"] = 100 * MB
    eventually(lambda: len(told) == 2, "it is seen to have room")
    stopping.set()
    thread.join(10.0)
    assert not thread.is_alive()
