"""Every legal state after a power cut is recovered, and any forgotten sync is found; kills and flipped bits too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

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
    record_site,
    record_syncer,
)
from tests.hunts.short_lives import BACKUP, GIVING_BACK, IMAGE, MAKING, SHORT, SITE, ShortLives, draw, named
from tests.power import Synced

pytestmark = pytest.mark.slow  # The hunts are tested where they run, in .ci/run.

Record = Callable[[Path], Recording]
hunt = pytest.mark.hunt


def record_round(root: Path) -> Recording:
    return record_syncer(root, 1)


OF_A_STANDBY = {Step.SNAPSHOT_PRUNE, Step.JOURNAL_PRUNE}
"""Only a standby depends on these two syncs of removed files: the swarm checks them (its seed 925059)."""
IN_PLACE = (Step.JOURNAL_BEGIN, Step.JOURNAL_SYNC, Step.LINEAGE_CARD, Step.LINEAGE_FOLDER, Step.LINEAGE_IMAGE)
OF_A_BACKUP = (Step.RESTORE_MOVE, Step.RESTORE_FETCH, Step.JOURNAL_BEGIN, Step.JOURNAL_SYNC, Step.LINEAGE_IMAGE)


@pytest.fixture
def folder() -> Iterator[Path]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with quick_folder() as found:
        yield found
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("record", "every", "states"),
    [
        (record_round, 4, 400),
        (record_site, 1, 100),
        (record_backup, 1, 400),
        pytest.param(record_round, 1, 2000, marks=hunt),
        pytest.param(record_in_place, 1, 400, marks=hunt),
        pytest.param(partial(record_backup, passage=5), 1, 400, marks=hunt),
    ],
)
def test_every_cut_leaves_a_legal_state(folder: Path, record: Record, every: int, states: int) -> None:
    """Everything acknowledged is there; of a restore, the run before it or the restored one is left."""
    found = list(record(folder).examined(folder / "state", Random(1), every=every))
    wrong = [(cut, why) for cut, why in found if why]
    assert not wrong, f"{len(wrong)} of {len(found)}: {wrong[0]}"
    assert len(found) > states


def is_found(folder: Path, recording: Recording, step: Step) -> bool:
    return any(why for _, why in recording.forgetting(step).examined(folder / "state", Random(1)))


@pytest.mark.parametrize(("record", "steps"), [(record_round, 9), (record_site, 4)])
def test_every_forgotten_sync_is_found(folder: Path, record: Record, steps: int) -> None:
    recording = record(folder)
    synced = {operation.step for operation in recording.log if isinstance(operation, Synced)} - OF_A_STANDBY
    assert len(synced) == steps, synced
    assert [step for step in synced if not is_found(folder, recording, step)] == []


@pytest.mark.parametrize(
    ("record", "step"),
    [
        (record_in_place, IN_PLACE[0]),
        (record_backup, OF_A_BACKUP[0]),
        *(pytest.param(record_in_place, step, marks=hunt) for step in IN_PLACE[1:]),
        *(pytest.param(record_backup, step, marks=hunt) for step in OF_A_BACKUP[1:]),
    ],
)
def test_a_forgotten_sync_of_a_restore_is_found(folder: Path, record: Record, step: Step) -> None:
    assert is_found(folder, record(folder), step)


@pytest.mark.hunt
@pytest.mark.parametrize("forgotten", ["", "journal.sync", "spool.sync"])
def test_real_cuts_lose_nothing_unless_a_sync_is_forgotten(forgotten: str, hunted: Callable[..., Any]) -> None:
    found, _ = hunted(powercut, "--cuts", "3", "--rounds", "0", "--forget", forgotten)
    if "not_permitted" in found:
        pytest.skip(found["not_permitted"])
    assert (found["violations"] > 0) == bool(forgotten), found


# --- A flipped bit is named or harmless, and a start that recovers another state is a violation ----------------------


def test_every_damage_is_named_or_harmless(hunted: Callable[..., Any]) -> None:
    found, _ = hunted(flips, "--flips", "80", "--seed", "7")
    assert found["violations"] == 0
    assert found["found"]["named"] > 50
    assert found["found"]["still to be merged"] > 12


def test_a_start_that_does_not_look_at_what_it_is_still_to_merge_is_a_violation(
    monkeypatch: pytest.MonkeyPatch, hunted: Callable[..., Any]
) -> None:
    monkeypatch.setattr(Store, "_check_waiting", lambda store, machine: None)
    _, said = hunted(flips, "--flips", "40", "--seed", "7")
    assert "a start recovers another state" in said


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
