"""What does the wire cost on loopback, compared with a raw socket that carries the same bytes?

One process sends and another receives and discards (no storage, no digest of the whole), like a site and a syncer.
Each repetition measures every way once, so that load on the machine slows all of them.  The first repetition is a
warm-up and is not counted.
"""

from __future__ import annotations

import argparse
import random
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

# As a script it measures its own tree, not an installed package.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.record import finish, parser_of, percentile, record
from diloco.sync.events import Outcome
from diloco.wire.chunks import checksum
from diloco.wire.client import SyncClient
from diloco.wire.handlers import PullSource
from diloco.wire.messages import KIB, MIB, PullAsk, PullHeader, PushHeader, PushResult
from diloco.wire.options import ClientOptions, SecurityOptions, ServerOptions
from diloco.wire.pulling import PullSink
from diloco.wire.server import RunningServer

RUN = "bench"
DIGEST = "0" * 64
RECEIVE_BYTES = MIB


class NullSession:
    """An admitted push whose bytes are discarded."""

    offset = 0

    def write(self, offset: int, data: memoryview) -> None:
        """Discard the bytes."""

    def commit(self, digest: str) -> PushResult:
        """Accept any content."""
        return PushResult(Outcome.ACCEPTED, 1)

    def close(self) -> None:
        """Do nothing."""


class NullSyncer:
    """A ``SyncerApi`` that stores nothing; only Push and Pull are used."""

    def __init__(self, payload: bytes) -> None:
        header = PullHeader(
            0, 0, 1, True, "fp32", len(payload) // 4, len(payload), (len(payload),), DIGEST, checksum((payload,)), ()
        )
        self._source = PullSource(header, (payload,))

    def open_push(self, header: PushHeader) -> NullSession:
        """Admit everything."""
        return NullSession()

    def pull(self, ask: PullAsk, identity: object) -> PullSource:
        """Return the same version each time."""
        return self._source


def random_bytes(count: int, seed: int) -> bytes:
    """Return random bytes, drawn MiB by MiB, because Python's generator returns less than 256 MiB at once."""
    dice = random.Random(seed)
    return b"".join(dice.randbytes(min(MIB, count - at)) for at in range(0, count, MIB))


def serve_until_closed(payload_bytes: int, seed: int, chunk_bytes: int) -> None:
    """Run the other process, the gRPC server and the raw socket, until its standard input ends."""
    payload = random_bytes(payload_bytes, seed)
    api: Any = NullSyncer(payload)
    options = ServerOptions(run_id=RUN, chunk_bytes=chunk_bytes)
    server = RunningServer(api, options, SecurityOptions(), lambda what, why: None)
    server.start(ready=True)
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=answer_raw, args=(listener, payload), daemon=True).start()
    print(server.address, listener.getsockname()[1], flush=True)
    for _ in sys.stdin:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        print(usage.ru_utime + usage.ru_stime, flush=True)
    server.stop(1.0)


def answer_raw(listener: socket.socket, payload: bytes) -> None:
    """Serve the raw socket: after ``u`` read the payload and answer one byte, after ``d`` send it."""
    connection, _ = listener.accept()
    buffer = bytearray(RECEIVE_BYTES)
    while wish := connection.recv(1):
        if wish == b"u":
            receive(connection, buffer, len(payload))
            connection.sendall(b".")
        else:
            connection.sendall(payload)


def receive(connection: socket.socket, buffer: bytearray, wanted_bytes: int) -> None:
    """Read and discard ``wanted_bytes``."""
    while wanted_bytes:
        wanted_bytes -= connection.recv_into(buffer, min(wanted_bytes, len(buffer)))


class Peer:
    """This end: the four ways of moving the payload, each a call without arguments."""

    def __init__(self, payload: bytes, seed: int, chunk_bytes: int) -> None:
        self._payload = payload
        command = [sys.executable, __file__, "--serve", str(len(payload)), str(chunk_bytes), "--seed", str(seed)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        address, port = self._process.stdout.readline().split()
        options = ClientOptions(chunk_bytes=chunk_bytes)
        self._client = SyncClient(address, "site-a", RUN, options=options)
        self._raw = socket.create_connection(("127.0.0.1", int(port)))
        self._buffer = bytearray(RECEIVE_BYTES)
        self._sink = PullSink()
        self._sequence = 0

    def push(self) -> None:
        """Push one update through the client and the service."""
        self._sequence += 1
        size = len(self._payload)
        header = PushHeader(RUN, "site-a", 1, 0, self._sequence, 0, 1, 1, 1, 1, False, "fp32", size, size, DIGEST)
        assert self._client.push(header, self._payload).outcome is Outcome.ACCEPTED

    def pull(self) -> None:
        """Pull one version through the client and the service."""
        pulled = self._client.pull(PullAsk(RUN, "site-a", 0, -1), self._sink)
        assert len(pulled.parts[0]) == len(self._payload)
        self._sink.give_back(pulled)

    def raw_up(self) -> None:
        """Send the same bytes, and receive one."""
        self._raw.sendall(b"u")
        self._raw.sendall(self._payload)
        self._raw.recv(1)

    def raw_down(self) -> None:
        """Receive the same bytes."""
        self._raw.sendall(b"d")
        receive(self._raw, self._buffer, len(self._payload))

    def cpu_s(self) -> float:
        """Return the CPU seconds of both processes so far."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("cpu\n")
        self._process.stdin.flush()
        mine = resource.getrusage(resource.RUSAGE_SELF)
        return float(self._process.stdout.readline()) + mine.ru_utime + mine.ru_stime

    def close(self) -> None:
        """End both processes."""
        self._client.close()
        self._raw.close()
        self._process.communicate(timeout=20)


def measure(payload: bytes, seed: int, chunk_bytes: int, repeats: int) -> list[dict[str, Any]]:
    """Return a row for each way at one chunk size."""
    peer = Peer(payload, seed, chunk_bytes)
    ways = {"push": peer.push, "raw socket up": peer.raw_up, "pull": peer.pull, "raw socket down": peer.raw_down}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    cpu_s = dict.fromkeys(ways, 0.0)
    for repeat in range(repeats + 1):
        for name, move in ways.items():
            cpu_before_s, begun_s = peer.cpu_s(), time.perf_counter()
            move()
            taken_s = time.perf_counter() - begun_s
            if repeat:
                seconds[name].append(taken_s)
                cpu_s[name] += peer.cpu_s() - cpu_before_s
    peer.close()
    gigabytes = len(payload) / 1e9
    return [
        {
            "way": name,
            "payload_mib": len(payload) / MIB,
            "chunk_kib": chunk_bytes // KIB,
            "p50_ms": round(1e3 * percentile(taken, 50), 2),
            "p95_ms": round(1e3 * percentile(taken, 95), 2),
            "p50_gb_per_s": round(gigabytes / percentile(taken, 50), 3),
            "cpu_s_per_gb": round(cpu_s[name] / repeats / gigabytes, 2),
        }
        for name, taken in seconds.items()
    ]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--payload-mib", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--serve", nargs=2, type=int, metavar=("BYTES", "CHUNK"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve_until_closed(options.serve[0], options.seed, options.serve[1])
        return
    payload_mib, repeats = (8, 3) if options.quick else (options.payload_mib, options.repeats)
    payload = random_bytes(payload_mib * MIB, options.seed)
    rows = []
    for chunk_bytes in (256 * KIB, MIB):
        rows += measure(payload, options.seed, chunk_bytes, repeats)
    for row in rows:
        print(
            f"{row['way']:<16} chunks of {row['chunk_kib']:>5} KiB  p50 {row['p50_ms']:>8} p95 {row['p95_ms']:>8} ms  "
            f"{row['p50_gb_per_s']:>6} GB/s  {row['cpu_s_per_gb']:>5} CPU-s/GB"
        )
    config = {"payload_mib": payload_mib, "chunk_kib": [256, 1024], "processes": 2}
    finish(record("wire", config, rows, options.seed, repeats=repeats), save=options.save)


if __name__ == "__main__":
    main()
