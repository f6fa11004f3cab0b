"""A site's passes: what it seals, takes and follows, also while a down-link comes; and what a syncer publishes."""

from __future__ import annotations

import random

import pytest
import torch

from diloco.codec.base import DecodeError, NonFiniteError, digest
from diloco.codec.merging import RANGE_VALUES
from diloco.codec.registry import Coded, make_codec, values_of
from diloco.codec.site_pass import AT_ONCE, Following, follow, publish, rebase_pieces, seal_pieces
from diloco.outer.pseudo_gradient import pseudo_gradient, rebase
from tests.codec.values import ALL, DOWN, NOT_FINITE, drawn, error_bound, running, same, samples

SIZES = [[1], [0, 17], [4096], [1, 1, 4095, 0, 3], [2048, 2048, 2049], [5000, 1, 333, 7000]]
SENT = [[], ["int4:32"], ["topk:65536x64", "int8"], ["int8", "fp32", "topk:256x8"]]
"""Of a chunk of 65536 values there is no kernel."""


def in_flight(names: list[str], numel: int) -> list[Coded]:
    codecs = [make_codec(name) for name in names]
    return [Coded(codec, codec.encode(drawn(numel, 50 + at, 1e-3)), numel) for at, codec in enumerate(codecs)]


def cut(values: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    """Pieces with memory of their own, at places that are no multiple of anything."""
    return [torch.cat([torch.zeros(at % 3), each])[at % 3 :] for at, each in enumerate(values.split(sizes))]


@pytest.mark.parametrize("codec_name", ["int4:32", "int8", "bf16", "fp32", "topk:256x8", "e3m0"])
@pytest.mark.parametrize("sent", SENT, ids="+".join)
def test_what_is_sealed_is_the_pseudo_gradient(codec_name: str, sent: list[str]) -> None:
    codec = make_codec(codec_name)
    for sizes in [*SIZES, [RANGE_VALUES, 1001]]:
        numel = sum(sizes)
        base, held = drawn(numel, 1), in_flight(sent, numel)
        local = base - drawn(numel, 2, 1e-3)
        pieces = cut(local, sizes)
        wanted = codec.encode(pseudo_gradient(base, local, [values_of(each) for each in held]))
        decoded, norms = codec.decode(wanted, numel), set()
        for level in ALL:
            payload = torch.full((codec.payload_bytes(numel),), 0xA5, dtype=torch.uint8)
            with running(level):
                found, norm = seal_pieces(pieces, base, held, codec, payload)
            assert payload.numpy().tobytes() == wanted, (sizes, level)
            assert found == digest(decoded)
            norms.add(norm)
        assert norms.pop() == pytest.approx(float(decoded.double().norm()), rel=1e-9, abs=1e-12)
        assert same(torch.cat(pieces), local), "the model was written to"


@pytest.mark.parametrize("level", ALL)
def test_values_of_every_kind_are_sealed_as_encoded_and_what_is_not_finite_or_never_made_is_refused(level: str) -> None:
    codec, local, zeros = make_codec("int4:32"), torch.zeros(5000), torch.zeros(5000)
    for kind, values in samples(5).items():
        payload = torch.empty(codec.payload_bytes(values.numel()), dtype=torch.uint8)
        with running(level):
            seal_pieces([torch.zeros_like(values)], values, [], codec, payload)
        assert payload.numpy().tobytes() == codec.encode(values), kind
    payload = torch.empty(codec.payload_bytes(5000), dtype=torch.uint8)
    ruined = bytearray(codec.encode(torch.ones(5000)))
    ruined[1] |= 0x80  # A negative scale.
    with running(level):
        for local[4321] in NOT_FINITE:
            with pytest.raises(NonFiniteError):
                seal_pieces([local], zeros, [], codec, payload)
        with pytest.raises(DecodeError):
            rebase_pieces([zeros.clone()], zeros, zeros, [Coded(codec, memoryview(ruined), 5000)])


@pytest.mark.parametrize("merged", SENT, ids="+".join)
def test_a_version_is_taken_as_rebase_defines(merged: list[str]) -> None:
    for sizes in [*SIZES, [RANGE_VALUES, 1001]]:
        numel = sum(sizes)
        old, new, held = drawn(numel, 3), drawn(numel, 4), in_flight(merged, numel)
        local = old - drawn(numel, 5, 1e-3)
        local[::3], new[::2] = old[::3], -0.0  # Nothing trained is the new base with its zeros.
        wanted = rebase(local, old, new, [values_of(each) for each in held])
        before = [old.clone(), new.clone()]
        for level in ALL:
            pieces = cut(local, sizes)
            with running(level):
                rebase_pieces(pieces, old, new, held)
            assert same(torch.cat(pieces), wanted), (sizes, level)
        assert merged or same(wanted[::3], new[::3])
        assert same(old, before[0])
        assert same(new, before[1])


# --- The down-link: all hold the same bits, and what was rounded off goes out with the next version -------------------


CODECS = [*DOWN, "int2", "sign"]


@pytest.mark.parametrize("name", CODECS)
def test_followers_hold_what_was_published_bit_for_bit_in_one_pass_or_in_several(name: str) -> None:
    codec, generator = make_codec(name), torch.Generator().manual_seed(9)
    theta = torch.randn(RANGE_VALUES + 1501, generator=generator)
    held = follower = published = theta.clone()
    payloads, out = [], torch.full_like(theta, float("nan"))
    assert Following(held, [], codec, out).finish() == digest(held)
    for version in range(6):
        theta = theta - torch.randn(theta.shape, generator=generator) * 0.01
        difference, where = theta - published, f"seed 9, version {version}"
        payload, published = publish(theta, published, codec)
        payloads.append(payload)
        follower = follow(follower, payload, codec)
        assert digest(follower) == digest(published), where
        for like in ("", "0" * 64):
            assert Following(held, payloads, codec, out, like).finish() == digest(published, like), where
        assert digest(out) == digest(published), where
        # One step's bound, never a sum of them: the codec's on this difference, and the roundings of the difference
        # and of the sum, each at most half a step of fp32.
        steps = 2.0**-24 * (difference.abs() + published.abs() + theta.abs())
        bound = error_bound(codec, difference) + steps if not codec.lossless else torch.zeros_like(theta)
        assert bool(((theta - published).abs() <= bound).all()), where
    with pytest.raises(DecodeError):
        Following(held, [*payloads, payloads[0][:-1]], codec, out).finish()


@pytest.mark.parametrize(
    ("name", "versions", "left"),
    [
        *((name, 30, 2.0**-22) for name in ("bf16", "int8", "int4", "e3m0")),
        ("int2", 300, 1e-5),
        ("sign", 300, 0.02),
        ("topk:256x16", 400, 1e-3),
    ],
)
def test_a_constant_version_is_reached(name: str, versions: int, left: float) -> None:
    """With theta at rest the remainder is sent again and again, never grows and shrinks to nothing."""
    codec, theta, published = make_codec(name), drawn(1000, 2), torch.zeros(1000)
    squares = theta.square().sum()
    for version in range(versions):
        _, published = publish(theta, published, codec)
        before, squares = squares, (theta - published).square().sum()
        assert squares <= before + 1e-9, f"seed 2, version {version}"
    assert float((theta - published).abs().max()) <= left


def test_two_roundings_and_the_arguments_stay_as_they_are() -> None:
    """The decoded value is fp32 before it is added; a fused multiply-add would keep more of it."""
    codec, published = make_codec("int8"), drawn(4001, 3)
    payload, after = publish(published * 1.3, published, codec)
    assert torch.equal(after, (codec.decode(payload, 4001).double() + published.double()).float())
    for name in CODECS:
        theta, published = torch.ones(40), torch.full((40,), 0.5)
        payload, after = publish(theta, published, make_codec(name))
        after.fill_(7.0)
        follow(published, payload, make_codec(name)).fill_(7.0)
        assert (theta.sum(), published.sum()) == (40, 20), name


# --- Followed while it comes: the same bits, whatever has come when ---------------------------------------------------


NUMEL = 3 * AT_ONCE + 1501


def made(name: str) -> tuple[torch.Tensor, bytes, torch.Tensor]:
    """What is held before, a payload with nothing compressed, and what is held after it."""
    codec, held = make_codec(name), drawn(NUMEL, 5)
    payload, after = publish(drawn(NUMEL, 6), held, codec.plain)
    return held, payload if codec.plain is codec else b"\x00" + payload, after


@pytest.mark.parametrize("name", [*CODECS, "int8:96"])
@pytest.mark.parametrize("like", ["", "0" * 64])
def test_it_gives_the_bits_of_the_whole_payload_at_once(name: str, like: str) -> None:
    held, dice = drawn(NUMEL, 5), random.Random(3)
    payload, after = publish(drawn(NUMEL, 6), held, make_codec(name))
    memory, out, come = bytearray(len(payload)), torch.empty(NUMEL), 0
    arriving = Following(held, [memoryview(memory).toreadonly()], make_codec(name), out, like)
    while come < len(payload):
        more = min(len(payload), come + dice.randint(1, len(payload) // 5))
        memory[come:more] = payload[come:more]
        come = more
        arriving.come(come)
    assert arriving.finish() == digest(after, like)
    assert digest(out) == digest(after)
    memory.append(0)  # It is read no more, so it may be resized.


@pytest.mark.parametrize("name", ["int4:32", "int4:32+zstd1", "fp32"])
def test_what_has_come_is_made_before_the_rest_is_here_in_no_more_than_so_many_ranges_at_a_time(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco.codec.site_pass.RANGES_MAX", 2)
    held, payload, after = made(name)
    out = torch.full((NUMEL,), float("nan"))
    arriving = Following(held, [memoryview(payload)], make_codec(name), out)
    for come, stop in ((len(payload) - 1, 2 * AT_ONCE), (len(payload) - 1, 3 * AT_ONCE), (len(payload), NUMEL)):
        arriving.come(come)
        assert torch.equal(out[:stop], after[:stop])
        assert out[stop:].isnan().all()
    assert arriving.finish() == digest(after)


@pytest.mark.parametrize("name", ["int4:32", "int4:32+zstd1", "int8"])
@pytest.mark.parametrize("harm", ["short", "code"])
def test_what_is_wrong_is_said_at_the_end_as_without_it(name: str, harm: str) -> None:
    held, payload, _ = made(name)
    wrong = bytearray(payload[:-1] if harm == "short" else payload)
    if harm == "code":
        wrong[-NUMEL // 4] = 0x80 if name == "int8" else 0x00
    out = torch.empty(NUMEL)
    with pytest.raises(DecodeError) as plain:
        Following(held, [bytes(wrong)], make_codec(name), out).finish()
    arriving = Following(held, [memoryview(wrong)], make_codec(name), out)
    for count in range(0, len(wrong), len(wrong) // 7):
        arriving.come(count)
    with pytest.raises(DecodeError) as found:
        arriving.finish()
    assert str(found.value) == str(plain.value)
