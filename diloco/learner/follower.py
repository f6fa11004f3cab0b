"""The ranks of a site that do not speak to the syncer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diloco.inner.trainer import StepInfo, Verdict
from diloco.learner.place import place_of
from diloco.learner.site_tensors import SiteTensors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from diloco.inner.parallel import SiteGroup
    from diloco.outer.fragments import Layout

# What rank 0 says at a boundary: any number of ADOPTED with a fragment, each followed by its values, then one of
# the other two.
GO_ON = 0
STOP = 1
ADOPTED = 2


class Follower:
    """Ranks above 0 of a site: they do at each boundary what rank 0 tells them."""

    def __init__(self, layout: Layout, parameters: Mapping[str, Tensor], group: SiteGroup) -> None:
        self._tensors = SiteTensors(layout, parameters, "rebase", 0.5, place_of(parameters.values()))
        self._group = group

    def start(self) -> None:
        """Take the first versions."""
        self._follow()

    def after_step(self, info: StepInfo) -> Verdict:
        """Adopt what rank 0 has adopted."""
        del info
        return Verdict(self._follow(), "rank 0 stops")

    def _follow(self) -> bool:
        while True:
            told = self._group.broadcast_small([])
            if told[0] != ADOPTED:
                return told[0] == STOP
            values = torch.empty(self._tensors.layout.fragments[told[1]].numel, device=self._tensors.place.device)
            self._group.broadcast_(values)
            self._tensors.write(told[1], values)


class Followers(Follower):
    """The same where a site has an agent for each syncer: rank 0 tells of each one's fragments, then of the site."""

    def __init__(self, layouts: Sequence[Layout], parameters: Mapping[str, Tensor], group: SiteGroup) -> None:
        self._followers = [Follower(layout, parameters, group) for layout in layouts]
        self._group = group

    def _follow(self) -> bool:
        for follower in self._followers:
            follower.start()  # That one part has ended is no reason for the site to stop.
        return self._group.broadcast_small([])[0] == STOP
