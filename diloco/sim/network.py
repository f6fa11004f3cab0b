"""Time and the network of the simulator: a heap of instants, and one link per site.

A link behaves as TCP does over a bad path: what is lost comes later (a retransmission), what is sent into a partition
is held and, when the partition ends, either arrives late or has died with its connection.  Messages overtake one
another freely and may come twice, which is more than gRPC does; the machines claim to bear it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

MILLISECOND_NS = 1_000_000
RETRANSMISSION_NS = 200 * MILLISECOND_NS
RETRANSMISSIONS_MAX = 5
HELD_MAX = 64
"""Messages that one direction of a cut link holds; later ones are lost, as in a full socket buffer."""


Message = tuple["Callable[[], None]", "Callable[[], None] | None"]


class Heap:
    """Everything that is going to happen, in order of instant and then of planning."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.events = 0
        self._planned: list[tuple[int, int, Callable[[], object]]] = []
        self._count = 0

    def at(self, instant_ns: int, action: Callable[[], object]) -> None:
        """Run ``action`` at ``instant_ns``, or now if that has passed."""
        self._count += 1
        instant_ns = instant_ns if instant_ns > self.now_ns else self.now_ns
        heapq.heappush(self._planned, (instant_ns, self._count, action))

    def after(self, delay_ns: int, action: Callable[[], object]) -> None:
        """Run ``action`` in ``delay_ns``."""
        self.at(self.now_ns + delay_ns, action)

    def run_until(self, instant_ns: int, over: Callable[[], bool]) -> None:
        """Let everything up to ``instant_ns`` happen, or until ``over()``."""
        planned, pop = self._planned, heapq.heappop
        while planned and planned[0][0] <= instant_ns and not over():
            self.now_ns, _, action = pop(planned)
            self.events += 1
            action()
        if not over():
            self.now_ns = max(self.now_ns, instant_ns)


class Direction(Enum):
    """``UP`` is from the site to the syncer."""

    UP = "up"
    DOWN = "down"


@dataclass(slots=True)
class Weather:
    """How a link behaves while it is not cut.  ``loss`` and ``twice`` are shares of messages, 0 to 1."""

    latency_ns: int = 20 * MILLISECOND_NS
    jitter_ns: int = 0
    loss: float = 0.0
    twice: float = 0.0


class Link:
    """One site's path to the syncer and back."""

    def __init__(self, heap: Heap, random: Random, weather: Weather) -> None:
        self.weather = weather
        self._usual = Weather(weather.latency_ns, weather.jitter_ns)
        self._heap = heap
        self._random = random
        self._cut: set[Direction] = set()
        self._held: dict[Direction, list[Message]] = {Direction.UP: [], Direction.DOWN: []}

    def send(
        self,
        direction: Direction,
        deliver: Callable[[], None],
        transfer_ns: int = 0,
        lost: Callable[[], None] | None = None,
    ) -> None:
        """Carry a message whose bytes take ``transfer_ns``; ``deliver`` runs on arrival, later, never or twice.

        ``lost`` runs where a message dies with its connection: who reads a stream is told that it broke.
        """
        message = (deliver, lost)
        self._heap.after(self._delay_ns() + transfer_ns, lambda: self._arrive(direction, message))
        if self.weather.twice and self._random.random() < self.weather.twice:
            self._heap.after(2 * self._delay_ns() + transfer_ns, lambda: self._arrive(direction, message))

    def cut(self, *directions: Direction) -> None:
        """Let nothing arrive in ``directions`` until ``heal``."""
        self._cut.update(directions)

    def heal(self) -> None:
        """End the partition: of what was held, some arrives late and some is lost with its connection."""
        self._cut.clear()
        for direction in Direction:
            held, self._held[direction] = self._held[direction], []
            for deliver, lost in held:
                if self._random.random() < 0.5:
                    self.send(direction, deliver, lost=lost)
                elif lost is not None:
                    lost()

    def calm(self) -> None:
        """End the partition, and let nothing be lost any more, come twice or be held up by a storm."""
        self.heal()
        self.weather = self._usual

    def _arrive(self, direction: Direction, message: Message) -> None:
        deliver, lost = message
        if direction not in self._cut:
            deliver()
        elif len(self._held[direction]) < HELD_MAX:
            self._held[direction].append(message)
        elif lost is not None:
            lost()

    def _delay_ns(self) -> int:
        weather, random = self.weather, self._random
        delay_ns = weather.latency_ns + int(random.random() * weather.jitter_ns)
        if weather.loss:
            wait_ns = RETRANSMISSION_NS
            for _ in range(RETRANSMISSIONS_MAX):
                if random.random() >= weather.loss:
                    break
                delay_ns += wait_ns
                wait_ns *= 2
        return delay_ns
