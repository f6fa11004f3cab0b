from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from diloco.launch.doctor_syncer import visit
from diloco.wire.checkup import Checkup
from diloco.wire.messages import Unreachable
from diloco.wire.options import ClientOptions, ServerOptions
from diloco.wire.security import SecurityOptions
from diloco.wire.server import serve
from tests.loopback.cluster import free_port
from tests.wire.fake_syncer import RUN, FakeSyncer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from diloco.launch.doctor_syncer import Visit

TOKEN = "a-token-of-site-a-0123456789"


@contextmanager
def served(security: SecurityOptions | None = None, *, ready: bool = True) -> Iterator[tuple[str, FakeSyncer]]:
    syncer = FakeSyncer()
    server = serve(syncer, ServerOptions(run_id=RUN), security or SecurityOptions(), ready=ready)
    try:
        yield server.address, syncer
    finally:
        server.stop(0.2)


def visited(address: str, run_id: str | None = RUN, token: str = "") -> Visit:
    with Checkup(address, SecurityOptions(token=token), ClientOptions(control_timeout_s=5.0)) as checkup:
        return visit(checkup, run_id)


def said(found: Visit) -> str:
    return "\n".join(finding.line() for finding in found.findings)


def test_a_syncer_that_is_well_is_told_in_four_lines_and_nothing_was_asked_of_its_run() -> None:
    with served() as (address, syncer):
        found = visited(address)
    assert [(each.check, each.level.value) for each in found.findings] == [
        ("grpc", "ok"),
        ("run", "ok"),
        ("identity", "ok"),
        ("rtt", "ok"),
    ]
    assert 0 < found.rtt_s < 1
    assert syncer.calls == []


def test_another_run_is_named() -> None:
    with served() as (address, _):
        found = said(visited(address, "run-2"))
        unsaid = said(visited(address, None))
    assert f"fail  run         run run-2 is not served there, but run {RUN} -> give the run or the address" in found
    assert f"it serves run {RUN}; give run=NAME to have this site's settings compared" in unsaid


def test_one_that_takes_no_updates_is_a_warning() -> None:
    with served(ready=False) as (address, _):
        assert f"warn  run         it knows run {RUN} and takes no updates at present -> " in said(visited(address))


@pytest.mark.parametrize(
    ("token", "words"),
    [
        (TOKEN, "ok    identity    it lets us in"),
        ("another-token-0123456789", "fail  identity    it does not let us in: the token is not known -> give site.to"),
        ("", "it does not let us in: a token is needed"),
    ],
)
def test_what_a_token_is_worth(token: str, words: str, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps({"sites": {"site-a": TOKEN}}))
    tokens.chmod(0o600)
    with served(SecurityOptions(tokens_file=str(tokens))) as (address, _):
        found = visited(address, token=token)
    assert words in said(found)
    assert found.answered


def test_who_is_not_there_did_not_answer() -> None:
    found = visited(f"127.0.0.1:{free_port()}")
    assert (found.answered, len(found.findings)) == (False, 1)
    assert said(found).startswith("fail  grpc        Check: ")


def test_a_syncer_that_goes_away_in_between_is_told_of() -> None:
    class Going(Checkup):
        def come_in(self) -> None:
            raise Unreachable("Watch: gone")

    with served() as (address, _), Going(address, SecurityOptions(), ClientOptions()) as checkup:
        found = visit(checkup, RUN)
    assert "fail  identity    it answered before, and not now: Watch: gone" in said(found)


def test_a_round_trip_that_varies_much_is_a_warning() -> None:
    class Varying(Checkup):
        def round_trips(self, count: int, limit_s: float) -> list[float]:
            return [0.1] * 17 + [0.9] * 3

    with served() as (address, _), Varying(address, SecurityOptions(), ClientOptions()) as checkup:
        found = visit(checkup, RUN)
    assert "warn  rtt         a small call takes 100 ms (median of 20; 95 % within 900 ms): it varies much" in said(
        found
    )
    assert found.rtt_s == 0.1
