from __future__ import annotations

from random import Random

import pytest

from diloco.sim import world
from diloco.sim.world import (
    HELD_MAX,
    MILLISECOND_NS,
    Damaged,
    Died,
    Direction,
    Heap,
    Lease,
    LeaseLine,
    Link,
    OuterRule,
    Process,
    Storage,
    Weather,
    sealed,
    unsealed,
)
from diloco.sync.leadership import Claim, Standing

TTL_NS = 1000 * MILLISECOND_NS


def wish(name: str, *, by_itself: bool = False) -> Claim:
    return Claim(name, 0, 1, anew=True, by_itself=by_itself)


def wait(heap: Heap, for_ns: int) -> None:
    heap.run_until(heap.now_ns + for_ns, lambda: False)


def a_lease() -> tuple[Heap, Lease]:
    heap = Heap()
    lease = Lease(heap, TTL_NS)
    assert lease.acquire(wish("p")) == 1
    return heap, lease


def test_only_the_last_holder_and_its_heir_may_have_it_and_the_heir_not_before_it_has_run_out() -> None:
    assert "not the heir" in str(Lease(Heap(), TTL_NS).acquire(wish("q", by_itself=True))), "nor the first to lead"
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


def test_an_answer_or_a_change_that_comes_late_or_from_a_lost_machine_is_thrown_away() -> None:
    heap, lease = a_lease()
    line = LeaseLine(lease, Link(heap, Random(0), Weather(10 * MILLISECOND_NS)))
    seen: list[object] = []
    process = Process(heap, lambda: None)

    def ask_for_the_last() -> None:
        line.ask(process, lambda lease: lease.last, seen.append)
        wait(heap, TTL_NS)

    ask_for_the_last()
    line.link.cut(Direction.DOWN)
    ask_for_the_last()
    line.link.heal()
    wait(heap, TTL_NS)
    assert seen == [0, None]
    assert lease.change(1, 2, "")
    assert lease.change(1, 1, "q"), "before the other, and late"
    line.ask(process, lambda lease: lease.change(1, 3, "q"), lambda answer: None)
    line.machine += 1
    wait(heap, TTL_NS)
    assert lease.standing == Standing(1, 1, "p")


# --- What a site is told over its stream -----------------------------------------------------------------------------


def test_heap_runs_in_order_of_instant_and_then_of_planning() -> None:
    heap, seen = Heap(), []
    for name, at_ns in (("c", 20), ("a", 10), ("d", 20), ("b", 10)):
        heap.at(at_ns, lambda name=name: seen.append((heap.now_ns, name)))  # type: ignore[misc]
    heap.run_until(15, lambda: False)
    assert (seen, heap.now_ns) == ([(10, "a"), (10, "b")], 15)
    heap.after(1, lambda: heap.at(0, lambda: seen.append((heap.now_ns, "late"))))
    heap.run_until(30, lambda: len(seen) == 4)
    assert heap.now_ns == 20, "it stops when it is over"
    heap.run_until(30, lambda: False)
    assert seen == [(10, "a"), (10, "b"), (16, "late"), (20, "c"), (20, "d")]
    assert heap.events == 6


def test_latency_and_jitter_bound_the_delay_and_lost_messages_come_late_and_some_twice() -> None:
    def arrivals(weather: Weather) -> list[int]:
        heap, seen = Heap(), []
        link = Link(heap, Random(5), weather)
        for _ in range(400):
            link.send(Direction.UP, lambda: seen.append(heap.now_ns))
        heap.run_until(60_000 * MILLISECOND_NS, lambda: False)
        return seen

    seen = arrivals(Weather(50 * MILLISECOND_NS, 10 * MILLISECOND_NS))
    assert len(seen) == 400
    assert 50 * MILLISECOND_NS <= min(seen) <= max(seen) < 60 * MILLISECOND_NS
    seen = arrivals(Weather(1, 0, loss=0.2, twice=0.1))
    assert 50 < sum(at_ns > 100 * MILLISECOND_NS for at_ns in seen) < 130
    assert 420 < len(seen) < 460


def test_a_cut_link_delivers_some_of_a_bounded_number_after_the_heal_and_a_loss_breaks_the_stream() -> None:
    heap, up, down, broken = Heap(), [], [], []
    link = Link(heap, Random(1), Weather(1))
    link.cut(Direction.UP)
    for _ in range(10 * HELD_MAX):
        link.send(Direction.UP, lambda: up.append(1), lambda: broken.append(heap.now_ns))
    link.send(Direction.DOWN, lambda: down.append(1), lambda: broken.append(heap.now_ns))
    heap.run_until(10, lambda: False)
    assert (len(up), len(down)) == (0, 1), "a one-way partition"
    assert broken, "what no longer fits into a cut line is lost, and its reader knows"
    link.heal()
    heap.run_until(20, lambda: False)
    assert 0 < len(up) < HELD_MAX


def test_a_frozen_process_does_everything_after_the_thaw_in_order_and_a_dead_one_nothing() -> None:
    seen: list[int] = []
    process = Process(Heap(), lambda: seen.append(-1))
    process.frozen = True
    process.deliver(lambda: seen.append(1))
    process.deliver(lambda: seen.append(2))
    assert seen == []
    process.thaw()
    assert seen == [1, 2]
    process.frozen = True
    process.deliver(lambda: seen.append(3))
    process.kill()
    process.thaw()
    process.deliver(lambda: seen.append(4))
    assert seen == [1, 2], "a kill from outside is known where it comes from"

    def die() -> None:
        raise Died("here")

    process = Process(Heap(), lambda: seen.append(-1))
    process.deliver(die)
    process.deliver(lambda: seen.append(5))
    assert (seen, process.alive) == ([1, 2, -1], False), "one that dies in the middle says so"


# --- The disk of the simulator ---------------------------------------------------------------------------------------


OLD = [("append", "a", "old"), ("sync", "a"), ("sync_names",)]


@pytest.mark.parametrize(
    ("write", "left"),
    [
        ([("append", "a", "one"), ("sync", "a"), ("sync_names",)], {b"one"}),
        ([("append", "a", "one"), ("sync", "a")], {None, b"one"}),
        ([*OLD, ("append", "b", "new"), ("sync", "b"), ("rename", "b", "a")], {b"old", b"new"}),
        (
            [("append", "a", "00"), ("sync", "a"), ("sync_names",), ("append", "a", "11"), ("append", "a", "22")],
            {b"00", b"001", b"0011", b"00112", b"001122", b"00\0\x002", b"00\0\x0022", b"001\x002", b"001\x0022"},
        ),
    ],
    ids=["synced with its name", "its name is not synced", "renamed", "lost, torn and reordered"],
)
def test_a_power_cut_may_leave_of_a_file(write: list[tuple[str, ...]], left: set[bytes | None]) -> None:
    found = set()
    for seed in range(1000):
        storage = Storage()
        for what, *given in write:
            getattr(storage, what)(
                *(part.encode() if what == "append" and place else part for place, part in enumerate(given))
            )
        storage.power_cut(Random(seed))
        found.add(storage.read("a") if "a" in storage.names("") else None)
    assert found == left


def test_rot_is_one_bit_until_it_is_mended() -> None:
    storage = Storage()
    assert not storage.rot(Random(0)), "there is nothing to rot"
    storage.append("a", b"some data")
    assert storage.rot(Random(0))
    assert storage.rotten
    changed = [a ^ b for a, b in zip(storage.read("a"), b"some data", strict=True)]
    assert sum(each.bit_count() for each in changed) == 1
    storage.mend()
    assert (storage.read("a"), storage.rotten) == (b"some data", [])
    assert storage.rot(Random(0))
    place = storage.rotten[0][1]
    storage.cut("a", place)
    storage.append("a", b"y")
    storage.mend()
    assert storage.read("a") == b"some data"[:place] + b"y", "what was cut off and written anew is not mended"


def test_a_seal_shows_every_flip_and_a_missing_file_is_damage() -> None:
    whole = sealed("data")
    assert unsealed("a", whole) == "data"
    for place in range(8 * len(whole)):
        broken = bytearray(whole)
        broken[place // 8] ^= 1 << place % 8
        with pytest.raises(Damaged, match="a is damaged"):
            unsealed("a", bytes(broken))
    with pytest.raises(Damaged, match="a is missing"):
        Storage().read("a")


# --- Values -----------------------------------------------------------------------------------------------------------


def test_merged_is_the_weighted_mean_of_sites_and_the_sum_of_each() -> None:
    update = (-987, -30, 0)
    assert world.merged([(1.0, [update])]) == update
    assert world.merged([(0.1, [update]), (0.7, [update]), (0.2, [update])]) == update
    assert world.merged([(1.0, [(1, 2, 0), (3, 4, 0)])]) == (4, 6, 0)
    assert world.merged([(0.25, [(0, 0, 0)]), (0.75, [(400, 8, 0)])]) == (300, 6, 0)


def test_quantised_is_near_and_keeps_tokens() -> None:
    for number in (0, 7, -7, 32, -32, 1000, -1000):
        rounded = world.quantised((number, 5, 0), 64)
        assert (rounded[0] % 64, rounded[1:]) == (0, (5, 0))
        assert abs(rounded[0] - number) <= 32
        assert world.quantised((number, 5, 0), 1) == (number, 5, 0)


def test_outer_step_takes_the_gradient_off_and_rate_momentum_and_blend_are_in_tenths() -> None:
    assert world.outer_step((10, 0, 0), (5, 5, 0), (3, -2, 0), OuterRule()) == ((7, 2, 0), (3, -2, 0))
    assert world.outer_step((0, 0, 0), (100, 0, 0), (10, 0, 0), OuterRule(5, 9)) == ((-50, 0, 0), (100, 0, 0))
    assert world.blended((100, 10, 0), (0, 0, 0), 3) == (30, 3, 0)
