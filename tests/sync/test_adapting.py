from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from diloco.sync.link import AGREEING, SECOND_NS, Adapter, AdaptOptions, Choice, LinkEstimate, Way

MS = 1_000_000
WAYS = (Way("int8", 8_000_000), Way("int4", 4_000_000), Way("topk", 1_000_000))
STEP_NS = 100 * MS  # Twenty of them are two seconds.


def options(**changes: Any) -> AdaptOptions:
    settings: dict[str, Any] = {"ways": WAYS, "version_bytes": 4_000_000, "inner_steps": 20, "channels_max": 1}
    return AdaptOptions(**(settings | changes))


def link(up: float, rtt_ms: float = 10, down: float = 1e7) -> LinkEstimate:
    return LinkEstimate(int(rtt_ms * MS), int(rtt_ms * MS), int(up), int(down))


def settled(adapter: Adapter, found: LinkEstimate, step_ns: int = STEP_NS) -> Choice:
    for _ in range(10):
        choice = adapter.choose(found, step_ns)
    return choice


@pytest.mark.parametrize(
    ("begins_with", "up", "codec"),
    [
        ("int8", 1e8, "int8"),  # 4 % of the time
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
    assert AGREEING == 2


def test_a_rate_between_the_bounds_never_moves_it_to_and_fro() -> None:
    for up in range(1_000_000, 40_000_000, 100_000):
        adapter = Adapter(options())
        seen = [adapter.choose(link(up), STEP_NS).codec for _ in range(40)]
        assert len(set(seen[20:])) == 1, up
        changes = sum(before != after for before, after in pairwise(seen))
        assert changes <= 2, up


def test_it_says_why_and_says_it_until_something_changes() -> None:
    adapter = Adapter(options())
    why = settled(adapter, link(4e6)).why
    assert why == "at 32 Mbit/s updates in int8 take 101 % of the 2 s between two of them, in int4 51 %"
    assert adapter.choose(link(4.1e6), STEP_NS).why == why


def test_without_a_measurement_nothing_changes() -> None:
    adapter = Adapter(options(channels_max=4))
    assert settled(adapter, LinkEstimate()) == Choice("int8", 1)
    assert settled(adapter, link(1e5), step_ns=0) == Choice("int8", 1)


def test_one_way_and_one_channel_is_no_choice() -> None:
    adapter = Adapter(options(ways=WAYS[:1]))
    for up in (1e3, 1e9):
        assert settled(adapter, link(up)) == Choice("int8", 1)


def test_round_trips_count_for_each_fragment() -> None:
    found = link(1e8, rtt_ms=200)
    assert settled(Adapter(options()), found).codec == "int8"
    # Four fragments wait 1.6 of the two seconds, whatever the codec is: the smallest is the best there is.
    assert settled(Adapter(options(num_fragments=4)), found).codec == "topk"


@pytest.mark.parametrize(
    ("up", "rtt_ms", "began", "channels"),
    [
        (1e6, 100, 1, 1),
        (20e6, 100, 1, 2),  # 27 MB/s are one window's: it may be the window that bounds it
        (20e6, 100, 2, 2),
        (50e6, 100, 2, 3),
        (12e6, 100, 3, 1),
        (26e6, 100, 3, 2),  # one would do, at the very edge of what it can hold
        (500e6, 100, 1, 6),
        (500e6, 1, 6, 1),
        (20e6, 0, 3, 3),
    ],
)
def test_channels_follow_what_their_windows_hold(up: float, rtt_ms: float, began: int, channels: int) -> None:
    adapter = Adapter(options(ways=WAYS[:1], channels=began, channels_max=6, window_bytes=4 << 20))
    settled(adapter, link(up, rtt_ms))
    assert settled(adapter, link(up, rtt_ms)).channels == channels


def test_a_connection_more_that_brings_nothing_is_not_followed_by_another() -> None:
    adapter = Adapter(options(ways=WAYS[:1], channels_max=6))
    found = link(0.72 * 4 * (1 << 20) * 0.65 * 10, rtt_ms=100)  # 72 % of one window, and the link has no more.
    assert [adapter.choose(found, STEP_NS).channels for _ in range(12)] == [1, *[2] * 11]


def test_the_steps_of_an_exchange_are_those_of_one_fragment() -> None:
    adapter = Adapter(options(num_fragments=2))
    # 8 MB up at 4 MB/s and 4 MB down at 10: half of 2.4 s for one fragment, and three round trips.
    assert adapter.exchange_steps(link(4e6), STEP_NS) == 13
    assert adapter.exchange_steps(link(4e6, down=0), STEP_NS) == 0
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


def test_without_a_range_the_overlap_stays_as_configured() -> None:
    adapter = Adapter(options(overlap_steps=3, overlap_steps_max=3))
    for up in (1e4, 1e9):
        assert settled(adapter, link(up)).overlap_steps == 3


def test_one_look_moves_no_overlap() -> None:
    adapter, near, far = Adapter(options(ways=WAYS[:1], overlap_steps_max=9)), link(1e9), link(1e9, rtt_ms=200)
    seen = [adapter.choose(found, STEP_NS).overlap_steps for found in (near, near, far, near, far, near, far, far)]
    assert seen == [0, 5, 5, 5, 5, 5, 5, 9]


def test_the_same_looks_give_the_same_choices() -> None:
    def run() -> list[Choice]:
        adapter = Adapter(options(channels_max=6))
        return [adapter.choose(link(10_000 + index * 7919 % 9_000_000), STEP_NS) for index in range(300)]

    assert run() == run()
    assert len({choice.codec for choice in run()}) > 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ways", ()),
        ("ways", (WAYS[0], WAYS[0])),
        ("inner_steps", 0),
        ("channels", 2),
        ("window_bytes", 0),
        ("overlap_steps", 1),
        ("overlap_steps_max", 20),
    ],
)
def test_what_cannot_be_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        options(**{field: value})


def test_the_period_is_a_sites_own() -> None:
    adapter = Adapter(options())
    assert settled(adapter, link(2e6), step_ns=10 * STEP_NS).codec == "int8"
    assert SECOND_NS == 1000 * MS
