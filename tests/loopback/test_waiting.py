"""No function of the agent waits on a socket or a file in the training thread, and no site waits for another."""

from __future__ import annotations

import os
import queue
import socket
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from diloco.learner.agent import Agent
from diloco.learner.seal import SealJob
from diloco.learner.transfer import Sealer
from diloco.observe.eventlog import EventLog, read_events
from diloco.sync.effects import StartOuterStep
from diloco.sync.events import UpdateArrived
from diloco.wire.client import SyncClient
from tests.loopback.audit import all_records, version_zero
from tests.loopback.cluster import SiteThread, eventually, serving, shares
from tests.loopback.guard import Guard, Waited, guarding
from tests.loopback.toy import RUN, Toy, Twin
from tests.sync.driving import replay

BOUND_S = 40.0
TRIES = 5


def test_the_guard_sees_each_kind_of_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check below can fail: this is what it would see."""
    left, right = socket.socketpair()
    with left, right, SyncClient("127.0.0.1:9", "a", RUN) as client:
        offences: dict[str, Callable[[], object]] = {
            "open": lambda: open(tmp_path / "file", "w"),  # noqa: SIM115
            "os.write": lambda: os.write(1, b"x"),
            "pathlib": lambda: (tmp_path / "file").rename(tmp_path / "other"),
            "connect": lambda: socket.create_connection(("127.0.0.1", 9), 0.1),
            "send": lambda: left.send(b"x"),
            "sleep": lambda: time.sleep(0.001),
            "event": lambda: threading.Event().wait(0.001),
            "queue": lambda: queue.SimpleQueue().get(timeout=0.001),
            "thread": lambda: threading.Thread(target=int).start(),
            "call": lambda: client.leave(1),
        }
        for name, offence in offences.items():
            guard = Guard(lambda: True)
            with guarding(guard, monkeypatch), suppress(Waited):
                offence()
            assert guard.seen, name


class Watched:
    """The agent's own functions, marked while a thread is inside one of them or holds the agent's lock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._inside = threading.local()
        self._locks: list[threading.Condition] = []
        for name in ("after_step", "progress", "state", "leave_soon"):
            monkeypatch.setattr(Agent, name, self._marked(getattr(Agent, name)))
        start, finish = Agent.start, Agent.finish

        def starting(agent: Agent) -> int:
            cursor = start(agent)  # What waits for the syncer, as it should, holds the lock while it does.
            self._locks.append(agent.changed)
            return cursor

        def finishing(agent: Agent) -> object:
            self._inside.done = True  # Training is over: now it is right to wait for the last fates.
            return finish(agent)

        monkeypatch.setattr(Agent, "start", starting)
        monkeypatch.setattr(Agent, "finish", finishing)

    def forbidden(self) -> bool:
        if getattr(self._inside, "done", False):
            return False
        held = any(lock._is_owned() for lock in self._locks)  # type: ignore[attr-defined]
        return held or getattr(self._inside, "depth", 0) > 0

    def _marked(self, original: Callable[..., object]) -> Callable[..., object]:
        def inside(*args: object, **kwargs: object) -> object:
            self._inside.depth = getattr(self._inside, "depth", 0) + 1
            try:
                return original(*args, **kwargs)
            finally:
                self._inside.depth -= 1

        return inside


@pytest.mark.parametrize("adopt", ["rebase", pytest.param("overwrite", marks=pytest.mark.slow)])
def test_the_training_thread_never_waits_on_a_socket_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adopt: str
) -> None:
    """Nor does any thread while it holds the lock that the training thread takes."""
    watched = Watched(monkeypatch)
    outer = {"grace": "fixed", "grace_ns": 0, "num_fragments": 2}
    toy = Toy(folder=str(tmp_path), codec="int4:32+zstd1", outer=outer, adopt=adopt)
    events = EventLog(tmp_path / "events.jsonl", "a")

    def boundary(steps: int) -> None:
        agent.progress()
        if steps % 10 == 0:
            agent.state()

    with serving(toy) as (_, address, _), guarding(Guard(watched.forbidden), monkeypatch) as guard:
        with SiteThread(toy, "a", address, also=events.emit, step_s=0.003, after=boundary) as site:
            agent = site.toy_site.agent
            site.log.wait_for("adopted", 10, BOUND_S)
            site.log.wait_for("sealed", 11, BOUND_S)
            agent.leave_soon()
            done = site.join(BOUND_S)
        assert not guard.seen, guard.seen
    events.close()
    assert guard.calls > 500, "the guard was there"
    assert done.ending == "left"
    assert not [event for event in read_events(events.path) if event.get("note") == "events_not_written"]


def test_the_check_fails_when_the_agent_seals_in_the_training_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutant: the file of the outbox is written where the order to seal is given."""
    watched = Watched(monkeypatch)
    monkeypatch.setattr(Sealer, "run", lambda sealer: None)
    toy = Toy(folder=str(tmp_path), outer={"grace": "fixed", "grace_ns": 0})
    with serving(toy) as (_, address, _), guarding(Guard(watched.forbidden), monkeypatch) as guard:
        with SiteThread(toy, "a", address, step_s=0.003) as site:
            sealer = site.toy_site.agent.sealer
            at_once = lambda job: isinstance(job, SealJob) and sealer._seal(job)  # noqa: E731
            sealer.queue = SimpleNamespace(put=at_once)  # type: ignore[assignment]
            eventually(lambda: site.error is not None, BOUND_S, "the mutant is caught")
        assert isinstance(site.error, Waited)
        assert guard.seen


def test_invariant_14_with_quorum_1_no_site_waits_for_another(tmp_path: Path) -> None:
    """A peer that takes a hundred times as long for a step costs a site nothing, and a round its grace at most."""
    grace_ns = 50_000_000
    toy = Toy(folder=str(tmp_path), outer={"grace": "fixed", "grace_ns": grace_ns}, snapshot_every=10_000)
    with serving(toy) as (_, address, _), Twin(0.01) as twin, SiteThread(toy, "a", address, step_s=0.01) as fast:
        fast.log.wait_for("adopted", 2, BOUND_S)
        alone, stalled_alone = measured(fast, twin)
        with SiteThread(toy, "b", address, step_s=1.0) as slow:
            eventually(lambda: slow.toy_site.trained > 0, BOUND_S, "the slow peer trains")
            # Who waits for the peer waits always; what else the machine does passes.
            for _ in range(TRIES):
                beside, stalled = measured(fast, twin)
                if beside >= 0.95 * alone and stalled < stalled_alone + 0.02:
                    break
            else:
                pytest.fail(
                    f"steps {beside} beside the peer and {alone} alone; stalled {stalled}, {stalled_alone} alone"
                )
    waited_ns = [delay_ns for delay_ns in waits(toy) if delay_ns >= grace_ns]
    assert waited_ns, "no round waited for the slow peer"
    # The machine is told of the instant it asked for; how late that is under load is no matter of the bound.
    assert statistics.median(waited_ns) < grace_ns + 30_000_000, waited_ns


def measured(site: SiteThread, twin: Twin) -> tuple[float, float]:
    """The site's steps for each of its twin's, and the share of its time in which the agent held it."""
    meters = site.log.of("meter")
    before = meters[-1]
    steps = statistics.median(shares(site, twin, 4, 0.5))
    meter = site.log.wait_for("meter", len(meters) + 1, BOUND_S)[-1]
    stall_s, train_s = (float(str(meter[key])) - float(str(before[key])) for key in ("stall_s", "train_s"))
    return steps, stall_s / train_s


def waits(toy: Toy) -> list[int]:
    """For each outer step: the time from the first update that waited for it to its begin."""
    machine, _ = version_zero(toy)
    first_ns: int | None = None
    found = []
    for record, effects in replay(machine, all_records(toy)):
        if isinstance(record.event, UpdateArrived) and first_ns is None:
            first_ns = record.at_ns
        for effect in effects:
            if isinstance(effect, StartOuterStep):
                assert first_ns is not None
                found.append(record.at_ns - first_ns)
                first_ns = None
    return found
