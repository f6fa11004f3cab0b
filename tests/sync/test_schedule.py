"""When a fragment is due."""

from __future__ import annotations

import pytest

from diloco.outer.optimizer import OuterOptimizerOptions
from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.options import due, even_offsets, local_steps, steps_to_due
from diloco.sync.syncer import OuterSync
from tests.sync.driving import MS, of, through_json
from tests.sync.driving_site import Site
from tests.sync.two_levels import Level, Region, number


@pytest.mark.parametrize(("fragments", "steps"), [(1, 1), (1, 15), (3, 3), (3, 15), (4, 15), (24, 24), (5, 7)])
def test_every_fragment_is_due_once_in_a_period(fragments: int, steps: int) -> None:
    for fragment in range(fragments):
        at = [step for step in range(1, 2 * steps + 1) if fragment in due(even_offsets(fragments, steps), steps, step)]
        assert len(at) == 2
        assert at[1] - at[0] == steps


@pytest.mark.parametrize(("fragments", "steps"), [(3, 15), (4, 15), (24, 24), (5, 7)])
def test_no_two_fragments_are_due_at_once_and_the_load_is_flat(fragments: int, steps: int) -> None:
    at = sorted(even_offsets(fragments, steps))
    assert len(set(at)) == fragments
    gaps = [b - a for a, b in zip(at, [*at[1:], at[0] + steps], strict=True)]
    assert max(gaps) - min(gaps) <= 1, gaps


def test_one_fragment_is_due_after_every_period() -> None:
    assert [step for step in range(40) if due(even_offsets(1, 15), 15, step)] == [15, 30]


def test_nothing_is_due_before_the_first_step() -> None:
    assert not due((0,), 15, 0)


def test_several_steps_told_as_one_are_due_when_one_of_them_is() -> None:
    for offset_of in range(7):
        each = [bool(due((offset_of,), 7, step)) for step in range(40)]
        for step in range(40):
            for steps in range(1, step + 1):
                assert bool(due((offset_of,), 7, step, steps)) == any(each[step - steps + 1 : step + 1]), (step, steps)


@pytest.mark.parametrize(
    ("fastest_ms", "own_ms", "steps"),
    [(0, 100, 40), (100, 0, 40), (100, 100, 40), (100, 150, 26), (100, 9_999, 1), (100, 80, 40)],
)
def test_a_slower_site_makes_as_many_fewer_steps_and_at_least_one(fastest_ms: int, own_ms: int, steps: int) -> None:
    assert local_steps(40, fastest_ms * MS, own_ms * MS) == steps


@pytest.mark.parametrize(
    ("fastest_ms", "own_ms", "steps"),
    [(0, 100, 8), (100, 0, 8), (100, 100, 8), (100, 101, 8), (100, 200, 4), (100, 250, 4), (100, 9_999, 1)],
)
def test_19_rounded_up_a_slower_site_makes_halos_number_of_steps(fastest_ms: int, own_ms: int, steps: int) -> None:
    """max(1, ceil(H w)), w being the site's speed by that of the fastest."""
    assert local_steps(8, fastest_ms * MS, own_ms * MS, "up") == steps


def sealed_at(site: Site, fragments: int, steps: int) -> list[list[int]]:
    """The steps after which each fragment was sealed, with every update accepted at once."""
    found: list[list[int]] = [[] for _ in range(fragments)]
    for _ in range(steps):
        for seal in of(fx.Seal, site.train()):
            found[seal.fragment].append(site.step)
            site.handle(ev.Sealed(seal.fragment, seal.sequence, "u"))
            site.handle(ev.PushAnswered(seal.fragment, seal.sequence, ev.Outcome.ACCEPTED, None))
    return found


def told(site: Site, fastest_ms: int, fragment: int = 0) -> None:
    site.handle(ev.VersionPublished(1, fragment, 0, 0, 0, 1, fastest_ms * MS))


def test_dynamic_steps_follow_the_fastest_site_as_told() -> None:
    """Site takes 100 ms a step; an update is of 20 steps where the fastest is as slow, and of 10 where it is twice as
    fast."""
    site = Site(inner_steps=20, dynamic_steps=True, updates_in_flight_max=100)
    assert sealed_at(site, 1, 45) == [[20, 40]]
    told(site, 50)
    assert sealed_at(site, 1, 25) == [[50, 60, 70]]
    told(site, 0)
    assert sealed_at(site, 1, 30) == [[90]]


@pytest.mark.parametrize(("rounding", "wanted"), [("down", [[2, 4, 6]]), ("up", [[3, 6]])])
def test_19_a_site_rounds_its_dynamic_steps_as_told(rounding: str, wanted: list[list[int]]) -> None:
    """A step takes it 100 ms and the fastest 35: 2.8 of 8."""
    site = Site(inner_steps=8, dynamic_steps=True, dynamic_rounding=rounding, updates_in_flight_max=100)
    told(site, 35)
    assert sealed_at(site, 1, 7) == wanted


def test_the_first_updates_of_several_fragments_stand_apart_with_dynamic_steps_too() -> None:
    plain = sealed_at(Site(inner_steps=20, num_fragments=4, updates_in_flight_max=100), 4, 40)
    dynamic = Site(inner_steps=20, num_fragments=4, updates_in_flight_max=100, dynamic_steps=True)
    assert sealed_at(dynamic, 4, 40) == plain
    slow = Site(inner_steps=20, num_fragments=4, updates_in_flight_max=100, dynamic_steps=True)
    told(slow, 50)
    assert sealed_at(slow, 4, 20) == [[2, 12], [5, 15], [7, 17], [10, 20]]


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_may_be_done_at_a_boundary_is_what_is_done(dynamic: bool) -> None:
    site = Site(inner_steps=7, dynamic_steps=dynamic, updates_in_flight_max=100)
    for step in range(1, 60):
        if step == 20:
            told(site, 40)
        may = site.machine.may_act()
        assert bool(of(fx.Seal, site.train())) <= may, step
        for sent in site.machine.state.fragments[0].in_flight:
            if not sent.digest:
                site.handle(ev.Sealed(0, sent.sequence, "u"))
                site.handle(ev.PushAnswered(0, sent.sequence, ev.Outcome.ACCEPTED, None))


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_next_boundary_with_anything_to_do_is_known_beforehand(dynamic: bool) -> None:
    options = {"inner_steps": 20, "num_fragments": 3, "updates_in_flight_max": 100, "dynamic_steps": dynamic}
    single, several = Site(**options), Site(**options)
    for site in (single, several):
        told(site, 60)
        site.train()  # What a step takes is known from the first one on.
    acted = []
    while single.step < 60:
        acted += [single.step for seal in of(fx.Seal, single.train()) if sealing(single, seal)]
    found = []
    while several.step < 60:
        steps = several.machine.steps_to_act()
        several.step += steps
        effects = several.handle(ev.StepDone(several.step, 10 * steps, 100 * MS, several.step, steps=steps))
        found += [several.step for seal in of(fx.Seal, effects) if sealing(several, seal)]
    assert [step for step in found if step <= 60] == acted


def test_what_is_due_and_was_overwritten_just_now_is_sent_after_the_next_step() -> None:
    site = Site(inner_steps=20, adopt="overwrite")
    site.send(1, steps=20)
    site.train(19)
    site.fate(1, version=1)
    site.handle(ev.VersionFetched(0, 1, ()))
    assert not of(fx.Seal, site.train()), "nothing is left of it"
    assert site.machine.steps_to_act() == 1
    assert of(fx.Seal, site.train())


def test_the_next_step_after_which_any_fragment_is_due() -> None:
    places = even_offsets(3, 10)
    for step in range(45):
        ahead = next(steps for steps in range(1, 11) if due(places, 10, step + steps))
        assert steps_to_due(places, 10, step) == ahead, step


def sealing(site: Site, seal: fx.Seal) -> bool:
    site.handle(ev.Sealed(seal.fragment, seal.sequence, "u"))
    site.handle(ev.PushAnswered(seal.fragment, seal.sequence, ev.Outcome.ACCEPTED, None))
    return True


# --- A region towards the syncer above -------------------------------------------------------------------------------


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
