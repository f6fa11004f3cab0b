"""The tables of kills are complete, and short hunts find nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco.durable import Step
from tests.hunts import crash, disaster, failover
from tests.hunts.crash import EVERY_CASE, NEVER
from tests.hunts.disaster import BOUND_S
from tests.hunts.rank_kills import RankKills
from tests.hunts.verb_lives import DEATHS, VerbLives
from tests.loopback.audit import one_run
from tests.runs.processes import TINY

Hunted = Callable[..., Any]


def test_every_step_has_a_kill_case() -> None:
    killed_at = {name.partition(": ")[2] for name in EVERY_CASE}
    missing = {str(step) for step in set(Step) - set(NEVER)} - killed_at
    assert not missing, f"steps without a kill case in tests/hunts: {sorted(missing)}"
    assert not killed_at & {str(step) for step in NEVER}


@pytest.mark.hunt
def test_a_short_hunt_finds_nothing(hunted: Hunted) -> None:
    found, _ = hunted(crash, "--kills", "40", "--seed", "4")
    assert found["violations"] == 0, found
    assert 40 <= found["kills"] == sum(found["killed_at"].values())
    assert found["steps_named"] == len(Step) - len(NEVER)
    assert 0 < found["steps_killed_at"] <= found["steps_named"]
    assert found["rounds"].keys() >= {"lock-step", "standby"}


# --- A short hunt of failovers finds nothing, and reports its measurements -------------------------------------------


@pytest.mark.hunt
@pytest.mark.parametrize("by", ["verb", "lease"])
def test_two_syncers_die_one_after_the_other_and_nothing_acknowledged_is_lost(by: str, hunted: Hunted) -> None:
    bounds = ["--within-s", "30", "--within-leases", "15", "--stall-share", "0.5"]
    found, _ = hunted(failover, "--n", "2", "--seed", "3", "--by", by, *bounds)
    assert found["violations"] == 0, found
    assert (found["failovers"], sum(found["killed_at"].values())) == (2, 2)
    assert found["updates"] > 0
    measured, unit = found[f"by_{by}"], {"verb": "s", "lease": "leases"}[by]
    assert (measured["failovers"], measured["runs"]) == (2, 1)
    assert 0 < measured[f"serving_{unit}"]["max"] <= measured[f"published_{unit}"]["max"]
    if by == "lease":
        assert measured["serving_leases"]["p50"] > 0.5, "it waited for the lease to run out"


@pytest.mark.hunt
def test_a_take_over_that_takes_too_long_is_a_violation_of_the_bound_of_its_kind(hunted: Hunted) -> None:
    found, said = hunted(failover, "--n", "1", "--by", "lease", "--within-leases", "0.1", "--stall-share", "0.5")
    assert found["violations"] == 1
    assert "(by lease) took too long" in said


def test_what_a_syncer_wrote_beyond_what_its_standby_had_is_no_part_of_the_run(tmp_path: Path) -> None:
    for name, segments in (("node-0", (1, 2, 3, 4)), ("node-1", (3,))):
        for segment in segments:
            path = tmp_path / name / "journal" / f"journal-{segment:08d}.log"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{name} {segment}")
    whole = one_run(tmp_path, ["node-0", "node-1"])
    found = {path.name: path.read_text() for path in sorted((whole / "archive" / "journal").iterdir())}
    assert list(found.values()) == ["node-0 1", "node-0 2", "node-1 3"]
    assert (whole / "syncer" / "journal").is_dir()


# --- Ranks, verbs and whole folders ----------------------------------------------------------------------------------


@pytest.mark.hunt
@pytest.mark.parametrize(("parallel", "memory"), [("ddp", 0), ("fsdp", 0), ("fsdp", 3)])
def test_a_site_comes_back_when_one_of_its_ranks_is_killed(parallel: str, memory: int, tmp_path: Path) -> None:
    found = RankKills(tmp_path, 1, 2, parallel, memory).run()
    assert sum(found["killed"]) == 2  # type: ignore[call-overload]


@pytest.mark.slow
def test_a_syncer_verb_that_is_killed_loses_nothing(tmp_path: Path) -> None:
    killed: Counter[str] = Counter({f"diloco syncer: {step}": 1 for step in DEATHS["syncer"] if step is not Step.ACK})
    before = killed.total()
    assert VerbLives(tmp_path, 1, killed, deaths=1).run() > 0
    assert killed.total() == before + 2
    assert killed["diloco syncer: syncer.ack"] == 1


SMALL = [text for text in TINY if not text.startswith(("run.seconds", "data.cache"))]


@pytest.mark.parametrize(
    "way", [pytest.param("backup", marks=pytest.mark.slow), pytest.param("site", marks=pytest.mark.hunt)]
)
def test_a_run_whose_syncer_lost_its_folder_is_restored_as_it_says(way: str, hunted: Hunted) -> None:
    """The hunt with a smaller model."""
    found, _ = hunted(disaster, "--ways", way, "--versions", "6", "--settings", " ".join(SMALL))
    assert found["violations"] == 0, found
    seconds = found[way]["seconds_from_loss"]
    assert 0 < seconds["told"] < seconds["restored"] < seconds["serving"] < seconds["all_merged"] < BOUND_S
    assert found[way]["tokens"]["merged"] > 0
