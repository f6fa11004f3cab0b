"""A site says what it holds, and not what it was told."""

from __future__ import annotations

from diloco.codec.base import digest
from diloco.learner.heartbeat import IDLE_SHARE, Echo
from diloco.wire.messages import short_digest
from tests.syncer.building import dice

TOLD = digest(dice("x", 0))


class Clock:
    def __init__(self) -> None:
        self.now_s, self.passes_s = 100.0, 0.0

    def __call__(self) -> float:
        self.now_s += self.passes_s
        return self.now_s


def test_fragments_take_turns_and_a_digest_stands_for_the_very_tensor_it_was_made_of() -> None:
    echo, bases = Echo(2, Clock()), [dice("x", 0), dice("y", 1)]
    assert echo.digests(bases) == (0, 0)
    assert echo.next_fragment() == 0
    echo.compute(bases[0], TOLD)
    assert echo.next_fragment() == 1
    assert echo.digests(bases) == (short_digest(digest(dice("x", 0))), 0)
    echo.compute(bases[1], TOLD)
    both = (short_digest(digest(dice("x", 0))), short_digest(digest(dice("y", 1))))
    assert echo.digests(bases) == both
    assert echo.next_fragment() == 0
    bases[0] = dice("x", 0)
    assert echo.digests(bases) == (0, both[1]), "another tensor lies there now"


def test_one_flipped_bit_shows() -> None:
    echo, values = Echo(1, Clock()), dice("x", 0)
    values.numpy().view("uint32")[3] ^= 1
    echo.compute(values, TOLD)
    assert echo.digests([values]) != (short_digest(digest(dice("x", 0))),)


def test_a_site_that_has_no_base_yet_says_nothing() -> None:
    echo = Echo(1, Clock())
    echo.compute(None, TOLD)
    assert echo.digests([None]) == (0,)


def test_it_is_in_the_form_of_what_was_told_and_nothing_is_said_where_nothing_was() -> None:
    echo, values = Echo(1, Clock()), dice("x", 0)
    echo.compute(values, "0" * 64)
    assert echo.digests([values]) == (short_digest(digest(values, like="0" * 64)),)
    echo = Echo(1, Clock())
    echo.compute(values, "")
    assert echo.digests([values]) == (0,)


def test_hashing_takes_a_bounded_share_of_the_time() -> None:
    clock = Clock()
    echo = Echo(1, clock)
    clock.passes_s = 2.0
    echo.compute(dice("x", 0), TOLD)
    clock.passes_s = 0.0
    clock.now_s += IDLE_SHARE * 2.0 - 0.1
    assert echo.next_fragment() is None
    clock.now_s += 0.2
    assert echo.next_fragment() == 0
