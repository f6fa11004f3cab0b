from __future__ import annotations

import os
from pathlib import Path

from diloco.wire.options import Watched


def read_number(path: Path) -> int:
    return int(path.read_text())


def test_a_change_is_read_once_and_a_broken_one_leaves_what_was(tmp_path: Path) -> None:
    path = tmp_path / "number"
    path.write_text("1")
    watched = Watched("number_file", [str(path)], lambda: read_number(path))
    assert (watched.value, watched.refresh(), watched.complaint) == (1, None, "")
    path.write_text("22")
    assert watched.refresh() == "number_file was read again"
    assert (watched.value, watched.refresh()) == (22, None)
    path.write_text("three")
    said = watched.refresh()
    assert said is not None
    assert said.startswith("number_file cannot be used, what was read before stays in force: invalid literal")
    assert (watched.value, watched.complaint, watched.refresh()) == (22, said, None)
    path.unlink()
    assert "No such file" in str(watched.refresh())
    assert watched.value == 22
    path.write_text("4")
    watched.refresh()
    assert (watched.value, watched.complaint) == (4, "")


def test_a_file_put_in_the_place_of_another_is_seen_whatever_its_time_and_size(tmp_path: Path) -> None:
    path, beside = tmp_path / "number", tmp_path / "beside"
    path.write_text("1")
    watched = Watched("number_file", [str(path)], lambda: read_number(path))
    beside.write_text("2")
    found = path.stat()
    os.utime(beside, ns=(found.st_atime_ns, found.st_mtime_ns))
    beside.replace(path)
    watched.refresh()
    assert watched.value == 2


def test_any_of_several_files_counts_and_so_does_a_mode(tmp_path: Path) -> None:
    paths = [tmp_path / "one", tmp_path / "two"]
    for path in paths:
        path.write_text("1")
    watched = Watched("numbers", [str(path) for path in paths], lambda: sum(map(read_number, paths)))
    paths[1].write_text("5")
    watched.refresh()
    assert watched.value == 6
    paths[0].chmod(0o600)
    assert watched.refresh() is not None
