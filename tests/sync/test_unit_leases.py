"""Units of the data at the syncer: leased, merged, given back, leased again, repeated."""

from __future__ import annotations

from typing import Any

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.data_units import SKIPPED, Columns
from diloco.sync.events import Reason
from diloco.sync.fates import columns_of, known_already
from diloco.sync.journal import replay
from diloco.sync.options import SECOND_NS
from diloco.sync.state import Status
from diloco.sync.syncer import OuterSync
from tests.sync.driving import Syncer, notes, of, only, running

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
    found = columns_of(syncer.options, syncer.machine.state)
    assert found.balanced(), found
    return found


def test_units_are_leased_in_order_and_the_same_ask_gives_the_same_answer() -> None:
    syncer = leasing("a", "b")
    assert ask(syncer, "a", 4) == ((0, 4),)
    assert ask(syncer, "b", 2) == ((4, 2),)
    assert ask(syncer, "a", 4) == ((0, 4),)
    assert ask(syncer, "a", 6, known=4) == ((6, 2),)
    assert counts(syncer).leased == counts(syncer).in_hand == 8


def test_a_unit_counts_when_every_fragment_has_merged_all_of_it() -> None:
    syncer = leasing("a", num_fragments=2)
    ask(syncer, "a", 4)
    merge(syncer, "a", 1, (0, 25))
    assert counts(syncer).merged == 0
    merge(syncer, "a", 1, (0, 19), fragment=1)
    assert (counts(syncer).merged, counts(syncer).in_hand) == (1, 3)
    merge(syncer, "a", 2, (19, 25), fragment=1)
    assert counts(syncer).merged == 2


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


def test_a_silent_site_has_its_units_until_its_lease_runs_out() -> None:
    syncer = leasing("a", "b")
    ask(syncer, "a", 3)
    syncer.handle(ev.SiteSilent("a"), at_s=10)
    assert counts(syncer).in_hand == 3
    assert syncer.machine.next_deadline_ns() == 40 * SECOND_NS
    effects = syncer.deadline()
    assert only(fx.Note, effects).what == "units_given_back"
    assert counts(syncer).given_back == 3
    assert syncer.machine.next_deadline_ns() is None


def test_a_site_that_is_heard_in_time_keeps_its_units() -> None:
    syncer = leasing("a")
    ask(syncer, "a", 3)
    syncer.handle(ev.SiteSilent("a"), at_s=10)
    syncer.handle(ev.SiteHeard("a"), at_s=20)
    assert syncer.machine.next_deadline_ns() is None
    assert counts(syncer).in_hand == 3


def test_a_site_that_asks_is_there() -> None:
    syncer = leasing("a", "b")
    ask(syncer, "a", 3)
    syncer.handle(ev.SiteSilent("a"), at_s=10)
    syncer.deadline()
    asks = ev.UnitsAsked(1, "a", 1, begin=0, known=0, upto=3, floor=0, again=0)
    assert known_already(syncer.options, syncer.machine.state, asks) is None, "it has nothing of its list at the moment"
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


def test_what_a_site_has_given_up_is_leased_again_or_partly() -> None:
    syncer = leasing("a", "b", num_fragments=2)
    ask(syncer, "a", 6)
    merge(syncer, "a", 1, (0, 40))
    merge(syncer, "a", 1, (0, 10), (20, 40), fragment=1)  # What lies between was thrown away of this fragment.
    assert counts(syncer).merged == 3
    ask(syncer, "a", 6, known=6, floor=55)
    assert (counts(syncer).merged, counts(syncer).partly) == (3, 1)
    assert (counts(syncer).given_back, counts(syncer).in_hand) == (1, 1)
    assert ask(syncer, "b", 1) == ((4, 1),)


def test_a_floor_gives_up_nothing_that_an_accepted_update_has() -> None:
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


def test_what_a_later_process_names_of_what_was_given_up_is_shown_as_repeated() -> None:
    syncer = leasing("a", "b")
    ask(syncer, "a", 3)
    ask(syncer, "a", 3, known=3, floor=20)
    assert ask(syncer, "b", 2) == ((0, 2),)
    merge(syncer, "b", 1, (0, 20))
    syncer.join("a", "p2")
    merge(syncer, "a", 1, (0, 20), incarnation=2)
    assert (counts(syncer).merged, counts(syncer).repeated) == (2, 2)


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


def test_an_ask_of_who_does_not_speak_for_the_site_changes_nothing() -> None:
    syncer = leasing("a")
    before = syncer.machine.snapshot()
    for site, incarnation, reason in (("a", 2, Reason.FENCED), ("z", 1, Reason.NOT_JOINED)):
        event = ev.UnitsAsked(1, site, incarnation, 0, 0, 4, 0, 0)
        told = known_already(syncer.options, syncer.machine.state, event)
        assert told == fx.AnswerUnits(1, 0, (), reason)
        assert syncer.handle(event) == [told]
    assert syncer.machine.snapshot() == before


def test_an_ask_that_changes_nothing_is_answered_without_the_machine() -> None:
    syncer = leasing("a")
    event = ev.UnitsAsked(7, "a", 1, 0, 0, 4, 0, 0)
    assert known_already(syncer.options, syncer.machine.state, event) is None
    effects = syncer.handle(event)
    assert known_already(syncer.options, syncer.machine.state, event) == only(fx.AnswerUnits, effects)
    for more in ({"upto": 5}, {"begin": 6}, {"floor": 10}):
        fields = {"known": 4, "begin": 4, "upto": 4, "floor": 0, "again": 0, **more}
        changed = ev.UnitsAsked(7, "a", 1, **fields)
        assert known_already(syncer.options, syncer.machine.state, changed) is None, more


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


def test_where_nothing_is_leased_nothing_is_remembered_of_units() -> None:
    syncer = running("a")
    merge(syncer, "a", 1, (0, 10))
    assert syncer.machine.state.units is None
    assert not of(fx.AnswerUnits, syncer.handle(ev.SiteLeft(1, "a", 1)))
    refused = only(fx.AnswerUnits, syncer.handle(ev.UnitsAsked(1, "a", 1, 0, 0, 4, 0, 0)))
    assert refused.reason is Reason.NOT_JOINED
