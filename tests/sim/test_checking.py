from __future__ import annotations

import pytest

from diloco.sim.checkers import Checker, Checkers, Violation
from diloco.sim.world import OuterPlan, OuterRule
from diloco.sync.options import OuterOptions
from diloco.sync.syncer import OuterSync

PLAN = OuterPlan(OuterOptions(), OuterRule())
HOOKS = [name for name in vars(Checker) if not name.startswith("_") and name not in ("of_the_disk", "require")]


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
    seen: list[tuple[object, ...]] = []
    having = type("Having", (Checker,), {hook: lambda self, *what: seen.append(what)})
    getattr(Checkers([Checker(PLAN), having(PLAN)]), hook)("this", 1)
    assert seen == [("this", 1)], f"no checker would ever hear of {hook}"


def test_a_restore_sets_the_books_of_the_disk_back() -> None:
    one, other = Noting(), Noting()
    one.of_the_disk = ("seen",)  # type: ignore[misc]
    checkers = Checkers([one, other])
    checkers.recovered(OuterSync(OuterOptions()))
    checkers.back_up()
    one.seen.append("later")
    other.seen.append("later")
    checkers.set_back()
    assert [len(each.seen) for each in (one, other)] == [1, 2]


def test_violation_says_who_saw_it() -> None:
    checker = Noting()
    checker.require(True, "nothing")
    with pytest.raises(Violation, match="noting: site a has 3") as raised:
        checker.require(False, "site", "a", "has", 3)
    assert raised.value.checker == "noting"
