"""The threads beside training that send, fetch and listen, and how a site joins."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.codec.base import digest
from diloco.codec.registry import make_codec
from diloco.codec.site_pass import Following, publish
from diloco.learner import transfer
from diloco.learner.seal import Outbox, OutboxError
from diloco.learner.tensors import AdoptOptions, SiteTensors
from diloco.learner.transfer import (
    MALFORMED_MAX,
    WAIT_S,
    Fetcher,
    Incoming,
    JoinFailed,
    Link,
    Listener,
    Pause,
    Sender,
)
from diloco.outer.fragments import Layout, plan_layout
from diloco.sync.events import (
    Ending,
    Fate,
    FateTold,
    FinalAnnounced,
    JoinAnswered,
    Outcome,
    OverlapChosen,
    PushAnswered,
    Reason,
    VersionFetched,
)
from diloco.sync.link import AdaptOptions, LinkEstimator, Way
from diloco.wire.channel import Backoff
from diloco.wire.chunks import checksum
from diloco.wire.messages import (
    PULL_WAIT_NS_MAX,
    Alive,
    Dropped,
    Frame,
    LinkInfo,
    PullAsk,
    PullHeader,
    PushHeader,
    PushResult,
    Refused,
    Status,
    Unreachable,
)
from diloco.wire.pulling import Patience, PulledVersion, PullSink
from tests.learner.participant import Recorder
from tests.learner.participant import held as model_of
from tests.syncer.building import LAYOUT, agreement, dice, eventually, update
from tests.wire.samples import PULL

BOUND_S = 10.0


@contextmanager
def thread(run: Callable[[], None], stopping: threading.Event, wake: Callable[[], None]) -> Iterator[None]:
    """Run a courier; an exception of it fails the test."""
    pool = ThreadPoolExecutor(1)
    running = pool.submit(run)
    try:
        yield
    finally:
        stopping.set()
        wake()
        pool.shutdown(wait=False)
        running.result(BOUND_S)


def test_a_pause_ends_when_the_site_stops_or_another_syncer_has_taken_it_in() -> None:
    class Moves(Recorder):
        epochs = iter([1, 1])
        epoch = property(lambda self: next(self.epochs, 2))

    stops = Recorder()
    stops.stopping.set()
    began = time.monotonic()
    for participant in (stops, Moves()):
        Pause(participant, cap_s=30.0).wait(30.0)
    assert time.monotonic() - began < 20
    assert WAIT_S * 1e9 <= PULL_WAIT_NS_MAX, "it waits ahead no longer than a syncer lets it"


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
        self.client = self
        self.fetcher = SimpleNamespace(expect=self.expected.append)
        self.sender = Sender(self)

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

    @contextmanager
    def sending(self, *orders: tuple[int, int]) -> Iterator[None]:
        for order in orders:
            self.sender.queue.put(order)
        with thread(self.sender.run, self.stopping, lambda: self.sender.queue.put(None)):
            yield

    def send(self, *orders: tuple[int, int], told: int = 1) -> None:
        """Send until so much is told."""
        with self.sending(*orders):
            eventually(lambda: len(self.told) >= told, "it is answered")


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


ACCEPTED, GAP = PushResult(Outcome.ACCEPTED, 0), PushResult(Outcome.RETRY, 0, Reason.GAP)


def test_an_update_is_sent_until_it_has_its_definite_answer_and_a_fate_that_comes_with_it_is_told(desk: Desk) -> None:
    header = desk.seal(1)
    fate = Fate(0, 1, 2, 100, header.digest)
    refused = Refused(Status.FAILED_PRECONDITION, "fenced")
    duplicate = PushResult(Outcome.DUPLICATE, 2, fate=fate)
    desk.answers = [Unreachable("cut"), Unreachable("busy", 0.3), refused, GAP, duplicate]
    began = time.monotonic()
    desk.send((0, 1), told=2)
    assert time.monotonic() - began >= 0.3, "the syncer's own word on when to come back"
    assert desk.told == [PushAnswered(0, 1, Outcome.DUPLICATE, None, header.digest), FateTold(fate)]
    assert desk.rejoins == ["a push was refused: fenced"], "what the syncer says at a join is clearer"
    assert desk.expected == [0] * 5, "a version of it comes next"
    assert {(pushed.digest, pushed.incarnation) for pushed in desk.pushed} == {(header.digest, 3)}
    assert [event["outcome"] for event in desk.events.of("pushed")] == ["retry", "duplicate"]


def test_one_that_is_to_come_later_holds_back_no_other_and_comes_again_with_another_syncer(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backoff, "next_s", lambda *_: 600.0)
    desk.seal(1)
    desk.seal(1, fragment=1)
    desk.answers = [PushResult(Outcome.RETRY, 0, Reason.OVERLOAD), ACCEPTED, ACCEPTED]
    with desk.sending((0, 1)):
        eventually(lambda: desk.events.of("pushed"), "it was told to come later")
        desk.sender.queue.put((1, 1))
        eventually(lambda: desk.told, "the other one goes out")
        assert (0, 1) in desk.updates
        desk.epoch = 2
        eventually(lambda: len(desk.told) == 2, "it comes again")
    assert [pushed.fragment for pushed in desk.pushed] == [0, 1, 0]


def test_an_update_is_sent_in_the_lineage_in_which_it_was_wanted(desk: Desk) -> None:
    """The site may start over in a restored run after it was asked what is wanted, and before that is sent."""
    desk.restores = 1
    desk.seal(1)
    desk.answers = [PushResult(Outcome.REFUSED, 2, Reason.NOT_JOINED)]
    desk.send((0, 1))
    assert ([header.lineage for header in desk.pushed], desk.lineage) == ([1], 2)


def test_an_order_that_has_outlived_its_update_sends_nothing(desk: Desk) -> None:
    """A number that was refused is given again: the bytes of the first bearer must not go out under it."""
    desk.seal(1, "first")  # These bytes lie in the outbox still ...
    desk.updates[0, 1] = "f" * 64  # ... and another update by that number is being sealed.
    with desk.sending(*[(0, 1)] * 3, (0, 2)):
        time.sleep(0.1)
        desk.seal(1, "second")
        desk.answers = [ACCEPTED]
        desk.sender.queue.put((0, 1))
        eventually(lambda: desk.told, "the second is sent")
    assert [pushed.digest for pushed in desk.pushed] == [update(values=dice((1, "second"), 0))[0].digest]


def test_bytes_that_were_dropped_because_a_join_has_answered_are_no_damage(desk: Desk) -> None:
    header = desk.seal(1)
    asked: list[int] = []

    def wanted(fragment: int, sequence: int) -> str | None:
        asked.append(sequence)
        if len(asked) == 1:
            desk.outbox.drop(0, 1)  # Between the question and the reading.
            return header.digest
        return None

    desk.wanted = wanted
    with desk.sending((0, 1)):
        eventually(lambda: len(asked) >= 2, "it asked again")
    assert desk.pushed == []


@pytest.mark.parametrize(("damage", "error"), [("there is none", FileNotFoundError), ("is damaged", OutboxError)])
def test_bytes_that_are_gone_or_damaged_are_named(
    desk: Desk, tmp_path: Path, damage: str, error: type[Exception]
) -> None:
    desk.seal(1)
    path = tmp_path / "0-1.update"
    if error is OutboxError:
        path.write_bytes(path.read_bytes()[:-1])
        desk.outbox.get(0, 1)  # The copy in memory.
    else:
        desk.outbox.drop(0, 1)
    with pytest.raises(error, match=f"{path}"), desk.sending((0, 1)):
        time.sleep(0.1)


def test_an_update_that_the_syncer_cannot_read_ends_in_words_and_not_in_endless_sending(desk: Desk) -> None:
    desk.seal(1)
    desk.answers = [Refused(Status.INVALID_ARGUMENT, "payload is no int8")] * 10
    with desk.sending((0, 1)):
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
        self.client, self.address, self.has_choice = self, "here:1", False
        self.log: list[str] = []
        self.joins: list[Callable[[], None]] = []
        self.watches: list[Callable[[], Stream]] = []
        self.tensors = SimpleNamespace(layout=LAYOUT)
        self.sealer = SimpleNamespace(encoder=SimpleNamespace(where="host"))
        self.listener = Listener(self, agreement())
        self.listener.attempt = self.join

    def join(self) -> JoinAnswered:
        self.log.append("join")
        if self.joins:
            self.joins.pop(0)()
        return JoinAnswered(1, 1, (), 0, 0, None, 1)

    def watch(self, incarnation: int) -> Stream:
        self.log.append("watch")
        return self.watches.pop(0)() if self.watches else Stream([Alive()])

    def running(self) -> Any:
        return thread(self.listener.run, self.stopping, self.listener.wake)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (Reason.SUPERSEDED, "another process now speaks for this site: is it started twice?"),
        (Reason.EVICTED, "the syncer ended this site's part: evicted"),
    ],
)
def test_events_are_told_in_order_and_a_drop_ends_the_site_in_words(reason: Reason, words: str) -> None:
    ear = Ear()
    ear.watches = [lambda: Stream([Alive(), FinalAnnounced(Ending.DRAINED), Dropped(reason)])]
    with ear.running():
        eventually(lambda: ear.gave_up, "it gives up")
    assert (ear.told, ear.gave_up) == ([FinalAnnounced(Ending.DRAINED)], [words])
    assert ear.events.all[0]["what"] == "connected"


@pytest.mark.parametrize(
    ("refused", "for_good"),
    [
        (Refused(Status.ALREADY_EXISTS, "a newer process speaks for site a", None), True),
        (Refused(Status.PERMISSION_DENIED, "site a was put out", Reason.EVICTED), True),
        (Refused(Status.FAILED_PRECONDITION, "run_id is 'x' at the site and 'y' at the syncer"), False),
        (Refused(Status.UNAUTHENTICATED, "site/a was revoked"), False),
        (Unreachable("Join: no answer; site a is not in the permissions", refused="not in the permissions"), False),
    ],
)
def test_a_join_that_is_refused_ends_the_site_or_is_said_once_and_tried_again(
    refused: Exception, for_good: bool
) -> None:
    """The operator who wrote that file may have slipped, and mends it: a site that ended would stay away."""
    ear = Ear()

    def refuse() -> None:
        raise refused

    ear.listener.wake()
    ear.joins = [refuse, refuse, lambda: None]
    with ear.running():
        eventually(lambda: ear.gave_up if for_good else ear.listener.connected, "it gives up, or is connected")
    assert ear.gave_up == ([refused.text] if for_good else [])
    assert [note["note"] for note in ear.events.of("note")] == ["join_refused"]


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


@pytest.mark.parametrize("place", ["join", "watch", "stream"])
def test_a_stop_is_noticed_wherever_the_listener_is(place: str) -> None:
    ear, inside, go_on = Ear(), threading.Event(), threading.Event()

    def wait() -> Stream:
        inside.set()
        assert go_on.wait(BOUND_S)
        return Stream([Alive()])

    if place == "join":
        ear.listener.wake()
        ear.joins = [wait]
    elif place == "watch":
        ear.watches = [wait]
    with ear.running():
        eventually(lambda: ear.listener.connected if place == "stream" else inside.is_set(), place)
        ear.stopping.set()
        ear.listener.wake()
        go_on.set()


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        ("", "no answer from here:1 yet: no place; trying for 0 s more"),
        ("not in the permissions", "no place"),  # One address refuses it, and another may answer yet.
    ],
)
def test_what_a_first_join_waits_for_is_said_once(monkeypatch: pytest.MonkeyPatch, refused: str, words: str) -> None:
    monkeypatch.setattr(transfer, "SILENT_S", 0.0)
    ear = Ear()

    def join() -> None:
        raise Unreachable("no place", retry_after_s=0.1, refused=refused)

    ear.joins = [join] * 99
    with pytest.raises(JoinFailed) as raised:
        ear.listener.first(time.monotonic() + 0.4)
    assert raised.value.kind == ("refused" if refused else "unreachable")
    assert [note["why"] for note in ear.events.of("note")].count(words) == 1
    assert len(ear.events.of("note")) == (2 if refused else 1), "that no answer comes is said as well"
    ear.joins = []
    ear.listener.first(time.monotonic() + 0.4)


def test_a_site_that_is_stopping_tries_to_join_no_more() -> None:
    """It once went on until join_timeout_s, without a pause between two attempts."""
    ear = Ear()

    def join() -> None:
        ear.stopping.set()
        raise Unreachable("the channel is closed")

    ear.joins = [join] * 99
    with pytest.raises(JoinFailed, match="stopping; last: the channel is closed"):
        ear.listener.first(time.monotonic() + 5.0)
    assert ear.log == ["join"]


# --- What a pull brings is made into values as it comes --------------------------------------------------------------

RANGE = 1024
"""Values that are made at once where a test says so."""

LONG = plan_layout((("long", (24 * RANGE + 7,)),), 1)


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where each going on with a version's values ended, in ranges so short that ``long_one`` has many."""
    found: list[int] = []
    busy, go_on = threading.Lock(), Following.go_on

    def watched(following: Following, stop: int) -> None:
        assert busy.acquire(blocking=False), "two threads are at it"
        time.sleep(0.001)
        go_on(following, stop)
        found.append(stop)
        busy.release()

    monkeypatch.setattr(Following, "go_on", watched)
    monkeypatch.setattr("diloco.codec.site_pass.AT_ONCE", RANGE)
    monkeypatch.setattr("diloco.codec.merging.RANGE_VALUES", RANGE)
    return found


def long_one() -> tuple[torch.Tensor, bytes, torch.Tensor]:
    """What is held, a payload of many ranges, and what is held after it."""
    generator = torch.Generator().manual_seed(8)
    held, theta = (torch.randn(LONG.fragments[0].numel, generator=generator) for _ in range(2))
    return held, *publish(theta, held, make_codec("int4:32"))


def tensors(held: torch.Tensor, layout: Layout = LAYOUT, have: int | None = 3) -> SiteTensors:
    model = model_of({name: torch.zeros(shape) for name, shape in layout.parameters})
    found = SiteTensors(layout, model, "rebase", AdoptOptions())
    found.latest[0] = None if have is None else (have, held)
    return found


def pulled(incoming: Incoming, header: PullHeader, payload: bytes) -> torch.Tensor | None:
    """What comes of a pull that brings the last bytes first, and then the others."""
    incoming.begin(header)
    middle = len(payload) // 2
    bring(incoming, payload, middle)
    bring(incoming, payload, 0, middle)
    return incoming.values(incoming.finish())


def header_of(
    after: torch.Tensor, *parts: bytes, encoding: str = "int4:32", have: int = 3, version: int = 4, whole: bool = False
) -> PullHeader:
    lengths, started = tuple(map(len, parts)), version if whole else have
    told = (digest(after), checksum(parts), ())
    return PullHeader(0, started, version, whole, encoding, after.numel(), sum(lengths), lengths, *told)


def bring(incoming: Incoming, payload: bytes, start: int = 0, stop: int | None = None) -> None:
    incoming.accept(Frame(start, memoryview(payload)[start:stop]))


def test_one_down_link_and_several_give_the_version() -> None:
    held, encoding = dice("held", 0), "int4:32+zstd1"
    codec = make_codec(encoding)
    one, after = publish(dice("one", 0), held, codec)
    two, later = publish(dice("two", 0), after, codec)
    for header, payload, wanted in (
        (header_of(after, one, encoding=encoding), one, after),
        (header_of(later, one, two, encoding=encoding, version=5), one + two, later),
    ):
        assert same(pulled(Incoming(0, 1, tensors(held)), header, payload), wanted)


def same(found: torch.Tensor | None, wanted: torch.Tensor) -> bool:
    return found is not None and torch.equal(found, wanted)


def test_other_bytes_than_were_told_are_nothing() -> None:
    held, codec = dice("held", 0), make_codec("int4:32")
    payload, after = publish(dice("one", 0), held, codec)
    other, _ = publish(dice("two", 0), held, codec)
    header = replace(header_of(after, payload), payload_crc32=0)
    assert pulled(Incoming(0, 1, tensors(held)), header, other) is None
    assert pulled(Incoming(0, 1, tensors(held)), replace(header, numel=header.numel - 1), payload) is None
    assert pulled(Incoming(0, 1, tensors(held)), replace(header, from_version=2), payload) is None
    site = tensors(held)
    incoming = Incoming(0, 1, site)
    incoming.begin(header)
    bring(incoming, payload)
    site.latest[0] = (4, after)
    assert incoming.values(incoming.finish()) is None, "that version was left meanwhile"


def test_values_are_made_before_the_last_byte_has_come(stops: list[int]) -> None:
    held, payload, after = long_one()
    incoming = Incoming(0, 1, tensors(held, LONG))
    incoming.begin(header_of(after, payload))
    ends = [0, len(payload) // 2, len(payload) - 1]
    for begin, end in pairwise(ends):
        bring(incoming, payload, begin, end)
    assert stops == list(range(RANGE, 25 * RANGE, RANGE))
    bring(incoming, payload, ends[-1])
    assert same(incoming.values(incoming.finish()), after)


def test_streams_of_several_threads_bring_it_and_one_at_a_time_makes_values(stops: list[int]) -> None:
    held, payload, after = long_one()
    incoming = Incoming(0, 1, tensors(held, LONG))
    more = len(payload) // 100

    def bring_some(at: int) -> None:
        time.sleep(0.001)
        bring(incoming, payload, at, at + more)

    for _ in range(3):
        incoming.begin(header_of(after, payload))
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(bring_some, range(0, len(payload), more)))
        assert len(stops) > 1
        assert same(incoming.values(incoming.finish()), after)
        stops.clear()


def test_one_that_broke_off_keeps_what_came_and_no_values_and_goes_on_from_there() -> None:
    held, payload, after = long_one()
    site, middle = tensors(held, LONG), len(payload) // 2
    incoming, kept = Incoming(0, 1, site), weakref.ref(held)
    header = header_of(after, payload)
    incoming.begin(header)
    bring(incoming, payload, 0, middle)
    incoming.broke_off()
    site.latest[0], again = None, held.clone()
    del held
    gc.collect()
    assert kept() is None, "it would be kept until this fragment is pulled again"
    assert incoming.bytes_held == middle
    site.latest[0] = (3, again)
    assert incoming.belongs(header)
    incoming.begin(header)
    bring(incoming, payload, middle)
    assert same(incoming.values(incoming.finish()), after)


# --- The thread that fetches versions ---------------------------------------------------------------------------------


OLD, NEW = dice("old", 0), dice("new", 0)


class Shelf(Recorder):
    """A site that fetches, and a syncer whose answers to pulls are written down here."""

    def __init__(self, have: int | None = None) -> None:
        super().__init__()
        self.tensors = tensors(OLD, have=have)
        self.answers: list[Callable[[PullAsk], PulledVersion]] = []
        self.asks: list[PullAsk] = []
        self.waiting: list[PullAsk] = []
        self.made = threading.Event()
        self.sinks: list[PullSink] = []
        self.client = self
        self.fetcher = Fetcher(self)

    def pull(self, ask: PullAsk, sink: PullSink, patience: Patience | None = None) -> PulledVersion:
        if patience is not None:
            assert patience.seconds == WAIT_S
            self.waiting.append(ask)
            self.sinks.append(sink)
            assert self.made.wait(20)
        else:
            self.asks.append(ask)
        return self.answers[0](ask) if len(self.answers) == 1 else self.answers.pop(0)(ask)

    def close(self) -> None:
        """As an agent does: no more orders, and what waits at the syncer ends."""
        self.fetcher.queue.put(None)
        self.made.set()

    def fetch(self, until: Callable[[], object]) -> None:
        with thread(self.fetcher.run, self.stopping, self.close):
            self.fetcher.queue.put(0)
            eventually(until, "fetched")


def came(values: Tensor, *parts: bytes, **told: Any) -> PulledVersion:
    return PulledVersion(header_of(values, *parts, **told), tuple(map(memoryview, parts)))


def whole(values: Tensor, version: int, sent: Tensor | None = None) -> PulledVersion:
    payload = (values if sent is None else sent).numpy().tobytes()
    return came(values, payload, encoding="fp32", version=version, whole=True)


@pytest.mark.parametrize("payload", [b"\x00" * 7, make_codec("int8").encode(dice("elsewhere", 0))])
def test_a_difference_that_does_not_give_the_version_is_said_and_the_whole_is_fetched(payload: bytes) -> None:
    shelf = Shelf(3)
    shelf.answers = [lambda ask: came(NEW, payload, encoding="int8"), lambda ask: whole(NEW, 4)]
    shelf.fetch(lambda: shelf.fetched)
    assert [ask.have_version for ask in shelf.asks] == [3, -1]
    (note,) = shelf.events.of("note")
    assert note["note"] == "digest_differs"
    assert "fetching it whole" in note["why"]
    values, event = shelf.fetched[0]
    assert (torch.equal(values, NEW), event) == (True, VersionFetched(0, 4, ()))
    assert [fetched["whole"] for fetched in shelf.events.of("fetched")] == [True]


def absent(ask: PullAsk) -> PulledVersion:
    """The version that the site has."""
    return came(OLD, encoding="int8", have=3, version=3)


@pytest.mark.parametrize(
    ("answer", "asks"),
    [
        *((lambda ask, sent=sent: whole(NEW, 4, sent), (2, 6)) for sent in (NEW + 1, NEW * torch.nan, NEW[:-1])),
        (absent, (1, 12)),
    ],
)
def test_what_is_not_the_next_version_is_asked_for_again_but_not_in_a_hot_loop(
    answer: Callable[[PullAsk], PulledVersion], asks: tuple[int, int]
) -> None:
    shelf = Shelf(3 if answer is absent else None)
    shelf.answers = [answer]
    with thread(shelf.fetcher.run, shelf.stopping, shelf.close):
        for _ in range(1000):
            shelf.fetcher.queue.put(0)
        time.sleep(0.6)
    assert asks[0] <= len(shelf.asks) <= asks[1], len(shelf.asks)
    assert all(event == VersionFetched(0, 3, ()) for _, event in shelf.fetched)
    assert bool(shelf.fetched) == (answer is absent)


def test_a_fetch_goes_on_until_the_line_is_back_and_leads_nowhere_once_the_run_was_restored() -> None:
    shelf = Shelf()

    def cut(ask: PullAsk) -> PulledVersion:
        raise Unreachable("cut") if len(shelf.asks) < 2 else Refused(Status.NOT_FOUND, "not yet")

    def restored(ask: PullAsk) -> PulledVersion:
        shelf.lineage = 2
        raise Unreachable("the syncer is being restored")

    shelf.answers = [cut, cut, lambda ask: whole(NEW, 1), restored]
    with thread(shelf.fetcher.run, shelf.stopping, shelf.close):
        shelf.fetcher.queue.put(0)
        eventually(lambda: shelf.fetched, "fetched")
        shelf.fetcher.queue.put(0)
        eventually(lambda: shelf.lineage == 2 and shelf.fetcher.queue.empty(), "restored")
        time.sleep(0.2)
    assert len(shelf.asks) == 4, "who asked for the old run goes on asking"
    assert len(shelf.fetched) == 1


def difference() -> tuple[PulledVersion, Tensor]:
    """The version after 3, as it comes and as it is."""
    codec = make_codec("int8")
    payload = codec.encode(NEW - OLD)
    after = OLD + codec.decode(payload, OLD.numel())
    return came(after, payload, encoding="int8"), after


def broken(ask: PullAsk) -> PulledVersion:
    raise Unreachable("gone")


@pytest.mark.parametrize("came_to_nothing", [None, broken, lambda ask: PulledVersion(PULL, ())])
def test_a_version_that_was_waited_for_is_asked_for_again_only_if_that_came_to_nothing(
    came_to_nothing: Callable[[PullAsk], PulledVersion] | None,
) -> None:
    shelf, (version, after) = Shelf(3), difference()
    shelf.answers = [*([came_to_nothing] if came_to_nothing else []), lambda ask: version]
    shelf.fetcher.expect(0)
    shelf.fetcher.expect(0)  # One waits there already.
    shelf.made.set()
    shelf.fetch(lambda: shelf.fetched)
    assert torch.equal(shelf.fetched[0][0], after)
    assert len(shelf.asks) == (1 if came_to_nothing else 0)
    assert [ask.have_version for ask in shelf.waiting] == [3]


@pytest.mark.parametrize("changed", ["lineage", "base"])
def test_what_was_waited_for_as_of_another_base_is_not_taken_and_its_memory_left_to_it(changed: str) -> None:
    shelf = Shelf(3)
    shelf.answers = [lambda ask: whole(NEW, 9)]
    shelf.fetcher.expect(0)
    if changed == "lineage":
        shelf.lineage = 2
    else:
        shelf.tensors.latest[0] = (5, OLD)
    shelf.fetch(lambda: shelf.fetched)
    assert [event.version for _, event in shelf.fetched] == [9]
    assert shelf.fetcher._of(0, shelf.lineage) is not shelf.sinks[0]
    shelf.made.set()


def test_no_thread_that_waits_ahead_outlives_the_fetcher() -> None:
    """Else torch aborts a process that ends while such a thread decodes."""
    without, shelf, slow = Shelf(), Shelf(3), threading.Event()

    def closed(ask: PullAsk) -> PulledVersion:
        time.sleep(0.3)
        slow.set()
        raise Unreachable("closed")

    shelf.answers = [closed]
    for each in (without, shelf):
        each.fetcher.expect(0)
    with thread(shelf.fetcher.run, shelf.stopping, shelf.close):
        pass
    assert slow.is_set()
    shelf.fetcher.expect(0)  # By the sender, which ends as well.
    assert (len(without.waiting), len(shelf.waiting)) == (0, 1), "none waits where there is no base"


# --- The link, and how it is used ------------------------------------------------------------------------------------

MS, STEP_NS = 1_000_000, 100_000_000

WAYS = (Way("int8", 8_000_000), Way("int4", 4_000_000))


def test_a_choice_is_taken_told_once_with_its_reason_and_stays_to_be_seen() -> None:
    site, channels = Recorder(), list[int]()
    measured = LinkEstimator()
    client: Any = SimpleNamespace(estimate=measured.estimate, use_channels=channels.append)
    sizes = {"version_bytes": 4_000_000, "window_bytes": 10_000, "inner_steps": 20}
    options = AdaptOptions(ways=WAYS, channels_max=6, overlap_steps=1, overlap_steps_max=12, **sizes)
    site.client = client
    use = Link(site, options)
    assert [use.codec(STEP_NS) for _ in range(4)] == ["int8"] * 4
    assert use.info(STEP_NS) == LinkInfo(up_codec="int8", channels=1, overlap_steps=1)
    assert (site.events.all, site.told, use.adapter.choice.overlap_steps) == ([], [], 1), "nothing is measured yet"
    measured.answered(10_000_000)
    for _ in range(3):
        measured.carried(4_000_000, 1_010_000_000, up=True)
        measured.carried(10_000_000, 1_010_000_000, up=False)
    assert [use.codec(STEP_NS) for _ in range(9)] == ["int8", *["int4"] * 8]
    chosen = site.events.of("adapted")
    assert channels == [facts["channels"] for facts in chosen]
    assert site.told == [OverlapChosen(facts["overlap_steps"]) for facts in chosen]
    info = use.info(STEP_NS)
    assert (info.up_codec, info.channels, info.overlap_steps, info.why) == tuple(
        chosen[-1][name] for name in ("codec", "channels", "overlap_steps", "why")
    )
    assert info.channels > 1
    assert info.overlap_steps == 12
    assert (info.rtt_ns, info.up_bytes_per_s, info.down_bytes_per_s) == (10_000_000, 4_000_000, 10_000_000)
    use.rounds.heard(PushAnswered(0, 1, Outcome.ACCEPTED, None), time.monotonic_ns())
    assert use.info(STEP_NS).round_ns == 0
    use.rounds.heard(FateTold(Fate(0, 1, 1, 10, "d")), time.monotonic_ns())
    assert use.info(STEP_NS).round_ns > 0, "by the site's own clock"
