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
from diloco.learner.transfer import Fetcher, LinkMeter, LinkUse
from diloco.sync.events import Fate, FateTold, Outcome, OverlapChosen, PushAnswered, VersionFetched
from diloco.sync.link import AdaptOptions, Way
from diloco.wire.chunks import checksum
from diloco.wire.messages import (
    LinkInfo,
    PullAsk,
    PullHeader,
    Refused,
    Status,
    Unreachable,
)
from diloco.wire.pulling import Patience, PulledVersion, PullSink
from tests.learner.participant import Recorder, held
from tests.learner.test_transfer import thread
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


STEP_NS = 100_000_000
WAYS = (Way("int8", 8_000_000), Way("int4", 4_000_000))


class Traffic:
    bytes_up = 0
    bytes_down = 0

    def __init__(self) -> None:
        self.channels: list[int] = []

    def use_channels(self, count: int) -> None:
        self.channels.append(count)


def using(ways: tuple[Way, ...] = WAYS) -> tuple[LinkUse, Recorder]:
    site = Recorder()
    options = AdaptOptions(ways=ways, version_bytes=4_000_000, inner_steps=20)
    return LinkUse(site, Traffic(), options), site  # type: ignore[arg-type]


def carried(use: LinkUse, up: int) -> None:
    use._estimator.answered(10_000_000)
    for _ in range(3):
        use._estimator.carried(up, 1_010_000_000, up=True)
        use._estimator.carried(10_000_000, 1_010_000_000, up=False)


def test_before_anything_is_measured_it_is_as_configured() -> None:
    use, site = using()
    assert [use.codec(STEP_NS) for _ in range(4)] == ["int8"] * 4
    assert use.info(STEP_NS) == LinkInfo(up_codec="int8", channels=1)
    assert site.events.all == []


def test_a_change_is_told_once_with_its_reason_and_stays_to_be_seen() -> None:
    use, site = using()
    carried(use, 4_000_000)
    assert [use.codec(STEP_NS) for _ in range(5)] == ["int8", "int4", "int4", "int4", "int4"]
    (facts,) = site.events.all
    assert (facts["what"], facts["codec"], facts["channels"]) == ("adapted", "int4", 1)
    info = use.info(STEP_NS)
    assert info.why == facts["why"]
    assert (info.up_codec, info.up_bytes_per_s, info.down_bytes_per_s) == ("int4", 4_000_000, 10_000_000)
    assert info.exchange_steps == 15  # One second up, 0.4 down, three round trips, in steps of a tenth.
    carried(use, 40_000_000)
    assert [use.codec(STEP_NS) for _ in range(3)] == ["int4", "int8", "int8"]
    assert [facts["codec"] for facts in site.events.of("adapted")] == ["int4", "int8"]


def test_connections_are_opened_where_their_windows_bound_the_link() -> None:
    traffic, site = Traffic(), Recorder()
    options = AdaptOptions(ways=WAYS[:1], inner_steps=20, channels_max=6, window_bytes=100_000)
    use = LinkUse(site, traffic, options)  # type: ignore[arg-type]
    carried(use, 6_000_000)  # 6 MB/s over 10 ms are 60 kB on the way, where one window has room for 65.
    for _ in range(6):
        use.codec(STEP_NS)
    assert traffic.channels == [facts["channels"] for facts in site.events.all] == [2]
    assert use.info(STEP_NS).channels == 2


def test_the_overlap_is_that_of_an_exchange_with_the_round_that_was_seen_and_the_machine_is_told() -> None:
    site = Recorder()
    options = AdaptOptions(
        ways=WAYS[1:], version_bytes=4_000_000, inner_steps=20, overlap_steps=1, overlap_steps_max=12
    )
    use = LinkUse(site, Traffic(), options)  # type: ignore[arg-type]
    use.begin()
    carried(use, 10_000_000)  # 0.4 s up and 0.4 s down, and three times 10 ms.
    assert [use.codec(STEP_NS) for _ in range(3)] == ["int4"] * 3
    assert site.told == [OverlapChosen(1), OverlapChosen(9)]
    use._rounds.heard(PushAnswered(0, 1, Outcome.ACCEPTED, None), 1_000_000_000)
    use._rounds.heard(FateTold(Fate(0, 1, 1, 10, "d")), 1_200_000_000)
    use.codec(STEP_NS)
    use.codec(STEP_NS)
    assert site.told[2:] == [OverlapChosen(11)]
    assert [facts["overlap_steps"] for facts in site.events.all] == [9, 11]
    info = use.info(STEP_NS)
    assert (info.overlap_steps, info.exchange_steps, info.round_ns) == (11, 11, 200_000_000)
    assert info.why == (
        "an exchange takes 1.03 s, 0.2 of it at the syncer, and an inner step 0.1 s: a version is adopted 11 steps "
        "after its update (1 to 12 allowed)"
    )


def test_a_round_is_heard_of_by_the_sites_own_clock() -> None:
    use, _ = using()
    use.heard(PushAnswered(0, 1, Outcome.ACCEPTED, None))
    assert use.info(STEP_NS).round_ns == 0
    use.heard(FateTold(Fate(0, 1, 1, 10, "d")))
    assert use.info(STEP_NS).round_ns > 0


def test_without_a_choice_the_link_is_told_all_the_same() -> None:
    use, site = using(WAYS[:1])
    carried(use, 1_000_000)
    assert {use.codec(STEP_NS) for _ in range(9)} == {"int8"}
    assert (use.info(STEP_NS).why, use.info(STEP_NS).rtt_ns, site.events.all) == ("", 10_000_000, [])
