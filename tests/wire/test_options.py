"""Options that cannot work, bounds that follow from options, and files that are read again."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from diloco.wire.options import (
    STANDARD_STREAMS_MAX,
    ClientOptions,
    SecurityOptions,
    ServerOptions,
    Watched,
    check_bind,
    is_loopback,
)


def test_values_and_switches_that_cannot_work_are_refused_in_words() -> None:
    files = {"tls_cert": "x", "tls_key": "y"}
    for kind, options, words in (
        (ServerOptions, {"run_id": "r", "sites_max": 0}, "sites_max is 0"),
        (ServerOptions, {"run_id": "r", "calls_per_s": -1.0}, "calls_per_s is -1"),
        (ClientOptions, {"data_channels": 0}, "data_channels is 0"),
        (ClientOptions, {"up_mbps": -1.0}, "up_mbps is -1"),
        (ClientOptions, {"down_mbps": 1e9}, "down_mbps is 1000000000"),
        (SecurityOptions, {"tls_cert": "x"}, "both or neither"),
        (SecurityOptions, {"require_client_cert": True, "tls_ca": "x"}, "require_client_cert"),
        (SecurityOptions, {"require_client_cert": True, "tls_ca": "system"} | files, "must name the file"),
        (SecurityOptions, {"token": "two words"}, "token holds"),
        (SecurityOptions, {"token": "t", "token_file": "f"}, "not both"),
        (SecurityOptions, {"permissions": "p"}, "permissions is 'p': it needs tokens_file or require_client_cert"),
    ):
        with pytest.raises(ValueError, match=words):
            kind(**options)  # type: ignore[operator]


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "10.1.2.3:7000", "example.org:7000", ":7000"])
def test_a_reachable_address_needs_tls_and_identities_or_to_be_had_by_saying_so(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *asked, **wanted: [("192.0.2.1", 7000)])
    tls: dict[str, Any] = {"tls_cert": "x", "tls_key": "y"}
    with pytest.raises(ValueError, match="there is no TLS"):
        check_bind(address, SecurityOptions(tokens_file="t"))
    with pytest.raises(ValueError, match="cannot be told apart"):
        check_bind(address, SecurityOptions(**tls))
    check_bind(address, SecurityOptions(insecure_non_loopback=True))
    check_bind(address, SecurityOptions(**tls, tokens_file="t"))
    check_bind(address, SecurityOptions(**tls, tls_ca="z", require_client_cert=True))


def test_loopback_is_what_it_says() -> None:
    assert all(map(is_loopback, ("127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1", "unix:/tmp/x")))
    assert not any(map(is_loopback, ("0.0.0.0:1", "[::]:1", ":1", "127.0.0.1.example.org:1", "10.0.0.1:1")))


def test_credits_leave_threads_for_control_and_one_caller_at_its_bound_leaves_all_others_theirs() -> None:
    options = ServerOptions(run_id="r", sites_max=3)
    assert (options.push_credits, options.pull_credits, options.watch_credits) == (6, 24, 6)
    assert options.calls_max >= 6 + 24 + 6 + 2 * 3 + 5 * 6  # And the streams beside each push.
    assert ServerOptions(run_id="r", pushes_max=5).push_credits == 5
    callers = ["site"] * 3 + ["observer", "admin", "standby", "strangers"]
    options = ServerOptions(run_id="r", sites_max=3, calls_per_caller_max=5)
    assert options.calls_max >= 5 * len(callers) + STANDARD_STREAMS_MAX


def test_the_server_permits_the_clients_pings() -> None:
    server, client = dict(ServerOptions(run_id="r").channel_arguments()), dict(ClientOptions().channel_arguments())
    assert server["grpc.http2.min_ping_interval_without_data_ms"] < client["grpc.keepalive_time_ms"]
    assert server["grpc.so_reuseport"] == 0
    assert client["grpc.use_local_subchannel_pool"] == 1


def test_the_memory_that_sites_can_take_is_stated() -> None:
    options = ServerOptions(run_id="r", checks_max=2)
    large = options.memory_bytes_max(32 << 20, 64)
    assert large == 2 * 4 * (1 << 20) + 64 * ((16 << 20) + 44 * 65536) + 32 * (8 << 20) + (8 << 20)
    assert options.memory_bytes_max(1000, 1) == 2 * 4 * (1 << 20) + 1500 + 44 * 65536 + 32 * 1000 + (8 << 20)
    assert options.memory_bytes_max(1000, 1, 900) == options.memory_bytes_max(1000, 1) + 2 * 900


def read_number(path: Path) -> int:
    return int(path.read_text())


def test_a_change_is_read_once_and_a_broken_one_leaves_what_was(tmp_path: Path) -> None:
    path = tmp_path / "number"
    path.write_text("1")
    watched = Watched("number_file", [str(path)], lambda: read_number(path))
    assert (watched.value, watched.refresh(), watched.complaint) == (1, None, "")
    path.write_text("22")
    assert watched.refresh() == "number_file was read again"
    assert (watched.value, watched.refresh()) == (22, None)
    path.write_text("three")
    said = watched.refresh()
    assert said is not None
    assert said.startswith("number_file cannot be used, what was read before stays in force: invalid literal")
    assert (watched.value, watched.complaint, watched.refresh()) == (22, said, None)
    path.unlink()
    assert "No such file" in str(watched.refresh())
    assert watched.value == 22
    path.write_text("4")
    watched.refresh()
    assert (watched.value, watched.complaint) == (4, "")


def test_a_file_put_in_the_place_of_another_is_seen_whatever_its_time_and_size_and_so_is_a_mode(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one", "two", "beside")]
    for path, text in zip(paths, "112", strict=True):
        path.write_text(text)
    watched = Watched("numbers", [str(path) for path in paths[:2]], lambda: sum(map(read_number, paths[:2])))
    found = paths[1].stat()
    os.utime(paths[2], ns=(found.st_atime_ns, found.st_mtime_ns))
    paths[2].replace(paths[1])
    watched.refresh()
    assert watched.value == 3
    paths[0].chmod(0o600)
    assert watched.refresh() is not None
