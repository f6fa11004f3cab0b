"""Versions of one fragment on their way in: the bytes, and the values that are made of them while they come."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from diloco.codec.arriving import Arriving
from diloco.codec.contract import DecodeError
from diloco.codec.feedback import follow_into
from diloco.codec.registry import make_codec
from diloco.wire.pulled import PullSink

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from diloco.codec.buffers import Buffers
    from diloco.codec.contract import Codec
    from diloco.outer.fragments import Layout
    from diloco.wire.messages import PullHeader
    from diloco.wire.pulled import PulledVersion


class Versions(Protocol):
    """The latest version of each fragment that is here, flat fp32 on the host, and memory for the next."""

    layout: Layout
    buffers: Buffers
    latest: list[tuple[int, Tensor] | None]


class Incoming:
    """What comes into ``sink``, and nowhere else, by one pull at a time."""

    def __init__(self, fragment: int, tensors: Versions) -> None:
        self.sink = PullSink(begun=self._begun, broken=self._broken)
        self._fragment = fragment
        self._tensors = tensors
        self._arriving: Arriving | None = None
        self._working = threading.Lock()

    def _begun(self, header: PullHeader, payload: memoryview) -> Callable[[int], None] | None:
        """A payload begins: made into values as it comes where it is one, and of what is known."""
        self._arriving, held = None, self._held(header)
        if held is None or len(header.part_bytes) != 1:
            return None
        try:
            codec = _codec(header)
        except ValueError:
            return None  # Said in its place.
        values = self._tensors.buffers.values(header.numel)
        arriving = self._arriving = Arriving(held, payload, codec, values, header.digest)

        def come(count: int) -> None:
            if self._working.acquire(blocking=False):  # Else another stream's thread is at it, and this one goes on.
                try:
                    arriving.come(count)
                finally:
                    self._working.release()

        return come

    def _broken(self) -> None:
        """Until the pull is resumed only what came is kept, and no values: those are then made at its end."""
        self._arriving = None

    def values(self, pulled: PulledVersion) -> Tensor | None:
        """The values that were pulled; None when these bytes do not give the ones whose digest was told."""
        arriving, self._arriving = self._arriving, None
        header, held = pulled.header, self._held(pulled.header)
        try:
            if arriving is not None and arriving.held is held:
                with self._working:
                    values, found = arriving.out, arriving.finish()
            elif header.numel == self._numel and (held is not None or header.whole):
                values = self._tensors.buffers.values(header.numel)
                before = held if held is not None else values
                found = follow_into(before, pulled.parts, _codec(header), values, header.digest)
            else:
                return None
        except DecodeError:
            return None
        return values if found == header.digest else None

    @property
    def _numel(self) -> int:
        return self._tensors.layout.fragments[self._fragment].numel

    def _held(self, header: PullHeader) -> Tensor | None:
        """The values that the payload of ``header`` is the difference to, if they are here."""
        latest = self._tensors.latest[self._fragment]
        fits = latest is not None and not header.whole and latest[0] == header.from_version
        return latest[1] if latest is not None and fits and header.numel == self._numel else None


def _codec(header: PullHeader) -> Codec:
    return make_codec("fp32" if header.whole else header.encoding)
