"""What a user is told who knocks at a TLS port without TLS, by every verb that asks a syncer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from diloco.launch.cli import main
from diloco.launch.config import compose
from diloco.launch.site_agent import join_text
from diloco.launch.unanswered import unanswered
from diloco.wire.options import SecurityOptions, ServerOptions
from diloco.wire.server import serve
from tests.loopback.cluster import free_port
from tests.wire.certificates import LOOPBACK, Authority
from tests.wire.fake_syncer import RUN, FakeSyncer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GIVE = "speaks TLS: give site.tls_ca, and site.tls_cert and site.tls_key if it asks for them"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def mutual(authority: Authority) -> Iterator[str]:
    """The address of a syncer that wants to see certificates."""
    cert, key = authority.issue("syncer", *LOOPBACK)
    options = SecurityOptions(tls_cert=cert, tls_key=key, tls_ca=authority.ca, require_client_cert=True)
    server = serve(FakeSyncer(), ServerOptions(run_id=RUN), options)
    yield server.address
    server.stop(0.2)


@pytest.mark.parametrize("verb", [["status"], ["drain"], ["standby", "status"]])
def test_a_verb_says_that_tls_is_spoken_there(mutual: str, verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*verb, mutual]) == 3
    said = capsys.readouterr().err
    assert f"{mutual} {GIVE}" in said
    assert said.count("\n") == 1


def test_a_verb_says_that_a_certificate_may_be_wanted(
    mutual: str, authority: Authority, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", mutual, f"site.tls_ca={authority.ca}"]) == 3
    assert f"{mutual} speaks TLS, and may want site.tls_cert and site.tls_key" in capsys.readouterr().err


def test_a_site_says_it_of_the_address_where_somebody_is(mutual: str) -> None:
    config = compose(["site.id=a", f"site.syncer='127.0.0.1:{free_port()}, {mutual}'"])
    said = join_text(config, "unreachable", "Join: Socket closed")
    assert f"Join: Socket closed; {mutual} {GIVE}" in said
    assert "TLS" not in join_text(config, "refused", "put out of the run")


def test_nothing_is_added_where_it_would_not_help(mutual: str, authority: Authority) -> None:
    cert, key = authority.site("site/a")
    everything = SecurityOptions(tls_ca=authority.ca, tls_cert=cert, tls_key=key)
    assert unanswered(mutual, everything, "why") == "why"
    assert unanswered(f"127.0.0.1:{free_port()}", SecurityOptions(), "why") == "why"
    plain = serve(FakeSyncer(), ServerOptions(run_id=RUN))
    try:
        assert unanswered(plain.address, SecurityOptions(), "why") == "why"
        told = unanswered(plain.address, SecurityOptions(tls_ca=authority.ca), "why")
        assert told == f"why; {plain.address} does not speak TLS: leave site.tls_ca out"
    finally:
        plain.stop(0.2)
