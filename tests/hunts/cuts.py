"""``make cuts``: cut the connections of one push and one pull at random offsets.

Each completes, arrives unchanged, and puts less than ``EXTRA_SHARE_MAX`` more than its bytes on the wire: only bytes in
flight at a cut are sent twice.  A relay between the two ends counts them.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diloco.sync.events import Outcome
from diloco.syncer.spool import PartialUpdate, Spool
from diloco.wire.client import SyncClient
from diloco.wire.messages import MIB, PullAsk, PushHeader, PushResult, Unreachable
from diloco.wire.options import ServerOptions
from diloco.wire.pulling import PullSink
from tests.hunts.cutting import quick_folder
from tests.hunts.reporting import Counts, Hunt, Namespace, hunting
from tests.wire.fake_syncer import RUN, FakeSyncer, push_header, serve
from tests.wire.relay import Relay

EXTRA_SHARE_MAX = 0.05
PAUSE_S = 0.02
PATIENCE_S = 600.0


class SpoolSession:
    """A push into a real spool, whose file lets the next attempt resume."""

    def __init__(self, partial: PartialUpdate) -> None:
        self._partial = partial

    @property
    def offset(self) -> int:
        return self._partial.offset

    def write(self, offset: int, data: memoryview) -> None:
        assert offset == self._partial.offset, (offset, self._partial.offset)
        self._partial.write(data)

    def commit(self, digest: str) -> PushResult:
        found = hashlib.sha256(self._partial.path.read_bytes()).hexdigest()
        return PushResult(Outcome.ACCEPTED if found == digest else Outcome.REFUSED, 1)

    def close(self) -> None:
        self._partial.close()


class SpoolingSyncer(FakeSyncer):
    """The fake syncer of the wire's tests, with a spool on disk."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._spool_on_disk = Spool(folder)

    def open_push(self, header: PushHeader) -> Any:
        return SpoolSession(self._spool_on_disk.open_partial(header))


def gaps(payload_bytes: int, cuts: int, dice: random.Random) -> list[int]:
    """Return the bytes between consecutive cuts, whose places in the payload are drawn uniformly."""
    places = sorted(dice.randrange(payload_bytes) for _ in range(cuts))
    return [after - before for before, after in zip([0, *places], places, strict=False)]


def cut_through(relay: Relay, between: list[int], attempt: Callable[[], object]) -> tuple[object, int]:
    """Repeat ``attempt`` until it has an answer; return that, and the number of cuts."""
    until_s, left, made = time.monotonic() + PATIENCE_S, list(between), 0
    while True:
        if left and not relay.waits_to_cut:
            relay.cut_after(left.pop(0))
            made += 1
        try:
            answer = attempt()
        except Unreachable:
            if time.monotonic() > until_s:
                raise
            time.sleep(PAUSE_S)
            continue
        return answer, made - relay.waits_to_cut


def arrived(way: str, answer: Any, payload: bytes) -> bool:
    """Return whether the other end has received the payload."""
    if way == "push":
        return bool(answer.outcome is Outcome.ACCEPTED)
    return bool(answer.parts[0] == payload)


@hunting(cuts=(50, "cuts of each transfer"), mib=(256, "payload in MiB"))
def main(hunt: Hunt, asked: Namespace) -> Counts:
    dice = random.Random(asked.seed)
    payload = dice.randbytes(MIB) * asked.mib
    counts: dict[str, object] = {}
    with quick_folder() as folder:
        syncer = SpoolingSyncer(folder)
        syncer.publish(payload)
        server = serve(syncer, ServerOptions(run_id=RUN))
        relay = Relay(server.address)
        client, sink = SyncClient(relay.address, "site-a", RUN), PullSink()
        ask = PullAsk(RUN, "site-a", 0, 2)
        ways: dict[str, Callable[[], object]] = {
            "push": lambda: client.push(push_header(payload), payload),
            "pull": lambda: client.pull(ask, sink),
        }
        for way, attempt in ways.items():
            before = relay.carried_up + relay.carried_down
            answer, made = cut_through(relay, gaps(len(payload), asked.cuts, dice), attempt)
            carried = relay.carried_up + relay.carried_down - before
            extra = (carried - len(payload)) / len(payload)
            counts |= {f"{way}_cuts": made, f"{way}_extra_percent": round(100 * extra, 2)}
            if made < asked.cuts:
                hunt.violated(f"{way}: it was cut only {made} times")
            if extra >= EXTRA_SHARE_MAX:
                hunt.violated(f"{way}: {100 * extra:.1f} % more than its bytes went over the wire")
            if not arrived(way, answer, payload):
                hunt.violated(f"{way}: the data that arrived differs from the data that was sent")
        client.close()
        relay.close()
        server.stop(0.5)
    return counts
