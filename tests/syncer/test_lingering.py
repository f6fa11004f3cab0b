"""The end of a syncer's process: it waits for who comes back for the fates of its work, and for nobody else."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from diloco.sync.events import Ending, FateTold, Outcome
from diloco.syncer.publish import Feed
from diloco.syncer.server import Syncer
from tests.syncer.building import eventually, push, report, serving, update

LAST_ROUND = {"token_budget": 100, "final_wait_ns": 50_000_000}


@pytest.fixture
def syncer(tmp_path: Path) -> Iterator[Syncer]:
    """In its run's last round, with one site."""
    with serving(tmp_path, sites="a", linger_s=20.0, outer=LAST_ROUND) as syncer:
        yield syncer


def end(syncer: Syncer) -> None:
    """An update of each fragment, the run's tokens; then the site says goodbye, and the run is over."""
    for fragment in (0, 1):
        assert push(syncer, *update(fragment=fragment)).outcome is Outcome.ACCEPTED
    eventually(lambda: [values.version for values in syncer.holdings.values] == [1, 1], "both versions")
    syncer.api.leave("a", 1)
    assert syncer.wait(20.0) is Ending.FINISHED


@contextmanager
def lingering(syncer: Syncer) -> Iterator[None]:
    """The syncer's end, in a thread; within the block it waits for somebody and after it, soon, for nobody."""
    thread = threading.Thread(target=syncer.linger)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive(), "a site does not know what became of its work"
    yield
    thread.join(15.0)
    assert not thread.is_alive()


def said(feed: Feed) -> list[int]:
    """The fates that a stream still has to say; it ends when its site knows enough."""
    events = [feed.get(1.0) for _ in range(6)]
    feed.close()
    return [event.fate.fragment for event in events if isinstance(event, FateTold)]


def took_s(syncer: Syncer) -> float:
    began = time.monotonic()
    syncer.linger()
    return time.monotonic() - began


def test_lingering_lasts_while_a_version_is_sent_but_not_for_ever(
    syncer: Syncer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A final version of gigabytes takes its time; a site that reads it ever so slowly does not keep the syncer."""
    end(syncer)
    monkeypatch.setattr("diloco.syncer.server.LINGERS_MAX", 5)
    syncer.options, began = replace(syncer.options, linger_s=0.4), time.monotonic()
    monkeypatch.setattr(syncer, "_bytes_out", lambda: int(10 * min(6.0, time.monotonic() - began)))
    syncer.api.feeds.open("a", 1)
    assert 2.0 <= took_s(syncer) < 5.0


def test_lingering_ends_when_every_site_has_left_and_is_bounded(tmp_path: Path) -> None:
    with serving(tmp_path, sites="a", linger_s=2.0, outer={"final_wait_ns": 50_000_000}) as syncer:
        syncer.drain()
        syncer.wait(20.0)
        assert took_s(syncer) > 1.9
        syncer.api.leave("a", 1)
        assert took_s(syncer) < 1.5


@pytest.mark.parametrize("is_written", [True, False])
def test_it_waits_for_a_site_whose_stream_broke_before_its_last_fate(syncer: Syncer, is_written: bool) -> None:
    feed = syncer.api.watch("a", 1)
    if not is_written:
        feed.close()
    end(syncer)
    feed.close()
    with lingering(syncer):
        assert said(syncer.api.watch("a", 1)) == [0, 1]


@pytest.mark.parametrize("when", ["lingers", "stops"])
def test_what_fails_while_it_waits_for_its_sites_or_stops_is_raised(
    syncer: Syncer, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    broken = MemoryError("it broke")
    server = syncer._server
    assert server is not None
    close = server.stop

    def dies() -> None:
        raise broken

    def closes(grace_s: float) -> None:
        close(grace_s)
        syncer.fail(broken)

    syncer.api.watch("a", 1)
    end(syncer)
    if when == "lingers":
        monkeypatch.setattr(syncer.core, "_turn", dies)
    else:
        monkeypatch.setattr(server, "stop", closes)
    with pytest.raises(MemoryError, match="it broke"):
        syncer.linger() if when == "lingers" else syncer.stop(0.1)


def test_it_waits_for_a_site_as_long_as_it_says_that_something_is_in_flight(syncer: Syncer) -> None:
    feed = syncer.api.watch("a", 1)
    syncer.api.report(report(tokens_in_flight=100))
    end(syncer)  # What it said before goodbye, or says as another process, holds nobody up.
    syncer.api.report(report(incarnation=2, tokens_in_flight=100))
    with lingering(syncer):  # For a stream to end that has said everything.
        eventually(lambda: feed.get(0.0) is None, "the end of what there is to say")
        feed.close()
    syncer.api.report(report(tokens_in_flight=100))  # Everything was written, and was lost on the way.
    with lingering(syncer):
        syncer.api.report(report(tokens_in_flight=0))


def test_a_site_that_says_that_nothing_is_in_flight_has_heard_what_its_stream_still_had_to_say(syncer: Syncer) -> None:
    feed = syncer.api.watch("a", 1)
    end(syncer)
    syncer.api.report(report(tokens_in_flight=0))
    feed.close()
    assert took_s(syncer) < 10


def test_who_goes_on_after_a_death_in_the_last_round_waits_for_its_sites(tmp_path: Path) -> None:
    """Nobody knows which of its fates that process had told; one that has stopped in order had told them all."""
    with serving(tmp_path / "one", sites="a", outer=LAST_ROUND) as syncer:
        end(syncer)
        shutil.copytree(tmp_path / "one", tmp_path / "two")  # As it is when the process dies now.
    with serving(tmp_path / "two", linger_s=20.0, outer=LAST_ROUND) as syncer:
        assert syncer.wait(20.0) is Ending.FINISHED
        with lingering(syncer):
            assert said(syncer.api.watch("a", 1)) == [0, 1]
    with serving(tmp_path / "one", linger_s=20.0, outer=LAST_ROUND) as syncer:
        assert syncer.wait(20.0) is Ending.FINISHED
        assert took_s(syncer) < 10


def test_a_run_that_goes_on_after_a_death_waits_for_nobody_who_left_it(tmp_path: Path) -> None:
    with serving(tmp_path / "one", sites="a") as syncer:
        syncer.api.leave("a", 1)
        shutil.copytree(tmp_path / "one", tmp_path / "two")
    with serving(tmp_path / "two", linger_s=20.0, outer={"final_wait_ns": 50_000_000}) as syncer:
        syncer.drain()
        assert syncer.wait(20.0) is Ending.DRAINED
        assert took_s(syncer) < 10
