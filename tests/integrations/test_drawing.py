"""What a loop of one's own draws of leased data."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from diloco.inner.parallel import SiteGroup
from diloco.integrations.join import STEPS_AHEAD_MAX, Batches, Drawing, OwnData

UNIT = 4


def alone() -> SiteGroup:
    return SiteGroup(0, 0, 1, "127.0.0.1", 0, "cpu", 10.0)


def listed(*units: int) -> Callable[[int, int], list[tuple[int, int]]]:
    def told(place: int, count: int) -> list[tuple[int, int]]:
        # Who is told none asks again, for ever.
        assert place < len(units), f"{len(units)} units are all that this test draws of, and there is no place {place}"
        return [(unit, 1) for unit in units[place : place + count]]

    return told


def drawing(*units: int, samples: int = 40, per_step: int = 2, seed: int = 3) -> Drawing:
    return Drawing(OwnData("essays", samples, per_step), UNIT, listed(*units), alone(), seed)


def drawn(one: Drawing, batches: int, count: int = 2) -> list[int]:
    return [index for _ in range(batches) for index in one.batch(count)]


def test_all_units_of_an_epoch_are_every_sample_once_and_the_next_has_another_order() -> None:
    first, second = drawn(drawing(*range(10)), 20), drawn(drawing(*range(10, 20)), 20)
    assert sorted(first) == sorted(second) == list(range(40))
    assert first != second
    assert drawn(drawing(*range(10), seed=4), 20) != first
    assert drawn(drawing(*range(10)), 20) == first
    assert drawn(drawing(7, 2), 4) == [*first[28:32], *first[8:12]], "a unit is the same samples at every site"


def test_the_last_unit_of_an_epoch_goes_on_into_the_next() -> None:
    found = drawn(drawing(*range(10), samples=38), 20)
    assert sorted(found[:38]) == list(range(38))


def test_ranks_draw_parts_of_what_the_site_draws() -> None:
    whole = drawn(drawing(*range(10)), 5, 4)
    ranks = [drawing(*range(10)), drawing(*range(10))]
    found = [index for _ in range(5) for rank, one in enumerate(ranks) for index in one.batch(2, rank, 2)]
    assert found == whole


def test_steps_are_what_counts_and_not_how_far_a_loader_has_run_ahead() -> None:
    one = drawing(*range(10))
    ahead = drawn(one, 8)
    assert one.cursor == 0
    assert [one.stepped() for _ in range(3)] == [2, 2, 2]
    assert (one.cursor, one.steps) == (6, 3)
    again = drawing(*range(10))
    again.begin(one.cursor)
    assert (again.cursor, again.steps) == (6, 3)
    assert drawn(again, 5) == ahead[6:], "what had been drawn and not trained on is drawn again"


def loader(batches: Batches, ahead: int) -> Iterator[list[int]]:
    """As torch's with workers: it holds so many batches more than it has handed out."""
    here, held = iter(batches), list[list[int]]()
    while True:
        held += [next(here) for _ in range(ahead + 1 - len(held))]
        yield held.pop(0)


def test_a_loader_that_is_left_and_begun_again_leaves_nothing_out() -> None:
    units = range(STEPS_AHEAD_MAX)
    one, read = drawing(*units), list[int]()
    batches = Batches(one, lambda: True, 2, None, None)
    for _ in range(STEPS_AHEAD_MAX // 4):  # So often that what was drawn in vain would be too much.
        for number, pair in enumerate(loader(batches, 4)):
            read += pair
            one.stepped()
            if number == 4:
                break
    straight, whole = drawing(*units), list[int]()
    while straight.cursor < one.cursor:
        whole += straight.batch(2)
        straight.stepped()
    assert read == whole, "what updates name is what steps were made of"


def test_batches_end_when_there_is_nothing_more_to_draw_for() -> None:
    one = drawing(*range(10))
    assert list(Batches(one, lambda: one.cursor < 0, 2, None, None)) == []


def test_a_step_needs_samples_that_were_drawn() -> None:
    one = drawing(*range(10), per_step=4)
    one.batch(2)
    with pytest.raises(ValueError, match=r"samples_per_step is 4, and the loop has drawn 2 for this step: take the"):
        one.stepped()
    one.batch(2)
    one.stepped()


def test_who_draws_ever_further_ahead_has_said_too_little() -> None:
    one = drawing(*range(STEPS_AHEAD_MAX * 8))
    for _ in range(STEPS_AHEAD_MAX - 2):
        one.batch(4)
        one.stepped()
    with pytest.raises(ValueError, match=r"samples_per_step is 2, and 2,052 samples would be drawn ahead of the steps"):
        drawn(one, 2, 4)
    right = drawing(*range(STEPS_AHEAD_MAX * 8), per_step=4)
    for _ in range(STEPS_AHEAD_MAX + 2):
        right.batch(4)
        right.stepped()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("", 40, 2), "data is '': what all sites call the same data"),
        (("x" * 300, 40, 2), "data is 'xxx"),
        (("essays", 0, 2), "samples is 0: a whole number from 1 on, where data is given"),
        (("essays", None, 2), "samples is None"),
        (("essays", 40, None), "samples_per_step is None: a whole number"),
        (("essays", 40, True), "samples_per_step is True"),
    ],
)
def test_what_cannot_be_is_named(given: tuple[str, int, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        OwnData(*given)


def test_a_place_that_cannot_be_is_named() -> None:
    for given, words in (((0,), "count is 0"), ((2, 2, 2), "rank is 2: 0 to ranks-1=1"), ((2, 0, 0), "ranks is 0")):
        with pytest.raises(ValueError, match=words):
            drawing(0).batch(*given)


def test_the_same_data_are_known_by_their_name_and_number() -> None:
    here = OwnData("essays", 40, 2)
    assert here.identity == OwnData("essays", 40, 8).identity, "how many a step reads is each site's own"
    assert len({here.identity, OwnData("essays", 41, 2).identity, OwnData("poems", 40, 2).identity}) == 3
