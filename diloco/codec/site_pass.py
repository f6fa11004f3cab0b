"""A site's passes over a fragment: what it sends, how it takes a version, and how it follows the down-link.

Pieces.  In the model a fragment lies in pieces.  :func:`seal_pieces` encodes what the site sends, and
:func:`rebase_pieces` takes a version.  Each reads the values where they lie, and the site's own updates in flight out
of their payloads, so that no tensor of the fragment's size is made.  The bits are those of ``outer.pseudo_gradient``.

The down-link.  Both ends hold the same published tensor, and what a codec rounds off goes out with the next version.
``published`` is what has been told so far.  The syncer sends the encoded difference to its own theta and adds what that
decodes to; every learner adds the same.  All hold the same bits, and the rounding error of one version is part of the
next difference, so it never adds up.  All tensors are flat fp32 of the fragment's size; results are new tensors.

Arriving.  :class:`Arriving` follows a down-link while it comes: it decodes, adds and hashes the bytes that are here,
and does the rest later.  When the last byte of a version comes over a far link, that byte is nearly all that is left to
do, and not a pass over the whole fragment.
"""

from __future__ import annotations

from ctypes import c_int64
from dataclasses import dataclass
from itertools import accumulate
from math import sqrt
from typing import TYPE_CHECKING

import torch

from diloco.codec.base import Add, DecodeError, NonFiniteError, bytes_of, check_values, hasher
from diloco.codec.entropy import stage_of
from diloco.codec.merging import RANGE_VALUES, layout_of, ranges, sum_of_products
from diloco.codec.native import address, kernel_digest, kernels, pointers, refuse, tile
from diloco.codec.registry import Coded
from diloco.codec.structures import SUM_BLOCK, FollowJob, Pieces, SealJob, Status, TakeJob, Update
from diloco.outer.pseudo_gradient import rebase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from diloco.codec.base import Codec
    from diloco.codec.native import Kernels
    from diloco.codec.structures import Layout


@dataclass(frozen=True, slots=True)
class Measured:
    """Of what was encoded, as it is decoded: the digest of the values and their L2 norm."""

    digest: str
    norm: float


def seal_pieces(
    pieces: Sequence[Tensor],
    base: Tensor,
    sent: Sequence[Coded],
    codec: Codec,
    payload: Tensor,
    fast: Callable[[], Kernels | None] = kernels,
) -> Measured:
    """Encode ``base - local - sent[0] - ...`` into ``payload``, with ``local`` in ``pieces`` one behind the other.

    ``codec`` has no entropy stage.  ``NonFiniteError`` when that is not finite.
    """
    numel = _checked(pieces, base, sent)
    assert payload.numel() == codec.payload_bytes(numel), (payload.numel(), numel)
    found, made = fast(), kernel_digest(4 * numel)
    if found is None or made is None or not found.fits(codec.layout, *_layouts(sent), granule=SUM_BLOCK):
        return _seal_plain(pieces, base, sent, codec, payload)
    assert codec.layout is not None
    job = SealJob(
        codec.layout.format(numel),
        0,
        numel,
        tile(SUM_BLOCK, codec.granule, *(each.codec.granule for each in sent)),
        pieces_of(pieces),
        base.data_ptr(),
        updates(sent),
        len(sent),
        payload.data_ptr(),
        made.address,
    )
    status = found.seal(job)
    if status is Status.NOT_FINITE:
        raise NonFiniteError(f"{codec.name} was to encode a NaN or an infinity")
    _check(status, sent)
    return Measured(made.text(), sqrt(job.squares))


def rebase_pieces(
    pieces: Sequence[Tensor],
    old_base: Tensor,
    new_base: Tensor,
    merged: Sequence[Coded],
    fast: Callable[[], Kernels | None] = kernels,
) -> None:
    """Replace the values in ``pieces``, one behind the other, by what ``rebase`` returns for them."""
    numel = _checked(pieces, old_base, merged)
    check_values(new_base)
    assert new_base.numel() == numel, (new_base.numel(), numel)
    found = fast()
    if found is None or not found.fits(*_layouts(merged), granule=SUM_BLOCK):
        _rebase_plain(pieces, old_base, new_base, merged)
        return
    job = TakeJob(
        0,
        numel,
        tile(SUM_BLOCK, *(each.codec.granule for each in merged)),
        pieces_of(pieces),
        old_base.data_ptr(),
        new_base.data_ptr(),
        updates(merged),
        len(merged),
    )
    _check(found.take(job), merged)


def updates(held: Sequence[Coded]) -> object:
    """The payloads as the kernels take them, which must live as long as that."""
    found = (Update * max(1, len(held)))()
    for update, each in zip(found, held, strict=False):
        assert each.codec.layout is not None
        update.format, update.payload = each.codec.layout.format(each.numel), address(each.payload)
    return found


def _seal_plain(
    pieces: Sequence[Tensor], base: Tensor, sent: Sequence[Coded], codec: Codec, payload: Tensor
) -> Measured:
    """The same by ranges on torch or by its kernels, each hashed and measured while it lies in the cache."""
    numel, found, squares = base.numel(), hasher(), 0.0
    for start, stop in ranges(numel, [codec, *(each.codec for each in sent)]):
        local = _gathered(pieces, start, stop)
        in_flight = [_decoded(each, start, stop) for each in sent]
        codec.encode_difference(base[start:stop], local, payload, local, in_flight=in_flight, start=start, numel=numel)
        found.update(bytes_of(local))
        squares += sum_of_products(local, local)
    return Measured(found.text(), sqrt(squares))


def _rebase_plain(pieces: Sequence[Tensor], old_base: Tensor, new_base: Tensor, merged: Sequence[Coded]) -> None:
    for start, stop in ranges(old_base.numel(), [each.codec for each in merged]):
        local, own = _gathered(pieces, start, stop), [_decoded(each, start, stop) for each in merged]
        values = rebase(local, old_base[start:stop], new_base[start:stop], own)
        parts = _parts(pieces, start, stop)
        for here, part in zip(parts, torch.split(values, [each.numel() for each in parts]), strict=True):
            here.copy_(part)


def _checked(pieces: Sequence[Tensor], base: Tensor, held: Sequence[Coded]) -> int:
    """Assert what the kernels cannot see; returns how many values there are."""
    for each in (*pieces, base):
        check_values(each)
    numel = base.numel()
    assert sum(each.numel() for each in pieces) == numel, ([each.numel() for each in pieces], numel)
    for coded in held:
        assert coded.codec.plain is coded.codec, coded.codec.name
        assert (coded.numel, len(coded.payload)) == (numel, coded.codec.payload_bytes(numel))
    return numel


def _layouts(held: Sequence[Coded]) -> Iterator[Layout | None]:
    return (each.codec.layout for each in held)


def pieces_of(pieces: Sequence[Tensor]) -> Pieces:
    """The memory of flat tensors, as the kernels take it."""
    ends = list(accumulate(each.numel() for each in pieces))
    return Pieces(pointers(pieces), (c_int64 * max(1, len(ends)))(*ends), len(ends))


def _check(status: Status, held: Sequence[Coded]) -> None:
    """What a site holds of its own updates was made by its own codecs."""
    for each in held:
        assert each.codec.layout is not None
        refuse(status, f"an update in flight: {each.codec.name}", each.codec.layout)
    assert status is Status.DONE, status


def _parts(pieces: Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
    """What lies between ``start`` and ``stop``, where it lies."""
    found, at = [], 0
    for each in pieces:
        first, last = max(start - at, 0), min(stop - at, each.numel())
        if first < last:
            found.append(each[first:last])
        at += each.numel()
    return found


def _gathered(pieces: Sequence[Tensor], start: int, stop: int) -> Tensor:
    """A copy of that."""
    return torch.cat(_parts(pieces, start, stop))


def _decoded(held: Coded, start: int, stop: int) -> Tensor:
    values = torch.empty(stop - start)
    held.codec.decode_into(held.payload, held.numel, values, start)
    return values


def publish(theta: Tensor, published: Tensor, codec: Codec) -> tuple[bytes, Tensor]:
    """Return the payload of ``theta`` for those who hold ``published``, and what they hold after it.

    A lossless codec carries ``theta`` itself, and they then hold ``theta``; any other carries
    ``fp32(theta - published)``.  ``NonFiniteError`` if that is not finite.
    """
    payload = codec.encode(theta if codec.lossless else torch.sub(theta, published))
    return payload, follow(published, payload, codec)


def follow(published: Tensor, payload: bytes | memoryview, codec: Codec) -> Tensor:
    """Return what is held after ``payload`` by one who held ``published``; ``DecodeError`` if it is malformed.

    Two roundings, the decoded value's and the sum's, with no fused multiply-add, on every kernel.
    """
    decoded = codec.decode(payload, published.numel())
    return decoded if codec.lossless else decoded.add_(published)


def follow_into(
    published: Tensor, payloads: Sequence[bytes | memoryview], codec: Codec, out: Tensor, like: str = ""
) -> str:
    """Write what :func:`follow` gives for ``payloads``, one after the other, to ``out``, and return its digest.

    One pass by ranges, which are hashed where they still lie in the cache, in the form of ``like``.  ``out`` is none of
    the others, and holds nothing of use after an error.
    """
    numel = published.numel()
    following = Following(published, [codec.opened(payload, numel) for payload in payloads], codec, out, like)
    following.go_on(numel)
    return following.digest()


class Following:
    """What :func:`follow_into` does, range after range."""

    def __init__(
        self, published: Tensor, opened: Sequence[tuple[Codec, memoryview]], codec: Codec, out: Tensor, like: str = ""
    ) -> None:
        """``opened`` are the payloads without the entropy stage; bytes of ranges that are not reached may change."""
        self._published, self._opened, self._codec, self._out = published, opened, codec, out
        self._numel = numel = published.numel()
        for each in (published, out):
            check_values(each)
            assert each.shape == (numel,), (each.shape, numel)
        self._at = 0
        fast, made = kernels(), kernel_digest(4 * numel, like)
        fits = fast is not None and made is not None and fast.fits(codec.plain.layout, granule=SUM_BLOCK)
        self._fast, self._made = (fast, made) if fits else (None, None)
        self._parts = updates([Coded(plain, payload, numel) for plain, payload in opened]) if fits else None
        self._hasher = hasher(like)

    def go_on(self, stop: int) -> None:
        """The values up to ``stop``, which is the border of a range or their number; ``DecodeError``."""
        codec, plain = self._codec, self._codec.plain
        if self._fast is not None and self._made is not None:
            size = tile(SUM_BLOCK, plain.granule)
            places = (self._published.data_ptr(), self._parts, len(self._opened))
            job = FollowJob(self._at, stop, size, *places, self._out.data_ptr(), self._made.address, codec.lossless)
            refuse(self._fast.follow(job), codec.name, layout_of(plain))
        else:
            for start, end in ranges(self._numel, [plain]):
                if self._at <= start < stop:
                    self._go_on_plain(start, min(end, stop))
        self._at = max(self._at, stop)

    def _go_on_plain(self, start: int, stop: int) -> None:
        part, lossless = self._out[start:stop], self._codec.lossless
        if not (lossless and self._opened):
            part.copy_(self._published[start:stop])
        for plain, payload in self._opened:
            plain.decode_into(payload, self._numel, part, start, None if lossless else Add())
        self._hasher.update(bytes_of(part))

    def digest(self) -> str:
        """Of all values, once they are there."""
        assert self._at == self._numel, (self._at, self._numel)
        return self._made.text() if self._made is not None else self._hasher.text()


AT_ONCE = 4 * RANGE_VALUES
RANGES_MAX = 16
"""For one word of what has come: whoever says it has more bytes to bring, and is not kept for long."""


class Arriving:
    """One payload and what comes of it, in ``out``, for who holds ``held``; see :func:`follow_into`.

    ``payload`` has its full length from the beginning on and is filled from its first byte.  A compressed one is of use
    only at its end.  One thread at a time.
    """

    def __init__(self, held: Tensor, payload: memoryview, codec: Codec, out: Tensor, like: str = "") -> None:
        self.held = held
        self.out = out
        self._payload = payload
        self._codec = codec
        self._like = like
        self._following: Following | None = None
        self._ranges: list[tuple[int, int]] = []
        """The bytes that have to be here, and the values that can then be made up to where; in reverse."""
        self._failed: DecodeError | None = None

    def come(self, count: int) -> None:
        """So many bytes, from the first one on, are here and will not change.  What is wrong is said at the end."""
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
        """All bytes are here: do what is left, and return the digest of ``out``.  ``DecodeError`` as ``follow_into``.

        Nothing of the payload is held any more.
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
