"""Which outer rule ends at which loss, at equal tokens?  A laboratory's table as one record.

Each row of ``configs/lab/NAME.yaml`` is trained under virtual time with each seed (``diloco lab``); ``off`` has the
differences from the reference with the same seed, as shares of its loss.  The row ``data_parallel`` is the limit: one
process with the batch of all sites, which no communication can beat.  Cells trained before, at any commit, are taken
from ``runs/lab/cells``; ``--fresh`` ignores them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.record import finish, parser_of, record
from diloco.lab import experiment as labs


def main() -> None:
    """Run one laboratory."""
    parser = parser_of(__doc__)
    parser.add_argument("--lab", default="smoke", help="a file of configs/lab (smoke)")
    parser.add_argument("--seeds", default="", help="0,1,2 (the laboratory's own; --seed is not used)")
    parser.add_argument("--rows", default="", help="only these rows (all)")
    parser.add_argument("--jobs", type=int, default=2, help="cells at once")
    parser.add_argument("--fresh", action="store_true", help="train every cell, also those kept")
    parser.add_argument("settings", nargs="*", help="settings of every row, as for diloco lab")
    given = parser.parse_args()
    name = "smoke" if given.quick else given.lab
    with tempfile.TemporaryDirectory() as fresh:
        out = fresh if given.fresh or given.quick else str(Path("runs") / "lab")
        more = [text for each in ("seeds", "rows") if (told := getattr(given, each)) for text in (f"--{each}", told)]
        command = ["lab", f"+lab={name}", "--json", "--jobs", str(given.jobs), "--out", out, *more, *given.settings]
        done = subprocess.run([sys.executable, "-m", "diloco", *command], stdout=subprocess.PIPE, text=True, check=True)
    told = json.loads(done.stdout)
    lab = labs.read(name)
    config = {
        "lab": name,
        "settings": [*lab.settings, *given.settings],
        "speeds": list(lab.speeds),
        "warm_steps": lab.warm_steps,
        "command": " ".join(["python -m benchmarks.bench_lab --lab", name, *more, *given.settings]),
    }
    rows = [
        {"does": lab.rows[row["row"]].does, "settings": list(lab.rows[row["row"]].settings), **row}
        for row in told["rows"]
    ]
    repeats = max((len(row["losses"]) for row in rows), default=0)
    finish(record("lab", config, rows, given.seed, repeats=repeats), save=given.save)


if __name__ == "__main__":
    main()
