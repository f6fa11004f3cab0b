"""What waits for a standby, and what is said about it; ``test_standby`` has both ends together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco.sync.events import DeadlinePassed, OuterEvent
from diloco.sync.journal import Record
from diloco.sync.leadership import Place
from diloco.syncer.replicator import ReplicationOptions, Replicator
from diloco.syncer.snapshots import RECOVERY_ONLY, Retention
from diloco.wire.messages import Alive, Chunk, FollowAck, Follows, FollowStart, Item, Refusal, Status
from tests.syncer.building import Events, files, refused
from tests.syncer.desk import CARD, Desk, arrived
from tests.syncer.test_store import harm

Replicating = Callable[..., tuple[Replicator, Events]]
EARLIER = "e" * 64


@pytest.fixture
def replicating(tmp_path: Path) -> Iterator[Replicating]:
    with ExitStack() as closing:

        def a_replicator(mode: str = "sync", retention: Retention = RECOVERY_ONLY) -> tuple[Replicator, Events]:
            desk, log = Desk(tmp_path / mode, retention=retention), Events()
            closing.callback(desk.close)
            desk.store.emit, desk.store.card = log.emit, replace(CARD, earlier_digest=EARLIER)
            replicator = Replicator(ReplicationOptions(mode=mode, alive_s=0.01), desk.store)
            core = SimpleNamespace(
                machine=desk.machine,
                snapshot=desk.snapshot,
                nudge=lambda: None,
                post=lambda event: log.emit("attach", {"standby": event.standby}),
                ask=lambda question, early: question(desk.machine),
            )
            replicator.begin(core, detached=False)  # type: ignore[arg-type]
            return replicator, log

        yield a_replicator


def journalled(replicator: Replicator, event: OuterEvent) -> None:
    """A turn with that event."""
    journal = replicator.store.journal
    end = journal.append([Record(5, event, "e" * 16)])
    journal.flush()
    replicator.replicated(end)


def test_sync_waits_for_the_standby_async_for_one_that_follows_and_off_for_none(replicating: Replicating) -> None:
    for mode, nobody, away in (("sync", "no standby has followed", "the standby is away: nothing"), ("async", "", "")):
        replicator, _ = replicating(mode)
        turn = a_turn(replicator)
        assert nobody in (replicator.replicated(turn) or "")
        assert bool(replicator.replicated(turn)) == bool(nobody)
        follower = replicator.follow(start())
        assert replicator.replicated(turn) == "the standby s is behind"
        follower.acknowledged(FollowAck(turn[0], turn[1] - 1))
        assert replicator.replicated(turn) is not None
        follower.acknowledged(FollowAck(*turn))
        assert replicator.replicated(turn) is None
        follower.close()
        said = replicator.replicated(a_turn(replicator))
        assert (bool(said), away in (said or "")) == (bool(away), True)
    replicator, _ = replicating("off")
    assert replicator.replicated(a_turn(replicator)) is None, "it waits for none"


def start(**changes: Any) -> FollowStart:
    return FollowStart(**{**CARD.facts(), "standby": "s", "segment": 0, "chain": "", **changes})


def a_turn(replicator: Replicator) -> Place:
    segment, end = replicator.machine.durable
    return segment, end + 10


def test_async_stops_waiting_for_one_that_is_too_slow_until_it_is_near_again(
    replicating: Replicating, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr("diloco.syncer.replicator.time", SimpleNamespace(monotonic_ns=lambda: round(now_s[0] * 1e9)))
    replicator, log = replicating("async")
    follower = replicator.follow(start())
    first = a_turn(replicator)
    for _ in range(11):  # It is heard all the time, and has never got what the turn waits for.
        assert replicator.replicated(first) == "the standby s is behind"
        now_s[0] += 0.5
        follower.acknowledged(FollowAck(first[0], first[1] - 9))
    assert replicator.replicated(first) is None
    second = a_turn(replicator)
    assert replicator.replicated(second) is None, "once is enough"
    assert replicator.status()["slow"]
    assert len(log.of("standby_slow")) == 1
    now_s[0] += 5.0
    follower.acknowledged(FollowAck(*second))
    third = a_turn(replicator)
    assert replicator.replicated(third) == "the standby s is behind"


@pytest.mark.parametrize("near", [True, False])
def test_a_detached_standby_is_attached_although_there_is_always_a_turn_on_its_way_to_it(
    replicating: Replicating, monkeypatch: pytest.MonkeyPatch, near: bool
) -> None:
    replicator, log = replicating()
    monkeypatch.setattr("diloco.sync.leadership.NEAR_NS", 60 * 10**9 if near else -1)
    replicator.detach()
    follower = replicator.follow(start())
    for _ in range(4):
        before = replicator.machine.durable
        assert replicator.replicated(a_turn(replicator)) is None
        follower.acknowledged(FollowAck(*before))
    assert len(log.of("attach")) == int(near), "one that is far behind would be waited for too long"
    for _ in range(3):
        follower.acknowledged(FollowAck(*replicator.machine.durable))
    assert len(log.of("attach")) == 1
    replicator.attached()
    assert replicator.replicated(a_turn(replicator)) == "the standby s is behind"


def test_an_acknowledgement_of_what_was_never_written_is_refused_and_believed_nothing_more(
    replicating: Replicating,
) -> None:
    replicator, log = replicating()
    follower = replicator.follow(start())
    segment, end = replicator.machine.durable
    follower.acknowledged(FollowAck(segment, end + 1))
    assert len(log.of("standby_away")) == 1
    assert "no standby has followed" in str(replicator.replicated(a_turn(replicator)))
    with pytest.raises(
        Refusal, match=f"acknowledged byte {end + 1} of segment {segment}, and the journal ends at byte"
    ):
        list(follower.parts())


def units_of(parts: Iterator[Any]) -> list[tuple[int, int]]:
    """The places of the units that come before there is nothing new."""
    found = []
    for part in parts:
        if isinstance(part, Alive):
            return found
        if isinstance(part, Item) and not part.name:
            found.append((part.segment, part.offset))
    raise AssertionError("it ended")


def test_a_segment_that_no_turn_has_come_to_yet_is_followed_into(replicating: Replicating) -> None:
    """A snapshot of an idle run: the segment that the standby has whole may go at once."""
    replicator, _ = replicating()
    journal = replicator.store.journal
    from_here = start(segment=1, chain=journal.chain.hex())
    follower = replicator.follow(from_here)
    parts = follower.parts()
    assert units_of(parts) == []
    journal.rotate()
    assert units_of(parts) == [(2, 0)]
    follower.acknowledged(FollowAck(*journal.begun))
    journal.prune(2)
    assert units_of(parts) == []
    assert replicator.status()["behind_bytes"] == 0
    follower.close()
    again = replicator.follow(from_here)
    assert again.place == (2, 0), "it goes on where the next segment begins, although its own last one is not kept"
    parts = again.parts()
    assert next(parts) == Follows(False, 2, from_here.chain, 1, waits=True)
    assert units_of(parts) == [(2, 0)]


def three_snapshots(replicator: Replicator) -> None:
    """Each with a turn behind it; without a pin the first one goes, and the segments before the last two."""
    for _ in range(3):
        journalled(replicator, DeadlinePassed())
        replicator.core.snapshot()


def test_what_a_slow_standby_is_being_sent_is_kept_until_it_has_it(replicating: Replicating) -> None:
    replicator, _ = replicating(retention=Retention(0, 1 << 30))
    store = replicator.store
    parts = replicator.follow(start()).parts()
    next(parts)
    next(parts)
    three_snapshots(replicator)
    assert (store.snapshots.numbers(), store.journal.segments()) == ([1, 3, 4], [1, 2, 3, 4])
    assert [segment for segment, _ in units_of(parts)] == [1, 1, 2, 2, 3, 3, 4]
    three_snapshots(replicator)
    assert (store.snapshots.numbers(), min(store.journal.segments())) == ([6, 7], 4), "what it has is not kept for it"


def test_a_copy_is_of_the_newest_whole_snapshot_and_neither_checked_nor_sent_as_a_whole(
    replicating: Replicating, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco.syncer.replicator.CHUNK_BYTES", 64)
    monkeypatch.setattr("diloco.syncer.snapshots.unpack", lambda data: pytest.fail("a fragment is in memory"))
    replicator, _ = replicating()
    snapshots = replicator.store.snapshots
    replicator.core.snapshot()
    whole, newest = (snapshots.path(number) for number in snapshots.numbers()[-2:])
    harm(newest / "fragment-1.safetensors", "flipped")
    sent: dict[str, bytes] = {}
    for part in replicator.follow(start()).parts():
        if isinstance(part, Item) and not part.name:
            break
        if isinstance(part, Item):
            name = part.name
            sent[name] = b""
        elif isinstance(part, Chunk):
            assert len(part.data) <= 64
            sent[name] += part.data
    assert sent == {f"snapshots/{whole.name}/{name}": data for name, data in files(whole).items()}


@pytest.mark.parametrize("sent", [1, 2, 20])
def test_a_copy_that_is_too_slow_for_what_may_be_kept_begins_again_in_words(
    replicating: Replicating, sent: int
) -> None:
    replicator, _ = replicating(retention=Retention(0, 10))
    parts = replicator.follow(start()).parts()
    for _ in range(sent):
        if isinstance(next(parts), Alive):
            break
    three_snapshots(replicator)
    with pytest.raises(Refusal, match="was deleted meanwhile: the copy starts over") as refused:
        units_of(parts)
    assert refused.value.status is Status.UNAVAILABLE, "it comes again by itself"


def test_a_payload_that_is_gone_is_needed_only_while_its_update_has_no_fate(
    replicating: Replicating, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update that was refused is in the journal where something else came of it too; its payload is dropped."""
    replicator, _ = replicating()
    payload = "a/0-1-dddddddddddddddd.update"
    from_here = start(segment=1, chain=replicator.store.journal.chain.hex())
    follower, begin = replicator.follow(from_here), replicator.end()
    journalled(replicator, arrived(payload=payload, digest="d" * 64))
    assert units_of(follower.parts()) == [begin]
    monkeypatch.setattr("diloco.syncer.replicator.payloads_in", lambda state: {payload: "d" * 64})
    with pytest.raises(Refusal, match=f"spool/{payload} is missing on the syncer's disk"):
        units_of(replicator.follow(from_here).parts())


def test_a_standby_of_another_run_or_with_another_journal_is_refused(replicating: Replicating) -> None:
    replicator, log = replicating()
    replicator.store.journal.rotate()
    for changes, words in (
        ({"layout_fingerprint": "c" * 64}, "layout_fingerprint is cccccccccccc at the standby"),
        ({"shared_digest": "c" * 64}, "shared_digest is cccccccccccc at the standby"),
        ({"segment": 1, "chain": "c" * 64}, "this one, of lineage 1, does not continue: give it an empty folder"),
        ({"segment": 7, "chain": "c" * 64}, "give it an empty folder"),
    ):
        with refused(Status.FAILED_PRECONDITION, words):
            replicator.admit(start(**changes))
            replicator.follow(start(**changes))
    replicator.follow(start(shared_digest=EARLIER))
    assert len(log.of("standby_follows")) == 1, "one of an earlier release follows by its digest"


def test_a_standby_that_copies_counts_as_one_that_follows(replicating: Replicating) -> None:
    """It says nothing before it has the whole copy, which may take longer than a silence may."""
    replicator, _ = replicating()
    follower = replicator.follow(start())
    replicator.machine.timeout_ns = 0
    replicator.admit(start())
    with refused(Status.ALREADY_EXISTS, "standby s follows already: stop that first"):
        replicator.admit(start(standby="t"))
    follower.close()
    replicator.admit(start(standby="t"))
