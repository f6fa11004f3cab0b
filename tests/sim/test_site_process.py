from __future__ import annotations

from diloco.sim.site_process import SiteProcess
from diloco.sim.world import Direction
from tests.sim.small import Small


def process(small: Small, name: str = "a") -> SiteProcess:
    found = small.cluster.sites[name].process
    assert found is not None
    return found


def test_site_trains_at_its_own_pace_through_a_partition() -> None:
    small = Small()
    small.run(2)
    before = process(small).step
    small.cluster.sites["a"].link.cut(*Direction)
    small.run(10)
    assert process(small).step - before == 100, "one step per 100 ms, as before"


def test_killed_site_goes_on_from_its_checkpoint() -> None:
    small = Small()
    small.run(3)
    before = process(small)
    small.cluster.kill_site("a", 100_000_000)
    small.run(0.2)
    after = process(small)
    assert after.name != before.name
    assert 0 < after.step <= before.step, "from the checkpoint, not from nothing and not from memory"
    small.run(3)
    assert after.machine.state.incarnation == 2


def test_wiped_site_begins_cold_and_skips_what_its_updates_consumed() -> None:
    small = Small()
    small.run(3)
    small.cluster.wipe_site("a", 100_000_000)
    small.run(2)
    after = process(small)
    assert after.step < 25
    assert after.cursor > after.step, "an earlier process has read these batches, and its work was accepted"


def test_lock_step_waits_and_gives_up_after_a_bound() -> None:
    small = Small(learner={"lock_step": True}, quorum="all")
    small.run(4)
    small.cluster.sites["a"].link.cut(*Direction)
    small.run(2)
    waiting = process(small).step
    small.run(1)
    assert process(small).step == waiting, "it waits for the answer to its update"
    small.run(8)
    assert process(small).step > waiting, "the wait has a bound"
