"""Protocol 2 serves protocol 1: what such a site is told is what it can read, and it does the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from diloco.sync.agreement import PROTOCOL, PROTOCOL_OLDEST
from diloco.sync.events import DISCARDING, Fate, FateTold, FragmentStanding, Outcome, Reason
from diloco.syncer import protocols
from diloco.syncer.protocols import REASONS_OF_1
from diloco.wire import convert, convert_bulk
from diloco.wire.messages import (
    Alive,
    Dropped,
    JoinReply,
    LearnerSettings,
    Published,
    PullAsk,
    PushResult,
    ReportReply,
)
from diloco.wire.v1 import sync_pb2
from tests.syncer.building import ANYONE, RUN, eventually, join_ask, push, serving, update

DIGEST = "0" * 64
DISCARDING_IN_1 = {Reason.NON_FINITE, Reason.OUTLIER, Reason.EVICTED}
SETTINGS = LearnerSettings(1, 65536, 2, 1, keep_until_decided=True)
NEW = {"protocol", "keep_until_decided", "values_digest", "lineage", "digests", "retake"}


def fate(reason: Reason | None) -> Fate:
    return Fate(0, 1, 2, 100, DIGEST, reason)


def fields_of(message: object) -> set[str]:
    """The names of all fields that travel, nested ones too."""
    found: set[str] = set()
    for field, value in message.ListFields():  # type: ignore[attr-defined]
        found.add(field.name)
        for each in value if hasattr(value, "__iter__") and not isinstance(value, str | bytes) else [value]:
            if hasattr(each, "ListFields"):
                found |= fields_of(each)
    return found


@pytest.mark.parametrize("reason", list(Reason))
def test_a_site_of_protocol_1_is_told_a_reason_that_it_knows_and_that_makes_it_do_the_same(reason: Reason) -> None:
    told = protocols.push_result(PushResult(Outcome.REFUSED, 1, reason, fate(reason)), 1)
    assert told.reason in REASONS_OF_1
    assert told.fate is not None
    assert told.fate.reason is told.reason
    assert (told.reason in DISCARDING_IN_1) == (reason in DISCARDING)
    assert protocols.watch_event(FateTold(fate(reason)), 1) == FateTold(told.fate)
    assert protocols.watch_event(Dropped(reason), 1) == Dropped(told.reason)
    assert protocols.fates([fate(reason), fate(None)], 1) == (told.fate, fate(None))


def test_what_protocol_1_has_is_told_as_it_is() -> None:
    for reason in REASONS_OF_1:
        assert protocols.fates([fate(reason)], 1) == (fate(reason),)
    assert protocols.watch_event(Alive(), 1) == Alive()


def test_no_new_field_travels_to_a_site_of_protocol_1() -> None:
    standing = FragmentStanding(0, 1, DIGEST, 1, 1, 1, 1, ((1, 1),), (fate(None),))
    reply = JoinReply(2, 5, 7, (standing,), 1, 1, None, SETTINGS)
    join = sync_pb2.JoinResponse.FromString(convert.pack_join_reply(protocols.join_reply(reply, 1)))
    assert fields_of(join) & NEW == {"lineage"}, "Join's own is of protocol 1"
    event = protocols.watch_event(Published(2, 3, 4, DIGEST, 5, 6, 7), 1)
    assert not fields_of(sync_pb2.WatchResponse.FromString(convert.pack_watch_event(event))) & NEW
    report = protocols.report_reply(ReportReply(2, 3, 4, True, None, (1,)), 1)
    assert not fields_of(sync_pb2.ReportResponse.FromString(convert.pack_report_reply(report))) & NEW


def test_a_site_of_this_protocol_is_told_everything() -> None:
    reply = JoinReply(2, 5, 7, (), 1, 1, None, SETTINGS)
    assert protocols.join_reply(reply, PROTOCOL) == replace(reply, protocol=PROTOCOL)
    for event in (Published(2, 3, 4, DIGEST, 5, 6, 7), FateTold(fate(Reason.OUTLIER)), Dropped(Reason.EVICTED)):
        assert protocols.watch_event(event, PROTOCOL) == event
    assert protocols.report_reply(ReportReply(2, 3, 4, True, None, (1,)), PROTOCOL).retake == (1,)


def test_a_client_that_speaks_1_joins_pushes_watches_and_pulls(tmp_path: Path) -> None:
    with serving(tmp_path) as syncer:
        reply = syncer.api.join(join_ask(protocol=PROTOCOL_OLDEST), ANYONE)
        assert (reply.protocol, reply.settings.keep_until_decided, reply.incarnation) == (0, False, 1)
        assert syncer.api.join(join_ask("b", "89abcdef"), ANYONE).protocol == PROTOCOL
        old, new = syncer.api.watch("a", 1, ANYONE), syncer.api.watch("b", 1, ANYONE)
        first = [feed.get(5.0) for feed in (old, new)]
        assert [event.lineage for event in first if isinstance(event, Published)] == [0, 1]
        header, payload = update()
        assert header.values_digest == ""
        assert push(syncer, header, payload).outcome is Outcome.ACCEPTED
        eventually(lambda: syncer.holdings.values[0].version == 1, "the first version")
        source = syncer.api.pull(PullAsk(RUN, "a", 0, 0), ANYONE)
        assert [each.merged for each in source.header.fates] == [True]
        assert convert_bulk.unpack_pull_part(convert_bulk.pack_pull_part(source.header)) == source.header
