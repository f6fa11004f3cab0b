"""A site's and an operator's end, over real connections that break, damage bytes, fall silent and come back."""

from __future__ import annotations

import gc
import itertools
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest

from diloco.sync.events import Ending, FateTold, FinalAnnounced, Outcome
from diloco.sync.link import LinkEstimate
from diloco.wire.channel import Stream
from diloco.wire.client import AdminClient, SyncClient
from diloco.wire.messages import (
    KIB,
    MIB,
    Alive,
    MalformedMessage,
    Published,
    PullAsk,
    PushResult,
    Refusal,
    Refused,
    Status,
    Unreachable,
)
from diloco.wire.pulling import Patience, PullSink
from tests.wire.conftest import Aside, Patch, Start, Wired
from tests.wire.fake_syncer import DIGEST, RUN, FakeSession, FakeSyncer, join_ask, push_header, report_info
from tests.wire.relay import WAIT_S, Relay, until_reached, wait_until
from tests.wire.samples import FATE, MARK, MARKED, PAYLOAD

ASK = PullAsk(RUN, "site-a", 0, 2)


def asks(client: SyncClient) -> list[Callable[[], object]]:
    return [
        lambda: client.push(push_header(b"abc"), b"abc"),
        lambda: client.pull(ASK, PullSink()),
        lambda: client.report(report_info()),
    ]


def test_push_and_pull_carry_a_payload_once_and_count_their_bytes(wired: Wired) -> None:
    client = wired.client()
    assert client.push(push_header(PAYLOAD), PAYLOAD) == PushResult(Outcome.ACCEPTED, 3)
    assert wired.syncer.accepted["site-a", 0, 1] == PAYLOAD
    wired.syncer.publish(PAYLOAD)
    pulled = client.pull(ASK, PullSink())
    assert pulled.header == wired.syncer.version
    assert [bytes(part) for part in pulled.parts] == [PAYLOAD]
    for counted in client.traffic:
        assert len(PAYLOAD) < counted < len(PAYLOAD) + 32 * (len(PAYLOAD) // (64 * KIB) + 1) + 600
    anew = wired.client()  # The other one has found a welcome, and would not wait to be admitted.
    assert anew.push(push_header(PAYLOAD), PAYLOAD).outcome is Outcome.DUPLICATE
    assert anew.up.bytes < 600, "a duplicate's payload was sent"
    with pytest.raises(MalformedMessage, match="payload_bytes is 3: the payload has 4"):
        client.push(push_header(b"abc"), b"abcd")  # Our own defect.


MS = 1_000_000


def test_what_calls_took_is_what_the_link_is(start: Start, monkeypatch: Patch) -> None:
    wired, clock = start(), itertools.count(0, 20 * MS)
    client = wired.client()

    def waited(took_s: float) -> Patience:
        """A wait in which other pulls bring a gigabyte, and the transfer then takes ``took_s``."""
        client.down.count(1 << 30)
        monkeypatch.setattr(Patience, "carried_s", took_s)
        return Patience(0.01)

    now = SimpleNamespace(monotonic=time.monotonic, monotonic_ns=lambda: next(clock))
    monkeypatch.setattr("diloco.wire.client.time", now)
    assert client.estimate() == LinkEstimate()
    client.report(report_info())
    assert client.estimate() == LinkEstimate(rtt_ns=20 * MS, rtt_min_ns=20 * MS)
    clock = itertools.count(0, 120 * MS)  # Of a transfer's time one round trip was a wait.
    client.push(push_header(PAYLOAD), PAYLOAD)
    wired.syncer.publish(PAYLOAD)
    client.pull(ASK, PullSink())
    up, down = client.traffic
    found = LinkEstimate(20 * MS, 20 * MS, 10 * up, 10 * down)
    assert client.estimate() == found
    client.pull(ASK, PullSink(), waited(0.0))
    assert client.estimate() == found, "one that took up what was here did not wait, and is not timed"
    wired.syncer.publish(numel=8)
    client.pull(replace(ASK, have_version=3), PullSink(), waited(1e-6))
    assert client.estimate() == found, "nothing came of it"
    wired.syncer.publish(PAYLOAD, epoch=1)
    client.pull(ASK, PullSink(), waited(0.05))
    found = replace(found, down_bytes_per_s=20 * len(PAYLOAD))
    assert client.estimate() == found, "without what others brought meanwhile"
    wired.server.stop(0.0)
    with pytest.raises(Unreachable):
        client.report(report_info())
    assert client.estimate() == found, "a call that failed measures nothing"


@pytest.mark.parametrize("channels", [1, 3])
def test_a_call_that_is_over_keeps_no_memory_until_a_garbage_collection(wired: Wired, channels: int) -> None:
    """New memory for each round costs more than all the arithmetic on it (see ``codec.base.Buffers``)."""
    payload, sink = np.frombuffer(PAYLOAD, dtype=np.uint8).copy(), PullSink()
    client, kept = wired.client(data_channels=channels), (weakref.ref(payload), weakref.ref(sink))
    gc.disable()
    try:
        client.push(push_header(PAYLOAD), payload.data)
        wired.syncer.publish(PAYLOAD)
        client.pull(ASK, sink)
        del payload, sink
        # gRPC's threads let go of a call a moment after its end.
        assert wait_until(lambda: all(each() is None for each in kept))
    finally:
        gc.enable()


def test_a_cancelled_stream_keeps_no_memory_until_a_garbage_collection() -> None:
    class Call(grpc.RpcError):
        def __next__(self) -> bytes:
            raise self  # As gRPC does: the call's frames hold the call.

        def cancel(self) -> None:
            pass

    line: Any = SimpleNamespace(call=lambda *_: Call())

    def listened() -> weakref.ref[Any]:
        payload = np.zeros(1)
        with Stream(line, "Push", iter(()), lambda raw: raw) as stream:
            stream.cancel()
            assert list(stream) == []
        return weakref.ref(payload)

    gc.disable()
    try:
        assert listened()() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("channels", [1, 3])
def test_a_push_that_was_cut_goes_on_from_where_it_was(wired: Wired, relay: Relay, aside: Aside, channels: int) -> None:
    client = wired.client(address=relay.address, data_channels=channels)
    relay.hold(MIB)
    pushed = aside(client.push, push_header(PAYLOAD), PAYLOAD)
    assert wired.syncer.wrote.wait(WAIT_S)
    relay.cut()
    with pytest.raises(Unreachable):
        pushed.result(WAIT_S)
    assert wired.syncer.ended.wait(WAIT_S)
    assert wired.syncer.endings == ["broken off"]
    assert wait_until(lambda: wired.server.counters().get("broken_off"))
    assert not wired.syncer.accepted
    held = len(wired.syncer.spool["site-a", 0, 1])
    assert 0 < held < len(PAYLOAD)
    before = client.up.bytes
    again = until_reached(lambda: client.push(push_header(PAYLOAD), PAYLOAD))
    assert again == PushResult(Outcome.ACCEPTED, 3)
    assert client.up.bytes - before < (len(PAYLOAD) - held + 20_000 if channels == 1 else 2 * len(PAYLOAD))
    assert wired.syncer.accepted["site-a", 0, 1] == PAYLOAD


def test_a_half_open_push_is_given_up_after_stall_s_and_control_is_not_behind_it(
    wired: Wired, relay: Relay, aside: Aside
) -> None:
    client = wired.client(address=relay.address, stall_s=1.5, control_timeout_s=5.0)
    client.report(report_info())
    wired.syncer.write_pause_s = 0.01
    # Told beforehand: were this thread late, all the rest could be on its way, and a commit waits for ``answer_s``.
    relay.hold(1_000_000)
    pushed = aside(client.push, push_header(PAYLOAD), PAYLOAD)
    assert wait_until(lambda: relay.carried_up > 1_000_000)
    for _ in range(10):
        assert client.report(report_info()).known
    assert not pushed.done()
    assert relay.connections == 2
    with pytest.raises(Unreachable, match=r"no progress for 1\.5 s"):
        pushed.result(WAIT_S)
    assert not wired.syncer.accepted


def test_a_half_open_pull_and_watch_are_given_up_after_stall_s(wired: Wired, relay: Relay) -> None:
    client = wired.client(address=relay.address, stall_s=0.8)
    wired.syncer.publish(PAYLOAD)
    stream = client.watch(1)
    assert next(stream) == Alive()
    client.pull(ASK, PullSink())
    relay.hold()
    begun_s = time.monotonic()
    with pytest.raises(Unreachable, match="Pull: no progress"):
        client.pull(ASK, PullSink())
    with pytest.raises(Unreachable, match="Watch: no progress"):
        list(stream)
    assert 0.7 < time.monotonic() - begun_s < 5


def test_the_syncer_may_take_longer_than_a_stall(start: Start, monkeypatch: Patch) -> None:
    wired = start(stall_s=0.3, header_timeout_s=0.3)
    for kind, name, seconds in ((FakeSyncer, "open_push", 0.6), (FakeSession, "commit", 1.5)):
        work = getattr(kind, name)
        slowly = lambda *given, work=work, seconds=seconds: (time.sleep(seconds), work(*given))[1]  # noqa: E731
        monkeypatch.setattr(kind, name, slowly)
    assert wired.client(stall_s=1.2).push(push_header(b"abc"), b"abc").outcome is Outcome.ACCEPTED


def test_a_site_that_is_asked_to_confirm_a_join_repeats_the_ticket_and_not_for_ever(wired: Wired) -> None:
    wired.syncer.tickets = [4, 6]  # Another process was taken in between the first answer and the second question.
    assert wired.client().join(join_ask()).incarnation == 1
    assert wired.syncer.confirmed == [0, 4, 6]
    wired.syncer.tickets = list(range(1, 100))
    with pytest.raises(Unreachable, match="started more than once"):
        wired.client().join(join_ask())


def test_what_a_syncer_of_an_older_epoch_answers_counts_for_nothing(wired: Wired) -> None:
    """The old primary thaws, and a connection to it still stands."""
    client = wired.client()
    wired.syncer.publish(b"abcd", whole=True, epoch=2)
    assert client.push(push_header(b"abc"), b"abc").outcome is Outcome.ACCEPTED
    assert client.join(join_ask()).epoch == 2
    for ask in asks(client):
        ask()
    found = client.estimate()
    wired.syncer.epoch = 1
    wired.syncer.publish(b"abcd", whole=True, epoch=1)
    for ask in asks(client):
        with pytest.raises(Unreachable, match="answers is of epoch 1, and one of epoch 2 has replaced it"):
            ask()
    assert client.estimate() == found, "its answers measure nothing"
    wired.syncer.publish(b"abcd", whole=True, epoch=0)  # One that speaks protocol 1 does not tell.
    assert client.pull(ASK, PullSink()).header.version == 3


def test_events_come_as_they_happen_until_cancel_or_close_wakes_the_thread_and_a_closed_client_is_unreachable(
    wired: Wired, aside: Aside
) -> None:
    told = [Published(2, 0, 4, DIGEST, 5, 6), FateTold(FATE), FinalAnnounced(Ending.FINISHED)]
    client = wired.client()
    with client.watch(1) as stream:
        assert next(stream) == Alive()
        for event in told:
            wired.syncer.feeds[0].events.put(event)
        assert [next(stream) for _ in told] == told
        rest = aside(list, stream)
        time.sleep(0.1)
        stream.cancel()
        assert rest.result(WAIT_S) == []
    assert wired.syncer.feeds[0].closed.wait(WAIT_S)
    stream = client.watch(1)
    next(stream)
    rest = aside(list, stream)
    client.close()
    with pytest.raises(Unreachable):
        rest.result(WAIT_S)
    for call in (*asks(client), lambda: client.join(join_ask()), lambda: client.watch(1)):
        with pytest.raises(Unreachable, match="closed"):
            call()


@pytest.mark.parametrize("channels", [1, 3])
def test_a_damaged_chunk_is_sent_again_by_itself_either_way(wired: Wired, relay: Relay, channels: int) -> None:
    client = wired.client(address=relay.address, data_channels=channels)
    relay.damage(MARK, 3)
    assert client.push(push_header(MARKED), MARKED) == PushResult(Outcome.ACCEPTED, 3)
    assert relay.damaged == 3
    assert wired.syncer.accepted["site-a", 0, 1] == MARKED
    counters = wired.server.counters()
    assert 1 <= counters["chunks_again"] <= 3
    assert counters["payload_bytes_in"] <= len(MARKED) + 3 * 64 * KIB
    assert wired.syncer.commits == 1
    wired.syncer.publish(MARKED)
    relay.damage(MARK, 3)
    assert bytes(client.pull(ASK, PullSink()).parts[0]) == MARKED
    assert relay.damaged == 3
    assert wired.server.counters()["payload_bytes_out"] <= len(MARKED) + 3 * MIB


def test_a_path_that_damages_everything_is_given_up(wired: Wired, relay: Relay) -> None:
    client = wired.client(address=relay.address)
    relay.damage(MARK, 1_000_000)
    with pytest.raises(Unreachable, match="damaged on the way, after 64 retries in this push"):
        client.push(push_header(MARKED), MARKED)
    assert not wired.syncer.accepted


def test_a_stream_that_is_not_answered_is_done_without(wired: Wired) -> None:
    client = wired.client(data_channels=3)
    client._bulk[1].lead_to("127.0.0.1:1")
    for sequence in range(1, 7):
        client._turn = itertools.count()  # The first stream is always one that works.
        assert client.push(push_header(PAYLOAD, sequence=sequence), PAYLOAD).outcome is Outcome.ACCEPTED
        assert wired.syncer.accepted["site-a", 0, sequence] == PAYLOAD


def test_a_push_goes_over_as_many_streams_as_is_said_arrives_once_and_a_short_one_takes_the_next(
    wired: Wired, relay: Relay
) -> None:
    client = wired.client(address=relay.address, data_channels=3)
    for sequence, connections in enumerate((1, 2, 3, 3), 1):
        client.push(push_header(b"short", sequence=sequence), b"short")
        assert relay.connections == connections
    for sequence, (count, connections) in enumerate(((None, 3), (4, 4), (99, 6), (0, 6)), 5):
        if count is not None:
            client.use_channels(count)
        before = wired.server.counters()["payload_bytes_in"]
        assert client.push(push_header(PAYLOAD, sequence=sequence), PAYLOAD) == PushResult(Outcome.ACCEPTED, 3)
        assert relay.connections == connections
        assert wired.syncer.accepted["site-a", 0, sequence] == PAYLOAD
        assert wired.server.counters()["payload_bytes_in"] - before == len(PAYLOAD), "something was sent twice"
    assert wired.syncer.calls.count("open_push") == 8


@pytest.mark.parametrize("channels", [1, 3])
def test_after_one_that_was_welcome_a_push_does_not_wait_to_be_admitted_and_leaves_out_what_is_held(
    wired: Wired, relay: Relay, aside: Aside, channels: int
) -> None:
    client = wired.client(address=relay.address, data_channels=channels)
    client.push(push_header(PAYLOAD), PAYLOAD)
    small = PAYLOAD[: 800 * KIB]  # More than the first window, less than what finds room on the way.
    wired.syncer.admits.clear()
    before = client.up.bytes
    pushed = aside(client.push, push_header(small, sequence=2), small)
    assert wait_until(lambda: client.up.bytes - before > 256 * KIB), "nothing goes before the admission"
    assert not wired.syncer.spool.get(("site-a", 0, 2)), "a byte was read before the admission"
    wired.syncer.admits.set()
    assert pushed.result(WAIT_S).outcome is Outcome.ACCEPTED
    assert wired.syncer.accepted["site-a", 0, 2] == small
    assert wired.server.counters()["payload_bytes_in"] == len(PAYLOAD) + len(small), "something was sent twice"
    client.use_channels(1)  # As after a restart of the site, which does not know how far the last process came:
    for sequence, held in ((3, 5 * MIB), (4, len(PAYLOAD))):
        wired.syncer.spool["site-a", 0, sequence] = bytearray(PAYLOAD[:held])
        before = wired.server.counters()["payload_bytes_in"]
        assert client.push(push_header(PAYLOAD, sequence=sequence), PAYLOAD).outcome is Outcome.ACCEPTED
        assert wired.syncer.accepted["site-a", 0, sequence] == PAYLOAD
        assert wired.server.counters()["payload_bytes_in"] - before < len(PAYLOAD), "what is held was sent"
    assert client.push(push_header(PAYLOAD), PAYLOAD).outcome is Outcome.DUPLICATE
    sent = client.up.bytes
    assert client.push(push_header(PAYLOAD), PAYLOAD).outcome is Outcome.DUPLICATE
    assert client.up.bytes - sent < KIB, "after one that was not welcome a push waits"


def test_a_push_that_breaks_again_and_again_puts_less_and_less_at_risk(wired: Wired, relay: Relay) -> None:
    client = wired.client(address=relay.address)
    payload = bytes(24 * MIB)
    breaks = 0
    relay.cut_after(2 * MIB)
    for _ in range(200):
        try:
            assert client.push(push_header(payload), payload).outcome is Outcome.ACCEPTED
            break
        except Unreachable:
            if not relay.waits_to_cut and breaks < 8:
                breaks += 1
                relay.cut_after(2 * MIB)
            wired.syncer.ended.wait(0.1)
    assert wired.syncer.accepted["site-a", 0, 1] == payload
    assert breaks >= 6
    assert relay.carried_up < len(payload) + 12 * MIB


def test_an_operators_calls_reach_the_syncer_and_a_refusal_comes_back_in_words(
    wired: Wired, monkeypatch: Patch
) -> None:
    def evict(site: str) -> None:
        raise Refusal(Status.NOT_FOUND, f"there is no site {site}")

    with AdminClient(wired.server.address) as admin:
        assert admin.status() == wired.syncer.status()
        admin.drain()
        admin.evict("site-b")
        admin.readmit("site-b")
        admin.admit("site-b", 3, 7)
        admin.refuse("site-c", 0, 9)
        admin.snapshot()
        admin.promote(lossy=True)
        admin.detach()
        said = ["evict site-b", "readmit site-b", "admit site-b 3 7", "refuse site-c 0 9"]
        assert wired.syncer.calls == ["status", "status", "drain", *said, "snapshot", "promote lossy=True", "detach"]
        monkeypatch.setattr(wired.syncer, "evict", evict)
        with pytest.raises(Refused, match="there is no site site-b") as caught:
            admin.evict("site-b")
        assert caught.value.status is Status.NOT_FOUND
        monkeypatch.setattr(wired.syncer, "status", lambda: {"loss": float("nan")})
        with pytest.raises(Unreachable, match="INTERNAL"):  # What JSON cannot carry is our own defect.
            admin.status()
    assert wired.server.counters()["internal"] == 1
