"""The ranks of a site that do not speak to the syncer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.inner.trainer import StepInfo, Verdict
from diloco.learner.orders import take_part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from diloco.inner.holding import Holding
    from diloco.learner.owner import Owner
    from diloco.outer.fragments import Layout


class Follower:
    """Ranks above 0 of a site: they take part at each boundary in what rank 0 does, for each of the site's agents."""

    def __init__(
        self, layouts: Sequence[Layout], holding: Holding, adopt: str, owned: Sequence[Owner | None] = ()
    ) -> None:
        """``layouts`` are those of rank 0's agents in their order, ``adopt`` the rule by which they adopt.

        ``owned`` is what this rank owns of the fragments of each agent, in the same order; None where ranks above 0 own
        none of an agent's, and empty where they own none at all.
        """
        self._layouts, self._holding, self._adopt, self._owned = layouts, holding, adopt, owned

    def start(self) -> bool:
        """Take the first versions; returns whether rank 0 stops instead, because it could not begin."""
        return self._follow()

    def after_step(self, info: StepInfo) -> Verdict:
        """Take part in what this boundary brings."""
        return Verdict(not info.passes and self._follow(), "rank 0 stops")

    def state(self) -> tuple[dict[str, Tensor], dict[str, object]]:
        """What a checkpoint must hold of this rank's fragments, when rank 0 is asked for its own part of it."""
        parts = [owner.state() if owner is not None else {} for owner in self._owned]
        if len(self._layouts) == 1:
            return {name: value for part in parts for name, value in part.items()}, {}
        return {f"{at}.{name}": value for at, part in enumerate(parts) for name, value in part.items()}, {}

    def finish(self) -> None:
        """After the loop: as long as rank 0 sends what is unsent, it may need what is held here."""
        while not self._follow():
            continue
        self.close()

    def close(self) -> None:
        """End the threads."""
        for owner in self._owned:
            if owner is not None:
                owner.close()

    def _follow(self) -> bool:
        return take_part(self._holding, self._layouts, self._adopt, self._owned)
