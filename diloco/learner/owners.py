"""Which rank of a site has the tensors of a fragment's exchange: its owner.

Where every rank has the whole model that is rank 0, which then needs nobody to read it.  Where each holds a part, the
fragments are dealt to the ranks, so that none holds the whole model's versions and updates, and all encode and send.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco.learner.channel import Channel, meet

if TYPE_CHECKING:
    from diloco.inner.holding import Holding
    from diloco.outer.fragments import Layout


@dataclass(frozen=True, slots=True)
class Dealt:
    """The owner of each fragment of one agent, and the channels of this rank: between rank 0 and each of the others."""

    owners: tuple[int, ...]
    channels: Mapping[int, Channel]

    def of(self, rank: int) -> list[int]:
        """The fragments of ``rank``."""
        return [fragment for fragment, owner in enumerate(self.owners) if owner == rank]


def all_mine(layout: Layout) -> Dealt:
    """Rank 0 owns everything."""
    return Dealt((0,) * len(layout.fragments), {})


def deal(layout: Layout, holding: Holding) -> Dealt:
    """Deal the fragments to the ranks, and connect these.  For all ranks at once."""
    owners = owners_of(layout, holding)
    return Dealt(owners, meet(holding.group) if any(owners) else {})


def owners_of(layout: Layout, holding: Holding) -> tuple[int, ...]:
    """The owner of each fragment: the largest first, each to the rank that has least so far."""
    if all(holding.is_copied(fragment.pieces) for fragment in layout.fragments):
        return (0,) * len(layout.fragments)
    loads, found = [0] * holding.group.world, [0] * len(layout.fragments)
    for fragment in sorted(layout.fragments, key=lambda each: (-each.numel, each.index)):
        rank = loads.index(min(loads))
        found[fragment.index] = rank
        loads[rank] += fragment.numel
    return tuple(found)
