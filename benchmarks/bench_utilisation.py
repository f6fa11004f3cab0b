"""How much of its time does a site train on a link of a given rate, compared with the formula?

Whole runs (``diloco up``) of two sites over emulated links.  A link's rate is a multiple of the least that carries one
exchange of the model each way per period: values x bits / (inner_steps x step).  Some sites wait (``outer=diloco``),
with the model in one and in four fragments; others train on meanwhile (``outer=decoupled outer.adopt=rebase``), for
which the formula gives 1 and the row has the merged share of the updates due.  The formula
(``diloco/plan/estimate.py``) gets the run's measurements: the step, the outer step and the bytes.  Figures are of the
site with the slower steps, for which the other waits; ``off_points`` is the difference.  Run as ``python -m
benchmarks.bench_utilisation``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.record import finish, parser_of, record
from diloco.config.run_dir import RunDir
from diloco.lab.compare import MadeRun, read_made
from diloco.plan.bandwidth import Load, Star
from diloco.plan.estimate import formula_utilisation

if TYPE_CHECKING:
    from collections.abc import Sequence

RTT_MS = 40.0
TIMES = (1, 2, 4, 8)
INNER_STEPS = 10
SITES = ("site-a", "site-b")
SLOWDOWN = 4.0
"""Sites that sleep most of the time do not compete for the cores, so that the time of a step is steady."""
SETTINGS = (
    "cluster=one",
    *(f"cluster.sites.{name}.slowdown={SLOWDOWN:g}" for name in SITES),
    "data=stdlib_bytes",
    "model.layers=3",
    "model.dim=96",
    "model.heads=4",
    "model.context=64",
    "inner.batch_sequences=8",
    "inner.precision=fp32",
    f"outer.inner_steps={INNER_STEPS}",
    "codec=fp32",
    "scenario=none",
    "network.jitter_ms=0",
    f"network.rtt_ms={RTT_MS:g}",
)
WAYS = {
    "waits": ("outer=diloco",),
    "waits, 4 fragments": ("outer=diloco", "outer.num_fragments=4"),
    "trains on, 4 fragments": ("outer=decoupled", "outer.num_fragments=4", "outer.adopt=rebase"),
}
BOUND_S = 240.0
"""The time allowed beyond a run's own: for its start, and the last round over the slowest link."""


def made(place: Path, name: str, seconds: float, seed: int, *settings: str) -> MadeRun:
    """Make a whole run and return its measurements."""
    run = (f"run.name={name}", f"run.seconds={seconds:g}", f"run.seed={seed}")
    command = [sys.executable, "-m", "diloco", "up", *SETTINGS, *run, *settings]
    source = str(Path(__file__).resolve().parent.parent)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source}
    done = subprocess.run(
        command, cwd=place, env=environment, capture_output=True, text=True, check=False, timeout=seconds + BOUND_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return read_made(RunDir(place / "runs" / name))


def bits_of(sizes: Sequence[int | None]) -> float:
    """Return the bits of the whole model; each fragment must have been exchanged."""
    known = [size for size in sizes if size is not None]
    assert len(known) == len(sizes), f"a fragment was never exchanged: {sizes}"
    return sum(known) * 8.0


def step_s_of(run: MadeRun) -> dict[str, float]:
    """Return the seconds of one inner step at each site."""
    return {name: site["step_s"] for name, site in run.sites.items()}


def expected(run: MadeRun, fragments: int, mbps: float) -> float:
    """Return the formula's share for the measurements of ``run``."""
    load = Load(updates_up=bits_of(run.update_bytes), versions_down=bits_of(run.version_bytes))
    star = Star(
        inner_steps=INNER_STEPS,
        step_s=max(step_s_of(run).values()),
        fragments=fragments,
        rtt_s=RTT_MS / 1e3,
        merge_s=run.merge_s,
    )
    return formula_utilisation(star, load, mbps / 1e3, mbps / 1e3)


def row(way: str, times: int, mbps: float, run: MadeRun) -> dict[str, Any]:
    """Return the row of a run's slower site."""
    waits, fragments = way.startswith("waits"), len(run.update_bytes)
    step_s = step_s_of(run)
    column = run.columns[max(step_s, key=step_s.__getitem__)]
    measured = 1 - column.idle_share
    formula = expected(run, fragments, mbps) if waits else 1.0
    due = column.steps * fragments / INNER_STEPS
    return {
        "way": way,
        "times": times,
        "mbps": round(mbps, 3),
        "step_s": {name: round(each_s, 4) for name, each_s in step_s.items()},
        "merge_s": round(run.merge_s, 4),
        "versions": list(run.versions),
        "utilisation": round(measured, 4),
        "formula": round(formula, 4),
        "off_points": round(100 * (measured - formula), 2),
        "updates_merged": round(column.updates_merged / due, 3),
    }


def words(found: dict[str, Any]) -> str:
    """Return the row as one line of text."""
    trained, formula, merged = (100 * found[name] for name in ("utilisation", "formula", "updates_merged"))
    return (
        f"{found['way']:24s} {found['times']} x, {found['mbps']:6.2f} Mbit/s: trains {trained:5.1f} % of the time,"
        f" {formula:5.1f} by the formula; {merged:3.0f} % of the updates due merged"
    )


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    seconds, ways, each_times = (12.0, ["waits"], (8,)) if arguments.quick else (60.0, list(WAYS), TIMES)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        first = made(place, "first", 12.0, arguments.seed, "outer=diloco", "network.mbps=0")
        asked_mbps = bits_of(first.update_bytes) / (INNER_STEPS * max(step_s_of(first).values())) / 1e6
        for way in ways:
            for times in each_times:
                name, mbps = f"{way.replace(', ', '-').replace(' ', '-')}-{times}", times * asked_mbps
                run = made(place, name, seconds, arguments.seed, *WAYS[way], f"network.mbps={mbps:.4f}")
                rows.append(found := row(way, times, mbps, run))
                print(words(found), flush=True)
    config = {
        "settings": list(SETTINGS),
        "ways": {way: list(settings) for way, settings in WAYS.items()},
        "seconds": seconds,
    }
    finish(record("utilisation", config, rows, arguments.seed, repeats=1), save=arguments.save)


if __name__ == "__main__":
    main()
