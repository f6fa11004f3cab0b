"""Exactly one fate for every accepted update."""

from __future__ import annotations

import pytest

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.events import Reason
from diloco.sync.state import Phase
from tests.sync.driving import only, running, through_json


def test_restart_with_a_smaller_staleness_bound_judges_again() -> None:
    syncer = running("a", "b", quorum=2, staleness_max=4)
    for version in range(2):
        syncer.push("a", version + 1, base_version=version)
        syncer.push("b", version + 1, base_version=version)
        syncer.done()
    syncer.push("a", 3, base_version=0)
    assert only(fx.TellFate, syncer.restart(staleness_max=1)).fate.reason is Reason.STALE
    assert through_json(syncer.machine.snapshot()) == syncer.machine.snapshot()
    assert syncer.machine.state.phase is Phase.RUNNING


def test_fates_are_counted_by_reason_and_the_newest_are_kept() -> None:
    syncer = running("a", staleness_max=0, updates_in_flight_max=1, fates_kept_max=2)
    for number in range(1, 4):
        syncer.push("a", number, base_version=number - 1)
        syncer.done()
    line = syncer.machine.state.sites["a"].lines[0]
    assert [fate.sequence for fate in line.fates] == [2, 3]
    assert (line.updates_merged, line.tokens_merged, line.updates_refused) == (3, 300, {})


@pytest.mark.parametrize(("event", "discarded"), [(ev.OuterStepFailed(0, 1), 100), (None, 0)])
def test_tokens_count_as_discarded_only_where_the_site_throws_its_progress_away(
    event: ev.OuterEvent | None, discarded: int
) -> None:
    syncer = running("a", staleness_max=0)
    syncer.push("a", final=True)
    if event is None:
        syncer.push("a", 2, final=True)  # Stale as soon as the version is there.
        syncer.done()
    else:
        syncer.handle(event)
    line = syncer.machine.state.sites["a"].lines[0]
    assert sum(line.updates_refused.values()) == 1
    assert line.tokens_discarded == discarded
    assert line.final == (event is not None), "a site that keeps its progress sends it once more"
