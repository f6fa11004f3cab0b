from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco.runs.scenario import Faults, Play, Step
from diloco.runs.supervise import Child, child_environment, end_all
from diloco.wan.link import LinkOptions
from diloco.wan.process import RelayProcess
from tests.launch.test_supervise import SLEEPER, says_up, state, until

LINKS = {"site-a": {"rtt_ms": 10.0, "jitter_ms": 0.0, "mbps": 50.0}}


class Stage:
    """Two children and what happened to them."""

    def __init__(self, path: Path, relay: RelayProcess | None) -> None:
        command = [sys.executable, "-c", SLEEPER]
        self.children = {name: Child(name, command, path / name) for name in ("site-a", "syncer")}
        self.events: list[tuple[str, dict[str, object]]] = []
        note = lambda what, fields: self.events.append((what, fields))  # noqa: E731
        self.faults = Faults(self.children, relay, LINKS, self.start, note)

    def start(self, child: Child) -> None:
        child.start(child_environment(os.environ))
        until(says_up(child))

    def play(self, *, heals: bool = False, **fields: Any) -> tuple[str, dict[str, object]]:
        self.faults.play([Play(Step(at_s=0, **fields), heals)])
        return self.events[-1]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path, None)
    yield made
    end_all(made.children.values(), 0.0)


def test_a_killed_child_is_not_wanted_until_it_is_healed(stage: Stage) -> None:
    child = stage.children["syncer"]
    stage.start(child)
    first = child.pid
    assert stage.play(do="kill", target="syncer", for_s=3) == (
        "fault",
        {"fault": "kill", "target": "syncer", "seconds": 3},
    )
    until(child.ended)
    assert (child.code, child.wanted) == (-signal.SIGKILL, False)
    assert stage.play(do="kill", target="syncer", for_s=3, heals=True)[0] == "healed"
    assert (child.wanted, child.running, child.pid != first) == (True, True, True)


def test_a_frozen_child_goes_on(stage: Stage) -> None:
    child = stage.children["site-a"]
    stage.start(child)
    stage.play(do="stop", target="site-a", for_s=1)
    until(lambda: state(child.pid) == "T")
    stage.play(do="stop", target="site-a", for_s=1, heals=True)
    until(lambda: state(child.pid) in "SR")
    assert child.wanted


def test_a_site_starts_late_and_leaves(stage: Stage) -> None:
    child = stage.children["site-a"]
    assert stage.play(do="start", target="site-a")[0] == "fault"
    assert child.running
    assert stage.play(do="start", target="site-a") == (
        "skipped",
        {"fault": "start", "target": "site-a", "why": "it runs already"},
    )
    stage.play(do="leave", target="site-a")
    until(child.ended)
    assert (child.code, child.wanted) == (-signal.SIGTERM, False)


def test_what_is_not_there_is_skipped_with_a_word(stage: Stage) -> None:
    assert stage.play(do="kill", target="site-a")[1]["why"] == "it does not run"
    assert "network.emulate" in str(stage.play(do="reset", target="link:site-a")[1]["why"])


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


def test_a_fault_on_a_sites_link_is_on_its_links_to_all_syncers() -> None:
    class Told:
        def __init__(self) -> None:
            self.calls: list[tuple[object, ...]] = []

        def __getattr__(self, name: str) -> Any:
            return lambda *names, **changes: self.calls.append((name, *names, *changes.items()))

    relay: Any = Told()
    links = {"site-a": {"mbps": 50.0}, "site-a@1": {"mbps": 60.0}, "site-b": {"mbps": 1.0}}
    faults = Faults({}, relay, links, lambda child: None, lambda what, fields: None)
    faults.play([Play(Step(do="partition", target="link:site-a", at_s=0, for_s=1))])
    faults.play([Play(Step(do="set", target="link:site-a", at_s=0, for_s=1, changes={"mbps": 2.0}), heals=True)])
    assert relay.calls == [
        ("partition", "site-a"),
        ("partition", "site-a@1"),
        ("set", "site-a", ("mbps", 50.0)),
        ("set", "site-a@1", ("mbps", 60.0)),
    ]
