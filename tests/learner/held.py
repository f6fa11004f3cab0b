"""A model of one process, as a site's agent is given it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from diloco.inner.holding import Holding
from diloco.inner.parallel import SiteGroup


def held(parameters: Mapping[str, Tensor]) -> Holding:
    return Holding(parameters, SiteGroup(device="cpu"))
