"""One push on its way in: bytes to the spool, checks, then the question to the machine."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from diloco.codec.contract import DecodeError
from diloco.durable import is_full
from diloco.sync.agreement import PROTOCOL
from diloco.sync.effects import AnswerPush
from diloco.sync.events import Outcome, Reason, UpdateArrived
from diloco.syncer import protocols
from diloco.syncer.core import NotHandedIn
from diloco.syncer.inspecting import Found, Inspection
from diloco.syncer.spool import Settled
from diloco.wire.messages import PushResult, Refusal, Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from diloco.codec.buffers import Buffers
    from diloco.syncer.core import Answer, Core
    from diloco.syncer.spool import PartialUpdate
    from diloco.syncer.store import Store
    from diloco.syncer.tally import Tally
    from diloco.syncer.vitals import Vitals
    from diloco.wire.messages import PushHeader


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
        return protocols.push_result(replace(result, epoch=self._epoch), self._protocol)

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
