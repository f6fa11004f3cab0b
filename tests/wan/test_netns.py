"""Links between network namespaces: what the kernel's own TCP measures through them."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import bench_wan, netns
from benchmarks.netns import (
    LATE_MS_P99_MAX,
    SITES_MAX,
    SYNCER,
    WIDE,
    Netns,
    UnfaithfulError,
    _complaints,
    available_congestions,
    unavailable,
)
from benchmarks.pipe import PipeOptions
from diloco.wan.process import ChildDiedError
from tests.runs.processes import ROOT, wait_for
from tests.runs.test_supervise import alive

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    Counts = Mapping[str, Mapping[str, int]]

needs_namespaces = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
WAIT_S = 20.0
SILENCE_S = 0.4
TRIES = 5
SLEEP = ["sleep", "60"]


@contextlib.contextmanager
def connected(network: Netns, near: str = "a", far: str = SYNCER) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection from ``near`` to ``far``: both ends, with ``near``'s first."""
    with network.inside(far):
        listening = socket.create_server(("0.0.0.0", 0))
    listening.settimeout(WAIT_S)
    host = network.syncer_address(near) if far == SYNCER else network.site_address(far)
    with listening, network.inside(near):
        client = socket.create_connection((host, listening.getsockname()[1]), timeout=WAIT_S)
        server, _ = listening.accept()
    with client, server:
        for end in (client, server):
            end.settimeout(WAIT_S)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield client, server


def round_trips_ms(client: socket.socket, server: socket.socket, count: int = 9) -> list[float]:
    """The least of them is the link's; in the others this process may have waited for its turn on a busy machine."""
    found = []
    for _ in range(count):
        began = time.perf_counter()
        client.sendall(b"?")
        assert server.recv(1) == b"?"
        server.sendall(b"!")
        assert client.recv(1) == b"!"
        found.append(1e3 * (time.perf_counter() - began))
    return found


def least_ms(client: socket.socket, server: socket.socket, wanted_ms: float) -> float:
    """The least round trip, until it is below ``wanted_ms`` or for ``WAIT_S``: a busy machine only adds to it."""
    until_s, least = time.monotonic() + WAIT_S, float("inf")
    while least >= wanted_ms and time.monotonic() < until_s:
        least = min(least, *round_trips_ms(client, server))
    return least


def goodput_mbps(sender: socket.socket, receiver: socket.socket, warm_up_s: float, measured_s: float) -> float:
    """What arrives of a stream that always has more to send."""
    piece, buffer = bytes(1 << 18), bytearray(1 << 20)

    def send() -> None:
        with contextlib.suppress(OSError):
            while True:
                sender.sendall(piece)

    sending = threading.Thread(target=send)
    sending.start()
    for span_s in (warm_up_s, measured_s):
        num_bytes, began = 0, time.perf_counter()
        while (taken_s := time.perf_counter() - began) < span_s:
            num_bytes += receiver.recv_into(buffer)
    receiver.close()  # What comes now is answered with a reset, which ends the sender.
    sending.join(WAIT_S)
    return num_bytes * 8e-6 / taken_s


@needs_namespaces
def test_the_round_trip_is_what_it_was_told_to_be_and_changes_while_it_runs() -> None:
    def carried() -> tuple[int, int]:
        counts = network.stats()["a"]
        return counts["up"]["bytes_out"], counts["down"]["bytes_out"]

    with Netns({"a": PipeOptions(rtt_ms=40), "b": PipeOptions(rtt_ms=20)}) as network:
        with connected(network) as ends:
            assert 40 <= least_ms(*ends, 46) < 46
            network.set("a", rtt_ms=10.0)
            round_trips_ms(*ends, 1)
            assert 10 <= least_ms(*ends, 16) < 16
        with connected(network, "a", "b") as ends:
            assert 30 <= least_ms(*ends, 36) < 36, "two sites meet over both their links"
        network.assert_faithful(late_ms_p99=250.0)
        # The last acknowledgement of a connection that is closed may still be on its way.
        wait_for(lambda: network.crossed()["a"] == carried(), "all that crossed to be carried")
        counts = network.stats()["a"]
        assert counts["up"]["segments_out"] >= 18 <= counts["down"]["segments_out"]
        words = r"the link of a .* 99 of 100 packets were up to .* and 0 ms is allowed"
        with pytest.raises(UnfaithfulError, match=words):
            network.assert_faithful(late_ms_p99=0.0)
        assert 0 < network.cpu_s() < WAIT_S


@needs_namespaces
@pytest.mark.parametrize("congestion", ["bbr", "cubic"])
def test_both_ends_of_a_link_have_the_congestion_control_that_was_asked_for(congestion: str) -> None:
    if congestion not in available_congestions():
        pytest.skip(f"this kernel has no {congestion}")
    with Netns({"a": PipeOptions()}, congestion=congestion) as network, connected(network) as ends:
        for end in ends:
            name = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            assert name.rstrip(b"\0").decode() == congestion


@needs_namespaces
def test_a_partition_is_silence_in_its_direction_and_tcp_sends_again_after_it() -> None:
    with Netns({"a": PipeOptions(rtt_ms=4)}) as network, connected(network) as (client, server):
        ways = {"up": (client, server), "down": (server, client)}
        for direction in ("up", "down", "both"):
            round_trips_ms(client, server, 1)
            before = network.stats()["a"]
            network.partition("a", direction)
            cut = [way for way in ways if direction in ("both", way)]
            for way, (sender, receiver) in ways.items():
                sender.sendall(b"x")
                if way in cut:
                    assert not select.select([receiver], [], [], SILENCE_S)[0]
                else:
                    assert receiver.recv(1) == b"x"
            network.heal("a")
            for way in cut:
                assert ways[way][1].recv(1) == b"x"
            assert network.stats()["a"][cut[0]]["cut_off"] > before[cut[0]]["cut_off"]
        with pytest.raises(ValueError, match="direction is 'left'"):
            network.partition("a", "left")


@needs_namespaces
@pytest.mark.parametrize(
    ("rtt_ms", "mbps", "least", "most", "warm_up_s", "measured_s", "late_ms_p99"),
    [
        (10, 40, 28, 41, 0.7, 1.0, 250.0),
        *(
            pytest.param(50, mbps, 0.90 * mbps, 0.975 * mbps, 3.0, 6.0, LATE_MS_P99_MAX, marks=pytest.mark.hunt)
            for mbps in (100, 1000)
        ),
    ],
)
def test_one_stream_fills_a_clean_link_and_no_more_than_its_rate_crosses(
    rtt_ms: float, mbps: float, least: float, most: float, warm_up_s: float, measured_s: float, late_ms_p99: float
) -> None:
    """Measured again, on another network, while that is too little or the emulator was late: a machine that is busy
    with something else slows the stream and delays the packets.  Where the emulator is late each time, the machine has
    no time for it, and there is nothing to be said of the link.
    """
    for left in reversed(range(TRIES)):
        with Netns({"a": PipeOptions(rtt_ms=rtt_ms, mbps=mbps)}, settings=WIDE) as network:
            with connected(network) as (client, server):
                found = goodput_mbps(client, server, warm_up_s, measured_s)
            try:
                network.assert_faithful(late_ms_p99)
            except UnfaithfulError as error:
                if not left:
                    pytest.skip(f"this machine is too busy to emulate it: {error}")
            else:
                if found > least or not left:
                    break
    assert least < found < most


@needs_namespaces
def test_a_namespace_has_its_own_loopback_and_settings_and_leaves_us_where_we_were() -> None:
    before, setting = os.readlink("/proc/thread-self/ns/net"), Path("/proc/sys/net/ipv4/tcp_wmem")
    ours, namespace = setting.read_text("ascii"), netns.make()
    with contextlib.suppress(ZeroDivisionError), netns.within(namespace):
        assert [name for _, name in socket.if_nameindex()] == ["lo"]
        with socket.create_server(("127.0.0.1", 0)) as listening:
            socket.create_connection(listening.getsockname(), timeout=5).close()
        netns.write_setting("ipv4.tcp_wmem", "4096 16384 67108864")
        assert setting.read_text("ascii").split()[2] == "67108864"
        netns.write_setting("ipv4.no_such_thing", "1", must=False)
        with pytest.raises(OSError, match=r"ip link set nothing up: .*nothing"):
            netns.ip("link", "set", "nothing", "up")
        raise ZeroDivisionError
    os.close(namespace)
    assert os.readlink("/proc/thread-self/ns/net") == before, "after an error inside too"
    assert setting.read_text("ascii") == ours


@needs_namespaces
def test_a_process_is_in_its_namespace_from_its_birth_and_nothing_is_left_of_it() -> None:
    before, here = socket.if_nameindex(), Path("/proc/thread-self/ns/net").stat()
    with Netns({"a": PipeOptions()}) as network:
        assert socket.if_nameindex() == before
        for who in ("a", SYNCER):
            there = Path(network.place(who)).stat()
            for _ in range(20):
                sleeper = network.popen(who, SLEEP)
                found = Path(f"/proc/{sleeper.pid}/ns/net").stat()
                assert (found.st_dev, found.st_ino) == (there.st_dev, there.st_ino)
        place = Path(network.place("a"))
    assert Path("/proc/thread-self/ns/net").stat().st_ino == here.st_ino, "its parent has stayed there"
    assert sleeper.poll() is not None
    assert not alive(network.pid)
    assert not place.exists()


@needs_namespaces
def test_nothing_is_left_of_an_owner_or_an_emulator_that_was_killed() -> None:
    program = (
        "import os, sys; from benchmarks.netns import Netns; from benchmarks.pipe import PipeOptions\n"
        "network = Netns({'a': PipeOptions()}); sleeper = network.popen('a', ['sleep', '60'])\n"
        "sys.stdout.write(f'{network.pid} {sleeper.pid}'); sys.stdout.flush(); os.kill(os.getpid(), 9)"
    )
    owner = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, timeout=60, check=False)
    assert owner.returncode == -9
    pids = [int(pid) for pid in owner.stdout.split()]
    wait_for(lambda: not any(map(alive, pids)), "the emulator and what is in its namespaces to end")
    with Netns({"a": PipeOptions()}) as network:
        sleeper = network.popen("a", SLEEP)
        os.kill(network.pid, signal.SIGKILL)
        with pytest.raises(ChildDiedError, match=r"the link emulator \d+ has ended \(exit code -9\)"):
            network.stats()
    assert sleeper.poll() is not None


@pytest.mark.slow
@needs_namespaces
def test_root_in_namespaces_of_one_s_own_is_root_enough() -> None:
    if subprocess.run(["unshare", "-Urn", "true"], capture_output=True, timeout=WAIT_S, check=False).returncode:
        pytest.skip("this machine gives nobody namespaces of his own")
    test = test_the_round_trip_is_what_it_was_told_to_be_and_changes_while_it_runs.__name__
    program = (
        f"from tests.wan import test_netns as here\nassert here.unavailable() is None\nhere.{test}()\nprint('passed')"
    )
    done = subprocess.run(
        ["unshare", "-Urn", sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == b"passed\n"


@needs_namespaces
def test_bad_input_is_refused_in_words_before_or_after_the_start() -> None:
    one = {"a": PipeOptions()}
    many = {f"s{number}": PipeOptions() for number in range(SITES_MAX + 1)}
    for links, given, words in (
        (one, {"congestion": "vegas"}, "congestion is 'vegas': one of "),
        (one, {"subnet": 256}, "subnet is 256: 0 to 255"),
        (one, {"settings": {"ipv4.tcp_nothing": "1"}}, "tcp_nothing"),
        ({}, {}, f"1 to {SITES_MAX} sites"),
        (many, {}, f"1 to {SITES_MAX} sites"),
        ({SYNCER: PipeOptions()}, {}, "none of them called syncer"),
    ):
        with pytest.raises(ValueError, match=words):
            Netns(links, **given)
    with Netns({"a": PipeOptions(rtt_ms=10)}) as network:
        for ask in (network.place, network.syncer_address, network.heal):
            with pytest.raises(ValueError, match="site is 'b': one of "):
                ask("b")
        with pytest.raises(ValueError, match="jitter_ms is 20: 0 to rtt_ms=10"):
            network.set("a", jitter_ms=20)
        assert alive(network.pid)


def test_the_benchmark_of_far_links_names_them_in_its_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_wan", "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        bench_wan.main()
    assert "1000Mbit/s 100ms 0.1%" in " ".join(capsys.readouterr().out.split())


FINE: dict[str, Any] = {"packets_out": 100, "late_us_p99": 100.0, "lost": 5, "drawn": 5000, "expected_lost": 5.0}
STATS: dict[str, Any] = {"failed_writes": 0, "unread": 0, "scheduling": "shared", "up": FINE, "down": FINE}


def test_each_way_of_being_unfaithful_is_named() -> None:
    assert not list(_complaints(STATS, 5.0))
    for changes, words in (
        ({"failed_writes": 1}, "1 packets could not be delivered"),
        ({"unread": 2}, "2 packets were dropped before the emulator read them"),
        ({"up": {**FINE, "late_us_p99": 8192.0}}, "up, 99 of 100 packets were up to 8.2 ms late"),
        ({"down": {**FINE, "lost": 25}}, "down, 25 of 5000 segments were lost, and 5 were expected"),
        ({"down": {**FINE, "lost": 0, "expected_lost": 100.0}}, "down, 0 of 5000 segments were lost, and 100"),
    ):
        (complaint,) = _complaints({**STATS, **changes}, 5.0)
        assert words in complaint


# --- Namespaces: why not, in words; what is in one, and what is left of it --------------------------------------------


@pytest.mark.parametrize(
    ("attribute", "value", "words"),
    [
        ("sys.platform", "darwin", "network namespaces exist only on Linux, and this is darwin"),
        ("TUN_DEVICE", Path("/dev/net/none"), "/dev/net/none does not exist"),
        ("shutil.which", lambda name: None if name == "ip" else name, r"the program ip \(of iproute2\)"),
        ("_may_come_back", lambda: False, "need root, or root in a user namespace: unshare -Urn COMMAND"),
        ("_capabilities", lambda: 1 << netns.CAP_NET_ADMIN, "need root"),
    ],
)
def test_what_is_missing_is_said_in_words(
    attribute: str, value: object, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # All that a machine may lack is there, but for what the case takes away.
    monkeypatch.setattr("benchmarks.netns.sys.platform", "linux")
    monkeypatch.setattr("benchmarks.netns.TUN_DEVICE", tmp_path)
    monkeypatch.setattr("benchmarks.netns.shutil.which", lambda name: name)
    monkeypatch.setattr("benchmarks.netns._capabilities", lambda: -1)
    monkeypatch.setattr("benchmarks.netns._may_come_back", lambda: True)
    assert netns.unavailable() is None
    monkeypatch.setattr(f"benchmarks.netns.{attribute}", value)
    assert re.search(words, str(netns.unavailable()))
    with pytest.raises(OSError, match=words):
        Netns({"a": PipeOptions()})
