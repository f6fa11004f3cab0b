from __future__ import annotations

from unittest.mock import Mock

import pytest

from diloco.cli import main
from diloco.config.compose import compose
from diloco.config.errors import ConfigError, ExitCode, VerbError, advice, whole_steps


def test_codes_are_those_that_scripts_and_schedulers_know() -> None:
    codes = {"OK": 0, "FAILED": 1, "USAGE": 2, "UNREACHABLE": 3, "MISMATCH": 4, "DRAINED": 75}
    assert {code.name: int(code) for code in ExitCode} == codes


def test_an_error_becomes_its_code_and_one_line_and_our_own_defect_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for error, code, lines in (
        (VerbError(ExitCode.MISMATCH, "not\nthe same"), 4, 1),
        (ConfigError("wrong"), 2, 1),
        (KeyboardInterrupt(), 1, 0),
    ):
        monkeypatch.setattr("diloco.cli.status.main", Mock(side_effect=error))
        assert main.main(["status"]) == code
        assert capsys.readouterr().err.count("\n") == lines
    monkeypatch.setattr("diloco.cli.status.main", Mock(side_effect=AssertionError("a defect")))
    with pytest.raises(AssertionError, match="a defect"):
        main.main(["status"])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["outer=async", "outer.kind=nesterov", "outer.momentum=0.5"], "outer.share_weighted=true makes of each"),
        (
            ["outer.kind=nesterov", "outer.momentum=0.9", "outer.inner_steps=10"],
            "outer.momentum is 0.9 with outer.inner_steps=10",
        ),
        (["outer=async_dn", "outer.window=2"], "outer.window is 2 and there are 3 sites"),
        (["outer=diloco", "outer.merge=rda"], "outer.merge is rda with outer.lr=0.7 and outer.momentum=0.9"),
        (
            ["outer=decoupled", "outer.staleness_max=5"],
            "outer.staleness_max is 5 and there are 3 sites: under outer.adopt",
        ),
        (
            ["experiment=async_dn", "run.tokens=4000000", "inner.batch_sequences=8", "inner.sequence_length=128"],
            "outer.momentum is 0.9 and run.tokens=4000000 are about 26 windows of outer.window=3 updates",
        ),
        (
            ["experiment=streaming", "codec=int2", "codec.feedback=0"],
            "codec.up is int2:128 with codec.feedback=0 under outer.adopt=blend",
        ),
        (["outer=async", "outer.staleness_power=0.5"], "outer.staleness_power is 0.5 and each update is merged alone"),
    ],
)
def test_what_goes_badly_together_is_said_with_its_settings(settings: list[str], words: str) -> None:
    (said,) = advice(compose(settings))
    assert words in said


@pytest.mark.parametrize(
    "settings",
    [
        ["cluster=one", "outer=async", "outer.kind=nesterov", "outer.momentum=0.5"],
        ["experiment=async_dn", "run.tokens=40000000", "inner.batch_sequences=8", "inner.sequence_length=128"],
        ["experiment=async_dn", "run.tokens=null"],
        ["experiment=streaming", "codec=int2"],
    ],
)
def test_what_goes_well_together_is_not_warned_of(settings: list[str]) -> None:
    assert advice(compose(settings)) == []


@pytest.mark.parametrize("settings", [["experiment=decoupled"], ["experiment=async"]])
def test_19_a_preset_of_whole_steps_says_so(settings: list[str]) -> None:
    (said,) = whole_steps(compose(settings))
    assert said.startswith("outer.share_weighted is false: each outer step is a whole one, as in the paper")
    assert whole_steps(compose([*settings, "outer.share_weighted=true"])) == []


@pytest.mark.parametrize("settings", [[], ["experiment=diloco"], ["experiment=async_dn"], ["outer=buffered"]])
def test_19_what_takes_shares_or_waits_for_all_has_nothing_to_say(settings: list[str]) -> None:
    assert whole_steps(compose(settings)) == []
