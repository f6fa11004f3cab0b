"""``diloco report RUN_DIR``: write the report of a run anew, and print its closing table again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.launch.arguments import OneLineParser
from diloco.launch.closing import closing_lines
from diloco.launch.errors import ExitCode
from diloco.launch.report import rebuild
from diloco.launch.run_dir import existing_run

if TYPE_CHECKING:
    from collections.abc import Sequence

DOES = """Writes report.html into a run's folder, from its events.jsonl and summary.json, and prints the closing table.
Works for a run that failed or still goes on, with what is known by then."""


def main(arguments: Sequence[str]) -> ExitCode:
    """Run the verb."""
    parser = OneLineParser(prog="diloco report", description=DOES)
    parser.add_argument("run", metavar="RUN_DIR", help="a run's folder, or its name below runs/")
    run_dir = existing_run(parser.parse_args(arguments).run).root
    summary, history = rebuild(run_dir)
    print("\n".join(closing_lines(summary, history, run_dir)))
    print(f"report  {run_dir / 'report.html'}")
    return ExitCode.OK
