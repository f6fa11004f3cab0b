"""The decision loop of the simulated syncer: one turn at a time, and nothing is told before the turn is safe.

A turn is what all that has arrived leads to.  Its records are made durable together; then it may have to wait, for the
standby or for the lease (``syncer/core``: ``settle``), and everything else waits behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from diloco.sim.network import MILLISECOND_NS
from diloco.sim.outer_disk import Place
from diloco.sim.process import Process
from diloco.sync.effects import OuterEffect
from diloco.sync.journal import Record

if TYPE_CHECKING:
    from diloco.sim.network import Heap

HELD_AFTER_NS = 500 * MILLISECOND_NS
"""Of a turn that waits for something; from then on nobody waits with it."""
RETRY_NS = 100 * MILLISECOND_NS
INBOX_MAX = 256


@dataclass(slots=True)
class Turn:
    """``decided`` are the records with what the machine said to each, ``answers`` what is said to who only asked.

    ``chain`` is the value of its frame in the journal, and ``place`` is where that ends once it is durable; None where
    nothing was decided.
    """

    began_ns: int
    decided: list[tuple[Record, Sequence[OuterEffect]]] = field(default_factory=list)
    answers: list[Callable[[], None]] = field(default_factory=list)
    chain: bytes | None = None
    place: Place | None = None

    def effects(self) -> list[OuterEffect]:
        """All of them, in order."""
        return [effect for _, effects in self.decided for effect in effects]


@dataclass(slots=True)
class Untold:
    """Turns that some process may have made durable and did not live to tell, by their chain values.

    Only who reads a disk next knows whether one is there.  There may be one on each machine's.
    """

    turns: dict[bytes, Turn] = field(default_factory=dict)


class Loop(Process):
    """What every turn goes through."""

    def __init__(self, heap: Heap, on_death: Callable[[], None]) -> None:
        super().__init__(on_death)
        self.heap = heap
        self._turn: Turn | None = None
        self._inbox: list[Callable[[], None]] = []
        self._retrying = False

    def _write(self, turn: Turn) -> None:
        """Make what was decided durable."""
        raise NotImplementedError

    def _must_wait(self, turn: Turn) -> bool:
        """Whether nothing of it may be told yet."""
        raise NotImplementedError

    def _tell(self, turn: Turn) -> None:
        """Carry out its effects."""
        raise NotImplementedError

    def _told(self, turn: Turn) -> None:
        """It is over."""
        raise NotImplementedError

    def ask(self, action: Callable[[], None]) -> None:
        """Somebody outside wants something: now, or after the turn that waits; nothing where that waits for long."""
        self.deliver(lambda: self._asked(action))

    def own(self, action: Callable[[], None]) -> None:
        """The same for what this process has begun itself: it waits for as long as it takes."""
        self.deliver(lambda: self._take(action))

    def _asked(self, action: Callable[[], None]) -> None:
        held = self._turn is not None and self.heap.now_ns - self._turn.began_ns > HELD_AFTER_NS
        if not held and len(self._inbox) < INBOX_MAX:
            self._take(action)

    def _take(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)
        if self._turn is None:
            self._work()

    def _work(self) -> None:
        while self._turn is None and self._inbox:
            turn = self._turn = Turn(self.heap.now_ns)
            arrived, self._inbox = self._inbox, []
            for action in arrived:
                action()
            if turn.decided:
                self._write(turn)
            self._finish(turn)

    def _say(self, answer: Callable[[], None]) -> None:
        """Answer who only asked, with the turn."""
        assert self._turn is not None
        self._turn.answers.append(answer)

    def go_on(self) -> None:
        """What a turn waits for may be there: tell what it has brought, and take the next."""
        if self._turn is not None:
            self._finish(self._turn)
            self._work()

    def _finish(self, turn: Turn) -> None:
        if not self._must_wait(turn):
            self._tell(turn)
            self._turn = None
            self._told(turn)
        elif not self._retrying:
            self._retrying = True
            self.heap.after(RETRY_NS, lambda: self.deliver(self._retry))

    def _retry(self) -> None:
        self._retrying = False
        self.go_on()

    def settled(self) -> bool:
        """Whether everything that was decided is told."""
        return self._turn is None
