"""A WAN link between two programs on one machine: a TCP relay in user space, for any user on any system.

It models, for each link and each direction: delay and jitter, a rate shared by all connections of the direction, a
bounded queue with back-pressure to the sender, stalls like those after a lost segment, partition of one or both
directions (nothing moves, nothing is closed), reset, and refusal of new connections. All of it can change while it
runs, and the weather is the same for the same seed (see ``link``).

It does not model packet loss, reordering, congestion control and slow start. ``connect`` returns at once, because the
relay's own kernel accepts; instead the relay opens the far side one round trip later and reads nothing before that.
TCP never notices a partition, because the relay's kernel continues to acknowledge, as with any proxy: only pings of the
application notice it. (Seen with grpcio 1.85: its pings time out by ``grpc.http2.ping_timeout_ms``, while
``grpc.keepalive_timeout_ms`` relies on TCP_USER_TIMEOUT alone and so has no effect here.) The kernel's socket buffers,
about 256 KiB at each socket of the relay, are a queue in addition to the modelled one. So use it for delay, rate,
partition and reset as an application sees them, but never to support a claim about loss or congestion.

Up is from the client (a site) to the target (the syncer). Run as a program, it hosts several links and is controlled by
JSON lines on its standard input (see ``process``); it ends when that input does.

A connection through the relay is a pair of ``End``s: the client's and the target's.  An end puts what it reads into its
direction's ``Path``, and one timer per direction delivers what is due to the other end.  Closes and handshakes travel
like data, so they are delayed, kept in order and held by a partition too.

An end stops reading for one of three reasons, and reads again when none is left: the far side is not open yet, the
direction is as full as a link of its rate and delay can be, or the other end's receiver accepts no more.  This bounds
memory: each direction holds its window and at most one more read for each connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import ipaddress
import json
import math
import os
import signal
import socket
import struct
import sys
import time
from collections import deque
from time import monotonic_ns
from typing import TYPE_CHECKING

from diloco.wan.link import DIRECTIONS, READ_BYTES_MAX, LinkOptions, Path, directions

if TYPE_CHECKING:
    from collections.abc import Mapping


# The kernel's buffers are a queue outside the model, so they are kept small.  On loopback this costs no speed.
SOCKET_BUFFER_BYTES = 256 * 1024
WRITE_BYTES_MAX = 1024 * 1024
LATENESS_KEPT_MAX = 2048


class Mark(enum.Enum):
    """Signals that travel between data."""

    ASK = "ask"
    """The handshake on its way up."""
    ANSWER = "answer"
    """The handshake on its way down; on its arrival the relay opens the far side."""
    END_OF_STREAM = "end of stream"
    RESET = "reset"


class StopReason(enum.Enum):
    """Why an end does not read now."""

    NOT_OPEN = "not open"
    LINK_FULL = "link full"
    RECEIVER_FULL = "receiver full"


class Lane:
    """One direction of a running link: the model, one timer, and the ends that wait for room."""

    def __init__(self, options: LinkOptions, direction: str) -> None:
        self.path: Path[tuple[End, bytes | Mark]] = Path(options, direction, monotonic_ns())
        """Data and signals, each with the end that it goes to; call ``refresh`` after a change."""
        self.num_bytes = 0
        """Payload bytes delivered."""
        self.lateness_ns: deque[int] = deque(maxlen=LATENESS_KEPT_MAX)
        """How late the latest items were delivered, after their due instants: the relay's own error."""
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.waiting: deque[End] = deque()
        """Ends that have stopped reading until there is room; first come, first served."""

    def send(self, to: End, content: bytes | Mark) -> None:
        """Send ``content`` over the link to the end ``to``."""
        num_bytes = len(content) if isinstance(content, bytes) else 0
        self.path.push((to, content), num_bytes, monotonic_ns())
        if self._timer is None:
            self.refresh()

    def refresh(self) -> None:
        """Let waiting ends read if there is room, and set the timer to the instant at which the next item is due."""
        room_bytes = self.path.room_bytes
        # A resumed end may have nothing to send, so an empty lane resumes all: nothing else would call this again.
        while self.waiting and (room_bytes > 0 or self.path.in_flight_bytes == 0):
            self.waiting.popleft().go_on_reading(StopReason.LINK_FULL)
            room_bytes -= self.path.options.read_bytes
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_ns = self.path.next_due_ns()
        if due_ns is not None:
            # asyncio's clock on this platform is time.monotonic, the same as monotonic_ns.
            self._timer = self._loop.call_at(due_ns / 1e9, self._let_out)

    def _let_out(self) -> None:
        self._timer = None
        now_ns = monotonic_ns()
        reached: dict[End, None] = {}
        for passage in self.path.take_due(now_ns):
            self.num_bytes += passage.num_bytes
            self.lateness_ns.append(now_ns - passage.due_ns)
            end, content = passage.item
            end.arrive(content)
            reached[end] = None
        for end in reached:
            end.flush()
        self.refresh()


class End(asyncio.BufferedProtocol):
    """One socket of a connection: reads into its lane, and writes what arrives from the other end's lane."""

    other: End
    """The end at the other side of the link."""

    def __init__(self, relay: Relay, lane: Lane) -> None:
        self.is_gone = False
        """True once the socket is closed, or if it will never be opened."""
        self._relay = relay
        self._lane = lane
        self._transport: asyncio.Transport | None = None
        self._buffer = memoryview(bytearray(READ_BYTES_MAX))
        self._stopped: set[StopReason] = set()
        self._arrived: deque[bytes | Mark] = deque()
        self._receiver_full = False
        self._read_all = False
        self._written_all = False

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set up the socket, and write what arrived before it opened."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self.is_gone:
            self.reset()
            return
        prepare_socket(transport.get_extra_info("socket"))
        transport.set_write_buffer_limits(high=SOCKET_BUFFER_BYTES)
        self._read_or_pause()
        self.flush()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for one read, small enough that connections of a slow link take turns."""
        return self._buffer[: self._lane.path.options.read_bytes]

    def buffer_updated(self, nbytes: int) -> None:
        """Send what was read over the link; stop reading if the link is full."""
        self._lane.send(self.other, bytes(self._buffer[:nbytes]))
        if self._lane.path.room_bytes <= 0:
            self.stop_reading(StopReason.LINK_FULL)
            self._lane.waiting.append(self)

    def eof_received(self) -> bool:
        """Forward the half-close over the link; the other half stays open."""
        self._read_all = True
        self._lane.send(self.other, Mark.END_OF_STREAM)
        self._close_if_done()
        return True

    def pause_writing(self) -> None:
        """Keep arriving data here, because the receiver accepts no more."""
        self._receiver_full = True

    def resume_writing(self) -> None:
        """Continue to write, because the receiver accepts more."""
        self._receiver_full = False
        self.flush()

    def connection_lost(self, error: Exception | None) -> None:
        """Send a reset over the link to the other end, if an error closed the socket."""
        # Without an error this side closed it, and the other end knows.
        if error is not None and not self.is_gone:
            self._lane.send(self.other, Mark.RESET)
        self._die()

    # Called by the lanes and the relay.

    def arrive(self, content: bytes | Mark) -> None:
        """Accept ``content`` that crossed the link to this end; ``flush`` writes data."""
        if self.is_gone:
            return
        if content is Mark.ASK:
            self._lane.send(self.other, Mark.ANSWER)
        elif content is Mark.ANSWER:
            self._relay.open(self.other)
        elif content is Mark.RESET:
            self.flush()  # Data before a reset is still delivered.
            self.reset()
        else:
            self._arrived.append(content)

    def flush(self) -> None:
        """Write what has arrived, as much as the receiver accepts, in as few pieces as possible."""
        transport = self._transport
        if transport is None or self.is_gone or transport.is_closing():
            return
        while self._arrived and not self._receiver_full:
            pieces: list[bytes] = []
            num_bytes = 0
            while self._arrived and num_bytes < WRITE_BYTES_MAX and isinstance(self._arrived[0], bytes):
                piece = self._arrived.popleft()
                assert isinstance(piece, bytes)
                pieces.append(piece)
                num_bytes += len(piece)
            if pieces:
                transport.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))
            else:
                self._arrived.popleft()
                self._written_all = True
                transport.write_eof()
        self._close_if_done()
        if self._arrived:
            self.other.stop_reading(StopReason.RECEIVER_FULL)
        else:
            self.other.go_on_reading(StopReason.RECEIVER_FULL)

    def stop_reading(self, why: StopReason) -> None:
        """Stop reading for the reason ``why``, until ``go_on_reading`` removes it."""
        self._stopped.add(why)
        self._read_or_pause()

    def go_on_reading(self, why: StopReason) -> None:
        """Remove the reason ``why``; read again unless there is another reason not to."""
        self._stopped.discard(why)
        self._read_or_pause()

    def reset(self) -> None:
        """Close at once with a TCP reset and discard what is pending at this end."""
        transport = self._transport
        if transport is not None:
            handle: socket.socket = transport.get_extra_info("socket")
            if handle.fileno() >= 0:
                # SO_LINGER with zero seconds makes the close a reset.
                handle.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()
        self._die()

    def _read_or_pause(self) -> None:
        # A transport whose stream has ended must not be resumed: it would report the end again.
        if self._transport is None or self._read_all or self._transport.is_closing():
            return
        if self._stopped:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _close_if_done(self) -> None:
        if self._read_all and self._written_all and self._transport is not None:
            self._transport.close()

    def _die(self) -> None:
        if not self.is_gone:
            self.is_gone = True
            self._arrived.clear()
            # Whatever the other end still sends is dropped, so it must not wait for this end to accept it.
            self.other.go_on_reading(StopReason.RECEIVER_FULL)
            self._relay.ends.discard(self)


def prepare_socket(handle: socket.socket) -> None:
    """Make the socket send small pieces at once, and keep the kernel's own queue short."""
    handle.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    handle.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    handle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)


# --- A WAN link between two programs on one machine ------------------------------------------------------------------

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
        raise ValueError(f"{field} is {host!r}: only loopback addresses")


class Relay:
    """One link: listens at one address and carries each connection to one target.

    Make and use it in one running event loop. ``partition`` with ``direction="up"`` or ``"down"`` silences one
    direction only; the other one still works.
    """

    def __init__(self, options: LinkOptions, listen: tuple[str, int], target: tuple[str, int]) -> None:
        """Reserve the address ``listen``, where ``accept`` begins to listen; port 0 means any free port.

        ``OSError`` if it is taken.
        """
        require_loopback("listen_host", listen[0])
        require_loopback("target_host", target[0])
        self.options = options
        self.ends: set[End] = set()
        """Both ends of each open connection."""
        self._reservation = _bind(*listen)
        self._listen = self._reservation.getsockname()[:2]
        self._target = target
        self._lanes = {direction: Lane(options, direction) for direction in DIRECTIONS}
        self._num_connections_total = 0
        self._server: asyncio.Server | None = None
        self._opening: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """``host:port`` to connect to."""
        return format_address(*self._listen)

    def set(self, **changes: object) -> None:
        """Change options by name; ``ValueError`` for an unknown one.  Items being serialised keep their instants."""
        self.options = self.options.changed(changes)
        for lane in self._lanes.values():
            lane.path.change(self.options, monotonic_ns())
            lane.refresh()

    def partition(self, direction: str = "both") -> None:
        """Stop delivery in ``direction`` ("both", "up" or "down") until ``heal``; nothing is closed or lost."""
        for name in directions(direction):
            self._lanes[name].path.blocked = True
            self._lanes[name].refresh()

    def heal(self) -> None:
        """End the partition of both directions. Everything held crosses the link again from the start."""
        for lane in self._lanes.values():
            lane.path.heal(monotonic_ns())
            lane.refresh()

    def reset(self) -> None:
        """End all open connections with a TCP reset at both sides; data in flight is lost."""
        for end in list(self.ends):
            end.reset()
        for lane in self._lanes.values():
            lane.path.drop(lambda item: item[0].is_gone)
            lane.refresh()

    def refuse(self) -> None:
        """Refuse new connections (``ECONNREFUSED``); open ones continue."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def accept(self) -> None:
        """Accept new connections, always at the same address."""
        if self._server is None:
            listener = _bind(*self._listen)
            prepare_socket(listener)
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(self._take_in, sock=listener, backlog=BACKLOG)

    def stats(self) -> dict[str, int | float]:
        """Return counts since the start; ``bytes_*`` are payload bytes delivered, ``connections`` those open now.

        ``late_us_p95`` is the relay's own error: how late, after their due instants, the latest items were delivered.
        """
        up, down = self._lanes["up"], self._lanes["down"]
        lateness_ns = sorted([*up.lateness_ns, *down.lateness_ns])
        p95_ns = lateness_ns[math.ceil(0.95 * len(lateness_ns)) - 1] if lateness_ns else 0
        return {
            "bytes_up": up.num_bytes,
            "bytes_down": down.num_bytes,
            "connections": (len(self.ends) + 1) // 2,
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
        self.partition()  # No timer runs from now on.
        self._reservation.close()
        # The transports close their sockets in the loop's next iteration.
        await asyncio.sleep(0)

    def _take_in(self) -> End:
        """Begin a connection; its client is not read before the handshake has crossed the link and the target is open.

        Returns the client's end.
        """
        client, target = End(self, self._lanes["up"]), End(self, self._lanes["down"])
        client.other, target.other = target, client
        self.ends |= {client, target}
        self._num_connections_total += 1
        client.stop_reading(StopReason.NOT_OPEN)
        self._lanes["up"].send(target, Mark.ASK)
        return client

    def open(self, target: End) -> None:
        """Connect ``target`` in a separate task, then read from its client."""

        async def connect() -> None:
            try:
                connecting = asyncio.get_running_loop().create_connection(lambda: target, *self._target)
                await asyncio.wait_for(connecting, OPEN_TIMEOUT_S)
            except OSError:  # TimeoutError is an OSError too.
                target.reset()
                target.other.reset()
                return
            target.other.go_on_reading(StopReason.NOT_OPEN)

        task = asyncio.get_running_loop().create_task(connect())
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)


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


_OF_ONE_LINK = ("heal", "partition", "refuse", "reset", "set")
"""Commands that are methods of ``Relay``."""


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
        if what == "stats":
            return {name: relay.stats() for name, relay in sorted(self._relays.items())}
        name = str(arguments.pop("name", ""))
        relay = self._relays.get(name)
        if relay is None:
            raise ValueError(f"link is {name!r}: one of {', '.join(sorted(self._relays)) or '(none yet)'}")
        if what == "remove":
            await self._relays.pop(name).close()
        elif what == "accept":
            await relay.accept()
        elif what in _OF_ONE_LINK:
            getattr(relay, what)(**arguments)
        else:
            known = ", ".join(sorted(("accept", "add", "cpu_s", "remove", "stats", *_OF_ONE_LINK)))
            raise ValueError(f"do is {what!r}: one of {known}")
        return None

    async def close(self) -> None:
        """Close all links."""
        for name in sorted(self._relays):
            await self._relays.pop(name).close()

    async def _add(self, name: str, options: Mapping[str, object], target: str, listen: str) -> str:
        if name in self._relays:
            raise ValueError(f"link is {name!r}: a link of that name exists already")
        relay = Relay(LinkOptions().changed(options), parse_address(listen), parse_address(target))
        try:
            await relay.accept()
        except OSError:
            await relay.close()
            raise
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
