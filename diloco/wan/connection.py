"""Moving bytes by the model: one direction of a link, and the two ends of each connection that uses it.

A connection through the relay is a pair of ``End``s: the client's and the target's.  An end puts what it reads into its
direction's ``Path``, and one timer per direction delivers what is due to the other end.  Closes and handshakes travel
like data, so they are delayed, kept in order and held by a partition too.

An end stops reading for one of three reasons, and reads again when none is left: the far side is not open yet, the
direction is as full as a link of its rate and delay can be, or the other end's receiver accepts no more.  This bounds
memory: each direction holds its window and at most one more read for each connection.
"""

from __future__ import annotations

import asyncio
import enum
import socket
import struct
from collections import deque
from dataclasses import dataclass
from time import monotonic_ns
from typing import TYPE_CHECKING

from diloco.wan.link import READ_BYTES_MAX, LinkOptions, Path

if TYPE_CHECKING:
    from collections.abc import Callable

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


@dataclass(slots=True)
class Parcel:
    """Data or a signal on its way to one end."""

    to: End
    content: bytes | Mark


class Lane:
    """One direction of a running link: the model, one timer, and the ends that wait for room."""

    def __init__(self, options: LinkOptions, direction: str) -> None:
        self.path: Path[Parcel] = Path(options, direction, monotonic_ns())
        self.num_bytes = 0
        """Payload bytes that have come out."""
        self.lateness_ns: deque[int] = deque(maxlen=LATENESS_KEPT_MAX)
        """How long after they were due the latest parcels came out: the relay's own error."""
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: deque[End] = deque()

    def send(self, to: End, content: bytes | Mark) -> None:
        """Put ``content`` on its way to the end ``to``."""
        num_bytes = len(content) if isinstance(content, bytes) else 0
        self.path.push(Parcel(to, content), num_bytes, monotonic_ns())
        if self._timer is None:
            self._arm()

    def wait_for_room(self, end: End) -> None:
        """Pause the reading of ``end`` until there is room; first come, first served."""
        end.stop_reading(StopReason.LINK_FULL)
        self._waiting.append(end)

    def partition(self) -> None:
        """Hold everything until ``heal``."""
        self.path.blocked = True
        self._arm()

    def heal(self) -> None:
        """End a partition."""
        self.path.heal(monotonic_ns())
        self._arm()

    def change(self, options: LinkOptions) -> None:
        """Change the options."""
        self.path.change(options, monotonic_ns())
        self._give_room()
        self._arm()

    def forget_the_dead(self) -> None:
        """Drop what is under way to closed ends."""
        self.path.drop(lambda parcel: parcel.to.is_gone)
        self._give_room()
        self._arm()

    def stop(self) -> None:
        """Cancel the timer for good."""
        self.path.blocked = True
        self._arm()

    def _arm(self) -> None:
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
            passage.item.to.arrive(passage.item.content)
            reached[passage.item.to] = None
        for end in reached:
            end.flush()
        self._give_room()
        if self._timer is None:
            self._arm()

    def _give_room(self) -> None:
        room_bytes = self.path.room_bytes
        # A resumed end may have nothing to send, so an empty lane resumes all: nothing else would call this again.
        while self._waiting and (room_bytes > 0 or self.path.in_flight_bytes == 0):
            self._waiting.popleft().go_on_reading(StopReason.LINK_FULL)
            room_bytes -= self.path.options.read_bytes


class End(asyncio.BufferedProtocol):
    """One socket of a connection: reads into its lane, and writes what arrives from the other end's lane."""

    def __init__(self, lane: Lane, on_gone: Callable[[End], None], on_answer: Callable[[End], None]) -> None:
        self.is_gone = False
        """True once the socket is closed, or if it will never be opened."""
        self._lane = lane
        self._on_gone = on_gone
        self._on_answer = on_answer
        self._other: End | None = None
        self._transport: asyncio.Transport | None = None
        self._buffer = memoryview(bytearray(READ_BYTES_MAX))
        self._stopped: set[StopReason] = set()
        self._arrived: deque[bytes | Mark] = deque()
        self._receiver_full = False
        self._read_all = False
        self._written_all = False

    @property
    def other(self) -> End:
        """The end at the other side of the link."""
        assert self._other is not None
        return self._other

    def pair(self, other: End) -> None:
        """Make ``other`` the other end of this connection, and this one its other end."""
        self._other, other._other = other, self

    def ask(self) -> None:
        """Begin the handshake; nothing is read until the far side is open."""
        self.stop_reading(StopReason.NOT_OPEN)
        self._lane.send(self.other, Mark.ASK)

    def open_for_reading(self) -> None:
        """Start reading: the far side is open, and the handshake is over."""
        self.go_on_reading(StopReason.NOT_OPEN)

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
        if self._stopped:
            transport.pause_reading()
        self.flush()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for one read, small enough that connections of a slow link take turns."""
        return self._buffer[: self._lane.path.options.read_bytes]

    def buffer_updated(self, nbytes: int) -> None:
        """Send what was read over the link; stop reading if the link is full."""
        self._lane.send(self.other, bytes(self._buffer[:nbytes]))
        if self._lane.path.room_bytes <= 0:
            self._lane.wait_for_room(self)

    def eof_received(self) -> bool:
        """Forward the half-close over the link; the other half stays open."""
        self._read_all = True
        self._lane.send(self.other, Mark.END_OF_STREAM)
        self._close_if_done()
        return True

    def pause_writing(self) -> None:
        """Hold what arrives: the receiver accepts no more."""
        self._receiver_full = True

    def resume_writing(self) -> None:
        """Continue to write: the receiver accepts more."""
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
        """Accept what came out of the link for this end; ``flush`` writes it."""
        if self.is_gone:
            return
        if content is Mark.ASK:
            self._lane.send(self.other, Mark.ANSWER)
        elif content is Mark.ANSWER:
            self._on_answer(self.other)
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
        if not self._stopped and self._reads():
            assert self._transport is not None
            self._transport.pause_reading()
        self._stopped.add(why)

    def go_on_reading(self, why: StopReason) -> None:
        """Remove the reason ``why``; read again unless there is another reason not to."""
        if why in self._stopped:
            self._stopped.remove(why)
            if not self._stopped and self._reads():
                assert self._transport is not None
                self._transport.resume_reading()

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

    def _reads(self) -> bool:
        # A transport whose stream has ended must not be resumed: it would report the end again.
        return self._transport is not None and not self._read_all and not self._transport.is_closing()

    def _close_if_done(self) -> None:
        if self._read_all and self._written_all and self._transport is not None:
            self._transport.close()

    def _die(self) -> None:
        if not self.is_gone:
            self.is_gone = True
            self._arrived.clear()
            # Whatever the other end still sends is dropped, so it must not wait for this end to accept it.
            self.other.go_on_reading(StopReason.RECEIVER_FULL)
            self._on_gone(self)


def prepare_socket(handle: socket.socket) -> None:
    """Make the socket send small pieces at once, and keep the kernel's own queue short."""
    handle.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    handle.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    handle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
