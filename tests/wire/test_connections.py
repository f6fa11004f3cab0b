"""Connections that never make a call leave places for those that do, and descriptors for files."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
import time

import pytest

from diloco import open_files
from diloco.wire.client import AdminClient, SyncClient
from diloco.wire.door import Connections, Counters, _chosen, places
from diloco.wire.messages import Alive, Unreachable
from diloco.wire.options import ServerOptions
from tests.hunts import http2
from tests.loopback.cluster import eventually
from tests.wire.fake_syncer import RUN, FakeSyncer, serve

BOUND_S = 10.0
FILES, PLACES, ROOM = 64, 32, 24


@pytest.fixture(autouse=True)
def few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files, "limits", lambda: (FILES, FILES))


def answers(address: str) -> bool:
    with AdminClient(address) as operator, contextlib.suppress(Unreachable):
        return bool(operator.status())
    return False


@pytest.mark.parametrize(
    ("files", "sites", "found"), [(64, 16, 32), (65_536, 4, 2048), (sys.maxsize, 1, 1280), (1, 1, 1)]
)
def test_half_of_the_files_are_for_connections_and_no_more_than_all_sites_can_want(
    files: int, sites: int, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_files, "limits", lambda: (files, files))
    assert places(ServerOptions(run_id=RUN, sites_max=sites)) == found


def test_connections_that_only_answer_pings_make_room_and_a_watch_goes_on() -> None:
    told: list[tuple[str, str]] = []
    server = serve(
        FakeSyncer(), ServerOptions(run_id=RUN, alive_s=0.1), note=lambda what, why: told.append((what, why))
    )
    with contextlib.ExitStack() as stack:
        stack.callback(server.stop, 0.2)
        site = stack.enter_context(contextlib.closing(SyncClient(server.address, "site-a", RUN)))
        watch = stack.enter_context(site.watch(1))
        assert isinstance(next(watch), Alive)
        strangers = [stack.enter_context(http2.hello(server.address)) for _ in range(3 * PLACES)]
        eventually(lambda: sum(not http2.is_over(each) for each in strangers) <= ROOM, BOUND_S, "they are hung up on")
        eventually(lambda: answers(server.address), BOUND_S, "an operator is answered")
        assert all(isinstance(next(watch), Alive) for _ in range(3)), "what is under way is never hung up on"
        eventually(lambda: bool(told), BOUND_S, "it is said")
        assert [what for what, _ in told] == ["crowded"]
        assert "connections hung up on so far: " in told[0][1]
        assert f"of {PLACES} places were taken" in told[0][1]
        assert server.counters()["hung_up"] >= PLACES - ROOM


def test_strangers_go_first_then_who_has_not_called_for_longest_and_nobody_whose_call_is_under_way() -> None:
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = listening.getsockname()[1]
        dialled = [stack.enter_context(socket.create_connection(("127.0.0.1", port), BOUND_S)) for _ in range(8)]
        taken = [stack.enter_context(listening.accept()[0]) for _ in dialled]
        early, late, busy, *strangers = [f"ipv4:127.0.0.1:{each.getsockname()[1]}" for each in dialled]
        counters = Counters()

        def over(places: int) -> list[int]:
            """Which of them are over after a look of a server with so many places; three quarters stay."""
            connections = Connections(places, counters, str)
            stack.enter_context(connections.calling(busy))
            for peer in (early, late):
                with connections.calling(peer):
                    time.sleep(0.001)
            connections.look(port)
            return [number for number, each in enumerate(dialled) if http2.is_over(each)]

        assert over(11) == []
        assert len(over(8)) == 2
        assert not {0, 1, 2} & {*over(8)}, "strangers first"
        assert counters.totals()["hung_up"] >= len(strangers) - 3
        for connection in taken:
            if http2.is_over(connection):
                connection.close()
        for number in (3, 4, 5, 6, 7):
            taken[number].close()
        assert {0, 1, 2} & {*over(3)} == {0}, "who has not called for longest"
        assert {0, 1, 2} & {*over(1)} == {0, 1}
        assert stat.S_ISSOCK(os.fstat(taken[2].fileno()).st_mode), "it is not ours to close"


@pytest.mark.parametrize(
    ("peers", "count", "chosen"),
    [
        (["ipv4:1.1.1.1:1", "ipv4:2.2.2.2:1", "ipv4:2.2.2.2:2"], 1, ["ipv4:2.2.2.2:1"]),
        (["ipv4:1.1.1.1:1", "ipv4:1.1.1.1:2"], 1, ["ipv4:1.1.1.1:1"]),
        (["ipv6:[::1]:1", "ipv6:[::1]:2", "ipv4:1.1.1.1:1"], 9, ["ipv6:[::1]:1", "ipv4:1.1.1.1:1", "ipv6:[::1]:2"]),
        (["ipv4:1.1.1.1:1"], 0, []),
        (["ipv4:1.1.1.1:1"], -3, []),
    ],
)
def test_the_oldest_of_the_address_that_has_most_goes(peers: list[str], count: int, chosen: list[str]) -> None:
    assert _chosen(peers, count) == chosen
