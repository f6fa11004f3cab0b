"""``make powercut CUTS=6``: check the states that a power cut may leave, first in a model and then by real cuts.

The model (``tests/power.py``) covers every operation of a small run of syncer and site.  For a real cut, an ext4 file
system is shut down without flushing while a syncer and a site use it over real gRPC, with a second site elsewhere.  The
hunt keeps what the processes acknowledged before the cut.  Afterwards it mounts the folder again, recovers the state
and compares it with that; both processes then continue, and at the end the run's token counts are audited.
"""

from __future__ import annotations

import itertools
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from diloco.learner.agent import Finished
from diloco.syncer.replaying import Rules
from diloco.syncer.store import RunCard, Store, StoreError
from tests.hunts.cutting import (
    Recording,
    copied,
    quick_folder,
    record_backup,
    record_in_place,
    record_site,
    record_syncer,
)
from tests.hunts.lives import ended
from tests.hunts.loop_disk import LoopDisk, NotPermittedError
from tests.hunts.reporting import Counts, Hunt, Namespace, hunting
from tests.loopback.audit import audit
from tests.loopback.cluster import Log, Process, SiteThread, free_port
from tests.loopback.toy import RUN, Toy

BOUND_S = 120.0
CUTS_A_RUN = 5
STEP_S = 0.004


class CutRun:
    """One run, on one loop disk."""

    def __init__(self, place: Path, disk: LoopDisk, seed: int, cuts: int, forgotten: str) -> None:
        self.dice = random.Random(f"powercut/{seed}")
        self.disk, self.place, self.cuts_left, self.forgotten = disk, place, cuts, forgotten
        outer = {"num_fragments": 2, "grace": "fixed", "grace_ns": 5_000_000, "token_budget": 25_000}
        port = free_port()
        self.toy = Toy(folder=str(disk.folder), codec="int8", inner_steps=6, seed=seed, outer=outer, port=port)
        self.address = f"127.0.0.1:{port}"
        self.syncers: list[Process] = []
        self.sites: list[Process] = []
        self.cuts = 0
        self.updates_said = 0

    def run(self) -> None:
        elsewhere = replace(self.toy, folder=str(self.place / "elsewhere"))
        with ExitStack() as alive:
            other = alive.enter_context(SiteThread(elsewhere, "b", self.address, step_s=1.7 * STEP_S))
            self._start(alive)
            while self.cuts_left and self._goes_on(self.dice.uniform(0.3, 1.5)):
                self._cut(other.log)
                self._start(alive)
            finished = {"b": other.join(BOUND_S), "a": self._end_of_site(alive)}
        logs = [process.log for process in self.syncers]
        audit(self.toy, logs, {"a": [site.log for site in self.sites], "b": [other.log]}, finished)

    def _start(self, alive: ExitStack) -> None:
        self.syncers.append(alive.enter_context(Process("syncer", self.toy, None, forgets=self.forgotten)))
        mine = {"site": "a", "address": self.address, "step_s": STEP_S, "checkpoint_every": 7}
        self.sites.append(alive.enter_context(Process("site", self.toy, None, **mine)))

    def _goes_on(self, seconds: float) -> bool:
        """Wait until a version is published, and then for ``seconds``; return False if the run has ended before."""
        process, began_s = self.syncers[-1], time.monotonic()
        while not process.log.of("published"):
            if (status := process.wait(0.05)) is not None:
                assert status == 0, process.errors
                return False
            assert time.monotonic() - began_s < BOUND_S, "no version after the power came back"
        return process.wait(seconds) is None and not process.log.of("final")

    def _cut(self, other: Log) -> None:
        """Cut the power, kill the processes, restore the disk, and check its state."""
        self.disk.cut()
        for process in (self.syncers[-1], self.sites[-1]):
            process.kill()
        self.cuts, self.cuts_left = self.cuts + 1, self.cuts_left - 1
        # After the cut a site rightly reports that a thread died of the failed disk: this is no error.
        log = self.sites[-1].log
        log.events = [event for event in log.events if event.get("note") != "thread_died"]
        self.disk.back()
        self._compare({"a": [site.log for site in self.sites], "b": [other]})

    def _compare(self, sites: dict[str, list[Log]]) -> None:
        """Recover from a copy, and check that all is there that was acknowledged to the sites or published."""
        copy = copied(Path(self.toy.folder) / "syncer", self.place / "copy")
        rules, rule = self.toy.rules()
        store = Store(copy, RunCard(RUN, self.toy.layout().fingerprint, "shared"))
        try:
            found = store.recover(Rules(rules, rule, self.toy.codec))
        except StoreError as error:
            raise AssertionError(f"no start: {error}") from error
        finally:
            store.journal.close()
        said = set[tuple[str, Any, Any]]()
        for site, logs in sites.items():
            pushed = [event for log in logs for event in log.of("pushed")]
            taken = [event for event in pushed if event["outcome"] in ("accepted", "duplicate")]
            said |= {(site, event["fragment"], event["sequence"]) for event in taken}
        self.updates_said = len(said)
        for site, fragment, sequence in said:
            known = found.machine.state.sites.get(site)
            assert known is not None, f"{site} had joined, and is forgotten"
            assert known.lines[fragment].watermark >= sequence, f"update {(site, fragment, sequence)} is lost"
        published: list[Any] = [event for process in self.syncers for event in process.log.of("published")]
        for event in published:
            values, version = found.holdings.values[event["fragment"]], event["version"]
            assert values.version >= version, f"version {version} of fragment {event['fragment']} is lost"
            same = values.version > version or values.digest == event["digest"]
            assert same, f"version {version} has other content"

    def _end_of_site(self, alive: ExitStack) -> Finished:
        site, until = self.sites[-1], time.monotonic() + BOUND_S
        while (status := site.wait(0.05)) is None:
            if self.syncers[-1].wait(0) is not None:  # The run had ended, but after a cut the site asks once more.
                self.syncers.append(alive.enter_context(Process("syncer", self.toy, None, stay=True)))
            assert time.monotonic() < until, "the site does not end"
        assert status == 0, site.errors
        assert self.syncers[-1].log.wait_for("final", 1, BOUND_S)
        self.syncers[-1].wait(10.0)
        return ended(site.log)


def real_cuts(hunt: Hunt, cuts: int, seed: int, forgotten: str) -> dict[str, object]:
    """Make runs until ``cuts`` cuts were made; return the counts."""
    counts = Counter(cuts=0, runs=0, updates_said=0)
    for number in itertools.count():
        if counts["cuts"] >= cuts or hunt.violations:
            break
        num = min(CUTS_A_RUN, cuts - counts["cuts"])
        with tempfile.TemporaryDirectory(prefix="powercut-") as folder, hunt.judging(f"run {number}"):
            try:
                with LoopDisk(Path(folder)) as disk:
                    run = CutRun(Path(folder), disk, seed * 1000 + number, num, forgotten)
                    run.run()
            except NotPermittedError as error:
                return {"cuts": counts["cuts"], "not_permitted": str(error)}
            counts.update(cuts=run.cuts, runs=1, updates_said=run.updates_said)
    return dict(counts)


def model_cuts(hunt: Hunt, rounds: int, seed: int) -> dict[str, object]:
    """Check every state that the model makes of a small run; return the counts."""
    counts: dict[str, object] = {}
    recorders: dict[str, Callable[[Path], Recording]] = {
        "site": record_site,
        "syncer": lambda place: record_syncer(place, rounds),
        "restore_in_place": record_in_place,
        "restore_backup": record_backup,
    }
    with quick_folder() as folder:
        for who, record in recorders.items():
            (folder / who).mkdir()
            recording = record(folder / who)
            states, dice = 0, random.Random(f"powercut/{seed}")
            for cut, wrong in recording.examined(folder / "state", dice, drawn=2):
                states += 1
                if wrong:
                    hunt.violated(f"{who}, {cut}: {wrong}", cuts=0)
                    break
            counts[f"{who}_operations"], counts[f"{who}_states"] = len(recording.log), states
    return counts


@hunting(
    cuts=(6, "real power cuts"),
    rounds=(2, "rounds of the run in the model"),
    forget=("", "leave out the syncs of a step: the hunt must find it"),
)
def main(hunt: Hunt, asked: Namespace) -> Counts:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    counts = model_cuts(hunt, asked.rounds, asked.seed)
    torch.set_num_threads(threads)
    found = real_cuts(hunt, asked.cuts, asked.seed, asked.forget)
    if "not_permitted" in found:
        print(f"no real power cut was made: {found['not_permitted']}", flush=True)
    return {**counts, **found}
