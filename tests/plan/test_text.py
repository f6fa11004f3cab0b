from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from diloco.plan import studies
from diloco.plan.answer import advice_line, answer, first_line, picture, round_lines, show, values
from diloco.plan.estimate import PRESETS, Question
from diloco.plan.studies import JOB, LAYOUTS

ASKED = Question(parameters=1e9, step_s=1.0, chips=0, fragments=8)
ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "benchmarks" / "results" / "plan.svg"


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studies, "SITE_ROUNDS", 100)


def test_the_picture_in_the_readme_is_what_the_verb_draws() -> None:
    assert COMMITTED.read_text("utf-8") == picture(PRESETS["100t_20dc"])


def test_the_readme_shows_what_the_verb_says(capsys: pytest.CaptureFixture[str]) -> None:
    """But for what fleets were found to do, which is another figure in each test that makes them short."""
    show(answer(PRESETS["100t_20dc"]))
    fleets = (JOB, *LAYOUTS.values())
    readme = (ROOT / "README.md").read_text("utf-8").splitlines()
    said = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in said if not line.strip().startswith(fleets) and line not in readme] == []


def test_the_answer_stands_first(capsys: pytest.CaptureFixture[str]) -> None:
    told = answer(ASKED)
    show(told)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == first_line(told)
    assert max(map(len, said)) <= 160


def test_what_cannot_be_had_is_said_in_words() -> None:
    told = answer(replace(ASKED, overlap_steps=0, rtt_ms=60_000.0, host_gb=1.0))
    assert "no link is fast enough" in first_line(told)
    assert any("no number of them is enough" in line or "these links need" in line for line in round_lines(told))
    assert any("a fragment alone does not fit into 1.00 GB" in line for line in round_lines(told))
    assert "no rhythm and encoding" in advice_line(told)


def test_what_an_entropy_stage_makes_smaller_is_an_upper_bound() -> None:
    lines = [round_lines(answer(replace(ASKED, codec_up=name)))[0] for name in ("int4:32", "int4:32+zstd1")]
    assert ["at most" in line for line in lines] == [False, True]


def test_parameters_are_counted_as_people_do() -> None:
    assert [values(each) for each in (7e6, 175e9, 100e12)] == ["7.00M", "175B", "100T"]
