from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco.runs.process import PARENT_VARIABLE, Child, Interrupts, child_environment, descendants, end_all
from tests.runs.processes import wait_for

SLEEPER = "import time; print('up', flush=True); time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
FAMILY = (
    "import subprocess, sys, time; "
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); print('up', flush=True); time.sleep(60)"
)


def python(code: str, log: Path) -> Child:
    return Child("site-a", [sys.executable, "-c", code], log)


def started(code: str, log: Path) -> Child:
    child = python(code, log)
    child.start(child_environment(os.environ))
    return child


def says_up(child: Child) -> Callable[[], bool]:
    return lambda: child.last_words() == "up"


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def alive(pid: int) -> bool:
    try:
        return state(pid) != "Z"
    except OSError:
        return False


def test_a_child_writes_to_its_log_and_its_end_is_seen_once(tmp_path: Path) -> None:
    child = python("print('one'); print('  the cause  '); raise SystemExit(4)", tmp_path / "logs" / "a.log")
    assert not child.running
    child.start(child_environment(os.environ))
    wait_for(child.ended, "its end")
    assert (child.code, child.ended(), child.running) == (4, False, False)
    assert child.last_words() == "the cause"
    child.command = [sys.executable, "-c", "pass"]
    child.start(child_environment(os.environ))
    wait_for(child.ended, "its end")
    assert child.last_words() == "", "the words of an earlier process"
    assert child.log.read_text().startswith("one")


def test_all_end_by_asking_also_a_frozen_one_and_the_stubborn_by_force(tmp_path: Path) -> None:
    codes = (SLEEPER, SLEEPER, STUBBORN, "pass")
    children = [started(code, tmp_path / str(number)) for number, code in enumerate(codes)]
    for child in children[:3]:
        wait_for(says_up(child), "its word")
    children[0].signal(signal.SIGSTOP)
    wait_for(lambda: state(children[0].pid) == "T", "its stop")
    began = time.monotonic()
    end_all(children, 0.5)
    assert time.monotonic() - began < 3
    assert [child.code for child in children[:3]] == [-signal.SIGTERM, -signal.SIGTERM, -signal.SIGKILL]
    assert not any(alive(child.pid) for child in children)
    end_all(children, 0.5)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_what_cannot_be_passed_on_reaches_the_descendants(tmp_path: Path, number: signal.Signals) -> None:
    child = started(FAMILY, tmp_path / "a")
    wait_for(says_up(child), "its word")
    (grandchild,) = descendants(child.pid)
    child.signal(number)
    if number == signal.SIGSTOP:
        wait_for(lambda: state(grandchild) == state(child.pid) == "T", "their stop")
    end_all([child], 0.0)
    wait_for(lambda: not alive(grandchild), "the end of both")


def test_back_off_grows_and_is_bounded(tmp_path: Path) -> None:
    child = python("pass", tmp_path / "a")
    child.started_s = 90.0
    for wait_s in (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0):
        assert child.backed_off(100.0) is (wait_s < 15.0)
        assert child.next_start_s == 100.0 + wait_s
    assert child.backed_off(200.0), "it has lived for long"
    assert child.next_start_s == 200.5


def test_the_environment_leads_to_this_package_and_to_its_parent() -> None:
    made = child_environment({"PYTHONPATH": "/else", "HOME": "/h"})
    assert made["PYTHONPATH"] == f"{Path(__file__).resolve().parents[2]}{os.pathsep}/else"
    assert (made["HOME"], made[PARENT_VARIABLE]) == ("/h", str(os.getpid()))


def test_interrupts_are_counted_and_the_same_one_counts_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: interrupts.count == 1, "the first")
        time.sleep(0.25)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: interrupts.count == 2, "the second")
    assert signal.getsignal(signal.SIGINT) is before
