from __future__ import annotations

from diloco.sim.outer_process import HELD_AFTER_NS, INBOX_MAX, Loop, Turn
from diloco.sim.world import Heap


class Desk(Loop):
    """A loop that says what it does, and waits while it ``holds``."""

    def __init__(self) -> None:
        super().__init__(Heap(), lambda: None)
        self.holds = False
        self.seen: list[str] = []

    def _must_wait(self, turn: Turn) -> bool:
        return self.holds

    def _tell(self, turn: Turn) -> None:
        for answer in turn.answers:
            answer()

    def _told(self, turn: Turn) -> None:
        self.seen.append("told")

    def says(self, what: str) -> None:
        self._say(lambda: self.seen.append(what))

    def run(self, for_ns: int) -> None:
        self.heap.run_until(self.heap.now_ns + for_ns, lambda: False)


def test_nothing_is_told_before_its_turn_is_safe_and_then_all_that_has_arrived_makes_one_turn() -> None:
    desk = Desk()
    desk.holds = True
    for what in "abc":
        desk.ask(lambda what=what: desk.says(what))  # type: ignore[misc]
    desk.run(HELD_AFTER_NS)
    assert (desk.seen, desk.settled()) == ([], False)
    desk.holds = False
    desk.run(HELD_AFTER_NS)
    assert (desk.seen, desk.settled()) == (["a", "told", "b", "c", "told"], True)


def test_who_asks_while_it_waits_for_long_gets_no_answer_and_its_own_work_is_kept() -> None:
    desk = Desk()
    desk.holds = True
    desk.ask(lambda: desk.says("first"))
    desk.run(2 * HELD_AFTER_NS)
    desk.ask(lambda: desk.says("late"))
    desk.own(lambda: desk.says("own"))
    desk.holds = False
    desk.deliver(desk.go_on)
    assert desk.seen == ["first", "told", "own", "told"]


def test_the_inbox_is_bounded() -> None:
    desk = Desk()
    desk.holds = True
    for _ in range(2 * INBOX_MAX):
        desk.ask(lambda: desk.says("x"))
    desk.holds = False
    desk.deliver(desk.go_on)
    assert desk.seen.count("x") == 1 + INBOX_MAX
