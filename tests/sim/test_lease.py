from __future__ import annotations

from random import Random

from diloco.sim.world import MILLISECOND_NS, Direction, Heap, Lease, LeaseLine, Link, Process, Weather
from diloco.sync.leadership import Claim, Standing

TTL_NS = 1000 * MILLISECOND_NS


def wish(name: str, *, by_itself: bool = False) -> Claim:
    return Claim(name, 0, 1, anew=True, by_itself=by_itself)


def a_lease() -> tuple[Heap, Lease]:
    heap = Heap()
    lease = Lease(heap, TTL_NS)
    assert lease.acquire(wish("p")) == 1
    return heap, lease


def wait(heap: Heap, for_ns: int) -> None:
    heap.run_until(heap.now_ns + for_ns, lambda: False)


def test_only_the_last_holder_and_its_heir_may_have_it_and_the_heir_not_before_it_has_run_out() -> None:
    heap, lease = a_lease()
    assert "not the heir" in str(lease.acquire(wish("q", by_itself=True)))
    assert lease.change(1, 1, "q")
    assert lease.acquire(wish("q", by_itself=True)) is None
    assert lease.change(1, 2)
    wait(heap, TTL_NS)
    assert lease.acquire(wish("q", by_itself=True)) == 2
    assert not lease.change(1, 3), "the one before has lost it"
    assert "its heir is" not in (why := str(lease.acquire(wish("p"))))
    assert "q led the run last" in why
    assert lease.acquire(wish("q", by_itself=True)) == 3, "it may not have heard that it has it"


def test_a_standby_is_not_the_first_to_lead() -> None:
    assert "not the heir" in str(Lease(Heap(), TTL_NS).acquire(wish("q", by_itself=True)))


def test_a_change_that_comes_late_changes_nothing() -> None:
    _, lease = a_lease()
    assert lease.change(1, 2, "")
    assert lease.change(1, 1, "q")
    assert lease.standing == Standing(1, 1, "p")


def test_an_answer_that_does_not_come_is_missed_and_one_that_comes_late_is_thrown_away() -> None:
    heap, lease = a_lease()
    line = LeaseLine(lease, Link(heap, Random(0), Weather(10 * MILLISECOND_NS)))
    seen: list[object] = []
    process = Process(lambda: None)
    line.ask(process, lambda lease: lease.last, seen.append, lambda: seen.append("missed"))
    wait(heap, TTL_NS)
    line.link.cut(Direction.DOWN)
    line.ask(process, lambda lease: lease.last, seen.append, lambda: seen.append("missed"))
    wait(heap, TTL_NS)
    line.link.heal()
    wait(heap, TTL_NS)
    assert seen == [0, "missed"]


def test_nothing_arrives_that_a_lost_machine_had_on_its_way() -> None:
    heap, lease = a_lease()
    line = LeaseLine(lease, Link(heap, Random(0), Weather(10 * MILLISECOND_NS)))
    line.ask(Process(lambda: None), lambda lease: lease.change(1, 1, "q"), lambda answer: None, lambda: None)
    line.machine += 1
    wait(heap, TTL_NS)
    assert lease.standing == Standing(1, 1, "p")
