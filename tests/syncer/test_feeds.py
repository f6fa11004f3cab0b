"""Watch streams: in order, bounded, and ended in words rather than by silence."""

from __future__ import annotations

import threading
import time

import pytest

from diloco.sync.events import Ending, Fate, FateTold, FinalAnnounced, Reason
from diloco.syncer.publish import EVENTS_MAX, Feed, Feeds
from diloco.wire.messages import Dropped, Published, Refusal, Status


def published(version: int) -> Published:
    return Published(1, 0, version, "0" * 64, 0, 0)


def test_everybody_hears_everything_in_order_and_a_site_what_is_its_own() -> None:
    feeds = Feeds()
    a, b = feeds.open("a", 1), feeds.open("b", 1)
    feeds.tell(published(1))
    feeds.tell(FateTold(Fate(0, 1, 1, 10, "0" * 64)), "a")
    feeds.tell(FinalAnnounced(Ending.FINISHED))
    assert [type(a.get(1.0)).__name__ for _ in range(3)] == ["Published", "FateTold", "FinalAnnounced"]
    assert [type(b.get(1.0)).__name__ for _ in range(2)] == ["Published", "FinalAnnounced"]
    assert a.get(0.0) is None
    assert feeds.standing() == (2, frozenset())
    a.close()
    a.close()
    assert feeds.standing()[0] == 1
    feeds.tell(published(2))
    assert a.get(0.0) is None


def test_who_had_no_stream_for_a_fate_is_known_until_it_has_one() -> None:
    feeds = Feeds()
    feeds.open("a", 1)
    for site in ("a", "b"):
        feeds.tell(FateTold(Fate(0, 1, 1, 10, "0" * 64)), site)
    feeds.tell(FinalAnnounced(Ending.FINISHED))
    assert feeds.standing() == (1, {"b"})
    feeds.open("b", 1)
    assert feeds.standing() == (2, frozenset())


def owing(feeds: Feeds) -> Feed:
    feed = feeds.open("a", 1)
    feeds.tell(published(1))
    feeds.tell(FateTold(Fate(0, 1, 1, 10, "0" * 64)), "a")
    feeds.tell(FinalAnnounced(Ending.FINISHED))
    return feed


@pytest.mark.parametrize("taken", [0, 2, 3])
def test_a_fate_that_was_not_written_when_its_stream_ended_is_unheard_until_there_is_another(taken: int) -> None:
    feeds = Feeds()
    feed = owing(feeds)
    for _ in range(taken):
        feed.get(1.0)
    feed.close()
    feed.close()
    assert feeds.standing() == (0, set() if taken == 3 else {"a"}), "the second event is the fate"
    again = feeds.open("a", 1)
    assert feeds.standing() == (1, frozenset())
    again.put(FateTold(Fate(0, 1, 1, 10, "0" * 64)))
    again.close()
    assert feeds.standing() == (0, {"a"}), "what a stream begins with may not arrive either"


def test_a_stream_that_another_has_replaced_leaves_nobody_without_a_fate() -> None:
    feeds = Feeds()
    feed = owing(feeds)
    feeds.open("a", 1)
    feed.close()
    assert feeds.standing() == (1, frozenset())


def test_a_site_says_itself_whether_it_lacks_a_fate() -> None:
    feeds = Feeds()
    feed = owing(feeds)
    feeds.says("a", lacks=True)
    assert feeds.standing() == (1, {"a"}), "what was written may have been lost on the way"
    feeds.says("a", lacks=False)
    feed.close()
    assert feeds.standing() == (0, frozenset()), "it has heard by a version what its stream still had to say"
    feeds.tell(FateTold(Fate(0, 2, 2, 10, "0" * 64)), "a")
    assert feeds.standing() == (0, {"a"}), "what it said was of those before"
    owing(feeds).close()
    assert feeds.standing() == (0, {"a"})


def test_a_stream_that_is_read_too_slowly_is_told_so_and_not_left_in_silence() -> None:
    feeds = Feeds()
    slow, quick = feeds.open("a", 1), feeds.open("b", 1)
    for version in range(EVENTS_MAX + 3):
        feeds.tell(published(version))
        assert quick.get(0.0) == published(version)
    assert feeds.standing()[0] == 1, "memory is bounded"
    with pytest.raises(Refusal, match="join again") as raised:
        slow.get(0.0)
    assert raised.value.status is Status.UNAVAILABLE, "its site comes back and hears how everything stands"
    slow.close()


def test_a_stream_may_begin_with_more_than_it_may_fall_behind() -> None:
    feeds = Feeds()
    feed = feeds.open("a", 1)
    for version in range(2 * EVENTS_MAX):
        feed.put(published(version))
    for version in range(2 * EVENTS_MAX):
        assert feed.get(0.0) == published(version)


def test_a_dropped_site_is_told_why_and_its_newer_process_is_not() -> None:
    feeds = Feeds()
    old, new, other = feeds.open("a", 1), feeds.open("a", 2), feeds.open("b", 1)
    feeds.drop("a", 1, Reason.SUPERSEDED)
    assert old.get(0.0) == Dropped(Reason.SUPERSEDED)
    assert new.get(0.0) is None
    assert other.get(0.0) is None


def test_closing_wakes_who_waits() -> None:
    feeds = Feeds()
    feed = feeds.open("a", 1)
    woken: list[float] = []
    began = time.monotonic()

    def wait() -> None:
        assert feed.get(20.0) is None
        woken.append(time.monotonic() - began)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.05)
    feed.close()
    waiting.join(10.0)
    assert woken
    assert woken[0] < 10
    assert feed.get(5.0) is None, "and it does not wait again"
