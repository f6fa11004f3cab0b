"""The outer machine's memory."""

from __future__ import annotations

from diloco.sync import effects as fx
from diloco.sync.journal import from_plain, to_plain
from diloco.sync.options import OuterOptions
from diloco.sync.state import (
    Attendance,
    FragmentState,
    Line,
    OuterState,
    Part,
    Pending,
    Site,
    Status,
    Turn,
    VersionAbove,
)
from tests.sync.driving import Syncer, through_json


def pending(sequence: int, *, merging: bool = False) -> Pending:
    return Pending(sequence, 0, 10, 1, "d", "p", "fp32", merging)


def test_sites_come_in_site_order_whatever_the_order_of_joining() -> None:
    for order in (["a", "b", "c"], ["c", "b", "a"]):
        state = OuterState([FragmentState()])
        for name in order:
            status = Status.SILENT if name == "b" else Status.LIVE
            state.sites[name] = Site(1, "p", status, [Line(undecided=[pending(1)])])
        assert state.live() == ["a", "c"]
        assert state.arrived(0) == ["a", "b", "c"], "an update counts when its site is silent"


def test_what_is_being_merged_has_left_the_next_round() -> None:
    line = Line(undecided=[pending(1, merging=True), pending(2)])
    assert [update.sequence for update in line.waiting()] == [2]
    state = OuterState([FragmentState()], sites={"a": Site(1, "p", Status.LIVE, [Line(undecided=line.undecided[:1])])})
    assert state.arrived(0) == []


def test_tokens_of_the_run_count_each_token_once() -> None:
    sites = {"a": Site(1, "p", Status.LIVE, [Line(tokens_merged=100), Line(tokens_merged=60)])}
    assert OuterState([FragmentState(), FragmentState()], sites=sites).run_tokens() == 80


def test_the_memory_survives_a_file() -> None:
    syncer = Syncer(num_fragments=2, grace="fixed")
    syncer.join("a")
    syncer.join("b")
    syncer.push("a")
    state = syncer.machine.state
    assert from_plain(OuterState, through_json(to_plain(state)), "state") == state


# --- One handling of an event ----------------------------------------------------------------------------------------


def test_notes_stand_among_the_effects_in_order() -> None:
    state = OuterState([FragmentState()])
    turn = Turn(OuterOptions(), state, Attendance(state))
    turn.effects.append(fx.AnswerDone(1))
    turn.note("grace", "for more", fragment=0)
    assert turn.effects == [fx.AnswerDone(1), fx.Note("grace", "for more", fragment=0)]


def test_a_part_needs_the_values_that_it_rests_on_waits_for_or_takes() -> None:
    one, two, three = (VersionAbove(number, f"payload {number}", "") for number in (1, 2, 3))
    part = Part(base=one, arrived=two, taking=three)
    assert all(part.needs(each.payload) for each in (one, two, three))
    assert not part.needs("payload 4")
    assert not Part().needs("")


def test_a_new_part_has_no_base() -> None:
    assert Part().progress.base_version == -1
