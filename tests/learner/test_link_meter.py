from __future__ import annotations

from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING

from diloco.learner import transfer
from diloco.learner.transfer import LinkMeter
from diloco.wire.messages import Unreachable

if TYPE_CHECKING:
    import pytest

MS = 1_000_000


class Traffic:
    bytes_up = 0
    bytes_down = 0


def test_what_calls_took_is_what_the_link_is(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic, now = Traffic(), [0]
    monkeypatch.setattr(transfer, "time", SimpleNamespace(monotonic_ns=lambda: now[0]))
    meter = LinkMeter(traffic)  # type: ignore[arg-type]
    assert (meter.read().rtt_ns, meter.read().up_bytes_per_s) == (0, 0)
    with meter.control():
        now[0] += 20 * MS
    with meter.transfer(up=True):
        traffic.bytes_up += 1_000_000
        now[0] += 120 * MS
    with meter.transfer(up=False):
        traffic.bytes_down += 3_000_000
        now[0] += 320 * MS
    found = meter.read()
    assert (found.rtt_ns, found.up_bytes_per_s, found.down_bytes_per_s) == (20 * MS, 10_000_000, 10_000_000)
    meter.came(3_000_000, 0.15)
    assert meter.read().down_bytes_per_s == 20_000_000


def test_a_call_that_failed_measures_nothing() -> None:
    traffic = Traffic()
    meter = LinkMeter(traffic)  # type: ignore[arg-type]
    for call in (meter.control, partial(meter.transfer, up=True), partial(meter.transfer, up=False)):
        with suppress(Unreachable), call():
            traffic.bytes_up += 1_000_000
            traffic.bytes_down += 1_000_000
            raise Unreachable("gone")
    assert meter.read() == LinkMeter(traffic).read()  # type: ignore[arg-type]
