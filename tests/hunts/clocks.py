"""``make clocks N=200``: make each process's wall clock jump independently while a run merges.

Real processes over real gRPC: a syncer that makes backups, its standby, two sites.  Each reads its wall clock from a
file, which the hunt rewrites while the process runs (``tests/hunts/cutting.py``): ten years ahead or back, 1960, the
beginning of 1970, a second ahead or back, a repeated second, a stopped clock.  Monotonic time is not changed.

Every few jumps a process is killed and restarted under another clock: a site; the syncer, whose standby takes over by a
lease in one run and by the operator's verb in the next, after which the old syncer briefly comes back; the syncer in
its own folder; the syncer without its folder, restored from the most advanced backup.

After each jump, within ``BOUND_S``, both sites merge again and every process runs.  No site is evicted, no update is
implausible, and no figure in the status is infinite, NaN or a negative duration.  Merged tokens, epochs and lineages
never fall; a restore has at least the backup's tokens.  The most advanced backup is never pruned.
"""

from __future__ import annotations

import math
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from diloco.durable import locked
from diloco.syncer.backups import BackupError, BackupFacts, Vault
from diloco.syncer.replaying import Rules
from diloco.syncer.restoring import Known, Restore
from diloco.syncer.store import RunCard
from diloco.wire.client import AdminClient
from tests.hunts.cutting import KINDS, tell
from tests.hunts.lives import Nodes, check_ledgers
from tests.hunts.reporting import Counts, Hunt, Namespace, hunting
from tests.loopback.cluster import Process
from tests.loopback.toy import RUN
from tests.runs.processes import wait_for

BOUND_S = 30.0
SITES = {"a": 0.02, "b": 0.03}
"""Seconds of each site's step."""
LOSSY = 0.3
"""The share of lossy promotions: the standby then begins a lineage, whose number depends on the wall clock."""
EACH = 40
"""The most jumps in one run."""
AT = {2: "site", 4: "take_over", 6: "restart", 9: "restore"}
"""What else happens at these jumps of every ten."""


def untrue(status: object, name: str = "status") -> Iterator[str]:
    """Yield the numbers in a status that no correct clock gives."""
    if isinstance(status, dict):
        for key, value in status.items():
            yield from untrue(value, f"{name}.{key}")
    elif isinstance(status, list):
        for index, value in enumerate(status):
            yield from untrue(value, f"{name}[{index}]")
    elif isinstance(status, int | float):
        lasts = "second" in name or name.endswith(("_s", "_ns"))
        if not math.isfinite(status) or (lasts and status < 0):
            yield f"{name} is {status}"


class Clocks:
    """One run from its first process to its end."""

    def __init__(self, folder: Path, seed: int, by: str, counts: Counter[str]) -> None:
        self.by, self.counts = by, counts
        self.dice = random.Random(f"clocks/{seed}")
        self.vault = Vault(str(folder / "vault"))
        backup = {"url": self.vault.url, "every_s": 0.7}
        self.nodes = Nodes(folder, lease=by == "lease", ttl_s=1.0, backup=backup)
        self.leads, self.follows = 0, -1
        self.next = 0
        self.living: dict[str, Process] = {}
        self.known: tuple[int, int, Counter[str]] = (0, 0, Counter())
        self.reach: tuple[int, ...] = ()
        self.dated: dict[str, str] = {}
        self.misdated = 0
        """Backups whose date is more than a year off."""

    def run(self, jumps: int) -> None:
        (self.nodes.folder / "clocks").mkdir(parents=True)
        with ExitStack() as self.alive:
            self._lead(0)
            for site in SITES:
                self._train(site)
            self._follow()
            for number in range(jumps):
                self._jump()
                match AT.get(number % 10):
                    case "site":
                        site = self.dice.choice(sorted(SITES))
                        self.living.pop(site).kill()
                        self._train(site)
                    case "take_over":
                        self._take_over()
                    case "restart":
                        self._restart(lost=False)
                    case "restore":
                        self._restart(lost=True)
                self._goes_on()
            self._end()
        dates = [datetime.fromisoformat(at) for at in self.dated.values()]
        self.misdated = sum(abs((at - datetime.now(UTC)).days) > 365 for at in dates)

    # --- processes -----------------------------------------------------------------------------------------------

    def _clock(self, name: str) -> Path:
        return self.nodes.folder / "clocks" / name

    def _begin(self, role: str, name: str, **mine: object) -> Process:
        """Start a process under its own clock, of a random kind."""
        tell(self._clock(name), self.dice.choice(KINDS))
        process = Process(role, self.nodes.toy, clock=str(self._clock(name)), **mine)
        self.living[name] = self.alive.enter_context(process)
        return process

    def _train(self, site: str) -> None:
        both = f"{self.nodes.address(0)},{self.nodes.address(1)}"
        self._begin("site", site, site=site, step_s=SITES[site], checkpoint_every=3, address=both)

    def _until(self, condition: Callable[[], object], what: str, process: Process) -> None:
        """Wait until ``condition`` holds; fail if any process ends or ``BOUND_S`` passes."""

        def holds() -> object:
            for name, each in self.living.items():
                assert each.wait(0) is None, f"{name} ended with {each.wait(0)}: {each.errors}"
                assert not each.errors, f"{name}: {each.errors}"
            return condition()

        wait_for(holds, what, lambda: str(process.log.events[-5:]), BOUND_S)

    def _said(self, process: Process, what: str, count: int = 1, text: str = "") -> None:
        """Wait until ``process`` has logged ``what``."""
        said = lambda: sum(text in str(event) for event in process.log.of(what)) >= count  # noqa: E731
        self._until(said, f"{what} {text}", process)

    def _lead(self, number: int) -> Process:
        process = self._begin("syncer", f"node-{number}", **self.nodes.home(number))
        self._said(process, "listening")
        return process

    def _follow(self) -> None:
        """Start a new standby, and wait until it has caught up."""
        self.next += 1
        while self.next % 2 == self.leads % 2:
            self.next += 1
        self.follows = self.next
        name = f"node-{self.follows}"
        self._begin("standby", name, primary=self.nodes.address(self.leads), **self.nodes.home(self.follows))
        leader = self.living[f"node-{self.leads}"]
        if self.nodes.toy.lease:  # As in the failover hunt: until then it is not the heir.
            self._said(leader, "note", text=f"names {name}-")
        with AdminClient(self.nodes.address(self.leads)) as operator:

            def follows() -> bool:
                said: dict[str, Any] = operator.status()["replication"]  # type: ignore[assignment]
                return said["following"] and not said["detached"]

            self._until(follows, f"{name} to follow", leader)

    # --- what happens ----------------------------------------------------------------------------------------------

    def _jump(self) -> None:
        kind = self.dice.choice(KINDS)
        tell(self._clock(self.dice.choice(sorted(self.living))), kind)
        self.counts[kind] += 1

    def _take_over(self) -> None:
        """Kill the syncer and let the standby lead; where a verb promoted it, the old one comes back without sites."""
        old = self.leads
        self.living.pop(f"node-{old}").kill()
        self.leads = self.follows
        process = self.living[f"node-{self.leads}"]
        if not self.nodes.toy.lease:
            with AdminClient(self.nodes.address(self.leads)) as operator:
                operator.promote(lossy=self.dice.random() < LOSSY)
        self._said(process, "listening")
        if not self.nodes.toy.lease:
            self._said(process, "published")
            back = self._lead(old)
            (started,) = process.log.of("syncer_started")
            (again,) = back.log.of("syncer_started")
            assert again["epoch"] < started["epoch"], f"the old syncer came back with an epoch as high: {again}"  # type: ignore[operator]
            self.living.pop(f"node-{old}").kill()
        self._follow()

    def _restart(self, *, lost: bool) -> None:
        """Kill syncer and standby, and restart the syncer in its own folder or in one restored from a backup."""
        if lost:
            self._said(self.living[f"node-{self.leads}"], "backup")
        for number in (self.follows, self.leads):
            self.living.pop(f"node-{number}").kill()
        if lost:
            self._restore(self.nodes.folder / f"node-{self.leads}")
        self._lead(self.leads)
        self._follow()

    def _restore(self, folder: Path) -> None:
        """Restore ``folder`` as ``diloco restore --from`` does, which reads the run's events too."""
        shutil.rmtree(folder)
        shutil.rmtree(self.nodes.folder / f"archive-{folder.name}", ignore_errors=True)
        name, facts = self._furthest()
        every = [each for each in self.vault.backups(RUN).values() if isinstance(each, BackupFacts)]
        most = max((each.lineage, each.run_tokens) for each in every)
        assert (facts.lineage, facts.run_tokens) == most, f"{name} is restored, but another has {most}"
        plan, (outer, rule) = self.nodes.toy.plan(), self.nodes.toy.rules()
        card = RunCard(RUN, plan.agreement.layout_fingerprint, plan.shared_digest)
        clock_s = tell(self._clock("restore"), self.dice.choice(KINDS))
        known = Known(clock_s, max(self.known[1], facts.lineage), max(each.epoch for each in every))
        folder.mkdir()
        with locked(folder):
            fetch = lambda to: self.vault.fetch(RUN, name, to)  # noqa: E731
            restored = Restore(folder, card, Rules(outer, rule, self.nodes.toy.codec), "a test", known).backup(fetch)
        assert restored.run_tokens >= facts.run_tokens, f"{asdict(restored)} is less than the backup {facts}"
        assert restored.lineage > self.known[1], f"lineage {restored.lineage} after {self.known[1]}"
        self.known = (self.known[0], restored.lineage, Counter())

    # --- what must be true -----------------------------------------------------------------------------------------

    def _furthest(self) -> tuple[str, BackupFacts]:
        found = self.vault.backups(RUN)
        for name, facts in found.items():
            assert not isinstance(facts, BackupError), f"{name}: {facts}"
            self.dated[name] = facts.at
        name, last = list(found.items())[-1]
        assert isinstance(last, BackupFacts)
        assert last.reach >= self.reach, f"the backup that reached {self.reach} is gone; {name} is left"
        self.reach = last.reach
        return name, last

    def _goes_on(self) -> None:
        """Check that both sites merge again, and that the syncer's status is plausible."""
        leader = self.living[f"node-{self.leads}"]
        since = len(leader.log)

        def merged() -> bool:
            new = [event for event in leader.log.events[since:] if event["what"] == "published"]
            return {site for event in new for site in event["merged"]} == set(SITES)  # type: ignore[attr-defined]

        self._until(merged, "both sites to merge again", leader)
        for name, process in self.living.items():
            notes = [
                event for event in process.log.of("note") if "evicted" in str(event) or "implausible" in str(event)
            ]
            assert not notes, f"{name}: {notes}"
        with AdminClient(self.nodes.address(self.leads)) as operator:
            status = operator.status()
        wrong = list(untrue(status))
        assert not wrong, "; ".join(wrong)
        sites: dict[str, dict[str, object]] = status["sites"]  # type: ignore[assignment]
        tokens = Counter({site: int(str(said["tokens_merged"])) for site, said in sites.items()})
        told = int(str(status["epoch"])), int(str(status["lineage"])), tokens
        for site, said in sites.items():
            assert said["status"] == "live", f"site {site} is {said['status']}"
            assert "implausible" not in dict(said["updates_refused"]), f"site {site}: {said['updates_refused']}"  # type: ignore[call-overload]
        assert all(new >= old for new, old in zip(told, self.known, strict=True)), f"{told} after {self.known}"
        self.known = told
        if self.vault.backups(RUN):
            self._furthest()

    def _end(self) -> None:
        """Drain the run, and check that every site's ledger balances."""
        sites = {site: self.living[site] for site in SITES}
        done = self.nodes.drained(self.living[f"node-{self.leads}"], self.leads, sites)
        check_ledgers({site: done[site].ledger for site in SITES}, self.nodes.folder / f"node-{self.leads}")


@hunting(jumps=(200, "number of jumps"))
def main(hunt: Hunt, asked: Namespace) -> Counts:
    counts: Counter[str] = Counter()
    runs = misdated = 0
    while counts.total() < asked.jumps and not hunt.violations:
        here, by = hunt.folder / str(runs), ("verb", "lease")[runs % 2]
        run = Clocks(here, asked.seed * 1000 + runs, by, counts)
        with hunt.judging(f"run {runs} (by {by})", here):
            run.run(min(EACH, asked.jumps - counts.total()))
        runs, misdated = runs + 1, misdated + run.misdated
    for kind in KINDS:
        print(f"{kind}: {counts[kind]}", flush=True)
    return {"done": counts.total(), "runs": runs, "backups_misdated": misdated}
