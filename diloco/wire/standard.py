"""The standard services, health and reflection, behind the same rules as our own.

Their stock handlers answer INTERNAL to bytes that do not parse, and ask nobody who they are.  The interceptor here
turns the first into INVALID_ARGUMENT and lets strangers call nothing but Check and List of the health service.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from diloco.wire.answers import abort, refusal_of
from diloco.wire.calls import ADMIN_SERVICE, SYNC_SERVICE
from diloco.wire.messages import MalformedMessage, Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from diloco.wire.gates import Counters
    from diloco.wire.security import Authenticator

_FOR_STRANGERS = ("/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/List")


class _Unparsed:
    """Stands for a message that could not be parsed, until the handler can say so."""


class StrictHandlers(grpc.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Wraps every handler that has a deserializer of its own; ours take raw bytes and need no help."""

    def __init__(self, authenticator: Authenticator, counters: Counters) -> None:
        self._authenticator = authenticator
        self._counters = counters

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        """gRPC's hook: the handler to use for a call."""
        handler = continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        method = handler_call_details.method
        wrap = {
            (False, False): (grpc.unary_unary_rpc_method_handler, handler.unary_unary, self._one),
            (False, True): (grpc.unary_stream_rpc_method_handler, handler.unary_stream, self._one),
            (True, True): (grpc.stream_stream_rpc_method_handler, handler.stream_stream, self._many),
        }
        make, behaviour, checked = wrap[handler.request_streaming, handler.response_streaming]
        return make(checked(method, behaviour), _parser(handler.request_deserializer), handler.response_serializer)

    def _one(self, method: str, behaviour: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def handler(request: Any, context: Any) -> Any:
            self._admit(method, context)
            self._check(method, request, context)
            return behaviour(request, context)

        return handler

    def _many(self, method: str, behaviour: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def parsed(requests: Iterator[Any], context: Any) -> Iterator[Any]:
            for request in requests:
                self._check(method, request, context)
                yield request

        def handler(requests: Iterator[Any], context: Any) -> Any:
            self._admit(method, context)
            return behaviour(parsed(requests, context), context)

        return handler

    def _admit(self, method: str, context: Any) -> None:
        if method in _FOR_STRANGERS:
            return
        try:
            self._authenticator.identify(context)
            return
        except Refusal as error:
            refusal = refusal_of(error, method, self._counters)
        abort(context, refusal)

    def _check(self, method: str, request: Any, context: Any) -> None:
        if isinstance(request, _Unparsed):
            abort(context, refusal_of(MalformedMessage("message cannot be parsed"), method, self._counters))


def _parser(deserializer: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parse(raw: bytes) -> Any:
        try:
            return deserializer(raw)
        except DecodeError:
            return _Unparsed()

    return parse


class StandardServices:
    """Health (of the server, of each service and of the run by its id) and reflection on ``server``."""

    def __init__(self, server: Any, run_id: str) -> None:
        self._names = ("", SYNC_SERVICE, ADMIN_SERVICE, run_id)
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        listed = (SYNC_SERVICE, ADMIN_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(listed, server)

    def serving(self) -> None:
        """Answer SERVING from now on."""
        for name in self._names:
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    def stopping(self) -> None:
        """Answer NOT_SERVING for good."""
        self._health.enter_graceful_shutdown()
