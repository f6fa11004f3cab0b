"""A site with several syncers: the loop sees one agent, and one syncer's absence is no other's business."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from diloco.inner.checkpoint import CheckpointError
from diloco.inner.parallel import SiteGroup
from diloco.inner.trainer import Resumed, Verdict
from diloco.learner.agent import Agent, Finished
from diloco.learner.exchange import AgentOptions
from diloco.learner.ranks import Orders
from diloco.learner.several_syncers import Agents, OneVoice, in_whole, part_restored
from diloco.learner.transfer import JoinFailed
from diloco.outer.fragments import gather, part_of
from diloco.outer.optimizer import OuterOptimizerOptions, OuterRule
from diloco.sync.effects import StopTraining
from diloco.sync.events import Ending
from diloco.sync.options import PROTOCOL, Agreement, HealthOptions, LearnerOptions, OuterOptions
from diloco.sync.progress import Ledger
from diloco.syncer.options import RunPlan, SyncerOptions
from diloco.syncer.server import Syncer
from diloco.wire.options import SecurityOptions, ServerOptions
from tests.learner.direct import TOKENS, DirectClient, cloned, info_of
from tests.learner.participant import held
from tests.syncer.building import LAYOUT, NO_WAIT, RUN, SHARED, Events, eventually, version_zero

FINISHED = StopTraining(Ending.FINISHED, "the run is finished")


DRAINED = StopTraining(Ending.DRAINED, "the run is drained")
EVICTED = StopTraining(None, "evicted", failed=True)


def part(cursor: int = 0, joins: bool | str = True, ending: Ending | None = None) -> Any:
    """An agent that does as it is told."""
    made = Mock(spec=Agent, has_joined=joins is True, stop=None, ending=ending)
    made.known = made
    made.start.side_effect = JoinFailed(joins, "no") if isinstance(joins, str) else [cursor]
    made.is_redone.return_value, made.next_turn.return_value = False, None
    made.progress.return_value = cursor / 10
    made.state.return_value = {"base.0": torch.full((1,), float(cursor))}, {"machine": cursor}
    made.ledgers.return_value = [Ledger(30, 30, 0, 0, 0, 0, 0)]

    def leave() -> None:
        made.stop = made.stop or StopTraining(None, "asked to leave")

    def finish(*, final: bool) -> Finished:
        made.leave()
        return Finished("failed" if made.stop.failed else "finished", "it is over", {}, final)

    made.leave.side_effect, made.finish.side_effect = leave, finish
    return made


def stops(made: Any, stop: StopTraining = FINISHED, ending: Ending | None = Ending.FINISHED) -> None:
    made.stop, made.ending = stop, ending


def site_of(*parts: Any, events: Events | None = None, join_timeout_s: float = 0.2) -> Agents:
    voice = OneVoice([[index] for index in range(len(parts))], (events or Events()).emit)
    return Agents(parts, voice, Orders(SiteGroup()), join_timeout_s)


def test_it_begins_where_the_furthest_is_when_one_syncer_answers_and_not_when_none_does() -> None:
    agents = site_of(part(cursor=4), part(cursor=9), part(joins=False))
    assert (agents.start(), agents.progress()) == (9, 0.9)
    parts = [part(joins=False), part(joins=False)]
    with pytest.raises(JoinFailed, match="none of the syncers answers") as caught:
        site_of(*parts).start()
    assert caught.value.kind == "unreachable"
    assert all(each.close.called for each in parts)
    parts = [part(), part(joins="mismatch")]
    with pytest.raises(JoinFailed, match=r"no \(syncer 1\)"):
        site_of(*parts).start()
    assert [call[0] for call in parts[0].method_calls] == ["start", "withdraw", "close"], "one refusal is the site's"


def test_every_agent_hears_of_every_step_and_all_ends_make_the_end() -> None:
    parts, events = [part(), part()], Events()
    agents = site_of(*parts, events=events, join_timeout_s=0.0)
    agents.start()
    assert not agents.after_step(info_of(1)).stop
    stops(parts[0])
    assert not any(agents.after_step(info_of(step)).stop for step in (2, 3)), "who has joined is waited for"
    stops(parts[1])
    assert agents.after_step(info_of(4)) == Verdict(True, "the run is finished")
    steps = [[call.args[0].step for call in each.after_step.mock_calls] for each in parts]
    assert steps == [[1, 2, 3, 4]] * 2
    parts[1].ledgers.return_value = [Ledger(50, 40, 0, 0, 0, 0, 10)]
    parts[1].stop = EVICTED
    finished = agents.finish()
    assert (finished.ending, finished.why) == ("failed", "it is over"), "as the part that failed meanwhile says it"
    zero = dict.fromkeys(finished.ledger, 0)
    mean = {**zero, "processed": 50, "merged": 35, "unsent": 10, "lost": 5}
    assert finished.ledger == mean, "what an ended part did not hear of is unsent"
    assert events.of("site_done")[0]["ledger"] == {f"tokens_{name}": tokens for name, tokens in mean.items()}


def test_one_drain_or_one_failure_is_enough_and_all_leave_at_the_same_step() -> None:
    for stop, ending in ((DRAINED, Ending.DRAINED), (EVICTED, None)):
        parts = [part(), part()]
        agents = site_of(*parts)
        stops(parts[1], stop, ending)
        assert agents.after_step(info_of(1)) == Verdict(True, f"{stop.why} (syncer 1)")
    parts = [part(), part()]
    agents = site_of(*parts)
    agents.leave_soon()
    assert agents.after_step(info_of(1)).stop
    assert all(each.leave.called for each in parts)


@pytest.mark.parametrize(("both", "goes_on"), [(False, False), (True, False), (True, True)])
def test_a_syncer_that_had_finished_before_is_waited_for_only_where_the_run_was_given_more_tokens(
    both: bool, goes_on: bool
) -> None:
    parts = [part(ending=Ending.FINISHED if both else None), part(joins=False, ending=Ending.FINISHED)]
    agents = site_of(*parts, join_timeout_s=600.0)
    agents.start()
    if goes_on:
        parts[0].ending = None  # As its syncer answered.
    assert not agents.after_step(info_of(1)).stop, "fragments of the other syncer go on"
    stops(parts[0])
    assert agents.after_step(info_of(2)).stop == (not goes_on)
    assert agents.finish().ending == ("left" if goes_on else "finished")
    assert [each.leave.called for each in parts] == [True, goes_on], "no goodbye can be said there"
    assert parts[1].close.called == (not goes_on)


def test_a_syncer_that_never_answers_is_waited_for_with_a_bound_once_the_run_is_finished() -> None:
    parts = [part(), part(joins=False)]
    agents = site_of(*parts, join_timeout_s=0.2)
    agents.start()
    threading.Event().wait(0.3)
    assert not agents.after_step(info_of(1)).stop, "while the run goes on a site waits for it without a bound"
    stops(parts[0])
    assert not agents.after_step(info_of(2)).stop
    threading.Event().wait(0.3)
    assert agents.after_step(info_of(3)) == Verdict(True, "the run is finished, and syncer 1 did not answer for 0.2 s")


def test_a_checkpoint_holds_each_part_and_gives_it_back() -> None:
    tensors, meta = site_of(part(cursor=3), part(cursor=4)).state()
    assert sorted(tensors) == ["0.base.0", "1.base.0"]
    whole = Resumed(3, tensors, meta)
    found = part_restored(whole, 1, 2)
    assert found is not None
    assert found.meta == {"machine": 4}
    assert dict(found.tensors) == {"base.0": torch.full((1,), 4.0)}
    assert part_restored(None, 0, 2) is None
    with pytest.raises(CheckpointError, match="of a run with 2 syncers, and this one has 3"):
        part_restored(whole, 0, 3)
    with pytest.raises(CheckpointError, match="of a run with one syncer, and this one has 2"):
        part_restored(replace(whole, meta={"machine": {}}), 0, 2)


# --- real agents and real syncers; the wire is a function call -------------------------------------------------------

PLACEMENT = ((1,), (0,))


class TwoSyncers:
    """Each with one of the two fragments, and a site that trains by dice."""

    def __init__(self, folder: Path, *, quorum: int | str = 1, lock_step: bool = False) -> None:
        self.folder, self.quorum, self.lock_step = folder, quorum, lock_step
        self.parts = [part_of(LAYOUT, indices) for indices in PLACEMENT]
        self.syncers = [self._syncer(at) for at in range(2)]
        self.parameters = {name: torch.full(shape, float("nan")) for name, shape in LAYOUT.parameters}
        self.events = Events()
        self.steps = 0
        for syncer in self.syncers:
            syncer.start()

    def _agreed(self, at: int) -> Agreement:
        return Agreement(PROTOCOL, RUN, 1, self.parts[at].fingerprint, {**SHARED, "cluster.syncer.index": str(at)})

    def _syncer(self, at: int) -> Syncer:
        plan = RunPlan(
            self._agreed(at),
            self.parts[at],
            "shared",
            OuterOptions(**{**NO_WAIT, "num_fragments": 1, "quorum": self.quorum}),
            OuterRule(OuterOptimizerOptions()),
            HealthOptions(policy="admit"),
        )
        options = SyncerOptions(folder=str(self.folder / f"syncer-{at}"), heartbeat_s=0.2, linger_s=2.0)
        network = ServerOptions(run_id=RUN, address="127.0.0.1:0")
        zero = [version_zero()[index] for index in PLACEMENT[at]]
        return Syncer(options, plan, lambda: zero, network, SecurityOptions(), Events().emit)

    def site(self, resumed: Resumed | None = None, name: str = "a") -> Agents:
        self.clients = [DirectClient(syncer, name) for syncer in self.syncers]
        whole, voice = LearnerOptions(num_fragments=2, inner_steps=4), OneVoice(PLACEMENT, self.events.emit)
        orders, model = Orders(SiteGroup()), held(self.parameters)
        times = {"join_timeout_s": 5.0, "lock_step_timeout_s": 5.0, "finish_timeout_s": 5.0, "meter_every_s": 0.1}
        agents = []
        for at, client in enumerate(self.clients):
            options = AgentOptions(folder=str(self.folder / name / str(at)), **times)
            offsets = (whole.due_at[PLACEMENT[at][0]],)
            rules = LearnerOptions(num_fragments=1, inner_steps=4, offsets=offsets, lock_step=self.lock_step)
            part, agreed, back = self.parts[at], self._agreed(at), part_restored(resumed, at, 2)
            said, ordered = voice.of(at), orders.of(at)
            agents.append(Agent(options, rules, part, model, agreed, client, said, ordered, back))
        return Agents(agents, voice, orders, 5.0)

    def begun(self) -> Agents:
        """The site, with a version of each fragment."""
        agents = self.site()
        agents.start()
        for fragment in range(2):
            self.train_until(agents, fragment, 1)
        return agents

    def train(self, agents: Agents, steps: int) -> None:
        for _ in range(steps):
            self.steps += 1
            for values in self.parameters.values():
                values.add_(0.01)
            threading.Event().wait(0.002)
            assert not agents.after_step(info_of(self.steps)).stop

    def adopted(self, fragment: int) -> int:
        return sum(event["fragment"] == fragment for event in self.events.of("adopted"))

    def train_until(self, agents: Agents, fragment: int, more: int) -> None:
        """Train until it has adopted so many more versions."""
        count = self.adopted(fragment) + more
        for _ in range(2000):
            if self.adopted(fragment) >= count:
                return
            self.train(agents, 1)
        raise AssertionError(f"not {count} of fragment {fragment} adopted: {self.events.all[-5:]}")

    def version(self, at: int) -> int:
        return int(self.syncers[at].status()["fragments"][0]["version"])

    def notes(self) -> list[str]:
        return [event["note"] for event in self.events.of("note")]


@pytest.fixture
def two(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[TwoSyncers]:
    found = TwoSyncers(tmp_path, **getattr(request, "param", {}))
    yield found
    for syncer in found.syncers:
        syncer.stop(0.1)


def test_one_syncer_away_costs_the_others_fragments_nothing(two: TwoSyncers) -> None:
    agents = two.begun()
    two.clients[0].down.set()
    before = two.version(0)
    two.train_until(agents, 0, 4)
    assert two.version(0) <= before + 2, "what had arrived before"
    two.clients[0].down.clear()
    two.train_until(agents, 1, 2)
    finished = agents.finish()
    assert finished.ledger["merged"] == two.steps * TOKENS, "the one that was away has everything"
    assert finished.ledger["unsent"] == 0
    (done,) = two.events.of("site_done")
    assert done["ledger"] == {f"tokens_{name}": value for name, value in finished.ledger.items()}
    meter = two.events.of("meter")[-1]
    assert meter["inner_steps"] == two.steps
    assert meter["bytes_up"] == sum(client.traffic[0] for client in two.clients)


@pytest.mark.parametrize("two", [{"quorum": "all", "lock_step": True}], indirect=True)
def test_in_lock_step_a_site_that_comes_later_exchanges_what_the_others_do(two: TwoSyncers) -> None:
    """Its steps are others than theirs, and each site once waited for the other at another syncer."""
    early = two.site()
    early.start()
    for index, zero in enumerate(version_zero()):
        assert torch.equal(gather(LAYOUT.fragments[index], two.parameters), zero), "fragments found their place"
    two.train(early, 6)
    late = two.site(name="b")
    late.start()
    assert [two.version(at) for at in (1, 0)] == [2, 1], "the second fragment is next"
    rest = threading.Thread(target=two.train, args=(early, 8))
    rest.start()
    for step in range(1, 11):
        assert not late.after_step(info_of(step)).stop
    rest.join(10.0)
    assert [two.version(at) for at in (1, 0)] == [4, 3]
    early.close()
    late.close()


def test_a_site_that_comes_back_trains_on_without_the_one_that_is_away(
    two: TwoSyncers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco.learner.several_syncers.AWAY_S", 0.1)
    agents = two.begun()
    saved = Resumed(two.steps, cloned(agents.state()[0]), agents.state()[1])
    two.train(agents, 8)
    agents.close()
    read = two.steps * TOKENS
    again = two.site(saved)
    two.clients[0].down.set()
    assert again.start() > 0
    assert "trains_on_without" in two.notes()
    two.train(again, 6)
    two.clients[0].down.clear()
    eventually(lambda: all(agent.has_joined for agent in again._agents), "both have taken it in")
    two.train_until(again, 1, 1)
    ledger = again.finish().ledger
    assert ledger["processed"] == two.steps * TOKENS
    # A step between the join and the boundary at which the earlier process' later work is taken is thrown away.
    assert ledger["merged"] + ledger["lost"] + ledger["overwritten"] == ledger["processed"]
    assert ledger["lost"] <= read


def test_a_site_that_is_closed_while_it_comes_back_does_not_train_on(
    two: TwoSyncers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It once went on without the syncer that it was waiting for, as an agent whose threads end at once."""
    monkeypatch.setattr("diloco.learner.several_syncers.AWAY_S", 60.0)
    agents = two.begun()
    saved = Resumed(two.steps, *agents.state())
    agents.close()
    again = two.site(saved)
    two.clients[0].down.set()
    closing = threading.Timer(0.3, again.close)
    closing.start()
    with pytest.raises(JoinFailed, match="the site is stopping"):
        again.start()
    closing.join(10.0)
    assert "trains_on_without" not in two.notes()


@pytest.mark.parametrize("two", [{"quorum": "all"}], indirect=True)
def test_a_new_site_that_does_not_reach_them_all_holds_nothing_back_when_it_gives_up(two: TwoSyncers) -> None:
    """The syncer that had taken it in once waited for it where all sites count, until it counted as silent."""
    early = two.begun()
    late = two.site(name="b")
    two.clients[1].down.set()
    late._agents[1]._options.join_timeout_s = 0.1
    with pytest.raises(JoinFailed):
        late.start()
    two.train_until(early, PLACEMENT[0][0], 3)
    early.close()


# --- Several agents say what one site says ---------------------------------------------------------------------------

METER = {"bytes_up": 5, "bytes_down": 7, "in_flight": 1, "adopt_s": 0.5, "incarnation": 1, "staleness": 0, "link": 9}


def test_fragments_are_those_of_the_whole_model_and_a_site_is_done_once() -> None:
    events = Events()
    voice = OneVoice([[0, 2], [1, 3]], events.emit)
    voice.of(1)("adopted", {"fragment": 1, "version": 4})
    voice.of(0)("joined", {"versions": [7, 8]})
    voice.of(1)("note", {"note": "x", "fragment": None})
    voice.of(0)("site_done", {"ledger": {}})
    assert events.all == [
        {"what": "adopted", "fragment": 3, "version": 4, "of_syncer": 1},
        {"what": "joined", "versions": [7, 8], "fragments": [0, 2], "of_syncer": 0},
        {"what": "note", "note": "x", "fragment": None, "of_syncer": 1},
    ]
    assert in_whole({"fragment": -1}, [4]) == {"fragment": -1}


def test_a_sites_meter_is_one_and_adds_up_what_its_agents_sent() -> None:
    events = Events()
    voice = OneVoice([[0], [1]], events.emit)
    voice.meter()
    assert not events.all, "nothing was measured yet"
    voice.spent.step(1_000_000, 10, 2.0)
    voice.spent.stalled(2_000_000, 0)
    for syncer, incarnation in ((0, 1), (1, 3), (0, 1)):
        voice.of(syncer)("meter", {**METER, "incarnation": incarnation, "stall_s": 9.0})
    assert len(events.of("meter")) == 2, "as often as one of them has one"
    told = events.of("meter")[-1]
    assert (told["bytes_up"], told["adopt_s"], told["incarnation"], told["inner_steps"]) == (10, 1.0, 3, 1)
    assert told["stall_s"] == 0.002, "the loop's own clock counts, not the agents'"
