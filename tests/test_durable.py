"""Writing files atomically and durably, and locking a folder for one process."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco.durable import (
    PLAIN_DISK,
    Disk,
    LockedError,
    ReadingDisk,
    Step,
    locked,
    private_folder,
    write_file,
)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.json"
    for data in (b"older", b"", memoryview(b"old")):
        write_file(path, data)
        assert path.read_bytes() == data
    Disk().write_parts(path, [b"one ", memoryview(b"two"), b""], Step.FILE)

    def breaks() -> Iterator[bytes]:
        yield b"half"
        raise ValueError("no more")

    def refuse(handle: int) -> None:
        raise OSError(5, "Input/output error")

    with pytest.raises(ValueError, match="no more"):
        Disk().write_parts(path, breaks(), Step.FILE)
    monkeypatch.setattr(os, "fsync", refuse)
    for attempt in (
        lambda: write_file(path, b"new"),
        lambda: PLAIN_DISK.sync_file(path, Step.FILE),
        lambda: PLAIN_DISK.sync_folder(tmp_path, Step.FILE),
    ):
        with pytest.raises(OSError, match="Input/output error"):
            attempt()
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {"state.json": b"one two"}


def test_a_secret_is_its_owners_alone_from_the_first_byte_also_where_a_public_file_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fsync, modes = tmp_path / "key", os.fsync, []
    path.write_bytes(b"public")
    monkeypatch.setattr(os, "fsync", lambda handle: (modes.append(os.fstat(handle).st_mode & 0o777), fsync(handle)))
    write_file(path, b"secret", 0o600)
    assert (modes[0], path.stat().st_mode & 0o777, path.read_bytes()) == (0o600, 0o600, b"secret")


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


def test_every_operation_reaches_its_step_before_and_after(tmp_path: Path) -> None:
    disk, folder, passed = Disk(), tmp_path / "folder", list[Step]()
    disk.reached = passed.append  # type: ignore[method-assign]
    disk.make_folder(folder, Step.FOLDER)
    file = disk.open(folder / "a", "wb", Step.JOURNAL_BEGIN)
    disk.write(file, b"content", Step.JOURNAL_WRITE)
    assert (folder / "a").read_bytes() == b""
    disk.sync(file, Step.JOURNAL_SYNC)
    file.close()
    disk.cut(folder / "a", 4, Step.JOURNAL_CUT)
    disk.sync_file(folder / "a", Step.SPOOL_SYNC)
    disk.rename(folder / "a", folder / "b", Step.SPOOL_RENAME)
    disk.sync_folder(folder, Step.SPOOL_FOLDER)
    assert (folder / "b").read_bytes() == b"cont"
    disk.remove(folder / "b", Step.SPOOL_DROP)
    disk.remove(folder / "b", Step.SPOOL_DROP)  # Removing it again is no error.
    assert not list(folder.iterdir())
    disk.write_file(folder / "c", b"whole", Step.CARD)
    disk.remove(folder, Step.SNAPSHOT_PRUNE)
    assert not folder.exists()
    wanted = [Step.FOLDER, Step.JOURNAL_BEGIN, Step.JOURNAL_WRITE, Step.JOURNAL_SYNC, Step.JOURNAL_CUT, Step.SPOOL_SYNC]
    wanted += [Step.SPOOL_RENAME, Step.SPOOL_FOLDER, Step.SPOOL_DROP, Step.SPOOL_DROP, *[Step.CARD] * 4]
    wanted += [Step.SNAPSHOT_PRUNE]
    both = [step for step in wanted for _ in ("before", "after")]
    assert passed == both
    with pytest.raises(FileNotFoundError):
        disk.rename(tmp_path / "missing", tmp_path / "b", Step.SPOOL_RENAME)
    assert passed == [*both, Step.SPOOL_RENAME], "what fails has only begun"


def test_a_folder_has_one_holder_who_is_named_and_is_free_again_even_after_sigkill(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir(mode=0o755)
    program = (
        "import sys, time; from pathlib import Path; from diloco.durable import locked\n"
        "with locked(Path(sys.argv[1])):\n    print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(LockedError, match=f"{folder} is in use by process {holder.pid}"), locked(folder):
            pass
        holder.kill()
        holder.wait(10.0)
    with locked(folder):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, "its owner's alone, also where it was not"
        with pytest.raises(LockedError, match=f"process {os.getpid()}"), locked(folder):
            pass
    with locked(folder), locked(tmp_path / "new"):
        assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_a_disk_that_is_only_read_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "kept").write_bytes(b"123")
    disk = ReadingDisk()
    disk.make_folder(tmp_path / "new", Step.FOLDER)
    for write in (
        lambda: disk.remove(tmp_path / "kept", Step.FILE),
        lambda: disk.write_file(tmp_path / "kept", b"", Step.FILE),
    ):
        with pytest.raises(AssertionError, match="only read"):
            write()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"kept": b"123"}


def test_a_private_folder_is_refused_where_it_is_not_ours_alone(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    for _ in range(2):
        private_folder(folder)
        assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o750)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "file").write_text("in the way")
    for name in ("mine", "link", "file"):
        with pytest.raises(PermissionError, match=f"not a folder that is this user's alone: '.*{name}'"):
            private_folder(tmp_path / name)


def test_a_settled_folder_is_durable_with_all_above_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}")))
    folder = tmp_path / "runs" / "demo"
    folder.mkdir(parents=True)  # By a process that died before it had made the names durable.
    PLAIN_DISK.settle(folder / "site", Step.OUTBOX_FOLDER)
    assert (folder / "site").is_dir()
    assert synced == [str(each) for each in (folder, *folder.parents)]


def test_parts_are_written_over_a_file_that_nobody_needs(tmp_path: Path) -> None:
    spare = tmp_path / "spare"
    spare.write_bytes(b"much longer than what comes")
    room = spare.stat().st_ino
    Disk().write_parts(tmp_path / "a", [b"one ", b"two"], Step.FILE, over=spare)
    assert (tmp_path / "a").read_bytes() == b"one two"
    assert (tmp_path / "a").stat().st_ino == room
    Disk().write_parts(tmp_path / "b", [b"three"], Step.FILE, over=spare)
    assert (tmp_path / "b").read_bytes() == b"three", "it was not there any more"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
