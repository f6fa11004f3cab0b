"""What is merged how, for each part of a layout."""

from __future__ import annotations

import pytest

from diloco.outer.fragments import plan_layout
from diloco.outer.merge import MEAN, Correction, Gate, MergeOptions, Segment
from diloco.outer.optimizer import OuterOptimizerOptions, OuterRule, outer_rule

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
