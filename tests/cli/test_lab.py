from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco.cli.main import main
from diloco.config.build import check
from diloco.config.compose import compose, folder
from diloco.lab import experiment as labs
from tests.lab.laboratories import rows, written
from tests.loopback.cluster import eventually


def test_a_mistake_is_one_line_and_trains_nothing(tmp_path: Path, refused: Callable[..., None]) -> None:
    mine = f"+lab={written(tmp_path, rows('a'))}"
    for arguments, words in (
        ([], "+lab is not given"),
        (["+lab=smok"], "did you mean smoke?"),
        ([mine, "--rows", "b"], "--rows is 'b': one of a"),
        ([mine, "--seeds", "x"], "--seeds is 'x'"),
        ([mine, "--seeds", ""], "--seeds is ''"),
        ([mine, "--jobs", "0"], "--jobs is 0"),
        ([mine, "outer.lrr=1"], "row a: unknown key outer.lrr"),
        ([mine, "run.tokens=null"], "row a: run.tokens is None"),
        ([mine, "outer.kind=nesterov", "outer.momentum=0"], "row a: outer.momentum is 0.0: kind"),
    ):
        refused(2, words, "lab", *arguments, "--out", str(tmp_path / "out"))
    assert not (tmp_path / "out" / "cells").exists()


@pytest.mark.slow
def test_every_row_of_every_laboratory_may_be_trained() -> None:
    """Or it would end the laboratory when its turn comes, hours later."""
    for path in sorted((folder() / "lab").glob("*.yaml")):
        lab = labs.read(path.stem)
        for name, row in lab.rows.items():
            if not row.control:
                check(compose([*labs.OWN, *lab.settings, *row.settings]))
            assert name == lab.reference or row.against in ("", *lab.rows), (path.stem, name)


@pytest.mark.slow
def test_rows_of_the_same_settings_are_trained_once_and_shown_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = written(tmp_path, rows("a", "b"))
    assert main(["lab", f"+lab={mine}", "run.tokens=192", "--seeds", "0", "--out", str(tmp_path), "--json"]) == 0
    said = capsys.readouterr()
    a, b = json.loads(said.out)["rows"]
    assert (a["row"], b["row"]) == ("a", "b")
    assert a["losses"] == b["losses"]
    assert len(a["seconds"]) == len(b["seconds"]) == 1
    (cell,) = (tmp_path / "cells").iterdir()
    assert "other code" not in said.err
    cell.write_text(cell.read_text("utf-8").replace(labs.code_digest(), "0"), "utf-8")
    assert main(["lab", f"+lab={mine}", "run.tokens=192", "--seeds", "0", "--out", str(tmp_path), "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["rows"][0]["losses"] == a["losses"]
    assert "1 of 1 cells that are kept are of other code" in said.err


@pytest.mark.slow
def test_cells_do_not_outlive_a_laboratory_that_is_killed(tmp_path: Path) -> None:
    mine = written(tmp_path, rows("a"))
    command = ["-m", "diloco", "lab", f"+lab={mine}", "run.tokens=1e7", "--out", str(tmp_path), "--jobs", "1"]
    with subprocess.Popen([sys.executable, *command], stderr=subprocess.DEVNULL) as lab:
        at_work: list[Path] = []

        def is_trained() -> bool:
            children = Path(f"/proc/{lab.pid}/task/{lab.pid}/children").read_text(encoding="ascii").split()
            at_work[:] = [Path(f"/proc/{each}/maps") for each in children if "libtorch" in _text(f"/proc/{each}/maps")]
            return bool(at_work)

        eventually(is_trained, 120, "a cell under way")
        lab.kill()
    eventually(lambda: not any(_text(each) for each in at_work), 30, "the cell gone")


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:  # Its process has ended.
        return ""


@pytest.mark.slow
def test_the_smallest_laboratory_ends_and_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``make lab-smoke``, with fewer tokens."""
    less = ["+lab=smoke", "--out", str(tmp_path), "--jobs", "1", "run.tokens=3840", "--json"]
    assert main(["lab", *less, "--rows", "sync"]) == 0
    (sync,) = json.loads(capsys.readouterr().out)["rows"]
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}
    assert main(["lab", *less]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["row"] for row in told["rows"]] == ["data_parallel", "sync", "decoupled"]
    assert told["rows"][1]["losses"] == sync["losses"]
    assert {path: path.stat().st_mtime_ns for path in made} == made, "what was there was not made again"
    assert all(row["losses"]["0"] < 5.6 for row in told["rows"]), "untrained: 5.55"
    assert "<svg" in (tmp_path / "smoke" / "report.html").read_text(encoding="utf-8")
