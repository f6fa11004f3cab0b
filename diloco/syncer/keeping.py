"""Snapshots beside the decision loop, and a check that the values in this process's memory are still what they were.

Memory.  Nothing writes to a version's values once it is published, so a digest that changes is a bit that flipped: in
memory without ECC, or by a defect.  What is wrong there must reach neither a site nor a snapshot.  This cannot see a
bit that flips and is used by an outer step before its turn comes: that version is not the one that the journal gives,
and the next start says so and refuses.

Snapshots.  ``Keeper`` decides when one is due, and has the thread that writes it.  A snapshot that finds no room is put
off, said in a note, and tried again with a later version; the journal has everything that would be in it.  Any other
failure ends the process.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from diloco.codec.base import digest
from diloco.durable import DiskFullError
from diloco.wire.messages import Refusal, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from diloco.sync.syncer import OuterSync
    from diloco.syncer.core import Core
    from diloco.syncer.holdings import Holdings
    from diloco.syncer.snapshots import FragmentValues
    from diloco.syncer.store import Store

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


BUSY = "a snapshot is being written"


class Keeper:
    """One snapshot at a time, every ``every`` outer steps and whenever somebody asks."""

    def __init__(
        self,
        store: Store,
        core: Core,
        holdings: Holdings,
        memory: MemoryCheck,
        every: int,
        emit: Callable[[str, dict[str, object]], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._store, self._core, self._holdings, self._memory = store, core, holdings, memory
        self._every = every
        self._emit = emit
        self._fail = fail
        self._thread: threading.Thread | None = None
        self._steps = 0
        self._due = False
        self._put_off: str | None = None

    def published(self) -> None:
        """One outer step more; in the decision loop's thread."""
        self._steps += 1
        if self._steps >= self._every and not self._due:
            # Not here: the machine may be ahead of the effects that are carried out, and a snapshot holds both.
            self._due = True
            self._core.do_soon(self.begin)

    def begin(self, machine: OuterSync) -> str | None:
        """Write a snapshot beside the loop; why not, if it cannot be.  In the loop's thread, between two turns."""
        self._due = False
        if self._thread is not None and self._thread.is_alive():
            return BUSY
        try:
            write = self._store.snapshot_writer(machine, self._holdings.values, check=self._memory.check)
        except DiskFullError as error:
            return self._later(error)
        self._steps = 0
        thread = threading.Thread(target=self._run, args=(write,), name="snapshot")
        thread.start()
        self._thread = thread  # Only now: whoever stops the process joins it.
        return None

    def _run(self, write: Callable[[], int]) -> None:
        began = time.monotonic()
        try:
            size = write()
        except DiskFullError as error:
            self._later(error)
        except Exception as error:
            self._fail(error)
        else:
            self._put_off = None
            self._emit("snapshot", {"seconds": round(time.monotonic() - began, 4), "bytes": size})

    def _later(self, error: DiskFullError) -> str:
        why = f"disk full: {error.strerror}"
        if self._put_off is None:
            self._emit("note", {"note": "snapshot_put_off", "why": why})
        self._put_off = why
        self._steps = max(self._steps, self._every)  # The next version tries again.
        return why

    def now(self, failed: Callable[[], BaseException | None]) -> None:
        """Write a snapshot and wait until it is durable; UNAVAILABLE when it cannot be."""
        while (why := self._core.do(self.begin)) is not None:
            if why != BUSY:
                raise Refusal(Status.UNAVAILABLE, why)
            time.sleep(0.02)
        self.finish()
        if (error := failed()) is not None:
            raise Refusal(Status.UNAVAILABLE, f"the snapshot could not be kept: {error}")
        if (put_off := self._put_off) is not None:
            raise Refusal(Status.UNAVAILABLE, put_off)

    def last(self) -> None:
        """One more as the process stops.  A site may still be answered meanwhile: it is no end of the journal."""
        with suppress(Refusal):  # The loop has ended, or waits for room: the journal has it all.
            self.finish()
            self._core.do(self.begin)

    def finish(self) -> None:
        """Wait until the snapshot that is being written is."""
        if self._thread is not None:
            self._thread.join()
