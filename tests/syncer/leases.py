"""A lease as a test holds it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from diloco.sync.leadership import Claim, Standing
from diloco.syncer.lease import Lease, LeaseRefusedError

FIRST = Claim("first", 0, 1, anew=True)


@dataclass(frozen=True, slots=True)
class Held:
    """A lease, with what ``acquire`` returned."""

    lease: Lease
    own: Standing

    @property
    def epoch(self) -> int:
        return self.own.epoch

    def renew(self) -> bool:
        return self.lease.change(self.own)

    def mark(self, heir: str) -> bool:
        return self.lease.change(self.own, heir=heir)

    def release(self) -> None:
        self.lease.change(self.own, released=True)


def taken(lease: Lease, claim: Claim = FIRST) -> Held:
    own = lease.acquire(claim)
    assert own is not None
    return Held(lease, own)


def take_often(lease: Lease, name: str, epochs: int, bound_s: float = 50.0) -> Iterator[int]:
    """Take it whenever it is free, give it back, and leave the next epoch to another, until there were ``epochs``."""
    until_s, last, mine = time.monotonic() + bound_s, None, -1
    while (last is None or last.epoch < epochs) and time.monotonic() < until_s:
        last = lease.read()
        if last is not None and last.epoch == mine:
            time.sleep(0.001)
            continue
        claim = Claim(name, 0, last.lineage + 1 if last is not None else 1, anew=True)  # Never refused as older.
        with contextlib.suppress(LeaseRefusedError):  # Unless another has just begun the same lineage.
            if (own := lease.acquire(claim)) is not None:
                mine = own.epoch
                yield mine
                lease.change(own, released=True)
