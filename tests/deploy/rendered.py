"""What the tests of all ways to launch look at."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest

from diloco.cli.main import VERBS
from diloco.cli.site import check_identity
from diloco.config import build
from diloco.config.arguments import settings_parser
from diloco.config.compose import compose, read
from diloco.config.schema import RunConfig

SOURCE = Path(__file__).resolve().parents[2]
AWAY = ("run.name=First.run", "site.syncer=syncer.example.org:7077", "cluster=one", "cluster.sites.fra.nproc=8")
OPEN = ("cluster.syncer.listen=0.0.0.0:7077", "cluster.syncer.insecure_non_loopback=true")
INDEX = "launch.torch_index=https://wheels.example.org/whl"
LABEL = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")


TOOLS = SOURCE / ".venv-launchers" / "bin" / "python"


@cache
def composed(*settings: str) -> RunConfig:
    """Composing takes longer than everything that is done with what comes of it."""
    return compose(settings)


def configured(*settings: str) -> RunConfig:
    return deepcopy(composed(*AWAY, *OPEN, *settings))


def put(folder: Path, *files: Mapping[str, str]) -> dict[str, str]:
    """The files of each process in ``folder``, and the texts of all by name."""
    folder.mkdir(exist_ok=True)
    whole = {name: text for each in files for name, text in each.items()}
    for name, text in whole.items():
        (folder / name).write_text(text)
    assert len(whole) == sum(map(len, files))
    return whole


def commands(script: str) -> list[list[str]]:
    """Our own commands among the lines of a script."""
    return [shlex.split(line.removesuffix(" &")) for line in script.splitlines() if line.startswith("diloco ")]


def understood(command: Sequence[str], folder: Path) -> RunConfig:
    """The settings that a command means, by the parser of its own verb; they are all in the one file it names."""
    name, verb, *arguments = command
    assert name == "diloco"
    assert verb in {each.name for each in VERBS}
    given = settings_parser(verb, "").parse_args(arguments)
    assert given.settings == [], "what is in the file stands nowhere else"
    assert not given.print_config
    config = read(folder / given.config)
    if verb == "site":
        check_identity(config)
        build.site_share(config)
    return config


def read_by(script: str, folder: Path, names: Sequence[str]) -> str:
    """What ``script`` says of files in ``folder``; it may import SkyPilot and Kubernetes' schemas."""
    if not TOOLS.exists():
        pytest.skip("the launchers' own readers are not installed here: make .venv-launchers/.ready")
    command = [str(TOOLS), "-c", script, *names]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
