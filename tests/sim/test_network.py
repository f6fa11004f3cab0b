from __future__ import annotations

from random import Random

from diloco.sim.world import HELD_MAX, MILLISECOND_NS, Direction, Heap, Link, Weather


def forever() -> bool:
    return False


def test_heap_runs_in_order_of_instant_and_then_of_planning() -> None:
    heap, seen = Heap(), []
    for name, at_ns in (("c", 20), ("a", 10), ("d", 20), ("b", 10)):
        heap.at(at_ns, lambda name=name: seen.append((heap.now_ns, name)))  # type: ignore[misc]
    heap.run_until(15, forever)
    assert (seen, heap.now_ns) == ([(10, "a"), (10, "b")], 15)
    heap.after(1, lambda: heap.at(0, lambda: seen.append((heap.now_ns, "late"))))
    heap.run_until(30, forever)
    assert seen == [(10, "a"), (10, "b"), (16, "late"), (20, "c"), (20, "d")]
    assert heap.events == 6


def test_heap_stops_when_it_is_over() -> None:
    heap, seen = Heap(), []
    heap.at(1, lambda: seen.append(1))
    heap.at(2, lambda: seen.append(2))
    heap.run_until(9, lambda: bool(seen))
    assert (seen, heap.now_ns) == ([1], 1)


def arrivals(weather: Weather, messages: int = 400) -> list[int]:
    heap, seen = Heap(), []
    link = Link(heap, Random(5), weather)
    for _ in range(messages):
        link.send(Direction.UP, lambda: seen.append(heap.now_ns))
    heap.run_until(60_000 * MILLISECOND_NS, forever)
    return seen


def test_latency_and_jitter_are_bounds_of_the_delay() -> None:
    seen = arrivals(Weather(50 * MILLISECOND_NS, 10 * MILLISECOND_NS))
    assert len(seen) == 400
    assert 50 * MILLISECOND_NS <= min(seen) <= max(seen) < 60 * MILLISECOND_NS


def test_lost_messages_come_late_and_some_come_twice() -> None:
    seen = arrivals(Weather(1, 0, loss=0.2, twice=0.1))
    late = sum(at_ns > 100 * MILLISECOND_NS for at_ns in seen)
    assert 50 < late < 130, late
    assert 420 < len(seen) < 460, len(seen)


def test_cut_link_holds_a_bounded_number_and_delivers_some_of_them_after_the_heal() -> None:
    heap, up, down = Heap(), [], []
    link = Link(heap, Random(1), Weather(1))
    link.cut(Direction.UP)
    for _ in range(10 * HELD_MAX):
        link.send(Direction.UP, lambda: up.append(1))
    link.send(Direction.DOWN, lambda: down.append(1))
    heap.run_until(10, forever)
    assert (len(up), len(down)) == (0, 1), "a one-way partition"
    link.heal()
    heap.run_until(20, forever)
    assert 0 < len(up) < HELD_MAX
