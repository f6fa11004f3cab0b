"""Which syncer holds which fragments."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import pytest

from diloco.outer.fragments import Fragment, Layout, Piece, described, part_of, place, plan_layout


def slowest(placed: tuple[tuple[int, ...], ...], numels: list[int], rates: list[float]) -> Fraction:
    return max(
        Fraction(sum(numels[index] for index in mine)) / Fraction(rate)
        for mine, rate in zip(placed, rates, strict=True)
    )


def best(numels: list[int], rates: list[float]) -> Fraction:
    """Of every way that there is."""
    ways = itertools.product(range(len(rates)), repeat=len(numels))
    return min(
        slowest(
            tuple(tuple(i for i, at in enumerate(way) if at == syncer) for syncer in range(len(rates))), numels, rates
        )
        for way in ways
    )


def fits(numels: list[int], rates: list[float]) -> bool:
    """Whether each syncer gets a fragment, which slow links may not."""
    try:
        place(numels, rates)
    except ValueError:
        return False
    return True


def test_every_fragment_is_placed_once_and_near_the_best() -> None:
    for seed in range(60):
        draw = random.Random(seed)
        count = draw.randint(1, 3)
        numels = [draw.randint(1, 100) for _ in range(draw.randint(count, 6))]
        equal = draw.random() < 0.5
        rates = [1.0] * count if equal else [draw.choice([1.0, 1.5, 2.0]) for _ in range(count)]
        if not equal and not fits(numels, rates):
            continue
        placed = place(numels, rates)
        assert sorted(index for mine in placed for index in mine) == list(range(len(numels))), f"seed {seed}"
        assert all(mine == tuple(sorted(mine)) and mine for mine in placed), f"seed {seed}"
        bound = Fraction(4, 3) - Fraction(1, 3 * count) if equal else Fraction(2)
        assert slowest(placed, numels, rates) <= bound * best(numels, rates), f"seed {seed}: {numels} {rates} {placed}"


def test_a_faster_link_takes_more() -> None:
    assert place([10] * 8, [300.0, 100.0]) == ((0, 1, 2, 4, 5, 6), (3, 7))
    assert place([10] * 4, [1.0, 1.0]) == ((0, 2), (1, 3))
    assert place([5, 9, 5], [1.0, 1.0]) == ((1,), (0, 2))


def test_one_syncer_holds_all() -> None:
    assert place([3, 1, 2], [7.0]) == ((0, 1, 2),)


@pytest.mark.parametrize(
    ("numels", "rates", "words"),
    [
        ([10], [1.0, 1.0], "syncer 1 of 2 would hold none of 1 fragments"),
        ([10, 10], [1.0, 0.01], "syncer 1 of 2 would hold none of 2 fragments, with a rate of 0.01 among 1, 0.01"),
        ([10], [], "rates is empty"),
        ([10], [0.0], "rates has 0.0: positive and finite"),
        ([10], [float("nan")], "rates has nan: positive and finite"),
    ],
)
def test_what_cannot_be_placed_is_said(numels: list[int], rates: list[float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        place(numels, rates)


def test_a_part_is_a_layout_of_its_own_and_the_parts_are_the_whole() -> None:
    whole = plan_layout([(f"w{number}", (number + 1, 3)) for number in range(9)], 4)
    placed = place([fragment.numel for fragment in whole.fragments], [1.0, 2.0])
    parts = [part_of(whole, mine) for mine in placed]
    assert sum(part.numel for part in parts) == whole.numel
    assert sorted(name for part in parts for name, _ in part.parameters) == [name for name, _ in whole.parameters]
    assert len({part.fingerprint for part in parts} | {whole.fingerprint}) == 3
    for part, mine in zip(parts, placed, strict=True):
        assert [each.pieces for each in part.fragments] == [whole.fragments[index].pieces for index in mine]
        assert [each.index for each in part.fragments] == list(range(len(mine)))
    assert part_of(whole, range(4)) == whole


def test_a_parameter_cannot_lie_with_two_syncers() -> None:
    pieces = (Fragment(0, (Piece("w", 0, 5),), 5), Fragment(1, (Piece("w", 5, 9),), 4))
    with pytest.raises(ValueError, match="the pieces of parameter w end at 5, it has 9 values"):
        part_of(Layout((("w", (9,)),), pieces), [0])


def test_a_placement_in_words() -> None:
    assert described(((0, 2), (1,))) == "0 2 / 1"
