"""The syncer's end of ``AdminService``: an operator's calls, each open to whom ``permissions.NEEDS`` says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from diloco.wire import convert
from diloco.wire.answers import unary
from diloco.wire.calls import ADMIN_SERVICE

if TYPE_CHECKING:
    from diloco.wire.arrivals import Arrivals
    from diloco.wire.gates import Counters
    from diloco.wire.identity import Identity
    from diloco.wire.service import SyncerApi


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
