"""What every codec is built from: digests, the contract and its errors, packed fields, units and two levels of a group.

Digests.  Two ends compare bytes by their digest, and a reader knows by it that a file is what was written.  A digest is
written as its name and 32 hexadecimal digits, ``xxh3:<digits>`` (XXH3 of 128 bits, big-endian).  XXH3 runs at the speed
of memory; SHA-256 runs at a tenth of it, and was the largest part of a round.  64 digits without a name are a SHA-256,
the form of earlier versions.  It stays readable: a comparison computes in the form of the digest that it is given
(``like``), and every file and every peer keeps the form that it began with.

XXH3 finds damage as SHA-256 does, and misses it with a chance of 2**-128.  It does not withstand an attacker who looks
for two inputs of one digest: a site that does so has two updates of its own under one name, and harms no other site.
What must withstand an attacker (the journal's chain, manifests, certificates) has SHA-256 and none of this.

Contract.  :class:`Codec` says what every codec promises, with two errors: :class:`NonFiniteError` refuses values,
:class:`DecodeError` refuses a payload.  :func:`digest` is the digest by which two ends compare a tensor.

Fields.  A field has 1, 2 or 4 bits.  Several share a byte, the earlier in the lower bits; what fills up the last byte
is 0.

Units.  Magnitudes are counted as whole numbers, so that a mean of them is the same on every machine and in every order
of summation.  A group of values (a block, or a chunk of top-k) has a ``top``, the largest biased exponent of fp32 in
it.  Its unit is ``2**(top - 127 - 23)``, and a value of it is ``u`` units, with its significand as a whole number of 24
bits::

    u = significand >> (top - exponent)          which is at most 2**24 - 1; 0 for a subnormal

A sum of such numbers is exact.  The mean of ``count`` of them, times a fraction where a codec wants one, is rounded up
to a whole number m, so that it is 0 only if all are.  As a scale it is cut to bf16::

    scale = 0                                                 if m is 0
          = max(bf16_down(m units), 2**-126)        otherwise; bf16_down cuts off the low 16 bits of the fp32 number

m is below 2**24, an fp32 number therefore, and never above the largest value of the group: the scale is finite.  It is
never subnormal, so a kernel that flushes subnormals to zero reads the same.

Two levels.  int2 puts the magnitudes of a block at two levels, and topk those of the values that it keeps.  A value is
big or it is not, by a rule of the codec's own under which never all of a group are::

    low   = mean of those that are not big, high = mean of those that are, each as ``mean_scale`` makes it of units
    x'    = high where big, low otherwise, with the sign of x (that of 0 is plus)

Where none is big, or high is no larger than low once both are bf16, high is 0 and nothing is big.

A field has 2 bits: 1 for big, 2 for a negative x'.  No two (levels, fields) mean the same values.  Refused on decoding:
a level that is no normal bf16 or 0; a high that is neither 0 nor above low; a high of 0 with a big value, and another
with none or with nothing else; a sign on a value of 0.

The mean of a set is the point with the least squares to it, so the sum of squares of a group shrinks by
``count mean**2`` or more (less what is cut off the levels, at most 2**-14 of it).
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import xxhash
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.codec.structures import Layout

Raw = bytes | bytearray | memoryview
XXH3 = "xxh3:"


class Hasher(Protocol):
    """A digest in the making."""

    def update(self, data: Raw, /) -> None:
        """Take the next bytes."""
        ...

    def text(self) -> str:
        """The digest of all bytes so far, as it is written."""
        ...


class _Xxh3:
    """The form of today."""

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, data: Raw, /) -> None:
        self._state.update(data)

    def text(self) -> str:
        return XXH3 + self._state.hexdigest()


class _Sha256:
    """The form of earlier versions."""

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state = hashlib.sha256()

    def update(self, data: Raw, /) -> None:
        self._state.update(data)

    def text(self) -> str:
        return self._state.hexdigest()


def hasher(like: str = "") -> Hasher:
    """A new one, in the form of the digest ``like``; in that of today where there is none to compare with."""
    return _Sha256() if is_sha256(like) else _Xxh3()


def digest_of(data: Raw, like: str = "") -> str:
    """The digest of ``data``, in the form of ``like``."""
    found = hasher(like)
    found.update(data)
    return found.text()


def is_sha256(digest: str) -> bool:
    """Whether it has the form of earlier versions."""
    return bool(digest) and not digest.startswith(XXH3)


def digits(digest: str) -> str:
    """Its hexadecimal digits, without the name."""
    return digest.removeprefix(XXH3)


def shorter(digest: str) -> str:
    """As much of it as tells two apart for people."""
    return digest[: 12 + (len(XXH3) if digest.startswith(XXH3) else 0)]


CHUNK_VALUES = 256 * 1024
"""Values handled at a time (1 MiB of fp32), so that the passes over a chunk find it in the cache."""


class NonFiniteError(ValueError):
    """A NaN or an infinity was to be encoded; nothing was."""


class DecodeError(ValueError):
    """The payload is not one that ``encode`` makes."""


class NonFinitePayload(DecodeError):
    """The payload is well formed and holds a NaN or an infinity: its sender's values are at fault, not its bytes."""


NON_FINITE = 1
BAD_SCALE = 2
BAD_CODE = 4
BAD_FILLING = 8
TOO_LARGE = 16
"""What a kernel on an accelerator finds wrong, as the bits of its ``fault``."""


@dataclass(frozen=True, slots=True)
class Add:
    """``out <- out + x``: a further update of the same site, or a version for one who holds the one before."""


@dataclass(frozen=True, slots=True)
class Towards:
    """``out <- out - share (out - x)``, three roundings: a further site in the running mean of ``merge_mean``."""

    share: float


@dataclass(frozen=True, slots=True)
class Carry:
    """Error feedback: ``fp32(beta residual)`` is added to what is encoded, and ``residual`` becomes what got lost."""

    residual: Tensor
    beta: float


class Codec(Protocol):
    """A fixed mapping between a flat fp32 CPU tensor and bytes, defined to the bit.

    ``encode`` and ``decode`` make new memory.  The others work in the caller's, and on a part of a tensor at a time:
    before the entropy stage a payload has a fixed length, and each run of ``granule`` values has its own bytes in it.
    Ranges may therefore be given to several threads, and no bit depends on how they were cut.
    """

    @property
    def name(self) -> str:
        """The name it was made from, e.g. ``int4:32+zstd1``."""
        ...

    @property
    def lossless(self) -> bool:
        """Whether ``decode(encode(values))`` is ``values``, bit for bit."""
        ...

    @property
    def granule(self) -> int:
        """How many values are coded together: a range starts at a multiple and ends at one, or with the tensor."""
        ...

    def encode(self, values: Tensor) -> bytes:
        """Encode flat contiguous fp32 ``values``; ``NonFiniteError`` if any is NaN or infinite."""
        ...

    def encode_into(
        self,
        values: Tensor,
        payload: Tensor,
        decoded: Tensor | None = None,
        *,
        start: int = 0,
        numel: int | None = None,
    ) -> int:
        """Encode into ``payload``, flat uint8 with room for ``payload_bytes_max``, and return the payload's length.

        ``decoded`` receives what the payload says where it is given, and may be ``values``.  Where ``numel`` is given,
        ``values`` are those from ``start`` of a tensor of that size, and only their bytes are written; a codec with an
        entropy stage takes whole tensors only.  After a ``NonFiniteError`` both hold nothing of use.
        """
        ...

    def encode_difference(
        self,
        base: Tensor,
        local: Tensor,
        payload: Tensor,
        decoded: Tensor | None = None,
        *,
        in_flight: Sequence[Tensor] = (),
        carry: Carry | None = None,
        start: int = 0,
        numel: int | None = None,
    ) -> int:
        """The same of ``base - local - in_flight[0] - ...``, of which no tensor is made; ``decoded`` may be ``local``.

        With ``carry`` its residual is part of it, and holds afterwards what was to be sent less what is.
        """
        ...

    def decode(self, payload: bytes | memoryview, numel: int) -> Tensor:
        """Decode to a new fp32 tensor of shape (``numel``,), all finite; ``DecodeError`` on anything malformed.

        The casts (fp32, bf16) say ``NonFinitePayload`` for values that are not finite.
        """
        ...

    def decode_into(
        self,
        payload: bytes | memoryview,
        numel: int,
        out: Tensor,
        start: int = 0,
        accumulate: Add | Towards | None = None,
    ) -> None:
        """Decode the values from ``start``, as many as ``out`` has, of a payload of ``numel`` into ``out``.

        With ``accumulate`` they are added to what ``out`` holds, or the mean in ``out`` moves towards them.  ``decode``
        says what is refused; of a range only its own bytes are looked at, and ``out`` holds nothing of use after it.
        With an entropy stage each call opens the payload anew: see :meth:`opened`.
        """
        ...

    def sections(self, numel: int, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """Where the values from ``start`` to ``stop`` lie in a payload of ``numel``: (offset, length) of each piece.

        Joined, the pieces are a payload of these values by themselves: so one that lies on a disk is decoded by
        ranges, and one that is on its way as far as it has come.  Of the payload before the entropy stage.
        """
        ...

    def opened(self, payload: bytes | memoryview, numel: int) -> tuple[Codec, memoryview]:
        """Take the entropy stage off: the codec inside and its payload, which is a view wherever it is stored raw."""
        ...

    @property
    def layout(self) -> Layout | None:
        """How the compiled kernels know the format; None where they do not."""
        ...

    @property
    def plain(self) -> Codec:
        """The codec without the entropy stage."""
        ...

    def closed(self, payload: Tensor) -> memoryview:
        """Put the entropy stage on a whole payload of :attr:`plain` (flat uint8): what ``encode`` would have made."""
        ...

    def payload_bytes(self, numel: int) -> int:
        """Length of the payload before the entropy stage, exactly."""
        ...

    def payload_bytes_max(self, numel: int) -> int:
        """Largest length ``encode`` returns: ``payload_bytes``, and one more where there is an entropy stage."""
        ...

    def error_bound(self, values: Tensor) -> Tensor:
        """Largest ``|decode(encode(values)) - values|``, elementwise, fp32 of the same shape."""
        ...


def check_values(values: Tensor) -> None:
    """Assert what the exchange level promises of a fragment: flat, contiguous, fp32, on the CPU."""
    assert sys.byteorder == "little", "the formats are little-endian, and values are read where they lie"
    assert values.dtype == torch.float32, f"values are {values.dtype}"
    assert values.dim() == 1, f"values have shape {tuple(values.shape)}"
    assert values.is_contiguous(), "values are not contiguous"
    assert values.device.type == "cpu", f"values are on {values.device}"


def accumulate_into(out: Tensor, values: Tensor, accumulate: Add | Towards | None) -> None:
    """Write ``values`` to ``out``, or do with them what ``accumulate`` says."""
    if accumulate is None:
        out.copy_(values)
    elif isinstance(accumulate, Add):
        out.add_(values)
    else:
        # Subtracted rather than added, so that the sign of a zero is kept too: -0 - 0 is -0, but -0 + 0 is +0.
        out.sub_(torch.sub(out, values).mul_(accumulate.share))


def payload_view(payload: Tensor) -> memoryview:
    """Return the memory of a flat uint8 tensor, which lives as long as the view does."""
    return payload.numpy().data


def tensor_bytes(values: Tensor) -> bytes:
    """Return the memory of a contiguous CPU tensor; its type must be one that numpy has."""
    return values.numpy().tobytes()


def bytes_of(values: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor where they lie; the view keeps them."""
    return values.numpy().reshape(-1).data.cast("B") if values.numel() else memoryview(b"")


def bytes_tensor(payload: bytes | memoryview, dtype: torch.dtype) -> Tensor:
    """Return a copy of ``payload`` as a flat tensor of ``dtype``; the length must be a multiple of its size."""
    if len(payload) == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(payload), dtype=dtype)


def check_length(payload: bytes | memoryview, expected: int, name: str, numel: int) -> None:
    """Raise ``DecodeError`` unless ``payload`` has the ``expected`` length."""
    if len(payload) != expected:
        raise DecodeError(f"{name} payload has {len(payload)} bytes, {numel} values take {expected}")


def check_place(codec: Codec, count: int, start: int, numel: int) -> None:
    """Assert that ``count`` values from ``start`` of ``numel`` are a range of whole granules."""
    stop = start + count
    assert 0 <= start <= stop <= numel, f"values {start} to {stop} of {numel}"
    assert start % codec.granule == 0, f"a range of {codec.name} starts at {start}"
    assert stop % codec.granule == 0 or stop == numel, f"a range of {codec.name} ends at {stop} of {numel}"


def digest(values: Tensor, like: str = "") -> str:
    """Return the digest of the values' fp32 little-endian bytes, in the form of ``like``."""
    check_values(values)
    return digest_of(values.numpy().data, like)


def packed_bytes(numel: int, bits: int) -> int:
    """Return the length of ``numel`` fields."""
    return (numel * bits + 7) // 8


def pack(fields: Tensor, bits: int) -> Tensor:
    """Return the bytes of flat uint8 ``fields``, each below ``2**bits``."""
    per_byte = 8 // bits
    missing = -fields.numel() % per_byte
    if missing:
        fields = torch.nn.functional.pad(fields, (0, missing))
    lanes = fields.view(-1, per_byte)
    packed = lanes[:, 0].clone()
    for place in range(1, per_byte):
        packed |= lanes[:, place] << (bits * place)
    return packed


def unpack(packed: Tensor, numel: int, bits: int, name: str) -> Tensor:
    """Return the ``numel`` fields of ``packed``; ``DecodeError`` where what fills up the last byte is not 0."""
    per_byte = 8 // bits
    lanes = torch.empty(packed.numel(), per_byte, dtype=torch.uint8)
    for place in range(per_byte):
        lanes[:, place] = (packed >> (bits * place)) & (2**bits - 1)
    fields = lanes.view(-1)
    if bool(fields[numel:].any()):
        raise DecodeError(f"{name} payload holds something behind its last value")
    return fields[:numel]


MAGNITUDE_BITS = 0x7FFFFFFF
INFINITY_BITS = 0x7F800000
SIGNIFICAND_BITS = 0x007FFFFF
HIDDEN_BIT = 0x00800000
EXPONENT_MAX = 254
EXPONENT_SHIFT = 23
SCALE_MIN_BITS = 0x0080  # the smallest normal bf16
SCALE_MAX_BITS = 0x7F7F


def magnitudes(values: Tensor, name: str) -> Tensor:
    """Return the bits of |x| as int32, which are in the order of |x|; ``NonFiniteError`` for a NaN or an infinity."""
    found = values.view(torch.int32) & MAGNITUDE_BITS
    if found.numel() and int(found.max()) >= INFINITY_BITS:
        raise NonFiniteError(f"{name} was to encode a NaN or an infinity")
    return found


def is_negative(values: Tensor) -> Tensor:
    """Return where x is below 0, which -0 is not, subnormals included wherever the machine flushes them."""
    bits = values.view(torch.int32)
    return (bits < 0) & ((bits & MAGNITUDE_BITS) != 0)


def units(found: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values of ``magnitudes`` (groups, values) as int32 units, and the groups' ``top``."""
    exponents = found >> EXPONENT_SHIFT
    top = exponents.amax(dim=1)
    significands = torch.where(exponents > 0, (found & SIGNIFICAND_BITS) | HIDDEN_BIT, 0)
    return significands >> (top[:, None] - exponents).clamp_(max=31), top


def mean_scale(sums: Tensor, counts: Tensor, top: Tensor) -> Tensor:
    """Return the scale of each group, the upper 16 bits of its fp32 as int32, for ``sums / counts`` (int64) units."""
    means = -(-sums // counts)
    bits = means.to(torch.float32).view(torch.int32)
    # m as an fp32 number has the exponent 127 for one unit; the unit's own is top - 23.
    shifted = (bits >> 16) + ((top - 127 - EXPONENT_SHIFT) << 7)
    return torch.where(means > 0, shifted.clamp(min=SCALE_MIN_BITS), 0)


def scale_values(scale_bits: Tensor) -> Tensor:
    """Return scales (int32, the upper 16 bits) as fp32."""
    return (scale_bits << 16).view(torch.float32)


def check_scales(scale_bits: Tensor, name: str) -> None:
    """Refuse what ``mean_scale`` never makes: NaN, infinity, negatives (with -0) and subnormals."""
    legal = (scale_bits == 0) | ((scale_bits >= SCALE_MIN_BITS) & (scale_bits <= SCALE_MAX_BITS))
    if not bool(legal.all()):
        raise DecodeError(f"{name} payload holds a scale that is negative, subnormal or not finite")


FIELD_BITS = 2
LEVELS_BYTES = 4
BIG, NEGATIVE = 1, 2


def two_levels(found: Tensor, top: Tensor, is_big: Tensor, counts: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
    """Return the levels (groups, 2) as int32, the upper 16 bits of fp32, and the fields (groups, values) as uint8.

    ``found`` are units (int64, 0 behind a group's ``counts``) and ``top`` those of the group; ``is_big`` and
    ``negative`` say so of each value.
    """
    num_big = is_big.sum(dim=1)
    sum_big = torch.where(is_big, found, 0).sum(dim=1)
    low = mean_scale(found.sum(dim=1) - sum_big, counts - num_big, top)
    high = mean_scale(sum_big, num_big.clamp(min=1), top)
    high = torch.where(high > low, high, 0)
    is_big = is_big & (high > 0)[:, None]
    signs = negative & (is_big | (low > 0)[:, None])
    return torch.stack([low, high], dim=1), is_big.to(torch.uint8) * BIG + signs.to(torch.uint8) * NEGATIVE


def check_levels(levels: Tensor, fields: Tensor, counts: Tensor, name: str) -> None:
    """Raise ``DecodeError`` for what ``two_levels`` never makes."""
    check_scales(levels, name)
    low, high = levels[:, 0], levels[:, 1]
    is_big = (fields & BIG) > 0
    num_big = is_big.sum(dim=1)
    two = (high > low) & (num_big > 0) & (num_big < counts)
    if not bool((two | ((high == 0) & (num_big == 0))).all()):
        raise DecodeError(f"{name} payload holds levels that are not those of its values")
    if bool(((fields == NEGATIVE) & (low == 0)[:, None]).any()):
        raise DecodeError(f"{name} payload holds a sign without a value")


def level_values(levels: Tensor, fields: Tensor) -> Tensor:
    """Return what checked levels and fields say, fp32."""
    both = scale_values(levels)
    values = torch.where((fields & BIG) > 0, both[:, 1:], both[:, :1])
    return torch.where((fields & NEGATIVE) > 0, -values, values)
