from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.launch.config import compose
from diloco.launch.errors import ConfigError, ExitCode, VerbError
from diloco.launch.run_dir import SiteDir
from diloco.launch.site_main import check_identity, ending_of_ranks, tell_speaker


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
