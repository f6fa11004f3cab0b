"""Where the training thread waits for the syncer anyway, an update is made of the model's own memory, without a copy.

Then nobody may change that memory until the update is encoded: the thread that could stands still for so long.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from diloco.learner.sealing import SealJob


class Standstill:
    """Counts what was sealed out of the model's own memory at a boundary and is not read yet."""

    def __init__(self, changed: threading.Condition, failed: Callable[[], bool]) -> None:
        """``changed`` is the agent's; once it has ``failed`` nobody changes the model, and nothing is waited for."""
        self._changed = changed
        self._failed = failed
        self._unread: list[SealJob] = []

    def begins(self, job: SealJob) -> None:
        """The lock is held."""
        if job.inputs.in_place:
            self._unread.append(job)

    def ends(self, job: SealJob) -> None:
        """The model's memory is read, or never will be.  From the sealer's thread."""
        with self._changed:
            self._unread = [each for each in self._unread if each is not job]
            self._changed.notify_all()

    def wait(self, until: float) -> None:
        """Stand still.  The lock is held, and given up meanwhile; ``TimeoutError`` when it takes too long."""
        read = lambda: not self._unread or self._failed()  # noqa: E731
        if not self._changed.wait_for(read, max(0.0, until - time.monotonic())):
            raise TimeoutError("this site waited in vain for its update to be encoded (lock_step)")
