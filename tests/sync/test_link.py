"""What a site learns of its link, and what it chooses by it: rate, connections, codec and overlap."""

from __future__ import annotations

from typing import Any

import pytest

from diloco.sync.events import Fate, FateTold, JoinAnswered, LearnerEvent, Outcome, PushAnswered, Reason, VersionFetched
from diloco.sync.link import (
    CHANNELS_MAX,
    LEFT_ALONE,
    RATE_MAX,
    ROUND_TRIPS_KEPT,
    SECOND_NS,
    TRANSFER_BYTES_MIN,
    TRANSFERS_KEPT,
    Adapter,
    AdaptOptions,
    Choice,
    LinkEstimate,
    LinkEstimator,
    Pace,
    RoundTimes,
    Way,
    channels_for,
    later_rate,
    overlap_for,
    steps_of,
)

MS = 1_000_000
STEP_NS = 100 * MS
MBIT = 1e6 / 8


def link(up: float = 1e7, rtt_ms: float = 10, down: float = 1e7) -> LinkEstimate:
    return LinkEstimate(int(rtt_ms * MS), int(rtt_ms * MS), int(up), int(down))


@pytest.mark.parametrize(
    ("rtt_s", "bytes_per_s", "window_bytes", "channels"),
    [
        (0.1, 1000 * MBIT, 4 << 20, 6),
        (0.1, 1000 * MBIT, 64 << 20, 1),
        (0.3, 10_000 * MBIT, 4 << 20, CHANNELS_MAX),
        (0.1, 0.0, 4 << 20, 1),
        (1.0, 45.0, 100, 1),
        (1.0, 45.1, 100, 2),
    ],
)
def test_as_many_channels_as_fill_the_link(rtt_s: float, bytes_per_s: float, window_bytes: int, channels: int) -> None:
    assert channels_for(rtt_s, bytes_per_s, window_bytes) == channels


@pytest.mark.parametrize(
    ("seen", "rate"),
    [
        ([(0, 100)], 0.0),
        ([(7, 100), (7, 200)], 0.0),
        ([(0, 100), (SECOND_NS, 200)], 100.0),
        # Slow at first: only the later half counts.
        ([(0, 0), (SECOND_NS, 10), (2 * SECOND_NS, 20), (3 * SECOND_NS, 1020), (4 * SECOND_NS, 2020)], 1000.0),
        # Few large steps: the middle lies in none of them.
        ([(0, 0), (3 * SECOND_NS, 300), (4 * SECOND_NS, 400)], 100.0),
    ],
)
def test_the_later_half_says_what_the_link_carries(seen: list[tuple[int, int]], rate: float) -> None:
    assert later_rate(seen) == rate


def test_a_link_is_the_shortest_round_trip_and_the_fastest_transfer_lately() -> None:
    link = LinkEstimator()
    for rtt_ns in (100 * MS, 300 * MS, 80 * MS, 500 * MS):
        link.answered(rtt_ns)
    assert link.estimate().rtt_min_ns == 80 * MS
    assert link.estimate().rtt_ns == 320 * MS  # Each counts half of all before it.
    for _ in range(ROUND_TRIPS_KEPT):
        link.answered(100 * MS)
    assert link.estimate().rtt_min_ns == 100 * MS, "a way that has become longer is known to be, in the end"
    link.carried(10_000_000, 1100 * MS, up=True)
    assert link.estimate().up_bytes_per_s == 10_000_000, "less the waiting"
    for _ in range(TRANSFERS_KEPT - 1):
        link.carried(10_000_000, 5100 * MS, up=True)
        assert link.estimate().up_bytes_per_s == 10_000_000, "one that was slow may have waited for anything"
    link.carried(10_000_000, 5100 * MS, up=True)
    assert link.estimate().up_bytes_per_s == 2_000_000, "a link that has become slow is known to be"
    link.carried(10_000_000, 1100 * MS, up=True)
    assert link.estimate().up_bytes_per_s == 10_000_000, "and one that is fast again, at once"
    assert link.estimate().down_bytes_per_s == 0


def test_a_small_transfer_says_nothing_and_a_short_one_no_more_than_twice_what_it_was() -> None:
    link = LinkEstimator()
    link.answered(100 * MS)
    link.carried(TRANSFER_BYTES_MIN - 1, 1, up=False)
    assert link.estimate().down_bytes_per_s == 0
    link.carried(TRANSFER_BYTES_MIN, 110 * MS, up=False)
    assert link.estimate().down_bytes_per_s == TRANSFER_BYTES_MIN * SECOND_NS // (55 * MS)
    link.carried(TRANSFER_BYTES_MIN, 50 * MS, round_trips=0, up=False)
    assert link.estimate().down_bytes_per_s == TRANSFER_BYTES_MIN * SECOND_NS // (50 * MS)


# --- The rate that a sender keeps to ---------------------------------------------------------------------------------

LINK = 24_000_000


def sent(pace: Pace, transfers: int, link: int = LINK, at_first: float = 0.7) -> list[int]:
    """The rates of transfers over ``link``, of which one that goes unheld gets only the share ``at_first``."""
    rates = []
    for _ in range(transfers):
        rates.append(pace.bytes_per_s)
        pace.carried(min(link, rates[-1]) if rates[-1] else int(at_first * link), rates[-1])
    return rates


@pytest.mark.parametrize("at_first", [0.3, 0.72, 0.9, 1.0])
def test_the_rate_of_a_link_is_found_and_kept_to(at_first: float) -> None:
    pace = Pace()
    sent(pace, 15, at_first=at_first)
    rates = sent(pace, 60)
    assert all(0.9 * LINK <= rate <= 1.12 * LINK for rate in rates)
    assert sum(rate <= LINK for rate in rates) >= 60 * (LEFT_ALONE - 1) / (LEFT_ALONE + 1), "more is tried seldom"
    assert any(rate > LINK for rate in rates), "and is tried"


def test_one_slow_transfer_says_nothing_and_a_link_that_has_slowed_down_is_followed_and_one_that_recovers_too() -> None:
    pace = Pace()
    sent(pace, 20)
    before = pace.bytes_per_s
    pace.carried(LINK // 5, before)
    assert pace.bytes_per_s >= 0.9 * before
    sent(pace, TRANSFERS_KEPT + 1, LINK // 3)
    assert pace.bytes_per_s <= 1.12 * LINK / 3
    sent(pace, 40)
    assert pace.bytes_per_s >= 0.9 * LINK


def test_a_transfer_is_judged_by_the_rate_that_it_was_sent_at_and_the_fastest_is_not_held_back() -> None:
    pace = Pace()
    pace.carried(RATE_MAX + 1, 0)
    assert pace.bytes_per_s == 0, "faster than machines care for"
    pace = Pace()
    pace.carried(LINK // 3, 0)
    sent_at = pace.bytes_per_s
    pace.carried(sent_at, sent_at)
    faster = pace.bytes_per_s
    pace.carried(sent_at, sent_at)  # Asked for before the rate rose.
    assert pace.bytes_per_s >= faster > sent_at


# --- What is chosen: a codec, connections, an overlap ----------------------------------------------------------------

WAYS = (Way("int8", 8_000_000), Way("int4", 4_000_000), Way("topk", 1_000_000))


def options(**changes: Any) -> AdaptOptions:
    settings: dict[str, Any] = {"ways": WAYS, "version_bytes": 4_000_000, "inner_steps": 20, "channels_max": 1}
    return AdaptOptions(**(settings | changes))


def settled(adapter: Adapter, found: LinkEstimate, step_ns: int = STEP_NS) -> Choice:
    for _ in range(10):
        choice = adapter.choose(found, step_ns)
    return choice


@pytest.mark.parametrize(
    ("begins_with", "up", "codec"),
    [
        ("int8", 5.2e6, "int8"),  # 77 %
        ("int8", 4.9e6, "int4"),  # 82 %, and 41 % in int4
        ("int8", 2e6, "topk"),  # int4 would take 101 %
        ("int8", 1e5, "topk"),  # nothing fits: the smallest
        ("topk", 1e8, "int8"),  # one after the other, up to the largest
        ("topk", 4.1e6, "int4"),  # 49 % in int4, 98 % in int8
        ("topk", 3.9e6, "topk"),  # 52 % in int4: it would fit, and leave less than half of the time
        ("int4", 3.9e6, "int4"),  # and is kept by who has it
        ("int4", 8.5e6, "int8"),
        ("int4", 7.9e6, "int4"),
    ],
)
def test_the_largest_codec_that_leaves_room_is_taken(begins_with: str, up: float, codec: str) -> None:
    ways = tuple(sorted(WAYS, key=lambda way: way.codec != begins_with))
    assert settled(Adapter(options(ways=ways)), link(up)).codec == codec


def test_one_look_moves_nothing_and_two_that_agree_do() -> None:
    adapter, slow, fast = Adapter(options()), link(2e6), link(1e8)
    for found in (slow, fast, slow, fast, slow):
        assert adapter.choose(found, STEP_NS) == Choice("int8", 1)
    assert adapter.choose(slow, STEP_NS).codec == "topk"
    adapter, near, far = Adapter(options(ways=WAYS[:1], overlap_steps_max=9)), link(1e9), link(1e9, rtt_ms=200)
    seen = [adapter.choose(found, STEP_NS).overlap_steps for found in (near, near, far, near, far, near, far, far)]
    assert seen == [0, 5, 5, 5, 5, 5, 5, 9]


def test_it_says_why_and_says_it_until_something_changes() -> None:
    adapter = Adapter(options())
    why = settled(adapter, link(4e6)).why
    assert why == "at 32 Mbit/s updates in int8 take 101 % of the 2 s between two of them, in int4 51 %"
    assert adapter.choose(link(4.1e6), STEP_NS).why == why


@pytest.mark.parametrize(
    ("changes", "found", "step_ns"),
    [
        ({"channels_max": 4}, LinkEstimate(), STEP_NS),
        ({"channels_max": 4}, link(1e5), 0),
        ({"ways": WAYS[:1]}, link(1e3), STEP_NS),
    ],
)
def test_without_a_measurement_nothing_changes(changes: dict[str, Any], found: LinkEstimate, step_ns: int) -> None:
    assert settled(Adapter(options(**changes)), found, step_ns) == Choice("int8", 1)


def test_round_trips_count_for_each_fragment_and_the_period_is_a_sites_own() -> None:
    found = link(1e8, rtt_ms=200)
    assert settled(Adapter(options()), found).codec == "int8"
    # Four fragments wait 1.6 of the two seconds, whatever the codec is: the smallest is the best there is.
    assert settled(Adapter(options(num_fragments=4)), found).codec == "topk"
    assert settled(Adapter(options()), link(2e6), step_ns=10 * STEP_NS).codec == "int8"


@pytest.mark.parametrize(
    ("up", "rtt_ms", "began", "channels"),
    [
        (14e6, 100, 1, 2),  # 19 MB/s are one window's: it may be the window that bounds it
        (34e6, 100, 2, 3),
        (8e6, 100, 3, 1),
        (18e6, 100, 3, 2),  # one would do, at the very edge of what it can hold
        (500e6, 100, 1, 6),
        (20e6, 0, 3, 3),
    ],
)
def test_channels_follow_what_their_windows_hold(up: float, rtt_ms: float, began: int, channels: int) -> None:
    adapter = Adapter(options(ways=WAYS[:1], channels=began, channels_max=6, window_bytes=4 << 20))
    settled(adapter, link(up, rtt_ms))
    assert settled(adapter, link(up, rtt_ms)).channels == channels


def test_a_connection_more_that_brings_nothing_is_not_followed_by_another() -> None:
    adapter = Adapter(options(ways=WAYS[:1], channels_max=6))
    found = link(0.72 * 4 * (1 << 20) * 0.45 * 10, rtt_ms=100)  # 72 % of one window, and the link has no more.
    assert [adapter.choose(found, STEP_NS).channels for _ in range(12)] == [1, *[2] * 11]


def test_the_steps_of_an_exchange_are_those_of_one_fragment() -> None:
    adapter = Adapter(options(num_fragments=2))
    # 8 MB up at 4 MB/s and 4 MB down at 10: half of 2.4 s for one fragment, and three round trips.
    assert adapter.exchange_steps(link(4e6), STEP_NS) == 13
    assert adapter.exchange_steps(link(4e6), STEP_NS, 100 * MS) == 14
    assert adapter.exchange_steps(link(4e6, down=0), STEP_NS) == adapter.exchange_steps(link(0), STEP_NS) == 0
    assert adapter.exchange_steps(link(1), 1) == 1_000_000


def test_an_overlap_follows_the_exchange_of_one_fragment_and_the_round() -> None:
    adapter = Adapter(options(num_fragments=2, overlap_steps_max=15))
    assert settled(adapter, link(4e6)).overlap_steps == 8  # In int4 by now: half of 1 s up and 0.4 down, and 30 ms.
    for _ in range(3):
        choice = adapter.choose(link(4e6), STEP_NS, round_ns=500 * MS)
    assert (choice.codec, choice.overlap_steps) == ("int4", 13)
    for _ in range(3):
        choice = adapter.choose(link(4e6), STEP_NS, round_ns=60 * SECOND_NS)
    assert choice.overlap_steps == 15
    assert "(0 to 15 allowed)" in choice.why


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("inner_steps", 0),
        ("channels", 2),
        ("window_bytes", 0),
        ("overlap_steps", 1),
        ("overlap_steps_max", 20),
    ],
)
def test_what_cannot_be_is_refused_by_name(field: str, value: object) -> None:
    kind = AssertionError if field.startswith("overlap") else ValueError  # The configuration refuses those by name.
    with pytest.raises(kind, match=field):
        options(**{field: value})


# --- How long an exchange takes, and the steps that pass meanwhile ---------------------------------------------------


@pytest.mark.parametrize(
    ("exchange_ms", "now", "least", "most", "chosen"),
    [
        (250, 0, 0, 9, 3),  # The third step is under way when the version comes.
        (301, 0, 0, 9, 4),
        (250, 3, 0, 9, 3),
        (250, 4, 0, 9, 4),  # 312 ms would not fit in three
        (50, 9, 2, 9, 2),
        (5000, 1, 0, 9, 9),
        (0, 4, 0, 9, 4),  # Nothing is known.
    ],
)
def test_what_is_let_pass(exchange_ms: int, now: int, least: int, most: int, chosen: int) -> None:
    assert overlap_for(exchange_ms * MS, STEP_NS, now, least, most) == chosen


def test_without_the_time_of_a_step_nothing_moves() -> None:
    assert overlap_for(250 * MS, 0, 4, 0, 9) == 4
    assert steps_of(250 * MS, 0) == 0


def accepted(fragment: int, sequence: int, outcome: Outcome = Outcome.ACCEPTED) -> PushAnswered:
    return PushAnswered(fragment, sequence, outcome, None)


def told(fragment: int, sequence: int, reason: Reason | None = None) -> FateTold:
    return FateTold(Fate(fragment, sequence, 1, 10, "d", reason))


@pytest.mark.parametrize(
    ("heard", "usual_ns"),
    [
        ([(accepted(0, 4), 1000), (told(0, 3), 1100), (told(1, 4), 1200)], 0),  # Of another update or fragment.
        ([(accepted(0, 4), 1000), (VersionFetched(0, 1, (told(0, 4).fate,)), 1700)], 700),
        ([(accepted(0, 4), 1000), (told(0, 4), 1700), (told(0, 4), 9000)], 700),  # It is told twice.
        ([(accepted(0, 1), 1000), (told(0, 1, Reason.STALE), 1700)], 0),
        ([(accepted(0, 2, Outcome.RETRY), 2000), (told(0, 2), 2500)], 0),
        (  # What was accepted before a join is no round of what is told after it.
            [
                *[(accepted(fragment, 1), 1000) for fragment in (0, 1)],
                (JoinAnswered(3, 1, (), 0, 0, None, lineage=2), 60_000),
                *[(told(0, 1), 70_000), (VersionFetched(1, 1, (told(1, 1).fate,)), 70_000)],
                *[(accepted(0, 1), 71_000), (told(0, 1), 71_500)],
            ],
            500,
        ),
        (  # The middle one of the last five.
            [
                (event, at_ns)
                for sequence, took in enumerate([9000, 9000, 9000, 500, 100, 300, 200, 9000], 1)
                for event, at_ns in ((accepted(0, sequence), 0), (told(0, sequence), took))
            ],
            300,
        ),
    ],
)
def test_a_round_is_from_the_acceptance_to_the_fate(heard: list[tuple[LearnerEvent, int]], usual_ns: int) -> None:
    rounds = RoundTimes()
    for event, now_ns in heard:
        rounds.heard(event, now_ns)
    assert rounds.usual_ns() == usual_ns
