"""The syncer of a region, with somebody above who says what the test wants."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.codec.base import bytes_of, digest
from diloco.codec.registry import make_codec
from diloco.codec.site_pass import follow, publish
from diloco.outer.optimizer import OuterOptimizerOptions, OuterRule, OuterState
from diloco.outer.pseudo_gradient import blend
from diloco.sync.effects import Fetch, RegionEffect, Release, Seal, Send, TakeVersion
from diloco.sync.events import (
    Fate,
    FateTold,
    FragmentStanding,
    JoinAnswered,
    Outcome,
    PushAnswered,
    Sealed,
    UpstreamFetched,
    UpstreamStarted,
)
from diloco.sync.region import Below, outbox_file
from diloco.sync.rounds import Selection
from diloco.sync.state import Part
from diloco.syncer.options import memory_bytes_max
from diloco.syncer.outer_step import OuterResult, run_outer_step
from diloco.syncer.replicator import ReplicationOptions
from diloco.syncer.restoring import Kept
from diloco.syncer.server import Syncer, UpstreamRefusedError
from diloco.syncer.snapshots import FragmentValues, same_values
from diloco.syncer.spool import Spool, SpoolError
from diloco.syncer.standby import Standby, begun_anew
from diloco.wire.client import AdminClient, FollowClient
from tests.syncer.building import NUMEL, Events, dice, eventually, join, new_syncer, push, update

RULE = OuterRule(OuterOptimizerOptions(kind="heavy_ball", lr=1.0, momentum=0.5))
SGD = {"kind": "sgd", "lr": 1.0, "momentum": 0.0}


class SomebodyAbove:
    """Takes down what it is told."""

    def __init__(self, site: str = "region-a", outbox: tuple[tuple[int, int, str], ...] = ()) -> None:
        self.site, self.outbox = site, outbox
        self.below: Below
        self.known: Sequence[Part] = ()
        self.orders: list[RegionEffect] = []
        self.sealed: list[tuple[Seal, Tensor, Tensor]] = []
        self.life: list[str] = []

    def begin(self, below: Below, known: Sequence[Part]) -> UpstreamStarted:
        self.below, self.known = below, known
        return UpstreamStarted(self.site, 1, 0.25, 2, self.outbox)

    def start(self) -> None:
        self.life.append("start")

    def seal(self, effect: Seal, reference: Tensor, values: Tensor) -> None:
        self.sealed.append((effect, reference.clone(), values.clone()))

    def order(self, effect: RegionEffect) -> None:
        self.orders.append(effect)

    def finish(self) -> None:
        self.life.append("finish")

    def close(self) -> None:
        self.life.append("close")

    def of(self, kind: type) -> list[RegionEffect]:
        return [order for order in list(self.orders) if isinstance(order, kind)]

    def answer(self) -> None:
        """It is taken in; version 4 of everything is there."""
        standings = tuple(FragmentStanding(index, 4, "", 0, 0, 0, 0, (), ()) for index in range(len(NUMEL)))
        self.below.tell(JoinAnswered(1, 1, standings, 0, 100, None))

    def bring(self, fragment: int, version: int, values: Tensor) -> str:
        payload = self.below.keep(fragment, bytes_of(values), digest(values))
        self.below.tell(UpstreamFetched(fragment, version, payload, digest(values), 1, 1))
        return payload

    def takes(self, sequence: int, version: int) -> None:
        """It has merged the region's update for fragment 0 into ``version``, which is nothing but zeros."""
        digest = f"d{sequence}"
        self.below.tell(PushAnswered(0, sequence, Outcome.ACCEPTED, None, digest, 1))
        self.below.tell(FateTold(Fate(0, sequence, version, 50, digest)))
        self.bring(0, version, torch.zeros(NUMEL[0]))
        eventually(lambda: self.of(Release), "what was sent is let go")


def a_region(folder: Path, above: SomebodyAbove, **options: Any) -> tuple[Syncer, Events]:
    events = Events()
    return new_syncer(folder, events.emit, {"round_updates": 1}, SGD, above=lambda: above, **options), events


@contextmanager
def based(folder: Path, **options: Any) -> Iterator[tuple[Syncer, SomebodyAbove, Events]]:
    above = SomebodyAbove()
    syncer, events = a_region(folder, above, **options)
    syncer.start()
    try:
        above.answer()
        eventually(lambda: len(above.of(Fetch)) == len(NUMEL), "fetches")
        for fragment in range(len(NUMEL)):
            above.bring(fragment, 4, dice("above", fragment))
        events.wait_for("published", len(NUMEL))
        yield syncer, above, events
    finally:
        syncer.stop()


def test_it_takes_the_version_above_and_sends_what_its_sites_have_brought(tmp_path: Path) -> None:
    with based(tmp_path, retain_steps=256) as (syncer, above, events):
        assert above.life == ["start"]
        bound = memory_bytes_max(syncer.options, syncer.plan, syncer.network, 2)
        assert events.of("syncer_started")[0]["memory_bytes_max"] == bound
        for fragment in range(len(NUMEL)):
            assert torch.equal(syncer.holdings.values[fragment].theta, dice("above", fragment))
        join(syncer)
        header, payload = update(base_version=1)
        push(syncer, header, payload)
        eventually(lambda: above.sealed, "an update for the one above")
        ((effect, reference, values),) = above.sealed
        assert (effect.fragment, effect.tokens, effect.base_version) == (header.fragment, header.tokens, 4)
        assert torch.equal(reference, dice("above", header.fragment))
        assert torch.equal(values, syncer.holdings.values[header.fragment].theta)
        standing, mean = above.below.standing(), header.tokens // 2  # Over two fragments.
        assert (standing.versions, standing.ledger.processed) == ((4, 4), mean)
        told: Any = syncer.status()["upstream"]
        assert (told["site"], told["base_versions"]) == ("region-a", [4, 4])
        assert (told["tokens_processed"], told["tokens_in_flight"]) == (mean, mean)
        sealed(tmp_path, above, 1)
        before = syncer.holdings.values[0].theta
        above.takes(1, 5)
        eventually(lambda: syncer.holdings.values[0].version == 3, "the next version")
        held = syncer.holdings.values[0].theta
        assert torch.allclose(held, 0.75 * before)
        assert [event["sites"] for event in events.of("outer_step")][-1] == {}
        syncer.linger()
        assert above.life == ["start", "finish"], "the end waits for the one above"
    assert above.life == ["start", "finish", "close"]
    assert above.below.standing() is None, "nothing is decided any more"
    # Without the update what came from above is taken all the same: that holds what the update has brought it.
    kept, rules = Kept(tmp_path), syncer.plan.rules(syncer.options)
    without = kept.replay(rules, [Selection("a", "sequences", 1, 1)])
    assert torch.equal(kept.replay(rules, verify=True).values[0].theta, held)
    assert torch.equal(without.values[0].theta, blend(dice("above", 0), torch.zeros(NUMEL[0]), 0.75))
    assert not torch.equal(without.values[0].theta, held)


def test_after_a_stop_and_after_a_kill_it_has_the_same_bits(tmp_path: Path) -> None:
    with based(tmp_path) as (syncer, above, _):
        join(syncer)
        push(syncer, *update(base_version=1))
        eventually(lambda: above.sealed, "an update for the one above")
        waits = above.bring(1, 5, dice("later", 1))
        eventually(lambda: syncer.holdings.values[1].version == 2, "fragment 1 has nothing to lose by it")
        held = list(syncer.holdings.values)
        syncer.keeper.begin = lambda machine: None  # type: ignore[method-assign]  # As after kill -9: no snapshot.
    for _ in range(2):  # From the journal, and then from the snapshot that the first stop has left.
        again = SomebodyAbove()
        syncer, _ = a_region(tmp_path, again)
        syncer.start()
        try:
            assert all(same_values(before, now) for before, now in zip(held, syncer.holdings.values, strict=True))
            assert all(each.reference is not None for each in held)
            assert [each.progress.base_version for each in again.known] == [4, 5]
            assert (tmp_path / "spool" / waits).exists(), "it is what fragment 1 rests on"
            again.answer()
            eventually(lambda: again.sealed, "what was not sealed is measured anew")  # noqa: B023
            assert torch.equal(again.sealed[0][1] - again.sealed[0][2], above.sealed[0][1] - above.sealed[0][2])
        finally:
            syncer.stop()


def sealed(folder: Path, above: SomebodyAbove, sequence: int) -> Path:
    """What the region's syncer hears when its ``sequence``th update for fragment 0 lies in the outbox, where it is."""
    path = folder / outbox_file(0, sequence)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"update %d" % sequence)
    above.below.tell(Sealed(0, sequence, f"d{sequence}"))
    eventually(lambda: len(above.of(Send)) == sequence, "the order to send")
    return path


def alike(syncer: Syncer, standby: Standby) -> bool:
    """Whether both hold the same values."""
    held, replayer = syncer.holdings.values, standby._replayer
    return replayer is not None and [each.digest for each in replayer.values] == [each.digest for each in held]


def test_a_standby_has_the_versions_above_and_the_updates_that_are_on_their_way(tmp_path: Path) -> None:
    """Those of before it came, and those that come after; what an earlier lineage had from above leaves its disk."""
    ours, theirs = tmp_path / "region", tmp_path / "standby"

    def both(pattern: str) -> tuple[dict[str, bytes], dict[str, bytes]]:
        found: tuple[dict[str, bytes], dict[str, bytes]] = {}, {}
        for files, folder in zip(found, (ours, theirs), strict=True):
            for path in folder.glob(pattern):
                with suppress(FileNotFoundError):  # The process removes files meanwhile.
                    files[path.name] = path.read_bytes()
        return found

    replication = ReplicationOptions(mode="async", timeout_s=2.0, alive_s=0.2)
    with ExitStack() as ending, based(ours, replication=replication) as (syncer, above, _):
        join(syncer)
        push(syncer, *update(base_version=1))
        eventually(lambda: above.sealed, "an update for the one above")
        first = sealed(ours, above, 1)
        syncer.api.snapshot()
        events, client = Events(), FollowClient(syncer._server.address)
        options = replace(syncer.options, folder=str(theirs))
        standby = Standby("standby", options, syncer.plan, client, events.emit)
        standby.start()
        ending.callback(standby.close)
        eventually(lambda: alike(syncer, standby), "the values of a snapshot, and what came since")
        assert (theirs / outbox_file(0, 1)).read_bytes() == first.read_bytes()
        here, there = both("spool/.above/*")
        assert here == there
        assert len(there) == len(NUMEL)
        above.takes(1, 5)
        first.unlink()
        eventually(lambda: syncer.holdings.values[0].version == 3, "the version above is blended")
        assert push(syncer, *update(sequence=2, base_version=3)).outcome is Outcome.ACCEPTED
        eventually(lambda: len(above.sealed) == 2, "the next one for the one above")
        second = sealed(ours, above, 2)
        eventually(
            lambda: both("above/outbox/*")[1] == {second.name: second.read_bytes()}, "the first one is wanted no more"
        )
        eventually(lambda: alike(syncer, standby), "the version above is blended there as well")
        for version in range(6, 9):
            above.bring(1, version, dice(version, 1))
            syncer.api.snapshot()
        eventually(lambda: both("spool/.above/*")[0].keys() <= both("spool/.above/*")[1].keys(), "none is missing")
        # The standby writes in one thread and carries out in another, so that it may let go a snapshot or two later.
        old, newer = both("spool/.above/1-*")[1].keys(), count(9)

        def go_with_the_next() -> bool:
            above.bring(1, version := next(newer), dice(version, 1))
            syncer.api.snapshot()
            return not old & (both("spool/.above/1-*")[0].keys() | both("spool/.above/1-*")[1].keys())

        eventually(go_with_the_next, "none stays for ever")
        assert not events.of("failed")
        syncer.stop()
        warm, later = begun_anew(standby.promote(), "an operator's word", 7), SomebodyAbove()
        promoted, _ = a_region(theirs, later)
        promoted.start(warm)
        ending.callback(promoted.stop)
        assert [each.progress.base_version for each in later.known] == [-1, -1]
        for _ in range(2):
            promoted.api.snapshot()
        assert not both("spool/.above/*")[1]


def test_it_speaks_above_when_it_may_tell_its_sites_and_ends_in_words_where_it_is_put_out(tmp_path: Path) -> None:
    """As the old syncer that is started again when its standby has taken over: it would put that one out above."""
    above = SomebodyAbove()
    syncer, _ = a_region(tmp_path, above, replication=ReplicationOptions(mode="sync"))
    address = syncer.start()
    try:
        assert above.life == []
        with AdminClient(address) as operator:
            operator.detach()
        eventually(lambda: above.life == ["start"], "it speaks above")
        above.below.give_up("evicted")
        with pytest.raises(UpstreamRefusedError, match="evicted"):
            syncer.wait(10.0)
    finally:
        syncer.stop()


# --- A version that is made of one of the syncer above: the blend, the down-link, and what stays ---------------------


def take(folder: Path, above: Tensor, share: float, codec: str, values: FragmentValues) -> OuterResult | None:
    spool = Spool(folder / "spool")
    payload = spool.put_above(0, bytes_of(above), digest(above))
    command = TakeVersion(0, values.version + 1, share, payload, digest(above))
    found = run_outer_step(command, values, spool, RULE, codec)
    (folder / "spool" / payload).write_bytes(bytes_of(-above))
    with pytest.raises(SpoolError, match="damaged"):
        run_outer_step(command, values, spool, RULE, codec)
    return found


@pytest.mark.parametrize("codec", ["fp32", "int4:32+zstd1"])
def test_it_is_the_blend_and_all_who_follow_hold_what_is_published(tmp_path: Path, codec: str) -> None:
    theta, published, momentum, reference, above = (dice(name, 0) for name in ("t", "p", "m", "r", "above"))
    values = FragmentValues(
        7, theta, published, OuterState(3, {"momentum": momentum}), digest(published), reference=reference
    )
    found = take(tmp_path, above, 0.25, codec, values)
    made = found.values
    assert torch.equal(made.theta, blend(theta, above, 0.75))
    assert torch.allclose(made.theta, 0.75 * theta + 0.25 * above)
    assert torch.equal(made.published, publish(made.theta, published, make_codec(codec))[1])
    assert torch.equal(follow(published, found.downlink, make_codec(codec)), made.published)
    assert made.digest == digest(made.published)
    assert found.downlink_digest.startswith(made.digest.partition(":")[0])
    assert made.version == 8
    assert made.optimizer is values.optimizer, "the momentum is kept"
    assert made.reference is made.theta
    whole = take(tmp_path, above, 1.0, codec, values)
    assert torch.equal(whole.values.theta, above), "all of it is taken to the bit"


def test_what_would_not_be_finite_is_not_taken(tmp_path: Path) -> None:
    far = torch.full((NUMEL[0],), 3e38)
    values = FragmentValues(0, -far, -far, OuterState(), "")
    assert take(tmp_path, far, 0.25, "fp32", values) is None
    assert take(tmp_path, far, 1.0, "int8", values) is None, "too far from what was published"
