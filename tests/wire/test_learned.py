from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from diloco.sync.events import Outcome
from diloco.sync.link import SPAN_MIN_NS, Pace
from diloco.wire import channel
from diloco.wire.channel import BYTES_MIN, Arrival, bulk_bytes_per_s
from diloco.wire.client import FAR_S, LOOK_AGAIN, Learned
from diloco.wire.messages import MIB, PullAsk
from diloco.wire.pulling import PullSink
from tests.wire.fake_syncer import RUN, join_ask, push_header
from tests.wire.test_pushing import PAYLOAD

if TYPE_CHECKING:
    from tests.wire.conftest import Wired


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 1
        monkeypatch.setattr(channel, "time", SimpleNamespace(monotonic_ns=lambda: self.now_ns))


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


RATE = 20_000_000


def transfer(way: Learned, clock: Clock, link: int = RATE, share: float = 1.0, count: int = 8 * BYTES_MIN) -> int:
    """One transfer over ``link``, of which ``share`` of what was sent arrives in its time; the rate it went at."""
    arrival = way.begin(2 * FAR_S)
    assert arrival is not None
    rate = share * min(link, arrival.sent_at or link)
    come(arrival, clock, count, int(count * 1e9 / rate))
    way.over(arrival)
    return arrival.sent_at


def test_a_rate_is_not_held_for_a_link_that_is_near_or_another(clock: Clock) -> None:
    for ends in (lambda way: way.begin(FAR_S / 10), lambda way: way.forget()):
        way = Learned(0.0)
        transfer(way, clock)
        assert way.bytes_per_s > 0
        ends(way)
        assert way.bytes_per_s == 0
    told = Learned(80.0)
    told.forget()
    assert told.bytes_per_s == bulk_bytes_per_s(80.0)


def test_now_and_then_a_transfer_goes_unheld_and_a_faster_link_is_found(clock: Clock) -> None:
    way = Learned(0.0)
    rates = [transfer(way, clock) for _ in range(2 * LOOK_AGAIN + 4)]
    assert [at for at, rate in enumerate(rates) if rate == 0] == [0, LOOK_AGAIN + 1, 2 * LOOK_AGAIN + 2]
    for _ in range(LOOK_AGAIN + 2):
        transfer(way, clock, 8 * RATE, count=64 * BYTES_MIN)
    assert way.bytes_per_s >= 0.95 * 8 * RATE


def test_a_machine_that_sends_late_does_not_bring_the_rate_down_without_end(clock: Clock) -> None:
    """A share of what may go is lost at any rate, because whoever sends has no time for it."""
    way = Learned(0.0)
    rates = [transfer(way, clock, share=0.8) for _ in range(10 * LOOK_AGAIN)]
    lowest = min(rate for rate in rates if rate)
    assert rates.count(0) >= 9
    assert 0 < lowest == min(rate for rate in rates[: LOOK_AGAIN + 1] if rate), "it begins anew each time"


def test_what_is_too_short_to_judge_by_is_not_held_for_ever(clock: Clock) -> None:
    way = Learned(0.0)
    transfer(way, clock)
    for _ in range(LOOK_AGAIN + 1):
        rate = transfer(way, clock, count=BYTES_MIN // 2)
    assert rate == way.bytes_per_s == 0


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
    arrival = Arrival(0)
    for held in (0, 3 * MIB, 2 * MIB, 5 * MIB, 4 * MIB):
        arrival.held(held)
        clock.now_ns += SPAN_MIN_NS
    arrival.held(6 * MIB)
    assert arrival.rate() > 0


def test_a_client_learns_both_ways_of_a_far_link_and_keeps_to_them(
    wired: Wired, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived: list[int] = []

    def carried(pace: Pace, bytes_per_s: int, sent_at: int) -> None:
        arrived.append(bytes_per_s)
        pace.bytes_per_s = 300 * MIB

    monkeypatch.setattr("diloco.wire.client.FAR_S", 0.0)
    monkeypatch.setattr("diloco.wire.channel.SPAN_MIN_NS", 0)
    monkeypatch.setattr(Pace, "carried", carried)
    asked: list[int] = []
    pull = wired.syncer.pull
    wired.syncer.pull = lambda ask, identity: (asked.append(ask.bytes_per_s), pull(ask, identity))[1]  # type: ignore[method-assign]
    wired.syncer.publish(PAYLOAD)
    client = wired.client(data_channels=2)
    client.join(join_ask())
    client._round_trips_s.append(0.1)
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
    monkeypatch.setattr("diloco.wire.client.FAR_S", 0.0)
    monkeypatch.setattr("diloco.wire.channel.SPAN_MIN_NS", 0)
    monkeypatch.setattr(Pace, "carried", lambda *_: pytest.fail("learned"))
    client = wired.client(up_mbps=8000.0, down_mbps=8000.0)
    wired.syncer.publish(PAYLOAD)
    client.push(push_header(PAYLOAD), PAYLOAD)
    client.pull(PullAsk(RUN, "site-a", 0, 2), PullSink())
