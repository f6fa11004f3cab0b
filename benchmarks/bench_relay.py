"""How accurate is the relay: the configured link, compared with what two programs measure through it?

For a grid of round-trip times and rates: the round trip of 64-byte pings on an idle link, the goodput of one bulk
connection up the link in steady state, and the share of one core that the relay process used for it.  The first row is
a loopback socket without a relay; the last is the relay with no delay and no limit.  Run it on an otherwise idle
machine for figures to quote.
"""

from __future__ import annotations

import socket
import threading
import time

from benchmarks.record import finish, parser_of, percentile, record
from diloco.wan.link import LinkOptions
from diloco.wan.process import RelayProcess
from diloco.wan.relay import format_address, parse_address

RTTS_MS = (20.0, 80.0, 200.0)
RATES_MBPS = (10.0, 100.0, 1000.0)
PING_BYTES = 64
PIECE_BYTES = 1 << 18
WAIT_S = 30.0


class Target:
    """The far side: echoes each connection that begins with ``p``; counts and discards the bytes of the others."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = format_address(*self._listener.getsockname())
        self.num_bytes = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        buffer = bytearray(PIECE_BYTES)
        with connection:
            try:
                echoes = connection.recv(1) == b"p"
                while num_bytes := connection.recv_into(buffer):
                    if echoes:
                        connection.sendall(buffer[:num_bytes])
                    else:
                        self.num_bytes += num_bytes
            except ConnectionError:
                return


def connect(address: str, first: bytes) -> socket.socket:
    """Return a connection to the target, possibly through a link."""
    connection = socket.create_connection(parse_address(address), timeout=WAIT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(first)
    return connection


def measure_round_trips_ms(address: str, num_pings: int) -> list[float]:
    """Send one ping at a time and return their times; the first, which includes the handshake, is not counted."""
    trips_ms: list[float] = []
    with connect(address, b"p") as connection:
        for _ in range(num_pings + 1):
            sent_ns = time.perf_counter_ns()
            connection.sendall(b"x" * PING_BYTES)
            missing = PING_BYTES
            while missing:
                missing -= len(connection.recv(missing))
            trips_ms.append((time.perf_counter_ns() - sent_ns) / 1e6)
    return trips_ms[1:]


def measure_goodput_mbps(address: str, target: Target, rtt_ms: float, bulk_s: float) -> float:
    """Return the rate at which bytes arrive in a window of ``bulk_s``, on a connection that always has data to send.

    The warm-up before it is one and a half round trips and half a second.
    """
    stop = threading.Event()
    connection = connect(address, b"b")

    def send() -> None:
        piece = bytes(PIECE_BYTES)
        connection.settimeout(0.2)
        while not stop.is_set():
            try:
                connection.send(piece)
            except TimeoutError:
                continue

    sender = threading.Thread(target=send)
    sender.start()
    time.sleep(rtt_ms / 1e3 * 1.5 + 0.5)
    before, before_ns = target.num_bytes, time.perf_counter_ns()
    time.sleep(bulk_s)
    after, after_ns = target.num_bytes, time.perf_counter_ns()
    stop.set()
    sender.join()
    connection.close()
    return (after - before) * 8e3 / (after_ns - before_ns)


def measure_cell(
    relays: RelayProcess, target: Target, options: LinkOptions, pings: int, bulk_s: float
) -> dict[str, object]:
    """Measure one cell of the grid, on its own link."""
    name = f"{options.rtt_ms:g} ms {options.mbps:g} Mbit/s"
    address = relays.add(name, options, target.address)
    trips_ms = measure_round_trips_ms(address, pings)
    idle_late_us = relays.stats()[name]["late_us_p95"]
    cpu_s, began_s = relays.cpu_s(), time.perf_counter()
    goodput_mbps = measure_goodput_mbps(address, target, options.rtt_ms, bulk_s)
    cpu_share = (relays.cpu_s() - cpu_s) / (time.perf_counter() - began_s)
    bulk_late_us = relays.stats()[name]["late_us_p95"]
    relays.reset(name)
    relays.remove(name)
    return {
        "path": "relay",
        "rtt_ms": options.rtt_ms,
        "mbps": options.mbps,
        "rtt_ms_p50": round(percentile(trips_ms, 50), 3),
        "rtt_ms_p95": round(percentile(trips_ms, 95), 3),
        "goodput_mbps": round(goodput_mbps, 1),
        "goodput_share": round(goodput_mbps / options.mbps, 4) if options.mbps else None,
        "relay_cpu_share": round(cpu_share, 4),
        "late_us_p95_idle": idle_late_us,
        "late_us_p95_bulk": bulk_late_us,
    }


def measure_direct(target: Target, pings: int, bulk_s: float) -> dict[str, object]:
    """Measure the same through a plain loopback socket."""
    trips_ms = measure_round_trips_ms(target.address, pings)
    goodput_mbps = measure_goodput_mbps(target.address, target, 0.0, bulk_s)
    return {
        "path": "direct",
        "rtt_ms_p50": round(percentile(trips_ms, 50), 3),
        "rtt_ms_p95": round(percentile(trips_ms, 95), 3),
        "goodput_mbps": round(goodput_mbps, 1),
    }


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    pings, bulk_s = (10, 1.0) if arguments.quick else (100, 4.0)
    grid = [(rtt_ms, mbps) for rtt_ms in RTTS_MS for mbps in RATES_MBPS]
    if arguments.quick:
        grid = [(20.0, 100.0), (80.0, 100.0), (80.0, 1000.0)]
    target = Target()
    rows = [measure_direct(target, pings, bulk_s)]
    print(rows[-1], flush=True)
    with RelayProcess() as relays:
        for rtt_ms, mbps in [*grid, (0.0, 0.0)]:
            options = LinkOptions(rtt_ms=rtt_ms, mbps=mbps, seed=arguments.seed)
            rows.append(measure_cell(relays, target, options, pings, bulk_s))
            print(rows[-1], flush=True)
    target.close()
    config = {"num_pings": pings, "bulk_s": bulk_s, "quick": arguments.quick}
    finish(record("relay", config, rows, arguments.seed), save=arguments.save)


if __name__ == "__main__":
    main()
