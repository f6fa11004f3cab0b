"""A region between its sites and the syncer above: what goes up, what comes down, and what its end leaves."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.events import Ending, Outcome, Reason, UpstreamFetched
from diloco.sync.state import Phase, Status
from diloco.sync.syncer import OuterSync
from tests.sooner import sooner
from tests.sync.driving import of, replay
from tests.sync.two_levels import Level, Region, number


def fresh(updates: int = 2, **options: object) -> tuple[Level, Region]:
    """A run above with a plain site x, and a region with a site s, which has heard nothing from above yet."""
    above = Level()
    above.theta = number(100.0)
    above.handle(ev.JoinRequested(1, "x", "p"))
    region = Region(above, "region-a", updates, **options)  # type: ignore[arg-type]
    region.handle(ev.JoinRequested(1, "s", "p"))
    return above, region


def based(updates: int = 2, **options: object) -> tuple[Level, Region]:
    """The same once the region holds the version above."""
    above, region = fresh(updates, **options)
    region.join()
    region.settle()
    assert region.theta.item() == 100.0
    return above, region


def merge(region: Region, *values: float, first: int = 1, **given: object) -> None:
    """Updates of the site s, each all alone in its round."""
    for sequence, value in enumerate(values, first):
        region.push("s", sequence, value, **({"tokens": 10} | given))
        region.step()


def sent(*values: float, **options: object) -> tuple[Level, Region]:
    """A region with an update on its way: of the first two ``values``, the others are merged after it."""
    above, region = based(**options)  # type: ignore[arg-type]
    merge(region, *values)
    region.seal()
    return above, region


def column(region: Region, *names: str) -> list[int]:
    ledger = region.ledger()
    return [ledger[name] for name in names]


def test_a_new_region_takes_the_version_above_whole_before_a_round_of_it_closes() -> None:
    _, region = fresh()
    region.push("s", 1, 8.0)
    assert not region.commands, "a round closed without a base"
    region.join()
    region.settle()
    assert region.theta.item() == 92.0
    assert region.version == 2
    assert column(region, "processed", "unsent") == [100, 100]


def test_19_from_the_blend_so_many_updates_count_and_none_goes_up_while_one_is_under_way() -> None:
    """HALoS' code with K 2 and a 1/4: of seven updates of 1, the first two go up, then the last two."""
    above, region = based(from_blend=True)

    def sealed_after(sequence: int) -> int:
        merge(region, 1.0, first=sequence)
        return len(region.sent) + len(region.sealing)

    assert [sealed_after(1), sealed_after(2)] == [0, 1]
    region.seal()
    region.do()
    assert [sealed_after(3), sealed_after(4), sealed_after(5)] == [1, 1, 1]
    region.settle()
    assert above.theta.item() == 98.0
    assert region.theta.item() == 0.75 * 95 + 0.25 * 98
    assert sealed_after(6) == 1
    region.restart()
    region.settle()
    assert sealed_after(7) == 2
    ((seal, value),) = region.sealing
    assert (value.item(), seal.tokens, seal.base_version) == (2.0, 20, 1)


def test_others_versions_wait_for_the_regions_own_update_and_are_taken_at_once_by_an_idle_one() -> None:
    above, region = based()
    above.push("x", 1, 40.0)
    region.settle()
    assert region.theta.item() == 0.75 * 100 + 0.25 * 60, "nothing here would have been given up for it"
    merge(region, 8.0)
    above.push("x", 2, 20.0)
    region.settle()
    assert region.theta.item() == 82.0, "what s has brought is not sent yet"
    region.push("s", 2, 2.0)
    region.settle()
    assert above.theta.item() == 30.0
    assert region.theta.item() == 0.75 * 80 + 0.25 * 30
    assert region.syncer.machine.progress_ppm() == 250_000


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


def test_a_region_that_is_refused_for_good_or_cannot_take_a_version_stops_in_words() -> None:
    _, region = sent(8.0, 4.0)
    (stop,) = of(fx.StopTraining, region.handle(ev.PushAnswered(0, 1, Outcome.REFUSED, Reason.FENCED)))
    assert stop.failed
    assert "fenced" in stop.why
    above, region = based()
    above.push("x", 1, 40.0)
    above.step()
    region.hear()
    region.do()
    command = region.commands.popleft()
    (stop,) = of(fx.StopTraining, region.handle(ev.OuterStepFailed(0, command.version)))
    assert stop.failed
    assert "fragment 0: blended with the version above" in stop.why
    region.restart()
    assert list(region.commands) == [command], "it is tried again"


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


# --- The run above, or the region, was restored ----------------------------------------------------------------------


@pytest.mark.parametrize("waits", [False, True])
def test_a_new_lineage_above_is_taken_whole_and_nothing_of_the_older_one(waits: bool) -> None:
    above, region = based()
    merge(region, 4.0)
    if waits:
        above.push("x", 1, 8.0)
        region.settle()
        assert region.learner.fetched == 1, "it is here, and waits"
    above.theta = number(7.0)
    above.handle(ev.LineageBegan(5, ("restored",), "a test"))
    region.handle(ev.VersionPublished(1, 0, above.version, 0, 0, 5))
    assert of(fx.Join, region.orders)
    region.join()
    region.spool["late"] = number(55.0)
    region.handle(UpstreamFetched(0, above.version, "late", "p", 1, 1))
    assert not region.spool, "of the run that is no more"
    if waits:
        region.restart()
        assert not region.commands
    region.spool["new"] = above.theta
    region.orders.clear()
    region.handle(UpstreamFetched(0, above.version, "new", "p", 5, 1))
    region.settle()
    assert region.theta.item() == 7.0
    assert column(region, "overwritten") == [10]


def test_a_version_from_a_syncer_whose_place_another_has_taken_is_fetched_again() -> None:
    _, region = based()
    region.handle(ev.VersionPublished(2, 0, 1, 0, 0))
    region.spool["old"] = number(60.0)
    (order,) = of(fx.Fetch, region.handle(UpstreamFetched(0, 1, "old", "p", 1, 1)))
    assert order.have_version == 0
    assert "old" not in region.spool


def test_a_restored_region_takes_the_version_above_whole() -> None:
    above, region = sent(8.0, 8.0)
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


# --- A region's process dies -----------------------------------------------------------------------------------------


def test_a_crash_before_the_seal_gives_the_progress_back_and_one_after_it_sends_the_same() -> None:
    above, region = based()
    merge(region, 4.0, 4.0)
    region.outbox[1] = ("never told", number(8.0))  # The machine does not know of these bytes.
    region.restart()
    assert not region.outbox
    ((seal, value),) = region.sealing
    assert (seal.sequence, seal.tokens, value.item()) == (1, 20, 8.0)
    region.seal()
    region.restart()  # It was sealed, and not sent.
    assert [type(each) for each in region.orders] == [fx.Send]
    region.settle()
    assert (above.theta.item(), above.version) == (92.0, 1)
    assert column(region, "merged") == [20]


def test_a_new_process_decides_nothing_before_it_has_joined() -> None:
    above, region = based()
    merge(region, 4.0)
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


def test_a_version_that_waits_is_not_fetched_again_after_a_crash() -> None:
    above, region = based()
    merge(region, 4.0)
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
    above, region = sent(4.0, 4.0)
    region.do()
    region.outbox.clear()
    region.restart()
    assert region.theta.item() == 92.0
    region.step()
    assert region.theta.item() == 100.0, "what it had last from above"
    region.settle()
    assert above.theta.item() == 92.0
    assert region.theta.item() == 0.75 * 100 + 0.25 * 92
    assert column(region, "merged") == [20]


# --- The end of a region: its last round, what goes up after that, and what is left when it goes on ------------------


def ends(region: Region, event: ev.OuterEvent | None = None) -> None:
    """The last round, in which its site leaves."""
    region.handle(event or ev.FinalAnnounced(Ending.FINISHED))
    region.handle(ev.SiteLeft(1, "s", 1))


@pytest.mark.parametrize("joins", [False, True])
def test_the_end_above_is_the_last_round_here_also_after_a_join_and_then_the_rest_goes_up(joins: bool) -> None:
    above, region = based(updates=10)
    merge(region, 8.0)
    above.handle(ev.DrainRequested(1))
    if joins:
        region.restart()
    else:
        region.hear()
    assert of(fx.AnnounceFinal, region.told)
    assert not region.sealing, "s is still to send its last"
    merge(region, 4.0, first=2, final=True)
    assert of(fx.MarkFinal, region.told)
    ((seal, value),) = region.sealing
    assert (seal.final, seal.tokens, value.item()) == (True, 20, 12.0)
    region.settle()
    above.handle(ev.SiteLeft(1, "x", 1))
    assert above.theta.item() == region.theta.item() == 88.0
    assert column(region, "merged") == [20]
    assert above.syncer.machine.state.sites["region-a"].status is Status.LEFT
    assert of(fx.MarkFinal, above.told)


def test_an_end_with_an_answer_on_its_way_gives_nothing_up_and_takes_nothing_that_comes_in_it() -> None:
    above, region = sent(4.0, 4.0, 2.0)
    region.do()
    region.handle(ev.FinalAnnounced(Ending.FINISHED))
    above.step()
    region.hear()
    region.do()
    assert region.learner.fetched == 1, "it is here"
    region.handle(ev.SiteLeft(1, "s", 1))
    region.settle()
    assert above.theta.item() == region.theta.item() == 90.0
    assert column(region, "merged") == [30]
    region.fetch()
    assert region.spool.keys() == {"above 1"}, "a late one is let go of"


def test_what_was_refused_in_the_last_round_does_not_go_up_at_the_end_nor_when_the_region_goes_on() -> None:
    above, region = sent(4.0, 4.0, 4.0)
    region.orders.clear()
    ends(region, ev.DrainRequested(1))
    region.handle(ev.PushAnswered(0, 1, Outcome.REFUSED, Reason.OUTLIER))
    region.settle()
    assert above.theta.item() == 100.0
    assert column(region, "refused", "overwritten", "unsent") == [20, 10, 0]
    assert above.syncer.machine.state.sites["region-a"].status is Status.LEFT
    region.restart()
    region.handle(ev.JoinRequested(1, "s", "p2"))
    region.settle()
    assert region.theta.item() == 100.0
    region.push("s", 4, 1.0, incarnation=2)
    region.settle()
    assert above.theta.item() == 99.0


def test_what_a_last_round_merges_without_a_base_is_in_the_ledger() -> None:
    _, region = fresh()
    region.push("s", 1, 8.0, tokens=10)
    ends(region, ev.DrainRequested(1))
    region.step()
    assert of(fx.MarkFinal, region.told)
    region.restart()
    region.settle()
    assert region.theta.item() == 100.0
    assert column(region, "processed", "overwritten") == [10, 10]


@pytest.mark.parametrize("above_goes_on", [False, True])
def test_a_region_that_has_finished_goes_on_where_the_run_above_does_and_else_stays_so(above_goes_on: bool) -> None:
    above, region = based(updates=10)
    merge(region, 8.0)
    ends(region)
    region.settle()
    assert region.syncer.machine.state.phase is Phase.ENDED
    assert above.syncer.machine.state.sites["region-a"].status is Status.LEFT
    region.told.clear()
    if above_goes_on:
        above.handle(ev.LineageBegan(7, ("restored",), "a test"))
        above.theta = number(50.0)
    region.restart(had_finished=True)
    if not above_goes_on:
        assert not of(fx.MarkFinal, region.told)
        region.handle(ev.FinalAnnounced(Ending.FINISHED))
        region.settle()
        assert of(fx.MarkFinal, region.told) == [fx.MarkFinal(Ending.FINISHED, (2,))]
        assert column(region, "merged") == [10]
        return
    while region.orders:  # The numbers of this level know one lineage only.
        assert region.orders.popleft() == fx.Fetch(0, -1)
    region.spool["restored"] = above.theta
    region.handle(UpstreamFetched(0, above.version, "restored", "p", 7, above.syncer.machine.state.epoch))
    region.step()
    assert region.theta.item() == 50.0
    region.handle(ev.JoinRequested(1, "s", "p2"))
    merge(region, 4.0, first=2, incarnation=2)
    assert region.theta.item() == 46.0
    assert column(region, "unsent") == [10]
    assert region.syncer.machine.state.phase is Phase.RUNNING


# --- Two regions and the syncer above them, as dice have it ----------------------------------------------------------


@pytest.mark.parametrize("seed", sooner(range(12), *range(4)))
def test_at_any_instant_a_crash_costs_nothing_and_a_replay_decides_the_same(seed: int) -> None:
    """Sites push, levels step, processes of both die, a region is drained and goes on, words get lost and come twice,
    updates are refused.  What goes up says as much as its tokens do, all that was merged in a region is merged above or
    in its ledger, each of its updates was merged once, and a replay decides it all again."""
    dice = random.Random(seed)
    above, region = based(updates=dice.choice((1, 2, 3)))
    regions = {"region-a": region, "region-b": Region(above, "region-b", dice.choice((1, 2)))}
    regions["region-b"].handle(ev.JoinRequested(1, "s", "p"))
    regions["region-b"].join()
    sequences: Counter[str] = Counter()
    for _ in range(240):
        name = dice.choice(sorted(regions))
        _something_happens(dice, above, regions[name], name, sequences)
        regions[name].ledger()
    for each in regions.values():
        each.join()
    for _ in range(3):
        for each in regions.values():
            each.settle()
    for name, each in regions.items():
        merged = each.syncer.machine.state.sites["s"].lines[0].tokens_merged
        ledger, line = each.ledger(), above.syncer.machine.state.sites[name].lines[0]
        assert ledger["processed"] == merged
        assert ledger["lost"] == ledger["in_flight"] == 0
        assert ledger["merged"] == line.tokens_merged
        assert line.watermark == line.updates_merged, "each was merged once"
        assert len(each.spool) <= 2
        assert len(each.outbox) <= 2
        again = OuterSync(replace(each.syncer.options))
        list(replay(again, each.syncer.records))
        assert again.snapshot() == each.syncer.machine.snapshot()


def _something_happens(dice: random.Random, above: Level, region: Region, name: str, sequences: Counter[str]) -> None:
    choices = [*["s"] * 4, "x", "hear", *["crash", "deaf", "crash above", "drain"] * (dice.random() < 0.1)]
    choices += ["below"] * (2 * bool(region.commands)) + ["above"] * bool(above.commands)
    choices += ["seal"] * bool(region.sealing) + ["do", "do", "do twice"] * bool(region.orders)
    choices += ["refuse"] * (bool(region.outbox) and dice.random() < 0.2)
    match dice.choice(choices):
        case "s" if not region.commands:
            sequences[name] += 1
            tokens, incarnation = dice.randrange(1, 50), region.syncer.machine.state.sites["s"].incarnation
            region.push("s", sequences[name], float(tokens), tokens=tokens, incarnation=incarnation)
        case "x" if not above.commands:
            sequences["x"] += 1
            above.push("x", sequences["x"], float(dice.randrange(-64, 64)))
        case "hear":
            region.hear()
        case "deaf":
            region.mail.clear()
        case "crash":
            region.restart()
        case "crash above":
            above.restart()
        case "below":
            region.step()
        case "above":
            above.step()
        case "seal":
            (seal, value) = region.sealing[0]
            assert value.item() == pytest.approx(seal.tokens), "something goes up twice, or never"
            region.seal()
        case "refuse":
            sequence = max(region.outbox)
            reason = dice.choice((ev.Reason.OVERLOAD, ev.Reason.OUTLIER))
            region.handle(ev.PushAnswered(0, sequence, ev.Outcome.REFUSED, reason, region.outbox[sequence][0]))
        case "drain":
            region.handle(ev.DrainRequested(1))
            region.handle(ev.SiteLeft(1, "s", region.syncer.machine.state.sites["s"].incarnation))
            while region.commands:
                region.step()
            if dice.random() < 0.5:
                region.settle()
            region.restart()
            region.handle(ev.JoinRequested(1, "s", f"process {region.syncer.machine.state.epoch}"))
        case "do":
            region.do()
        case "do twice":
            region.orders.append(region.orders[0])
            region.do()
