from __future__ import annotations

import os
from pathlib import Path

import pytest

from diloco.wire.options import STANDARD_STREAMS_MAX, ClientOptions, ServerOptions, Watched

BAD_SERVER = {"sites_max": 0, "calls_per_s": -1.0}
BAD_CLIENT = {"data_channels": 0, "up_mbps": -1.0, "down_mbps": 1e9}


@pytest.mark.parametrize(("field", "value"), BAD_SERVER.items())
def test_a_server_value_that_cannot_work_is_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        ServerOptions(run_id="r", **{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(("field", "value"), BAD_CLIENT.items())
def test_a_client_value_that_cannot_work_is_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        ClientOptions(**{field: value})  # type: ignore[arg-type]


def test_credits_leave_threads_for_control() -> None:
    options = ServerOptions(run_id="r", sites_max=3)
    assert (options.push_credits, options.pull_credits, options.watch_credits) == (6, 24, 6)
    assert options.calls_max >= 6 + 24 + 6 + 2 * 3 + 5 * 6  # And the streams beside each push.
    assert ServerOptions(run_id="r", pushes_max=5).push_credits == 5


def test_whoever_is_at_their_bound_leaves_everybody_else_theirs() -> None:
    options = ServerOptions(run_id="r", sites_max=3, calls_per_caller_max=5)
    callers = ["site"] * 3 + ["observer", "admin", "standby", "strangers"]
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


def test_a_file_put_in_the_place_of_another_is_seen_whatever_its_time_and_size(tmp_path: Path) -> None:
    path, beside = tmp_path / "number", tmp_path / "beside"
    path.write_text("1")
    watched = Watched("number_file", [str(path)], lambda: read_number(path))
    beside.write_text("2")
    found = path.stat()
    os.utime(beside, ns=(found.st_atime_ns, found.st_mtime_ns))
    beside.replace(path)
    watched.refresh()
    assert watched.value == 2


def test_any_of_several_files_counts_and_so_does_a_mode(tmp_path: Path) -> None:
    paths = [tmp_path / "one", tmp_path / "two"]
    for path in paths:
        path.write_text("1")
    watched = Watched("numbers", [str(path) for path in paths], lambda: sum(map(read_number, paths)))
    paths[1].write_text("5")
    watched.refresh()
    assert watched.value == 6
    paths[0].chmod(0o600)
    assert watched.refresh() is not None
