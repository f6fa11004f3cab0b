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
    opened = [codec.opened(payload, numel) for payload in payloads]
    fast, made = kernels(), kernel_digest(4 * numel, like)
    if fast is not None and made is not None and fast.fits(codec.plain.layout, granule=SUM_BLOCK):
        for each in (published, out):
            check_values(each)
            assert each.shape == (numel,), (each.shape, numel)
        parts = updates([Coded(plain, payload, numel) for plain, payload in opened])
        size = tile(SUM_BLOCK, codec.plain.granule)
        places = (published.data_ptr(), parts, len(opened), out.data_ptr(), made.address)
        refuse(fast.follow(FollowJob(0, numel, size, *places, codec.lossless)), codec.name, layout_of(codec.plain))
        return made.text()
    found = hasher(like)
    for start, stop in ranges(numel, [codec.plain]):
        part = out[start:stop]
        if not (codec.lossless and opened):
            part.copy_(published[start:stop])
        for plain, payload in opened:
            plain.decode_into(payload, numel, part, start, None if codec.lossless else Add())
        found.update(bytes_of(part))
    return found.text()
