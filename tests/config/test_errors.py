from __future__ import annotations

import pytest

from diloco.cli import main
from diloco.config.errors import ConfigError, ExitCode, VerbError


def test_codes_are_those_that_scripts_and_schedulers_know() -> None:
    assert {code.name: int(code) for code in ExitCode} == {
        "OK": 0,
        "FAILED": 1,
        "USAGE": 2,
        "UNREACHABLE": 3,
        "MISMATCH": 4,
        "DRAINED": 75,
    }


@pytest.mark.parametrize(
    ("error", "code"),
    [(VerbError(ExitCode.MISMATCH, "not\nthe same"), 4), (ConfigError("wrong"), 2), (KeyboardInterrupt(), 1)],
)
def test_an_error_becomes_its_code_and_one_line(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(arguments: list[str]) -> ExitCode:
        raise error

    monkeypatch.setattr("diloco.cli.status.main", fails)
    assert main.main(["status"]) == code
    assert capsys.readouterr().err.count("\n") == (0 if isinstance(error, KeyboardInterrupt) else 1)


def test_our_own_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(arguments: list[str]) -> ExitCode:
        raise AssertionError("a defect")

    monkeypatch.setattr("diloco.cli.status.main", fails)
    with pytest.raises(AssertionError, match="a defect"):
        main.main(["status"])
