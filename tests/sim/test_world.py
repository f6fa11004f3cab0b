from __future__ import annotations

from random import Random

import pytest

from diloco.sim.world import (
    HELD_MAX,
    MILLISECOND_NS,
    Damaged,
    Died,
    Direction,
    Feed,
    Heap,
    Lease,
    LeaseLine,
    Link,
    Process,
    Storage,
    Weather,
    sealed,
    unsealed,
)
from diloco.sync.events import Ending, FinalAnnounced
from diloco.sync.leadership import Claim, Standing
from tests.sim.small import Small


def session(small: Small) -> object:
    return small.process("a").courier.session


def test_site_that_hears_nothing_breaks_off_and_joins_again_after_the_heal() -> None:
    small = Small(site_timeout_ns=3_000_000_000)
    small.run(1)
    first = session(small)
    assert first is not None
    small.cluster.sites["a"].sides[0].link.cut(Direction.DOWN)
    small.run(8)
    assert session(small) is None
    small.cluster.sites["a"].sides[0].link.heal()
    small.run(4)
    assert session(small) not in (None, first)


def test_site_joins_a_syncer_that_comes_up_late() -> None:
    small = Small()
    small.syncers.seats[0].restart_ns = 20_000_000_000
    small.syncers.kill(small.syncers.seats[0])
    small.run(19)
    assert session(small) is None
    small.run(5)
    assert session(small) is not None, "it asks for ever, with a capped back-off"


def test_site_that_is_asked_to_leave_says_goodbye() -> None:
    small = Small()
    small.run(2)
    site = small.cluster.sites["a"]
    small.process("a").ask_to_leave()
    small.run(3)
    assert (site.why, site.wanted, site.running()) == ("left", False, False)


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


# --- What a site is told over its stream -----------------------------------------------------------------------------


def test_a_message_that_is_lost_breaks_the_stream() -> None:
    heap, told, broken = Heap(), [], []
    link = Link(heap, Random(1), Weather())
    feed = Feed(1, link, told.append, lambda: broken.append(heap.now_ns))
    feed.tell(FinalAnnounced(Ending.DRAINED))
    heap.run_until(10**9, lambda: False)
    assert told == [FinalAnnounced(Ending.DRAINED)]
    link.cut(Direction.DOWN)
    for _ in range(200):
        feed.tell(FinalAnnounced(Ending.FINISHED))
    heap.run_until(2 * 10**9, lambda: False)
    assert len(told) == 1
    assert broken, "what no longer fits into a cut line is lost, and its reader knows"


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


def test_frozen_process_does_everything_after_the_thaw_in_order() -> None:
    seen: list[int] = []
    process = Process(lambda: None)
    process.freeze()
    process.deliver(lambda: seen.append(1))
    process.deliver(lambda: seen.append(2))
    assert seen == []
    process.thaw()
    assert seen == [1, 2]


def test_dead_process_does_nothing() -> None:
    seen: list[int] = []
    process = Process(lambda: seen.append(-1))
    process.freeze()
    process.deliver(lambda: seen.append(1))
    process.kill()
    process.thaw()
    process.deliver(lambda: seen.append(2))
    assert seen == [], "a kill from outside is known to whoever kills"


def test_process_that_dies_in_the_middle_says_so() -> None:
    seen: list[int] = []
    process = Process(lambda: seen.append(-1))

    def die() -> None:
        seen.append(1)
        raise Died("here")

    process.deliver(die)
    process.deliver(lambda: seen.append(2))
    assert (seen, process.alive) == ([1, -1], False)


# --- The disk of the simulator ---------------------------------------------------------------------------------------


def after_power_cuts(write: list[tuple[str, ...]], seeds: int = 200) -> set[tuple[tuple[str, bytes], ...]]:
    """Everything that ``write`` may have left."""
    found = set()
    for seed in range(seeds):
        storage = Storage()
        for what, *given in write:
            getattr(storage, what)(
                *(part.encode() if what == "append" and place else part for place, part in enumerate(given))
            )
        storage.power_cut(Random(seed))
        found.add(tuple((name, storage.read(name)) for name in storage.names("")))
    return found


def test_what_is_synced_with_its_name_stays() -> None:
    assert after_power_cuts([("append", "a", "one"), ("sync", "a"), ("sync_names",)]) == {(("a", b"one"),)}


def test_a_name_that_is_not_synced_may_go() -> None:
    assert after_power_cuts([("append", "a", "one"), ("sync", "a")]) == {(), (("a", b"one"),)}


def test_writes_are_lost_torn_and_reordered() -> None:
    begun = [("append", "a", "00"), ("sync", "a"), ("sync_names",), ("append", "a", "11"), ("append", "a", "22")]
    found = {dict(state)["a"] for state in after_power_cuts(begun, 2000)}
    assert found == {
        b"00",
        b"001",
        b"0011",
        b"0011" + b"2",
        b"001122",
        b"00\0\0" + b"2",
        b"00\0\0" + b"22",
        b"001\0" + b"2",
        b"001\0" + b"22",
    }


def test_a_renamed_file_is_the_old_or_the_new_one() -> None:
    begun = [("append", "a", "old"), ("sync", "a"), ("sync_names",)]
    change = [("append", "b", "new"), ("sync", "b"), ("rename", "b", "a")]
    assert {dict(state).get("a") for state in after_power_cuts([*begun, *change])} == {b"old", b"new"}


def test_rot_is_one_bit_until_it_is_mended() -> None:
    storage = Storage()
    assert not storage.rot(Random(0)), "there is nothing to rot"
    storage.append("a", b"some data")
    assert storage.rot(Random(0))
    assert storage.is_rotten()
    changed = [a ^ b for a, b in zip(storage.read("a"), b"some data", strict=True)]
    assert sum(each.bit_count() for each in changed) == 1
    storage.mend()
    assert (storage.read("a"), storage.is_rotten()) == (b"some data", False)


def test_what_was_cut_off_and_written_anew_is_not_mended() -> None:
    storage = Storage()
    storage.append("a", b"x")
    assert storage.rot(Random(0))
    storage.cut("a", 0)
    storage.append("a", b"y")
    storage.mend()
    assert storage.read("a") == b"y"


def test_a_seal_shows_every_flip() -> None:
    whole = sealed(b"data")
    assert unsealed("a", whole) == b"data"
    for place in range(8 * len(whole)):
        broken = bytearray(whole)
        broken[place // 8] ^= 1 << place % 8
        with pytest.raises(Damaged, match="a is damaged"):
            unsealed("a", bytes(broken))


def test_a_missing_file_is_damage() -> None:
    with pytest.raises(Damaged, match="a is missing"):
        Storage().read("a")
