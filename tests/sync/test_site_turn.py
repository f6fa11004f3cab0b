"""One handling of an event at a site."""

from __future__ import annotations

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.options import LearnerOptions
from diloco.sync.progress import FragmentProgress, LearnerState, SiteTurn


def turn() -> SiteTurn:
    return SiteTurn(LearnerOptions(), LearnerState([FragmentProgress()]))


def test_a_version_is_fetched_once() -> None:
    begun = turn()
    begun.state.fragments[0].published = 4
    begun.want(0)
    begun.want(0)
    assert begun.effects == [fx.Fetch(0, -1)]


def test_an_end_is_told_once_and_giving_up_is_a_failure() -> None:
    begun = turn()
    begun.end(ev.Ending.DRAINED, "a pause")
    begun.end(ev.Ending.FINISHED, "done")
    begun.stop("no use")
    assert begun.effects == [
        fx.StopTraining(ev.Ending.DRAINED, "a pause"),
        fx.StopTraining(None, "no use", failed=True),
    ]
    assert begun.state.left
