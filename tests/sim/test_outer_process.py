from __future__ import annotations

from random import Random

import pytest

from diloco.sim.outer_process import CrashPoint
from tests.sim.small import Small
from tests.sooner import sooner


@pytest.mark.parametrize("power", sooner([False, True], True), ids=["killed", "power cut"])
@pytest.mark.parametrize("point", CrashPoint)
def test_syncer_that_dies_comes_back_and_goes_on(point: CrashPoint, power: bool) -> None:
    small = Small(site_timeout_ns=1_500_000_000)  # So reports are frequent and a dead syncer is soon noticed.
    small.run(1.5)
    before = small.versions()
    small.syncers.doom(small.syncers.seats[0], point, power=power)
    if point.value.startswith("snapshot"):
        assert small.syncers.outer is not None
        small.syncers.outer.ask(small.syncers.outer.snapshot)
    small.run(4)
    assert (small.cluster.restarts, small.syncers.power_cuts) == (1, int(power)), point
    assert small.syncers.outer is not None
    assert small.syncers.outer.machine.state.epoch == 2
    assert all(now > was for now, was in zip(small.versions(), before, strict=True)), (before, small.versions())


def test_payloads_go_with_the_snapshots_that_need_them() -> None:
    small = Small()
    small.run(8)
    outer = small.syncers.outer
    assert outer is not None
    for _ in range(3):
        outer.snapshot()
    undecided = sum(len(line.undecided) for site in outer.machine.state.sites.values() for line in site.lines)
    assert len(small.syncers.disk.storage.names("spool/")) == undecided


def test_rot_is_found_or_harmless() -> None:
    found = 0
    for seed in range(8):
        small = Small(1)
        small.run(2)
        assert small.syncers.disk.storage.rot(Random(seed))
        small.syncers.kill(small.syncers.seats[0])
        small.run(2)
        assert small.syncers.outer is not None, seed
        found += small.syncers.damage_found
    assert found > 4


def test_machine_time_stands_still_while_no_process_lives() -> None:
    small = Small()
    small.run(2)
    assert small.syncers.outer is not None
    before = small.syncers.outer.now_ns()
    small.syncers.seats[0].restart_ns = 50 * 1_000_000_000
    small.syncers.kill(small.syncers.seats[0])
    small.run(50)
    assert small.syncers.outer is not None
    assert small.syncers.outer.now_ns() - before < 1_000_000_000
