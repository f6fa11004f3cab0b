"""A run that begins again: the values that were wanted, a larger lineage, and nothing half done wherever it is cut."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from diloco.durable import Disk, Step
from diloco.outer.optimizer import NOTHING
from diloco.sync.data_units import Columns
from diloco.sync.events import JoinRequested, Reason, UnitsAsked
from diloco.sync.fates import columns_of
from diloco.sync.rounds import Selection
from diloco.sync.state import Line, Part, Upstream
from diloco.syncer.backups import Vault, back_up
from diloco.syncer.replaying import held_of
from diloco.syncer.restoring import (
    Kept,
    KeptError,
    Known,
    Restore,
    RestoreError,
)
from diloco.syncer.snapshots import FragmentValues, Image, same_values
from diloco.syncer.store import StoreError, payloads_in
from tests.syncer.building import RUN, Crash, CrashingDisk, files, update
from tests.syncer.desk import CARD, Desk
from tests.syncer.test_kept import RULES, run, versions
from tests.syncer.test_store import Story

CLOCK_S = 1_800_000_000
KNOWN = Known(CLOCK_S)
LEFT_OPEN = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
"""A process that ends closes nothing."""


def stopped(folder: Path, seed: int = 6) -> Desk:
    """A run that ended with something under way and something waiting."""
    desk = run(folder, seed)
    story = Story(desk, 11)
    while not desk.under_way:
        story.tell()
    desk.close()
    return desk


def backed_up(folder: Path) -> tuple[Desk, Callable[[Path], object]]:
    """A run in the folder ``lost``, and what fetches its backup; the folder ``run`` is empty."""
    desk = stopped(folder / "lost")
    vault = Vault(str(folder / "vault"))
    one, _ = back_up(folder / "lost", vault)
    (folder / "run").mkdir()
    return desk, lambda to: vault.fetch(RUN, one, to)


def image_of(folder: Path, *chosen: Selection) -> Image:
    rebuilt = Kept(folder).replay(RULES, chosen)
    return Image(asdict(CARD), tuple(rebuilt.values), rebuilt.held, {})


def assert_goes_on(folder: Path, wanted: tuple[FragmentValues, ...], expected: list[int]) -> Desk:
    """The folder is a run of a later lineage with ``wanted`` as its present values, and takes updates."""
    desk = Desk(folder)
    assert versions(desk) == expected
    for mine, other in zip(desk.values, wanted, strict=True):
        assert same_values(mine, replace(other, version=mine.version, reference=None))
    assert [fragment.digest for fragment in desk.machine.state.fragments] == [values.digest for values in wanted]
    assert desk.machine.state.lineage >= CLOCK_S
    desk.begin()
    Story(desk, 5)  # The sites join.
    site, before = desk.machine.state.sites["a"], versions(desk)
    for _ in range(30):
        line = site.lines[0]
        if desk.under_way:
            desk.finish(min(desk.under_way))
        elif not line.undecided:
            desk.push(*update("a", line.watermark + 1, 0, incarnation=site.incarnation, base_version=versions(desk)[0]))
    assert versions(desk)[0] > before[0], "no version came of it"
    return desk


def test_an_image_becomes_the_next_version_of_every_fragment(tmp_path: Path) -> None:
    desk = stopped(tmp_path)
    image = image_of(tmp_path, Selection("b", "versions", 1, 3))
    undecided = sum(len(line.undecided) for site in desk.machine.state.sites.values() for line in site.lines)
    restored = Restore(tmp_path, CARD, RULES, "b was poisoned", KNOWN).in_place(image)
    assert (restored.lineage, restored.refused) == (CLOCK_S, undecided)
    assert restored.refused > 0, "nothing was in flight: the dice prove nothing"
    assert restored.versions == tuple(version + 1 for version in versions(desk))
    again = assert_goes_on(tmp_path, image.fragments, list(restored.versions))
    reasons = set()
    for name, site in again.machine.state.sites.items():
        for index, line in enumerate(site.lines):
            reasons |= {fate.reason for fate in line.fates}
            later = sum(fate.tokens for fate in line.fates if fate.version > restored.versions[index] and fate.merged)
            assert line.tokens_merged == image.held[name, index][0] + later
    assert Reason.RESTORED in reasons
    again.close()
    kept = Kept(tmp_path)
    assert kept.points()[0].state.lineage == 1, "the oldest snapshot is of the time before"
    rebuilt = kept.replay(RULES, verify=True)
    assert rebuilt.machine.state.lineage == CLOCK_S, "a replay goes across the beginning of a lineage"
    assert all(same_values(one, other) for one, other in zip(rebuilt.values, again.values, strict=True))
    assert rebuilt.held == held_of(again.machine.state)
    with pytest.raises(KeptError, match=f"lineage {CLOCK_S} began after the left-out updates"):
        kept.replay(RULES, [Selection("a", "versions", kept.points()[0].state.fragments[0].version + 1, 10**6)])
    again = Desk(tmp_path)
    assert again.store.lineages.numbers() == [CLOCK_S], "a snapshot is older"
    again.snapshot()
    assert again.store.lineages.numbers() == []
    again.close()


def test_a_run_whose_waiting_payloads_are_damaged_gets_out_by_a_replay_and_a_restore(tmp_path: Path) -> None:
    """As the refusal of the start says: what waits is refused, and what is merged is gone on with."""
    desk = stopped(tmp_path)
    waiting = payloads_in(desk.machine.snapshot())
    for payload in waiting:
        (tmp_path / "spool" / payload).write_bytes(b"other")
    with pytest.raises(StoreError, match=r"diloco replay RUN --out IMAGE.*diloco restore RUN --from IMAGE"):
        Desk(tmp_path)
    restored = Restore(tmp_path, CARD, RULES, "a payload was damaged", KNOWN).in_place(image_of(tmp_path))
    assert restored.refused == len(waiting) > 0
    assert_goes_on(tmp_path, tuple(desk.values), list(restored.versions)).close()


@LEFT_OPEN
def test_a_backup_becomes_a_run_again_or_the_folder_is_refused(tmp_path: Path) -> None:
    """With a crash at every 17th operation of the disk."""
    desk, fetch = backed_up(tmp_path)
    folder, wanted = tmp_path / "run", [version + 1 for version in versions(desk)]
    refused, number, done = 0, 1, False

    def restore(disk: Disk) -> None:
        Restore(folder, CARD, RULES, "lost", KNOWN, disk).backup(fetch)

    while not done:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            restore(CrashingDisk(number))
            done = True
        except Crash:
            number += 17
        try:
            again = Desk(folder) if any(folder.iterdir()) else None
        except StoreError as error:
            refused += "restore it again" in str(error)
            again = None
        if again is None:
            assert not done
            restore(Disk())
            again = Desk(folder)
        assert versions(again) == wanted
        assert again.machine.state.lineage == CLOCK_S
        again.close()
    assert number > 60
    assert refused > 2
    assert_goes_on(folder, tuple(desk.values), wanted).close()


def test_values_of_a_site_become_a_run_that_leases_no_unit_again_that_the_site_knows_of(tmp_path: Path) -> None:
    values = tuple(
        FragmentValues(each.version, each.published, each.published.clone(), NOTHING, each.digest)
        for each in stopped(tmp_path / "lost").values
    )
    lines = {"a": [Line(watermark=9, tokens_merged=300, updates_merged=3), Line(watermark=8)]}
    rules = replace(RULES, outer=replace(RULES.outer, unit_sequences=8))
    known = Known(CLOCK_S, lineage=CLOCK_S + 5, epoch=41)
    for above, upstream in (("region-a", Upstream([Part(), Part()], "region-a")), ("", None)):
        folder = tmp_path / f"run {above}"
        folder.mkdir()
        restored = Restore(folder, CARD, rules, "from site a", known).values(values, lines, 70, above)
        machine = Kept(folder).replay(rules).machine
        assert machine.state.upstream == upstream, "a region is the site that it was"
    assert restored.lineage == CLOCK_S + 6, "above what is known, whatever the clock says"
    assert restored.versions == tuple(each.version + 1 for each in values)
    assert machine.state.epoch == 41
    line = machine.state.sites["a"].lines[0]
    assert (line.watermark, line.tokens_merged) == (9, 300)
    assert columns_of(machine) == Columns(70, 0, 70, 0, 0, 0, 0), "what was merged is not known"
    machine.handle(JoinRequested(1, "a", "p", ticket=None), machine.state.now_ns)
    (told,) = machine.handle(UnitsAsked(2, "a", machine.state.sites["a"].incarnation, 0, 0, 3, 0, 0), 0)
    assert told.pieces == ((70, 3),)
    assert_goes_on(folder, values, list(restored.versions)).close()


@LEFT_OPEN
def test_what_cannot_be_restored_is_refused_and_the_run_stays_as_it_is(tmp_path: Path) -> None:
    desk, fetch = backed_up(tmp_path)
    image, lost = image_of(tmp_path / "lost"), tmp_path / "lost"
    before = files(lost)
    with pytest.raises(RestoreError, match=r"is not empty .* move it away first"):
        Restore(lost, CARD, RULES, "lost", KNOWN).backup(fetch)
    other = replace(image, card={**image.card, "run_id": "other"})
    with pytest.raises(RestoreError, match="of another run: its run_id is 'other', and here it is 'small'"):
        Restore(lost, CARD, RULES, "why", KNOWN).in_place(other)
    with pytest.raises(RestoreError, match="holds no run"):
        Restore(tmp_path / "none", CARD, RULES, "why", KNOWN).in_place(image)
    assert files(lost) == before
    with pytest.raises(Crash):
        Restore(tmp_path / "run", CARD, RULES, "lost", KNOWN, CrashingDisk(1, Step.RESTORE_END)).backup(fetch)
    with pytest.raises(RestoreError, match="is restored, and only the clean-up after it was interrupted: start"):
        Restore(tmp_path / "run", CARD, RULES, "lost", KNOWN).backup(fetch)
    again = Desk(tmp_path / "run")
    assert versions(again) == [version + 1 for version in versions(desk)]
    again.close()
