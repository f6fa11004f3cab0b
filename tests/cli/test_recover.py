from __future__ import annotations

from pathlib import Path

import pytest

from diloco.cli.main import main
from diloco.sync.events import SyncerStarted
from diloco.sync.journal import Record
from tests.sync.format_1 import encode_record
from tests.syncer.test_store import told


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "syncer" / "journal"
    folder.mkdir(parents=True)
    (tmp_path / "run" / "events.jsonl").touch()
    for number in (1, 2):
        record = encode_record(Record(number * 10**9, SyncerStarted(number), "0" * 16))
        (folder / f"journal-{number:06d}.log").write_bytes(record)
    return tmp_path / "run"


def test_a_journal_is_shown_as_lines_whatever_names_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for target in (run, run / "syncer"):
        assert main(["journal", "show", str(target)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[1] for line in lines if "SyncerStarted" in line] == ["SyncerStarted"] * 2
        assert lines[1].split()[0] == "1.000000"
        assert lines[3].split()[0] == "2.000000"
    assert main(["journal", "show", str(run / "syncer/journal/journal-000002.log")]) == 0
    assert capsys.readouterr().out.count("SyncerStarted") == 1


def test_a_torn_end_is_said_and_damage_is_an_error(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "syncer/journal/journal-000002.log"
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:20])
    assert main(["journal", "show", str(path)]) == 0
    assert "20 bytes of a turn that was being written" in capsys.readouterr().out
    path.write_bytes(whole[:-3] + b"xxx" + whole)
    assert main(["journal", "show", str(path)]) == 1
    assert "damaged" in capsys.readouterr().err


def test_a_folder_without_a_journal_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "events.jsonl").touch()
    assert main(["journal", "show", str(tmp_path)]) == 2
    assert "holds no journal" in capsys.readouterr().err


def test_everything_is_verified_and_the_first_damage_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    desk = told(tmp_path / "run" / "syncer", snapshots=2)
    (tmp_path / "run" / "events.jsonl").touch()
    for target in (tmp_path / "run", desk.store.folder):
        assert main(["journal", "verify", str(target)]) == 0
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith("whole: ")
        assert " 2 snapshots, " in line
        assert line.endswith(f"in {desk.store.folder}")
    path = max((desk.store.folder / "journal").glob("journal-*.log"))
    with path.open("ab") as file:
        file.write(b"torn")
    assert main(["journal", "verify", str(tmp_path / "run")]) == 0
    assert "the last 4 bytes are of a turn that was being written" in capsys.readouterr().out
    with path.open("r+b") as file:
        file.seek(300)
        file.write(b"?")
    assert main(["journal", "verify", str(tmp_path / "run")]) == 1
    captured = capsys.readouterr()
    assert (captured.out, str(path) in captured.err) == ("", True)
