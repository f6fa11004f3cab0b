"""``make flood``: one site floods a syncer at full speed; how much longer are another site's rounds?

A real syncer and the flooding site run in their own processes, an honest site in this one, in one run.  Quiet and
flooded periods alternate, so that other load on this machine affects both.  The honest site waits for each version
(``lock_step``), so that any delay at the syncer is part of its round.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.record import percentile
from tests.forked import forkserver
from tests.hunts.flooding import KINDS, SITE, Order, flooded
from tests.hunts.reporting import Counts, Hunt, Namespace, hunting
from tests.loopback.cluster import Process, SiteThread, free_port
from tests.loopback.toy import Toy

TOKENS = {"honest": "token-of-the-honest-site", SITE: "token-of-the-flooding-site"}
BOUND_S = 60.0
STEP_S = 0.03
INNER_STEPS = 10
ROUNDS_MIN = 10
RISE_MAX = 0.20
GRANTS = {"default": "deny", "sites": {"honest": {}, SITE: {"pushes_per_s": 2, "bytes_per_s": 4e6}}}
SETTLE_S = 1.0


class Run:
    """The syncer and the flood, each in its own process, and the honest site."""

    def __init__(self, folder: Path, seed: int, alive: ExitStack) -> None:
        tokens, permissions = folder / "tokens.json", folder / "permissions.json"
        tokens.write_text(json.dumps({"sites": TOKENS}))
        tokens.chmod(0o600)
        permissions.write_text(json.dumps(GRANTS))
        outer = {"grace": "fixed", "grace_ns": 0, "quorum": 1}
        self.toy = Toy(
            folder=str(folder),
            seed=seed,
            inner_steps=INNER_STEPS,
            lock_step=True,
            outer=outer,
            shapes=(("w", (976, 256)),),
            snapshot_every=64,
            port=free_port(),
            tokens=str(tokens),
            permissions=str(permissions),
            token=TOKENS["honest"],
            client={"stall_s": 20.0, "control_timeout_s": 10.0},
        )
        self.syncer = alive.enter_context(Process("syncer", self.toy))
        self.address = str(self.syncer.log.wait_for("listening", 1, BOUND_S)[0]["address"])
        self.flooder = alive.enter_context(ProcessPoolExecutor(1, forkserver()))
        self.boundaries: list[float] = []
        """The times at which the honest site adopted a version, and so began a round."""
        self.site = alive.enter_context(SiteThread(self.toy, "honest", self.address, self._heard, step_s=STEP_S))
        self.site.log.wait_for("adopted", 1, BOUND_S)

    def _heard(self, what: str, fields: dict[str, object]) -> None:
        if what == "adopted":
            self.boundaries.append(time.monotonic())

    def spell(self, seconds: float, order: Order | None) -> tuple[list[float], float, dict[str, int]]:
        """Run one period; return its complete rounds, the syncer's share of one core, and the flood's counts."""
        until_s, counts = time.monotonic() + seconds, {}
        if order is not None:
            order.until_s = until_s
            job = self.flooder.submit(flooded, self.toy, self.address, TOKENS[SITE], order)
        time.sleep(SETTLE_S)
        cpu_s, first = cpu_of(self.syncer.pid), len(self.boundaries)
        time.sleep(until_s - time.monotonic())
        share = (cpu_of(self.syncer.pid) - cpu_s) / (seconds - SETTLE_S)
        instants = self.boundaries[first:]
        if order is not None:
            counts = job.result(BOUND_S)
        assert self.syncer.wait(0) is None, self.syncer.errors
        return [later - earlier for earlier, later in itertools.pairwise(instants)], share, counts


def cpu_of(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measured(run: Run, hunt: Hunt, kinds: tuple[str, ...], asked: Any) -> dict[str, object]:
    quiet: list[float] = []
    flooded: list[float] = []
    shares: dict[str, list[float]] = {"quiet": [], "flooded": []}
    calls: Counter[str] = Counter()
    for _ in range(asked.turns):
        rounds, share, _ = run.spell(asked.seconds, None)
        quiet += rounds
        shares["quiet"].append(share)
        rounds, share, counts = run.spell(asked.seconds, Order(kinds, 0.0, asked.threads, asked.connections))
        flooded += rounds
        shares["flooded"].append(share)
        calls.update(counts)
    name = "+".join(kinds) if len(kinds) < len(KINDS) else "all"
    row: dict[str, object] = {"kinds": name, "rounds_quiet": len(quiet), "rounds_flooded": len(flooded)}
    row["flood_calls_per_s"] = round(calls.total() / asked.seconds / asked.turns, 1)
    row |= {f"syncer_cpu_{kind}": round(sum(each) / len(each), 3) for kind, each in shares.items()}
    row["calls"] = dict(sorted(calls.items()))
    again = ",".join(kinds)
    if min(len(quiet), len(flooded)) < ROUNDS_MIN:
        hunt.violated(f"{name}: {len(quiet)} quiet and {len(flooded)} flooded rounds are too few", kinds=again)
        return row
    for percent in (50, 95):
        before, after = percentile(quiet, percent), percentile(flooded, percent)
        row |= {f"p{percent}_quiet_s": round(before, 4), f"p{percent}_flooded_s": round(after, 4)}
        row[f"p{percent}_ratio"] = round(after / before, 3)
    rise = float(str(row["p50_ratio"])) - 1.0
    if rise > RISE_MAX:
        hunt.violated(f"{name}: the median round is {rise:.0%} longer", kinds=again)
    return row


@hunting(
    seconds=(10.0, "length of a period"),
    turns=(2, "quiet and flooded periods of each measurement"),
    kinds=("all", f"all (at once), each (one after the other) or some of {', '.join(KINDS)}"),
    threads=(2, "flooding threads of each kind"),
    connections=(4, "connections that they share"),
)
def main(hunt: Hunt, asked: Namespace) -> Counts:
    wanted = {"all": [KINDS], "each": [(kind,) for kind in KINDS]}.get(asked.kinds, [tuple(asked.kinds.split(","))])
    rows = []
    with ExitStack() as alive:
        run = Run(hunt.folder, asked.seed, alive)
        for kinds in wanted:
            rows.append(measured(run, hunt, kinds, asked))
            print(json.dumps(rows[-1]), flush=True)
    return {"rows": rows} if len(rows) > 1 else rows[0]
