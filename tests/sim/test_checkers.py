"""Each checker of the syncer by hand; ``test_mutants`` shows them against broken machines."""

from __future__ import annotations

import pytest

from diloco.sim.checkers import Staleness, Versions, Violation, Weights, accepted
from diloco.sim.world import OuterPlan, OuterRule
from diloco.sync.effects import AnswerPush, Contribution, StartOuterStep, UpdateRef
from diloco.sync.events import Outcome, UpdateArrived
from diloco.sync.options import OuterOptions
from diloco.sync.syncer import OuterSync

OPTIONS = OuterOptions(staleness_max=2, weights="tokens")
PLAN = OuterPlan(OPTIONS, OuterRule())


def update(site: str, tokens: int = 10, base_version: int = 0) -> UpdateArrived:
    return UpdateArrived(
        call=1,
        site=site,
        incarnation=1,
        fragment=0,
        sequence=1,
        base_version=base_version,
        tokens=tokens,
        steps=1,
        step_ns=1,
        cursor=1,
        digest=site,
        payload=site,
        encoding="exact",
        finite=True,
        final=False,
    )


def step(version: int, **weights: float) -> StartOuterStep:
    parts = (Contribution(site, weight, 0, (UpdateRef(1, site, "exact", site),)) for site, weight in weights.items())
    return StartOuterStep(0, version, tuple(parts))


YES = AnswerPush(1, Outcome.ACCEPTED, 0)
MACHINE = OuterSync(OPTIONS)


def test_accepted_is_what_was_answered_so() -> None:
    assert accepted(update("a"), [YES]) == update("a")
    assert accepted(update("a"), [AnswerPush(1, Outcome.DUPLICATE, 0)]) is None


def test_weights_follow_the_rule() -> None:
    checker = Weights(PLAN)
    checker.outer(0, update("a", tokens=10), [YES], MACHINE)
    with pytest.raises(Violation, match="should be"):
        checker.outer(0, update("b", tokens=30), [YES, step(1, a=0.5, b=0.5)], MACHINE)
    checker = Weights(PLAN)
    checker.outer(0, update("a", tokens=10), [YES], MACHINE)
    checker.outer(0, update("b", tokens=30), [YES, step(1, a=0.25, b=0.75)], MACHINE)
    with pytest.raises(Violation, match="again and was"):
        checker.outer(0, update("c"), [step(1, a=0.5, b=0.5)], MACHINE)
    with pytest.raises(Violation, match="sum to"):
        checker.outer(0, update("c"), [step(1, a=0.25, b=0.8)], MACHINE)


def test_staleness_is_judged_at_the_merge() -> None:
    checker = Staleness(PLAN)
    checker.outer(0, update("a", base_version=1), [YES], MACHINE)
    checker.outer(0, update("a"), [step(4, a=1.0)], MACHINE)
    assert checker.worst == 2
    with pytest.raises(Violation, match="at staleness 3"):
        checker.outer(0, update("a"), [step(5, a=1.0)], MACHINE)


def test_version_that_nobody_announced_is_seen() -> None:
    machine = OuterSync(OPTIONS)
    checker = Versions(PLAN)
    checker.recovered(machine)
    machine.state.fragments[0].version = 1
    with pytest.raises(Violation, match="should be"):
        checker.told(machine, None, [])
