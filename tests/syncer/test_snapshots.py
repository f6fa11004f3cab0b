"""Snapshots: what is read is what was written, or the file that is not is named."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save

from diloco.codec.base import digest
from diloco.durable import PLAIN_DISK, Disk, DiskFullError, Step
from diloco.outer.fragments import Fragment, Layout, Piece
from diloco.outer.optimizer import NOTHING, OuterState
from diloco.syncer import snapshots as snapshots_module
from diloco.syncer.snapshots import (
    RECOVERY_ONLY,
    FragmentValues,
    NewerSnapshotError,
    Snapshot,
    SnapshotError,
    Snapshots,
    digest_of,
    export,
    full_parameters,
    read_verified,
    same_values,
    tensor_file,
)
from tests.syncer.building import LAYOUT, dice

PIECE = 64


def snapshot(number: int, momentum: bool = True) -> Snapshot:
    fragments = []
    for index in (0, 1):
        theta = dice((number, "theta"), index)
        published = dice((number, "published"), index) if index else theta
        moved = OuterState(number, {"momentum": dice((number, "momentum"), index)}) if momentum else NOTHING
        fragments.append(FragmentValues(number, theta, published, moved, digest(published)))
    return Snapshot({"sites": {}, "number": number}, tuple(fragments), 10 + number)


def assert_equal(found: Snapshot, wanted: Snapshot) -> None:
    assert (found.state, found.journal_segment) == (wanted.state, wanted.journal_segment)
    assert all(same_values(mine, theirs) for mine, theirs in zip(found.fragments, wanted.fragments, strict=True))


def three(folder: Path) -> Snapshots:
    """The second has no momentum."""
    snapshots = Snapshots(folder)
    for number in (1, 2, 3):
        size = snapshots.write(snapshot(number, number != 2))
        assert size == sum(path.stat().st_size for path in (folder / f"{number:08d}").iterdir())
    return snapshots


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    three(tmp_path)
    again = Snapshots(tmp_path)
    assert again.numbers() == [1, 2, 3]
    for number in (1, 2, 3):
        assert_equal(again.load(number), snapshot(number, number != 2))
        assert again.load(number, whole=False) == replace(snapshot(number), fragments=())
    first, other = (snapshot(number).fragments[1] for number in (1, 2))
    for part in ("version", "digest", "theta", "published", "optimizer"):
        assert not same_values(first, replace(first, **{part: getattr(other, part)})), part


def test_every_flipped_byte_every_cut_and_every_missing_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots_module, "PIECE_BYTES", PIECE)
    snapshots = Snapshots(tmp_path)
    snapshots.write(snapshot(1))
    folder = tmp_path / "00000001"
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    dice_of = random.Random(seed)
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for _ in range(60):
            at, bit = dice_of.randrange(len(whole)), dice_of.randrange(8)
            path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << bit)]) + whole[at + 1 :])
            with pytest.raises(SnapshotError, match=str(folder)) as raised:
                snapshots.load(1)
            assert not isinstance(raised.value, NewerSnapshotError), (path, at, bit)
        for harmed in (b"", whole[:PIECE], whole[:-1], whole + b"!"):
            path.write_bytes(harmed)
            with pytest.raises(SnapshotError, match=str(folder)):
                snapshots.load(1)
        path.unlink()
        with pytest.raises(SnapshotError, match=path.name):
            snapshots.load(1)
        path.write_bytes(whole)
    assert_equal(snapshots.load(1), snapshot(1))


def test_a_manifest_of_another_kind_is_named(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path)
    snapshots.write(snapshot(1))
    path = tmp_path / "00000001" / "manifest.json"
    lacking = json.loads(path.read_bytes())
    del lacking["files"]["fragment-1.safetensors"], lacking["sha256"]
    lacking["sha256"] = digest_of(lacking)
    for manifest, words in (
        (b"[]", ""),
        (b"{}", ""),
        (b"\xff{}", ""),
        (b'{"format": 1, "files": [1]}', ""),
        (b'{"format": 9}', ""),
        (b"[" * 50_000, "nested too deeply"),
        (json.dumps(lacking, sort_keys=True, indent=1).encode(), r"differ in fragment-1\.safetensors"),
    ):
        path.write_bytes(manifest)
        with pytest.raises(SnapshotError, match=f"00000001.*{words}"):
            snapshots.load(1)
        if b"state.json" not in manifest:
            with pytest.raises(SnapshotError, match="00000001"):
                snapshots.load(1, whole=False)


def test_a_crash_while_one_is_dropped_leaves_no_half_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``tests/hunts/test_disks.py`` ends it in each operation of what is written."""
    snapshots = three(tmp_path)

    def dies(folder: Path) -> None:
        (folder / "state.json").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", dies)
    with pytest.raises(KeyboardInterrupt):
        snapshots.prune(RECOVERY_ONLY, lambda segments: 0, 0)
    monkeypatch.undo()
    PLAIN_DISK.sweep(tmp_path, Step.SNAPSHOT_PRUNE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000002", "00000003"]


def test_a_damaged_one_is_set_aside_and_its_number_not_given_again(tmp_path: Path) -> None:
    snapshots = three(tmp_path)
    snapshots.set_aside(2)
    snapshots.set_aside(3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000001", "00000003.damaged"]
    snapshots.write(snapshot(4))
    assert snapshots.numbers() == [1, 4]


def test_one_that_is_damaged_where_it_lies_lets_nothing_be_dropped_on_its_word(tmp_path: Path) -> None:
    snapshots = three(tmp_path)
    (tmp_path / "00000001" / "state.json").write_bytes(b'{"state": {}, "journal_segment": 99}')
    for one, kept in ((Snapshots(tmp_path), []), (snapshots, [12, 13])):  # Who wrote it knows what it was.
        found, _ = one.prune(RECOVERY_ONLY, lambda segments: 0, 0)
        assert [point.segment for point in found] == kept
        assert snapshots.numbers() == ([2, 3] if kept else [1, 2, 3])


# --- The final version as a file -------------------------------------------------------------------------------------


def test_a_parameter_in_one_piece_is_no_copy_and_one_in_several_is_put_together() -> None:
    halves = (Fragment(0, (Piece("w", 0, 3),), 3), Fragment(1, (Piece("v", 0, 2), Piece("w", 3, 6)), 5))
    layout = Layout((("v", (2,)), ("w", (2, 3))), halves)
    flats = [torch.arange(3.0), torch.arange(10.0, 15.0)]
    found = full_parameters(layout, flats)
    assert found["w"].tolist() == [[0, 1, 2], [12, 13, 14]]
    assert found["v"].tolist() == [10, 11]
    assert found["v"].data_ptr() == flats[1].data_ptr()


def test_what_is_exported_is_the_average_where_the_outer_rule_keeps_one(tmp_path: Path) -> None:
    averages = [dice("average", index) for index in (0, 1)]
    kept = [
        replace(each, optimizer=OuterState(3, {"fast": each.theta, "average": average}))
        for each, average in zip(snapshot(3).fragments, averages, strict=True)
    ]
    export(Disk(), tmp_path / "final", LAYOUT, kept)
    written = load_file(tmp_path / "final" / "model.safetensors")
    wanted = full_parameters(LAYOUT, averages)
    assert written.keys() == wanted.keys()
    assert all(torch.equal(written[name], wanted[name]) for name in wanted)


def test_no_room_for_it_is_said_as_such_and_any_other_failure_is_one(tmp_path: Path) -> None:
    disk = Disk()
    for number, full in ((errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EIO, False)):
        disk.write_parts = Mock(side_effect=OSError(number, "as it is"))  # type: ignore[method-assign]
        with pytest.raises(OSError, match="as it is") as raised:
            export(disk, tmp_path / "final", LAYOUT, snapshot(3).fragments)
        assert isinstance(raised.value, DiskFullError) is full


# --- Files come as they were written, or are named, whatever their length against the pieces that they are read in ---


def told(path: Path, content: bytes) -> dict[str, object]:
    path.write_bytes(content)
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_many_files_of_any_length_come_as_they_were_written_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots_module, "PIECE_BYTES", PIECE)
    sizes = [0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 3 * PIECE, 10 * PIECE + 5, *range(0, 1000, 50)]
    contents = [random.Random(size).randbytes(size) for size in sizes]
    files = {str(number): told(tmp_path / str(number), content) for number, content in enumerate(contents)}
    assert [found.numpy().tobytes() for found in read_verified(tmp_path, files, list(files))] == contents
    assert read_verified(tmp_path, {}, []) == []


def test_a_file_that_is_cut_while_it_is_read_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots_module, "PIECE_BYTES", PIECE)
    wanted = told(tmp_path / "a", random.Random(1).randbytes(6 * PIECE))
    empty = torch.empty

    def cut(size: int, dtype: torch.dtype) -> torch.Tensor:
        os.truncate(tmp_path / "a", 2 * PIECE + 5)
        return empty(size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", cut)
    with pytest.raises(SnapshotError, match="a is damaged"):
        read_verified(tmp_path, {"a": wanted}, ["a"])


# --- What is written piece by piece is the file that the library would have written, and is no copy of the values ----

TENSORS = {"b": torch.arange(6.0).view(2, 3), "a": torch.ones(5), "c": torch.tensor(2.5)}


@pytest.mark.parametrize("piece_bytes", [7, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_what_the_library_writes(piece_bytes: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots_module, "PIECE_BYTES", piece_bytes)
    tensors = {name: values.to(dtype) for name, values in TENSORS.items()}
    tensors["shares the memory of"] = tensors["b"]
    whole = {**tensors, "shares the memory of": tensors["b"].clone()}
    assert b"".join(tensor_file(tensors)) == save(whole)
    assert b"".join(tensor_file(tensors, {"version": "7"})) == save(whole, metadata={"version": "7"})


def test_the_pieces_are_views_of_tensors_of_a_known_kind() -> None:
    values = torch.zeros(4)
    _, piece = tensor_file({"w": values})
    values[0] = 1.0
    assert bytes(piece[:4]) == b"\0\0\x80?"
    with pytest.raises(AssertionError, match=r"w is torch\.int8"):
        list(tensor_file({"w": torch.ones(1, dtype=torch.int8)}))
