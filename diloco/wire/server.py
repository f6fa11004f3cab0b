"""Puts a syncer's shell on the network: the gRPC server, the admin calls, and the files that say who may come in.

``Keeper`` reads those files again while the syncer runs.  ``AdminHandlers`` is the syncer's end of ``AdminService``: an
operator's calls, each open to the roles that ``identity.NEEDS`` names.  ``serve`` listens, and ``RunningServer`` is
what it returns.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc

from diloco.wire import convert
from diloco.wire.arrivals import Arrivals, StandardServices, StrictHandlers, unary
from diloco.wire.channel import ADMIN_SERVICE, StallWatch
from diloco.wire.door import Connections, Counters, Door, OneAtATime, places
from diloco.wire.handlers import SyncHandlers
from diloco.wire.identity import Authenticator
from diloco.wire.options import SecurityOptions, ServingCertificate, check_bind
from diloco.wire.replication import FollowHandlers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from diloco.wire.identity import Identity
    from diloco.wire.options import ServerOptions, Watched
    from diloco.wire.replication import Following
    from diloco.wire.service import SyncerApi

_LOOK_S = 0.5


class Keeper:
    """A thread: a change is in force for new calls, and for those under way, within a second.

    ``note`` is told of each change, of each file that cannot be used, and of everybody who was put out.
    """

    def __init__(
        self,
        watched: Sequence[Watched[Any]],
        door: Door,
        note: Callable[[str], None],
        stopping: threading.Event,
    ) -> None:
        self._watched = watched
        self._door = door
        self._note = note
        self._stopping = stopping
        self._thread = threading.Thread(target=self._run, name="identity-files", daemon=True)
        if watched:
            self._thread.start()

    def complaints(self) -> list[str]:
        """What is wrong with the files now."""
        return [each.complaint for each in self._watched if each.complaint]

    def close(self) -> None:
        """End the thread; ``stopping`` is set."""
        if self._watched:
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._stopping.wait(_LOOK_S):
            said = [text for each in self._watched if (text := each.refresh()) is not None]
            # Looked at each time, and not only after a change: a call may have come in on what was read before it.
            for text in [*said, *self._door.put_out()]:
                self._note(text)


class AdminHandlers:
    """All methods of ``AdminService`` over one ``SyncerApi``."""

    def __init__(self, api: SyncerApi, arrivals: Arrivals, counters: Counters) -> None:
        self._api = api
        self._arrivals = arrivals
        self._counters = counters

    def generic_handler(self) -> Any:
        """What gRPC's server takes."""
        methods = {
            "Status": self._status,
            "Drain": self._drain,
            "Evict": self._evict,
            "Readmit": self._readmit,
            "Admit": self._admit,
            "Refuse": self._refuse,
            "Snapshot": self._snapshot,
            "Promote": self._promote,
            "Detach": self._detach,
        }
        handlers = {
            name: grpc.stream_unary_rpc_method_handler(unary(self._arrivals, self._counters, name, work))
            for name, work in methods.items()
        }
        return grpc.method_handlers_generic_handler(ADMIN_SERVICE, handlers)

    def _status(self, raw: bytes, identity: Identity) -> bytes:
        del identity
        convert.unpack_empty(raw)
        return convert.pack_status(self._api.status())

    def _drain(self, raw: bytes, identity: Identity) -> bytes:
        del identity
        convert.unpack_empty(raw)
        self._api.drain()
        return b""

    def _evict(self, raw: bytes, identity: Identity) -> bytes:
        del identity
        self._api.evict(convert.unpack_evict(raw).site_id)
        return b""

    def _readmit(self, raw: bytes, identity: Identity) -> bytes:
        del identity
        self._api.readmit(convert.unpack_evict(raw).site_id)
        return b""

    def _admit(self, raw: bytes, identity: Identity) -> bytes:
        del identity
        ask = convert.unpack_update(raw)
        self._api.admit(ask.site_id, ask.fragment, ask.sequence)
        return b""

    def _refuse(self, raw: bytes, identity: Identity) -> bytes:
        del identity
        ask = convert.unpack_update(raw)
        self._api.refuse(ask.site_id, ask.fragment, ask.sequence)
        return b""

    def _snapshot(self, raw: bytes, identity: Identity) -> bytes:
        del identity
        convert.unpack_empty(raw)
        self._api.snapshot()
        return b""

    def _promote(self, raw: bytes, identity: Identity) -> bytes:
        del identity
        self._api.promote(lossy=convert.unpack_promote(raw))
        return b""

    def _detach(self, raw: bytes, identity: Identity) -> bytes:
        del identity
        convert.unpack_empty(raw)
        self._api.detach()
        return b""


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

    ``note`` is told, as ``identity``, what changes about who may come in, and, as ``crowded``, that connections were
    hung up on, once a minute at most.

    ``ready`` is what the health service says of the run until ``RunningServer.ready`` says otherwise.  Standbys are
    served where ``following`` is given.

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
