"""No power cut leaves half of a restore, and a restore that forgot a sync would be found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
import torch

from diloco.durable import Step
from tests.hunts.cutting import Recording, quick_folder
from tests.hunts.cutting_restores import record_backup, record_in_place, record_second

pytestmark = pytest.mark.slow  # What a hunt is worth is tried where the hunts run, in .ci/run.

Record = Callable[[Path], tuple[Recording, int]]
IN_PLACE = (Step.JOURNAL_BEGIN, Step.JOURNAL_SYNC, Step.LINEAGE_CARD, Step.LINEAGE_FOLDER, Step.LINEAGE_IMAGE)
BACKUP = (Step.RESTORE_FETCH, Step.RESTORE_MOVE, Step.JOURNAL_BEGIN, Step.JOURNAL_SYNC, Step.LINEAGE_IMAGE)
hunt = pytest.mark.hunt


@pytest.fixture
def folder() -> Iterator[Path]:
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
def test_every_cut_leaves_the_run_before_or_the_restored_one(folder: Path, record: Record, every: int) -> None:
    recording, began = record(folder)
    found = list(recording.examined(folder / "state", Random(1), first=began, every=every))
    wrong = [(cut, why) for cut, why in found if why]
    assert not wrong, f"{len(wrong)} of {len(found)}: {wrong[0]}"
    assert len(found) > 400 // every


@pytest.mark.parametrize(
    ("record", "step"),
    [
        pytest.param(record, step, marks=hunt if step in steps[2:] else pytest.mark.slow)
        for record, steps in ((record_in_place, IN_PLACE), (record_backup, BACKUP))
        for step in steps
    ],
)
def test_a_forgotten_sync_is_found(folder: Path, record: Record, step: Step) -> None:
    recording, began = record(folder)
    mutant, first = recording.forgetting(step, began)
    assert any(why for _, why in mutant.examined(folder / "state", Random(1), first=first)), step
