"""The outer machine as a whole: invariants over its life, one fate for each update, the last round, any order."""

from __future__ import annotations

import dataclasses
import functools
import random
from types import SimpleNamespace
from typing import Any

import pytest

from diloco.sim.checkers import ExactlyOnce, Staleness, Versions, Weights
from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.admission import admit
from diloco.sync.events import Ending, Outcome, Reason
from diloco.sync.journal import read_records
from diloco.sync.options import SECOND_NS, OuterOptions
from diloco.sync.state import Attendance, Phase, Status
from diloco.sync.syncer import OuterSync
from tests.sync.driving import MS, Syncer, of, only, replay, running, through_json
from tests.sync.format_1 import encode_record


def test_invariant_9_an_update_sent_many_times_is_merged_once_also_through_a_restart_and_an_eviction() -> None:
    syncer = running("a", "b", quorum=2)
    for _ in range(3):
        syncer.push("a")
    first = only(fx.StartOuterStep, syncer.push("b"))
    assert [[update.sequence for update in part.updates] for part in first.contributions] == [[1], [1]]
    syncer.handle(ev.SiteEvicted(1, "b"))
    assert only(fx.StartOuterStep, syncer.restart()) == first
    assert [tell.fate.merged for tell in of(fx.TellFate, syncer.done())] == [True, True]
    for _ in range(3):
        (answer,) = syncer.push("a")
        assert isinstance(answer, fx.AnswerPush)
        assert answer.fate is not None
        assert answer.fate.version == 1


def test_progress_is_the_further_of_tokens_and_time() -> None:
    syncer = running("a", token_budget=1000, run_ns=100 * SECOND_NS)
    syncer.push("a", tokens=250, at_s=10)
    syncer.done()
    assert syncer.machine.progress_ppm() == 250_000
    syncer.handle(ev.SiteHeard("a"), 50)
    assert syncer.machine.progress_ppm() == 500_000


def test_a_snapshot_of_other_fragments_is_refused() -> None:
    with pytest.raises(AssertionError, match="other fragments"):
        OuterSync.restore(OuterOptions(num_fragments=2), running("a").machine.snapshot())


@pytest.mark.parametrize("forgets", ["set_status", "line_changed"])
def test_a_count_that_is_not_kept_along_is_found(forgets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attendance, forgets, lambda *_: None)
    with pytest.raises(AssertionError):
        running("b", "a").push("a")


# --- Exactly one fate for every accepted update ----------------------------------------------------------------------


def test_fates_are_counted_by_reason_and_the_newest_are_kept() -> None:
    syncer = running("a", staleness_max=0, updates_in_flight_max=1, fates_kept_max=2)
    for number in range(1, 4):
        syncer.push("a", number, base_version=number - 1)
        syncer.done()
    line = syncer.machine.state.sites["a"].lines[0]
    assert [fate.sequence for fate in line.fates] == [2, 3]
    assert (line.updates_merged, line.tokens_merged, line.updates_refused) == (3, 300, {})


# --- The last round --------------------------------------------------------------------------------------------------


def test_last_round_waits_for_progress_that_was_refused_and_kept() -> None:
    syncer = running("a", staleness_max=0)
    syncer.push("a")
    syncer.push("a", 2, final=True)  # It waits for a merge after which it is stale: its progress comes again.
    syncer.handle(ev.DrainRequested(1))
    effects = syncer.done()
    assert of(fx.TellFate, effects)[-1].fate.reason is Reason.STALE
    assert not of(fx.MarkFinal, effects), "the run ended before the kept progress could be sent again"
    assert of(fx.StartOuterStep, syncer.push("a", 3, base_version=1, final=True))
    assert of(fx.MarkFinal, syncer.done())


def test_last_round_does_not_wait_for_a_site_that_may_send_nothing_more() -> None:
    syncer = running("a", quorum=2, updates_in_flight_max=2)
    syncer.push("a")
    syncer.push("a", 2)  # Its window is full: it cannot send its last update before these two have their fate.
    assert of(fx.StartOuterStep, syncer.handle(ev.DrainRequested(1)))
    assert not of(fx.MarkFinal, syncer.done())
    syncer.push("a", 3, base_version=1, final=True)
    assert of(fx.MarkFinal, syncer.done())


def test_restart_says_the_end_again() -> None:
    syncer = running("a", token_budget=100)
    syncer.push("a")
    assert of(fx.AnnounceFinal, syncer.done())
    assert only(fx.AnnounceFinal, syncer.restart()).ending is Ending.FINISHED
    marked = only(fx.MarkFinal, syncer.handle(ev.SiteLeft(1, "a", 1)))
    assert only(fx.MarkFinal, syncer.restart()) == marked, "a crash between the record and the mark would lose the mark"


# --- The outer machine under any order of legal and illegal events, from seeds ---------------------------------------

EVENTS = 120


class Book:
    """What the effects have promised so far, judged by what judges the simulator's runs."""

    def __init__(self, syncer: Syncer) -> None:
        plan: Any = SimpleNamespace(options=syncer.options)
        self.syncer = syncer
        self.once = ExactlyOnce(plan)
        self.checkers = [self.once, Weights(plan), Versions(plan), Staleness(plan)]

    def happen(self, event: ev.OuterEvent) -> list[fx.OuterEffect]:
        """Hand in the event and judge what comes of it."""
        syncer = self.syncer
        admitted = isinstance(event, ev.UpdateArrived) and self.is_admitted(event)
        before = syncer.machine.snapshot() if isinstance(event, ev.UpdateArrived) and not admitted else None
        deadline_ns = syncer.machine.next_deadline_ns()
        effects = syncer.handle(event)
        for checker in self.checkers:
            checker.outer(syncer.now_ns, event, effects, syncer.machine)
        if isinstance(event, ev.UpdateArrived) and of(fx.AnswerPush, effects)[0].outcome is not Outcome.ACCEPTED:
            assert isinstance(before, dict), "the header alone was admitted"
            if deadline_ns is None or deadline_ns > syncer.now_ns:
                after = syncer.machine.snapshot()
                assert after == before | {"now_ns": syncer.now_ns}, "invariant 15: a refused update changed the memory"
                assert len(effects) == 1
        wanted = syncer.machine.next_deadline_ns()
        assert wanted is None or wanted > syncer.now_ns, "a deadline that has passed is asked for again"
        return effects

    def is_admitted(self, event: ev.UpdateArrived) -> bool:
        header = (event.site, event.incarnation, event.fragment, event.sequence, event.base_version, event.digest)
        late = self.syncer.machine.state.final_deadline_ns is not None  # It may have passed since the last event.
        verdict = admit(self.syncer.machine, *header)
        return not late and event.finite and verdict.outcome is Outcome.ACCEPTED


def options_of(draw: random.Random) -> dict[str, Any]:
    quorum = draw.choice(["all", 1, 2, 3])
    return {
        "num_fragments": draw.randint(1, 3),
        "quorum": quorum,
        "quorum_min": draw.randint(1, 2 if quorum == "all" else int(quorum)),
        "grace": draw.choice(["fixed", "adaptive"]),
        "grace_ns": draw.choice([0, SECOND_NS]),
        "overlap_steps": draw.randint(0, 20),
        "weights": draw.choice(["tokens2_per_step", "tokens", "uniform"]),
        "round_updates": draw.choice([0, 0, 1, 3]) if quorum == 1 else 0,
        "merge_by": (merge_by := draw.choice(["site", "site", "update"])),
        "share_weighted": merge_by == "site" and draw.random() < 0.5,
        "staleness_power": draw.choice([0.0, 0.5]),
        "staleness_max": (stale := draw.choice([0, 1, 8])),
        "updates_in_flight_max": (window := draw.randint(1, 3)),
        "final_wait_ns": 5 * SECOND_NS,
        "token_budget": draw.choice([0, 5000]),
        "run_ns": draw.choice([0, 60 * SECOND_NS]),
        "fates_kept_max": draw.choice([window * (stale + 2), 64]),
        "sites_max": 4,
    }


def an_update(draw: random.Random, syncer: Syncer) -> ev.OuterEvent:
    """An update that is mostly right: its number, base, content or sender may be wrong."""
    state = syncer.machine.state
    name = draw.choice([*sorted(state.sites), "nobody"])
    site = state.sites.get(name)
    fragment = draw.randrange(len(state.fragments))
    watermark = site.lines[fragment].watermark if site else 0
    sequence = max(0, watermark + draw.choice([1, 1, 1, 1, 0, -1, 2]))
    version = state.fragments[fragment].version
    steps = draw.randint(1, 20)
    return syncer.update(
        name,
        sequence,
        incarnation=(site.incarnation if site else 1) - (draw.random() < 0.05),
        fragment=fragment if draw.random() < 0.97 else draw.choice([-1, 99]),
        base_version=version - draw.choice([0, 0, 0, 1, 2, 9, -1]),
        tokens=steps * draw.randint(50, 100),
        steps=steps,
        step_ns=draw.choice([0, MS, 500 * MS]),
        cursor=draw.randint(0, 1000),
        digest=f"{name}.{fragment}.{sequence}" + ("!" if draw.random() < 0.1 else ""),
        finite=draw.random() < 0.95,
        final=state.phase is not Phase.RUNNING and draw.random() < 0.5,
    )


def an_event(draw: random.Random, book: Book) -> ev.OuterEvent:
    syncer = book.syncer
    state = syncer.machine.state
    seen = sorted(state.sites)
    kind = draw.choices(
        ["update", "finish", "join", "silent", "heard", "left", "evict", "drain", "deadline", "restart"],
        [50, 25, 6, 4, 4, 1.5, 0.5, 0.3, 6, 2],
    )[0]
    if kind == "finish" and book.once.under_way:
        index = draw.choice(sorted(book.once.under_way))
        version = book.once.under_way[index].version
        if draw.random() < 0.1:
            return ev.OuterStepFailed(index, version)
        return ev.OuterStepDone(index, version, f"v{version}", f"d{version}")
    if kind == "join":
        return ev.JoinRequested(1, draw.choice("abcde"), draw.choice(["p1", "p1", "p2", "p3"]))
    if kind in ("silent", "heard") and seen:
        return {"silent": ev.SiteSilent, "heard": ev.SiteHeard}[kind](draw.choice(seen))
    if kind == "left":
        name = draw.choice([*seen, "nobody"])
        return ev.SiteLeft(1, name, state.sites[name].incarnation if name in seen else 1)
    if kind == "evict":
        return ev.SiteEvicted(1, draw.choice([*seen, "nobody"]))
    if kind == "drain":
        return ev.DrainRequested(1)
    if kind == "restart":
        syncer.machine = OuterSync.restore(syncer.options, through_json(syncer.machine.snapshot()))
        return ev.SyncerStarted(state.epoch + 1, sites_max=draw.choice([None, 2, 4, 5]))
    wanted = syncer.machine.next_deadline_ns()
    if kind == "deadline" and wanted is not None:
        syncer.now_ns = wanted
        return ev.DeadlinePassed()
    return an_update(draw, syncer)


def settle(book: Book) -> None:
    """Let pass what the machine waits for, and every outer step under way be done."""
    syncer = book.syncer
    for _ in range(20):
        while book.once.under_way:
            index, step = next(iter(book.once.under_way.items()))
            book.happen(ev.OuterStepDone(index, step.version, f"v{step.version}", "d"))
        wanted = syncer.machine.next_deadline_ns()
        if wanted is None:
            return
        syncer.now_ns = wanted
        book.happen(ev.DeadlinePassed())
    raise AssertionError("deadlines without end")


def heal(book: Book) -> None:
    """With enough live sites that all send something, every version rises: nothing waits for what cannot come."""
    syncer, state, options = book.syncer, book.syncer.machine.state, book.syncer.options
    settle(book)
    live = sorted(syncer.machine.attendance.live)
    needed = options.quorum_min if options.quorum == "all" else options.quorum
    before = [fragment.version for fragment in state.fragments]
    for index, version in enumerate(before):
        for name in live:
            site = state.sites[name]
            if len(site.lines[index].undecided) < options.updates_in_flight_max:
                sequence = site.lines[index].watermark + 1
                given = {"incarnation": site.incarnation, "base_version": version, "digest": f"{name}{index}{sequence}"}
                update = syncer.update(name, sequence, fragment=index, **given)
                book.happen(update)
    settle(book)
    if syncer.machine.state.phase is Phase.RUNNING and len(live) >= int(needed):
        after = [fragment.version for fragment in syncer.machine.state.fragments]
        assert all(new > old for new, old in zip(after, before, strict=True)), f"{before} -> {after} with {live} live"


def finish(book: Book) -> None:
    """Let everything come to an end: the last round must end by itself and leave no update without its fate."""
    syncer = book.syncer
    book.happen(ev.DrainRequested(1))
    settle(book)
    assert syncer.machine.state.phase is Phase.ENDED, "the last round hangs"
    assert book.once.fates.keys() == book.once.accepted.keys(), "invariant 9: an update has no fate at the end"


@functools.cache
def play(seed: int) -> Book:
    """The same one for all tests, which only read it."""
    draw = random.Random(seed)
    syncer = Syncer(**options_of(draw))
    book = Book(syncer)
    for _ in range(EVENTS):
        syncer.now_ns += draw.choice([0, 1, MS, 100 * MS, SECOND_NS])
        book.happen(an_event(draw, book))
    heal(book)
    finish(book)
    return book


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_events(seed: int) -> None:
    book = play(seed)
    records = book.syncer.records
    read, _ = read_records(b"".join(encode_record(record) for record in records))
    machine = OuterSync(dataclasses.replace(book.syncer.options, sites_max=1))  # What the journal says holds.
    list(replay(machine, read))
    assert machine.snapshot() == book.syncer.machine.snapshot()


def test_the_draws_reach_what_they_should() -> None:
    """A property that nothing puts to the test is no property: every outcome, reason and status comes up."""
    reasons: set[ev.Reason | None] = set()
    statuses, names = set(), set()
    for seed in range(20):
        book = play(seed)
        reasons |= {fate.reason for fate in book.once.fates.values()}
        statuses |= {site.status for site in book.syncer.machine.state.sites.values()}
        names |= {type(record.event).__name__ for record in book.syncer.records}
    assert reasons >= {None, ev.Reason.STALE, ev.Reason.NON_FINITE, ev.Reason.EVICTED}
    assert statuses == set(Status)
    assert len(names) == 11, names
