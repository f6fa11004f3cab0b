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
    MEAN,
    MERGE_KINDS,
    Correction,
    Gate,
    MergeOptions,
    Segment,
    blend,
    merge_mean,
    trimmed_mean,
)
from diloco.outer.optimizer import OuterOptimizerOptions, OuterRule, outer_rule

BLENDS = [kind for kind in MERGE_KINDS if kind != "trimmed_mean"]


def test_weighted_mean_of_exact_numbers() -> None:
    merged = merge_mean([(1.0, [torch.tensor([4.0, 0.0])]), (3.0, [torch.tensor([8.0, -4.0])])])
    assert merged.tolist() == [7.0, -3.0]


def test_close_to_the_mean_in_double() -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        deltas = [torch.randn(1001, generator=generator) for _ in range(7)]
        weights = [float(w) for w in torch.rand(7, generator=generator) + 0.1]
        exact = sum(w * d.double() for w, d in zip(weights, deltas, strict=True)) / sum(weights)
        merged = merge_mean([(w, [d]) for w, d in zip(weights, deltas, strict=True)])
        assert torch.allclose(merged.double(), exact, rtol=0, atol=1e-6), f"seed {seed}"


def test_updates_of_one_site_are_added_in_sequence_order() -> None:
    big, small = torch.tensor([2.0**24]), torch.tensor([1.0])
    other = torch.tensor([0.0])
    # 2**24 + 1 rounds to 2**24, so the order of a site's three updates can be seen in the bits.
    for place in (0, 1):
        for updates, total in (([big, small, -big], 0.0), ([big, -big, small], 1.0)):
            contributions = [(1.0, [other])]
            contributions.insert(place, (1.0, updates))
            assert merge_mean(contributions).item() == total / 2, f"place {place}"


def test_the_updates_stay_as_they_are() -> None:
    deltas = [torch.randn(33, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    before = [d.clone() for d in deltas]
    out = torch.empty(33)
    merged = merge_mean([(1.0, deltas[:2]), (2.0, deltas[2:3]), (0.5, deltas[3:])], out=out)
    assert merged is out
    assert torch.equal(out, merge_mean([(1.0, deltas[:2]), (2.0, deltas[2:3]), (0.5, deltas[3:])]))
    assert all(torch.equal(d, b) for d, b in zip(deltas, before, strict=True))


@pytest.mark.parametrize("contributions", [[], [(0.0, [torch.ones(2)])], [(1.0, [])]])
def test_nothing_to_merge_is_an_error(contributions: list[tuple[float, list[torch.Tensor]]]) -> None:
    with pytest.raises(ValueError, match="no contribution has a positive weight"):
        merge_mean(contributions)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_an_error(weight: float) -> None:
    with pytest.raises(ValueError, match="weight is"):
        merge_mean([(1.0, [torch.ones(2)]), (weight, [torch.ones(2)])])


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
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [0.1, 0.2, 0.7], [1e-9, 1.0, 3e7]])
def test_5_equal_pseudo_gradients_are_merged_to_themselves_whatever_the_weights(
    kind: str, weights: list[float]
) -> None:
    for each in (*drawn(5, 501, 3), torch.zeros(501)):
        assert torch.equal(merged(MergeOptions(kind=kind), weights, [each] * 3), each)


@pytest.mark.parametrize("kind", MERGE_KINDS)
def test_one_contribution_is_itself(kind: str) -> None:
    (each,) = drawn(1, 501, 4)
    assert torch.equal(merged(MergeOptions(kind=kind), [0.3], [each]), each)


@pytest.mark.parametrize("kind", MERGE_KINDS)
def test_contributions_of_zeros_are_merged_to_zeros_and_beside_others_break_nothing(kind: str) -> None:
    zeros, (one, other) = torch.zeros(64), drawn(2, 64, 5)
    assert not merged(MergeOptions(kind=kind), [1.0, 2.0], [zeros, zeros]).any()
    assert merged(MergeOptions(kind=kind), [1.0, 2.0, 1.0], [zeros, one, other]).isfinite().all()


@pytest.mark.parametrize("kind", MERGE_KINDS)
def test_the_order_of_the_sites_shows_in_no_more_than_rounding(kind: str) -> None:
    weights, values = [1.0, 2.0, 0.5, 1.5], drawn(4, 257, 6)
    first = merged(MergeOptions(kind=kind), weights, values)
    for order in itertools.permutations(range(4)):
        other = merged(MergeOptions(kind=kind), [weights[i] for i in order], [values[i] for i in order])
        assert torch.allclose(first, other, rtol=1e-5, atol=1e-6), order


@pytest.mark.parametrize("kind", MERGE_KINDS)
def test_twice_as_long_contributions_make_twice_as_long_a_merge(kind: str) -> None:
    weights, values = [1.0, 2.0, 0.5], drawn(3, 257, 7)
    single, double = (merged(MergeOptions(kind=kind), weights, [by * each for each in values]) for by in (1.0, 2.0))
    assert torch.allclose(2 * single, double, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", BLENDS)
def test_turning_the_contributions_turns_the_merge(kind: str) -> None:
    weights, values = [1.0, 2.0, 0.5], drawn(3, 64, 8)
    turn, _ = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(9)))
    turned = merged(MergeOptions(kind=kind), weights, [turn @ each for each in values])
    assert torch.allclose(turned, turn @ merged(MergeOptions(kind=kind), weights, values), rtol=1e-4, atol=1e-5)


def test_rda_is_the_mean_length_along_the_mean_direction() -> None:
    weights, values = [1.0, 2.0, 0.5], [each.double() for each in drawn(3, 101, 10)]
    direction = sum(weight * each / each.norm() for weight, each in zip(weights, values, strict=True))
    assert isinstance(direction, Tensor)
    length = sum(weight * each.norm() for weight, each in zip(weights, values, strict=True)) / sum(weights)
    exact = length * direction / direction.norm()
    found = merged(MergeOptions(kind="rda"), weights, [each.float() for each in values])
    assert torch.allclose(found.double(), exact, rtol=1e-5, atol=1e-6)


def test_rda_keeps_the_length_of_what_has_nothing_in_common() -> None:
    """Where the mean of M is sqrt(M) times shorter."""
    values = [row * 8.0 for row in torch.eye(16)]
    assert merged(MergeOptions(kind="rda"), [1.0] * 16, values).norm().item() == pytest.approx(8.0)
    assert merged(MEAN, [1.0] * 16, values).norm().item() == pytest.approx(2.0)


def test_rda_of_directions_that_cancel_is_the_mean() -> None:
    one = torch.tensor([3.0, 4.0])
    assert merged(MergeOptions(kind="rda"), [1.0, 1.0], [one, -one]).tolist() == [0.0, 0.0]
    assert merged(MergeOptions(kind="rda"), [1.0, 1.0], [one, -3 * one]).tolist() == [-3.0, -4.0]


def test_clip_and_normalise_by_hand() -> None:
    """Lengths 1, 2 and 8: the median is 2."""
    values = [torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0]), torch.tensor([8.0, 0.0])]
    weights = [1.0, 1.0, 2.0]
    assert merged(MergeOptions(kind="clip"), weights, values).tolist() == pytest.approx([(1 + 2 * 2) / 4, 2 / 4])
    wide = MergeOptions(kind="clip", norm_ratio_max=2.0)
    assert merged(wide, weights, values).tolist() == pytest.approx([(1 + 2 * 4) / 4, 2 / 4])
    assert merged(MergeOptions(kind="normalise"), weights, values).tolist() == pytest.approx([(2 + 2 * 2) / 4, 2 / 4])


def test_clamp_by_hand() -> None:
    """Lengths 1, 2, 8 and 9: the lower median is 2, and the shortest stays as it is."""
    values = [torch.tensor(each) for each in ([1.0, 0.0], [0.0, 2.0], [8.0, 0.0], [0.0, -9.0])]
    clamp = MergeOptions(kind="clamp")
    assert merged(clamp, [1.0, 1.0, 2.0, 1.0], values).tolist() == pytest.approx([(1 + 2 * 2) / 5, (2 - 2) / 5])
    nothing_of_most = [torch.zeros(2), torch.zeros(2), torch.ones(2)]
    assert merged(clamp, [1.0] * 3, nothing_of_most).tolist() == [0.0, 0.0]


def test_the_geometric_median_has_the_least_sum_of_distances() -> None:
    weights, values = [1.0, 1.0, 2.0, 0.5], drawn(4, 16, 11)

    def far(point: Tensor) -> float:
        return sum(w * (point - each).double().norm().item() for w, each in zip(weights, values, strict=True))

    found = merged(MergeOptions(kind="geometric_median"), weights, values)
    for seed in range(50):
        near = found + 1e-2 * torch.randn(16, generator=torch.Generator().manual_seed(seed))
        assert far(found) <= far(near) + 1e-6, seed


@pytest.mark.parametrize(
    ("kind", "moved_max"), [("clip", 1.0), ("normalise", 1.0), ("clamp", 1.0), ("geometric_median", 1.0)]
)
def test_one_mad_site_of_five_moves_a_robust_merge_little(kind: str, moved_max: float) -> None:
    good = [torch.ones(64) + 0.1 * each / each.norm() for each in drawn(4, 64, 12)]
    mad = [*good, torch.full((64,), -1e6)]
    without = merged(MEAN, [1.0] * 4, good)
    moved = (merged(MergeOptions(kind=kind), [1.0] * 5, mad) - without).norm() / without.norm()
    assert moved.item() < moved_max
    assert (merged(MEAN, [1.0] * 5, mad) - without).norm() / without.norm() > 1e4


def test_a_trimmed_mean_by_hand() -> None:
    values = [torch.tensor([each]) for each in (1.0, 2.0, 4.0, 8.0, 100.0)]
    weights = [1.0, 1.0, 3.0, 4.0, 9.0]
    out = torch.empty(1)
    assert trimmed_mean(list(zip(weights, values, strict=True)), 0.2, out).item() == (2 + 3 * 4 + 4 * 8) / 8
    assert trimmed_mean(list(zip(weights, values, strict=True)), 0.49, out).item() == 4.0
    assert trimmed_mean(list(zip(weights, values, strict=True)), 0.1, out).item() == pytest.approx(
        (1 + 2 + 12 + 32 + 900) / 18
    )


def test_trimming_is_value_by_value() -> None:
    values = [torch.tensor([1.0, 300.0]), torch.tensor([200.0, 2.0]), torch.tensor([3.0, 3.0])]
    out = torch.empty(2)
    assert trimmed_mean([(1.0, each) for each in values], 0.34, out).tolist() == [3.0, 3.0]


def test_19_a_gate_of_a_power_is_fedbuff_s_weight_that_nothing_is_divided_by() -> None:
    assert [Gate(power=0.5).factor(staleness) for staleness in (0, 3, 8)] == [1.0, 0.5, 1 / 3]
    assert Gate(alpha=0.5, power=1.0).factor(1) == math.exp(-0.5) / 2
    assert not Gate(power=0.5).is_open


def test_a_gate_lets_the_present_through_and_closes_smoothly_at_its_cutoff() -> None:
    gate = Gate(alpha=0.1, cutoff=4)
    found = [gate.factor(staleness) for staleness in range(6)]
    assert found[0] == 1.0
    assert found[2] == pytest.approx(0.5 * math.exp(-0.2))
    assert found == sorted(found, reverse=True)
    assert found[4:] == [0.0, 0.0]
    assert [Gate().factor(staleness) for staleness in (0, 9)] == [1.0, 1.0]
    assert Gate(alpha=1.0).factor(3) == math.exp(-3)
    assert (Gate().is_open, gate.is_open, Gate(alpha=1.0).is_open) == (True, False, False)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"alpha": -1.0}, "gate_alpha is -1.0"),
        ({"cutoff": -1}, "gate_cutoff is -1"),
        ({"power": -0.5}, "gate_power is -0.5"),
    ],
)
def test_a_gate_names_the_field_and_the_value(given: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Gate(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kind": "average"}, "merge is 'average': one of mean, rda, clip"),
        ({"kind": "clip", "norm_ratio_max": 0.5}, "norm_ratio_max is 0.5: at least 1"),
        ({"trim_share": 0.5}, "trim_share is 0.5: from 0 to below 0.5"),
    ],
)
def test_options_name_the_field_and_the_value(given: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MergeOptions(**given)  # type: ignore[arg-type]


# --- What is merged how, for each part of a layout -------------------------------------------------------------------

PLAIN = OuterOptimizerOptions(kind="sgd", lr=1.0, momentum=0.0)


def test_rda_goes_by_parameters_and_leaves_embeddings_and_vectors_to_the_mean() -> None:
    shapes = [("embed.weight", (20, 4)), ("norm.weight", (4,)), ("a.weight", (4, 4)), ("head.weight", (20, 4))]
    layout = plan_layout(shapes, 2)
    rda = MergeOptions(kind="rda")
    rule = outer_rule(PLAIN, rda, layout, ["*embed*", "*head*"])
    kinds = {}
    for fragment in layout.fragments:
        segments = rule.segments_of(fragment.index)
        assert [0, *(each.stop for each in segments)] == [*(each.start for each in segments), fragment.numel]
        for piece, segment in zip(fragment.pieces, segments, strict=True):
            assert segment.stop - segment.start == piece.stop - piece.start
            kinds[piece.name] = segment.options.kind
    assert kinds == {"embed.weight": "mean", "norm.weight": "mean", "a.weight": "rda", "head.weight": "mean"}


def test_clamp_goes_by_all_parameters() -> None:
    layout = plan_layout([("embed.weight", (20, 4)), ("norm.weight", (4,)), ("a.weight", (4, 4))], 1)
    clamp = MergeOptions(kind="clamp")
    segments = outer_rule(PLAIN, clamp, layout, ["*embed*"]).segments_of(0)
    assert segments == (Segment(0, 16, clamp), Segment(16, 96, clamp), Segment(96, 100, clamp))


def test_the_mean_needs_no_segments_and_the_others_have_a_fragment_in_one() -> None:
    layout = plan_layout([("a.weight", (4, 4)), ("b.weight", (4, 4))], 2)
    assert outer_rule(PLAIN, MEAN, layout) == OuterRule(PLAIN)
    clip = MergeOptions(kind="clip")
    assert outer_rule(PLAIN, clip, layout).segments == ((Segment(0, 16, clip),), (Segment(0, 16, clip),))


def test_a_gate_needs_segments_and_gives_each_contribution_its_factor() -> None:
    layout = plan_layout([("a.weight", (4, 4))], 1)
    gate = Gate(cutoff=4)
    rule = outer_rule(PLAIN, MEAN, layout, gate=gate)
    assert rule.segments_of(0) == (Segment(0, 16, MEAN),)
    assert rule.factors([0, 2]) == [1.0, gate.factor(2)]
    assert outer_rule(PLAIN, MEAN, layout).factors([0, 2]) is None


@pytest.mark.parametrize("kind", ["mean", "clip", "rda"])
def test_a_correction_goes_by_parameters_whatever_the_merge(kind: str) -> None:
    layout = plan_layout([("a.weight", (4, 4)), ("b.weight", (3,)), ("c.weight", (5, 1)), ("d.weight", (2, 2))], 2)
    heloco, options = Correction(kind="heloco"), MergeOptions(kind=kind)
    rule = outer_rule(OuterOptimizerOptions(), options, layout, correction=heloco)
    assert rule.correction is heloco
    for fragment in layout.fragments:
        stops = [each for segment in rule.segments_of(fragment.index) for each in (*segment.cuts, segment.stop)]
        sizes = [piece.stop - piece.start for piece in fragment.pieces]
        assert [stop - start for start, stop in zip([0, *stops], stops, strict=False)] == sizes
        assert len(rule.segments_of(fragment.index)) == (len(sizes) if kind == "rda" else 1)
    uncorrected = outer_rule(OuterOptimizerOptions(), options, layout)
    assert not any(segment.cuts for segments in uncorrected.segments for segment in segments)


def test_a_correction_wants_a_momentum() -> None:
    layout = plan_layout([("a.weight", (4, 4))], 1)
    words = "correction is 'heloco': kind 'sgd' has no momentum, heavy_ball or nesterov or nesterov_ema or"
    with pytest.raises(ValueError, match=words):
        outer_rule(PLAIN, MEAN, layout, correction=Correction(kind="heloco"))
