"""``diloco journal show``: the syncer's journal as lines, so that an incident can be read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from diloco.launch.arguments import OneLineParser
from diloco.launch.errors import ConfigError, ExitCode, VerbError
from diloco.launch.run_dir import existing_run

if TYPE_CHECKING:
    from collections.abc import Sequence

DOES = """diloco journal show RUN_DIR     every event that changed the outer machine: instant in seconds, event, fields,
                                digest of what came of it; a run folder, a syncer's data folder or one .log file"""


def main(arguments: Sequence[str]) -> ExitCode:
    """Run the verb."""
    from diloco.sync.journal import JournalError, describe, read_records

    parser = OneLineParser(prog="diloco journal", description=DOES)
    parser.add_argument("what", choices=["show"])
    parser.add_argument("target", metavar="RUN_DIR|FILE")
    given = parser.parse_args(arguments)
    for path in segments(given.target):
        try:
            records, end = read_records(path.read_bytes())
        except (JournalError, OSError) as error:
            raise VerbError(ExitCode.FAILED, f"{path}: {error}") from error
        print(f"# {path.name}: {len(records)} records")
        for record in records:
            print(describe(record))
        torn = path.stat().st_size - end
        if torn > 0:
            print(f"# {torn} bytes of a record that was being written")
    return ExitCode.OK


def segments(target: str) -> list[Path]:
    """The journal's files that ``target`` means, oldest first."""
    path = Path(target)
    if path.is_file():
        return [path]
    folder = path / "journal" if (path / "journal").is_dir() else existing_run(target).syncer / "journal"
    found = sorted(folder.glob("journal-*.log"))
    if not found:
        raise ConfigError(f"{target!r} holds no journal: no journal-*.log in {folder}")
    return found
