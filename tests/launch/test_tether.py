from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-m", "diloco.launch.tether", str(os.getpid()), "sleep", "60"])
time.sleep(float(sys.argv[1]))
print(child.pid, flush=True)
time.sleep(60)
"""


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(pid: int) -> bool:
    until = time.monotonic() + 10
    while running(pid) and time.monotonic() < until:
        time.sleep(0.02)
    return not running(pid)


def test_a_child_even_a_stopped_one_is_killed_with_its_parent() -> None:
    for freeze in (False, True):
        parent = subprocess.Popen([sys.executable, "-c", PARENT, "0.7"], stdout=subprocess.PIPE, text=True)
        assert parent.stdout is not None
        with parent.stdout as out:
            child = int(out.readline())
        try:
            assert running(child)
            if freeze:
                os.kill(child, signal.SIGSTOP)
            parent.kill()
            parent.wait(10)
            assert ends(child), f"child {child} lives on, stopped: {freeze}"
        finally:
            parent.kill()
            if running(child):
                os.kill(child, signal.SIGKILL)


def test_a_child_whose_parent_has_gone_does_not_begin() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "diloco.launch.tether", "1", "echo", "began"], capture_output=True, check=False
    )
    assert done.returncode == 1
    assert not done.stdout


def test_a_verb_is_tied_by_a_variable() -> None:
    environment = {**os.environ, "DILOCO_PARENT": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "diloco", "status", "127.0.0.1:1"], capture_output=True, check=False, env=environment
    )
    assert done.returncode == 1
    assert not done.stderr
