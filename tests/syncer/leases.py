"""A lease as a test holds it."""

from __future__ import annotations

from dataclasses import dataclass

from diloco.sync.leadership import Claim, Standing
from diloco.syncer.lease import Lease

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
