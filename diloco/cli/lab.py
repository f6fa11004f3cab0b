"""``diloco lab``: compare rules at equal tokens, under virtual time, by really training a small model."""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from diloco.codec import kernel_library
from diloco.config.arguments import limit_threads, settings_parser
from diloco.config.errors import ConfigError, ExitCode, refusing, require
from diloco.durable import write_file
from diloco.lab import experiment as labs
from diloco.runs.process import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from diloco.lab.experiment import Cell, Found, Laboratory, RowResult

LAB = "+lab="
FIGURES = ("seconds", "bytes_up", "goodput", "sites_per_version")
"""The values printed for each cell of a row."""


def main(arguments: Sequence[str]) -> ExitCode:
    """Train each row of a lab file with each seed, under virtual time, and compare them: loss at equal tokens,
    time and bytes.  Rows that were trained before are read from the folder, so the same command resumes.

      diloco lab +lab=orderings
      diloco lab +lab=orderings --rows sync,quorum_1 --seeds 0 outer.lr=0.4
      diloco lab +lab=my/rows.yaml --jobs 8

    Lab files are like those in configs/lab.  Settings given here apply to every row.
    """
    parser = settings_parser("lab", main.__doc__, file=False, shown=False)
    parser.add_argument("--seeds", metavar="0,1,2", help="in place of the lab file's seeds")
    parser.add_argument("--rows", metavar="NAME,NAME", default="", help="only these rows (default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="cells trained at once (one a core)")
    parser.add_argument("--out", type=Path, help="the folder of the results (default: runs/lab)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    named = [each.removeprefix(LAB) for each in arguments if each.startswith(LAB)]
    given = parser.parse_args([each for each in arguments if not each.startswith(LAB)])
    if not named:
        raise ConfigError("+lab is not given: name a lab file, such as +lab=smoke")
    require(given.jobs >= 1, "--jobs", given.jobs, "at least 1")
    lab = labs.read(named[-1])
    try:
        seeds = lab.seeds if given.seeds is None else tuple(int(each) for each in given.seeds.split(","))
    except ValueError:
        raise ConfigError(f"--seeds is {given.seeds!r}: whole numbers, such as 0,1,2") from None
    cells = labs.cells(lab, given.settings, seeds, [name for name in given.rows.split(",") if name])
    folder = given.out or Path("runs") / "lab"
    (folder / lab.name).mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    found = {cell.digest: here for cell in cells if (here := labs.kept(folder, cell)) is not None}
    missing = list({cell.digest: cell for cell in cells if cell.digest not in found}.values())
    limit_threads(1)
    _check(missing)
    if older := sum(here.code != labs.code_digest() for here in found.values()):
        # Most code changes do not change results, and a laboratory takes hours: the user decides.
        print(
            f"{older} of {len(found)} stored cells were trained by other code: another --out trains them again",
            file=sys.stderr,
        )
    with _bar(len(found) + len(missing), len(found), quiet=given.json) as advance:
        for cell, here in _trained(missing, folder, given.jobs):
            found[cell.digest] = replace(here, code=labs.code_digest())
            labs.keep(folder, cell, found[cell.digest])
            advance(cell, here)
    lines = labs.lines(lab, [replace(found[cell.digest], row=cell.name) for cell in cells])  # Rows may share a cell.
    _report(lab, lines, folder / lab.name, time.monotonic() - began_s, as_json=given.json)
    return ExitCode.OK


def _check(cells: Sequence[Cell]) -> None:
    """Raise ConfigError for bad settings before any cell is trained; checks each row once."""
    if not cells:
        return
    from diloco.config import build_syncer

    for cell in {cell.name: cell for cell in cells if not cell.row.control}.values():
        with refusing(ConfigError, begin=f"row {cell.name}: "):
            build_syncer.check(cell.config)


def _trained(cells: Sequence[Cell], folder: Path, jobs: int) -> Iterator[tuple[Cell, Found]]:
    """Yield each cell with its result, as they finish; trains every seed's warm start first."""
    if not cells:
        return
    from diloco.lab.training import make_warm, run_cell  # Not above: --help must not import torch.

    warm = {cell.warm_digest: cell for cell in cells if cell.warm_steps}
    begin = (_begin_worker, (os.getpid(), os.environ.get(kernel_library.VARIABLE, "")))
    with ProcessPoolExecutor(min(jobs, len(cells)), get_context("spawn"), *begin) as pool:
        try:
            list(pool.map(make_warm, warm.values(), [folder] * len(warm)))
            under_way: dict[Future[Found], Cell] = {pool.submit(run_cell, cell, folder): cell for cell in cells}
            while under_way:
                done, _ = wait(under_way, return_when=FIRST_COMPLETED)
                for each in done:
                    yield under_way.pop(each), each.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _begin_worker(parent: int, kernels: str) -> None:
    """Make the worker die with ``parent`` and use the same kernels; the parent has already reported kernel problems."""
    die_with_parent(parent)
    kernel_library.force(kernels)


@contextmanager
def _bar(total: int, before: int, *, quiet: bool) -> Iterator[Callable[[Cell, Found], None]]:
    """Show a progress bar over all cells on standard error (a line for each without a terminal); yield its advance."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True, quiet=quiet)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        task = bars.add_task("cells", total=total, completed=before)

        def advance(cell: Cell, found: Found) -> None:
            bars.advance(task)
            if not console.is_terminal:
                console.print(f"{cell.name}, seed {cell.seed}: {found.loss:.4f} in {found.took_s:.0f} s")

        yield advance


def _report(lab: Laboratory, lines: Sequence[RowResult], folder: Path, took_s: float, *, as_json: bool) -> None:
    rows: list[dict[str, Any]] = []
    for line in lines:
        row, found = lab.rows[line.name], line.found
        told = {"row": line.name, "loss": line.loss, "losses": line.losses, "against": line.against, "off": line.off}
        told |= {name: [getattr(each, name) for each in found] for name in FIGURES}
        if row.rule:  # Under a pattern: how much higher the mean loss is than under the first pattern, "together".
            off = 0.0 if not row.against else fmean(line.off.values()) if line.off else None
            told |= {"rule": row.rule, "pattern": row.pattern, "loss_vs_together": off}
        rows.append(told)
    result: dict[str, object] = {"lab": lab.name, "seconds": round(took_s, 1), "rows": rows}
    offs = [row["loss_vs_together"] for row in rows if row.get("rule") == "default"]
    if offs and None not in offs:
        result["worst_default"] = max(offs)
    write_file(folder / "table.json", json.dumps(result, indent=1).encode())
    write_file(folder / "report.html", labs.html(lab, lines).encode())
    if as_json:
        print(json.dumps(result))
        return
    print(labs.table(lines))
    print(f"{folder}/report.html")
