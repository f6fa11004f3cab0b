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
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from diloco.durable import Step
from diloco.learner.agent import Finished
from diloco.wire.client import AdminClient
from diloco.wire.messages import WireError
from tests.hunts.reporting import Hunt, why
from tests.loopback.audit import History, audit, one_run
from tests.loopback.cluster import Process, free_port
from tests.loopback.toy import Toy

BOUND_S = 90.0
SITES = ("a", "b")
STEP_S = 0.08
WITHIN_S = 2.0
"""The longest time from the verb to a new version."""
WITHIN_LEASES = 3.0
"""The longest time from the kill to a new version without an operator, in leases."""
LEASE_TTL_S = 2.0
BY = ("verb", "lease")
STALL_SHARE_MAX = 0.02
PATIENCE_S = 15.0
"""If a step does not occur for this long, SIGKILL comes from outside instead."""
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


@dataclass
class Took:
    """The times of a failover, in seconds after the verb or, by the lease, after the kill."""

    serving_s: float
    joined_s: float
    published_s: float


@dataclass
class Failovers:
    """One run from its first process to its audit."""

    folder: Path
    seed: int
    num: int
    by: str
    at: str = "any"
    killed: Counter[str] = field(default_factory=Counter)
    took: list[Took] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    longest_s: float = 0.0
    """The longest that a site's training waited between two steps."""
    died_copying: int = 0

    def __post_init__(self) -> None:
        self.dice = random.Random(f"failover/{self.seed}")
        outer = {"num_fragments": 2, "grace": "fixed", "grace_ns": 5_000_000}
        replication = {"mode": "sync", "timeout_s": 3.0, "alive_s": 0.2}
        self.toy = Toy(
            folder=str(self.folder),
            codec="int8",
            inner_steps=4,
            seed=11,
            outer=outer,
            replication=replication,
            lease=str(self.folder / "lease.json") if self.by == "lease" else "",
            lease_ttl_s=LEASE_TTL_S,
        )
        self.ports = [free_port(), free_port()]
        self.nodes: list[Process] = []
        self.deaths: list[tuple[str, int]] = []

    def run(self) -> History:
        with ExitStack() as alive:
            self._node(alive)
            self._node(alive)
            sites = {site: alive.enter_context(self._site(site)) for site in SITES}
            self.nodes[0].log.wait_for("published", 2, BOUND_S)
            for number in range(self.num):
                self._fail_over(number, sites, alive)
            led = self.num
            with AdminClient(self._address(led)) as operator:
                operator.drain()
            done = {site: self._finished(site, process) for site, process in sites.items()}
            assert self.nodes[led].wait(BOUND_S) == 0, self.nodes[led].errors
        return self._audited(led, sites, done)

    def _address(self, number: int) -> str:
        return f"127.0.0.1:{self.ports[number % 2]}"

    def _node(self, alive: ExitStack) -> None:
        """Start the next process: the first one leads, and each later one follows the one before."""
        number = len(self.nodes)
        mine: dict[str, object] = {"data": f"node-{number}", "port": self.ports[number % 2], "late": True}
        if number:
            mine["primary"] = self._address(number - 1)
        merging = self.at == "merge" or number % 2 == 0
        step = Step.MERGE if merging else self.dice.choice(STEPS)
        self.deaths.append((str(step), self.dice.randint(1, 2 if merging else 6)))
        if number and self.dice.random() < KILLED_COPYING:
            self._dies_copying({**mine, "late": False})
        process = Process("standby" if number else "syncer", self.toy, self.deaths[-1], **mine)
        alive.callback(process.__exit__)
        self.nodes.append(process)
        self._said(process, "standing" if number else "listening")

    def _dies_copying(self, mine: dict[str, object]) -> None:
        """Kill a standby in the middle of its first copy; the same command later resumes in its folder."""
        death = (str(Step.STANDBY_FILE), self.dice.randint(1, PASSAGES_COPYING))
        with Process("standby", self.toy, death, **mine) as standby:
            assert standby.wait(BOUND_S) == -signal.SIGKILL, f"it ended with {standby.wait(0)}: {standby.errors}"
        self.died_copying += 1

    def _site(self, site: str) -> Process:
        both = ",".join(self._address(number) for number in (0, 1))
        return Process("site", self.toy, site=site, address=both, step_s=STEP_S * (1.0 if site == "a" else 1.6))

    def _said(self, process: Process, what: str, count: int = 1) -> None:
        """Wait until ``process`` has logged ``what``; fail with its error if it ends before."""
        until = time.monotonic() + BOUND_S
        while len(process.log.of(what)) < count:
            assert process.wait(0.005) is None, f"it ended before {what}: {process.errors}"
            assert time.monotonic() < until, f"no {what} in {BOUND_S} s: {process.log.events[-5:]}"

    def _fail_over(self, number: int, sites: dict[str, Process], alive: ExitStack) -> None:
        """Kill the leader, let its follower take over, and start a new follower."""
        leads, follows = self.nodes[number], self.nodes[number + 1]
        if self.by == "lease":  # Until the standby is the heir, the syncer does not wait for it.
            heir = f"names node-{number + 1}-"
            leads.log.wait_for("note", 1, BOUND_S, where=lambda note: heir in str(note.get("why")))
        leads.send(signal.SIGUSR2)
        step = self.deaths[number][0]
        if leads.wait(PATIENCE_S) is None:
            step = "instant"
            leads.kill()
        assert leads.wait(BOUND_S) == -signal.SIGKILL, f"it ended with {leads.wait(0)}: {leads.errors}"
        self.killed[step] += 1
        began, joined = time.monotonic(), len(sites["a"].log)
        if self.by == "verb":
            with AdminClient(self._address(number + 1)) as operator:
                began = time.monotonic()
                operator.promote()
        self._said(follows, "listening")
        serving_s = time.monotonic() - began
        sites["a"].log.wait_for("joined", 1, BOUND_S, since=joined)
        joined_s = time.monotonic() - began
        self._said(follows, "published")
        self.took.append(Took(serving_s, joined_s, time.monotonic() - began))
        self._node(alive)
        self._said(follows, "standby_attached")
        before = len(follows.log.of("published"))
        self._said(follows, "published", before + 2)

    # --- afterwards --------------------------------------------------------------------------------------------

    def _finished(self, site: str, process: Process) -> Finished:
        assert process.wait(BOUND_S) == 0, f"site {site}: {process.errors}"
        (event,) = process.log.of("finished")
        assert event["ending"] == "drained", event
        meter = process.log.of("meter")[-1]
        self.stalls.append(float(str(meter["stall_s"])) / float(str(meter["train_s"])))
        self.longest_s = max(self.longest_s, float(str(meter["after_step_s_max"])))
        return Finished(event["ending"], str(event["why"]), event["ledger"])  # type: ignore[arg-type]

    def _audited(self, led: int, sites: dict[str, Process], done: dict[str, Finished]) -> History:
        whole = one_run(self.folder, [f"node-{number}" for number in range(led + 1)])
        logs = {site: [process.log] for site, process in sites.items()}
        told = audit(replace(self.toy, folder=str(whole)), [node.log for node in self.nodes], logs, done)
        epochs = [event["epoch"] for node in self.nodes for event in node.log.of("syncer_started")]
        assert len(epochs) == led + 1, f"epochs are {epochs}"
        assert epochs == sorted(set(epochs)), f"epochs are {epochs}"
        return told


@dataclass
class Tally:
    """The times of all failovers of one kind."""

    runs: int = 0
    took: list[Took] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    longest_s: float = 0.0

    def add(self, run: Failovers) -> None:
        """Add a run."""
        self.runs += 1
        self.took += run.took
        self.stalls += run.stalls
        self.longest_s = max(self.longest_s, run.longest_s)

    def told(self, by: str) -> dict[str, object]:
        """Return the counts for the last line: the verb's times in seconds, the lease's in leases."""
        unit, one = ("_leases", LEASE_TTL_S) if by == "lease" else ("_s", 1.0)
        counts = {"failovers": len(self.took), "runs": self.runs}
        names = ("serving", "joined", "published")
        spreads = {name + unit: spread([getattr(cost, f"{name}_s") / one for cost in self.took]) for name in names}
        stall = {"stall_share_max": round(max(self.stalls, default=0.0), 5), "waited_s_max": round(self.longest_s, 4)}
        return {**counts, **spreads, **stall}


def main(arguments: list[str] | None = None) -> int:
    hunt = Hunt("failover", __doc__)
    hunt.parser.add_argument("--n", type=int, default=10, help="syncers to kill (default: 10)")
    hunt.parser.add_argument("--by", choices=[*BY, "both"], default="both", help="run by run (default: both)")
    hunt.parser.add_argument("--at", choices=["any", "merge"], default="any", help="where to kill (default: any)")
    hunt.parser.add_argument("--each", type=int, default=5, help="kills in one run (default: 5)")
    hunt.parser.add_argument("--within-s", type=float, default=WITHIN_S, help=f"after the verb (default: {WITHIN_S:g})")
    hunt.parser.add_argument(
        "--within-leases", type=float, default=WITHIN_LEASES, help=f"after the kill (default: {WITHIN_LEASES:g})"
    )
    hunt.parser.add_argument("--stall-share", type=float, default=STALL_SHARE_MAX, help="largest share (default: 0.02)")
    asked = hunt.asked(arguments)
    kinds = BY if asked.by == "both" else (asked.by,)
    bounds_s = {"verb": asked.within_s, "lease": asked.within_leases * LEASE_TTL_S}
    killed: Counter[str] = Counter()
    tallies = {by: Tally() for by in kinds}
    updates = versions = runs = done = copying = 0
    replay = {"n": asked.n, "each": asked.each, "by": asked.by, "at": asked.at, "seed": asked.seed}
    with tempfile.TemporaryDirectory(prefix="failover-") as folder:
        while done < asked.n and not hunt.violations:
            here, by = Path(folder) / str(runs), kinds[runs % len(kinds)]
            run = Failovers(here, asked.seed * 1000 + runs, min(asked.each, asked.n - done), by, asked.at, killed)
            try:
                told = run.run()
                updates, versions = updates + len(told.accepted), versions + len(told.published)
            except (AssertionError, WireError) as error:
                kept = shutil.copytree(here, tempfile.mkdtemp(prefix="failover-kept-"), dirs_exist_ok=True)
                hunt.violated(f"run {runs} (by {by}), kept in {kept}: {why(error)}", **replay)
            for number, cost in enumerate(run.took):
                if cost.published_s > bounds_s[by]:
                    hunt.violated(f"failover {number} of run {runs} (by {by}) took too long: {cost}", **replay)
            for share in run.stalls:
                if share > asked.stall_share:
                    hunt.violated(f"a site's training stood still for {share:.1%} of run {runs} (by {by})", **replay)
            tallies[by].add(run)
            done, runs, copying = done + len(run.took), runs + 1, copying + run.died_copying
            with suppress(OSError):
                shutil.rmtree(here)
    counts = {"failovers": done, "runs": runs, "updates": updates, "versions": versions}
    counts["standbys_killed_copying"] = copying
    by_kind = {f"by_{by}": tally.told(by) for by, tally in tallies.items()}
    return hunt.finish({**counts, **by_kind, "lease_s": LEASE_TTL_S, "killed_at": dict(sorted(killed.items()))})


def spread(values: list[float]) -> dict[str, float]:
    """Return the median, the 95th percentile and the largest value."""
    ordered = sorted(values) or [0.0]
    at = {"p50": 0.5, "p95": 0.95, "max": 1.0}
    return {name: round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3) for name, share in at.items()}


if __name__ == "__main__":
    sys.exit(main())
