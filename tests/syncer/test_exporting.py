"""The final version as a file: the fragments in place, whole or not there, and no room for it is no failure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from safetensors.torch import load_file

from diloco.codec.base import digest
from diloco.durable import Disk, DiskFullError, Step
from diloco.outer.fragments import Fragment, Layout, Piece
from diloco.outer.optimizer import NOTHING
from diloco.syncer.snapshots import FragmentValues, export, full_parameters
from tests.syncer.building import LAYOUT, dice


def values() -> list[FragmentValues]:
    published = [dice("full", index) for index in (0, 1)]
    return [FragmentValues(3, each, each, NOTHING, digest(each)) for each in published]


def test_full_parameters_are_the_fragments_in_place() -> None:
    flats = [each.published for each in values()]
    found = full_parameters(LAYOUT, flats)
    for fragment, flat in zip(LAYOUT.fragments, flats, strict=True):
        pieces = [found[piece.name].reshape(-1)[piece.start : piece.stop] for piece in fragment.pieces]
        assert torch.equal(torch.cat(pieces), flat)


def test_a_parameter_in_one_piece_is_no_copy_and_one_in_several_is_put_together() -> None:
    halves = (Fragment(0, (Piece("w", 0, 3),), 3), Fragment(1, (Piece("v", 0, 2), Piece("w", 3, 6)), 5))
    layout = Layout((("v", (2,)), ("w", (2, 3))), halves)
    flats = [torch.arange(3.0), torch.arange(10.0, 15.0)]
    found = full_parameters(layout, flats)
    assert found["w"].tolist() == [[0, 1, 2], [12, 13, 14]]
    assert found["v"].tolist() == [10, 11]
    assert found["v"].data_ptr() == flats[1].data_ptr()


def test_what_is_exported_is_whole_and_says_what_it_is(tmp_path: Path) -> None:
    for _ in range(2):
        export(Disk(), tmp_path / "final", LAYOUT, values(), [3, 3])
        found = load_file(tmp_path / "final" / "model.safetensors")
        wanted = full_parameters(LAYOUT, [each.published for each in values()])
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        facts = json.loads((tmp_path / "final" / "final.json").read_bytes())
        assert facts == {"versions": [3, 3], "digests": [each.digest for each in values()]}
        (tmp_path / "final" / ".model.safetensors.1.tmp").touch()  # Of a process that died over it.
    assert len(list((tmp_path / "final").iterdir())) == 3


class Refusing(Disk):
    """Fails at every file that is made."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def make(self, path: Path, write: object, step: Step) -> None:
        raise self.error

    def write(self, file: BinaryIO, data: bytes | memoryview, step: Step) -> None:
        raise self.error


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), OSError(122, "Disk quota exceeded")],
)
def test_no_room_is_said_as_such(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(DiskFullError):
        export(Refusing(error), tmp_path / "final", LAYOUT, values(), [3, 3])


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), ValueError("of another kind")])
def test_any_other_failure_is_one(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        export(Refusing(error), tmp_path / "final", LAYOUT, values(), [3, 3])
    assert not isinstance(raised.value, DiskFullError)
