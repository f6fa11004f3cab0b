"""A site of several machines: all ranks are started and ended together, as the first machine says.

torchrun starts the ranks of its own machine only, and starts none of them again.  Its rendezvous for several machines
would not do: c10d numbers machines by address and process, so that rank 0, which keeps the site's place in the run,
could come up on another one after a restart, and each counts restarts for itself; static does not tell a machine that
another's ranks were lost; and neither says for whom it waits.  Here the first machine counts the starts.  A start ends
everywhere when one rank of it is lost anywhere, and the next one begins when every machine is there.
"""

from __future__ import annotations

import json
import math
import time
from multiprocessing import AuthenticationError
from typing import TYPE_CHECKING

from diloco.launch.errors import ConfigError, ExitCode, VerbError
from diloco.launch.machines import NONE, Gone, Line, Machines, Order, Report, reached, rendezvous_of
from diloco.launch.ranks import ending_of_ranks, forget_ending, tell_speaker
from diloco.launch.site_rank import has_ended
from diloco.learner.meeting import NEAR

if TYPE_CHECKING:
    from collections.abc import Callable

    from diloco.launch.ranks import Ranks
    from diloco.launch.run_dir import SiteDir
    from diloco.launch.schema import RunConfig

PAUSE_S = 0.05
KNOCK_EVERY_S = 0.5
RANKS_END_S = 10.0
"""What ranks have to end by themselves when rank 0 has said how it ended, or another machine's are lost."""
DISMISS_S = 2 * RANKS_END_S
FOLDER_S = 30.0
"""How long a shared folder may take to show what another machine has written."""


class First:
    """The machine with rank 0."""

    def __init__(
        self,
        config: RunConfig,
        folder: SiteDir,
        ranks: Ranks,
        asked: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        """``asked`` tells whether somebody wants the site to stop; ``say`` is for people."""
        self._config, self._folder, self._ranks, self._asked, self._say = config, folder, ranks, asked, say
        self._machines = Machines(config, folder)
        self._leaving, self._told = False, 0

    def run(self) -> tuple[ExitCode, str]:
        """How the site ended, which the others are told; VerbError where it failed."""
        with self._machines:
            try:
                code, text = self._run()
            except VerbError as error:
                self._dismiss(Order(code=int(error.code), text=str(error)))
                raise
            finally:
                self._ranks.kill()
            self._dismiss(Order(code=int(code), text=text))
        return code, text

    def _run(self) -> tuple[ExitCode, str]:
        site, start, why = self._config.site, 0, ""
        while True:
            self._gather(why)
            why = self._train(start)
            if has_ended(self._folder):
                return ending_of_ranks(site.id, self._folder, self._ranks)
            if start >= site.rank_restarts:
                often = f"{start + 1} times (site.rank_restarts={site.rank_restarts})"
                raise VerbError(ExitCode.FAILED, f"site {site.id} has lost ranks {often}; at last {why}")
            start += 1

    def _gather(self, why: str) -> None:
        """Wait, for ``site.nodes_wait_s``, until every machine is there and has no ranks any more."""
        site = self._config.site
        until, said = time.monotonic() + site.nodes_wait_s, False
        if why:
            self._say(f"site {site.id}: {why}; all ranks are started again")
        while True:
            self._machines.attend(Order())
            missing = [node for node in range(1, site.nodes) if node not in self._machines.lives]
            reports = self._machines.reports.values()
            if not missing and all(report.running == NONE for report in reports):
                return
            whom = f"machine {', '.join(map(str, missing or range(1, site.nodes)))} of {site.nodes}"
            if self._leaves():
                told = f"site {site.id} stopped while it waited for {whom}; the same command goes on"
                raise VerbError(ExitCode.DRAINED, told)
            if missing and not said:
                self._say(f"site {site.id} waits for {whom}, at most {site.nodes_wait_s:g} s")
                said = True
            if time.monotonic() > until:
                told = f"site {site.id} has waited {site.nodes_wait_s:g} s in vain for {whom} (site.nodes_wait_s)"
                raise VerbError(ExitCode.FAILED, told)
            time.sleep(PAUSE_S)

    def _train(self, start: int) -> str:
        """One start of the ranks, until those of this machine have ended; why, where rank 0 has not said it."""
        from diloco.inner.parallel import OpenStore

        forget_ending(self._folder)
        # Of this start alone: a rank of an earlier one that is not dead yet does not find it.
        store = OpenStore()
        order, lives = Order(start, store.port), dict(self._machines.lives)
        self._ranks.start(0, place_of(self._config, NEAR, order))
        until, why = math.inf, ""
        while (code := self._ranks.code()) is None:
            self._machines.attend(order)
            if self._leaves():
                # Again and again: it may not have written its number yet when the request came.
                self._told = tell_speaker(self._folder, self._told)
            why = why or self._loss(start, lives)
            if until == math.inf and (why or has_ended(self._folder)):
                until = time.monotonic() + RANKS_END_S
            if time.monotonic() > until:
                self._ranks.kill()
            time.sleep(PAUSE_S)
        return why or f"the ranks of machine 0 ended with code {code}, see {self._ranks.log}"

    def _loss(self, start: int, lives: dict[int, int]) -> str:
        """Why this start cannot go on, as far as the other machines tell; empty where it can."""
        for node, life in lives.items():
            if self._machines.lives.get(node) != life:
                return f"machine {node} went away"
            report = self._machines.reports[node]
            if report.ended == start and report.code:
                return f"the ranks of machine {node} ended with code {report.code}, see its torchrun.log"
        return ""

    def _leaves(self) -> bool:
        """Whether somebody has asked the site to stop, at a machine that may be gone by now."""
        asked = self._asked() or any(report.leave for report in self._machines.reports.values())
        self._leaving = self._leaving or asked
        return self._leaving

    def _dismiss(self, order: Order) -> None:
        """Tell the others how the site ended, until they have gone."""
        self._ranks.kill()
        until = time.monotonic() + DISMISS_S
        while time.monotonic() < until:
            self._machines.attend(order)
            if not self._machines.lives:
                return
            time.sleep(PAUSE_S)


class Another:
    """Any other machine: does what the first one says."""

    def __init__(
        self,
        config: RunConfig,
        folder: SiteDir,
        ranks: Ranks,
        asked: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        """As ``First``."""
        self._config, self._folder, self._ranks, self._asked, self._say = config, folder, ranks, asked, say

    def run(self) -> tuple[ExitCode, str]:
        """How the site ended, as the first machine says it; VerbError where it failed, or that machine stays away."""
        site, why = self._config.site, ""
        try:
            while True:
                line = self._reach(why)
                try:
                    end = self._obey(line)
                    break
                except Gone as gone:
                    why = f"machine 0 went away ({gone})"
                finally:
                    self._ranks.kill()
                    line.close()
        finally:
            self._ranks.kill()
        code = ExitCode(end.code)
        if code in (ExitCode.OK, ExitCode.DRAINED):
            return code, end.text
        raise VerbError(code, f"machine {site.node_rank} of site {site.id} ends with machine 0: {end.text}")

    def _reach(self, why: str) -> Line:
        """Wait, for ``site.nodes_wait_s``, for the first machine."""
        site = self._config.site
        whom = f"machine 0 at {site.rendezvous}"
        until, apart = time.monotonic() + site.nodes_wait_s, math.inf
        said, again = False, f"{why}; " if why else ""
        while True:
            try:
                return reached(self._config, self._folder)
            except AuthenticationError:
                apart = min(apart, time.monotonic() + FOLDER_S)
            except OSError:
                apart = math.inf
            if not said:
                self._say(
                    f"site {site.id}: {again}machine {site.node_rank} waits for {whom}, at most {site.nodes_wait_s:g} s"
                )
                said = True
            if self._asked():
                raise VerbError(ExitCode.DRAINED, f"site {site.id} stopped while it waited for {whom}")
            if time.monotonic() > apart:
                told = f"{whom} does not have {self._folder.root} as this machine has it"
                raise ConfigError(
                    f"run.dir is {self._config.run.dir!r}: {told}; the machines of a site share one folder"
                )
            if time.monotonic() > until:
                told = f"in vain for {whom} (site.nodes_wait_s; {self._folder.meeting} is where it says its port)"
                raise VerbError(ExitCode.FAILED, f"site {site.id} has waited {site.nodes_wait_s:g} s {told}")
            time.sleep(KNOCK_EVERY_S)

    def _obey(self, line: Line) -> Order:
        """Do what is said until the end is; raises Gone."""
        order, report, until = Order(), Report(), math.inf
        while True:
            for words in line.heard():
                if "refused" in words:
                    raise ConfigError(str(words["refused"]))
                order = Order(**words)
            if order.code != NONE:
                until = min(until, time.monotonic() + RANKS_END_S)
                if report.running == NONE or self._ranks.code() is not None or time.monotonic() > until:
                    return order
            elif report.running not in (NONE, order.start):
                self._ranks.kill()
            if report.running != NONE and (code := self._ranks.code()) is not None:
                report = Report(ended=report.running, code=code)
            if order.code == NONE and report.running == NONE and order.start not in (NONE, report.ended):
                host, _ = rendezvous_of(self._config)
                self._ranks.start(0, place_of(self._config, host, order))
                report = Report(running=order.start)
            line.say({"running": report.running, "ended": report.ended, "code": report.code, "leave": self._asked()})
            time.sleep(PAUSE_S)


def place_of(config: RunConfig, host: str, order: Order) -> str:
    """What torchrun does not know about the ranks of this machine, for ``site_rank``."""
    site = config.site
    first, world = site.node_rank * site.nproc, site.nodes * site.nproc
    return json.dumps({"first": first, "world": world, "host": host, "port": order.port, "start": order.start})
