"""Processes of the tests begin with everything imported, whichever test is the first to start one."""

from __future__ import annotations

import gc
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.forked import IMPORTED, forkserver

TESTS = Path(__file__).resolve().parent


def tell_missing(told: Connection) -> None:
    told.send([name for name in IMPORTED if name not in sys.modules])
    told.send((gc.get_freeze_count(), len(gc.get_objects())))


def test_a_process_has_imported_everything_when_it_begins_and_does_not_search_it_for_garbage() -> None:
    context = forkserver()
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=tell_missing, args=(there,))
    process.start()
    there.close()
    with here:
        assert here.poll(60.0), "it says nothing"
        assert here.recv() == []
        frozen, searched = here.recv()
        assert frozen > 50 * searched
    process.join(60.0)
    assert process.exitcode == 0


ELSEWHERE = """
import multiprocessing, os, sys
sys.path.insert(0, sys.argv[1])
os.chdir(sys.argv[2])
from tests import forked, test_forked
context = forked.forkserver()
here, there = context.Pipe(duplex=False)
context.Process(target=test_forked.tell_missing, args=(there,)).start()
print(here.recv(), os.getcwd())
"""


@pytest.mark.slow
def test_it_has_imported_everything_also_where_the_first_to_ask_works_in_another_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ELSEWHERE, str(TESTS.parent), str(tmp_path)]
    told = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=120, check=False)
    assert told.stdout == f"[] {tmp_path}\n", told.stderr


def test_nobody_else_starts_the_server_that_processes_are_forked_from() -> None:
    """The first to do so decides for all: lives of a second each took six, in whichever worker had begun so."""
    word = "fork" + "server"
    asks = [path for path in TESTS.rglob("*.py") if f'"{word}"' in path.read_text(encoding="utf-8")]
    assert asks == [TESTS / "forked.py"]
