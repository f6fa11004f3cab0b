"""How a call ends: refusals and defects become statuses here and nowhere else.

A refusal changes nothing but a counter.  INTERNAL is always a defect of ours: it is logged with its traceback and
counted.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from diloco.wire.calls import PUSHBACK_KEY, REASON_KEY
from diloco.wire.chunks import ChunkError, DamagedChunk
from diloco.wire.messages import TEXT_CHARS_MAX, MalformedMessage, Refusal, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from diloco.wire.arrivals import Arrivals
    from diloco.wire.gates import Counters, Gate
    from diloco.wire.identity import Identity

T = TypeVar("T")
_log = logging.getLogger(__name__)


def refusal_of(error: Exception, method: str, counters: Counters) -> Refusal:
    """What ``error`` means to the caller; a defect is logged and counted as ``internal``.

    The error itself is let go of.
    """
    try:
        return _refusal_of(error, method, counters)
    finally:
        forget(error)


def forget(error: BaseException) -> None:
    """Let go of where ``error`` comes from.

    Its traceback holds every frame of the call and they hold it, so that the call would live until somebody collects
    garbage; and as long as it lives, gRPC counts it among the few streams that a connection may have.
    """
    held: BaseException | None = error
    while held is not None:
        held.__traceback__ = None
        held = held.__cause__ or held.__context__


def _refusal_of(error: Exception, method: str, counters: Counters) -> Refusal:
    match error:
        case Refusal():
            refusal = Refusal(error.status, error.text, error.retry_ms, reason=error.reason)
        case DamagedChunk():
            refusal = Refusal(Status.DATA_LOSS, str(error))
        case MalformedMessage() | ChunkError():
            refusal = Refusal(Status.INVALID_ARGUMENT, str(error))
        case _:
            _log.exception("%s failed by a defect", method, exc_info=error)
            counters.add("internal")
            return Refusal(Status.INTERNAL, "the syncer hit a defect of its own; its log says which")
    counters.add(f"refused_{refusal.status.value.lower()}")
    return refusal


def abort(context: Any, refusal: Refusal) -> None:
    """End the call; raises gRPC's own exception, always."""
    beside = [(PUSHBACK_KEY, str(refusal.retry_ms))] if refusal.retry_ms is not None else []
    beside += [(REASON_KEY, refusal.reason.value)] if refusal.reason is not None else []
    if beside:
        context.set_trailing_metadata(tuple(beside))
    text = " ".join(refusal.text.split())[:TEXT_CHARS_MAX]
    context.abort(grpc.StatusCode[refusal.status.name], text)


def unary(
    arrivals: Arrivals,
    counters: Counters,
    method: str,
    work: Callable[[bytes, Identity], bytes],
    *,
    large: bool = False,
    gate: Gate | None = None,
) -> Callable[[Iterator[bytes], Any], bytes]:
    """What gRPC calls for a method that has one message each way, of which ``work`` makes the answer.

    A ``gate`` bounds how many are worked on at once, in all and for each caller.
    """

    def answer(requests: Iterator[bytes], context: Any) -> bytes:
        with arrivals.enter(method, context) as identity:
            raw = arrivals.first(requests, context, identity, large=large)
            with gate.enter(arrivals.caller(identity, context)) if gate is not None else nullcontext():
                return work(raw, identity)

    return lambda requests, context: answered(lambda: answer(requests, context), context, method, counters)


def answered(work: Callable[[], T], context: Any, method: str, counters: Counters) -> T:
    """The answer of a call that has one message each way.  A client that went away is told nothing."""
    try:
        return work()
    except grpc.RpcError as error:
        counters.add("broken_off")
        forget(error)
        refusal = Refusal(Status.CANCELLED, "the call is over")
    except Exception as error:
        refusal = refusal_of(error, method, counters)
    abort(context, refusal)
    raise AssertionError("abort returned")


def streamed(messages: Iterator[T], context: Any, method: str, counters: Counters) -> Iterator[T]:
    """The answers of a stream.  A client that went away ends it silently: there is nobody to be told."""
    try:
        yield from messages
        return
    except grpc.RpcError as error:
        counters.add("broken_off")
        forget(error)
        return
    except Exception as error:
        refusal = refusal_of(error, method, counters)
    abort(context, refusal)
