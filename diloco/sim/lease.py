"""The lease of a simulated run: one object somewhere else, which both syncers reach over links of their own.

Its rules are the product's: the epoch only rises, by compare-and-swap; who wants it and is neither the last holder nor
its heir is refused; it may be taken by another once it was not renewed for as long as it lasts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from diloco.sim.network import Direction, Heap

if TYPE_CHECKING:
    from collections.abc import Callable

    from diloco.sim.network import Link
    from diloco.sim.process import Process


@dataclass(slots=True)
class Lease:
    """What it says.  ``last`` is the number of the holder's last change: one that comes late changes nothing."""

    heap: Heap = field(repr=False)
    ttl_ns: int
    epoch: int = 0
    holder: str = ""
    heir: str = ""
    renewed_ns: int = 0
    last: int = 0

    def acquire(self, name: str, *, by_itself: bool) -> int | str | None:
        """Take it: the new epoch, None while another holds it, or why it is not to be had."""
        if self.epoch and name != self.holder:
            if name != self.heir:
                return f"{name} is neither {self.holder} nor its heir"
            if self.heap.now_ns < self.renewed_ns + self.ttl_ns:
                return None
        elif by_itself and not self.epoch:
            return f"{name} is a standby, and nobody has led yet"
        self.epoch, self.holder, self.heir = self.epoch + 1, name, ""
        self.renewed_ns, self.last = self.heap.now_ns, 0
        return self.epoch

    def renew(self, epoch: int, number: int) -> bool:
        """Hold it for another ``ttl_ns``; False when it is another's."""
        if epoch == self.epoch and number > self.last:
            self.renewed_ns, self.last = self.heap.now_ns, number
        return epoch == self.epoch

    def mark(self, epoch: int, number: int, heir: str) -> bool:
        """Name the heir; False when it is another's."""
        if epoch == self.epoch and number > self.last:
            self.heir, self.last = heir, number
        return epoch == self.epoch


class LeaseLine:
    """One machine's way to the lease."""

    def __init__(self, lease: Lease, link: Link) -> None:
        self.lease, self.link = lease, link
        self.machine = 1
        """Another one once a machine is lost: nothing that it had on its way arrives."""

    def ask(
        self,
        process: Process,
        request: Callable[[Lease], object],
        answered: Callable[[object], None],
        missed: Callable[[], None],
    ) -> None:
        """Exactly one of ``answered`` and ``missed`` happens, unless ``process`` dies."""
        waiting = [True]

        def settle(action: Callable[[], None]) -> None:
            if waiting:
                waiting.clear()
                action()

        machine = self.machine

        def receive() -> None:
            if machine != self.machine:
                return
            answer = request(self.lease)
            self.link.send(Direction.DOWN, lambda: process.deliver(lambda: settle(lambda: answered(answer))))

        self.link.send(Direction.UP, receive)
        self.lease.heap.after(self.lease.ttl_ns // 4, lambda: process.deliver(lambda: settle(missed)))
