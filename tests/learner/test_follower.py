"""The other ranks of a site hold what rank 0 has adopted, and stop when it stops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diloco.inner.holding import Holding
from diloco.inner.trainer import StepInfo
from diloco.learner.exchange import Follower
from diloco.learner.ranks import ADOPT, GO_ON, RETAKE, SEAL, STOP
from diloco.outer.fragments import gather, part_of
from tests.syncer.building import LAYOUT, dice

INFO = StepInfo(1, 1.0, 10, 0, 1000, 1, 1.0, 0.1, applied=True)


class Told:
    """The process group of two replicas as rank 1 sees it: what rank 0 has said, in order."""

    rank, world, device = 1, 2, torch.device("cpu")

    def __init__(self, *said: Any) -> None:
        self.said = list(said)

    def all_gather_bytes(self, mine: bytes) -> list[bytes]:
        return [mine, mine]

    def broadcast_small(self, values: Sequence[int], src: int = 0) -> list[int]:
        return list(self.said.pop(0))

    def broadcast_(self, tensor: Tensor, src: int = 0) -> None:
        tensor.copy_(self.said.pop(0))


def held_by(group: Told) -> tuple[dict[str, Tensor], Holding]:
    parameters = {name: torch.zeros(shape) for name, shape in LAYOUT.parameters}
    return parameters, Holding(parameters, group)  # type: ignore[arg-type]


def test_it_takes_what_it_is_told_and_nothing_else() -> None:
    first, second, third = dice("v0", 0), dice("v0", 1), dice("v1", 0)
    group = Told([RETAKE, 0, 0, 0], first, [RETAKE, 0, 1, 0], second, [GO_ON], [GO_ON], [ADOPT, 0, 0, 0], third, [STOP])
    parameters, holding = held_by(group)
    follower = Follower([LAYOUT], holding, "rebase")
    follower.start()
    assert torch.equal(gather(LAYOUT.fragments[0], parameters), first)
    assert torch.equal(gather(LAYOUT.fragments[1], parameters), second)
    assert not follower.after_step(INFO).stop
    verdict = follower.after_step(INFO)
    assert verdict.stop
    assert torch.equal(gather(LAYOUT.fragments[0], parameters), third)
    assert group.said == []


def test_it_knows_when_rank_0_could_not_begin() -> None:
    for said, stops in ((STOP, True), (GO_ON, False)):
        group = Told([said])
        assert Follower([LAYOUT], held_by(group)[1], "rebase").start() is stops


def test_each_of_several_agents_orders_of_its_own_fragments() -> None:
    first, second = dice("v0", 0), dice("v0", 1)
    group = Told([RETAKE, 0, 0, 0], first, [RETAKE, 1, 0, 0], second, [GO_ON], [STOP])
    parameters, holding = held_by(group)
    follower = Follower([part_of(LAYOUT, [0]), part_of(LAYOUT, [1])], holding, "rebase")
    follower.start()
    assert torch.equal(gather(LAYOUT.fragments[0], parameters), first)
    assert torch.equal(gather(LAYOUT.fragments[1], parameters), second)
    assert follower.after_step(INFO).stop
    assert group.said == []


class Owned:
    """What a rank owns of one agent's fragments."""

    def __init__(self, name: str) -> None:
        self.name, self.done, self.closed = name, 0, False

    def do(self) -> None:
        self.done += 1

    def state(self) -> dict[str, Tensor]:
        return {self.name: torch.ones(1)}

    def close(self) -> None:
        self.closed = True


def test_what_it_owns_is_its_own_to_do_and_to_keep() -> None:
    group = Told([SEAL, 1, 0, 1], [RETAKE, 0, 0, 1], [GO_ON], [STOP])
    _, holding = held_by(group)
    owned: Any = [Owned("base.0"), Owned("base.1")]
    layouts = [part_of(LAYOUT, [0]), part_of(LAYOUT, [1])]
    follower = Follower(layouts, holding, "rebase", owned)
    follower.start()
    assert [each.done for each in owned] == [1, 1]
    assert sorted(follower.state()[0]) == ["0.base.0", "1.base.1"], "by agent, as rank 0 names its own"
    assert sorted(Follower([LAYOUT], holding, "rebase", owned[:1]).state()[0]) == ["base.0"]
    follower.finish()
    assert all(each.closed for each in owned)


def test_of_an_agent_of_which_it_owns_nothing_it_does_and_keeps_nothing() -> None:
    group = Told([SEAL, 1, 0, 1], [GO_ON], [STOP])
    _, holding = held_by(group)
    mine: Any = Owned("base.0")
    follower = Follower([part_of(LAYOUT, [0]), part_of(LAYOUT, [1])], holding, "rebase", [None, mine])
    follower.start()
    assert mine.done == 1
    assert list(follower.state()[0]) == ["1.base.0"]
    follower.finish()
    assert mine.closed


def test_it_stays_until_rank_0_has_sent_everything() -> None:
    last = dice("v1", 1)
    group = Told([GO_ON], [ADOPT, 0, 1, 0], last, [GO_ON], [STOP])
    parameters, holding = held_by(group)
    follower = Follower([LAYOUT], holding, "overwrite")
    follower.start()
    follower.finish()
    assert torch.equal(gather(LAYOUT.fragments[1], parameters), last)
    assert group.said == []
