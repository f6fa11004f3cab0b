from __future__ import annotations

from random import Random

import pytest

from diloco.sim.plan import PAIR, PairFaults
from diloco.sim.world import Direction
from tests.sim.small import Small, a_pair
from tests.sooner import sooner


@pytest.mark.parametrize("kind", sooner(PAIR, *PAIR[::2]))
def test_a_run_survives_each_fault(kind: str) -> None:
    small = Small(replication=a_pair(), site_timeout_ns=1_500_000_000)
    small.run(2)
    faults = PairFaults(small.syncers, Random(kind))
    if kind == "detach":
        assert not faults.inject(kind), "there is no need"
        assert small.syncers.between is not None
        small.syncers.between.cut(*Direction)
        small.run(2)
    found = [faults.inject(kind) for _ in range(4)]
    assert any(found)
    small.run(4)
    before = small.versions()
    small.cluster.heal()
    small.run(6)
    assert min(small.versions()) > max(before)
    assert small.syncers.caught_up()


def test_there_are_none_without_a_standby() -> None:
    small = Small()
    faults = PairFaults(small.syncers, Random(0))
    assert not any(faults.inject(kind) for kind in PAIR)
