"""One training loop steps all the parts of a site."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from diloco.sim.several import Several, draw_several
from diloco.sim.site_process import SiteProcess
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
        whole = dataclasses.replace(plan.whole, weathers=plan.whole.weathers[:1])
        plan = dataclasses.replace(
            plan, whole=whole, outers=tuple(outers), sites=plan.sites[:1], reached_ns=reached_ns, faults=()
        )
        super().__init__(plan, ())
        self.across.stepped = self._noted  # type: ignore[method-assign]
        for syncers in self.syncers:
            syncers.start()
        self.start_site("a")

    def _noted(self, takers: Sequence[SiteProcess]) -> None:
        self.steps.append((self.heap.now_ns, takers[0].site, tuple(part.step for part in takers)))

    def go(self, seconds: float) -> None:
        self.heap.run_until(self.heap.now_ns + int(seconds * SECOND_NS), lambda: False)

    @property
    def parts(self) -> list[SiteProcess]:
        return self.sites["a"].parts


def test_all_parts_make_the_same_steps_and_read_the_same_batches() -> None:
    run = Quiet()
    run.go(20)
    assert len(run.steps) > 10
    for step, (_, _, made) in enumerate(run.steps, 1):
        assert made == (step,) * len(run.syncers)
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
    assert {len(made) for _, _, made in run.steps[before:]} == {len(run.syncers) - 1}


def test_who_is_told_to_stop_while_it_waits_for_the_others_is_at_rest() -> None:
    run = Quiet()
    run.syncers[1].kill(run.syncers[1].seats[0])
    run.syncers[1].seats[0].up = False
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
    (seat,) = run.syncers[0].seats
    seat.up = False
    run.syncers[0].kill(seat)
    before, steps = run.syncers[1].versions(), len(run.steps)
    run.go(20)
    assert all(now > was for now, was in zip(run.syncers[1].versions(), before, strict=True))
    assert all(len(made) == len(run.syncers) for _, _, made in run.steps[steps:])
