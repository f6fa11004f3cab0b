"""One site that does all it can to keep a syncer busy: the abuse of ``flood``, in a process of its own.

It has a good token and speaks only for itself.  Nothing of the product's own client is used, which would wait when it
is told to: each thread asks again as soon as it has an answer.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import grpc

from diloco.sync.options import PROTOCOL
from diloco.wire.channel import ADMIN_SERVICE, SYNC_SERVICE
from diloco.wire.chunks import cut
from diloco.wire.convert import (
    pack_join,
    pack_pull,
    pack_push,
    pack_report,
    pack_watch,
    unpack_join_reply,
    unpack_push_reply,
)
from diloco.wire.messages import Chunk, JoinAsk, PullAsk, PushCommit, PushHeader, PushResult, ReportInfo, WatchAsk
from tests.loopback.toy import RUN, Toy

SITE = "flood"
WAIT_S = 10.0
CHUNK_BYTES = 256 * 1024


@dataclass
class Order:
    """What to do until when (on the clock that all processes of a machine share), in how many threads of each kind."""

    kinds: tuple[str, ...]
    until_s: float
    threads: int
    connections: int


class Flood:
    """The calls of one thread over one connection."""

    def __init__(self, toy: Toy, token: str, channel: grpc.Channel) -> None:
        self.toy = toy
        self.metadata = (("authorization", f"Bearer {token}"),)
        self.channel = channel
        layout = toy.layout()
        self.numel = layout.fragments[0].numel
        self.payload = bytes(4 * self.numel)
        self.fingerprint = layout.fingerprint
        self.incarnation = 1
        self.sequence = 1
        self.version = 0
        self.numbers = itertools.count(os.getpid() << 32)

    def ask(self, method: str, *messages: bytes) -> Iterator[bytes]:
        service = ADMIN_SERVICE if method == "Status" else SYNC_SERVICE
        call = self.channel.stream_stream(f"/{service}/{method}")
        answer: Iterator[bytes] = call(iter(messages), timeout=WAIT_S, metadata=self.metadata)
        return answer

    def join(self, process: str) -> None:
        ask = JoinAsk(PROTOCOL, RUN, 1, SITE, process, self.fingerprint, b"", {"codec": self.toy.codec})
        reply = unpack_join_reply(next(self.ask("Join", pack_join(ask))))
        while reply.ticket:  # Our other threads join as well, and each has the others asked once more.
            reply = unpack_join_reply(next(self.ask("Join", pack_join(replace(ask, ticket=reply.ticket)))))
        self.incarnation = reply.incarnation
        self.sequence = reply.standings[0].watermark + 1
        self.version = reply.standings[0].version

    def joins(self) -> None:
        self.join("0123456789abcdef")

    def starts(self) -> None:
        """Each time as a process that nobody has seen."""
        self.join(f"{next(self.numbers):032x}")

    def reports(self) -> None:
        fields: dict[str, object] = dict.fromkeys(ReportInfo.__slots__, 1)
        fields |= {"run_id": RUN, "site_id": SITE, "loss": 2.5, "tokens_per_s": 1.0, "versions": (0,), "digests": (0,)}
        fields |= {"link": None, "units": None}
        next(self.ask("Report", pack_report(ReportInfo(**fields))))  # type: ignore[arg-type]

    def pulls(self) -> None:
        for _ in self.ask("Pull", pack_pull(PullAsk(RUN, SITE, 0, -1))):
            pass

    def watches(self) -> None:
        call = self.ask("Watch", pack_watch(WatchAsk(RUN, SITE, self.incarnation)))
        next(call)
        call.cancel()  # type: ignore[attr-defined]

    def status(self) -> None:
        next(self.ask("Status", b""))

    def noise(self) -> None:
        next(self.ask("Push", b"\xff" * 200))

    def header(self, digest: str) -> PushHeader:
        size = len(self.payload)
        here = (RUN, SITE, self.incarnation, 0, self.sequence, self.version, 50, 5, 1_000_000, 5)
        return PushHeader(*here, False, "fp32", size, self.numel, digest)

    def push(self, digest: str) -> PushResult | None:
        header = self.header(digest)
        cuts = cut((self.payload,), 0, len(self.payload), lambda: CHUNK_BYTES)
        messages = [pack_push(header), *(pack_push(Chunk.of(*each)) for each in cuts)]
        messages.append(pack_push(PushCommit(len(self.payload), digest)))
        last = [unpack_push_reply(raw) for raw in self.ask("Push", *messages)][-1]
        return last if isinstance(last, PushResult) else None

    def damaged(self) -> None:
        """Whole updates, whose bytes are not what was declared."""
        self.starts()
        self.push(hashlib.sha256(str(next(self.numbers)).encode()).hexdigest())

    def updates(self) -> None:
        """Good ones, one after the other."""
        self.starts()
        self.push(hashlib.sha256(self.payload).hexdigest())


KINDS = ("joins", "starts", "reports", "pulls", "watches", "status", "noise", "damaged", "updates")


def attack(flood: Flood, kind: str, until_s: float, counts: Counter[str], lock: threading.Lock) -> None:
    call: Callable[[], None] = getattr(flood, kind)
    while time.monotonic() < until_s:
        try:
            call()
            said = "ok"
        except grpc.RpcError as error:
            said = error.code().name.lower()
        except StopIteration:
            said = "nothing"
        with lock:
            counts[f"{kind}_{said}"] += 1


def main(toy: Toy, address: str, token: str, orders: Connection) -> None:
    """Carry out one order after the other; what came of each is sent back."""
    os.nice(19)  # What is measured is the syncer's work, not this process's share of the machine.
    while (order := orders.recv()) is not None:
        counts: Counter[str] = Counter()
        lock = threading.Lock()
        private = [("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.insecure_channel(address, private) for _ in range(order.connections)]
        turn = itertools.cycle(channels)
        with ThreadPoolExecutor(len(order.kinds) * order.threads) as pool:
            attacks = [
                pool.submit(attack, Flood(toy, token, next(turn)), kind, order.until_s, counts, lock)
                for kind in order.kinds
                for _ in range(order.threads)
            ]
        for each in attacks:
            each.result()  # A flood that has broken down is no flood: the hunt must not go on with less of it.
        for channel in channels:
            channel.close()
        orders.send(dict(counts))
