"""One incoming push: bytes to the spool, checks, then the decision by the machine.

Vital signs. ``Measuring`` sums up a decoded update block by block, as the blocks come. Sums are in fp64, because the
square of an fp32 value may not fit fp32.

Inspection. An update is checked while it arrives: is it well formed, finite, and what its site decoded, and how large
is it. The received bytes are read back from the disk by ranges and decoded, so that only the last range is left for the
commit, and no update is ever whole in memory. An update with an entropy stage has no ranges: once all of it is here, it
is unpacked on the disk and then checked like the others.

Memory: for each of the concurrent ``checks`` the payload of one range, on plain torch also its values and the sums'
temporaries (``wire.options.CHECK_BYTES_MAX``), and the memory to unpack a frame.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, fields, replace
from math import sqrt
from typing import TYPE_CHECKING

from diloco.codec.base import DecodeError, NonFinitePayload
from diloco.codec.entropy import RAW
from diloco.codec.merging import Reading
from diloco.codec.registry import make_codec
from diloco.durable import is_full
from diloco.sync.effects import AnswerPush
from diloco.sync.events import Outcome, Reason, UpdateArrived
from diloco.syncer.core import NotHandedIn
from diloco.syncer.publish import as_known
from diloco.syncer.spool import Settled, opened, read_part
from diloco.wire.messages import PushHeader, PushResult, Refusal, Status

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import Tensor

    from diloco.codec.base import Buffers
    from diloco.codec.merging import Sums
    from diloco.syncer.core import Answer, Core
    from diloco.syncer.publish import Holdings
    from diloco.syncer.spool import PartialUpdate
    from diloco.syncer.status import Tally

LARGEST = 2.0**100
"""The largest magnitude of an update's values. Larger finite ones could make a sum overflow, and then the honest
updates of that round would be refused together with the faulty one; no training comes near."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """Measurements of an update; ``intact``: its values are those that the site has decoded itself.

    ``norm`` is 0 and ``cosine`` None unless the update is ``finite``, which means within ``LARGEST``.
    """

    finite: bool
    norm: float = 0.0
    cosine: float | None = None
    intact: bool = True


class Measuring:
    """Accumulates the blocks of one update, in order."""

    def __init__(self) -> None:
        self.finite = True
        """False once a value is not finite or exceeds ``LARGEST``; nothing else is reported of the update then."""
        self._squares = self._products = self._momentum_squares = 0.0

    def add(self, sums: Sums) -> None:
        """Add the next block's ``sums``, taken against the same part of the momentum if there is one.

        An update may take longer to arrive than a version to be made. Then each block is measured against the momentum
        at its arrival, and the cosine is that to the vector of those parts.
        """
        if not self.finite:
            return
        if sums.largest > LARGEST:
            self.finite = False
            return
        self._squares += sums.squares
        self._products += sums.products
        self._momentum_squares += sums.against_squares

    def vitals(self) -> Vitals:
        """Return the measurements of all blocks; ``cosine`` is None if either vector is zero."""
        if not self.finite:
            return Vitals(finite=False)
        lengths = sqrt(self._squares) * sqrt(self._momentum_squares)
        return Vitals(True, sqrt(self._squares), self._products / lengths if lengths > 0 else None)


class Inspection:
    """Checks the update that is being written to ``path``. Not thread-safe."""

    def __init__(
        self,
        path: Path,
        header: PushHeader,
        momentum: Callable[[], Tensor | None],
        checks: AbstractContextManager[object],
        begins: Callable[[], None],
        buffers: Buffers,
    ) -> None:
        """``momentum`` returns the fragment's present momentum; ``checks`` is entered while values are in memory;
        ``begins`` is called before a codec reads the first byte; ``buffers`` has memory for a range's payload."""
        self._path = path
        self._header = header
        self._momentum = momentum
        self._checks = checks
        self._begins = begins
        self._buffers = buffers
        self._codec = make_codec(header.encoding)
        self._reading = Reading(self._codec.plain, header.numel, header.values_digest)
        self._ranges = iter(self._reading.ranges())
        self._next = next(self._ranges, None)
        self._begin: int | None = 0 if self._codec.plain is self._codec else None
        """The offset of the plain codec's payload; None: unknown, or the payload is packed."""
        self._measuring = Measuring()
        self._has_digest = bool(header.values_digest)
        self._malformed: DecodeError | None = None
        self._file: int | None = None

    def advance(self, here_bytes: int) -> None:
        """Check the ranges that are complete in the first ``here_bytes`` of the payload, which are on the disk."""
        if self._ready(here_bytes) is None:
            return
        with self._checks:
            while (bounds := self._ready(here_bytes)) is not None:
                assert self._file is not None
                assert self._begin is not None
                count = bounds[1] - bounds[0]
                part = read_part(self._file, self._codec.plain, self._header.numel, *bounds, self._begin, self._buffers)
                self._look(part, count, 0, bounds)

    def finish(self) -> Vitals:
        """Check the rest of the complete payload; raise ``DecodeError`` unless it is what the codec makes."""
        header = self._header
        self.advance(header.payload_bytes)
        if self._next is not None and self._malformed is None:  # A frame of the entropy stage has no ranges.
            with self._checks:
                _, mapped = opened(self._path, self._codec, header.numel)
                while (bounds := self._next) is not None and self._malformed is None:
                    self._look(mapped.payload, header.numel, bounds[0], bounds)
                    mapped.let_go()
        if self._malformed is not None:
            raise self._malformed
        intact = not self._has_digest or self._reading.digest() == header.values_digest
        return replace(self._measuring.vitals(), intact=intact)

    def close(self) -> None:
        """End the inspection and close its file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _ready(self, here_bytes: int) -> tuple[int, int] | None:
        """Return the next range, if all its bytes are on the disk."""
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
        sections = self._codec.plain.sections(self._header.numel, *self._next)
        return self._next if self._begin + max(map(sum, sections)) <= here_bytes else None

    def _look(self, payload: memoryview, numel: int, start: int, bounds: tuple[int, int]) -> None:
        """Check the values of ``bounds``, which begin at ``start`` of a ``payload`` of ``numel``."""
        momentum = self._momentum()
        against = momentum[slice(*bounds)] if momentum is not None else None
        try:
            sums = self._reading.read(payload, numel, start, bounds[1] - bounds[0], against)
        except NonFinitePayload:  # The rest may still be malformed.
            self._measuring.finite = False
            self._has_digest = False
        except DecodeError as error:
            self._malformed = error
            return
        else:
            self._measuring.add(sums)
        self._next = next(self._ranges, None)


HEARD_EVERY_S = 0.05
"""Seconds between signs of life from an active push: each wakes the decision loop."""


DECLARED = tuple({each.name for each in fields(UpdateArrived)} & {each.name for each in fields(PushHeader)})
"""The fields that a site declares of an update and the machine gets, under the same names."""


class Reception:
    """Satisfies ``wire.handlers.PushSession``.  The ack it gives means: durable in spool and journal."""

    def __init__(
        self,
        core: Core,
        holdings: Holdings,
        header: PushHeader,
        tally: Tally,
        emit: Callable[[str, dict[str, object]], None],
        protocol: int,
        epoch: int,
        checks: AbstractContextManager[object],
        buffers: Buffers,
    ) -> None:
        """``holdings`` have the momentum to measure against; ``protocol`` is the site's, ``epoch`` the syncer's;
        ``checks`` is entered while some values are in memory, and admits as many as there is space for; ``buffers`` has
        their memory."""
        self._core, self._spool, self._header, self._tally, self._emit = core, core.store.spool, header, tally, emit
        self._protocol, self._epoch = protocol, epoch
        self._busy_s = 0.0
        self._heard_s = -HEARD_EVERY_S
        try:
            self._partial = self._spool.open_partial(header)
        except OSError as error:
            raise _refusal(error) from error
        self._inspection = Inspection(
            self._partial.path,
            header,
            lambda: holdings.values[header.fragment].optimizer.momentum,
            checks,
            tally.decoded,
            buffers,
        )
        self._advance()  # Check once what an earlier attempt has brought.

    @property
    def offset(self) -> int:
        """Bytes that an earlier attempt has brought already."""
        return self._partial.offset

    def write(self, offset: int, data: memoryview) -> None:
        """Store the next bytes, and check the values that they complete."""
        assert offset == self._partial.offset, (offset, self._partial.offset)
        began_s = time.perf_counter()
        try:
            self._partial.write(data)
        except OSError as error:
            raise self._no_room(error) from error
        self._advance()
        ended_s = time.perf_counter()
        self._busy_s += ended_s - began_s
        self._tally.count(self._header.site_id, payload_bytes_up=len(data))
        if ended_s - self._heard_s >= HEARD_EVERY_S:
            self._heard_s = ended_s
            self._core.heard(self._header.site_id)

    def commit(self, digest: str) -> PushResult:
        """Check the rest, make the update durable, and let the machine decide."""
        header = self._header
        began_s = time.perf_counter()
        if digest != header.digest or self._partial.digest() != header.digest:
            self._partial.discard()
            raise Refusal(Status.DATA_LOSS, "digest of the payload is not the declared one; send it again")
        try:
            found = self._inspection.finish()
        except OSError as error:
            raise self._no_room(error) from error
        except DecodeError as error:
            self._partial.discard()
            raise Refusal(Status.INVALID_ARGUMENT, f"payload is no {header.encoding}: {error}") from error
        if not (found.finite and found.intact):
            self._partial.discard()
            return self._told(self._decided("", found))
        try:
            reference = self._spool.keep(self._partial)
        except OSError as error:
            # Discarded, never retried with the same pages: after a failed fsync they count as written.
            raise self._no_room(error) from error
        self._tally.costs.received(reference, self._busy_s + time.perf_counter() - began_s)
        try:
            answer = self._decided(reference, found)
        except NotHandedIn:
            self._spool.settle(reference, Settled.GIVEN_BACK, self._partial)
            raise
        self._settle(reference, answer, self._partial)
        return self._told(answer)

    def _told(self, answer: AnswerPush) -> PushResult:
        result = PushResult(answer.outcome, answer.version, answer.reason, answer.fate, epoch=self._epoch)
        return as_known(result, self._protocol)

    def _settle(self, reference: str, answer: Answer, partial: PartialUpdate | None = None) -> None:
        """Release or keep the payload, as the answer requires; without ``partial`` no attempt can resume it."""
        assert isinstance(answer, AnswerPush), answer
        if answer.outcome is Outcome.RETRY:
            self._spool.settle(reference, Settled.GIVEN_BACK, partial)
        elif answer.outcome is Outcome.REFUSED and answer.reason is not Reason.FORGOTTEN:
            self._spool.settle(reference, Settled.DROPPED)  # Never accepted by this name: nothing can need it.
        else:
            self._spool.settle(reference, Settled.KEPT)
            if answer.fate is not None or answer.outcome is Outcome.REFUSED:
                self._core.store.release(reference)  # Decided long ago: only a replay could still need it.

    def _decided(self, reference: str, vitals: Vitals) -> AnswerPush:
        header = self._header
        answer = self._core.call(
            lambda call: UpdateArrived(
                call,
                header.site_id,
                **{name: getattr(header, name) for name in DECLARED},
                payload=reference,
                **asdict(vitals),
            ),
            late=lambda answer: self._settle(reference, answer) if reference else None,
        )
        assert isinstance(answer, AnswerPush), answer
        if answer.outcome is Outcome.REFUSED and answer.reason is not None:
            self._tally.refused(answer.reason.value)
        if answer.reason is Reason.CORRUPT:
            self._tally.count(header.site_id, updates_corrupt=1)
            why = f"update {header.sequence} of fragment {header.fragment} decodes to other values here than there"
            self._emit("note", {"note": "update_corrupt", "why": why, "site": header.site_id})
        return answer

    def _advance(self) -> None:
        try:
            self._inspection.advance(self._partial.offset)
        except OSError as error:
            raise self._no_room(error) from error

    def _no_room(self, error: OSError) -> Refusal:
        self._partial.discard()
        return _refusal(error)

    def close(self) -> None:
        """End the push; without a commit its bytes stay for another attempt."""
        self._inspection.close()
        try:
            self._partial.close()
        except OSError:
            self._partial.discard()  # The file's content is not what was counted.


def _refusal(error: OSError) -> Refusal:
    why = "disk full" if is_full(error) else "the update cannot be stored here now"
    return Refusal(Status.UNAVAILABLE, f"{why}: {error.strerror or error}")
