"""How a call begins and ends at the server: its first message, its statuses, and the standard services.

Arrival.  The door is passed before a byte of the call is read, and its first message must come soon.  gRPC itself reads
the one message of a unary call in the handler's thread, before it asks the handler and without a bound: a few callers
that open calls and never send anything would hold every thread, known or not.  So every method is a stream of requests
to gRPC, which is the same on the wire, and its first message is read here.

Statuses.  Refusals and defects become statuses here and nowhere else.  A refusal changes nothing but a counter.
INTERNAL is always a defect of ours: it is logged with its traceback and counted.

Standard services.  Health and reflection obey the same rules as our own services.  Their stock handlers answer INTERNAL
to bytes that do not parse, ask no caller for an identity, hold a thread for each stream, and remember every name that
was ever asked for.  The interceptor here turns the first into INVALID_ARGUMENT, lets strangers call nothing but Check
and List of the health service, and bounds the rest.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from diloco.wire.channel import ADMIN_SERVICE, PUSHBACK_KEY, REASON_KEY, SYNC_SERVICE
from diloco.wire.chunks import ChunkError, DamagedChunk
from diloco.wire.door import Gate, WaitingRoom
from diloco.wire.messages import CONTROL_BYTES_MAX, TEXT_CHARS_MAX, MalformedMessage, Refusal, Status
from diloco.wire.options import STANDARD_STREAMS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    pass

    from diloco.wire.channel import StallWatch
    from diloco.wire.door import Counters, Door
    from diloco.wire.identity import Identity
    from diloco.wire.options import ServerOptions


class Arrivals:
    """The way in of all services of one server."""

    def __init__(self, door: Door, stalls: StallWatch, options: ServerOptions) -> None:
        self._door = door
        self._stalls = stalls
        self._header_timeout_s = options.header_timeout_s
        self._stall_s = options.stall_s
        self._silent = WaitingRoom(options.calls_max // 2)

    def enter(self, method: str, context: Any) -> AbstractContextManager[Identity]:
        """Be inside, as whom it is (``Door.enter``, which refuses in words)."""
        return self._door.enter(method, context)

    @contextmanager
    def waiting(self, identity: Identity | None, context: Any) -> Iterator[None]:
        """Inside, the first message of a call of ``identity`` (None: a stranger) is waited for."""
        with self._silent.enter(self.caller(identity, context), context.cancel):
            yield

    def first(
        self, requests: Iterator[bytes], context: Any, identity: Identity | None, *, large: bool = False
    ) -> bytes:
        """The one message of a call, of which a ``large`` one may take as long as a stream that stalls."""
        limit_s = self._stall_s if large else self._header_timeout_s
        with self.waiting(identity, context), self._stalls.guard(limit_s, context.cancel) as guard:
            try:
                raw = next(requests, None)
            except grpc.RpcError as error:
                forget(error)
                if not guard.stalled:
                    raise
        if guard.stalled:
            raise Refusal(Status.DEADLINE_EXCEEDED, f"no message came within {limit_s:g} s")
        if raw is None:
            raise MalformedMessage("the call ended before its message")
        return raw

    def caller(self, identity: Identity | None, context: Any) -> str:
        """By whom calls are counted (``Identity.caller``); a stranger by connection too."""
        return f"peer {context.peer()}" if identity is None else identity.caller(context)


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


_FOR_STRANGERS = ("/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/List")
_EACH_MAX = 2


class StrictHandlers(grpc.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Wraps every handler that has a deserializer of its own; ours take raw bytes and need no help."""

    def __init__(self, arrivals: Arrivals, stalls: StallWatch, counters: Counters, options: ServerOptions) -> None:
        self._arrivals = arrivals
        self._stalls = stalls
        self._stall_s = options.stall_s
        self._counters = counters
        self._names = service_names(options.run_id)
        self._streams = Gate("standard stream", STANDARD_STREAMS_MAX, _EACH_MAX, options.pushback_ms)

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        """gRPC's hook: the handler to use for a call."""
        handler = continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        method, parse = handler_call_details.method, _parser(handler.request_deserializer)
        if handler.request_streaming:
            work = self._talking(method, handler.stream_stream, parse)
        elif handler.response_streaming:
            work = self._telling(method, handler.unary_stream, parse)
        else:
            one = self._answering(method, handler.unary_unary, parse)
            return grpc.stream_unary_rpc_method_handler(one, None, handler.response_serializer)
        return grpc.stream_stream_rpc_method_handler(work, None, handler.response_serializer)

    def _let_in(self, method: str, context: Any) -> AbstractContextManager[Identity | None]:
        return nullcontext() if method in _FOR_STRANGERS else self._arrivals.enter(method, context)

    def _answering(self, method: str, behaviour: Any, parse: Callable[[bytes], Any]) -> Callable[[Any, Any], Any]:
        """One message each way."""

        def answer(requests: Iterator[bytes], context: Any) -> Any:
            with self._let_in(method, context) as identity:
                return behaviour(parse(self._arrivals.first(requests, context, identity)), context)

        return lambda requests, context: answered(lambda: answer(requests, context), context, method, self._counters)

    def _telling(self, method: str, behaviour: Any, parse: Callable[[bytes], Any]) -> Callable[[Any, Any], Any]:
        """One message there, many back: Watch of the health service."""

        def told(requests: Iterator[bytes], context: Any) -> Iterator[Any]:
            with self._let_in(method, context) as identity:
                request = parse(self._arrivals.first(requests, context, identity))
                if request.service not in self._names:
                    # Stock, it would be remembered for ever that somebody asked.
                    raise Refusal(Status.NOT_FOUND, "service is not one that is watched here")
                with self._streams.enter(self._arrivals.caller(identity, context)):
                    yield from behaviour(request, context)

        return lambda requests, context: streamed(told(requests, context), context, method, self._counters)

    def _talking(self, method: str, behaviour: Any, parse: Callable[[bytes], Any]) -> Callable[[Any, Any], Any]:
        """Many messages both ways: reflection."""

        def parsed(requests: Iterator[bytes], touch: Callable[[], object]) -> Iterator[Any]:
            for raw in requests:
                touch()
                yield parse(raw)

        def talked(requests: Iterator[bytes], context: Any) -> Iterator[Any]:
            with self._let_in(method, context) as identity:
                first = self._arrivals.first(requests, context, identity)
                with (
                    self._streams.enter(self._arrivals.caller(identity, context)),
                    self._stalls.guard(self._stall_s, context.cancel) as guard,
                ):
                    yield from behaviour(parsed(chain((first,), requests), guard.touch), context)

        return lambda requests, context: streamed(talked(requests, context), context, method, self._counters)


def _parser(deserializer: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parse(raw: bytes) -> Any:
        if len(raw) > CONTROL_BYTES_MAX:
            raise MalformedMessage(f"message is {len(raw)} bytes long: at most {CONTROL_BYTES_MAX} wanted")
        try:
            return deserializer(raw)
        except DecodeError as error:
            raise MalformedMessage("message cannot be parsed") from error

    return parse


def service_names(run_id: str) -> tuple[str, ...]:
    """Of what the health service tells: the server, each service, and the run by its id."""
    return "", SYNC_SERVICE, ADMIN_SERVICE, run_id


class _Health(health.HealthServicer):  # type: ignore[misc]  # grpc_health has no types
    """With List, which the stock one leaves out."""

    def List(self, request: Any, context: Any) -> Any:  # noqa: N802 — gRPC's name
        """Every name with its status."""
        del request, context
        with self._lock:
            statuses = dict(self._server_status)
        answers = {name: health_pb2.HealthCheckResponse(status=status) for name, status in statuses.items()}
        return health_pb2.HealthListResponse(statuses=answers)


class StandardServices:
    """Health (of the server, of each service and of the run by its id) and reflection on ``server``."""

    def __init__(self, server: Any, run_id: str) -> None:
        self._run_id = run_id
        self._health = _Health()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        listed = (SYNC_SERVICE, ADMIN_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(listed, server)

    def serving(self, ready: bool = True) -> None:
        """Answer SERVING from now on; when not ``ready``, NOT_SERVING for the run and what it is exchanged by.

        The server itself and its admin service are alive all the same: no process is to be ended for what it waits for.
        """
        response = health_pb2.HealthCheckResponse
        for name in service_names(self._run_id):
            serves = ready or name in ("", ADMIN_SERVICE)
            self._health.set(name, response.SERVING if serves else response.NOT_SERVING)

    def stopping(self) -> None:
        """Answer NOT_SERVING for good."""
        self._health.enter_graceful_shutdown()
