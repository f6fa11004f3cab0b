"""One push on its way in: bytes to the spool, checks, then the question to the machine.

Vital signs.  ``Measuring`` sums up a decoded update block by block, as the blocks come.  Sums are made in fp64: the
square of a value that fp32 holds may be one that it does not.

Inspection.  An update is looked at while it arrives: is it well formed, finite, what its site decoded, and how large.
What has come is read back from the disk by ranges and decoded, so that a commit has the last range left to look at, and
no update is ever whole in memory.  An update with an entropy stage has no ranges: once all of it is here, it is
unpacked on the disk and then looked at like the others.

Memory: for each of the ``checks`` that look at the same time the payload of one range, and on plain torch its values
and the sums' temporaries (``wire.options.CHECK_BYTES_MAX``), and what it takes to unpack a frame.
"""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import sqrt
from typing import TYPE_CHECKING

from diloco.codec.base import DecodeError, NonFinitePayload
from diloco.codec.buffers import Buffers
from diloco.codec.entropy import RAW
from diloco.codec.merging import Reading
from diloco.codec.registry import make_codec
from diloco.durable import is_full
from diloco.sync.agreement import PROTOCOL
from diloco.sync.effects import AnswerPush
from diloco.sync.events import Outcome, Reason, UpdateArrived
from diloco.syncer import publish
from diloco.syncer.core import NotHandedIn
from diloco.syncer.spool import Settled, opened, read_part
from diloco.wire.messages import PushResult, Refusal, Status

if TYPE_CHECKING:
    from collections.abc import Callable

    pass
    from pathlib import Path

    from torch import Tensor

    from diloco.codec.merging import Sums
    from diloco.syncer.core import Answer, Core
    from diloco.syncer.spool import PartialUpdate
    from diloco.syncer.status import Tally
    from diloco.syncer.store import Store
    from diloco.wire.messages import PushHeader

LARGEST = 2.0**100
"""Of any value of an update.  Finite ones beyond it could make a sum overflow, and the honest updates of that round
would be refused together with the one at fault; no training comes near."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """``norm`` is 0 and ``cosine`` None where the values are not ``finite``, that is, within ``LARGEST``."""

    finite: bool
    norm: float = 0.0
    cosine: float | None = None


class Measuring:
    """Takes the blocks of one update in order."""

    def __init__(self) -> None:
        self._finite = True
        self._squares = self._products = self._momentum_squares = 0.0

    def add(self, sums: Sums) -> None:
        """The next block has these ``sums``, against the same part of the momentum if there is one.

        An update may take longer on its way than a version: then its blocks are measured against the momentum as it was
        when they came, each against a later one, and the cosine is that to the vector made of those parts.
        """
        if not self._finite:
            return
        if sums.largest > LARGEST:
            self.not_finite()
            return
        self._squares += sums.squares
        self._products += sums.products
        self._momentum_squares += sums.against_squares

    def not_finite(self) -> None:
        """Of what is not finite nothing else is said."""
        self._finite = False

    def vitals(self) -> Vitals:
        """What was found in all blocks; where either vector is nothing there is no cosine."""
        if not self._finite:
            return Vitals(finite=False)
        lengths = sqrt(self._squares) * sqrt(self._momentum_squares)
        return Vitals(True, sqrt(self._squares), self._products / lengths if lengths > 0 else None)


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


HEARD_EVERY_S = 0.05
"""A push that moves is a sign of life so often: each wakes the decision loop, which knows that the site is there."""


class Reception:
    """Satisfies ``wire.service.PushSession``.  The ack it gives means: durable in spool and journal."""

    def __init__(
        self,
        core: Core,
        store: Store,
        header: PushHeader,
        tally: Tally,
        momentum: Callable[[int], Tensor | None],
        refused: Callable[[Reason], None] = lambda reason: None,
        protocol: int = PROTOCOL,
        epoch: int = 0,
        checks: AbstractContextManager[object] | None = None,
        buffers: Buffers | None = None,
        took: Callable[[str, float], None] = lambda reference, seconds: None,
    ) -> None:
        """``tally`` counts what comes in; ``momentum`` gives a fragment's own as it is now; ``refused`` is told why a
        whole update was not accepted; ``protocol`` is the site's, ``epoch`` ours; ``checks`` is entered while some of
        its values are in memory, and lets in as many as there is room for; ``buffers`` has the memory for these;
        ``took`` hears, of an update that is accepted, how long this process was busy with taking it in."""
        self._core = core
        self._store = store
        self._spool = store.spool
        self._header = header
        self._tally = tally
        self._refused = refused
        self._protocol = protocol
        self._epoch = epoch
        self._took = took
        self._busy_s = 0.0
        self._heard_s = -HEARD_EVERY_S
        try:
            self._partial = self._spool.open_partial(header)
        except OSError as error:
            raise _refusal(error) from error
        room = checks if checks is not None else nullcontext()
        self._inspection = Inspection(self._partial.path, header, momentum, room, tally.decoded, buffers)
        self._advance()  # Over what an earlier attempt has brought, once.

    @property
    def offset(self) -> int:
        """Bytes that an earlier attempt has brought already."""
        return self._partial.offset

    def write(self, offset: int, data: memoryview) -> None:
        """Keep the next bytes, and look at the values that are whole by them."""
        assert offset == self._partial.offset, (offset, self._partial.offset)
        began_s = time.perf_counter()
        try:
            self._partial.write(data)
        except OSError as error:
            raise self._no_room(error) from error
        self._advance()
        ended_s = time.perf_counter()
        self._busy_s += ended_s - began_s
        self._tally.received(self._header.site_id, len(data))
        if ended_s - self._heard_s >= HEARD_EVERY_S:
            self._heard_s = ended_s
            self._core.heard(self._header.site_id)

    def commit(self, digest: str) -> PushResult:
        """Look at the last of it, make it durable, and have the machine decide."""
        header = self._header
        began_s = time.perf_counter()
        found = self._looked_at(digest)
        if not (found.vitals.finite and found.intact):
            self._partial.discard()
            return self._told(self._decided("", found.vitals, intact=found.intact))
        try:
            reference = self._spool.keep(self._partial, header)
        except OSError as error:
            # Discarded, never tried again with the same pages: after a failed fsync they count as written.
            raise self._no_room(error) from error
        self._took(reference, self._busy_s + time.perf_counter() - began_s)
        try:
            result = self._decided(reference, found.vitals, intact=True)
        except NotHandedIn:
            self._spool.settle(reference, Settled.GIVEN_BACK, self._partial)
            raise
        self._settle(reference, result, self._partial)
        return self._told(result)

    def _told(self, result: PushResult) -> PushResult:
        return publish.push_result(replace(result, epoch=self._epoch), self._protocol)

    def _settle(self, reference: str, result: PushResult, partial: PartialUpdate | None = None) -> None:
        """Let the payload go, or keep it, as the answer has it; without ``partial`` nobody would go on with it."""
        if result.outcome is Outcome.RETRY:
            self._spool.settle(reference, Settled.GIVEN_BACK, partial)
        elif result.outcome is Outcome.REFUSED and result.reason is not Reason.FORGOTTEN:
            self._spool.settle(reference, Settled.DROPPED)  # It was never accepted by this name: nothing can need it.
        else:
            self._spool.settle(reference, Settled.KEPT)
            if result.fate is not None or result.outcome is Outcome.REFUSED:
                self._store.release(reference)  # Decided long ago: only a replay could still want it.

    def _decided(self, reference: str, vitals: Vitals, *, intact: bool) -> PushResult:
        header = self._header
        answer = self._core.call(
            lambda call: UpdateArrived(
                call,
                header.site_id,
                header.incarnation,
                header.fragment,
                header.sequence,
                header.base_version,
                header.tokens,
                header.steps,
                header.step_ns,
                header.cursor,
                header.digest,
                reference,
                header.encoding,
                vitals.finite,
                header.final,
                vitals.norm,
                vitals.cosine,
                intact,
                header.spans,
            ),
            late=lambda answer: self._settle(reference, _result(answer)) if reference else None,
        )
        result = _result(answer)
        if result.outcome is Outcome.REFUSED and result.reason is not None:
            self._refused(result.reason)
        return result

    def _looked_at(self, digest: str) -> Found:
        """What the values are, and whether they are those that the site has decoded itself."""
        header = self._header
        if digest != header.digest or self._partial.digest() != header.digest:
            self._partial.discard()
            raise Refusal(Status.DATA_LOSS, "digest of the payload is not the declared one; send it again")
        try:
            return self._inspection.finish()
        except OSError as error:
            raise self._no_room(error) from error
        except DecodeError as error:
            self._partial.discard()
            raise Refusal(Status.INVALID_ARGUMENT, f"payload is no {header.encoding}: {error}") from error

    def _advance(self) -> None:
        try:
            self._inspection.advance(self._partial.offset)
        except OSError as error:
            raise self._no_room(error) from error

    def _no_room(self, error: OSError) -> Refusal:
        self._partial.discard()
        return _refusal(error)

    def close(self) -> None:
        """The push is over; without a commit its bytes wait for another attempt."""
        self._inspection.close()
        try:
            self._partial.close()
        except OSError:
            self._partial.discard()  # What is in the file now is not what was counted.


def _result(answer: Answer) -> PushResult:
    assert isinstance(answer, AnswerPush), answer
    return PushResult(answer.outcome, answer.version, answer.reason, answer.fate)


def _refusal(error: OSError) -> Refusal:
    why = "disk full" if is_full(error) else "the update cannot be stored here now"
    return Refusal(Status.UNAVAILABLE, f"{why}: {error.strerror or error}")
