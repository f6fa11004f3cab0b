"""Watch streams: in order, bounded, and ended in words rather than by silence."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from diloco.codec.base import digest, digest_of
from diloco.codec.registry import make_codec
from diloco.sync.events import Ending, Fate, FateTold, FinalAnnounced, Outcome, Reason
from diloco.sync.options import PROTOCOL, PROTOCOL_OLDEST
from diloco.syncer.publish import EVENTS_MAX, EarlierDigests, Feed, Feeds
from diloco.syncer.server import Syncer
from diloco.wire import convert
from diloco.wire.handlers import PullSource
from diloco.wire.messages import (
    Dropped,
    Published,
    PullAsk,
    Refusal,
    Status,
    short_digest,
)
from tests.syncer.building import ANYONE, RUN, dice, eventually, join_ask, push, refused, report, serving, update


def published(version: int) -> Published:
    return Published(1, 0, version, "0" * 64, 0, 0)


def fate(sequence: int = 1) -> FateTold:
    return FateTold(Fate(0, sequence, sequence, 10, "0" * 64))


def owing(feeds: Feeds) -> Feed:
    feed = feeds.open("a", 1)
    feeds.tell(published(1))
    feeds.tell(fate(), "a")
    feeds.tell(FinalAnnounced(Ending.FINISHED))
    return feed


def test_a_fate_is_unheard_that_was_not_written_until_there_is_another_stream_or_its_site_says_otherwise() -> None:
    feeds = Feeds()
    for taken in (0, 2, 3):
        feed = owing(feeds)
        for _ in range(taken):
            feed.get(1.0)
        feed.close()
        feed.close()
        assert feeds.standing() == (0, set() if taken == 3 else {"a"}), "the second event is the fate"
        again = feeds.open("a", 1)
        assert feeds.standing() == (1, frozenset())
        again.close()
    again = feeds.open("a", 1)
    again.put(fate())
    again.close()
    assert feeds.standing() == (0, {"a"}), "what a stream begins with may not arrive either"
    replaced, feed = owing(feeds), owing(feeds)
    replaced.close()
    assert feeds.standing() == (1, frozenset()), "another stream has what this one had still to say"
    feeds.says("a", lacks=True)
    assert feeds.standing() == (1, {"a"}), "what was written may have been lost on the way"
    feeds.says("a", lacks=False)
    feed.close()
    assert feeds.standing() == (0, frozenset()), "it has heard by a version what its stream still had to say"
    feeds.tell(fate(2), "a")
    assert feeds.standing() == (0, {"a"}), "what it said was of those before, and it has no stream"


def test_a_stream_that_is_read_too_slowly_is_told_so_and_not_left_in_silence() -> None:
    feeds = Feeds()
    slow, quick, begun = feeds.open("a", 1), feeds.open("b", 1), feeds.open("c", 1)
    for version in range(2 * EVENTS_MAX):
        begun.put(published(version))
    assert all(begun.get(0.0) == published(version) for version in range(2 * EVENTS_MAX)), "it may begin with more"
    begun.close()
    for version in range(EVENTS_MAX + 3):
        feeds.tell(published(version))
        assert quick.get(0.0) == published(version)
    assert feeds.standing()[0] == 1, "memory is bounded"
    with refused(Status.UNAVAILABLE, "join again"):  # Its site comes back and hears how everything stands.
        slow.get(0.0)
    feeds.open("b", 1)
    for version in range(EVENTS_MAX):
        feeds.tell(published(version), "b")
    quick.close()
    feeds.tell(fate(), "b")
    assert feeds.standing() == (0, {"b"}), "what it was too slow for, it has not heard"


def test_a_dropped_site_is_told_why_and_its_newer_process_its_own_fates_and_no_other_site() -> None:
    feeds = Feeds()
    old, new, other = feeds.open("a", 1), feeds.open("a", 2), feeds.open("b", 1)
    feeds.drop("a", 1, Reason.SUPERSEDED)
    assert old.get(0.0) == Dropped(Reason.SUPERSEDED)
    assert new.get(0.0) is None
    for sequence in (1, 2):
        feeds.tell(fate(sequence), "a")
    assert [new.get(0.0), new.get(0.0)] == [fate(1), fate(2)]
    assert other.get(0.0) is None


# --- Protocol 3 serves protocol 2 ------------------------------------------------------------------------------------

IN_2 = re.compile("[0-9a-f]{64}")
LIKE_2 = "0" * 64


def joined(syncer: Syncer) -> None:
    """A site of each protocol: a of the earlier one, b of this one."""
    assert syncer.api.join(join_ask(protocol=PROTOCOL_OLDEST)).protocol == PROTOCOL_OLDEST
    assert syncer.api.join(join_ask("b", "89abcdef")).protocol == PROTOCOL


def pulled(syncer: Syncer, site: str, have: int, **more: int) -> PullSource:
    source = syncer.api.pull(PullAsk(RUN, site, 0, have, protocol=2 if site == "a" else 3, **more), ANYONE)
    assert convert.unpack_pull_part(convert.pack_pull_part(source.header)) == source.header
    return source


def test_a_site_that_speaks_2_joins_pushes_watches_and_pulls(tmp_path: Path) -> None:
    with serving(tmp_path, down_codec="int8") as syncer:
        joined(syncer)
        old, new = syncer.api.watch("a", 1), syncer.api.watch("b", 1)
        first = [feed.get(5.0) for feed in (old, new)]
        assert [bool(IN_2.fullmatch(event.digest)) for event in first if isinstance(event, Published)] == [True, False]
        header, payload = update()
        values = dice(("a", 0, 1), 0)
        header = replace(header, digest=digest_of(payload, LIKE_2), values_digest=digest(values, LIKE_2))
        others = replace(header, values_digest=digest(dice("other", 0), LIKE_2))
        assert push(syncer, others, payload).reason is Reason.CORRUPT
        with refused(Status.DATA_LOSS):
            push(syncer, replace(header, digest=LIKE_2), payload)
        assert push(syncer, header, payload).outcome is Outcome.ACCEPTED
        eventually(lambda: syncer.holdings.values[0].version == 1, "the first version")
        held = syncer.holdings.values[0].published
        source, of_3 = pulled(syncer, "a", 0), pulled(syncer, "b", 0)
        assert [each.digest for each in source.header.fates] == [header.digest]
        assert (source.header.digest, of_3.header.digest) == (digest(held, LIKE_2), digest(held))
        assert (source.header.payload_crc32 != 0, of_3.header.payload_crc32) == (True, 0)
        start = make_codec("fp32").decode(pulled(syncer, "a", -1).parts[0], held.numel())
        assert digest(start) == digest(held)
        assert push(syncer, header, payload).fate.digest == header.digest, "its own is the one that it knows"
        header, payload = update("b", base_version=1)
        push(syncer, replace(header, digest=digest_of(payload)), payload)
        eventually(lambda: syncer.holdings.values[0].version == 2, "the second version")
        reply = syncer.api.join(join_ask("b", "89abcdef", protocol=2))  # Its process is of an earlier release now.
        result = push(syncer, replace(header, digest=digest_of(payload)), payload)
        (fate,) = reply.standings[0].fates
        assert all(IN_2.fullmatch(each) for each in (reply.standings[0].digest, fate.digest, result.fate.digest))
        assert convert.unpack_join_reply(convert.pack_join_reply(reply)) == reply
        again = pulled(syncer, "a", 0, want_version=1, offset=1)
        assert (again.header.version, again.header.digest) == (1, source.header.digest), "one that broke off goes on"
        syncer.api._earlier = EarlierDigests(2)
        with pytest.raises(Refusal, match="cannot be sent any more"):
            pulled(syncer, "a", 0, want_version=1, offset=1)
        assert pulled(syncer, "a", 1).header.digest == digest(syncer.holdings.values[0].published, LIKE_2)


def test_what_a_site_of_protocol_2_holds_is_compared_with_what_was_published(tmp_path: Path) -> None:
    for _ in range(2):  # The second syncer knows nothing of what the first has computed.
        with serving(tmp_path) as syncer:
            joined(syncer)
            right = [short_digest(digest(values.published, LIKE_2)) for values in syncer.holdings.values]
            incarnation = syncer.core.ask(lambda machine: machine.state.sites["a"].incarnation)
            for said, retake in ((right, ()), ([right[1], right[1]], (0,)), (right, ()), ([], ())):
                assert syncer.api.report(report("a", incarnation, digests=said)).retake == retake


def test_a_site_that_has_not_joined_this_process_yet_is_taken_for_one_of_this_protocol(tmp_path: Path) -> None:
    with serving(tmp_path, sites="a") as syncer:
        header, payload = update()
        push(syncer, header, payload)
        eventually(lambda: syncer.holdings.values[0].version == 1, "the first version")
    with serving(tmp_path) as syncer:  # The site's heartbeat and what it sends again are here before it joins.
        held = syncer.holdings.values[0]
        mine = report(versions=(1, 0), digests=(short_digest(held.digest), 0))
        assert syncer.api.report(mine).retake == ()
        fate = push(syncer, header, payload).fate
        assert fate.digest == header.digest, "else the site would take it for another update's"
