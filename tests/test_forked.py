"""Test processes start with everything imported, whichever test starts the first one."""

from __future__ import annotations

import gc
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import ages
from benchmarks.peers.task import OUTER_LR, OUTER_MOMENTUM, Task, report, reports_in, round_seconds
from diloco import open_files
from tests.forked import IMPORTED
from tests.runs.processes import place_in

TESTS = Path(__file__).resolve().parent


def found_missing() -> tuple[list[str], int, int]:
    missing = [name for name in IMPORTED if name not in sys.modules]
    return missing, gc.get_freeze_count(), len(gc.get_objects())


ELSEWHERE = """
import json, os, sys
from concurrent.futures import ProcessPoolExecutor
sys.path.insert(0, sys.argv[1])
os.chdir(sys.argv[2])
from tests import forked, test_forked
with ProcessPoolExecutor(1, forked.forkserver()) as pool:
    print(json.dumps([os.getcwd(), *pool.submit(test_forked.found_missing).result()]))
"""


def test_a_process_begins_with_everything_imported_and_frozen_in_whatever_folder_the_first_to_ask_works(
    tmp_path: Path,
) -> None:
    """It then does not search all that for garbage."""
    command = [sys.executable, "-c", ELSEWHERE, str(TESTS.parent), str(tmp_path)]
    told = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=120, check=False)
    assert told.returncode == 0, told.stderr
    folder, missing, frozen, searched = json.loads(told.stdout)
    assert (folder, missing) == (str(tmp_path), [])
    assert frozen > 50 * searched


def test_nobody_else_starts_the_server_that_processes_are_forked_from() -> None:
    """The first start decides for all: in a worker that had started it elsewhere, processes of one second took six."""
    word = "fork" + "server"
    asks = [path for path in TESTS.rglob("*.py") if f'"{word}"' in path.read_text(encoding="utf-8")]
    assert asks == [TESTS / "forked.py"]


# --- The soft limit of open files is raised to the hard one, also in a serving syncer; no crash leaves a core dump ---

INFINITE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("change", "had", "has"),
    [
        (open_files.raise_limit, (1024, 4096), (4096, 4096)),
        (open_files.raise_limit, (1024, 1_000_000), (open_files.WANTED, 1_000_000)),
        (open_files.raise_limit, (1024, INFINITE), (open_files.WANTED, INFINITE)),
        (open_files.raise_limit, (256, 256), None),
        (open_files.raise_limit, (INFINITE, INFINITE), None),
        (open_files.raise_limit, (100_000, 1_000_000), None),
        (open_files.leave_no_core, (0, 0), (0, 0)),
        (open_files.leave_no_core, (0, INFINITE), (1, INFINITE)),
        (open_files.leave_no_core, (INFINITE, INFINITE), (1, INFINITE)),
    ],
)
def test_the_limit_of_open_files_is_raised_and_never_lowered_and_no_crash_leaves_what_was_in_memory(
    change: Callable[[], None], had: tuple[int, int], has: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: had)
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: given.append(limits))
    change()
    assert given == ([] if has is None else [has])


@pytest.mark.slow
def test_a_syncer_that_serves_may_open_what_the_hard_limit_allows(tmp_path: Path) -> None:
    with place_in(tmp_path) as place:
        place.open_files = (256, 600)
        syncer, _ = place.syncer("files")
        assert resource.prlimit(syncer.process.pid, resource.RLIMIT_NOFILE) == (600, 600)


# --- The reference with which the benchmarks compare every system's result -------------------------------------------

TASK = Task(numel=200_000, sites=3, rounds=3, warm_up=2, seed=7)


def by_torch(task: Task, rule: str) -> list[np.ndarray]:
    """Return the final values of all sites, computed by torch on whole tensors."""
    theta = [torch.nn.Parameter(torch.from_numpy(values)) for values in task.zeros()]
    outer = torch.optim.SGD(theta, lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
    for step in range(task.rounds_in_all):
        sites = [[values.detach().clone() for values in theta] for _ in range(task.sites)]
        for site, values in enumerate(sites):
            task.disturb([tensor.numpy() for tensor in values], site, step)
        means = [torch.stack(each).mean(0) for each in zip(*sites, strict=True)]
        with torch.no_grad():
            for values, mean in zip(theta, means, strict=True):
                if rule == "mean":
                    values.copy_(mean)
                else:
                    values.grad = values - mean
        if rule == "nesterov":
            outer.step()
    return [values.detach().numpy() for values in theta]


def test_what_is_expected_is_what_torch_comes_to_and_who_averages_nothing_or_otherwise_is_far_off() -> None:
    alone, later = TASK.zeros(), TASK.zeros()
    for rule in ("mean", "nesterov"):
        assert TASK.error(by_torch(TASK, rule), rule) < 1e-5
    TASK.disturb(alone, 0, 0)
    TASK.disturb(later, 0, 1)
    assert (alone[0] != later[0]).mean() > 0.99, "each round has its own"
    for step in range(1, TASK.rounds_in_all):
        TASK.disturb(alone, 0, step)
    assert TASK.error(alone, "mean") > 0.5
    assert TASK.error(TASK.zeros(), "mean") == pytest.approx(1.0)
    assert TASK.error(by_torch(TASK, "mean"), "nesterov") > 0.2
    with pytest.raises(ValueError, match="rule is 'median': one of mean, nesterov"):
        TASK.expected("median")


def test_a_round_lasts_from_the_last_ready_to_the_last_done(capsys: pytest.CaptureFixture[str]) -> None:
    print("other output of a peer")
    report(1, spans=[(2.0, 5.0), (6.0, 7.0)])
    report(0, spans=[(1.0, 6.0), (6.5, 6.9)])
    found = reports_in(capsys.readouterr().out)
    assert [each["site"] for each in found] == [0, 1]
    assert round_seconds(found) == [4.0, 0.5]
    assert Task.read(TASK.written) == TASK


# --- `make bench` says which kept rows are older than the last change of the code that they measure ------------------


def test_a_row_is_as_old_as_the_changes_of_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q")
    commits = []
    for package in ("codec", "wire", "codec"):
        path = tmp_path / "diloco" / package / "a.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write("1\n")
        git("add", "-A")
        git("commit", "-qm", package)
        commits.append(git("rev-parse", "--short", "HEAD"))
    monkeypatch.setattr(ages, "ROOT", tmp_path)
    first = commits[0]
    assert ages.changes_since(first, "2026-01-01", ("codec",)) == 1
    assert ages.changes_since(first, "2026-01-01", ("codec", "wire")) == 2
    assert ages.changes_since("0123abc", "2000-01-01", ("codec",)) == 2, "git does not know the commit"
    assert ages.changes_since(first, "2026-01-01", ()) == 0


def test_what_is_measured_is_there() -> None:
    named = {name for packages in [*ages.MEASURED.values(), ages.HUNTED] for name in packages}
    assert all((ages.ROOT / "diloco" / name).is_dir() for name in named)
    assert set(ages.MEASURED) <= {path.stem for path in ages.RESULTS.glob("*.jsonl")}
