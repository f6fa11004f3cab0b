"""The model of a link, tried without a clock."""

from __future__ import annotations

import hashlib
import random

import pytest

from benchmarks.pipe import PipeOptions
from diloco.wan.link import (
    JITTER_SLOT_NS,
    MILLISECOND_NS,
    SECOND_NS,
    UNLIMITED_WINDOW_BYTES,
    CommonOptions,
    LinkOptions,
    Path,
    Weather,
)


def test_the_weather_is_the_seeds_alone_in_any_order_of_asking_and_in_every_release() -> None:
    instants = [index * 37 * MILLISECOND_NS for index in range(3000)]
    forward, backward = Weather(5, "up"), Weather(5, "up")
    drawn = [forward.jitter(at_ns) for at_ns in instants]
    assert drawn == [backward.jitter(at_ns) for at_ns in reversed(instants)][::-1]
    for other in (Weather(5, "down"), Weather(6, "up")):
        assert drawn != [other.jitter(at_ns) for at_ns in instants]
    # A recorded run is repeated by its seed, so the draws and their order are an interface.
    weather, options = Weather(0, "up"), LinkOptions(stall_percent=50, stall_ms=300)
    both = [(weather.jitter(at), weather.stall_at(at, options)) for at in range(0, 60 * SECOND_NS, JITTER_SLOT_NS)]
    assert hashlib.sha256(repr(both).encode()).hexdigest()[:16] == "b49b212dbd69221c"
    # Nor does it depend on how the traffic is cut.
    options = LinkOptions(rtt_ms=100, jitter_ms=30, stall_percent=20, seed=11)
    whole, cut = Path[int](options, "up", 7), Path[int](options, "up", 7)
    for second in range(200):
        now_ns = second * SECOND_NS + second * 3 * JITTER_SLOT_NS % SECOND_NS
        whole.push(second, 1000, now_ns)
        for _ in range(10):
            cut.push(second, 100, now_ns)
    assert dict(let_out_all(whole)) == dict(let_out_all(cut))


def test_stalls_come_as_often_as_asked_and_nothing_comes_out_before_one_is_over() -> None:
    options = LinkOptions(stall_percent=10, stall_ms=300, seed=1)
    weather = Weather(1, "up")
    drawn = (weather.stall_at(at_ns, options) for at_ns in range(0, 2000 * SECOND_NS, 100 * MILLISECOND_NS))
    stalled = sorted({stall for stall in drawn if stall})
    assert len(stalled) == pytest.approx(200, abs=45), "within 3 sigma of a tenth of 2000 seconds"
    link = Path[int](options, "up", 0)
    for item in range(20_000):
        link.push(item, 10, item * 100 * MILLISECOND_NS)
    assert all(weather.stall_at(due_ns, options) is None for _, due_ns in let_out_all(link))
    assert link.num_stalls == len(stalled)
    link = Path[int](options, "up", 0)
    _, ends_ns = stalled[0]
    link.push(1, 10, ends_ns - MILLISECOND_NS)
    assert link.next_due_ns() == ends_ns


def path(direction: str = "up", started_ns: int = 0, **options: float) -> Path[int]:
    return Path(LinkOptions(**options), direction, started_ns)  # type: ignore[arg-type]


def let_out_all(of: Path[int]) -> list[tuple[int, int]]:
    """Each item with the instant at which it came out."""
    found: list[tuple[int, int]] = []
    while (due_ns := of.next_due_ns()) is not None:
        found += [(passage.item, passage.due_ns) for passage in of.take_due(due_ns)]
    return found


REFUSED = {
    "rtt_ms": (-1, float("nan"), "80"),
    "jitter_ms": (1.5,),
    "mbps": (-0.1, 1e-9, True),
    "queue_kib": (float("inf"), -1),
    "seed": (0.5,),
}
"""Of both kinds of links; each has more of its own."""


@pytest.mark.parametrize(
    ("kind", "own"),
    [(LinkOptions, {"stall_percent": (101,), "stall_ms": (1e9,)}), (PipeOptions, {"loss_percent": (200,)})],
)
def test_an_option_that_cannot_work_is_refused_by_name_and_value(
    kind: type[CommonOptions], own: dict[str, tuple[float, ...]]
) -> None:
    for field, value in ((field, value) for field, values in {**REFUSED, **own}.items() for value in values):
        with pytest.raises(ValueError, match=f"^{field} is {value!r}: "):
            kind(**{"rtt_ms": 1, field: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"^mbps is .*: 0 \(no bound\) or at least {kind.mbps_min}"):
        kind(rtt_ms=1, mbps=kind.mbps_min / 2)


def test_a_link_that_stands_still_for_most_of_the_time_is_refused() -> None:
    LinkOptions(stall_percent=100, stall_ms=500)
    with pytest.raises(ValueError, match="stall_percent is 100: with stall_ms=2000 the link would stand still 200%"):
        LinkOptions(stall_percent=100, stall_ms=2000)


def test_the_rate_is_shared_first_come_first_served() -> None:
    link = path(rtt_ms=20, mbps=8)  # 1 000 bytes a millisecond
    for item in range(3):
        link.push(item, 5000, 0)
    link.push(3, 0, 0)
    assert link.take_due(15 * MILLISECOND_NS - 1) == []
    came = [(item, due_ns / MILLISECOND_NS) for item, due_ns in let_out_all(link)]
    assert came == [(0, 15), (1, 20), (2, 25), (3, 25)]
    link.push(4, 1000, 100 * MILLISECOND_NS)
    assert link.next_due_ns() == 111 * MILLISECOND_NS, "an idle link does not save up its rate"
    link = path(rtt_ms=20, mbps=8)
    for item in range(4):
        link.push(item, 1000, 0)
    link.drop(lambda item: item % 2 == 0)
    assert link.in_flight_bytes == 2000
    assert let_out_all(link) == [(1, 12 * MILLISECOND_NS), (3, 14 * MILLISECOND_NS)], "as if nothing had been dropped"


@pytest.mark.parametrize("seed", range(5))
def test_nothing_overtakes_and_nothing_is_early(seed: int) -> None:
    draws = random.Random(seed)
    link = path(rtt_ms=40, jitter_ms=40, mbps=5, stall_percent=30, stall_ms=400, seed=seed)
    now_ns, pushed = 0, {}
    for item in range(500):
        now_ns += draws.randrange(20 * MILLISECOND_NS)
        pushed[item] = now_ns
        link.push(item, draws.randrange(5000), now_ns)
    out = let_out_all(link)
    assert [item for item, _ in out] == list(range(500)), f"seed {seed}"
    assert [due for _, due in out] == sorted(due for _, due in out), f"seed {seed}"
    assert all(due_ns >= pushed[item] for item, due_ns in out), f"seed {seed}"
    assert link.in_flight_bytes == 0


def test_the_round_trip_stays_within_its_jitter_and_uses_it() -> None:
    up, down = path("up", rtt_ms=80, jitter_ms=10, seed=3), path("down", rtt_ms=80, jitter_ms=10, seed=3)
    trips_ms = []
    for item in range(2000):
        sent_ns = item * 200 * MILLISECOND_NS
        up.push(item, 64, sent_ns)
        ((_, there_ns),) = let_out_all(up)
        down.push(item, 64, there_ns)
        ((_, back_ns),) = let_out_all(down)
        trips_ms.append((back_ns - sent_ns) / MILLISECOND_NS)
    assert 70 <= min(trips_ms) < 72
    assert 88 < max(trips_ms) <= 90
    assert sum(trips_ms) / len(trips_ms) == pytest.approx(80, abs=0.5)


def test_a_partition_holds_all_and_a_heal_sends_it_again_from_the_start() -> None:
    link = path(rtt_ms=20, mbps=8)
    link.push(1, 1000, 0)
    link.blocked = True
    link.push(2, 1000, 5 * MILLISECOND_NS)
    assert link.next_due_ns() is None
    assert link.take_due(10 * SECOND_NS) == []
    link.heal(20 * SECOND_NS)
    assert let_out_all(link) == [(1, 20 * SECOND_NS + 11 * MILLISECOND_NS), (2, 20 * SECOND_NS + 12 * MILLISECOND_NS)]
    link = path(rtt_ms=20, mbps=8)
    link.push(1, 100_000, 0)
    link.push(2, 100_000, 0)
    link.blocked = True
    link.heal(5 * MILLISECOND_NS)
    assert let_out_all(link) == [(1, 115 * MILLISECOND_NS), (2, 215 * MILLISECOND_NS)]


def test_what_waits_is_planned_anew_when_the_rate_changes_and_what_is_under_way_is_not() -> None:
    link = path(rtt_ms=20, mbps=0.008)  # one byte a millisecond
    link.push(1, 100, 0)
    link.push(2, 1000, 0)
    link.change(LinkOptions(rtt_ms=40, mbps=8), 50 * MILLISECOND_NS)
    assert let_out_all(link) == [(1, 110 * MILLISECOND_NS), (2, 121 * MILLISECOND_NS)]
    link = path(rtt_ms=2000)
    link.push(1, 10, 0)
    link.change(LinkOptions(rtt_ms=2), MILLISECOND_NS)
    link.push(2, 10, MILLISECOND_NS)
    assert let_out_all(link) == [(1, SECOND_NS), (2, SECOND_NS)], "a shorter delay lets nothing overtake"


def test_the_window_is_rate_times_delay_and_the_queue() -> None:
    assert LinkOptions(rtt_ms=80, mbps=100, queue_kib=64).window_bytes == 500_000 + 64 * 1024
    assert LinkOptions(rtt_ms=80, queue_kib=0).window_bytes > UNLIMITED_WINDOW_BYTES
    slow = LinkOptions(mbps=0.1, queue_kib=0)
    assert slow.window_bytes == 2 * slow.read_bytes, "a link without a queue still has something to send next"
    link = path(rtt_ms=80, mbps=100, queue_kib=64)
    link.push(1, 564_000, 0)
    assert 0 < link.room_bytes < 2000
    link.push(2, 2000, 0)
    assert link.room_bytes <= 0
    assert link.in_flight_bytes_peak == 566_000
