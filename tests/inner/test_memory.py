from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from diloco.inner import memory
from diloco.inner.checkpoint import names
from diloco.inner.data import CorpusManifest
from diloco.inner.memory import Machines
from diloco.inner.parallel import SiteGroup
from tests.inner import memory_program
from tests.inner.conftest import damage, resumed, run_ranks
from tests.inner.memory_program import DIES, NEWEST, Life, trained
from tests.inner.spread_program import CASES, build


@pytest.fixture
def life(manifest: CorpusManifest, tmp_path: Path) -> Life:
    """Of a site of one process."""
    return Life("ddp", manifest.directory, SiteGroup(device="cpu"), tmp_path / "memory")


@pytest.mark.slow
def test_two_ranks_on_one_machine_and_on_two(manifest: CorpusManifest, tmp_path: Path) -> None:
    run_ranks(memory_program, 2, manifest.directory, tmp_path)
    one = build(CASES["fsdp"], manifest.directory, SiteGroup(device="cpu"), memory=tmp_path / "one-machine")
    found = resumed(one)
    assert found.step == 4
    assert {name: tensor.tolist() for name, tensor in found.tensors.items()} == {"mine.0": [4, 4], "mine.1": [4, 4]}


def test_the_newer_of_memory_and_disk_is_taken(life: Life, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    trained(life.begin(folder=disk), DIES, dies=True)
    (disk / names(disk)[-1]).rename(disk / "step-0000000003")
    damage(disk / "step-0000000003" / "model.safetensors")
    assert resumed(life.begin(folder=disk)).step == 4
    assert life.said("note") == [], "nothing of the disk was read"
    (disk / "step-0000000003").rename(disk / "step-0000000009")
    assert resumed(life.begin(folder=disk)).step == 4
    assert "step-0000000009/model.safetensors is damaged" in str(life.said("note")[0]["why"])
    damage(disk / "step-0000000009" / "model.safetensors")  # Which makes it whole.
    resumed(life.begin(folder=disk))
    assert str(disk) in str(life.said("resumed")[0]["path"])


def test_what_is_damaged_in_memory_is_said_and_the_disk_or_nothing_is_taken(life: Life, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    trained(life.begin(folder=disk), DIES, dies=True)
    for name, file in zip(NEWEST, ("manifest.json", "rank-00000.json"), strict=True):
        damage(life.memory / name / file)
    resumed(life.begin(folder=disk))
    assert str(disk) in str(life.said("resumed")[0]["path"])
    whys = " ".join(str(each["why"]) for each in life.said("note"))
    assert f"{NEWEST[0]}/manifest.json is damaged" in whys or f"{NEWEST[0]}/manifest.json cannot be read" in whys
    assert f"{NEWEST[1]}/rank-00000.json is damaged" in whys
    assert life.begin().resume() is None
    assert len(life.said("note")) == 2


@pytest.mark.parametrize(
    ("usage", "words"),
    [
        (Mock(return_value=SimpleNamespace(free=4096)), "4,096 are free and a tenth must stay free"),
        # As the system does with what users who logged out have in /dev/shm.
        (Mock(side_effect=FileNotFoundError(2, "gone")), f"{NEWEST[0]} could not be written: [Errno 2] gone"),
    ],
)
def test_a_folder_without_room_or_removed_meanwhile_costs_checkpoints_in_memory_and_no_training(
    life: Life, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, usage: Mock, words: str
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", usage)
    disk = tmp_path / "disk"
    trained(life.begin(folder=disk), DIES, dies=True)
    whys = [str(each["why"]) for each in life.said("note")]
    assert len(whys) == 2
    assert words in whys[0]
    assert names(life.memory) == []
    assert names(disk)[-1] == NEWEST[1]


def test_a_site_goes_on_from_memory_to_the_bit_and_removes_what_lies_there_of_another_history(life: Life) -> None:
    trained(life.begin(), DIES, dies=True)
    assert names(life.memory) == NEWEST
    assert life.memory.stat().st_mode & 0o077 == 0
    life.goes_on(4, dies=False)
    trained(life.begin(), DIES, dies=True)
    trained(life.begin(), 2, dies=True)
    assert names(life.memory) == []


# --- What goes between two machines is in ``memory_program`` ----------------------------------------------------------


def among(told: list[str], rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
    """As ``rank`` sees ranks of which each is on the machine that ``told`` names."""
    monkeypatch.setattr(memory.dist, "new_group", lambda **options: None)
    alone = SiteGroup(device="cpu")
    group: Any = SimpleNamespace(rank=rank, timeout_s=1.0, bounded=alone.bounded, all_gather_json=lambda mine: told)
    return Machines(group, tmp_path)


def test_every_part_has_a_second_copy_on_the_next_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = ["x", "x", "x", "y", "y", "z"]
    found = among(told, 3, tmp_path, monkeypatch)
    assert found.ranks == [[0, 1, 2], [3, 4], [5]]
    assert found.second == {0: 3, 1: 4, 2: 3, 3: 5, 4: 5, 5: 0}
    assert found.is_first_here
    assert not among(told, 4, tmp_path, monkeypatch).is_first_here
    assert among(["x", "x"], 0, tmp_path, monkeypatch).second == {}
    alone = Machines(SiteGroup(device="cpu"), tmp_path)
    assert (alone.ranks, alone.here, alone.second) == ([[0]], 0, {})
    (tmp_path / "other").mkdir()
    assert memory._identity(tmp_path) == memory._identity(tmp_path / "other" / "..")
    assert memory._identity(tmp_path) != memory._identity(tmp_path / "other")
