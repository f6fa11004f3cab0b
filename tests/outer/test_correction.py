"""HeLoCo's correction against numbers worked out by hand, and what must hold of it for any."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from diloco.outer.merge import KEPT, UNCORRECTED, Correction, corrected, corrected_products
from diloco.outer.optimizer import NOTHING, OuterOptimizerOptions, outer_step


def exact(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def drawn(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def once(values: Tensor, momentum: Tensor, correction: Correction) -> Tensor:
    change = correction.change(values.dot(values).item(), values.dot(momentum).item(), momentum.dot(momentum).item())
    return corrected(values, momentum, change)


def heloco(**numbers: float) -> Correction:
    return Correction(kind="heloco", **numbers)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "numbers", "wanted"),
    [
        # c = .8 is enough.
        ((4.0, 3.0), {"cosine": 0.8}, (4.0, 3.0)),
        # c = -.6 and |D| = 5: of the -3 along the momentum .6 is taken out, or what the largest share allows.
        ((-3.0, 4.0), {"doubt": 0.0}, (-1.2, 4.0)),
        ((-3.0, 4.0), {"doubt": 0.0, "project": 0.5}, (-2.1, 4.0)),
        ((-3.0, 4.0), {"doubt": 0.0, "project": 9.0}, (0.0, 4.0)),
        ((-3.0, 4.0), {"doubt": 0.0, "project_max": 0.5}, (-1.5, 4.0)),
        # trust = 5 / (5 + 1.5 x 2) = .625, so .375 of it.
        ((-3.0, 4.0), {"doubt": 1.5}, (-1.875, 4.0)),
        # c = 0: half way to the momentum, then all of it.
        ((0.0, 5.0), {"doubt": 0.0, "rotate": 0.5}, (5 / math.sqrt(2), 5 / math.sqrt(2))),
        ((0.0, 5.0), {"doubt": 0.0, "rotate": 7.0}, (5.0, 0.0)),
        # c = .6 and r = .5 x .4 x .625 = .125: (.875 x .6 + .125, .875 x .8), made 5 long.
        (
            (3.0, 4.0),
            {"cosine": 0.7, "rotate": 0.5, "doubt": 1.5},
            (5 * 0.65 / math.hypot(0.65, 0.7), 5 * 0.7 / math.hypot(0.65, 0.7)),
        ),
    ],
)
def test_by_hand(values: tuple[float, ...], numbers: dict[str, float], wanted: tuple[float, ...]) -> None:
    found = once(exact(*values), exact(2.0, 0.0), heloco(**numbers))
    assert found.tolist() == pytest.approx(wanted, abs=1e-15)


def test_a_sequence_by_hand() -> None:
    """Arrivals (4, 0), (-3, 4) and (23, 11), with momentum 1/2, lr 1 and no doubt.

    The first meets no momentum.  The second goes against (2, 0) and loses .6 of its 3: (-1.2, 4).  The third has .6 of
    its length along (.4, 2), which is less than .8, and is turned all the way: (5, 25).
    """
    correction = heloco(cosine=0.8, rotate=3.0, doubt=0.0)
    options = OuterOptimizerOptions(kind="nesterov_ema", lr=1.0, momentum=0.5)
    theta, state, seen = exact(0.0, 0.0), NOTHING, []
    for arrived in (exact(4.0, 0.0), exact(-3.0, 4.0), exact(23.0, 11.0)):
        g = arrived if state.momentum is None else once(arrived, state.momentum, correction)
        theta, state = outer_step(theta, g, state, options)
        assert state.momentum is not None
        seen.append([*theta.tolist(), *state.momentum.tolist()])
    wanted = [[-5.0, 0.0, 2.0, 0.0], [-4.0, -5.0, 0.4, 2.0], [-10.35, -36.75, 2.7, 13.5]]
    for found, each in zip(seen, wanted, strict=True):
        assert found == pytest.approx(each, abs=1e-13)


@pytest.mark.parametrize("numbers", [{}, {"doubt": 0.0, "project": 5.0, "rotate": 2.0}, {"cosine": 1.0, "rotate": 1.0}])
def test_it_turns_towards_the_momentum_and_makes_nothing_longer(numbers: dict[str, float]) -> None:
    correction, kept = heloco(**numbers), 0
    for seed in range(60):
        momentum = drawn(7, seed)
        values = 3 * drawn(7, 1000 + seed) + (seed % 3 - 1) * momentum
        found = once(values, momentum, correction)
        before, after = (torch.cosine_similarity(each, momentum, dim=0).item() for each in (values, found))
        kept += found is values
        assert (found is values) == (before >= correction.cosine), seed
        assert after >= before - 1e-12, seed
        assert after > before + 1e-6 or found is values, seed
        assert found.norm() <= values.norm() + 1e-12, seed
        if before >= 0:
            assert found.norm().item() == pytest.approx(values.norm().item()), seed
        else:
            assert after <= 1e-12, seed
    assert (kept > 10) == (correction.cosine < 1)


@pytest.mark.parametrize(
    ("correction", "products"),
    [
        (UNCORRECTED, (1.0, -1.0, 1.0)),
        (heloco(), (1.0, 0.0, 0.0)),
        (heloco(), (0.0, 0.0, 1.0)),
        (heloco(cosine=0.0), (4.0, 0.0, 1.0)),
        (heloco(cosine=0.0), (4.0, 1e-9, 1.0)),
        (heloco(project=0.0), (4.0, -1.0, 1.0)),
        (heloco(project_max=0.0), (4.0, -1.0, 1.0)),
        (heloco(rotate=0.0), (4.0, 0.1, 1.0)),
    ],
)
def test_where_nothing_is_to_be_corrected_the_values_are_the_same(
    correction: Correction, products: tuple[float, float, float]
) -> None:
    change = correction.change(*products)
    values = drawn(3, 1)
    assert change == KEPT
    assert corrected(values, drawn(3, 2), change) is values


@pytest.mark.parametrize("cosine", [-0.5, 0.1])
def test_a_momentum_that_has_all_but_died_away_has_a_direction_still(cosine: float) -> None:
    """What it is multiplied by does not fit in fp32."""
    momentum = torch.tensor([1e-43, 0.0])
    values = torch.tensor([cosine, math.sqrt(1 - cosine**2)])
    correction = heloco(doubt=0.0, project=2.0, rotate=2.0)
    wanted = [0.0, math.sqrt(0.75)] if cosine < 0 else [1.0, 0.0]
    change = correction.change(1.0, cosine * momentum[0].item(), momentum[0].item() ** 2)
    assert change[1] > torch.finfo(torch.float32).max
    found = corrected(values, momentum, change)
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(wanted, abs=1e-6)


def test_the_products_of_what_is_corrected_follow_from_those_before() -> None:
    correction = heloco(cosine=0.9, rotate=1.0, doubt=0.5)
    momentum = drawn(9, 3)
    values = [drawn(9, seed) for seed in range(20, 25)]
    products = [[one.dot(other).item() for other in (*values, momentum)] for one in (*values, momentum)]
    changes = [correction.change(row[i], row[-1], products[-1][-1]) for i, row in enumerate(products[:-1])]
    assert len({(kept == 1, kept == 1 and ahead == 0) for kept, ahead in changes}) > 1, "taken out and turned"
    after = [corrected(each, momentum, change) for each, change in zip(values, changes, strict=True)]
    found = corrected_products(products, changes)
    for (i, one), (j, other) in itertools.product(enumerate(after), repeat=2):
        assert found[i][j] == pytest.approx(one.dot(other).item(), abs=1e-12), (i, j)


def test_no_square_of_what_is_taken_out_entirely_is_below_0() -> None:
    correction = heloco(doubt=0.0)
    for seed in range(200):
        momentum = drawn(5, seed)
        values = momentum * -(1 + seed / 7)
        products = [[one.dot(other).item() for other in (values, momentum)] for one in (values, momentum)]
        ((square,),) = corrected_products(products, [correction.change(products[0][0], products[0][1], products[1][1])])
        assert 0 <= square < 1e-12 * products[0][0], seed


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kind": "helo"}, "correction is 'helo': one of none, heloco"),
        ({"cosine": 1.5}, "correction_cosine is 1.5: at most 1"),
        ({"project_max": -0.1}, "correction_project_max is -0.1: must not be negative"),
        ({"project": math.inf}, "correction_project is inf: must not be negative"),
        ({"rotate": math.nan}, "correction_rotate is nan"),
        ({"doubt": -1.0}, "correction_doubt is -1.0"),
    ],
)
def test_options_name_the_field_and_the_value(given: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Correction(**given)  # type: ignore[arg-type]
