from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from diloco.runs.up import StatusWatch, StatusWatches, together
from diloco.wire.messages import Refusal, Status
from diloco.wire.options import SecurityOptions, ServerOptions
from tests.wire.fake_syncer import RUN, FakeSyncer, serve


def until(done: Callable[[], object], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


@pytest.fixture
def syncer() -> FakeSyncer:
    return FakeSyncer()


@pytest.fixture
def watch(syncer: FakeSyncer) -> Iterator[StatusWatch]:
    server = serve(syncer, ServerOptions(run_id=RUN))
    watch = StatusWatch(server.address, SecurityOptions())
    yield watch
    watch.close()
    server.stop(0.1)


def test_the_newest_answer_is_kept(watch: StatusWatch, syncer: FakeSyncer) -> None:
    until(lambda: watch.latest is not None)
    assert watch.latest == {"run_id": RUN, "sites": {"site-a": {"step": 1}}}
    watch.hurry()
    seen = syncer.calls.count("status")
    until(lambda: syncer.calls.count("status") >= seen + 4, 3.0)


def test_a_drain_is_passed_on_once(watch: StatusWatch, syncer: FakeSyncer) -> None:
    watch.hurry()
    watch.drain()
    until(lambda: watch.drain_accepted)
    seen = syncer.calls.count("status")
    until(lambda: syncer.calls.count("status") >= seen + 2)
    assert syncer.calls.count("drain") == 1


def test_a_refusal_is_kept_in_words(watch: StatusWatch, syncer: FakeSyncer) -> None:
    def refuse() -> None:
        raise Refusal(Status.PERMISSION_DENIED, "only an admin may do this")

    syncer.drain = refuse  # type: ignore[method-assign]
    watch.drain()
    until(lambda: watch.drain_refused)
    assert watch.drain_refused == "only an admin may do this"
    assert not watch.drain_accepted


def test_a_syncer_that_is_not_there_holds_nobody_up() -> None:
    watch = StatusWatch("127.0.0.1:9", SecurityOptions())
    watch.drain()
    time.sleep(0.1)
    assert watch.latest is None
    began = time.monotonic()
    watch.close()
    assert time.monotonic() - began < 5


def test_what_two_syncers_say_is_what_one_would() -> None:
    site = {"tokens_merged": 100, "tokens_in_flight": 10, "tokens_processed": 150, "updates_merged": 4, "undecided": 1}
    first = {"fragments": [{}] * 3, "sites": {"a": {**site, "updates_refused": {"stale": 1}}}}
    late = {**site, "tokens_merged": 60, "tokens_processed": None, "updates_refused": {"stale": 2}}
    other = {"fragments": [{}], "sites": {"a": late, "b": site}}
    told = together([first, other])
    assert told is not None
    sites: Any = told["sites"]
    assert sites["a"] == {
        "tokens_merged": (3 * 100 + 60) // 4,
        "tokens_in_flight": 10,
        "tokens_processed": 150,
        "updates_merged": 8,
        "undecided": 2,
        "updates_refused": {"stale": 3},
    }
    assert sites["b"]["tokens_merged"] == 25, "one that the other syncer does not know has merged nothing there"
    assert together([]) is None


class Heard:
    """A watch that has heard what it was told."""

    def __init__(self) -> None:
        self.latest: dict[str, object] | None = None
        self.drain_accepted, self.drain_refused = False, ""

    def hurry(self) -> None: ...

    def close(self) -> None: ...

    def drain(self) -> None:
        self.drain_accepted = True


def test_all_syncers_are_drained() -> None:
    pair: Any = [Heard(), Heard()]
    watches = StatusWatches(pair)
    assert watches.latest is None
    pair[0].drain()
    assert not watches.drain_accepted
    watches.drain()
    assert watches.drain_accepted
    pair[1].drain_refused = "an admin's token, please"
    assert watches.drain_refused == "an admin's token, please"
    watches.drain_refused = ""
    assert not watches.drain_refused
    watches.hurry()
    watches.close()
