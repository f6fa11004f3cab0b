"""The threads beside training: what each does when the other end, the disk or the moment is not as hoped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from diloco.learner.seal import Outbox, OutboxError
from diloco.learner.transfer import MALFORMED_MAX, LinkMeter, Listener, Pause, Sender
from diloco.sync.events import Ending, Fate, FateTold, FinalAnnounced, Outcome, PushAnswered, Reason
from diloco.wire.channel import Backoff
from diloco.wire.messages import (
    Alive,
    Dropped,
    PushHeader,
    PushResult,
    Refused,
    Status,
    Unreachable,
)
from tests.learner.participant import Recorder
from tests.syncer.building import dice, eventually, update

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
