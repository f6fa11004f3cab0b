"""An outer step in one pass, by ranges: the bits of whole tensors, whatever the ranges, the threads and the kernels."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby, pairwise
from math import nan

import pytest
import torch
from torch import Tensor

from diloco.codec import merging
from diloco.codec.base import DecodeError, NonFiniteError, NonFinitePayload, digest
from diloco.codec.kernel_library import PLAIN
from diloco.codec.merging import (
    LANES,
    RANGE_VALUES,
    READ_VALUES,
    SUM_BLOCK,
    Reading,
    State,
    Sums,
    outer_pass,
    ranges,
    sum_of_products,
    sums_of,
)
from diloco.codec.registry import make_codec
from diloco.codec.site_pass import publish
from diloco.outer.merge import (
    MEAN,
    MERGE_KINDS,
    UNCORRECTED,
    Correction,
    MergeOptions,
    Merging,
    Segment,
    blend,
    corrected,
    corrected_products,
    merge_mean,
    trimmed_mean,
)
from diloco.outer.optimizer import NOTHING, OuterOptimizerOptions, OuterState, outer_step
from tests.codec.values import ALL, DOWN, NOT_FINITE, bf16_by_default, drawn, running, same, samples

NESTEROV = OuterOptimizerOptions()
HEAVY_BALL = OuterOptimizerOptions(kind="heavy_ball", lr=0.3, momentum=0.8)
PLAIN_SGD = OuterOptimizerOptions(kind="sgd", lr=1.0, momentum=0.0)
WITHOUT_KERNELS = (
    OuterOptimizerOptions(kind="nesterov_ema"),
    OuterOptimizerOptions(kind="delayed_nesterov", window=3, share_ahead=0.2),
    OuterOptimizerOptions(kind="adamw", lr=0.1, weight_decay=0.1),
    OuterOptimizerOptions(kind="schedule_free", lr=1.0, weight_decay=0.01),
    OuterOptimizerOptions(kind="gpa", lr=1.0),
)
Contributions = list[tuple[float, list[tuple[str, torch.Tensor]]]]


def check(
    contributions: Contributions, state: State, optimizer: OuterOptimizerOptions, down: str, share: float = 1
) -> State:
    """Compare the pass with the stages, with and without threads, and return the state after it."""
    numel = state.theta.numel()
    sent = [
        (weight, [(make_codec(name), make_codec(name).encode(values)) for name, values in updates])
        for weight, updates in contributions
    ]
    decoded = [(weight, [codec.decode(payload, numel) for codec, payload in updates]) for weight, updates in sent]
    merged = merge_mean(decoded)
    theta, following = outer_step(state.theta, merged, state.optimizer, optimizer, share)
    payload, published = publish(theta, state.published, make_codec(down))
    before = [each.clone() for each in tensors(state)]
    norms = set()
    with ThreadPoolExecutor(3) as pool:
        for spread, level in ((map, PLAIN), *((pool.map, each) for each in ALL)):
            with running(level), bf16_by_default():
                stepped = outer_pass(sent, state, optimizer, make_codec(down), spread, like="", share=share)
            assert stepped.digest == digest(published)
            assert same(stepped.state.theta, theta)
            assert same(stepped.state.published, published)
            assert stepped.payload == payload
            assert stepped.state.optimizer.steps == following.steps
            assert stepped.state.optimizer.tensors.keys() == following.tensors.keys()
            for name, values in stepped.state.optimizer.tensors.items():
                assert same(values, following.tensors[name]), name
            norms.add(stepped.norm)
            assert stepped.norm == pytest.approx(sum_of_products(merged, merged) ** 0.5, rel=1e-12)
    assert len(norms) == 1, "the threads or the kernels show in the norm"
    for held, old in zip(tensors(state), before, strict=True):
        assert same(held, old), "the state was written to"
    return stepped.state


def tensors(state: State) -> list[torch.Tensor]:
    return [state.theta, state.published, *state.optimizer.tensors.values()]


def draw(numel: int, seed: int) -> Tensor:
    return drawn(numel, seed, 1e-3)


CASES = [(down, NESTEROV, 1.0) for down in DOWN]
CASES += [(down, each, 1.0) for each in (HEAVY_BALL, PLAIN_SGD) for down in ("fp32", "int4")]
CASES += [("fp32", WITHOUT_KERNELS[0], 1.0), *(("int4", each, 1.0) for each in WITHOUT_KERNELS)]
CASES += [("int4", each, 0.3) for each in (NESTEROV, HEAVY_BALL, PLAIN_SGD, *WITHOUT_KERNELS) if not each.window > 1]


@pytest.mark.parametrize(
    ("down", "optimizer", "share"),
    CASES,
    ids=lambda each: each.kind if isinstance(each, OuterOptimizerOptions) else str(each),
)
def test_versions_are_those_of_the_stages(
    down: str, optimizer: OuterOptimizerOptions, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "RANGE_VALUES", 16_384)  # Two ranges; ``test_every_length`` goes to the true bound.
    numel = 16_384 + 4099
    theta = drawn(numel, 0)
    state = State(theta, theta.clone(), NOTHING)
    for version in range(3):
        contributions: Contributions = [
            (0.25, [("int4", draw(numel, 10 * version + 1))]),
            (0.5, [("int8", draw(numel, 10 * version + 2)), ("int4+zstd1", draw(numel, 10 * version + 3))]),
            (0.0, [("fp32", draw(numel, 10 * version + 4))]),
            (0.25, [("bf16", draw(numel, 10 * version + 5)), ("topk", draw(numel, 10 * version + 6))]),
        ]
        if version == 2:  # Before that all codecs have kernels, and the pass is theirs.
            contributions += [(0.5, [("sign", draw(numel, 27)), ("e3m0:24", draw(numel, 28))])]
        state = check(contributions, state, optimizer, down, share)


@pytest.mark.parametrize(("like", "form"), [(None, ""), ("", "xxh3:"), ("0" * 64, "")])
def test_the_digest_has_the_form_that_is_asked_for(like: str | None, form: str) -> None:
    values, codec = draw(5000, 3), make_codec("int8")
    sent = [(1.0, [(codec, codec.encode(values))]), (0.0, [(codec, b"x")])]  # A site without weight is not read.
    stepped = outer_pass(sent, State(values, values, NOTHING), NESTEROV, make_codec("int4"), like=like)
    assert stepped.digest == ("" if like is None else digest(stepped.state.published, like))
    assert stepped.digest.startswith(form)


def test_what_is_sent_as_it_is_lies_in_memory_once() -> None:
    theta, codec = draw(3000, 0), make_codec("fp32")
    stepped = outer_pass([(1.0, [(codec, bytes(12000))])], State(theta, theta, NOTHING), NESTEROV, codec)
    assert stepped.state.published.data_ptr() == stepped.state.theta.data_ptr()
    stepped.state.theta[5] = 1.0
    assert stepped.payload[20:24] == b"\0\0\x80?"


@pytest.mark.parametrize("numel", [1, 2, 31, 33, 1023, 1025, RANGE_VALUES - 1, RANGE_VALUES, RANGE_VALUES + 1])
def test_every_length(numel: int) -> None:
    state = State(drawn(numel, 0), drawn(numel, 1), OuterState(1, {"momentum": draw(numel, 2)}))
    for up in ("int4", "int8", "fp32"):
        check([(3.0, [(up, draw(numel, 3))]), (1.0, [(up, draw(numel, 4))])], state, NESTEROV, "int4")


@pytest.mark.parametrize("kind", sorted(samples(0)))
def test_adversarial_values(kind: str) -> None:
    """What overflows in the stages is refused; all else has the stages' bits, signs of zeros too."""
    values = samples(0)[kind]
    largest = float(values.abs().max())
    values = values / 16 if largest > 1e36 else values
    zeros = torch.full_like(values, -0.0)
    for theta, up in ((zeros, "fp32"), (values, "fp32"), (zeros, "int4"), (values, "int8:256")):
        contributions: Contributions = [(1.0, [(up, values)]), (0.1, [(up, values), (up, zeros)])]
        check(contributions, State(theta, zeros, NOTHING), PLAIN_SGD, "int4")
        check(contributions, State(theta, theta, OuterState(1, {"momentum": zeros})), NESTEROV, "int8")


def test_ranges_are_whole_blocks_and_cover_everything_and_blocks_that_share_no_factor_make_one() -> None:
    numel = 10_000
    state = State(drawn(numel, 0), drawn(numel, 1), NOTHING)
    check([(1.0, [("int4:4098", draw(numel, 2))]), (1.0, [("int8:6006", draw(numel, 3))])], state, NESTEROV, "int4:14")
    assert ranges(10_000_000, [make_codec("int4:65534"), make_codec("int4:65522")]) == [(0, 10_000_000)]
    codecs = [make_codec(name) for name in ("int4:96", "int8", "fp32")]
    found = ranges(1_000_000, codecs)
    assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])]
    assert found[-1][1] == 1_000_000
    assert all(start % (3 * 1024) == 0 for start, _ in found)
    assert max(stop - start for start, stop in found) <= RANGE_VALUES


def test_what_is_not_finite_makes_no_version() -> None:
    numel, codec = RANGE_VALUES + 10, make_codec("fp32")
    big, zeros = torch.full((numel,), 3e38), torch.zeros(numel)
    payload = codec.encode(torch.cat([torch.zeros(numel - 1), torch.tensor([-3e38])]))
    nothing, gone = State(zeros, zeros, NOTHING), State(zeros, -big, NOTHING)
    for weight, sent, state, down, error, words in (
        (1.0, payload, State(big, big, NOTHING), "fp32", NonFiniteError, "theta"),
        (1.0, payload, gone, "int4", NonFiniteError, "int4"),
        (1.0, payload[:-1], nothing, "fp32", DecodeError, None),
        (0.0, payload, nothing, "fp32", ValueError, "no contribution"),
        (nan, payload, nothing, "fp32", ValueError, "weight is"),
    ):
        with pytest.raises(error, match=words):
            outer_pass([(weight, [(codec, sent)])], state, PLAIN_SGD, make_codec(down))


# --- The merges by ranges are those of whole tensors ------------------------------------------------------------------


EMA = OuterOptimizerOptions(kind="nesterov_ema", lr=0.5, momentum=0.5)
HELOCO = Correction(kind="heloco", cosine=0.5, rotate=1.0)
ENCODED = "int8"


def segments_of(kind: str, *stops: int, cuts: tuple[int, ...] = ()) -> tuple[Segment, ...]:
    """Groups that end at ``stops``, each cut into segments at ``cuts``; the second is merged by the mean."""
    found = []
    for index, (first, last) in enumerate(pairwise((0, *stops))):
        options = MEAN if index == 1 else MergeOptions(kind=kind)
        inside = pairwise((first, *(cut for cut in cuts if first < cut < last), last))
        found += [Segment(start, stop, options, first) for start, stop in inside]
    return tuple(found)


def remembered(numel: int, seed: int) -> OuterState:
    return OuterState(3, {"momentum": draw(numel, seed)})


def whole(
    segments: tuple[Segment, ...],
    contributions: list[tuple[float, list[Tensor]]],
    momentum: Tensor,
    correction: Correction,
    factors: list[float],
) -> Tensor:
    """The definition, on whole tensors: contributions are corrected as they came, and then made smaller."""
    weights = [weight for weight, _ in contributions]
    values = [merge_mean([(1.0, updates)]) for _, updates in contributions]
    out, count = torch.empty_like(values[0]), len(values)
    for _, some in groupby(segments, lambda segment: segment.group):
        products, group = [[0.0] * count for _ in values], list(some)
        for segment in group:
            mine = [each[segment.start : segment.stop] for each in (*values, momentum)]
            square = [[sum_of_products(a, b) for b in mine] for a in mine]
            changes = [correction.change(square[at][at], square[at][-1], square[-1][-1]) for at in range(count)]
            for row, more, by in zip(products, corrected_products(square, changes), factors, strict=True):
                row[:] = [one + by * factor * other for one, factor, other in zip(row, factors, more, strict=True)]
            for each, change, by in zip(mine[:-1], changes, factors, strict=True):
                each.copy_(corrected(each, mine[-1], change) * by)
        part, options = slice(group[0].start, group[-1].stop), group[0].options
        mine = [each[part] for each in values]
        if options.kind == "trimmed_mean":
            trimmed_mean(list(zip(weights, mine, strict=True)), options.trim_share, out[part])
            continue
        changed, scale = blend(options, weights, products)
        out[part] = merge_mean([(weight, [each]) for weight, each in zip(changed, mine, strict=True)]).mul_(scale)
    return out


@pytest.mark.parametrize("correction", [UNCORRECTED, HELOCO], ids=["", "corrected"])
@pytest.mark.parametrize("factors", [None, [1.0, 0.5, 0.25]], ids=["", "smaller"])
@pytest.mark.parametrize("kind", MERGE_KINDS)
def test_6_17_by_ranges_it_is_the_definition_weights_are_relative_and_without_one_nothing_has_influence_not_even_by_nan(
    kind: str, factors: list[float] | None, correction: Correction, monkeypatch: pytest.MonkeyPatch
) -> None:
    numel, codec = 9_001, make_codec(ENCODED)
    cuts = () if correction.kind == "none" else (700, 1_600, 4_000, 4_001)
    segments = segments_of(kind, 1_500, 2_048, 2_050, 8_000, 9_001, cuts=cuts)
    merging = Merging(segments, factors, correction)
    updates = [[draw(numel, 1)], [draw(numel, 2), draw(numel, 3)], [5 * draw(numel, 4)], [draw(numel, 1)]]
    weights = [1.0, 2.0, 0.25, 0.0]
    sent = [
        (weight, [(codec, codec.encode(each)) for each in some]) for weight, some in zip(weights, updates, strict=True)
    ]
    decoded = [(weight, [codec.decode(payload, numel) for codec, payload in some]) for weight, some in sent if weight]
    sent[-1] = (0.0, [(make_codec("fp32"), torch.full((numel,), nan).numpy().tobytes())])
    theta, before = draw(numel, 9), remembered(numel, 10)
    assert before.momentum is not None
    by_definition = whole(segments, decoded, before.momentum, correction, factors or [1.0] * 3)
    wanted, _ = outer_step(theta, by_definition, before, EMA)
    state, found = State(theta, theta.clone(), before), []
    with ThreadPoolExecutor(3) as pool:
        for spread in (map, pool.map):
            for level in ALL:
                with running(level):
                    each = outer_pass(sent, state, EMA, make_codec("fp32"), spread, merging=merging)
                found.append(each.state.theta)
        monkeypatch.setattr("diloco.codec.merging.RANGE_VALUES", 1024)
        cut = outer_pass(sent, state, EMA, make_codec("fp32"), merging=merging)
    assert factors or torch.equal(found[0], wanted)
    assert torch.allclose(found[0], wanted, rtol=0, atol=1e-9)
    assert all(torch.equal(each, found[0]) for each in found[1:])
    # Where ranges are cut shows in the last bits of sums, and so of weights, at most.
    assert torch.allclose(cut.state.theta, wanted, rtol=0, atol=1e-9)
    left = outer_pass(sent, state, EMA, make_codec("fp32"), merging=Merging(segments))
    assert torch.equal(left.state.theta, found[0]) == (correction is UNCORRECTED and not factors)
    for more, is_same in ((2, True), (20, False)):
        other = [(weight * (more if is_same or at else 1), some) for at, (weight, some) in enumerate(sent)]
        again = outer_pass(other, state, EMA, make_codec("fp32"), merging=merging)
        assert torch.equal(again.state.theta, cut.state.theta) == is_same


@pytest.mark.parametrize("kind", MERGE_KINDS)
def test_5_equal_contributions_that_go_with_the_momentum_give_themselves_and_so_do_the_first(kind: str) -> None:
    codec, numel = make_codec("fp32"), 3_000
    values, before = draw(numel, 1), remembered(numel, 2)
    sent = [(weight, [(codec, codec.encode(values))]) for weight in (0.1, 0.7, 3.0)]
    merging = Merging(segments_of(kind, 100, 200, numel, cuts=(300, 301)), correction=HELOCO)
    along = OuterState(3, {"momentum": 0.3 * values})
    for momentum, is_kept in ((along, True), (NOTHING, True), (before, False)):
        state = State(draw(numel, 4), draw(numel, 4), momentum)
        found = outer_pass(sent, state, EMA, codec, merging=merging)
        wanted, following = outer_step(state.theta, values, momentum, EMA)
        assert torch.allclose(found.state.theta, wanted, rtol=0, atol=1e-9) == is_kept
        if kind in ("mean", "trimmed_mean"):
            assert torch.equal(found.state.theta, wanted) == is_kept
            assert torch.equal(found.state.optimizer.tensors["momentum"], following.tensors["momentum"]) == is_kept


@pytest.mark.parametrize("kind", [kind for kind in MERGE_KINDS if kind != "mean"])
def test_what_is_merged_to_more_than_fp32_holds_is_no_version(kind: str) -> None:
    codec = make_codec("fp32")
    huge = [(1.0, [(codec, codec.encode(torch.full((64,), 3e38))), (codec, codec.encode(torch.full((64,), 3e38)))])]
    state = State(torch.zeros(64), torch.zeros(64), NOTHING)
    with pytest.raises(NonFiniteError):
        outer_pass(huge, state, PLAIN_SGD, codec, merging=Merging((Segment(0, 64, MergeOptions(kind=kind)),)))


# --- Reading an update by ranges --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int4:32", "int8", "int8:96", "fp32", "topk", "topk:65536x1024", "e3m0", "int2"])
@pytest.mark.parametrize("like", ["", "0" * 64])
def test_what_is_found_is_what_is_in_it(name: str, like: str) -> None:
    """Also where a piece of the payload is read by itself, as it is taken out of a file that is still growing."""
    codec = make_codec(name).plain
    for numel in (1, 60, 61, 4099, READ_VALUES + 1500):
        values, against = torch.randn(2, numel, generator=torch.Generator().manual_seed(numel))
        payload = codec.encode(values)
        decoded = codec.decode(payload, numel)
        for level in ALL:
            with running(level), bf16_by_default():
                reading, apart = Reading(codec, numel, like), Reading(codec, numel, like)
                for start, stop in reading.ranges():
                    own, part = decoded[start:stop], against[start:stop] if start else None
                    pieces = b"".join(payload[at : at + length] for at, length in codec.sections(numel, start, stop))
                    found = reading.read(payload, numel, start, stop - start, part)
                    assert found == apart.read(pieces, stop - start, 0, stop - start, part)
                    assert (found.largest, found.squares) == (float(own.abs().max()), sum_of_products(own, own))
                    assert found.products == (0 if part is None else sum_of_products(own, part))
                    assert found.against_squares == (0 if part is None else sum_of_products(part, part))
            assert reading.digest() == apart.digest() == digest(decoded, like)


@pytest.mark.parametrize("level", ALL)
@pytest.mark.parametrize("numel", [40, 4096])
def test_it_refuses_what_decoding_refuses(numel: int, level: str) -> None:
    values = torch.zeros(numel)
    values[7] = nan
    with running(level):
        short = Reading(make_codec("int4").plain, numel)
        with pytest.raises(NonFinitePayload):
            Reading(make_codec("fp32").plain, numel).read(values.numpy().tobytes(), numel, 0, numel)
        with pytest.raises(DecodeError):
            short.read(b"abc", numel, 0, numel)
        assert isinstance(short.read(make_codec("int4").encode(torch.ones(numel)), numel, 0, numel), Sums)


# --- Sums of products -------------------------------------------------------------------------------------------------


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
        found = slow_sum(x, y)
        for level in ALL:
            with running(level):
                assert sum_of_products(x, y).hex() == found.hex(), f"seed {numel}, {level}"
        exact = math.fsum(p * q for p, q in zip(x.tolist(), y.tolist(), strict=True))
        scale = math.fsum(abs(p * q) for p, q in zip(x.tolist(), y.tolist(), strict=True))
        assert abs(found - exact) <= 1e-12 * scale


def test_squares_beyond_fp32_have_a_sum_nothing_is_plus_zero_and_what_is_not_finite_has_none() -> None:
    values = torch.full((3000,), 3e38)
    assert sum_of_products(values, values) == pytest.approx(3000 * 9e76)
    assert math.copysign(1.0, sum_of_products(torch.full((3,), -0.0), torch.ones(3))) == 1.0
    for bad in NOT_FINITE:
        assert sums_of(torch.tensor([1.0, bad]), None) == Sums(largest=math.inf)
