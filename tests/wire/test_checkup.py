from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from diloco.wire.checkup import Checkup
from diloco.wire.messages import Refused, Status, Unreachable
from diloco.wire.options import ClientOptions, SecurityOptions, ServerOptions
from tests.loopback.cluster import free_port
from tests.wire.fake_syncer import RUN, FakeSyncer, serve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.wire.conftest import Wired

TOKEN = "a-token-of-site-a-0123456789"


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[tuple[FakeSyncer, str]]:
    """A syncer that wants tokens, and its address."""
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps({"sites": {"site-a": TOKEN}}))
    tokens.chmod(0o600)
    syncer = FakeSyncer()
    server = serve(syncer, ServerOptions(run_id=RUN), SecurityOptions(tokens_file=str(tokens)))
    yield syncer, server.address
    server.stop(0.2)


def checkup(address: str, token: str = "") -> Checkup:
    return Checkup(address, SecurityOptions(token=token), ClientOptions(control_timeout_s=5.0))


def test_it_tells_what_is_served_and_what_is_not(wired: Wired) -> None:
    with checkup(wired.server.address) as asked:
        assert asked.serving("") is True
        assert asked.serving(RUN) is True
        assert asked.serving("run-2") is None
        assert RUN in asked.names()
        asked.come_in()


def test_one_that_takes_no_updates_says_so(start: Callable[..., Wired]) -> None:
    wired = start()
    wired.server.ready(False)
    with checkup(wired.server.address) as asked:
        assert asked.serving(RUN) is False
        assert asked.serving("") is True


def test_round_trips_are_counted_and_bounded(wired: Wired) -> None:
    with checkup(wired.server.address) as asked:
        taken = asked.round_trips(5, 5.0)
        assert len(taken) == 5
        assert all(0 < each < 5 for each in taken)
        assert asked.round_trips(1000, 0.0) == []


def test_who_is_known_comes_in_and_a_stranger_does_not(locked: tuple[FakeSyncer, str]) -> None:
    syncer, address = locked
    with checkup(address, TOKEN) as asked:
        asked.come_in()
    for token in ("", "another-token-0123456789"):
        with checkup(address, token) as asked:
            assert asked.serving("") is True
            with pytest.raises(Refused) as refused:
                asked.come_in()
            assert refused.value.status is Status.UNAUTHENTICATED
    assert syncer.calls == []


def test_nobody_there_is_unreachable() -> None:
    with checkup(f"127.0.0.1:{free_port()}") as asked:
        for question in (lambda: asked.serving(""), asked.names, asked.come_in, lambda: asked.round_trips(1, 1.0)):
            with pytest.raises(Unreachable):
                question()
