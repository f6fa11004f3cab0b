"""The variable by which a test tells a real process where to die."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from diloco.durable import PLAIN_DISK, KillingDisk
from diloco.launch.arming import KILL_VARIABLE, disk_from_environment
from diloco.launch.errors import ConfigError


def test_the_plain_disk_without_it_and_a_killing_one_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KILL_VARIABLE, raising=False)
    assert disk_from_environment() is PLAIN_DISK
    monkeypatch.setenv(KILL_VARIABLE, "outbox.put:3")
    assert isinstance(disk_from_environment(), KillingDisk)


@pytest.mark.parametrize("text", ["journal.sync", "journal.sync:0", "journal.sync:-1", "journal.sink:1", ":1", "x"])
def test_what_names_no_step_and_passage_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KILL_VARIABLE, text)
    with pytest.raises(ConfigError, match=f"{KILL_VARIABLE}: '{text}' is no place"):
        disk_from_environment()


def test_the_process_ends_at_that_passage_and_not_before() -> None:
    program = (
        "from diloco.durable import Step; from diloco.launch.arming import disk_from_environment\n"
        "disk = disk_from_environment()\n"
        "for number in range(5):\n    print(number, flush=True); disk.reached(Step.ACK); disk.reached(Step.FATE)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], env={KILL_VARIABLE: "syncer.ack:4"}, capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout.split()) == (-signal.SIGKILL, ["0", "1", "2", "3"])
