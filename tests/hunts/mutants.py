"""``make mutants N=300``: would the default tests notice if one place in the code were wrong?

Each mutant is one small change in a function of --packages, in a copy of the tree.  A first run of the
default tests records which test files reach which of the drawn places, also in processes that they start.  Only those
files run with a mutant: first the file of its module's name, then those of its package, then the others, the fastest
first each time, until --tests-seconds have passed.  A mutant that fails a test, or makes it hang, is killed.

A place that a test reaches only through another file's fixture or cache counts for that file alone.  Tests that fail
without a mutant are left out, and counted; a flaky test may kill a mutant that it does not detect.
"""

from __future__ import annotations

import compileall
import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from xml.etree import ElementTree

from tests.hunts.mutant_sites import Site, in_both, marked, sites_of
from tests.hunts.reporting import Counts, Hunt, Namespace, hunting

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = [f"diloco/{name}" for name in ("sync", "outer", "codec", "inner", "wire", "syncer", "learner")]
KERNELS = "diloco/codec/kernels"
EXIT = ("-o", "faulthandler_exit_on_timeout=true")
START_S = 0.5
"""The time that a test file takes beside its tests."""
TEST_S = 30.0
"""A test hangs if it takes longer than this, and than five times its file's longest test without a mutant."""
RECORD_S = 7200.0
BYTES_MAX = 12 << 30
"""The limit of memory and of a file's size; a mutant may ask for any amount."""
REACHED = ".reached"
RECORDER = f"""
import os
_open, _read, _write, _close, _seen = os.open, os.read, os.write, os.close, set()
def _add(path, text, how):
    file = _open(path, os.O_WRONLY | os.O_CREAT | how)
    _write(file, text.encode())
    _close(file)
def _now():
    return {{folder!r}} + "/{REACHED}-by-" + os.environ.get("PYTEST_XDIST_WORKER", "")
def pytest_runtest_logstart(nodeid):
    _add(_now(), nodeid.partition("::")[0], os.O_TRUNC)
def reached(number):
    key = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0], number
    if key not in _seen:
        try:
            file = _open(_now(), os.O_RDONLY)
        except FileNotFoundError:
            return
        _seen.add(key)
        _add({{folder!r}} + "/{REACHED}", f"{{{{number}}}} {{{{_read(file, 4096).decode()}}}}\\n", os.O_APPEND)
        _close(file)
"""
"""A pytest plugin that writes the current test file to disk: a process forked from a server that an earlier test
started has that test's environment."""


@dataclass
class Record:
    """The results of one run of the tests without a mutant, by test file."""

    reached: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    """The files that reach a site, by its number."""
    seconds: Counter[str] = field(default_factory=Counter)
    longest: dict[str, float] = field(default_factory=dict)
    passed: set[str] = field(default_factory=set)
    failed: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def files_for(self, number: int, site: Site, budget_s: float) -> tuple[list[str], bool]:
        """Return the test files that try a site, in order, and whether these are all that reach it."""
        package, module = Path(site.path).parent.name, Path(site.path).stem
        own, folder = f"tests/{package}/test_{module}.py", f"tests/{package}/"
        files = sorted(
            self.reached[number] & self.passed,
            key=lambda file: (file != own, not file.startswith(folder), self.seconds[file], file),
        )
        spent, chosen = 0.0, list[str]()
        for file in files:
            spent += self.seconds[file] + START_S
            if chosen and spent > budget_s:
                break
            chosen.append(file)
        return chosen, len(chosen) == len(files)


@dataclass
class Bench:
    """A copy of a tree in which tests run with one file changed at a time, each time in a new process."""

    tree: Path
    scratch: Path

    def pytest(self, words: Sequence[str], bound_s: float, compiled: bool) -> tuple[int | None, str]:
        """Run pytest; return its exit code and output.  None: it did not end, and was killed with its children.

        ``compiled`` writes bytecode: never for a mutant, whose file may have the size and time of the next one's.
        """
        # A thread that a mutant leaves behind must not keep the process: it would count as one that hangs.
        run = "import os, sys, pytest; code = int(pytest.main(sys.argv[1:])); sys.stdout.flush(); os._exit(code)"
        words = ["-c", run, "--basetemp", str(self.scratch / "tmp"), "-p", "no:cacheprovider", *words]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        environment |= {"PYTHONPATH": str(self.tree), "PYTHONDONTWRITEBYTECODE": "" if compiled else "1"}
        where = {"cwd": self.tree, "env": environment, "start_new_session": True}
        with (self.scratch / "out").open("w+", errors="replace") as out:
            process = subprocess.Popen([sys.executable, *words], stdout=out, stderr=out, **where)
            for limit in (resource.RLIMIT_DATA, resource.RLIMIT_FSIZE):
                resource.prlimit(process.pid, limit, (BYTES_MAX, BYTES_MAX))
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(bound_s)
                code = process.returncode
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            out.seek(0)
            return code, out.read()

    def record(self, sites: Sequence[Site], tests: Sequence[str], workers: int) -> Record:
        """Run ``tests`` once, with a mark before each of ``sites``."""
        paths = sorted({site.path for site in sites})
        whole = {path: self.scratch / "whole" / path for path in paths}
        top = paths[0].partition("/")[0]
        recorder = self.tree / top / "_reached.py"
        recorder.write_text(RECORDER.format(folder=str(self.tree)))
        for path, kept in whole.items():
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(self.tree / path, kept)
            here = [(number, site) for number, site in enumerate(sites) if site.path == path]
            call = f"__import__('{top}._reached')._reached.reached"
            (self.tree / path).write_bytes(marked(kept.read_bytes(), here, call))
        junit = self.scratch / "junit.xml"
        words = [
            "-p",
            f"{top}._reached",
            "-n",
            str(workers),
            "--junitxml",
            str(junit),
            "-o",
            "junit_family=xunit1",
            *tests,
        ]
        code, text = self.pytest(words, RECORD_S, compiled=True)
        if code not in (0, 1) or not junit.exists():
            sys.exit(f"mutants: the tests do not run without a mutant: exit code {code}\n{text[-3000:]}")
        recorder.unlink()
        for path, kept in whole.items():
            shutil.copy2(kept, self.tree / path)
        # Runs with a mutant write no bytecode, so compile everything here, the marked files once more.
        compileall.compile_dir(self.tree / top, quiet=2, force=True)
        return self._read(junit)

    def _read(self, junit: Path) -> Record:
        record = Record()
        for case in ElementTree.parse(junit).iter("testcase"):
            file, took_s = case.get("file", ""), float(case.get("time", 0))
            record.seconds[file] += took_s
            record.longest[file] = max(took_s, record.longest.get(file, 0.0))
            if case.find("failure") is not None or case.find("error") is not None:
                record.failed[file].append(f"{file}::{case.get('name')}")
            elif case.find("skipped") is None:
                record.passed.add(file)
        reached = self.tree / REACHED
        for line in reached.read_text().splitlines() if reached.exists() else []:
            number, _, file = line.partition(" ")
            record.reached[int(number)].add(file)
        return record

    def fate(self, site: Site, files: Sequence[str], record: Record) -> tuple[str, str]:
        """Run ``files`` with the mutant at ``site``: "killed", "time" or "survived", and the test that killed it."""
        file, kept = self.tree / site.path, self.scratch / "kept.py"
        test_s = max([TEST_S, *(5 * record.longest.get(each, 0.0) for each in files)])
        left_out = [word for each in files for test in record.failed.get(each, ()) for word in ("--deselect", test)]
        words = ["-n", "0", "-x", "--tb=no", "-o", f"faulthandler_timeout={test_s:.0f}", *EXIT, *left_out, *files]
        bound_s = 5 * (sum(record.seconds[each] + START_S for each in files) + TEST_S) if record.passed else RECORD_S
        shutil.copy2(file, kept)
        try:
            file.write_bytes(site.mutate(kept.read_bytes()))
            for _ in range(2):  # Once more, because a busy machine may have been slow.
                code, text = self.pytest(words, bound_s, compiled=False)
                hung = code is None or "Timeout (0:" in text
                if not hung:
                    break
        finally:
            shutil.copy2(kept, file)
        if hung:
            return "time", ""
        if code in (0, 5):  # 5: all tests were left out.
            return "survived", ""
        failed = (line.partition(" - ")[0] for line in text.splitlines() if line.startswith(("FAILED ", "ERROR ")))
        return "killed", next(failed, "")


def copied(tree: Path, folder: Path, commit: str = "") -> None:
    """Copy the tree as it is, or its ``commit``, with the environments that ``make`` has set up."""
    if commit:
        folder.mkdir()
        archive = subprocess.run(["git", "archive", commit], cwd=tree, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x"], input=archive, cwd=folder, check=True)
    else:
        skipped = shutil.ignore_patterns(".git", ".venv*", ".*_cache", "__pycache__")
        at_the_root = shutil.ignore_patterns("runs", "outputs", "build")  # ``diloco/runs`` is a package.

        def ignored(place: str, names: list[str]) -> set[str]:
            return skipped(place, names) | (at_the_root(place, names) if Path(place) == tree else set())

        shutil.copytree(tree, folder, symlinks=True, ignore=ignored)
    for made in tree.glob(".venv*"):
        (folder / made.name).symlink_to(made)
    if (folder / "configs").exists():
        (folder / "diloco" / "configs").symlink_to(folder / "configs")  # As an installed package has it.
    if commit and subprocess.run(["git", "diff", "--quiet", commit, "--", KERNELS], cwd=tree).returncode:
        build = "import setuptools; setuptools.setup()"
        subprocess.run([sys.executable, "-c", build, "-q", "build_ext", "--inplace"], cwd=folder, check=True)
    elif commit:
        for library in (tree / KERNELS).parent.glob("*.so"):
            shutil.copy2(library, folder / library.relative_to(tree))


DEAD = ("killed", "time")


@dataclass(frozen=True)
class Trial:
    """The fate of the mutant at ``site``; ``whole`` where all test files that reach it were tried."""

    site: Site
    fate: str
    files: list[str]
    whole: bool


def trials(bench: Bench, sites: Sequence[Site], record: Record, budget_s: float) -> Iterator[Trial]:
    """Try one mutant after another."""
    for number, site in enumerate(sites):
        files, whole = record.files_for(number, site, budget_s)
        fate, by = bench.fate(site, files, record) if files else ("not covered", "")
        print(f"{number + 1}/{len(sites)} {fate}: {site}\n  {by}".rstrip(), flush=True)
        yield Trial(site, fate, files, whole)


def summed(tried: Sequence[Trial]) -> dict[str, object]:
    """Return the row: mutants by fate, and the share killed of all mutants and of those that a test reached."""
    fates = Counter(trial.fate for trial in tried)
    dead, covered = sum(fates[fate] for fate in DEAD), len(tried) - fates["not covered"]
    packages: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for trial in tried:
        package = packages[Path(trial.site.path).parent.name]
        package[0] += trial.fate in DEAD
        package[1] += 1
    return {
        "mutants": len(tried),
        "killed": fates["killed"],
        "by_time": fates["time"],
        "survived": fates["survived"],
        "survived_some_files_untried": sum(trial.fate == "survived" and not trial.whole for trial in tried),
        "not_covered": fates["not covered"],
        "share_killed": round(dead / max(1, len(tried)), 3),
        "share_killed_of_covered": round(dead / max(1, covered), 3),
        "killed_of_package": dict(sorted(packages.items())),
    }


def tried_in(bench: Bench, sites: Sequence[Site], asked: Namespace, where: str = "") -> tuple[list[Trial], int]:
    """Try the mutants at ``sites``; return what became of them, and how many tests failed without one."""
    began = time.monotonic()
    record = bench.record(sites, asked.tests, asked.workers)
    failed = [test for tests in record.failed.values() for test in tests]
    took_s = time.monotonic() - began
    print(f"tests without a mutant{where}: {took_s:.0f} s, {len(failed)} failed, which are left out", flush=True)
    print("".join(f"  {test}\n" for test in failed), end="")
    tried = list(trials(bench, sites, record, asked.tests_seconds))
    for trial in sorted(tried, key=lambda each: each.site.name):
        if trial.fate == "survived":
            tests = " ".join(trial.files)
            print(f"{trial.site}{'' if trial.whole else ' (not by all the files that reach it)'}")
            print(f"  python -m tests.hunts.mutants{where} --at {trial.site.name} --tests {tests}")
        elif trial.fate == "not covered":
            print(f"{trial.site} (no default test reaches it)")
    return tried, len(failed)


@hunting(
    n=(300, "number of mutants"),
    since=("", "only functions that this commit has too, by name; what survives is tried with its tests as well"),
    there=(False, "with --at: in the tree of --since"),
    at=("", "the one mutant of this name, with all --tests"),
    tests=(["tests"], "files or folders"),
    packages=(PACKAGES, "folders"),
    tests_seconds=(30.0, "time of tests for each mutant"),
    workers=(3, "processes that record"),
)
def main(hunt: Hunt, asked: Namespace, tree: Path = ROOT) -> Counts:
    scratch = hunt.folder
    sites = sites_of(tree, asked.packages)
    pairs = [(site, site) for site in sites]
    if asked.since:
        copied(tree, scratch / "since", asked.since)
        pairs = list(in_both(sites, sites_of(scratch / "since", asked.packages)))
    copied(tree, scratch / "tree")
    here, there = (Bench(scratch / name, scratch) for name in ("tree", "since"))
    if asked.at:
        one = next(pair[asked.there] for pair in pairs if pair[asked.there].name == asked.at)
        fate, by = (there if asked.there else here).fate(one, asked.tests, Record())
        print(f"{fate}: {one}\n{by}", flush=True)
        return {}
    chosen = Random(asked.seed).sample(pairs, min(asked.n, len(pairs)))
    print(f"{len(chosen)} of {len(pairs)} places", flush=True)
    tried, left_out = tried_in(here, [ours for ours, _ in chosen], asked)
    counts = {"of": len(pairs), **summed(tried), "left_out": left_out}
    alive = [theirs for (_, theirs), trial in zip(chosen, tried, strict=True) if trial.fate not in DEAD]
    if asked.since and alive:
        before, _ = tried_in(there, alive, asked, f" --since {asked.since} --there")
        counts["not_killed_here_but_there"] = sum(trial.fate in DEAD for trial in before)
    return counts
