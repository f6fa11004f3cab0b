"""The down-link: everyone holds the same bits, and what was rounded off goes out with the next version."""

from __future__ import annotations

import pytest
import torch

from diloco.codec.base import DecodeError, NonFiniteError, digest
from diloco.codec.merging import RANGE_VALUES
from diloco.codec.registry import make_codec
from diloco.codec.site_pass import follow, follow_into, publish
from tests.codec.bounds import error_bound

CODECS = ["fp32", "fp32+zstd1", "bf16", "int8", "int4", "int4:32+zstd1", "e3m0", "int2", "sign", "topk"]


@pytest.mark.parametrize("name", CODECS)
def test_followers_hold_what_was_published_bit_for_bit(name: str) -> None:
    codec = make_codec(name)
    generator = torch.Generator().manual_seed(9)
    theta = torch.randn(5003, generator=generator)
    published = theta.clone()
    followers = [theta.clone(), theta.clone()]
    for version in range(20):
        step = torch.randn(theta.shape, generator=generator) * 0.01
        theta = theta - step
        difference = theta - published
        payload, published = publish(theta, published, codec)
        followers = [follow(held, payload, codec) for held in followers]
        assert all(digest(held) == digest(published) for held in followers), f"seed 9, version {version}"
        # One step's bound, never a sum of them: the codec's on this difference, and the roundings of the difference
        # and of the sum, each at most half a step of fp32.
        steps = 2.0**-24 * (difference.abs() + published.abs() + theta.abs())
        bound = error_bound(codec, difference) + steps if not codec.lossless else torch.zeros_like(theta)
        assert bool(((theta - published).abs() <= bound).all()), f"seed 9, version {version}"


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize(("links", "like"), [(0, ""), (1, ""), (3, ""), (1, "0" * 64)])
def test_one_pass_gives_the_same_bits_and_their_digest(name: str, links: int, like: str) -> None:
    codec, generator = make_codec(name), torch.Generator().manual_seed(links)
    numel = RANGE_VALUES + 1501
    held = published = torch.randn(numel, generator=generator)
    payloads = []
    for _ in range(links):
        payload, published = publish(torch.randn(numel, generator=generator), published, codec)
        payloads.append(payload)
    out = torch.full((numel,), float("nan"))
    assert follow_into(held, payloads, codec, out, like) == digest(published, like)
    assert digest(out) == digest(published)
    if payloads:
        with pytest.raises(DecodeError):
            follow_into(held, [*payloads, payloads[0][:-1]], codec, out)


@pytest.mark.parametrize("name", ["fp32", "fp32+zstd1"])
def test_a_lossless_codec_sends_the_version_itself(name: str) -> None:
    codec = make_codec(name)
    theta, published = torch.tensor([1.0, -0.0, 3e38]), torch.full((3,), -3e38)
    payload, after = publish(theta, published, codec)
    assert digest(codec.decode(payload, 3)) == digest(theta) == digest(after)
    assert after.data_ptr() != theta.data_ptr()


@pytest.mark.parametrize(
    ("name", "versions", "left"),
    [*((name, 30, 2.0**-22) for name in ("bf16", "int8", "int4", "e3m0")), ("int2", 300, 1e-5)],
)
def test_a_constant_version_is_reached(name: str, versions: int, left: float) -> None:
    """With theta at rest the remainder is sent again and again and shrinks to nothing."""
    codec = make_codec(name)
    theta = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    published = torch.zeros(1000)
    for _ in range(versions):
        _, published = publish(theta, published, codec)
    assert float((theta - published).abs().max()) <= left


def test_two_roundings() -> None:
    """The decoded value is fp32 before it is added; a fused multiply-add would keep more of it."""
    codec = make_codec("int8")
    published = torch.randn(4001, generator=torch.Generator().manual_seed(3))
    payload, after = publish(published * 1.3, published, codec)
    decoded = codec.decode(payload, 4001)
    expected = (decoded.double() + published.double()).float()
    assert torch.equal(after, expected)


def test_the_arguments_stay_as_they_are() -> None:
    for name in CODECS:
        theta, published = torch.ones(40), torch.full((40,), 0.5)
        payload, after = publish(theta, published, make_codec(name))
        after.fill_(7.0)
        follow(published, payload, make_codec(name)).fill_(7.0)
        assert (theta.sum(), published.sum()) == (40, 20), name


def test_errors_are_those_of_the_codec() -> None:
    codec = make_codec("int4")
    with pytest.raises(DecodeError):
        follow(torch.zeros(10), b"abc", codec)
    with pytest.raises(NonFiniteError):
        publish(torch.full((2,), float("nan")), torch.zeros(2), codec)
    with pytest.raises(NonFiniteError):
        publish(torch.full((2,), 3e38), torch.full((2,), -3e38), codec)
