"""The README's commands, run with the same text and short arguments.

Every command of a block fenced as ``sh`` must have an entry in ``SHORT``: what is added so that it takes seconds.  A
command that is new, or whose text has changed, fails until its entry is made.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.processes import TINY, Place, Verb, place_in, wait_for
from tests.loopback.cluster import free_port

README = Path(__file__).resolve().parent.parent / "README.md"
BY_CI = frozenset({"make demo", "make test"})  # .ci/run runs these two as they stand.
SHORT_RUN = ["run.seconds=null", "run.tokens=12000", "outer.final_wait_s=5"]
UP = [*TINY, *SHORT_RUN, "cluster=one", "scenario=none", "model.layers=1"]
REAL = [*TINY, *SHORT_RUN]
SITE = "diloco site run.name=first run.tokens=2e9"
SHORT: dict[str, list[str]] = {
    "diloco up": UP,
    "diloco up run.seconds=60 run.seed=3 network=transatlantic": UP,
    "diloco up experiment=decoupled scenario=none": [*UP, "run.name=decoupled"],
    "diloco up --help": [],
    "diloco syncer run.name=first run.tokens=2e9 cluster.syncer.listen=127.0.0.1:7077": REAL,
    f"{SITE} site.id=fra site.index=0 site.num_sites=2 site.syncer=127.0.0.1:7077": REAL,
    f"{SITE} site.id=iad site.index=1 site.num_sites=2 site.syncer=127.0.0.1:7077": REAL,
    "diloco status 127.0.0.1:7077": [],
    "diloco train run.name=warm run.tokens=500000 inner.schedule=constant": [*UP, "run.tokens=3000"],
    "diloco up run.init_from=runs/warm/train/checkpoints": [*UP, "run.name=from-warm"],
    "diloco report runs/latest": [],
    "diloco journal show runs/latest": [],
}


def commands() -> list[str]:
    text = README.read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with place_in(tmp_path_factory.mktemp("readme")) as place:
        yield place


def start(place: Place, command: str, port: int = 7077) -> Verb:
    verb = shlex.split(command.replace(":7077", f":{port}"))
    assert verb[0] == "diloco", command
    short = SHORT[command]
    return place.start(re.sub(r"\W+", "-", command)[:60], *verb[1:], *short)


def test_every_command_is_run_here_or_by_ci() -> None:
    assert set(commands()) == BY_CI | set(SHORT)


@pytest.mark.parametrize("command", [line for line in SHORT if line.startswith(("diloco up", "diloco train"))])
def test_a_whole_run(place: Place, command: str) -> None:
    if "init_from" in command:
        warm = Path("runs/warm/train/checkpoints")
        assert (place.folder / warm).is_dir(), "the command above it was not run"
    verb = start(place, command)
    assert verb.end(90.0) == 0, verb.text()


def test_real_sites_by_hand_and_status(place: Place) -> None:
    port = free_port()
    syncer_line, *site_lines = [line for line in SHORT if line.startswith(("diloco syncer", "diloco site"))]
    syncer = start(place, syncer_line, port)
    wait_for(lambda: "listening on" in syncer.text(), "the syncer", syncer.text)
    sites = [start(place, line, port) for line in site_lines]
    status = start(place, "diloco status 127.0.0.1:7077", port)
    assert status.end(60.0) == 0, status.text()
    assert "first" in status.text()
    for verb in (*sites, syncer):
        assert verb.end(90.0) == 0, verb.text()


@pytest.mark.parametrize("command", ["diloco report runs/latest", "diloco journal show runs/latest"])
def test_afterwards(place: Place, command: str) -> None:
    assert (place.folder / "runs" / "latest").exists(), "no run was made above"
    verb = start(place, command)
    assert verb.end(60.0) == 0, verb.text()
    assert verb.text().strip()
