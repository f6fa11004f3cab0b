"""``diloco journal``: print the syncer's journal as lines, to read an incident, or verify all that the syncer keeps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from diloco.launch.arguments import OneLineParser
from diloco.launch.errors import ConfigError, ExitCode, VerbError
from diloco.launch.past import data_of, is_data
from diloco.launch.run_dir import existing_run

if TYPE_CHECKING:
    from collections.abc import Sequence

DOES = """diloco journal show RUN_DIR     every event that changed the outer machine: instant in seconds, event, fields,
                                digest of what came of it; a run folder, a syncer's data folder or one .log file
diloco journal verify RUN_DIR   everything that the syncer keeps, looked at and not touched: chain and marks of the
                                journal, snapshots, payloads; ends with 1 and names the first thing that is damaged"""


def main(arguments: Sequence[str]) -> ExitCode:
    """Run the verb."""
    parser = OneLineParser(prog="diloco journal", description=DOES)
    parser.add_argument("what", choices=["show", "verify"])
    parser.add_argument("target", metavar="RUN_DIR|FILE")
    given = parser.parse_args(arguments)
    return _show(given.target) if given.what == "show" else _verify(given.target)


def _show(target: str) -> ExitCode:
    from diloco.sync.journal import JournalError, describe
    from diloco.syncer.journal_files import read_file

    for path in segments(target):
        try:
            read = read_file(path)
        except (JournalError, OSError) as error:
            raise VerbError(ExitCode.FAILED, str(error)) from error
        print(f"# {path.name}: {len(read.records)} records")
        for record in read.records:
            print(describe(record))
        if read.end < read.size:
            print(f"# {read.size - read.end} bytes of a turn that was being written")
    return ExitCode.OK


def _verify(target: str) -> ExitCode:
    from diloco.sync.journal import JournalError
    from diloco.syncer.snapshots import SnapshotError
    from diloco.syncer.spool import SpoolError
    from diloco.syncer.store import verify

    folder = data_folder(target)
    try:
        found = verify(folder)
    except (JournalError, SnapshotError, SpoolError, OSError) as error:
        raise VerbError(ExitCode.FAILED, str(error)) from error
    print(
        f"whole: {found.records} records in {found.segments} segments, {found.snapshots} snapshots, "
        f"{found.payloads} payloads in {folder}"
    )
    if found.torn_bytes:
        print(f"the last {found.torn_bytes} bytes are of a turn that was being written, and never acknowledged")
    return ExitCode.OK


def data_folder(target: str) -> Path:
    """Return the syncer's data folder of ``target``, which is a run folder or already a data folder."""
    path = Path(target)
    return path if is_data(path) else data_of(existing_run(target))


def segments(target: str) -> list[Path]:
    """Return the journal's files for ``target``, oldest first."""
    path = Path(target)
    if path.is_file():
        return [path]
    folder = data_folder(target) / "journal"
    found = sorted(folder.glob("journal-*.log"))
    if not found:
        raise ConfigError(f"{target!r} holds no journal: no journal-*.log in {folder}")
    return found
