from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from diloco.durable import PLAIN_DISK, Step
from diloco.inner import checkpoint
from diloco.inner.checkpoint import (
    AsyncWriter,
    Checkpoint,
    CheckpointError,
    Part,
    commit,
    digest_of_file,
    latest,
    load,
    names,
    read_sealed,
    save,
    write_part,
    write_sealed,
)
from diloco.inner.parallel import Box


def some(value: float) -> dict[str, torch.Tensor]:
    return {
        "model/a.weight": torch.full((3, 4), value),
        "model/b": torch.full((), value, dtype=torch.bfloat16),
        "random/0/cpu": torch.arange(9, dtype=torch.uint8),
    }


def test_what_is_saved_comes_back_with_dtype_shape_and_meta(tmp_path: Path) -> None:
    meta = {"step": 3, "lr": 0.1 + 0.2, "names": ["a"], "none": None}
    path = save(tmp_path, "step-3", some(1.5), meta)
    found = load(path)
    assert found.meta == meta
    assert found.tensors.keys() == some(0).keys()
    for name, tensor in some(1.5).items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor)
    assert found.part("model").keys() == {"a.weight", "b"}
    assert found.part("random/0").keys() == {"cpu"}
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", "model.safetensors", "random.safetensors"]


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in range(5):
        save(tmp_path, f"step-{step}", some(step), {}, keep=2)
    assert names(tmp_path) == ["step-3", "step-4"]
    save(tmp_path, "step-5", some(5), {}, keep=0)
    assert len(names(tmp_path)) == 3


def test_saving_under_a_name_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, "step-1", some(1), {})
    save(tmp_path, "step-1", some(2), {})
    assert float(load(tmp_path / "step-1").tensors["model/b"]) == 2.0
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-1"]


@pytest.mark.parametrize("file", ["manifest.json", "model.safetensors", "random.safetensors"])
@pytest.mark.parametrize("harm", ["flip", "cut", "gone"])
def test_a_damaged_file_is_named_and_the_one_before_is_taken(tmp_path: Path, file: str, harm: str) -> None:
    save(tmp_path, "step-1", some(1), {"step": 1})
    save(tmp_path, "step-2", some(2), {"step": 2})
    target = tmp_path / "step-2" / file
    content = bytearray(target.read_bytes())
    if harm == "gone":
        target.unlink()
    else:
        content[-9] ^= 4
        target.write_bytes(content if harm == "flip" else content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=rf"step-2/{file}"):
        load(tmp_path / "step-2")
    found = latest(tmp_path)
    assert found is not None
    assert found.meta == {"step": 1}
    assert len(found.skipped) == 1
    assert file in found.skipped[0]


@pytest.mark.parametrize(
    "text", ["[]", "7", '"x"', "null", '{"sha256": "x"}', "[" * 100_000, '{"a":' * 100_000, "\x00"]
)
def test_a_manifest_of_another_kind_is_damage_like_any_other(tmp_path: Path, text: str) -> None:
    save(tmp_path, "step-1", some(1), {"step": 1})
    manifest = save(tmp_path, "step-2", some(2), {"step": 2}) / "manifest.json"
    manifest.write_text(text)
    with pytest.raises(CheckpointError, match=r"step-2/manifest\.json (cannot be read|is damaged)"):
        load(tmp_path / "step-2")
    found = latest(tmp_path)
    assert found is not None
    assert found.meta == {"step": 1}


def test_none_is_none_and_all_damaged_is_an_error(tmp_path: Path) -> None:
    assert latest(tmp_path / "nowhere") is None
    (tmp_path / ".tmp-step-9").mkdir()
    assert latest(tmp_path) is None
    save(tmp_path, "step-1", some(1), {})
    (tmp_path / "step-1" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole"):
        latest(tmp_path)


def test_a_write_that_dies_leaves_the_older_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "step-1", some(1), {"step": 1})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr("safetensors.torch.save_file", full)
        with pytest.raises(CheckpointError, match=r"step-2 could not be written: .*No space left"):
            save(tmp_path, "step-2", some(2), {})
    assert names(tmp_path) == ["step-1"]
    save(tmp_path, "step-2", some(2), {"step": 2})
    assert latest(tmp_path).meta == {"step": 2}  # type: ignore[union-attr]


def test_the_writer_works_beside_and_tells_its_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    real = checkpoint.save

    def slow(*arguments: object) -> Path:
        assert gate.wait(20)
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint, "save", slow)
    writer = AsyncWriter(tmp_path / "out", keep=2)
    writer.submit("step-1", some(1), {})
    assert writer.busy
    assert names(tmp_path / "out") == []
    with pytest.raises(CheckpointError, match=r"still being written after 0\.05 s"):
        writer.wait(0.05)
    gate.set()
    writer.wait(20)
    assert not writer.busy
    assert names(tmp_path / "out") == ["step-1"]
    (tmp_path / "file").write_text("in the way")
    blocked = AsyncWriter(tmp_path / "file")
    blocked.submit("step-1", some(1), {})
    with pytest.raises(CheckpointError, match="could not be written"):
        blocked.wait(20)
    assert not blocked.busy


def test_the_synchronous_writer_is_done_when_it_returns(tmp_path: Path) -> None:
    writer = AsyncWriter(tmp_path, synchronous=True)
    writer.submit("step-1", some(1), {})
    assert not writer.busy
    assert names(tmp_path) == ["step-1"]


def test_names_of_tensors_have_a_part(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tensor name is 'weight'"):
        save(tmp_path, "step-1", {"weight": torch.zeros(1)}, {})


WHOLE = torch.arange(24.0).reshape(4, 6)


def parted(root: Path, boxes: list[Box], shape: tuple[int, ...] = (4, 6)) -> Checkpoint:
    """A checkpoint of as many ranks as there are ``boxes``, each of which holds that of ``model/w``."""
    for rank, box in enumerate(boxes):
        parts = {
            "model/w": Part(WHOLE[box.slices].contiguous(), box.starts, shape),
            f"random/{rank}/cpu": Part(torch.tensor([rank], dtype=torch.uint8), (0,), (1,)),
        }
        write_part(root, "step-1", rank, parts)
    commit(root, "step-1", len(boxes), {"step": 1}, 3)
    return Checkpoint(root / "step-1")


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
    assert set(found.tensors) == {"model/w", *(f"random/{rank}/cpu" for rank in range(len(boxes)))}
    assert len(found.tensors) == 1 + len(boxes)
    assert "w" in found.part("model")
    with pytest.raises(KeyError):
        found.part("model")["v"]


def test_what_one_rank_wrote_is_read_in_boxes_as_well(tmp_path: Path) -> None:
    tensors = {"model/w": WHOLE, "model/n": torch.tensor(3.0), "model/none": torch.zeros(0, 2, dtype=torch.int32)}
    found = Checkpoint(save(tmp_path, "step-1", tensors, {}))
    assert torch.equal(found.read("model/w", QUARTERS[3]), WHOLE[2:, 3:])
    assert found.read("model/n").item() == 3.0
    assert found.read("model/none").shape == (0, 2)
    assert found.read("model/none").dtype == torch.int32


@pytest.mark.parametrize("file", ["manifest.json", "rank-00001.json", "rank-00001.safetensors"])
@pytest.mark.parametrize("harm", ["flip", "gone"])
def test_a_damaged_file_is_named_by_whoever_looks_at_it(tmp_path: Path, file: str, harm: str) -> None:
    target = parted(tmp_path, ROWS).path / file
    content = bytearray(target.read_bytes())
    target.unlink()
    if harm == "flip":
        content[-9] ^= 4
        target.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"step-1/{file}"):
        Checkpoint(tmp_path / "step-1").verify()
    if file.endswith("safetensors"):
        Checkpoint(tmp_path / "step-1").verify(rank=0, world=2)
        with pytest.raises(CheckpointError, match=f"step-1/{file}"):
            Checkpoint(tmp_path / "step-1").verify(rank=1, world=2)


@pytest.mark.parametrize("boxes", [QUARTERS[:3], [*ROWS, QUARTERS[0]]])
def test_a_tensor_with_a_hole_or_held_twice_is_no_checkpoint(tmp_path: Path, boxes: list[Box]) -> None:
    with pytest.raises(CheckpointError, match="does not hold every value of model/w once"):
        assert parted(tmp_path, boxes).entries


def test_two_shapes_of_one_tensor_and_a_format_of_the_future_are_refused(tmp_path: Path) -> None:
    write_part(tmp_path, "step-1", 0, {"model/w": Part(WHOLE, (0, 0), (4, 6))})
    write_part(tmp_path, "step-1", 1, {"model/w": Part(WHOLE, (0, 0), (8, 6))})
    commit(tmp_path, "step-1", 2, {}, 3)
    with pytest.raises(CheckpointError, match=r"holds model/w in two shapes, \(4, 6\) and \(8, 6\)"):
        assert Checkpoint(tmp_path / "step-1").entries


def test_what_is_sealed_comes_back_and_any_change_is_seen(tmp_path: Path) -> None:
    file, told = tmp_path / "a.json", {"step": 3, "names": ["a"], "none": None, "share": 0.1 + 0.2}
    write_sealed(file, told, PLAIN_DISK, Step.CHECKPOINT_FILE)
    assert read_sealed(file) == told
    assert len(digest_of_file(file)) == 64
    file.write_text(file.read_text().replace("3", "4", 1))
    with pytest.raises(CheckpointError, match=r"a\.json is damaged: its own sha256 does not match"):
        read_sealed(file)
    file.write_text("[]")
    with pytest.raises(CheckpointError, match=r"a\.json cannot be read"):
        read_sealed(file)


def test_a_number_that_json_has_no_word_for_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Out of range"):
        write_sealed(tmp_path / "a.json", {"x": float("nan")}, PLAIN_DISK, Step.CHECKPOINT_FILE)
