"""Rank 0 and one other owner in one process: fragment 0 is rank 0's, fragment 1 the other's; the wire is a pipe.

Both hold the whole model, so that no value needs a collective, and each has a model of its own.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diloco.inner.holding import Holding
from diloco.learner.exchange import AgentOptions, Exchange, Owner, Owners, Source
from diloco.learner.ranks import Channel, Dealt, Orders
from diloco.learner.seal import Outbox
from diloco.learner.tensors import SiteTensors
from diloco.sync.events import LearnerEvent
from diloco.sync.progress import FragmentProgress, LearnerState
from diloco.wire.messages import Unreachable
from diloco.wire.pulling import PulledVersion
from tests.syncer.building import LAYOUT, Events, eventually


class Rank:
    """A process group in which nothing needs to be sent."""

    world, device, timeout_s = 2, torch.device("cpu"), 20.0

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def all_gather_bytes(self, mine: bytes) -> list[bytes]:
        return [mine, mine]

    def broadcast_small(self, words: Sequence[int], src: int = 0) -> list[int]:
        return list(words)

    def broadcast_(self, tensor: Tensor, src: int = 0) -> None:
        pass


class Client:
    """Of the wire only what is counted, and where it leads."""

    def __init__(self) -> None:
        self.bytes_up, self.bytes_down = 0, 0
        self.taken_in = (0, 1)
        self.followed: list[tuple[int, int]] = []

    def follow(self, taken_in: tuple[int, int]) -> None:
        self.followed.append(taken_in)

    def pull(self, *asked: object) -> PulledVersion:
        raise Unreachable("nobody is asked")

    def close(self) -> None:
        pass


class RankZero(Exchange):
    """Rank 0, whose machine is a list of what it is told."""

    incarnation = epoch = lineage = 1
    known: Any = property(lambda self: self)  # type: ignore[assignment]

    def __init__(self, pair: Pair, *ways: Any) -> None:
        self._pair = pair
        super().__init__(*ways)

    def wanted(self, fragment: int, sequence: int) -> str | None:
        return self._pair.answer

    def change(self, do: Callable[[], None], event: LearnerEvent, source: Source | None) -> bool:
        with self.changed:
            self.tell(event)
            if self._pair.knows:
                do()
        return self._pair.knows

    def tell(self, event: object) -> None:
        self._pair.told.append(event)

    def emit(self, what: str, facts: dict[str, object]) -> None:
        self._pair.events.emit(what, facts)

    def rejoin(self, why: str) -> None:
        self.tell(("rejoin", why))

    def give_up(self, why: str) -> None:
        self.tell(("give_up", why))

    def has_failed(self) -> bool:
        return False


class Pair:
    """``site`` is what rank 0 knows of the other, ``owner`` that other; ``told`` is what the machine would be told."""

    def __init__(self, folder: Path, restored: dict[str, Tensor] | None = None) -> None:
        ends = [Channel(end) for end in multiprocessing.Pipe()]
        self.events, self.told, self.knows = Events(), list[Any](), True
        self.state = LearnerState([FragmentProgress(), FragmentProgress()])
        self.answer: str | None = "digest"
        self.models = [{name: torch.zeros(shape) for name, shape in LAYOUT.parameters} for _ in range(2)]
        mine, theirs = (Holding(model, Rank(rank)) for rank, model in enumerate(self.models))  # type: ignore[arg-type]
        self.clients = [Client(), Client()]
        options = AgentOptions(folder=str(folder))
        self.tensors = SiteTensors(LAYOUT, mine, "rebase", 0.5, owned=[0])
        orders, outbox = Orders(mine.group), Outbox(folder / "outbox")
        rank_0 = RankZero(self, "run", "a", self.tensors, outbox, orders, self.clients[0], options.choices())
        self.lock = rank_0.changed
        self.site = Owners(Dealt((0, 1), {1: ends[0]}), rank_0, orders, lambda why: rank_0.tell(("lost", why)))
        dealt = Dealt((0, 1), {0: ends[1]})
        self.owner = Owner(options, "rebase", LAYOUT, theirs, dealt, self.clients[1], "run", "a", restored)  # type: ignore[arg-type]

    def heard(self, count: int) -> list[Any]:
        eventually(lambda: len(self.told) >= count, f"{count} things are told")
        return self.told

    def through(self) -> None:
        """All that was sent to the owner is done: it answers in order."""
        with self.lock:
            self.site.capture()
        self.owner.state()


@contextmanager
def pair(folder: Path, restored: dict[str, Tensor] | None = None) -> Iterator[Pair]:
    found = Pair(folder, restored)
    try:
        yield found
    finally:
        found.site.part()
        found.owner.close()
        found.site.close()
