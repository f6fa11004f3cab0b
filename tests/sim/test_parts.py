"""One training loop steps all the parts of a site."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from diloco.sim.several import PartProcess, Several, draw_several
from diloco.sync.events import LeaveAsked
from diloco.sync.options import SECOND_NS


class Quiet(Several):
    """A run without faults and without an end, and which parts stepped when."""

    def __init__(self, seed: int = 3) -> None:
        plan = draw_several(seed)
        self.steps: list[tuple[int, str, tuple[int, ...]]] = []
        outers = [
            dataclasses.replace(outer, options=dataclasses.replace(outer.options, token_budget=0))
            for outer in plan.outers
        ]
        reached_ns = ((0,) * len(outers),)
        plan = dataclasses.replace(plan, outers=tuple(outers), sites=plan.sites[:1], reached_ns=reached_ns, faults=())
        super().__init__(plan, ())
        self.across.stepped = self._noted  # type: ignore[method-assign]
        for machine in self.machines:
            machine.syncers.start()
        self._start("a")

    def _noted(self, takers: Sequence[PartProcess]) -> None:
        self.steps.append((self.heap.now_ns, takers[0].site, tuple(part.step for part in takers)))

    def go(self, seconds: float) -> None:
        self.heap.run_until(self.heap.now_ns + int(seconds * SECOND_NS), lambda: False)

    @property
    def parts(self) -> list[PartProcess]:
        return self.places["a"].processes


def test_all_parts_make_the_same_steps_and_read_the_same_batches() -> None:
    run = Quiet()
    run.go(20)
    assert len(run.steps) > 10
    for step, (_, _, made) in enumerate(run.steps, 1):
        assert made == (step,) * len(run.machines)
    run.parts[0].cursor += 5
    run.go(5)
    assert len({part.cursor for part in run.parts}) == 1


def test_a_part_that_has_ended_holds_nobody_back() -> None:
    run = Quiet()
    run.go(10)
    first = run.parts[0]
    first.deliver(lambda: first.handle(LeaveAsked()))
    run.go(10)
    assert not first.alive
    before = len(run.steps)
    run.go(10)
    assert len(run.steps) > before + 5
    assert {len(made) for _, _, made in run.steps[before:]} == {len(run.machines) - 1}


def test_who_is_told_to_stop_while_it_waits_for_the_others_is_at_rest() -> None:
    run = Quiet()
    run.machines[1].syncers.kill(run.machines[1].syncers.seats[0])
    run.machines[1].syncers.seats[0].up = False
    run.go(5)
    first = run.parts[0]
    assert (first.training, first.step) == (True, 0), "a new site needs the values of all"
    first.deliver(lambda: first.handle(LeaveAsked()))
    assert first.at_rest
    run.go(5)
    assert not first.alive


def test_a_site_that_trains_goes_on_while_a_syncer_is_away() -> None:
    run = Quiet()
    run.go(10)
    (seat,) = run.machines[0].syncers.seats
    seat.up = False
    run.machines[0].syncers.kill(seat)
    before, steps = run.machines[1].syncers.versions(), len(run.steps)
    run.go(20)
    assert all(now > was for now, was in zip(run.machines[1].syncers.versions(), before, strict=True))
    assert all(len(made) == len(run.machines) for _, _, made in run.steps[steps:])
