"""One push on its way in: bytes to the spool, checks, then the question to the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diloco.codec.contract import DecodeError
from diloco.codec.registry import make_codec
from diloco.sync.effects import AnswerPush
from diloco.sync.events import Outcome, UpdateArrived
from diloco.wire.messages import PushResult, Refusal, Status

if TYPE_CHECKING:
    from diloco.syncer.core import Core
    from diloco.syncer.spool import Spool
    from diloco.wire.messages import PushHeader


class Reception:
    """Satisfies ``wire.service.PushSession``.  The ack it gives means: durable in spool and journal."""

    def __init__(self, core: Core, spool: Spool, header: PushHeader) -> None:
        self._core = core
        self._spool = spool
        self._header = header
        self._partial = spool.open_partial(header)

    @property
    def offset(self) -> int:
        """Bytes that an earlier attempt has brought already."""
        return self._partial.offset

    def write(self, offset: int, data: memoryview) -> None:
        """Keep the next bytes."""
        assert offset == self._partial.offset, (offset, self._partial.offset)
        self._partial.write(data)
        self._core.heard(self._header.site_id)

    def commit(self, digest: str) -> PushResult:
        """Check the whole update, make it durable, and have the machine decide."""
        header = self._header
        if digest != header.digest or self._partial.digest() != header.digest:
            self._partial.discard()
            raise Refusal(Status.DATA_LOSS, "digest of the payload is not the declared one; send it again")
        finite = self._is_finite(self._partial.read())
        reference = self._spool.keep(self._partial, header)
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
                finite,
                header.final,
            )
        )
        assert isinstance(answer, AnswerPush), answer
        if answer.outcome is Outcome.RETRY:
            self._spool.give_back(reference, self._partial)
        elif answer.outcome is Outcome.REFUSED:
            self._spool.drop(reference)
        return PushResult(answer.outcome, answer.version, answer.reason, answer.fate)

    def _is_finite(self, payload: bytes) -> bool:
        header = self._header
        try:
            values = make_codec(header.encoding).decode(payload, header.numel)
        except DecodeError as error:
            self._partial.discard()
            raise Refusal(Status.INVALID_ARGUMENT, f"payload is no {header.encoding}: {error}") from error
        return bool(torch.isfinite(values).all())

    def close(self) -> None:
        """The push is over; without a commit its bytes wait for another attempt."""
        self._partial.close()
