"""Puts a syncer's shell on the network: the gRPC server, and the files that control access.

``RunningServer`` listens, and reloads those files while the syncer runs.

Standard services.  Health and reflection obey the same rules as our own services.  Their stock handlers answer INTERNAL
to bytes that do not parse, do not authenticate callers, hold a thread for each stream, and remember every name ever
requested.  Here they are behind the ``Door`` like our own: unauthenticated callers may call only Check and List of the
health service, and the number of streams is bounded.
"""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from diloco.wire.channel import ADMIN_SERVICE, SYNC_SERVICE, Guard
from diloco.wire.convert import parse
from diloco.wire.door import Call, Door, Gate, places
from diloco.wire.handlers import SyncHandlers, admin_handler, follow_handler
from diloco.wire.identity import Authenticator
from diloco.wire.messages import CONTROL_BYTES_MAX, Refusal, Status
from diloco.wire.options import STANDARD_STREAMS_MAX, SecurityOptions, Watched, check_bind, serving_credentials

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from diloco.wire.handlers import Follow, SyncerApi
    from diloco.wire.options import ServerOptions

_LOOK_S = 0.5
_EACH_MAX = 2
"""Streams of the standard services that one caller may have open."""


class _Health(health.HealthServicer):  # type: ignore[misc]  # grpc_health has no types
    """The stock health service, with access to all statuses."""

    def statuses(self) -> dict[str, Any]:
        """Return the status of every name: of the server (""), of each service, and of the run by its id."""
        with self._lock:
            return dict(self._server_status)


def _standard_services(healthy: _Health, door: Door) -> list[Any]:
    """Return the handlers of health and reflection, behind ``door``, in the form that gRPC's server takes."""
    reflecting = reflection.ReflectionServicer(
        (SYNC_SERVICE, ADMIN_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    )
    streams = Gate("standard stream", STANDARD_STREAMS_MAX, _EACH_MAX, door.options.pushback_ms)
    parsed = partial(parse, bytes_max=CONTROL_BYTES_MAX)

    def check(raw: bytes, call: Call) -> bytes:
        del call
        status = healthy.statuses().get(parsed(health_pb2.HealthCheckRequest, raw).service)
        if status is None:
            raise Refusal(Status.NOT_FOUND, "service is not known here")
        return bytes(health_pb2.HealthCheckResponse(status=status).SerializeToString())

    def list_all(raw: bytes, call: Call) -> bytes:
        del call
        parsed(health_pb2.HealthListRequest, raw)
        answers = {name: health_pb2.HealthCheckResponse(status=status) for name, status in healthy.statuses().items()}
        return bytes(health_pb2.HealthListResponse(statuses=answers).SerializeToString())

    def watch(call: Call) -> Iterator[bytes]:
        request = parsed(health_pb2.HealthCheckRequest, door.first(call))
        if request.service not in healthy.statuses():
            # The stock handler would remember the requested name for ever.
            raise Refusal(Status.NOT_FOUND, "service is not known here")
        with streams.enter(call.caller):
            for answer in healthy.Watch(request, call.context):
                yield answer.SerializeToString()

    def reflect(call: Call) -> Iterator[bytes]:
        first = door.first(call)
        with streams.enter(call.caller), Guard(door.stalls, door.options.stall_s, call.context.cancel) as guard:

            def asked() -> Iterator[Any]:
                for raw in chain((first,), call.requests):
                    guard.touch()
                    yield parsed(reflection_pb2.ServerReflectionRequest, raw)

            for answer in reflecting.ServerReflectionInfo(asked(), call.context):
                yield answer.SerializeToString()

    path = f"/{health.SERVICE_NAME}/"
    checks = {
        "Check": door.unary(f"{path}Check", check),
        "List": door.unary(f"{path}List", list_all),
        "Watch": door.handler(f"{path}Watch", watch),
    }
    info = door.handler(f"/{reflection.SERVICE_NAME}/ServerReflectionInfo", reflect)
    return [
        grpc.method_handlers_generic_handler(health.SERVICE_NAME, checks),
        grpc.method_handlers_generic_handler(reflection.SERVICE_NAME, {"ServerReflectionInfo": info}),
    ]


class RunningServer:
    """A listening syncer.  ``address`` is ``host:port`` with the port that the system chose.

    One thread reloads the access-control files: a change takes effect, for new calls and for those under way, within a
    second.  Another one watches the connections.
    """

    def __init__(
        self,
        api: SyncerApi,
        options: ServerOptions,
        security: SecurityOptions,
        note: Callable[[str, str], None],
        follow: Follow | None = None,
    ) -> None:
        """Listen at ``options.address``; ``ValueError`` when it cannot be bound, or must not be bound without TLS and
        identities.

        ``note`` is called with ``identity`` for each reload, each unusable file and each identity whose calls were
        ended, and with ``crowded``, at most once a minute, when idle connections were closed.  Standbys are served if
        ``follow`` is given.
        """
        check_bind(options.address, security)
        authenticator = Authenticator(security)
        self._watched: list[Watched[Any]] = list(authenticator.watched)
        credentials: Any = None
        if security.tls_cert:
            certificate, credentials = serving_credentials(security)
            self._watched.append(certificate)
        self._note = note
        self._door = Door(authenticator, options, lambda why: note("crowded", why))
        self.counters = self._door.counters.totals
        """Totals since the start: refusals by status, payload bytes, streams that broke off, defects (``internal``)."""
        self._threads = ThreadPoolExecutor(max_workers=options.calls_max, thread_name_prefix="syncer-rpc")
        arguments = [*options.channel_arguments(), ("grpc.max_allowed_incoming_connections", places(options))]
        if security.require_client_cert:
            arguments.append(("grpc.max_connection_age_ms", int(options.connection_age_s * 1000)))
        self._server = grpc.server(self._threads, options=arguments, maximum_concurrent_rpcs=options.calls_max)
        self._health = _Health()
        handlers = [
            SyncHandlers(api, self._door).generic_handler,
            admin_handler(api, self._door),
            *_standard_services(self._health, self._door),
        ]
        if follow is not None:
            handlers.append(follow_handler(follow, self._door))
        self._server.add_generic_rpc_handlers(handlers)
        self.address = _bind(self._server, options.address, credentials)
        self._watchers = [threading.Thread(target=self._look, name="identity-files", daemon=True)]
        if not self.address.startswith("unix:"):
            watch = partial(self._door.connections.watch, int(self.address.rpartition(":")[2]), self._door.stopping)
            self._watchers.append(threading.Thread(target=watch, name="connections", daemon=True))

    def start(self, *, ready: bool) -> None:
        """Answer from now on.  The health service reports ``ready`` for the run until method ``ready`` is called."""
        self.ready(ready)
        self._server.start()
        for thread in self._watchers:
            thread.start()

    def _look(self) -> None:
        while not self._door.stopping.wait(_LOOK_S):
            said = [text for each in self._watched if (text := each.refresh()) is not None]
            # Checked each time, not only after a change: a call may have been admitted on the content before it.
            for text in [*said, *self._door.end_revoked()]:
                self._note("identity", text)

    def complaints(self) -> list[str]:
        """Return the problems of the identity and certificate files; empty when all of them are in force."""
        return [each.complaint for each in self._watched if each.complaint]

    def ready(self, ready: bool) -> None:
        """Set whether updates are accepted at present, for the health service only; all calls are still answered.

        When not ``ready``, the run and SyncService are NOT_SERVING.  The server itself and its admin service stay
        SERVING, so that no orchestrator kills a process that is waiting.
        """
        response = health_pb2.HealthCheckResponse
        for name in ("", SYNC_SERVICE, ADMIN_SERVICE, self._door.options.run_id):
            serves = ready or name in ("", ADMIN_SERVICE)
            self._health.set(name, response.SERVING if serves else response.NOT_SERVING)

    def stop(self, grace_s: float) -> None:
        """Accept no new calls, end every Watch at once, and give other calls ``grace_s`` seconds to finish."""
        self._health.enter_graceful_shutdown()
        self._door.stopping.set()
        self._server.stop(grace_s).wait(grace_s + 5.0)
        self._threads.shutdown(wait=False)
        self._door.stalls.close()
        for thread in self._watchers:
            if thread.is_alive():  # They run only where the server could start.
                thread.join(timeout=5.0)


def _unbound(address: str) -> str:
    """Return why the system binds no socket to ``address``; "" where it does, or is not asked."""
    if address.startswith("unix:"):
        return ""
    host, _, port = address.rpartition(":")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host.strip("[]"), int(port)), family=family).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _bind(server: Any, address: str, credentials: Any) -> str:
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        why = _unbound(address) or f"the TLS files may not fit: {error}"
        raise ValueError(f"address is {address!r}: it cannot be bound: {why}") from error
    return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"
