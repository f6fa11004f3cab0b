"""A down-link that is followed while it comes: the same bits, whatever has come when."""

from __future__ import annotations

import random

import pytest
import torch

from diloco.codec.base import DecodeError, digest
from diloco.codec.registry import make_codec
from diloco.codec.site_pass import AT_ONCE, Arriving, follow_into, publish

CODECS = ["fp32", "bf16", "int8", "int8:96", "int4:32", "int4:32+zstd1", "e3m0", "int2", "sign", "topk"]
NUMEL = 3 * AT_ONCE + 1501


def made(name: str) -> tuple[torch.Tensor, bytes, torch.Tensor]:
    """What is held before, a payload, and what is held after it."""
    generator = torch.Generator().manual_seed(5)
    held = torch.randn(NUMEL, generator=generator)
    payload, after = publish(torch.randn(NUMEL, generator=generator), held, make_codec(name))
    return held, payload, after


def stored(name: str) -> tuple[torch.Tensor, bytes, torch.Tensor]:
    """The same, with nothing compressed."""
    codec = make_codec(name)
    held, payload, after = made(codec.plain.name)
    return held, payload if codec.plain is codec else b"\x00" + payload, after


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("like", ["", "0" * 64])
def test_it_gives_the_bits_of_the_whole_payload_at_once(name: str, like: str) -> None:
    held, payload, after = made(name)
    memory, out, dice = bytearray(len(payload)), torch.empty(NUMEL), random.Random(3)
    arriving = Arriving(held, memoryview(memory).toreadonly(), make_codec(name), out, like)
    come = 0
    while come < len(payload):
        more = min(len(payload), come + dice.randint(1, len(payload) // 5))
        memory[come:more] = payload[come:more]
        come = more
        arriving.come(come)
    assert arriving.finish() == digest(after, like)
    assert digest(out) == digest(after)
    memory.append(0)  # Nobody reads it any more, so it may be resized.


@pytest.mark.parametrize("name", ["int4:32", "int4:32+zstd1", "fp32"])
def test_what_has_come_is_made_before_the_rest_is_here(name: str) -> None:
    held, payload, after = stored(name)
    memory, out = bytearray(len(payload)), torch.full((NUMEL,), float("nan"))
    memory[: len(payload) - 1] = payload[:-1]
    arriving = Arriving(held, memoryview(memory), make_codec(name), out)
    arriving.come(len(payload) - 1)
    assert torch.equal(out[: 3 * AT_ONCE], after[: 3 * AT_ONCE])
    assert out[3 * AT_ONCE :].isnan().all()


def test_one_word_of_what_has_come_makes_no_more_than_so_many_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.codec.site_pass.RANGES_MAX", 2)
    held, payload, after = made("int4:32")
    out = torch.full((NUMEL,), float("nan"))
    arriving = Arriving(held, memoryview(payload), make_codec("int4:32"), out)
    for stop in (2 * AT_ONCE, NUMEL):
        arriving.come(len(payload))
        assert torch.equal(out[:stop], after[:stop])
        assert out[stop:].isnan().all()
    assert arriving.finish() == digest(after)


def test_nothing_said_is_all_said() -> None:
    for name in ("int4:32", "int4:32+zstd1"):
        held, payload, after = made(name)
        assert Arriving(held, memoryview(payload), make_codec(name), torch.empty(NUMEL)).finish() == digest(after)


@pytest.mark.parametrize("name", ["int4:32", "int4:32+zstd1", "int8"])
@pytest.mark.parametrize("harm", ["short", "code"])
def test_what_is_wrong_is_said_at_the_end_as_without_it(name: str, harm: str) -> None:
    held, payload, _ = stored(name)
    wrong = bytearray(payload[:-1] if harm == "short" else payload)
    if harm == "code":
        wrong[-NUMEL // 4] = 0x80 if name == "int8" else 0x00
    out = torch.empty(NUMEL)
    with pytest.raises(DecodeError) as plain:
        follow_into(held, [bytes(wrong)], make_codec(name), out)
    arriving = Arriving(held, memoryview(wrong), make_codec(name), out)
    for count in range(0, len(wrong), len(wrong) // 7):
        arriving.come(count)
    with pytest.raises(DecodeError) as found:
        arriving.finish()
    assert str(found.value) == str(plain.value)
