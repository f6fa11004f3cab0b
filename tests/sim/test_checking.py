from __future__ import annotations

import pytest

from diloco.sim.checkers import Checker, Checkers, Violation
from diloco.sim.values import OuterRule
from diloco.sim.world import OuterPlan
from diloco.sync.options import OuterOptions
from diloco.sync.syncer import OuterSync

PLAN = OuterPlan(OuterOptions(), OuterRule())
HOOKS = [name for name, member in vars(Checker).items() if callable(member) and name not in ("__init__", "require")]


class Noting(Checker):
    name = "noting"

    def __init__(self) -> None:
        super().__init__(PLAN)
        self.seen: list[object] = []

    def recovered(self, machine: OuterSync) -> None:
        self.seen.append(machine)


def test_hook_reaches_those_that_have_it() -> None:
    one, other, machine = Noting(), Checker(PLAN), OuterSync(OuterOptions())
    Checkers([one, other]).recovered(machine)
    assert one.seen == [machine]


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_passed_on(hook: str) -> None:
    assert hook in vars(Checkers), f"no checker would ever hear of {hook}"


def test_violation_says_who_saw_it() -> None:
    checker = Noting()
    checker.require(True, "nothing")
    with pytest.raises(Violation, match="noting: site a has 3") as raised:
        checker.require(False, "site", "a", "has", 3)
    assert raised.value.checker == "noting"
