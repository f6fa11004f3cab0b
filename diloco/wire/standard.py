"""The standard services, health and reflection, behind the same rules as our own.

Their stock handlers answer INTERNAL to bytes that do not parse, ask nobody who they are, hold a thread for each stream,
and remember every name that was ever asked for.  The interceptor here turns the first into INVALID_ARGUMENT, lets
strangers call nothing but Check and List of the health service, and bounds the rest.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from diloco.wire.answers import answered, streamed
from diloco.wire.calls import ADMIN_SERVICE, SYNC_SERVICE
from diloco.wire.gates import Gate
from diloco.wire.messages import CONTROL_BYTES_MAX, MalformedMessage, Refusal, Status
from diloco.wire.options import STANDARD_STREAMS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from diloco.wire.arrivals import Arrivals
    from diloco.wire.gates import Counters
    from diloco.wire.identity import Identity
    from diloco.wire.options import ServerOptions
    from diloco.wire.stall import StallWatch

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
