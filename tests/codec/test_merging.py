"""The merges by ranges are those of whole tensors, whatever the ranges, the threads and the kernels."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from math import nan

import pytest
import torch
from torch import Tensor

from diloco.codec.base import DecodeError, NonFiniteError, NonFinitePayload, digest
from diloco.codec.kernel_library import LANES, SUM_BLOCK
from diloco.codec.merging import (
    READ_VALUES,
    Merging,
    Reading,
    State,
    Sums,
    outer_pass,
    sum_of_products,
    sum_plain,
    sums_of,
)
from diloco.codec.registry import make_codec
from diloco.outer.merge import (
    MEAN,
    MERGE_KINDS,
    UNCORRECTED,
    Correction,
    MergeOptions,
    Segment,
    blend,
    corrected,
    corrected_products,
    merge_mean,
    trimmed_mean,
)
from diloco.outer.optimizer import NOTHING, OuterOptimizerOptions, OuterState, outer_step
from tests.codec.levels import ALL, running

PLAIN = OuterOptimizerOptions(kind="sgd", lr=1.0, momentum=0.0)
EMA = OuterOptimizerOptions(kind="nesterov_ema", lr=0.5, momentum=0.5)
HELOCO = Correction(kind="heloco", cosine=0.5, rotate=1.0)
ENCODED = "int8"


def drawn(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 1e-3


def segments_of(kind: str, *stops: int, cuts: tuple[int, ...] = ()) -> tuple[Segment, ...]:
    starts = (0, *stops[:-1])
    return tuple(
        Segment(
            start, stop, MEAN if index == 1 else MergeOptions(kind=kind), tuple(c for c in cuts if start < c < stop)
        )
        for index, (start, stop) in enumerate(zip(starts, stops, strict=True))
    )


def remembered(numel: int, seed: int) -> OuterState:
    return OuterState(3, {"momentum": drawn(numel, seed)})


def whole(
    segments: tuple[Segment, ...],
    contributions: list[tuple[float, list[Tensor]]],
    momentum: Tensor,
    correction: Correction = UNCORRECTED,
) -> Tensor:
    """The definition, on whole tensors."""
    weights = [weight for weight, _ in contributions]
    values = [merge_mean([(1.0, updates)]) for _, updates in contributions]
    out, count = torch.empty_like(values[0]), len(values)
    for segment in segments:
        products = [[0.0] * count for _ in values]
        for start, stop in pairwise((segment.start, *segment.cuts, segment.stop)):
            mine = [each[start:stop] for each in (*values, momentum)]
            square = [[sum_of_products(a, b) for b in mine] for a in mine]
            changes = [correction.change(square[at][at], square[at][-1], square[-1][-1]) for at in range(count)]
            for row, more in zip(products, corrected_products(square, changes), strict=True):
                row[:] = [one + other for one, other in zip(row, more, strict=True)]
            for each, change in zip(mine[:-1], changes, strict=True):
                each.copy_(corrected(each, mine[-1], change))
        part = slice(segment.start, segment.stop)
        mine = [each[part] for each in values]
        if segment.options.kind == "trimmed_mean":
            trimmed_mean(list(zip(weights, mine, strict=True)), segment.options.trim_share, out[part])
            continue
        changed, scale = blend(segment.options, weights, products)
        out[part] = merge_mean([(weight, [each]) for weight, each in zip(changed, mine, strict=True)]).mul_(scale)
    return out


@pytest.mark.parametrize("correction", [UNCORRECTED, HELOCO], ids=["", "corrected"])
@pytest.mark.parametrize("kind", MERGE_KINDS)
def test_by_ranges_it_is_the_definition(kind: str, correction: Correction, monkeypatch: pytest.MonkeyPatch) -> None:
    numel, codec = 9_001, make_codec(ENCODED)
    cuts = () if correction.is_none else (700, 1_600, 4_000, 4_001)
    segments = segments_of(kind, 1_500, 2_048, 2_050, 8_000, 9_001, cuts=cuts)
    merging = Merging(segments, correction=correction)
    updates = [[drawn(numel, 1)], [drawn(numel, 2), drawn(numel, 3)], [5 * drawn(numel, 4)], [drawn(numel, 1)]]
    weights = [1.0, 2.0, 0.25, 0.0]
    sent = [
        (weight, [(codec, codec.encode(each)) for each in some]) for weight, some in zip(weights, updates, strict=True)
    ]
    decoded = [(weight, [codec.decode(payload, numel) for codec, payload in some]) for weight, some in sent if weight]
    theta, before = drawn(numel, 9), remembered(numel, 10)
    assert before.momentum is not None
    wanted, _ = outer_step(theta, whole(segments, decoded, before.momentum, correction), before, EMA)
    state, found = State(theta, theta.clone(), before), []
    with ThreadPoolExecutor(3) as pool:
        for spread in (map, pool.map):
            for level in ALL:
                with running(level):
                    each = outer_pass(sent, state, EMA, make_codec("fp32"), spread, merging=merging)
                found.append(each.state.theta)
        monkeypatch.setattr("diloco.codec.merging.RANGE_VALUES", 1024)
        cut = outer_pass(sent, state, EMA, make_codec("fp32"), merging=merging)
    assert torch.equal(found[0], wanted)
    assert all(torch.equal(each, found[0]) for each in found[1:])
    # Where ranges are cut shows in the last bits of sums, and so of weights, at most.
    assert torch.allclose(cut.state.theta, wanted, rtol=0, atol=1e-9)
    left = outer_pass(sent, state, EMA, make_codec("fp32"), merging=Merging(segments))
    assert torch.equal(left.state.theta, wanted) == correction.is_none


@pytest.mark.parametrize("sites", [2, 3, 4])
def test_clamp_is_sparselocos_for_ten_rounds(sites: int) -> None:
    """Its code takes each tensor times min(1, median / norm), torch's median being the lower one of two."""
    stops, codec = (40, 1_000, 1_003), make_codec("fp32")
    clamp = MergeOptions(kind="clamp")
    segments = tuple(Segment(start, stop, clamp) for start, stop in pairwise((0, *stops)))
    theta = drawn(stops[-1], 0)
    state, authors = State(theta, theta.clone(), NOTHING), theta.double()
    for number in range(10):
        updates = [drawn(stops[-1], 100 * number + site) for site in range(sites)]
        for site, update in enumerate(updates):
            for segment in segments:
                update[segment.start : segment.stop] *= 3.0 ** ((site * 7 + number * 5 + segment.stop) % 5 - 2)
        updates[number % sites][-3:] = 0
        sent = [(1.0, [(codec, codec.encode(each))]) for each in updates]
        state = outer_pass(sent, state, PLAIN, codec, merging=Merging(segments)).state
        for segment in segments:
            mine = torch.stack([each[segment.start : segment.stop].double() for each in updates])
            norms = mine.norm(dim=1)
            factors = torch.where(norms > 0, norms.median() / norms, 1.0).clamp(max=1.0)
            authors[segment.start : segment.stop] -= (factors[:, None] * mine).mean(0)
        assert (state.theta - authors).abs().max().item() < 1e-6, number


@pytest.mark.parametrize("kind", MERGE_KINDS)
def test_5_equal_contributions_that_go_with_the_momentum_give_themselves_and_so_do_the_first(kind: str) -> None:
    codec, numel = make_codec("fp32"), 3_000
    values, before = drawn(numel, 1), remembered(numel, 2)
    sent = [(weight, [(codec, codec.encode(values))]) for weight in (0.1, 0.7, 3.0)]
    merging = Merging(segments_of(kind, 100, 200, numel, cuts=(300, 301)), correction=HELOCO)
    along = OuterState(3, {"momentum": 0.3 * values})
    for momentum, is_kept in ((along, True), (NOTHING, True), (before, False)):
        state = State(drawn(numel, 4), drawn(numel, 4), momentum)
        found = outer_pass(sent, state, EMA, codec, merging=merging)
        wanted, following = outer_step(state.theta, values, momentum, EMA)
        assert torch.allclose(found.state.theta, wanted, rtol=0, atol=1e-9) == is_kept
        if kind in ("mean", "trimmed_mean"):
            assert torch.equal(found.state.theta, wanted) == is_kept
            assert torch.equal(found.state.optimizer.tensors["momentum"], following.tensors["momentum"]) == is_kept


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
def test_contributions_are_corrected_as_they_came_and_then_made_smaller(kind: str) -> None:
    codec, numel, factors = make_codec("fp32"), 3_000, [1.0, 0.5, 0.25]
    stops, weights, before = (0, 100, 200, 700, numel), [1.0, 2.0, 0.5], remembered(numel, 5)
    segments = segments_of(kind, 100, 200, numel, cuts=(700,))
    values = [drawn(numel, seed) for seed in (1, 2, 3)]
    sent = [(weight, [(codec, codec.encode(each))]) for weight, each in zip(weights, values, strict=True)]
    assert before.momentum is not None
    for each, by in zip(values, factors, strict=True):
        for start, stop in pairwise(stops):
            mine, ahead = each[start:stop], before.momentum[start:stop]
            products = (sum_of_products(mine, mine), sum_of_products(mine, ahead), sum_of_products(ahead, ahead))
            mine.copy_(corrected(mine, ahead, HELOCO.change(*products)) * by)
    smaller = [(weight, [(codec, codec.encode(each))]) for weight, each in zip(weights, values, strict=True)]
    state = State(drawn(numel, 4), drawn(numel, 4), before)
    found = outer_pass(sent, state, EMA, codec, merging=Merging(segments, factors, HELOCO))
    wanted = outer_pass(smaller, state, EMA, codec, merging=Merging(segments))
    assert torch.allclose(found.state.theta, wanted.state.theta, rtol=0, atol=1e-9)


@pytest.mark.parametrize("correction", [UNCORRECTED, HELOCO], ids=["", "corrected"])
@pytest.mark.parametrize("kind", MERGE_KINDS)
def test_6_a_site_without_weight_has_no_influence_not_even_by_nan(kind: str, correction: Correction) -> None:
    codec, numel = make_codec("fp32"), 3_000
    bad = torch.full((numel,), float("nan")).numpy().tobytes()
    good = [(1.0, [(codec, codec.encode(drawn(numel, 1)))]), (2.0, [(codec, codec.encode(drawn(numel, 2)))])]
    state = State(drawn(numel, 3), drawn(numel, 3), remembered(numel, 5))
    merging = Merging(segments_of(kind, 100, 200, numel), correction=correction)
    without = outer_pass(good, state, EMA, codec, merging=merging)
    beside = outer_pass([good[0], (0.0, [(codec, bad)]), good[1]], state, EMA, codec, merging=merging)
    assert torch.equal(without.state.theta, beside.state.theta)


@pytest.mark.parametrize("correction", [UNCORRECTED, HELOCO], ids=["", "corrected"])
@pytest.mark.parametrize("kind", MERGE_KINDS)
def test_17_weights_that_are_twice_as_large_change_nothing(kind: str, correction: Correction) -> None:
    codec, numel, weights = make_codec("fp32"), 3_000, [1.0, 2.0, 0.5, 0.3]
    payloads = [codec.encode(drawn(numel, seed)) for seed in range(4)]
    state = State(drawn(numel, 5), drawn(numel, 5), remembered(numel, 6))
    merging = Merging(segments_of(kind, 100, 200, numel), [1.0, 0.5, 1.0, 0.25], correction)
    once, twice, other = (
        outer_pass(
            [(weight * by, [(codec, payload)]) for weight, payload, by in zip(weights, payloads, more, strict=True)],
            state, EMA, codec, merging=merging,
        ).state.theta
        for more in ((1, 1, 1, 1), (2, 2, 2, 2), (1, 1, 1, 20))
    )  # fmt: skip
    assert torch.equal(once, twice)
    assert not torch.equal(once, other)


@pytest.mark.parametrize("kind", [kind for kind in MERGE_KINDS if kind != "mean"])
def test_what_is_merged_to_more_than_fp32_holds_is_no_version(kind: str) -> None:
    codec = make_codec("fp32")
    huge = [(1.0, [(codec, codec.encode(torch.full((64,), 3e38))), (codec, codec.encode(torch.full((64,), 3e38)))])]
    state = State(torch.zeros(64), torch.zeros(64), NOTHING)
    with pytest.raises(NonFiniteError):
        outer_pass(huge, state, PLAIN, codec, merging=Merging((Segment(0, 64, MergeOptions(kind=kind)),)))


# --- Reading an update by ranges -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int4:32", "int8", "fp32", "topk", "e3m0"])
@pytest.mark.parametrize("like", ["", "0" * 64])
def test_what_is_found_is_what_is_in_it(name: str, like: str) -> None:
    codec = make_codec(name).plain
    for numel in (1, 60, 61, 4099, READ_VALUES + 1500):
        values, against = torch.randn(2, numel, generator=torch.Generator().manual_seed(numel))
        payload = codec.encode(values)
        decoded = codec.decode(payload, numel)
        for level in ALL:
            with running(level):
                reading = Reading(codec, numel, like)
            found = []
            for start, stop in reading.ranges():
                part = against[start:stop] if start else None
                with running(level):
                    found.append(reading.read(payload, numel, start, stop - start, part))
                own = decoded[start:stop]
                assert found[-1].largest == float(own.abs().max())
                assert found[-1].squares == sum_of_products(own, own)
                assert found[-1].products == (0 if part is None else sum_of_products(own, part))
                assert found[-1].against_squares == (0 if part is None else sum_of_products(part, part))
            assert len(found) == len(reading.ranges())
            assert reading.digest() == digest(decoded, like)


def test_a_piece_of_a_payload_is_read_by_itself() -> None:
    """As it is taken out of a file that is still growing."""
    codec, numel = make_codec("int4:32").plain, READ_VALUES + 3000
    values = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    payload, decoded = codec.encode(values), codec.decode(codec.encode(values), numel)
    for level in ALL:
        with running(level):
            reading = Reading(codec, numel)
        for start, stop in reading.ranges():
            piece = b"".join(payload[at : at + length] for at, length in codec.sections(numel, start, stop))
            own = decoded[start:stop]
            assert reading.read(piece, stop - start, 0, stop - start).squares == sum_of_products(own, own)
        assert reading.digest() == digest(decoded)


@pytest.mark.parametrize("numel", [40, 4096])
def test_it_refuses_what_decoding_refuses(numel: int) -> None:
    values = torch.zeros(numel)
    values[7] = nan
    for level in ALL:
        with running(level):
            reading = Reading(make_codec("fp32").plain, numel)
            short = Reading(make_codec("int4").plain, numel)
        with pytest.raises(NonFinitePayload):
            reading.read(values.numpy().tobytes(), numel, 0, numel)
        with pytest.raises(DecodeError):
            short.read(b"abc", numel, 0, numel)
        assert isinstance(short.read(make_codec("int4").encode(torch.ones(numel)), numel, 0, numel), Sums)


# --- Sums of products ------------------------------------------------------------------------------------------------


def slow_sum(a: torch.Tensor, b: torch.Tensor) -> float:
    """The module's docstring in Python's floats, which are fp64."""
    products = [x * y for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    total = 0.0
    for start in range(0, len(products), SUM_BLOCK):
        block = products[start : start + SUM_BLOCK]
        block += [0.0] * (SUM_BLOCK - len(block))
        lanes = [0.0] * LANES
        for index, product in enumerate(block):
            lanes[index % LANES] += product
        while len(lanes) > 1:
            half = len(lanes) // 2
            lanes = [low + high for low, high in zip(lanes[:half], lanes[half:], strict=True)]
        total += lanes[0]
    return total


@pytest.mark.parametrize("numel", [0, 1, 15, 16, 17, 1023, 1024, 1025, 5000, 262_144 + 1500])
def test_against_the_order_written_slowly(numel: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    a, b = (
        torch.randn(numel, generator=generator) * torch.exp2(torch.randint(-60, 60, (numel,), generator=generator))
        for _ in range(2)
    )
    for x, y in ((a, a), (a, b)):
        found = sum_plain(x, y)
        assert found.hex() == slow_sum(x, y).hex(), f"seed {numel}"
        assert sum_of_products(x, y).hex() == found.hex(), f"seed {numel}"
        exact = math.fsum(p * q for p, q in zip(x.tolist(), y.tolist(), strict=True))
        scale = math.fsum(abs(p * q) for p, q in zip(x.tolist(), y.tolist(), strict=True))
        assert abs(found - exact) <= 1e-12 * scale


def test_squares_beyond_fp32_have_a_sum() -> None:
    values = torch.full((3000,), 3e38)
    assert sum_of_products(values, values) == pytest.approx(3000 * 9e76)


def test_nothing_is_plus_zero() -> None:
    assert math.copysign(1.0, sum_of_products(torch.full((3,), -0.0), torch.ones(3))) == 1.0


def test_what_is_not_finite_has_no_sums() -> None:
    for bad in (math.nan, math.inf, -math.inf):
        assert sums_of(torch.tensor([1.0, bad]), None) == Sums(largest=math.inf)
