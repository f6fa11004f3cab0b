"""The record every benchmark ends with: what was measured, by which code, on which machine.

A benchmark's last line of output is one JSON object.  With the rows it has the commit, the resolved configuration, the
machine, the versions, the seed and the number of repeats, so that a figure always comes with its origin.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "numpy", "grpcio", "protobuf", "zstandard", "triton")


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the help ``doc`` and what every benchmark has: ``--quick``, ``--seed`` and ``--save``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes: only to check that it runs")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random data (default 0)")
    parser.add_argument("--save", action="store_true", help="append the record to benchmarks/results/<question>.jsonl")
    return parser


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the ``percent``-th percentile of ``samples``, linear between neighbours; ``ValueError`` if empty."""
    if not samples:
        raise ValueError("percentile of no samples")
    return float(np.percentile(samples, percent))


def record(
    question: str, config: dict[str, Any], rows: list[dict[str, Any]], seed: int, *, repeats: int = 1
) -> dict[str, Any]:
    """Return the record of one run.

    ``question`` is the file's short name (``"codec"``) and names the results file.  ``config`` is what was resolved
    from the options, ``rows`` the measurements with units last in their names, ``repeats`` how often each was taken.
    """
    return {
        "question": question,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "config": config,
        "machine": machine(),
        "versions": versions(),
        "seed": seed,
        "repeats": repeats,
        "rows": rows,
    }


def finish(result: dict[str, Any], *, save: bool = False) -> None:
    """Print ``result`` as the last line of output and, with ``save``, append it to ``results/<question>.jsonl``."""
    line = json.dumps(result, sort_keys=False, allow_nan=False)
    if save:
        RESULTS.mkdir(parents=True, exist_ok=True)
        with (RESULTS / f"{result['question']}.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    print(line, flush=True)


def commit() -> str:
    """Return the short commit, with ``-dirty`` where tracked files differ from it, or ``unknown`` outside git."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}-dirty" if changed else head


def machine() -> dict[str, Any]:
    """Return the machine's properties that affect a figure: processor, usable cores, memory, system, accelerator."""
    description: dict[str, Any] = {
        "cpu": _cpu_model(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "threads_env": os.environ.get("OMP_NUM_THREADS", ""),
    }
    if torch.cuda.is_available():
        description["gpu"] = torch.cuda.get_device_name(0)
    return description


def versions() -> dict[str, str]:
    """Return the versions of Python and of those of ``PACKAGES`` that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
