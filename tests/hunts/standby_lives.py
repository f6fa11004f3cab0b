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
import signal
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from diloco.durable import Step
from diloco.learner.agent import Finished
from diloco.syncer.lease import REMEMBERED
from diloco.wire.client import AdminClient
from tests.loopback.audit import audit, one_run
from tests.loopback.cluster import Process, free_port
from tests.loopback.toy import Toy

BOUND_S = 120.0
PATIENCE_S = 12.0
"""If a step does not occur for this long, SIGKILL comes from outside instead."""
SITES = ("a", "b")
STEP_S = 0.02
DEATHS = 8
"""Kills of the standby before the syncer's."""
COPIES, FOLLOWS, LEADS = "copies", "follows", "leads"


@dataclass(frozen=True)
class Death:
    """The place of a kill: one of the first ``passages`` of a step, while the standby ``does`` something."""

    does: str
    passages: int


STANDBY: Mapping[Step, Death] = {
    Step.FOLDER: Death(FOLLOWS, 12),
    Step.CARD: Death(COPIES, 8),
    Step.STANDBY_FILE: Death(COPIES, 64),
    Step.SNAPSHOT_RENAME: Death(COPIES, 2),
    Step.SNAPSHOT_FOLDER: Death(COPIES, 2),
    Step.SPOOL_DROP: Death(FOLLOWS, 4),
    Step.JOURNAL_BEGIN: Death(COPIES, 8),
    Step.JOURNAL_WRITE: Death(FOLLOWS, 24),
    Step.JOURNAL_SYNC: Death(FOLLOWS, 24),
    Step.JOURNAL_MARK: Death(FOLLOWS, 24),
    Step.JOURNAL_END: Death(FOLLOWS, 24),
    Step.JOURNAL_PRUNE: Death(FOLLOWS, 4),
    Step.SNAPSHOT_BEGIN: Death(FOLLOWS, 4),
    Step.SNAPSHOT_FILE: Death(FOLLOWS, 48),
    Step.SNAPSHOT_PRUNE: Death(FOLLOWS, 4),
    Step.LEASE_REMEMBER: Death(LEADS, 8),
    Step.LEASE_WRITE: Death(LEADS, 12),
    Step.MERGE: Death(LEADS, 4),
    Step.PUBLISH: Death(LEADS, 4),
}


class StandbyLives:
    """One run from its first process to its audit."""

    def __init__(self, folder: Path, seed: int, killed: Counter[str]) -> None:
        self.folder, self.killed, self.kills = folder, killed, 0
        self.dice = random.Random(f"standby/{seed}")
        folder.mkdir(parents=True, exist_ok=True)
        self.toy = Toy(
            folder=str(folder),
            codec="int8",
            inner_steps=4,
            seed=11,
            outer={"num_fragments": 2, "grace": "fixed", "grace_ns": 5_000_000},
            replication={"mode": "sync", "timeout_s": 3.0, "alive_s": 0.2},
            lease=str(folder / "lease.json"),
            lease_ttl_s=2.0,
        )
        self.ports = free_port(), free_port()
        self.lives: list[Process] = []

    def run(self) -> int:
        """Make the run; return how many updates were accepted."""
        with ExitStack() as alive:
            first = alive.enter_context(Process("syncer", self.toy, data="node-0", port=self.ports[0]))
            self._said(first, "listening")
            sites = {site: alive.enter_context(self._site(site)) for site in SITES}
            for _ in range(DEATHS):
                self._dies(self._wanted(COPIES, FOLLOWS), alive)
            step = self._wanted(LEADS)
            standby = self._standby(alive, (str(step), self.dice.randint(1, STANDBY[step].passages)))
            self._becomes_heir()
            first.kill()
            self._ends(standby, step)
            last = self._standby(alive, None)
            self._said(last, "published", 3)
            with AdminClient(self._address(1)) as operator:
                operator.drain()
            done = {site: self._finished(process) for site, process in sites.items()}
            assert last.wait(BOUND_S) == 0, last.errors
        whole = one_run(self.folder, ["node-0", "node-1"])
        logs = {site: [process.log] for site, process in sites.items()}
        told = audit(replace(self.toy, folder=str(whole)), [first.log, *(life.log for life in self.lives)], logs, done)
        epochs = [event["epoch"] for life in (first, *self.lives) for event in life.log.of("syncer_started")]
        assert epochs == sorted(set(epochs)), f"epochs are {epochs}"
        return len(told.accepted)

    # --- the standby ---------------------------------------------------------------------------------------------

    def _wanted(self, *what: str) -> Step:
        """Return the step of these activities with the fewest kills so far."""
        steps = [step for step, death in STANDBY.items() if death.does in what]
        self.dice.shuffle(steps)
        return min(steps, key=lambda step: self.killed[f"standby: {step}"])

    def _dies(self, step: Step, alive: ExitStack) -> None:
        if STANDBY[step].does == COPIES:  # An empty folder makes it copy everything again.
            for name in ("node-1", "archive-node-1"):
                shutil.rmtree(self.folder / name, ignore_errors=True)
        process = self._standby(alive, (str(step), self.dice.randint(1, STANDBY[step].passages)))
        self._ends(process, step)

    def _standby(self, alive: ExitStack, death: tuple[str, int] | None) -> Process:
        mine: dict[str, object] = {"data": "node-1", "port": self.ports[1], "primary": self._address(0)}
        process = Process("standby", self.toy, death, **mine)
        alive.callback(process.__exit__)
        self.lives.append(process)
        return process

    def _ends(self, process: Process, step: Step) -> None:
        """Wait until the process is killed at its step; kill it from outside if it does not reach that."""
        died_at = f"standby: {step}"
        if process.wait(PATIENCE_S) is None:
            died_at = "standby: instant"
            process.kill()
        assert process.wait(BOUND_S) == -signal.SIGKILL, f"it ended with {process.wait(0)}: {process.errors}"
        self.killed[died_at] += 1
        self.kills += 1

    def _becomes_heir(self) -> None:
        """Wait until the lease names the running standby, or that has been killed already."""
        lease, until = self.toy.made_lease(), time.monotonic() + BOUND_S
        assert lease is not None
        while self.lives[-1].wait(0.02) is None:
            (standing, _), known = lease.read(), self.folder / "node-1" / REMEMBERED
            if standing is not None and known.exists() and standing.heir == json.loads(known.read_bytes())["name"]:
                return
            assert time.monotonic() < until, f"the standby does not become the heir: {standing}"

    # --- the others ----------------------------------------------------------------------------------------------

    def _address(self, number: int) -> str:
        return f"127.0.0.1:{self.ports[number]}"

    def _site(self, site: str) -> Process:
        both = ",".join(self._address(number) for number in (0, 1))
        return Process("site", self.toy, site=site, address=both, step_s=STEP_S * (1.0 if site == "a" else 1.6))

    def _said(self, process: Process, what: str, count: int = 1) -> None:
        until = time.monotonic() + BOUND_S
        while len(process.log.of(what)) < count:
            assert process.wait(0.01) is None, f"it ended before {what}: {process.errors}"
            assert time.monotonic() < until, f"no {what} in {BOUND_S} s: {process.log.events[-5:]}"

    def _finished(self, process: Process) -> Finished:
        assert process.wait(BOUND_S) == 0, process.errors
        (event,) = process.log.of("finished")
        assert event["ending"] == "drained", event
        return Finished(event["ending"], str(event["why"]), event["ledger"])  # type: ignore[arg-type]
