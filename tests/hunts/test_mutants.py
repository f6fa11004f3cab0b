"""A mutant that a test detects is killed, one that no test reaches is reported, and the tree stays unchanged."""

from __future__ import annotations

import ast
import json
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import pytest

import diloco.syncer.backups
from diloco.syncer import standby
from tests.hunts import clocks, cuts, mutants
from tests.hunts.clocks import untrue
from tests.hunts.cutting import YEAR_S, follow, tell
from tests.hunts.mutant_sites import in_both, marked, sites_of
from tests.hunts.mutants import PACKAGES, ROOT, Bench, Record

Capture = pytest.CaptureFixture[str]
Hunted = Callable[..., Any]
Patch = pytest.MonkeyPatch
AREA = '''
LIMIT = 3

def area(width: int, height: int = 1) -> int:
    """Of 2 x 3: 6."""
    if width < 0:
        raise ValueError(f"{width + 1}")
    return width * height
'''
COUNT = """
def count(number):
    while number > 0:
        number -= 1
    return number
"""
PRODUCT = """
def area(width, height):
    return width * height
"""
UNUSED = """
def unused(x):
    return x + 1
"""
TEST_AREA = """
from tiny.core.area import area

def test_area():
    assert area(2, 3) == 6
"""
TEST_COUNT = """
from tiny.core.count import count

def test_count():
    assert count(2) == 0
"""
FORKED = """
from multiprocessing import get_context
from tiny.core import area

def test_forked():
    process = get_context('forkserver').Process(target=area.{name}, args=(2,))
    process.start()
    process.join()
    assert process.exitcode == 0
"""
GIT = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
ASKED = ["--packages", "tiny/core", "--workers", "0"]


def written(tree: Path, files: dict[str, str]) -> Path:
    """Write a package ``tiny.core`` and its tests into ``tree``."""
    settings = {"pyproject.toml": "[tool.pytest.ini_options]\npythonpath = ['.']\n"}
    packages = {"tiny/__init__.py": "", "tiny/core/__init__.py": ""}
    for name, text in (settings | packages | files).items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    return tree


def run(tree: Path, capsys: Capture, *words: str) -> tuple[list[str], dict[str, Any]]:
    """Run the hunt; return its line for each mutant, and the row."""
    assert mutants.main([*ASKED, *words], tree) == 0
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if line[0].isdigit() and "/" in line.split()[0]], json.loads(lines[-1])


def everything(tree: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in tree.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.mark.slow
def test_each_mutant_has_the_fate_that_its_tests_give_it(tmp_path: Path, capsys: Capture) -> None:
    """A test that fails without a mutant is left out, and kills none."""
    tests = TEST_AREA + "\n\ndef test_no_more():\n    assert area(2, 3) == 7\n"
    written(tmp_path, {"tiny/core/area.py": AREA + UNUSED, "tests/core/test_area.py": tests})
    before = everything(tmp_path)
    said, row = run(tmp_path, capsys)
    assert everything(tmp_path) == before
    fates = {line.split(": ", 1)[1]: line.split(":")[0].split(" ", 1)[1] for line in said}
    assert fates.pop(next(name for name in fates if " integer: 0 -> " in name)) == "survived"
    assert fates.pop(next(name for name in fates if " integer: 1 -> " in name)) == "not covered"
    assert fates == {
        "tiny/core/area.py:6 condition: width < 0 -> (not (width < 0))": "killed",
        "tiny/core/area.py:6 comparison: width < 0 -> (width <= 0)": "survived",
        "tiny/core/area.py:8 arithmetic: width * height -> (width // height)": "killed",
        "tiny/core/area.py:8 return: width * height -> (None)": "killed",
        "tiny/core/area.py:11 arithmetic: x + 1 -> (x - 1)": "not covered",
        "tiny/core/area.py:11 return: x + 1 -> (None)": "not covered",
    }
    assert (row["mutants"], row["left_out"]) == (8, 1)
    assert (row["killed"], row["by_time"], row["survived"], row["not_covered"]) == (3, 0, 2, 3)
    assert (row["share_killed"], row["share_killed_of_covered"]) == (0.375, 0.6)


def test_a_seed_draws_the_same_mutants(tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Bench, "record", lambda *_: Record())  # No test reaches anything: only the draw is printed.
    written(tmp_path, {"tiny/core/area.py": AREA + UNUSED})
    one, again, other = (run(tmp_path, capsys, "--n", "4", "--seed", seed)[0] for seed in ("3", "3", "4"))
    assert one == again != other
    assert len(one) == 4


@pytest.mark.slow
def test_a_mutant_with_which_a_test_hangs_is_killed_by_time(
    tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(mutants, "TEST_S", 1.0)
    written(tmp_path, {"tiny/core/count.py": COUNT, "tests/core/test_count.py": TEST_COUNT})
    name = next(site.name for site in sites_of(tmp_path, ["tiny/core"]) if site.operator == "arithmetic")
    assert mutants.main([*ASKED, "--at", name], tmp_path) == 0
    said = capsys.readouterr().out.splitlines()[0]
    assert said == "time: tiny/core/count.py:4 arithmetic: number -= 1 -> number += 1"


def test_a_place_that_only_another_process_reaches_is_reached_by_the_test_that_started_it(tmp_path: Path) -> None:
    """Both tests' processes are forked from one server, which the first of the tests starts."""
    tree = tmp_path / "tree"
    functions = "".join(f"def {name}(x):\n    return x\n" for name in ("one", "two"))
    tests = {f"tests/test_{name}.py": FORKED.format(name=name) for name in ("one", "two")}
    written(tree, {"tiny/core/area.py": functions, **tests})
    record = Bench(tree, tmp_path).record(sites_of(tree, ["tiny/core"]), ["tests"], 0)
    assert record.reached == {0: {"tests/test_one.py"}, 1: {"tests/test_two.py"}}
    assert (tree / "tiny/core/area.py").read_text() == functions


@pytest.mark.slow
def test_what_survives_is_tried_with_the_tests_of_another_commit(tmp_path: Path, capsys: Capture) -> None:
    test = TEST_AREA.replace(".area ", ".shapes ")
    written(tmp_path, {"tiny/core/shapes.py": UNUSED + PRODUCT, "tests/core/test_shapes.py": test})
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "before"]):
        subprocess.run([*GIT, *words], cwd=tmp_path, check=True)
    (tmp_path / "tiny/core/shapes.py").unlink()
    (tmp_path / "tests/core/test_shapes.py").unlink()
    weaker = TEST_AREA.replace("area(2, 3) == 6", "area(2, 3) is not None")
    written(tmp_path, {"tiny/core/area.py": UNUSED + PRODUCT, "tests/core/test_area.py": weaker})
    said, row = run(tmp_path, capsys, "--since", "HEAD")
    assert (row["of"], row["killed"], row["not_covered"], row["not_killed_here_but_there"]) == (5, 1, 3, 1)
    changes = [line.split(" ", 2)[2].split(":")[-1] for line in said]
    assert set(changes[5:]) < set(changes[:5])


def test_a_function_that_has_moved_is_changed_in_the_same_way(tmp_path: Path) -> None:
    function = f"def found(x):\n    return [{', '.join(['x < 3'] * 20)}]\n"
    before = written(tmp_path / "before", {"tiny/core/area.py": function})
    after = written(tmp_path / "after", {"tiny/core/shapes.py": UNUSED + function})
    pairs = list(in_both(*(sites_of(tree, ["tiny/core"]) for tree in (before, after))))
    assert len(pairs) == 41
    assert all(one.after == other.after and one.path != other.path for one, other in pairs)
    assert {one.after for one, _ in pairs if one.operator == "integer"} == {"(2)", "(4)"}


def test_the_copy_lacks_what_runs_leave_at_the_root_and_has_every_package(tmp_path: Path) -> None:
    for name in ("diloco/runs", "runs", "build", "diloco/__pycache__"):
        (tmp_path / "tree" / name).mkdir(parents=True)
        (tmp_path / "tree" / name / "up.py").touch()
    copy = tmp_path / "copy"
    mutants.copied(tmp_path / "tree", copy)
    assert list(copy.rglob("up.py")) == [copy / "diloco/runs/up.py"]


@pytest.mark.slow
def test_each_place_in_a_part_of_the_product_can_be_marked_and_changed() -> None:
    sites = sites_of(ROOT, PACKAGES[1:3])
    assert len({site.name for site in sites}) == len(sites) > 1_000
    assert len(list(in_both(sites, sites))) == len(sites)
    for path in Random(0).sample(sorted({site.path for site in sites}), 12):
        here = [site for site in sites if site.path == path]
        source = (ROOT / path).read_bytes()
        ast.parse(marked(source, enumerate(here), "f"))
        for site in Random(0).sample(here, min(12, len(here))):
            assert ast.dump(ast.parse(site.mutate(source))) != ast.dump(ast.parse(source)), site


# --- A short hunt finds nothing, each process reads its own clock, and an impossible status is detected --------------


@pytest.mark.slow
def test_clocks_jump_under_living_processes_and_nothing_is_wrong(hunted: Hunted) -> None:
    found, _ = hunted(clocks, "--jumps", "10")
    assert found["violations"] == 0, found
    assert (found["done"], found["runs"]) == (10, 1)
    assert found["backups_misdated"] > 0, "no process read another time"


def test_the_product_is_told_the_time_of_the_file_and_others_the_true_one(tmp_path: Path, monkeypatch: Patch) -> None:
    for module, name in ((standby, "time"), (diloco.syncer.backups, "datetime")):
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr("sys.modules", {each.__name__: each for each in (standby, diloco.syncer.backups)})
    clock = tmp_path / "clock"
    tell(clock, "true")
    follow(clock)
    for kind, ahead_s in (("+10 years", 10 * YEAR_S), ("-10 years", -10 * YEAR_S), ("+1 s", 1)):
        tell(clock, kind)
        assert abs(standby.time.time() - time.time() - ahead_s) < 0.5
        assert abs(diloco.syncer.backups.datetime.now(UTC).timestamp() - time.time() - ahead_s) < 0.5
    assert tell(clock, "1960") < 0
    assert diloco.syncer.backups.datetime.now(UTC).year == 1960
    tell(clock, "frozen")
    assert standby.time.time_ns() == standby.time.time_ns()
    assert abs(datetime.now(UTC).timestamp() - time.time()) < 0.5


def test_what_no_true_clock_gives_is_named() -> None:
    true = {"sites": [{"heard_seconds_ago": 0.0, "base_versions": [-1]}], "progress": None, "ended": False}
    assert list(untrue(true)) == []
    wrong = {"sites": [{"heard_seconds_ago": -1.0}], "loss": float("nan"), "backup": {"age_s": -3}}
    assert [text.split(" is ")[0] for text in untrue(wrong)] == [
        "status.sites[0].heard_seconds_ago",
        "status.loss",
        "status.backup.age_s",
    ]


# --- A short hunt of cuts, and proof that it can find a violation ----------------------------------------------------


@pytest.mark.hunt
def test_many_cuts_cost_a_small_share(hunted: Hunted) -> None:
    found, _ = hunted(cuts, "--cuts", "8", "--mib", "192", "--seed", "3")
    assert (found["violations"], found["push_cuts"], found["pull_cuts"]) == (0, 8, 8)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("EXTRA_SHARE_MAX", 0.0, "% more than its bytes went over the wire"),
        ("arrived", lambda way, answer, payload: False, "the data that arrived differs"),
    ],
)
def test_what_is_sent_twice_or_arrives_changed_is_a_violation(
    name: str, value: object, words: str, monkeypatch: Patch, hunted: Hunted
) -> None:
    monkeypatch.setattr(cuts, name, value)
    _, said = hunted(cuts, "--cuts", "2", "--mib", "4")
    assert words in said
    assert "push" in said
