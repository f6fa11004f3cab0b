"""Units of the data: sets of numbers as spans, the lists that a syncer leases, and what a site reads and names."""

from __future__ import annotations

import random
from typing import Any

import pytest

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.data_units import (
    SKIPPED,
    Columns,
    Span,
    added,
    common,
    first_of,
    in_units,
    size,
    whole_units,
    without,
)
from diloco.sync.events import Reason
from diloco.sync.fates import columns_of, known_already
from diloco.sync.options import SECOND_NS
from diloco.sync.progress import REMEMBERED, UnitAsk, ask_of, units_from, wants_soon
from diloco.sync.state import Status
from diloco.sync.syncer import OuterSync
from tests.sync.driving import Syncer, notes, only, replay, running
from tests.sync.driving_site import Site, known


def numbers(spans: list[Span]) -> set[int]:
    return {number for start, stop in spans for number in range(start, stop)}


def some(draw: random.Random) -> list[Span]:
    starts = [draw.randrange(30) for _ in range(draw.randrange(6))]
    return [(start, start + draw.randrange(6)) for start in starts]


def test_spans_are_sets_of_numbers_however_they_are_given() -> None:
    draw = random.Random(1)
    for _ in range(500):
        ours, theirs = some(draw), some(draw)
        for found, wanted in (
            (added(ours, theirs), numbers(ours) | numbers(theirs)),
            (without(ours, theirs), numbers(ours) - numbers(theirs)),
            (common(ours, theirs), numbers(ours) & numbers(theirs)),
        ):
            assert numbers(found) == wanted
            assert size(found) == len(wanted)
            assert found == added(found, ()), "sorted, and no two touch"


def test_the_first_numbers_of_spans_and_units_that_are_touched_or_whole() -> None:
    assert first_of([(2, 4), (7, 9)], 3) == [(2, 4), (7, 8)]
    assert first_of([(2, 4), (7, 9)], 9) == [(2, 4), (7, 9)]
    assert first_of([(2, 4)], 0) == first_of([(2, 4)], -1) == []
    assert in_units([(3, 9), (12, 13)], 4) == [(0, 4)]
    assert whole_units([(3, 9), (12, 13)], 4) == [(1, 2)]
    assert whole_units([(4, 12)], 4) == in_units([(4, 12)], 4) == [(1, 3)]


class Counted(int):
    """A number that counts how often one is found the greater."""

    times = 0

    def __gt__(self, other: int) -> bool:
        Counted.times += 1
        return int(self) > int(other)


def test_long_lists_are_gone_through_once() -> None:
    count = 1000
    spans = [(Counted(10 * at), Counted(10 * at + 6)) for at in range(count)]
    less = [(Counted(10 * at + 2), Counted(10 * at + 3)) for at in range(count)]
    assert size(without(spans, less)) == 5 * count
    assert 0 < Counted.times < 40 * count


# --- Units at the syncer ---------------------------------------------------------------------------------------------

UNIT = 10


def leasing(*sites: str, **options: Any) -> Syncer:
    return running(*sites, **{"unit_sequences": UNIT, "lease_ns": 30 * SECOND_NS, **options})


def ask(syncer: Syncer, site: str, upto: int, known: int = 0, **given: Any) -> tuple[tuple[int, int], ...]:
    """What ``site`` is told of its list."""
    fields = {"incarnation": 1, "begin": known, "floor": 0, "again": 0, **given}
    return only(fx.AnswerUnits, syncer.handle(ev.UnitsAsked(1, site, known=known, upto=upto, **fields))).pieces


def merge(syncer: Syncer, site: str, sequence: int, *spans: tuple[int, int], **given: Any) -> None:
    """An update that has consumed ``spans``, all alone in its round."""
    fragment = given.pop("fragment", 0)
    version = syncer.machine.state.fragments[fragment].version
    more = {"spans": spans, "cursor": spans[-1][1], "fragment": fragment, "base_version": version, **given}
    syncer.push(site, sequence, **more)
    if syncer.machine.state.fragments[fragment].merging_since_ns is None:
        syncer.deadline()
    syncer.done(fragment)


def counts(syncer: Syncer) -> Columns:
    found = columns_of(syncer.machine)
    assert found.balanced(), found
    return found


def test_units_are_leased_in_order_and_an_ask_that_changes_nothing_is_answered_without_the_machine() -> None:
    syncer = leasing("a", "b")
    event = ev.UnitsAsked(7, "a", 1, 0, 0, 4, 0, 0)
    assert known_already(syncer.machine, event) is None
    told = only(fx.AnswerUnits, syncer.handle(event))
    assert told.pieces == ((0, 4),)
    assert known_already(syncer.machine, event) == told
    for more in ({"upto": 5}, {"begin": 6}, {"floor": 10}):
        changed = ev.UnitsAsked(7, "a", 1, **{"known": 4, "begin": 4, "upto": 4, "floor": 0, "again": 0, **more})
        assert known_already(syncer.machine, changed) is None, more
    assert ask(syncer, "b", 2) == ((4, 2),)
    assert ask(syncer, "a", 4) == ((0, 4),), "the same ask, the same answer"
    assert ask(syncer, "a", 6, known=4) == ((6, 2),)
    assert counts(syncer).leased == counts(syncer).in_hand == 8


def test_what_a_site_that_leaves_has_not_begun_is_leased_again_and_what_it_has_begun_never() -> None:
    syncer = leasing("a", "b")
    ask(syncer, "a", 5)
    merge(syncer, "a", 1, (0, 15))
    effects = syncer.handle(ev.SiteLeft(1, "a", 1))
    assert "units_given_back" in notes(effects)
    assert (counts(syncer).merged, counts(syncer).partly, counts(syncer).given_back) == (1, 1, 3)
    assert ask(syncer, "b", 4) == ((2, 4),), "three of them, and then a fresh one"
    assert (counts(syncer).reissued, counts(syncer).partly, counts(syncer).in_hand) == (3, 1, 4)


def test_what_an_update_names_beyond_its_sites_list_counts_for_nothing_and_is_not_kept() -> None:
    syncer = leasing("a")
    ask(syncer, "a", 2)
    merge(syncer, "a", 1, (0, 10), (20, 30), (500, 510))
    units = syncer.machine.state.units
    assert units is not None
    assert units.holders["a"].merged == [[(0, 10)]], "no more was leased"
    ask(syncer, "a", 4, known=2)
    assert (counts(syncer).merged, counts(syncer).in_hand) == (1, 3)


def test_what_an_undecided_update_has_consumed_stays_in_hand_when_its_site_is_gone() -> None:
    syncer = leasing("a", "b", quorum=2)
    ask(syncer, "a", 3)
    syncer.push("a", 1, spans=((0, 20),), cursor=20)
    syncer.handle(ev.SiteLeft(1, "a", 1))
    assert (counts(syncer).in_hand, counts(syncer).given_back) == (2, 1)
    syncer.handle(ev.UpdateWithdrawn(1, "a", 0, 1))
    assert (counts(syncer).in_hand, counts(syncer).given_back) == (0, 3)


def test_a_silent_site_has_its_units_until_its_lease_runs_out_and_one_that_asks_is_there() -> None:
    syncer = leasing("a", "b")
    ask(syncer, "a", 3)
    syncer.handle(ev.SiteSilent("a"), at_s=10)
    assert (counts(syncer).in_hand, syncer.machine.next_deadline_ns()) == (3, 40 * SECOND_NS)
    syncer.handle(ev.SiteHeard("a"), at_s=20)
    assert (counts(syncer).in_hand, syncer.machine.next_deadline_ns()) == (3, None), "it was heard in time"
    syncer.handle(ev.SiteSilent("a"), at_s=30)
    assert notes(syncer.deadline(60)) == ["units_given_back"]
    assert (counts(syncer).given_back, syncer.machine.next_deadline_ns()) == (3, None)
    asks = ev.UnitsAsked(1, "a", 1, begin=0, known=0, upto=3, floor=0, again=0)
    assert known_already(syncer.machine, asks) is None, "it has nothing of its list at the moment"
    assert ask(syncer, "a", 5) == ((0, 5),)
    assert (counts(syncer).in_hand, counts(syncer).given_back, counts(syncer).reissued) == (5, 0, 0)
    assert syncer.machine.state.sites["a"].status is Status.LIVE


def test_a_site_that_comes_back_has_what_is_free_and_what_another_has_counts_once() -> None:
    syncer = leasing("a", "b")
    ask(syncer, "a", 4)
    syncer.handle(ev.SiteLeft(1, "a", 1))
    assert ask(syncer, "b", 2) == ((0, 2),)
    syncer.join("a", "p2")
    assert (counts(syncer).in_hand, counts(syncer).given_back) == (4, 0)
    merge(syncer, "a", 1, (0, 30), incarnation=2)
    assert (counts(syncer).merged, counts(syncer).repeated) == (3, 0)
    merge(syncer, "b", 1, (0, 20))
    assert (counts(syncer).merged, counts(syncer).repeated) == (3, 2)


def test_what_a_site_has_given_up_is_leased_again_or_partly_and_nothing_that_an_accepted_update_has() -> None:
    syncer = leasing("a", "b", num_fragments=2)
    ask(syncer, "a", 6)
    merge(syncer, "a", 1, (0, 40))
    merge(syncer, "a", 1, (0, 10), (20, 40), fragment=1)  # What lies between was thrown away of this fragment.
    assert counts(syncer).merged == 3
    ask(syncer, "a", 6, known=6, floor=55)
    assert (counts(syncer).merged, counts(syncer).partly) == (3, 1)
    assert (counts(syncer).given_back, counts(syncer).in_hand) == (1, 1)
    assert ask(syncer, "b", 1) == ((4, 1),)
    syncer = leasing("a", "b", quorum=2)
    ask(syncer, "a", 4)
    syncer.push("a", 1, spans=((0, 15),), cursor=15)
    ask(syncer, "a", 4, known=4, floor=30)
    assert counts(syncer).in_hand == 4


def test_the_places_that_a_site_filled_by_itself_are_skipped() -> None:
    syncer = leasing("a")
    ask(syncer, "a", 2)
    assert ask(syncer, "a", 7, known=2, begin=5, again=3) == ((SKIPPED, 3), (2, 2))
    merge(syncer, "a", 1, (0, 20), (50, 70))
    assert (counts(syncer).merged, counts(syncer).repeated) == (4, 3)


def test_what_comes_late_in_its_last_fragment_alone_is_shown_as_repeated() -> None:
    syncer = leasing("a", "b", num_fragments=2)
    ask(syncer, "a", 3)
    syncer.handle(ev.SiteLeft(1, "a", 1))
    assert ask(syncer, "b", 2) == ((0, 2),)
    syncer.join("a", "p2")
    merge(syncer, "a", 1, (0, 20), incarnation=2)
    ask(syncer, "a", 3, known=3, floor=20, incarnation=2)
    for fragment in (0, 1):
        merge(syncer, "b", 1, (0, 20), fragment=fragment)
    assert (counts(syncer).merged, counts(syncer).repeated) == (2, 0)
    syncer.join("a", "p3")
    merge(syncer, "a", 1, (0, 15), fragment=1, incarnation=3)
    assert (counts(syncer).merged, counts(syncer).repeated) == (2, 1)
    merge(syncer, "a", 2, (15, 20), fragment=1, incarnation=3)
    assert (counts(syncer).merged, counts(syncer).repeated) == (2, 2)


def test_what_comes_late_of_a_unit_that_was_given_back_keeps_it_from_being_leased_again() -> None:
    syncer = leasing("a", "b")
    ask(syncer, "a", 4)
    merge(syncer, "a", 1, (0, 10))
    ask(syncer, "a", 4, known=4, floor=30)
    assert (counts(syncer).merged, counts(syncer).given_back) == (1, 2)
    merge(syncer, "a", 2, (10, 20))
    assert (counts(syncer).partly, counts(syncer).given_back) == (1, 1)
    assert ask(syncer, "b", 1) == ((2, 1),)


def test_an_ask_for_a_site_by_another_or_where_nothing_is_leased_changes_nothing() -> None:
    syncer = leasing("a")
    before = syncer.machine.snapshot()
    for site, incarnation, reason in (("a", 2, Reason.FENCED), ("z", 1, Reason.NOT_JOINED)):
        event = ev.UnitsAsked(1, site, incarnation, 0, 0, 4, 0, 0)
        told = known_already(syncer.machine, event)
        assert told == fx.AnswerUnits(1, 0, (), reason)
        assert syncer.handle(event) == [told]
    assert syncer.machine.snapshot() == before
    syncer = running("a")
    merge(syncer, "a", 1, (0, 10))
    refused = only(fx.AnswerUnits, syncer.handle(ev.UnitsAsked(1, "a", 1, 0, 0, 4, 0, 0)))
    assert (refused.reason, syncer.machine.state.units) == (Reason.NOT_JOINED, None)


def test_all_sites_draw_from_the_text_of_the_first() -> None:
    syncer = leasing()
    join = ev.JoinRequested(1, "a", "p1", corpus="one")
    assert only(fx.AnswerJoin, syncer.handle(join)).reason is None
    other = syncer.handle(ev.JoinRequested(1, "b", "p1", corpus="two"))
    assert only(fx.AnswerJoin, other).reason is Reason.OTHER_DATA
    assert list(syncer.machine.state.sites) == ["a"]
    assert only(fx.AnswerJoin, syncer.handle(join)).reason is None


def test_a_restart_and_a_replay_give_the_same_leases() -> None:
    syncer = leasing("a", "b")
    ask(syncer, "a", 4)
    merge(syncer, "a", 1, (0, 25))
    syncer.handle(ev.SiteEvicted(1, "a"))
    ask(syncer, "b", 3)
    twin = OuterSync(syncer.options)
    for _ in replay(twin, syncer.records):
        pass
    assert twin.state == syncer.machine.state
    syncer.restart()
    assert syncer.machine.state.units == twin.state.units


# --- Units at a site -------------------------------------------------------------------------------------------------


def reading(**options: object) -> Site:
    """A site whose step reads one sequence, of units of four."""
    site = Site(
        cold=True, **{"unit_sequences": 4, "sequence_tokens": 10, "units_ahead": 3, "inner_steps": 5, **options}
    )
    site.join()
    site.fetched(0)
    return site


def asked(site: Site) -> UnitAsk:
    return ask_of(site.options, site.machine.state)


def unit_at(site: Site, place: int) -> int:
    return units_from(site.machine.state, place, 1)[0][0][0]


def tell(site: Site, first: int, *pieces: tuple[int, int]) -> None:
    site.handle(ev.UnitsTold(first, pieces))


def test_a_site_trains_once_it_has_units_and_an_update_names_what_it_has_consumed() -> None:
    site = reading()
    assert not site.machine.ready()
    assert asked(site) == UnitAsk(known=0, begin=0, upto=3, floor=0, again=0)
    tell(site, 0, (7, 3))
    assert site.machine.ready()
    assert [unit_at(site, place) for place in range(3)] == [7, 8, 9]
    site.train(3)
    site.restart(site.machine.snapshot())
    assert unit_at(site, 2) == 9, "a checkpoint has the list"
    site.join()
    assert only(fx.Seal, site.train(2)).spans == ((0, 5),)
    site.seal(1)
    site.answer(1)
    assert only(fx.Seal, site.train(5)).spans == ((5, 10),)
    assert asked(site).floor == 0, "the first one can still be refused, and sent again"
    site.fate(1, 1, tokens=50)
    assert asked(site).floor == 5
    site = reading(inner_steps=1)
    tell(site, 0, (7, 3))
    seal = only(fx.Seal, site.handle(ev.StepDone(1, 999, 1000, 2, sequences=2)))
    assert (seal.spans, seal.tokens) == (((0, 2),), 999), "a loop may count tokens as it likes"
    assert only(fx.Seal, Site(inner_steps=5).train(5)).spans == (), "where nothing is leased nothing is named"


@pytest.mark.parametrize(
    ("reason", "floor", "spans"),
    [(Reason.OVERLOAD, 0, ((0, 7),)), (Reason.OUTLIER, 7, ((7, 10),))],
    ids=["kept, and named by the next", "thrown away, and named by none"],
)
def test_what_a_refused_update_has_consumed(reason: Reason, floor: int, spans: tuple[Span, ...]) -> None:
    site = reading()
    tell(site, 0, (7, 3))
    site.send(1, steps=5)
    site.train(2)
    site.fate(1, 0, reason, tokens=50)
    effects = site.boundary()
    assert asked(site).floor == floor
    assert only(fx.Seal, effects + site.train(3)).spans == spans


@pytest.mark.parametrize(("adopt", "tokens"), [("rebase", 50), ("overwrite", 30), ("blend", 30)])
def test_what_overwritten_progress_has_consumed_counts_as_consumed(adopt: str, tokens: int) -> None:
    site = reading(adopt=adopt)
    tell(site, 0, (7, 3))
    site.send(1, steps=5)
    site.train(2)
    assert only(fx.Adopt, site.fetched(1, ev.Fate(0, 1, 1, 50, "u1"))).merged == (1,)
    seal = only(fx.Seal, site.train(3))
    assert (seal.spans, seal.tokens) == (((5, 10),), tokens)


def test_a_site_that_runs_out_draws_its_own_over_again_and_does_not_name_it() -> None:
    site = reading(inner_steps=11)
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
    site = reading()
    tell(site, 0, (7, 2))
    units_from(site.machine.state, 2, 1)
    tell(site, 2, (9, 3))  # The answer to an ask from before that.
    assert units_from(site.machine.state, 2, 1)[1]
    assert unit_at(site, 3) == 10
    assert asked(site).known == 5


def test_more_is_asked_for_before_the_end_and_by_no_site_that_stops() -> None:
    site = reading(units_ahead=4)
    tell(site, 0, (0, 4))
    site.train(4)
    assert not wants_soon(site.options, site.machine.state), "three units are left"
    site.train(8)
    assert wants_soon(site.options, site.machine.state)
    assert asked(site).upto == 7
    site.handle(ev.LeaveAsked())
    assert asked(site).upto == 4
    assert not wants_soon(site.options, site.machine.state)


def test_a_process_without_memory_takes_up_its_list_where_accepted_updates_end() -> None:
    site = Site(cold=True, unit_sequences=4, sequence_tokens=10, units_ahead=3)
    site.join(known(watermark=2, cursor=10))
    assert asked(site) == UnitAsk(known=2, begin=3, upto=5, floor=10, again=0)
    tell(site, 2, (30, 2))
    assert unit_at(site, 2) == 30


def test_a_restored_run_knows_of_no_later_units() -> None:
    site = reading()
    tell(site, 0, (7, 3))
    site.train(2)
    site.join(lineage=2)
    assert (asked(site).known, asked(site).begin) == (1, 1)
    units, again = units_from(site.machine.state, 0, 1)
    assert again, "what is left of the unit that was begun is no site's"
    assert 7 <= units[0][0] < 10
    site.fetched(0)
    tell(site, 0, (30, 4))
    assert only(fx.Seal, site.train(8)).spans == ((4, 5),), "from the next place on"


def test_a_list_does_not_grow_with_the_run() -> None:
    site = reading(inner_steps=10_000)
    for place in range(300):
        tell(site, place, (5 * place, 1))
        site.train(4)
    units = site.machine.state.units
    assert units.end - units.first <= REMEMBERED + 1
    assert len(units.pieces) <= REMEMBERED + 1
    assert site.machine.state.fragments[0].unsent_spans == [(0, 1200)]
