"""What goes wrong between a syncer, its standby and their lease."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.sim.network import MILLISECOND_NS, Direction
from diloco.sim.outer_process import CrashPoint
from diloco.sim.standby_process import StandbyProcess
from diloco.sync.options import SECOND_NS

if TYPE_CHECKING:
    from random import Random

    from diloco.sim.network import Link
    from diloco.sim.syncers import Seat, Syncers

PAIR = (
    "primary_gone",
    "primary_frozen",
    "pair_partition",
    "lease_partition",
    "standby_crash",
    "standby_gone",
    "standby_frozen",
    "detach",
    "deserted",
)
"""Faults of runs with a standby."""


class PairFaults:
    """Each method is one fault; False when it cannot be now."""

    def __init__(self, syncers: Syncers, random: Random) -> None:
        self._syncers, self._random = syncers, random

    def inject(self, kind: str) -> bool:
        """One of ``PAIR``."""
        standby = self._syncers.standby_seat()
        return standby is not None and bool(getattr(self, f"_{kind}")(standby))

    def _for_ns(self) -> int:
        return self._random.choice((400, 2000, 6000, 12000)) * MILLISECOND_NS

    def _primary_gone(self, standby: Seat) -> bool:
        """The machine is gone until everything is healed, perhaps with its folder."""
        del standby
        seat = self._syncers.seat_of_outer()
        if self._random.random() < 0.5:
            if not self._syncers.may_be_lost(seat):
                return False
            self._syncers.lose(seat)
        else:
            self._syncers.kill(seat, power=self._random.random() < 0.5)
        seat.up = False
        if self._random.random() < 0.5:
            self._syncers.heap.after(self._for_ns(), lambda: self._syncers.bring_up(seat))
        return True

    def _primary_frozen(self, standby: Seat) -> bool:
        """For as long as its lease and longer."""
        del standby
        process, lease = self._syncers.outer, self._syncers.lease
        assert process is not None
        assert lease is not None
        process.freeze()
        for_ns = int(lease.ttl_ns * (0.5 + 2 * self._random.random()))
        self._syncers.heap.after(for_ns, process.thaw)
        return True

    def _pair_partition(self, standby: Seat) -> bool:
        del standby
        assert self._syncers.between is not None
        return self._cut(self._syncers.between)

    def _lease_partition(self, standby: Seat) -> bool:
        seat = self._random.choice((standby, self._syncers.seat_of_outer()))
        assert seat.line is not None
        return self._cut(seat.line.link)

    def _cut(self, link: Link) -> bool:
        link.cut(*self._random.choice(((Direction.UP,), (Direction.DOWN,), tuple(Direction))))
        self._syncers.heap.after(self._for_ns(), link.heal)
        return True

    def _standby_crash(self, standby: Seat) -> bool:
        standby.restart_ns = self._for_ns()
        point, power = self._random.choice((None, *CrashPoint)), self._random.random() < 0.5
        if point is None:
            self._syncers.kill(standby, power=power)
        else:
            self._syncers.doom(standby, point, power=power)
        return True

    def _standby_gone(self, standby: Seat) -> bool:
        if not self._syncers.may_be_lost(standby):
            return False
        standby.restart_ns = self._for_ns()
        self._syncers.lose(standby)
        return True

    def _standby_frozen(self, standby: Seat) -> bool:
        process = standby.process
        if not isinstance(process, StandbyProcess):
            return False
        process.freeze()
        self._syncers.heap.after(self._for_ns(), process.thaw)
        return True

    def _detach(self, standby: Seat) -> bool:
        """An operator who sees that nothing goes on."""
        del standby
        outer = self._syncers.outer
        if outer is None or outer.replicator is None or outer.replicator.follows():
            return False
        outer.deliver(outer.detach)
        return True

    def _deserted(self, standby: Seat) -> bool:
        """Cut off from the standby, and told not to wait for it; then the primary falls silent with what it told."""
        syncers, heap = self._syncers, self._syncers.heap
        outer, plan = syncers.outer, syncers.plan.replication
        assert syncers.between is not None
        assert outer is not None
        assert plan is not None
        syncers.between.cut(*Direction)

        def fall_silent() -> None:
            if syncers.outer is outer:
                self._primary_frozen(standby)
            heap.after(2 * plan.ttl_ns, syncers.between.heal)  # type: ignore[union-attr]

        def detach() -> None:
            self._detach(standby)

        heap.after(plan.timeout_ns + SECOND_NS, detach)
        heap.after(plan.timeout_ns + 4 * SECOND_NS, fall_silent)
        return True
