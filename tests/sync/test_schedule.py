"""When a fragment is due."""

from __future__ import annotations

import pytest

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.options import due, even_offsets, local_steps, steps_to_due
from tests.sync.driving import MS, of
from tests.sync.driving_site import Site


@pytest.mark.parametrize(("fragments", "steps"), [(1, 1), (1, 15), (3, 3), (3, 15), (4, 15), (24, 24), (5, 7)])
def test_every_fragment_is_due_once_in_a_period(fragments: int, steps: int) -> None:
    for fragment in range(fragments):
        at = [step for step in range(1, 2 * steps + 1) if fragment in due(even_offsets(fragments, steps), steps, step)]
        assert len(at) == 2
        assert at[1] - at[0] == steps


@pytest.mark.parametrize(("fragments", "steps"), [(3, 15), (4, 15), (24, 24), (5, 7)])
def test_no_two_fragments_are_due_at_once_and_the_load_is_flat(fragments: int, steps: int) -> None:
    at = sorted(even_offsets(fragments, steps))
    assert len(set(at)) == fragments
    gaps = [b - a for a, b in zip(at, [*at[1:], at[0] + steps], strict=True)]
    assert max(gaps) - min(gaps) <= 1, gaps


def test_one_fragment_is_due_after_every_period() -> None:
    assert [step for step in range(40) if due(even_offsets(1, 15), 15, step)] == [15, 30]


def test_nothing_is_due_before_the_first_step() -> None:
    assert not due((0,), 15, 0)


def test_several_steps_told_as_one_are_due_when_one_of_them_is() -> None:
    for offset_of in range(7):
        each = [bool(due((offset_of,), 7, step)) for step in range(40)]
        for step in range(40):
            for steps in range(1, step + 1):
                assert bool(due((offset_of,), 7, step, steps)) == any(each[step - steps + 1 : step + 1]), (step, steps)


@pytest.mark.parametrize(
    ("fastest_ms", "own_ms", "steps"),
    [(0, 100, 40), (100, 0, 40), (100, 100, 40), (100, 150, 26), (100, 9_999, 1), (100, 80, 40)],
)
def test_a_slower_site_makes_as_many_fewer_steps_and_at_least_one(fastest_ms: int, own_ms: int, steps: int) -> None:
    assert local_steps(40, fastest_ms * MS, own_ms * MS) == steps


@pytest.mark.parametrize(
    ("fastest_ms", "own_ms", "steps"),
    [(0, 100, 8), (100, 0, 8), (100, 100, 8), (100, 101, 8), (100, 200, 4), (100, 250, 4), (100, 9_999, 1)],
)
def test_19_rounded_up_a_slower_site_makes_halos_number_of_steps(fastest_ms: int, own_ms: int, steps: int) -> None:
    """max(1, ceil(H w)), w being the site's speed by that of the fastest."""
    assert local_steps(8, fastest_ms * MS, own_ms * MS, "up") == steps


def sealed_at(site: Site, fragments: int, steps: int) -> list[list[int]]:
    """The steps after which each fragment was sealed, with every update accepted at once."""
    found: list[list[int]] = [[] for _ in range(fragments)]
    for _ in range(steps):
        for seal in of(fx.Seal, site.train()):
            found[seal.fragment].append(site.step)
            site.handle(ev.Sealed(seal.fragment, seal.sequence, "u"))
            site.handle(ev.PushAnswered(seal.fragment, seal.sequence, ev.Outcome.ACCEPTED, None))
    return found


def told(site: Site, fastest_ms: int, fragment: int = 0) -> None:
    site.handle(ev.VersionPublished(1, fragment, 0, 0, 0, 1, fastest_ms * MS))


def test_dynamic_steps_follow_the_fastest_site_as_told() -> None:
    """Site takes 100 ms a step; an update is of 20 steps where the fastest is as slow, and of 10 where it is twice as
    fast."""
    site = Site(inner_steps=20, dynamic_steps=True, updates_in_flight_max=100)
    assert sealed_at(site, 1, 45) == [[20, 40]]
    told(site, 50)
    assert sealed_at(site, 1, 25) == [[50, 60, 70]]
    told(site, 0)
    assert sealed_at(site, 1, 30) == [[90]]


@pytest.mark.parametrize(("rounding", "wanted"), [("down", [[2, 4, 6]]), ("up", [[3, 6]])])
def test_19_a_site_rounds_its_dynamic_steps_as_told(rounding: str, wanted: list[list[int]]) -> None:
    """A step takes it 100 ms and the fastest 35: 2.8 of 8."""
    site = Site(inner_steps=8, dynamic_steps=True, dynamic_rounding=rounding, updates_in_flight_max=100)
    told(site, 35)
    assert sealed_at(site, 1, 7) == wanted


def test_the_first_updates_of_several_fragments_stand_apart_with_dynamic_steps_too() -> None:
    plain = sealed_at(Site(inner_steps=20, num_fragments=4, updates_in_flight_max=100), 4, 40)
    dynamic = Site(inner_steps=20, num_fragments=4, updates_in_flight_max=100, dynamic_steps=True)
    assert sealed_at(dynamic, 4, 40) == plain
    slow = Site(inner_steps=20, num_fragments=4, updates_in_flight_max=100, dynamic_steps=True)
    told(slow, 50)
    assert sealed_at(slow, 4, 20) == [[2, 12], [5, 15], [7, 17], [10, 20]]


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_may_be_done_at_a_boundary_is_what_is_done(dynamic: bool) -> None:
    site = Site(inner_steps=7, dynamic_steps=dynamic, updates_in_flight_max=100)
    for step in range(1, 60):
        if step == 20:
            told(site, 40)
        may = site.machine.may_act()
        assert bool(of(fx.Seal, site.train())) <= may, step
        for sent in site.machine.state.fragments[0].in_flight:
            if not sent.digest:
                site.handle(ev.Sealed(0, sent.sequence, "u"))
                site.handle(ev.PushAnswered(0, sent.sequence, ev.Outcome.ACCEPTED, None))


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_next_boundary_with_anything_to_do_is_known_beforehand(dynamic: bool) -> None:
    options = {"inner_steps": 20, "num_fragments": 3, "updates_in_flight_max": 100, "dynamic_steps": dynamic}
    single, several = Site(**options), Site(**options)
    for site in (single, several):
        told(site, 60)
        site.train()  # What a step takes is known from the first one on.
    acted = []
    while single.step < 60:
        acted += [single.step for seal in of(fx.Seal, single.train()) if sealing(single, seal)]
    found = []
    while several.step < 60:
        steps = several.machine.steps_to_act()
        several.step += steps
        effects = several.handle(ev.StepDone(several.step, 10 * steps, 100 * MS, several.step, steps=steps))
        found += [several.step for seal in of(fx.Seal, effects) if sealing(several, seal)]
    assert [step for step in found if step <= 60] == acted


def test_what_is_due_and_was_overwritten_just_now_is_sent_after_the_next_step() -> None:
    site = Site(inner_steps=20, adopt="overwrite")
    site.send(1, steps=20)
    site.train(19)
    site.fate(1, version=1)
    site.handle(ev.VersionFetched(0, 1, ()))
    assert not of(fx.Seal, site.train()), "nothing is left of it"
    assert site.machine.steps_to_act() == 1
    assert of(fx.Seal, site.train())


def test_the_next_step_after_which_any_fragment_is_due() -> None:
    places = even_offsets(3, 10)
    for step in range(45):
        ahead = next(steps for steps in range(1, 11) if due(places, 10, step + steps))
        assert steps_to_due(places, 10, step) == ahead, step


def sealing(site: Site, seal: fx.Seal) -> bool:
    site.handle(ev.Sealed(seal.fragment, seal.sequence, "u"))
    site.handle(ev.PushAnswered(seal.fragment, seal.sequence, ev.Outcome.ACCEPTED, None))
    return True
