"""The values that lineages began with: kept, found by the record that names them, dropped when nothing needs them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from torch import Tensor

from diloco.codec.base import digest
from diloco.durable import PLAIN_DISK, Disk, Step
from diloco.outer.optimizer import NOTHING, OuterState
from diloco.sync.events import LineageBegan
from diloco.sync.journal import JournalError
from diloco.syncer.snapshots import FragmentValues, Image, Lineages, MemoryCheck, MemoryDamaged, same_values
from tests.syncer.building import Events, dice, eventually, files, new_syncer, version_zero
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


# --- A bit that flips in the syncer's memory ends the process before it reaches a site or a snapshot -----------------


def held(version: int = 3) -> FragmentValues:
    published = dice("published", 0)
    memory = OuterState(3, {"momentum": dice("momentum", 0)})
    return FragmentValues(version, dice("theta", 0), published, memory, digest(published), dice("reference", 0))


def flip(values: Tensor | None) -> None:
    assert values is not None
    values.numpy().view("uint32")[5] ^= 1 << 20


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("published", "what is published"),
        ("theta", "the parameters"),
        ("momentum", "the optimizer's momentum"),
        ("reference", "what a region measures from"),
    ],
)
def test_one_flipped_bit_is_found_and_named(field: str, words: str) -> None:
    values = held()
    check = MemoryCheck([values], 1.0)
    check.check(0, values)
    check.check(0, values)
    flip(values.optimizer.momentum if field == "momentum" else getattr(values, field))
    with pytest.raises(MemoryDamaged, match=f"{words} of version 3 of fragment 0 changed"):
        check.check(0, values)


def test_a_new_version_is_no_damage() -> None:
    check = MemoryCheck([], 1.0)
    check.check(0, held(3))
    moved = replace(held(4), theta=dice("other", 0), optimizer=NOTHING)
    check.check(0, moved)
    check.check(0, moved)


def test_the_thread_takes_every_fragment_in_turn_and_ends_when_it_is_told_to() -> None:
    values, stopping = [held(), held()], threading.Event()
    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(MemoryCheck(values, 0.001).run, stopping)
        flip(values[1].published)
        assert "fragment 1" in str(looking.exception(5.0))
        looking = pool.submit(MemoryCheck([held()], 0.001).run, stopping)
        stopping.set()
        assert looking.result(5.0) is None


def test_a_syncer_ends_in_words_and_goes_on_from_its_disk(tmp_path: Path) -> None:
    events = Events()
    syncer = new_syncer(tmp_path, events.emit, memory_check_s=0.01)
    syncer.start()
    flip(syncer.holdings.values[1].published)
    with pytest.raises(MemoryDamaged, match="version 0 of fragment 1 changed in this process's memory"):
        eventually(lambda: syncer.wait(0.1), "an end")
    snapshots = [name for name in files(tmp_path) if name.startswith("snapshots")]
    syncer.stop(0.1)
    assert [name for name in files(tmp_path) if name.startswith("snapshots")] == snapshots, "nothing of it is kept"
    again = new_syncer(tmp_path, events.emit)
    again.start()
    try:
        assert [digest(values.published) for values in again.holdings.values] == [digest(v) for v in version_zero()]
    finally:
        again.stop(0.1)


def test_no_snapshot_is_made_of_damaged_values(tmp_path: Path) -> None:
    syncer = new_syncer(tmp_path, Events().emit, memory_check_s=0.0)
    syncer.start()
    before = [name for name in files(tmp_path) if name.startswith("snapshots")]
    flip(syncer.holdings.values[0].published)
    with pytest.raises(Exception, match="changed in this process's memory"):
        syncer.api.snapshot()
    syncer.stop(0.1)
    assert [name for name in files(tmp_path) if name.startswith("snapshots")] == before
