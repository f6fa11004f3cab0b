"""Kill a standby while it copies, while it follows, and while it takes over.

Real processes over real gRPC, with ``replication=sync`` and a lease in a file.  While the syncer runs, its standby is
killed and restarted, with its own folder or an empty one.  Then the syncer is killed; the standby, its heir, is killed
once more while it takes over, takes over after a restart, and ends the run.  An audit over both journals checks that
nothing acknowledged is lost or doubled, and that epochs and versions only rise.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from diloco.durable import Step
from diloco.syncer.lease import REMEMBERED
from tests.hunts.lives import BOUND_S, Nodes, least
from tests.loopback.cluster import Process

STEP_S = {"a": 0.02, "b": 0.032}
DEATHS = 8
"""Kills of the standby before the syncer's."""
COPIES, FOLLOWS, LEADS = "copies", "follows", "leads"
STANDBY: Mapping[Step, tuple[str, int]] = {
    Step.FOLDER: (FOLLOWS, 12),
    Step.CARD: (COPIES, 8),
    Step.STANDBY_FILE: (COPIES, 64),
    Step.SNAPSHOT_RENAME: (COPIES, 2),
    Step.SNAPSHOT_FOLDER: (COPIES, 2),
    Step.SPOOL_DROP: (FOLLOWS, 4),
    Step.JOURNAL_BEGIN: (COPIES, 8),
    Step.JOURNAL_WRITE: (FOLLOWS, 24),
    Step.JOURNAL_SYNC: (FOLLOWS, 24),
    Step.JOURNAL_MARK: (FOLLOWS, 24),
    Step.JOURNAL_END: (FOLLOWS, 24),
    Step.JOURNAL_PRUNE: (FOLLOWS, 4),
    Step.SNAPSHOT_BEGIN: (FOLLOWS, 4),
    Step.SNAPSHOT_FILE: (FOLLOWS, 48),
    Step.SNAPSHOT_PRUNE: (FOLLOWS, 4),
    Step.LEASE_REMEMBER: (LEADS, 8),
    Step.LEASE_WRITE: (LEADS, 12),
    Step.MERGE: (LEADS, 4),
    Step.PUBLISH: (LEADS, 4),
}
"""For each step, what the standby does when it is killed there, and the number of passages to choose from."""


class StandbyLives:
    """One run from its first process to its audit."""

    def __init__(self, folder: Path, seed: int, killed: Counter[str]) -> None:
        self.killed = killed
        self.dice = random.Random(f"standby/{seed}")
        self.nodes = Nodes(folder, lease=True)
        self.lives: list[Process] = []

    def run(self) -> int:
        """Make the run; return how many updates were accepted."""
        nodes = self.nodes
        with ExitStack() as alive:
            first = alive.enter_context(Process("syncer", nodes.toy, **nodes.home(0)))
            nodes.said(first, "listening")
            sites = {site: alive.enter_context(nodes.site(site, step_s)) for site, step_s in STEP_S.items()}
            for _ in range(DEATHS):
                step = self._wanted(COPIES, FOLLOWS)
                if STANDBY[step][0] == COPIES:  # An empty folder makes it copy everything again.
                    for name in ("node-1", "archive-node-1"):
                        shutil.rmtree(nodes.folder / name, ignore_errors=True)
                self._ends(self._standby(alive, self._death(step)), step)
            step = self._wanted(LEADS)
            standby = self._standby(alive, self._death(step))
            self._becomes_heir(standby)
            first.kill()
            self._ends(standby, step)
            last = self._standby(alive, None)
            nodes.said(last, "published", 3)
            done = nodes.drained(last, 1, sites)
        told, _ = nodes.audited(2, [first, *self.lives], sites, done)
        return len(told.accepted)

    def _wanted(self, *what: str) -> Step:
        """Return the step of these activities with the fewest kills so far."""
        steps = [step for step, (does, _) in STANDBY.items() if does in what]
        return least(steps, self.dice, lambda step: self.killed[f"standby: {step}"])

    def _death(self, step: Step) -> tuple[str, int]:
        return str(step), self.dice.randint(1, STANDBY[step][1])

    def _standby(self, alive: ExitStack, death: tuple[str, int] | None) -> Process:
        process = Process("standby", self.nodes.toy, death, primary=self.nodes.address(0), **self.nodes.home(1))
        self.lives.append(alive.enter_context(process))
        return process

    def _ends(self, process: Process, step: Step) -> None:
        """Wait until the process is killed at its step, or from outside."""
        self.killed[f"standby: {self.nodes.dies(process, str(step))}"] += 1

    def _becomes_heir(self, standby: Process) -> None:
        """Wait until the lease names the running standby, or that has been killed already."""
        lease, until = self.nodes.toy.made_lease(), time.monotonic() + BOUND_S
        assert lease is not None
        while standby.wait(0.02) is None:
            (standing, _), known = lease.read(), self.nodes.folder / "node-1" / REMEMBERED
            if standing is not None and known.exists() and standing.heir == json.loads(known.read_bytes())["name"]:
                return
            assert time.monotonic() < until, f"the standby does not become the heir: {standing}"
