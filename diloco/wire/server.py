"""Puts a syncer's shell on the network."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc

from diloco.wire.admin import AdminHandlers
from diloco.wire.arrivals import Arrivals
from diloco.wire.gates import Counters
from diloco.wire.handlers import SyncHandlers
from diloco.wire.security import Authenticator, SecurityOptions, check_bind, server_credentials
from diloco.wire.stall import StallWatch
from diloco.wire.standard import StandardServices, StrictHandlers

if TYPE_CHECKING:
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
    ) -> None:
        self.address = address
        self._server = server
        self._threads = threads
        self._standard = standard
        self._stalls = stalls
        self._counters = counters
        self._stopping = stopping

    def counters(self) -> dict[str, int]:
        """Totals since the start: refusals by status, payload bytes, streams that broke off, defects (``internal``)."""
        return self._counters.totals()

    def stop(self, grace_s: float) -> None:
        """Take no new calls, end every Watch at once, and give what is under way ``grace_s`` to finish."""
        self._standard.stopping()
        self._stopping.set()
        self._server.stop(grace_s).wait(grace_s + 5.0)
        self._threads.shutdown(wait=False)
        self._stalls.close()


def serve(api: SyncerApi, options: ServerOptions, security: SecurityOptions | None = None) -> RunningServer:
    """Listen at ``options.address`` and answer from now on.

    ``ValueError`` in words when the address cannot be bound, or must not be without TLS and identities.
    """
    security = security or SecurityOptions()
    check_bind(options.address, security)
    credentials = server_credentials(security)
    counters = Counters()
    stopping = threading.Event()
    stalls = StallWatch("stalls-syncer")
    arrivals = Arrivals(Authenticator(security), stalls, options)
    threads = ThreadPoolExecutor(max_workers=options.calls_max, thread_name_prefix="syncer-rpc")
    server = grpc.server(
        threads,
        interceptors=(StrictHandlers(arrivals, stalls, counters, options),),
        options=options.channel_arguments(),
        maximum_concurrent_rpcs=options.calls_max,
    )
    sync = SyncHandlers(api, options, arrivals, stalls, counters, stopping)
    admin = AdminHandlers(api, arrivals, counters)
    server.add_generic_rpc_handlers((sync.generic_handler(), admin.generic_handler()))
    standard = StandardServices(server, options.run_id)
    address = _bind(server, options.address, credentials)
    server.start()
    standard.serving()
    return RunningServer(server, threads, address, standard, stalls, counters, stopping)


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
