"""Two machines of a site, each in a thread, with ranks that do as the test says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from diloco.config.compose import compose
from diloco.config.errors import ConfigError, ExitCode, VerbError
from diloco.config.run_dir import SiteDir
from diloco.config.schema import RunConfig
from diloco.runs import site_machines
from diloco.runs.site_machines import Another, First, Ranks, ending_of_ranks, forget_ending, tell_speaker

BOUND_S = 30.0


class Killed(BaseException):
    """This machine is no more."""


@cache
def config(*settings: str) -> RunConfig:
    several = ["site.id=a", "site.nodes=2", "site.nproc=2", "site.rendezvous=127.0.0.1:0"]
    return compose([*several, *settings])


def wait(condition: Callable[[], object], what: str) -> None:
    until = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.005)


class Machine:
    """One of them, from when it is started; as its own ranks it has ``places`` and no processes."""

    def __init__(self, settings: RunConfig, folder: Path) -> None:
        self.places: list[dict[str, int]] = []
        self.said: list[str] = []
        self.asked = self.killed = False
        self.how: tuple[ExitCode, str] | BaseException | None = None
        self.log = folder / "torchrun.log"
        self._code: int | None = 0
        part = First if settings.site.node_rank == 0 else Another
        self._part = part(settings, SiteDir(folder), self, self._is_asked, self.said.append)  # type: ignore[arg-type]
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.how = self._part.run()
        except (VerbError, ConfigError, Killed) as error:
            self.how = error

    def _is_asked(self) -> bool:
        if self.killed:
            raise Killed
        return self.asked

    def ended(self) -> tuple[ExitCode, str] | BaseException | None:
        self.thread.join(BOUND_S)
        assert not self.thread.is_alive()
        return self.how

    def runs(self, start: int) -> None:
        """Wait until the ranks of this start run."""
        wait(lambda: self.places and self.places[-1]["start"] == start and self._code is None, f"start {start}")

    # What ``Ranks`` is.

    def start(self, restarts: int, place: str) -> None:
        assert self._code is not None, "those of before have ended"
        assert restarts == 0, "the first machine counts them"
        self.places.append(json.loads(place))
        self._code = None

    def code(self) -> int | None:
        return self._code

    def kill(self) -> None:
        if self._code is None:
            self._code = -9

    def ends(self, code: int) -> None:
        self._code = code


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Machine]]:
    monkeypatch.setattr(site_machines, "RANKS_END_S", 0.05)
    monkeypatch.setattr(site_machines, "KNOCK_EVERY_S", 0.01)
    found: list[Machine] = []

    def make(node_rank: int, *settings: str) -> Machine:
        found.append(Machine(config(f"site.node_rank={node_rank}", *settings), tmp_path))
        return found[-1]

    yield make
    for each in found:
        each.killed = True
        each.thread.join(BOUND_S)


def says(folder: Path, code: int, text: str, *, again: bool = False) -> None:
    """What rank 0 leaves behind."""
    told = {"code": code, "text": text, "start": 0, "again": again}
    SiteDir(folder).ending.write_text(json.dumps(told))


def test_all_ranks_are_started_together_and_end_as_rank_0_did(made: Callable[..., Machine], tmp_path: Path) -> None:
    says(tmp_path, 1, "of a run before")
    second, first = made(1), made(0)
    first.runs(0)
    second.runs(0)
    assert first.places[0] == {**second.places[0], "first": 0}
    assert {key: second.places[0][key] for key in ("first", "world", "start")} == {"first": 2, "world": 4, "start": 0}
    second.ends(0)  # They have done their part, and rank 0 writes its last checkpoint.
    says(tmp_path, 75, "site a drained")
    first.ends(0)
    assert first.ended() == second.ended() == (ExitCode.DRAINED, "site a drained")
    assert [len(first.places), len(second.places)] == [1, 1]
    assert second.said == [] or "machine 1 waits for machine 0 at 127.0.0.1:0, at most 600 s" in second.said[0]


def test_a_loss_anywhere_is_a_new_start_everywhere_and_there_is_an_end_to_it(
    made: Callable[..., Machine], tmp_path: Path
) -> None:
    first, second = (made(node, "site.rank_restarts=3") for node in (0, 1))
    for start, lost in ((0, second), (1, first)):
        first.runs(start)
        second.runs(start)
        says(tmp_path, 1, "a rank was lost", again=True)
        lost.ends(1)
    first.runs(2)
    second.runs(2)
    second.killed = True  # The machine as a whole.
    assert isinstance(second.ended(), Killed)
    wait(lambda: any("waits for machine 1 of 2, at most 600 s" in text for text in first.said), str(first.said))
    again = made(1, "site.rank_restarts=3")
    first.runs(3)
    again.runs(3)
    assert any("machine 1 went away; all ranks are started again" in text for text in first.said)
    assert any("the ranks of machine 1 ended with code 1" in text for text in first.said)
    assert any("the ranks of machine 0 ended with code 1" in text for text in first.said)
    again.ends(-9)
    for how in (first.ended(), again.ended()):
        assert isinstance(how, VerbError)
        assert how.code is ExitCode.FAILED
        assert "site a has lost ranks 4 times (site.rank_restarts=3); at last the ranks of machine 1 ended" in str(how)


def test_the_others_wait_for_a_first_machine_that_comes_back(made: Callable[..., Machine], tmp_path: Path) -> None:
    second, first = made(1), made(0)
    second.runs(0)
    first.killed = True
    assert isinstance(first.ended(), Killed)
    wait(lambda: any("machine 0 went away" in text for text in second.said), str(second.said))
    assert second.code() == -9, "its ranks are ended meanwhile"
    first = made(0)
    first.runs(0)
    wait(lambda: len(second.places) == 2, "the ranks of the other machine")
    says(tmp_path, 4, "another run")
    first.ends(0)
    for how in (first.ended(), second.ended()):
        assert isinstance(how, VerbError)
        assert how.code is ExitCode.MISMATCH
        assert "another run" in str(how)


@pytest.mark.parametrize("where", [0, 1])
def test_a_request_to_stop_reaches_rank_0_wherever_it_comes(
    where: int, made: Callable[..., Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()

    def tell(folder: SiteDir, told: int) -> int:
        asked.set()
        return 7

    monkeypatch.setattr(site_machines, "tell_speaker", tell)
    both = [made(0), made(1)]
    for each in both:
        each.runs(0)
    assert not asked.is_set()
    both[where].asked = True
    assert asked.wait(BOUND_S)
    says(tmp_path, 75, "left in order")
    both[0].ends(0)
    assert [each.ended() for each in both] == [(ExitCode.DRAINED, "left in order")] * 2
    assert both[1].code() == -9, "those that wait for ranks which have left are ended"


def test_who_was_asked_to_stop_and_goes_before_the_site_has_left_is_not_waited_for(
    made: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = threading.Event()
    monkeypatch.setattr(site_machines, "tell_speaker", lambda folder, before: told.set() or 7)
    first, second = made(0), made(1)
    second.runs(0)
    second.asked = True
    assert told.wait(BOUND_S)
    second.killed = True  # Asked twice, or its machine was taken away.
    how = first.ended()
    assert isinstance(how, VerbError)
    assert how.code is ExitCode.DRAINED
    assert "stopped while it waited for machine 1 of 2; the same command goes on" in str(how)


@pytest.mark.parametrize(
    ("node_rank", "words"),
    [
        (0, r"waited 0.05 s in vain for machine 1 of 2 \(site.nodes_wait_s\)"),
        (1, r"waited 0.05 s in vain for machine 0 at 127.0.0.1:0 \(site.nodes_wait_s; .*machines.json is where"),
    ],
)
def test_nobody_waits_for_ever(node_rank: int, words: str, made: Callable[..., Machine]) -> None:
    how = made(node_rank, "site.nodes_wait_s=0.05").ended()
    assert isinstance(how, VerbError)
    with pytest.raises(VerbError, match=words):
        raise how


@pytest.mark.parametrize("node_rank", [0, 1])
def test_who_waits_can_be_asked_to_stop(node_rank: int, made: Callable[..., Machine]) -> None:
    alone = made(node_rank)
    wait(lambda: alone.said, "a word")
    alone.asked = True
    how = alone.ended()
    assert isinstance(how, VerbError)
    assert how.code is ExitCode.DRAINED


def test_a_machine_with_another_folder_or_other_settings_is_told(
    made: Callable[..., Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(0)
    wait((tmp_path / "machines.json").is_file, "the first machine")
    how = made(1, "site.nproc=3").ended()
    assert isinstance(how, ConfigError)
    assert str(how).startswith("site.nproc is 3 here and 2 on machine 0")
    monkeypatch.setattr(site_machines, "SEEN_S", 0.0)
    port = json.loads((tmp_path / "machines.json").read_text())["port"]
    (tmp_path / "there").mkdir()
    elsewhere = Machine(config("site.node_rank=1", f"site.rendezvous=127.0.0.1:{port}"), tmp_path / "there")
    how = elsewhere.ended()
    assert isinstance(how, ConfigError)
    assert str(how).startswith("run.dir is 'runs': machine 0 at 127.0.0.1:")
    assert str(how).endswith("the machines of a site share one folder")


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
