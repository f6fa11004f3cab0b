"""The end of a region: its last round, what goes up after that, and what is left when it goes on."""

from __future__ import annotations

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.events import UpstreamFetched
from diloco.sync.state import Phase
from tests.sync.driving import of
from tests.sync.test_schedule import based
from tests.sync.two_levels import Level, Region, number


def test_the_end_above_is_the_last_round_here_and_then_the_rest_goes_up() -> None:
    above, region = based(updates=10)
    region.push("s", 1, 8.0, tokens=10)
    region.step()
    above.handle(ev.DrainRequested(1))
    region.hear()
    assert of(fx.AnnounceFinal, region.told)
    region.push("s", 2, 4.0, tokens=10, final=True)
    region.step()
    assert of(fx.MarkFinal, region.told)
    ((seal, value),) = region.sealing
    assert (seal.final, seal.tokens, value.item()) == (True, 20, 12.0)
    region.settle()
    above.handle(ev.SiteLeft(1, "x", 1))
    assert above.theta.item() == 88.0
    assert region.theta.item() == 88.0
    assert region.ledger()["merged"] == 20
    assert above.syncer.machine.state.sites["region-a"].status.value == "left"
    assert of(fx.MarkFinal, above.told)


def test_a_region_that_is_drained_leaves_the_run_above_and_comes_back() -> None:
    above, region = based(updates=10)
    region.push("s", 1, 8.0, tokens=10)
    region.step()
    region.handle(ev.DrainRequested(1))
    region.handle(ev.SiteLeft(1, "s", 1))
    region.settle()
    assert above.theta.item() == 92.0
    assert not of(fx.MarkFinal, above.told)
    region.restart()
    region.settle()
    region.handle(ev.JoinRequested(1, "s", "p2"))
    region.push("s", 2, 4.0, incarnation=2, tokens=10)
    region.settle()
    assert region.ledger()["unsent"] == 10
    assert region.theta.item() == 88.0


def test_an_end_with_an_answer_on_its_way_gives_nothing_up() -> None:
    above, region = based()
    for sequence in (1, 2):
        region.push("s", sequence, 4.0, tokens=10)
        region.step()
    region.seal()
    region.do()
    above.step()
    region.push("s", 3, 2.0, tokens=10)
    region.step()
    region.handle(ev.FinalAnnounced(ev.Ending.FINISHED))
    region.handle(ev.SiteLeft(1, "s", 1))
    region.settle()
    assert above.theta.item() == 90.0
    assert region.ledger()["merged"] == 30


def test_what_comes_in_the_last_round_is_not_taken() -> None:
    above, region = based()
    for sequence in (1, 2, 3):
        region.push("s", sequence, 4.0, tokens=10)
        region.step()
    region.seal()
    region.do()
    region.handle(ev.FinalAnnounced(ev.Ending.FINISHED))
    above.step()
    region.hear()
    region.do()
    assert region.learner.fetched == 1, "it is here"
    region.handle(ev.SiteLeft(1, "s", 1))
    region.settle()
    assert above.theta.item() == region.theta.item() == 88.0
    assert region.ledger()["merged"] == 30
    region.fetch()
    assert region.spool.keys() == {"above 1"}, "a late one is let go of"


def test_a_join_into_the_last_round_above_begins_the_one_here() -> None:
    above, region = based(updates=10)
    region.push("s", 1, 8.0, tokens=10)
    region.step()
    above.handle(ev.DrainRequested(1))
    region.restart()
    assert of(fx.AnnounceFinal, region.told)
    assert not region.sealing, "s is still to send its last"
    region.push("s", 2, 4.0, tokens=10, final=True)
    region.settle()
    assert [seal.tokens for seal in region.sent] == [20]
    assert above.theta.item() == 88.0


def test_what_is_worth_nothing_does_not_go_up_at_the_end() -> None:
    above, region = based()
    for sequence in (1, 2, 3):
        region.push("s", sequence, 4.0, tokens=10)
        region.step()
    region.seal()
    region.orders.clear()
    region.push("s", 4, 4.0, tokens=10)
    region.handle(ev.FinalAnnounced(ev.Ending.FINISHED))
    region.handle(ev.PushAnswered(0, 1, ev.Outcome.REFUSED, ev.Reason.OUTLIER))
    region.handle(ev.SiteLeft(1, "s", 1))
    region.settle()
    assert above.theta.item() == 100.0
    ledger = region.ledger()
    assert (ledger["refused"], ledger["overwritten"], ledger["unsent"]) == (20, 20, 0)
    assert above.syncer.machine.state.sites["region-a"].status.value == "left"


def test_what_was_refused_in_the_last_round_does_not_go_up_when_the_region_goes_on() -> None:
    above, region = based()
    for sequence in (1, 2, 3):
        region.push("s", sequence, 4.0, tokens=10)
        region.step()
    region.seal()
    region.orders.clear()
    region.handle(ev.DrainRequested(1))
    region.handle(ev.SiteLeft(1, "s", 1))
    region.handle(ev.PushAnswered(0, 1, ev.Outcome.REFUSED, ev.Reason.OUTLIER))
    region.settle()
    assert above.syncer.machine.state.sites["region-a"].status.value == "left"
    region.restart()
    region.handle(ev.JoinRequested(1, "s", "p2"))
    region.settle()
    assert region.theta.item() == above.theta.item() == 100.0
    region.push("s", 4, 1.0, incarnation=2)
    region.settle()
    assert above.theta.item() == 99.0


def test_what_a_last_round_merges_without_a_base_is_in_the_ledger() -> None:
    above = Level()
    above.theta = number(100.0)
    region = Region(above, "region-a")
    region.handle(ev.JoinRequested(1, "s", "p"))
    region.push("s", 1, 8.0, tokens=10)
    region.handle(ev.DrainRequested(1))
    region.handle(ev.SiteLeft(1, "s", 1))
    region.step()
    assert of(fx.MarkFinal, region.told)
    region.restart()
    region.settle()
    assert region.theta.item() == 100.0
    ledger = region.ledger()
    assert (ledger["processed"], ledger["overwritten"]) == (10, 10)


def finished() -> tuple[Level, Region]:
    """A region that has heard that the run above is over, and has said goodbye."""
    above, region = based(updates=10)
    region.push("s", 1, 8.0, tokens=10)
    region.step()
    region.handle(ev.FinalAnnounced(ev.Ending.FINISHED))
    region.handle(ev.SiteLeft(1, "s", 1))
    region.settle()
    assert region.syncer.machine.state.phase is Phase.ENDED
    assert above.syncer.machine.state.sites["region-a"].status.value == "left"
    return above, region


def test_a_region_that_has_finished_goes_on_where_the_run_above_does() -> None:
    above, region = finished()
    above.handle(ev.LineageBegan(7, ("restored",), "a test"))
    above.theta = number(50.0)
    region.restart(had_finished=True)
    while region.orders:  # The numbers of this level know one lineage only.
        assert region.orders.popleft() == fx.Fetch(0, -1)
    region.spool["restored"] = above.theta
    region.handle(UpstreamFetched(0, above.version, "restored", "p", 7, above.syncer.machine.state.epoch))
    region.step()
    assert region.theta.item() == 50.0
    region.handle(ev.JoinRequested(1, "s", "p2"))
    region.push("s", 2, 4.0, incarnation=2, tokens=10)
    region.step()
    assert region.theta.item() == 46.0
    assert region.ledger()["unsent"] == 10
    assert region.syncer.machine.state.phase is Phase.RUNNING


def test_a_region_that_has_finished_stays_so_where_the_run_above_is_over() -> None:
    _, region = finished()
    region.told.clear()
    region.restart(had_finished=True)
    assert not of(fx.MarkFinal, region.told)
    region.handle(ev.FinalAnnounced(ev.Ending.FINISHED))
    region.settle()
    assert of(fx.MarkFinal, region.told) == [fx.MarkFinal(ev.Ending.FINISHED, (2,))]
    assert region.ledger()["merged"] == 10
