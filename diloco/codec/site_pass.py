"""A site's passes over a fragment: encoding an update, taking a version, and following the down-link.

Pieces.  In the model a fragment is stored in pieces.  :func:`seal_pieces` encodes an update, and :func:`rebase_pieces`
takes a version.  Both read the values in place, and the site's own updates in flight from their payloads, so that no
tensor of the fragment's size is made.  The bits are those of ``outer.pseudo_gradient``.

The down-link.  Both ends hold the same ``published`` tensor: the sum of everything sent so far.  The syncer encodes the
difference from that to its theta, sends it, and adds the decoded difference; every learner adds the same.  So all hold
the same bits, and the rounding error of one version is part of the next difference and never accumulates.  All tensors
are flat fp32 of the fragment's size; results are new tensors.

Arriving.  :class:`Following` follows a down-link while its bytes arrive: it decodes, adds and hashes what has arrived.
So after the last byte of a version from a far link little work is left, and not a pass over the whole fragment.
"""

from __future__ import annotations

from ctypes import c_int64
from itertools import accumulate
from math import sqrt
from typing import TYPE_CHECKING

import torch

from diloco.codec.base import (
    DecodeError,
    Hasher,
    KernelDigest,
    address,
    bytes_of,
    check_values,
    hashing,
    kernels,
    pointers,
    refuse,
    require_finite,
    tile,
)
from diloco.codec.entropy import stage_of
from diloco.codec.kernel_library import SUM_BLOCK, Fold, FollowJob, Pieces, SealJob, Status, TakeJob, Update
from diloco.codec.merging import RANGE_VALUES, decoded, ranges, sum_of_products
from diloco.codec.registry import Coded
from diloco.outer.pseudo_gradient import rebase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from diloco.codec.base import Codec, PlainCodec


def seal_pieces(
    pieces: Sequence[Tensor], base: Tensor, sent: Sequence[Coded], codec: PlainCodec, payload: Tensor
) -> tuple[str, float]:
    """Encode ``base - local - sent[0] - ...`` into ``payload``; ``pieces``, concatenated, are ``local``.

    Return the digest and the L2 norm of the decoded values.  ``NonFiniteError`` when the difference is not finite.
    """
    numel = _checked(pieces, base, sent)
    assert payload.numel() == codec.payload_bytes(numel), (payload.numel(), numel)
    codecs = [codec, *[each.codec for each in sent]]
    made, squares = hashing(4 * numel, "", *codecs), 0.0
    if isinstance(made, Hasher):  # Each range is hashed and measured while it is in the cache.
        for start, stop in ranges(numel, codecs):
            local = torch.cat(_parts(pieces, start, stop))
            in_flight = [decoded([(each.codec, each.payload)], numel, (start, stop)) for each in sent]
            codec.encode_into((base[start:stop], local, *in_flight), payload, local, start=start, numel=numel)
            made.update(bytes_of(local))
            squares += sum_of_products(local, local)
        return made.text(), sqrt(squares)
    job = SealJob(
        codec.format(numel),
        0,
        numel,
        tile(SUM_BLOCK, codecs),
        pieces_of(pieces),
        base.data_ptr(),
        updates(sent),
        len(sent),
        payload.data_ptr(),
        made.address,
    )
    status = made.kernels.run(job)
    require_finite(status is not Status.NOT_FINITE, codec.name)
    _check(status, sent)
    return made.text(), sqrt(job.squares)


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
        tile(SUM_BLOCK, codecs),
        pieces_of(pieces),
        old_base.data_ptr(),
        new_base.data_ptr(),
        updates(merged),
        len(merged),
    )
    _check(fast.run(job), merged)


def updates(held: Sequence[Coded]) -> object:
    """Return the payloads in the form of the kernels; the payloads must outlive the result."""
    found = [Update(each.codec.format(each.numel), address(each.payload)) for each in held]
    return (Update * max(1, len(held)))(*found)


def _checked(pieces: Sequence[Tensor], base: Tensor, held: Sequence[Coded]) -> int:
    """Assert what the kernels cannot check; return the number of values."""
    for each in (*pieces, base):
        check_values(each)
    numel, sizes = base.numel(), [each.numel() for each in pieces]
    assert sum(sizes) == numel, (sizes, numel)
    for coded in held:
        assert (coded.numel, len(coded.payload)) == (numel, coded.codec.payload_bytes(numel))
    return numel


def pieces_of(pieces: Sequence[Tensor]) -> Pieces:
    """Return the memory of flat tensors in the form of the kernels."""
    ends = list(accumulate([each.numel() for each in pieces]))
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


AT_ONCE = 4 * RANGE_VALUES
RANGES_MAX = 16
"""Most ranges in one call of ``come``: the caller has more bytes to receive, and must not be blocked for long."""


class Following:
    """Does the work of :func:`follow` for ``payloads``, one after the other, from the values ``held`` to ``out``.

    It is one pass by ranges, which are hashed while they are in the cache.  ``out`` must not be another argument; after
    an error its contents are undefined.

    A single payload may be followed while it arrives (:meth:`come`): it has its full length from the start and is
    filled from its first byte.  A compressed payload can only be decoded at its end.  One thread at a time.
    """

    def __init__(
        self, held: Tensor, payloads: Sequence[bytes | memoryview], codec: Codec, out: Tensor, like: str = ""
    ) -> None:
        """The digest has the form of ``like``."""
        self.held, self.out = held, out
        self._payloads, self._codec, self._numel = payloads, codec, held.numel()
        for each in (held, out):
            check_values(each)
            assert each.shape == (self._numel,), (each.shape, self._numel)
        self._opened: list[Coded] = []
        """The payloads without the entropy stage; bytes of ranges not reached yet may still change."""
        self._at = 0
        self._digest = hashing(4 * self._numel, like, codec.plain)
        self._stops = [stop for _, stop in reversed(ranges(self._numel, [codec.plain], AT_ONCE))]
        """The ends of the ranges that ``come`` has not reached, in reverse order."""
        self._failed: DecodeError | None = None

    def come(self, count: int) -> None:
        """Handle all ranges that need only the first ``count`` bytes, which are final; ``finish`` raises any error."""
        if self._failed is not None or not count:
            return
        plain, [payload] = self._codec.plain, self._payloads
        if stage_of(self._codec, payload) == "zstd":
            return
        ahead = len(payload) - plain.payload_bytes(self._numel)  # The flag of an entropy stage.
        try:
            for _ in range(min(RANGES_MAX, len(self._stops))):
                sections = plain.sections(self._numel, self._at, self._stops[-1])
                if ahead + max(map(sum, sections)) > count:
                    return
                self.go_on(self._stops.pop())
        except DecodeError as error:
            self._failed = error

    def finish(self) -> str:
        """Handle the rest once all bytes are here; return the digest of ``out``.  ``DecodeError`` if one is malformed.

        Afterwards the payloads are no longer referenced.
        """
        try:
            if self._failed is not None:
                raise self._failed
            self.go_on(self._numel)
            return self._digest.text()
        finally:
            self._failed = DecodeError("these payloads were followed before")
            self._payloads, self._opened = [], []

    def go_on(self, stop: int) -> None:
        """Continue up to value ``stop``, a range's border or the end; ``DecodeError`` for a malformed payload."""
        codec, plain, begin, made = self._codec, self._codec.plain, self._at, self._digest
        if not self._opened:
            self._opened = [Coded(*codec.opened(each, self._numel), self._numel) for each in self._payloads]
        if isinstance(made, KernelDigest):
            size = tile(SUM_BLOCK, [plain])
            places = (self.held.data_ptr(), updates(self._opened), len(self._opened))
            job = FollowJob(begin, stop, size, *places, self.out.data_ptr(), made.address, codec.lossless)
            refuse(made.kernels.run(job), codec.name, plain.kind)
        else:
            for start, end in ranges(stop - begin, [plain]):
                part = self.out[begin + start : begin + end]
                if not (codec.lossless and self._opened):
                    part.copy_(self.held[begin + start : begin + end])
                fold = Fold.WRITE if codec.lossless else Fold.ADD
                for each in self._opened:
                    each.codec.decode_into(each.payload, self._numel, part, begin + start, fold)
                made.update(bytes_of(part))
        self._at = stop
