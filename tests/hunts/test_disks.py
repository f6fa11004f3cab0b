"""Every legal state after a power cut is recovered, and any forgotten sync is found; kills and flipped bits too."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
import torch

from diloco.durable import Step
from diloco.syncer.store import Store
from tests.hunts import flips, powercut
from tests.hunts.cutting import (
    Recording,
    quick_folder,
    record_backup,
    record_in_place,
    record_second,
    record_site,
    record_syncer,
)
from tests.hunts.short_lives import BACKUP, GIVING_BACK, IMAGE, MAKING, SHORT, SITE, ShortLives, draw, named

pytestmark = pytest.mark.slow  # The hunts are tested where they run, in .ci/run.

SYNCER_SYNCS = (
    Step.CARD,
    Step.FOLDER,
    Step.SPOOL_SITE,
    Step.SPOOL_SYNC,
    Step.SPOOL_FOLDER,
    Step.JOURNAL_BEGIN,
    Step.JOURNAL_SYNC,
    Step.SNAPSHOT_FILE,
    Step.SNAPSHOT_FOLDER,
)
SITE_SYNCS = (Step.OUTBOX_FOLDER, Step.OUTBOX_PUT, Step.CHECKPOINT_FILE, Step.CHECKPOINT_FOLDER)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with quick_folder() as found:
        yield found


@pytest.fixture(scope="module")
def recorded(folder: Path) -> dict[str, Recording]:
    (folder / "a").mkdir()
    (folder / "b").mkdir()
    return {"syncer": record_syncer(folder / "a", 1), "site": record_site(folder / "b")}


@pytest.mark.parametrize("who", [pytest.param("syncer", marks=pytest.mark.slow), "site"])
def test_every_prefix_of_a_round_recovers_to_a_legal_state(
    recorded: dict[str, Recording], folder: Path, who: str
) -> None:
    found = list(recorded[who].examined(folder / "state", Random(1)))
    wrong = [(cut, why) for cut, why in found if why]
    assert not wrong, f"{len(wrong)} of {len(found)}: {wrong[0]}"
    assert len(found) > 100


@pytest.mark.parametrize(("who", "step"), [("syncer", s) for s in SYNCER_SYNCS] + [("site", s) for s in SITE_SYNCS])
def test_a_forgotten_sync_is_found(recorded: dict[str, Recording], folder: Path, who: str, step: Step) -> None:
    mutant, first = recorded[who].forgetting(step)
    assert any(why for _, why in mutant.examined(folder / "state", Random(1), first=first)), step


@pytest.mark.hunt
@pytest.mark.parametrize("forgotten", ["", "journal.sync", "spool.sync"])
def test_real_cuts_lose_nothing_unless_a_sync_is_forgotten(forgotten: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = powercut.main(["--cuts", "3", "--rounds", "0", "--forget", forgotten])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    if "not_permitted" in found:
        pytest.skip(found["not_permitted"])
    assert code == (1 if forgotten else 0), found


def test_no_sync_is_left_out_of_the_mutants(recorded: dict[str, Recording]) -> None:
    synced = {operation.step for each in recorded.values() for operation in each.log if hasattr(operation, "node")}
    # Only a standby depends on these two syncs of removed files: the swarm checks them (its seed 925059).
    of_a_standby = {Step.SNAPSHOT_PRUNE, Step.JOURNAL_PRUNE}
    assert synced == {*SYNCER_SYNCS, *SITE_SYNCS, *of_a_standby}


# --- A flipped bit is named or harmless, and a start that recovers another state is a violation ----------------------


def test_every_damage_is_named_or_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    assert flips.main(["--flips", "80", "--seed", "7"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["found"]["named"] > 50
    assert found["found"]["still to be merged"] > 12


def test_a_start_that_goes_on_with_another_state_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flips, "looked_at", lambda folder: "")
    started = flips.started
    monkeypatch.setattr(flips, "started", lambda folder, copy, wanted: (started(folder, copy, wanted)[0], False))
    assert flips.main(["--flips", "5"]) == 1


def test_a_start_that_does_not_look_at_what_it_is_still_to_merge_is_a_violation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Store, "_check_waiting", lambda store, machine: None)
    assert flips.main(["--flips", "40", "--seed", "7"]) == 1
    assert "a start recovers another state" in capsys.readouterr().out


# --- No power cut leaves half of a restore, and a forgotten sync of a restore is found -------------------------------

Record = Callable[[Path], tuple[Recording, int]]
IN_PLACE = (Step.JOURNAL_BEGIN, Step.JOURNAL_SYNC, Step.LINEAGE_CARD, Step.LINEAGE_FOLDER, Step.LINEAGE_IMAGE)
OF_A_BACKUP = (Step.RESTORE_FETCH, Step.RESTORE_MOVE, Step.JOURNAL_BEGIN, Step.JOURNAL_SYNC, Step.LINEAGE_IMAGE)
hunt = pytest.mark.hunt


@pytest.fixture
def restored_folder() -> Iterator[Path]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with quick_folder() as found:
        yield found
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("record", "every"),
    [
        pytest.param(record_in_place, 1, marks=hunt),
        (record_backup, 5),
        pytest.param(record_backup, 1, marks=pytest.mark.slow),
        pytest.param(record_second, 1, marks=hunt),
    ],
)
def test_every_cut_leaves_the_run_before_or_the_restored_one(restored_folder: Path, record: Record, every: int) -> None:
    recording, began = record(restored_folder)
    found = list(recording.examined(restored_folder / "state", Random(1), first=began, every=every))
    wrong = [(cut, why) for cut, why in found if why]
    assert not wrong, f"{len(wrong)} of {len(found)}: {wrong[0]}"
    assert len(found) > 400 // every


@pytest.mark.parametrize(
    ("record", "step"),
    [
        pytest.param(record, step, marks=hunt if step in steps[2:] else pytest.mark.slow)
        for record, steps in ((record_in_place, IN_PLACE), (record_backup, OF_A_BACKUP))
        for step in steps
    ],
)
def test_a_forgotten_sync_of_a_restore_is_found(restored_folder: Path, record: Record, step: Step) -> None:
    recording, began = record(restored_folder)
    mutant, first = recording.forgetting(step, began)
    assert any(why for _, why in mutant.examined(restored_folder / "state", Random(1), first=first)), step


# --- A few kills of restores and backups, and the table of their steps is complete -----------------------------------


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> ShortLives:
    return ShortLives(tmp_path_factory.mktemp("lives"))


@pytest.mark.parametrize("what", sorted(SHORT))
def test_the_table_has_every_step_that_is_passed_and_no_other(lives: ShortLives, what: str) -> None:
    assert {Step(step) for step in lives.passages(what)} == SHORT[what]


@pytest.mark.parametrize(
    ("what", "step", "passage"),
    [
        (IMAGE, Step.LINEAGE_IMAGE, 20),
        (IMAGE, Step.JOURNAL_MARK, 1),
        (IMAGE, Step.LINEAGE_CARD, 5),
        (BACKUP, Step.RESTORE_FETCH, 9),
        (BACKUP, Step.RESTORE_MOVE, 17),
        (BACKUP, Step.RESTORE_END, 2),
        (SITE, Step.RESTORE_BEGIN, 5),
        (SITE, Step.RESTORE_MOVE, 3),
        (MAKING, Step.BACKUP_WHOLE, 2),
        (GIVING_BACK, Step.SPOOL_BACK, 1),
        (GIVING_BACK, Step.SPOOL_BACK, 2),
    ],
)
def test_a_death_leaves_the_run_that_was_there_or_the_restored_one(
    lives: ShortLives, what: str, step: Step, passage: int
) -> None:
    lives.kill(what, step, passage)


def test_what_was_killed_at_least_often_comes_next(lives: ShortLives) -> None:
    killed = Counter({named(what, step): 1 for what, steps in SHORT.items() for step in steps})
    del killed[named(MAKING, Step.BACKUP_FILE)]
    draw(lives, Random(1), killed, 1)
    assert killed[named(MAKING, Step.BACKUP_FILE)] == 1
