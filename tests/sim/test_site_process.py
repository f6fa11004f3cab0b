from __future__ import annotations

from diloco.sim.world import Direction
from tests.sim.small import Small


def test_site_trains_at_its_own_pace_through_a_partition() -> None:
    small = Small()
    small.run(2)
    before = small.process("a").step
    small.cluster.sites["a"].sides[0].link.cut(*Direction)
    small.run(10)
    assert small.process("a").step - before == 100, "one step per 100 ms, as before"


def test_killed_site_goes_on_from_its_checkpoint() -> None:
    small = Small()
    small.run(3)
    before = small.process("a")
    small.cluster.kill_site("a", 100_000_000)
    small.run(0.2)
    after = small.process("a")
    assert after.name != before.name
    assert 0 < after.step <= before.step, "from the checkpoint, not from nothing and not from memory"
    small.run(3)
    assert after.machine.state.incarnation == 2


def test_wiped_site_begins_cold_and_skips_what_its_updates_consumed() -> None:
    small = Small()
    small.run(3)
    small.cluster.wipe_site("a", 100_000_000)
    small.run(2)
    after = small.process("a")
    assert after.step < 25
    assert after.cursor > after.step, "an earlier process has read these batches, and its work was accepted"


def test_lock_step_waits_and_gives_up_after_a_bound() -> None:
    small = Small(learner={"lock_step": True}, quorum="all")
    small.run(4)
    small.cluster.sites["a"].sides[0].link.cut(*Direction)
    small.run(2)
    waiting = small.process("a").step
    small.run(1)
    assert small.process("a").step == waiting, "it waits for the answer to its update"
    small.run(8)
    assert small.process("a").step > waiting, "the wait has a bound"
