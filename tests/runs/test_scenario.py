from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest

from diloco.config.errors import ConfigError
from diloco.runs.process import Child, child_environment, end_all
from diloco.runs.scenario import Faults, Play, ScenarioError, Schedule, Step, late_sites, load_scenario, not_yet_played
from diloco.wan.link import LinkOptions
from diloco.wan.process import RelayProcess
from tests.runs.processes import wait_for
from tests.runs.test_supervise import SLEEPER, says_up, state

SITES = ["site-a", "site-b", "site-c"]


def load(text: str) -> list[Step]:
    return load_scenario(text, "faults.yaml", SITES)


def test_every_kind_can_be_written() -> None:
    steps = load(
        """
        # a comment
        - {at_s: 30, do: kill, target: site-b, for_s: 8}
        - {at_s: 31, do: kill, target: site-a}
        - {at_progress: 0.5, do: kill, target: syncer, for_s: 3}
        - {at_s: 1.5, do: stop, target: syncer, for_s: 2}
        - at_s: 40
          do: partition
          target: link:site-c
          for_s: 10
        - {at_s: 2, do: half_open, target: "link:site-a", for_s: 5, direction: down}
        - {at_s: 2, do: reset, target: "link:site-a"}
        - {at_s: 2, do: set, target: "link:site-a", mbps: 1, rtt_ms: 300, jitter_ms: 20, for_s: 4}
        - {at_s: 9, do: start, target: site-c}
        - {at_s: 9, do: leave, target: site-a}
        """
    )
    did = " ".join(step.do for step in steps)
    assert did == "kill kill kill stop partition half_open reset set start leave"
    assert steps[0] == Step(do="kill", target="site-b", at_s=30.0, for_s=8.0, line=3)
    assert steps[2].at_progress == 0.5
    assert steps[5].direction == "down"
    assert steps[7].changes == {"mbps": 1.0, "rtt_ms": 300.0, "jitter_ms": 20.0}
    assert late_sites(steps) == {"site-c"}
    assert [step.site for step in steps[2:5]] == ["", "", "site-c"]
    assert load("") == load("[]") == load("# nothing") == []


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("- {at_s: 1, do: kil, target: site-a}", "faults.yaml:1: do is 'kil': one of kill, stop"),
        ("- {at_s: 1, do: kill, target: site-x}", "target of kill is 'site-x': one of site-a, site-b, site-c, syncer"),
        ("- {at_s: 1, do: partition, target: site-a, for_s: 1}", "target of partition is 'site-a': one of link:site-a"),
        ("- {at_s: 1, do: leave, target: syncer}", "target of leave is 'syncer'"),
        ("\n- {at_s: 1, do: kill, target: site-a, for: 3}", "faults.yaml:2: unknown key for: did you mean for_s?"),
        ("- {at_s: 1, do: kill, target: site-a, mbps: 3}", "unknown key mbps"),
        ("- {at_s: -1, do: kill, target: site-a}", "at_s is -1: seconds"),
        ("- {at_s: .nan, do: kill, target: site-a}", "at_s is nan"),
        ("- {at_s: yes, do: kill, target: site-a}", "at_s is True"),
        ("- {at_progress: 30, do: kill, target: site-a}", "at_progress is 30: the share"),
        ("- {at_s: 1, at_progress: 0.1, do: kill, target: site-a}", "either at_s (seconds) or at_progress"),
        ("- {at_s: 1, do: kill, target: syncer}", "kill syncer needs for_s"),
        ("- {at_s: 1, do: stop, target: site-a}", "stop needs for_s"),
        ("- {at_s: 1, do: stop, target: site-a, for_s: 0}", "for_s is 0: seconds, more than 0"),
        ("- {at_s: 1, do: reset, target: 'link:site-a', for_s: 2}", "reset takes no for_s"),
        ("- {at_s: 1, do: set, target: 'link:site-a'}", "set changes nothing"),
        ("- {at_s: 1, do: set, target: 'link:site-a', rtt_ms: 99999}", "rtt_ms is 99999.0: 0 to 60000"),
        ("- {at_s: 1, do: half_open, target: 'link:site-a', for_s: 2, direction: left}", "direction is 'left'"),
        ("- {at_s: 1, at_s: 2, do: kill, target: site-a}", "at_s is given twice"),
        ("at_s: 1", "faults.yaml:1: a scenario is a list of steps"),
        ("- kill", "faults.yaml:1: a step is a mapping"),
        ("- {at_s: [", "faults.yaml:1: not YAML"),
        (
            "- {at_s: 1,\n   do: !mine kill, target: site-a}",
            "faults.yaml:2: not YAML: could not determine a constructor",
        ),
        ("- {at_s: 2026-13-01, do: kill, target: site-a}", "faults.yaml:1: at_s is '2026-13-01': month"),
        (
            "- {at_s: 1, do: start, target: site-a}\n- {at_s: 2, do: start, target: site-a}",
            "faults.yaml:2: site-a starts already in line 1",
        ),
    ],
)
def test_what_cannot_be_played_is_refused_with_line_and_value(text: str, wanted: str) -> None:
    with pytest.raises(ScenarioError) as refusal:
        load(text)
    assert wanted in str(refusal.value)
    # What makes it one line and exit code 2.
    assert isinstance(refusal.value, ConfigError)
    assert "\n" not in str(refusal.value)


def test_steps_begin_once_and_end_once() -> None:
    first = Step(do="kill", target="site-a", at_s=10, for_s=5)
    second = Step(do="reset", target="link:site-b", at_progress=0.5)
    schedule = Schedule([first, second])
    assert schedule.due(9.9, 0.0) == []
    assert schedule.due(10.2, 0.1) == [Play(first)]
    assert schedule.healing
    assert schedule.due(12.0, 0.5) == [Play(second)]
    # A heal is counted from when the step really began, however late that was.
    assert schedule.due(15.1, 0.5) == []
    assert schedule.due(15.3, 0.6) == [Play(first, heals=True)]
    assert schedule.due(99.0, 1.0) == []
    assert schedule.waiting == []


def test_what_lasts_is_ended_before_something_begins_and_by_a_drain() -> None:
    first = Step(do="stop", target="site-a", at_s=1, for_s=5)
    second = Step(do="kill", target="site-a", at_s=6, for_s=1)
    schedule = Schedule([first, second])
    schedule.due(1.0, 0.0)
    assert schedule.due(6.0, 0.0) == [Play(first, heals=True), Play(second)]
    drained = Schedule([first, second])
    drained.due(1.0, 0.0)
    assert len(drained.waiting) == 1
    assert drained.heal_all() == [Play(first, heals=True)]
    assert drained.due(99.0, 1.0) == []


def test_what_an_earlier_part_of_the_run_played_is_not_left() -> None:
    first, second = Step(do="kill", target="site-a", at_s=1.0), Step(do="kill", target="site-a", at_s=9.0)
    other, passed = Step(do="kill", target="site-b", at_s=1.0), Step(do="leave", target="site-b", at_progress=0.3)
    steps = [first, second, other, passed]
    assert not_yet_played(steps, [], -1.0) == steps
    assert not_yet_played(steps, [("kill", "site-a")], 0.2) == [second, other, passed]
    assert not_yet_played(steps, [("kill", "site-b")], 0.3) == [first, second]


def test_each_of_several_syncers_can_be_a_target() -> None:
    text = "- {at_s: 1, do: kill, target: syncer-1, for_s: 2}"
    (step,) = load_scenario(text, "faults.yaml", SITES, ["syncer", "syncer-1"])
    assert (step.target, step.site) == ("syncer-1", "")
    with pytest.raises(ScenarioError, match=r"target of kill is 'syncer-1': one of site-a, site-b, site-c, syncer$"):
        load(text)
    with pytest.raises(ScenarioError, match="kill syncer-1 needs for_s"):
        load_scenario("- {at_s: 1, do: kill, target: syncer-1}", "faults.yaml", SITES, ["syncer", "syncer-1"])


LINKS = {"site-a": {"rtt_ms": 10.0, "jitter_ms": 0.0, "mbps": 50.0}}


class Stage:
    """Two children and what happened to them."""

    def __init__(self, path: Path, relay: RelayProcess | None) -> None:
        command = [sys.executable, "-c", SLEEPER]
        self.children = {name: Child(name, command, path / name) for name in ("site-a", "syncer")}
        self.events: list[tuple[str, dict[str, object]]] = []
        self.faults = Faults(self.children, relay, LINKS, self.start, lambda *event: self.events.append(event))

    def start(self, child: Child) -> None:
        child.start(child_environment(os.environ))
        wait_for(says_up(child), "its word")

    def play(self, *, heals: bool = False, **fields: Any) -> tuple[str, dict[str, object]]:
        self.faults.play([Play(Step(at_s=0, **fields), heals)])
        return self.events[-1]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path, None)
    yield made
    end_all(made.children.values(), 0.0)


def test_a_site_starts_late_is_frozen_for_a_while_and_leaves_and_what_is_not_there_is_skipped(stage: Stage) -> None:
    child = stage.children["site-a"]
    assert stage.play(do="start", target="site-a")[0] == "fault"
    assert child.running
    what, facts = stage.play(do="start", target="site-a")
    assert (what, facts) == ("skipped", {"fault": "start", "target": "site-a", "why": "it runs already"})
    stage.play(do="stop", target="site-a", for_s=1)
    wait_for(lambda: state(child.pid) == "T", "its stop")
    stage.play(do="stop", target="site-a", for_s=1, heals=True)
    wait_for(lambda: state(child.pid) in "SR", "its going on")
    assert child.wanted
    stage.play(do="leave", target="site-a")
    wait_for(child.ended, "its end")
    assert (child.code, child.wanted) == (-signal.SIGTERM, False)
    assert stage.play(do="kill", target="site-a")[1]["why"] == "it does not run"


def test_links_are_broken_and_mended(tmp_path: Path) -> None:
    with RelayProcess() as relay:
        relay.add("site-a", LinkOptions(**LINKS["site-a"]), "127.0.0.1:9")  # type: ignore[arg-type]
        stage = Stage(tmp_path, relay)
        for do, more in [("partition", {}), ("half_open", {"direction": "down"}), ("set", {"changes": {"mbps": 1.0}})]:
            fields = {"do": do, "target": "link:site-a", "for_s": 2.0, **more}
            assert stage.play(**fields)[0] == "fault"
            assert stage.play(**fields, heals=True)[0] == "healed"
        assert stage.play(do="reset", target="link:site-a")[0] == "fault"
        what, facts = stage.play(do="set", target="link:site-a", changes={"jitter_ms": 500.0})
        assert what == "skipped"
        assert "jitter_ms is 500.0" in str(facts["why"])
        stage.play(do="set", target="link:site-a", changes={"rtt_ms": 300.0}, for_s=2.0)
        stage.play(do="set", target="link:site-a", changes={"jitter_ms": 200.0})
        what, facts = stage.play(do="set", target="link:site-a", changes={"rtt_ms": 300.0}, for_s=2.0, heals=True)
        assert (what, "jitter_ms is 200.0" in str(facts["why"])) == ("skipped", True), "the usual trip is too short now"


def test_a_fault_on_a_sites_link_is_on_its_links_to_all_syncers() -> None:
    relay = Mock()
    links = {"site-a": {"mbps": 50.0}, "site-a@1": {"mbps": 60.0}, "site-b": {"mbps": 1.0}}
    faults = Faults({}, relay, links, lambda child: None, lambda what, fields: None)
    faults.play([Play(Step(do="partition", target="link:site-a", at_s=0, for_s=1))])
    faults.play([Play(Step(do="set", target="link:site-a", at_s=0, for_s=1, changes={"mbps": 2.0}), heals=True)])
    assert relay.mock_calls == [
        call.partition("site-a", "both"),
        call.partition("site-a@1", "both"),
        call.set("site-a", mbps=50.0),
        call.set("site-a@1", mbps=60.0),
    ]
