"""Rank 0 and one other owner in one process: fragment 0 is rank 0's, fragment 1 the other's; the wire is a pipe.

Both hold the whole model, so that no value needs a collective, and each has a model of its own.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diloco.inner.holding import Holding
from diloco.learner.channel import Channel, Dealt, Orders
from diloco.learner.exchange import Exchange, Exchanges, Heard, Machine, Source, Standstill
from diloco.learner.options import AgentOptions
from diloco.learner.outbox import Outbox
from diloco.learner.owner import Owner
from diloco.learner.tensors import SiteTensors
from diloco.learner.transfer import LinkUse
from diloco.sync.events import LearnerEvent
from diloco.sync.progress import FragmentProgress, LearnerState
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
        self.bytes_up, self.bytes_down, self.has_patience = 0, 0, False
        self.taken_in = (0, 1, 9)
        self.followed: list[tuple[int, int, int]] = []

    def follow(self, taken_in: tuple[int, int, int]) -> None:
        self.followed.append(taken_in)

    def close(self) -> None:
        pass


class Pair:
    """``site`` is rank 0's side, ``owner`` the other's; ``told`` is what the machine would be told."""

    def __init__(self, folder: Path, restored: dict[str, Tensor] | None = None) -> None:
        ends = [Channel(end) for end in multiprocessing.Pipe()]
        self.events, self.told, self.knows = Events(), list[Any](), True
        self.lock = threading.Condition(threading.RLock())
        self.state = LearnerState([FragmentProgress(), FragmentProgress()])
        self.answer: str | None = "digest"
        self.models = [{name: torch.zeros(shape) for name, shape in LAYOUT.parameters} for _ in range(2)]
        mine, theirs = (Holding(model, Rank(rank)) for rank, model in enumerate(self.models))  # type: ignore[arg-type]
        self.clients = [Client(), Client()]
        options = AgentOptions(folder=str(folder))
        tell = self.told.append
        self.tensors = SiteTensors(LAYOUT, mine, "rebase", 0.5, owned=[0])
        machine = Machine(lambda: 1, lambda: 1, lambda: 1, lambda *_: None, self.change, tell, tell, tell)
        stopping, client, orders = threading.Event(), self.clients[0], Orders(mine.group)
        use = LinkUse(client, options.choices(), self.events.emit, lambda event: None)  # type: ignore[arg-type]
        ways: Any = (Outbox(folder / "outbox"), orders, client, use, Standstill(self.lock, lambda: False))
        exchange = Exchange("run", "a", machine, self.tensors, *ways, self.events.emit, stopping)
        said = [lambda why, what=what: tell((what, why)) for what in ("rejoin", "give_up", "lost")]  # type: ignore[misc]
        heard = Heard(self.change, lambda *_: self.answer, tell, *said, self.events.emit)
        self.site = Exchanges(Dealt((0, 1), {1: ends[0]}), exchange, orders, client, heard)  # type: ignore[arg-type]
        dealt = Dealt((0, 1), {0: ends[1]})
        self.owner = Owner(options, "rebase", LAYOUT, theirs, dealt, self.clients[1], "run", "a", restored)  # type: ignore[arg-type]

    def change(self, do: Callable[[], None], event: LearnerEvent, source: Source | None) -> bool:
        with self.lock:
            self.told.append(event)
            if self.knows:
                do()
        return self.knows

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
