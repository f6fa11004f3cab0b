"""A site that is told of versions only when it has an update to make decides as one that is told at once."""

from __future__ import annotations

import pytest

from diloco.sim.fleet import Fleet
from diloco.sim.fleet_plan import FleetPlan
from diloco.sim.fleet_site import Site, to_ns
from diloco.sync import effects as fx
from tests.sim.test_fleet import FleetSite, fleet

Made = list[tuple[int, str, int, int, int, int]]


def made_in(plan: FleetPlan, monkeypatch: pytest.MonkeyPatch, *, at_once: bool) -> tuple[Made, Fleet]:
    """Every update that is made: when, by whom, of what, from which version, of how many steps."""
    made: Made = []
    seal, train = Site._seal, Site._train

    def noted(self: Site, effect: fx.Seal) -> None:
        made.append((self.heap.now_ns, self.name, effect.fragment, effect.sequence, effect.base_version, effect.steps))
        seal(self, effect)

    def listening(self: Site) -> None:
        train(self)
        self.fleet.resting[self.index] = self

    with monkeypatch.context() as patched:
        patched.setattr(Site, "_seal", noted)
        if at_once:
            patched.setattr(Site, "_train", listening)
            patched.setattr(Site, "told_in_passing", Site.told)
        world = Fleet(plan)
        assert plan.seconds is not None
        world.heap.run_until(to_ns(plan.seconds), world.is_over)
        world.result()
    return sorted(made), world


@pytest.mark.parametrize(("adopt", "fragments"), [("rebase", 1), ("rebase", 3), ("eager", 3)])
def test_a_site_that_looks_later_makes_the_same_updates(
    adopt: str, fragments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = tuple(
        FleetSite(step_s=step_s, rtt_s=0.2137, up_mbps=0.05, down_mbps=0.05, interruptions_per_s=fails, away_s=7.3)
        for step_s, fails in ((1.0, 0.0), (1.3, 1 / 200), (2.1, 0.0))
    )
    plan = fleet(sites, fragments=fragments, learner={"adopt": adopt}, seconds=1800.0, staleness_max=20)
    (later, one), (at_once, other) = (made_in(plan, monkeypatch, at_once=which) for which in (False, True))
    assert len(later) > 100
    assert later == at_once
    for site, same in zip(one.sites, other.sites, strict=True):
        assert site.account.bytes_up == same.account.bytes_up
        assert site.account.bytes_down == pytest.approx(same.account.bytes_down, rel=0.05), "what nobody looked at yet"


def test_the_word_of_the_end_comes_after_what_was_trained_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A last update of each fragment; it once made one of the steps before the last adopt and another of the rest."""
    sites = (FleetSite(step_s=1.0, rtt_s=0.1), FleetSite(step_s=1.3, rtt_s=0.1), FleetSite(step_s=1.7, rtt_s=0.1))
    plan = fleet(sites, fragments=4, learner={"adopt": "overwrite"}, seconds=700.0, run_ns=to_ns(600.0))
    made, _ = made_in(plan, monkeypatch, at_once=False)
    last = [(name, fragment) for now_ns, name, fragment, *_ in made if now_ns > to_ns(600.0)]
    assert len(last) == len(set(last)) > 6


def test_every_version_crosses_the_link_of_a_site_that_is_there() -> None:
    plan = fleet((FleetSite(step_s=1.0, rtt_s=0.1),) * 3, fragments=2)
    world = Fleet(plan)
    world.heap.run_until(to_ns(1800.0), world.is_over)
    versions = sum(world.result().versions)
    for site in world.sites:
        assert site.account.bytes_down == pytest.approx(2 * 8000 + versions * 1000, abs=4000)
