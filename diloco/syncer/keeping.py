"""Snapshots beside the decision loop: when one is due, the thread that writes it, and what happens on a full disk.

A snapshot that finds no room is put off, said in a note, and tried again with a later version; the journal has
everything that would be in it.  Any other failure ends the process.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from diloco.durable import DiskFullError
from diloco.wire.messages import Refusal, Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from diloco.sync.syncer import OuterSync
    from diloco.syncer.core import Core
    from diloco.syncer.holdings import Holdings
    from diloco.syncer.memory import MemoryCheck
    from diloco.syncer.store import Store

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
