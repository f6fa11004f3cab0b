"""A standby whose disk is full: it says so, acknowledges nothing, ends nothing, and goes on when there is room."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from diloco.durable import Disk, Step
from diloco.syncer.store import verify
from tests.loopback.cluster import Log, SiteThread, eventually, serving
from tests.sooner import sooner
from tests.syncer.test_standby import BOUND_S, STEP_S, a_toy


class FullAt(Disk):
    """Has no room for what ``step`` writes while it is ``full``."""

    def __init__(self, step: Step) -> None:
        self.step, self.full, self.met = step, False, 0

    def _check(self, step: Step) -> None:
        if self.full and step is self.step:
            self.met += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(self, file: BinaryIO, data: bytes | memoryview, step: Step) -> None:
        self._check(step)
        super().write(file, data, step)

    def make(self, path: Path, write: Callable[[Path], object], step: Step) -> None:
        self._check(step)
        super().make(path, write, step)


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.syncer.standby.LOOK_EVERY_S", 0.05)


@pytest.mark.parametrize(
    "step",
    sooner([Step.STANDBY_FILE, Step.JOURNAL_WRITE, Step.JOURNAL_MARK, Step.JOURNAL_BEGIN], Step.JOURNAL_WRITE),
)
def test_a_full_disk_stops_acknowledgements_and_heals(tmp_path: Path, step: Step) -> None:
    toy, log, disk = a_toy(tmp_path), Log(), FullAt(step)
    toy.replication["timeout_s"] = 0.5
    with serving(toy) as (_, address, said), SiteThread(toy, "a", address, step_s=STEP_S) as site:
        standby = toy.standby("standby", address, log.emit, disk)
        standby.start()
        try:
            site.log.wait_for("pushed", 3, BOUND_S)
            disk.full = True
            (note,) = log.wait_for("note", 1, BOUND_S, where=lambda note: note["note"] == "disk_full")
            assert "disk full: No space left on device; the standby does not follow" in str(note["why"])
            before = len(said.events)
            said.wait_for("note", 1, BOUND_S, before, lambda note: note["note"] == "held")
            pushed, steps = len(site.log.of("pushed")), site.toy_site.trained
            eventually(lambda: site.toy_site.trained > steps + 20, BOUND_S, "the site trains on")
            assert len(site.log.of("pushed")) <= pushed + 2
            disk.full = False
            site.log.wait_for("pushed", pushed + 6, BOUND_S)
            assert standby.failed is None
            assert not list((tmp_path / "standby" / "spool").glob("*/.*.tmp"))
            site.toy_site.halt.set()
            acknowledged = {(int(str(e["fragment"])), int(str(e["sequence"]))) for e in site.log.of("pushed")}
        finally:
            warm = standby.promote()
        with warm.taken:
            lines = warm.machine.state.sites["a"].lines
            assert all(lines[fragment].watermark >= sequence for fragment, sequence in acknowledged)
    verify(tmp_path / "standby")


@pytest.mark.slow
def test_a_snapshot_that_finds_no_room_is_put_off_and_the_standby_follows_on(tmp_path: Path) -> None:
    toy, log, disk = a_toy(tmp_path), Log(), FullAt(Step.SNAPSHOT_FILE)
    with serving(toy) as (_, address, _said), SiteThread(toy, "a", address, step_s=STEP_S) as site:
        standby = toy.standby("standby", address, log.emit, disk)
        standby.start()
        try:
            site.log.wait_for("pushed", 3, BOUND_S)
            disk.full = True
            (note,) = log.wait_for("note", 1, BOUND_S, where=lambda note: note["note"] == "snapshot_put_off")
            assert "disk full" in str(note["why"])
            site.log.wait_for("pushed", len(site.log.of("pushed")) + 4, BOUND_S)
            snapshots, disk.full = len(log.of("snapshot")), False
            log.wait_for("snapshot", snapshots + 1, BOUND_S)
            assert standby.failed is None
        finally:
            standby.close()
    verify(tmp_path / "standby")


def test_one_that_begins_on_a_full_disk_begins_when_there_is_room(tmp_path: Path) -> None:
    toy, log, disk = a_toy(tmp_path), Log(), FullAt(Step.STANDBY_FILE)
    disk.full = True
    with serving(toy) as (_, address, _said):
        standby = toy.standby("standby", address, log.emit, disk)
        standby.start()
        try:
            eventually(lambda: disk.met > 2, BOUND_S, "it tries again and again")
            assert "disk full" in str(standby.status()["trouble"]) or standby.connected
            assert not standby.ready
            disk.full = False
            eventually(lambda: standby.ready, BOUND_S, "it has a state")
        finally:
            standby.close()
