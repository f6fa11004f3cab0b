from __future__ import annotations

from pathlib import Path

import pytest

from diloco.cli.status import report
from diloco.config.errors import ConfigError, ExitCode, VerbError
from tests.launch.recorded import Recorder, write


def test_it_writes_the_report_and_prints_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "events.jsonl", Recorder(10).record()[:200])
    assert report([str(tmp_path)]) is ExitCode.OK
    out = capsys.readouterr().out
    assert "the run did not come to its end" in out
    assert (tmp_path / "report.html").is_file()
    assert str(tmp_path / "report.html") in out


def test_what_is_no_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no run folder"):
        report([str(tmp_path)])
    with pytest.raises(VerbError):
        report([])
