"""A down-link that is followed while it comes: what is here of it is decoded, added and hashed, and the rest later.

On a far link the last byte of a version is then nearly all that is left to do, and not a pass over the whole fragment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.codec.contract import DecodeError
from diloco.codec.entropy import stage_of
from diloco.codec.feedback import Following
from diloco.codec.fused import RANGE_VALUES, ranges

if TYPE_CHECKING:
    from torch import Tensor

    from diloco.codec.contract import Codec

AT_ONCE = 4 * RANGE_VALUES
RANGES_MAX = 16
"""For one word of what has come: whoever says it has more bytes to bring, and is not kept for long."""


class Arriving:
    """One payload and what comes of it, in ``out``, for who holds ``held``; see :func:`feedback.follow_into`.

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
