"""Where a site's tokens are."""

from __future__ import annotations

import random

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.data_units import SKIPPED
from diloco.sync.options import LearnerOptions
from diloco.sync.progress import (
    REMEMBERED,
    FragmentProgress,
    LearnerState,
    Ledger,
    Orphan,
    Sent,
    SentState,
    SiteTurn,
    UnitAsk,
    ask_of,
    combined,
    ledger_of,
    site_ledger,
    units_from,
    wants_soon,
)
from tests.sync.driving import of, only
from tests.sync.driving_site import Site, known


def a_state(draw: random.Random) -> LearnerState:
    parts = []
    for _ in range(draw.randint(1, 7)):
        part = FragmentProgress()
        part.tokens_merged, part.tokens_refused = draw.randint(0, 99), draw.randint(0, 9)
        part.tokens_overwritten, part.unsent_tokens = draw.randint(0, 9), draw.randint(0, 50)
        part.in_flight = [Sent(1, 0, draw.randint(1, 9), 1, merged_version=draw.choice([None, 3]))]
        part.orphans = [Orphan(2, draw.randint(1, 9))]
        parts.append(part)
    state = LearnerState(parts, tokens_processed=max(part.accounted() for part in parts))
    for part in parts:
        part.tokens_lost = state.tokens_processed - part.accounted()
    return state


def test_invariant_10_the_sites_ledger_balances_in_whole_tokens() -> None:
    for seed in range(300):
        state = a_state(random.Random(seed))
        ledger = site_ledger(state)
        assert ledger.balanced(), f"seed {seed}: {ledger}"
        for index in range(len(state.fragments)):
            assert ledger_of(state, index).balanced(), f"seed {seed}"
        lost = sum(part.tokens_lost for part in state.fragments) / len(state.fragments)
        assert abs(ledger.lost - lost) <= 1, f"seed {seed}: no part is off by more than its rounding"


def test_what_an_ended_part_did_not_hear_of_is_unsent_in_the_whole() -> None:
    assert combined([Ledger(3, 3, 0, 0, 0, 0, 0), Ledger(3, 0, 0, 0, 3, 0, 0)]).balanced()
    assert combined([Ledger(6, 6, 0, 0, 0, 0, 0), Ledger(4, 4, 0, 0, 0, 0, 0)]) == Ledger(6, 5, 0, 0, 1, 0, 0)


def test_a_ledger_can_be_out_of_balance() -> None:
    assert Ledger(6, 1, 1, 1, 1, 1, 1).balanced()
    assert not Ledger(7, 1, 1, 1, 1, 1, 1).balanced()


def test_a_merged_update_is_in_flight_until_it_is_adopted_but_its_tokens_are_not() -> None:
    part = FragmentProgress(in_flight=[Sent(1, 0, 5, 1), Sent(2, 0, 7, 1, merged_version=4)])
    assert [sent.sequence for sent in part.undecided()] == [1]
    assert part.tokens_in_flight() == 5


def test_an_update_awaits_its_answer_until_it_is_accepted() -> None:
    for state in SentState:
        part = FragmentProgress(in_flight=[Sent(1, 0, 5, 1, state=state)])
        assert part.unanswered() == (state is not SentState.ACCEPTED)


# --- One handling of an event at a site ------------------------------------------------------------------------------


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


# --- Units of the data at a site -------------------------------------------------------------------------------------


def leasing(**options: object) -> Site:
    """A site whose step reads one sequence, of units of four."""
    given = {"unit_sequences": 4, "sequence_tokens": 10, "units_ahead": 3, "inner_steps": 5, **options}
    site = Site(cold=True, **given)
    site.join()
    for index in range(site.options.num_fragments):
        site.handle(ev.VersionFetched(index, 0, ()))
    site.boundary()
    return site


def asked(site: Site) -> UnitAsk:
    return ask_of(site.options, site.machine.state)


def unit_at(site: Site, place: int) -> int:
    return units_from(site.machine.state, place, 1)[0][0][0]


def tell(site: Site, first: int, *pieces: tuple[int, int]) -> None:
    site.handle(ev.UnitsTold(first, pieces))


def test_a_site_trains_once_it_has_units() -> None:
    site = leasing()
    assert not site.machine.ready()
    assert asked(site) == UnitAsk(known=0, begin=0, upto=3, floor=0, again=0)
    tell(site, 0, (7, 3))
    assert site.machine.ready()
    assert [unit_at(site, place) for place in range(3)] == [7, 8, 9]


def test_an_update_names_what_it_has_consumed() -> None:
    site = leasing()
    tell(site, 0, (7, 3))
    assert only(fx.Seal, site.train(5)).spans == ((0, 5),)
    site.seal(1)
    site.answer(1)
    assert only(fx.Seal, site.train(5)).spans == ((5, 10),)
    assert asked(site).floor == 0, "the first one can still be refused, and sent again"
    site.fate(1, 1, tokens=50)
    assert asked(site).floor == 5


def test_a_step_may_say_how_many_sequences_it_read() -> None:
    """A loop of somebody's own counts tokens as it likes: here each of its sequences is worth 999 of them."""
    site = leasing()
    tell(site, 0, (7, 3))
    found = [site.handle(ev.StepDone(step, 999, 1000, 2 * step, sequences=2)) for step in range(1, 6)]
    (seal,) = of(fx.Seal, found[-1])
    assert (seal.spans, seal.tokens) == (((0, 10),), 5 * 999)


def test_an_update_that_is_refused_and_kept_is_named_by_the_next() -> None:
    site = leasing()
    tell(site, 0, (7, 3))
    site.send(1, steps=5)
    site.fate(1, 0, ev.Reason.OVERLOAD, tokens=50)
    sealed = of(fx.Seal, site.train(5))
    assert [seal.spans for seal in sealed] == [((0, 6),)]


def test_what_is_thrown_away_is_named_by_nothing() -> None:
    site = leasing()
    tell(site, 0, (7, 3))
    site.send(1, steps=5)
    site.train(2)
    site.fate(1, 0, ev.Reason.OUTLIER, tokens=50)
    site.boundary()
    assert asked(site).floor == 7
    assert only(fx.Seal, site.train(3)).spans == ((7, 10),)


def test_a_site_that_runs_out_draws_its_own_over_again_and_does_not_name_it() -> None:
    site = leasing(inner_steps=11)
    tell(site, 0, (7, 2))
    assert units_from(site.machine.state, 0, 9) == ([(7, 2)], False)
    found, again = units_from(site.machine.state, 2, 9)
    assert again
    assert found[0][0] in (7, 8)
    assert only(fx.Seal, site.train(11)).spans == ((0, 8),)
    assert asked(site) == UnitAsk(known=2, begin=3, upto=5, floor=0, again=1)
    tell(site, 2, (SKIPPED, 1), (9, 3))
    assert [unit_at(site, place) for place in (3, 4, 5)] == [9, 10, 11]


def test_what_was_drawn_over_again_meanwhile_stays_so() -> None:
    site = leasing()
    tell(site, 0, (7, 2))
    units_from(site.machine.state, 2, 1)
    tell(site, 2, (9, 3))  # The answer to an ask from before that.
    assert units_from(site.machine.state, 2, 1)[1]
    assert unit_at(site, 3) == 10
    assert asked(site).known == 5


def test_more_is_asked_for_before_the_end() -> None:
    site = leasing(units_ahead=4)
    tell(site, 0, (0, 4))
    assert not wants_soon(site.options, site.machine.state)
    site.train(4)
    assert not wants_soon(site.options, site.machine.state), "three units are left"
    site.train(8)
    assert wants_soon(site.options, site.machine.state)
    assert asked(site).upto == 7


def test_a_site_that_stops_asks_for_no_more() -> None:
    site = leasing()
    tell(site, 0, (0, 1))
    site.handle(ev.LeaveAsked())
    assert asked(site).upto == 1
    assert not wants_soon(site.options, site.machine.state)


def test_a_process_without_memory_takes_up_its_list_where_accepted_updates_end() -> None:
    site = Site(cold=True, unit_sequences=4, sequence_tokens=10, units_ahead=3)
    site.join(known(watermark=2, cursor=10))
    assert asked(site) == UnitAsk(known=2, begin=3, upto=5, floor=10, again=0)
    tell(site, 2, (30, 2))
    assert unit_at(site, 2) == 30


def test_a_checkpoint_has_the_list_and_what_is_unsent() -> None:
    site = leasing()
    tell(site, 0, (7, 3))
    site.train(3)
    kept = site.machine.snapshot()
    site.restart(kept)
    assert unit_at(site, 2) == 9
    site.join()
    assert only(fx.Seal, site.train(2)).spans == ((0, 5),)


def test_a_restored_run_knows_of_no_later_units() -> None:
    site = leasing()
    tell(site, 0, (7, 3))
    site.train(2)
    site.join(lineage=2)
    assert (asked(site).known, asked(site).begin) == (1, 1)
    units, again = units_from(site.machine.state, 0, 1)
    assert again, "what is left of the unit that was begun is nobody's"
    assert 7 <= units[0][0] < 10
    site.handle(ev.VersionFetched(0, 0, ()))
    site.boundary()
    tell(site, 0, (30, 4))
    assert only(fx.Seal, site.train(8)).spans == ((4, 5),), "from the next place on"


def test_a_list_does_not_grow_with_the_run() -> None:
    site = leasing(inner_steps=10_000)
    for place in range(300):
        tell(site, place, (5 * place, 1))
        site.train(4)
    units = site.machine.state.units
    assert units.end - units.first <= REMEMBERED + 1
    assert len(units.pieces) <= REMEMBERED + 1
    assert site.machine.state.fragments[0].unsent_spans == [(0, 1200)]


def test_where_nothing_is_leased_nothing_is_named() -> None:
    site = Site(inner_steps=5)
    assert only(fx.Seal, site.train(5)).spans == ()
    assert site.machine.ready()
