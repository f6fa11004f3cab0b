"""Puts a syncer's shell on the network."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc

from diloco.wire.admin import AdminHandlers
from diloco.wire.arrivals import Arrivals
from diloco.wire.connections import Connections, places
from diloco.wire.door import Door
from diloco.wire.following import FollowHandlers
from diloco.wire.gates import Counters, OneAtATime
from diloco.wire.handlers import SyncHandlers
from diloco.wire.identity import Authenticator
from diloco.wire.keeper import Keeper
from diloco.wire.security import SecurityOptions, ServingCertificate, check_bind
from diloco.wire.stall import StallWatch
from diloco.wire.standard import StandardServices, StrictHandlers

if TYPE_CHECKING:
    from collections.abc import Callable

    from diloco.wire.following import Following
    from diloco.wire.options import ServerOptions
    from diloco.wire.service import SyncerApi


class RunningServer:
    """A syncer that answers.  ``address`` is ``host:port`` with the port that the system chose."""

    def __init__(
        self,
        server: Any,
        threads: ThreadPoolExecutor,
        address: str,
        standard: StandardServices,
        stalls: StallWatch,
        counters: Counters,
        stopping: threading.Event,
        keeper: Keeper,
        connections: Connections,
    ) -> None:
        self.address = address
        self._server = server
        self._threads = threads
        self._standard = standard
        self._stalls = stalls
        self._counters = counters
        self._stopping = stopping
        self._keeper = keeper
        self._connections = connections

    def counters(self) -> dict[str, int]:
        """Totals since the start: refusals by status, payload bytes, streams that broke off, defects (``internal``)."""
        return self._counters.totals()

    def complaints(self) -> list[str]:
        """What is wrong with the files of identities and certificates; nothing where all of them are in force."""
        return self._keeper.complaints()

    def ready(self, ready: bool) -> None:
        """Whether updates are taken in at present, for the health service; everything is answered all the same."""
        self._standard.serving(ready)

    def stop(self, grace_s: float) -> None:
        """Take no new calls, end every Watch at once, and give what is under way ``grace_s`` to finish."""
        self._standard.stopping()
        self._stopping.set()
        self._server.stop(grace_s).wait(grace_s + 5.0)
        self._threads.shutdown(wait=False)
        self._stalls.close()
        self._keeper.close()
        self._connections.close()


def serve(
    api: SyncerApi,
    options: ServerOptions,
    security: SecurityOptions | None = None,
    note: Callable[[str, str], None] = lambda what, why: None,
    following: Following | None = None,
    *,
    ready: bool = True,
) -> RunningServer:
    """Listen at ``options.address`` and answer from now on.

    ``note`` is told what changes about who may come in (``identity``), and that connections were hung up on, once a
    minute at most (``crowded``).

    ``ready`` is what the health service says of the run until ``RunningServer.ready`` says otherwise.  Standbys are
    served where there is somebody who does that (``following``).

    ``ValueError`` in words when the address cannot be bound, or must not be without TLS and identities.
    """
    security = security or SecurityOptions()
    check_bind(options.address, security)
    authenticator = Authenticator(security)
    certificate = ServingCertificate(security) if security.tls_cert else None
    counters = Counters()
    stopping = threading.Event()
    stalls = StallWatch("stalls-syncer")
    connections_max = places(options)
    connections = Connections(connections_max, counters, lambda why: note("crowded", why))
    door = Door(authenticator, options, counters, connections)
    arrivals = Arrivals(door, stalls, options)
    threads = ThreadPoolExecutor(max_workers=options.calls_max, thread_name_prefix="syncer-rpc")
    arguments = [*options.channel_arguments(), ("grpc.max_allowed_incoming_connections", connections_max)]
    if security.require_client_cert:
        arguments.append(("grpc.max_connection_age_ms", int(options.connection_age_s * 1000)))
    server = grpc.server(
        threads,
        interceptors=(StrictHandlers(arrivals, stalls, counters, options),),
        options=arguments,
        maximum_concurrent_rpcs=options.calls_max,
    )
    sync = SyncHandlers(api, options, arrivals, door, stalls, counters, stopping)
    admin = AdminHandlers(api, arrivals, counters)
    server.add_generic_rpc_handlers((sync.generic_handler(), admin.generic_handler()))
    if following is not None:
        one = OneAtATime("standby", options.pushback_ms)
        follow = FollowHandlers(following, options, arrivals, one, counters, stopping)
        server.add_generic_rpc_handlers((follow.generic_handler(),))
    standard = StandardServices(server, options.run_id)
    address = _bind(server, options.address, certificate.credentials() if certificate is not None else None)
    server.start()
    standard.serving(ready)
    watched = [*authenticator.watched, *([certificate.watched] if certificate is not None else [])]
    keeper = Keeper(watched, door, lambda why: note("identity", why), stopping)
    if not address.startswith("unix:"):
        connections.watch(int(address.rpartition(":")[2]))
    return RunningServer(server, threads, address, standard, stalls, counters, stopping, keeper, connections)


def _bind(server: Any, address: str, credentials: Any) -> str:
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise ValueError(f"address is {address!r}: it cannot be bound, or the TLS files do not fit: {error}") from error
    if port == 0:
        raise ValueError(f"address is {address!r}: it cannot be bound")
    return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"
