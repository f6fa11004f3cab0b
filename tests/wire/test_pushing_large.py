"""Transfers that are large or long, and what else goes over the link meanwhile."""

from __future__ import annotations

import mmap
import resource
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.record import percentile
from diloco.sync.events import Outcome
from diloco.wan.link import LinkOptions
from diloco.wan.process import RelayProcess
from diloco.wire.client import SyncClient
from diloco.wire.messages import MIB, PushHeader, PushResult
from diloco.wire.options import ClientOptions
from tests.wire.fake_syncer import DIGEST, RUN, report_info

if TYPE_CHECKING:
    from tests.wire.conftest import Wired

LARGE_BYTES = (9 << 28) + 12345  # 2.25 GiB and a bit: over 2^31.
# Slow enough that a machine with a quarter of a core to spare fills it, with a queue of 0.4 s behind it.
LINK = LinkOptions(rtt_ms=100.0, mbps=20.0)


class CountingSession:
    """Keeps nothing but how much came; every byte is to be a zero, looked at in samples."""

    def __init__(self) -> None:
        self.offset = 0

    def write(self, offset: int, data: memoryview) -> None:
        assert offset == self.offset
        assert data[0] == data[len(data) // 2] == data[-1] == 0
        self.offset += len(data)

    def commit(self, digest: str) -> PushResult:
        return PushResult(Outcome.ACCEPTED, self.offset)

    def close(self) -> None:
        return


def header_of(payload_bytes: int, sequence: int) -> PushHeader:
    return PushHeader(RUN, "site-a", 1, 0, sequence, 0, 1, 1, 1, 1, False, "int4", payload_bytes, 1, DIGEST)


def counting(wired: Wired, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(header: PushHeader) -> Any:
        return CountingSession()

    monkeypatch.setattr(wired.syncer, "open_push", opened)


@pytest.mark.slow
@pytest.mark.parametrize("channels", [1, 3])
def test_an_update_of_more_than_2_gib_goes_through_in_little_memory(
    wired: Wired, monkeypatch: pytest.MonkeyPatch, channels: int
) -> None:
    counting(wired, monkeypatch)
    client = wired.client(data_channels=channels, chunk_bytes=MIB)
    # Private and never written: every page of it is the one of zeros, and takes no memory.  It is never closed: a
    # thread of gRPC may hold the last chunk for a moment longer than the push takes.
    nothing = mmap.mmap(-1, LARGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = client.push(header_of(LARGE_BYTES, 1), memoryview(nothing))
    assert result == PushResult(Outcome.ACCEPTED, LARGE_BYTES)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 256 * 1024


@pytest.mark.slow
@pytest.mark.parametrize("channels", [1, 4])
def test_heartbeats_pass_while_bulk_fills_the_link(
    wired: Wired, monkeypatch: pytest.MonkeyPatch, channels: int
) -> None:
    counting(wired, monkeypatch)
    over = threading.Event()
    with RelayProcess() as relay:
        address = relay.add("site", LINK, wired.server.address)
        options = ClientOptions(data_channels=channels, up_mbps=LINK.mbps)
        with SyncClient(address, "site-a", RUN, options=options) as client:

            def push() -> None:
                sequence, payload = 0, bytes(16 * MIB)
                while not over.is_set():
                    sequence += 1
                    client.push(header_of(len(payload), sequence), payload)

            bulk = threading.Thread(target=push)
            client.report(report_info())
            bulk.start()
            time.sleep(2.0)
            sent_before, began_s, took_s = client.bytes_up, time.monotonic(), []
            for _ in range(60):
                at_s = time.monotonic()
                client.report(report_info())
                took_s.append(time.monotonic() - at_s)
                time.sleep(0.05)
            carried_mbps = (client.bytes_up - sent_before) * 8e-6 / (time.monotonic() - began_s)
            over.set()
            bulk.join(60)
    assert carried_mbps > 0.7 * LINK.mbps, "the link was not full"
    # Behind a queue kept full the median is over 0.5 s, and behind a whole update 6.7 s.  The few that are slow may be
    # those of moments in which a busy machine ran none of these processes.
    assert percentile(took_s, 50) < 2 * LINK.rtt_ms / 1e3 + 0.2, sorted(took_s)
    assert percentile(took_s, 95) < 3.0, sorted(took_s)[-5:]
