"""``diloco plan`` from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from xml.etree import ElementTree

import pytest

from diloco.cli.main import main
from diloco.cli.plan import question_of
from diloco.config.build import check
from diloco.config.compose import compose, folder
from diloco.lab import experiment as labs
from diloco.plan import studies
from diloco.plan.estimate import PRESETS, Question
from tests.cli.conftest import Cli
from tests.lab.laboratories import rows, written
from tests.loopback.cluster import eventually


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_answers_in_time(name: str, cli: Cli) -> None:
    began_s = time.process_time()
    found = cli.json("plan", f"+experiment={name}")
    assert time.process_time() - began_s < 10
    assert found["experiment"] == name
    bits = PRESETS[name].parameters * 4.5
    assert found["bytes_per_site_per_round_up"] == found["bytes_per_site_per_round_down"]
    assert 8 * found["bytes_per_site_per_round_up"] == pytest.approx(bits, rel=1e-6)
    assert found["syncer_bytes"] > 0
    assert found["gbps_for_utilisation"] == pytest.approx(found["gbps_for_utilisation_formula"], rel=0.03)
    assert found["goodput"] == pytest.approx(found["goodput_formula"], abs=0.03)


def test_settings_go_over_an_experiment(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.setattr(studies, "SITE_ROUNDS", 100)
    found = cli.json("plan", "+experiment=100t_20dc", "sites=40", "utilisation=0.9", "chips=0")
    assert (found["asked"]["sites"], found["asked"]["utilisation"]) == (40, 0.9)
    assert found["bytes_wan_per_round"] == 39 * 2 * 56.25e12
    assert found["gbps_for_utilisation"] == pytest.approx(0.9 * 2 * 39 / 40 * 8 * 56.25e12 / 3000 / 1e9, rel=0.02)
    name, question = question_of(["experiment=10b_8dc", "up_gbps=1,2,3,4,5,6,7,8", "inner_steps=2e2"])
    assert (name, question.link_gbps, question.inner_steps) == ("10b_8dc", (1.0, 1.0), 200)


def test_a_model_of_ones_own_in_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cli: Cli) -> None:
    monkeypatch.setattr(studies, "SITE_ROUNDS", 100)
    picture = tmp_path / "plan.svg"
    said = cli.out("plan", "parameters=1e9", "step_s=2", "fragments=4", "--plot", str(picture))
    assert said.startswith("1.00B parameters at 4 sites: to train 95 % of the time a site needs ")
    assert "as asked, simulated" in said
    assert "Bytes grow linearly with the parameters" in said
    names = [text.text for text in ElementTree.parse(picture).iter() if "named" in text.get("class", "")]
    assert names == [
        f"{size}: {words}"
        for size in ("1.00B", "10.0M")
        for words in ("one site", "a site with a part of the syncer", "one syncer")
    ]


def test_help_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    said = capsys.readouterr().out
    assert "100t_20dc | gpt3_4dc | 10b_8dc" in said
    settings = [
        line
        for line in said.partition("Settings (in brackets: the defaults without")[2].splitlines()[1:]
        if line.startswith("  ")
    ]
    assert {line.split()[0] for line in settings} == {"experiment=", *(item.name for item in fields(Question))}
    assert any(line.startswith("  up_gbps [10]") for line in settings)
    assert all(len(line.split("]")[-1].split()) > 1 for line in settings), "a setting without a word about it"


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
def test_the_smallest_laboratory_goes_on_where_it_was_and_trains_rows_of_the_same_settings_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cli: Cli
) -> None:
    mine = written(tmp_path, rows("a", "b"))
    asked = ["lab", f"+lab={mine}", "run.tokens=192", "--seeds", "0", "--out", str(tmp_path), "--json"]
    assert main([*asked, "--rows", "a"]) == 0
    said = capsys.readouterr()
    (a,) = json.loads(said.out)["rows"]
    assert "other code" not in said.err
    (cell,) = (tmp_path / "cells").iterdir()
    cell.write_text(cell.read_text("utf-8").replace(labs.code_digest(), "0"), "utf-8")
    made = cell.stat().st_mtime_ns
    assert main(asked) == 0
    said = capsys.readouterr()
    assert [(row["row"], row["losses"]) for row in json.loads(said.out)["rows"]] == [(n, a["losses"]) for n in "ab"]
    assert [each.stat().st_mtime_ns for each in (tmp_path / "cells").iterdir()] == [made], "it was not made again"
    assert "1 of 1 stored cells were trained by other code" in said.err

    told = cli.json("lab", "+lab=smoke", "--out", str(tmp_path), "--jobs", "1", "run.tokens=3840")
    assert [row["row"] for row in told["rows"]] == ["data_parallel", "sync", "decoupled"]
    assert all(row["losses"]["0"] < 5.6 for row in told["rows"]), "untrained: 5.55"
    assert "<svg" in (tmp_path / "smoke" / "report.html").read_text(encoding="utf-8")
