"""A client's streams that last: a standby's, and those of one push."""

from __future__ import annotations

import dataclasses
import itertools
import mmap
import resource
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock

import pytest

from benchmarks.record import percentile
from diloco.sync.events import Outcome
from diloco.wan.link import LinkOptions
from diloco.wan.process import RelayProcess
from diloco.wire.channel import Guard, StallWatch
from diloco.wire.client import FollowClient, Learned, Pushing, SyncClient
from diloco.wire.convert import unpack_push
from diloco.wire.messages import (
    AGAINS_MAX,
    KIB,
    MIB,
    Alive,
    FollowAck,
    FollowPart,
    Follows,
    FollowStart,
    Frame,
    MalformedMessage,
    PushAdmitted,
    PushAgain,
    PushCommit,
    PushHeader,
    PushResult,
    Refusal,
    Refused,
    Status,
    Unreachable,
)
from diloco.wire.options import ClientOptions
from tests.wire.conftest import Aside, Patch, Start, Wired
from tests.wire.fake_syncer import RUN, push_header, report_info
from tests.wire.relay import WAIT_S, wait_until
from tests.wire.samples import HEX


def served() -> Mock:
    """What serves one standby: it says who follows, then is alive until that is acknowledged."""
    followed = Mock()

    def follow(start: FollowStart) -> Mock:
        if start.standby == "stranger":
            raise Refusal(Status.FAILED_PRECONDITION, "give it an empty folder")
        return followed

    def parts() -> Iterator[FollowPart]:
        yield Follows(False, 1, HEX, 1)
        while not (followed.acknowledged.called or followed.close.called):
            time.sleep(0.05)
            yield Alive()

    followed.parts = parts
    return Mock(follow=Mock(side_effect=follow), followed=followed)


def follower(wired: Wired) -> FollowClient:
    wired.opened.append(FollowClient(wired.server.address))
    return wired.opened[-1]


def asked(standby: str = "s", run_id: str = RUN) -> FollowStart:
    return FollowStart(run_id, standby, HEX, HEX, 1, HEX)


def test_parts_come_and_acknowledgements_go_until_either_end_leaves_and_a_refusal_comes_in_words(start: Start) -> None:
    serves = served()
    with follower(start(follow=serves)).follow(asked()) as stream:
        assert next(stream) == Follows(False, 1, HEX, 1)
        stream.ack(FollowAck(1, 77))
        rest: list[FollowPart] = []
        with pytest.raises(Unreachable, match="the stream ended"):
            rest += stream
    assert set(map(type, rest)) <= {Alive}
    serves.followed.acknowledged.assert_called_once_with(FollowAck(1, 77))
    serves.follow.assert_called_once_with(asked())
    serves = served()
    client, elsewhere = follower(start(follow=serves)), follower(start())
    with client.follow(asked()) as stream:
        next(stream)
    assert wait_until(lambda: serves.followed.close.called)
    for to, who, words in (
        (client, asked("stranger"), "empty folder"),
        (client, asked(run_id="other"), "no such run"),
        (elsewhere, asked(), "Method not found"),
    ):
        with to.follow(who) as stream, pytest.raises(Refused, match=words):
            next(stream)


PAYLOAD = bytes(range(256)) * 1024  # 256 KiB: four chunks
OPTIONS = ClientOptions(chunk_bytes=64 * KIB)
STALLS = StallWatch("never started")


def sending(
    payload: bytes = PAYLOAD, *, streams: int = 1, options: ClientOptions = OPTIONS, breaks: int = 0
) -> Pushing:
    """A push of ``payload``, without a network."""
    lines = [None] * streams
    client = SimpleNamespace(options=options, stalls=STALLS, up=Learned(0.0), in_turn=lambda: lines)
    return Pushing(cast(SyncClient, client), push_header(payload), memoryview(payload), breaks)


def begun(push: Pushing) -> Iterator[bytes]:
    """Its messages behind the header, once it was admitted."""
    requests = push.requests()
    next(requests)
    push.admit(PushAdmitted(0, True))
    return requests


def test_what_was_not_sent_is_not_wanted_again_nor_anything_without_end() -> None:
    push = sending()
    with pytest.raises(MalformedMessage, match="were never sent"):
        push.again(PushAgain(0, 1))
    next(begun(push))
    with pytest.raises(MalformedMessage, match="offset is 65536"):
        push.again(PushAgain(64 * KIB, 1))
    for _ in range(AGAINS_MAX):
        push.again(PushAgain(0, 1))
    with pytest.raises(MalformedMessage, match="for the 65th time"):
        push.again(PushAgain(0, 1))


def test_a_stream_for_which_no_chunk_was_left_carries_none() -> None:
    push = sending()
    requests = begun(push)
    guards = [Guard(STALLS, 1.0) for _ in range(3)]
    one, early, late = (push.beside(guard) for guard in guards)
    for beside in (one, early, late):
        next(beside)
    assert isinstance(unpack_push(next(one)), Frame)
    assert not push.carries(guards[1])
    assert not list(early), "it has broken off, so nothing is given to it any more"
    rest = [unpack_push(next(requests)) for _ in range(3)]
    assert all(isinstance(part, Frame) for part in rest)
    assert not list(late), "everything was given to others"
    assert not push.carries(guards[2]), "where it breaks off the push lacks nothing"
    assert push.carries(guards[0])


def test_stop_sends_no_commit_and_ends_a_thread_that_waits_to_be_admitted(aside: Aside) -> None:
    push = sending()
    requests = begun(push)
    next(requests)
    push.stop()
    assert not list(requests)
    waiting = sending()
    messages = aside(list, waiting.requests())
    waiting.stop()
    assert len(messages.result(WAIT_S)) == 1


def test_what_is_wanted_again_goes_on_the_stream_that_commits() -> None:
    push = sending(streams=2)
    requests, beside = begun(push), push.beside(Guard(STALLS, 1.0))
    next(beside)
    for _ in range(4):
        next(requests)
    push.again(PushAgain(0, 64 * KIB))
    assert not list(beside), "the commit would overtake it"
    again, commit = (unpack_push(next(requests)) for _ in range(2))
    assert again == Frame(0, memoryview(PAYLOAD)[: 64 * KIB])
    assert isinstance(commit, PushCommit)
    push.stop()


LARGE_BYTES = (9 << 28) + 12345  # 2.25 GiB and a bit: over 2^31.


def counting_session(header: PushHeader) -> Mock:
    """One that keeps only how much came."""
    session = Mock(offset=0, commit=lambda digest: PushResult(Outcome.ACCEPTED, session.offset))

    def write(offset: int, data: memoryview) -> None:
        assert offset == session.offset
        session.offset += len(data)

    session.write = write
    return session


@pytest.mark.slow
def test_an_update_of_more_than_2_gib_goes_through_in_little_memory(wired: Wired, monkeypatch: Patch) -> None:
    monkeypatch.setattr(wired.syncer, "open_push", counting_session)
    client = wired.client(data_channels=3, chunk_bytes=MIB)
    # Private and never written: every page of it is the one of zeros, and takes no memory.  It is never closed: a
    # thread of gRPC may hold the last chunk for a moment longer than the push takes.
    nothing = mmap.mmap(-1, LARGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    header = push_header(b"", payload_bytes=LARGE_BYTES)
    assert client.push(header, memoryview(nothing)) == PushResult(Outcome.ACCEPTED, LARGE_BYTES)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 256 * 1024


# Slow enough that a machine with a quarter of a core to spare fills it, with a queue of 0.4 s behind it.
LINK = LinkOptions(rtt_ms=100.0, mbps=20.0)


@pytest.mark.slow
def test_heartbeats_pass_while_bulk_fills_the_link(wired: Wired, monkeypatch: Patch) -> None:
    monkeypatch.setattr(wired.syncer, "open_push", counting_session)
    over = threading.Event()
    with RelayProcess() as relay:
        address = relay.add("site", LINK, wired.server.address)
        options = ClientOptions(data_channels=4, up_mbps=LINK.mbps)
        with SyncClient(address, "site-a", RUN, options=options) as client:

            def push() -> None:
                payload = bytes(16 * MIB)
                for sequence in itertools.takewhile(lambda _: not over.is_set(), itertools.count(1)):
                    client.push(push_header(payload, sequence=sequence), payload)

            bulk = threading.Thread(target=push)
            client.report(report_info())
            bulk.start()
            time.sleep(2.0)
            sent_before, began_s, took_s = client.up.bytes, time.monotonic(), []
            for _ in range(60):
                at_s = time.monotonic()
                client.report(report_info())
                took_s.append(time.monotonic() - at_s)
                time.sleep(0.05)
            carried_mbps = (client.up.bytes - sent_before) * 8e-6 / (time.monotonic() - began_s)
            over.set()
            bulk.join(60)
    assert carried_mbps > 0.7 * LINK.mbps, "the link was not full"
    # Behind a queue kept full the median is over 0.5 s, and behind a whole update 6.7 s.  The few that are slow may be
    # those of moments in which a busy machine ran none of these processes.
    assert percentile(took_s, 50) < 2 * LINK.rtt_ms / 1e3 + 0.2, sorted(took_s)
    assert percentile(took_s, 95) < 3.0, sorted(took_s)[-5:]


@pytest.mark.parametrize(("chunk_bytes", "at_risk"), [(64 * KIB, 128 * KIB), (256 * KIB, 256 * KIB)])
def test_after_breaks_no_more_is_on_its_way_than_can_be_spared_but_always_one_chunk(
    aside: Aside, chunk_bytes: int, at_risk: int
) -> None:
    payload, sent = bytes(MIB), [0]
    push = sending(payload, options=ClientOptions(chunk_bytes=chunk_bytes), breaks=20)
    requests = push.requests()
    assert unpack_push(next(requests)) == dataclasses.replace(push_header(payload), frames=True, progress=True)
    push.admit(PushAdmitted(0, True))

    def read() -> None:
        for part in map(unpack_push, requests):
            if isinstance(part, PushCommit):
                return
            sent[0] += len(part.data) if isinstance(part, Frame) else 0

    committed = aside(read)
    for held in range(0, MIB, chunk_bytes):
        assert wait_until(lambda held=held: sent[0] > held), "nothing more came"
        assert not wait_until(lambda held=held: sent[0] > held + at_risk, seconds=0.02)
        push.held(held + chunk_bytes)
    committed.result(WAIT_S)
    push.stop()
    assert sent[0] == MIB
