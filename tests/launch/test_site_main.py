from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.durable import locked
from diloco.launch import run_dir, site_main
from diloco.launch.cli import main
from diloco.launch.config import compose, write
from diloco.launch.errors import ConfigError, ExitCode, VerbError
from diloco.launch.run_dir import SiteDir
from diloco.launch.site_main import check_identity, ending_of_ranks, tell_speaker
from tests.launch.processes import TINY


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([], "run.name is null"),
        (["run.name=x", "site.id='../a'"], r"site.id is '../a'"),
        (["run.name=x", "site.nproc=0"], r"site.nproc is 0: at least 1"),
    ],
)
def test_a_site_says_which_run_and_which_site_it_is(settings: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_identity(compose(settings))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")})
    return tmp_path


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_second_start_touches_nothing_of_the_first(
    nproc: int, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_dir, "HELD_WAIT_S", 0.1)
    folder = SiteDir(Path("runs/x/sites/site-a"))
    with locked(folder.root):
        for path in (folder.config, folder.ending, folder.speaker):
            path.write_text("of the first")
        assert main(["site", *TINY, "run.name=x", "site.id=site-a", f"site.nproc={nproc}"]) == 1
        for path in (folder.config, folder.ending, folder.speaker):
            assert path.read_text() == "of the first"
    assert "is it started twice?" in capsys.readouterr().err


def test_under_torchrun_values_are_checked_and_a_drained_site_has_not_failed(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(compose([*TINY, "run.name=x", "site.id=site-a"]), place / "site.yaml")
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    ends = iter((ExitCode.OK, ExitCode.DRAINED, ExitCode.FAILED))
    monkeypatch.setattr(site_main, "run_rank", lambda config, place: (next(ends), "so it was"))
    assert main(["site", "--config", "site.yaml", "inner.lr=-1"]) == 2
    assert "inner.lr is -1: positive" in capsys.readouterr().err.replace("-1.0", "-1")
    assert [main(["site", "--config", "site.yaml"]) for _ in range(3)] == [0, 0, 1]


def test_how_rank_0_ended_is_how_the_site_ended(tmp_path: Path) -> None:
    folder = SiteDir(tmp_path)
    for code in (ExitCode.OK, ExitCode.DRAINED):
        folder.ending.write_text(json.dumps({"code": int(code), "text": "so it was"}))
        assert ending_of_ranks("a", folder, 1, "") == (code, "so it was")
    folder.ending.write_text(json.dumps({"code": 4, "text": "another run"}))
    with pytest.raises(VerbError, match="another run") as ended:
        ending_of_ranks("a", folder, 1, "")
    assert ended.value.code is ExitCode.MISMATCH


def test_ranks_that_died_without_a_word_are_said_with_the_end_of_their_log(tmp_path: Path) -> None:
    with pytest.raises(VerbError, match=r"ended with code -9.*the last\s+words") as ended:
        ending_of_ranks("a", SiteDir(tmp_path), -9, "x" * 5000 + "the last\nwords")
    assert ended.value.code is ExitCode.FAILED


def test_the_speaker_is_told_once_it_has_said_who_it_is(tmp_path: Path) -> None:
    folder = SiteDir(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert not tell_speaker(folder, child)
        folder.speaker.write_text(str(child.pid))
        assert tell_speaker(folder, child)
        assert child.wait(10) == -15
        folder.speaker.unlink()
        assert tell_speaker(folder, child), "nobody is left to be told"
    finally:
        child.kill()
        child.wait()
