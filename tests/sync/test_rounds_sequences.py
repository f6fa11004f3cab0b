"""The values that a run arrives at under the asynchronous rules, update by update, worked out by hand in fp64.

Most numbers are small binary fractions, so that what is written here is exact; where a third or a tenth comes in, the
difference may be 1e-12.
"""

from __future__ import annotations

from collections import Counter

import pytest

from diloco.outer.optimizer import NOTHING, OuterOptimizerOptions, outer_step
from diloco.sync import events as ev
from tests.sync.two_levels import PLAIN, Level, Region, number

EXACT = 1e-12
DELAYED = OuterOptimizerOptions(kind="delayed_nesterov", lr=1.0, momentum=0.5, window=4)
ONE_BY_ONE = pytest.mark.parametrize("round_updates", [0, 1])
"""Every update merges alone where nobody is waited for, whether a round is bounded to one or is all that came."""


def run(optimizer: OuterOptimizerOptions, **options: object) -> Level:
    """A run with the sites a, b and c; version 0 is the number 100."""
    level = Level(optimizer, **({"weights": "uniform"} | options))
    level.theta = number(100.0)
    for site in "abc":
        level.handle(ev.JoinRequested(1, site, "p"))
    return level


def play(level: Level, *arrivals: tuple[str, int, float]) -> list[float]:
    """What every version holds; an arrival is a site, the version that it trained from, and where it got to from
    there."""
    published, sequences = [level.theta], Counter[str]()
    for site, base, reached in arrivals:
        sequences[site] += 1
        level.push(site, sequences[site], published[base] - reached, base_version=base)
        level.step()
        published.append(level.theta)
    assert level.version == len(arrivals)
    return [each.item() for each in published[1:]]


@ONE_BY_ONE
def test_delayed_nesterov_arrival_by_arrival(round_updates: int) -> None:
    """With lr 1, mu .5, N 4 and c 0 each update moves theta by a fourth of itself, and the last of a window by half
    of the momentum as well, which is then m <- m/2 + (mean of the window)."""
    values = play(
        run(DELAYED, round_updates=round_updates),
        ("a", 0, 92.0),  # 100 - 92 = 8
        ("b", 0, 96.0),  # 100 - 96 = 4, one version old
        ("a", 1, 82.0),  # 98 - 82 = 16, one version old
        ("c", 0, 88.0),  # 100 - 88 = 12, three versions old
        ("b", 4, 81.0),  # 85 - 81 = 4
        ("a", 4, 77.0),  # 85 - 77 = 8, one version old
        ("b", 6, 86.0),  # 82 - 86 = -4
        ("c", 7, 67.0),  # 83 - 67 = 16
    )
    assert values == [
        98.0,  # 100 - 8/4
        97.0,  # 98 - 4/4
        93.0,  # 97 - 16/4
        85.0,  # m = (8 + 4 + 16 + 12)/4 = 10;  93 - 12/4 - 10/2
        84.0,  # 85 - 4/4, and the momentum rests
        82.0,  # 84 - 8/4
        83.0,  # 82 + 4/4
        73.5,  # m = 10/2 + (4 + 8 - 4 + 16)/4 = 11;  83 - 16/4 - 11/2
    ]


def test_updates_that_wait_together_are_applied_one_after_another_as_they_came() -> None:
    level = run(DELAYED, round_updates=1)
    for site, sequence, value in (("c", 1, 12.0), ("a", 1, 8.0), ("b", 1, 4.0), ("a", 2, 16.0)):
        level.push(site, sequence, value)
    found = []
    while level.commands:
        level.step()
        found.append(level.theta.item())
    assert found == [97.0, 95.0, 94.0, 85.0]  # 100 - 12/4;  - 8/4;  - 4/4;  - 16/4 - 10/2


@ONE_BY_ONE
def test_invariant_4_four_equal_arrivals_are_one_nesterov_step_and_plain_nesterov_takes_four(
    round_updates: int,
) -> None:
    """At momentum .9 four arrivals of g move plain Nesterov by (4 + 4 mu + 3 mu^2 + 2 mu^3 + mu^4) g = 12.1441 g,
    and one step on their mean by (1 + mu) g."""
    equal = [("a", 0, 90.0), ("b", 0, 90.0), ("a", 0, 90.0), ("c", 0, 90.0)]
    nesterov = OuterOptimizerOptions(kind="nesterov", lr=0.7, momentum=0.9)
    once, _ = outer_step(number(100.0), number(10.0), NOTHING, nesterov)
    delayed = OuterOptimizerOptions(kind="delayed_nesterov", lr=0.7, momentum=0.9, window=4)
    values = play(run(delayed, round_updates=round_updates), *equal)
    assert values == pytest.approx([98.25, 96.5, 94.75, 100 - 0.7 * 1.9 * 10], abs=EXACT, rel=0)
    assert values[-1] == pytest.approx(once.item(), abs=EXACT, rel=0)
    plain = play(run(nesterov, round_updates=round_updates), *equal)
    assert plain[-1] == pytest.approx(100 - 0.7 * 12.1441 * 10, abs=EXACT, rel=0)


@pytest.mark.parametrize(
    ("weights", "first", "second"),
    [
        # Version 1 has 8 + 16 = 24 of a and 6 of b, version 2 has 2 + 4 = 6 of a and 10 of b.
        ("uniform", 85.0, 77.0),  # 100 - (24 + 6)/2;  85 - (6 + 10)/2
        # a read 400 tokens in 20 steps and counts 400^2/20 = 8000, b counts 200^2/20 = 2000; then 2000 and 1000.
        ("tokens2_per_step", 79.6, 79.6 - 22 / 3),  # 100 - (4 x 24 + 6)/5;  then (2 x 6 + 10)/3
        ("tokens", 82.0, 82.0 - 22 / 3),  # 100 - (2 x 24 + 6)/3;  then the same, as all have the same tokens a step
    ],
)
def test_a_buffer_adds_and_weighs_the_updates_of_a_site_as_one(weights: str, first: float, second: float) -> None:
    """The mean of the three updates would be 10, and each weighed for itself 13.67."""
    level = run(PLAIN, round_updates=3, weights=weights)
    level.push("a", 1, 8.0, tokens=100, steps=10)
    level.push("b", 1, 6.0, tokens=200, steps=20)
    assert not level.commands
    level.push("a", 2, 16.0, tokens=300, steps=10)
    level.push("b", 2, 10.0)  # It came while the three are merged, and is of the next version.
    level.step()
    assert level.theta.item() == pytest.approx(first, abs=EXACT, rel=0)
    level.push("a", 3, 2.0, base_version=0)
    assert not level.commands
    level.push("a", 4, 4.0)
    level.step()
    assert level.theta.item() == pytest.approx(second, abs=EXACT, rel=0)
    assert level.version == 2


@pytest.mark.parametrize(
    ("power", "weights", "values"),
    [
        # a brings 8 at age 0, b 20 at age 3, with twice as many tokens; then both 8 and 4 at age 1; then a brings 6 at
        # age 0, and b 8 + 4 with the older at age 3, in three times as many tokens.
        (0.5, "uniform", [76.0, 70.0, 62.0]),  # (8 + 20/2)/1.5 = 12;  (8 + 4)/2 = 6;  (6 + 12/2)/1.5 = 8
        (0.0, "uniform", [74.0, 68.0, 59.0]),  # (8 + 20)/2 = 14;  6;  (6 + 12)/2 = 9
        (0.5, "tokens", [74.0, 68.0, 58.4]),  # (8 + 2/2 x 20)/2 = 14;  6;  (6 + 3/2 x 12)/2.5 = 9.6
    ],
)
def test_an_old_update_moves_the_model_less_beside_a_new_one_and_as_much_beside_its_like(
    power: float, weights: str, values: list[float]
) -> None:
    level = run(PLAIN, round_updates=0, quorum=2, staleness_power=power, weights=weights)
    for sequence in (1, 2, 3):
        level.push("a", sequence, 4.0)
        level.push("c", sequence, 4.0)
        level.step()
    assert level.theta.item() == 88.0
    found = []

    def merge() -> None:
        level.step()
        found.append(level.theta.item())

    level.push("b", 1, 20.0, base_version=0, tokens=200)
    level.push("a", 4, 8.0)
    merge()
    level.push("a", 5, 8.0, base_version=3)
    level.push("c", 4, 4.0, base_version=3)
    merge()
    level.push("b", 2, 8.0, base_version=2, tokens=200)
    level.push("b", 3, 4.0)
    level.push("a", 6, 6.0)
    merge()
    assert found == pytest.approx(values, abs=EXACT, rel=0)


def test_two_levels_of_delayed_nesterov_by_hand() -> None:
    """HALoS, with windows of two and momentum .5 on both levels.

    The region has lr 2: theta <- theta - g, and at a window's end less m as well.  Above, lr is 1:
    theta <- theta - g/2, and at a window's end less m/2.  m <- m/2 + (mean of the window) on either.  After two updates
    the region sends what it has gained, and it takes a fourth of what comes back.
    """

    def delayed(lr: float) -> OuterOptimizerOptions:
        return OuterOptimizerOptions(kind="delayed_nesterov", lr=lr, momentum=0.5, window=2)

    above = Level(delayed(1.0), weights="uniform")
    above.theta = number(100.0)
    above.handle(ev.JoinRequested(1, "x", "p"))
    region = Region(above, "region-a", 2, 0.25, optimizer=delayed(2.0), weights="uniform")
    for site in "st":
        region.handle(ev.JoinRequested(1, site, "p"))
    region.join()
    region.settle()
    assert (region.version, region.theta.item()) == (1, 100.0)

    region.push("s", 1, 8.0)
    region.step()
    assert region.theta.item() == 92.0  # 100 - 8
    region.push("t", 1, 4.0, base_version=1)
    region.step()
    assert region.theta.item() == 82.0  # m = (8 + 4)/2 = 6;  92 - 4 - 6
    region.seal()
    region.do()
    above.step()
    assert above.theta.item() == 91.0  # The region brings 100 - 82 = 18;  100 - 18/2
    above.push("x", 1, 6.0, base_version=0)
    above.step()
    assert above.theta.item() == 82.0  # m = (18 + 6)/2 = 12;  91 - 6/2 - 12/2
    region.push("s", 2, 2.0, base_version=1)
    region.step()
    assert region.theta.item() == 80.0  # 82 - 2, the first of a window, before the region hears of versions 1 and 2
    region.settle()
    assert region.theta.item() == 80.5  # 3/4 x 80 + 1/4 x 82, in the middle of the window

    region.push("t", 2, 10.0)
    region.step()
    assert region.theta.item() == 61.5  # m = 6/2 + (2 + 10)/2 = 9;  80.5 - 10 - 9
    region.settle()
    assert above.theta.item() == 72.5  # The region brings 80.5 - 61.5 = 19, from what it took;  82 - 19/2
    assert region.theta.item() == 64.25  # 3/4 x 61.5 + 1/4 x 72.5
    above.push("x", 2, 7.0)
    region.settle()
    assert above.theta.item() == 59.5  # m = 12/2 + (19 + 7)/2 = 19;  72.5 - 7/2 - 19/2
    assert region.theta.item() == 63.0625  # 3/4 x 64.25 + 1/4 x 59.5: nothing is unsent
    assert [(seal.sequence, seal.base_version) for seal in region.sent] == [(1, 0), (2, 2)]
    assert (above.version, region.version) == (4, 8)
