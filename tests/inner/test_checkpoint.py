from __future__ import annotations

import shutil
from concurrent import futures
from pathlib import Path
from random import Random

import pytest
import torch

from diloco.durable import PLAIN_DISK, Disk, Step
from diloco.inner.checkpoint import (
    Checkpoint,
    CheckpointError,
    Part,
    PartWriter,
    State,
    WholeWriter,
    commit,
    kept,
    latest,
    load,
    names,
    newest,
    save,
    write_part,
)
from diloco.inner.holding import Spread
from diloco.inner.parallel import Box, SiteGroup
from tests.inner.conftest import NoRoom, damage, held_back
from tests.power import RecordingDisk, cuts_at, lay_out, state_after, told_at, without_syncs


def some(value: float) -> dict[str, torch.Tensor]:
    return {
        "model/a.weight": torch.full((3, 4), value),
        "model/b": torch.full((), value, dtype=torch.bfloat16),
        "random/0/cpu": torch.arange(9, dtype=torch.uint8),
    }


def test_what_is_saved_comes_back_with_dtype_shape_and_meta_and_in_boxes(tmp_path: Path) -> None:
    meta = {"step": 3, "lr": 0.1 + 0.2, "names": ["a"], "none": None}
    tensors = {**some(1.5), "model/w": WHOLE, "model/none": torch.zeros(0, 2, dtype=torch.int32)}
    with pytest.raises(ValueError, match="tensor name is 'weight'"):
        save(tmp_path, "step-3", {"weight": torch.zeros(1)}, {})
    with pytest.raises(ValueError, match="Out of range"):
        save(tmp_path, "step-3", some(1), {"x": float("nan")})
    assert names(tmp_path) == [], "what cannot be read again is not written"
    save(tmp_path, "step-3", some(1), {})
    path = save(tmp_path, "step-3", tensors, meta)
    assert names(tmp_path) == ["step-3"], "it takes the place of the other one"
    found = load(path)
    assert found.meta == meta
    assert found.entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found.read(name).dtype == tensor.dtype
        assert torch.equal(found.read(name), tensor)
    assert found.part("model").keys() == {"a.weight", "b", "w", "none"}
    assert found.part("random/0").keys() == {"cpu"}
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", "model.safetensors", "random.safetensors"]
    assert torch.equal(Checkpoint(path).read("model/w", QUARTERS[3]), WHOLE[2:, 3:])


@pytest.mark.parametrize(
    "file",
    ["manifest.json", "model.safetensors", "random.safetensors", "rank-00001.json", "rank-00001.safetensors"],
)
@pytest.mark.parametrize("harm", ["flip", "cut", "gone"])
def test_a_damaged_file_is_named_and_the_one_before_is_taken(tmp_path: Path, file: str, harm: str) -> None:
    save(tmp_path, "step-1", some(1), {"step": 1})
    of_ranks = file.startswith("rank")
    path = parted(tmp_path, ROWS, 2).path if of_ranks else save(tmp_path, "step-2", some(2), {"step": 2})
    damage(path / file, harm)
    with pytest.raises(CheckpointError, match=rf"step-2/{file}"):
        load(tmp_path / "step-2")
    found, skipped = newest(tmp_path, SiteGroup(device="cpu"))
    assert found is not None
    assert found.meta == {"step": 1}
    assert [file in why for why in skipped] == [True]
    assert newest(tmp_path, SiteGroup(device="cpu"), after="step-1") == (None, skipped)
    assert newest(tmp_path, SiteGroup(device="cpu"), after="step-2") == (None, [])
    if of_ranks and file.endswith("safetensors"):
        Checkpoint(path).verify(rank=0, world=2)
        with pytest.raises(CheckpointError, match=f"step-2/{file}"):
            Checkpoint(path).verify(rank=1, world=2)


@pytest.mark.parametrize(
    "text", ["[]", "7", '"x"', "null", '{"sha256": "x"}', "[" * 100_000, '{"a":' * 100_000, "\x00"]
)
def test_a_manifest_of_another_kind_is_damage_like_any_other(tmp_path: Path, text: str) -> None:
    (save(tmp_path, "step-2", some(2), {"step": 2}) / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"step-2/manifest\.json (cannot be read|is damaged)"):
        load(tmp_path / "step-2")


def test_none_is_none_and_all_damaged_is_an_error(tmp_path: Path) -> None:
    assert latest(tmp_path / "nowhere") is None
    (tmp_path / ".tmp-step-9").mkdir()
    assert latest(tmp_path) is None
    save(tmp_path, "step-1", some(1), {})
    (tmp_path / "step-1" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is valid"):
        latest(tmp_path)


WHOLE = torch.arange(24.0).reshape(4, 6)


def parted(root: Path, boxes: list[Box], number: int = 1, disk: Disk = PLAIN_DISK) -> Checkpoint:
    """A checkpoint of as many ranks as there are ``boxes``, each of which holds that of ``model/w``."""
    name, digests = f"step-{number}", []
    for rank, box in enumerate(boxes):
        parts = {
            "model/w": Part(WHOLE[box.slices] * number, box.starts, (4, 6)),
            f"random/{rank}/cpu": Part(torch.tensor([rank], dtype=torch.uint8), (0,), (1,)),
        }
        digests.append(write_part(root, name, rank, parts, disk))
    commit(root, name, digests, {"step": number}, 2, disk)
    return Checkpoint(root / name)


QUARTERS = [Box((row, column), (2, 3)) for row in (0, 2) for column in (0, 3)]
ROWS = [Box((0, 0), (3, 6)), Box((3, 0), (1, 6))]


@pytest.mark.parametrize("boxes", [QUARTERS, ROWS, [Box((0, 0), (4, 6))]])
def test_any_box_of_what_many_ranks_wrote_is_read(tmp_path: Path, boxes: list[Box]) -> None:
    found = parted(tmp_path, boxes)
    found.verify()
    assert found.meta == {"step": 1}
    assert torch.equal(found.read("model/w"), WHOLE)
    for wanted in (Box((1, 2), (2, 3)), Box((3, 5), (1, 1)), Box((0, 0), (4, 1)), Box((2, 0), (0, 6))):
        assert torch.equal(found.read("model/w", wanted), WHOLE[wanted.slices])
    assert dict(found.part("random/0")) == {"cpu": torch.tensor([0], dtype=torch.uint8)}
    assert set(found.entries) == {"model/w", *(f"random/{rank}/cpu" for rank in range(len(boxes)))}
    assert len(found.part("random")) == len(boxes)
    assert "w" in found.part("model")
    with pytest.raises(KeyError):
        found.part("model")["v"]


def test_a_tensor_with_a_hole_or_held_twice_or_of_two_shapes_is_no_checkpoint(tmp_path: Path) -> None:
    for boxes in (QUARTERS[:3], [*ROWS, QUARTERS[0]]):
        with pytest.raises(CheckpointError, match="does not hold every value of model/w once"):
            assert parted(tmp_path, boxes).entries
    parts = [{"model/w": Part(WHOLE, (0, 0), shape)} for shape in ((4, 6), (8, 6))]
    digests = [write_part(tmp_path, "step-2", rank, part) for rank, part in enumerate(parts)]
    commit(tmp_path, "step-2", digests, {}, 3, PLAIN_DISK)
    with pytest.raises(CheckpointError, match=r"holds model/w in two shapes, \(4, 6\) and \(8, 6\)"):
        assert Checkpoint(tmp_path / "step-2").entries


# --- What each rank writes of its own ---------------------------------------------------------------------------------


PLACE = {"replicate": 0, "shard": 0, "tensor": 0}


def state(value: float) -> State:
    return State({"model/a": torch.full((2, 3), value)}, {}, {}, {})


def writer(root: Path, synchronous: bool = False, disk: Disk = PLAIN_DISK) -> PartWriter:
    return PartWriter(root, 2, synchronous, 20.0, spread(), disk)


def spread() -> Spread:
    """Of one rank."""
    return Spread(torch.nn.Identity(), SiteGroup(device="cpu"))


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
    gate, made = held_back(monkeypatch, "write_part"), writer(tmp_path)
    made.begin(resumed=False)
    assert made.words() == [1.0, 0.0, 0.0]
    made.submit("step-1", state(1.0))
    assert made.words() == [0.0, 0.0, 0.0]
    assert made.heard([0.0, 0.0]) == ""
    gate.set()
    made.wait()
    assert names(tmp_path) == []  # It is whole, and no rank has said so yet.
    assert made.words() == [0.0, 1.0, 0.0]
    assert made.heard([1.0, 0.0]) == ""
    made.settle()
    assert names(tmp_path) == ["step-1"]
    assert made.words() == [1.0, 0.0, 0.0]
    made.submit("step-2", state(1.0))
    made.wait()
    assert "another rank could not write its part of" in made.heard([0.0, 1.0])
    made.settle()
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"], "nothing is left of it"
    made.settle()
    for name, disk, words in (("step-3", NoRoom(), [0.0, 0.0, 1.0]), ("step-4", PLAIN_DISK, [0.0, 1.0, 0.0])):
        made._disk = disk
        made.submit(name, state(1.0))
        futures.wait([made._written], 20)
        assert made.words() == words, "what failed does not count for the next one"
        assert ("No space left" in made.heard(words[1:])) == (name == "step-3")
    made.settle()
    assert names(tmp_path) == ["step-1", "step-4"]


@pytest.mark.parametrize("end", [".safetensors", "manifest.json"])
@pytest.mark.parametrize("synchronous", [True, False])
def test_a_write_that_dies_is_said_and_costs_one_checkpoint(tmp_path: Path, end: str, synchronous: bool) -> None:
    disk, whole, parts = NoRoom(), tmp_path / "whole", tmp_path / "parts"
    made, disk.end = writer(parts, synchronous, disk), end
    made.begin(resumed=False)
    save(whole, "step-1", some(1), {})
    made.submit("step-1", state(1.0))
    with pytest.raises(CheckpointError, match=r"step-1 could not be written: .*No space left"):
        made.settle()
    with pytest.raises(CheckpointError, match=r"step-2 could not be written: .*No space left"):
        save(whole, "step-2", some(2), {}, disk=disk)
    assert not list(parts.iterdir()), "nothing is left of it"
    assert [path.name for path in whole.iterdir()] == ["step-1"]
    assert made.words() == [1.0, 0.0, 0.0]
    shutil.copytree(whole / "step-1", whole / "warmup-done")  # A user's own: not the newest one, and not deleted.
    disk.end = "nothing"
    made.submit("step-2", state(2.0))
    made.settle()
    save(whole, "step-2", some(2), {}, disk=disk)
    assert names(parts) == ["step-2"]
    assert names(whole) == ["step-1", "step-2"]
    save(whole, "step-3", some(3), {}, keep=1)
    assert sorted(path.name for path in whole.iterdir()) == ["step-3", "warmup-done"]


def test_what_a_dead_attempt_left_is_removed_and_only_the_newest_are_kept(tmp_path: Path) -> None:
    part = {"model/a": Part(torch.ones(2, 3), (0, 0), (2, 3))}
    write_part(tmp_path, "step-3", 5, part)
    writer(tmp_path).begin(resumed=True)
    for number in range(4):
        parted(tmp_path, ROWS, number)
    assert sorted(file.name for file in (tmp_path / "step-3").iterdir()) == [
        "manifest.json",
        *(f"rank-0000{rank}.{end}" for rank in (0, 1) for end in ("json", "safetensors")),
    ]
    write_part(tmp_path, "step-4", 0, part)
    with pytest.raises(CheckpointError, match="already holds step-3, and this run did not resume"):
        writer(tmp_path).begin(resumed=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-3"]
    save(tmp_path, "step-5", some(5), {}, keep=2)
    assert names(tmp_path) == ["step-3", "step-5"]
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"no checkpoint can be written in .*file"):
        writer(tmp_path / "file").begin(resumed=False)


def wrong_after_cuts(tmp_path: Path, forgets: Step | None) -> int:
    """In how many of the states that a power cut may leave a checkpoint is lost that was said to be whole."""
    root = tmp_path / "recorded"
    root.mkdir(parents=True)
    disk = RecordingDisk(root)
    writer(root / "checkpoints", True, disk).begin(resumed=False)
    for number in (1, 2, 3):
        parted(root / "checkpoints", ROWS, number, disk)
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
                number = found.meta["step"] if found is not None else 0
                whole = found is None or torch.equal(found.read("model/w"), WHOLE * number)
                wrong += not whole or number < max(0, told_at(log, at))
            except CheckpointError:
                wrong += 1
            looked += 1
    assert looked > 100
    return wrong


def test_a_writer_that_a_panic_ends_is_free_again_and_tells_the_next_caller(tmp_path: Path) -> None:
    class PanicException(BaseException):
        """As a library in Rust raises it."""

    def panics() -> None:
        raise PanicException("index out of bounds")

    made = WholeWriter(tmp_path, 2, False, 30.0, spread(), PLAIN_DISK)
    made.start(panics)
    with pytest.raises(PanicException):
        made.wait()
    assert not made.busy


def test_a_power_cut_leaves_the_last_that_was_whole(tmp_path: Path) -> None:
    assert wrong_after_cuts(tmp_path, None) == 0


@pytest.mark.slow
@pytest.mark.parametrize("step", [Step.CHECKPOINT_FILE, Step.CHECKPOINT_FOLDER])
def test_a_sync_that_is_forgotten_would_be_found(tmp_path: Path, step: Step) -> None:
    assert wrong_after_cuts(tmp_path, step) > 0
