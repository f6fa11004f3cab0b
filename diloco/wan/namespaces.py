"""Network namespaces of Linux: made, entered, and each given a TUN device that a program of ours is the cable of.

A namespace made here has no name.  It lives as long as somebody holds it open or runs in it, so nothing is to be swept
up: when the program that made it dies, however it dies, the kernel takes the namespace away with its devices
and addresses, as soon as the last process in it has ended.
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
"""What waits for the emulator to read it; drops here are its own fault and are counted."""
COMMAND_TIMEOUT_S = 20.0
CONGESTIONS = ("bbr", "cubic", "reno")


def unavailable() -> str | None:
    """Return why namespaces with emulated links cannot be made here, in words, or None where they can."""
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
    """The congestion controls of this kernel, of those that ``CONGESTIONS`` names."""
    listed = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text("ascii").split()
    return tuple(name for name in CONGESTIONS if name in listed)


def enter(place: str | int) -> None:
    """Move the calling thread, and all that it starts from now on, into the namespace at ``place``: a path or a
    descriptor.  Threads that run already stay where they are, so a process enters before it starts any.
    """
    handle = os.open(place, os.O_RDONLY | os.O_CLOEXEC) if isinstance(place, str) else place
    try:
        _call("setns", handle, CLONE_NEWNET)
    finally:
        if isinstance(place, str):
            os.close(handle)


def make() -> int:
    """Make a namespace with its loopback device up and return a descriptor that holds it; the caller stays outside."""
    with _returning():
        _call("unshare", CLONE_NEWNET)
        made = _open_own()
        # No router is ever solicited on a link whose packets are counted.
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
    """Make a TUN device in the present namespace and return its descriptor; the device goes when that is closed.

    Packets come with a virtio-net header and with TCP's segmentation left undone (see ``packets``).
    """
    import fcntl  # Here, because Windows lacks it and its users may import every module.

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
    """Give the device an ``address`` and bring it up; ``peer`` is at its other end, and nobody else yet."""
    ip("link", "set", name, "mtu", str(MTU_BYTES), "txqueuelen", str(DEVICE_QUEUE_PACKETS), "up")
    ip("addr", "add", address, "peer", peer, "dev", name, "noprefixroute")


def route(to: str, device: str, congestion: str) -> None:
    """Send what goes to ``to`` by ``device``, its TCP under the congestion control ``congestion``.

    It is a property of the route and not of the namespace: a new namespace may choose only among what the whole
    machine allows to everybody, and nothing of the machine itself is ever changed here.
    """
    ip("route", "replace", to, "dev", device, "congctl", congestion)


def write_setting(name: str, value: str, *, must: bool = True) -> None:
    """Set ``net.NAME`` of the present namespace; unless it ``must`` be there, one that is not is left."""
    path = Path("/proc/sys/net", *name.split("."))
    if must or path.exists():
        path.write_text(value, "ascii")


def end_all_in(namespaces: Sequence[int], spare: int) -> list[int]:
    """Kill every process whose first thread is in one of ``namespaces``, but for ``spare`` and the caller; returns
    their ids.
    """
    ours = {(found.st_dev, found.st_ino) for found in map(os.fstat, namespaces)}
    ended = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) in (os.getpid(), spare):
            continue
        # One that has just ended, and those of other users, are none of ours.
        with contextlib.suppress(OSError):
            found = (entry / "ns/net").stat()
            if (found.st_dev, found.st_ino) in ours:
                os.kill(int(entry.name), signal.SIGKILL)
                ended.append(int(entry.name))
    return ended


def device_drops(name: str) -> int:
    """Packets that the device dropped before the emulator read them."""
    for line in Path("/proc/thread-self/net/dev").read_text("ascii").splitlines():
        device, colon, counts = line.partition(":")
        if colon and device.strip() == name:
            return int(counts.split()[11])  # The fourth of transmission.
    raise ValueError(f"device is {name!r}: not in this namespace")


def ip(*arguments: str) -> None:
    """Run iproute2's ``ip`` in the present namespace; its words in an ``OSError`` if it fails."""
    done = subprocess.run(["ip", *arguments], capture_output=True, timeout=COMMAND_TIMEOUT_S, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.decode(errors='replace').strip()}")


@contextlib.contextmanager
def _returning() -> Iterator[None]:
    """Come back to the present namespace at the block's end."""
    here = _open_own()
    try:
        yield
    finally:
        try:
            _call("setns", here, CLONE_NEWNET)
        finally:
            os.close(here)


def _may_come_back() -> bool:
    """Whether a thread that left the present namespace could enter it again, tried by entering it from within."""
    try:
        enter("/proc/thread-self/ns/net")
    except OSError:
        return False
    return True


def _open_own() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _call(name: str, *arguments: int) -> None:
    """A call of the C library that answers 0, or leaves its reason in errno."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        reason = ctypes.get_errno()
        raise OSError(reason, f"{name}: {os.strerror(reason)}")


def _capabilities() -> int:
    """The effective capabilities of this process, a bit each."""
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0
