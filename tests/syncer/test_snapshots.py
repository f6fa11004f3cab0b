"""Snapshots: what is read is what was written, or the file that is not is named."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from safetensors.torch import load_file

from diloco.codec.base import digest
from diloco.durable import PLAIN_DISK, Disk, DiskFullError, Step
from diloco.outer.fragments import Fragment, Layout, Piece
from diloco.outer.optimizer import NOTHING, OuterState
from diloco.syncer.snapshots import (
    RECOVERY_ONLY,
    FragmentValues,
    NewerSnapshotError,
    Retention,
    Snapshot,
    SnapshotError,
    Snapshots,
    digest_of,
    export,
    full_parameters,
)
from tests.syncer.building import LAYOUT, dice


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
    for mine, theirs in zip(found.fragments, wanted.fragments, strict=True):
        assert (mine.version, mine.digest) == (theirs.version, theirs.digest)
        assert torch.equal(mine.theta, theirs.theta)
        assert torch.equal(mine.published, theirs.published)
        assert mine.optimizer.steps == theirs.optimizer.steps
        assert mine.optimizer.tensors.keys() == theirs.optimizer.tensors.keys()
        for name, tensor in mine.optimizer.tensors.items():
            assert torch.equal(tensor, theirs.optimizer.tensors[name]), name


def loaded(snapshots: Snapshots, number: int) -> Snapshot | SnapshotError:
    try:
        return snapshots.load(number)
    except SnapshotError as error:
        return error


@pytest.mark.parametrize("momentum", [False, True])
def test_what_is_read_is_what_was_written(tmp_path: Path, momentum: bool) -> None:
    snapshots = Snapshots(tmp_path)
    for number in (1, 2, 3):
        size = snapshots.write(snapshot(number, momentum))
        stored = [path for path in (tmp_path / f"{number:08d}").iterdir() if path.name != "manifest.json"]
        assert size == sum(path.stat().st_size for path in stored)
    again = Snapshots(tmp_path)
    assert again.numbers() == [1, 2, 3]
    for number in (1, 2, 3):
        assert_equal(again.load(number), snapshot(number, momentum))
        assert again.peek(number) == (snapshot(number).state, 10 + number)


def test_every_flipped_byte_every_cut_and_every_missing_file_is_named(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path)
    snapshots.write(snapshot(1))
    folder = tmp_path / "00000001"
    seed = random.randrange(1 << 30)
    dice_of = random.Random(seed)
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for _ in range(60):
            at, bit = dice_of.randrange(len(whole)), dice_of.randrange(8)
            path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << bit)]) + whole[at + 1 :])
            found = loaded(snapshots, 1)
            assert isinstance(found, SnapshotError), (seed, path, at, bit)
            assert not isinstance(found, NewerSnapshotError), (seed, path, at, bit)
            assert str(folder) in str(found), (seed, path, at, bit)
        for length in {0, 1, len(whole) // 2, len(whole) - 1}:
            path.write_bytes(whole[:length])
            with pytest.raises(SnapshotError, match=str(folder)):
                snapshots.load(1)
        path.unlink()
        with pytest.raises(SnapshotError, match=path.name):
            snapshots.load(1)
        path.write_bytes(whole)
    assert_equal(snapshots.load(1), snapshot(1))


@pytest.mark.parametrize(
    "manifest", [b"[]", b"{}", b'"x"', b"\xff{}", b'{"format": 1, "files": [1]}', b'{"format": 9}']
)
def test_a_manifest_of_another_kind_is_named(tmp_path: Path, manifest: bytes) -> None:
    snapshots = Snapshots(tmp_path)
    snapshots.write(snapshot(1))
    (tmp_path / "00000001" / "manifest.json").write_bytes(manifest)
    for read in (snapshots.load, snapshots.peek):
        with pytest.raises(SnapshotError, match="00000001"):
            read(1)


def test_what_a_crash_left_half_written_is_removed(tmp_path: Path) -> None:
    Snapshots(tmp_path).write(snapshot(1))
    (tmp_path / ".00000002.tmp").mkdir()
    (tmp_path / ".00000002.tmp" / "fragment-0.safetensors").write_bytes(b"half")
    again = Snapshots(tmp_path)
    PLAIN_DISK.sweep(tmp_path, Step.SNAPSHOT_PRUNE)
    assert again.numbers() == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["00000001"]
    again.write(snapshot(2))
    assert_equal(again.load(2), snapshot(2))


def nothing_behind(segments: range) -> int:
    return 0


def pruned(snapshots: Snapshots) -> list[int]:
    return [point.segment for point in snapshots.prune(RECOVERY_ONLY, nothing_behind).kept]


def test_the_newest_are_kept_and_the_journal_that_they_need(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path)
    needed = []
    for number in range(1, 6):
        snapshots.write(snapshot(number))
        needed.append(pruned(snapshots)[0])
    assert snapshots.numbers() == [4, 5]
    assert needed == [11, 11, 12, 13, 14]
    assert pruned(Snapshots(tmp_path)) == [14, 15], "known again from what lies there"


def test_retention_keeps_older_ones_that_are_not_too_many(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path)
    for number in range(1, 12):
        state = {"sites": {}, "fragments": [{"version": 3 * number}, {"version": 2 * number}]}
        snapshots.write(replace(snapshot(number), state=state))
        kept = snapshots.prune(Retention(20, 1 << 30), nothing_behind)
        assert [point.number for point in kept.kept] == snapshots.numbers()
    assert [point.steps for point in kept.kept] == [35, 45, 50, 55]


def test_a_crash_while_dropping_one_leaves_no_half_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots = Snapshots(tmp_path)
    for number in (1, 2, 3):
        snapshots.write(snapshot(number))

    def dies(folder: Path) -> None:
        (folder / "state.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", dies)
        with pytest.raises(KeyboardInterrupt):
            pruned(snapshots)
    again = Snapshots(tmp_path)
    PLAIN_DISK.sweep(tmp_path, Step.SNAPSHOT_PRUNE)
    assert again.numbers() == [2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000002", "00000003"]


def test_one_that_is_damaged_where_it_lies_lets_nothing_be_dropped_on_its_word(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path)
    for number in (1, 2, 3):
        snapshots.write(snapshot(number))
    state = tmp_path / "00000001" / "state.json"
    state.write_bytes(json.dumps({"state": {}, "journal_segment": 99}).encode())
    assert pruned(Snapshots(tmp_path)) == []
    assert snapshots.numbers() == [1, 2, 3]
    assert pruned(snapshots) == [12, 13], "who wrote it knows what it was"


def test_a_damaged_one_is_set_aside_and_its_number_not_given_again(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path)
    for number in (1, 2, 3):
        snapshots.write(snapshot(number))
    snapshots.set_aside(2)
    snapshots.set_aside(3)
    assert snapshots.numbers() == [1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000001", "00000003.damaged"]
    snapshots.write(snapshot(4))
    assert snapshots.numbers() == [1, 4]


def test_a_manifest_that_leaves_a_fragment_out_is_damaged(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path)
    snapshots.write(snapshot(1))
    path = tmp_path / "00000001" / "manifest.json"
    manifest = json.loads(path.read_bytes())
    del manifest["files"]["fragment-1.safetensors"], manifest["sha256"]
    manifest["sha256"] = digest_of(manifest)
    path.write_text(json.dumps(manifest, sort_keys=True, indent=1))
    with pytest.raises(SnapshotError, match=r"differ in fragment-1\.safetensors"):
        snapshots.load(1)
    path.write_text("[" * 50_000)
    with pytest.raises(SnapshotError, match="nested too deeply"):
        snapshots.load(1)


# --- The final version as a file -------------------------------------------------------------------------------------


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
