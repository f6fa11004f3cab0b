"""What waits for a standby, and what is said about it; ``test_standby`` has both ends together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from diloco.durable import PLAIN_DISK
from diloco.syncer.journal_files import Turn
from diloco.syncer.replicator import ReplicationOptions, Replicator
from diloco.syncer.store import RunCard, Store
from diloco.wire.messages import Refusal, Status
from diloco.wire.replication import FollowAck, Follows, FollowStart
from tests.loopback.audit import version_zero
from tests.loopback.cluster import Log
from tests.loopback.toy import Toy

PRINT, SHARED = "a" * 64, "b" * 64


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def a_replicator(folder: Path, closing: ExitStack, mode: str = "sync") -> tuple[Replicator, Log]:
    toy, log = Toy(folder=str(folder)), Log()
    store = Store(folder / "syncer", RunCard("toy", PRINT, SHARED), PLAIN_DISK)
    store.begin(*version_zero(toy))
    closing.callback(store.journal.close)
    replicator = Replicator(ReplicationOptions(mode=mode), store, (PRINT, SHARED, lambda: 1), log.emit)
    replicator.begin(lambda: None, lambda name: log.emit("attach", {"standby": name}), detached=False)
    return replicator, log


def start(**changes: Any) -> FollowStart:
    fields = {"run_id": "toy", "standby": "s", "layout_fingerprint": PRINT, "shared_digest": SHARED}
    return FollowStart(**{**fields, "segment": 0, "chain": "", **changes})


def a_turn(replicator: Replicator, size: int = 10) -> Turn:
    segment, end = replicator.durable
    return Turn(segment, end, bytes(size), b"")


def test_sync_waits_for_the_standby_and_says_for_whom(tmp_path: Path, closing: ExitStack) -> None:
    replicator, _ = a_replicator(tmp_path, closing)
    turn = a_turn(replicator)
    assert "no standby has followed" in str(replicator.replicated(turn))
    follower = replicator.follow(start())
    assert replicator.replicated(turn) == "the standby s is behind"
    follower.acknowledged(FollowAck(turn.segment, turn.offset + 9))
    assert replicator.replicated(turn) is not None
    follower.acknowledged(FollowAck(turn.segment, turn.offset + 10))
    assert replicator.replicated(turn) is None
    follower.close()
    assert "the standby is away: nothing" in str(replicator.replicated(a_turn(replicator)))


def test_async_waits_only_for_one_that_follows(tmp_path: Path, closing: ExitStack) -> None:
    replicator, _ = a_replicator(tmp_path, closing, "async")
    assert replicator.acks_first
    turn = a_turn(replicator)
    assert replicator.replicated(turn) is None
    follower = replicator.follow(start())
    assert replicator.replicated(turn) == "the standby s is behind"
    follower.close()
    assert replicator.replicated(turn) is None


def test_off_waits_for_nobody(tmp_path: Path, closing: ExitStack) -> None:
    replicator, _ = a_replicator(tmp_path, closing, "off")
    assert replicator.replicated(a_turn(replicator)) is None


def test_a_detached_standby_is_told_of_once_when_it_has_caught_up(tmp_path: Path, closing: ExitStack) -> None:
    replicator, log = a_replicator(tmp_path, closing)
    turn = a_turn(replicator)
    replicator.detach()
    assert replicator.replicated(turn) is None
    follower = replicator.follow(start())
    assert replicator.replicated(turn) is None, "until it is attached again nobody waits for it"
    for _ in range(3):
        follower.acknowledged(FollowAck(*replicator.durable))
    assert len(log.of("attach")) == 1
    replicator.attached()
    assert replicator.replicated(a_turn(replicator)) == "the standby s is behind"


@pytest.mark.parametrize("near", [True, False])
def test_a_detached_standby_is_attached_although_there_is_always_a_turn_on_its_way_to_it(
    tmp_path: Path, closing: ExitStack, monkeypatch: pytest.MonkeyPatch, near: bool
) -> None:
    replicator, log = a_replicator(tmp_path, closing)
    monkeypatch.setattr("diloco.syncer.replicator.NEAR_S", 60.0 if near else -1.0)
    replicator.detach()
    follower = replicator.follow(start())
    for _ in range(4):
        before = replicator.durable
        assert replicator.replicated(a_turn(replicator)) is None
        follower.acknowledged(FollowAck(*before))
    assert len(log.of("attach")) == int(near), "one that is far behind would be waited for too long"
    follower.acknowledged(FollowAck(*replicator.durable))
    assert len(log.of("attach")) == 1


@pytest.mark.parametrize("field", ["layout_fingerprint", "shared_digest"])
def test_a_standby_of_another_run_is_refused(tmp_path: Path, closing: ExitStack, field: str) -> None:
    replicator, _ = a_replicator(tmp_path, closing)
    with pytest.raises(Refusal, match=f"{field} is cccccccccccc at the standby") as refused:
        replicator.follow(start(**{field: "c" * 64}))
    assert refused.value.status is Status.FAILED_PRECONDITION


@pytest.mark.parametrize("segment", [1, 7])
def test_a_journal_that_is_not_a_beginning_of_this_one_is_refused(
    tmp_path: Path, closing: ExitStack, segment: int
) -> None:
    replicator, _ = a_replicator(tmp_path, closing)
    with pytest.raises(Refusal, match="give it an empty folder"):
        replicator.follow(start(segment=segment, chain="c" * 64))


def test_one_that_has_nothing_begins_with_a_snapshot_and_one_that_has_all_with_nothing(
    tmp_path: Path, closing: ExitStack
) -> None:
    replicator, _ = a_replicator(tmp_path, closing)
    parts = replicator.follow(start()).parts()
    follows = next(parts)
    assert isinstance(follows, Follows)
    assert (follows.anew, follows.segment, follows.chain) == (True, 1, "0" * 64)
    names = []
    for part in parts:
        if getattr(part, "segment", 0):
            break
        names.append(getattr(part, "name", ""))
    assert [name for name in names if name] == [
        f"snapshots/00000001/{name}" for name in ("fragment-0.safetensors", "manifest.json", "state.json")
    ]
    follower = replicator.follow(start(segment=1, chain=replicator.store.journal.chain.hex()))
    assert follower.place == replicator.durable or follower.place[1] <= replicator.durable[1]
    assert next(follower.parts()) == Follows(False, 1, replicator.store.journal.chain.hex(), 1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "both"}, "mode is 'both': one of off, sync, async"),
        ({"timeout_s": 0.5}, "timeout_s is 0.5: longer than"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ReplicationOptions(**options)
