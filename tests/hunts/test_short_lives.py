"""A few deaths of restores and backups, and the table of their steps is that of what they do."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from diloco.durable import Step
from tests.hunts.short_lives import BACKUP, GIVING_BACK, IMAGE, MAKING, SHORT, SITE, ShortLives, draw, named

pytestmark = pytest.mark.slow  # Each death is a process, and each look after it a syncer.


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
