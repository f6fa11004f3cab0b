"""The simulated syncer's folder, by itself."""

from __future__ import annotations

from random import Random

import pytest

from diloco.sim.outer_disk import OuterDisk
from diloco.sim.outer_process import OuterProcess
from diloco.sim.world import Damaged
from tests.sim.small import Small


def a_disk() -> tuple[OuterDisk, OuterProcess]:
    """A folder with two snapshots and some journal behind the second one, and its process."""
    small = Small()
    small.run(3)
    outer = small.syncers.outer
    assert outer is not None
    outer.snapshot()
    small.run(1)
    return small.syncers.disk, outer


def test_a_new_folder_begins_at_version_0() -> None:
    small = Small(0)
    assert small.syncers.disk.storage.names("") == ["journal-000001", "snapshot-000001"]


def test_without_a_snapshot_a_journal_is_not_begun_anew() -> None:
    disk, _ = a_disk()
    for name in disk.storage.names("snapshot-"):
        disk.storage.remove(name)
    with pytest.raises(Damaged, match="no snapshot is whole"):
        disk.recover()


def test_a_damaged_snapshot_is_named_and_the_one_before_it_is_used() -> None:
    disk, outer = a_disk()
    older, newer = disk.storage.names("snapshot-")
    disk.storage.cut(newer, 40)
    found = disk.recover()
    assert disk.notes == [f"{newer} is damaged"]
    assert found.machine.state == outer.machine.state
    assert disk.storage.names("snapshot-") == [older]


def test_a_missing_segment_is_named() -> None:
    disk, _ = a_disk()
    disk.storage.cut(disk.storage.names("snapshot-")[-1], 40)
    first = disk.storage.names("journal-")[0]
    disk.storage.remove(first)
    with pytest.raises(Damaged, match=f"{first} is missing"):
        disk.recover()


def test_a_power_cut_between_two_events_costs_nothing() -> None:
    disk, outer = a_disk()
    for seed in range(8):
        disk.storage.power_cut(Random(seed))
        assert disk.recover().machine.state == outer.machine.state
