"""A client that knows several addresses, syncers that answer nonsense, and what is learned of a link."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from diloco.sync.events import Outcome, Reason
from diloco.sync.link import SPAN_MIN_NS, LinkEstimate, Pace
from diloco.wire import channel
from diloco.wire.channel import ADDRESSES_MAX, BYTES_MIN, Arrival, bulk_bytes_per_s, split_addresses
from diloco.wire.client import FAR_NS, LOOK_AGAIN, AdminClient, Learned, SyncClient
from diloco.wire.convert import pack_push_reply
from diloco.wire.messages import MIB, PullAsk, PushAdmitted, Refusal, Refused, Status, Unreachable, WireError
from diloco.wire.options import SecurityOptions
from diloco.wire.pulling import PullSink
from tests.hunts.mutating import spoiled
from tests.wire.conftest import Patch, Start, Wired, answering
from tests.wire.fake_syncer import RUN, join_ask, push_header, report_info
from tests.wire.samples import PAYLOAD, everything

ASK = PullAsk(RUN, "site-a", 0, -1)
AWAY = Refusal(Status.UNAVAILABLE, "this is the standby of another: ask there")


def two(start: Start) -> tuple[Wired, Wired, SyncClient]:
    one, other = start(), start()
    return one, other, one.client(address=f"{one.server.address}, {other.server.address}")


def test_everything_goes_where_the_site_was_taken_in_and_what_was_learned_of_one_link_holds_for_no_other(
    start: Start,
) -> None:
    one, other, client = two(start)
    follower = one.client(address=f"{one.server.address}, {other.server.address}")  # As in another process.
    one.syncer.join_fails = AWAY
    client.join(join_ask())
    client.push(push_header(b"four"), b"four")
    client.pull(ASK, PullSink())
    client.report(report_info())
    client.leave(1)
    follower.up.bytes_per_s = 1_000_000
    follower.follow(client.taken_in)
    assert follower.up.bytes_per_s == 0, "it was learned of another link"
    follower.pull(ASK, PullSink())
    assert follower.taken_in == client.taken_in
    assert follower.address == client.address == other.server.address
    assert other.syncer.calls == ["join", "open_push", "pull", "report", "leave", "pull"]
    assert one.syncer.calls == ["join"]
    up, down = client.traffic
    for way in (client.up, client.down):
        way.bytes_per_s = 1_000_000
    client.join(join_ask())
    assert client.estimate().rtt_min_ns > 0
    assert client.up.bytes_per_s == client.down.bytes_per_s == 1_000_000
    one.syncer.join_fails, other.syncer.join_fails = None, AWAY
    client.join(join_ask())
    assert client.estimate() == LinkEstimate()
    assert client.up.bytes_per_s == client.down.bytes_per_s == 0
    client.push(push_header(b"four"), b"four")
    client.pull(ASK, PullSink())
    assert one.syncer.calls == ["join", "join", "open_push", "pull"]
    assert client.traffic == (2 * up, 2 * down), "one count, wherever it goes"
    one.syncer.join_fails = AWAY
    with pytest.raises(Unreachable, match=r"ask there.*; .*ask there"):
        client.join(join_ask())
    client.report(report_info())
    assert one.syncer.calls[-1] == "report", "what a site has goes nowhere that has not taken it in"


SLIP = Refusal(Status.PERMISSION_DENIED, "site site-a is not in the permissions of this run")
EVICTED = Refusal(Status.PERMISSION_DENIED, "site-a was put out of the run", reason=Reason.EVICTED)
SUPERSEDED = Refusal(Status.ALREADY_EXISTS, "a newer process speaks", reason=Reason.SUPERSEDED)
OTHER_RUN = Refusal(Status.FAILED_PRECONDITION, "run_id is another")


def test_a_refusal_ends_a_join_where_it_is_final_or_the_runs_or_the_same_everywhere(start: Start) -> None:
    """Another may be an operator's slip in a file of one syncer, and ends nothing while another one is away."""
    one, other, client = two(start)
    for says, final in ((OTHER_RUN, False), (EVICTED, True)):
        one.syncer.join_fails, other.syncer.join_fails = says, AWAY
        with pytest.raises(Refused, match=says.text) as caught:
            client.join(join_ask())
        assert (caught.value.reason, caught.value.final) == (says.reason, final)
    one.syncer.join_fails = SLIP
    for says in (SLIP, SUPERSEDED):
        other.syncer.join_fails = says
        with pytest.raises(Refused, match=says.text) as caught:
            client.join(join_ask())
        assert caught.value.final == (says is SUPERSEDED)
    other.syncer.join_fails = AWAY
    with pytest.raises(Unreachable, match=r"not in the permissions.*ask there") as away:
        client.join(join_ask())
    assert away.value.refused == SLIP.text


def test_an_older_syncer_does_not_win_a_site_back(start: Start) -> None:
    one, other, client = two(start)
    with pytest.raises(Unreachable, match="of lineage 7, epoch 2, and one of epoch 3 has replaced it"):
        client.join(join_ask(lineage=7), epoch=3)
    assert one.syncer.calls == other.syncer.calls == ["join"]
    assert client.join(join_ask(lineage=7), epoch=2).epoch == 2
    assert client.join(join_ask(lineage=6), epoch=9).lineage == 7, "a later lineage may begin with any epoch"


def test_addresses_are_checked_at_the_door() -> None:
    for address, why in (
        ("", "host:port wanted"),
        ("127.0.0.1", "host:port wanted"),
        ("127.0.0.1:7077,", "host:port wanted"),
        ("127.0.0.1:7077,127.0.0.1:65536", "a port of 1 to 65535"),
        ("127.0.0.1:7077,dns:///x", "host:port wanted"),
        ("127.0.0.1:1,127.0.0.1:2,127.0.0.1:1", r"127\.0\.0\.1:1 is listed twice"),
        (",".join(f"127.0.0.1:{port}" for port in range(1, ADDRESSES_MAX + 2)), f"at most {ADDRESSES_MAX}"),
    ):
        with pytest.raises(ValueError, match=f"address is .*{why}"):
            SyncClient(address, "site-a", RUN)
    with pytest.raises(ValueError, match=r"address is 'example\.org:7077': the token would travel unencrypted"):
        SyncClient("127.0.0.1:7077,example.org:7077", "site-a", RUN, SecurityOptions(token="token-of-site-a-1"))
    addresses = ("127.0.0.1:65535", "fra.example:7077", "[::1]:7078", "unix:/run/x")
    assert split_addresses("127.0.0.1:65535,fra.example:7077, [::1]:7078,unix:/run/x") == addresses


class Nonsense(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers every call of every service with ``answers``."""

    answers: tuple[bytes, ...] = ()

    def service(self, details: Any) -> Any:
        name = details.method.rpartition("/")[2]
        if name == "Push":
            return grpc.stream_stream_rpc_method_handler(lambda requests, context: iter(self.answers))
        if name in ("Pull", "Watch"):
            return grpc.unary_stream_rpc_method_handler(lambda request, context: iter(self.answers))
        return grpc.unary_unary_rpc_method_handler(lambda request, context: self.answers[0])


def test_noise_and_what_cannot_be_are_unreachable_and_fuzzed_answers_end_in_words(wired: Wired) -> None:
    handler = Nonsense()
    with answering(handler) as address, AdminClient(address) as admin:
        client = wired.client(address=address)
        push, pull = lambda: client.push(push_header(b"abc"), b"abc"), lambda: client.pull(ASK, PullSink())
        calls: list[Callable[[], object]] = [push, pull, lambda: list(client.watch(1)), admin.status]
        for answers, asks, words in (
            *(((raw,), calls, None) for raw in (b"\xff", b"", b"\x08")),
            ((pack_push_reply(PushAdmitted(4)),), [push], "offset is 4"),
            ((), [push], "without an answer"),
            ((), [pull], "before the header"),
        ):
            handler.answers = answers
            for ask in asks:
                with pytest.raises(Unreachable, match=words):
                    ask()
        calls += [lambda: client.join(join_ask()), lambda: client.report(report_info())]
        seed = 63
        chance = random.Random(seed)
        raws = [pack(message) for message, pack, _ in everything()]
        failures = 0
        for turn in range(200):
            handler.answers = tuple(spoiled(chance.choice(raws), raws, chance) for _ in range(chance.randint(1, 3)))
            try:
                chance.choice(calls)()
            except WireError:
                failures += 1
            except Exception as error:
                raise AssertionError(f"seed {seed}, turn {turn}: {handler.answers!r}") from error
    assert failures > 100, f"seed {seed}"


@pytest.fixture
def clock(monkeypatch: Patch) -> SimpleNamespace:
    """Time that passes when it is told to."""
    clock = SimpleNamespace(now_ns=1)
    monkeypatch.setattr(channel, "time", SimpleNamespace(monotonic_ns=lambda: clock.now_ns))
    return clock


def come(arrival: Arrival, clock: SimpleNamespace, count: int = 8 * BYTES_MIN, took_ns: int = 4 * SPAN_MIN_NS) -> None:
    for _ in range(8):
        arrival.more(count // 8)
        clock.now_ns += took_ns // 8


def test_a_far_link_is_learned_by_what_arrives_and_no_other_unless_it_was_told(clock: SimpleNamespace) -> None:
    told = Learned(0.8)
    assert told.begin(10 * FAR_NS) is None
    told.forget()
    assert 90_000 < told.bytes_per_s == bulk_bytes_per_s(0.8) < 100_000, "control keeps a share"
    way = Learned(0.0)
    for rtt_ns in (0, FAR_NS // 2):
        assert way.begin(rtt_ns) is None
        way.over(None)
        assert way.bytes_per_s == 0
    little, short = (BYTES_MIN // 2, 4 * SPAN_MIN_NS), (8 * BYTES_MIN, SPAN_MIN_NS // 2)
    for count, took_ns in (little, short, (8 * BYTES_MIN, 4 * SPAN_MIN_NS)):
        arrival = way.begin(FAR_NS)
        assert arrival is not None
        assert way.bytes_per_s == 0, "little and short transfers say nothing"
        come(arrival, clock, count, took_ns)
        way.over(arrival)
    rate = 8 * BYTES_MIN * 1e9 / (4 * SPAN_MIN_NS)
    for ends in (lambda: way.begin(FAR_NS // 10), way.forget):  # It is near by now, or another one.
        come(arrival, clock)
        way.over(arrival)
        assert rate <= way.bytes_per_s <= 1.4 * rate
        ends()
        assert way.bytes_per_s == 0


RATE = 20_000_000


def transfer(
    way: Learned, clock: SimpleNamespace, link: int = RATE, share: float = 1.0, count: int = 8 * BYTES_MIN
) -> int:
    """One transfer over ``link``, of which ``share`` of what was sent arrives in its time; the rate it went at."""
    arrival = way.begin(2 * FAR_NS)
    assert arrival is not None
    rate = share * min(link, arrival.sent_at or link)
    come(arrival, clock, count, int(count * 1e9 / rate))
    way.over(arrival)
    return arrival.sent_at


def test_now_and_then_a_transfer_goes_unheld_and_a_faster_link_is_found(clock: SimpleNamespace) -> None:
    way = Learned(0.0)
    rates = [transfer(way, clock) for _ in range(2 * LOOK_AGAIN + 4)]
    assert [at for at, rate in enumerate(rates) if rate == 0] == [0, LOOK_AGAIN + 1, 2 * LOOK_AGAIN + 2]
    for _ in range(LOOK_AGAIN + 2):
        transfer(way, clock, 8 * RATE, count=64 * BYTES_MIN)
    assert way.bytes_per_s >= 0.95 * 8 * RATE
    for _ in range(LOOK_AGAIN + 1):
        rate = transfer(way, clock, count=BYTES_MIN // 2)
    assert rate == way.bytes_per_s == 0, "what is too short to judge by is not held for ever"


def test_a_machine_that_sends_late_does_not_bring_the_rate_down_without_end(clock: SimpleNamespace) -> None:
    """A share of what may go is lost at any rate, because the sender has no time for it."""
    way = Learned(0.0)
    rates = [transfer(way, clock, share=0.8) for _ in range(10 * LOOK_AGAIN)]
    lowest = min(rate for rate in rates if rate)
    assert rates.count(0) >= 9
    assert 0 < lowest == min(rate for rate in rates[: LOOK_AGAIN + 1] if rate), "it begins anew each time"


def test_a_client_learns_both_ways_of_a_far_link_and_keeps_to_them(wired: Wired, monkeypatch: Patch) -> None:
    arrived: list[int] = []

    def carried(pace: Pace, bytes_per_s: int, sent_at: int) -> None:
        arrived.append(bytes_per_s)
        pace.bytes_per_s = 300 * MIB

    monkeypatch.setattr("diloco.wire.client.FAR_NS", 0)
    monkeypatch.setattr("diloco.wire.channel.SPAN_MIN_NS", 0)
    monkeypatch.setattr(Pace, "carried", carried)
    wired.syncer.publish(PAYLOAD)
    client = wired.client(data_channels=2)
    client.join(join_ask())
    client.report(report_info())
    for sequence in (1, 2):
        assert client.push(push_header(PAYLOAD, sequence=sequence), PAYLOAD).outcome is Outcome.ACCEPTED
        assert len(arrived) == sequence
    for _ in range(2):
        assert bytes(client.pull(PullAsk(RUN, "site-a", 0, 2), PullSink()).parts[0]) == PAYLOAD
    assert len(arrived) == 4
    assert min(arrived) > 0
    assert client.up.chunk_bytes(1 << 40) < 1 << 40
    assert (wired.syncer.pulls[0].bytes_per_s, wired.syncer.pulls[-1].bytes_per_s) == (0, 300 * MIB)
