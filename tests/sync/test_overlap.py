from __future__ import annotations

import random
from itertools import pairwise

import pytest

from diloco.sync.events import Fate, FateTold, JoinAnswered, Outcome, PushAnswered, Reason, VersionFetched
from diloco.sync.link import (
    ROUNDS_KEPT,
    SECOND_NS,
    STEPS_MAX,
    LinkEstimate,
    RoundTimes,
    exchange_ns,
    overlap_for,
    steps_of,
)

MS = 1_000_000
STEP_NS = 100 * MS
ACCEPTED = Outcome.ACCEPTED


def link(rtt_ms: float = 10, up: int = 10_000_000, down: int = 20_000_000) -> LinkEstimate:
    return LinkEstimate(int(rtt_ms * MS), int(rtt_ms * MS), up, down)


@pytest.mark.parametrize(
    ("found", "up_bytes", "down_bytes", "round_ms", "exchange_ms"),
    [
        (link(), 1_000_000, 1_000_000, 0, 180),
        (link(), 1_000_000, 1_000_000, 70, 250),
        (link(rtt_ms=100), 0, 0, 0, 300),
        (link(up=1_000_000), 1_000_000, 0, 0, 1030),
        (link(up=0), 1_000_000, 1_000_000, 70, 0),
        (link(down=0), 1_000_000, 1_000_000, 70, 0),
        (LinkEstimate(), 1_000_000, 1_000_000, 0, 0),
    ],
)
def test_an_exchange_is_its_bytes_its_round_trips_and_its_round(
    found: LinkEstimate, up_bytes: int, down_bytes: int, round_ms: int, exchange_ms: int
) -> None:
    assert exchange_ns(found, up_bytes, down_bytes, round_ms * MS) == exchange_ms * MS


@pytest.mark.parametrize(
    ("exchange_ms", "now", "least", "most", "chosen"),
    [
        (250, 0, 0, 9, 3),  # The third step is under way when the version comes.
        (300, 0, 0, 9, 3),
        (301, 0, 0, 9, 4),
        (250, 3, 0, 9, 3),
        (250, 4, 0, 9, 4),  # 312 ms would not fit in three
        (240, 4, 0, 9, 3),
        (50, 9, 0, 9, 1),
        (50, 9, 2, 9, 2),
        (5000, 1, 0, 9, 9),
        (5000, 1, 0, 1, 1),
        (50, 0, 0, 0, 0),
        (0, 4, 0, 9, 4),  # Nothing is known.
    ],
)
def test_what_is_let_pass(exchange_ms: int, now: int, least: int, most: int, chosen: int) -> None:
    assert overlap_for(exchange_ms * MS, STEP_NS, now, least, most) == chosen


def test_without_the_time_of_a_step_nothing_moves() -> None:
    assert overlap_for(250 * MS, 0, 4, 0, 9) == 4
    assert steps_of(250 * MS, 0) == 0
    assert steps_of(SECOND_NS, 1) == STEPS_MAX


def test_it_stays_within_the_range_and_a_longer_exchange_never_gives_fewer_steps() -> None:
    dice = random.Random(11)
    for _ in range(500):
        least = dice.randint(0, 6)
        most = least + dice.randint(0, 9)
        now, step_ns = dice.randint(least, most), dice.randint(1, 400) * MS
        # Delay, bytes and the round each make it longer; a slower link does as well.
        found = [link(rtt_ms, dice.randint(1, 100) * 100_000) for rtt_ms in (5, 50, 500)]
        up_bytes, down_bytes = dice.randint(0, 5_000_000), dice.randint(0, 5_000_000)
        for rate in (found[0].up_bytes_per_s, 1_000_000):
            same = [LinkEstimate(each.rtt_ns, each.rtt_min_ns, rate, rate) for each in found]
            chosen = [
                overlap_for(exchange_ns(each, up_bytes, down_bytes, round_ns), step_ns, now, least, most)
                for round_ns in (0, 300 * MS)
                for each in same
            ]
            assert all(least <= steps <= most for steps in chosen)
            for half in (chosen[:3], chosen[3:], [chosen[0], chosen[3]], [chosen[2], chosen[5]]):
                assert half == sorted(half), (half, step_ns, now)


def test_an_exchange_that_stays_the_same_moves_it_once() -> None:
    for exchange_ms in range(1, 2000, 7):
        for begun in range(16):
            now = [begun]
            for _ in range(6):
                now.append(overlap_for(exchange_ms * MS, STEP_NS, now[-1], 0, 15))
            assert len({*now[1:]}) == 1, (exchange_ms, now)


def test_an_exchange_that_varies_by_a_tenth_never_moves_it_to_and_fro() -> None:
    dice = random.Random(5)
    for exchange_ms in range(20, 1500, 10):
        now = [0]
        for _ in range(60):
            varied = int(exchange_ms * dice.uniform(0.9, 1.1) * MS)
            now.append(overlap_for(varied, STEP_NS, now[-1], 0, 15))
        assert all(before <= after for before, after in pairwise(now)), (exchange_ms, now)


def told(fragment: int, sequence: int, reason: Reason | None = None) -> FateTold:
    return FateTold(Fate(fragment, sequence, 1, 10, "d", reason))


def test_a_round_is_from_the_acceptance_to_the_fate() -> None:
    rounds = RoundTimes()
    assert rounds.usual_ns() == 0
    rounds.heard(PushAnswered(0, 4, ACCEPTED, None), 1000)
    rounds.heard(told(0, 3), 1100)  # Of another update.
    rounds.heard(told(1, 4), 1200)  # Of another fragment.
    assert rounds.usual_ns() == 0
    rounds.heard(VersionFetched(0, 1, (told(0, 4).fate,)), 1700)
    assert rounds.usual_ns() == 700
    rounds.heard(told(0, 4), 9000)  # It is told twice, by Watch too.
    assert rounds.usual_ns() == 700


def test_what_was_not_merged_or_not_accepted_is_no_round() -> None:
    rounds = RoundTimes()
    rounds.heard(PushAnswered(0, 1, ACCEPTED, None), 1000)
    rounds.heard(told(0, 1, Reason.STALE), 1700)
    rounds.heard(PushAnswered(0, 2, Outcome.RETRY, None), 2000)
    rounds.heard(told(0, 2), 2500)
    assert rounds.usual_ns() == 0


def test_what_was_accepted_before_a_join_is_no_round_of_what_is_told_after_it() -> None:
    rounds = RoundTimes()
    rounds.heard(PushAnswered(0, 1, ACCEPTED, None), 1000)
    rounds.heard(PushAnswered(1, 1, ACCEPTED, None), 1000)
    rounds.heard(JoinAnswered(3, 1, (), 0, 0, None, lineage=2), 60_000)
    rounds.heard(told(0, 1), 70_000)
    rounds.heard(VersionFetched(1, 1, (told(1, 1).fate,)), 70_000)
    assert rounds.usual_ns() == 0
    rounds.heard(PushAnswered(0, 1, ACCEPTED, None), 71_000)
    rounds.heard(told(0, 1), 71_500)
    assert rounds.usual_ns() == 500


def test_the_usual_round_is_the_middle_one_of_the_last() -> None:
    rounds = RoundTimes()
    for sequence, took in enumerate([9000, 9000, 9000, 500, 100, 300, 200, 9000], 1):
        rounds.heard(PushAnswered(0, sequence, ACCEPTED, None), 0)
        rounds.heard(told(0, sequence), took)
    assert ROUNDS_KEPT == 5
    assert rounds.usual_ns() == 300
