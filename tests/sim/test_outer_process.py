from __future__ import annotations

import pytest

from diloco.sim.outer_process import CrashPoint
from tests.sim.small import Small


@pytest.mark.parametrize("point", CrashPoint)
def test_syncer_that_dies_comes_back_and_goes_on(point: CrashPoint) -> None:
    small = Small(site_timeout_ns=1_500_000_000)  # So reports are frequent and a dead syncer is soon noticed.
    small.run(3)
    before, records = small.versions(), len(small.cluster.outer_disk.journal)
    small.cluster.doom_outer(point)
    if point is CrashPoint.SNAPSHOT:
        assert small.cluster.outer is not None
        small.cluster.outer.deliver(small.cluster.outer.snapshot)
    small.run(5)
    assert small.cluster.restarts == 1, point
    assert small.cluster.outer_disk.epoch == 2
    assert all(now > was for now, was in zip(small.versions(), before, strict=True)), (before, small.versions())
    assert len(small.cluster.outer_disk.journal) > records


def test_spool_holds_no_more_than_what_has_no_fate() -> None:
    small = Small()
    small.run(8)
    outer = small.cluster.outer
    assert outer is not None
    undecided = sum(len(line.undecided) for site in outer.machine.state.sites.values() for line in site.lines)
    assert len(small.cluster.outer_disk.spool) == undecided


def test_machine_time_stands_still_while_no_process_lives() -> None:
    small = Small()
    small.run(2)
    assert small.cluster.outer is not None
    before = small.cluster.outer.now_ns()
    small.cluster.outer_restart_ns = 50 * 1_000_000_000
    small.cluster.kill_outer()
    small.run(50)
    assert small.cluster.outer is not None
    assert small.cluster.outer.now_ns() - before < 1_000_000_000
