"""The merges, against exact numbers and the formulas of their papers; what DESIGN promises of the mean is in
tests/numerics."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from diloco.outer.fragments import plan_layout
from diloco.outer.merge import (
    KEPT,
    MEAN,
    MERGE_KINDS,
    UNCORRECTED,
    Correction,
    Gate,
    MergeOptions,
    Merging,
    Segment,
    blend,
    corrected,
    corrected_products,
    merge_mean,
    trimmed_mean,
)
from diloco.outer.optimizer import OuterOptimizerOptions, OuterRule, outer_rule
from diloco.outer.reference import reference_diloco


@pytest.mark.parametrize(
    ("contributions", "words"),
    [
        ([], "no contribution has a positive weight"),
        ([(0.0, [torch.ones(2)])], "no contribution has a positive weight"),
        ([(1.0, [])], "no contribution has a positive weight"),
        *[([(1.0, [torch.ones(2)]), (weight, [torch.ones(2)])], "weight is") for weight in (-1.0, math.nan, math.inf)],
    ],
)
def test_what_cannot_be_weighed_is_an_error(contributions: list[tuple[float, list[Tensor]]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        merge_mean(contributions)


def merged(options: MergeOptions, weights: list[float], values: list[Tensor]) -> Tensor:
    if options.kind == "trimmed_mean":
        out = torch.empty_like(values[0])
        return trimmed_mean(list(zip(weights, values, strict=True)), options.trim_share, out)
    products = [[float(a.double() @ b.double()) for b in values] for a in values]
    changed, scale = blend(options, weights, products)
    return merge_mean([(weight, [each]) for weight, each in zip(changed, values, strict=True)]).mul_(scale)


def drawn(count: int, numel: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator) * (0.5 + index) for index in range(count)]


@pytest.mark.parametrize("kind", MERGE_KINDS)
def test_5_equal_pseudo_gradients_are_merged_to_themselves_whatever_the_weights(kind: str) -> None:
    options = MergeOptions(kind=kind)
    for weights in ([1.0, 1.0, 1.0], [0.1, 0.2, 0.7], [1e-9, 1.0, 3e7], [0.3]):
        for each in (*drawn(5, 501, 3), torch.zeros(501)):
            assert torch.equal(merged(options, weights, [each] * len(weights)), each), weights
    assert merged(options, [1.0, 2.0, 1.0], [torch.zeros(64), *drawn(2, 64, 5)]).isfinite().all()


@pytest.mark.parametrize("kind", MERGE_KINDS)
def test_the_order_of_the_sites_and_a_common_factor_show_in_no_more_than_rounding(kind: str) -> None:
    weights, values = [1.0, 2.0, 0.5, 1.5], drawn(4, 257, 6)
    first = merged(MergeOptions(kind=kind), weights, values)
    for order in itertools.permutations(range(4)):
        other = merged(MergeOptions(kind=kind), [weights[i] for i in order], [values[i] for i in order])
        assert torch.allclose(first, other, rtol=1e-5, atol=1e-6), order
    double = merged(MergeOptions(kind=kind), weights, [2 * each for each in values])
    assert torch.allclose(2 * first, double, rtol=1e-6, atol=0)


def test_rda_is_the_mean_length_along_the_mean_direction_and_the_mean_where_directions_cancel() -> None:
    weights, values = [1.0, 2.0, 0.5], [each.double() for each in drawn(3, 101, 10)]
    direction = sum(weight * each / each.norm() for weight, each in zip(weights, values, strict=True))
    assert isinstance(direction, Tensor)
    length = sum(weight * each.norm() for weight, each in zip(weights, values, strict=True)) / sum(weights)
    exact = length * direction / direction.norm()
    rda = MergeOptions(kind="rda")
    found = merged(rda, weights, [each.float() for each in values])
    assert torch.allclose(found.double(), exact, rtol=1e-5, atol=1e-6)
    one = torch.tensor([3.0, 4.0])
    assert merged(rda, [1.0, 1.0], [one, -one]).tolist() == [0.0, 0.0]
    assert merged(rda, [1.0, 1.0], [one, -3 * one]).tolist() == [-3.0, -4.0]


@pytest.mark.parametrize(
    ("options", "values", "wanted"),
    [
        # Lengths 1, 2 and 8: the median is 2.
        (MergeOptions(kind="clip"), [(1, 0), (0, 2), (8, 0)], [(1 + 2 * 2) / 4, 2 / 4]),
        (MergeOptions(kind="clip", norm_ratio_max=2.0), [(1, 0), (0, 2), (8, 0)], [(1 + 2 * 4) / 4, 2 / 4]),
        (MergeOptions(kind="normalise"), [(1, 0), (0, 2), (8, 0)], [(2 + 2 * 2) / 4, 2 / 4]),
        # Lengths 1, 2, 8 and 9: the lower median is 2, and the shortest stays as it is.
        (MergeOptions(kind="clamp"), [(1, 0), (0, 2), (8, 0), (0, -9)], [(1 + 2 * 2) / 5, (2 - 2) / 5]),
        (MergeOptions(kind="clamp"), [(0, 0), (1, 1), (0, 0)], [0.0, 0.0]),
    ],
)
def test_lengths_by_hand(options: MergeOptions, values: list[tuple[float, float]], wanted: list[float]) -> None:
    """The third site weighs twice as much as each other."""
    weights = [1.0, 1.0, 2.0, 1.0][: len(values)]
    assert merged(options, weights, [torch.tensor(each).float() for each in values]).tolist() == pytest.approx(wanted)


def test_the_geometric_median_has_the_least_sum_of_distances() -> None:
    weights, values = [1.0, 1.0, 2.0, 0.5], drawn(4, 16, 11)

    def far(point: Tensor) -> float:
        return sum(w * (point - each).double().norm().item() for w, each in zip(weights, values, strict=True))

    found = merged(MergeOptions(kind="geometric_median"), weights, values)
    for seed in range(50):
        near = found + 1e-2 * torch.randn(16, generator=torch.Generator().manual_seed(seed))
        assert far(found) <= far(near) + 1e-6, seed


@pytest.mark.parametrize("kind", ["clip", "normalise", "clamp", "geometric_median"])
def test_one_mad_site_of_five_moves_a_robust_merge_little(kind: str) -> None:
    good = [torch.ones(64) + 0.1 * each / each.norm() for each in drawn(4, 64, 12)]
    mad = [*good, torch.full((64,), -1e6)]
    without = merged(MEAN, [1.0] * 4, good)
    moved = (merged(MergeOptions(kind=kind), [1.0] * 5, mad) - without).norm() / without.norm()
    assert moved.item() < 1.0
    assert (merged(MEAN, [1.0] * 5, mad) - without).norm() / without.norm() > 1e4


def test_a_trimmed_mean_by_hand() -> None:
    values = [torch.tensor([each, -each]) for each in (1.0, 2.0, 4.0, 8.0, 100.0)]
    contributions, out = list(zip([1.0, 1.0, 3.0, 4.0, 9.0], values, strict=True)), torch.empty(2)
    for share, wanted in ((0.2, (2 + 12 + 32) / 8), (0.49, 4.0), (0.1, (1 + 2 + 12 + 32 + 900) / 18)):
        assert trimmed_mean(contributions, share, out).tolist() == pytest.approx([wanted, -wanted])
    crossed = [torch.tensor([1.0, 300.0]), torch.tensor([200.0, 2.0]), torch.tensor([3.0, 3.0])]
    assert trimmed_mean([(1.0, each) for each in crossed], 0.34, out).tolist() == [3.0, 3.0], "value by value"


@pytest.mark.parametrize(
    ("gate", "factors"),
    [
        (Gate(), [1.0, 1.0, 1.0, 1.0, 1.0]),
        (Gate(power=0.5), [1.0, 1 / math.sqrt(2), 1 / math.sqrt(3), 0.5, 1 / math.sqrt(5)]),
        (Gate(alpha=1.0), [math.exp(-staleness) for staleness in range(5)]),
        (Gate(alpha=0.5, power=1.0), [math.exp(-0.5 * staleness) / (1 + staleness) for staleness in range(5)]),
        (Gate(alpha=0.1, cutoff=4), [1.0, None, 0.5 * math.exp(-0.2), None, 0.0]),
    ],
    ids=str,
)
def test_19_a_gate_lets_the_present_through_and_closes_smoothly(gate: Gate, factors: list[float | None]) -> None:
    """A power is FedBuff's weight, that nothing is divided by."""
    found = [gate.factor(staleness) for staleness in range(5)]
    assert found == sorted(found, reverse=True)
    for factor, wanted in zip(found, factors, strict=True):
        assert wanted is None or factor == pytest.approx(wanted, rel=1e-15)
    merging = OuterRule(PLAIN, ((Segment(0, 4, MEAN),),), gate).merging(0, [1])
    assert merging is not None
    assert (merging.factors is None) == (gate == Gate())


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        (Gate, {"alpha": -1.0}, "gate_alpha is -1.0"),
        (Gate, {"cutoff": -1}, "gate_cutoff is -1"),
        (Gate, {"power": -0.5}, "gate_power is -0.5"),
        (MergeOptions, {"kind": "average"}, "merge is 'average': one of mean, rda, clip"),
        (MergeOptions, {"kind": "clip", "norm_ratio_max": 0.5}, "norm_ratio_max is 0.5: at least 1"),
        (MergeOptions, {"trim_share": 0.5}, "trim_share is 0.5: from 0 to below 0.5"),
        (Correction, {"kind": "helo"}, "correction is 'helo': one of none, heloco"),
        (Correction, {"cosine": 1.5}, "correction_cosine is 1.5: at most 1"),
        (Correction, {"project_max": -0.1}, "correction_project_max is -0.1: not negative, and finite"),
        (Correction, {"project": math.inf}, "correction_project is inf: not negative, and finite"),
        (Correction, {"rotate": math.nan}, "correction_rotate is nan"),
        (Correction, {"doubt": -1.0}, "correction_doubt is -1.0"),
    ],
)
def test_options_name_the_field_and_the_value(kind: type, given: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kind(**given)


# --- What is merged how, for each part of a layout -------------------------------------------------------------------

PLAIN = OuterOptimizerOptions(kind="sgd", lr=1.0, momentum=0.0)


def test_rda_goes_by_parameters_and_leaves_embeddings_and_vectors_to_the_mean() -> None:
    shapes = [("embed.weight", (20, 4)), ("norm.weight", (4,)), ("a.weight", (4, 4)), ("head.weight", (20, 4))]
    layout = plan_layout(shapes, 2)
    rda = MergeOptions(kind="rda")
    rule = outer_rule(PLAIN, rda, layout, ["*embed*", "*head*"])
    kinds = {}
    for fragment in layout.fragments:
        segments = rule.segments[fragment.index]
        assert [0, *(each.stop for each in segments)] == [*(each.start for each in segments), fragment.numel]
        for piece, segment in zip(fragment.pieces, segments, strict=True):
            assert segment.stop - segment.start == piece.stop - piece.start
            kinds[piece.name] = segment.options.kind
    assert kinds == {"embed.weight": "mean", "norm.weight": "mean", "a.weight": "rda", "head.weight": "mean"}


def test_the_mean_needs_no_segments_and_the_others_have_a_fragment_or_its_parameters() -> None:
    layout = plan_layout([("a.weight", (4, 4)), ("b.weight", (4, 4))], 2)
    assert outer_rule(PLAIN, MEAN, layout) == OuterRule(PLAIN)
    clip, clamp = MergeOptions(kind="clip"), MergeOptions(kind="clamp")
    assert outer_rule(PLAIN, clip, layout).segments == ((Segment(0, 16, clip),), (Segment(0, 16, clip),))
    layout = plan_layout([("embed.weight", (20, 4)), ("norm.weight", (4,)), ("a.weight", (4, 4))], 1)
    (segments,) = outer_rule(PLAIN, clamp, layout, ["*embed*"]).segments
    assert segments == (Segment(0, 16, clamp), Segment(16, 96, clamp, 16), Segment(96, 100, clamp, 96))


def test_a_gate_needs_segments_and_gives_each_contribution_its_factor() -> None:
    layout, gate = plan_layout([("a.weight", (4, 4))], 1), Gate(cutoff=4)
    rule = outer_rule(PLAIN, MEAN, layout, gate=gate)
    assert rule.merging(0, [0, 2]) == Merging((Segment(0, 16, MEAN),), [1.0, gate.factor(2)])
    assert outer_rule(PLAIN, MEAN, layout).merging(0, [0, 2]) is None


@pytest.mark.parametrize("kind", ["mean", "rda"])
def test_a_correction_goes_by_parameters_whatever_the_merge_and_wants_a_momentum(kind: str) -> None:
    layout = plan_layout([("a.weight", (4, 4)), ("b.weight", (3,)), ("c.weight", (5, 1)), ("d.weight", (2, 2))], 2)
    heloco, options = Correction(kind="heloco"), MergeOptions(kind=kind)
    rule = outer_rule(OuterOptimizerOptions(), options, layout, correction=heloco)
    assert rule.correction is heloco
    for fragment in layout.fragments:
        segments = rule.segments[fragment.index]
        sizes = [piece.stop - piece.start for piece in fragment.pieces]
        assert [segment.stop - segment.start for segment in segments] == sizes
        assert len({segment.group for segment in segments}) == (len(sizes) if kind == "rda" else 1)
    uncorrected = outer_rule(OuterOptimizerOptions(), options, layout)
    assert all(len({segment.group for segment in each}) == len(each) for each in uncorrected.segments)
    words = "correction is 'heloco': kind 'sgd' has no momentum, heavy_ball or nesterov or nesterov_ema or"
    with pytest.raises(ValueError, match=words):
        outer_rule(PLAIN, MEAN, layout, correction=Correction(kind="heloco"))


# --- HeLoCo's correction against numbers worked out by hand, and what must hold of it for any -------------------------


def exact(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def normal(numel: int, seed: int) -> Tensor:
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
def test_a_correction_by_hand(values: tuple[float, ...], numbers: dict[str, float], wanted: tuple[float, ...]) -> None:
    found = once(exact(*values), exact(2.0, 0.0), heloco(**numbers))
    assert found.tolist() == pytest.approx(wanted, abs=1e-15)


@pytest.mark.parametrize(
    ("correction", "products"),
    [
        (UNCORRECTED, (1.0, -1.0, 1.0)),
        (heloco(), (1.0, 0.0, 0.0)),
        (heloco(), (0.0, 0.0, 1.0)),
        (heloco(cosine=0.0), (4.0, 0.0, 1.0)),
        (heloco(project=0.0), (4.0, -1.0, 1.0)),
        (heloco(project_max=0.0), (4.0, -1.0, 1.0)),
        (heloco(rotate=0.0), (4.0, 0.1, 1.0)),
    ],
)
def test_where_nothing_is_to_be_corrected_the_values_are_the_same(
    correction: Correction, products: tuple[float, float, float]
) -> None:
    values = normal(3, 1)
    assert correction.change(*products) == KEPT
    assert corrected(values, normal(3, 2), KEPT) is values


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


def test_the_products_of_what_is_corrected_follow_from_those_before_and_no_square_is_below_0() -> None:
    correction = heloco(cosine=0.9, rotate=1.0, doubt=0.5)
    momentum, values = normal(9, 3), [normal(9, seed) for seed in range(20, 25)]
    products = [[one.dot(other).item() for other in (*values, momentum)] for one in (*values, momentum)]
    changes = [correction.change(row[i], row[-1], products[-1][-1]) for i, row in enumerate(products[:-1])]
    assert len({(kept == 1, kept == 1 and ahead == 0) for kept, ahead in changes}) > 1, "taken out and turned"
    after = [corrected(each, momentum, change) for each, change in zip(values, changes, strict=True)]
    found = corrected_products(products, changes)
    for (i, one), (j, other) in itertools.product(enumerate(after), repeat=2):
        assert found[i][j] == pytest.approx(one.dot(other).item(), abs=1e-12), (i, j)
    for seed in range(200):
        against = momentum * -(1 + seed / 7)
        products = [[one.dot(other).item() for other in (against, momentum)] for one in (against, momentum)]
        change = heloco(doubt=0.0).change(products[0][0], products[0][1], products[1][1])
        ((square,),) = corrected_products(products, [change])
        assert 0 <= square < 1e-12 * products[0][0], f"seed {seed}: all of it is taken out"


# --- The reference ---------------------------------------------------------------------------------------------------


def test_a_site_keeps_its_inner_state_and_may_change_its_copy() -> None:
    calls: list[int] = []

    def site(local: torch.Tensor, round_index: int) -> torch.Tensor:
        calls.append(round_index)
        return local.sub_(float(len(calls)))  # in place, and another move in each round

    versions = reference_diloco(torch.zeros(2), [site], [1.0], 3, OuterOptimizerOptions(kind="sgd", lr=1.0, momentum=0))
    assert [v[0].item() for v in versions] == [0, -1, -3, -6]
    assert calls == [0, 1, 2]
    with pytest.raises(ValueError, match="zip"):
        reference_diloco(torch.zeros(1), [site], [1.0, 1.0], 1, OuterOptimizerOptions())
