from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from diloco.wire.messages import Unreachable
from diloco.wire.options import ServerOptions
from tests.wire.fake_syncer import RUN, FakeSyncer, join_ask, serve

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.wire.conftest import Wired


def test_two_servers_cannot_have_one_port(wired: Wired) -> None:
    with pytest.raises(ValueError, match="cannot be bound"):
        serve(FakeSyncer(), ServerOptions(run_id=RUN, address=wired.server.address))


@pytest.mark.parametrize("address", ["127.0.0.1:65536", "127.0.0.1:99999", "[::1]:99999", "127.0.0.1", "127.0.0.1:-1"])
def test_a_port_that_is_none_is_not_taken_modulo_what_there_is(address: str) -> None:
    with pytest.raises(ValueError, match=r"address is '.*': host:port wanted, with a port of 0 to 65535"):
        serve(FakeSyncer(), ServerOptions(run_id=RUN, address=address))


@pytest.mark.parametrize("address", ["127.0.0.1:http!", "no.such.host.invalid:1"])
def test_an_address_that_cannot_be_bound_is_named(address: str) -> None:
    with pytest.raises(ValueError, match=r"address is '"):
        serve(FakeSyncer(), ServerOptions(run_id=RUN, address=address))


def test_stop_ends_watches_at_once_and_takes_no_new_calls(start: Callable[..., Wired]) -> None:
    wired = start()
    client = wired.client()
    stream = client.watch(1)
    next(stream)
    begun_s = time.monotonic()
    wired.server.stop(20.0)
    assert time.monotonic() - begun_s < 5
    with pytest.raises(Unreachable):
        list(stream)
    with pytest.raises(Unreachable):
        client.join(join_ask())


def test_no_thread_is_left_behind(start: Callable[..., Wired]) -> None:
    import threading

    before = set(threading.enumerate())  # Another test of this process may have left some.
    wired = start()
    client = wired.client()
    with client.watch(1) as stream:
        next(stream)
    client.close()
    wired.server.stop(1.0)
    until = time.monotonic() + 10
    ours = ("stalls-", "syncer-rpc")
    while left := {t.name for t in set(threading.enumerate()) - before if t.name.startswith(ours)}:
        assert time.monotonic() < until, left
        time.sleep(0.02)
