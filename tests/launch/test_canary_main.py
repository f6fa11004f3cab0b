"""``diloco canary`` says what it found, in its exit code as well."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diloco.cli.main import main
from diloco.runs import canary
from tests.launch.test_canary import digest_of, trained_site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_site(tmp_path_factory.mktemp("site"))


@pytest.mark.slow
def test_a_machine_that_repeats_itself(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["canary", str(site), "--steps", "2"]) == 0
    first, digest, again, verdict = capsys.readouterr().out.splitlines()
    assert "2 steps from step 3 on" in first
    assert digest.split() == ["digest", digest_of(site)]
    assert again.split() == ["again", digest_of(site)]
    assert verdict == "same"


def test_a_digest_from_elsewhere(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["canary", str(site), "--steps", "2", "--json", "--expect", digest_of(site)]) == 0
    assert json.loads(capsys.readouterr().out)["same"] is True
    assert main(["canary", str(site), "--steps", "2", "--expect", "0" * 64]) == 1
    assert "DIFFERENT" in capsys.readouterr().out


def test_two_runs_that_differ(site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    digests = iter((("a" * 64, 3), ("b" * 64, 3)))
    monkeypatch.setattr(canary, "digest_after", lambda *asked: next(digests))
    assert main(["canary", str(site)]) == 1
    assert "DIFFERENT" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "0"], "--steps is 0: at least 1"),
        (["--expect", "xyz"], "--expect is 'xyz': 64 hexadecimal digits"),
        (["--nice", "20"], "--nice is 20: from 0 to 19"),
        ([], "is no site's folder"),
    ],
)
def test_a_users_mistake_is_one_line(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["canary", str(tmp_path), *arguments]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert len(told.splitlines()) == 1
