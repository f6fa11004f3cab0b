"""``diloco sim`` from the command line."""

from __future__ import annotations

import json

import pytest

from diloco.launch.cli import main
from diloco.sim import studies
from tests.launch.processes import TINY


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_the_table_of_goodput(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studies, "HOURS", 4.0)
    assert main(["sim", "+scenario=goodput_decoupled", "--json"]) == 0
    found = told(capsys)
    assert found["max_error_points"] <= 5  # type: ignore[operator]
    assert len(found["cells"]) == 18  # type: ignore[arg-type]


def test_the_table_of_bandwidths(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "+scenario=bandwidth_streaming"]) == 0
    said = capsys.readouterr().out
    assert "streaming               1B 50%" in said
    assert "steps of the grid off" in said


def test_a_run_of_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    faults = ["--interruptions-per-day", "200"]
    assert main(["sim", *TINY, "cluster=local3", "network=wan", "--json", "--hours", "1", *faults]) == 0
    found = told(capsys)
    sites = found["sites"]
    assert isinstance(sites, dict)
    assert len(sites) == 3
    for site in sites.values():
        assert site["trained_share"] + site["waited_share"] + site["away_share"] == pytest.approx(1.0, abs=1e-4)
        assert site["away_share"] > 0
        assert site["bytes_up"] > 0
    assert main(["sim", *TINY, "cluster=local3"]) == 0
    assert "goodput" in capsys.readouterr().out


def test_hours_are_how_long_the_run_lasts_and_without_them_it_ends_by_itself(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It once ended after run.seconds whatever --hours said, and everybody was said to wait for the rest."""
    assert main(["sim", *TINY, "cluster=local3", "network=wan", "--hours", "0.5", "--json"]) == 0
    found = told(capsys)
    assert found["simulated_s"] == 1800
    assert found["goodput"] > 0.95  # type: ignore[operator]
    assert main(["sim", *TINY, "cluster=local3", "network=wan", "--json"]) == 0
    found = told(capsys)
    assert 100 < found["simulated_s"] < 110  # type: ignore[operator]
    assert found["goodput"] > 0.95  # type: ignore[operator]


def test_a_run_that_never_ends_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["cluster=local3", "outer.quorum=4", "run.seconds=null", "run.tokens=1000"]
    assert main(["sim", *TINY, *settings]) == 2
    said = capsys.readouterr().err
    assert "0 of 1000 tokens are merged" in said
    assert "--hours" in said
    assert len(said.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["+scenario=goodput_decouple"], "+scenario is 'goodput_decouple': did you mean goodput_decoupled?"),
        (
            ["+scenario=bandwidth_streaming", "outer.lr=1"],
            "outer.lr=1: +scenario=bandwidth_streaming is as it was published",
        ),
        (["--step-s", "0"], "--step-s is 0: must be from 1e-06 to 1e+09"),
        (["--step-s", "1e-12"], "--step-s is 1e-12: must be from"),
        (["--hours", "inf"], "--hours is inf: must be from"),
        (["--merge-s", "inf"], "--merge-s is inf: must be from 0 to 86400"),
        (["--interruptions-per-day", "-1"], "--interruptions-per-day is -1: must be from 0 to 86400"),
        (["--interruptions-per-day", "inf"], "--interruptions-per-day is inf"),
        (["--region-interruptions-per-day", "nan"], "--region-interruptions-per-day is nan"),
        (["codec.up=int3"], "codec: "),
        (["outer.lrr=1"], "outer.lrr"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.strip().splitlines()) == 1
