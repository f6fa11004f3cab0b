"""``make hostile``: a network full of malicious peers, around a site that trains all the time.

The scenarios: silent connections, half-open ones, thousands at once, streams of a byte a second, streams whose client
is killed, resets in the middle of a chunk, floods of frames and of calls, a thousand reconnects.  The site's rounds
continue in each of them, the syncer closes silent connections, and an operator gets an answer even among thousands of
connections.  Afterwards the syncer's threads, files and memory are back where they were.  The syncer may open 256
files, then 1,024, then 65,536 (or what the hard limit allows); each limit has some of the scenarios, and all have the
thousands.
"""

from __future__ import annotations

import itertools
import os
import resource
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from diloco.wire.channel import SYNC_SERVICE
from diloco.wire.client import AdminClient
from diloco.wire.convert import pack_push
from diloco.wire.messages import Unreachable
from diloco.wire.options import SecurityOptions, ServerOptions
from tests.hunts import flooding
from tests.hunts.crowd import memory_of, reset_peak
from tests.hunts.flooding import FLOODS, Due, flood
from tests.hunts.reporting import Counts, Hunt, Namespace, hunting
from tests.hunts.target import Target, View, guarded, running
from tests.loopback.cluster import Process
from tests.loopback.test_hostile import report, update
from tests.loopback.toy import RUN

HONEST, RUDE = "site-a", "site-b"
SILENT = 500
MANY = 10_000
GONE_S = 60.0
ANSWER_S = 20.0
ADOPTED_MIN = 3
GROWTH_MAX = 0.05
THREAD_BYTES = 128 << 10
"""Resident bytes of each thread that gRPC adds to its pool, up to the bound of calls; measured: 35 to 110 KiB."""
FILES_SLACK = 8
"""Files of the snapshots, the journal and the honest site's connections, which come and go."""
FLOOD_S = 10.0
FLOOD_BYTES_MAX = 768 << 20
"""The most memory of a flood of frames.  gRPC states no bound for what it reads at once; the most that was measured is
450 MiB, all of it freed with the connections.
"""
ORDER = (Due.BORNE, Due.REFUSED, Due.ENDED)
PATH = f"/{SYNC_SERVICE}/"
CHECK = "/grpc.health.v1.Health/Check"


@dataclass
class Siege:
    """The arguments of every scenario: the syncer's address, the scale, and the token of a known site."""

    address: str
    scale: float
    token: str
    hunt: Hunt
    facts: dict[str, object]
    pid: int
    """The syncer's process."""
    operator: str
    """The token of an operator."""
    adopted: Callable[[], int]
    """Returns the number of versions that the honest site has adopted so far."""

    def count(self, full: int) -> int:
        return max(5, int(full * self.scale))

    def answered(self) -> None:
        """Wait until an operator's new connection gets an answer, and note how long that took."""
        began_s = time.monotonic()
        with AdminClient(self.address, SecurityOptions(token=self.operator)) as operator:
            while time.monotonic() - began_s < ANSWER_S:
                with suppress(Unreachable):
                    operator.status()
                    self.facts["operator_answered_s"] = round(time.monotonic() - began_s, 1)
                    return
        self.hunt.violated(f"an operator got no answer in {ANSWER_S:g} s")

    def gone(self, name: str, connections: list[socket.socket]) -> None:
        """Wait until the syncer has closed all of these connections, and note how long that took."""
        began_s = time.monotonic()
        left = list(connections)
        while left and time.monotonic() - began_s < GONE_S:
            time.sleep(0.2)
            left = [each for each in left if not flooding.is_over(each)]
        if left:
            self.hunt.violated(f"{name}: {len(left)} of {len(connections)} are still open after {GONE_S:g} s")
        for each in connections:
            each.close()
        self.facts[name] = len(connections)
        self.facts[f"{name}_closed_s"] = round(time.monotonic() - began_s, 1)

    @contextmanager
    def training(self, what: str) -> Iterator[None]:
        """Check that the honest site adopts a version meanwhile."""
        before = self.adopted()
        yield
        if self.adopted() == before:
            self.hunt.violated(f"{what}: the honest site adopted nothing meanwhile")


def silent(siege: Siege) -> None:
    """Open connections that never send anything."""
    siege.gone("silent", [flooding.dial(siege.address) for _ in range(siege.count(SILENT))])


def half_open(siege: Siege) -> None:
    """Open HTTP/2 connections that answer no ping, as if their machine had lost its power."""
    siege.gone("half_open", [flooding.hello(siege.address) for _ in range(siege.count(200))])


def many(siege: Siege) -> None:
    """Open as many connections at once as the limits of open files on both sides allow."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(siege.count(MANY), soft - 1000)
    connections: list[socket.socket] = []
    for _ in range(wanted):
        try:
            connections.append(flooding.dial(siege.address))
        except OSError as error:
            siege.facts["many_stopped_by"] = str(error)
            break
    watched = select.poll()
    for each in connections:
        watched.register(each, select.POLLRDHUP | select.POLLHUP)
    siege.answered()
    siege.facts["many_at_once"] = len(connections) - len(watched.poll(0))
    siege.gone("many", connections)


def trickle(siege: Siege) -> None:
    """Make permitted calls that send a byte a second: the syncer ends each in time."""
    raw = flooding.message(report(site_id=RUDE))
    connections = []
    for method in ("Report", "Push", "Watch", "Pull", "Leave"):
        for _ in range(siege.count(10)):
            connection = flooding.hello(siege.address)
            connection.sendall(flooding.asking(PATH + method, siege.token))
            connections.append(connection)
    trickling = set(connections)
    began_s = last_s = time.monotonic()
    for second in range(int(GONE_S)):
        for connection in list(trickling):
            with suppress(OSError):
                connection.sendall(flooding.frame(flooding.DATA, 0, 1, raw[second % len(raw) :][:1]))
                if flooding.heard(connection, 1, 0.001) is None:
                    continue
            trickling.discard(connection)
            last_s = time.monotonic()
        if not trickling:
            break
        time.sleep(1.0)
    if trickling:
        siege.hunt.violated(f"{len(trickling)} of {len(connections)} calls still trickle after {GONE_S:g} s")
    for each in connections:
        each.close()
    siege.facts["trickling"] = len(connections)
    siege.facts["trickling_ended_s"] = round(last_s - began_s, 1)


def abandoned(siege: Siege) -> None:
    """Close connections in the middle of their streams, as the kernel does for a client that is killed."""
    header = flooding.message(pack_push(update(site_id=RUDE, sequence=1)))
    for _ in range(siege.count(16)):
        with flooding.hello(siege.address) as connection:
            for stream, method in ((1, "Push"), (3, "Push"), (5, "Watch"), (7, "Join")):
                connection.sendall(flooding.asking(PATH + method, siege.token, stream))
                connection.sendall(flooding.frame(flooding.DATA, 0, stream, header))
            time.sleep(0.1)  # All are under way.
    siege.facts["abandoned"] = siege.count(16)


def resets(siege: Siege) -> None:
    """Reset connections in the middle of a chunk, and of a frame's header."""
    header = flooding.message(pack_push(update(site_id=RUDE)))
    opening = flooding.asking(f"{PATH}Push", siege.token) + flooding.frame(flooding.DATA, 0, 1, header)
    cut = flooding.frame(flooding.DATA, 0, 1, flooding.message(bytes(10_000)))[:6000]
    for number in range(siege.count(200)):
        connection = flooding.hello(siege.address)
        connection.sendall(opening + (cut if number % 2 else cut[:5]))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    siege.facts["resets"] = siege.count(200)


def frames(siege: Siege) -> None:
    """Send every flood of frames over two connections of one site at once, while the honest site trains."""
    told: dict[str, object] = {}
    for name, (pieces, due) in FLOODS.items():
        before, adopted = reset_peak(siege.pid), siege.adopted()
        seconds = max(1.0, FLOOD_S * siege.scale)
        until_s = time.monotonic() + seconds
        with ThreadPoolExecutor(2) as pool, siege.training(name):
            jobs = [pool.submit(flood, siege.address, pieces(siege.token), seconds) for _ in range(2)]
            found = [job.result().due for job in jobs]
            time.sleep(max(0.0, until_s - time.monotonic()))  # A flood may be ended at once.
        taken = memory_of(siege.pid)["VmHWM"] - before
        told[name] = [*(each.value for each in found), f"{taken >> 20} MiB", f"{siege.adopted() - adopted} rounds"]
        if any(ORDER.index(each) < ORDER.index(due) for each in found):
            siege.hunt.violated(f"{name}: {[each.value for each in found]}, but {due.value} is due")
        if taken > FLOOD_BYTES_MAX:
            siege.hunt.violated(f"{name}: the syncer took {taken} bytes, more than the bound {FLOOD_BYTES_MAX}")
    siege.facts["floods"] = told


def checks(siege: Siege) -> None:
    """Check the syncer's health as strangers, as fast as possible, in more calls at once than it has threads."""
    connections = [flooding.hello(siege.address) for _ in range(siege.count(100))]
    seconds, asked = max(2.0, FLOOD_S * siege.scale), 0
    until_s = time.monotonic() + seconds
    with siege.training("checks"):
        for first in itertools.count(1, 16):
            calls = b"".join(flooding.asking(CHECK, stream=stream, body=b"") for stream in range(first, first + 16, 2))
            if time.monotonic() > until_s:
                break
            for connection in connections:
                if not flooding.is_over(connection):  # This also reads the answers.
                    with suppress(OSError):
                        connection.sendall(calls)
                        asked += 8
    for each in connections:
        each.close()
    siege.facts["checks_per_s"] = round(asked / seconds)


def takers_of_nothing(siege: Siege) -> None:
    """Make more calls than there are threads, as strangers, and accept no byte of an answer."""
    connections = []
    for _ in range(siege.count(100)):
        connections.append(flooding.hello(siege.address, flooding.TAKES_NOTHING))
        for stream in range(1, 16, 2):
            with suppress(OSError):
                connections[-1].sendall(flooding.asking(CHECK, stream=stream, body=b""))
    with siege.training("takers of nothing"):
        time.sleep(max(2.0, FLOOD_S * siege.scale))
    siege.answered()
    for each in connections:
        each.close()
    siege.facts["takers_of_nothing"] = len(connections)


def reconnects(siege: Siege) -> None:
    """Make one call on each of many connections; every call is answered."""
    answered, wanted = 0, siege.count(1000)
    for _ in range(wanted):
        with flooding.hello(siege.address) as connection:
            connection.sendall(flooding.asking(CHECK, body=b""))
            answered += flooding.heard(connection, 1, 20.0) == flooding.DATA
    siege.facts["reconnects"] = wanted
    if answered < wanted:
        siege.hunt.violated(f"{wanted - answered} of {wanted} calls after a reconnect had no answer")


SCENARIOS: Mapping[int, tuple[Callable[[Siege], None], ...]] = {
    256: (half_open, many, trickle, abandoned),
    1024: (silent, many, resets, reconnects),
    65_536: (many, frames, checks, takers_of_nothing),
}
"""The scenarios, by the number of files that the syncer may open."""


def _besieged(
    hunt: Hunt, target: Target, site: Process, scale: float, files: int, tokens: Mapping[str, str]
) -> dict[str, object]:
    fresh, scenarios = target.look(), SCENARIOS[files]
    adopted = lambda: len(site.log.of("adopted"))  # noqa: E731
    siege = Siege(target.address, scale, tokens[RUDE], hunt, {}, target.pid, tokens["admin"], adopted)
    # Warm up: fill the pools (of threads as far as strangers can), load code, and let the allocator grow with the
    # crowd: after the third time it keeps no more.
    again = (many, many, checks) if checks in scenarios else ()
    for scenario in (*scenarios, *again):
        scenario(replace(siege, scale=scale if scenario in (many, checks) else 0.01, facts={}))
    before = _settled(target, None)
    rounds: dict[str, float] = {}
    for scenario in scenarios:
        known, began_s = len(site.log.of("adopted")), time.monotonic()
        scenario(siege)
        name = scenario.__name__
        try:
            site.log.wait_for("adopted", known + ADOPTED_MIN, 20.0)
        except AssertionError as error:
            hunt.violated(f"{name}: the honest site's rounds stopped: {error}")
        rounds[name] = round((len(site.log.of("adopted")) - known) / (time.monotonic() - began_s), 2)
    after = _settled(target, before)
    _compare(hunt, before, after, scale)
    if site.log.of("error"):
        hunt.violated(f"the honest site failed: {site.errors[:300]}")
    held = {"threads": [before.threads, after.threads], "files": [before.files, after.files]}
    memory = [round(view.rss_bytes / 2**20, 1) for view in (fresh, before, after)]
    return {**siege.facts, "honest_versions_per_s": rounds, **held, "rss_mib": memory}


def _settled(target: Target, wanted: View | None) -> View:
    """Return a view once the syncer has freed what the scenarios left, or after the bound for that."""
    until_s = time.monotonic() + GONE_S
    view = target.look()
    while time.monotonic() < until_s:
        time.sleep(1.0)
        now = target.look()
        calm = now.files <= (wanted.files + FILES_SLACK if wanted else view.files)
        if calm and now.files <= view.files + FILES_SLACK and time.monotonic() > until_s - GONE_S + 8:
            return now
        view = now
    return view


def _compare(hunt: Hunt, before: View, after: View, scale: float) -> None:
    threads_max = ServerOptions(run_id=RUN).calls_max + 40  # The pool of gRPC's handlers never shrinks.
    if after.threads > max(before.threads + 4, threads_max):
        hunt.violated(f"{before.threads} threads before and {after.threads} after")
    if after.files > before.files + FILES_SLACK:
        hunt.violated(f"{before.files} open files before and {after.files} after")
    wakened = max(0, after.threads - before.threads) * THREAD_BYTES
    if scale >= 0.5 and after.rss_bytes > before.rss_bytes * (1 + GROWTH_MAX) + wakened:
        hunt.violated(f"{before.rss_bytes} bytes of memory before and {after.rss_bytes} after")
    if after.counters.get("internal", 0):
        hunt.violated(f"{after.counters['internal']} internal errors")
    if after.forged:
        hunt.violated(f"a forged line was logged: {after.forged[0]!r}")


def _raise_limit() -> None:
    """Raise the limit of open files of this process and the ones that it starts."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


@hunting(scale=(0.1, "share of the full numbers"))
def main(hunt: Hunt, asked: Namespace) -> Counts:
    _raise_limit()
    facts: dict[str, object] = {}
    for files in SCENARIOS:
        # One keepalive in five seconds, so that the hunt need not wait long until half-open peers are noticed.
        fortress, shown = guarded("tokens", hunt.folder / str(files), [HONEST, RUDE], keepalive_time_ms=5_000)
        tokens = {name: each["token"] for name, each in shown.items() if each}
        with running(replace(fortress, files=files)) as target:
            honest = replace(fortress, token=tokens[HONEST])
            with Process("site", honest, site=HONEST, address=target.address, step_s=0.02) as site:
                site.log.wait_for("adopted", ADOPTED_MIN, GONE_S)
                facts[str(files)] = _besieged(hunt, target, site, asked.scale, files, tokens)
    return facts
