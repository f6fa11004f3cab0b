from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diloco.config.errors import ExitCode, VerbError
from diloco.config.run_dir import SiteDir
from diloco.runs.site_machines import Ranks, ending_of_ranks, forget_ending, tell_speaker

BOUND_S = 30.0
PRETENDED = """#!/bin/sh
echo "$@" >&2
sleep 600 &
echo $! > "$FOLDER/below.new"
mv "$FOLDER/below.new" "$FOLDER/below"
wait
"""


def test_torchrun_is_started_for_this_machine_and_ends_with_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(PRETENDED)
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setenv("FOLDER", str(tmp_path))
    ranks = Ranks(2, tmp_path / "config.yaml", tmp_path / "own" / "torchrun.log")
    ranks.kill()  # Of nothing.
    ranks.start(3, "place")
    until = time.monotonic() + BOUND_S
    while not (tmp_path / "below").exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    assert ranks.code() is None
    below = int((tmp_path / "below").read_text())
    ranks.kill()
    assert ranks.code() == -9
    while Path(f"/proc/{below}").exists() and "Z" not in Path(f"/proc/{below}/stat").read_text().split()[2]:
        assert time.monotonic() < until, "what torchrun has started is left behind"
        time.sleep(0.01)
    words = ranks.log.read_text().split()
    assert words[:3] == ["-m", "diloco.runs.process", str(os.getpid())]
    assert words[4:] == [
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"),
        *("-m", "diloco.runs.site_rank", str(tmp_path / "config.yaml"), "place"),
    ]


def test_what_ranks_of_before_said_is_forgotten(tmp_path: Path) -> None:
    folder = SiteDir(tmp_path)
    forget_ending(folder)
    for path in (folder.ending, folder.speaker):
        path.write_text("of before")
    forget_ending(folder)
    assert list(tmp_path.iterdir()) == []


def test_how_rank_0_ended_is_how_the_site_ended(tmp_path: Path) -> None:
    folder, ranks = SiteDir(tmp_path), Ranks(1, tmp_path / "config.yaml", tmp_path / "torchrun.log")
    for code in (ExitCode.OK, ExitCode.DRAINED):
        folder.ending.write_text(json.dumps({"code": int(code), "text": "so it was"}))
        assert ending_of_ranks("a", folder, ranks) == (code, "so it was")
    folder.ending.write_text(json.dumps({"code": 4, "text": "another run"}))
    with pytest.raises(VerbError, match="another run") as ended:
        ending_of_ranks("a", folder, ranks)
    assert ended.value.code is ExitCode.MISMATCH


def test_ranks_that_died_without_a_word_are_said_with_the_end_of_their_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(1, tmp_path / "config.yaml", tmp_path / "torchrun.log")
    ranks.log.write_text("x" * 5000 + "the last\nwords")
    monkeypatch.setattr(Ranks, "code", lambda self: -9)
    with pytest.raises(VerbError, match=r"ended with code -9.*the last\s+words") as ended:
        ending_of_ranks("a", SiteDir(tmp_path), ranks)
    assert ended.value.code is ExitCode.FAILED


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def test_each_speaker_is_told_once_it_has_said_who_it_is(tmp_path: Path) -> None:
    folder = SiteDir(tmp_path)
    first, second = sleeper(), sleeper()
    try:
        assert tell_speaker(folder, 0) == 0
        folder.speaker.write_text(str(first.pid))
        told = tell_speaker(folder, 0)
        assert told == first.pid
        assert first.wait(10) == -15
        assert tell_speaker(folder, told) == told, "once more would be at once"
        folder.speaker.unlink()
        assert tell_speaker(folder, told) == told, "nobody is left to be told"
        # The ranks were started again, because one of them was lost while the site was leaving.
        folder.speaker.write_text(str(second.pid))
        assert tell_speaker(folder, told) == second.pid
        assert second.wait(10) == -15
    finally:
        for child in (first, second):
            child.kill()
            child.wait()
