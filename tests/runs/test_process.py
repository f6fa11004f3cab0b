from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest

import diloco
from diloco.cli.main import VERBS
from diloco.config.errors import ConfigError, ExitCode, VerbError
from diloco.durable import PLAIN_DISK
from diloco.inner.parallel import OpenStore
from diloco.runs.process import (
    ARENAS_MAX,
    KILL_VARIABLE,
    LINUX_ONLY,
    PARENT_VARIABLE,
    SAME_REQUEST_S,
    SUPPORT,
    Stopping,
    disk_from_environment,
    refusal,
)
from tests.forked import forkserver
from tests.integrations.serving import serving
from tests.runs import elsewhere
from tests.runs.processes import ROOT, wait_for
from tests.runs.test_supervise import alive


def in_a_new_process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != SUPPORT}
    whole = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([sys.executable, *arguments], env=whole, capture_output=True, text=True, timeout=120)


PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-m", "diloco.runs.process", str(os.getpid()), "sleep", "60"])
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_child_even_a_stopped_one_is_killed_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            wait_for(lambda: Path(f"/proc/{child}/comm").read_text() == "sleep\n", "its command")
            os.kill(child, signal.SIGSTOP)
            parent.kill()
            wait_for(lambda: not alive(child), "its end")
        finally:
            parent.kill()
            if alive(child):
                os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("what", ["diloco.runs.process 1 echo began", "diloco status 127.0.0.1:1"])
def test_a_child_whose_parent_has_gone_does_not_begin_nor_does_a_verb_that_is_tied_to_it(what: str) -> None:
    done = in_a_new_process("-m", *what.split(), **{PARENT_VARIABLE: "1"})
    assert (done.returncode, done.stdout, done.stderr if "status" in what else "") == (1, "", "")


def test_what_is_loaded_is_looked_at_no_more_by_a_collection_of_garbage() -> None:
    keeps = "import gc; from diloco.runs.process import keep_what_is_loaded; keep_what_is_loaded()"
    told = in_a_new_process("-c", f"{keeps}; print(gc.get_freeze_count(), len(gc.get_objects()))").stdout.split()
    kept, searched = map(int, told)
    assert kept > 1000 > searched


COUNT = """
import ctypes, sys, threading
from diloco.runs.process import limit_arenas
limit_arenas()
meet, blocks = threading.Barrier(20), []
def allocate():
    meet.wait()
    blocks.append(bytes(100_000))
    meet.wait()
threads = [threading.Thread(target=allocate) for _ in range(20)]
for thread in threads: thread.start()
for thread in threads: thread.join()
library = ctypes.CDLL(None)
library.fopen.restype = ctypes.c_void_p
file = ctypes.c_void_p(library.fopen(sys.argv[1].encode(), b"w"))
library.malloc_info(0, file)
library.fclose(file)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="this C library has no such pools")
def test_threads_share_few_pools_of_memory(tmp_path: Path) -> None:
    in_a_new_process("-c", COUNT, str(tmp_path / "told"))
    assert 0 < (tmp_path / "told").read_text().count("<heap nr=") <= ARENAS_MAX


@pytest.mark.slow
def test_who_joins_has_said_so_before_grpc_is_imported() -> None:
    joins = f"""
assert "grpc" not in sys.modules
print(os.environ.get({SUPPORT!r}))
diloco.JoinFailed
print(os.environ.get({SUPPORT!r}))
"""
    assert in_a_new_process("-c", f"import os, sys, diloco{joins}").stdout == "None\n0\n"
    titan = "import os, sys, diloco, diloco.titan; diloco.titan.Site"  # A job of torchtitan's joins later.
    assert in_a_new_process("-c", titan + joins, **{SUPPORT: "1"}).stdout == "1\n1\n", "it is left as it was set"


@pytest.mark.slow
def test_a_loaders_workers_are_forked_in_the_middle_of_a_run(tmp_path: Path) -> None:
    with serving(tmp_path, "run.tokens=100000", "data.leased=true", "data.unit_sequences=8") as served:
        done = in_a_new_process(str(ROOT / "tests/integrations/loader_workers.py"), served.address)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "120 0 60\n"
        units = served.syncer.api.status()["units"]
        assert isinstance(units, dict)
        assert (units["merged"], units["repeated"]) == (15, 0), "what was drawn ahead counts for nothing"


RANK = """
import atexit, sys
import torch
from diloco.inner.parallel import SiteGroup
from diloco.runs.process import end_process

# Whoever waits for the interpreter's lock gets it only when this thread waits for something.
sys.setswitchinterval(1000)
atexit.register(lambda: print("at the end"))
rank, world, port = map(int, sys.argv[1:])
group = SiteGroup(rank, rank, world, "127.0.0.1", port, "cpu", 60.0)
try:
    for _ in range(100):
        torch.distributed.all_reduce(torch.ones(4), async_op=True)  # What it is given is gloo's to let go of.
except RuntimeError:
    pass  # The other has ended already.
print("trained", end=" ")
end_process(3)
"""


@pytest.mark.slow
def test_a_process_that_was_a_rank_ends_with_its_code() -> None:
    store = OpenStore()

    def run(rank: int) -> subprocess.CompletedProcess[str]:
        place = (str(rank), "2", str(store.port))
        return in_a_new_process("-c", RANK, *place, TORCHELASTIC_USE_AGENT_STORE="True")

    with ThreadPoolExecutor(2) as both:
        told = list(both.map(run, range(2)))
    assert [each.returncode for each in told] == [3, 3], "no thread of gloo's has aborted it"
    assert [each.stdout for each in told] == ["trained at the end\n"] * 2


def test_the_process_ends_at_the_passage_of_the_step_that_is_named_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for text in ("journal.sync", "journal.sync:0", "journal.sink:1"):
        monkeypatch.setenv(KILL_VARIABLE, text)
        with pytest.raises(ConfigError, match=f"{KILL_VARIABLE}: '{text}' is no place"):
            disk_from_environment()
    monkeypatch.delenv(KILL_VARIABLE)
    assert disk_from_environment() is PLAIN_DISK
    program = (
        "from diloco.durable import Step; from diloco.runs.process import disk_from_environment\n"
        "disk = disk_from_environment()\n"
        "for number in range(5):\n    print(number, flush=True); disk.reached(Step.ACK); disk.reached(Step.FATE)"
    )
    ended = in_a_new_process("-c", program, **{KILL_VARIABLE: "syncer.ack:4"})
    assert (ended.returncode, ended.stdout.split()) == (-signal.SIGKILL, ["0", "1", "2", "3"])


def signalled(number: signal.Signals) -> None:
    """Give this process a signal, and Python the time to see it."""
    os.kill(os.getpid(), number)
    time.sleep(0.01)


def test_before_anything_began_the_first_signal_ends_the_verb() -> None:
    with Stopping("stops") as stopping, pytest.raises(VerbError) as ended:
        signalled(signal.SIGINT)
    assert ended.value.code is ExitCode.DRAINED
    assert stopping.asked


def test_the_first_signal_asks_once_and_an_echo_of_it_is_not_a_second(capfd: pytest.CaptureFixture[str]) -> None:
    asked: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with Stopping("the site leaves") as stopping:
        stopping.ask(lambda: asked.append("please"))
        signalled(signal.SIGTERM)
        signalled(signal.SIGINT)
    assert asked == ["please"]
    assert capfd.readouterr().err == "the site leaves; again: stop at once\n"
    assert signal.getsignal(signal.SIGINT) is before


def test_what_is_ending_with_an_error_is_not_taken_for_drained() -> None:
    """torchrun asks a rank to stop that is about to say that another one is lost."""

    def train() -> None:
        try:
            with Stopping("leaves") as inner:
                inner.ask()
                raise ValueError("rank 1 is lost")
        finally:
            signalled(signal.SIGTERM)

    with Stopping("stops") as outer, pytest.raises(ValueError, match="rank 1 is lost"):
        train()
    assert outer.asked


def test_twice_is_at_once_even_in_a_busy_process() -> None:
    code = (
        "import sys, time\nfrom diloco.runs.process import Stopping\nwith Stopping('stops') as stopping:\n"
        "    stopping.ask()\n    print('ready', flush=True)\n    time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        child.send_signal(signal.SIGINT)
        time.sleep(SAME_REQUEST_S * 2)
        assert child.poll() is None
        child.send_signal(signal.SIGTERM)
        assert child.wait(10) == ExitCode.FAILED


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
        signalled(signal.SIGHUP)
        assert stopping.handing_over
        assert (stopping.asked, asked) == (False, [])
    assert capfd.readouterr().err == "another takes its place\n"
    assert signal.getsignal(signal.SIGHUP) is before


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


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_elsewhere_every_module_is_imported_and_what_needs_linux_says_so_in_one_line(
    system: str, tmp_path: Path
) -> None:
    commands = [*COMMANDS, *((verb, *more) for verb in sorted(LINUX_ONLY) for more in ((), ("--help",)))]
    with ProcessPoolExecutor(1, forkserver()) as other:
        asked = other.submit(elsewhere.be_on, system, tmp_path, [list(each) for each in commands])
        try:
            found, answers = asked.result(WAIT_S)
        except TimeoutError:
            for process in other._processes.values():  # Or the pool would wait for it.
                process.kill()
            raise
    assert not found
    said = dict(zip(commands, answers, strict=True))
    assert {each: said[each] for each, code in COMMANDS.items() if said[each][0] != code} == {}
    for verb in LINUX_ONLY:
        code, line = said[(verb,)]
        assert (code, line.count("\n")) == (2, 1), line
        assert line.startswith(f"diloco {verb}: it needs Linux, and this is {SYSTEMS[system]}: run it in ")
        assert said[verb, "--help"][0] == 0


def test_linux_refuses_no_verb_and_each_that_needs_it_is_one() -> None:
    assert not refusal("linux")
    assert {verb.name for verb in VERBS} > LINUX_ONLY


def test_a_loop_of_its_own_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(RuntimeError, match=r"^diloco\.join: it needs Linux, and this is Windows: run it in WSL 2, a "):
        diloco.join([], [], syncer="127.0.0.1:9", site="fra")
