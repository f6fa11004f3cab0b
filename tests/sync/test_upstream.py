"""A region towards the syncer above: what goes up, what comes back, and what a crash in between costs."""

from __future__ import annotations

import pytest

from diloco.outer.optimizer import OuterOptimizerOptions
from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.syncer import OuterSync
from tests.sync.driving import of, through_json
from tests.sync.two_levels import Level, Region, number


def based(updates: int = 2, **options: object) -> tuple[Level, Region]:
    """A run above with a plain site x, and a region with a site s, which holds the version above."""
    above = Level()
    above.theta = number(100.0)
    above.handle(ev.JoinRequested(1, "x", "p"))
    region = Region(above, "region-a", updates, **options)  # type: ignore[arg-type]
    region.handle(ev.JoinRequested(1, "s", "p"))
    region.join()
    region.settle()
    assert region.theta.item() == 100.0
    return above, region


def test_a_new_region_takes_the_version_above_whole_before_a_round_of_it_closes() -> None:
    above = Level()
    above.theta = number(100.0)
    region = Region(above, "region-a")
    region.handle(ev.JoinRequested(1, "s", "p"))
    region.push("s", 1, 8.0)
    assert not region.commands, "a round closed without a base"
    region.join()
    region.settle()
    assert region.theta.item() == 92.0
    assert region.version == 2
    assert region.ledger() == {
        "processed": 100, "merged": 0, "refused": 0, "in_flight": 0, "unsent": 100, "overwritten": 0, "lost": 0
    }  # fmt: skip


def test_two_levels_by_hand() -> None:
    above, region = based()
    region.push("s", 1, 8.0, tokens=100, steps=10)
    region.step()
    assert not region.sealing, "one of two updates is merged"
    region.push("s", 2, 4.0, tokens=60, steps=5)
    region.step()
    assert region.theta.item() == 88.0
    ((seal, value),) = region.sealing
    assert value.item() == 12.0
    assert (seal.tokens, seal.steps, seal.base_version) == (160, 15, 0)
    region.seal()
    region.do()
    assert region.ledger()["in_flight"] == 160
    above.step()
    assert above.theta.item() == 88.0
    above.push("x", 1, 48.0)
    above.step()
    region.push("s", 3, 16.0, tokens=40)  # Merged while the answer is on its way.
    region.step()
    region.settle()
    assert above.theta.item() == 40.0
    assert region.theta.item() == 0.75 * 72 + 0.25 * 40
    assert region.ledger() == {
        "processed": 200, "merged": 160, "refused": 0, "in_flight": 0, "unsent": 0, "overwritten": 40, "lost": 0
    }  # fmt: skip
    assert region.syncer.machine.progress_ppm() == 250_000
    region.push("s", 4, 1.0)  # The fourth of the fragment: due again.
    region.step()
    ((seal, value),) = region.sealing
    assert (value.item(), seal.base_version) == (1.0, 2)


def test_19_from_the_blend_so_many_updates_count_and_none_goes_up_while_one_is_under_way() -> None:
    """HALoS' code with K 2 and a 1/4: of seven updates of 1, the first two go up, then the last two."""
    above, region = based(from_blend=True)

    def merge(sequence: int) -> int:
        region.push("s", sequence, 1.0)
        region.step()
        return len(region.sent) + len(region.sealing)

    assert [merge(1), merge(2)] == [0, 1]
    region.seal()
    region.do()
    assert [merge(3), merge(4), merge(5)] == [1, 1, 1]
    region.settle()
    assert above.theta.item() == 98.0
    assert region.theta.item() == 0.75 * 95 + 0.25 * 98
    assert merge(6) == 1
    region.restart()
    region.settle()
    assert merge(7) == 2
    ((seal, value),) = region.sealing
    assert (value.item(), seal.tokens, seal.base_version) == (2.0, 200, 1)


def test_others_versions_wait_for_the_regions_own_update_and_are_taken_at_once_by_an_idle_one() -> None:
    above, region = based()
    above.push("x", 1, 40.0)
    region.settle()
    assert region.theta.item() == 0.75 * 100 + 0.25 * 60, "nothing here would have been given up for it"
    region.push("s", 1, 8.0)
    region.step()
    above.push("x", 2, 20.0)
    region.settle()
    assert region.theta.item() == 82.0, "what s has brought is not sent yet"
    region.push("s", 2, 2.0)
    region.settle()
    assert above.theta.item() == 30.0
    assert region.theta.item() == 0.75 * 80 + 0.25 * 30


def test_the_momentum_is_kept_and_staleness_counts_the_versions_that_were_taken() -> None:
    heavy = OuterOptimizerOptions(kind="heavy_ball", lr=1.0, momentum=0.5)
    above, region = based()
    region.optimizer = heavy
    region.push("s", 1, 8.0)
    region.step()
    region.push("s", 2, 0.0)
    region.step()
    assert region.theta.item() == 88.0  # 100 - 8 - 4
    region.settle()
    assert above.theta.item() == 88.0
    assert region.theta.item() == 88.0
    region.push("s", 3, 0.0, base_version=1)
    command = region.commands[0]
    assert isinstance(command, fx.StartOuterStep)
    assert command.version - 1 - command.contributions[0].base_version == 3, "one of the three was taken from above"
    region.step()
    assert region.theta.item() == 86.0


def test_a_second_update_before_the_answer_is_less_the_first() -> None:
    _, region = based()
    for sequence, value in enumerate((8.0, 4.0, 2.0, 1.0), 1):
        region.push("s", sequence, value)
        region.step()
    (_, first) = region.sealing[0]
    assert first.item() == 12.0
    assert len(region.sealing) == 1, "one update at a time waits for its answer"
    region.seal()
    assert not region.sealing
    region.do()
    ((seal, second),) = region.sealing
    assert (seal.in_flight, second.item()) == ((1,), 3.0)


def test_updates_whose_versions_are_long_in_coming_are_no_more_than_may_be_in_flight() -> None:
    above, region = based(updates=1)

    def merge(sequence: int, **given: object) -> None:
        region.push("s", sequence, 4.0, tokens=10, **given)
        region.step()
        while region.sealing or region.orders:
            if region.sealing:
                region.seal()
            elif isinstance(region.orders[0], fx.Fetch):
                region.orders.popleft()  # It takes long.
            else:
                region.do()
            if above.commands:
                above.step()
            region.hear()

    for sequence in range(1, 5):
        merge(sequence)
    assert (len(region.outbox), above.theta.item()) == (2, 92.0)
    assert region.ledger()["unsent"] == 20
    region.handle(ev.FinalAnnounced(ev.Ending.FINISHED))
    merge(5, final=True)
    assert above.theta.item() == 80.0, "nothing is taken any more, and the rest goes up"
    assert len(region.outbox) == 3


def test_what_was_refused_above_and_is_kept_goes_up_with_the_next() -> None:
    above, region = based()
    region.push("s", 1, 8.0, tokens=10)
    region.step()
    region.push("s", 2, 4.0, tokens=10)
    region.step()
    region.seal()
    sent = region.sent[0]
    region.handle(ev.PushAnswered(0, sent.sequence, ev.Outcome.REFUSED, ev.Reason.OVERLOAD))
    assert not region.outbox
    ((seal, value),) = region.sealing
    assert (seal.sequence, seal.tokens, value.item()) == (1, 20, 12.0)
    region.orders.clear()
    region.settle()
    assert above.theta.item() == 88.0
    assert region.ledger()["merged"] == 20


def test_what_was_refused_above_and_is_discarded_costs_the_region_its_progress() -> None:
    above, region = based()
    region.push("s", 1, 8.0, tokens=10)
    region.step()
    region.push("s", 2, 4.0, tokens=10)
    region.step()
    region.seal()
    region.orders.clear()
    region.handle(ev.PushAnswered(0, 1, ev.Outcome.REFUSED, ev.Reason.OUTLIER))
    region.settle()
    assert region.theta.item() == above.theta.item() == 100.0
    assert region.ledger()["refused"] == 20
    assert not region.outbox


def test_a_region_that_is_refused_for_good_stops_in_words() -> None:
    _, region = based()
    region.push("s", 1, 8.0)
    region.step()
    region.push("s", 2, 4.0)
    region.step()
    region.seal()
    effects = region.handle(ev.PushAnswered(0, 1, ev.Outcome.REFUSED, ev.Reason.FENCED))
    (stop,) = of(fx.StopTraining, effects)
    assert stop.failed
    assert "fenced" in stop.why


def test_what_is_said_of_a_fragment_that_is_not_there_changes_nothing() -> None:
    _, region = based()
    before = region.syncer.machine.snapshot()
    region.syncer.now_ns -= 1_000_000
    effects = region.handle(ev.VersionPublished(1, 7, 3, 0, 0))
    assert [type(effect) for effect in effects] == [fx.Note]
    assert region.syncer.machine.snapshot() == before


def test_an_update_of_a_round_of_several_counts_each_of_them() -> None:
    _, region = based(updates=3, round_updates=0, quorum=2)
    region.handle(ev.JoinRequested(1, "t", "p"))
    for sequence in (1, 2):
        region.push("s", sequence, 8.0, tokens=100, steps=10)
        region.push("t", sequence, 4.0, tokens=60, steps=6)
        region.step()
    ((seal, value),) = region.sealing
    assert (seal.tokens, seal.steps) == (320, 32)
    assert value.item() == pytest.approx(2 * 6, rel=0.2)


def test_a_new_lineage_above_is_taken_whole() -> None:
    above, region = based()
    region.push("s", 1, 8.0, tokens=10)
    region.step()
    above.theta = number(7.0)
    above.handle(ev.LineageBegan(5, ("restored",), "a test"))
    region.handle(ev.VersionPublished(1, 0, 1, 0, 0, 5))
    (order,) = region.orders
    assert isinstance(order, fx.Join)
    region.orders.clear()
    region.join()
    payload, region.spool["late"] = "late", number(55.0)
    region.handle(_fetched(above.version, payload, lineage=1))
    assert payload not in region.spool, "of the run that is no more"
    region.fetch = lambda: _fetch(region, lineage=5)  # type: ignore[method-assign]
    region.settle()
    assert region.theta.item() == 7.0
    assert region.ledger()["overwritten"] == 10


def test_what_waits_of_an_older_lineage_above_is_never_taken() -> None:
    above, region = based()
    region.push("s", 1, 4.0)
    region.step()
    above.push("x", 1, 8.0)
    region.settle()
    assert region.learner.fetched == 1, "it is here, and waits"
    above.theta = number(7.0)
    above.handle(ev.LineageBegan(5, ("restored",), "a test"))
    region.handle(ev.VersionPublished(1, 0, 2, 0, 0, 5))
    region.orders.clear()
    region.join()
    assert not region.spool, "the values of before are let go of"
    region.restart()
    assert not region.commands
    region.fetch = lambda: _fetch(region, lineage=5)  # type: ignore[method-assign]
    region.settle()
    assert region.theta.item() == 7.0


def _fetched(version: int, payload: str, lineage: int) -> ev.RegionEvent:
    from diloco.sync.events import UpstreamFetched

    return UpstreamFetched(0, version, payload, "p", lineage, 1)


def _fetch(region: Region, lineage: int) -> None:
    region.spool["new"] = region.above.theta
    region.handle(_fetched(region.above.version, "new", lineage))


def test_a_version_from_a_syncer_whose_place_another_has_taken_is_fetched_again() -> None:
    above, region = based()
    above.push("x", 1, 40.0)
    above.step()
    region.handle(ev.VersionPublished(2, 0, 1, 0, 0))
    region.orders.clear()
    region.spool["old"] = number(60.0)
    (order,) = of(fx.Fetch, region.handle(_fetched(1, "old", lineage=1)))
    assert order.have_version == 0
    assert "old" not in region.spool


def test_a_restored_region_takes_the_version_above_whole() -> None:
    above, region = based()
    region.push("s", 1, 8.0, tokens=10)
    region.push("s", 2, 8.0, tokens=10)
    region.step()
    region.step()
    region.seal()
    region.do()
    above.step()
    region.theta, region.reference = number(-3.0), None
    region.handle(ev.LineageBegan(9, ("restored",), "a test"))
    assert not region.spool, "of the past"
    region.outbox.clear()
    region.restart()
    region.handle(ev.JoinRequested(1, "s", "p2"))
    region.settle()
    assert region.theta.item() == above.theta.item() == 84.0


def test_a_crash_before_the_seal_gives_the_progress_back_and_one_after_it_sends_the_same() -> None:
    above, region = based()
    for sequence in (1, 2):
        region.push("s", sequence, 4.0, tokens=10)
        region.step()
    region.restart()  # It was ordered, and nothing is in the outbox.
    ((seal, value),) = region.sealing
    assert (seal.sequence, seal.tokens, value.item()) == (1, 20, 8.0)
    region.seal()
    region.restart()  # It was sealed, and not sent.
    assert [type(each) for each in region.orders] == [fx.Send]
    region.do()
    region.orders.append(fx.Send(0, 1))  # Its answer was lost.
    region.restart()
    region.settle()
    assert above.theta.item() == 92.0
    assert above.version == 1
    assert region.ledger()["merged"] == 20


def test_a_new_process_decides_nothing_before_it_has_joined() -> None:
    above, region = based()
    region.push("s", 1, 4.0)
    region.step()
    above.push("x", 1, 8.0)
    region.settle()
    region.push("s", 2, 4.0)
    command = region.commands.popleft()
    assert isinstance(command, fx.StartOuterStep)
    region.handle(ev.SyncerStarted(2))
    assert region.commands, "the outer step was under way"
    region.step()
    assert not region.sealing, "what is in the outbox is not known yet"
    region.start()
    assert not region.sealing
    region.join()
    assert len(region.sealing) == 1


def test_bytes_of_which_the_machine_was_not_told_are_dropped() -> None:
    _, region = based()
    for sequence in (1, 2):
        region.push("s", sequence, 4.0)
        region.step()
    region.outbox[1] = ("never told", number(8.0))
    region.restart()
    assert not region.outbox


def test_a_version_that_waits_is_not_fetched_again_after_a_crash() -> None:
    above, region = based()
    region.push("s", 1, 4.0)
    region.step()
    above.push("x", 1, 8.0)
    region.settle()
    fetches = region.fetches
    assert fetches == 2, "it lies here, and is not taken while something is unsent"
    region.restart()
    region.settle()
    assert region.fetches == fetches
    region.push("s", 2, 4.0)
    region.settle()
    assert region.theta.item() == 0.75 * 92 + 0.25 * 84


def test_bytes_that_are_lost_with_a_disk_cost_the_region_what_it_cannot_tell_apart() -> None:
    above, region = based()
    for sequence in (1, 2):
        region.push("s", sequence, 4.0, tokens=10)
        region.step()
    region.seal()
    region.do()
    region.outbox.clear()
    region.restart()
    assert region.theta.item() == 92.0
    region.step()
    assert region.theta.item() == 100.0, "what it had last from above"
    region.settle()
    assert above.theta.item() == 92.0
    assert region.theta.item() == 0.75 * 100 + 0.25 * 92
    assert region.ledger()["merged"] == 20


def test_the_memory_comes_back_from_a_snapshot() -> None:
    _, region = based()
    region.push("s", 1, 8.0)
    region.step()
    plain = through_json(region.syncer.machine.snapshot())
    assert OuterSync.restore(region.syncer.options, plain).snapshot() == plain


def test_a_version_above_that_cannot_be_taken_ends_the_region_and_is_tried_again() -> None:
    above, region = based()
    above.push("x", 1, 40.0)
    above.step()
    region.hear()
    region.do()
    command = region.commands.popleft()
    assert isinstance(command, fx.TakeVersion)
    (stop,) = of(fx.StopTraining, region.handle(ev.OuterStepFailed(0, command.version)))
    assert stop.failed
    assert "fragment 0: blended with the version above" in stop.why
    region.restart()
    assert list(region.commands) == [command]
