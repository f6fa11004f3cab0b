"""Both ends of the wire as they are configured."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.launch import connecting
from diloco.launch.errors import ConfigError
from tests.launch.test_build import small


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
