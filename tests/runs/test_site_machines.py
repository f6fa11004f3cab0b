"""Two machines of a site, each in a thread, with ranks that do as the test says."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from diloco.config.compose import compose
from diloco.config.errors import ConfigError, ExitCode, VerbError
from diloco.config.run_dir import SiteDir
from diloco.config.schema import RunConfig
from diloco.runs import site_machines
from diloco.runs.site_machines import (
    Another,
    First,
    Gone,
    Line,
    Machines,
    Order,
    Ranks,
    check_machines,
    differs,
    ending_of_ranks,
    forget_ending,
    reached,
    tell_speaker,
)
from tests.runs.processes import wait_for
from tests.runs.test_supervise import alive

BOUND_S = 30.0


class Killed(BaseException):
    """This machine is no more."""


@cache
def config(*settings: str) -> RunConfig:
    several = ["site.id=a", "site.nodes=2", "site.nproc=2", "site.rendezvous=127.0.0.1:0"]
    return compose([*several, *settings])


class Machine:
    """One of them, from when it is started; as its own ranks it has ``places`` and no processes."""

    def __init__(self, settings: RunConfig, folder: Path) -> None:
        self.places: list[dict[str, int]] = []
        self.said: list[str] = []
        self.leaves = self.killed = False
        self.log = folder / "torchrun.log"
        self.ended_with: int | None = 0
        """By its ranks; None while they run."""
        part = First if settings.site.node_rank == 0 else Another
        self._part = part(settings, SiteDir(folder), self, self)  # type: ignore[arg-type]
        self._part._say = self.said.append  # type: ignore[method-assign]
        thread = ThreadPoolExecutor(1)
        self._how = thread.submit(self._part.run)
        thread.shutdown(wait=False)

    def ended(self) -> tuple[ExitCode, str] | BaseException:
        return self._how.exception(BOUND_S) or self._how.result()

    def fails(self, code: ExitCode, words: str) -> None:
        how = self.ended()
        assert isinstance(how, VerbError | ConfigError)
        assert how.code is code
        assert re.search(words, str(how)), how

    def runs(self, start: int) -> None:
        """Wait until the ranks of this start run."""
        wait_for(
            lambda: self.places and self.places[-1]["start"] == start and self.ended_with is None, f"start {start}"
        )

    # What ``Stopping`` and ``Ranks`` are.

    @property
    def asked(self) -> bool:
        if self.killed:
            raise Killed
        return self.leaves

    def start(self, restarts: int, place: str) -> None:
        assert self.ended_with is not None, "those of before have ended"
        assert restarts == 0, "the first machine counts them"
        self.places.append(json.loads(place))
        self.ended_with = None

    def code(self) -> int | None:
        return self.ended_with

    def kill(self) -> None:
        if self.ended_with is None:
            self.ended_with = -9


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
    hows = [each.ended() for each in found]
    assert all(isinstance(how, tuple | VerbError | ConfigError | Killed) for how in hows), hows


def run_all(start: int, *machines: Machine) -> None:
    for each in machines:
        each.runs(start)


def says(folder: Path, code: int, text: str, *, again: bool = False) -> None:
    """What rank 0 leaves behind."""
    told = {"code": code, "text": text, "start": 0, "again": again}
    SiteDir(folder).ending.write_text(json.dumps(told))


def test_all_ranks_are_started_together_and_end_as_rank_0_did(made: Callable[..., Machine], tmp_path: Path) -> None:
    says(tmp_path, 1, "of a run before")
    second, first = made(1), made(0)
    run_all(0, first, second)
    assert first.places[0] == {**second.places[0], "first": 0}
    assert second.places[0].items() >= {"first": 2, "world": 4, "start": 0}.items()
    second.ended_with = 0  # They have done their part, and rank 0 writes its last checkpoint.
    says(tmp_path, 75, "site a drained")
    first.ended_with = 0
    assert first.ended() == second.ended() == (ExitCode.DRAINED, "site a drained")
    assert [len(first.places), len(second.places)] == [1, 1]
    assert second.said == [] or "machine 1 waits for machine 0 at 127.0.0.1:0, at most 600 s" in second.said[0]


def test_a_loss_anywhere_is_a_new_start_everywhere_and_there_is_an_end_to_it(
    made: Callable[..., Machine], tmp_path: Path
) -> None:
    first, second = (made(node, "site.rank_restarts=3") for node in (0, 1))
    for start, lost in ((0, second), (1, first)):
        run_all(start, first, second)
        says(tmp_path, 1, "a rank was lost", again=True)
        lost.ended_with = 1
    run_all(2, first, second)
    second.killed = True  # The machine as a whole.
    assert isinstance(second.ended(), Killed)
    wait_for(lambda: any("waits for machine 1 of 2, at most 600 s" in text for text in first.said), str(first.said))
    again = made(1, "site.rank_restarts=3")
    run_all(3, first, again)
    said = "\n".join(first.said)
    assert "machine 1 went away; all ranks are started again" in said
    assert "the ranks of machine 1 ended with code 1" in said
    assert "the ranks of machine 0 ended with code 1" in said
    again.ended_with = -9
    for each in (first, again):
        words = r"site a has lost ranks 4 times \(site.rank_restarts=3\); at last the ranks of machine 1 ended"
        each.fails(ExitCode.FAILED, words)


def test_the_others_wait_for_a_first_machine_that_comes_back(made: Callable[..., Machine], tmp_path: Path) -> None:
    second, first = made(1), made(0)
    second.runs(0)
    first.killed = True
    assert isinstance(first.ended(), Killed)
    wait_for(lambda: any("machine 0 went away" in text for text in second.said), str(second.said))
    assert second.code() == -9, "its ranks are ended meanwhile"
    first = made(0)
    first.runs(0)
    wait_for(lambda: len(second.places) == 2, "the ranks of the other machine")
    says(tmp_path, 4, "another run")
    first.ended_with = 0
    for each in (first, second):
        each.fails(ExitCode.MISMATCH, "another run")


@pytest.mark.parametrize("where", [0, 1])
def test_a_request_to_stop_reaches_rank_0_wherever_it_comes(
    where: int, made: Callable[..., Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()
    monkeypatch.setattr(site_machines, "tell_speaker", lambda folder, before: asked.set() or 7)
    both = [made(0), made(1)]
    run_all(0, *both)
    assert not asked.is_set()
    both[where].leaves = True
    assert asked.wait(BOUND_S)
    says(tmp_path, 75, "left in order")
    both[0].ended_with = 0
    assert [each.ended() for each in both] == [(ExitCode.DRAINED, "left in order")] * 2
    assert both[1].code() == -9, "those that wait for ranks which have left are ended"


def test_who_was_asked_to_stop_and_goes_before_the_site_has_left_is_not_waited_for(
    made: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = threading.Event()
    monkeypatch.setattr(site_machines, "tell_speaker", lambda folder, before: told.set() or 7)
    first, second = made(0), made(1)
    second.runs(0)
    second.leaves = True
    assert told.wait(BOUND_S)
    second.killed = True  # Asked twice, or its machine was taken away.
    first.fails(ExitCode.DRAINED, "stopped while it waited for machine 1 of 2; the same command resumes")


def test_a_machine_waits_neither_for_ever_nor_once_it_is_asked_to_stop(made: Callable[..., Machine]) -> None:
    there = (r"1 of 2 \(site.nodes_wait_s\)", r"0 at 127.0.0.1:0 \(site.nodes_wait_s; .*machines.json has its port")
    for node_rank, words in enumerate(there):
        made(node_rank, "site.nodes_wait_s=0.05").fails(ExitCode.FAILED, f"waited 0.05 s for machine {words}")
        alone = made(node_rank)
        wait_for(lambda alone=alone: alone.said, "a word")  # type: ignore[misc]
        alone.leaves = True
        alone.fails(ExitCode.DRAINED, "")


def test_a_machine_with_another_folder_or_other_settings_is_told(
    made: Callable[..., Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(0)
    wait_for((tmp_path / "machines.json").is_file, "the first machine")
    made(1, "site.nproc=3").fails(ExitCode.USAGE, "^site.nproc is 3 here and 2 on machine 0")
    monkeypatch.setattr(site_machines, "SEEN_S", 0.0)
    port = json.loads((tmp_path / "machines.json").read_text())["port"]
    (tmp_path / "there").mkdir()
    elsewhere = Machine(config("site.node_rank=1", f"site.rendezvous=127.0.0.1:{port}"), tmp_path / "there")
    words = "^run.dir is 'runs': machine 0 at 127.0.0.1:.*; the machines of a site share one folder$"
    elsewhere.fails(ExitCode.USAGE, words)


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
    wait_for((tmp_path / "below").exists, "what torchrun starts")
    assert ranks.code() is None
    below = int((tmp_path / "below").read_text())
    ranks.kill()
    assert ranks.code() == -9
    wait_for(lambda: not alive(below), "what torchrun has started is left behind")
    words = ranks.log.read_text().split()
    assert words[:3] == ["-m", "diloco.runs.process", str(os.getpid())]
    assert words[4:] == [
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"),
        *("-m", "diloco.runs.site_rank", str(tmp_path / "config.yaml"), "place"),
    ]


def test_of_ranks_that_end_without_a_word_the_log_is_shown_and_not_what_is_left_of_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ranks = SiteDir(tmp_path), Ranks(1, tmp_path / "config.yaml", tmp_path / "torchrun.log")
    for left in (folder.ending, folder.speaker):
        left.write_text("of before")
    forget_ending(folder)
    forget_ending(folder)
    assert list(tmp_path.iterdir()) == []
    ranks.log.write_text("x" * 5000 + "the last\nwords")
    monkeypatch.setattr(Ranks, "code", lambda self: -9)
    with pytest.raises(VerbError, match=r"ended with code -9.*the last\s+words") as ended:
        ending_of_ranks("a", folder, ranks)
    assert ended.value.code is ExitCode.FAILED


def test_each_speaker_is_told_once_it_has_said_who_it_is(tmp_path: Path) -> None:
    folder, sleeps = SiteDir(tmp_path), [sys.executable, "-c", "import time; time.sleep(60)"]
    told = tell_speaker(folder, 0)
    assert told == 0
    for _ in range(2):  # Ranks are started again, because one of them was lost while the site was leaving.
        with subprocess.Popen(sleeps) as speaker:
            folder.speaker.write_text(str(speaker.pid))
            told = tell_speaker(folder, told)
            assert told == speaker.pid
            assert speaker.wait(10) == -15
        assert tell_speaker(folder, told) == told, "once more would be at once"
    folder.speaker.unlink()
    assert tell_speaker(folder, told) == told, "nobody is left to be told"


three = partial(config, "site.nodes=3")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("site.nodes=0", "site.nodes is 0: at least 1"),
        ("site.node_rank=3", "site.node_rank is 3: from 0 to 2, with site.nodes=3"),
        ("site.node_rank=-1", "site.node_rank is -1: from 0"),
        ("site.nodes_wait_s=0", r"site.nodes_wait_s is 0.0: seconds, more than 0"),
        ("site.rendezvous=''", "site.rendezvous is '': HOST:PORT of machine 0"),
        ("site.rendezvous=node-a:70000", "site.rendezvous is 'node-a:70000': HOST:PORT"),
    ],
)
def test_what_cannot_be_is_named(setting: str, words: str) -> None:
    with pytest.raises(ConfigError, match="^" + words):
        check_machines(three(setting))
    for config in (compose([]), three("site.node_rank=2")):
        check_machines(config)
    assert site_machines.rendezvous_of(three("site.rendezvous='[::1]:29500'")) == ("::1", 29500)


def test_only_a_few_settings_may_be_others_on_each_machine() -> None:
    here = site_machines.configs.as_text(three())
    own = ["site.node_rank=1", "site.rendezvous=a:1", "run.dir=there", "data.path=x", "data.cache=y"]
    assert differs(here, site_machines.configs.as_text(three(*own))) == ""
    assert differs(here, site_machines.configs.as_text(three("site.nproc=3"))) == (
        "site.nproc is 3 here and 2 on machine 0: the machines of a site have the same settings"
    )


@pytest.fixture
def meeting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    monkeypatch.setattr(site_machines, "KNOCK_S", BOUND_S)
    with Machines(three(), SiteDir(tmp_path)) as made:
        yield made


def come(meeting: Machines, folder: Path, node: int) -> Line:
    line = reached(three(f"site.node_rank={node}"), SiteDir(folder))
    before = meeting.lines.get(node)

    def taken_in() -> bool:
        meeting.attend(Order())
        return meeting.lines.get(node) not in (None, before)

    wait_for(taken_in, "the machine to be taken in")
    return line


def test_a_machine_that_has_come_back_is_another_and_its_line_of_before_ends(meeting: Machines, tmp_path: Path) -> None:
    before = come(meeting, tmp_path, 1)
    life = meeting.lines[1]
    again = come(meeting, tmp_path, 1)  # The first does not know yet that the one before is no more.
    assert meeting.lines[1] != life
    with pytest.raises(Gone):
        wait_for(lambda: bool(list(before.heard()) and False), "the end")
    for line in (before, again):
        line.close()


def test_who_says_nothing_or_is_cut_off_in_the_middle_of_a_word_is_gone(
    meeting: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = come(meeting, tmp_path, 1)
    monkeypatch.setattr(site_machines, "SILENT_S", 0.0)
    time.sleep(0.001)
    meeting.attend(Order())
    assert meeting.lines == {}
    monkeypatch.setattr(site_machines, "SILENT_S", 1.0)
    here, there = socket.socketpair()
    torn = Line(Connection(here.detach()))
    with there:
        there.sendall(struct.pack("!i", 100) + b"{")
        for line in (silent, torn):
            with pytest.raises(Gone):
                list(line.heard())
            line.close()


def test_a_machine_of_a_number_that_is_taken_is_told_why(meeting: Machines, tmp_path: Path) -> None:
    line = reached(three("site.node_rank=0"), SiteDir(tmp_path))
    told: list[dict[str, object]] = []

    def answered() -> bool:
        meeting.attend(Order())
        with suppress(Gone):
            told.extend(line.heard())
        return bool(told)

    wait_for(answered, "an answer")
    assert str(told[0]["refused"]).startswith("site.node_rank is 0: from 1 to 2 beside machine 0")
    assert meeting.lines == {}
    line.close()


def test_a_first_machine_that_is_not_there_is_told_from_one_in_another_folder_and_a_taken_port_is_said(
    tmp_path: Path,
) -> None:
    here, there = SiteDir(tmp_path / "here"), SiteDir(tmp_path / "there")
    with pytest.raises(OSError, match="No such file"):
        reached(three("site.node_rank=1"), here)
    here.root.mkdir()
    there.root.mkdir()
    with Machines(three(), here) as meeting:
        assert stat.S_IMODE(here.meeting.stat().st_mode) == 0o600
        known = three("site.node_rank=1", f"site.rendezvous=127.0.0.1:{meeting._door.port}")
        with pytest.raises(AuthenticationError, match="is not there"):
            reached(known, there)
        there.meeting.write_text('{"host": "x", "port": 1, "key": "00"}')
        with pytest.raises(AuthenticationError):
            reached(known, there)
        there.meeting.write_text("nonsense")
        with pytest.raises(OSError, match="JSONDecodeError"):
            reached(known, there)
        taken = three(f"site.rendezvous=127.0.0.1:{meeting._door.port}")
        with pytest.raises(ConfigError, match=r"^site\.rendezvous is '127\.0\.0\.1:\d+': Address already in use"):
            Machines(taken, here).__enter__()
    assert not here.meeting.exists()
    with pytest.raises(OSError, match="refused"):
        reached(known, here)
