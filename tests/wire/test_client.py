"""A site's end, over real connections that break, fall silent and come back."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from diloco.sync.events import Ending, FateTold, FinalAnnounced, Outcome, Reason
from diloco.wire.messages import (
    KIB,
    MIB,
    Alive,
    Dropped,
    MalformedMessage,
    Published,
    PullAsk,
    PushResult,
    Refusal,
    Refused,
    Status,
    Unreachable,
)
from diloco.wire.pulling import PullSink
from tests.wire.fake_syncer import DIGEST, RUN, join_ask, push_header, report_info
from tests.wire.relay import Relay
from tests.wire.samples import FATE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from diloco.wire.client import SyncClient
    from tests.wire.conftest import Wired

SEED = 15
PAYLOAD = random.Random(SEED).randbytes(6 * MIB + 321)
ASK = PullAsk(RUN, "site-a", 0, 2)
WAIT_S = 20.0


@pytest.fixture
def relay(wired: Wired) -> Iterator[Relay]:
    relay = Relay(wired.server.address)
    yield relay
    relay.close()


def test_push_and_pull_count_their_bytes(wired: Wired) -> None:
    client = wired.client()
    assert client.push(push_header(PAYLOAD), PAYLOAD) == PushResult(Outcome.ACCEPTED, 3)
    assert wired.syncer.accepted["site-a", 0, 1] == PAYLOAD
    wired.syncer.publish(PAYLOAD)
    pulled = client.pull(ASK, PullSink())
    assert pulled.header == wired.syncer.version
    assert [bytes(part) for part in pulled.parts] == [PAYLOAD]
    for counted in (client.bytes_up, client.bytes_down):
        assert len(PAYLOAD) < counted < len(PAYLOAD) + 32 * (len(PAYLOAD) // (64 * KIB) + 1) + 600
    anew = wired.client()  # The other one has found a welcome, and would not wait to be admitted.
    assert anew.push(push_header(PAYLOAD), PAYLOAD).outcome is Outcome.DUPLICATE
    assert anew.bytes_up < 600, "a duplicate's payload was sent"


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
        until_s = time.monotonic() + WAIT_S
        while any(each() is not None for each in kept) and time.monotonic() < until_s:
            time.sleep(0.01)  # gRPC's threads let go of a call a moment after its end.
        assert [each() is None for each in kept] == [True, True]
    finally:
        gc.enable()


def test_a_header_that_does_not_fit_its_payload_is_our_own_defect(wired: Wired) -> None:
    with pytest.raises(MalformedMessage, match="payload_bytes is 3: the payload has 4"):
        wired.client().push(push_header(b"abc"), b"abcd")


def in_background(work: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Run ``work`` in a thread; its result or its error comes in the list."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


def test_a_push_that_was_cut_goes_on_from_where_it_was(wired: Wired, relay: Relay) -> None:
    client = wired.client(address=relay.address)
    relay.hold(2 * MIB)
    thread, outcome = in_background(lambda: client.push(push_header(PAYLOAD), PAYLOAD))
    assert wired.syncer.wrote.wait(WAIT_S)
    relay.cut()
    thread.join(WAIT_S)
    assert isinstance(outcome[0], Unreachable), outcome
    assert wired.syncer.ended.wait(WAIT_S)
    assert wired.syncer.endings == ["broken off"]
    assert not wired.syncer.accepted
    held = len(wired.syncer.spool["site-a", 0, 1])
    assert 0 < held < len(PAYLOAD)
    sent_before = client.bytes_up
    assert until_reached(lambda: client.push(push_header(PAYLOAD), PAYLOAD)) == PushResult(Outcome.ACCEPTED, 3)
    assert client.bytes_up - sent_before < len(PAYLOAD) - held + 20_000
    assert wired.syncer.accepted["site-a", 0, 1] == PAYLOAD


def until_reached(call: Callable[[], object]) -> object:
    """What ``call`` gives once the connection is back."""
    until_s = time.monotonic() + WAIT_S
    while True:
        try:
            return call()
        except Unreachable:
            assert time.monotonic() < until_s
            time.sleep(0.05)


KILLED = """
import sys
from diloco.wire.client import SyncClient
from diloco.wire.messages import KIB
from diloco.wire.options import ClientOptions
from tests.wire.fake_syncer import RUN
from tests.wire.test_client import PAYLOAD, push_header
client = SyncClient(sys.argv[1], "site-a", RUN, options=ClientOptions(chunk_bytes=64 * KIB))
client.push(push_header(PAYLOAD), PAYLOAD)
"""


@pytest.mark.slow
def test_a_client_killed_in_mid_push_is_broken_off_and_not_finished(wired: Wired) -> None:
    root = Path(__file__).resolve().parents[2]
    wired.syncer.write_pause_s = 0.02
    held = 0
    for _ in range(2):
        wired.syncer.wrote.clear()
        site = subprocess.Popen([sys.executable, "-c", KILLED, wired.server.address], cwd=root)
        try:
            assert wired.syncer.wrote.wait(60)
        finally:
            os.kill(site.pid, signal.SIGKILL)
            site.wait(WAIT_S)
        assert wired.syncer.ended.wait(WAIT_S)
        assert wired.syncer.endings[-1] == "broken off"
        assert not wired.syncer.accepted
        assert held < len(wired.syncer.spool["site-a", 0, 1]) < len(PAYLOAD)
        held = len(wired.syncer.spool["site-a", 0, 1])
    wired.syncer.write_pause_s = 0.0
    client = wired.client()
    assert client.push(push_header(PAYLOAD), PAYLOAD).outcome is Outcome.ACCEPTED
    assert client.bytes_up < len(PAYLOAD) - held + 20_000
    assert wired.syncer.accepted["site-a", 0, 1] == PAYLOAD
    assert wired.server.counters()["broken_off"] >= 2


def test_a_half_open_push_is_given_up_after_stall_s(wired: Wired, relay: Relay) -> None:
    client = wired.client(address=relay.address, stall_s=0.8)
    wired.syncer.write_pause_s = 0.01
    # Told beforehand: were this thread late, all the rest could be on its way, and a commit waits for ``answer_s``.
    relay.freeze(above_bytes=1_000_000)
    thread, outcome = in_background(lambda: client.push(push_header(PAYLOAD), PAYLOAD))
    assert relay.carried.wait(WAIT_S)
    frozen_s = time.monotonic()
    thread.join(WAIT_S)
    assert time.monotonic() - frozen_s < 5
    assert isinstance(outcome[0], Unreachable), outcome
    assert "nothing moved for 0.8 s" in outcome[0].why
    assert not wired.syncer.accepted


def test_a_half_open_pull_and_watch_are_given_up_after_stall_s(wired: Wired, relay: Relay) -> None:
    client = wired.client(address=relay.address, stall_s=0.8)
    wired.syncer.publish(PAYLOAD)
    stream = client.watch(1)
    assert next(stream) == Alive()
    client.pull(ASK, PullSink())
    relay.freeze()
    begun_s = time.monotonic()
    with pytest.raises(Unreachable, match="Pull: nothing moved"):
        client.pull(ASK, PullSink())
    with pytest.raises(Unreachable, match="Watch: nothing moved"):
        list(stream)
    assert 0.7 < time.monotonic() - begun_s < 5


def test_a_commit_may_take_longer_than_a_stall(wired: Wired, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.wire.fake_syncer import FakeSession

    original = FakeSession.commit

    def slow(self: FakeSession, digest: str) -> PushResult:
        time.sleep(1.2)
        return original(self, digest)

    monkeypatch.setattr(FakeSession, "commit", slow)
    assert wired.client(stall_s=0.3).push(push_header(b"abc"), b"abc").outcome is Outcome.ACCEPTED


def test_control_is_not_behind_bulk(wired: Wired, relay: Relay) -> None:
    client = wired.client(address=relay.address, control_timeout_s=5.0)
    client.report(report_info())
    wired.syncer.write_pause_s = 0.02
    # The connection that carries bulk is dead from there on; what control says must not notice.
    relay.freeze(above_bytes=1_000_000)
    thread, outcome = in_background(lambda: client.push(push_header(PAYLOAD), PAYLOAD))
    assert relay.carried.wait(WAIT_S)
    for _ in range(10):
        assert client.report(report_info()).known
    assert thread.is_alive(), outcome
    assert relay.connections == 2
    client.close()
    thread.join(WAIT_S)
    assert isinstance(outcome[0], Unreachable), outcome


def test_no_room_says_when_to_come_back(start: Callable[..., Wired]) -> None:
    wired = start(pushes_max=1, pushback_ms=2500)
    wired.syncer.write_pause_s = 0.02
    thread, _ = in_background(lambda: wired.client("site-b").push(push_header(PAYLOAD, site_id="site-b"), PAYLOAD))
    assert wired.syncer.wrote.wait(WAIT_S)
    client = wired.client()
    with pytest.raises(Unreachable, match="no room") as caught:
        client.push(push_header(PAYLOAD), PAYLOAD)
    assert caught.value.retry_after_s == 2.5
    assert client.bytes_up < 600
    wired.syncer.write_pause_s = 0.0
    thread.join(WAIT_S)


def test_damaged_bytes_may_be_sent_again_and_a_definite_no_may_not(wired: Wired) -> None:
    client = wired.client()
    with pytest.raises(Unreachable, match="digest of the payload differs"):
        client.push(push_header(b"abc", digest=DIGEST), b"abc")
    with pytest.raises(Refused, match="there is no such run") as caught:
        client.push(push_header(b"abc", run_id="run-2"), b"abc")
    assert caught.value.status is Status.NOT_FOUND
    wired.syncer.join_fails = Refusal(Status.FAILED_PRECONDITION, "model.dim is 64 at the site and 128 at the syncer")
    with pytest.raises(Refused, match=r"model\.dim") as caught:
        client.join(join_ask())
    assert caught.value.status is Status.FAILED_PRECONDITION


def test_whoever_is_asked_to_confirm_a_join_repeats_the_ticket_and_not_for_ever(wired: Wired) -> None:
    wired.syncer.tickets = [4, 6]  # Another process was taken in between the first answer and the second question.
    assert wired.client().join(join_ask()).incarnation == 1
    assert wired.syncer.confirmed == [0, 4, 6]
    wired.syncer.tickets = list(range(1, 100))
    with pytest.raises(Unreachable, match="started more than once"):
        wired.client().join(join_ask())


def test_what_a_syncer_of_an_older_epoch_answers_counts_for_nothing(wired: Wired) -> None:
    """The old primary thaws, and a connection to it still stands."""
    client = wired.client()
    header = push_header(b"abc")
    assert client.push(header, b"abc").outcome is Outcome.ACCEPTED
    wired.syncer.epoch = 3
    assert client.join(join_ask()).epoch == 3
    assert client.push(header, b"abc").outcome is Outcome.DUPLICATE
    wired.syncer.publish(b"abcd", whole=True, epoch=3)
    assert client.pull(ASK, PullSink()).header.epoch == 3
    assert client.report(report_info()).epoch == 3
    wired.syncer.epoch = 2
    wired.syncer.publish(b"abcd", whole=True, epoch=2)
    words = "answers is of epoch 2, and another of epoch 3 has taken its place"
    with pytest.raises(Unreachable, match=words):
        client.push(header, b"abc")
    with pytest.raises(Unreachable, match=words):
        client.pull(ASK, PullSink())
    with pytest.raises(Unreachable, match=words):
        client.report(report_info())
    wired.syncer.publish(b"abcd", whole=True, epoch=0)  # One that speaks protocol 1 does not tell.
    assert client.pull(ASK, PullSink()).header.version == 3


def test_events_come_as_they_happen(wired: Wired) -> None:
    told = [
        Published(2, 0, 4, DIGEST, 5, 6),
        FateTold(FATE),
        FinalAnnounced(Ending.FINISHED),
        Dropped(Reason.SUPERSEDED),
    ]
    with wired.client().watch(1) as stream:
        assert next(stream) == Alive()
        for event in told:
            wired.syncer.feeds[0].events.put(event)
        assert [event for event in stream if event != Alive()] == told


def test_cancel_wakes_the_thread_that_iterates(wired: Wired) -> None:
    stream = wired.client().watch(1)
    assert next(stream) == Alive()
    thread, outcome = in_background(lambda: list(stream))
    time.sleep(0.1)
    stream.cancel()
    thread.join(WAIT_S)
    assert outcome == [[]]
    assert wired.syncer.feeds[0].closed.wait(WAIT_S)


def test_a_pull_that_was_cut_goes_on_from_where_it_was(wired: Wired, relay: Relay) -> None:
    client = wired.client(address=relay.address)
    wired.syncer.publish(PAYLOAD)
    sink = PullSink()
    pull_and_cut(client, relay, sink)
    held, before = sink.offset, client.bytes_down
    assert 0 < held < len(PAYLOAD)
    pulled = until_reached(lambda: client.pull(ASK, sink))
    assert bytes(pulled.parts[0]) == PAYLOAD  # type: ignore[attr-defined]
    assert client.bytes_down - before < len(PAYLOAD) - held + 20_000


def pull_and_cut(client: SyncClient, relay: Relay, sink: PullSink) -> None:
    """A pull that breaks off with some bytes in ``sink`` and others not."""
    relay.hold(2 * MIB)
    thread, outcome = in_background(lambda: client.pull(ASK, sink))
    until_s = time.monotonic() + WAIT_S
    while not sink.offset:
        assert time.monotonic() < until_s, outcome
        time.sleep(0.005)
    relay.cut()
    thread.join(WAIT_S)
    assert isinstance(outcome[0], Unreachable), outcome


def test_a_pull_begins_anew_when_its_version_is_gone(wired: Wired, relay: Relay) -> None:
    client = wired.client(address=relay.address)
    wired.syncer.publish(PAYLOAD)
    sink = PullSink()
    pull_and_cut(client, relay, sink)
    wired.syncer.publish(b"new!" * 100, whole=True, version=4, from_version=0)
    pulled = until_reached(lambda: client.pull(ASK, sink))
    assert bytes(pulled.parts[0]) == b"new!" * 100  # type: ignore[attr-defined]
    assert pulled.header.version == 4  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "changes", [{"payload_crc32": 1}, {"fragment": 1}, {"from_version": 0, "part_bytes": (1, 1, 1), "payload_bytes": 3}]
)
def test_a_version_that_was_not_asked_for_is_not_taken(
    wired: Wired, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    from diloco.wire.handlers import PullSource

    wired.syncer.publish(b"abc", **changes)
    monkeypatch.setattr(wired.syncer, "pull", lambda ask, identity: PullSource(wired.syncer.version, (b"abc",)))
    with pytest.raises(Unreachable, match="Pull"):
        wired.client().pull(ASK, PullSink())


def test_a_closed_client_is_unreachable_and_ends_what_is_under_way(wired: Wired) -> None:
    client = wired.client()
    stream = client.watch(1)
    next(stream)
    thread, outcome = in_background(lambda: list(stream))
    client.close()
    thread.join(WAIT_S)
    assert isinstance(outcome[0], Unreachable), outcome
    for call in (
        lambda: client.join(join_ask()),
        lambda: client.watch(1),
        lambda: client.push(push_header(b"a"), b"a"),
        lambda: client.pull(ASK, PullSink()),
    ):
        with pytest.raises(Unreachable, match="closed"):
            call()


def test_bulk_may_have_several_connections(wired: Wired, relay: Relay) -> None:
    client = wired.client(address=relay.address, data_channels=3)
    for sequence in range(1, 7):
        client.push(push_header(b"abc", sequence=sequence), b"abc")
    assert relay.connections == 3
