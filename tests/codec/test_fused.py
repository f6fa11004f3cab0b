"""The fused pass against the stages one after the other: the same bits, whatever the sizes, codecs and threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from diloco.codec import merging
from diloco.codec.base import DecodeError, NonFiniteError, digest
from diloco.codec.kernel_library import PLAIN
from diloco.codec.merging import RANGE_VALUES, State, outer_pass, ranges, sum_of_products
from diloco.codec.registry import make_codec
from diloco.codec.site_pass import publish
from diloco.outer.merge import merge_mean
from diloco.outer.optimizer import NOTHING, OuterOptimizerOptions, OuterState, outer_step
from tests.codec.levels import ALL, running
from tests.codec.test_contract import samples
from tests.codec.test_ranged import same

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
            with running(level):
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


def draw(numel: int, seed: int, scale: float = 1e-3) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * scale


DOWN = ("fp32", "fp32+zstd1", "bf16", "int8", "int4", "int4:32+zstd1", "int8:6", "e3m0", "int2+auto", "topk")
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
    theta = draw(numel, 0, 1.0)
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
    values = draw(5000, 3)
    sent = [(1.0, [(make_codec("int8"), make_codec("int8").encode(values))])]
    stepped = outer_pass(sent, State(values, values, NOTHING), NESTEROV, make_codec("int4"), like=like)
    assert stepped.digest == ("" if like is None else digest(stepped.state.published, like))
    assert stepped.digest.startswith(form)


@pytest.mark.parametrize("down", ["fp32", "fp32+zstd1"])
def test_what_is_sent_as_it_is_lies_in_memory_once(down: str) -> None:
    theta = draw(3000, 0)
    sent: Contributions = [(1.0, [("int4", draw(3000, 1))])]
    after = check(sent, State(theta, theta, NOTHING), NESTEROV, down)
    assert after.published.data_ptr() == after.theta.data_ptr()
    stepped = outer_pass([(1.0, [(make_codec("fp32"), bytes(12000))])], after, NESTEROV, make_codec("fp32"))
    stepped.state.theta[5] = 1.0
    assert stepped.payload[20:24] == b"\0\0\x80?"


@pytest.mark.parametrize("numel", [1, 2, 31, 33, 1023, 1025, RANGE_VALUES - 1, RANGE_VALUES, RANGE_VALUES + 1])
def test_every_length(numel: int) -> None:
    state = State(draw(numel, 0, 1.0), draw(numel, 1, 1.0), OuterState(1, {"momentum": draw(numel, 2)}))
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


def test_blocks_that_share_no_factor_make_one_range() -> None:
    numel = 10_000
    state = State(draw(numel, 0, 1.0), draw(numel, 1, 1.0), NOTHING)
    check([(1.0, [("int4:4098", draw(numel, 2))]), (1.0, [("int8:6006", draw(numel, 3))])], state, NESTEROV, "int4:14")
    assert ranges(10_000_000, [make_codec("int4:65534"), make_codec("int4:65522")]) == [(0, 10_000_000)]


def test_ranges_are_whole_blocks_and_cover_everything() -> None:
    codecs = [make_codec(name) for name in ("int4:96", "int8", "fp32")]
    found = ranges(1_000_000, codecs)
    assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])]
    assert found[-1][1] == 1_000_000
    assert all(start % (3 * 1024) == 0 for start, _ in found)
    assert max(stop - start for start, stop in found) <= RANGE_VALUES


def test_what_is_not_finite_makes_no_version() -> None:
    numel = RANGE_VALUES + 10
    codec, big = make_codec("fp32"), torch.full((numel,), 3e38)
    zeros = torch.zeros(numel)
    payload = codec.encode(torch.cat([torch.zeros(numel - 1), torch.tensor([-3e38])]))
    with pytest.raises(NonFiniteError, match="theta"):
        outer_pass([(1.0, [(codec, payload)])], State(big, big, NOTHING), PLAIN_SGD, codec)
    with pytest.raises(NonFiniteError, match="int4"):
        outer_pass([(1.0, [(codec, payload)])], State(zeros, -big, NOTHING), PLAIN_SGD, make_codec("int4"))
    with pytest.raises(DecodeError):
        outer_pass([(1.0, [(codec, payload[:-1])])], State(zeros, zeros, NOTHING), PLAIN_SGD, codec)
    with pytest.raises(ValueError, match="no contribution"):
        outer_pass([(0.0, [(codec, payload)])], State(zeros, zeros, NOTHING), PLAIN_SGD, codec)
    with pytest.raises(ValueError, match="weight is"):
        outer_pass([(float("nan"), [(codec, payload)])], State(zeros, zeros, NOTHING), PLAIN_SGD, codec)


def test_a_site_without_weight_is_not_read() -> None:
    codec, values = make_codec("fp32"), torch.ones(5)
    state = State(values, values, NOTHING)
    stepped = outer_pass([(0.0, [(codec, b"x")]), (1.0, [(codec, codec.encode(values))])], state, PLAIN_SGD, codec)
    assert same(stepped.state.theta, torch.zeros(5))
