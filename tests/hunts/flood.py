"""``make flood``: one site floods a syncer at full speed; how much longer are another site's rounds?

A real syncer, an honest site and the flooding site run in their own processes, in one run.  Quiet and flooded periods
alternate, so that other load on this machine affects both.  The honest site waits for each version (``lock_step``), so
that any delay at the syncer is part of its round.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.record import percentile
from tests.hunts.flooding import KINDS, SITE, Order
from tests.hunts.flooding import main as flood_main
from tests.hunts.reporting import Hunt
from tests.loopback.cluster import Process, free_port
from tests.loopback.toy import Toy, ToySite

TOKENS = {"honest": "token-of-the-honest-site", SITE: "token-of-the-flooding-site"}
BOUND_S = 60.0
INNER_STEPS = 10
ROUNDS_MIN = 10
RISE_MAX = 0.20
GRANTS = {"default": "deny", "sites": {"honest": {}, SITE: {"pushes_per_s": 2, "bytes_per_s": 4e6}}}
SETTLE_S = 1.0


def honest(toy: Toy, address: str, step_s: float, told: Connection, over: Any) -> None:
    """Run the honest site's process, which sends the time of each boundary between rounds, until ``over``."""
    site = ToySite(toy, "honest", address, lambda what, fields: None)

    def after(trained: int) -> None:
        if trained % INNER_STEPS == 0:
            told.send(time.monotonic())
        if over.is_set():
            site.halt.set()

    site.run(step_s, after=after)
    site.agent.close()


class Run:
    """The three processes."""

    def __init__(self, folder: Path, asked: argparse.Namespace, alive: ExitStack) -> None:
        tokens, permissions = folder / "tokens.json", folder / "permissions.json"
        tokens.write_text(json.dumps({"sites": TOKENS}))
        tokens.chmod(0o600)
        permissions.write_text(json.dumps(GRANTS if asked.grants == "limited" else {"default": "allow"}))
        outer = {"grace": "fixed", "grace_ns": 0, "quorum": 1}
        self.toy = Toy(
            folder=str(folder),
            seed=asked.seed,
            inner_steps=INNER_STEPS,
            lock_step=True,
            outer=outer,
            shapes=(("w", (int(asked.megabytes * 1e6 / 4 / 256), 256)),),
            snapshot_every=64,
            port=free_port(),
            tokens=str(tokens),
            permissions=str(permissions),
            token=TOKENS["honest"],
            client={"stall_s": 20.0, "control_timeout_s": 10.0},
            server={"calls_per_s": asked.calls_per_s},
        )
        self.syncer = alive.enter_context(Process("syncer", self.toy))
        address = str(self.syncer.log.wait_for("listening", 1, BOUND_S)[0]["address"])
        context = multiprocessing.get_context("spawn")
        self.boundaries, told = context.Pipe(duplex=False)
        self._over = context.Event()
        mine = (self.toy, address, asked.step_s, told, self._over)
        self.site = context.Process(target=honest, args=mine, name="honest")
        self.orders, taken = context.Pipe()
        self.flooder = context.Process(target=flood_main, args=(self.toy, address, TOKENS[SITE], taken), name="flood")
        for process in (self.site, self.flooder):
            process.start()
            alive.callback(process.kill)
        alive.callback(self.end)
        assert self.boundaries.poll(BOUND_S), "the honest site never began"

    def end(self) -> None:
        self._over.set()
        self.orders.send(None)
        self.flooder.join(BOUND_S)
        self.site.join(BOUND_S)

    def spell(self, seconds: float, order: Order | None) -> tuple[list[float], float, dict[str, int]]:
        """Run one period; return its complete rounds, the syncer's share of one core, and the flood's counts."""
        began_s = time.monotonic()
        if order is not None:
            order.until_s = began_s + seconds
            self.orders.send(order)
        time.sleep(SETTLE_S)
        while self.boundaries.poll():
            self.boundaries.recv()
        cpu_s = cpu_of(self.syncer.pid)
        instants = []
        while (left_s := began_s + seconds - time.monotonic()) > 0:
            if self.boundaries.poll(left_s):
                instants.append(self.boundaries.recv())
        share = (cpu_of(self.syncer.pid) - cpu_s) / (seconds - SETTLE_S)
        counts: dict[str, int] = {}
        if order is not None:
            assert self.orders.poll(BOUND_S), "the flood did not end"
            counts = self.orders.recv()
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
    calls: dict[str, int] = {}
    for _ in range(asked.turns):
        rounds, share, _ = run.spell(asked.seconds, None)
        quiet += rounds
        shares["quiet"].append(share)
        rounds, share, counts = run.spell(asked.seconds, Order(kinds, 0.0, asked.threads, asked.connections))
        flooded += rounds
        shares["flooded"].append(share)
        for name, count in counts.items():
            calls[name] = calls.get(name, 0) + count
    name = "+".join(kinds) if len(kinds) < len(KINDS) else "all"
    row: dict[str, object] = {"kinds": name, "rounds_quiet": len(quiet), "rounds_flooded": len(flooded)}
    row["flood_calls_per_s"] = round(sum(calls.values()) / asked.seconds / asked.turns, 1)
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


def main(arguments: list[str] | None = None) -> int:
    hunt = Hunt("flood", __doc__)
    hunt.option("seconds", 10.0, "length of a period")
    hunt.option("turns", 2, "quiet and flooded periods of each measurement")
    hunt.option("kinds", "all", f"all (at once), each (one after the other) or some of {', '.join(KINDS)}")
    hunt.option("threads", 2, "flooding threads of each kind")
    hunt.option("connections", 4, "connections that they share")
    hunt.option("step-s", 0.03, "an inner step of the honest site; ten make a round")
    hunt.option("megabytes", 1.0, "size of an update")
    hunt.option("calls-per-s", 100.0, "the syncer's limit for each site, by default its own")
    hunt.option("grants", "limited", "limited: 2 pushes and 4 MB a second", choices=["limited", "none"])
    asked = hunt.asked(arguments)
    wanted = {"all": [KINDS], "each": [(kind,) for kind in KINDS]}.get(asked.kinds, [tuple(asked.kinds.split(","))])
    rows = []
    with tempfile.TemporaryDirectory(prefix="flood-") as folder, ExitStack() as alive:
        run = Run(Path(folder), asked, alive)
        for kinds in wanted:
            rows.append(measured(run, hunt, kinds, asked))
            print(json.dumps(rows[-1]), flush=True)
    return hunt.finish({"rows": rows} if len(rows) > 1 else rows[0])


if __name__ == "__main__":
    sys.exit(main())
