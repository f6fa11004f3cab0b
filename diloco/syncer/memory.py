"""Whether the values in this process's memory are still what they were when they were made.

Nothing writes to a version's values once it is published, so a digest that changes is a bit that flipped: in memory
without ECC, or by a defect.  What is wrong there must reach neither a site nor a snapshot.  What this cannot see is a
bit that flips and is used by an outer step before its turn comes: that version is not the one that the journal gives,
and the next start says so and refuses.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from diloco.codec.contract import digest

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from diloco.syncer.snapshots import FragmentValues

IDLE_SHARE = 50
"""Time left to others for each unit of time that hashing takes: at most 2 % of one core, however large the model."""


class MemoryDamaged(RuntimeError):
    """Values in memory changed by themselves; only what is on disk may be gone on from."""


class MemoryCheck:
    """One fragment at a time, in turn; and whatever else is asked about, in any thread."""

    def __init__(self, values: Sequence[FragmentValues], every_s: float) -> None:
        """``values`` is the list that always holds the present versions; ``every_s`` passes between two fragments."""
        self._values = values
        self._every_s = every_s
        self._seen: dict[int, tuple[int, dict[str, str]]] = {}

    def run(self, stopping: threading.Event, on_damage: Callable[[MemoryDamaged], None]) -> None:
        """The thread."""
        pause_s, turn = self._every_s, 0
        while not stopping.wait(pause_s):
            began_s = time.monotonic()
            try:
                self.check(turn, self._values[turn])
            except MemoryDamaged as error:
                on_damage(error)
                return
            turn = (turn + 1) % len(self._values)
            pause_s = max(self._every_s, IDLE_SHARE * (time.monotonic() - began_s))

    def check(self, fragment: int, held: FragmentValues) -> None:
        """``MemoryDamaged`` if the published values are not those of their digest, or the others not as last seen."""
        if digest(held.published, held.digest) != held.digest:
            raise _damaged(fragment, held, "what is published")
        others = {"the parameters": held.theta, "what a region measures from": held.reference}
        others |= {f"the optimizer's {name}": each for name, each in held.optimizer.tensors.items()}
        own = (held.version, {name: digest(each) for name, each in others.items() if each is not None})
        seen = self._seen.get(fragment, own)
        if seen[0] == held.version and seen != own:
            raise _damaged(fragment, held, next(name for name in own[1] if seen[1].get(name) != own[1][name]))
        self._seen[fragment] = own


def _damaged(fragment: int, held: FragmentValues, what: str) -> MemoryDamaged:
    return MemoryDamaged(
        f"{what} of version {held.version} of fragment {fragment} changed in this process's memory: this machine "
        "corrupts data; started again, here or on another one, the syncer goes on from its disk"
    )
