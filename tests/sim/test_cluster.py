from __future__ import annotations

from diloco.sim.world import Direction
from diloco.sync.fates import columns_of
from tests.sim.small import Small


def test_sites_of_a_calm_run_draw_and_merge_each_unit_once() -> None:
    learner = {"unit_sequences": 2, "sequence_tokens": 10, "units_ahead": 64}
    small = Small(sites=3, learner=learner, unit_sequences=2)
    small.run(10)
    found = columns_of(small.outer.plan.options, small.outer.machine.state)
    assert found.merged > 50
    assert (found.partly, found.given_back, found.reissued, found.repeated) == (0, 0, 0, 0)
    assert found.balanced()
    assert min(small.versions()) > 10
    assert small.cluster.restarts == 0


def test_site_trains_at_its_own_pace_through_a_partition_and_joins_again_after_it() -> None:
    small = Small(site_timeout_ns=3_000_000_000)
    small.run(2)
    site = small.process("a")
    before, first = site.step, site.courier.session
    small.link("a").cut(Direction.DOWN)
    small.run(10)
    assert site.step - before == 100, "one step per 100 ms, as before"
    assert (first is not None, site.courier.session) == (True, None), "it hears nothing and breaks off"
    small.link("a").heal()
    small.run(8)
    assert site.courier.session not in (None, first)


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
    small.link("a").cut(*Direction)
    small.run(2)
    waiting = small.process("a").step
    small.run(1)
    assert small.process("a").step == waiting, "it waits for the answer to its update"
    small.run(8)
    assert small.process("a").step > waiting, "the wait has a bound"
