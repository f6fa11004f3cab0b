"""An update looked at while it arrives: is it well formed, finite, what its site decoded, and how large.

What has come is read back from the disk by ranges and decoded, so that a commit has the last range left to look at, and
no update is ever whole in memory.  One with an entropy stage has no ranges: once all of it is here, it is unpacked on
the disk and then looked at like the others.

Memory: for each of the ``checks`` that look at the same time the payload of one range, and on plain torch its values
and the sums' temporaries (``wire.options.CHECK_BYTES_MAX``), and what it takes to unpack a frame.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco.codec.buffers import Buffers
from diloco.codec.contract import DecodeError, NonFinitePayload
from diloco.codec.entropy import RAW
from diloco.codec.reading import Reading
from diloco.codec.registry import make_codec
from diloco.syncer.payloads import opened, read_part
from diloco.syncer.vitals import Measuring, Vitals

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import Tensor

    from diloco.wire.messages import PushHeader


@dataclass(frozen=True, slots=True)
class Found:
    """What there is to say of a whole update; ``intact``: its values are those that the site has decoded itself."""

    vitals: Vitals
    intact: bool


class Inspection:
    """Of the update that is being written to ``path``.  Not for several threads."""

    def __init__(
        self,
        path: Path,
        header: PushHeader,
        momentum: Callable[[int], Tensor | None],
        checks: AbstractContextManager[object],
        begins: Callable[[], None],
        buffers: Buffers | None = None,
    ) -> None:
        """``momentum`` gives the fragment's own as it is now; ``checks`` is entered while values are in memory;
        ``begins`` is told before a codec reads the first byte; ``buffers`` has memory for a range's payload."""
        self._path = path
        self._header = header
        self._momentum = momentum
        self._checks = checks
        self._begins = begins
        self._buffers = buffers if buffers is not None else Buffers(1)
        self._codec = make_codec(header.encoding)
        self._reading = Reading(self._codec.plain, header.numel, header.values_digest)
        self._ranges = iter(self._reading.ranges())
        self._next = next(self._ranges, None)
        self._begin: int | None = 0 if self._codec.plain is self._codec else None
        """Where the payload of the plain codec begins; None: that is not known, or it lies nowhere as it is."""
        self._measuring = Measuring()
        self._has_digest = bool(header.values_digest)
        self._malformed: DecodeError | None = None
        self._file: int | None = None

    def advance(self, here_bytes: int) -> None:
        """So much of the payload is on the disk: look at the ranges that are whole by now."""
        if self._ready(here_bytes) is None:
            return
        with self._checks:
            while (bounds := self._ready(here_bytes)) is not None:
                assert self._file is not None
                assert self._begin is not None
                count = bounds[1] - bounds[0]
                part = read_part(self._file, self._codec.plain, self._header.numel, *bounds, self._begin, self._buffers)
                self._look(part, count, 0, bounds)

    def finish(self) -> Found:
        """All is here: ``DecodeError`` unless it is what the codec makes."""
        header = self._header
        self.advance(header.payload_bytes)
        if self._next is not None and self._malformed is None:
            with self._checks:
                self._finish_whole()
        if self._malformed is not None:
            raise self._malformed
        found = self._measuring.vitals()
        return Found(found, not self._has_digest or self._reading.digest() == header.values_digest)

    def close(self) -> None:
        """Nothing more will be looked at."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _ready(self, here_bytes: int) -> tuple[int, int] | None:
        """The next range, if all its bytes are on the disk."""
        if self._next is None or self._malformed is not None or not here_bytes:
            return None
        if self._file is None:
            self._file = os.open(self._path, os.O_RDONLY)
            self._begins()
        if self._begin is None:
            staged = self._header.payload_bytes - len(RAW) == self._codec.payload_bytes(self._header.numel)
            if not staged or os.pread(self._file, len(RAW), 0) != RAW:
                return None
            self._begin = len(RAW)
        sections = self._codec.sections(self._header.numel, *self._next)
        return self._next if self._begin + max(map(sum, sections)) <= here_bytes else None

    def _finish_whole(self) -> None:
        """A frame of the entropy stage, or nothing that could be one."""
        header = self._header
        try:
            _, mapped = opened(self._path, self._codec, header.numel)
        except DecodeError as error:
            self._malformed = error
            return
        while (bounds := self._next) is not None and self._malformed is None:
            self._look(mapped.payload, header.numel, bounds[0], bounds)
            mapped.let_go()

    def _look(self, payload: memoryview, numel: int, start: int, bounds: tuple[int, int]) -> None:
        """Read the values of ``bounds``, which begin at ``start`` of a ``payload`` of ``numel``."""
        momentum = self._momentum(self._header.fragment)
        against = momentum[slice(*bounds)] if momentum is not None else None
        try:
            sums = self._reading.read(payload, numel, start, bounds[1] - bounds[0], against)
        except NonFinitePayload:  # What comes behind it may still be no payload at all.
            self._measuring.not_finite()
            self._has_digest = False
        except DecodeError as error:
            self._malformed = error
            return
        else:
            self._measuring.add(sums)
        self._next = next(self._ranges, None)
