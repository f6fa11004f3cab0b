"""The down-link: both ends hold the same published tensor, and what a codec rounds off goes out with the next version.

``published`` is what has been told so far.  The syncer sends the encoded difference to its own theta and adds what
that decodes to; every learner adds the same.  All hold the same bits, and the rounding error of one version is part of
the next difference, so it never adds up.  All tensors are flat fp32 of the fragment's size; results are new tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
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
