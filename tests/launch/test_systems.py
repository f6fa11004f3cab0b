from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest

import diloco
from diloco.launch.cli import VERBS
from diloco.launch.systems import LINUX_ONLY, refusal
from tests.forked import forkserver
from tests.launch import elsewhere

WAIT_S = 120
SYSTEMS = {"darwin": "macOS", "win32": "Windows"}
# What does not need Linux, with arguments that have it do something, and how that ends.
COMMANDS = {
    ("plan", "+experiment=100t_20dc"): 0,
    ("sim",): 0,
    ("launch", "docker", "--dry-run", "--to", "files"): 0,
    ("certs", "init", "keys", "--force"): 0,
    ("status", "127.0.0.1:9"): 3,
    ("drain", "127.0.0.1:9"): 3,
    ("doctor",): 0,
    ("report", "nothing"): 2,
    ("export", "nothing", "--to", "folder"): 2,
    ("generate", "nothing", "once"): 2,
}


@cache
def on(system: str, folder: Path) -> tuple[dict[str, str], dict[tuple[str, ...], tuple[int, str]]]:
    """Return what fails on ``system`` when it is imported, and what commands say there."""
    commands = [*COMMANDS, *((verb, *more) for verb in sorted(LINUX_ONLY) for more in ((), ("--help",)))]
    context = forkserver()
    here, there = context.Pipe()
    process = context.Process(target=elsewhere.be_on, args=(system, folder, [list(each) for each in commands], there))
    process.start()
    there.close()
    try:
        assert here.poll(WAIT_S), "it says nothing"
        found, said = here.recv()
    finally:
        process.kill()
        process.join(WAIT_S)
    return found, dict(zip(commands, said, strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elsewhere")


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_every_module_can_be_imported_elsewhere(system: str, folder: Path) -> None:
    found, _ = on(system, folder)
    assert not found


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_what_needs_linux_says_so_in_one_line_and_has_its_help(system: str, folder: Path) -> None:
    _, said = on(system, folder)
    for verb in LINUX_ONLY:
        code, line = said[(verb,)]
        assert (code, line.count("\n")) == (2, 1), line
        assert line.startswith(f"diloco {verb}: it needs Linux, and this is {SYSTEMS[system]}: run it in ")
        assert said[verb, "--help"][0] == 0


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_what_does_not_need_it_works(system: str, command: tuple[str, ...], folder: Path) -> None:
    _, said = on(system, folder)
    assert said[command][0] == COMMANDS[command], said[command][1]


def test_linux_refuses_no_verb_and_each_that_needs_it_is_one() -> None:
    assert not refusal("linux")
    assert {verb.name for verb in VERBS} > LINUX_ONLY


def test_a_loop_of_its_own_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(RuntimeError, match=r"^diloco\.join: it needs Linux, and this is Windows: run it in WSL 2, a "):
        diloco.join([], [], syncer="127.0.0.1:9", site="fra")
