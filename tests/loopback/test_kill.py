"""kill -9 at every place where dying could cost something.  The run goes on, and the books still balance."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from diloco.outer.merge import Correction
from tests.loopback.audit import audit
from tests.loopback.cluster import Log, Process, SiteThread, eventually, free_port, serving
from tests.loopback.toy import TOKENS_PER_STEP, Toy
from tests.sooner import sooner

START_S, RUN_S = 60.0, 20.0
"""Bounds for processes to start on a machine that is full, and for a run of ``BUDGET`` then."""
STEP_S = 0.004
BUDGET = 4_000

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


def the_toy(
    folder: Path,
    seed: int,
    quorum: int = 1,
    token_budget: int = BUDGET,
    rules: dict[str, object] | None = None,
    **changes: object,
) -> Toy:
    """``rules`` are more of the outer machine."""
    outer: dict[str, object] = {"grace": "fixed", "grace_ns": 5_000_000, "num_fragments": 2}
    outer |= {"quorum": quorum, "token_budget": token_budget, **(rules or {})}
    # A site's last fates may wait for a syncer that starts again.
    settings: dict[str, object] = {"finish_timeout_s": 60.0, "inner_steps": 6, "codec": "int8", "seed": seed}
    return Toy(folder=str(folder), **settings | {"outer": outer, **changes})  # type: ignore[arg-type]


def seed_of(name: str) -> int:
    return random.Random(name).randrange(1 << 20)


class EndedTooSoonError(Exception):
    """The run was over before a process came to its death."""


def long_enough(folder: Path, play: Callable[[Path, int], None], first: int = BUDGET) -> None:
    """``play`` with a budget of tokens that lasts until the last death: how many it takes depends on the machine."""
    for budget in (first, 3 * first):
        with suppress(EndedTooSoonError):
            return play(folder / str(budget), budget)
    return play(folder / str(9 * first), 9 * first)


def bound_s(budget: int) -> float:
    """How long a run of so many tokens may take."""
    return START_S + RUN_S * budget / BUDGET


def begins(life: Process, others: Sequence[SiteThread]) -> Process:
    """``life`` once it is at its work, or dead; ``others`` stand still meanwhile, so that the budget lasts longer."""

    def at_work() -> bool:
        return bool(life.log.of("listening") or life.log.of("joined")) or life.wait(0.0) is not None

    for site in others:
        site.toy_site.pause.set()
    eventually(at_work, START_S, "a process at its work")
    for site in others:
        site.toy_site.pause.clear()
    return life


def dies(life: Process, death: tuple[str, int] | None, seed: int, budget: int) -> None:
    """Wait until ``life`` has ended, by its death where it has one."""
    status = life.wait(bound_s(budget))
    if death and status == 0:
        raise EndedTooSoonError(f"seed {seed}: the run was over before {death}")
    assert status == (-9 if death else 0), f"seed {seed}: {death} gave {status}; {life.errors}"


ONE_BY_ONE = {"quorum": 1, "round_updates": 1, "weights": "uniform", "staleness_max": 20}
BUFFER = {"quorum": 1, "round_updates": 3, "merge_by": "update", "weights": "uniform", "staleness_power": 0.5}
RULES: dict[str, tuple[str, dict[str, object]]] = {
    # what an outer step does: (where the syncer dies, what of the toy is otherwise)
    "the mean by SGD": ("merging", {}),
    "adamw on rda": (
        "at the beginning",
        {"optimizer": {"kind": "adamw", "lr": 0.05, "momentum": 0.9}, "merge": "rda"},
    ),
    "delayed_nesterov, one by one": (
        "receiving",
        {"optimizer": {"kind": "delayed_nesterov", "lr": 0.5, "momentum": 0.5, "window": 2}, "rules": ONE_BY_ONE},
    ),
    "heloco, one by one": (
        "merging",
        {
            "optimizer": {"kind": "nesterov_ema", "lr": 0.25, "momentum": 0.9},
            "correction": Correction(kind="heloco"),
            "rules": ONE_BY_ONE,
        },
    ),
    "schedule_free on the median": (
        "keeping",
        {"optimizer": {"kind": "schedule_free", "lr": 0.7, "momentum": 0.9}, "merge": "geometric_median"},
    ),
    "gpa on what is clipped, a buffer of three, update by update, eager": (
        "pruning",
        {"optimizer": {"kind": "gpa", "lr": 0.7, "momentum": 0.5}, "merge": "clip", "adopt": "eager", "rules": BUFFER},
    ),
}


@pytest.mark.parametrize("rule", sooner(RULES, "the mean by SGD"))
def test_invariant_11a_a_syncer_that_dies_goes_on_to_the_bits_of_its_journal_whatever_the_rule(
    tmp_path: Path, rule: str
) -> None:
    chapter, changes = RULES[rule]
    long_enough(tmp_path, partial(the_syncer_dies, chapter, **changes))


def the_syncer_dies(chapter: str, folder: Path, budget: int, **changes: object) -> None:
    """``changes`` are of the toy."""
    seed = seed_of(chapter)
    # Each life may be too short for a site that is backing off; the run must not end before both have trained.
    toy = the_toy(folder, seed, port=free_port(), **{"quorum": 2, "token_budget": budget, **changes})
    address = f"127.0.0.1:{toy.port}"
    logs: list[Log] = []
    with ExitStack() as alive:
        sites: list[SiteThread] = []
        for death in [*SYNCER_DEATHS[chapter], None]:
            life = begins(alive.enter_context(Process("syncer", toy, death)), sites)
            logs.append(life.log)
            if not sites:
                sites = [
                    alive.enter_context(SiteThread(toy, name, address, step_s=pause))
                    for name, pause in (("a", STEP_S), ("b", 1.7 * STEP_S))
                ]
            dies(life, death, seed, budget)
        if not all(site.log.of("joined") for site in sites):  # One was enough, and nobody waits for a stranger.
            raise EndedTooSoonError(f"seed {seed}: the run was over before both had joined")
        finished = {site.site: site.join(bound_s(budget)) for site in sites}
    told = audit(toy, logs, {site.site: [site.log] for site in sites}, finished)
    assert told.machine.state.run_tokens() >= budget
    for done in finished.values():
        assert done.ending == "finished"
        assert done.ledger["lost"] == done.ledger["refused"] == 0, f"seed {seed}: {done.ledger}"


@pytest.mark.parametrize(
    ("chapter", "wiped"), sooner([("pushing", False), ("adopting", False), ("adopting", True)], ("pushing", False))
)
def test_a_site_dies_and_the_run_goes_on_also_where_its_disk_is_lost(tmp_path: Path, chapter: str, wiped: bool) -> None:
    long_enough(tmp_path, partial(a_site_dies, chapter, wiped), BUDGET // 2)


def a_site_dies(chapter: str, wiped: bool, folder: Path, budget: int) -> None:
    seed = seed_of(chapter)
    toy = the_toy(folder, seed, token_budget=budget, snapshot_every=1_000_000)
    deaths = SITE_DEATHS[chapter]
    logs: list[Log] = []
    with serving(toy) as (syncer, address, log), ExitStack() as alive:
        mine = {"site": "a", "address": address, "step_s": STEP_S, "checkpoint_every": 7}
        other = alive.enter_context(SiteThread(toy, "b", address, step_s=3 * STEP_S))
        for death in [*deaths, None]:
            if death is None and wiped:
                shutil.rmtree(folder / "a")
            life = begins(alive.enter_context(Process("site", toy, death, **mine)), [other])
            logs.append(life.log)
            dies(life, death, seed, budget)
        (event,) = logs[-1].of("finished")
        assert event["ending"] == "finished", event
        ledger: Any = event["ledger"]
        finished = {"b": other.join(bound_s(budget))}
    audit(toy, [log], {"a": logs, "b": [other.log]}, finished)
    merged = sum(line.tokens_merged for line in syncer.core.machine.state.sites["a"].lines) // toy.fragments
    assert ledger["merged"] == merged, ledger
    assert ledger["processed"] == sum(ledger[part] for part in ledger if part != "processed"), ledger
    if not wiped:  # What was on a disk that is gone can only be counted by what the syncer has of it.
        trained = sum(len(life.of("trained")) for life in logs) * TOKENS_PER_STEP
        # A step is handed over and then noted, so each death may hide one from the test's own count.
        assert trained <= ledger["processed"] <= trained + len(deaths) * TOKENS_PER_STEP, f"seed {seed}: {ledger}"
