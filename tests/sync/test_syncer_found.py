"""Stories that the swarm simulator found broken at the syncer, each as short as it could be made."""

from __future__ import annotations

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.options import SECOND_NS
from tests.sync.driving import Syncer, only


def test_grace_of_the_last_round_runs_while_a_merge_is_under_way_and_all_windows_are_full() -> None:
    syncer = Syncer(quorum=1, grace="fixed", grace_ns=SECOND_NS, updates_in_flight_max=1)
    syncer.join("a")
    syncer.join("b")
    syncer.push("a")
    only(fx.StartOuterStep, syncer.deadline(at_s=1.0))
    syncer.handle(ev.DrainRequested(2), at_s=1.1)
    syncer.push("b", at_s=1.1)
    step = only(fx.StartOuterStep, syncer.done(at_s=2.5))
    assert [part.site for part in step.contributions] == ["b"], "the grace was over at 2.1 s"
