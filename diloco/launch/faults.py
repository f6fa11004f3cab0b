"""Inject a scenario's faults into the child processes and links of ``diloco up``, and log them as events."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from diloco.launch.scenario import LINK, Play, Step
from diloco.launch.up_syncers import site_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from diloco.launch.supervise import Child
    from diloco.wan.process import RelayProcess


class Faults:
    """``start`` restarts a child; ``links`` are the options of each link without faults."""

    def __init__(
        self,
        children: Mapping[str, Child],
        relay: RelayProcess | None,
        links: Mapping[str, Mapping[str, float]],
        start: Callable[[Child], None],
        emit: Callable[[str, dict[str, object]], None],
    ) -> None:
        self._children, self._relay, self._links = children, relay, links
        self._start, self._emit = start, emit

    def play(self, plays: Iterable[Play]) -> None:
        """Begin and end faults.  An impossible one (its target has ended) is skipped, with an event that says why."""
        for play in plays:
            step = play.step
            act = self._heal if play.heals else self._begin
            why = act(step)
            facts: dict[str, object] = {"fault": step.do, "target": step.target}
            if why:
                self._emit("skipped", {**facts, "why": why})
            elif play.heals:
                self._emit("healed", facts)
            else:
                self._emit("fault", {**facts, "seconds": step.for_s})
                self._after(step)

    def _begin(self, step: Step) -> str:
        """Begin the fault; return "" or the reason why that is impossible."""
        if step.target.startswith(LINK):
            return self._begin_on_link(step)
        child = self._children[step.target]
        if step.do == "start":
            return "it runs already" if child.running else ""
        if not child.running:
            return "it does not run"
        if step.do == "kill":
            # The supervisor must not take this end for an accident and restart the child too early.
            child.wanted = False
            child.signal(signal.SIGKILL)
        elif step.do == "leave":
            child.wanted = False
            child.signal(signal.SIGTERM)
        else:
            child.signal(signal.SIGSTOP)
        return ""

    def _after(self, step: Step) -> None:
        if step.do == "start":
            self._start(self._children[step.target])

    def _heal(self, step: Step) -> str:
        if step.target.startswith(LINK):
            return self._heal_link(step)
        child = self._children[step.target]
        if step.do == "stop":
            child.signal(signal.SIGCONT)
            return "" if child.running else "it has ended"
        if child.running and not child.ended():
            return "it runs already"
        self._start(child)
        return ""

    def _begin_on_link(self, step: Step) -> str:
        if self._relay is None:
            return "network.emulate is false: there is no link to break"
        for link in self._links_of(step.site):
            if step.do == "partition":
                self._relay.partition(link)
            elif step.do == "half_open":
                self._relay.partition(link, step.direction)
            elif step.do == "reset":
                self._relay.reset(link)
            else:
                try:
                    self._relay.set(link, **step.changes)
                except ValueError as error:
                    return str(error)
        return ""

    def _links_of(self, site: str) -> list[str]:
        """Return the site's links to all syncers."""
        return [link for link in self._links if site_of(link) == site] or [site]

    def _heal_link(self, step: Step) -> str:
        if self._relay is None:
            return "there is no link"
        for link in self._links_of(step.site):
            if step.do == "set":
                self._relay.set(link, **{name: self._links[link][name] for name in step.changes})
            else:
                self._relay.heal(link)
        return ""
