"""Network namespaces of Linux: make them, enter them, and give each a TUN device, which our program reads and writes.

A namespace made here has no name.  It lives as long as a process holds it open or runs in it, so it needs no cleanup:
however the program that made it dies, the kernel removes the namespace with its devices and addresses, as soon as the
last process in it has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TUN_DEVICE = Path("/dev/net/tun")
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


def unavailable() -> str | None:
    """Return why namespaces with emulated links cannot be made here, or None if they can."""
    if sys.platform != "linux":
        return f"network namespaces are Linux's own, and this is {sys.platform}"
    if not TUN_DEVICE.exists():
        return f"{TUN_DEVICE} is not there: the kernel has no TUN devices"
    if shutil.which("ip") is None:
        return "the program ip (of iproute2) is not installed"
    held = _capabilities()
    if not (held >> CAP_SYS_ADMIN & 1 and held >> CAP_NET_ADMIN & 1 and _may_come_back()):
        return "network namespaces need root, or root in namespaces of one's own: unshare -Urn COMMAND"
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
    """Make a namespace with its loopback device up; return a descriptor that holds it.  The caller stays outside."""
    with _returning():
        _call("unshare", CLONE_NEWNET)
        made = _open_own()
        # IPv6 would send router solicitations over a link whose packets are counted.
        write_setting("ipv6.conf.all.disable_ipv6", "1", must=False)
        write_setting("ipv6.conf.default.disable_ipv6", "1", must=False)
        ip("link", "set", "lo", "up")
        return made


@contextlib.contextmanager
def within(namespace: int) -> Iterator[None]:
    """Run the block in ``namespace``; for single-threaded programs."""
    with _returning():
        enter(namespace)
        yield


def open_tun(name: str) -> int:
    """Make a TUN device in the current namespace and return its descriptor; closing that removes the device.

    Packets come with a virtio-net header and before TCP segmentation (see ``packets``).
    """
    import fcntl  # Imported here, so that the module can be imported on Windows, which lacks it.

    tun = os.open(TUN_DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        request = struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI | IFF_VNET_HDR)
        fcntl.ioctl(tun, TUNSETIFF, request)
        fcntl.ioctl(tun, TUNSETVNETHDRSZ, struct.pack("i", VIRTIO_HEADER_BYTES))
        fcntl.ioctl(tun, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    except OSError:
        os.close(tun)
        raise
    return tun


def bring_up(name: str, address: str, peer: str) -> None:
    """Give the device an ``address`` and bring it up; ``peer`` is at its other end.  Adds no route."""
    ip("link", "set", name, "mtu", str(MTU_BYTES), "txqueuelen", str(DEVICE_QUEUE_PACKETS), "up")
    ip("addr", "add", address, "peer", peer, "dev", name, "noprefixroute")


def route(to: str, device: str, congestion: str) -> None:
    """Route packets for ``to`` over ``device``, with ``congestion`` as the congestion control of TCP.

    The congestion control is set on the route, not on the namespace: a namespace may choose only among those that the
    machine allows for all users, and this module never changes settings of the machine.
    """
    ip("route", "replace", to, "dev", device, "congctl", congestion)


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
    here = _open_own()
    try:
        yield
    finally:
        try:
            _call("setns", here, CLONE_NEWNET)
        finally:
            os.close(here)


def _may_come_back() -> bool:
    """Whether a thread that left the current namespace could enter it again; tests it by entering it from inside."""
    try:
        enter("/proc/thread-self/ns/net")
    except OSError:
        return False
    return True


def _open_own() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


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
