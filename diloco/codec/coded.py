"""Values held as a payload and decoded where they are needed: with four bits each, in an eighth of the memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco.codec.contract import Codec, bytes_of
from diloco.codec.registry import make_codec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Coded:
    """``numel`` values, by what ``codec``, which has no entropy stage, made of them; ``payload`` never changes."""

    codec: Codec
    payload: bytes | memoryview
    numel: int

    def values(self) -> Tensor:
        """New memory with all of them."""
        return self.codec.decode(self.payload, self.numel)


def values_of(held: Tensor | Coded) -> Tensor:
    """The values, decoded where they are not there as they are."""
    return held.values() if isinstance(held, Coded) else held


def coded(held: Tensor | Coded) -> Coded:
    """The same the other way round; flat fp32 on the CPU, finite, is a payload by itself."""
    return held if isinstance(held, Coded) else Coded(make_codec("fp32"), bytes_of(held), held.numel())
