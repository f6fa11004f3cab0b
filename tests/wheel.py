"""``make test-wheel``: install the wheel and run it with each Python that is found.

The wheel is built once, from a copy of this tree, and serves every Python.  Each interpreter installs it with
constraints.txt in its own environment, and runs ``diloco up``: without HOME, with LANG=C, with ``run.dir`` elsewhere,
in a read-only folder whose name has a space (read-only by its mode or, for root, who ignores modes, by a mount).  The
run must end with 0, have trained at each site and have merged.

The last line is one JSON object: "ok", "failed: ..." or, where the interpreter or a torch for it is missing,
"absent: ...".  Exit 1 when one failed or none was ok.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
BUILD_S_MAX = 600
INSTALL_S_MAX = 3600
RUN_S_MAX = 600
NO_TORCH = "No matching distribution found for torch"
READ_ONLY_MOUNT = 'mount --bind "$PWD" "$PWD" && mount -o remount,bind,ro "$PWD" && cd "$PWD" && exec "$@"'


class Failed(Exception):
    """A step failed; the message is the last line of its output."""


def interpreter(version: str) -> str | None:
    """Return a Python of ``version`` that can create environments, from PATH or from pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [*map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/python"), reverse=True))]
    program = f"import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != {tuple(map(int, version.split('.')))})"
    for each in [shutil.which(f"python{version}"), *found]:
        if each and subprocess.run([each, "-c", program], capture_output=True, timeout=60, check=False).returncode == 0:
            return each
    return None


def step(
    command: Sequence[str | Path], cwd: Path, timeout_s: float, environment: Mapping[str, str] = os.environ
) -> None:
    """Run ``command``; raise :class:`Failed` with its last line."""
    print("$", *command, flush=True)
    done = subprocess.run(
        [str(each) for each in command],
        cwd=cwd,
        env=dict(environment),
        timeout=timeout_s,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if done.returncode:
        print(done.stdout[-4000:], flush=True)
        errors = [line for line in done.stdout.splitlines() if line.startswith("ERROR")]
        raise Failed(
            f"exit {done.returncode}: {(errors or done.stdout.splitlines() or ['nothing was said'])[-1].strip()}"
        )


def copy_of_tree(place: Path) -> Path:
    """Copy the files that a commit would have: the build then neither writes into this tree nor uses more of it."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)
    return place


def read_only(folder: Path, command: list[str | Path]) -> list[str | Path]:
    """Return ``command`` changed so that its working directory ``folder`` is read-only."""
    if os.geteuid() != 0:
        folder.chmod(0o555)
        return command
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", READ_ONLY_MOUNT, "sh", *command]


def run(python: Path, place: Path, seconds: int) -> str:
    """Run the installed program as the module's docstring describes; return its results in words."""
    folder, runs = place / "a folder", place / "all runs"
    folder.mkdir()
    environment = {"PATH": os.environ["PATH"], "LANG": "C"}
    refused = [python, "-c", "import pathlib; pathlib.Path('x').touch()"]
    written = subprocess.run(read_only(folder, refused), cwd=folder, env=environment, capture_output=True, timeout=60)
    if written.returncode == 0:
        raise Failed("the working directory can be written: this test shows nothing")
    up = [python.with_name("diloco"), "up", f"run.seconds={seconds}", f"run.dir={runs}"]
    step(read_only(folder, up), folder, RUN_S_MAX, environment)
    summary = json.loads((runs / "latest" / "summary.json").read_text("utf-8"))
    return trained_and_merged(summary)


def trained_and_merged(summary: dict[str, Any]) -> str:
    """Return the results of a run in words; raise :class:`Failed` where they are too few."""
    steps = {name: site["inner_steps"] for name, site in summary["sites"].items()}
    merged = sum(site["tokens_merged"] for site in summary["sites"].values())
    told = f"steps {steps}, {merged} tokens merged, versions {summary['versions']}, status {summary['status']}"
    if summary["status"] != "ok" or not all(steps.values()) or not merged or not any(summary["versions"]):
        raise Failed(told)
    return told


def built(source: Path, place: Path) -> Path:
    """Build the wheel for all Pythons in ``place`` with this one."""
    step([sys.executable, "-m", "venv", place / "builder"], place, BUILD_S_MAX)
    pip = [place / "builder/bin/python", "-m", "pip", "--disable-pip-version-check"]
    step([*pip, "wheel", "-q", "--no-deps", "-w", place, source], place, BUILD_S_MAX)
    [wheel] = place.glob("*.whl")
    if not wheel.name.split("-")[2:4] == ["py3", "none"]:
        raise Failed(f"{wheel.name} is tagged for one Python, but its kernels are for all")
    return wheel


def check(version: str, source: Path, wheel: Path, seconds: int) -> str:
    """Return the outcome for ``version``: ok, failed or absent."""
    python = interpreter(version)
    if python is None:
        return "absent: no such interpreter"
    with tempfile.TemporaryDirectory(prefix=f"diloco-wheel-{version}-") as folder:
        place = Path(folder)
        pip = [place / "venv/bin/python", "-m", "pip", "--disable-pip-version-check"]
        try:
            step([python, "-m", "venv", place / "venv"], place, BUILD_S_MAX)
            # Not compiled: the run compiles the part of torch's thousands of files that it needs.
            step([*pip, "install", "-q", "--no-compile", "-c", source / "constraints.txt", wheel], place, INSTALL_S_MAX)
            print(f"{version}: {run(place / 'venv/bin/python', place, seconds)}", flush=True)
        except Failed as error:
            return f"absent: {error}" if NO_TORCH in str(error) else f"failed: {error}"
        except subprocess.TimeoutExpired as error:
            return f"failed: {error.cmd[0]} took more than {error.timeout:.0f} s"
    return "ok"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.wheel", description=__doc__)
    parser.add_argument("--pythons", nargs="+", default=PYTHONS, help=f"default: {' '.join(PYTHONS)}")
    parser.add_argument("--seconds", type=int, default=40, help="length of the run (default: 40)")
    asked = parser.parse_args(arguments)
    print("the working directory is read-only by", "its mode" if os.geteuid() else "a mount in a namespace of its own")
    found = {}
    with tempfile.TemporaryDirectory(prefix="diloco-tree-") as folder:
        source = copy_of_tree(Path(folder, "diloco"))
        wheel = built(source, Path(folder))
        for version in asked.pythons:
            found[version] = check(version, source, wheel, asked.seconds)
            print(f"Python {version}: {found[version]}", flush=True)
    print(json.dumps({"pythons": found}), flush=True)
    return int(any(each.startswith("failed") for each in found.values()) or "ok" not in found.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
