"""Every legal state that a power cut may leave is recovered from, and a forgotten sync of any kind is found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch

from diloco.durable import Step
from tests.hunts.cutting import Recording, quick_folder, record_site, record_syncer
from tests.hunts.powercut import main

pytestmark = pytest.mark.slow  # What a hunt is worth is tried where the hunts run, in .ci/run.

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
    code = main(["--cuts", "3", "--rounds", "0", "--forget", forgotten])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    if "not_permitted" in found:
        pytest.skip(found["not_permitted"])
    assert code == (1 if forgotten else 0), found


def test_no_sync_is_left_out_of_the_mutants(recorded: dict[str, Recording]) -> None:
    synced = {operation.step for each in recorded.values() for operation in each.log if hasattr(operation, "node")}
    # What these two keep from coming back is wanted by a standby alone: the swarm watches them (its seed 925059).
    of_a_standby = {Step.SNAPSHOT_PRUNE, Step.JOURNAL_PRUNE}
    assert synced == {*SYNCER_SYNCS, *SITE_SYNCS, *of_a_standby}
