from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock, PropertyMock, call, create_autospec

import pytest
from rich.console import Console

from diloco.config.compose import compose
from diloco.config.errors import ConfigError, ExitCode, VerbError
from diloco.config.run_dir import RunDir
from diloco.config.schema import RunConfig
from diloco.observe.eventlog import EventLog, read_events
from diloco.observe.history import RunHistory
from diloco.observe.view import Facts, PlainView
from diloco.runs.process import SAME_REQUEST_S, Child, Interrupts, child_environment
from diloco.runs.scenario import Step
from diloco.runs.up import (
    OneSyncer,
    Outcome,
    StatusWatch,
    Up,
    UpOptions,
    check_syncers,
    children_of,
    syncer_address,
    syncers_of,
    together,
)
from diloco.wan.link import LinkOptions
from diloco.wan.process import RelayProcess
from diloco.wire.messages import Refusal, Status
from diloco.wire.options import SecurityOptions, ServerOptions
from tests.runs.processes import wait_for
from tests.runs.test_supervise import alive
from tests.wire.fake_syncer import RUN, FakeSyncer, serve

ACTORS = str(Path(__file__).with_name("actors.py"))
WATCH = ["latest", "answered_s", "drain_accepted", "drain_refused", "drain", "hurry", "close"]
"""What a StatusWatch has."""


class Stage:
    """A run of actors in a folder."""

    def __init__(self, path: Path, *steps: Step, seconds: float = 0.7, **sites: dict[str, float]) -> None:
        self.run_dir = RunDir(path)
        self.history = RunHistory()
        self.log = EventLog(self.run_dir.events, "up")
        self.watch = Mock(spec_set=WATCH, latest={"sites": {}}, drain_accepted=False, drain_refused="")
        self.watch.drain.side_effect = self.drain
        self.watches = [self.watch]
        self.out = io.StringIO()
        self.relay: RelayProcess | None = None
        self.over = threading.Event()
        self.children = {"syncer": self.actor("syncer", "syncer", {"seconds": seconds})}
        names = {f"site-{name}": options for name, options in (sites or {"a": {}, "b": {}}).items()}
        self.children |= {name: self.actor("site", name, options) for name, options in names.items()}
        self.children["eval"] = self.actor("observer", "eval", {})
        self.options = UpOptions(
            sites={name: [] for name in names},
            links={},
            syncers=[OneSyncer("syncer", "127.0.0.1:1", self.run_dir, "diloco restore")],
            steps=list(steps),
            layout=[100],
            references={"xz": 1.7},
            ending_s_max=5.0,
        )

    def actor(self, role: str, who: str, options: dict[str, float]) -> Child:
        command = [sys.executable, ACTORS, role, str(self.run_dir.root), who, json.dumps(options)]
        return Child(who, command, self.run_dir.root / "logs" / f"{who}.log")

    def play(self, *interrupt_when: Callable[[], object]) -> Outcome:
        """Until it is over; interrupted once for each of ``interrupt_when``, in turn, as soon as that holds."""
        environment = child_environment(os.environ)
        up = Up(self.options, self.children, self.run_dir, self.log, self.history, self.relay, environment)
        user = threading.Thread(target=self._interrupt, args=interrupt_when)
        view = PlainView(self.history, Facts(name="quiet-otter", what=""), Console(file=self.out, color_system=None))
        try:
            with Interrupts() as interrupts, view:
                user.start()
                try:
                    return up.run(view, self.watches, interrupts)
                finally:
                    self.over.set()
                    user.join()
        finally:
            self.log.close()
            self.left = [child.name for child in self.children.values() if child.pid and alive(child.pid)]

    def _interrupt(self, *when: Callable[[], object]) -> None:
        for each in when:
            wait_for(lambda each=each: self.over.is_set() or each(), "what is waited for")
            if self.over.is_set():
                return
            os.kill(os.getpid(), signal.SIGINT)
            self.over.wait(2 * SAME_REQUEST_S)  # Sooner the next one would be taken for the same.

    def drain(self) -> None:
        """Stand where the StatusWatch is: a request to drain reaches the syncer as SIGTERM."""
        self.watch.drain_accepted = True
        self.children["syncer"].signal(signal.SIGTERM)

    def has_begun(self) -> bool:
        """The syncer and every site are there, and mind what they are told."""
        joined = {event["who"] for event in self.seen("joined")}
        return bool(self.seen("syncer_started")) and len(joined) == len(self.options.sites)

    def seen(self, what: str, **fields: object) -> list[dict[str, object]]:
        events = list(read_events(self.run_dir.events))
        return [e for e in events if e["what"] == what and all(e.get(key) == value for key, value in fields.items())]


def test_a_run_begins_ends_and_leaves_no_process(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    units = {"leased": 9, "merged": 4, "partly": 1, "repeated": 0}
    stage.watch.latest = {"sites": {}, "units": units}
    with RelayProcess() as relay:
        relay.add("site-a", LinkOptions(), "127.0.0.1:9")
        stage.relay = relay
        outcome = stage.play()
    assert (outcome.code, outcome.wrong) == (ExitCode.OK, [])
    assert stage.history.ending == "finished"
    assert stage.left == []
    stage.watch.hurry.assert_called()
    assert {child.code for child in stage.children.values()} == {0}
    started = stage.seen("process", state="started")
    assert len(started) == 4
    assert {str(each["name"]) for each in started if each.get("site")} == set(stage.options.sites)
    assert stage.history.references == {"xz": 1.7}
    assert stage.history.evaluations
    assert stage.history.units == units
    assert len(stage.seen("units")) == 1, "it is told when it changes"
    assert stage.seen("link", site="site-a", bytes_up=0)


def test_a_long_evaluation_at_the_end_is_waited_for_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.runs.up.FAREWELL_S", 0.1)
    for how in ("takes", "stays"):
        stage = Stage(tmp_path / how)
        stage.children["eval"] = stage.actor("observer", "eval", {how: 1.5})
        assert stage.play().wrong == []
        assert stage.history.evaluations
        said = "waiting for the final version's loss, for at most 5 s" in stage.out.getvalue()
        assert said is (how == "takes"), "one that stays has said it already"


def test_who_ends_unasked_is_started_again(tmp_path: Path) -> None:
    stage = Stage(tmp_path, seconds=1.6, a={"dies_after": 0.3}, b={})
    outcome = stage.play()
    assert outcome.wrong == []
    (death,) = stage.seen("process", unasked=True)
    assert (death["name"], death["code"], death["why"]) == ("site-a", 1, "ValueError: the disk is full")
    assert stage.history.sites["site-a"].restarts == 1
    assert "site-a ended unexpectedly with exit code 1: ValueError: the disk is full" in stage.out.getvalue()


def test_who_cannot_start_ends_it_all_with_its_code_and_words(tmp_path: Path) -> None:
    stage = Stage(tmp_path, seconds=60)
    stage.children["site-b"] = stage.actor("fails", "site-b", {})
    stage.children["site-a"].command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(VerbError) as failure:
        stage.play()
    assert failure.value.code is ExitCode.USAGE
    assert "site-b ended with exit code 2: diloco site: site.id is 'x y': no name" in str(failure.value)
    assert str(tmp_path / "logs" / "site-b.log") in str(failure.value)
    assert stage.left == []


def test_a_run_whose_syncer_lost_its_data_can_be_stopped(tmp_path: Path) -> None:
    stage = Stage(tmp_path, seconds=60)
    stage.children["syncer"] = stage.actor("syncer", "syncer", {"seconds": 60, "loses_after": 0.3})
    how = "diloco restore runs/x --from vault"
    stage.options.syncers = [OneSyncer("syncer", "127.0.0.1:1", stage.run_dir, how)]
    outcome = stage.play(lambda: stage.seen("lost"))
    assert outcome.wrong == [f"the syncer's data are gone: {how}, then the same command"]
    (death,) = stage.seen("process", unasked=True)
    assert death["why"] == "diloco syncer: runs/x/syncer is gone"
    assert len(stage.seen("process", name="syncer", state="started")) == 1, "it was not started in vain"
    said = stage.out.getvalue()
    assert f"the syncer's data in {stage.run_dir.syncer} are gone; the sites train on without it" in said
    assert f"type:  {how}" in said
    assert stage.left == []


def test_the_scenario_is_played_on_the_processes_and_what_was_not_is_said(tmp_path: Path) -> None:
    steps = [
        Step(do="kill", target="site-b", at_s=0.2, for_s=0.5),
        Step(do="kill", target="syncer", at_progress=0.4, for_s=0.4),
        Step(do="start", target="site-c", at_s=0.3),
        Step(do="leave", target="site-c", at_progress=0.8),
        Step(do="kill", target="site-a", at_s=100.0),
    ]
    stage = Stage(tmp_path, *steps, seconds=2.4, a={}, b={}, c={})
    outcome = stage.play()
    assert outcome.wrong == ["the run ended before: kill site-a"]
    played = [f"{each.what} {each.target} {each.healed_s is not None}" for each in stage.history.faults]
    assert played == ["kill site-b True", "start site-c False", "kill syncer True", "leave site-c False"]
    assert stage.history.epoch == 2
    assert len(stage.history.syncer_spans) == 2
    restarts = {name: site.restarts for name, site in stage.history.sites.items()}
    assert restarts == {"site-a": 0, "site-b": 1, "site-c": 0}
    assert not stage.seen("process", unasked=True), "a fault of ours was taken for an accident"
    assert stage.children["site-c"].code == 75


def test_one_interrupt_drains_and_where_that_is_refused_again_and_again_it_is_one_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch goes on asking, and a second SIGTERM would end the syncer at once, without a last round."""
    stage = Stage(tmp_path, seconds=60)
    type(stage.watch).drain_refused = PropertyMock(return_value="only an admin may do this")
    stage.watch.drain.side_effect = None
    accepts = Mock(spec_set=WATCH, latest=None, drain_accepted=True, drain_refused="")
    refused_once = Mock(spec_set=WATCH, latest=None, drain_accepted=False, drain_refused="no admin either")
    stage.watches[:0] = [accepts, refused_once]
    syncer = stage.children["syncer"] = stage.actor("syncer", "syncer", {"seconds": 60, "lingers": 1.0})
    signals = create_autospec(Child.signal, side_effect=Child.signal)
    monkeypatch.setattr(Child, "signal", signals)
    stage.play(stage.has_begun)
    assert stage.history.ending == "drained"
    assert signals.mock_calls.count(call(syncer, signal.SIGTERM)) == 1
    assert refused_once.drain_refused == "", "its next answer counts"
    accepts.drain.assert_called_once_with()
    assert {child.code for name, child in stage.children.items() if name != "eval"} == {75}
    assert stage.left == []
    assert "asked to stop" in stage.out.getvalue()


def test_a_drain_heals_what_is_broken_first(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Step(do="kill", target="syncer", at_s=0.1, for_s=50), seconds=60)

    def drain() -> None:
        wait_for(lambda: len(stage.seen("syncer_started")) == 2, "the syncer")
        stage.children["syncer"].signal(signal.SIGTERM)

    back = threading.Thread(target=drain)

    def drain_when_it_is_back() -> None:
        assert stage.children["syncer"].running
        back.start()

    stage.watch.drain.side_effect = drain_when_it_is_back
    stage.play(lambda: stage.has_begun() and stage.history.faults)
    back.join()
    assert stage.history.ending == "drained"
    assert stage.history.faults[0].healed_s is not None


def test_two_interrupts_end_it_at_once(tmp_path: Path) -> None:
    stage = Stage(tmp_path, seconds=60, a={"deaf": 1.0})
    stage.watch.drain.side_effect = None
    outcome = stage.play(stage.has_begun, lambda: "asked to stop" in stage.out.getvalue())
    assert outcome.code is ExitCode.FAILED
    assert "stopped at once, by hand" in outcome.wrong
    assert stage.children["site-a"].code == -signal.SIGKILL
    assert stage.left == []


def test_who_does_not_end_is_ended_and_named(tmp_path: Path) -> None:
    stage = Stage(tmp_path, seconds=60)
    stage.options.ending_s_max = 0.3
    stage.watch.drain.side_effect = None
    outcome = stage.play(stage.has_begun)
    assert any("did not end in time" in text for text in outcome.wrong)
    assert stage.left == []


def test_a_run_without_sites_is_drained(tmp_path: Path) -> None:
    later = Step(do="kill", target="site-a", at_s=100.0)  # It may be played when the run goes on.
    stage = Stage(tmp_path, Step(do="leave", target="site-a", at_s=0.2), later, seconds=60, a={})
    outcome = stage.play()
    assert outcome.wrong == ["every site had ended before the run did"]
    assert stage.history.ending == "drained"


@pytest.mark.slow
def test_what_was_played_is_not_played_again(tmp_path: Path) -> None:
    steps = [Step(do="start", target="site-b", at_s=0.1), Step(do="kill", target="site-a", at_s=0.2, for_s=0.1)]
    first = Stage(tmp_path, *steps, seconds=60)
    first.play(lambda: len(first.history.faults) == 2 and first.history.sites["site-a"].restarts and first.has_begun())
    assert [fault.what for fault in first.history.faults] == ["start", "kill"]
    (tmp_path / "ending").unlink()
    again = Stage(tmp_path, *steps, seconds=1.0)
    assert again.play().wrong == []
    assert again.history.ending == "finished", "the drain before is not taken for its end"
    assert again.history.sites["site-a"].spans[-1].end_s is not None
    assert [fault.what for fault in again.history.faults] == ["start", "kill"]
    assert len(again.seen("process", name="site-b", state="started")) == 2, "the late site was not started at once"


TWO = ["outer.num_fragments=2", "outer.num_syncers=2", "run.name=x"]


def config_in(path: Path, *overrides: str) -> RunConfig:
    return compose([f"run.dir={path}/runs", "run.name=x", *overrides])


def test_each_syncer_has_an_address_a_folder_and_what_is_typed_once_its_data_are_lost(tmp_path: Path) -> None:
    root = tmp_path / "runs" / "x"
    first = syncer_address(config_in(tmp_path))
    assert first.startswith("127.0.0.1:")
    assert first != "127.0.0.1:7077", "a free one, unless it was chosen"
    assert not syncer_address(config_in(tmp_path, "cluster.syncer.listen=127.0.0.1:0")).endswith(":0")
    assert syncer_address(config_in(tmp_path, "cluster.syncer.listen=127.0.0.1:7123")) == "127.0.0.1:7123"
    (alone,) = syncers_of(config_in(tmp_path))
    assert alone.restore == f"diloco restore {root} --from-site {root}/sites/site-a"
    one, other = syncers_of(config_in(tmp_path, *TWO, "cluster.syncer.backup=s3://bucket"))
    assert (one.name, other.name) == ("syncer", "syncer-1")
    assert one.address != other.address
    assert other.run_dir.root == root / "syncers/1"
    assert other.restore == f"diloco restore {other.run_dir.root} --from s3://bucket/syncer-1"


LISTENS = "cluster.syncer.listen"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([f"{LISTENS}=foo"], f"{LISTENS} is 'foo': host:port with a port of 0 to 65535"),
        ([f"{LISTENS}=0.0.0.0:7123"], f"{LISTENS} is '0.0.0.0:7123': emulated links stay on this machine"),
        ([*TWO, f"{LISTENS}=127.0.0.1:7123"], f"{LISTENS} is '127.0.0.1:7123': diloco up gives each"),
        ([*TWO, "cluster.syncer.metrics=9464"], "cluster.syncer.metrics is '9464': diloco up gives each"),
        ([*TWO, "cluster.syncer.index=1"], "cluster.syncer.index is 1: diloco up gives each"),
        ([*TWO, "cluster.syncer.processes=2"], "cluster.syncer.processes is 2: diloco up gives each"),
        ([*TWO, "cluster.lease.kind=file", "cluster.lease.path=/x"], "lease.path is '/x': several syncers need a file"),
    ],
)
def test_what_no_syncer_of_this_machine_can_have_and_what_two_cannot_share_is_named(
    tmp_path: Path, settings: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_syncers(config_in(tmp_path, *settings))
    for fine in ([f"{LISTENS}=127.0.0.1:7123"], [f"{LISTENS}=0.0.0.0:7123", "network.emulate=false"]):
        check_syncers(config_in(tmp_path, *fine))


@pytest.fixture
def syncer() -> FakeSyncer:
    return FakeSyncer()


@pytest.fixture
def watch(syncer: FakeSyncer) -> Iterator[StatusWatch]:
    server = serve(syncer, ServerOptions(run_id=RUN))
    watch = StatusWatch(server.address, SecurityOptions())
    yield watch
    watch.close()
    server.stop(0.1)


def test_the_newest_answer_is_kept_and_a_drain_is_passed_on_once(watch: StatusWatch, syncer: FakeSyncer) -> None:
    wait_for(lambda: watch.latest is not None, "an answer")
    assert watch.latest == {"run_id": RUN, "sites": {"site-a": {"step": 1}}}
    watch.drain()
    wait_for(lambda: watch.drain_accepted, "its word")
    seen = syncer.calls.count("status")
    wait_for(lambda: syncer.calls.count("status") >= seen + 4, "four answers", bound_s=3.0)
    assert syncer.calls.count("drain") == 1


def test_a_refusal_is_kept_in_words(watch: StatusWatch, syncer: FakeSyncer) -> None:
    syncer.drain = Mock(side_effect=Refusal(Status.PERMISSION_DENIED, "only an admin may do this"))  # type: ignore[method-assign]
    watch.drain()
    wait_for(lambda: watch.drain_refused, "its word")
    assert watch.drain_refused == "only an admin may do this"
    assert not watch.drain_accepted


def test_a_syncer_that_is_not_there_holds_nobody_up() -> None:
    watch = StatusWatch("127.0.0.1:9", SecurityOptions())
    watch.drain()
    time.sleep(0.1)
    assert watch.latest is None
    began = time.monotonic()
    watch.close()
    assert time.monotonic() - began < 5


def test_what_two_syncers_say_is_what_one_would() -> None:
    site = {"tokens_merged": 100, "tokens_in_flight": 10, "tokens_processed": 150, "updates_merged": 4, "undecided": 1}
    first = {"fragments": [{}] * 3, "sites": {"a": {**site, "updates_refused": {"stale": 1}}}}
    late = {**site, "tokens_merged": 60, "tokens_processed": None, "updates_refused": {"stale": 2}}
    other = {"fragments": [{}], "sites": {"a": late, "b": site}}
    told = together([first, None, other])
    assert told is not None
    sites: Any = told["sites"]
    assert sites["a"] == {
        "tokens_merged": (3 * 100 + 60) // 4,
        "tokens_in_flight": 10,
        "tokens_processed": 150,
        "updates_merged": 8,
        "undecided": 2,
        "updates_refused": {"stale": 3},
    }
    assert sites["b"]["tokens_merged"] == 25, "one that the other syncer does not know has merged nothing there"
    assert together([None, None]) is None
    assert together([first]) is first


def test_the_processes_of_a_run_are_our_verbs(tmp_path: Path) -> None:
    options = Stage(tmp_path).options
    options.sites = {"site-a": ["site.id=site-a", "site.syncer=127.0.0.1:2"]}
    children = children_of(options, RunDir(tmp_path))
    assert list(children) == ["syncer", "site-a", "eval"]
    words = " ".join(children["site-a"].command)
    assert words.endswith(f"-m diloco site --config {tmp_path}/config.yaml site.id=site-a site.syncer=127.0.0.1:2")
    assert "cluster.syncer.listen=127.0.0.1:1" in children["syncer"].command
