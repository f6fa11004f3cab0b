"""Snapshots that find no room are put off and come later; the run goes on, and any other failure ends it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from diloco.durable import DiskFullError
from diloco.syncer.journal_files import JournalFiles, Position
from diloco.syncer.snapshots import Snapshot, Snapshots, same_values
from diloco.wire.messages import Refusal, Status
from tests.syncer.building import Events, eventually, join, push, serving, update
from tests.syncer.desk import Desk
from tests.syncer.test_server import merged


def full(*_: object) -> None:
    raise DiskFullError(28, "No space left on device")


@pytest.mark.parametrize("where", [(Snapshots, "write"), (JournalFiles, "rotate")])
def test_a_snapshot_without_room_is_said_once_and_comes_with_a_later_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: tuple[type, str]
) -> None:
    events = Events()
    with serving(tmp_path, events, snapshot_every=1) as syncer:
        join(syncer)
        before = syncer.store.snapshots.numbers()
        with monkeypatch.context() as patch:
            patch.setattr(*where, full)
            merged(syncer, 3)
            with pytest.raises(Refusal, match="disk full: No space left on device") as raised:
                syncer.api.snapshot()
            assert raised.value.status is Status.UNAVAILABLE
        (note,) = [each for each in events.of("note") if each["note"] == "snapshot_put_off"]
        assert note["why"] == "disk full: No space left on device"
        assert syncer.store.snapshots.numbers() == before
        push(syncer, *update(sequence=4, base_version=3))
        eventually(lambda: syncer.store.snapshots.numbers() != before, "the next version is kept")
        syncer.api.snapshot()
        assert syncer.failed is None
    with serving(tmp_path) as again:
        assert again.holdings.values[0].version == 4


def test_a_stop_on_a_full_disk_is_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path, snapshot_every=1000) as syncer:
        join(syncer)
        merged(syncer, 2)
        monkeypatch.setattr(Snapshots, "write", full)
    monkeypatch.undo()
    events = Events()
    with serving(tmp_path, events) as again:
        assert again.holdings.values[0].version == 2
        assert events.of("syncer_started")[0]["recovered"] > 0, "from the journal"


def test_a_snapshot_that_finds_no_room_half_way_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = Snapshots(tmp_path)
    place = Position(1, "")
    keep, calls = snapshots._disk.keep, [0]

    def fails(path: Path, write: object, step: object) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise OSError(28, "No space left on device")
        keep(path, write, step)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(snapshots._disk, "keep", fails)
        with pytest.raises(DiskFullError):
            snapshots.write(Snapshot({"sites": {}}, (), place.segment))
    assert list(tmp_path.iterdir()) == []
    snapshots.write(Snapshot({"sites": {}}, (), place.segment))
    assert snapshots.numbers() == [1]


def test_a_snapshot_writes_first_what_has_a_newer_version_by_then(tmp_path: Path) -> None:
    """What nobody but the snapshot holds any more is let go of sooner."""
    desk = Desk(tmp_path / "run")
    desk.begin()
    live = list(desk.values)
    seen: list[tuple[int, int]] = []
    write = desk.store.snapshot_writer(
        desk.machine, live, check=lambda index, values: seen.append((index, values.version))
    )
    before = live[1]
    live[1] = replace(before, version=before.version + 1)
    write()
    assert seen == [(1, 0), (0, 0)]
    kept = desk.store.snapshots.load(desk.store.snapshots.numbers()[-1])
    assert all(same_values(mine, theirs) for mine, theirs in zip(kept.fragments, [live[0], before], strict=True))
    desk.close()
