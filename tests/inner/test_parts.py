from __future__ import annotations

import threading
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from diloco.durable import PLAIN_DISK, Disk, Step
from diloco.inner import checkpoint
from diloco.inner.checkpoint import CheckpointError, Part, PartWriter, commit, kept, latest, names, write_part
from diloco.inner.parallel import SiteGroup
from tests.power import RecordingDisk, cuts_at, lay_out, state_after, told_at, without_syncs

PLACE = {"replicate": 0, "shard": 0, "tensor": 0}


def some(value: float) -> dict[str, Part]:
    return {"model/a": Part(torch.full((2, 3), value), (0, 0), (2, 3))}


def writer(root: Path, synchronous: bool = False, disk: Disk = PLAIN_DISK) -> PartWriter:
    return PartWriter(root, 2, synchronous, 20.0, SiteGroup(device="cpu"), disk)


def test_what_is_kept_are_copies_and_of_copies_one() -> None:
    shared, own = torch.ones(2), torch.zeros(1)
    found = kept({"model/a": shared}, {"extra/b": own}, PLACE)
    shared.add_(1.0)
    own.add_(1.0)
    assert {name: part.values.tolist() for name, part in found.items()} == {"model/a": [1.0, 1.0], "extra/b": [0.0]}
    assert list(kept({"model/a": shared}, {"extra/b": own}, {**PLACE, "shard": 1})) == ["extra/b"]


def test_it_is_written_beside_training_and_there_when_all_have_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    real = checkpoint.write_part

    def slow(*arguments: Any) -> None:
        assert gate.wait(20)
        real(*arguments)

    monkeypatch.setattr(checkpoint, "write_part", slow)
    made = writer(tmp_path)
    made.begin()
    assert made.is_free
    made.submit("step-1", some(1.0), {"step": 1})
    assert made.words() == [0.0, 0.0]
    assert not made.is_free
    assert made.heard([0.0, 0.0]) == ""
    gate.set()
    made.writer.wait(20)
    assert names(tmp_path) == []  # It is whole, and nobody has said so yet.
    assert made.words() == [1.0, 0.0]
    assert made.heard([1.0, 0.0]) == ""
    made.settle()
    assert names(tmp_path) == ["step-1"]
    assert made.is_free
    made.settle()


def test_a_rank_that_could_not_write_costs_one_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = writer(tmp_path)
    made.begin()
    with monkeypatch.context() as broken:

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        broken.setattr("safetensors.torch.save_file", full)
        made.submit("step-1", some(1.0), {})
        with pytest.raises(CheckpointError, match=r"step-1 could not be written: .*No space left"):
            made.settle()
    assert list(tmp_path.iterdir()) == []
    made.submit("step-2", some(2.0), {})
    made.settle()
    assert names(tmp_path) == ["step-2"]


@pytest.mark.parametrize("synchronous", [True, False])
def test_a_manifest_that_could_not_be_written_is_said(tmp_path: Path, synchronous: bool) -> None:
    class NoManifest(Disk):
        def make(self, path: Path, write: Any, step: Step) -> None:
            if path.name == "manifest.json":
                raise OSError(28, "No space left on device")
            super().make(path, write, step)

    made = writer(tmp_path, synchronous, NoManifest())
    made.submit("step-1", some(1.0), {})
    with pytest.raises(CheckpointError, match="step-1 could not be written"):
        made.settle()
    assert names(tmp_path) == []


def test_what_a_dead_attempt_left_is_removed_and_takes_no_part(tmp_path: Path) -> None:
    write_part(tmp_path, "step-1", 5, some(5.0))
    commit_of_two(tmp_path, "step-1", 1.0, PLAIN_DISK)
    assert sorted(file.name for file in (tmp_path / "step-1").iterdir()) == [
        "manifest.json",
        *(f"rank-0000{rank}.{end}" for rank in (0, 1) for end in ("json", "safetensors")),
    ]
    write_part(tmp_path, "step-2", 0, some(5.0))
    writer(tmp_path).begin()
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_a_folder_that_cannot_be_one_is_told_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"no checkpoint can be written in .*file"):
        writer(tmp_path / "file").begin()


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for number in range(4):
        commit_of_two(tmp_path, f"step-{number}", float(number), PLAIN_DISK)
    assert names(tmp_path) == ["step-2", "step-3"]


def commit_of_two(root: Path, name: str, value: float, disk: Disk) -> None:
    """A checkpoint of two ranks, of which each holds a row."""
    for rank in range(2):
        write_part(root, name, rank, {"model/a": Part(torch.full((1, 3), value), (rank, 0), (2, 3))}, disk)
    commit(root, name, 2, {"number": int(value)}, 2, disk)


def wrong_after_cuts(tmp_path: Path, forgets: Step | None) -> int:
    """In how many of the states that a power cut may leave a checkpoint is lost that was said to be whole."""
    root = tmp_path / "recorded"
    root.mkdir(parents=True)
    disk = RecordingDisk(root)
    PartWriter(root / "checkpoints", 2, True, 20.0, SiteGroup(device="cpu"), disk).begin()
    for number in (1, 2, 3):
        commit_of_two(root / "checkpoints", f"step-{number}", float(number), disk)
        disk.tell(number)
    log = disk.log if forgets is None else without_syncs(disk.log, forgets)
    dice, wrong, looked = Random(4), 0, 0
    for at in range(0, len(log) + 1, 2):
        for cut in cuts_at(log, at, dice, 1):
            folder = tmp_path / f"state-{looked}"
            folder.mkdir()
            lay_out(state_after(log, disk.folders, cut), folder)
            try:
                found = latest(folder / "checkpoints")
                number = found.meta["number"] if found is not None else 0
                whole = found is None or torch.equal(found.tensors["model/a"], torch.full((2, 3), float(number)))
                wrong += not whole or number < max(0, told_at(log, at))
            except CheckpointError:
                wrong += 1
            looked += 1
    assert looked > 100
    return wrong


def test_a_power_cut_leaves_the_last_that_was_whole(tmp_path: Path) -> None:
    assert wrong_after_cuts(tmp_path, None) == 0


@pytest.mark.slow
@pytest.mark.parametrize("step", [Step.CHECKPOINT_FILE, Step.CHECKPOINT_FOLDER])
def test_a_sync_that_is_forgotten_would_be_found(tmp_path: Path, step: Step) -> None:
    assert wrong_after_cuts(tmp_path, step) > 0
