"""What do several far, failing sites cost in loss, at the same number of tokens?

For each seed, through the command line, as a user would run it:

- ``warm``: a short phase of ``diloco train``; its checkpoint is version 0 of the warm arms;
- ``dp warm`` and ``sites warm``: from there, ``diloco train`` with the batch of all sites together, and ``diloco up``;
- ``dp``, ``sites`` and ``sites, faults``: the same from scratch; the last with the demo's faults (a site is killed and
  restarted, a link is cut for ten seconds, the syncer is killed and restarted).

Loss is that of the final global model on the whole validation split, in nats per token.  Ratios are paired by seed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.record import finish, parser_of, percentile, record

if TYPE_CHECKING:
    import argparse

SITES = 3
BATCH = 16
QUICK = ("model.layers=1", "model.dim=32", "model.heads=2", "model.context=32", "data.tokenizer=bytes")


def diloco(folder: str, name: str, verb: str, settings: list[str], bound_s: float) -> dict[str, Any]:
    """Run one verb to its end and return its summary; its output is shown when it fails."""
    command = [sys.executable, "-m", "diloco", verb, f"run.dir={folder}", f"run.name={name}", *settings]
    began = time.monotonic()
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=bound_s, check=False, env={**os.environ, "CI": "true"}
    )
    if done.returncode != 0:
        sys.stderr.write(done.stdout[-4000:] + done.stderr[-4000:])
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
    summary: dict[str, Any] = json.loads((Path(folder) / name / "summary.json").read_text(encoding="utf-8"))
    print(f"{name}: val loss {summary['global']['val_loss']:.4f} in {time.monotonic() - began:.0f} s", flush=True)
    return summary


def one_seed(folder: str, seed: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run every arm with one seed and return the rows."""
    shared = [f"run.seed={seed}", *(QUICK if options.quick else ())]
    together = [f"inner.batch_sequences={SITES * BATCH}", "site.threads=2"]
    tokens = [f"run.tokens={options.tokens}"]
    calm, faults = ["scenario=none"], list[str]()
    bound_s = options.bound_s
    warm = f"warm-{seed}"
    diloco(
        folder,
        warm,
        "train",
        [*shared, *together, f"run.tokens={options.warm_tokens}", "inner.schedule=constant"],
        bound_s,
    )
    begin = [f"run.init_from={Path(folder) / warm / 'train' / 'checkpoints'}"]
    arms = {
        "dp warm": ("train", [*together, *begin]),
        "sites warm": ("up", [*calm, *begin]),
        "dp": ("train", together),
        "sites": ("up", calm),
        "sites, faults": ("up", faults),
    }
    rows = []
    for arm, (verb, settings) in arms.items():
        if options.arms and arm not in options.arms:
            continue
        name = f"{arm.replace(' ', '-').replace(',', '')}-{seed}"
        summary = diloco(folder, name, verb, [*shared, *tokens, *settings], bound_s)
        loss = summary["global"]
        facts = {"seed": seed, "arm": arm, "val_loss": loss["val_loss"], "bits_per_byte": loss["val_bits_per_byte"]}
        rows.append({**facts, "status": summary["status"], "wall_s": summary["wall_seconds"], **_merged(summary)})
    return rows


def _merged(summary: dict[str, Any]) -> dict[str, Any]:
    sites = summary.get("sites") or {}
    merged = sum(site.get("tokens_merged", 0) for site in sites.values())
    return {"tokens_merged": merged, "versions": summary.get("versions"), "faults": len(summary.get("faults") or [])}


def ratios(rows: list[dict[str, Any]], arm: str, beside: str) -> dict[str, Any] | None:
    """Return the losses of ``arm`` over those of ``beside``, by seed; None where no seed has both."""
    by_seed = {row["seed"]: row["val_loss"] for row in rows if row["arm"] == beside}
    found = [row["val_loss"] / by_seed[row["seed"]] for row in rows if row["arm"] == arm and row["seed"] in by_seed]
    if not found:
        return None
    return {
        "arm": f"{arm} / {beside}",
        "ratios": found,
        "ratio_p50": percentile(found, 50),
        "ratio_p95": percentile(found, 95),
        "ratio_max": max(found),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, from --seed on")
    parser.add_argument("--tokens", type=int, default=1_200_000, help="merged tokens of every arm")
    parser.add_argument("--warm-tokens", type=int, default=400_000)
    parser.add_argument("--arms", nargs="*", default=[], help="only these arms")
    parser.add_argument("--bound-s", type=float, default=900.0, help="longest wait for one run")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.tokens, options.warm_tokens, options.arms = 1, 30_000, 10_000, ["dp warm", "sites warm"]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seed, options.seed + options.seeds):
            rows += one_seed(folder, seed, options)
    pairs = [("sites warm", "dp warm"), ("sites", "dp"), ("sites, faults", "sites")]
    rows += [found for arm, beside in pairs if (found := ratios(rows, arm, beside)) is not None]
    config = {name: getattr(options, name) for name in ("tokens", "warm_tokens", "seeds", "quick")}
    finish(record("convergence", config, rows, options.seed, repeats=options.seeds), save=options.save)


if __name__ == "__main__":
    main()
