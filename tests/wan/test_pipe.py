"""The model of one direction that carries packets, tried without a clock."""

from __future__ import annotations

import itertools
import math

import pytest

from diloco.wan.link import MILLISECOND_NS as MS
from diloco.wan.link import SECOND_NS
from diloco.wan.pipe import QUEUE_BYTES_MIN, Pipe, PipeOptions, measure
from tests.wan.test_packets import SEGMENT, packet

SMALL = packet(bytes(948))  # 1000 bytes on the link.
BIG = packet(bytes(40 * SEGMENT))
BIG_BYTES = measure(BIG).wire_bytes


def drain(pipe: Pipe) -> list[tuple[int, bytes]]:
    """All that is under way, each with the instant at which it is due."""
    found = []
    while (due_ns := pipe.next_due_ns()) is not None:
        assert pipe.take(due_ns - 1) is None
        content = pipe.take(due_ns)
        if content is not None:
            found.append((due_ns, content))
    return found


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rtt_ms": -1}, "rtt_ms is -1: 0 to 60000"),
        ({"rtt_ms": math.nan}, "rtt_ms is nan"),
        ({"rtt_ms": 10, "jitter_ms": 11}, "jitter_ms is 11: 0 to rtt_ms=10"),
        ({"mbps": "fast"}, "mbps is 'fast'"),
        ({"mbps": 0.001}, "mbps is 0.001: 0 .no bound. or at least 0.01"),
        ({"loss_percent": 101}, "loss_percent is 101: 0 to 100"),
        ({"queue_kib": -1}, "queue_kib is -1"),
        ({"seed": 1.5}, "seed is 1.5: a whole number"),
    ],
)
def test_options_are_refused_in_words(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PipeOptions(**changes)  # type: ignore[arg-type]


def test_a_direction_has_a_name() -> None:
    with pytest.raises(ValueError, match="direction is 'left': one of up, down"):
        Pipe(PipeOptions(), "left", 0)


def test_half_a_round_trip_each_way() -> None:
    pipe = Pipe(PipeOptions(rtt_ms=80), "up", 0)
    pipe.push(SMALL, 5 * MS)
    assert drain(pipe) == [(45 * MS, SMALL)]


def test_the_rate_counts_the_headers_of_every_segment_and_is_shared() -> None:
    pipe = Pipe(PipeOptions(rtt_ms=10, mbps=8), "up", 0)  # A byte in a microsecond.
    pipe.push(BIG, 0)
    pipe.push(SMALL, 0)
    assert [due_ns for due_ns, _ in drain(pipe)] == [BIG_BYTES * 1000 + 5 * MS, (BIG_BYTES + 1000) * 1000 + 5 * MS]
    pipe.push(SMALL, SECOND_NS)  # An idle link owes nobody.
    assert [due_ns for due_ns, _ in drain(pipe)] == [SECOND_NS + MS + 5 * MS]


def test_the_queue_is_bounded_and_drops_single_segments_at_its_tail() -> None:
    pipe = Pipe(PipeOptions(mbps=8, queue_kib=100), "up", 0)
    for _ in range(3):
        pipe.push(BIG, 0)
    counts = pipe.counts
    kept = 100 * 1024 // (SEGMENT + 52)
    assert counts.overflowed == 120 - kept
    assert sum(measure(content).segments for _, content in drain(pipe)) == kept == counts.segments_out


def test_the_default_queue_is_what_the_link_holds_in_a_round_trip() -> None:
    assert PipeOptions(rtt_ms=100, mbps=1000).queue_bytes == 12_500_000
    assert PipeOptions(rtt_ms=10, mbps=1).queue_bytes == QUEUE_BYTES_MIN


def test_without_a_rate_what_is_held_is_bounded_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.wan.pipe.HELD_BYTES_MAX", 10_000)
    pipe = Pipe(PipeOptions(rtt_ms=100), "up", 0)
    for _ in range(12):
        pipe.push(SMALL, 0)
    assert (pipe.held_segments, pipe.counts.overflowed) == (10, 2)


@pytest.mark.parametrize("percent", [0.1, 1.0, 30.0, 100.0])
def test_loss_strikes_segments_as_often_as_it_was_told(percent: float) -> None:
    pipe = Pipe(PipeOptions(loss_percent=percent), "down", 0)
    for _ in range(1000):
        pipe.push(BIG, 0)
    expected = 400 * percent
    assert pipe.counts.drawn == 40_000
    assert math.isclose(pipe.counts.expected_lost, expected, rel_tol=1e-6)
    assert abs(pipe.counts.lost - expected) <= 5 * math.sqrt(expected * (1 - percent / 100))
    assert sum(measure(content).segments for _, content in drain(pipe)) == 40_000 - pipe.counts.lost


def test_losses_are_the_seed_s_and_the_direction_s() -> None:
    def lost(seed: int, direction: str) -> list[bytes]:
        pipe = Pipe(PipeOptions(loss_percent=5, seed=seed), direction, 0)
        for _ in range(20):
            pipe.push(BIG, 0)
        return [content for _, content in drain(pipe)]

    assert lost(1, "up") == lost(1, "up")
    assert lost(1, "up") != lost(2, "up")
    assert lost(1, "up") != lost(1, "down")


def test_jitter_spreads_and_never_reorders() -> None:
    pipe = Pipe(PipeOptions(rtt_ms=40, jitter_ms=20), "up", 0)
    for step in range(500):
        pipe.push(packet(step.to_bytes(4, "big")), step * MS)
    found = drain(pipe)
    assert [int.from_bytes(content[-4:], "big") for _, content in found] == list(range(500))
    delays_ms = [(due_ns - step * MS) / MS for step, (due_ns, _) in enumerate(found)]
    assert 10 <= min(delays_ms) < 13
    assert 27 < max(delays_ms) <= 30
    assert all(later >= sooner for (sooner, _), (later, _) in itertools.pairwise(found))


def test_a_partition_loses_what_would_come_out_and_nothing_else() -> None:
    pipe = Pipe(PipeOptions(rtt_ms=20), "up", 0)
    pipe.push(BIG, 0)
    pipe.blocked = True
    assert pipe.take(10 * MS) is None
    pipe.push(SMALL, 15 * MS)
    pipe.blocked = False
    assert pipe.take(25 * MS) == SMALL
    assert (pipe.counts.cut_off, pipe.counts.segments_out) == (40, 1)


def test_a_change_holds_for_what_comes_after_it() -> None:
    pipe = Pipe(PipeOptions(rtt_ms=20), "up", 0)
    pipe.push(SMALL, 0)
    pipe.change(PipeOptions(rtt_ms=100, loss_percent=100))
    pipe.push(SMALL, 0)
    pipe.change(PipeOptions(rtt_ms=100))
    pipe.push(SMALL, 0)
    assert [due_ns for due_ns, _ in drain(pipe)] == [10 * MS, 50 * MS]
    pipe.change(PipeOptions(rtt_ms=2))
    pipe.push(SMALL, 50 * MS)
    assert [due_ns for due_ns, _ in drain(pipe)] == [51 * MS]


def test_every_segment_is_accounted_for() -> None:
    pipe = Pipe(PipeOptions(rtt_ms=20, mbps=100, loss_percent=3, queue_kib=64), "up", 0)
    for step in range(200):
        pipe.push(BIG, step * MS)
        pipe.blocked = 50 <= step < 60
        while pipe.take(step * MS) is not None:
            pass
    counts = pipe.counts
    assert min(counts.lost, counts.overflowed, counts.cut_off, counts.segments_out, pipe.held_segments) > 0
    gone = counts.lost + counts.overflowed + counts.cut_off
    assert counts.segments_in == 200 * 40 == gone + counts.segments_out + pipe.held_segments


def test_lateness_is_counted_in_bins_of_powers_of_two() -> None:
    pipe = Pipe(PipeOptions(), "up", 0)
    for late_us in [0] * 98 + [900, 70_000]:
        pipe.push(SMALL, 0)
        pipe.take(late_us * 1000)
    counts = pipe.counts
    assert (counts.late_us(50), counts.late_us(99), counts.late_us(100)) == (1.0, 1024.0, 70_000.0)
    assert counts.late_us_max == 70_000
    assert counts.as_dict()["late_us_p99"] == 1024.0
