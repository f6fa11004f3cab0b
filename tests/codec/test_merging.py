"""The merges by ranges are those of whole tensors, whatever the ranges, the threads and the kernels."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from diloco.codec import fused
from diloco.codec.contract import NonFiniteError
from diloco.codec.fused import State, outer_pass
from diloco.codec.merging import Merging
from diloco.codec.native import kernels
from diloco.codec.registry import make_codec
from diloco.codec.sums import sum_of_products
from diloco.outer.merge import MEAN, MERGE_KINDS, MergeOptions, Segment, blend, merge_mean, trimmed_mean
from diloco.outer.optimizer import NOTHING, OuterOptimizerOptions, outer_step

PLAIN = OuterOptimizerOptions(kind="sgd", lr=1.0, momentum=0.0)
ENCODED = "int8"


def drawn(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 1e-3


def segments_of(kind: str, *stops: int) -> tuple[Segment, ...]:
    starts = (0, *stops[:-1])
    return tuple(
        Segment(start, stop, MEAN if index == 1 else MergeOptions(kind=kind))
        for index, (start, stop) in enumerate(zip(starts, stops, strict=True))
    )


def whole(segments: tuple[Segment, ...], contributions: list[tuple[float, list[Tensor]]]) -> Tensor:
    """The definition, on whole tensors."""
    weights = [weight for weight, _ in contributions]
    values = [merge_mean([(1.0, updates)]) for _, updates in contributions]
    out = torch.empty_like(values[0])
    for segment in segments:
        part = slice(segment.start, segment.stop)
        mine = [each[part].clone() for each in values]
        if segment.options.kind == "trimmed_mean":
            trimmed_mean(list(zip(weights, mine, strict=True)), segment.options.trim_share, out[part])
            continue
        products = [[sum_of_products(a, b) for b in mine] for a in mine]
        changed, scale = blend(segment.options, weights, products)
        out[part] = merge_mean([(weight, [each]) for weight, each in zip(changed, mine, strict=True)]).mul_(scale)
    return out


@pytest.mark.parametrize("kind", MERGE_KINDS)
def test_by_ranges_it_is_the_definition(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    numel, codec = 9_001, make_codec(ENCODED)
    segments = segments_of(kind, 1_500, 2_048, 2_050, 8_000, 9_001)
    updates = [[drawn(numel, 1)], [drawn(numel, 2), drawn(numel, 3)], [5 * drawn(numel, 4)], [drawn(numel, 1)]]
    weights = [1.0, 2.0, 0.25, 0.0]
    sent = [
        (weight, [(codec, codec.encode(each)) for each in some]) for weight, some in zip(weights, updates, strict=True)
    ]
    decoded = [(weight, [codec.decode(payload, numel) for codec, payload in some]) for weight, some in sent if weight]
    theta = drawn(numel, 9)
    wanted, _ = outer_step(theta, whole(segments, decoded), NOTHING, PLAIN)
    found = []
    with ThreadPoolExecutor(3) as pool:
        for spread in (map, pool.map):
            for fast in (lambda: None, kernels):
                state = State(theta, theta.clone(), NOTHING)
                found.append(
                    outer_pass(
                        sent, state, PLAIN, make_codec("fp32"), spread, fast, merging=Merging(segments)
                    ).state.theta
                )
        monkeypatch.setattr(fused, "RANGE_VALUES", 1024)
        cut = outer_pass(
            sent, State(theta, theta.clone(), NOTHING), PLAIN, make_codec("fp32"), merging=Merging(segments)
        )
    assert torch.equal(found[0], wanted)
    assert all(torch.equal(each, found[0]) for each in found[1:])
    # Where ranges are cut shows in the last bits of sums, and so of weights, at most.
    assert torch.allclose(cut.state.theta, wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", MERGE_KINDS)
def test_contributions_made_smaller_are_merged_as_if_they_were_sent_so(kind: str) -> None:
    codec, numel, factors = make_codec("fp32"), 3_000, [1.0, 0.5, 0.25]
    values, weights = [drawn(numel, seed) for seed in (1, 2, 3)], [1.0, 2.0, 0.5]
    sent = [(weight, [(codec, codec.encode(each))]) for weight, each in zip(weights, values, strict=True)]
    smaller = [(w, [(codec, codec.encode(each * by))]) for w, each, by in zip(weights, values, factors, strict=True)]
    state, segments = State(drawn(numel, 4), drawn(numel, 4), NOTHING), segments_of(kind, 100, 200, numel)
    found = outer_pass(sent, state, PLAIN, codec, merging=Merging(segments, factors))
    wanted = outer_pass(smaller, state, PLAIN, codec, merging=Merging(segments))
    assert torch.allclose(found.state.theta, wanted.state.theta, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", MERGE_KINDS)
def test_6_a_site_without_weight_has_no_influence_not_even_by_nan(kind: str) -> None:
    codec, numel = make_codec("fp32"), 3_000
    bad = torch.full((numel,), float("nan")).numpy().tobytes()
    good = [(1.0, [(codec, codec.encode(drawn(numel, 1)))]), (2.0, [(codec, codec.encode(drawn(numel, 2)))])]
    state, segments = State(drawn(numel, 3), drawn(numel, 3), NOTHING), segments_of(kind, 100, 200, numel)
    without = outer_pass(good, state, PLAIN, codec, merging=Merging(segments))
    beside = outer_pass([good[0], (0.0, [(codec, bad)]), good[1]], state, PLAIN, codec, merging=Merging(segments))
    assert torch.equal(without.state.theta, beside.state.theta)


@pytest.mark.parametrize("kind", [kind for kind in MERGE_KINDS if kind != "mean"])
def test_what_is_merged_to_more_than_fp32_holds_is_no_version(kind: str) -> None:
    codec = make_codec("fp32")
    huge = [(1.0, [(codec, codec.encode(torch.full((64,), 3e38))), (codec, codec.encode(torch.full((64,), 3e38)))])]
    state = State(torch.zeros(64), torch.zeros(64), NOTHING)
    with pytest.raises(NonFiniteError):
        outer_pass(huge, state, PLAIN, codec, merging=Merging((Segment(0, 64, MergeOptions(kind=kind)),)))
