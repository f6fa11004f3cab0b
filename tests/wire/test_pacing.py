from __future__ import annotations

import threading
import time

from diloco.wire.channel import CONTROL_SHARE, Guard, Pacer, StallWatch, bulk_bytes_per_s
from diloco.wire.messages import CHUNK_BYTES_MIN, MIB

GUARD = Guard(StallWatch("never started"), 1.0)


def test_bulk_gets_what_control_leaves() -> None:
    assert bulk_bytes_per_s(0.0) == 0
    assert bulk_bytes_per_s(80.0) == int(1e7 * (1 - CONTROL_SHARE))


def test_no_bound_holds_nothing_back() -> None:
    pacer = Pacer(0)
    began_s = time.monotonic()
    for _ in range(1000):
        pacer.wait(MIB, GUARD)
    assert time.monotonic() - began_s < 10.0
    assert pacer.chunk_bytes(MIB) == MIB


def test_many_threads_together_keep_to_the_rate() -> None:
    pacer = Pacer(2_000_000)
    began_s = time.monotonic()
    threads = [threading.Thread(target=lambda: [pacer.wait(50_000, GUARD) for _ in range(5)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    # A million bytes, of which the first burst is free.
    assert 0.4 < time.monotonic() - began_s < 5.0


def test_chunks_are_short_where_the_rate_is_low() -> None:
    assert Pacer(100_000).chunk_bytes(MIB) == CHUNK_BYTES_MIN
    assert CHUNK_BYTES_MIN < Pacer(10_000_000).chunk_bytes(MIB) < MIB
    assert Pacer(1_000_000_000).chunk_bytes(MIB) == MIB


def test_who_waits_is_not_taken_for_stuck_and_goes_on_when_it_ends() -> None:
    class Touched:
        count = 0

        def touch(self) -> None:
            self.count += 1

    touched, pacer = Touched(), Pacer(1000)
    pacer.wait(2000, touched)  # type: ignore[arg-type]
    thread = threading.Thread(target=pacer.wait, args=(1000, touched))
    thread.start()
    thread.join(1.2)
    assert thread.is_alive()
    assert touched.count >= 1
    pacer.close()
    thread.join(10)
    assert not thread.is_alive()
