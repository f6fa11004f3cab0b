"""Several syncers behind one command: what starts again, what ends all, and which signals reach them."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco.config.errors import ExitCode, VerbError
from diloco.runs.process import Child
from diloco.runs.syncers import keep_running
from tests.runs.processes import wait_for

SERVES = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
signal.signal(signal.SIGHUP, lambda *_: sys.exit(75))
Path(sys.argv[1]).write_text(sys.argv[2])
with open(sys.argv[1] + ".starts", "a") as starts:
    print(*sys.argv[3:], file=starts)
"""
UNTIL_TOLD = "time.sleep(60)"


def syncers(folder: Path, *codes: str) -> dict[Path, Child]:
    """A stand-in for each of ``codes``: it writes its address, and then runs the code."""
    made = {}
    for index, code in enumerate(codes):
        path = folder / f"{index}.address"
        command = [sys.executable, "-c", SERVES + code, str(path), f"host:{index}"]
        made[path] = Child(f"syncer-{index}", command, folder / f"{index}.log")
    return made


def asking(*requests: tuple[float, signal.Signals]) -> Callable[[list[str]], None]:
    """Give this process each signal so many seconds after all have begun."""

    def begun(addresses: list[str]) -> None:
        for after_s, number in requests:
            threading.Timer(after_s, os.kill, (os.getpid(), number)).start()

    return begun


def starts(path: Path) -> int:
    return len(Path(f"{path}.starts").read_text().splitlines())


def test_all_addresses_are_told_once_and_a_finished_one_is_not_started_again(tmp_path: Path) -> None:
    made, told = syncers(tmp_path, "time.sleep(.5)", "time.sleep(.8)"), list[list[str]]()
    stale = next(iter(made))
    stale.write_text("of an earlier process")
    os.utime(stale, (1, 1))
    assert keep_running(made, told.append) is ExitCode.OK
    assert told == [["host:0", "host:1"]]
    assert [starts(path) for path in made] == [1, 1]


def test_what_a_syncer_prints_after_its_greeting_is_printed_with_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dies_once = "if len(open(sys.argv[1] + '.starts').readlines()) < 2: sys.exit(3)"
    prints = "print('a greeting\\na site joins with:  it\\nBEHIND: an old copy', flush=True); time.sleep(.5)\n"
    assert keep_running(syncers(tmp_path, prints + dies_once), lambda addresses: None) is ExitCode.OK
    said = [line for line in capsys.readouterr().out.splitlines() if "again" not in line]
    assert said == ["[syncer-0] BEHIND: an old copy"] * 2


def test_one_that_dies_is_started_again_and_the_other_is_left_alone(tmp_path: Path) -> None:
    dies_once = (
        "time.sleep(1)\nif sys.argv[2] == 'host:1' and len(open(sys.argv[1] + '.starts').readlines()) < 2: sys.exit(3)"
    )
    made = syncers(tmp_path, "time.sleep(2)", dies_once)
    assert keep_running(made, lambda addresses: None) is ExitCode.OK
    assert [starts(path) for path in made] == [1, 2]
    # What the command says of an existing run holds for the first start alone.
    assert Path(f"{list(made)[1]}.starts").read_text().splitlines() == ["", "run.resume=auto"]


def test_one_that_cannot_start_ends_all_with_its_own_words_and_code(tmp_path: Path) -> None:
    made = syncers(tmp_path, UNTIL_TOLD)
    refused = "import sys; print('cluster.syncer.listen is taken'); sys.exit(2)"
    made[tmp_path / "other"] = Child("syncer-1", [sys.executable, "-c", refused], tmp_path / "1.log")
    with pytest.raises(VerbError, match=r"syncer-1 ended with exit code 2: cluster\.syncer\.listen is taken") as raised:
        keep_running(made, lambda addresses: None)
    assert raised.value.code is ExitCode.USAGE
    assert not any(child.running for child in made.values())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_request_to_stop_reaches_each_and_the_run_is_drained(tmp_path: Path, number: signal.Signals) -> None:
    made = syncers(tmp_path, UNTIL_TOLD, UNTIL_TOLD)
    assert keep_running(made, asking((0.2, number))) is ExitCode.DRAINED
    assert [starts(path) for path in made] == [1, 1]


def test_one_whose_settings_are_refused_later_costs_only_its_own_fragments(tmp_path: Path) -> None:
    refused = "time.sleep(.5); print('permissions is no JSON'); sys.exit(2)"
    made = syncers(tmp_path, "time.sleep(1.5)", refused)
    assert keep_running(made, lambda addresses: None) is ExitCode.FAILED
    assert [starts(path) for path in made] == [1, 1]
    assert [child.code for child in made.values()] == [0, 2]


def test_one_that_fails_after_the_request_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fails = "signal.signal(signal.SIGTERM, lambda *_: (print('memory is damaged', flush=True), sys.exit(1)));"
    made = syncers(tmp_path, UNTIL_TOLD, fails + UNTIL_TOLD)
    assert keep_running(made, asking((0.3, signal.SIGTERM))) is ExitCode.FAILED
    assert "syncer-1 ended with exit code 1: memory is damaged" in capfd.readouterr().out


def test_a_hand_over_ends_the_wait_for_a_last_round(tmp_path: Path) -> None:
    waits = "signal.signal(signal.SIGTERM, lambda *_: None); time.sleep(60)"
    made = syncers(tmp_path, waits, waits)
    assert keep_running(made, asking((0.3, signal.SIGTERM), (0.8, signal.SIGHUP))) is ExitCode.DRAINED


def test_one_that_has_died_is_not_started_again_after_the_request(tmp_path: Path) -> None:
    made = syncers(tmp_path, UNTIL_TOLD, "time.sleep(.3); sys.exit(3)")
    dies = list(made.values())[1]

    def begun(addresses: list[str]) -> None:
        def ask() -> None:
            wait_for(lambda: dies.code == 3, "its death")  # Half a second of back-off begins.
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=ask).start()

    assert keep_running(made, begun) is ExitCode.DRAINED
    assert [starts(path) for path in made] == [1, 1]


def test_one_that_is_ended_while_it_starts_leaves_the_run_to_be_resumed(tmp_path: Path) -> None:
    made = syncers(tmp_path, UNTIL_TOLD)
    slow = tmp_path / "slow"
    made[slow] = Child("syncer-1", [sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "1.log")
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert keep_running(made, lambda addresses: None) is ExitCode.DRAINED
    assert made[slow].code == -signal.SIGTERM
