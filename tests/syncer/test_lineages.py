"""The values that lineages began with: kept, found by the record that names them, dropped when nothing needs them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from diloco.codec.base import digest
from diloco.durable import PLAIN_DISK, Disk, Step
from diloco.outer.optimizer import NOTHING
from diloco.sync.events import LineageBegan
from diloco.sync.journal import JournalError
from diloco.syncer.snapshots import FragmentValues, Image, Lineages, same_values
from tests.syncer.building import version_zero
from tests.syncer.desk import CARD


class DyingDisk(Disk):
    """Ends before the image gets its name."""

    def rename(self, path: Path, target: Path, step: Step) -> None:
        if path.is_dir():
            raise RuntimeError("as by a death")
        super().rename(path, target, step)


def image() -> Image:
    return Image(asdict(CARD), tuple(FragmentValues(5, v, v.clone(), NOTHING, digest(v)) for v in version_zero()))


def event(lineage: int, kept: Image) -> LineageBegan:
    return LineageBegan(lineage, tuple(values.digest for values in kept.fragments), "a test")


def test_what_is_kept_is_found_by_its_record_and_another_attempt_replaces_it(tmp_path: Path) -> None:
    lineages, kept = Lineages(tmp_path / "lineages"), image()
    assert lineages.numbers() == []
    for _ in range(2):
        lineages.keep(7, kept)
    found = lineages.values(event(7, kept))
    assert all(same_values(one, other) for one, other in zip(found, kept.fragments, strict=True))
    assert lineages.numbers() == [7]


def test_what_is_missing_damaged_or_another_is_named(tmp_path: Path) -> None:
    lineages, kept = Lineages(tmp_path / "lineages"), image()
    lineages.keep(7, kept)
    with pytest.raises(JournalError, match="lineage 8 began with are not here"):
        lineages.values(event(8, kept))
    with pytest.raises(JournalError, match="holds other values than those that lineage 7 began with"):
        lineages.values(LineageBegan(7, ("0" * 64, "1" * 64), "another"))
    path = tmp_path / "lineages" / "7" / "fragment-0.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(JournalError, match=r"fragment-0\.safetensors is damaged"):
        lineages.values(event(7, kept))


def test_what_a_death_left_half_written_goes_with_the_next_start(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="as by a death"):
        Lineages(tmp_path / "lineages", DyingDisk()).keep(7, image())
    assert [path.name for path in (tmp_path / "lineages").iterdir()] == [".7.tmp"]
    PLAIN_DISK.sweep(tmp_path / "lineages", Step.LINEAGE_PRUNE)
    assert list((tmp_path / "lineages").iterdir()) == []


def test_what_no_snapshot_is_older_than_goes(tmp_path: Path) -> None:
    lineages = Lineages(tmp_path / "lineages")
    for lineage in (7, 9, 12):
        lineages.keep(lineage, image())
    lineages.prune(9)
    assert lineages.numbers() == [12]
