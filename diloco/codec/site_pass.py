"""A site's passes over a fragment: encoding an update, taking a version, and following the down-link.

Pieces.  In the model a fragment is stored in pieces.  :func:`seal_pieces` encodes an update, and :func:`rebase_pieces`
takes a version.  Both read the values in place, and the site's own updates in flight from their payloads, so that no
tensor of the fragment's size is made.  The bits are those of ``outer.pseudo_gradient``.

The down-link.  Both ends hold the same ``published`` tensor: the sum of everything sent so far.  The syncer encodes the
difference from that to its theta, sends it, and adds the decoded difference; every learner adds the same.  So all hold
the same bits, and the rounding error of one version is part of the next difference and never accumulates.  All tensors
are flat fp32 of the fragment's size; results are new tensors.

Arriving.  :class:`Arriving` follows a down-link while its bytes arrive: it decodes, adds and hashes what has arrived.
So after the last byte of a version from a far link little work is left, and not a pass over the whole fragment.
"""

from __future__ import annotations

from ctypes import c_int64
from dataclasses import dataclass
from itertools import accumulate
from math import sqrt
from typing import TYPE_CHECKING

import torch

from diloco.codec.base import (
    Add,
    DecodeError,
    Hasher,
    address,
    bytes_of,
    check_values,
    hashing_kernels,
    kernels,
    pointers,
    refuse,
    require_finite,
    tile,
)
from diloco.codec.entropy import stage_of
from diloco.codec.kernel_library import SUM_BLOCK, FollowJob, Pieces, SealJob, Status, TakeJob, Update
from diloco.codec.merging import RANGE_VALUES, decoded, ranges, sum_of_products
from diloco.codec.registry import Coded
from diloco.outer.pseudo_gradient import rebase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from diloco.codec.base import Codec, PlainCodec


@dataclass(frozen=True, slots=True)
class Measured:
    """The digest and the L2 norm of the decoded values of an encoded update."""

    digest: str
    norm: float


def seal_pieces(
    pieces: Sequence[Tensor], base: Tensor, sent: Sequence[Coded], codec: PlainCodec, payload: Tensor
) -> Measured:
    """Encode ``base - local - sent[0] - ...`` into ``payload``; ``pieces``, concatenated, are ``local``.

    ``NonFiniteError`` when the difference is not finite.
    """
    numel = _checked(pieces, base, sent)
    assert payload.numel() == codec.payload_bytes(numel), (payload.numel(), numel)
    codecs = codec, *(each.codec for each in sent)
    hashing = hashing_kernels(4 * numel, "", *codecs)
    if hashing is None:  # Each range is hashed and measured while it is in the cache.
        found, squares = Hasher(), 0.0
        for start, stop in ranges(numel, codecs):
            local = torch.cat(_parts(pieces, start, stop))
            in_flight = [decoded([(each.codec, each.payload)], numel, (start, stop)) for each in sent]
            codec.encode_into((base[start:stop], local, *in_flight), payload, local, start=start, numel=numel)
            found.update(bytes_of(local))
            squares += sum_of_products(local, local)
        return Measured(found.text(), sqrt(squares))
    fast, made = hashing
    job = SealJob(
        codec.format(numel),
        0,
        numel,
        tile(SUM_BLOCK, *(each.block for each in codecs)),
        pieces_of(pieces),
        base.data_ptr(),
        updates(sent),
        len(sent),
        payload.data_ptr(),
        made.address,
    )
    status = fast.run(job)
    require_finite(status is not Status.NOT_FINITE, codec.name)
    _check(status, sent)
    return Measured(made.text(), sqrt(job.squares))


def rebase_pieces(pieces: Sequence[Tensor], old_base: Tensor, new_base: Tensor, merged: Sequence[Coded]) -> None:
    """Replace the values in ``pieces``, concatenated, by the result of ``rebase`` for them."""
    numel = _checked(pieces, old_base, merged)
    check_values(new_base)
    assert new_base.numel() == numel, (new_base.numel(), numel)
    codecs = [each.codec for each in merged]
    fast = kernels(*codecs, step=SUM_BLOCK)
    if fast is None:
        for start, stop in ranges(numel, codecs):
            parts = _parts(pieces, start, stop)
            own = [decoded([(each.codec, each.payload)], numel, (start, stop)) for each in merged]
            values = rebase(torch.cat(parts), old_base[start:stop], new_base[start:stop], own)
            for here, part in zip(parts, torch.split(values, [each.numel() for each in parts]), strict=True):
                here.copy_(part)
        return
    job = TakeJob(
        0,
        numel,
        tile(SUM_BLOCK, *(each.block for each in codecs)),
        pieces_of(pieces),
        old_base.data_ptr(),
        new_base.data_ptr(),
        updates(merged),
        len(merged),
    )
    _check(fast.run(job), merged)


def updates(held: Sequence[Coded]) -> object:
    """Return the payloads in the form of the kernels; the payloads must outlive the result."""
    found = (Update * max(1, len(held)))()
    for update, each in zip(found, held, strict=False):
        update.format, update.payload = each.codec.format(each.numel), address(each.payload)
    return found


def _checked(pieces: Sequence[Tensor], base: Tensor, held: Sequence[Coded]) -> int:
    """Assert what the kernels cannot check; return the number of values."""
    for each in (*pieces, base):
        check_values(each)
    numel = base.numel()
    assert sum(each.numel() for each in pieces) == numel, ([each.numel() for each in pieces], numel)
    for coded in held:
        assert (coded.numel, len(coded.payload)) == (numel, coded.codec.payload_bytes(numel))
    return numel


def pieces_of(pieces: Sequence[Tensor]) -> Pieces:
    """Return the memory of flat tensors in the form of the kernels."""
    ends = list(accumulate(each.numel() for each in pieces))
    return Pieces(pointers(pieces), (c_int64 * max(1, len(ends)))(*ends), len(ends))


def _check(status: Status, held: Sequence[Coded]) -> None:
    """Raise for a refused payload of ``held``; any other failure is a bug, as the site's own codecs made them."""
    for each in held:
        refuse(status, f"an update in flight: {each.codec.name}", each.codec.kind)
    assert status is Status.DONE, status


def _parts(pieces: Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
    """Return views of the values between ``start`` and ``stop``."""
    found, at = [], 0
    for each in pieces:
        first, last = max(start - at, 0), min(stop - at, each.numel())
        if first < last:
            found.append(each[first:last])
        at += each.numel()
    return found


def publish(theta: Tensor, published: Tensor, codec: Codec) -> tuple[bytes, Tensor]:
    """Return the payload of ``theta`` for learners that hold ``published``, and the values that they hold after it.

    A lossless codec carries ``theta`` itself, and learners then hold ``theta``; any other codec carries
    ``fp32(theta - published)``.  ``NonFiniteError`` if that is not finite.
    """
    payload = codec.encode(theta if codec.lossless else torch.sub(theta, published))
    return payload, follow(published, payload, codec)


def follow(published: Tensor, payload: bytes | memoryview, codec: Codec) -> Tensor:
    """Return the values after ``payload`` of a learner that held ``published``; ``DecodeError`` if it is malformed.

    Two roundings, the decoded value's and the sum's, with no fused multiply-add, on every kernel.
    """
    decoded = codec.decode(payload, published.numel())
    return decoded if codec.lossless else decoded.add_(published)


def follow_into(
    published: Tensor, payloads: Sequence[bytes | memoryview], codec: Codec, out: Tensor, like: str = ""
) -> str:
    """Write the result of :func:`follow` for ``payloads``, one after the other, to ``out``, and return its digest.

    It is one pass by ranges, which are hashed while they are in the cache, in the form of ``like``.  ``out`` must not
    be another argument; after an error its contents are undefined.
    """
    numel = published.numel()
    following = Following(published, [codec.opened(payload, numel) for payload in payloads], codec, out, like)
    following.go_on(numel)
    return following.digest()


class Following:
    """Does the work of :func:`follow_into` range by range."""

    def __init__(
        self,
        published: Tensor,
        opened: Sequence[tuple[PlainCodec, memoryview]],
        codec: Codec,
        out: Tensor,
        like: str = "",
    ) -> None:
        """``opened`` are the payloads without the entropy stage; bytes of ranges not reached yet may still change."""
        self._published, self._opened, self._codec, self._out = published, opened, codec, out
        self._numel = numel = published.numel()
        for each in (published, out):
            check_values(each)
            assert each.shape == (numel,), (each.shape, numel)
        self._at = 0
        self._hashing = hashing_kernels(4 * numel, like, codec.plain)
        self._hasher = Hasher(like)

    def go_on(self, stop: int) -> None:
        """Continue up to value ``stop``, a range's border or the end; ``DecodeError`` for a malformed payload."""
        codec, plain, begin = self._codec, self._codec.plain, self._at
        if self._hashing is not None:
            fast, made = self._hashing
            size = tile(SUM_BLOCK, plain.block)
            parts = updates([Coded(plain, payload, self._numel) for plain, payload in self._opened])
            places = (self._published.data_ptr(), parts, len(self._opened))
            job = FollowJob(begin, stop, size, *places, self._out.data_ptr(), made.address, codec.lossless)
            refuse(fast.run(job), codec.name, plain.kind)
        else:
            for start, end in ranges(stop - begin, [plain]):
                part = self._out[begin + start : begin + end]
                if not (codec.lossless and self._opened):
                    part.copy_(self._published[begin + start : begin + end])
                for each, payload in self._opened:
                    each.decode_into(payload, self._numel, part, begin + start, None if codec.lossless else Add())
                self._hasher.update(bytes_of(part))
        self._at = stop

    def digest(self) -> str:
        """Return the digest of all values, once they are complete."""
        assert self._at == self._numel, (self._at, self._numel)
        return (self._hasher if self._hashing is None else self._hashing[1]).text()


AT_ONCE = 4 * RANGE_VALUES
RANGES_MAX = 16
"""Most ranges in one call of ``come``: the caller has more bytes to receive, and must not be blocked for long."""


class Arriving:
    """Follows one payload while it arrives, from the values ``held`` to ``out``; see :func:`follow_into`.

    ``payload`` has its full length from the start and is filled from its first byte.  A compressed payload can only be
    decoded at its end.  One thread at a time.
    """

    def __init__(self, held: Tensor, payload: memoryview, codec: Codec, out: Tensor, like: str = "") -> None:
        self.held, self.out = held, out
        self._payload, self._codec, self._like = payload, codec, like
        self._following: Following | None = None
        self._ranges: list[tuple[int, int]] = []
        """Pairs (bytes needed, stop of the values that can then be computed), in reverse order."""
        self._failed: DecodeError | None = None

    def come(self, count: int) -> None:
        """Handle all ranges that need only the first ``count`` bytes, which are final; ``finish`` raises any error."""
        if self._failed is not None or not count or stage_of(self._codec, self._payload) == "zstd":
            return
        try:
            if self._following is None:
                self._following = self._begun()
            for _ in range(RANGES_MAX):
                if not self._ranges or self._ranges[-1][0] > count:
                    return
                self._following.go_on(self._ranges.pop()[1])
        except DecodeError as error:
            self._failed = error

    def finish(self) -> str:
        """Handle the rest once all bytes are here; return the digest of ``out``.  ``DecodeError`` as ``follow_into``.

        Afterwards the payload is no longer referenced.
        """
        following, self._following = self._following, None
        try:
            if self._failed is not None:
                raise self._failed
            following = following or self._begun()
            following.go_on(self.held.numel())
            return following.digest()
        finally:
            self._failed, self._payload = DecodeError("this payload was followed before"), memoryview(b"")

    def _begun(self) -> Following:
        numel = self.held.numel()
        opened = plain, payload = self._codec.opened(self._payload, numel)
        ahead = len(self._payload) - len(payload)
        for start, stop in ranges(numel, [plain], AT_ONCE):
            ends = [offset + length for offset, length in plain.sections(numel, start, stop)]
            self._ranges.append((ahead + max(ends), stop))
        self._ranges.reverse()
        return Following(self.held, [opened], self._codec, self.out, self._like)
