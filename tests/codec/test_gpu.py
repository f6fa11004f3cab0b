"""Which codecs an accelerator encodes by itself."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from diloco.codec.base import NonFiniteError
from diloco.codec.blocks import IntCodec
from diloco.codec.gpu import ALIGNMENT, DeviceBlocks, Launch, accelerated, held_from, new_fault
from diloco.codec.registry import CODEC_NAMES, make_codec
from diloco.outer.pseudo_gradient import pseudo_gradient

ON_THE_HOST = {"fp32", "bf16"}


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_every_codec_but_the_casts_has_kernels(name: str) -> None:
    assert (accelerated(make_codec(name)) is None) == (name in ON_THE_HOST)


def test_a_chunk_that_no_program_holds_is_encoded_on_the_host() -> None:
    assert accelerated(make_codec("topk:65536x256")) is None


def test_an_entropy_stage_is_no_accelerators_work() -> None:
    assert accelerated(make_codec("int4+zstd1")) is None
    assert accelerated(make_codec("int4+zstd1").plain) is not None


def test_a_launch_is_taken_as_given() -> None:
    for name in ("int4", "int2", "topk"):
        passes = accelerated(make_codec(name), Launch(8192, 2))
        assert passes is not None
        assert passes.launch == Launch(8192, 2)


# --- The kernels against the plain codec, to the bit -----------------------------------------------------------------

LAUNCH = Launch(program_values=512, num_warps=4)
NAMES = ("int4:2", "int4", "int4:48", "int4:256", "int8:6", "int8:64", "int8", "int8:512")
DIFFERENT = ("int4", "int4:48", "int8:6", "int8")
"""Blocks that divide a program and blocks that do not, of both widths."""
FP32_MAX = torch.finfo(torch.float32).max


def int_codec(name: str) -> IntCodec:
    codec = make_codec(name)
    assert isinstance(codec, IntCodec)
    return codec


class Bench:
    """One device codec, with its inputs moved to the device and its outputs back."""

    def __init__(self, name: str, device: torch.device, launch: Launch = LAUNCH) -> None:
        self.plain = int_codec(name)
        self.codec = DeviceBlocks(self.plain, launch)
        self.device = device
        self.fault = new_fault(device)

    def there(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.device, copy=True)

    def room(self, numel: int) -> torch.Tensor:
        return torch.full((numel,), torch.nan, device=self.device)

    def payload(self, numel: int) -> torch.Tensor:
        return self.codec.payload(numel, self.device).fill_(0xA5)

    def check(self) -> None:
        self.codec.check(int(self.fault))


def payload_bytes(payload: torch.Tensor) -> bytes:
    return payload.cpu().numpy().tobytes()


def assert_same(found: torch.Tensor, expected: torch.Tensor, why: str) -> None:
    """Equal bits: -0 is not 0."""
    differ = (found.cpu().view(torch.int32) != expected.view(torch.int32)).nonzero().view(-1)
    assert differ.numel() == 0, f"{why}: {differ.numel()} values differ, the first at {int(differ[0])}"


def assert_encodes(bench: Bench, values: torch.Tensor, why: str) -> None:
    numel = values.numel()
    expected = bench.plain.encode(values)
    payload, decoded = bench.payload(numel), bench.room(numel)
    bench.codec.encode((bench.there(values),), payload, bench.fault, decoded)
    bench.check()
    assert payload_bytes(payload) == expected, why
    assert_same(decoded, bench.plain.decode(expected, numel), why)


@pytest.mark.parametrize(
    "name", [name if name in DIFFERENT else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_sizes(name: str, kernel_device: torch.device) -> None:
    """Whole programs, a rest, both, a last block that is short, an odd number of values."""
    bench = Bench(name, kernel_device)
    for numel in (1, 512, 559):
        values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * 1e-3
        assert_encodes(bench, values, f"{numel} values")


@pytest.mark.parametrize("name", ["int4", "int8:6", "int8"])
def test_any_finite_bits(name: str, kernel_device: torch.device) -> None:
    """Every exponent beside every other: subnormals, -0, values near the top whose codes are held."""
    bench = Bench(name, kernel_device)
    random = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (2001,), generator=random).to(torch.int32)
    values = bits.view(torch.float32)
    assert_encodes(bench, torch.where(torch.isfinite(values), values, -0.0), "any bits")


@pytest.mark.parametrize("name", ["int4:32", "int8:32"])
def test_every_magnitude(name: str, kernel_device: torch.device) -> None:
    """Blocks whose values are of one size, from the least subnormal to the largest fp32."""
    bench = Bench(name, kernel_device, Launch(program_values=4096))
    random = torch.Generator().manual_seed(1)
    powers = torch.arange(-149, 128).to(torch.float64)
    blocks = torch.rand(277, 32, generator=random, dtype=torch.float64) * torch.exp2(powers + 1)[:, None]
    values = (blocks * torch.sign(torch.rand(277, 32, generator=random) - 0.5)).clamp(-FP32_MAX, FP32_MAX)
    assert_encodes(bench, values.to(torch.float32).view(-1), name)


@pytest.mark.parametrize(
    ("name", "code_max", "apart_by"),
    [("int4:2", 7, 1), ("int8:2", 127, 5), pytest.param("int8:2", 127, 1, marks=pytest.mark.slow)],
)
def test_ties_and_their_neighbours(name: str, code_max: int, apart_by: int, kernel_device: torch.device) -> None:
    """For every mantissa that a scale can have and every tie: the tie and the fp32 below and above, both signs."""
    bench = Bench(name, kernel_device, Launch(program_values=4096))
    scales = (1 + torch.arange(0, 128, apart_by) / 128)[:, None]
    ties = scales * (torch.arange(code_max) + 0.5)
    infinity = torch.tensor(torch.inf)
    for x in (ties, -ties, torch.nextafter(ties, -infinity), torch.nextafter(ties, infinity)):
        assert_encodes(bench, torch.stack([(scales * code_max).expand_as(x), x], dim=-1).reshape(-1), name)


@pytest.mark.parametrize("name", ["int4:32", "int8:32"])
def test_corners(name: str, kernel_device: torch.device) -> None:
    """Each in blocks of its own."""
    least = 2.0**-149
    corners = (
        [0.0],
        [-0.0] * 33,
        [least],
        [-least, 2.0**-126, 2.0**-127],
        [FP32_MAX, FP32_MAX / 7, 1.0],
        [-FP32_MAX] * 32 + [1e-30] * 32,
        [FP32_MAX, -FP32_MAX * 0.93, FP32_MAX * 0.07],
        [2.0**127, 2.0**127 * (1 - 2.0**-24), 2.0**126],
        [127 * 2.0**-126, 63.5 * 2.0**-126, 0.5 * 2.0**-126, 1.5 * 2.0**-126],
        [7 * 2.0**-126, 3.5 * 2.0**-126, 2.5 * 2.0**-126, least],
    )
    assert_encodes(Bench(name, kernel_device), apart(corners, 64), name)


def apart(parts: Sequence[Sequence[float]], numel: int) -> torch.Tensor:
    """One tensor of all of them, each filled up with zeros to a multiple of ``numel``, the last one as it is."""
    filled = [[*part, *[0.0] * (-len(part) % numel)] for part in parts[:-1]]
    return torch.tensor([value for part in (*filled, parts[-1]) for value in part])


@pytest.mark.parametrize("name", ["int4", "int8"])
@pytest.mark.parametrize("num_sent", [0, 1, 2, 3])
def test_the_difference_is_that_of_the_plain_pass(name: str, num_sent: int, kernel_device: torch.device) -> None:
    bench = Bench(name, kernel_device)
    numel = 777
    random = torch.Generator().manual_seed(num_sent)
    base, local, *sent = torch.randn(2 + num_sent, numel, generator=random).unbind()
    measured = pseudo_gradient(base, local, sent)
    payload, decoded = bench.payload(numel), bench.room(numel)
    there = [bench.there(each) for each in (base, local, *sent)]
    bench.codec.encode(there, payload, bench.fault, decoded)
    bench.check()
    expected = bench.plain.encode(measured)
    assert payload_bytes(payload) == expected
    assert_same(decoded, bench.plain.decode(expected, numel), "decoded")
    for kept, original in zip(there, (base, local, *sent), strict=True):
        assert_same(kept, original, "an input was written to")


def test_decoded_may_take_the_place_of_the_values(kernel_device: torch.device) -> None:
    bench = Bench("int4", kernel_device)
    values = torch.randn(700, generator=torch.Generator().manual_seed(3))
    place, payload = bench.there(values), bench.payload(700)
    bench.codec.encode((place,), payload, bench.fault, decoded=place)
    expected = bench.plain.encode(values)
    assert payload_bytes(payload) == expected
    assert_same(place, bench.plain.decode(expected, 700), "in place")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, which interprets, warns of what the fault tells
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [0, 300, 599])
def test_what_is_not_finite_is_told(bad: float, at: int, kernel_device: torch.device) -> None:
    bench = Bench("int4", kernel_device)
    values = torch.ones(600)
    values[at] = bad
    with pytest.raises(NonFiniteError) as plain:
        bench.plain.encode(values)
    bench.codec.encode((bench.there(values),), bench.payload(600), bench.fault)
    with pytest.raises(NonFiniteError) as told:
        bench.check()
    assert str(told.value) == str(plain.value)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_difference_that_overflows_is_told(kernel_device: torch.device) -> None:
    bench = Bench("int8", kernel_device)
    base = torch.full((300,), FP32_MAX)
    bench.codec.encode((bench.there(base), bench.there(-base)), bench.payload(300), bench.fault)
    with pytest.raises(NonFiniteError):
        bench.check()


@pytest.mark.parametrize("name", ["int4", "int8:48"])
def test_a_payload_may_lie_anywhere_even(name: str, kernel_device: torch.device) -> None:
    """The room that is made for speed has aligned codes; a payload without that has the same bytes."""
    bench = Bench(name, kernel_device)
    values = torch.randn(333, generator=torch.Generator().manual_seed(9))
    expected = bench.plain.encode(values)
    for front in (0, 2, 6):
        payload = torch.empty(front + len(expected), dtype=torch.uint8, device=kernel_device)[front:]
        bench.codec.encode((bench.there(values),), payload, bench.fault)
        assert payload_bytes(payload) == expected
    aligned = bench.payload(333)
    scales_bytes = 2 * -(-333 // bench.plain.block)
    assert (aligned.data_ptr() + scales_bytes) % ALIGNMENT == 0


@pytest.mark.parametrize(("program_values", "num_warps"), [(2, 1), (128, 2), (1024, 8)])
def test_the_launch_changes_no_bit(program_values: int, num_warps: int, kernel_device: torch.device) -> None:
    numel = {2: 70, 128: 300, 1024: 1100}[program_values]
    for name in ("int4:32", "int8:128"):
        bench = Bench(name, kernel_device, Launch(program_values, num_warps))
        assert_encodes(bench, torch.randn(numel, generator=torch.Generator().manual_seed(2)), name)


def test_held_from_is_the_first_scale_that_overflows() -> None:
    for name in ("int4", "int8"):
        codec = int_codec(name)
        bits = torch.tensor([held_from(codec.code_max)], dtype=torch.int32)
        below = (bits - 0x10000).view(torch.float32)
        assert torch.isinf(bits.view(torch.float32) * codec.code_max)
        assert torch.isfinite(below * codec.code_max)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["int4", "int8", "int4:256"])
def test_large_and_odd_on_the_accelerator(name: str, kernel_device: torch.device) -> None:
    """More values than one wave of programs, with the launch that the product uses; odd, so that nothing is aligned."""
    bench = Bench(name, kernel_device, Launch())
    for numel in (2**25, 2**25 + 12345):
        values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * 1e-3
        assert_encodes(bench, values, f"{numel} values")
