"""What a run tells its simulation, from events made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from diloco.cli.main import main
from diloco.config import compose as configs
from diloco.config.compose import compose
from diloco.config.errors import ConfigError
from diloco.config.run_dir import RunDir
from diloco.lab.compare import Column, as_made, read_made
from diloco.lab.fleet import fleet_of
from diloco.runs.scenario import Step
from tests.lab.test_fleet import TIMES
from tests.runs.processes import TINY

METER = {"inner_steps": 20, "train_s": 15.0, "stall_s": 6.0, "adopt_s": 1.0}
EVENTS: list[dict[str, Any]] = [
    {"at": 100.0, "who": "up", "what": "layout", "fragments": [1000, 1000]},
    {"at": 101.0, "who": "syncer", "what": "site_joined", "site": "site-b"},
    {"at": 103.5, "who": "syncer", "what": "site_joined", "site": "site-a"},
    {"at": 104.0, "who": "site-a", "what": "step", "step": 10, "step_s": 0.5},
    {"at": 104.0, "who": "site-a", "what": "step", "step": 20, "step_s": 0.75},
    {"at": 104.25, "who": "site-a", "what": "sealed", "fragment": 0, "sequence": 1},
    {"at": 104.5, "who": "site-a", "what": "pushed", "fragment": 0, "outcome": "accepted", "bytes": 300},
    {"at": 104.6, "who": "site-b", "what": "pushed", "fragment": 0, "outcome": "accepted", "bytes": 500},
    {"at": 105.0, "who": "syncer", "what": "round_closed", "fragment": 0, "version": 1},
    {"at": 105.1, "who": "syncer", "what": "outer_step", "fragment": 0, "version": 1, "sites": {"site-a": 1.0}},
    {"at": 105.2, "who": "syncer", "what": "published", "fragment": 0, "version": 1, "bytes": 700},
    {"at": 106.0, "who": "up", "what": "fault", "fault": "kill", "target": "site-a", "seconds": 2.0},
    {"at": 107.0, "who": "up", "what": "fault", "fault": "partition", "target": "link:site-b", "seconds": 1.5},
    {"at": 108.75, "who": "syncer", "what": "site_joined", "site": "site-a"},
    {"at": 110.0, "who": "site-a", "what": "meter", **METER},
    {"at": 110.0, "who": "site-b", "what": "meter", **METER, "inner_steps": 10, "stall_s": 0.0, "adopt_s": 0.0},
    {"at": 110.0, "who": "up", "what": "link", "site": "site-a", "bytes_up": 900, "bytes_down": 9000},
    {"at": 111.0, "who": "syncer", "what": "final", "ending": "finished", "versions": [1, 0]},
]


def run_in(folder: Path, events: list[dict[str, Any]], *settings: str) -> RunDir:
    root = folder / "runs" / "otter"
    root.mkdir(parents=True)
    (root / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (root / "config.yaml").write_text(configs.to_yaml(compose([*TINY, "outer.num_fragments=2", *settings])))
    return RunDir(root)


def test_what_the_run_tells(tmp_path: Path) -> None:
    made = read_made(run_in(tmp_path, EVENTS))
    assert made.step_s == {"site-a": 0.5, "site-b": 1.5}, "a copy of values is work, and waiting is not"
    assert made.steps_s == {"site-a": (0.4, 0.6), "site-b": ()}, "their mean is step_s"
    assert made.starts_s == {"site-a": 2.5, "site-b": 0.0}
    assert made.seal_s == {"site-a": 0.25, "site-b": 0.0}
    assert made.merge_s == pytest.approx(0.2)
    assert (made.update_bytes, made.version_bytes, made.versions) == ([400, None], [700, None], [1])
    assert made.faults == [
        Step(do="kill", target="site-a", at_s=2.5, for_s=2.75),
        Step(do="partition", target="link:site-b", at_s=3.5, for_s=1.5),
    ]
    assert made.columns["site-a"] == Column(20, 1, 900, 9000, pytest.approx(5 / 15))


def test_the_plan_has_it_and_keeps_the_rest(tmp_path: Path) -> None:
    made = read_made(run_in(tmp_path, EVENTS))
    config = compose([*TINY, "outer.num_fragments=2", "cluster=one", "cluster.sites.site-b.slowdown=3"])
    before = fleet_of(config, TIMES)
    plan = as_made(before, ["site-a", "site-b"], made)
    assert [(site.step_s, site.starts_s, site.seal_s) for site in plan.sites] == [(0.5, 2.5, 0.25), (1.5, 0.0, 0.0)]
    assert plan.update_bytes == (400, before.update_bytes[1])
    assert [(fault.kind, fault.site) for fault in plan.faults] == [("away", 0), ("cut", 1)]
    assert plan.sites[0].rtt_s == before.sites[0].rtt_s
    with pytest.raises(ConfigError, match="site-z, which has made no step"):
        as_made(before, ["site-a", "site-z"], made)


def test_the_verb_puts_both_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("cluster=one", "cluster.sites.site-b.slowdown=3", "run.seconds=10", "scenario=not-here.yaml")
    folder = str(run_in(tmp_path, EVENTS, *settings).root)
    assert main(["sim", "--like", folder, "--json"]) == 0
    like = json.loads(capsys.readouterr().out)["like"]
    assert like["sites"]["site-a"]["run"]["steps"] == 20
    assert like["sites"]["site-b"]["simulation"]["steps"] == pytest.approx(7, abs=1)
    assert main(["sim", "--like", folder]) == 0
    assert "versions: 1 in the run" in capsys.readouterr().out


@pytest.mark.parametrize("events", [[], EVENTS[:-1], EVENTS[:1] + EVENTS[-1:]])
def test_a_run_that_did_not_end_is_no_likeness(
    events: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(run_in(tmp_path, events).root)
    assert main(["sim", "--like", folder]) == 2
    assert "is no run that came to its end" in capsys.readouterr().err
    assert main(["sim", "--like", folder, "--config", f"{folder}/config.yaml"]) == 2
    assert "the configuration is that of the run" in capsys.readouterr().err
