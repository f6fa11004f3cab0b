"""What does ``make demo`` reach on this machine?

Runs ``diloco up`` as the demo does, with its faults, and keeps these values of its ``summary.json``: bits per byte of
validation text, beside a stated limit, and each site's steps, tokens per second and number format.  For a smaller
machine: ``taskset -c 0,1`` for two cores; ``ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2
MKL_ENABLE_INSTRUCTIONS=AVX2 DILOCO_KERNELS=avx2`` for another processor.

Run as ``python -m benchmarks.bench_demo``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.record import finish, parser_of, record

BITS_PER_BYTE_MAX = {"bf16": 1.6, "fp32": 2.0}
"""The limit by number format: that of fp32 where any site uses it."""
ENDS_S_MAX = 900
REDUCED_BY = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "DILOCO_KERNELS")


def row_of(summary: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a run from its summary."""
    sites = summary["sites"]
    slowest = "fp32" if any(site["products"] == "fp32" for site in sites.values()) else "bf16"
    return {
        "val_bits_per_byte": summary["global"]["val_bits_per_byte"],
        "val_bits_per_byte_max": BITS_PER_BYTE_MAX[slowest],
        "outer_steps": sum(summary["versions"]),
        "wall_s": summary["wall_seconds"],
        "status": summary["status"],
        "faults": [f"{fault['what']} {fault['target']}" for fault in summary["faults"]],
        "wire": summary["wire"],
        "sites": {
            name: {key: site[key] for key in ("inner_steps", "tokens_per_second", "products", "tokens_lost")}
            for name, site in sites.items()
        },
    }


def main() -> None:
    options = parser_of(__doc__).parse_args()
    settings = [f"run.seed={options.seed}", *(["run.seconds=20", "scenario=none"] if options.quick else [])]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "diloco", "up", *settings, f"run.dir={folder}", "run.name=demo"]
        subprocess.run(command, check=True, timeout=ENDS_S_MAX, stdout=sys.stderr)
        row = row_of(json.loads((Path(folder) / "demo" / "summary.json").read_text("utf-8")))
    reduced = {name: os.environ[name] for name in REDUCED_BY if name in os.environ}
    config = {"command": f"diloco up {' '.join(settings)}", "reduced": reduced}
    top = {key: row[key] for key in ("val_bits_per_byte", "val_bits_per_byte_max")}
    finish(record("demo", config, [row], options.seed) | top, save=options.save)


if __name__ == "__main__":
    main()
