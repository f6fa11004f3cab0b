"""What the machine orders goes to the thread that does it, and is told when the tensors are changed, not before."""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from diloco.codec.base import digest
from diloco.codec.registry import make_codec
from diloco.inner import GroupError
from diloco.inner.holding import Holding
from diloco.learner import exchange
from diloco.learner.agent import Agent
from diloco.learner.exchange import AgentOptions, Exchange, Follower, Owner, Owners
from diloco.learner.ranks import ADOPT, GO_ON, RETAKE, SEAL, STOP, WAIT, Channel, Dealt, Orders, all_mine
from diloco.learner.seal import Encoder, SealJob, seal
from diloco.outer.fragments import gather, part_of
from diloco.sync.effects import Adopt, Release, Retake, Seal, StartOver
from diloco.sync.events import LearnerEvent, Sealed, VersionFetched
from diloco.sync.progress import FragmentProgress, LearnerState, Sent
from diloco.wire.messages import PullHeader, Unreachable
from diloco.wire.pulling import PulledVersion
from tests.learner.direct import info_of
from tests.learner.participant import Heard, held
from tests.syncer.building import LAYOUT, dice, eventually


class Rank:
    """A process group of two in which nothing needs to be sent."""

    world, device, timeout_s = 2, torch.device("cpu"), 20.0

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def all_gather_json(self, mine: Any) -> list[Any]:
        return [json.loads(json.dumps(mine))] * 2

    def broadcast_small(self, words: Sequence[int], src: int = 0) -> list[int]:
        return list(words)

    def broadcast_(self, tensor: Tensor, src: int = 0) -> None:
        pass


class Client:
    """Of the wire only what is counted, and where it leads."""

    run_id, site_id = "run", "a"

    def __init__(self) -> None:
        self.traffic = (0, 0)
        self.taken_in = (0, 1)
        self.followed: list[tuple[int, int]] = []

    def follow(self, taken_in: tuple[int, int]) -> None:
        self.followed.append(taken_in)

    def pull(self, *asked: object) -> PulledVersion:
        raise Unreachable("no syncer")

    def close(self) -> None:
        pass


class Told(Heard, Exchange):
    """The exchange of rank 0."""

    def __init__(self, folder: Path, model: Holding, dealt: Dealt, client: Any) -> None:
        Heard.__init__(self)
        self.knows, self.answer = True, "digest"
        options, orders = AgentOptions(folder=str(folder)), Orders(model.group)
        Exchange.__init__(self, options, "rebase", LAYOUT, model, dealt, orders, client)

    def change(self, do: Callable[[], None], event: LearnerEvent, *_: object) -> bool:
        with self.changed:
            if self.knows:
                do()
            self.tell(event)
        return self.knows

    def wanted(self, fragment: int, sequence: int) -> str | None:
        return self.answer

    def has_failed(self) -> bool:
        return False

    def sealing(self, sequence: int, at_rest: bool = False) -> SealJob:
        self.at_boundary(sealing(0, sequence), "fp32", at_rest=at_rest)
        job = self.sealer.queue.get()
        assert isinstance(job, SealJob)
        assert (job.effect.sequence, job.codec) == (sequence, "fp32")
        return job


stand_still: Any = Agent.stand_still
"""A rank that has the machine waits; of that only ``has_failed`` is used."""


def sealing(fragment: int, sequence: int) -> Seal:
    return Seal(fragment, sequence, 0, (), 10, 1, 1_000, 1, final=False)


def zeros() -> dict[str, Tensor]:
    return {name: torch.zeros(shape) for name, shape in LAYOUT.parameters}


def arrive(at: Exchange, version: int, fragment: int = 0) -> None:
    """The exchange has fetched a version, whose values are dice."""
    values = dice(f"v{version}", fragment)
    size, told = 4 * values.numel(), digest(values)
    header = PullHeader(fragment, -1, version, True, "fp32", values.numel(), size, (size,), told, 0, (), 1, sites=3)
    at.keep_fetched(values, VersionFetched(fragment, version, ()), 1, header)


@pytest.fixture
def begun(tmp_path: Path) -> Told:
    """A site of one rank, with a first version."""
    found = Told(tmp_path, held(zeros()), all_mine(LAYOUT), Client())
    arrive(found, 0)
    found.at_boundary(Retake(0, 0, (), "first version"))
    return found


def test_an_update_is_measured_at_once_and_known_when_it_is_durable(begun: Told) -> None:
    begun.tensors.write(0, dice("trained", 0), dice("trained", 0))
    job = begun.sealing(1)
    begun.tensors.write(0, dice("later", 0), dice("later", 0))
    header, encoded = seal(job, Encoder(make_codec("fp32"), begun.tensors.place), "run", "a", 1)
    assert header.values_digest == digest(dice("v0", 0) - dice("trained", 0))
    begun.keep_sealed(header, encoded)
    assert begun.told[-1] == Sealed(0, 1, header.digest)
    assert list(begun.tensors.sent) == [(0, 1)]
    begun.order(Release(0, 1))
    assert begun.tensors.sent == {}


def test_training_stands_still_for_as_long_as_its_values_are_read_and_no_longer(
    begun: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun.sealing(1)
    with begun.changed:
        stand_still(begun, 0.0)  # A copy is not waited for.
    first, second = (begun.sealing(sequence, at_rest=True) for sequence in (2, 3))
    begun.was_read(first)
    with begun.changed, pytest.raises(TimeoutError, match="lock_step"):
        stand_still(begun, 0.0)
    other = threading.Timer(0.05, begun.was_read, [second])
    other.start()
    with begun.changed:
        stand_still(begun, time.monotonic() + 30.0)
    begun.sealing(4, at_rest=True)
    monkeypatch.setattr(begun, "has_failed", lambda: True)
    with begun.changed:
        stand_still(begun, 0.0)


# --- A rank that owns fragments does what rank 0 says, in that order, and knows no more than rank 0 ------------------


class Pair:
    """Rank 0 and one other owner in one process: fragment 0 is rank 0's, fragment 1 the other's; the wire is a pipe.

    Both hold the whole model, so that no value needs a collective, and each has a model of its own.
    """

    def __init__(self, folder: Path, restored: Mapping[str, Tensor] | None) -> None:
        ends = [Channel(end) for end in multiprocessing.Pipe()]
        self.state = LearnerState([FragmentProgress(), FragmentProgress()])
        self.models, self.clients = [zeros(), zeros()], [Client(), Client()]
        mine, theirs = (Holding(model, Rank(rank)) for rank, model in enumerate(self.models))
        dealt = Dealt((0, 1), {1: ends[0]})
        self.zero = Told(folder, mine, dealt, self.clients[0])
        self.tensors, self.told, self.events = self.zero.tensors, self.zero.told, self.zero.events
        self.site = Owners(dealt, self.zero, Orders(mine.group))
        dealt, options = Dealt((0, 1), {0: ends[1]}), AgentOptions(folder=str(folder))
        self.owner = Owner(options, "rebase", LAYOUT, theirs, dealt, self.clients[1], restored)

    def first_version(self) -> None:
        arrive(self.owner, 0, 1)
        self.site.at_boundary(Retake(1, 0, (), "first version"), "")
        self.owner.do()

    def through(self) -> None:
        """All that was sent to the owner is done: it answers in order."""
        with self.zero.changed:
            self.site.capture()
        self.owner.state()


Began = Callable[[Mapping[str, Tensor] | None], Pair]


@pytest.fixture
def began(tmp_path: Path) -> Iterator[Began]:
    """What makes a pair, perhaps from a checkpoint."""
    made = list[Pair]()
    yield lambda restored: made.append(Pair(tmp_path, restored)) or made[-1]
    made[0].site.parting = True
    made[0].owner.close()
    made[0].site.close()


@pytest.fixture
def pair(began: Began) -> Pair:
    found = began(None)
    found.site.begin(found.state)
    return found


def test_a_version_is_here_when_the_machine_has_taken_it_and_not_before(pair: Pair) -> None:
    pair.zero.knows = False
    arrive(pair.owner, 0, 1)
    assert pair.owner.tensors.latest[1] is None
    pair.zero.knows = True
    arrive(pair.owner, 0, 1)
    latest = pair.owner.tensors.latest[1]
    assert latest is not None
    assert torch.equal(latest[1], dice("v0", 1))
    assert pair.owner.tensors.sites_in[1] == 3
    eventually(lambda: pair.told == [VersionFetched(1, 0, ())] * 2, "both words, in the thread of rank 0")
    assert pair.tensors.latest == [None, None], "no tensor of it is rank 0's"
    assert pair.tensors.told_latest[1] == digest(dice("v0", 1))


def test_an_update_is_made_sealed_and_taken_back_here(pair: Pair, tmp_path: Path) -> None:
    pair.first_version()
    for values in pair.models[1].values():
        values.add_(1.0)
    pair.site.at_boundary(sealing(1, 1), "fp32")
    pair.site.order(Release(1, 1))
    pair.owner.do()
    eventually(lambda: any(isinstance(event, Sealed) for event in pair.told), "it is told")
    pair.through()
    assert list(pair.owner.tensors.sent) == [(1, 1)], "that order came before it was sealed"
    (sealed,) = pair.events.of("sealed")
    assert (sealed["fragment"], sealed["sequence"]) == (1, 1)
    assert [path.name for path in (tmp_path / "outbox").glob("*.update")] == ["1-1.update"]
    arrive(pair.owner, 1, 1)
    pair.site.at_boundary(Adopt(1, 1, (1,)), "")
    pair.owner.do()
    assert pair.owner.tensors.sent == {}
    assert torch.allclose(pair.owner.tensors.local(1), dice("v1", 1), atol=1e-6), "what was merged is taken off"
    eventually(lambda: [event["version"] for event in pair.events.of("adopted")] == [1], "it is told")
    assert pair.tensors.told_base[1] == digest(dice("v1", 1))


def test_what_is_ordered_behind_a_boundary_waits_until_that_is_done(pair: Pair) -> None:
    pair.first_version()
    arrive(pair.owner, 1, 1)
    pair.site.at_boundary(Adopt(1, 1, ()), "")
    pair.site.order(StartOver(1))
    pair.site.capture()
    assert pair.owner.tensors.latest[1] is not None
    pair.owner.do()
    assert torch.equal(pair.owner.state()["base.1"], dice("v1", 1))
    assert pair.owner.tensors.latest[1] is None
    eventually(lambda: [event["fragment"] for event in pair.events.of("started_over")] == [1], "it is told")


def test_what_is_known_of_the_run_is_told_once_and_bytes_are_those_of_all_ranks(pair: Pair) -> None:
    pair.state.incarnation, pair.state.epoch, pair.state.lineage = 4, 5, 6
    pair.site.know(pair.state)
    pair.site.know(pair.state)
    pair.through()
    known = pair.owner.known
    assert (known.incarnation, known.epoch, known.lineage, pair.clients[1].followed) == (4, 5, 6, [(0, 1)])
    assert pair.owner.wanted(1, 7) == "digest"
    pair.zero.answer = None
    assert pair.owner.wanted(1, 7) is None
    pair.clients[0].traffic, pair.clients[1].traffic = (3, 0), (40, 500)
    pair.owner.emit("note", {"note": "x"})
    eventually(lambda: pair.site.traffic() == (43, 500), "it came with what is said")


def test_a_checkpoint_is_taken_up_as_far_as_the_machine_lists_it(began: Began) -> None:
    tensors = {"base.0": dice("b0", 0), "base.1": dice("b1", 1), "sent.1.3": dice("d3", 1), "sent.1.4": dice("d4", 1)}
    found = began(tensors)
    part = found.state.fragments[1]
    found.state.fragments[0].base_version = part.base_version = 7
    part.in_flight = [Sent(3, 7, 10, 1)]
    found.tensors.told_base[1] = "seven"
    found.site.begin(found.state)
    found.through()
    own = found.owner.tensors
    assert own.base == [None, tensors["base.1"]], "the other is rank 0's"
    assert (list(own.sent), own.told_base[1]) == ([(1, 3)], "seven")


def test_a_base_is_hashed_here_and_told_for_the_heartbeat(began: Began, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "ECHO_EVERY_S", 0.01)
    found = began(None)
    found.site.begin(found.state)
    found.first_version()
    found.state.fragments[1].base_version = 0
    eventually(lambda: found.site.digests((5, 0), found.state)[1] != 0, "it is hashed")
    assert found.site.digests((5, 0), found.state)[0] == 5
    found.state.fragments[1].base_version = 1
    assert found.site.digests((5, 0), found.state) == (5, 0), "of another version nothing is said"


def test_a_first_digest_may_come_while_those_for_a_heartbeat_are_gathered(pair: Pair) -> None:
    """The thread that hears the rank holds no lock, and every adopt forgets a digest: the next one is a first one."""

    class Hearing(list[FragmentProgress]):
        def __getitem__(self, at: Any) -> Any:
            pair.site._hear(1, ("echo", (0, 0), 0, 0, 9))
            return super().__getitem__(at)

    pair.site._hear(1, ("echo", (0, 0), 1, -1, 7))
    assert pair.site.digests((5, 0), LearnerState(Hearing(pair.state.fragments))) == (5, 7)


def test_without_rank_0_no_thread_waits(pair: Pair) -> None:
    waits = threading.Thread(target=pair.owner.wanted, args=(1, 1))
    pair.zero.answer = None
    pair.site.close()
    waits.start()
    waits.join(10)
    assert not waits.is_alive()
    with pytest.raises(GroupError, match="the connection to rank 0 of this site is lost"):
        pair.owner.do()


def test_an_order_that_ends_in_an_error_keeps_no_thread_when_the_rank_ends(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise GroupError("rank 2 went away")

    pair.first_version()
    monkeypatch.setattr(pair.owner.tensors, "retake", fail)
    pair.site.at_boundary(Retake(1, 0, (), "an update was refused"), "")
    with pytest.raises(GroupError, match="rank 2 went away"):
        pair.owner.do()
    pair.owner.close()
    hears = pair.owner._channel._thread
    assert hears is not None
    assert not hears.is_alive(), "it would be waited for in vain"


@pytest.mark.parametrize("ends", [False, True])
def test_an_owner_that_is_gone_is_a_rank_that_is_lost_unless_the_site_ends(pair: Pair, ends: bool) -> None:
    pair.site.parting = ends
    pair.owner.close()
    if not ends:
        eventually(lambda: "rank 1 of this site is gone" in pair.site.lost, "it is told")
    assert bool(pair.site.lost) == (not ends)


def test_a_thread_that_dies_here_stops_the_site_in_words(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    pair.first_version()
    pair.site.at_boundary(sealing(1, 1), "fp32")
    monkeypatch.setattr(pair.owner.outbox, "put", lambda header, payload: 1 / 0)
    pair.owner.do()
    eventually(lambda: pair.zero.gave_up, "it is told")
    assert "ZeroDivisionError" in pair.zero.gave_up[0]


def test_a_version_that_is_taken_again_is_told_as_its_base_only_where_it_is_the_latest(pair: Pair) -> None:
    pair.tensors.told_latest[1] = "two"
    pair.site._versions[1] = 2
    pair.owner.tensors.base[1] = dice("v1", 1)
    pair.owner.tensors.arrived(1, 2, dice("v2", 1), "two")
    for version, told in ((1, ""), (2, "two")):
        pair.site._echoes[1] = (version, 7)
        pair.site.at_boundary(Retake(1, version, (), "an update was refused"), "")
        pair.owner.do()
        assert pair.tensors.told_base[1] == told
        assert pair.site._echoes == {}, "what was hashed was the base before"
        assert torch.equal(pair.owner.tensors.local(1), dice(f"v{version}", 1))


# --- The other ranks of a site hold what rank 0 has adopted, and stop when it stops ----------------------------------

PARTS = [part_of(LAYOUT, [0]), part_of(LAYOUT, [1])]


class Ordered(Rank):
    """The process group of two replicas as rank 1 sees it: what rank 0 has said, in order."""

    def __init__(self, *said: Any) -> None:
        super().__init__(1)
        self.said = list(said)

    def broadcast_small(self, words: Sequence[int], src: int = 0) -> list[int]:
        return list(self.said.pop(0))

    def broadcast_(self, tensor: Tensor, src: int = 0) -> None:
        tensor.copy_(self.said.pop(0))


def test_a_follower_takes_what_it_is_told_and_nothing_else_until_rank_0_has_sent_everything() -> None:
    first, second, third, last = dice("v0", 0), dice("v0", 1), dice("v1", 0), dice("v1", 1)
    group = Ordered([RETAKE, 0, 0, 0], first, [RETAKE, 0, 1, 0], second, [GO_ON], [WAIT, 0, 0, 0], [GO_ON])
    group.said += [[ADOPT, 0, 0, 0], third, [STOP], [ADOPT, 0, 1, 0], last, [GO_ON], [STOP]]
    parameters = zeros()
    follower = Follower([LAYOUT], Holding(parameters, group), "overwrite", {})
    assert not follower.follow()
    now = lambda: [gather(fragment, parameters) for fragment in LAYOUT.fragments]  # noqa: E731
    assert all(map(torch.equal, now(), [first, second]))
    assert not follower.after_step(info_of(1)).stop
    assert follower.after_step(info_of(1)).stop
    assert all(map(torch.equal, now(), [third, second]))
    follower.finish()
    assert all(map(torch.equal, now(), [third, last]))
    assert group.said == []
    assert Follower([LAYOUT], Holding(zeros(), Ordered([STOP])), "rebase", {}).follow(), "rank 0 could not begin"


@pytest.mark.parametrize("owns", [[0, 1], [1]])
def test_of_several_agents_each_orders_of_its_own_fragments_and_what_a_rank_owns_is_its_own_to_do(
    owns: list[int],
) -> None:
    values = dice("v0", 0), dice("v0", 1)
    retakes = [word for part in (0, 1) for word in ([RETAKE, part, 0, 0], values[part])]
    group = Ordered(*retakes, *([SEAL, part, 0, 1] for part in owns), [GO_ON], [STOP])
    states = [{f"base.{part}": torch.ones(1)} for part in (0, 1)]
    owned: Any = {part: Mock(**{"state.return_value": states[part]}) for part in owns}
    parameters = zeros()
    follower = Follower(PARTS, Holding(parameters, group), "rebase", owned)
    follower.follow()
    assert all(torch.equal(gather(LAYOUT.fragments[part], parameters), values[part]) for part in (0, 1))
    assert sorted(follower.state()[0]) == [f"{part}.base.{part}" for part in owns], "by agent, as rank 0 names its own"
    follower.finish()
    assert all((owned[part].do.call_count, owned[part].close.called) == (1, True) for part in owns)
    assert list(Follower([LAYOUT], Holding(zeros(), group), "rebase", {0: owned[1]}).state()[0]) == ["base.1"]
