"""A participant that writes down what it hears, a model of one process, and a place that stands for an accelerator."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from diloco.inner.holding import Holding
from diloco.inner.parallel import SiteGroup
from diloco.learner.seal import Encoded, SealJob
from diloco.learner.tensors import HOST, Place
from diloco.sync.events import VersionFetched
from diloco.wire.messages import PullHeader, PushHeader
from tests.syncer.building import RUN, Events


class SealedUpdate(NamedTuple):
    """What ``seal`` returns."""

    header: PushHeader
    encoded: Encoded


class Heard:
    """A machine that is a list of what it is told."""

    incarnation = epoch = lineage = 1
    known: Any = property(lambda self: self)

    def __init__(self) -> None:
        self.events, self.told = Events(), list[Any]()
        self.rejoins, self.gave_up = list[str](), list[str]()

    def tell(self, event: object) -> None:
        self.told.append(event)

    def emit(self, what: str, facts: dict[str, object]) -> None:
        self.events.emit(what, facts)

    def rejoin(self, why: str) -> None:
        self.rejoins.append(why)

    def give_up(self, why: str) -> None:
        self.gave_up.append(why)


class Recorder(Heard):
    run_id, site_id = RUN, "a"
    client: Any
    outbox: Any

    def __init__(self) -> None:
        super().__init__()
        self.stopping, self.left = threading.Event(), threading.Event()
        self.updates: dict[tuple[int, int], str] = {}
        """The digests of those that wait to be sent."""
        self.sealed: list[SealedUpdate] = []
        self.fetched: list[tuple[Tensor, VersionFetched]] = []

    def wanted(self, fragment: int, sequence: int) -> str | None:
        return self.updates.get((fragment, sequence))

    def was_read(self, job: SealJob) -> None:
        pass

    def keep_sealed(self, header: PushHeader, encoded: Encoded) -> None:
        self.sealed.append(SealedUpdate(header, encoded))

    def keep_fetched(self, values: Tensor, event: VersionFetched, lineage: int, told: PullHeader) -> None:
        self.fetched.append((values, event))


def held(parameters: Mapping[str, Tensor]) -> Holding:
    """A model of one process, as a site's agent is given it."""
    return Holding(parameters, SiteGroup(device="cpu"))


class Elsewhere(Place):
    """A place on the CPU that is not the host: everything is copied there as it would be to an accelerator."""

    def __init__(self) -> None:
        super().__init__(HOST)
        self.is_host = False
