from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from diloco.config.compose import compose
from diloco.doctor import machine as doctor_store
from diloco.doctor.machine import Store, store, stores
from tests.runs.processes import TINY

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_a_folder_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    [found] = store(Store("site a", tmp_path / "runs" / "first", 0))
    assert found.level.value == "ok"
    assert "GB free, fsync" in found.says
    assert found.figures["fsync_s"] > 0
    assert found.figures["write_bytes_per_s"] > 0
    assert list(tmp_path.iterdir()) == []


def failing(number: int) -> Callable[..., int]:
    def write(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return write


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "No space left on device -> make room on the disk of"),
        (errno.EACCES, "Permission denied -> let user"),
        (errno.EROFS, "Read-only file system -> set run.dir to a folder that can be written"),
    ],
)
def test_a_disk_that_takes_nothing_fails_with_what_to_change(
    number: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_store.os, "write", failing(number))
    [found] = store(Store("site a", tmp_path, 0))
    monkeypatch.undo()
    assert found.line().startswith(f"fail  store       site a: {tmp_path} cannot be written: {words}")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)
    fields = list(real)
    fields[4] = 1  # f_bavail
    monkeypatch.setattr(doctor_store.os, "statvfs", lambda path: os.statvfs_result(fields))
    [found] = store(Store("syncer", tmp_path, 0))
    assert found.level.value == "fail"
    assert found.remedy.endswith("or set cluster.syncer.folder to another one")


def test_too_little_room_for_the_run_and_a_slow_disk_are_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [found] = store(Store("site a", tmp_path, 1 << 60))
    assert found.level.value == "warn"
    assert "a run of this configuration comes to about" in found.says
    monkeypatch.setattr(doctor_store, "SLOW_SYNC_S", 0.0)
    [found] = store(Store("site a", tmp_path, 0))
    assert (found.level.value, found.remedy[:30]) == ("warn", "keep the folder on a local dis")


def test_the_folders_that_are_here_are_looked_at(tmp_path: Path) -> None:
    config = compose([*TINY, f"run.dir={tmp_path}"])
    assert [each.owner for each in stores(config)] == ["runs"]
    config = compose([*TINY, f"run.dir={tmp_path}", "run.name=first"])
    [site] = stores(config)
    assert (site.owner, site.folder) == ("site site-a", tmp_path / "first" / "sites" / "site-a")
    numel = 4 * (site.needed_bytes // 4)
    assert numel > 0
    (tmp_path / "first" / "syncer").mkdir(parents=True)
    assert [each.owner for each in stores(config)] == ["syncer"]
    site.folder.mkdir(parents=True)
    assert [each.owner for each in stores(config)] == ["syncer", "site site-a"]
