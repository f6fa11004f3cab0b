"""Sites and a syncer in network namespaces of their own, joined by links that the kernel's real TCP crosses.

    with Netns({"site-a": PipeOptions(rtt_ms=100, mbps=200), "site-b": PipeOptions(rtt_ms=20)}) as network:
        syncer = network.popen(SYNCER, [..., "--listen", "0.0.0.0:7077"])
        site = network.popen("site-a", [..., f"{network.syncer_address('site-a')}:7077"])
        network.partition("site-a", "up")
        network.assert_faithful()

Each site has one link, to the syncer, which forwards between sites.  Unlike in ``relay``, these are real: segments of
1500 bytes that are lost one by one, congestion control and its windows, slow start, the kernel's socket buffers and
time-outs, and silence when a link is cut.  It does not model cross traffic, active queue management, congestion marks
(ECN) or reordering.  Packets cross in runs of up to 64 KiB, each of which comes out when its last segment would.

It needs Linux and root, or the root of ``unshare -Urn`` (``unavailable`` returns why not).  It changes no setting of
the machine: its namespaces have no names and disappear with the program between them (see ``namespaces``, ``delayer``).

Measurements are valid only while the emulator keeps up: call ``assert_faithful`` at the end of each.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from diloco.wan import namespaces
from diloco.wan.child import END_TIMEOUT_S, Child, ChildDiedError
from diloco.wan.delayer import SYNCER
from diloco.wan.link import DIRECTIONS
from diloco.wan.namespaces import CONGESTIONS, available_congestions, unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from diloco.wan.pipe import PipeOptions

__all__ = [
    "CONGESTIONS",
    "SYNCER",
    "Netns",
    "NetnsDiedError",
    "UnfaithfulError",
    "available_congestions",
    "unavailable",
]

SUBNET = 77
LATE_MS_P99_MAX = 5.0
DEVIATIONS_MAX = 5.0


class NetnsDiedError(ChildDiedError):
    """The link emulator (``delayer``) has ended, or does not answer."""


class UnfaithfulError(RuntimeError):
    """The emulator did not behave as configured, so measurements through it are not valid."""


class Netns(Child):
    """Namespaces, links and the processes in them; a context manager, safe for threads.

    ``congestion`` (of ``available_congestions``) is the congestion control of all TCP over the links, both ways.
    ``settings`` are written below ``/proc/sys/net`` in every namespace, for example
    ``{"ipv4.tcp_wmem": "4096 16384 67108864"}``; other settings are as on the machine.  ``close`` ends all processes
    started here that still run.
    """

    module = "diloco.wan.delayer"
    noun = "link emulator"
    died = NetnsDiedError

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
            started = self._do(
                "start", links=options, congestion=congestion, settings=dict(settings or {}), subnet=subnet
            )
        except BaseException:
            self.close()
            raise
        assert isinstance(started, dict)
        self._places: dict[str, dict[str, str]] = started

    def place(self, who: str) -> str:
        """Return the path of the namespace of a site or ``SYNCER``, for ``namespaces.enter`` and ``nsenter --net``."""
        return self._find(who)["place"]

    def syncer_address(self, site: str) -> str:
        """Return the syncer's address at the other end of this site's link."""
        return self._find(site)["syncer_address"]

    def site_address(self, site: str) -> str:
        """Return the site's own address; other sites reach it through the syncer's namespace, over both links."""
        return self._find(site)["site_address"]

    @contextlib.contextmanager
    def inside(self, who: str) -> Iterator[None]:
        """Move the calling thread into a namespace for the block; sockets that it makes there stay there."""
        here = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            namespaces.enter(self.place(who))
            try:
                yield
            finally:
                namespaces.enter(here)
        finally:
            os.close(here)

    def popen(self, who: str, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program in a namespace; ``options`` are those of ``subprocess.Popen``.

        The program starts inside.  If it entered later, and its owner were killed before that, the cleanup that kills
        all processes in the namespace (``Delayer.end_the_rest``) would miss it.
        """
        with self.inside(who):
            process = subprocess.Popen(command, **options)
        self._processes.append(process)
        return process

    def set(self, site: str, **changes: object) -> None:
        """Change options of a site's link; packets under way on it keep their instants."""
        self._do("set", name=site, **changes)

    def partition(self, site: str, direction: str = "both") -> None:
        """Lose everything in ``direction`` ("both", "up" or "down") from now until ``heal``."""
        self._do("partition", name=site, direction=direction)

    def heal(self, site: str) -> None:
        """End a partition of both directions."""
        self._do("heal", name=site)

    def stats(self) -> dict[str, dict[str, Any]]:
        """Return by site the ``PipeCounts`` of ``up`` and ``down``, and counts of the emulator's own failures."""
        value = self._do("stats")
        assert isinstance(value, dict)
        return value

    def crossed(self) -> dict[str, tuple[int, int]]:
        """Return by site the bytes that have come out of its link (up, down), headers counted; cheap to call often."""
        value = self._do("crossed")
        assert isinstance(value, dict)
        return {site: (up, down) for site, (up, down) in value.items()}

    def assert_faithful(self, late_ms_p99: float = LATE_MS_P99_MAX) -> None:
        """Raise ``UnfaithfulError`` unless every link has behaved as configured since the start.

        That means: 99 of 100 packets came out at most ``late_ms_p99`` late, the random losses are as many as the
        options specify (within five standard deviations), and the emulator itself lost none.
        """
        for site, stats in self.stats().items():
            complaints = list(_complaints(stats, late_ms_p99))
            if complaints:
                raise UnfaithfulError(
                    f"the link of {site} was not what it was configured to be: {'; '.join(complaints)}"
                )

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
                f"{way}, 1 packet in 100 was up to {counts['late_us_p99'] / 1e3:.1f} ms late, or more, and "
                f"{late_ms_p99:g} is allowed ({stats['scheduling']})"
            )
        expected = counts["expected_lost"]
        if abs(counts["lost"] - expected) > DEVIATIONS_MAX * math.sqrt(expected) + DEVIATIONS_MAX:
            yield f"{way}, {counts['lost']} segments were lost of {counts['drawn']} where {expected:.0f} should be"
