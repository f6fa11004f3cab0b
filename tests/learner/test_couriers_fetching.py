"""The thread that fetches versions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.codec.base import digest
from diloco.codec.registry import make_codec
from diloco.learner.tensors import SiteTensors
from diloco.learner.transfer import Fetcher, LinkMeter
from diloco.sync.events import VersionFetched
from diloco.wire.chunks import checksum
from diloco.wire.messages import (
    PullAsk,
    PullHeader,
    Refused,
    Status,
    Unreachable,
)
from diloco.wire.pulling import Patience, PulledVersion, PullSink
from tests.learner.held import held
from tests.learner.participant import Recorder
from tests.learner.test_couriers import thread
from tests.syncer.building import LAYOUT, dice, eventually


class Shelf(Recorder):
    """A site that fetches, and a syncer whose answers to pulls are written down here."""

    def __init__(self) -> None:
        super().__init__()
        parameters = {name: torch.zeros(shape) for name, shape in LAYOUT.parameters}
        self.site_tensors = SiteTensors(LAYOUT, held(parameters), "rebase", 0.5)
        self.answers: list[Callable[[PullAsk], PulledVersion]] = []
        self.asks: list[PullAsk] = []
        self.bytes_down = 0
        self.waiting: list[PullAsk] = []
        self.made = threading.Event()
        self.sinks: list[PullSink] = []
        client: Any = self
        self.fetcher = Fetcher(self, client, LinkMeter(client), self.site_tensors)

    def pull(self, ask: PullAsk, sink: PullSink, patience: Patience | None = None) -> PulledVersion:
        if patience is not None:
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


def pulled(values: Tensor, version: int, have: int, parts: list[bytes], whole: bool, encoding: str) -> PulledVersion:
    header = PullHeader(
        0,
        version if whole else have,
        version,
        whole,
        encoding,
        values.numel(),
        sum(map(len, parts)),
        tuple(map(len, parts)),
        digest(values),
        checksum(parts),
        (),
    )
    return PulledVersion(header, tuple(memoryview(part) for part in parts))


def whole(values: Tensor, version: int, sent: Tensor | None = None) -> PulledVersion:
    return pulled(values, version, 0, [(values if sent is None else sent).numpy().tobytes()], True, "fp32")


@pytest.mark.parametrize("payload", [b"\x00" * 7, None])
def test_a_difference_that_does_not_give_the_version_is_said_and_the_whole_is_fetched(payload: bytes | None) -> None:
    shelf, old, new = Shelf(), dice("old", 0), dice("new", 0)
    shelf.site_tensors.latest[0] = (3, old)
    wrong = payload or make_codec("int8").encode(dice("elsewhere", 0))
    shelf.answers = [lambda ask: pulled(new, 4, ask.have_version, [wrong], False, "int8"), lambda ask: whole(new, 4)]
    shelf.fetch(lambda: shelf.fetched)
    assert [ask.have_version for ask in shelf.asks] == [3, -1]
    (note,) = shelf.events.of("note")
    assert note["note"] == "digest_differs"
    assert "fetching it whole" in note["why"]
    values, event = shelf.fetched[0]
    assert torch.equal(values, new)
    assert event == VersionFetched(0, 4, ())
    assert [fetched["whole"] for fetched in shelf.events.of("fetched")] == [True]


@pytest.mark.parametrize("sent", [dice("else", 0), torch.full_like(dice("x", 0), float("nan")), dice("x", 0)[:-1]])
def test_a_whole_fragment_that_is_not_the_version_is_asked_for_again_but_not_in_a_hot_loop(sent: Tensor) -> None:
    shelf = Shelf()
    shelf.answers = [lambda ask: whole(dice("new", 0), 4, sent)]
    with thread(shelf.fetcher.run, shelf.stopping, lambda: shelf.fetcher.queue.put(None)):
        shelf.fetcher.queue.put(0)
        time.sleep(0.6)
    assert shelf.fetched == []
    assert 2 <= len(shelf.asks) <= 6, len(shelf.asks)


def test_a_version_that_the_syncer_does_not_have_is_not_asked_for_in_a_hot_loop() -> None:
    shelf = Shelf()
    shelf.site_tensors.latest[0] = (4, dice("old", 0))
    shelf.answers = [lambda ask: pulled(dice("old", 0), 4, 4, [], False, "int8")]
    with thread(shelf.fetcher.run, shelf.stopping, lambda: shelf.fetcher.queue.put(None)):
        for _ in range(1000):
            shelf.fetcher.queue.put(0)
        time.sleep(0.6)
    assert 1 <= len(shelf.asks) <= 12, len(shelf.asks)
    assert all(event == VersionFetched(0, 4, ()) for _, event in shelf.fetched)


def test_a_fetch_goes_on_until_the_line_is_back() -> None:
    shelf = Shelf()

    def cut(ask: PullAsk) -> PulledVersion:
        raise Unreachable("cut") if len(shelf.asks) < 2 else Refused(Status.NOT_FOUND, "not yet")

    shelf.answers = [cut, cut, lambda ask: whole(dice("new", 0), 1)]
    shelf.fetch(lambda: shelf.fetched)
    assert len(shelf.asks) == 3


def test_a_fetch_of_a_run_that_was_restored_meanwhile_leads_nowhere() -> None:
    shelf = Shelf()

    def restored(ask: PullAsk) -> PulledVersion:
        del ask
        shelf.lineage = 2
        raise Unreachable("the syncer is being restored")

    shelf.answers = [restored]
    shelf.fetch(lambda: shelf.lineage == 2 and shelf.fetcher.queue.empty())
    assert len(shelf.asks) == 1, "who asked for the old run goes on asking"
    assert not shelf.fetched


def difference(old: Tensor, new: Tensor, have: int) -> tuple[PulledVersion, Tensor]:
    """The next version after ``have``, as it comes and as it is."""
    codec = make_codec("int8")
    payload = codec.encode(new - old)
    after = old + codec.decode(payload, old.numel())
    return pulled(after, have + 1, have, [payload], False, "int8"), after


def test_a_version_that_was_waited_for_is_not_asked_for_again() -> None:
    shelf, old = Shelf(), dice("old", 0)
    shelf.site_tensors.latest[0] = (3, old)
    version, after = difference(old, dice("new", 0), 3)
    shelf.answers = [lambda ask: version]
    shelf.fetcher.expect(0)
    shelf.fetcher.expect(0)  # One waits there already.
    shelf.made.set()
    shelf.fetch(lambda: shelf.fetched)
    assert torch.equal(shelf.fetched[0][0], after)
    assert (shelf.asks, [ask.have_version for ask in shelf.waiting]) == ([], [3])


def test_what_came_of_waiting_to_nothing_is_asked_for() -> None:
    shelf, old = Shelf(), dice("old", 0)
    shelf.site_tensors.latest[0] = (3, old)
    version, after = difference(old, dice("new", 0), 3)

    def broken(ask: PullAsk) -> PulledVersion:
        raise Unreachable("gone")

    shelf.answers = [broken, lambda ask: version]
    shelf.made.set()
    shelf.fetcher.expect(0)
    shelf.fetch(lambda: shelf.fetched)
    assert torch.equal(shelf.fetched[0][0], after)
    assert len(shelf.asks) == 1


@pytest.mark.parametrize("changed", ["lineage", "base"])
def test_what_was_waited_for_as_of_another_base_is_not_taken_and_its_memory_left_to_it(changed: str) -> None:
    shelf, old = Shelf(), dice("old", 0)
    shelf.site_tensors.latest[0] = (3, old)
    shelf.answers = [lambda ask: whole(dice("new", 0), 9)]
    shelf.fetcher.expect(0)
    if changed == "lineage":
        shelf.lineage = 2
    else:
        shelf.site_tensors.latest[0] = (5, old)
    shelf.fetch(lambda: shelf.fetched)
    assert [event.version for _, event in shelf.fetched] == [9]
    assert shelf.fetcher._of(0, shelf.lineage).sink is not shelf.sinks[0]
    shelf.made.set()


def test_nobody_waits_where_there_is_no_base() -> None:
    shelf = Shelf()
    shelf.fetcher.expect(0)
    assert shelf.waiting == []


def test_no_thread_that_waits_ahead_outlives_the_fetcher() -> None:
    """Else torch aborts a process that ends while such a thread decodes."""
    shelf, slow = Shelf(), threading.Event()
    shelf.site_tensors.latest[0] = (3, dice("old", 0))

    def broken(ask: PullAsk) -> PulledVersion:
        time.sleep(0.3)
        slow.set()
        raise Unreachable("closed")

    shelf.answers = [broken]
    shelf.fetcher.expect(0)
    with thread(shelf.fetcher.run, shelf.stopping, shelf.close):
        pass
    assert slow.is_set()
    shelf.fetcher.expect(0)  # By the sender, which ends as well.
    assert len(shelf.waiting) == 1
