"""What a power cut may leave of a restore: every operation of its disk written down, and every state looked at."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from pathlib import Path

from diloco.durable import Step
from diloco.sync.events import JoinRequested
from diloco.sync.journal import JournalError
from diloco.syncer.backups import Vault, back_up
from diloco.syncer.restoring import Kept, KeptError, Known, RestoreError, restore_backup, restore_in_place
from diloco.syncer.snapshots import Image
from diloco.syncer.spool import SpoolError
from diloco.syncer.store import StoreError
from tests.hunts.cutting import GOES_ON_EVERY, Recording
from tests.power import QuietDisk, RecordingDisk
from tests.syncer.building import RUN, update
from tests.syncer.desk import CARD, Desk
from tests.syncer.test_kept import RULES

CLOCK_S = 1_800_000_000
VERSIONS = [4, 4]


def a_run(folder: Path, disk: QuietDisk) -> Desk:
    """Some versions of either fragment, and a snapshot between them."""
    desk = Desk(folder, disk=disk)
    desk.begin()
    for site in "ab":
        desk.handle(JoinRequested(1, site, "0123abcd"))
    for number in (1, 2):
        for fragment in (0, 1):
            for site in "ab":
                desk.push(*update(site, number, fragment, encoding="int8", base_version=number - 1, tokens=10 + number))
            while fragment in desk.under_way:
                desk.finish(fragment)
        if number == 1:
            desk.snapshot()
    desk.close()
    return desk


def record_in_place(root: Path) -> tuple[Recording, int]:
    """A run that takes itself up from an image; where the restore begins."""
    disk = RecordingDisk(root)
    desk = a_run(root / "syncer", disk)
    began = len(disk.log)
    disk.tell(0)
    image = Image(dict(asdict(CARD)), tuple(desk.values), {})
    restore_in_place(root / "syncer", CARD, RULES, image, "a test", Known(CLOCK_S), disk)
    disk.tell(1)

    def check(folder: Path, told: int) -> str:
        found = stands(folder / "syncer")
        if isinstance(found, str):
            return f"no start: {found}"
        return wrong(found, told)

    return Recording(list(disk.log), disk.folders, check), began


class MortalDisk(RecordingDisk):
    """Ends a restore for once, in the middle of moving what it has made into its place."""

    def __init__(self, root: Path, passage: int) -> None:
        super().__init__(root)
        self._left = passage or -1

    def reached(self, step: Step) -> None:
        self._left -= step is Step.RESTORE_MOVE
        if self._left == 0:
            self._left = -1
            raise InterruptedError(step.value)


def record_second(root: Path) -> tuple[Recording, int]:
    """A backup that is restored where a restore was cut short; where the second one begins."""
    return record_backup(root, passage=5)


def record_backup(root: Path, passage: int = 0) -> tuple[Recording, int]:
    """A backup that is restored into an empty folder; after a death at that ``passage``, if it is one."""
    a_run(root / "lost", QuietDisk())
    vault, here = Vault(str(root / "vault")), root / "here"
    back_up(root / "lost", vault)
    here.mkdir()
    disk = MortalDisk(here, passage)
    disk.make_folder(here / "syncer", Step.FOLDER)
    disk.sync_folder(here, Step.FOLDER)
    disk.tell(0)
    if passage:
        with contextlib.suppress(InterruptedError):
            restored(here / "syncer", vault, disk)
    began = len(disk.log)
    restored(here / "syncer", vault, disk)
    disk.tell(1)
    number = 0

    def check(folder: Path, told: int) -> str:
        nonlocal number
        number += 1
        found = stands(folder / "syncer") if any((folder / "syncer").iterdir()) else "it is empty"
        if not isinstance(found, str):
            return wrong(found, told)
        if told > 0:
            return f"it was restored, and is not there: {found}"
        if found != "it is empty" and "restore it again" not in found:
            return f"no start: {found}"
        if number % GOES_ON_EVERY:
            return ""
        try:
            restored(folder / "syncer", vault, QuietDisk())
        except RestoreError as error:
            return f"it cannot be restored again: {error}"
        again = stands(folder / "syncer")
        return again if isinstance(again, str) else wrong(again, 1)

    return Recording(list(disk.log), disk.folders, check), began


def restored(folder: Path, vault: Vault, disk: QuietDisk) -> None:
    """What ``diloco restore`` does with a backup."""
    fetch = lambda to: vault.fetch(RUN, vault.names(RUN)[-1], to, disk)  # noqa: E731
    restore_backup(folder, CARD, RULES, fetch, "a test", Known(CLOCK_S), disk)


def stands(folder: Path) -> tuple[int, list[int]] | str:
    """The lineage and the versions that a syncer goes on with, all of the past replayed; why it does not."""
    try:
        desk = Desk(folder, disk=QuietDisk())
    except StoreError as error:
        return str(error)
    state = desk.machine.state
    desk.close()
    try:
        again = Kept(folder).replay(RULES, verify=True).machine.state
    except (KeptError, JournalError, SpoolError) as error:
        return f"its past does not replay: {error}"
    if again.lineage != state.lineage:
        return f"lineage {state.lineage} replays to lineage {again.lineage}"
    return state.lineage, [fragment.version for fragment in state.fragments]


def wrong(found: tuple[int, list[int]], told: int) -> str:
    """What is wrong with a run that stands like that: it is the one before, or the restored one."""
    if found == (CLOCK_S, [version + 1 for version in VERSIONS]):
        return ""
    return "" if found == (1, VERSIONS) and told < 1 else f"it goes on with {found}"
