from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from diloco.codec.base import digest
from diloco.codec.registry import make_codec
from diloco.codec.site_pass import Following, publish
from diloco.learner import transfer
from diloco.learner.seal import Outbox, OutboxError
from diloco.learner.tensors import SiteTensors
from diloco.learner.transfer import (
    MALFORMED_MAX,
    WAIT_S,
    Ahead,
    Incoming,
    Joiner,
    JoinFailed,
    LinkMeter,
    Listener,
    Pause,
    Sender,
)
from diloco.outer.fragments import plan_layout
from diloco.sync.events import Ending, Fate, FateTold, FinalAnnounced, Outcome, PushAnswered, Reason
from diloco.wire.channel import Backoff
from diloco.wire.messages import (
    PULL_WAIT_NS_MAX,
    Alive,
    Dropped,
    Frame,
    PullAsk,
    PullHeader,
    PushHeader,
    PushResult,
    Refused,
    Status,
    Unreachable,
)
from diloco.wire.pulling import PulledVersion, PullSink
from tests.learner.participant import Recorder
from tests.learner.participant import held as model_of
from tests.syncer.building import LAYOUT, agreement, dice, eventually, update
from tests.wire.samples import PULL

if TYPE_CHECKING:
    import pytest

    from diloco.outer.fragments import Layout


ASK = PullAsk("run-1", "site-a", 3, 7)


class Syncer:
    """Answers a pull when it is told to."""

    def __init__(self, *parts: bytes) -> None:
        self.parts = tuple(map(memoryview, parts))
        self.made = threading.Event()
        self.fails = False

    def pull(self, ask: PullAsk, sink: PullSink, patience: Any) -> PulledVersion:
        assert (ask, patience.seconds) == (ASK, WAIT_S)
        assert self.made.wait(20)
        if self.fails:
            raise Unreachable("gone")
        return PulledVersion(PULL, self.parts)


def ahead(syncer: Syncer) -> Ahead:
    return Ahead(syncer, ASK, PullSink())  # type: ignore[arg-type]


def test_it_waits_no_longer_than_a_syncer_lets_anybody_wait() -> None:
    assert WAIT_S * 1e9 <= PULL_WAIT_NS_MAX


def test_what_came_is_taken() -> None:
    syncer = Syncer(b"ab")
    waiting = ahead(syncer)
    assert not waiting.over
    syncer.made.set()
    taken = waiting.take()
    assert taken is not None
    assert bytes(taken.parts[0]) == b"ab"
    assert not waiting.over, "what it brought is still to be taken"


def test_nothing_newer_and_a_break_are_nothing() -> None:
    for fails in (False, True):
        syncer = Syncer()
        syncer.fails = fails
        waiting = ahead(syncer)
        syncer.made.set()
        eventually(lambda waiting=waiting: waiting.over, "it waits no more")
        assert waiting.take() is None


# --- The threads beside training -------------------------------------------------------------------------------------

BOUND_S = 10.0


@contextmanager
def thread(
    run: Callable[[], None], stopping: threading.Event, wake: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Run a courier; an exception of it fails the test."""
    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            run()
        except BaseException as error:
            failures.append(error)

    running = threading.Thread(target=guarded)
    running.start()
    try:
        yield
    finally:
        stopping.set()
        wake()
        running.join(BOUND_S)
    assert not running.is_alive()
    if failures:
        raise failures[0]


def test_a_pause_ends_when_the_site_stops() -> None:
    participant = Recorder()
    pause = Pause(participant, cap_s=30.0)
    for _ in range(3):
        began = time.monotonic()
        pause.wait()
        assert 0.09 <= time.monotonic() - began < 3
    pause.reset()
    participant.stopping.set()
    began = time.monotonic()
    pause.wait(20.0)
    assert time.monotonic() - began < 10


# --- Sender ----------------------------------------------------------------------------------------------------------


class Desk(Recorder):
    """A site that sends from an outbox, and a syncer that answers as it is told."""

    incarnation = 3

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.outbox = Outbox(folder)
        self.restores = 0
        self.answers: list[PushResult | Exception] = []
        self.pushed: list[PushHeader] = []
        self.expected: list[int] = []
        self.bytes_up = 0
        client: Any = self
        self.sender = Sender(self, client, LinkMeter(client), self.outbox, self.expected.append)

    def wanted(self, fragment: int, sequence: int) -> str | None:
        self.lineage += self.restores
        return super().wanted(fragment, sequence)

    def tell(self, event: object) -> None:
        super().tell(event)
        if isinstance(event, PushAnswered):
            self.updates.pop((event.fragment, event.sequence), None)

    def push(self, header: PushHeader, payload: memoryview) -> PushResult:
        self.pushed.append(header)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def seal(self, sequence: int, seed: object = "", fragment: int = 0) -> PushHeader:
        header, payload = update(sequence=sequence, fragment=fragment, values=dice((sequence, seed), fragment))
        self.outbox.put(header, payload)
        self.updates[fragment, sequence] = header.digest
        return header


ACCEPTED = PushResult(Outcome.ACCEPTED, 0)


def test_an_update_is_sent_until_it_has_its_definite_answer(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    header = desk.seal(1)
    refused = Refused(Status.FAILED_PRECONDITION, "fenced")
    gap = PushResult(Outcome.RETRY, 0, Reason.GAP)
    desk.answers = [Unreachable("cut"), Unreachable("busy", 0.3), refused, gap, ACCEPTED]
    began = time.monotonic()
    with thread(desk.sender.run, desk.stopping, lambda: desk.sender.queue.put(None)):
        desk.sender.queue.put((0, 1))
        eventually(lambda: desk.told, "it is answered")
    assert time.monotonic() - began >= 0.3, "the syncer's own word on when to come back"
    assert desk.told == [PushAnswered(0, 1, Outcome.ACCEPTED, None, header.digest)]
    assert desk.rejoins == ["a push was refused: fenced"], "what the syncer says at a join is clearer"
    assert [pushed.incarnation for pushed in desk.pushed] == [3] * 5
    assert {pushed.digest for pushed in desk.pushed} == {header.digest}
    assert [event["outcome"] for event in desk.events.of("pushed")] == ["retry", "accepted"]


def test_one_that_waits_for_another_lets_it_go_first(tmp_path: Path) -> None:
    """A promoted standby lacks update 1, which was acknowledged; number 2 is on its way when that is found."""
    desk = Desk(tmp_path)
    desk.seal(1)
    desk.seal(2)
    gap = PushResult(Outcome.RETRY, 0, Reason.GAP)
    desk.answers = [gap, ACCEPTED, ACCEPTED]
    for order in ((0, 2), (0, 1)):
        desk.sender.queue.put(order)
    with thread(desk.sender.run, desk.stopping, lambda: desk.sender.queue.put(None)):
        eventually(lambda: len(desk.told) == 2, "both are answered")
    assert [pushed.sequence for pushed in desk.pushed] == [2, 1, 2]


def test_one_that_is_to_come_later_holds_back_no_other_and_comes_again_with_another_syncer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backoff, "next_s", lambda *_: 600.0)
    desk = Desk(tmp_path)
    desk.seal(1)
    desk.seal(1, fragment=1)
    desk.answers = [PushResult(Outcome.RETRY, 0, Reason.OVERLOAD), ACCEPTED, ACCEPTED]
    with thread(desk.sender.run, desk.stopping, lambda: desk.sender.queue.put(None)):
        desk.sender.queue.put((0, 1))
        eventually(lambda: desk.events.of("pushed"), "it was told to come later")
        desk.sender.queue.put((1, 1))
        eventually(lambda: desk.told, "the other one goes out")
        assert (0, 1) in desk.updates
        desk.epoch = 2
        eventually(lambda: len(desk.told) == 2, "it comes again")
    assert [pushed.fragment for pushed in desk.pushed] == [0, 1, 0]


def test_a_pause_ends_when_another_syncer_has_taken_the_site_in() -> None:
    class Moves(Recorder):
        epochs = iter([1, 1])
        epoch = property(lambda self: next(self.epochs, 2))  # type: ignore[assignment]

    pause, began = Pause(Moves()), time.monotonic()
    pause.wait(30.0)
    assert time.monotonic() - began < 10


def test_a_fate_that_comes_with_the_answer_is_told_after_it(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    fate = Fate(0, 1, 2, 100, desk.seal(1).digest)
    desk.answers = [PushResult(Outcome.DUPLICATE, 2, fate=fate)]
    with thread(desk.sender.run, desk.stopping, lambda: desk.sender.queue.put(None)):
        desk.sender.queue.put((0, 1))
        eventually(lambda: len(desk.told) == 2, "both are told")
    assert desk.told == [PushAnswered(0, 1, Outcome.DUPLICATE, None, fate.digest), FateTold(fate)]


def test_an_update_is_sent_in_the_lineage_in_which_it_was_wanted(tmp_path: Path) -> None:
    """The site may start over in a restored run after it was asked what is wanted, and before that is sent."""
    desk = Desk(tmp_path)
    desk.restores = 1
    desk.seal(1)
    desk.answers = [PushResult(Outcome.REFUSED, 2, Reason.NOT_JOINED)]
    with thread(desk.sender.run, desk.stopping, lambda: desk.sender.queue.put(None)):
        desk.sender.queue.put((0, 1))
        eventually(lambda: desk.told, "it is answered")
    assert [header.lineage for header in desk.pushed] == [1]
    assert desk.lineage == 2


def test_an_order_that_has_outlived_its_update_sends_nothing(tmp_path: Path) -> None:
    """A number that was refused is given again: the bytes of the first bearer must not go out under it."""
    desk = Desk(tmp_path)
    desk.seal(1, "first")  # These bytes lie in the outbox still ...
    desk.updates[0, 1] = "f" * 64  # ... and another update by that number is being sealed.
    with thread(desk.sender.run, desk.stopping, lambda: desk.sender.queue.put(None)):
        for _ in range(3):
            desk.sender.queue.put((0, 1))
        desk.sender.queue.put((0, 2))
        time.sleep(0.1)
        desk.seal(1, "second")
        desk.answers = [ACCEPTED]
        desk.sender.queue.put((0, 1))
        eventually(lambda: desk.told, "the second is sent")
    assert [pushed.digest for pushed in desk.pushed] == [update(values=dice((1, "second"), 0))[0].digest]


def test_bytes_that_were_dropped_because_a_join_has_answered_are_no_damage(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    header = desk.seal(1)
    asked: list[int] = []

    def wanted(fragment: int, sequence: int) -> str | None:
        asked.append(sequence)
        if len(asked) == 1:
            desk.outbox.drop(0, 1)  # Between the question and the reading.
            return header.digest
        return None

    desk.wanted = wanted  # type: ignore[method-assign]
    with thread(desk.sender.run, desk.stopping, lambda: desk.sender.queue.put(None)):
        desk.sender.queue.put((0, 1))
        eventually(lambda: len(asked) >= 2, "it asked again")
    assert desk.pushed == []


def test_bytes_that_are_gone_or_damaged_are_named(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.seal(1)
    desk.outbox.drop(0, 1)
    desk.sender.queue.put((0, 1))
    with (
        pytest.raises(FileNotFoundError, match=r"0-1\.update"),
        thread(desk.sender.run, desk.stopping, lambda: desk.sender.queue.put(None)),
    ):
        time.sleep(0.1)
    desk = Desk(tmp_path)
    desk.seal(2)
    path = tmp_path / "0-2.update"
    path.write_bytes(path.read_bytes()[:-1])
    assert desk.outbox.fresh(0, 2, 3) is not None
    desk.sender.queue.put((0, 2))
    with (
        pytest.raises(OutboxError, match=f"{path} is damaged"),
        thread(desk.sender.run, desk.stopping, lambda: desk.sender.queue.put(None)),
    ):
        time.sleep(0.1)


def test_an_update_that_the_syncer_cannot_read_ends_in_words_and_not_in_endless_sending(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.seal(1)
    desk.answers = [Refused(Status.INVALID_ARGUMENT, "payload is no int8")] * 10  # type: ignore[list-item]
    with thread(desk.sender.run, desk.stopping, lambda: desk.sender.queue.put(None)):
        desk.sender.queue.put((0, 1))
        eventually(lambda: desk.gave_up, "it gives up", 20.0)
    assert desk.gave_up == ["the syncer cannot read update 1 of fragment 0: payload is no int8"]
    assert len(desk.pushed) == MALFORMED_MAX


# --- Listener --------------------------------------------------------------------------------------------------------


class Stream:
    def __init__(self, events: list[object]) -> None:
        self.events = events
        self.cancelled = threading.Event()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __iter__(self) -> Iterator[Any]:
        yield from self.events
        assert self.cancelled.wait(BOUND_S)

    def cancel(self) -> None:
        self.cancelled.set()


class Ear(Recorder):
    """A site that listens, and a syncer whose Joins and Watches do what is written down here."""

    def __init__(self) -> None:
        super().__init__()
        self.has_choice = False
        self.log: list[str] = []
        self.joins: list[Callable[[], None]] = []
        self.watches: list[Callable[[], Stream]] = []
        client: Any = self
        self.listener = Listener(self, client)

    def join(self) -> None:
        self.log.append("join")
        if self.joins:
            self.joins.pop(0)()

    def watch(self, incarnation: int) -> Stream:
        self.log.append("watch")
        return self.watches.pop(0)() if self.watches else Stream([Alive()])

    def running(self) -> Any:
        return thread(self.listener.run, self.stopping, self.listener.wake)


def test_events_are_told_in_order_and_a_drop_ends_the_site_in_words() -> None:
    ear = Ear()
    ear.watches = [lambda: Stream([Alive(), FinalAnnounced(Ending.DRAINED), Dropped(Reason.SUPERSEDED)])]
    with ear.running():
        eventually(lambda: ear.gave_up, "it gives up")
    assert ear.told == [FinalAnnounced(Ending.DRAINED)]
    assert ear.gave_up == ["another process now speaks for this site: is it started twice?"]
    assert [event["what"] for event in ear.events.all][:1] == ["connected"]


def test_a_stream_that_breaks_is_opened_again_after_a_join() -> None:
    ear = Ear()
    first = Stream([Alive()])
    ear.watches = [lambda: first]
    with ear.running():
        eventually(lambda: ear.listener.connected, "connected")
        first.cancel()
        eventually(lambda: ear.log[:3] == ["watch", "join", "watch"], "joined again")
        eventually(lambda: len(ear.events.of("connected")) == 2, "connected again")
    assert len(ear.events.of("disconnected")) >= 1


def test_a_word_to_join_again_is_never_lost() -> None:
    """Said before the first stream, from inside a join's own answer, and while a stream is being opened."""
    ear = Ear()
    ear.listener.wake()
    ear.joins = [lambda: ear.listener.wake(), lambda: None]

    def opened_meanwhile() -> Stream:
        ear.listener.wake()
        return Stream([Alive()])

    ear.watches = [lambda: Stream([Alive()]), opened_meanwhile]
    with ear.running():
        eventually(lambda: ear.log.count("join") >= 3, f"three joins: {ear.log}")
        eventually(lambda: ear.listener.connected, "connected at last")
        before = ear.log.count("join")
        time.sleep(0.3)
        assert ear.log.count("join") == before, "and then it is at peace"


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (Status.ALREADY_EXISTS, Reason.SUPERSEDED),
        (Status.ALREADY_EXISTS, None),
        (Status.PERMISSION_DENIED, Reason.EVICTED),
    ],
)
def test_a_join_that_is_refused_for_good_ends_the_site_in_words(status: Status, reason: Reason | None) -> None:
    ear = Ear()

    def refuse() -> None:
        raise Refused(status, "a newer process speaks for site a", reason)

    ear.listener.wake()
    ear.joins = [refuse]
    with ear.running():
        eventually(lambda: ear.gave_up, "it gives up")
    assert ear.gave_up == ["a newer process speaks for site a"]


@pytest.mark.parametrize(
    "refused",
    [
        Refused(Status.FAILED_PRECONDITION, "run_id is 'x' at the site and 'y' at the syncer"),
        Refused(Status.PERMISSION_DENIED, "site a is not in the permissions of this run"),
        Refused(Status.UNAUTHENTICATED, "site/a was revoked"),
        Unreachable("Join: nobody is there; site a is not in the permissions", refused="not in the permissions"),
    ],
)
def test_a_join_that_is_refused_for_another_reason_is_said_once_and_tried_again(refused: Exception) -> None:
    """Whoever wrote that file may have slipped, and mends it: a site that ended would stay away."""
    ear = Ear()

    def refuse() -> None:
        raise refused

    ear.listener.wake()
    ear.joins = [refuse, refuse, lambda: None]
    with ear.running():
        eventually(lambda: ear.listener.connected, "connected")
    assert ear.gave_up == []
    assert [note["note"] for note in ear.events.of("note")] == ["join_refused"]


def test_a_site_that_said_goodbye_listens_on_and_never_joins() -> None:
    ear = Ear()
    first = Stream([Alive()])
    ear.watches = [lambda: first]
    ear.left = True
    with ear.running():
        eventually(lambda: ear.listener.connected, "connected")
        first.cancel()
        eventually(lambda: ear.log.count("watch") >= 2, "listening again")
        ear.listener.wake()
        eventually(lambda: ear.log.count("watch") >= 3, "and again")
    assert "join" not in ear.log


def test_a_stop_is_noticed_wherever_the_listener_is() -> None:
    for place in ("join", "watch", "stream"):
        ear = Ear()
        inside, go_on = threading.Event(), threading.Event()

        def wait(inside: threading.Event = inside, go_on: threading.Event = go_on) -> None:
            inside.set()
            assert go_on.wait(BOUND_S)

        if place == "join":
            ear.listener.wake()
            ear.joins = [wait]
        elif place == "watch":
            ear.watches = [lambda wait=wait: (wait(), Stream([Alive()]))[1]]  # type: ignore[misc]
        began = time.monotonic()
        running = threading.Thread(target=ear.listener.run)
        running.start()
        if place == "stream":
            eventually(lambda ear=ear: ear.listener.connected, "connected")  # type: ignore[misc]
        else:
            assert inside.wait(BOUND_S)
        ear.stopping.set()
        ear.listener.wake()
        go_on.set()
        running.join(BOUND_S)
        assert not running.is_alive(), place
        assert time.monotonic() - began < 5, place


RANGE = 1024
"""Values that are made at once where a test says so."""
LONG = plan_layout((("long", (24 * RANGE + 7,)),), 1)


class Ranges:
    """What is made, and when, in ranges so short that a small fragment has many."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pause_s: float = 0.0) -> None:
        self.stops: list[int] = []
        self.crossed = 0
        """Times at which two threads were at it."""
        self._busy = threading.Lock()
        go_on = Following.go_on

        def watched(following: Following, stop: int) -> None:
            alone = self._busy.acquire(blocking=False)
            self.crossed += not alone
            time.sleep(pause_s)
            go_on(following, stop)
            self.stops.append(stop)
            if alone:
                self._busy.release()

        monkeypatch.setattr(Following, "go_on", watched)
        monkeypatch.setattr("diloco.codec.site_pass.AT_ONCE", RANGE)
        monkeypatch.setattr("diloco.codec.merging.RANGE_VALUES", RANGE)


def long_one() -> tuple[torch.Tensor, bytes, torch.Tensor]:
    """What is held, a payload of many ranges, and what is held after it."""
    generator = torch.Generator().manual_seed(8)
    held, theta = (torch.randn(LONG.fragments[0].numel, generator=generator) for _ in range(2))
    return held, *publish(theta, held, make_codec("int4:32"))


def tensors(held: torch.Tensor, layout: Layout = LAYOUT) -> SiteTensors:
    found = SiteTensors(
        layout, model_of({name: torch.zeros(shape) for name, shape in layout.parameters}), "rebase", 0.5
    )
    found.latest[0] = (3, held)
    return found


def pulled(incoming: Incoming, header: PullHeader, payload: bytes) -> torch.Tensor | None:
    """What comes of a pull that brings the last bytes first, and then the others."""
    incoming.sink.begin(header)
    middle = len(payload) // 2
    for offset, stop in ((middle, len(payload)), (0, middle)):
        incoming.sink.accept(Frame(offset, memoryview(payload)[offset:stop]))
    return incoming.values(incoming.sink.finish())


def header_of(after: torch.Tensor, *parts: bytes, encoding: str = "int4:32", version: int = 4) -> PullHeader:
    lengths = tuple(map(len, parts))
    return PullHeader(0, 3, version, False, encoding, after.numel(), sum(lengths), lengths, digest(after), 0, ())


@pytest.mark.parametrize("encoding", ["int4:32", "int4:32+zstd1", "fp32"])
def test_one_down_link_and_several_give_the_version(encoding: str) -> None:
    held, codec = dice("held", 0), make_codec(encoding)
    one, after = publish(dice("one", 0), held, codec)
    two, later = publish(dice("two", 0), after, codec)
    for header, payload, wanted in (
        (header_of(after, one, encoding=encoding), one, after),
        (header_of(later, one, two, encoding=encoding, version=5), one + two, later),
    ):
        found = pulled(Incoming(0, tensors(held)), header, payload)
        assert found is not None
        assert torch.equal(found, wanted)


def test_a_whole_version_needs_none_before_it() -> None:
    after, site = dice("after", 0), tensors(dice("held", 0))
    site.latest[0] = None
    payload = after.numpy().tobytes()
    header = replace(header_of(after, payload, encoding="fp32"), whole=True)
    found = pulled(Incoming(0, site), header, payload)
    assert found is not None
    assert torch.equal(found, after)


def test_other_bytes_than_were_told_are_nothing() -> None:
    held, codec = dice("held", 0), make_codec("int4:32")
    payload, after = publish(dice("one", 0), held, codec)
    other, _ = publish(dice("two", 0), held, codec)
    header = header_of(after, payload)
    assert pulled(Incoming(0, tensors(held)), header, other) is None
    assert pulled(Incoming(0, tensors(held)), replace(header, numel=header.numel - 1), payload) is None
    assert pulled(Incoming(0, tensors(held)), replace(header, from_version=2), payload) is None


def test_a_difference_to_a_version_that_was_left_meanwhile_is_nothing() -> None:
    held, site = dice("held", 0), tensors(dice("held", 0))
    payload, after = publish(dice("one", 0), held, make_codec("int4:32"))
    incoming = Incoming(0, site)
    incoming.sink.begin(header_of(after, payload))
    incoming.sink.accept(Frame(0, memoryview(payload)))
    site.latest[0] = (4, after)
    assert incoming.values(incoming.sink.finish()) is None


def test_one_that_breaks_off_for_a_newer_one_is_forgotten() -> None:
    held, codec = dice("held", 0), make_codec("int4:32")
    old, old_after = publish(dice("one", 0), held, codec)
    new, new_after = publish(dice("two", 0), held, codec)
    incoming = Incoming(0, tensors(held))
    incoming.sink.begin(header_of(old_after, old))
    incoming.sink.accept(Frame(0, memoryview(old)[:9]))
    found = pulled(incoming, header_of(new_after, new, version=5), new)
    assert found is not None
    assert torch.equal(found, new_after)


def test_its_memory_is_used_again() -> None:
    held, codec = dice("held", 0), make_codec("int4:32")
    payload, after = publish(dice("one", 0), held, codec)
    incoming = Incoming(0, tensors(held))
    incoming.sink.begin(header_of(after, payload))
    incoming.sink.accept(Frame(0, memoryview(payload)))
    taken = incoming.sink.finish()
    memory = taken.parts[0].obj
    assert incoming.values(taken) is not None
    incoming.sink.give_back(taken)
    incoming.sink.begin(header_of(after, payload))
    incoming.sink.accept(Frame(0, memoryview(payload)))
    assert incoming.sink.finish().parts[0].obj is memory


def test_values_are_made_before_the_last_byte_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    held, payload, after = long_one()
    ranges, incoming = Ranges(monkeypatch), Incoming(0, tensors(held, LONG))
    incoming.sink.begin(header_of(after, payload))
    ends = [len(payload) // 2, len(payload) - 1]
    for begin, end in zip([0, *ends], ends, strict=False):
        incoming.sink.accept(Frame(begin, memoryview(payload)[begin:end]))
    assert ranges.stops == list(range(RANGE, 25 * RANGE, RANGE))
    incoming.sink.accept(Frame(ends[1], memoryview(payload)[ends[1] :]))
    found = incoming.values(incoming.sink.finish())
    assert found is not None
    assert torch.equal(found, after)


def test_streams_of_several_threads_bring_it_and_one_at_a_time_makes_values(monkeypatch: pytest.MonkeyPatch) -> None:
    held, payload, after = long_one()
    ranges, incoming = Ranges(monkeypatch, pause_s=0.001), Incoming(0, tensors(held, LONG))
    more = len(payload) // 100
    frames = [Frame(at, memoryview(payload)[at : at + more]) for at in range(0, len(payload), more)]

    def bring(frame: Frame) -> None:
        time.sleep(0.001)
        incoming.sink.accept(frame)

    for _ in range(3):
        incoming.sink.begin(header_of(after, payload))
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(bring, frames))
        assert len(ranges.stops) > 1
        found = incoming.values(incoming.sink.finish())
        assert found is not None
        assert torch.equal(found, after)
        ranges.stops.clear()
    assert not ranges.crossed


def test_one_that_broke_off_keeps_what_came_and_no_values_and_goes_on_from_there() -> None:
    held, payload, after = long_one()
    site, middle = tensors(held, LONG), len(payload) // 2
    incoming, kept = Incoming(0, site), weakref.ref(held)
    incoming.sink.begin(header_of(after, payload))
    incoming.sink.accept(Frame(0, memoryview(payload)[:middle]))
    incoming.sink.broke_off()
    site.latest[0], again = None, held.clone()
    del held
    gc.collect()
    assert kept() is None, "it would be kept until this fragment is pulled again"
    assert incoming.sink.bytes_held == middle
    site.latest[0] = (3, again)
    header = header_of(after, payload)
    assert incoming.sink.belongs(header)
    incoming.sink.begin(header)
    incoming.sink.accept(Frame(middle, memoryview(payload)[middle:]))
    found = incoming.values(incoming.sink.finish())
    assert found is not None
    assert torch.equal(found, after)


# --- How a site joins ------------------------------------------------------------------------------------------------


def door(join: Callable[[Recorder], None]) -> Joiner:
    class Site(Recorder):
        def join(self) -> None:
            join(self)

    unused: Any = None
    return Joiner(Site(), unused, agreement(), LAYOUT, unused)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Refused(Status.FAILED_PRECONDITION, "another layout", None), "mismatch"),
        (Refused(Status.PERMISSION_DENIED, "not you", None), "refused"),
        (Unreachable("nobody there"), "unreachable"),
    ],
)
def test_why_a_first_join_failed(error: Exception, kind: str) -> None:
    def fails(site: Recorder) -> None:
        raise error

    with pytest.raises(JoinFailed) as caught:
        door(fails).first(time.monotonic())
    assert caught.value.kind == kind


def test_it_is_tried_until_somebody_answers() -> None:
    left = [3]

    def late(site: Recorder) -> None:
        left[0] -= 1
        if left[0]:
            raise Unreachable("not yet", retry_after_s=0.01)

    door(late).first(time.monotonic() + 10.0)
    assert left == [0]


def test_who_is_stopping_is_not_at_the_door_any_more() -> None:
    """It once went on until join_timeout_s, without a pause between two attempts."""
    tries: list[float] = []

    def closed(site: Recorder) -> None:
        tries.append(time.monotonic())
        site.stopping.set()
        raise Unreachable("the channel is closed")

    with pytest.raises(JoinFailed, match="stopping; last: the channel is closed"):
        door(closed).first(time.monotonic() + 5.0)
    assert len(tries) == 1


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
