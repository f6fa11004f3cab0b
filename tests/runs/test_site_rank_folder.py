from __future__ import annotations

import threading
from pathlib import Path

import pytest

from diloco.config.compose import compose
from diloco.config.errors import ConfigError
from diloco.config.run_dir import SiteDir
from diloco.runs.site_rank import check_one_folder

BOUND_S = 20.0


class Rank:
    """One of two threads as a rank."""

    def __init__(self, rank: int, world: int, barrier: threading.Barrier, said: dict[int, bytes]) -> None:
        self.rank, self.world, self.is_first = rank, world, rank == 0
        self._barrier, self._said = barrier, said

    def all_gather_bytes(self, mine: bytes) -> list[bytes]:
        self._said[self.rank] = mine
        self._barrier.wait(BOUND_S)
        found = [self._said[rank] for rank in range(self.world)]
        self._barrier.wait(BOUND_S)
        return found

    def broadcast_small(self, values: list[int]) -> list[int]:
        return [int(self.all_gather_bytes(str(values[0]).encode())[0])]


def checked(*folders: Path, within_s: float) -> list[str]:
    """What each rank is told that has this folder for the site's."""
    barrier, said, told = threading.Barrier(len(folders)), dict[int, bytes](), dict[int, str]()
    config = compose(["run.dir=here"])

    def check(rank: int) -> None:
        group = Rank(rank, len(folders), barrier, said)
        try:
            check_one_folder(config, SiteDir(folders[rank]), group, within_s)  # type: ignore[arg-type]
            told[rank] = ""
        except ConfigError as error:
            told[rank] = str(error)

    threads = [threading.Thread(target=check, args=(rank,)) for rank in range(len(folders))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * BOUND_S)
    return [told[rank] for rank in range(len(folders))]


def test_one_folder_is_enough_and_nothing_is_left_in_it(tmp_path: Path) -> None:
    assert checked(tmp_path, tmp_path, within_s=BOUND_S) == ["", ""]
    assert checked(tmp_path, within_s=0) == [""]
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_sees_another_folder_is_named_to_all(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    told = checked(tmp_path, tmp_path, tmp_path / "other", within_s=0.2)
    assert len(set(told)) == 1
    assert told[0].startswith("run.dir is 'here': rank 2, on ")
    assert "does not see there what rank 0 writes" in told[0]
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_a_folder_that_shows_it_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exists, asked = Path.exists, list[str]()

    def later(path: Path) -> bool:
        asked.append(path.name)
        return len(asked) > 4 and exists(path)

    monkeypatch.setattr(Path, "exists", later)
    assert checked(tmp_path, tmp_path, within_s=BOUND_S) == ["", ""]
