"""Kill ``diloco syncer`` and ``diloco site``, started as by a user, at durable steps, and restart them.

Processes, configuration and training are real, with the smallest model; only a variable is added that says where to be
killed (``diloco/runs/process.py``).  The same command restarts each process.  After the run is drained, it gets the
same audit as the toy runs, from its journal and events.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from diloco.durable import Step
from tests.hunts.lives import QUICK, audited, drained, in_a_place, least
from tests.loopback.archive import link
from tests.loopback.cluster import free_port
from tests.runs.processes import TINY, Place, Verb, wait_for

BOUND_S = 240.0
PATIENCE_S = 45.0
"""If a step does not occur for this long, SIGKILL comes from outside instead."""
RUN = "runs/killed"
SITES = ("site-a", "site-b")
SETTINGS = (
    "run.name=killed",
    "run.seconds=3600",
    *QUICK,
    "cluster.syncer.snapshot_every=4",
    "site.num_sites=8",
)
DEATHS: Mapping[str, Mapping[Step, int]] = {
    "syncer": {
        Step.SPOOL_SYNC: 4,
        Step.SPOOL_RENAME: 4,
        Step.JOURNAL_WRITE: 12,
        Step.JOURNAL_SYNC: 12,
        Step.JOURNAL_MARK: 12,
        Step.ACK: 4,
        Step.MERGE: 4,
        Step.FATE: 4,
        Step.PUBLISH: 4,
        Step.SNAPSHOT_FILE: 32,
        Step.SNAPSHOT_RENAME: 2,
    },
    "site": {
        Step.OUTBOX_PUT: 12,
        Step.OUTBOX_DROP: 4,
        Step.ODOMETER: 60,
        Step.CHECKPOINT_FILE: 24,
        Step.CHECKPOINT_RENAME: 4,
        Step.CHECKPOINT_FOLDER: 8,
    },
}
"""For each step, the number of passages that occur early in a process."""
VERSIONS = 4
"""Versions to be published after the last kill, before the run is drained."""


class VerbLives:
    """One run in which syncer and sites are killed: before each kill at a step, also one at a random instant."""

    def __init__(self, folder: Path, seed: int, killed: Counter[str], deaths: int = 4) -> None:
        self.folder, self.killed, self.deaths = folder, killed, deaths
        self.dice = random.Random(f"verbs/{seed}")
        self.address = f"127.0.0.1:{free_port()}"

    def run(self) -> int:
        """Make the run; return how many updates were accepted."""
        with in_a_place(self.folder) as place:
            roles = ["syncer", "site", *(self.dice.choice(("syncer", "site")) for _ in range(self.deaths))]
            lives = {name: self._start(place, name, "") for name in ("syncer", *SITES)}
            for role in roles[: self.deaths]:
                name = "syncer" if role == "syncer" else self.dice.choice(SITES)
                step = least(DEATHS[role], self.dice, lambda step, role=role: self.killed[f"diloco {role}: {step}"])
                self._end(place, lives[name], None)
                death = f"{step}:{self.dice.randint(1, DEATHS[role][step])}"
                self._end(place, self._start(place, name, death), f"diloco {role}: {step}")
                lives[name] = self._start(place, name, "")
            self._trains_on(place, lives)
            drained(*lives.values())
            told, _, logs = audited(place, "killed", SITES)
            assert all(logs[site].of("pushed") for site in SITES), "a site has sent nothing"
            return len(told.accepted)

    def _start(self, place: Place, name: str, death: str) -> Verb:
        where = [f"cluster.syncer.listen={self.address}"]
        if name != "syncer":
            where = [f"site.syncer={self.address}", f"site.id={name}", f"site.index={SITES.index(name)}"]
        verb = "syncer" if name == "syncer" else "site"
        return place.start(name, verb, *TINY, *SETTINGS, *where, kill_at=death)

    def _end(self, place: Place, verb: Verb, where: str | None) -> None:
        """Wait until the process is killed at ``where``; kill it from outside if it does not reach that in time."""
        until = time.monotonic() + (PATIENCE_S if where is not None else self.dice.uniform(3.0, 9.0))
        while verb.process.poll() is None and time.monotonic() < until:
            self._archive(place)
            time.sleep(0.2)
        if where is None or verb.process.poll() is None:
            where = f"diloco {verb.name.partition('-')[0]}: instant"
            verb.kill()
        assert verb.process.poll() == -signal.SIGKILL, f"{verb.name} ended with {verb.process.poll()}"
        self.killed[where] += 1

    def _trains_on(self, place: Place, lives: Mapping[str, Verb]) -> None:
        """Wait until every site merges again, and ``VERSIONS`` versions are published."""
        began = len(place.events("killed"))

        def goes_on() -> bool:
            self._archive(place)
            ended = [name for name, verb in lives.items() if verb.process.poll() is not None]
            assert not ended, f"{ended} ended before the run was drained"
            new = [event for event in place.events("killed")[began:] if event["what"] == "published"]
            merged = {site for event in new for site in event["merged"]}  # type: ignore[attr-defined]
            return len(new) >= VERSIONS and merged == set(SITES)

        wait_for(goes_on, "both sites to merge again", bound_s=BOUND_S)

    def _archive(self, place: Place) -> None:
        """Hard-link the syncer's files into an archive: it prunes those older than 256 outer steps."""
        run = place.folder / RUN
        for path in (*run.glob("syncer/journal/journal-*.log"), *run.glob("syncer/spool/[!.]*/*.update")):
            with suppress(FileNotFoundError):
                link(path, run / "archive" / path.relative_to(run / "syncer"))
