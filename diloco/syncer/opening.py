"""How a process comes to its data folder and the state in it: a syncer that starts, a standby that begins to follow.

Neither takes the folder's lock here: whoever calls holds it, and for longer.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from diloco.codec.base import digest
from diloco.outer.optimizer import NOTHING
from diloco.outer.pseudo_gradient import is_finite
from diloco.sync.syncer import OuterSync
from diloco.syncer.holdings import Holdings
from diloco.syncer.snapshots import FragmentValues, Retention
from diloco.syncer.store import Recovered, Store, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from diloco.durable import Disk
    from diloco.syncer.options import RunPlan, SyncerOptions


def open_store(
    options: SyncerOptions, plan: RunPlan, disk: Disk, emit: Callable[[str, dict[str, object]], None]
) -> Store:
    """The folder of ``options``, checked to be that of the run; ``emit`` hears where less of the past can be kept."""
    retention = Retention(options.retain_steps, options.retain_mb * 1_000_000)

    def past_cut(why: str) -> None:
        emit("note", {"note": "retention", "why": why})

    return Store(Path(options.folder), plan.card, disk, retention, past_cut)


def recovered(
    store: Store, options: SyncerOptions, plan: RunPlan, emit: Callable[[str, dict[str, object]], None]
) -> Recovered:
    """What the last process had, to the bit; ``emit`` hears what was not as it should be."""
    found = store.recover(plan.outer, plan.rule, options.down_codec, options.downlinks_kept)
    for note in found.notes:
        emit("note", {"note": "recovery", "why": note})
    return found


def begun(
    store: Store, options: SyncerOptions, plan: RunPlan, version_zero: Callable[[], Sequence[Tensor]]
) -> Recovered:
    """Version 0 in a folder that is new; ``StoreError`` when it holds what no run can begin with."""
    values = [FragmentValues(0, first, first, NOTHING, digest(first)) for first in version_zero()]
    for index, first in enumerate(values):
        if not is_finite(first.theta):
            raise StoreError(f"version 0 of fragment {index} holds a NaN or an infinity")
    machine = OuterSync(plan.outer)
    for fragment, first in zip(machine.state.fragments, values, strict=True):
        fragment.digest = first.digest
    store.begin(machine, values)
    return Recovered(machine, Holdings(values, options.down_codec, options.downlinks_kept), 0, [])
