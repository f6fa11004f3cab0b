"""What is ordered of a fragment of rank 0 is done at once, and of another by its owner."""

from __future__ import annotations

from pathlib import Path

import torch

from diloco.sync.effects import Adopt, Fetch, Release, Retake, Seal, Send, StartOver
from tests.learner.owned import pair
from tests.syncer.building import dice


def test_rank_0_does_its_own_and_the_owner_the_others(tmp_path: Path) -> None:
    with pair(tmp_path) as found:
        found.site.begin(found.state)
        found.tensors.arrived(0, 0, dice("v0", 0), "told")
        found.site.retake(Retake(0, 0, (), "first version"))
        assert torch.equal(found.tensors.local(0), dice("v0", 0))
        assert found.tensors.told_base == ["told", ""]
        found.site.seal(Seal(0, 1, 0, (), 10, 1, 1_000, 1, final=False), "fp32", at_rest=False)
        assert found.site._exchange.sealer.queue.get().effect.fragment == 0  # type: ignore[union-attr]
        found.tensors.arrived(0, 1, dice("v1", 0), "newer")
        found.site.adopt(Adopt(0, 1, ()))
        assert found.tensors.told_base == ["newer", ""]
        for effect in (Send(0, 1), Fetch(0, 1), Release(0, 1), StartOver(0)):
            found.site.order(effect)
        assert found.site._exchange.sender.queue.get() == (0, 1)
        assert found.site._exchange.fetcher.queue.get() == 0
        assert found.tensors.latest[0] is None
        found.through()
        assert found.owner._due.empty(), "nothing of it was the other's"


def test_a_version_that_is_taken_again_is_told_as_its_base_only_where_it_is_the_latest(tmp_path: Path) -> None:
    with pair(tmp_path) as found:
        found.site.begin(found.state)
        found.tensors.told_latest[1] = "two"
        found.site._versions[1] = 2
        found.owner._exchange.tensors.base[1] = dice("v1", 1)
        found.site.retake(Retake(1, 1, (), "an update was refused"))
        found.owner.do()
        assert found.tensors.told_base[1] == "", "it takes what it had"
        found.owner._exchange.tensors.arrived(1, 2, dice("v2", 1), "two")
        found.site.retake(Retake(1, 2, (), "an update was refused"))
        found.owner.do()
        assert found.tensors.told_base[1] == "two"
        assert torch.equal(found.owner._tensors.local(1), dice("v2", 1))
