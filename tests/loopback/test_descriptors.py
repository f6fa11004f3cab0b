"""Strangers who open as many connections as they can do not keep a syncer from merging, nor from answering."""

from __future__ import annotations

import contextlib
import socket
import threading
import urllib.request
from collections import Counter
from pathlib import Path

import grpc
import pytest

from diloco.wire.channel import SYNC_SERVICE
from tests.hunts import http2
from tests.loopback.cluster import Process, free_port
from tests.loopback.test_hostile import join
from tests.loopback.toy import Toy
from tests.runs.processes import place_in, wait_for

PEERS = 1007
ROUNDS = 5
JOINS = 4000
BOUND_S = 60.0


@pytest.mark.slow
@pytest.mark.parametrize("files", [256, 1024])
def test_a_thousand_idle_connections_leave_descriptors_for_merges_and_for_an_operator(
    files: int, tmp_path: Path
) -> None:
    port = free_port()
    with place_in(tmp_path) as place, contextlib.ExitStack() as stack:
        place.open_files = (files, files)
        syncer, address = place.syncer("crowded", f"cluster.syncer.metrics={port}")
        place.open_files = None
        place.site("crowded", address, "site-a", "site.num_sites=1")

        def merged(count: int) -> bool:
            return len(place.seen("crowded", "syncer", "published")) >= count

        wait_for(lambda: merged(2), "the first versions", syncer.text)
        for target, dial in ((address, http2.hello), (f"127.0.0.1:{port}", http2.dial)):
            peers = [stack.enter_context(dial(target)) for _ in range(PEERS)]
            known = len(place.seen("crowded", "syncer", "published"))
            wait_for(lambda known=known: merged(known + ROUNDS), "merges go on", syncer.text)

            def few(peers: list[socket.socket] = peers) -> bool:
                return sum(not http2.is_over(each) for each in peers) <= files * 3 // 8

            wait_for(few, "the others are hung up on", syncer.text)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
            assert b"diloco_connections_hung_up_total" in page.read()
        code, text = place.run("status", address)
        assert code == 0, text

        def said() -> list[str]:
            notes = [event for event in place.seen("crowded", "syncer", "note") if event["note"] == "crowded"]
            return [str(event["why"]).partition(" so far")[0] for event in notes]

        told = ["connections hung up on", "cluster.syncer.metrics: connections hung up on"]
        wait_for(lambda: set(told) <= set(said()), "it is said", lambda: str(said()))
        assert len(said()) <= 4, "once a minute for each port"


@pytest.mark.slow
def test_four_thousand_joins_at_once_are_all_answered(tmp_path: Path) -> None:
    """Each on a connection of its own: by a status where there is a place for it, else by its end."""
    toy, over = Toy(folder=str(tmp_path)), threading.Semaphore(0)
    codes: Counter[str] = Counter()

    def answered(call: grpc.Future) -> None:
        codes[call.code().name] += 1
        over.release()

    with Process("syncer", toy, files=1024) as syncer, contextlib.ExitStack() as stack:
        address = str(syncer.log.wait_for("listening", 1, BOUND_S)[0]["address"])
        site = stack.enter_context(Process("site", toy, site="a", address=address, step_s=0.02))
        site.log.wait_for("adopted", 2, BOUND_S)
        for number in range(JOINS):
            channel = grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
            stack.callback(channel.close)
            call = channel.unary_unary(f"/{SYNC_SERVICE}/Join")
            call.future(join(site_id=f"s{number}"), timeout=BOUND_S).add_done_callback(answered)
        assert all(over.acquire(timeout=BOUND_S) for _ in range(JOINS)), codes
        assert set(codes) <= {"OK", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "CANCELLED"}, codes
        site.log.wait_for("adopted", len(site.log.of("adopted")) + 3, BOUND_S)
