"""Both ends of the wire as they are configured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from diloco.cli.main import main
from diloco.config import connecting
from diloco.config.compose import compose
from diloco.config.connecting import unanswered
from diloco.config.errors import ConfigError
from diloco.runs.site_agent import join_text
from diloco.wire.options import SecurityOptions, ServerOptions
from tests.config.test_build import small
from tests.loopback.cluster import free_port
from tests.wire.certificates import LOOPBACK, Authority
from tests.wire.fake_syncer import RUN, FakeSyncer, serve

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def test_a_site_sets_how_many_connections_it_uses_and_how_much_of_its_link() -> None:
    usual = connecting.client_options(small())
    assert (usual.data_channels, usual.up_mbps, usual.down_mbps) == (1, 0.0, 0.0)
    chosen = connecting.client_options(small("site.data_channels=4", "site.up_mbps=200", "site.down_mbps=1000"))
    assert (chosen.data_channels, chosen.up_mbps, chosen.down_mbps) == (4, 200.0, 1000.0)


def test_a_link_is_the_networks_but_for_what_the_site_says() -> None:
    config = small("cluster=local4", "network=wan_bad")
    plain, far = connecting.link_options(config, "site-a"), connecting.link_options(config, "site-d")
    assert (plain.rtt_ms, plain.mbps, plain.stall_percent) == (150.0, 20.0, 5.0)
    assert (far.rtt_ms, far.mbps, far.stall_percent) == (200.0, 20.0, 5.0)
    assert plain.seed != far.seed


def test_what_a_site_shows_is_looked_at_before_anything_starts(tmp_path: Path) -> None:
    token = tmp_path / "token"
    with pytest.raises(ConfigError, match=r"site\.token_file is '.*/token': No such file"):
        connecting.site_security(small(f"site.token_file={token}"))
    with pytest.raises(ConfigError, match=r"site\.tls_ca is '.*/ca': No such file"):
        connecting.site_security(small(f"site.tls_ca={tmp_path / 'ca'}"))
    token.write_text("0123456789abcdef\n")
    token.chmod(0o644)
    with pytest.raises(ConfigError, match=rf"site\.token_file .*: chmod 600 {token}$"):
        connecting.site_security(small(f"site.token_file={token}"))
    token.chmod(0o600)
    assert connecting.site_security(small(f"site.token_file={token}")).token_file == str(token)
    token.write_text("two words\n")
    with pytest.raises(ConfigError, match=r"holds a blank"):
        connecting.site_security(small(f"site.token_file={token}"))


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
