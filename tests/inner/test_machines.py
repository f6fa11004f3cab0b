"""What goes between two machines is in ``memory_program``: it takes two ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco.durable import PLAIN_DISK
from diloco.inner import memory
from diloco.inner.memory import Machines
from diloco.inner.parallel import SiteGroup


def among(told: list[str], rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
    """As ``rank`` sees ranks of which each is on the machine that ``told`` names."""
    monkeypatch.setattr(memory.dist, "new_group", lambda **options: None)
    alone = SiteGroup(device="cpu")
    group: Any = SimpleNamespace(
        rank=rank, timeout_s=1.0, bounded=alone.bounded, all_gather_bytes=lambda mine: [each.encode() for each in told]
    )
    return Machines(group, tmp_path)


def test_every_part_has_a_second_copy_on_the_next_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = ["x", "x", "x", "y", "y", "z"]
    found = among(told, 3, tmp_path, monkeypatch)
    assert found.ranks == [[0, 1, 2], [3, 4], [5]]
    assert [found.second_of(rank) for rank in range(6)] == [3, 4, 3, 5, 5, 0]
    assert [found.firsts_of(rank) for rank in range(6)] == [[5], [], [], [0, 2], [1], [3, 4]]
    assert found.is_first_here
    assert not among(told, 4, tmp_path, monkeypatch).is_first_here


def test_ranks_that_see_one_folder_are_on_one_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Machines(SiteGroup(device="cpu"), tmp_path)
    assert (alone.ranks, alone.here, alone.second_of(0), alone.firsts_of(0)) == ([[0]], 0, None, [])
    alone.exchange({}, {}, PLAIN_DISK)
    assert among(["x", "x"], 0, tmp_path, monkeypatch).second_of(0) is None
    (tmp_path / "other").mkdir()
    assert memory._identity(tmp_path) == memory._identity(tmp_path / "other" / "..")
    assert memory._identity(tmp_path) != memory._identity(tmp_path / "other")
