from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from diloco.wire.channel import SYNC_SERVICE, Line, split_addresses
from diloco.wire.options import SecurityOptions
from tests.wire.certificates import Authority

if TYPE_CHECKING:
    from pathlib import Path

TOKEN = "token-of-site-a-1"


def test_a_token_is_that_of_its_file_now(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o600)
    line = Line("127.0.0.1:1", SecurityOptions(token_file=str(file)), [], SYNC_SERVICE)
    assert line.metadata() == (("authorization", f"Bearer {TOKEN}"),)
    file.write_text("next-token-of-site-a")
    assert line.metadata() == (("authorization", "Bearer next-token-of-site-a"),)
    file.write_text("two words")
    assert line.metadata() == (("authorization", "Bearer next-token-of-site-a"),)
    line.close()
    assert Line("127.0.0.1:1", SecurityOptions(), [], SYNC_SERVICE).metadata() == ()


def test_a_token_in_a_file_does_not_travel_unencrypted_either(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    with pytest.raises(ValueError, match="unencrypted"):
        Line("example.org:7000", SecurityOptions(token_file=str(file)), [], SYNC_SERVICE)


def test_a_channel_is_made_anew_only_when_the_files_have_changed(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.site("site/a")
    line = Line("127.0.0.1:1", SecurityOptions(tls_ca=authority.ca, tls_cert=cert, tls_key=key), [], SYNC_SERVICE)
    first = line.channel
    line.lost()
    assert line.channel is first
    authority.site("site/a")
    line.lost()
    assert line.channel is not first
    (tmp_path / "authority.pem").write_text("nothing")
    second = line.channel
    line.lost()
    assert line.channel is second, "what cannot be used changes nothing"
    line.close()
    line.lost()


def test_a_channel_ends_when_another_one_takes_its_place(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.site("site/a")
    line = Line("127.0.0.1:1", SecurityOptions(tls_ca=authority.ca, tls_cert=cert, tls_key=key), [], SYNC_SERVICE)
    channels = [line.channel]
    authority.site("site/a")
    for change in (line.lost, line.renew, lambda: line.lead_to("127.0.0.1:2")):
        change()
        channels.append(line.channel)
    line.close()
    assert len({id(channel) for channel in channels}) == 4
    for channel in channels:
        with pytest.raises(ValueError, match="closed"):
            channel.unary_unary("/any")(b"", timeout=1.0)


def test_files_that_cannot_work_are_refused_in_words(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.site("site/a")
    (tmp_path / "empty").touch(mode=0o600)
    empty = str(tmp_path / "empty")
    for options, words in (
        (SecurityOptions(tls_ca=empty), "tls_ca .*empty holds no certificate"),
        (SecurityOptions(tls_ca=authority.ca, tls_cert=cert, tls_key=empty), "no certificate and its key"),
        (SecurityOptions(tls_ca=authority.ca, tls_cert=cert, tls_key=cert), "chmod 600"),
        (SecurityOptions(token_file=empty), "token_file .* is empty"),
    ):
        with pytest.raises(ValueError, match=words):
            Line("127.0.0.1:1", options, [], SYNC_SERVICE)
    assert key


def test_a_line_leads_to_one_address_at_a_time(tmp_path: Path) -> None:
    line = Line("127.0.0.1:1", SecurityOptions(token="token-of-site-a-1"), [], SYNC_SERVICE)
    first = line.channel
    line.lead_to("127.0.0.1:1")
    assert line.channel is first
    line.lead_to("127.0.0.1:2")
    assert line.channel is not first
    with pytest.raises(ValueError, match="unencrypted"):
        line.lead_to("example.org:7000")
    line.close()
    line.lead_to("127.0.0.1:1")


@pytest.mark.parametrize("address", ["127.0.0.1:65536", "127.0.0.1:99999", "127.0.0.1:0", "[::1]:70000"])
def test_a_port_that_is_none_is_not_taken_modulo_what_there_is(address: str) -> None:
    with pytest.raises(ValueError, match="a port of 1 to 65535"):
        Line(address, SecurityOptions(), [], SYNC_SERVICE)
    with pytest.raises(ValueError, match="a port of 1 to 65535"):
        split_addresses(address)


def test_addresses_are_host_and_port() -> None:
    assert split_addresses("127.0.0.1:65535,127.0.0.1:1") == ("127.0.0.1:65535", "127.0.0.1:1")
    assert split_addresses("fra.example:7077, [::1]:7078,unix:/run/x") == (
        "fra.example:7077",
        "[::1]:7078",
        "unix:/run/x",
    )
