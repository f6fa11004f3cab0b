"""Files that are old or new, and a folder that one process has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.durable import LockedError, locked, sync_file, sync_folder, write_file


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    for data in (b"old", b"", memoryview(b"newer than old")):
        write_file(path, data)
        assert path.read_bytes() == data
    assert [each.name for each in tmp_path.iterdir()] == ["state.json"]


def test_the_content_is_durable_before_the_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "state.json", []
    write_file(path, b"old")
    monkeypatch.setattr(
        os, "fsync", lambda handle: seen.append((os.readlink(f"/proc/self/fd/{handle}"), path.read_bytes()))
    )
    write_file(path, b"new")
    assert [(Path(name).name.startswith(".state.json."), content) for name, content in seen[:1]] == [(True, b"old")]
    assert seen[1:] == [(str(tmp_path), b"new")]


def test_a_failed_write_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.json"
    write_file(path, b"old")

    def refuse(handle: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        write_file(path, b"new")
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {"state.json": b"old"}
    with pytest.raises(OSError, match="Input/output error"):
        sync_file(path)
    with pytest.raises(OSError, match="Input/output error"):
        sync_folder(tmp_path)


def test_a_second_holder_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with (
        locked(folder),
        pytest.raises(LockedError, match=f"{folder} is in use by process {os.getpid()}"),
        locked(folder),
    ):
        pass
    with locked(folder):  # And it is free again afterwards.
        pass


def test_the_lock_ends_with_its_process_even_by_sigkill(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from diloco.durable import locked\n"
        "with locked(Path(sys.argv[1])):\n    print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(LockedError, match=f"process {holder.pid}"), locked(tmp_path):
            pass
        holder.kill()
        holder.wait(10.0)
    with locked(tmp_path):
        pass
