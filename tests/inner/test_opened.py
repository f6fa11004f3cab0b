from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diloco.inner.checkpoint import Checkpoint, CheckpointError, Part, commit, save, write_part
from diloco.inner.parallel import Box

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
