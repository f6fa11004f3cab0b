"""Namespaces: why not, in words; what is in one, and what is left of it."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from diloco.wan import netns

if TYPE_CHECKING:
    from collections.abc import Iterator

needs_namespaces = pytest.mark.skipif(netns.unavailable() is not None, reason=str(netns.unavailable()))


@pytest.fixture
def namespace() -> Iterator[int]:
    made = netns.make()
    yield made
    os.close(made)


@pytest.mark.parametrize(
    ("attribute", "value", "words"),
    [
        ("sys.platform", "darwin", "network namespaces are Linux's own, and this is darwin"),
        ("TUN_DEVICE", Path("/dev/net/none"), "/dev/net/none is not there"),
        ("shutil.which", lambda name: None if name == "ip" else name, r"the program ip \(of iproute2\)"),
        ("_capabilities", lambda: 0, "need root, or root in namespaces of one's own: unshare -Urn COMMAND"),
        ("_may_come_back", lambda: False, "need root"),
        ("_capabilities", lambda: 1 << netns.CAP_NET_ADMIN, "need root"),
    ],
)
def test_what_is_missing_is_said_in_words(
    attribute: str, value: object, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # All that a machine may lack is there, but for what the case takes away.
    monkeypatch.setattr("diloco.wan.netns.sys.platform", "linux")
    monkeypatch.setattr("diloco.wan.netns.TUN_DEVICE", tmp_path)
    monkeypatch.setattr("diloco.wan.netns.shutil.which", lambda name: name)
    monkeypatch.setattr("diloco.wan.netns._capabilities", lambda: -1)
    monkeypatch.setattr("diloco.wan.netns._may_come_back", lambda: True)
    assert netns.unavailable() is None
    monkeypatch.setattr(f"diloco.wan.netns.{attribute}", value)
    assert re.search(words, str(netns.unavailable()))


@needs_namespaces
def test_a_namespace_has_nothing_but_its_loopback_and_leaves_us_where_we_were(namespace: int) -> None:
    before = [name for _, name in socket.if_nameindex()]
    with netns.within(namespace):
        assert [name for _, name in socket.if_nameindex()] == ["lo"]
        with socket.create_server(("127.0.0.1", 0)) as listening:
            address = listening.getsockname()
            socket.create_connection(address, timeout=5).close()
    assert [name for _, name in socket.if_nameindex()] == before


@needs_namespaces
def test_an_error_inside_leaves_us_where_we_were(namespace: int) -> None:
    before = os.readlink("/proc/thread-self/ns/net")

    def fail() -> None:
        with netns.within(namespace):
            assert os.readlink("/proc/thread-self/ns/net") != before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert os.readlink("/proc/thread-self/ns/net") == before


@needs_namespaces
def test_a_device_lives_as_long_as_its_descriptor(namespace: int) -> None:
    with netns.within(namespace):
        tun = netns.open_tun("wan")
        netns.bring_up("wan", "10.77.1.1", "10.77.1.2")
        netns.route("default", "wan", netns.available_congestions()[0])
        assert netns.device_drops("wan") == 0
        os.close(tun)
        assert [name for _, name in socket.if_nameindex()] == ["lo"]
        with pytest.raises(ValueError, match="device is 'wan': not in this namespace"):
            netns.device_drops("wan")


@needs_namespaces
def test_settings_are_the_namespaces_own(namespace: int) -> None:
    setting = Path("/proc/sys/net/ipv4/tcp_wmem")
    before = setting.read_text("ascii")
    with netns.within(namespace):
        netns.write_setting("ipv4.tcp_wmem", "4096 16384 67108864")
        assert setting.read_text("ascii").split()[2] == "67108864"
        with pytest.raises(FileNotFoundError):
            netns.write_setting("ipv4.no_such_thing", "1")
        netns.write_setting("ipv4.no_such_thing", "1", must=False)
    assert setting.read_text("ascii") == before


@needs_namespaces
def test_a_command_that_fails_says_why(namespace: int) -> None:
    with netns.within(namespace), pytest.raises(OSError, match=r"ip link set nothing up: .*nothing"):
        netns.ip("link", "set", "nothing", "up")
    with pytest.raises(OSError, match="setns"):
        netns.enter("/dev/null")


@needs_namespaces
def test_only_what_runs_in_these_namespaces_is_ended(namespace: int) -> None:
    with contextlib.ExitStack() as stack:
        with netns.within(namespace):
            inside, spared = (stack.enter_context(subprocess.Popen(["sleep", "60"])) for _ in range(2))
        outside = stack.enter_context(subprocess.Popen(["sleep", "60"]))
        for process in (spared, outside):
            stack.callback(process.kill)
        assert netns.end_all_in([namespace], spared.pid) == [inside.pid]
        assert inside.wait(10) == -9
        assert (spared.poll(), outside.poll()) == (None, None)
