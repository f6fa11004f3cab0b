"""The down-link: both ends hold the same published tensor, and what a codec rounds off goes out with the next version.

``published`` is what has been told so far.  The syncer sends the encoded difference to its own theta and adds what
that decodes to; every learner adds the same.  All hold the same bits, and the rounding error of one version is part of
the next difference, so it never adds up.  All tensors are flat fp32 of the fragment's size; results are new tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diloco.codec.coded import Coded
from diloco.codec.contract import Add, bytes_of, check_values
from diloco.codec.digests import hasher
from diloco.codec.fused import layout_of, ranges
from diloco.codec.kernel_digest import kernel_digest
from diloco.codec.native import kernels, refuse, tile
from diloco.codec.pieces import updates
from diloco.codec.structures import SUM_BLOCK, FollowJob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from diloco.codec.contract import Codec


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
