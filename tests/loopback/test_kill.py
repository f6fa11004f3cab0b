"""kill -9 at every place where dying could cost something.  The run goes on, and the books still balance."""

from __future__ import annotations

import random
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from diloco.learner.agent import Finished
from diloco.outer.merge import Correction
from tests.loopback.audit import audit
from tests.loopback.cluster import Log, Process, SiteThread, drain, free_port, serving
from tests.loopback.toy import TOKENS_PER_STEP, Toy
from tests.sooner import sooner

BOUND_S = 120.0
"""For a process to start on a machine that is full, and to come to its death."""
STEP_S = 0.004

# A process that begins a run writes its first snapshot at once, so that its passage number 1 is before version 0.
# A snapshot of the toy has four files, each of four operations; odd passages are before an operation, even ones after.
SYNCER_DEATHS = {
    "at the beginning": [("snapshot.begin", 1), ("snapshot.file", 16), ("snapshot.folder", 2), ("syncer.merge", 1)],
    "receiving": [("spool.sync", 7), ("spool.folder", 10), ("journal.write", 18), ("journal.sync", 18)],
    "merging": [("syncer.merge", 9), ("merged", 4), ("syncer.publish", 5), ("syncer.publish", 6)],
    "keeping": [("snapshot.begin", 3), ("snapshot.file", 40), ("snapshot.folder", 2)],
    "pruning": [("snapshot_half_pruned", 2), ("snapshot.prune", 4), ("journal.prune", 2)],
}
SITE_DEATHS = {
    "pushing": [("outbox.put", 32), ("push", 5), ("pushed", 4)],
    "adopting": [("adopt", 4), ("adopted", 5), ("pulled", 4)],
}


def the_toy(folder: Path, seed: int, rules: dict[str, object], **changes: object) -> Toy:
    """``rules`` are more of the outer machine."""
    outer = {"grace": "fixed", "grace_ns": 5_000_000, "num_fragments": 2, "quorum": 1, **rules}
    # A site's last fates may wait for a syncer that starts again.
    settings: dict[str, object] = {"finish_timeout_s": 60.0, "inner_steps": 6, "codec": "int8", "seed": seed}
    return Toy(folder=str(folder), **settings | {"outer": outer, **changes})  # type: ignore[arg-type]


def seed_of(name: str) -> int:
    return random.Random(name).randrange(1 << 20)


def dies(life: Process, death: tuple[str, int]) -> None:
    assert life.wait(BOUND_S) == -9, f"{death}: {life.errors}"


def outer(kind: str, lr: float, momentum: float, **more: object) -> dict[str, object]:
    """The optimizer of an outer step."""
    return {"optimizer": {"kind": kind, "lr": lr, "momentum": momentum, **more}}


ONE_BY_ONE = {"quorum": 1, "round_updates": 1, "weights": "uniform", "staleness_max": 20}
BUFFER = {"quorum": 1, "round_updates": 3, "merge_by": "update", "weights": "uniform", "staleness_power": 0.5}
HELOCO = {"correction": Correction(kind="heloco")}
RULES: dict[str, tuple[str, dict[str, object], dict[str, object]]] = {
    # what an outer step does: (where the syncer dies, the rules of rounds, what of the toy is otherwise)
    "the mean by SGD": ("merging", {}, {}),
    "adamw on rda": ("at the beginning", {}, {**outer("adamw", 0.05, 0.9), "merge": "rda"}),
    "delayed_nesterov, one by one": ("receiving", ONE_BY_ONE, outer("delayed_nesterov", 0.5, 0.5, window=2)),
    "heloco, one by one": ("merging", ONE_BY_ONE, {**outer("nesterov_ema", 0.25, 0.9), **HELOCO}),
    "schedule_free on the median": ("keeping", {}, {**outer("schedule_free", 0.7, 0.9), "merge": "geometric_median"}),
    "gpa on what is clipped, a buffer of three, update by update, eager": (
        *("pruning", BUFFER),
        {**outer("gpa", 0.7, 0.5), "merge": "clip", "adopt": "eager"},
    ),
}


@pytest.mark.parametrize("rule", sooner(RULES, "the mean by SGD"))
def test_invariant_11a_a_syncer_that_dies_goes_on_to_the_bits_of_its_journal_whatever_the_rule(
    tmp_path: Path, rule: str
) -> None:
    chapter, rules, changes = RULES[rule]
    toy = the_toy(tmp_path, seed_of(chapter), {"quorum": 2, **rules}, port=free_port(), **changes)
    address = f"127.0.0.1:{toy.port}"
    with ExitStack() as alive:
        pauses = {"a": STEP_S, "b": 1.7 * STEP_S}
        sites = [alive.enter_context(SiteThread(toy, site, address, step_s=each)) for site, each in pauses.items()]
        logs: list[Log] = []
        for death in SYNCER_DEATHS[chapter]:
            life = alive.enter_context(Process("syncer", toy, death))
            logs.append(life.log)
            dies(life, death)
        last = alive.enter_context(Process("syncer", toy))
        last.log.wait_for("published", 4, BOUND_S)
        for site in sites:  # One may be enough, and nobody waits for a stranger.
            site.log.wait_for("adopted", 1, BOUND_S, where=lambda event: event["merged"])
        drain(address)
        finished = {site.site: site.join(BOUND_S) for site in sites}
        assert last.wait(BOUND_S) == 0, last.errors
    audit(toy, [*logs, last.log], {site.site: [site.log] for site in sites}, finished)
    for done in finished.values():
        assert done.ending == "drained"
        assert done.ledger["lost"] == done.ledger["refused"] == 0, done.ledger


@pytest.mark.parametrize(
    ("chapter", "wiped"), sooner([("pushing", False), ("adopting", False), ("adopting", True)], ("pushing", False))
)
def test_a_site_dies_and_the_run_goes_on_also_where_its_disk_is_lost(tmp_path: Path, chapter: str, wiped: bool) -> None:
    toy = the_toy(tmp_path, seed_of(chapter), {}, snapshot_every=1_000_000)
    deaths = SITE_DEATHS[chapter]
    with serving(toy) as (syncer, address, log), ExitStack() as alive:
        mine = {"site": "a", "address": address, "step_s": STEP_S, "checkpoint_every": 7}
        other = alive.enter_context(SiteThread(toy, "b", address, step_s=3 * STEP_S))
        lives = []
        for death in deaths:
            lives.append(alive.enter_context(Process("site", toy, death, **mine)))
            dies(lives[-1], death)
        if wiped:
            shutil.rmtree(tmp_path / "a")
        lives.append(alive.enter_context(Process("site", toy, **mine)))
        lives[-1].log.wait_for("adopted", 2, BOUND_S, where=lambda event: event["merged"])
        syncer.drain()
        assert lives[-1].wait(BOUND_S) == 0, lives[-1].errors
        (event,) = lives[-1].log.of("finished")
        assert event["ending"] == "drained"
        ledger: Any = event["ledger"]
        finished = {"a": Finished("drained", "", ledger), "b": other.join(BOUND_S)}
    logs = [life.log for life in lives]
    audit(toy, [log], {"a": logs, "b": [other.log]}, finished)
    if not wiped:  # What was on a disk that is gone can only be counted by what the syncer has of it.
        trained = sum(len(log.of("trained")) for log in logs) * TOKENS_PER_STEP
        # A step is handed over and then noted, so each death may hide one from the test's own count.
        assert trained <= ledger["processed"] <= trained + len(deaths) * TOKENS_PER_STEP, ledger
