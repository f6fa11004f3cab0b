"""A path that fell silent behind something that goes on acknowledging, as the relay and every proxy do."""

from __future__ import annotations

import time

import pytest

from diloco.wan.link import LinkOptions
from diloco.wan.process import RelayProcess
from diloco.wire.client import SyncClient
from diloco.wire.messages import Alive, Unreachable
from diloco.wire.options import ClientOptions, ServerOptions
from tests.loopback.cluster import eventually
from tests.wire.fake_syncer import RUN, FakeSyncer, serve

LONG_S = 15.0
"""The bounds of other means to notice silence, out of the way here."""


def test_both_ends_notice_a_silent_path_by_http2_pings_alone() -> None:
    quick = {"keepalive_time_ms": 500, "keepalive_timeout_ms": 500}
    syncer = FakeSyncer()
    server = serve(syncer, ServerOptions(run_id=RUN, stall_s=LONG_S, alive_s=LONG_S, **quick))  # type: ignore[arg-type]
    client: SyncClient | None = None
    try:
        with RelayProcess() as relay:
            address = relay.add("link", LinkOptions(), server.address)
            client = SyncClient(address, "site-a", RUN, options=ClientOptions(stall_s=LONG_S, **quick))  # type: ignore[arg-type]
            with client.watch(1) as stream:
                assert isinstance(next(stream), Alive)
                relay.partition("link")
                began = time.monotonic()
                with pytest.raises(Unreachable, match="ping timeout"):
                    next(stream)
                assert time.monotonic() - began < 5.0
                eventually(lambda: all(feed.closed.is_set() for feed in syncer.feeds), 5.0, "the server notices too")
                assert syncer.feeds, "there was a stream to be noticed"
    finally:
        if client is not None:
            client.close()
        server.stop(0.2)
