"""The machines of a site find each other, and nobody else comes in."""

from __future__ import annotations

import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator
from functools import cache
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from diloco.config.compose import compose
from diloco.config.errors import ConfigError
from diloco.config.run_dir import SiteDir
from diloco.config.schema import RunConfig
from diloco.runs import site_machines
from diloco.runs.site_machines import Gone, Line, Machines, Order, Report, check_machines, differs, reached

BOUND_S = 30.0


@cache
def config(*settings: str) -> RunConfig:
    return compose(["site.nodes=3", "site.rendezvous=127.0.0.1:0", *settings])


def wait(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["site.nodes=0"], "site.nodes is 0: at least 1"),
        (["site.node_rank=3"], "site.node_rank is 3: from 0 to 2, with site.nodes=3"),
        (["site.node_rank=-1"], "site.node_rank is -1: from 0"),
        (["site.nodes_wait_s=0"], r"site.nodes_wait_s is 0.0: seconds, more than 0"),
        (["site.rendezvous=''"], "site.rendezvous is '': HOST:PORT of machine 0"),
        (["site.rendezvous=node-a"], "site.rendezvous is 'node-a': HOST:PORT"),
        (["site.rendezvous=node-a:70000"], "site.rendezvous is 'node-a:70000': HOST:PORT"),
    ],
)
def test_what_cannot_be_is_named(settings: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match="^" + words):
        check_machines(config(*settings))


def test_what_can_be_is_taken() -> None:
    check_machines(compose([]))
    check_machines(config("site.node_rank=2"))
    assert site_machines.rendezvous_of(config("site.rendezvous='[::1]:29500'")) == ("::1", 29500)


def test_only_a_few_settings_may_be_others_on_each_machine() -> None:
    here = site_machines.configs.as_text(config())
    own = ["site.node_rank=1", "site.rendezvous=a:1", "run.dir=there", "data.path=x", "data.cache=y"]
    assert differs(here, site_machines.configs.as_text(config(*own))) == ""
    assert differs(here, site_machines.configs.as_text(config("site.nproc=2"))) == (
        "site.nproc is 2 here and 1 on machine 0: the machines of a site have the same settings"
    )


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    monkeypatch.setattr(site_machines, "KNOCK_S", BOUND_S)
    with Machines(config(), SiteDir(tmp_path)) as made:
        yield made


def come(first: Machines, folder: Path, node: int) -> Line:
    line = reached(config(f"site.node_rank={node}"), SiteDir(folder))
    before = first.lives.get(node)

    def taken_in() -> bool:
        first.attend(Order())
        return first.lives.get(node) not in (None, before)

    wait(taken_in, "the machine to be taken in")
    return line


def heard(line: Line) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    wait(lambda: bool(found.extend(line.heard()) or found), "a word")
    return found


def test_the_first_says_what_is_to_be_done_and_hears_what_was(first: Machines, tmp_path: Path) -> None:
    one, two = come(first, tmp_path, 1), come(first, tmp_path, 2)
    assert sorted(first.lives) == [1, 2]
    assert first.reports[1] == Report()
    first.attend(Order(start=0, port=99))
    wait(lambda: heard(one)[-1]["port"] == 99, "the order")
    two.say({"running": 0, "ended": -1, "code": 0, "leave": True})

    def reported() -> bool:
        first.attend(Order(start=0, port=99))
        return first.reports[2] == Report(running=0, leave=True)

    wait(reported, "the report")
    lives = dict(first.lives)
    one.close()

    def gone() -> bool:
        first.attend(Order())
        return 1 not in first.lives

    wait(gone, "the loss to be seen")
    again = come(first, tmp_path, 1)
    assert first.lives[1] != lives[1], "one that has come back is another"
    more = come(first, tmp_path, 1)  # The first does not know yet that the one before is no more.
    with pytest.raises(Gone):
        wait(lambda: bool(list(again.heard()) and False), "the end")
    for line in (again, more, two):
        line.close()


def test_who_says_nothing_is_gone(first: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = come(first, tmp_path, 1)
    monkeypatch.setattr(site_machines, "SILENT_S", 0.0)
    time.sleep(0.001)
    first.attend(Order())
    assert first.lives == {}
    with pytest.raises(Gone):
        list(line.heard())
    line.close()


def test_who_is_cut_off_in_the_middle_of_a_word_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_machines, "SILENT_S", 1.0)
    here, there = socket.socketpair()
    line = Line(Connection(here.detach()))
    with there:
        there.sendall(struct.pack("!i", 100) + b"{")
        with pytest.raises(Gone):
            list(line.heard())
    line.close()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["site.node_rank=1", "outer.lr=0.1"], "outer.lr is 0.1 here and "),
        (["site.node_rank=0"], "site.node_rank is 0: from 1 to 2 beside machine 0"),
    ],
)
def test_who_does_not_belong_to_the_site_is_told_why(
    first: Machines, tmp_path: Path, settings: list[str], words: str
) -> None:
    line = reached(config(*settings), SiteDir(tmp_path))
    told: list[dict[str, object]] = []

    def answered() -> bool:
        first.attend(Order())
        try:
            told.extend(line.heard())
        except Gone:
            return True
        return bool(told)

    wait(answered, "an answer")
    assert str(told[0]["refused"]).startswith(words)
    assert first.lives == {}
    line.close()


def test_a_first_machine_that_is_not_there_is_told_from_one_in_another_folder(tmp_path: Path) -> None:
    here, there = SiteDir(tmp_path / "here"), SiteDir(tmp_path / "there")
    with pytest.raises(OSError, match="No such file"):
        reached(config("site.node_rank=1"), here)
    here.root.mkdir()
    there.root.mkdir()
    with Machines(config(), here) as first:
        assert stat.S_IMODE(here.meeting.stat().st_mode) == 0o600
        known = config("site.node_rank=1", f"site.rendezvous=127.0.0.1:{first.port}")
        with pytest.raises(AuthenticationError, match="is not there"):
            reached(known, there)
        there.meeting.write_text('{"host": "x", "port": 1, "key": "00"}')
        with pytest.raises(AuthenticationError):
            reached(known, there)
        there.meeting.write_text("nonsense")
        with pytest.raises(OSError, match="JSONDecodeError"):
            reached(known, there)
    assert not here.meeting.exists()
    with pytest.raises(OSError, match="refused"):
        reached(known, here)


def test_a_port_that_cannot_be_had_is_said(tmp_path: Path) -> None:
    with Machines(config(), SiteDir(tmp_path)) as first:
        taken = config(f"site.rendezvous=127.0.0.1:{first.port}")
        with pytest.raises(ConfigError, match=r"^site\.rendezvous is '127\.0\.0\.1:\d+': Address already in use"):
            Machines(taken, SiteDir(tmp_path)).__enter__()
