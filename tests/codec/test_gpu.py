"""The codecs on an accelerator against the plain ones, to the bit: every pass of a site, values of every kind."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from diloco.codec.base import NonFiniteError
from diloco.codec.gpu import (
    ALIGNMENT,
    DevicePasses,
    accelerated,
    new_fault,
)
from diloco.codec.registry import CODEC_NAMES, make_codec
from diloco.outer.pseudo_gradient import pseudo_gradient
from tests.codec.values import FP32_MAX, NOT_FINITE, any_bits, drawn, same
from tests.sooner import sooner


def test_every_codec_but_the_casts_and_stages_and_chunks_that_no_program_holds_has_kernels() -> None:
    on_the_host = {"fp32", "bf16", "topk:65536x256", "int4+zstd1"}
    for name in {*CODEC_NAMES, *on_the_host}:
        assert (accelerated(make_codec(name)) is None) == (name in on_the_host), (
            f"{name}: a Triton kernel, or a place here"
        )


INTS = ("int4", "int4:48", "int8:6", "int8")
"""Blocks that divide a program and blocks that do not, of both widths."""
GRIDS = ("e3m0", "e3m0:24", "int2", "int2:8", "sign", "sign:512")
SPARSE = ("topk", "topk:256x4", "topk:256x64", "topk:4096x1024")
NUMELS = {"topk": 4099, "topk:256x4": 259, "topk:256x64": 259, "topk:4096x1024": 4099}
"""Whole chunks, and three values more."""


class Bench:
    """One device codec, with its inputs moved to the device and its outputs back."""

    def __init__(self, name: str, device: torch.device, program_values: int = 0, num_warps: int = 4) -> None:
        """``program_values`` 0: few, so that there are several programs."""
        usual = 4096 if name.startswith("topk") else 512 if name.startswith("int4") or name.startswith("int8") else 2048
        self.plain, self.device, self.fault = make_codec(name).plain, device, new_fault(device)
        found = accelerated(self.plain)
        assert found is not None
        self.codec: DevicePasses = replace(found, program_values=program_values or usual, num_warps=num_warps)

    def encode(self, *terms: torch.Tensor, in_place: bool = False) -> tuple[bytes, torch.Tensor]:
        """The payload and what it decodes to."""
        numel, there = terms[0].numel(), [each.to(self.device, copy=True) for each in terms]
        payload = self.codec.payload(numel, self.device).fill_(0xA5)
        decoded = there[0] if in_place else torch.full((numel,), torch.nan, device=self.device)
        self.codec.encode(there, payload, self.fault, decoded)
        self.codec.check(int(self.fault))
        for kept, given in list(zip(there, terms, strict=True))[in_place:]:
            assert same(kept.cpu(), given), "an input was written to"
        return payload_bytes(payload), decoded.cpu()


def payload_bytes(payload: torch.Tensor) -> bytes:
    return payload.cpu().numpy().tobytes()


def assert_encodes(bench: Bench, values: torch.Tensor, why: str, **how: bool) -> None:
    expected = bench.plain.encode(values)
    payload, decoded = bench.encode(values, **how)
    assert payload == expected, why
    assert same(decoded, bench.plain.decode(expected, values.numel())), why


@pytest.mark.parametrize(
    "name",
    [
        *sooner([*INTS, "int4:2", "int4:256", "int8:64", "int8:512"], *INTS),
        *GRIDS,
        *sooner(SPARSE, "topk:256x4", "topk:4096x1024"),
    ],
)
def test_sizes_and_any_finite_bits(name: str, kernel_device: torch.device) -> None:
    """Whole programs, a rest, both, a last block that is short, an odd number of values; of 1 or 3 topk keeps all.

    And every exponent beside every other: subnormals, -0, values near the top whose codes are held.
    """
    bench = Bench(name, kernel_device)
    numels = (1, 3, 256, NUMELS[name]) if name in NUMELS else (1, 511, 1051) if name in GRIDS else (1, 512, 559)
    for numel in numels:
        assert_encodes(bench, drawn(numel, numel, 1e-3), f"{numel} values", in_place=numel % 3 == 0)

    values = any_bits(5001 if name in SPARSE else 2001, torch.Generator().manual_seed(1), -0.0)
    assert_encodes(bench, values, "any bits")


@pytest.mark.parametrize(
    ("name", "code_max", "apart_by"),
    [("int4:2", 7, 1), ("int8:2", 127, 5), pytest.param("int8:2", 127, 1, marks=pytest.mark.slow)],
)
def test_ties_and_their_neighbours(name: str, code_max: int, apart_by: int, kernel_device: torch.device) -> None:
    """For every mantissa that a scale can have and every tie: the tie and the fp32 below and above, both signs."""
    bench = Bench(name, kernel_device, 4096)
    scales = (1 + torch.arange(0, 128, apart_by) / 128)[:, None]
    ties = scales * (torch.arange(code_max) + 0.5)
    infinity = torch.tensor(torch.inf)
    for x in (ties, -ties, torch.nextafter(ties, -infinity), torch.nextafter(ties, infinity)):
        assert_encodes(bench, torch.stack([(scales * code_max).expand_as(x), x], dim=-1).reshape(-1), name)


@pytest.mark.parametrize("name", ["int4:32", "int8:32", *GRIDS])
def test_corners(name: str, kernel_device: torch.device) -> None:
    """Each in blocks of its own, the last one as it is."""
    least, bench = 2.0**-149, Bench(name, kernel_device)
    corners = (
        [0.0],
        [-0.0, 0.0] * 33,
        [least, -least],
        [-least, 2.0**-126, 2.0**-127],
        [2.0**-126, 2.0**-127, -(2.0**-126)] * 5,
        [FP32_MAX, FP32_MAX / 7, 1.0],
        [FP32_MAX, -FP32_MAX, FP32_MAX / 3],
        [-FP32_MAX] * 32 + [1e-30] * 32,
        [-FP32_MAX] * 9 + [1.0] * 300,
        [FP32_MAX, -FP32_MAX * 0.93, FP32_MAX * 0.07],
        [2.0**127, 2.0**127 * (1 - 2.0**-24), 2.0**126],
        [127 * 2.0**-126, 63.5 * 2.0**-126, 0.5 * 2.0**-126, 1.5 * 2.0**-126],
        [1.5, 3.0, 0.75, -1.5, 1.4999999, 1.0, -96.0],  # ties of e3m0
        [1.0] * 16 + [-1.0] * 16 + [0.0] * 5,
        [5.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0],
        [7 * 2.0**-126, 3.5 * 2.0**-126, 2.5 * 2.0**-126, least],
    )
    filled = [[*part, *[0.0] * (-len(part) % bench.plain.block)] for part in corners[:-1]]
    values = torch.tensor([value for part in (*filled, corners[-1]) for value in part])
    assert_encodes(bench, values, "corners")


@pytest.mark.parametrize("name", ["int4", "int8", "e3m0", "int2:40", "sign", "topk:256x16"])
@pytest.mark.parametrize("num_sent", [0, 1, 3])
def test_the_difference_is_that_of_the_plain_pass(name: str, num_sent: int, kernel_device: torch.device) -> None:
    bench, numel = Bench(name, kernel_device), 1300
    parts = torch.randn(2 + num_sent, numel, generator=torch.Generator().manual_seed(num_sent)).unbind()
    expected = bench.plain.encode(pseudo_gradient(parts[0], parts[1], parts[2:]))
    payload, decoded = bench.encode(*parts)
    assert payload == expected
    assert same(decoded, bench.plain.decode(expected, numel))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, which interprets, warns of what the fault tells
@pytest.mark.parametrize("name", ["int4", "int8", "e3m0", "int2", "sign", "topk:256x16"])
def test_what_is_not_finite_is_told(name: str, kernel_device: torch.device) -> None:
    far = torch.full((300,), FP32_MAX)
    with pytest.raises(NonFiniteError):
        Bench(name, kernel_device).encode(far, -far)
    for bad, at in ((NOT_FINITE[0], 0), (NOT_FINITE[1], 300), (NOT_FINITE[2], 599)):
        bench, values = Bench(name, kernel_device), torch.ones(600)
        values[at] = bad
        with pytest.raises(NonFiniteError) as plain:
            bench.plain.encode(values)
        with pytest.raises(NonFiniteError) as told:
            bench.encode(values)
        assert str(told.value) == str(plain.value)


@pytest.mark.parametrize("name", ["int4", "int8:48"])
def test_a_payload_may_lie_anywhere_even(name: str, kernel_device: torch.device) -> None:
    """The room that is made for speed has aligned codes; a payload without that has the same bytes."""
    bench, values = Bench(name, kernel_device), drawn(333, 9)
    expected, there = bench.plain.encode(values), values.to(kernel_device)
    for front in (0, 2, 6):
        payload = torch.empty(front + len(expected), dtype=torch.uint8, device=kernel_device)[front:]
        bench.codec.encode((there,), payload, bench.fault)
        assert payload_bytes(payload) == expected
    aligned = bench.codec.payload(333, kernel_device)
    assert (aligned.data_ptr() + 2 * -(-333 // bench.plain.block)) % ALIGNMENT == 0


@pytest.mark.parametrize(("program_values", "num_warps"), [(2, 1), (128, 2), (1024, 8)])
def test_the_launch_changes_no_bit(program_values: int, num_warps: int, kernel_device: torch.device) -> None:
    numel = {2: 70, 128: 300, 1024: 1100}[program_values]
    for name in ("int4:32", "int8:128"):
        bench = Bench(name, kernel_device, program_values, num_warps)
        assert_encodes(bench, drawn(numel, 2), name)


@pytest.mark.parametrize("name", sooner(SPARSE, "topk:256x4", "topk:4096x1024"))
def test_equal_values_are_kept_from_the_first(name: str, kernel_device: torch.device) -> None:
    few = torch.randint(-2, 3, (NUMELS[name],), generator=torch.Generator().manual_seed(3)).to(torch.float32)
    largest = torch.full((NUMELS[name] - 3,), FP32_MAX)
    largest[::2] = -FP32_MAX / 2
    alike = torch.full((NUMELS[name] - 3,), -1.5)
    for values in (few, torch.zeros(256), alike, few * 2.0**-149, torch.eye(64).view(-1)[: NUMELS[name]], largest):
        assert_encodes(Bench(name, kernel_device), values, f"{values[:4].tolist()}...")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["int4", "int8", "int4:256"])
def test_large_and_odd_on_the_accelerator(name: str, kernel_device: torch.device) -> None:
    """More values than one wave of programs, with the launch that the product uses; odd, so that nothing is aligned."""
    bench = Bench(name, kernel_device, 4096, 8)
    for numel in (2**25, 2**25 + 12345):
        values = drawn(numel, numel, 1e-3)
        assert_encodes(bench, values, f"{numel} values")
