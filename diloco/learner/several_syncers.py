"""A site of a run that has several syncers: one agent for each, behind one object for the training loop.

Each agent is complete, with its own client, outbox, odometer and machine, for the fragments of its syncer.  Nothing is
atomic across fragments, so the agents are independent: one that cannot reach its syncer keeps training as an offline
site does, while the others push and adopt.  This module decides what all agents of the site must share:

- the data cursor is the furthest that any syncer has accepted;
- in lock-step, fragments are exchanged in one order, that of the whole model, whichever syncer holds them;
- progress is the furthest that any syncer reports, so that a syncer that is away does not hold back the schedule;
- training ends when every syncer has reported that the run is finished, or as soon as one is drained, the site is asked
  to leave, or a part has failed (a site evicted at one syncer cannot usefully train the rest of the model): then the
  other parts leave in order.  Tokens trained after the end of one part count as unsent there;
- a syncer that ended while no process of the site ran cannot report that.  Its report to an earlier process counts,
  unless another syncer with the same report continues now, because then the run got more tokens.  Without such a
  report, once one part of the run is finished, the site waits at most ``join_timeout_s`` for the others;
- the ledger is the mean over all fragments, as with one syncer;
- a site that resumes from a checkpoint starts to train when it has joined one syncer; a new site must join them all.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from diloco.inner.checkpoint import CheckpointError, Prefixed
from diloco.inner.trainer import Verdict
from diloco.learner.agent import Finished, Meter, site_done
from diloco.learner.transfer import LOOK_S, JoinFailed
from diloco.sync.events import Ending, TurnElsewhere
from diloco.sync.progress import combined

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from diloco.inner.trainer import Log, Resumed, StepInfo
    from diloco.learner.agent import Agent
    from diloco.learner.ranks import Orders
    from diloco.sync.progress import Ledger

AWAY_S = 5.0
"""How long a site that resumes from a checkpoint waits for each syncer before it trains without it."""


class Agents:
    """Rank 0 of a site with several syncers; contains an ``Agent`` for each."""

    def __init__(self, agents: Sequence[Agent], voice: OneVoice, orders: Orders, join_timeout_s: float) -> None:
        """``agents`` log through ``voice``."""
        self._agents, self._voice, self._orders = tuple(agents), voice, orders
        self._join_timeout_s = join_timeout_s
        self._leave_asked = False  # A signal handler sets it, so a plain store.
        self._given_up_at = 0.0  # When the site ends without the syncers that never answered; 0: no end is due.
        self._why = ""
        self._finished_before = tuple(agent for agent in self._agents if agent.known.ending is Ending.FINISHED)
        """The agents whose syncers had reported to an earlier process that the run is finished."""

    def start(self) -> int:
        """Join all syncers, or those that answer; return the data cursor to resume from.

        ``JoinFailed`` when one refuses, when a new site does not reach all, or when none answers: then all agents are
        closed, after those that had joined have left again.
        """
        until, cursors = time.monotonic() + self._join_timeout_s, list[int]()
        try:
            for syncer, agent in enumerate(self._agents):
                try:
                    cursors.append(agent.start(AWAY_S))
                except JoinFailed as error:
                    raise JoinFailed(error.kind, f"{error.text} (syncer {syncer})") from error
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

    def after_step(self, info: StepInfo) -> Verdict:
        """Account for an inner step at every agent (each seals and adopts what is due); return whether to stop."""
        began_ns = time.perf_counter_ns()
        if self._leave_asked:
            for agent in self._agents:
                agent.leave()  # All at this boundary, so that all have sent the same steps.
        for agent in self._agents:
            agent.after_step(info)
            self._tell_turns()
        if not self._agents[0].is_redone(info):
            self._voice.spent.step(info.step_ns, info.tokens, info.loss)
        self._voice.spent.stalled(time.perf_counter_ns() - began_ns, 0)
        if info.passes:
            return Verdict()
        self._why = why = self._why_to_stop()
        self._orders.go_on(stop=bool(why))
        return Verdict(bool(why), why)

    def _tell_turns(self) -> None:
        """In lock-step, tell each agent the next exchange among those of the other agents.

        Otherwise a site could wait at one syncer for a second site that waits for the first at another syncer.
        """
        turns = [agent.next_turn() for agent in self._agents]
        if any(turns):
            for at, agent in enumerate(self._agents):
                others = [turn for other, turn in enumerate(turns) if turn is not None and other != at]
                agent.tell(TurnElsewhere(min(others, default=None)))

    def may_act(self) -> bool:
        """Return whether ``after_step`` may need the other ranks after the step that is about to end."""
        return self._leave_asked or any(agent.may_act() for agent in self._agents) or bool(self._why_to_stop())

    def _why_to_stop(self) -> str:
        stops = [agent.stop for agent in self._agents]
        for syncer, (agent, stop) in enumerate(zip(self._agents, stops, strict=True)):
            if stop is not None and (stop.failed or agent.known.ending is Ending.DRAINED):
                return f"{stop.why} (syncer {syncer})"
        said = [stop.why for stop in stops if stop is not None]
        if any(agent.has_joined and agent.known.ending is None for agent in self._finished_before):
            self._finished_before = ()  # The run continues, with a larger token budget.
        waited = [syncer for syncer, agent in enumerate(self._agents) if not (agent.stop or self._is_over(agent))]
        if not said or any(self._agents[syncer].has_joined for syncer in waited):
            return ""
        self._given_up_at = self._given_up_at or time.monotonic() + self._join_timeout_s
        if waited and time.monotonic() < self._given_up_at:
            return ""
        missed = f", and syncer {waited[0]} did not answer for {self._join_timeout_s:g} s" if waited else ""
        return said[-1] + missed

    def progress(self) -> float:
        """Return the run's progress from 0 to 1, as reported by the syncer that is furthest."""
        return max(agent.progress() for agent in self._agents)

    def units(self, place: int, count: int) -> list[tuple[int, int]]:
        """Return the data units that the site draws, which the first syncer leases."""
        return self._agents[0].units(place, count)

    def state(self) -> tuple[dict[str, Tensor], dict[str, object]]:
        """Return the checkpoint tensors and metadata of all agents, by the number of their syncer."""
        states = [agent.state() for agent in self._agents]
        named = {f"{at}.{name}": value for at, (tensors, _) in enumerate(states) for name, value in tensors.items()}
        return named, {"parts": [meta for _, meta in states]}

    def ledgers(self) -> list[Ledger]:
        """Return the token ledger of each fragment."""
        return [ledger for agent in self._agents for ledger in agent.ledgers()]

    def leave_soon(self) -> None:
        """Ask the site to stop, at the user's request.  May be called from a signal handler."""
        self._leave_asked = True

    def finish(self, *, final: bool = False) -> Finished:
        """After the loop, run ``Agent.finish`` of all agents in parallel.  Ends all threads."""
        self._voice.spent.end()
        with ThreadPoolExecutor(len(self._agents)) as pool:
            ended = list(pool.map(lambda agent: self._finished(agent, final=final), self._agents))
        self._orders.go_on(stop=True)
        self._voice.meter()
        worst_first = ("failed", "drained", "left", "finished")
        decisive = min(ended, key=lambda each: worst_first.index(each.ending))
        why = self._why if self._why and decisive.ending != "failed" else decisive.why
        is_final = all(each.final for each in ended)
        return site_done(self._voice.emit, decisive.ending, why, combined(self.ledgers()), final=is_final)

    def _is_over(self, agent: Agent) -> bool:
        """Return whether the agent's syncer had finished before, and has not answered this process."""
        return agent in self._finished_before and not agent.has_joined

    def _finished(self, agent: Agent, *, final: bool) -> Finished:
        """Finish one agent.  If its syncer had finished before, it is only closed.

        One that ends "finished" without having joined counts as "left".
        """
        if self._is_over(agent):
            agent.close()
            return Finished(Ending.FINISHED.value, "the run is finished", {})
        ended = agent.finish(final=final)
        return replace(ended, ending="left") if ended.ending == "finished" and not agent.has_joined else ended

    def close(self) -> None:
        """End the threads."""
        for agent in self._agents:
            agent.close()


def part_restored(resumed: Resumed | None, syncer: int, syncers: int) -> Resumed | None:
    """Return the part of ``Agents.state`` in a checkpoint for the agent of ``syncer``.

    ``CheckpointError`` when the checkpoint is of a run with another number of syncers.
    """
    if resumed is None:
        return None
    parts = resumed.meta.get("parts")
    if not isinstance(parts, list) or len(parts) != syncers:
        had = f"{len(parts)} syncers" if isinstance(parts, list) else "one syncer"
        raise CheckpointError(f"the checkpoint is of a run with {had}, and this one has {syncers}")
    tensors = Prefixed(resumed.tensors, f"{syncer}.", resumed.tensors.__getitem__)
    return replace(resumed, tensors=tensors, meta=parts[syncer])


SUMMED = ("bytes_up", "bytes_down", "in_flight", "adopt_s")
LARGEST = ("incarnation", "staleness")
"""Meter fields that are summed, or whose largest counts; the others are the site's own or the first agent's."""


class OneVoice:
    """Combines the agents' log events into one stream of the site.  ``emit`` writes an event; ``placement`` lists the
    fragments of each syncer."""

    def __init__(self, placement: Sequence[Sequence[int]], emit: Log) -> None:
        self._placement, self.emit = placement, emit
        self.spent = Meter()
        """Measures the training loop's time, for all agents together."""
        self._lock = threading.Lock()
        self._meters: dict[int, dict[str, Any]] = {}

    def of(self, syncer: int) -> Log:
        """Return the ``emit`` of the agent that talks to ``syncer``."""
        return lambda what, fields: self._take(syncer, what, fields)

    def meter(self) -> None:
        """Log the totals of the site: the sum of the agents' traffic, and the time of the training loop."""
        with self._lock:
            told = [self._meters[syncer] for syncer in sorted(self._meters)]
        if not told:
            return
        summed = {name: sum(each[name] for each in told) for name in SUMMED}
        largest = {name: max(each[name] for each in told) for name in LARGEST}
        self.emit("meter", {**told[0], **asdict(self.spent.read()), **summed, **largest})

    def _take(self, syncer: int, what: str, fields: dict[str, object]) -> None:
        if what == "meter":
            with self._lock:
                self._meters[syncer] = fields
                first = min(self._meters)
            if syncer == first:  # One event for all agents, whenever the first agent emits one.
                self.meter()
        elif what != "site_done":  # ``Agents.finish`` logs it for the whole site.
            self.emit(what, in_whole(fields, self._placement[syncer]) | {"of_syncer": syncer})


def in_whole(fields: Mapping[str, object], fragments: Sequence[int]) -> dict[str, object]:
    """Return an event's fields with fragment numbers of the whole model, from those of a syncer with ``fragments``.

    ``versions`` stay in the syncer's order; an added field ``fragments`` lists the fragments they belong to.
    """
    found = dict(fields)
    if isinstance(here := fields.get("fragment"), int) and 0 <= here < len(fragments):
        found["fragment"] = fragments[here]
    if "versions" in fields:
        found["fragments"] = list(fragments)
    return found
