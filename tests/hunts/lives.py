"""What hunts that kill processes share: a syncer with a standby and two sites, verbs as a user starts them, audits."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from torch import Tensor

from diloco.config import build
from diloco.config import compose as configs
from diloco.config.errors import ExitCode
from diloco.learner.agent import Finished
from diloco.observe.eventlog import Event
from diloco.outer.fragments import Layout
from diloco.outer.optimizer import OuterRule
from diloco.sync.options import OuterOptions
from diloco.syncer.restoring import Kept
from diloco.wire.client import AdminClient
from tests.hunts.reporting import why
from tests.loopback.audit import History, audit, one_run
from tests.loopback.cluster import Log, Process, free_port
from tests.loopback.toy import Toy
from tests.runs.processes import START_S, Place, Verb, place_in

Found = TypeVar("Found")
BOUND_S = 90.0
PATIENCE_S = 15.0
"""If a step does not occur for this long, SIGKILL comes from outside instead."""
QUICK = ("outer.num_fragments=2", "outer.quorum=1", "outer.grace_s=0.2", "inner.checkpoint_every_steps=10")
"""Settings of runs of verbs, in which a round waits for no site."""
PARTS = ("merged", "refused", "in_flight", "unsent", "overwritten", "lost")
"""Where the tokens are that a site has processed."""


def ended(log: Log) -> Finished:
    """Return how a site of a toy run ended."""
    (event,) = log.of("finished")
    ledger = event["ledger"]
    assert isinstance(ledger, dict)
    return Finished(str(event["ending"]), str(event["why"]), ledger)


def ledgers_of(events: Iterable[Event]) -> dict[str, dict[str, int]]:
    """Return the last ledger of each of a run's sites."""
    told: dict[str, Any] = {str(event["who"]): event["ledger"] for event in events if event["what"] == "site_done"}
    return {site: {name.removeprefix("tokens_"): ledger[name] for name in ledger} for site, ledger in told.items()}


def check_ledgers(ledgers: Mapping[str, Mapping[str, int]], syncer: Path) -> None:
    """Check that the tokens of each of the run's sites balance, and that its syncer has merged as many."""
    sites = Kept(syncer).points()[-1].state.sites
    assert sorted(ledgers) == sorted(sites), f"of {sorted(sites)} {sorted(ledgers)} ended"
    for site, ledger in ledgers.items():
        lines = sites[site].lines
        merged = sum(line.tokens_merged for line in lines) // len(lines)
        assert ledger["processed"] == sum(ledger[part] for part in PARTS), f"{site}: tokens do not balance: {ledger}"
        assert ledger["merged"] == merged, f"{site}: {ledger}, but the syncer has merged {merged}"


def least(places: Iterable[Found], dice: Random, kills: Callable[[Found], int]) -> Found:
    """Return one of the places with the fewest kills so far."""
    drawn = list(places)
    dice.shuffle(drawn)
    return min(drawn, key=kills)


def stall_share(log: Log) -> float:
    """Return the share of a site's training time in which it waited."""
    meter = log.of("meter")[-1]
    return float(str(meter["stall_s"])) / float(str(meter["train_s"]))


class Nodes:
    """A toy run whose syncer and standby take turns at two addresses, which both sites know."""

    def __init__(self, folder: Path, *, lease: bool, ttl_s: float = 2.0, **more: Any) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.toy = Toy(
            folder=str(folder),
            codec="int8",
            inner_steps=4,
            seed=11,
            outer={"num_fragments": 2, "grace": "fixed", "grace_ns": 5_000_000},
            replication={"mode": "sync", "timeout_s": 3.0, "alive_s": 0.2},
            lease=str(folder / "lease.json") if lease else "",
            lease_ttl_s=ttl_s,
            **more,
        )
        self.ports = [free_port(), free_port()]

    def address(self, number: int) -> str:
        return f"127.0.0.1:{self.ports[number % 2]}"

    def home(self, number: int) -> dict[str, object]:
        """Return the folder and the port of a node."""
        return {"data": f"node-{number}", "port": self.ports[number % 2]}

    def site(self, site: str, step_s: float, **mine: object) -> Process:
        return Process(
            "site", self.toy, site=site, address=f"{self.address(0)},{self.address(1)}", step_s=step_s, **mine
        )

    def said(self, process: Process, what: str, count: int = 1) -> None:
        """Wait until ``process`` has logged ``what``; fail with its error if it ends before."""
        until = time.monotonic() + BOUND_S
        while len(process.log.of(what)) < count:
            assert process.wait(0.005) is None, f"it ended before {what}: {process.errors}"
            assert time.monotonic() < until, f"no {what} in {BOUND_S} s: {process.log.events[-5:]}"

    def killed(self, process: Process) -> None:
        """Wait until the process has killed itself."""
        assert process.wait(BOUND_S) == -signal.SIGKILL, f"it ended with {process.wait(0)}: {process.errors}"

    def dies(self, process: Process, step: str) -> str:
        """Wait until the process has killed itself at ``step``, or kill it; return where it was killed."""
        if process.wait(PATIENCE_S) is None:
            step = "instant"
            process.kill()
        self.killed(process)
        return step

    def drained(self, leader: Process, number: int, sites: dict[str, Process]) -> dict[str, Finished]:
        """Drain the run that the node of this number leads."""
        with AdminClient(self.address(number)) as operator:
            operator.drain()
        for process in (*sites.values(), leader):
            assert process.wait(BOUND_S) == 0, process.errors
        done = {site: ended(process.log) for site, process in sites.items()}
        assert {each.ending for each in done.values()} == {"drained"}, done
        return done

    def audited(
        self, nodes: int, lives: Sequence[Process], sites: dict[str, Process], done: dict[str, Finished]
    ) -> tuple[History, list[int]]:
        """Audit the run of the first ``nodes`` nodes; return also the epochs that it had."""
        whole = one_run(self.folder, [f"node-{number}" for number in range(nodes)])
        logs = {site: [process.log] for site, process in sites.items()}
        told = audit(replace(self.toy, folder=str(whole)), [life.log for life in lives], logs, done)
        epochs = [int(str(event["epoch"])) for life in lives for event in life.log.of("syncer_started")]
        assert epochs == sorted(set(epochs)), f"epochs are {epochs}"
        return told, epochs


# --- Verbs as a user starts them -------------------------------------------------------------------------------------


class RealRun:
    """The interface of a run that an audit needs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.config = str(folder), configs.read(folder / "config.yaml")
        self.run_id, self.codec = str(self.config.run.name), self.config.codec.down
        self.fragments = self.config.outer.num_fragments

    def layout(self) -> Layout:
        return build.layout_of(self.config)

    def version_zero(self) -> list[Tensor]:
        return build.version_zero(self.config, self.layout())

    def rules(self) -> tuple[OuterOptions, OuterRule]:
        return build.outer_options(self.config), build.rule(self.config, self.layout())


@contextmanager
def in_a_place(folder: Path) -> Iterator[Place]:
    """Return a place for verbs; a failed check also tells what each verb said last."""
    folder.mkdir(parents=True, exist_ok=True)
    with place_in(folder) as place:
        try:
            yield place
        except AssertionError as error:
            said = " ".join(f"[{verb.name}: {verb.text()[-400:]}]" for verb in place.verbs)
            raise AssertionError(f"{why(error)} {said}") from error


def drained(syncer: Verb, *sites: Verb) -> None:
    """Drain the run of these verbs, and wait until each has ended."""
    syncer.signal(signal.SIGINT)
    for verb in (syncer, *sites):
        code = verb.end(4 * START_S)
        assert code == ExitCode.DRAINED, f"{verb.name} ended with {code}"


def audited(place: Place, name: str, sites: Sequence[str]) -> tuple[History, dict[str, Finished], dict[str, Log]]:
    """Audit the drained run ``name`` from its journal and events; return also each site's end and log."""
    logs, events = {who: Log() for who in ("syncer", *sites)}, place.events(name)
    for event in events:
        if (log := logs.get(str(event["who"]))) is not None:
            log.events.append(dict(event))
    ledgers = ledgers_of(events)
    finished = {site: Finished("drained", "", ledgers[site]) for site in sites}
    of_sites = {site: [logs[site]] for site in sites}
    told = audit(RealRun(place.folder / "runs" / name), [logs["syncer"]], of_sites, finished)
    return told, finished, logs
