"""Sites and a syncer in separate network namespaces, joined by emulated links that carry the kernel's real TCP.

    with Netns({"site-a": PipeOptions(rtt_ms=100, mbps=200), "site-b": PipeOptions(rtt_ms=20)}) as network:
        syncer = network.popen(SYNCER, [..., "--listen", "0.0.0.0:7077"])
        site = network.popen("site-a", [..., f"{network.syncer_address('site-a')}:7077"])
        network.partition("site-a", "up")
        network.assert_faithful()

Each site has one link, to the syncer, which forwards between sites.  Unlike in ``diloco.wan.relay``, these are real:
segments of 1500 bytes that are lost one by one, congestion control and its windows, slow start, the kernel's socket
buffers and timeouts, and silence when a link is cut.  It does not model cross traffic, active queue management,
congestion marks (ECN) or reordering.  Packets cross in runs of up to 64 KiB, each of which arrives when its last
segment would.

It needs Linux and root, or the root of ``unshare -Urn`` (``unavailable`` returns why not).  It changes no setting of
the machine: its namespaces have no names and disappear with the program between them.

Measurements are valid only while the emulator keeps up: call ``assert_faithful`` at the end of each.

The emulator (``Delayer``) is a program: JSON lines control it, and it ends when its input does.  It has one thread
and no framework: any time between a packet's due instant and its delivery is the emulator's error, so the loop only
waits for the next instant, a packet or a command.  It requests a real-time priority; its counts show which one it got,
and how late it was.

A namespace made here has no name.  It lives as long as a process holds it open or runs in it, so it needs no cleanup:
however the program that made it dies, the kernel removes the namespace with its devices and addresses, as soon as the
last process in it has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import math
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.pipe import PACKET_BYTES_MAX, Pipe, PipeOptions
from diloco.wan.link import DIRECTIONS, directions
from diloco.wan.process import END_TIMEOUT_S, Child

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


TUN_DEVICE = Path("/dev/net/tun")
OWN_NAMESPACE = "/proc/thread-self/ns/net"
CLONE_NEWNET = 0x40000000
CAP_NET_ADMIN, CAP_SYS_ADMIN = 12, 21
# <linux/if_tun.h>
TUNSETIFF, TUNSETOFFLOAD, TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02
VIRTIO_HEADER_BYTES = 10
MTU_BYTES = 1500
DEVICE_QUEUE_PACKETS = 10_000
"""Length of the queue that the emulator reads; drops here are the emulator's fault and are counted."""
COMMAND_TIMEOUT_S = 20.0
CONGESTIONS = ("bbr", "cubic", "reno")
WIDE = {"ipv4.tcp_wmem": "4096 65536 67108864", "ipv4.tcp_rmem": "4096 131072 67108864"}
"""Settings for windows of the size of the link, so that a measured rate is not one of the machine's settings."""


def unavailable() -> str | None:
    """Return why namespaces with emulated links cannot be made here, or None if they can."""
    if sys.platform != "linux":
        return f"network namespaces exist only on Linux, and this is {sys.platform}"
    if not TUN_DEVICE.exists():
        return f"{TUN_DEVICE} does not exist: the kernel has no TUN devices"
    if shutil.which("ip") is None:
        return "the program ip (of iproute2) is not installed"
    held = _capabilities()
    if not (held >> CAP_SYS_ADMIN & 1 and held >> CAP_NET_ADMIN & 1 and _may_come_back()):
        return "network namespaces need root, or root in a user namespace: unshare -Urn COMMAND"
    return None


def available_congestions() -> tuple[str, ...]:
    """Return the congestion controls in ``CONGESTIONS`` that this kernel has."""
    listed = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text("ascii").split()
    return tuple(name for name in CONGESTIONS if name in listed)


def enter(place: str | int) -> None:
    """Move the calling thread, and all threads and processes that it starts later, into the namespace at ``place``.

    ``place`` is a path or a descriptor.  Other threads that already run stay where they are, so a process must enter
    before it starts any.
    """
    handle = os.open(place, os.O_RDONLY | os.O_CLOEXEC) if isinstance(place, str) else place
    try:
        _call("setns", handle, CLONE_NEWNET)
    finally:
        if isinstance(place, str):
            os.close(handle)


def make() -> int:
    """Make a namespace with its loopback device up; return a descriptor that holds it.  The caller does not enter."""
    with _returning():
        _call("unshare", CLONE_NEWNET)
        made = os.open(OWN_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC)
        # IPv6 would send router solicitations over a link whose packets are counted.
        write_setting("ipv6.conf.all.disable_ipv6", "1", must=False)
        write_setting("ipv6.conf.default.disable_ipv6", "1", must=False)
        ip("link", "set", "lo", "up")
        return made


@contextlib.contextmanager
def within(place: str | int) -> Iterator[None]:
    """Move the calling thread into the namespace at ``place`` (see ``enter``) for the block."""
    with _returning():
        enter(place)
        yield


def open_tun(name: str, address: str, peer: str, *, to: str, congestion: str) -> int:
    """Make a TUN device in the current namespace and return its descriptor; closing that removes the device.

    Packets have a virtio-net header and are not cut into TCP segments yet (see ``pipe``).  The device has ``address``,
    with ``peer`` at its other end.  Packets for ``to`` take it, with ``congestion`` as TCP's congestion control.  The
    route sets that, not the namespace: a namespace may choose only among those that the machine allows for all users,
    and this module never changes settings of the machine.
    """
    import fcntl  # Imported here, so that the module can be imported on Windows, which lacks it.

    tun = os.open(TUN_DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        request = struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI | IFF_VNET_HDR)
        fcntl.ioctl(tun, TUNSETIFF, request)
        fcntl.ioctl(tun, TUNSETVNETHDRSZ, struct.pack("i", VIRTIO_HEADER_BYTES))
        fcntl.ioctl(tun, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
        ip("link", "set", name, "mtu", str(MTU_BYTES), "txqueuelen", str(DEVICE_QUEUE_PACKETS), "up")
        ip("addr", "add", address, "peer", peer, "dev", name, "noprefixroute")
        ip("route", "replace", to, "dev", name, "congctl", congestion)
    except OSError:
        os.close(tun)
        raise
    return tun


def write_setting(name: str, value: str, *, must: bool = True) -> None:
    """Set ``net.NAME`` of the current namespace; if not ``must``, ignore a setting that does not exist."""
    path = Path("/proc/sys/net", *name.split("."))
    if must or path.exists():
        path.write_text(value, "ascii")


def end_all_in(namespaces: Sequence[int], spare: int) -> list[int]:
    """Kill every process whose first thread is in one of ``namespaces``, except ``spare`` and the caller.

    Returns the ids of the killed processes.
    """
    ours = {(found.st_dev, found.st_ino) for found in map(os.fstat, namespaces)}
    ended = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) in (os.getpid(), spare):
            continue
        # A process that has just ended, or of another user, raises OSError and is not in our namespaces.
        with contextlib.suppress(OSError):
            found = (entry / "ns/net").stat()
            if (found.st_dev, found.st_ino) in ours:
                os.kill(int(entry.name), signal.SIGKILL)
                ended.append(int(entry.name))
    return ended


def device_drops(name: str) -> int:
    """Return the number of packets that the device dropped before the emulator read them."""
    for line in Path("/proc/thread-self/net/dev").read_text("ascii").splitlines():
        device, colon, counts = line.partition(":")
        if colon and device.strip() == name:
            return int(counts.split()[11])  # The fourth column of transmission.
    raise ValueError(f"device is {name!r}: not in this namespace")


def ip(*arguments: str) -> None:
    """Run iproute2's ``ip`` in the current namespace; if it fails, raise ``OSError`` with its standard error."""
    done = subprocess.run(["ip", *arguments], capture_output=True, timeout=COMMAND_TIMEOUT_S, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.decode(errors='replace').strip()}")


@contextlib.contextmanager
def _returning() -> Iterator[None]:
    """Return to the current namespace at the block's end."""
    here = os.open(OWN_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield
    finally:
        try:
            enter(here)
        finally:
            os.close(here)


def _may_come_back() -> bool:
    """Whether a thread that left the current namespace could enter it again; tests it by entering it from inside."""
    try:
        enter(OWN_NAMESPACE)
    except OSError:
        return False
    return True


def _call(name: str, *arguments: int) -> None:
    """Call a function of the C library that returns 0 on success; otherwise raise OSError with its errno."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        reason = ctypes.get_errno()
        raise OSError(reason, f"{name}: {os.strerror(reason)}")


def _capabilities() -> int:
    """Return the effective capabilities of this process, one bit each."""
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


# --- The program that emulates the links -----------------------------------------------------------------------------

PRIORITY = 5
NICENESS = -10
PR_SET_TIMERSLACK = 29
IDLE_S = 1.0
READS_IN_A_ROW = 16
"""Packets read from one device before the others get a turn."""
SITES_MAX = 200
SYNCER = "syncer"
COMMAND_BYTES_MAX = 1 << 20


@dataclass(slots=True)
class Cable:
    """One site's link: its devices at both ends and a pipe for each direction."""

    options: PipeOptions
    namespace: int
    device: str
    """The device's name at the syncer's end; at the site's end it is ``wan``."""
    tuns: dict[str, int]
    """Descriptors of the devices, by the direction that begins there."""
    pipes: dict[str, Pipe]
    failed_writes: int = 0
    """Packets that the receiving kernel refused."""

    def let_out(self, direction: str) -> int | None:
        """Write at the far end the packets due in ``direction``; return when the next one is due, in ns, or None."""
        pipe, far = self.pipes[direction], self.tuns["down" if direction == "up" else "up"]
        # The clock is read for each packet, so that the time to write earlier ones counts as lateness too.
        while (packet := pipe.take(time.monotonic_ns())) is not None:
            try:
                os.write(far, packet)
            except OSError:
                self.failed_writes += 1
        return pipe.next_due_ns()


class Delayer:
    """All links of one network, and the commands that change them."""

    def __init__(self) -> None:
        self._cables: dict[str, Cable] = {}
        self._by_tun: dict[int, Pipe] = {}
        self.namespaces: list[int] = []
        """The syncer's, then each site's."""
        self.ended = False

    def run(self) -> None:
        """Carry packets and execute commands until the input ends."""
        commands, source = b"", sys.stdin.fileno()
        while not self.ended:
            timeout_s = self._let_out()
            ready, _, _ = select.select([source, *self._by_tun], (), (), timeout_s)
            for tun in ready:
                if tun == source:
                    continue
                pipe, now_ns = self._by_tun[tun], time.monotonic_ns()
                with contextlib.suppress(BlockingIOError):
                    for _ in range(READS_IN_A_ROW):
                        pipe.push(os.read(tun, PACKET_BYTES_MAX), now_ns)
            if source in ready:
                read = os.read(source, 65536)
                self.ended = self.ended or not read or len(commands) > COMMAND_BYTES_MAX
                *lines, commands = (commands + read).split(b"\n")
                for line in lines:
                    self._answer(json.loads(line))

    def _let_out(self) -> float:
        """Deliver all packets that are due, and return the seconds until the next one is, at most ``IDLE_S``."""
        while True:
            dues_ns = [cable.let_out(direction) for cable in self._cables.values() for direction in DIRECTIONS]
            soonest_ns = min((due_ns for due_ns in dues_ns if due_ns is not None), default=None)
            if soonest_ns is None:
                return IDLE_S
            if (left_ns := soonest_ns - time.monotonic_ns()) > 0:
                return min(left_ns / 1e9, IDLE_S)

    def _answer(self, command: dict[str, object]) -> None:
        answer: dict[str, object] = {"number": command.pop("number", None)}
        try:
            answer["value"] = self._do(str(command.pop("do", "")), command)
        except (ValueError, OSError) as error:
            answer["refused"] = str(error)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()

    def _do(self, what: str, arguments: dict[str, object]) -> object:
        if what == "start":
            return self._start(**arguments)  # type: ignore[arg-type]
        if what == "cpu_s":
            return time.process_time()
        if what == "crossed":
            return {
                name: [cable.pipes[direction].counts.bytes_out for direction in DIRECTIONS]
                for name, cable in self._cables.items()
            }
        if what == "stats":
            return {name: self._stats(cable) for name, cable in sorted(self._cables.items())}
        name = str(arguments.pop("name", ""))
        cable = self._cables.get(name)
        if cable is None:
            raise ValueError(f"site is {name!r}: one of {', '.join(sorted(self._cables)) or '(none yet)'}")
        if what == "set":
            cable.options = cable.options.changed(arguments)
            for pipe in cable.pipes.values():
                pipe.change(cable.options)
        elif what in ("partition", "heal"):
            for way in directions(str(arguments.get("direction", "both"))):
                cable.pipes[way].blocked = what == "partition"
        else:
            raise ValueError(f"do is {what!r}: one of cpu_s, crossed, heal, partition, set, start, stats")
        return None

    def _start(
        self, links: dict[str, dict[str, object]], congestion: str, settings: dict[str, str], subnet: int
    ) -> dict[str, dict[str, str]]:
        """Make the namespaces and the links; return the path of each namespace and the addresses of its link."""
        if self._cables:
            raise ValueError("do is 'start': the links exist already")
        if not 1 <= len(links) <= SITES_MAX or SYNCER in links:
            raise ValueError(f"links are {', '.join(links)}: 1 to {SITES_MAX} sites, none of them called {SYNCER}")
        syncer = make()
        self.namespaces.append(syncer)
        with within(syncer):
            for setting, value in {"ipv4.ip_forward": "1", **settings}.items():
                write_setting(setting, value)
        found = {SYNCER: {"place": f"/proc/{os.getpid()}/fd/{syncer}"}}
        for number, (name, values) in enumerate(links.items(), 1):
            options, device = PipeOptions().changed(values), f"site{number}"
            at_site, at_syncer = f"10.{subnet}.{number}.1", f"10.{subnet}.{number}.2"
            site = make()
            self.namespaces.append(site)
            with within(site):
                up = open_tun("wan", at_site, at_syncer, to="default", congestion=congestion)
                for setting, value in settings.items():
                    write_setting(setting, value)
            with within(syncer):
                down = open_tun(device, at_syncer, at_site, to=at_site, congestion=congestion)
            now_ns = time.monotonic_ns()
            pipes = {direction: Pipe(options, direction, now_ns) for direction in DIRECTIONS}
            self._cables[name] = Cable(options, site, device, {"up": up, "down": down}, pipes)
            self._by_tun |= {up: pipes["up"], down: pipes["down"]}
            place = f"/proc/{os.getpid()}/fd/{site}"
            found[name] = {"place": place, "site_address": at_site, "syncer_address": at_syncer}
        gc.freeze()
        gc.disable()  # Nothing here makes reference cycles, and a collection would delay packets.
        return found

    def _stats(self, cable: Cable) -> dict[str, object]:
        with within(cable.namespace):
            unread = device_drops("wan")
        with within(self.namespaces[0]):
            unread += device_drops(cable.device)
        scheduling = f"shared, niceness {os.getpriority(os.PRIO_PROCESS, 0)}"
        if os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK == os.SCHED_FIFO:
            scheduling = f"real time, priority {os.sched_getparam(0).sched_priority}"
        ways = {way: pipe.stats() for way, pipe in cable.pipes.items()}
        return {**ways, "failed_writes": cable.failed_writes, "unread": unread, "scheduling": scheduling}


def main() -> None:
    """Emulate links until standard input ends, at the highest priority that this user may have.

    Then kill all processes in the namespaces except the owner: they have no network without the links.
    """
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(PRIORITY))
    except OSError:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    delayer = Delayer()

    def end(number: int, frame: object) -> None:
        delayer.ended = True

    signal.signal(signal.SIGTERM, end)
    owner = os.getppid()
    try:
        delayer.run()
    finally:
        end_all_in(delayer.namespaces, owner)


# --- The owner's side: namespaces, links and processes ---------------------------------------------------------------

SUBNET = 77
LATE_MS_P99_MAX = 5.0
DEVIATIONS_MAX = 5.0


class UnfaithfulError(RuntimeError):
    """The emulator did not behave as configured, so measurements through it are not valid."""


class Netns(Child):
    """Namespaces, links and the processes in them; a context manager, safe for threads.

    ``congestion`` (of ``available_congestions``) is the congestion control of all TCP over the links, both ways.
    ``settings`` are written below ``/proc/sys/net`` in every namespace, for example
    ``{"ipv4.tcp_wmem": "4096 16384 67108864"}``; other settings are as on the machine.  ``close`` ends all processes
    started here that still run.
    """

    module = "benchmarks.netns"
    noun = "link emulator"

    def __init__(
        self,
        links: Mapping[str, PipeOptions],
        *,
        congestion: str = "bbr",
        settings: Mapping[str, str] | None = None,
        subnet: int = SUBNET,
    ) -> None:
        reason = unavailable()
        if reason is not None:
            raise OSError(reason)
        there = available_congestions()
        if congestion not in there:
            raise ValueError(f"congestion is {congestion!r}: one of {', '.join(there)}")
        if not 0 <= subnet <= 255:
            raise ValueError(f"subnet is {subnet!r}: 0 to 255, the second number of the addresses")
        super().__init__()
        self._processes: list[subprocess.Popen[Any]] = []
        try:
            options = {name: asdict(link) for name, link in links.items()}
            self._places: dict[str, dict[str, str]] = self._do(
                "start", links=options, congestion=congestion, settings=dict(settings or {}), subnet=subnet
            )
        except BaseException:
            self.close()
            raise

    def place(self, who: str) -> str:
        """Return the path of the namespace of a site or ``SYNCER``, for ``enter`` and ``nsenter --net``."""
        return self._find(who)["place"]

    def syncer_address(self, site: str) -> str:
        """Return the syncer's address at the other end of this site's link."""
        return self._find(site)["syncer_address"]

    def site_address(self, site: str) -> str:
        """Return the site's own address; other sites reach it through the syncer's namespace, over both links."""
        return self._find(site)["site_address"]

    def inside(self, who: str) -> contextlib.AbstractContextManager[None]:
        """Move the calling thread into a namespace for the block; sockets that it makes there stay there."""
        return within(self.place(who))

    def popen(self, who: str, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program in a namespace; ``options`` are those of ``subprocess.Popen``.

        The program starts inside.  If it entered later, and its owner were killed before that, the cleanup that kills
        all processes in the namespace (``end_all_in``) would miss it.
        """
        with self.inside(who):
            process = subprocess.Popen(command, **options)
        self._processes.append(process)
        return process

    def set(self, site: str, **changes: object) -> None:
        """Change options of a site's link; packets in flight on it keep their instants."""
        self._do("set", name=site, **changes)

    def partition(self, site: str, direction: str = "both") -> None:
        """Lose everything in ``direction`` ("both", "up" or "down") from now until ``heal``."""
        self._do("partition", name=site, direction=direction)

    def heal(self, site: str) -> None:
        """End a partition of both directions."""
        self._do("heal", name=site)

    def stats(self) -> dict[str, dict[str, Any]]:
        """Return by site the ``PipeCounts`` of ``up`` and ``down``, and counts of the emulator's own failures."""
        stats: dict[str, dict[str, Any]] = self._do("stats")
        return stats

    def crossed(self) -> dict[str, tuple[int, int]]:
        """Return by site the bytes that its link has delivered (up, down), headers counted; cheap to call often."""
        return {site: (up, down) for site, (up, down) in self._do("crossed").items()}

    def assert_faithful(self, late_ms_p99: float = LATE_MS_P99_MAX) -> None:
        """Raise ``UnfaithfulError`` unless every link has behaved as configured since the start.

        That means: 99 of 100 packets arrived at most ``late_ms_p99`` late, the random losses are as many as the options
        specify (within five standard deviations), and the emulator itself lost none.
        """
        for site, stats in self.stats().items():
            complaints = list(_complaints(stats, late_ms_p99))
            if complaints:
                raise UnfaithfulError(f"the link of {site} did not behave as configured: {'; '.join(complaints)}")

    def close(self) -> None:
        """End the processes started here, then the links, each in bounded time."""
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        for process in self._processes:
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(END_TIMEOUT_S)
        super().close()

    def _find(self, who: str) -> dict[str, str]:
        if who not in self._places:
            raise ValueError(f"site is {who!r}: one of {', '.join(self._places)}")
        return self._places[who]


def _complaints(stats: Mapping[str, Any], late_ms_p99: float) -> Iterator[str]:
    """Yield a message for each way in which one link did not behave as configured."""
    if stats["failed_writes"]:
        yield f"{stats['failed_writes']} packets could not be delivered"
    if stats["unread"]:
        yield f"{stats['unread']} packets were dropped before the emulator read them"
    for way in DIRECTIONS:
        counts = stats[way]
        if counts["packets_out"] and counts["late_us_p99"] > 1e3 * late_ms_p99:
            yield (
                f"{way}, 99 of 100 packets were up to {counts['late_us_p99'] / 1e3:.1f} ms late, and "
                f"{late_ms_p99:g} ms is allowed ({stats['scheduling']})"
            )
        expected = counts["expected_lost"]
        if abs(counts["lost"] - expected) > DEVIATIONS_MAX * math.sqrt(expected) + DEVIATIONS_MAX:
            yield f"{way}, {counts['lost']} of {counts['drawn']} segments were lost, and {expected:.0f} were expected"


if __name__ == "__main__":
    main()
