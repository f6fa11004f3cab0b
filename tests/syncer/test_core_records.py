"""What the decision loop journals, and what it need not."""

from __future__ import annotations

import random

from diloco.sync.effects import AnswerDone, OuterEffect, StartOuterStep
from diloco.sync.events import (
    DeadlinePassed,
    DrainRequested,
    JoinRequested,
    Outcome,
    OuterEvent,
    OuterStepDone,
    OuterStepFailed,
    Reason,
    SiteEvicted,
    SiteHeard,
    SiteLeft,
    SiteSilent,
    SyncerStarted,
)
from diloco.sync.options import OuterOptions
from diloco.sync.syncer import OuterSync
from diloco.syncer.core import Core, changes_nothing
from tests.syncer.building import eventually
from tests.syncer.test_core import Journal, arrived, running

MS = 1_000_000


def without_time(machine: OuterSync) -> object:
    plain = machine.snapshot()
    assert isinstance(plain, dict)
    return {**plain, "now_ns": 0}


def any_event(dice: random.Random, machine: OuterSync) -> OuterEvent:
    site = dice.choice(("a", "b", "c", "d"))
    known = machine.state.sites.get(site)
    fragment = dice.randrange(2)
    merging = [i for i, each in enumerate(machine.state.fragments) if each.merging_since_ns is not None]
    kind = dice.random()
    if merging and kind < 0.2:
        index = dice.choice(merging)
        version = machine.state.fragments[index].version + 1
        if dice.random() < 0.15:
            return OuterStepFailed(index, version)
        return OuterStepDone(index, version, f"v{version}", "d")
    if kind < 0.55:
        line = known.lines[fragment] if known else None
        follows = line.watermark + 1 if line else 1
        version = machine.state.fragments[fragment].version
        sequence = max(0, follows + dice.choice((0, 0, 0, -1, -2, 1)))
        return arrived(
            1,
            site,
            sequence,
            fragment=fragment,
            incarnation=dice.choice((known.incarnation if known else 1,) * 5 + (1, 9)),
            base_version=max(0, version - dice.choice((0, 0, 1, 2, 5))),
            digest=f"{site}{fragment}{sequence}{dice.choice(('', '', '', '!'))}",
            finite=dice.random() > 0.05,
            final=dice.random() < 0.3,
        )
    if kind < 0.70:
        return JoinRequested(1, site, f"p{dice.randrange(3)}")
    if kind < 0.80:
        return dice.choice((SiteSilent, SiteHeard))(site) if known else DeadlinePassed()
    if kind < 0.84:
        return SiteLeft(1, site, known.incarnation if known and dice.random() < 0.7 else 7)
    if kind < 0.85:
        return SiteEvicted(1, site)
    if kind < 0.853:
        return DrainRequested(1)
    return DeadlinePassed()


def test_what_is_not_journalled_has_changed_nothing_but_the_clock() -> None:
    """Against the machine itself, over random runs; otherwise a replay would lose what was decided."""
    skipped: set[str] = set()
    for seed in range(16):
        dice = random.Random(seed)
        options = OuterOptions(
            num_fragments=2,
            quorum=dice.choice((1, 2, "all")),
            grace=dice.choice(("fixed", "adaptive")),
            grace_ns=dice.choice((0, 5 * MS, 50 * MS)),
            staleness_max=dice.choice((1, 4)),
            token_budget=dice.choice((0, 3000)),
            run_ns=dice.choice((0, 400 * MS)),
            final_wait_ns=50 * MS,
            sites_max=3,
        )
        machine = OuterSync(options)
        machine.handle(SyncerStarted(1), 0)
        now_ns = 0
        for number in range(120):
            event = any_event(dice, machine)
            now_ns += dice.choice((0, 1, MS, 20 * MS))
            before = without_time(machine)
            effects = machine.handle(event, now_ns)
            if changes_nothing(event, effects):
                assert without_time(machine) == before, (seed, number, event, effects)
                skipped.add(type(event).__name__)
    assert skipped >= {"DeadlinePassed", "UpdateArrived", "JoinRequested", "SiteSilent", "SiteHeard", "SiteLeft"}


def test_what_was_due_is_decided_by_a_record_of_its_own() -> None:
    """An update that is refused as a round's grace ends is not journalled: nobody keeps its payload."""
    clock_ns = [0]
    with running(clock_ns=lambda: clock_ns[0], grace_ns=1000, quorum=1, num_fragments=2) as desk:
        desk.join("a")
        desk.join("b")
        assert desk.push("a", 1).outcome is Outcome.ACCEPTED
        clock_ns[0] = 5000
        answer = desk.push("b", 1, payload="", finite=False)
        assert answer.reason is Reason.NON_FINITE
        kinds = [type(event).__name__ for event in desk.disk.events]
        assert kinds.count("UpdateArrived") == 1
        assert "DeadlinePassed" in kinds


def test_heartbeats_and_refusals_write_nothing() -> None:
    with running() as desk:
        desk.join("a")
        written = len(desk.disk.events)
        for _ in range(50):
            desk.core.heard("a")
        desk.join("a")
        assert desk.push("a", 5).reason is Reason.GAP
        assert desk.push("b", 1).reason is Reason.NOT_JOINED
        answer = desk.core.call(lambda call: SiteEvicted(call, "nobody"))
        assert isinstance(answer, AnswerDone)
        assert answer.reason is Reason.NOT_JOINED
        assert len(desk.disk.events) == written


def test_a_start_is_decided_before_what_came_due_while_nobody_was_there() -> None:
    """Otherwise the round's outer step is begun by the deadline and once more by the start, and its end comes twice."""
    clock_ns = [0]
    with running(clock_ns=lambda: clock_ns[0], grace_ns=1000, quorum=1) as desk:
        desk.join("a")
        desk.join("b")
        assert desk.push("a", 1).outcome is Outcome.ACCEPTED
    journal, effects = Journal(), list[OuterEffect]()
    core = Core(desk.core.machine, journal, effects.append, clock_ns=lambda: clock_ns[0])  # type: ignore[arg-type]
    clock_ns[0] = 5000
    core.post(SyncerStarted(2))
    core.start()
    try:
        eventually(lambda: any(isinstance(effect, StartOuterStep) for effect in effects), "the round is closed")
    finally:
        core.stop()
    assert core.failed is None
    assert isinstance(journal.events[0], SyncerStarted)
    assert sum(isinstance(effect, StartOuterStep) for effect in effects) == 1
