"""The building blocks of codecs: digests, the interface and its errors, and memory.

Digests.  Two ends compare bytes by their digest, and a reader verifies a file by it.  A digest is written as its name
and 32 hexadecimal digits, ``xxh3:<digits>`` (XXH3 of 128 bits, big-endian).  XXH3 runs at the speed of memory; SHA-256
runs at a tenth of it, and was the largest part of a round.  64 digits without a name are a SHA-256, the form of earlier
versions.  It stays readable: a comparison uses the form of the digest that it is given (``like``), and every file and
every peer keeps the form that it began with.

XXH3 finds damage as SHA-256 does, and misses it with a chance of 2**-128.  It does not resist an attacker who searches
for two inputs with one digest: a site that does so has two updates of its own with one digest, and harms no other site.
Data that must resist an attacker (the journal's chain, manifests, certificates) uses only SHA-256.

A :class:`KernelDigest` is computed within a pass of the compiled kernels, while the values are in the first-level
cache.  It equals the digest that :class:`Hasher` makes of the same bytes.  Two ends compare a tensor by :func:`digest`.

Contract.  :class:`Codec` is the interface of every codec, with two errors: :class:`NonFiniteError` refuses values,
:class:`DecodeError` refuses a payload.

Buffers.  The system maps memory in pages, each at its first touch, and that costs ten times as much as the write
itself: new tensors for each version cost more than all the arithmetic on them.  :class:`Buffers` reuses memory of a
fragment's size for the next version.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import sys
import weakref
from abc import ABC, abstractmethod
from collections import deque
from ctypes import c_void_p
from math import lcm
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
import xxhash
from torch import Tensor

from diloco.codec.kernel_library import (
    SUM_BLOCK,
    TILE_MAX,
    TILE_USUAL,
    DecodeJob,
    DigestState,
    EncodeJob,
    Fold,
    Format,
    Kernels,
    Kind,
    Status,
    choice,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Raw = bytes | bytearray | memoryview
XXH3 = "xxh3:"


class Hasher:
    """Computes a digest incrementally."""

    __slots__ = ("_name", "_state", "update")

    def __init__(self, like: str = "") -> None:
        """Use the form of the digest ``like``; the present form where it is empty."""
        self._name = "" if is_sha256(like) else XXH3
        self._state: hashlib._Hash | xxhash.xxh3_128 = hashlib.sha256() if is_sha256(like) else xxhash.xxh3_128()
        self.update: Callable[[Raw], None] = self._state.update
        """Add the next bytes."""

    def text(self) -> str:
        """Return the digest of all bytes so far, in its written form."""
        return self._name + self._state.hexdigest()


def digest_of(data: Raw, like: str = "") -> str:
    """Return the digest of ``data``, in the form of ``like``."""
    found = Hasher(like)
    found.update(data)
    return found.text()


def is_sha256(digest: str) -> bool:
    """Return whether ``digest`` has the form of earlier versions."""
    return bool(digest) and not digest.startswith(XXH3)


def digits(digest: str) -> str:
    """Return the hexadecimal digits of ``digest``, without the name."""
    return digest.removeprefix(XXH3)


def shorter(digest: str) -> str:
    """Return ``digest`` shortened to 12 digits, for people."""
    return digest[: 12 + (len(XXH3) if digest.startswith(XXH3) else 0)]


BYTES_MIN = 241
"""XXH3 hashes shorter input by another algorithm, which the kernels lack."""


class KernelDigest:
    """The digest of ``total`` bytes, which kernels add in order; all parts but the last are whole ``SUM_BLOCK``s."""

    def __init__(self, kernels: Kernels, total: int) -> None:
        assert total >= BYTES_MIN, total
        self.kernels = kernels
        self._state = DigestState(total)
        self.address = ctypes.addressof(self._state)
        """The address of the state, for a job of the kernels."""

    def text(self) -> str:
        """Return the digest in its written form, once all bytes are in."""
        assert self._state.done == self._state.total, (self._state.done, self._state.total)
        return f"{XXH3}{self._state.high:016x}{self._state.low:016x}"


def tile(step: int, codecs: Sequence[PlainCodec]) -> int:
    """Return how many values the kernels handle at a time, in whole ``step``s and whole blocks of all ``codecs``.

    0 where that is impossible.
    """
    step = lcm(step, *[each.block for each in codecs])
    return 0 if step > TILE_MAX else max(1, TILE_USUAL // step) * step


def address(payload: bytes | memoryview) -> int:
    """Return the address of the bytes, which is valid as long as the object lives."""
    return int(np.frombuffer(payload, dtype=np.uint8).ctypes.data)


def pointers(tensors: Sequence[Tensor]) -> ctypes.Array[c_void_p]:
    """Return an array of the tensors' addresses."""
    return (c_void_p * max(1, len(tensors)))(*[each.data_ptr() for each in tensors])


def pointer(values: Tensor | None) -> int | None:
    """Return the address of a tensor, or None (null)."""
    return None if values is None else values.data_ptr()


def kernels(*codecs: PlainCodec, step: int = 1) -> Kernels | None:
    """Return the kernels for a pass over payloads of ``codecs``, by tiles of whole ``step``s; None: torch makes it.

    None where this process runs plain torch, where a codec has no kernel, and where no tile holds whole blocks of all.
    """
    if None in [each.kind for each in codecs] or not tile(step, codecs):
        return None
    return choice().kernels


def hashing(total: int, like: str, *codecs: PlainCodec) -> KernelDigest | Hasher:
    """Return a digest of ``total`` bytes in the form of ``like``, for the kernels to compute in a pass over payloads of
    ``codecs``; a ``Hasher`` where torch makes the pass."""
    fast = kernels(*codecs, step=SUM_BLOCK)
    return Hasher(like) if fast is None or total < BYTES_MIN or is_sha256(like) else KernelDigest(fast, total)


def digest(values: Tensor, like: str = "") -> str:
    """Return the digest of the values' fp32 little-endian bytes, in the form of ``like``."""
    check_values(values)
    return digest_of(values.numpy().data, like)


CHUNK_VALUES = 256 * 1024
"""Values handled at a time (1 MiB of fp32), so that a chunk stays in the cache for all passes over it."""


class NonFiniteError(ValueError):
    """The values to encode hold a NaN or an infinity; nothing was encoded."""


class DecodeError(ValueError):
    """The payload is not one that ``encode`` produces."""


class NonFinitePayload(DecodeError):
    """The payload is well formed but holds a NaN or an infinity: its sender's values are wrong, not its bytes."""


def require_finite(finite: bool, name: str) -> None:
    """Raise the ``NonFiniteError`` of the codec ``name`` unless all values to encode were ``finite``."""
    if not finite:
        raise NonFiniteError(f"{name} was to encode a NaN or an infinity")


def refuse_where(wrong: Tensor, status: Status, name: str) -> None:
    """Raise the ``DecodeError`` of ``status`` if any value of the mask ``wrong`` is true."""
    if bool(wrong.any()):
        refuse(status, name)


def refuse(status: Status, name: str, kind: Kind | None = None) -> None:
    """Raise the ``DecodeError`` of ``status`` for a payload of the codec ``name``; do nothing for ``DONE``."""
    if status is Status.DONE:
        return
    if status is Status.NOT_FINITE:
        raise NonFinitePayload(f"{name} payload {status.text}")
    what = status.text
    if status is Status.BAD_CODE:
        what += " -127" if kind is Kind.INT8 else " -7"
    raise DecodeError(f"{name} payload {what}")


class Codec(ABC):
    """A fixed mapping between a flat fp32 CPU tensor and bytes, defined to the bit.

    It is a :class:`PlainCodec`, or a plain codec followed by an entropy stage.
    """

    __slots__ = ()
    name: str
    """The name that it was built from, e.g. ``int4:32+zstd1``."""

    @property
    @abstractmethod
    def plain(self) -> PlainCodec:
        """The codec without the entropy stage."""

    @abstractmethod
    def opened(self, payload: bytes | memoryview, numel: int) -> tuple[PlainCodec, memoryview]:
        """Undo the entropy stage: return the plain codec and its payload, which is a view where it is stored raw."""

    def closed(self, payload: Tensor) -> memoryview:
        """Apply the entropy stage to a whole payload of :attr:`plain` (flat uint8); return what ``encode`` would."""
        return bytes_of(payload)

    def payload_bytes_max(self, numel: int) -> int:
        """Return the largest length of a result of ``encode``: ``payload_bytes``, plus the flag of an entropy stage."""
        return self.payload_bytes(numel) + (0 if self.plain is self else 1)

    @property
    def lossless(self) -> bool:
        """Whether ``decode(encode(values))`` is ``values``, bit for bit."""
        return self.plain.kind is Kind.FP32

    def payload_bytes(self, numel: int) -> int:
        """Return the exact length of the payload before the entropy stage."""
        at, size = self.plain.sections(numel, 0, numel)[-1]
        return at + size

    def encode(self, values: Tensor) -> bytes:
        """Encode flat contiguous fp32 ``values``; ``NonFiniteError`` if any is NaN or infinite."""
        payload = torch.empty(self.payload_bytes(values.numel()), dtype=torch.uint8)
        self.plain.encode_into((values,), payload)
        return bytes(self.closed(payload))

    def decode(self, payload: bytes | memoryview, numel: int) -> Tensor:
        """Decode to a new fp32 tensor of shape (``numel``,), all finite; ``DecodeError`` on anything malformed.

        The casts (fp32, bf16) raise ``NonFinitePayload`` for values that are not finite.
        """
        plain, raw = self.opened(payload, numel)
        values = torch.empty(numel, dtype=torch.float32)
        plain.decode_into(raw, numel, values)
        return values


class PlainCodec(Codec):
    """A codec without an entropy stage: each block of ``block`` values has its own bytes at fixed offsets.

    ``encode_into`` and ``decode_into`` work in the caller's memory, and on a part of a tensor at a time.  Several
    threads may handle different ranges, and no bit depends on how the ranges are cut.

    A subclass defines how rows of values are rounded, and where and how the result is stored.  A row is a whole
    block, or the last one of a tensor, alone, which may be shorter.
    """

    __slots__ = ()
    kind: ClassVar[Kind | None] = None
    """The class's own format in the compiled kernels, which no subclass inherits; None: torch makes every pass."""
    block: int
    """Number of values coded together: a range starts at a multiple of it and ends at one, or with the tensor."""
    k: int = 0
    """Number of values kept of each block; 0: all."""

    def __init_subclass__(cls) -> None:
        """Give ``cls`` no kernel unless it names one itself: an inherited one would compute its parent's values."""
        cls.kind = cls.__dict__.get("kind")

    def format(self, numel: int) -> Format:
        """Return the description of a payload of ``numel`` values for the compiled kernels."""
        return Format(self.kind, self.block, numel, self.k)

    @abstractmethod
    def sections(self, numel: int, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """Return (offset, length) of each piece of the values from ``start`` to ``stop`` in a payload of ``numel``.

        Joined, the pieces are a payload of these values alone: so a payload on disk can be decoded by ranges, and an
        arriving one as far as its bytes have arrived.
        """

    @abstractmethod
    def encode_rows(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return the codes of ``rows``, fp32 (rows, values); ``NonFiniteError`` if any value is NaN or infinite."""

    @abstractmethod
    def decode_rows(self, *codes: Tensor) -> Tensor:
        """Return the fp32 values of codes from ``encode_rows`` or ``unpack``; ``DecodeError`` if one is not finite."""

    @abstractmethod
    def pack(self, *codes: Tensor) -> Sequence[Tensor]:
        """Return the bytes of codes from ``encode_rows``, flat uint8, for each of the sections."""

    @abstractmethod
    def unpack(self, pieces: Sequence[Tensor], rows: int, width: int) -> tuple[Tensor, ...]:
        """Return the codes of ``rows`` of ``width`` values; ``DecodeError`` for bytes that ``pack`` never produces."""

    @property
    def plain(self) -> PlainCodec:
        """The codec itself."""
        return self

    def opened(self, payload: bytes | memoryview, numel: int) -> tuple[PlainCodec, memoryview]:
        """Return the codec itself and the payload; ``DecodeError`` unless that has the length for ``numel`` values."""
        if len(payload) != self.payload_bytes(numel):
            expected = f"{numel} values take {self.payload_bytes(numel)}"
            raise DecodeError(f"{self.name} payload has {len(payload)} bytes, {expected}")
        return self, memoryview(payload)

    def encode_into(
        self,
        terms: Sequence[Tensor],
        payload: Tensor,
        decoded: Tensor | None = None,
        *,
        residual: Tensor | None = None,
        beta: float = 1.0,
        start: int = 0,
        numel: int | None = None,
    ) -> None:
        """Encode the first of ``terms`` minus the others, without a tensor for the difference, into ``payload``.

        ``payload`` is flat uint8 with room for ``payload_bytes``.  ``residual``, if given, is error feedback:
        ``fp32(beta residual)`` is part of the encoded values, and afterwards it holds their rounding error.
        ``decoded``, if given, receives the decoded payload, and may be one of the terms.  Where ``numel`` is given, the
        terms are the values from ``start`` of a tensor of that size, and only their bytes are written.  After a
        ``NonFiniteError`` the contents of all outputs are undefined.
        """
        values = terms[0]
        whole = values.numel() if numel is None else numel
        self.check_place(values.numel(), start, whole)
        for each in (*terms, *(held for held in (decoded, residual) if held is not None)):
            check_values(each)
            assert each.shape == values.shape, (each.shape, values.shape)
        length = self.payload_bytes(whole)
        assert payload.dtype == torch.uint8, f"payload is {payload.dtype}"
        assert payload.is_contiguous(), "payload is not contiguous"
        assert payload.dim() == 1, f"payload has shape {tuple(payload.shape)}"
        assert payload.numel() >= length, f"payload has room for {payload.numel()} bytes, {length} are needed"
        fast = kernels(self)
        if fast is not None and values.numel():
            job = EncodeJob(
                self.format(whole),
                start,
                values.numel(),
                pointer(values),
                pointers(terms[1:]),
                len(terms) - 1,
                pointer(residual),
                pointer(payload),
                pointer(decoded),
                beta,
            )
            require_finite(fast.run(job) is Status.DONE, self.name)
            return
        for first, last in self._chunks(values.numel()):  # In torch: the definition.
            chunk = values[first:last]
            for index, term in enumerate(terms[1:]):
                chunk = torch.sub(chunk, term[first:last], out=chunk if index else None)
            if residual is not None:
                chunk = torch.add(chunk, residual[first:last] * beta)
            codes = self.encode_rows(self._rows(chunk))
            sections = self.sections(whole, start + first, start + last)
            for (at, size), piece in zip(sections, self.pack(*codes), strict=True):
                payload[at : at + size] = piece
            if residual is None and decoded is None:
                continue
            said = self.decode_rows(*codes).view(-1)
            if residual is not None:
                torch.sub(chunk, said, out=residual[first:last])
            if decoded is not None:
                decoded[first:last] = said

    def decode_into(
        self,
        payload: bytes | memoryview,
        numel: int,
        out: Tensor,
        start: int = 0,
        fold: Fold = Fold.WRITE,
        share: float = 0.0,
    ) -> None:
        """Decode the values from ``start``, as many as ``out`` has, of a payload of ``numel`` into ``out``.

        ``fold`` says how they are combined with ``out``; ``share`` is that of ``TOWARDS``.  It refuses what ``decode``
        refuses, but checks only the bytes of the range; after an error the contents of ``out`` are undefined.
        """
        _, view = self.opened(payload, numel)
        check_values(out)
        self.check_place(out.numel(), start, numel)
        fast = kernels(self)
        if fast is not None and out.numel():
            at = pointer(out)
            job = DecodeJob(self.format(numel), start, out.numel(), address(payload), at, at, fold, share)
            refuse(fast.run(job), self.name, self.kind)
            return
        for first, last in self._chunks(out.numel()):  # In torch: the definition.
            sections = self.sections(numel, start + first, start + last)
            pieces = [torch.frombuffer(bytearray(view[at : at + size]), dtype=torch.uint8) for at, size in sections]
            codes = self.unpack(pieces, *self._rows(out[first:last]).shape)
            fold_into(out[first:last], self.decode_rows(*codes).view(-1), fold, share)

    def check_place(self, count: int, start: int, numel: int) -> None:
        """Assert that ``count`` values from ``start`` of ``numel`` are a range of whole blocks."""
        stop = start + count
        assert 0 <= start <= stop <= numel, f"values {start} to {stop} of {numel}"
        assert start % self.block == 0, f"a range of {self.name} starts at {start}"
        assert stop % self.block == 0 or stop == numel, f"a range of {self.name} ends at {stop} of {numel}"

    def _chunks(self, numel: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of ``numel`` values, cut at blocks so that temporaries stay in the cache; a short last block is
        a range of its own."""
        step, whole = max(1, CHUNK_VALUES // self.block) * self.block, numel // self.block * self.block
        yield from ((start, min(start + step, whole)) for start in range(0, whole, step))
        if whole < numel:
            yield whole, numel

    def _rows(self, chunk: Tensor) -> Tensor:
        """Return a view of the chunk as rows of a block each; a shorter chunk is one row."""
        return chunk.view(-1, min(self.block, chunk.numel()))


def check_values(values: Tensor) -> None:
    """Assert that ``values`` have the form of an exchanged fragment: flat, contiguous, fp32, on the CPU."""
    assert sys.byteorder == "little", "the formats are little-endian, and values are read in place"
    assert values.dtype == torch.float32, f"values are {values.dtype}"
    assert values.dim() == 1, f"values have shape {tuple(values.shape)}"
    assert values.is_contiguous(), "values are not contiguous"
    assert values.device.type == "cpu", f"values are on {values.device}"


def fold_into(out: Tensor, values: Tensor, fold: Fold, share: float = 0.0) -> None:
    """Combine ``values`` with those of ``out`` as ``fold`` says."""
    if fold is Fold.WRITE:
        out.copy_(values)
    elif fold is Fold.ADD:
        out.add_(values)
    else:
        # Subtract rather than add, to keep the sign of a zero too: -0 - 0 is -0, but -0 + 0 is +0.
        out.sub_(torch.sub(out, values).mul_(share))


def bytes_of(values: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without a copy; the view keeps the memory alive."""
    return values.numpy().reshape(-1).data.cast("B") if values.numel() else memoryview(b"")


ALIGNMENT = 64
"""Alignment of every buffer in bytes: the size of a cache line."""
LONGER_MAX = 4 / 3
"""Largest ratio of reused memory to the size asked for: fragment sizes differ by no more."""


class Buffers:
    """Allocates tensors, and reuses the memory of a tensor once the last tensor, array or view on it is gone.

    Nothing has to be released explicitly: the storage of a tensor owns the array that it was made from, every view owns
    the storage, and the memory becomes spare when that array dies.  At most ``spare_max`` pieces are spare.  Any thread
    may allocate or drop a tensor.
    """

    def __init__(self, spare_max: int) -> None:
        self._spare: deque[np.ndarray[tuple[int], np.dtype[np.uint8]]] = deque(maxlen=spare_max)

    def values(self, numel: int) -> Tensor:
        """Return a flat, uninitialised fp32 tensor of ``numel`` values."""
        return self.raw(4 * numel).view(torch.float32)

    def raw(self, size: int) -> Tensor:
        """Return a flat, uninitialised uint8 tensor of ``size`` bytes."""
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        memory = self._taken(size + ALIGNMENT)
        begin = -memory.ctypes.data % ALIGNMENT
        lease = memory[begin : begin + size]
        # Appending to a deque is safe at any moment, even during its own ``popleft``: no lock is needed.
        weakref.finalize(lease, self._spare.append, memory).atexit = False
        return torch.from_numpy(lease)

    def _taken(self, size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Return memory for ``size`` bytes: the first spare piece of fitting length, or new memory.

        Without a fitting piece the one that has been spare for longest is freed: spare and new memory together never
        exceed the memory in use before.
        """
        for _ in range(len(self._spare)):
            try:
                memory = self._spare.popleft()
            except IndexError:
                break  # Another thread took the last piece.
            if size <= memory.nbytes <= LONGER_MAX * size:
                return memory
            self._spare.append(memory)
        with contextlib.suppress(IndexError):
            self._spare.popleft()
        return np.empty(size, dtype=np.uint8)
