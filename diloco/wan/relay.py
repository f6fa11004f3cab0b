"""A WAN link between two programs on one machine: a TCP relay in user space, for any user on any system.

It models, for each link and each direction: delay and jitter, a rate shared by all connections of the direction, a
bounded queue with back-pressure to the sender, stalls like those after a lost segment, partition of one or both
directions (nothing moves, nothing is closed), reset, and refusal of new connections. All of it can change while it
runs, and the weather is the same for the same seed (see ``link``).

It does not model packet loss, reordering, congestion control and slow start. ``connect`` returns at once, because the
relay's own kernel accepts; instead the relay opens the far side one round trip later and reads nothing before.
TCP never notices a partition, because the relay's kernel continues to acknowledge, as with any proxy: only pings of the
application do. (Seen with grpcio 1.85: its pings time out by ``grpc.http2.ping_timeout_ms``, while
``grpc.keepalive_timeout_ms`` relies on TCP_USER_TIMEOUT alone and so has no effect here.) The kernel's socket buffers,
about 256 KiB at each socket of the relay, are a queue in addition to the modelled one. So use it for delay, rate,
partition and reset as an application sees them, but never to support a claim about loss or congestion.

Up is from the client (a site) to the target (the syncer). Run as a program, it hosts several links and is controlled by
JSON lines on its standard input (see ``process``); it ends when that input does.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ipaddress
import json
import math
import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING

from diloco.wan.connection import End, Lane, prepare_socket
from diloco.wan.link import DIRECTIONS, LinkOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

BACKLOG = 128
OPEN_TIMEOUT_S = 10.0
COMMAND_BYTES_MAX = 1 << 20
NICENESS = -10


def parse_address(text: str) -> tuple[str, int]:
    """Split ``host:port`` (``[::1]:80`` for IPv6)."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"address is {text!r}: host:port with a port of 0 to 65535")
    return host.removeprefix("[").removesuffix("]"), int(port)


def format_address(host: str, port: int) -> str:
    """Return ``host:port``, as ``parse_address`` reads it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def require_loopback(field: str, host: str) -> None:
    """Raise ValueError unless ``host`` is a loopback address of this machine; the message names ``field``."""
    is_loopback = host == "localhost"
    with contextlib.suppress(ValueError):
        is_loopback = is_loopback or ipaddress.ip_address(host).is_loopback
    if not is_loopback:
        raise ValueError(f"{field} is {host!r}: only loopback addresses, unless allow_remote is set")


def changed_options(options: LinkOptions, changes: Mapping[str, object]) -> LinkOptions:
    """Return ``options`` with ``changes``, checked as a whole; ``ValueError`` names an unknown or invalid field."""
    known = [field.name for field in dataclasses.fields(LinkOptions)]
    for name in changes:
        if name not in known:
            raise ValueError(f"{name} is no option of a link: one of {', '.join(known)}")
    return LinkOptions(**{**dataclasses.asdict(options), **changes})


class Relay:
    """One link: listens at one address and carries each connection to one target.

    Use it from one running event loop. ``partition`` with ``direction="up"`` or ``"down"`` silences one direction only;
    the other one still works.
    """

    def __init__(self, options: LinkOptions, *, allow_remote: bool = False) -> None:
        self.options = options
        self._allow_remote = allow_remote
        self._lanes: dict[str, Lane] = {}
        self._ends: set[End] = set()
        self._num_connections_total = 0
        self._listen = ("", 0)
        self._target = ("", 0)
        self._reservation: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._opening: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """``host:port`` to connect to."""
        return format_address(*self._listen)

    async def start(self, listen_host: str, listen_port: int, target_host: str, target_port: int) -> None:
        """Listen; port 0 means any free port (see ``address``). ``OSError`` if the address is taken."""
        assert not self._lanes, "a relay is started once"
        if not self._allow_remote:
            require_loopback("listen_host", listen_host)
            require_loopback("target_host", target_host)
        self._reservation = _bind(listen_host, listen_port)
        self._listen = self._reservation.getsockname()[:2]
        self._target = (target_host, target_port)
        self._lanes = {direction: Lane(self.options, direction) for direction in DIRECTIONS}
        try:
            await self.accept()
        except OSError:
            await self.close()
            raise

    def set(self, **changes: object) -> None:
        """Change options by name. Items whose serialisation has begun keep their instants; the rest is planned anew."""
        self.options = changed_options(self.options, changes)
        for lane in self._lanes.values():
            lane.change(self.options)

    def partition(self, direction: str = "both") -> None:
        """Stop delivery in ``direction`` ("both", "up" or "down") until ``heal``; nothing is closed or lost."""
        if direction not in ("both", *DIRECTIONS):
            raise ValueError(f"direction is {direction!r}: one of both, {', '.join(DIRECTIONS)}")
        for name, lane in self._lanes.items():
            if direction in ("both", name):
                lane.partition()

    def heal(self) -> None:
        """End the partition of both directions. Everything held crosses the link again from the start."""
        for lane in self._lanes.values():
            lane.heal()

    def reset(self) -> None:
        """End all open connections with a TCP reset at both sides; data under way is lost."""
        for end in list(self._ends):
            end.reset()
        for lane in self._lanes.values():
            lane.forget_the_dead()

    def refuse(self) -> None:
        """Refuse new connections (``ECONNREFUSED``); open ones continue."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def accept(self) -> None:
        """Accept new connections again, at the same address."""
        if self._server is None:
            listener = _bind(*self._listen)
            prepare_socket(listener)
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(self._accept_one, sock=listener, backlog=BACKLOG)

    def stats(self) -> dict[str, int | float]:
        """Return counts since the start; ``bytes_*`` are payload bytes delivered, ``connections`` those open now.

        ``late_us_p95`` is the relay's own error: how long after they were due the latest parcels came out.
        """
        up, down = self._lanes["up"], self._lanes["down"]
        lateness_ns = sorted([*up.lateness_ns, *down.lateness_ns])
        p95_ns = lateness_ns[math.ceil(0.95 * len(lateness_ns)) - 1] if lateness_ns else 0
        return {
            "bytes_up": up.num_bytes,
            "bytes_down": down.num_bytes,
            "connections": (len(self._ends) + 1) // 2,
            "connections_total": self._num_connections_total,
            "in_flight_bytes_up": up.path.in_flight_bytes,
            "in_flight_bytes_down": down.path.in_flight_bytes,
            "in_flight_bytes_peak": max(up.path.in_flight_bytes_peak, down.path.in_flight_bytes_peak),
            "late_us_p95": round(p95_ns / 1e3, 1),
            "stalls": up.path.num_stalls + down.path.num_stalls,
        }

    async def close(self) -> None:
        """Stop listening and reset all connections."""
        self.refuse()
        for task in self._opening:
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        self.reset()
        for lane in self._lanes.values():
            lane.stop()
        if self._reservation is not None:
            self._reservation.close()
            self._reservation = None
        # The transports close their sockets in the loop's next iteration.
        await asyncio.sleep(0)

    def _accept_one(self) -> End:
        client = End(self._lanes["up"], self._ends.discard, self._begin_opening)
        target = End(self._lanes["down"], self._ends.discard, self._begin_opening)
        client.pair(target)
        self._ends |= {client, target}
        self._num_connections_total += 1
        client.ask()
        return client

    def _begin_opening(self, target: End) -> None:
        task = asyncio.get_running_loop().create_task(self._open(target))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, target: End) -> None:
        try:
            connecting = asyncio.get_running_loop().create_connection(lambda: target, *self._target)
            await asyncio.wait_for(connecting, OPEN_TIMEOUT_S)
        except OSError:  # TimeoutError is an OSError too.
            target.reset()
            target.other.reset()
            return
        target.other.open_for_reading()


def _bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to the address and does not listen.

    A relay keeps one open for its lifetime, so that the system gives its port to no other process while it refuses
    connections: with SO_REUSEADDR a second socket can be bound beside it, as long as neither listens yet.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    bound.setblocking(False)
    return bound


class RelayHost:
    """Several links by name, hosted by one program."""

    def __init__(self) -> None:
        self._relays: dict[str, Relay] = {}

    async def do(self, command: Mapping[str, object]) -> object:
        """Execute one command: ``do`` names it, the other keys are its arguments. ``ValueError`` if it is invalid."""
        arguments = dict(command)
        what = str(arguments.pop("do", ""))
        if what == "add":
            return await self._add(**arguments)  # type: ignore[arg-type]
        if what == "cpu_s":
            return time.process_time()
        if what == "stats" and not arguments:
            return {name: relay.stats() for name, relay in sorted(self._relays.items())}
        name = str(arguments.pop("name", ""))
        relay = self._relays.get(name)
        if relay is None:
            raise ValueError(f"link is {name!r}: one of {', '.join(sorted(self._relays)) or '(none yet)'}")
        if what == "accept":
            await relay.accept()
            return None
        if what == "remove":
            await self._relays.pop(name).close()
            return None
        now: dict[str, Callable[..., object]] = {
            "set": relay.set,
            "partition": relay.partition,
            "heal": relay.heal,
            "reset": relay.reset,
            "refuse": relay.refuse,
            "stats": relay.stats,
        }
        if what not in now:
            raise ValueError(f"do is {what!r}: one of accept, add, cpu_s, remove, {', '.join(sorted(now))}")
        return now[what](**arguments)

    async def close(self) -> None:
        """Close all links."""
        for name in sorted(self._relays):
            await self._relays.pop(name).close()

    async def _add(
        self, name: str, options: Mapping[str, object], target: str, listen: str, allow_remote: bool = False
    ) -> str:
        if name in self._relays:
            raise ValueError(f"link is {name!r}: there is one already")
        relay = Relay(changed_options(LinkOptions(), options), allow_remote=allow_remote)
        await relay.start(*parse_address(listen), *parse_address(target))
        self._relays[name] = relay
        return relay.address


async def serve_commands() -> None:
    """Answer each JSON line of standard input with one on standard output, until the input ends or on SIGTERM."""
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader(limit=COMMAND_BYTES_MAX)
    pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    loop.add_signal_handler(signal.SIGTERM, commands.feed_eof)
    host = RelayHost()
    while line := await commands.readline():
        command = json.loads(line)
        answer: dict[str, object] = {"number": command.pop("number", None)}
        try:
            answer["value"] = await host.do(command)
        except (ValueError, OSError) as error:
            answer["refused"] = str(error)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    await host.close()
    pipe.close()


def main() -> None:
    """Host links until standard input ends."""
    # A late relay makes the links slower than configured. If the user may not raise its priority, it runs without,
    # and late_us_p95 shows how late it is.
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    asyncio.run(serve_commands())


if __name__ == "__main__":
    main()
