"""``make crash KILLS=100``: kill -9 syncer and sites at every named durable step, again and again in one run.

Real processes over real gRPC.  Every life of a process except the last ends in a kill: at a passage of a step of
``diloco.durable.Step``, at a place in ``tests/loopback/toy.py``, or after a random time.  The step with the fewest
kills so far comes next.  After the run its token counts are audited, and in lock-step every update and the final
parameters must equal those of a twin run without kills, bit for bit.

Other rounds kill a standby (``standby_lives.py``), restores and backups (``short_lives.py``) and, now and then, the
verbs themselves (``verb_lives.py``).
"""

from __future__ import annotations

import itertools
import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from diloco.durable import Step
from tests.hunts.lives import ended
from tests.hunts.reporting import Counts, Hunt, Namespace, hunting
from tests.hunts.short_lives import SHORT, ShortLives, draw, named
from tests.hunts.standby_lives import STANDBY, StandbyLives
from tests.hunts.verb_lives import VerbLives
from tests.loopback.audit import History, audit
from tests.loopback.cluster import Log, Process, free_port
from tests.loopback.stranger import Stranger
from tests.loopback.toy import EVERYBODY, Toy

BOUND_S = 120.0
SITES = ("a", "b")
STEP_S = 0.003
ENOUGH = 500
"""After this many kills, every case must have come at least once."""
KILLS_A_ROUND = 25
"""The most kills in one run of syncer and sites, so that the other kinds of rounds have their turns."""
SHORT_DEATHS = 15
KINDS = ("lock-step", "standby", "free", "short", "lock-step", "verbs", "free", "short", "standby")
"""The kinds of rounds, in turn.  Those of the verbs are slow, and a few of them are enough."""
INSTANT = "instant"
"""A kill at no particular place: SIGKILL from outside, some time after the process started."""


@dataclass(frozen=True)
class Case:
    """Where a process is killed: at one of the first ``passages`` of a step, in a life of ``role``.

    ``before`` makes the step necessary, and returns whether it could.  ``when`` is the part of the run in which the
    step occurs at all: only in "first" lives, or after the "last" version.
    """

    role: str
    passages: int
    before: Callable[[Path], bool] = lambda folder: True
    when: str = ""
    asynchronous: bool = False
    """Only in runs without lock-step, where a stranger may push as well."""


def torn_journal(folder: Path) -> bool:
    """Append to the journal what a power cut may leave after the last frame."""
    segments = sorted((folder / "journal").glob("journal-*.log"))
    if not segments or segments[-1].stat().st_size == 0:
        return False
    with segments[-1].open("ab") as file:
        file.write(bytes(37))
    return True


def damaged_snapshot(folder: Path) -> bool:
    """Flip a bit in the newest of several snapshots; the previous one and the journal contain all of its data."""
    found = sorted(path for path in (folder / "snapshots").glob("*") if path.name.isdigit())
    if len(found) < 2:
        return False
    data = bytearray((found[-1] / "state.json").read_bytes())
    data[len(data) // 2] ^= 1
    (found[-1] / "state.json").write_bytes(data)
    return True


CASES: Mapping[Step | str, Case] = {
    Step.CARD: Case("syncer", 8, when="first"),
    Step.FOLDER: Case("syncer", 12),
    Step.SPOOL_WRITE: Case("syncer", 16),
    Step.SPOOL_SITE: Case("syncer", 8),
    Step.SPOOL_SYNC: Case("syncer", 8),
    Step.SPOOL_RENAME: Case("syncer", 8),
    Step.SPOOL_FOLDER: Case("syncer", 8),
    Step.SPOOL_DROP: Case("syncer", 4),
    Step.SPOOL_DISCARD: Case("syncer", 2, asynchronous=True),
    Step.JOURNAL_BEGIN: Case("syncer", 8),
    Step.JOURNAL_WRITE: Case("syncer", 24),
    Step.JOURNAL_SYNC: Case("syncer", 24),
    Step.JOURNAL_MARK: Case("syncer", 24),
    Step.JOURNAL_END: Case("syncer", 24),
    Step.JOURNAL_CUT: Case("syncer", 2, before=torn_journal),
    Step.JOURNAL_PRUNE: Case("syncer", 4),
    Step.SNAPSHOT_BEGIN: Case("syncer", 4),
    Step.SNAPSHOT_FILE: Case("syncer", 64),
    Step.SNAPSHOT_RENAME: Case("syncer", 4),
    Step.SNAPSHOT_FOLDER: Case("syncer", 4),
    Step.SNAPSHOT_PRUNE: Case("syncer", 6),
    Step.SNAPSHOT_ASIDE: Case("syncer", 2, before=damaged_snapshot),
    Step.MERGE: Case("syncer", 12),
    Step.ACK: Case("syncer", 16),
    Step.FATE: Case("syncer", 12),
    Step.PUBLISH: Case("syncer", 12),
    Step.EXPORT: Case("syncer", 18, when="last"),
    Step.OUTBOX_FOLDER: Case("site", 8),
    Step.OUTBOX_PUT: Case("site", 64),
    Step.OUTBOX_DROP: Case("site", 12),
    Step.ODOMETER: Case("site", 120),
    Step.CHECKPOINT_BEGIN: Case("site", 32),
    Step.CHECKPOINT_FILE: Case("site", 120),
    Step.CHECKPOINT_RENAME: Case("site", 32),
    Step.CHECKPOINT_FOLDER: Case("site", 64),
    Step.CHECKPOINT_PRUNE: Case("site", 32),
    "merged": Case("syncer", 4),
    "snapshot_half_pruned": Case("syncer", 2),
    "push": Case("site", 12),
    "pushed": Case("site", 12),
    "adopt": Case("site", 12),
    "adopted": Case("site", 12),
    "pulled": Case("site", 12),
}
NEVER: Mapping[Step, str] = {
    Step.FILE: "nothing durable depends on it; tests/test_tidy.py keeps it out of rooms with durable data"
}
EVERY_CASE = frozenset(
    {
        *(f"{case.role}: {name}" for name, case in CASES.items()),
        *(f"standby: {step}" for step in STANDBY),
        *(named(what, step) for what, steps in SHORT.items() for step in steps),
    }
)
"""Every pair of a role and a step at which it must be killed."""


class Killing:
    """One run from its first process to its audit."""

    def __init__(self, folder: Path, seed: int, killed: Counter[str], kills_max: int, *, lock_step: bool) -> None:
        self.dice = random.Random(f"crash/{seed}")
        self.killed = killed
        self.kills_left = kills_max
        self.mortal = kills_max > 0
        self.lock_step = lock_step
        self.toy = the_toy(folder, lock_step=lock_step)
        self.data = folder / "syncer"
        self.logs: dict[str, list[Log]] = {name: [] for name in ("syncer", *SITES)}
        self.sites: list[Future[None]] = []
        self.counting = threading.Lock()

    def run(self) -> History:
        with ExitStack() as alive, ThreadPoolExecutor(len(self.logs)) as pool:
            if not self.lock_step:
                alive.enter_context(Stranger(self.toy, f"127.0.0.1:{self.toy.port}"))
            self.sites = [pool.submit(self._live, site) for site in SITES]
            for job in as_completed([*self.sites, pool.submit(self._live, "syncer")]):
                job.result()
        return self._audited()

    # --- lives -------------------------------------------------------------------------------------------------

    def _live(self, name: str) -> None:
        """Start one process after another, each with the place of its kill, until one ends by itself."""
        role, status = "syncer" if name == "syncer" else "site", -9
        while status == -9:
            with self.counting:
                death = self._next_death(role)
            with self._process(name, death) as process:
                if death and death[0] == INSTANT and process.wait(death[1] / 1000) is None:
                    process.kill()
                found = process.wait(BOUND_S)
                assert found in (0, -9), f"{name} ended with {found} in {BOUND_S} s, after {death}; {process.errors}"
            status = found
            if status == -9:
                assert death is not None, f"{name} was not killed by this hunt"
                with self.counting:
                    self.kills_left -= 1
                    self.killed[f"{role}: {death[0]}"] += 1
        if name == "syncer":
            # A site that was killed at the end asks once more; so the syncer is started again, as its operator would.
            self.mortal = False
            with self._process("syncer", None, stay=True) as last:
                wait(self.sites)
                assert last.wait(0) is None, f"{name} ended with {last.wait(0)} at the end; {last.errors}"

    def _process(self, name: str, death: tuple[str, int] | None, **mine: object) -> Process:
        if name != "syncer":
            mine = {"site": name, "address": f"127.0.0.1:{self.toy.port}", "checkpoint_every": 3}
            mine["step_s"] = STEP_S if name == "a" else 1.7 * STEP_S
        role, place = "syncer" if name == "syncer" else "site", None if death and death[0] == INSTANT else death
        process = Process(role, self.toy, place, **mine)
        self.logs[name].append(process.log)
        return process

    def _next_death(self, role: str) -> tuple[str, int] | None:
        if not self.mortal:
            return None
        if self.kills_left <= 0:
            # A run's end has its own step, the export: the second to last process is killed there.
            self.mortal = role != "syncer"
            return None if self.mortal else (str(Step.EXPORT), self.dice.randint(1, CASES[Step.EXPORT].passages))
        if self.dice.random() < 0.15:
            return INSTANT, self.dice.randrange(20, 1500)
        wanted = [name for name, case in CASES.items() if case.role == role and self._is_time(case)]
        self.dice.shuffle(wanted)
        for name in sorted(wanted, key=lambda name: self.killed[f"{role}: {name}"]):
            if CASES[name].before(self.data):
                return str(name), self.dice.randint(1, CASES[name].passages)
        return None

    def _is_time(self, case: Case) -> bool:
        if case.asynchronous and self.lock_step:
            return False
        if case.when == "first":
            return not (self.data / "run.json").exists()
        told = [event for log in self.logs["syncer"] for event in log.of("published")]
        return case.when != "last" or (bool(told) and int(str(told[-1]["progress_ppm"])) > 850_000)

    # --- afterwards --------------------------------------------------------------------------------------------

    def _audited(self) -> History:
        finished = {site: ended(self.logs[site][-1]) for site in SITES}
        assert {done.ending for done in finished.values()} == {"finished"}, finished
        return audit(self.toy, self.logs["syncer"], {site: self.logs[site] for site in SITES}, finished)

    def final(self) -> dict[str, torch.Tensor]:
        return load_file(self.data / "final" / "model.safetensors")


def the_toy(folder: Path, *, lock_step: bool) -> Toy:
    """Two sites and two fragments; in lock-step without a codec, so that the time of a kill changes nothing."""
    common: dict[str, object] = {"folder": str(folder), "inner_steps": 6, "seed": 11, "port": free_port()}
    outer: dict[str, object] = {"num_fragments": 2, "grace": "fixed"}
    if lock_step:
        outer |= {**EVERYBODY, "token_budget": 30 * 2 * 6 * 10, "site_timeout_ns": 600 * 10**9}
        optimizer = {"kind": "nesterov", "lr": 0.7, "momentum": 0.9}
        return Toy(**common, lock_step=True, outer=outer, optimizer=optimizer)  # type: ignore[arg-type]
    outer |= {"grace_ns": 5_000_000, "token_budget": 20_000}
    return Toy(**common, codec="int8", outer=outer)  # type: ignore[arg-type]


def twin(folder: Path) -> tuple[History, dict[str, torch.Tensor]]:
    """Make the run in lock-step without kills."""
    unkilled = Killing(folder, 0, Counter(), 0, lock_step=True)
    return unkilled.run(), unkilled.final()


def compare(found: History, final: dict[str, torch.Tensor], wanted: tuple[History, dict[str, torch.Tensor]]) -> None:
    """Invariant 11: all repeated work has the same ids and content, and the run ends in the same bits."""
    assert found.accepted == wanted[0].accepted, "an update differs from the twin's"
    assert found.published == wanted[0].published, "a version differs from the twin's"
    assert {key: fate.version for key, fate in found.fates.items()} == {
        key: fate.version for key, fate in wanted[0].fates.items()
    }
    assert final.keys() == wanted[1].keys()
    assert all(torch.equal(final[name], wanted[1][name]) for name in final), "the run ends in other bits"


class Crashes:
    """Rounds of each kind in turn."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.killed: Counter[str] = Counter()
        self.rounds: Counter[str] = Counter()
        self.updates = 0
        self.unkilled = twin(folder / "twin")
        self._short: ShortLives | None = None

    @property
    def kills(self) -> int:
        return self.killed.total()

    def round(self, number: int, kills_max: int) -> None:
        """Run one more round; raise ``AssertionError`` for a violation."""
        kind, seed, here = KINDS[number % len(KINDS)], self.seed * 1000 + number, self.folder / str(number)
        if kind == "short":
            self._short = self._short or ShortLives(self.folder / "short")
            draw(self._short, random.Random(f"short/{seed}"), self.killed, min(SHORT_DEATHS, kills_max))
        elif kind == "standby":
            self.updates += StandbyLives(here, seed, self.killed).run()
        elif kind == "verbs":
            self.updates += VerbLives(here, seed, self.killed).run()
        else:
            run = Killing(here, seed, self.killed, min(KILLS_A_ROUND, kills_max), lock_step=kind == "lock-step")
            told = run.run()
            if run.lock_step:
                compare(told, run.final(), self.unkilled)
            self.updates += len(told.accepted)
        self.rounds[kind] += 1
        shutil.rmtree(here, ignore_errors=True)

    def never(self) -> list[str]:
        """Return the cases that have not occurred."""
        return sorted(name for name in EVERY_CASE if not self.killed[name])

    def counts(self) -> dict[str, object]:
        """Return the counts for the last line."""
        steps = {str(step) for step in Step if step not in NEVER}
        return {
            "kills": self.kills,
            "rounds": dict(self.rounds),
            "updates": self.updates,
            "steps_named": len(steps),
            "steps_killed_at": len(steps & {name.partition(": ")[2] for name in self.killed}),
            "killed_at": dict(sorted(self.killed.items())),
            "never_killed_at": self.never(),
        }


@hunting(kills=(100, "the least number of kills"))
def main(hunt: Hunt, asked: Namespace) -> Counts:
    crashes = Crashes(hunt.folder, asked.seed)
    for number in itertools.count():
        if crashes.kills >= asked.kills or hunt.violations:
            break
        with hunt.judging(f"round {number}", hunt.folder):
            crashes.round(number, asked.kills - crashes.kills)
    never = crashes.never()
    if never and crashes.kills >= ENOUGH:
        hunt.violated(f"none of {crashes.kills} kills was at {', '.join(never)}")
    return crashes.counts()
