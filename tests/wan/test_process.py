"""The relay as a process of its own: control, death, and never a process left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from diloco.wan.link import LinkOptions
from diloco.wan.process import ChildDiedError, RelayProcess
from diloco.wan.relay import format_address, parse_address
from tests.runs.processes import ROOT, wait_for
from tests.runs.test_supervise import alive

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 10.0


@pytest.fixture
def relays() -> Iterator[RelayProcess]:
    with RelayProcess() as running:
        yield running


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(WAIT_S)
        yield listening


def test_links_are_hosted_by_name_and_controlled_while_they_run(relays: RelayProcess, listener: socket.socket) -> None:
    target = format_address(*listener.getsockname())
    addresses = {name: relays.add(name, LinkOptions(rtt_ms=10), target) for name in ("near", "far")}
    relays.set("far", rtt_ms=40.0)
    assert len(set(addresses.values())) == 2
    with socket.create_connection(parse_address(addresses["far"]), timeout=WAIT_S) as client:
        server, _ = listener.accept()
        with server:
            relays.partition("far", "down")
            server.sendall(b"down")
            client.settimeout(0.3)
            with pytest.raises(TimeoutError):
                client.recv(16)
            client.settimeout(WAIT_S)
            relays.heal("far")
            assert client.recv(16) == b"down"
            stats = relays.stats()
            assert (stats["far"]["bytes_down"], stats["far"]["connections"]) == (4, 1)
            assert stats["near"]["bytes_down"] == stats["near"]["connections_total"] == 0
            relays.reset("far")
            with pytest.raises(ConnectionResetError):
                client.recv(16)
    relays.refuse("near")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(parse_address(addresses["near"]), timeout=WAIT_S)
    relays.accept("near")
    socket.create_connection(parse_address(addresses["near"]), timeout=WAIT_S).close()
    relays.remove("near")
    assert list(relays.stats()) == ["far"]
    assert 0 < relays.cpu_s() < WAIT_S


def test_refusals_cross_the_pipe_in_words_and_the_relay_goes_on(relays: RelayProcess, listener: socket.socket) -> None:
    nowhere, taken = "127.0.0.1:1", format_address(*listener.getsockname())
    with pytest.raises(ValueError, match=r"link is 'a': one of \(none yet\)"):
        relays.heal("a")
    relays.add("a", LinkOptions(), nowhere)
    for ask, words in (
        (lambda: relays.add("b", LinkOptions(), "192.0.2.1:80"), r"target_host is '192\.0\.2\.1': only loopback"),
        (lambda: relays.add("b", LinkOptions(), nowhere, listen=taken), "in use"),
        (lambda: relays.add("a", LinkOptions(), nowhere), "link is 'a': a link of that name exists already"),
        (lambda: relays.set("a", speed=1.0), "speed is not an option of a link"),
        (lambda: relays.heal("c"), "link is 'c': one of a"),
        (lambda: relays._do("explode", name="a"), "do is 'explode': one of accept"),
    ):
        with pytest.raises(ValueError, match=words):
            ask()
    relays.remove("a")
    assert relays.stats() == {}
    # Many threads may ask at once.
    names = [f"link{number}" for number in range(8)]
    threads = [threading.Thread(target=relays.add, args=(name, LinkOptions(rtt_ms=1), nowhere)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(relays.stats()) == names


def test_the_relay_is_small_in_a_session_of_its_own_and_gone_when_it_is_closed() -> None:
    relays = RelayProcess()
    relays.add("a", LinkOptions(), "127.0.0.1:1")
    assert os.getsid(relays.pid) == relays.pid != os.getsid(0), "a Ctrl-C for the run would end the links"
    assert "libtorch" not in Path(f"/proc/{relays.pid}/maps").read_text(encoding="utf-8")
    for _ in range(2):  # Closing it again is allowed.
        relays.close()
    assert not alive(relays.pid)
    assert relays._child.returncode == 0
    with pytest.raises(ChildDiedError, match="was closed"):
        relays.stats()


def test_a_relay_that_was_killed_or_failed_is_noticed_with_its_last_words() -> None:
    with RelayProcess() as relays:
        relays.add("a", LinkOptions(), "127.0.0.1:1")
        os.kill(relays.pid, signal.SIGKILL)
        with pytest.raises(ChildDiedError, match=r"has ended \(exit code -9\)"):
            relays.stats()
        assert not alive(relays.pid)
        with pytest.raises(ChildDiedError):
            relays.heal("a")
    with RelayProcess() as relays, pytest.raises(ChildDiedError, match=r"(?s)\(exit code 1\); it said: .*TypeError"):
        # No method asks for this: a link without its arguments is a defect of ours, and ends the child.
        relays._do("add")


def test_a_silent_relay_is_noticed_in_bounded_time_and_may_come_back(
    relays: RelayProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    relays.stats()
    os.kill(relays.pid, signal.SIGSTOP)
    monkeypatch.setattr("diloco.wan.process.ANSWER_TIMEOUT_S", 0.3)
    try:
        with pytest.raises(ChildDiedError, match=r"did not answer within 0\.3 s"):
            relays.stats()
    finally:
        os.kill(relays.pid, signal.SIGCONT)
    monkeypatch.undo()
    assert relays.cpu_s() > 0, "the answer that came too late was taken for this one's"


def test_the_relay_does_not_outlive_a_parent_that_was_killed() -> None:
    program = (
        "import os, sys; from diloco.wan.process import RelayProcess; relays = RelayProcess(); relays.stats(); "
        "sys.stdout.write(str(relays.pid)); sys.stdout.flush(); os.kill(os.getpid(), 9)"
    )
    parent = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=30, check=False)
    assert parent.returncode == -9, parent.stderr.decode()
    wait_for(lambda: not alive(int(parent.stdout)), "the relay to end")
