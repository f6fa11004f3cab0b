"""A site of a run that has several syncers: an agent for each, and the training loop sees one.

Each agent is a whole one, with its own client, outbox, odometer and machine, for the fragments that its syncer holds.
Nothing is atomic across fragments, so the agents need nothing of each other: where one cannot reach its syncer it
trains on as an offline site does, while the others push and adopt.  What must be one for the site is decided here:

- the data cursor is the furthest that any syncer has accepted;
- in lock-step fragments are exchanged in one order, that of the whole model, whichever syncer holds them;
- progress is the furthest that any syncer tells: one that is away does not hold the schedule back;
- training ends when every syncer has said that the run is finished, or as soon as one is drained, the site is asked to
  leave, or a part has failed (evicted at one syncer, a site cannot train the rest of the model to any use): then the
  other parts leave in order.  What is trained after the end of one part is unsent there, and counted so;
- a syncer that ended while no process of the site ran is not there to say so.  Its word to an earlier process counts,
  unless another that had said the same goes on now: then the run was given more tokens.  Without that word, a finished
  part of the run bounds by ``join_timeout_s`` how long the others are waited for;
- the ledger is the mean over all fragments, as with one syncer;
- a site that goes on from a checkpoint begins to train when one syncer has taken it in; a new one needs them all.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from diloco.inner.checkpoint import CheckpointError
from diloco.inner.trainer import Verdict
from diloco.learner.options import Finished, JoinFailed
from diloco.sync.events import Ending
from diloco.sync.progress import combined

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from diloco.inner.trainer import StepInfo
    from diloco.learner.agent import Agent
    from diloco.learner.channel import Orders
    from diloco.learner.meter import OneVoice
    from diloco.sync.progress import Ledger

AWAY_S = 5.0
"""A site that has somewhere to go on from waits so long for each syncer before it trains on without it."""
LOOK_S = 0.1


class Agents:
    """Rank 0 of a site, towards all syncers; ``Agent`` towards one."""

    def __init__(
        self,
        agents: Sequence[Agent],
        voice: OneVoice,
        orders: Orders,
        join_timeout_s: float,
        redo: StepInfo | None = None,
    ) -> None:
        """``agents`` say what they do through ``voice``; ``redo`` is what each of them was given."""
        self._agents, self._voice, self._orders = tuple(agents), voice, orders
        self._join_timeout_s, self._redo = join_timeout_s, redo
        self._meter = voice.spent
        self._leave_asked = False  # Set by a signal handler, so a plain store.
        self._given_up_at = 0.0  # When the site stops to wait for who never answered; 0 while there is nothing to end.
        self._why = ""
        self._finished_before = tuple(agent for agent in self._agents if agent.ending is Ending.FINISHED)
        """Whose syncers had said to an earlier process that the run is finished."""

    def start(self) -> int:
        """Join all syncers, or those that answer; returns the data cursor to go on from.

        ``JoinFailed`` when one refuses, when a new site does not reach all, or none answers: all agents are closed, and
        those that were taken in have said goodbye.
        """
        until = time.monotonic() + self._join_timeout_s
        try:
            cursors = [self._started(syncer) for syncer in range(len(self._agents))]
            while not any(agent.has_joined for agent in self._agents):
                if time.monotonic() >= until:
                    raise JoinFailed("unreachable", "none of the syncers answers")
                time.sleep(LOOK_S)
        except BaseException as error:
            if isinstance(error, JoinFailed):
                for agent in self._agents:
                    agent.withdraw()
            self.close()
            raise
        self._tell_turns()
        self._orders.go_on()
        return max(cursors)

    def _started(self, syncer: int) -> int:
        try:
            return self._agents[syncer].start(AWAY_S)
        except JoinFailed as error:
            raise JoinFailed(error.kind, f"{error.text} (syncer {syncer})") from error

    def after_step(self, info: StepInfo) -> Verdict:
        """The line in the training loop: the step is told to every agent, and each seals and adopts what is due."""
        began_ns = time.perf_counter_ns()
        if self._leave_asked:
            for agent in self._agents:
                agent.leave()  # All at this boundary, so that all have sent the same steps.
        for agent in self._agents:
            agent.after_step(info)
            self._tell_turns()
        if self._redo is None or info.step != self._redo.step:
            self._meter.step(info.step_ns, info.tokens, info.loss)
        self._meter.stalled(time.perf_counter_ns() - began_ns, 0)
        if info.passes:
            return Verdict()
        self._why = why = self._why_to_stop()
        self._orders.go_on(stop=bool(why))
        return Verdict(bool(why), why)

    def _tell_turns(self) -> None:
        """Tell each agent which exchange comes next among those of the others, where it is in lock-step with them.

        Else one site would wait at one syncer for a second one, which waits for the first at another.
        """
        turns = [agent.next_turn() for agent in self._agents]
        if any(turns):
            for at, agent in enumerate(self._agents):
                others = [turn for other, turn in enumerate(turns) if turn is not None and other != at]
                agent.turn_elsewhere(min(others, default=None))

    def may_act(self) -> bool:
        """Whether ``after_step`` may have something to do with the other ranks after the step that is about to end."""
        acts = [agent.may_act() for agent in self._agents]
        return self._leave_asked or any(acts) or bool(self._why_to_stop())

    def _why_to_stop(self) -> str:
        stops = [agent.stop for agent in self._agents]
        for syncer, (agent, stop) in enumerate(zip(self._agents, stops, strict=True)):
            if stop is not None and (stop.failed or agent.ending is Ending.DRAINED):
                return f"{stop.why} (syncer {syncer})"
        said = [stop.why for stop in stops if stop is not None]
        if any(agent.has_joined and agent.ending is None for agent in self._finished_before):
            self._finished_before = ()  # It goes on, with more tokens to merge.
        waited = [syncer for syncer, agent in enumerate(self._agents) if not (agent.stop or self._is_over(agent))]
        if not said or any(self._agents[syncer].has_joined for syncer in waited):
            return ""
        self._given_up_at = self._given_up_at or time.monotonic() + self._join_timeout_s
        if waited and time.monotonic() < self._given_up_at:
            return ""
        missed = f", and syncer {waited[0]} did not answer for {self._join_timeout_s:g} s" if waited else ""
        return said[-1] + missed

    def progress(self) -> float:
        """The run's progress from 0 to 1, as the syncer told that is furthest."""
        return max(agent.progress() for agent in self._agents)

    def units(self, place: int, count: int) -> list[tuple[int, int]]:
        """The units that the site draws: those of the first syncer, which leases them."""
        return self._agents[0].units(place, count)

    def state(self) -> tuple[dict[str, Tensor], dict[str, object]]:
        """What a checkpoint must hold: that of each agent, by the number of its syncer."""
        states = [agent.state() for agent in self._agents]
        named = {f"{at}.{name}": value for at, (tensors, _) in enumerate(states) for name, value in tensors.items()}
        return named, {"parts": [meta for _, meta in states]}

    def ledgers(self) -> list[Ledger]:
        """Where the tokens are, fragment by fragment."""
        return [ledger for agent in self._agents for ledger in agent.ledgers()]

    def leave_soon(self) -> None:
        """The user asked this site to stop.  May be called from a signal handler."""
        self._leave_asked = True

    def finish(self) -> Finished:
        """After the loop: all agents at once send what is unsent and say goodbye; bounded.  Ends all threads."""
        self._meter.end()
        with ThreadPoolExecutor(len(self._agents)) as pool:
            ended = list(pool.map(self._finished, self._agents))
        self._orders.go_on(stop=True)
        self._voice.meter()
        ledger = combined(self.ledgers())
        assert ledger.balanced(), ledger
        found = {field: getattr(ledger, field) for field in ledger.__slots__}
        decisive = _decisive(ended)
        told = {f"tokens_{field}": value for field, value in found.items()}
        why = self._why if self._why and decisive.ending != "failed" else decisive.why
        self._voice.say("site_done", {"ledger": told, "reason": why})
        return Finished(decisive.ending, why, found)

    def _is_over(self, agent: Agent) -> bool:
        """Whether its syncer had finished before, and has not answered this process."""
        return agent in self._finished_before and not agent.has_joined

    def _finished(self, agent: Agent) -> Finished:
        """The end of one part.  What is over has nobody to send to; whom nobody took in cannot say that it is over."""
        if self._is_over(agent):
            agent.close()
            return Finished(Ending.FINISHED.value, "the run is finished", {})
        ended = agent.finish()
        return replace(ended, ending="left") if ended.ending == "finished" and not agent.has_joined else ended

    def close(self) -> None:
        """End the threads."""
        for agent in self._agents:
            agent.close()


def _decisive(ended: Sequence[Finished]) -> Finished:
    """The part that says how the site's whole part ended: the worst one."""
    order = ("failed", "drained", "left", "finished")
    return min(ended, key=lambda each: order.index(each.ending))


def part_restored(
    restored: tuple[Mapping[str, Tensor], Mapping[str, object]] | None, syncer: int, syncers: int
) -> tuple[Mapping[str, Tensor], Mapping[str, object]] | None:
    """What ``Agents.state`` gave a checkpoint, for the agent of ``syncer``; CheckpointError if there were others."""
    if restored is None:
        return None
    tensors, meta = restored
    parts = meta.get("parts")
    if not isinstance(parts, list) or len(parts) != syncers:
        had = f"{len(parts)} syncers" if isinstance(parts, list) else "one syncer"
        raise CheckpointError(f"the checkpoint is of a run with {had}, and this one has {syncers}")
    begin = f"{syncer}."
    return _Under(tensors, begin), parts[syncer]


class _Under(Mapping[str, "Tensor"]):
    """The tensors whose names begin so, without that; each is read when it is asked for."""

    def __init__(self, tensors: Mapping[str, Tensor], begin: str) -> None:
        self._tensors, self._begin = tensors, begin

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._begin + name]

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._begin) for name in self._tensors if name.startswith(self._begin))

    def __len__(self) -> int:
        return sum(1 for _ in self)
