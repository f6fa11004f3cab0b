"""The other ranks of a site hold what rank 0 has adopted, and stop when it stops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diloco.inner.trainer import StepInfo
from diloco.learner.follower import ADOPTED, GO_ON, STOP, Follower, Followers
from diloco.outer.fragments import gather
from diloco.outer.placement import part_of
from tests.syncer.building import LAYOUT, dice


class Told:
    """The site's process group as a rank above 0 sees it: what rank 0 has said, in order."""

    def __init__(self, *said: Any) -> None:
        self.said = list(said)

    def broadcast_small(self, values: Sequence[int], src: int = 0) -> list[int]:
        return list(self.said.pop(0))

    def broadcast_(self, tensor: Tensor, src: int = 0) -> None:
        tensor.copy_(self.said.pop(0))


def test_it_takes_what_it_is_told_and_nothing_else() -> None:
    parameters = {name: torch.zeros(shape) for name, shape in LAYOUT.parameters}
    first, second, third = dice("v0", 0), dice("v0", 1), dice("v1", 0)
    group = Told([ADOPTED, 0], first, [ADOPTED, 1], second, [GO_ON], [GO_ON], [ADOPTED, 0], third, [STOP])
    follower = Follower(LAYOUT, parameters, group)  # type: ignore[arg-type]
    info = StepInfo(1, 1.0, 10, 0, 1000, 1, 1.0, 0.1, applied=True)
    follower.start()
    assert torch.equal(gather(LAYOUT.fragments[0], parameters), first)
    assert torch.equal(gather(LAYOUT.fragments[1], parameters), second)
    assert not follower.after_step(info).stop
    verdict = follower.after_step(info)
    assert verdict.stop
    assert torch.equal(gather(LAYOUT.fragments[0], parameters), third)
    assert group.said == []


def test_one_part_that_has_ended_does_not_stop_a_site_that_has_another() -> None:
    parameters = {name: torch.zeros(shape) for name, shape in LAYOUT.parameters}
    first, second = dice("v0", 0), dice("v0", 1)
    group = Told([ADOPTED, 0], first, [GO_ON], [ADOPTED, 0], second, [GO_ON], [GO_ON], [STOP], [GO_ON], [GO_ON])
    group.said += [[STOP], [STOP], [STOP]]
    followers = Followers([part_of(LAYOUT, [0]), part_of(LAYOUT, [1])], parameters, group)  # type: ignore[arg-type]
    info = StepInfo(1, 1.0, 10, 0, 1000, 1, 1.0, 0.1, applied=True)
    followers.start()
    assert torch.equal(gather(LAYOUT.fragments[0], parameters), first)
    assert torch.equal(gather(LAYOUT.fragments[1], parameters), second)
    assert not followers.after_step(info).stop
    assert followers.after_step(info).stop
    assert group.said == []
