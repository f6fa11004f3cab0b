from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from diloco.wire import checkup
from diloco.wire.checkup import speaks_tls
from diloco.wire.options import SecurityOptions, ServerOptions
from tests.loopback.cluster import free_port
from tests.wire.certificates import LOOPBACK, Authority
from tests.wire.fake_syncer import RUN, FakeSyncer, serve

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("mutual", [False, True])
def test_a_syncer_that_speaks_tls_is_known_by_it_whoever_asks(tmp_path: Path, mutual: bool) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("syncer", *LOOPBACK)
    options = SecurityOptions(tls_cert=cert, tls_key=key, tls_ca=authority.ca, require_client_cert=mutual)
    server = serve(FakeSyncer(), ServerOptions(run_id=RUN), options)
    try:
        assert speaks_tls(server.address) is True
    finally:
        server.stop(0.2)


def test_one_that_does_not_is_known_too() -> None:
    server = serve(FakeSyncer(), ServerOptions(run_id=RUN))
    try:
        assert speaks_tls(server.address) is False
    finally:
        server.stop(0.2)


def test_of_who_is_not_there_or_says_nothing_it_cannot_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "KNOCK_S", 0.2)
    for address in (
        f"127.0.0.1:{free_port()}",
        "unix:/nowhere",
        "nohost.invalid:7077",
        "127.0.0.1:99999",
        "a..b:1",
        "x",
    ):
        assert speaks_tls(address) is None
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert speaks_tls(f"127.0.0.1:{silent.getsockname()[1]}") is None
