"""``make test-isa``: run the tests of arithmetic with fewer and fewer of the processor's instructions.

A level disables instructions in torch, in its libraries and in our kernels by environment variables, which every
process of a test inherits.  The default tests cover the machine's own level.  Before the tests of a level, a process
reports what it really computes with.  The last line is one JSON object; exit 1 for a failed test, for a level without a
passed one, and for a variable without effect.

Rules select the tests of a level, so that no list must be kept: the files of :data:`FOLDERS` that use torch or numpy,
without an accelerator's kernels, which are interpreted and not compiled for this processor; and, where a level differs
from the one before only in our own kernels, only the files that also use ``diloco.codec``.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
import torch

from diloco.codec import kernel_library
from diloco.codec.kernel_library import PLAIN, VARIABLE

FOLDERS = ("tests/codec", "tests/inner", "tests/outer", "tests/numerics")
USES = "DILOCO_TEST_ISA_USES"
"""Tells this module, as a plugin of a level's pytest, what a test file must use: one package of each of these sets."""
ARITHMETIC = "torch|numpy"
KERNELS = f"{ARITHMETIC} diloco.codec"
LEVEL_S_MAX = 1800
PROBE_S_MAX = 120


@dataclass(frozen=True, slots=True)
class Level:
    """``environment`` disables instructions; ``uses`` is what a file of its tests must use."""

    name: str
    environment: dict[str, str]
    torch: str
    """The CPU capability that torch must report."""
    said: tuple[str, ...]
    """The text that oneDNN and MKL must print on an x86 in verbose mode."""
    uses: str = ARITHMETIC


def reduced(name: str, kernels: str, uses: str = ARITHMETIC) -> Level:
    """Return a level without vector instructions beyond those that every x86 has.

    MKL obeys MKL_ENABLE_INSTRUCTIONS only on Intel's processors; MKL_CBWR=COMPATIBLE selects its oldest code on all.
    """
    environment = {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "MKL_CBWR": "COMPATIBLE",
        VARIABLE: kernels,
    }
    return Level(name, environment, "DEFAULT", ("isa:Intel SSE4.1", "CNR:COMPATIBLE"), uses)


AVX2 = Level(
    "avx2",
    {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        VARIABLE: "avx2",
    },
    "AVX2",
    ("isa:Intel AVX2",),
)
# Report what a process computes with on standard output, to which the verbose libraries write as well.
PROBE = """
import torch
from tests import conftest
print("torch:", torch.backends.cpu.get_cpu_capability(), flush=True)
print("kernels:", conftest.kernel_library.description(), flush=True)
torch.relu(torch.ones(8, 8).to_mkldnn())
with torch.backends.mkl.verbose(torch.backends.mkl.VERBOSE_ON):
    torch.ones(64, 64) @ torch.ones(64, 64)
"""


def levels() -> tuple[list[Level], dict[str, str]]:
    """Return the levels to run here, and why each of the others is left out."""
    there, left_out = [reduced("plain", PLAIN)], {}
    kernel_library.force("")
    chosen = kernel_library.choice()
    own = "baseline" if chosen.kernels is None else kernel_library.LEVELS[chosen.kernels.level]
    if chosen.kernels is None:
        left_out["baseline"] = f"no compiled kernels: {chosen.why}"
    else:
        there.append(reduced("baseline", "baseline", KERNELS))
    if torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        there.append(AVX2)
    else:
        left_out["avx2"] = f"torch computes with {torch.backends.cpu.get_cpu_capability()} here, our kernels with {own}"
    return there, left_out


def without_effect(level: Level) -> list[str]:
    """Return a line for each library that does not compute at ``level``."""
    environment = {**os.environ, **level.environment, "ONEDNN_VERBOSE": "1"}
    command = [sys.executable, "-c", PROBE]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PROBE_S_MAX, check=False)
    if told.returncode:
        return [f"a process ends with {told.returncode}: {told.stderr.strip().splitlines()[-1:]}"]
    wanted = [f"torch: {level.torch}"]
    if platform.machine() == "x86_64":
        wanted += [each for each in level.said if "CNR" not in each or torch.backends.mkl.is_available()]
    kernels = level.environment[VARIABLE]
    wanted.append("kernels: plain (forced" if kernels == PLAIN else f"kernels: native ({kernels}, forced")
    return [f"nothing says {each!r}" for each in wanted if each not in told.stdout]


def run(level: Level, options: list[str]) -> dict[str, int]:
    """Run the tests of ``level``; return how many passed and how many failed."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "found.xml")
        command = [sys.executable, "-m", "pytest", "-p", "tests.isa", f"--junitxml={found}", *FOLDERS, *options]
        environment = {**os.environ, **level.environment, USES: level.uses}
        try:
            code = subprocess.run(command, env=environment, timeout=LEVEL_S_MAX, check=False).returncode
        except subprocess.TimeoutExpired:
            code = -1
        suites = ElementTree.parse(found).getroot().iter("testsuite") if found.exists() else ()
        counts = [
            {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")} for suite in suites
        ]
    failed = sum(each["failures"] + each["errors"] for each in counts)
    passed = sum(each["tests"] - each["skipped"] for each in counts) - failed
    return {"passed": passed, "failed": failed or int(code != 0)}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that do not belong to the level, where this module is a plugin."""
    uses = [each.split("|") for each in os.environ[USES].split()]
    kept, left = [], []
    for item in items:
        on_device = "kernel_device" in getattr(item, "fixturenames", ())
        (left if on_device or not all(uses_one(item, packages) for packages in uses) else kept).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


def uses_one(item: pytest.Item, packages: list[str]) -> bool:
    """Return whether the file of ``item`` imports one of ``packages``, or something from it."""
    values = vars(getattr(item, "module", object)).values()
    names = [each.__name__ if isinstance(each, ModuleType) else getattr(each, "__module__", None) for each in values]
    return any(f"{name}.".startswith(f"{package}.") for name in names for package in packages)


def main(options: list[str]) -> int:
    there, left_out = levels()
    for name, why in left_out.items():
        print(f"level {name}: left out, {why}", flush=True)
    results: dict[str, dict[str, int]] = {}
    for level in there:
        print(f"level {level.name}: {level.environment}", flush=True)
        faults = without_effect(level)
        print(*faults, sep="\n", end="\n" * bool(faults), flush=True)
        results[level.name] = {"passed": 0, "failed": len(faults)} if faults else run(level, options)
    print(json.dumps({"levels": results}), flush=True)
    return int(any(each["failed"] or not each["passed"] for each in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
