"""Whether a simulated syncer leads at this moment, and how a process comes to lead (``syncer/leadership`` in short)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.sim.process import Died

if TYPE_CHECKING:
    from collections.abc import Callable

    from diloco.sim.lease import LeaseLine
    from diloco.sim.outer_process import OuterProcess
    from diloco.sim.process import Process

VALID_TENTHS = 6
"""Of the lease's time, from the instant at which the last confirmed renewal was sent."""
RENEW_SHARE = 3
RETRY_SHARE = 10


class Leadership:
    """The guard of one process that has taken the lease."""

    def __init__(self, line: LeaseLine, epoch: int, sent_ns: int) -> None:
        """``sent_ns``: when the lease was asked for."""
        self.epoch = epoch
        self._line, self._heap = line, line.lease.heap
        self._ttl_ns = line.lease.ttl_ns
        self._confirmed_ns = sent_ns
        self._due_ns = sent_ns + self._ttl_ns // RENEW_SHARE
        self._number = 0
        self._busy = False
        self._wish = ""
        self._marked: str | None = ""
        self._possible = ""
        self.lost = False

    def start(self, process: OuterProcess) -> None:
        """Begin to renew."""
        self._process = process
        self._later()

    # --- asked before anything is told ---------------------------------------------------------------------------

    def wanting(self) -> bool:
        """Whether nothing may be told now; the process ends where nothing may ever be again."""
        if self.lost:
            raise Died(f"the lease of epoch {self.epoch} is lost")
        return self._heap.now_ns - self._confirmed_ns >= self._ttl_ns * VALID_TENTHS // 10

    def may_inherit(self, name: str) -> bool:
        """Whether somebody else than ``name`` may stand there as the heir; who does is taken out."""
        if self._wish not in ("", name):
            self._wish = ""
        if self._possible in ("", name):
            return False
        self._step()
        return True

    def name_heir(self, name: str) -> None:
        """The standby ``name`` has everything, and gets everything from now on."""
        self._wish = name
        self._step()

    def is_heir(self, name: str) -> bool:
        """Whether it is certain that the lease names ``name``, and that this is to stay so."""
        return self._wish == self._marked == self._possible == name

    # --- beside it -----------------------------------------------------------------------------------------------

    def _later(self) -> None:
        due_ns = self._due_ns
        self._heap.at(due_ns, lambda: self._process.deliver(lambda: self._step() if due_ns == self._due_ns else None))

    def _step(self) -> None:
        """Renew if it is time, else write down the heir if another is wished for: one thing at a time."""
        if self._busy or self.lost:
            return
        heir = self._wish if self._possible in ("", self._wish) else ""  # Never one name right after another.
        if self._heap.now_ns >= self._due_ns:
            self._change(lambda number: self._renew(number))
        elif not heir == self._marked == self._possible:
            self._possible, self._marked = heir or self._possible, None
            self._change(lambda number: self._mark(number, heir))

    def _change(self, change: Callable[[int], None]) -> None:
        self._busy = True
        self._number += 1
        change(self._number)

    def _renew(self, number: int) -> None:
        sent_ns = self._heap.now_ns

        def renewed() -> None:
            self._confirmed_ns, self._due_ns = sent_ns, sent_ns + self._ttl_ns // RENEW_SHARE
            self._later()

        self._line.ask(
            self._process,
            lambda lease: lease.renew(self.epoch, number),
            lambda held: self._answered(held is True, renewed),
            self._missed,
        )

    def _mark(self, number: int, heir: str) -> None:
        def marked() -> None:
            self._possible = self._marked = heir

        self._line.ask(
            self._process,
            lambda lease: lease.mark(self.epoch, number, heir),
            lambda held: self._answered(held is True, marked),
            self._missed,
        )

    def _answered(self, held: bool, then: Callable[[], None]) -> None:
        self._busy = False
        if not held:
            self.lost = True
            raise Died(f"the lease of epoch {self.epoch} is lost")
        then()
        self._step()
        self._process.go_on()

    def _missed(self) -> None:
        self._busy = False
        self._due_ns = self._heap.now_ns + self._ttl_ns // RETRY_SHARE
        self._later()


def claim(
    process: Process,
    line: LeaseLine,
    name: str,
    taken: Callable[[Leadership], None],
    refused: Callable[[str], None],
    *,
    by_itself: bool,
) -> None:
    """Ask for the lease again and again until it is taken; ``refused`` hears why it is not to be had, each time."""
    heap, ttl_ns = line.lease.heap, line.lease.ttl_ns
    sent_ns = heap.now_ns

    def again() -> None:
        heap.after(
            ttl_ns // RETRY_SHARE,
            lambda: process.deliver(lambda: claim(process, line, name, taken, refused, by_itself=by_itself)),
        )

    def answered(answer: object) -> None:
        if isinstance(answer, int):
            taken(Leadership(line, answer, sent_ns))
            return
        if isinstance(answer, str):
            refused(answer)
        if process.alive:
            again()

    line.ask(process, lambda lease: lease.acquire(name, by_itself=by_itself), answered, again)
