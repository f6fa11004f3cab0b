"""A site's machine with the real syncer's, under losses, delays, restarts and refusals, from seeds.

``tests/sync/world.py`` checks after every event; here is what happens, and what must be true at the end.
"""

from __future__ import annotations

import functools
import json
import random

import pytest

from diloco.sync import events as ev
from diloco.sync.events import Reason
from diloco.sync.options import SECOND_NS, LearnerOptions
from diloco.sync.progress import ledger_of
from tests.sooner import sooner
from tests.sync.another_process import told_in_another_process
from tests.sync.world import World

TURNS = 250


def a_world(draw: random.Random) -> World:
    fragments = draw.randint(1, 2)
    window, staleness = draw.randint(1, 3), draw.choice([0, 1, 8])
    options = LearnerOptions(
        num_fragments=fragments,
        inner_steps=draw.randint(fragments, 5),
        adopt=draw.choice(["rebase", "rebase", "overwrite"]),
        updates_in_flight_max=window,
        discards_max=1000,
        lock_step=draw.random() < 0.2,
    )
    return World(
        draw,
        options,
        grace="fixed",
        grace_ns=draw.choice([0, SECOND_NS]),
        staleness_max=staleness,
        updates_in_flight_max=window,
        fates_kept_max=window * (staleness + 2) + 3,
    )


def turn(world: World) -> None:
    kind = world.draw.choices(
        ["train", "deliver", "pass_time", "save", "restart", "restart_syncer", "join", "strange"],
        [40, 60, 8, 3, 1, 1, 1, 3],
    )[0]
    if kind == "strange":
        strange(world)
    else:
        getattr(world, kind)()


def strange(world: World) -> None:
    """Late, repeated and meaningless words, of the kind that a network gives."""
    draw = world.draw
    index = draw.randrange(world.options.num_fragments)
    part = world.machine.state.fragments[index]
    number = draw.choice([0, part.next_sequence - 1, part.next_sequence, part.next_sequence + 5])
    sealed = [sent.sequence for sent in part.in_flight if sent.state == "sealed"]
    told = world.syncer.machine.state.sites["a"].lines[index].fates
    events: list[ev.LearnerEvent] = [
        ev.FateTold(ev.Fate(index, number, 1, 10, "another")),
        ev.VersionPublished(0, index, 999, 0, 0),
        ev.BoundaryReached(),
        ev.BaseDiffers(index, draw.choice([part.base_version, 999])),
        *[ev.FateTold(fate) for fate in told],
    ]
    if number not in sealed:
        events.append(ev.PushAnswered(index, number, ev.Outcome.REFUSED, draw.choice(list(Reason))))
    if all(sent.state != "sealing" for sent in part.in_flight):
        events += [ev.Sealed(index, number, "late"), ev.SealFailed(index, number)]
    if not world.options.lock_step:
        events.append(ev.OverlapChosen(draw.randrange(world.options.inner_steps)))
    if part.fetching or part.base_version >= 0:
        events.append(ev.FetchFailed(index))
    world.tell(draw.choice(events))


def deliver_all(world: World) -> None:
    for _ in range(1000):
        if not world.mail:
            return
        world.deliver()
    raise AssertionError("messages without end")


def come_to_rest(world: World) -> None:
    """No more faults; the site leaves after sending what it has, then everything is decided."""
    world.calm = True
    world.join()  # Whatever Watch has lost, its next stream begins with a join.
    world.tell(ev.LeaveAsked())
    for _ in range(60):
        deliver_all(world)
        world.tell(ev.BoundaryReached())
        world.pass_time()
        if world.machine.state.left and not world.mail:
            break
    state = world.machine.state
    assert state.left, "the site cannot leave"
    world.join()
    deliver_all(world)
    assert world.machine.settled(), "an update has no fate at the end"


@functools.cache
def play(seed: int) -> World:
    """The same one for all tests, which only read it."""
    world = a_world(random.Random(seed))
    for _ in range(TURNS):
        turn(world)
        assert not world.failed, "the site gave up"
    come_to_rest(world)
    assert not world.failed, "the site gave up"
    for index, line in enumerate(world.syncer.machine.state.sites["a"].lines):
        ledger = ledger_of(world.machine.state, index)
        assert ledger.merged == line.tokens_merged == -world.published[index][-1], "merged tokens and progress differ"
        assert ledger.in_flight == 0
        assert ledger.unsent == 0, "the last update was not sent"
    return world


@pytest.mark.parametrize("seed", sooner(range(25), *range(10)))
def test_any_order_of_events(seed: int) -> None:
    try:
        play(seed)
    except Exception as error:
        again = f"pytest 'tests/sync/test_learner_random.py::test_any_order_of_events[{seed}]'"
        error.add_note(f"seed {seed}; again with: {again}")
        raise


def test_the_draws_reach_what_they_should() -> None:
    seen = set().union(*(play(seed).seen for seed in range(25)))
    wanted = {"Seal", "Send", "Forget", "Release", "Fetch", "Adopt", "Retake", "SkipData", "StopTraining", "Leave"}
    wanted |= {"passed"}
    assert seen >= wanted | {"Note:update_kept", "Note:update_discarded", "Note:outrun", "Note:publish_ignored", "Join"}


def told() -> str:
    """What a few sites know at the end."""
    return json.dumps([play(seed).machine.snapshot() for seed in range(8)])


@pytest.mark.slow
def test_effects_do_not_depend_on_the_hash_seed() -> None:
    assert told_in_another_process("tests.sync.test_learner_random") == told()
