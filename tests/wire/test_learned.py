from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from diloco.sync.events import Outcome
from diloco.sync.pace import SPAN_MIN_NS, Pace
from diloco.wire import learned
from diloco.wire.learned import BYTES_MIN, FAR_S, Arrival, Learned
from diloco.wire.messages import MIB, PullAsk
from diloco.wire.pacing import bulk_bytes_per_s
from diloco.wire.pulled import PullSink
from tests.wire.fake_syncer import RUN, join_ask, push_header
from tests.wire.test_pushing import PAYLOAD

if TYPE_CHECKING:
    from tests.wire.conftest import Wired


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 1
        monkeypatch.setattr(learned.time, "monotonic_ns", lambda: self.now_ns)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def come(arrival: Arrival, clock: Clock, count: int = 8 * BYTES_MIN, took_ns: int = 4 * SPAN_MIN_NS) -> None:
    for _ in range(8):
        arrival.more(count // 8)
        clock.now_ns += took_ns // 8


def test_what_was_told_is_kept_to_and_nothing_is_learned() -> None:
    told = Learned(80.0)
    assert told.bytes_per_s == bulk_bytes_per_s(80.0)
    assert told.begin(10 * FAR_S) is None


@pytest.mark.parametrize("rtt_s", [0.0, FAR_S / 2])
def test_a_near_link_and_one_of_which_nothing_is_known_are_not_held_back(rtt_s: float) -> None:
    near = Learned(0.0)
    assert near.begin(rtt_s) is None
    near.over(None)
    assert near.bytes_per_s == 0


def test_a_far_link_is_learned_by_what_arrives(clock: Clock) -> None:
    far = Learned(0.0)
    arrival = far.begin(FAR_S)
    assert arrival is not None
    come(arrival, clock)
    far.over(arrival)
    rate = 8 * BYTES_MIN * 1e9 / (4 * SPAN_MIN_NS)
    assert rate <= far.bytes_per_s <= 1.4 * rate


@pytest.mark.parametrize(("count", "took_ns"), [(8 * BYTES_MIN, SPAN_MIN_NS // 2), (BYTES_MIN // 2, 4 * SPAN_MIN_NS)])
def test_little_and_short_transfers_say_nothing(clock: Clock, count: int, took_ns: int) -> None:
    far = Learned(0.0)
    arrival = far.begin(FAR_S)
    assert arrival is not None
    come(arrival, clock, count, took_ns)
    far.over(arrival)
    far.over(far.begin(FAR_S))
    assert far.bytes_per_s == 0


def test_what_is_held_never_goes_back(clock: Clock) -> None:
    arrival = Arrival()
    for held in (0, 3 * MIB, 2 * MIB, 5 * MIB, 4 * MIB):
        arrival.held(held)
        clock.now_ns += SPAN_MIN_NS
    arrival.held(6 * MIB)
    assert arrival.rate() > 0


def test_a_client_learns_both_ways_of_a_far_link_and_keeps_to_them(
    wired: Wired, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived: list[int] = []

    def carried(pace: Pace, bytes_per_s: int) -> None:
        arrived.append(bytes_per_s)
        pace.bytes_per_s = 300 * MIB

    monkeypatch.setattr(learned, "FAR_S", 0.0)
    monkeypatch.setattr(learned, "SPAN_MIN_NS", 0)
    monkeypatch.setattr(Pace, "carried", carried)
    asked: list[int] = []
    pull = wired.syncer.pull
    wired.syncer.pull = lambda ask, identity: (asked.append(ask.bytes_per_s), pull(ask, identity))[1]  # type: ignore[method-assign]
    wired.syncer.publish(PAYLOAD)
    client = wired.client(data_channels=2)
    client.join(join_ask())
    for sequence in (1, 2):
        assert client.push(push_header(PAYLOAD, sequence=sequence), PAYLOAD).outcome is Outcome.ACCEPTED
        assert len(arrived) == sequence
    for _ in range(2):
        assert bytes(client.pull(PullAsk(RUN, "site-a", 0, 2), PullSink()).parts[0]) == PAYLOAD
    assert len(arrived) == 4
    assert min(arrived) > 0
    assert client._pacer.chunk_bytes(1 << 40) < 1 << 40
    assert set(asked[:1] + asked[-1:]) == {0, 300 * MIB}


def test_a_client_that_was_told_learns_nothing(wired: Wired, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned, "FAR_S", 0.0)
    monkeypatch.setattr(learned, "SPAN_MIN_NS", 0)
    monkeypatch.setattr(Pace, "carried", lambda pace, rate: pytest.fail("learned"))
    client = wired.client(up_mbps=8000.0, down_mbps=8000.0)
    wired.syncer.publish(PAYLOAD)
    client.push(push_header(PAYLOAD), PAYLOAD)
    client.pull(PullAsk(RUN, "site-a", 0, 2), PullSink())
