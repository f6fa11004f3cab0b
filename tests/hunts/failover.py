"""``make failover N=10``: kill -9 the syncer, again and again in one run; its standby takes over each time.

Real processes over real gRPC, with ``replication=sync``.  The syncer is killed at a random passage of a durable step:
every second time in the middle of a merge, or each time with ``--at merge``.  In one run the operator's verb promotes
the standby; in the next no operator acts, and as the heir it takes the lease (a file), which expires after the kill.
The sites know both addresses and find the new syncer themselves.  A new standby with an empty folder then follows it at
the free address; every second one is first killed in the middle of its first copy.

A new version must be published within ``WITHIN_S`` after the verb, or within ``WITHIN_LEASES`` leases after the kill,
and the sites' training must not have stopped for it.  After the run an audit reads all journals of its syncers: nothing
acknowledged is lost or doubled, no version has two contents, and epochs and versions only rise.
"""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from benchmarks.record import percentile
from diloco.durable import Step
from diloco.wire.client import AdminClient
from tests.hunts.lives import BOUND_S, Nodes, stall_share
from tests.hunts.reporting import Counts, Hunt, Namespace, hunting
from tests.loopback.audit import History
from tests.loopback.cluster import Process

STEP_S = {"a": 0.08, "b": 0.128}
WITHIN_S = 2.0
"""The longest time from the verb to a new version."""
WITHIN_LEASES = 3.0
"""The longest time from the kill to a new version without an operator, in leases."""
LEASE_TTL_S = 2.0
BY = ("verb", "lease")
STALL_SHARE_MAX = 0.02
SPREAD = {"p50": 50, "p95": 95, "max": 100}
EACH = 5
"""The most kills in one run."""
KILLED_COPYING = 0.5
"""The share of standbys that are killed during their first copy."""
PASSAGES_COPYING = 24
"""Fewer than a whole copy has."""
STEPS = (
    Step.SPOOL_WRITE,
    Step.SPOOL_SYNC,
    Step.SPOOL_RENAME,
    Step.JOURNAL_WRITE,
    Step.JOURNAL_SYNC,
    Step.JOURNAL_MARK,
    Step.ACK,
    Step.FATE,
    Step.PUBLISH,
    Step.SNAPSHOT_FILE,
    Step.SNAPSHOT_PRUNE,
    Step.JOURNAL_BEGIN,
    Step.JOURNAL_PRUNE,
)


class Failovers:
    """One run from its first process to its audit."""

    def __init__(self, folder: Path, seed: int, num: int, by: str, at: str, killed: Counter[str]) -> None:
        self.num, self.by, self.at, self.killed = num, by, at, killed
        self.dice = random.Random(f"failover/{seed}")
        self.nodes = Nodes(folder, lease=by == "lease", ttl_s=LEASE_TTL_S)
        self.lives: list[Process] = []
        self.deaths: list[tuple[str, int]] = []
        self.took: list[dict[str, float]] = []
        """The times of each failover, in seconds after the verb or, by the lease, after the kill."""
        self.stalls: list[float] = []
        self.longest_s = 0.0
        """The longest that a site's training waited between two steps."""
        self.died_copying = 0

    def run(self) -> History:
        with ExitStack() as alive:
            self._node(alive)
            self._node(alive)
            sites = {site: alive.enter_context(self.nodes.site(site, step_s)) for site, step_s in STEP_S.items()}
            self.lives[0].log.wait_for("published", 2, BOUND_S)
            for number in range(self.num):
                self._fail_over(number, sites, alive)
            done = self.nodes.drained(self.lives[self.num], self.num, sites)
        for process in sites.values():
            self.stalls.append(stall_share(process.log))
            self.longest_s = max(self.longest_s, float(str(process.log.of("meter")[-1]["after_step_s_max"])))
        told, epochs = self.nodes.audited(self.num + 1, self.lives, sites, done)
        assert len(epochs) == self.num + 1, f"epochs are {epochs}"
        return told

    def _node(self, alive: ExitStack) -> None:
        """Start the next process: the first one leads, and each later one follows the one before."""
        number = len(self.lives)
        mine = self.nodes.home(number)
        if number:
            mine["primary"] = self.nodes.address(number - 1)
        merging = self.at == "merge" or number % 2 == 0
        step = Step.MERGE if merging else self.dice.choice(STEPS)
        self.deaths.append((str(step), self.dice.randint(1, 2 if merging else 6)))
        if number and self.dice.random() < KILLED_COPYING:
            # The same command later resumes in its folder.
            death = (str(Step.STANDBY_FILE), self.dice.randint(1, PASSAGES_COPYING))
            with Process("standby", self.nodes.toy, death, **mine) as standby:
                self.nodes.killed(standby)
            self.died_copying += 1
        process = Process("standby" if number else "syncer", self.nodes.toy, self.deaths[-1], late=True, **mine)
        self.lives.append(alive.enter_context(process))
        self.nodes.said(process, "standing" if number else "listening")

    def _fail_over(self, number: int, sites: dict[str, Process], alive: ExitStack) -> None:
        """Kill the leader, let its follower take over, and start a new follower."""
        leads, follows, said = self.lives[number], self.lives[number + 1], self.nodes.said
        if self.by == "lease":  # Until the standby is the heir, the syncer does not wait for it.
            heir = f"names node-{number + 1}-"
            leads.log.wait_for("note", 1, BOUND_S, where=lambda note: heir in str(note.get("why")))
        leads.send(signal.SIGUSR2)
        self.killed[self.nodes.dies(leads, self.deaths[number][0])] += 1
        began, joined = time.monotonic(), len(sites["a"].log)
        if self.by == "verb":
            with AdminClient(self.nodes.address(number + 1)) as operator:
                began = time.monotonic()
                operator.promote()
        said(follows, "listening")
        serving_s = time.monotonic() - began
        sites["a"].log.wait_for("joined", 1, BOUND_S, since=joined)
        joined_s = time.monotonic() - began
        said(follows, "published")
        published_s = time.monotonic() - began
        self.took.append({"serving": serving_s, "joined": joined_s, "published": published_s})
        self._node(alive)
        said(follows, "standby_attached")
        said(follows, "published", len(follows.log.of("published")) + 2)


def told_of(runs: list[Failovers], by: str) -> dict[str, object]:
    """Return the counts of all runs of one kind: the verb's times in seconds, the lease's in leases."""
    unit, one = ("_leases", LEASE_TTL_S) if by == "lease" else ("_s", 1.0)
    took = [cost for run in runs for cost in run.took]
    stalls = [share for run in runs for share in run.stalls]
    times: dict[str, object] = {}
    for name in ("serving", "joined", "published"):
        costs = [cost[name] / one for cost in took] or [0.0]
        times[name + unit] = {each: round(percentile(costs, of), 3) for each, of in SPREAD.items()}
    return {
        "failovers": len(took),
        "runs": len(runs),
        **times,
        "stall_share_max": round(max(stalls, default=0.0), 5),
        "waited_s_max": round(max((run.longest_s for run in runs), default=0.0), 4),
    }


@hunting(
    n=(10, "syncers to kill"),
    by=("both", "run by run", [*BY, "both"]),
    at=("any", "where to kill", ["any", "merge"]),
    within_s=(WITHIN_S, "after the verb"),
    within_leases=(WITHIN_LEASES, "after the kill"),
    stall_share=(STALL_SHARE_MAX, "largest share"),
)
def main(hunt: Hunt, asked: Namespace) -> Counts:
    kinds = BY if asked.by == "both" else (asked.by,)
    bounds_s = {"verb": asked.within_s, "lease": asked.within_leases * LEASE_TTL_S}
    killed: Counter[str] = Counter()
    runs: dict[str, list[Failovers]] = {by: [] for by in kinds}
    counts = Counter(failovers=0, runs=0, updates=0, versions=0, standbys_killed_copying=0)
    while counts["failovers"] < asked.n and not hunt.violations:
        number = counts["runs"]
        here, by = hunt.folder / str(number), kinds[number % len(kinds)]
        num = min(EACH, asked.n - counts["failovers"])
        run = Failovers(here, asked.seed * 1000 + number, num, by, asked.at, killed)
        with hunt.judging(f"run {number} (by {by})", here):
            told = run.run()
            counts.update(updates=len(told.accepted), versions=len(told.published))
        for which, cost in enumerate(run.took):
            if cost["published"] > bounds_s[by]:
                hunt.violated(f"failover {which} of run {number} (by {by}) took too long: {cost}")
        for share in run.stalls:
            if share > asked.stall_share:
                hunt.violated(f"a site's training stood still for {share:.1%} of run {number} (by {by})")
        runs[by].append(run)
        counts.update(failovers=len(run.took), runs=1, standbys_killed_copying=run.died_copying)
        shutil.rmtree(here, ignore_errors=True)
    by_kind = {f"by_{by}": told_of(of_kind, by) for by, of_kind in runs.items()}
    return {**counts, **by_kind, "lease_s": LEASE_TTL_S, "killed_at": dict(sorted(killed.items()))}
