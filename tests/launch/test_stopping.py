from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from diloco.launch.errors import ExitCode, VerbError
from diloco.launch.stopping import SAME_REQUEST_S, Stopping


def test_before_anything_began_the_first_signal_ends_the_verb() -> None:
    def wait() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)

    with Stopping("stops") as stopping, pytest.raises(VerbError) as ended:
        wait()
    assert ended.value.code is ExitCode.DRAINED
    assert stopping.asked


def test_the_first_signal_asks_once_and_an_echo_of_it_is_not_a_second(capfd: pytest.CaptureFixture[str]) -> None:
    asked: list[str] = []
    with Stopping("the site leaves") as stopping:
        stopping.ask(lambda: asked.append("please"))
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
    assert asked == ["please"]
    assert capfd.readouterr().err == "the site leaves; once more: at once\n"


def test_handlers_are_given_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Stopping("stops"):
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_what_is_ending_with_an_error_is_not_taken_for_drained() -> None:
    """torchrun asks a rank to stop that is about to say that another one is lost."""

    def train() -> None:
        try:
            with Stopping("leaves") as inner:
                inner.ask(lambda: None)
                raise ValueError("rank 1 is lost")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)

    with Stopping("stops") as outer, pytest.raises(ValueError, match="rank 1 is lost"):
        train()
    assert outer.asked


def test_twice_is_at_once_even_in_a_busy_process() -> None:
    code = (
        "import sys, time\nfrom diloco.launch.stopping import Stopping\nwith Stopping('stops') as stopping:\n"
        "    stopping.ask(lambda: None)\n    print('ready', flush=True)\n    time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        child.send_signal(signal.SIGINT)
        time.sleep(SAME_REQUEST_S * 2)
        assert child.poll() is None
        child.send_signal(signal.SIGTERM)
        assert child.wait(10) == ExitCode.FAILED
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def test_a_hangup_makes_room_where_that_is_offered_and_is_not_ours_elsewhere(
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = signal.getsignal(signal.SIGHUP)
    with Stopping("stops"):
        assert signal.getsignal(signal.SIGHUP) is before
    asked: list[str] = []
    with Stopping("stops", "another takes its place") as stopping:
        stopping.ask(lambda: asked.append("please"))
        assert not stopping.handing_over
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(0.01)
        assert stopping.handing_over
        assert (stopping.asked, asked) == (False, [])
    assert capfd.readouterr().err == "another takes its place\n"
    assert signal.getsignal(signal.SIGHUP) is before
