"""A short hunt finds nothing, and what it measures is there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.hunts.failover import main, spread
from tests.loopback.audit import one_run


@pytest.mark.hunt
@pytest.mark.parametrize("by", ["verb", "lease"])
def test_two_syncers_die_one_after_the_other_and_nothing_acknowledged_is_lost(
    by: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bounds = ["--within-s", "30", "--within-leases", "15", "--stall-share", "0.5"]
    code = main(["--n", "2", "--seed", "3", "--by", by, *bounds])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (code, found["violations"]) == (0, 0), found
    assert (found["failovers"], sum(found["killed_at"].values())) == (2, 2)
    assert found["updates"] > 0
    measured, unit = found[f"by_{by}"], {"verb": "s", "lease": "leases"}[by]
    assert (measured["failovers"], measured["runs"]) == (2, 1)
    assert 0 < measured[f"serving_{unit}"]["max"] <= measured[f"published_{unit}"]["max"]
    if by == "lease":
        assert measured["serving_leases"]["p50"] > 0.5, "it waited for the lease to run out"


@pytest.mark.hunt
def test_a_take_over_that_takes_too_long_is_a_violation_of_the_bound_of_its_kind(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = main(["--n", "1", "--by", "lease", "--within-leases", "0.1", "--stall-share", "0.5"])
    said = capsys.readouterr().out
    assert (code, json.loads(said.splitlines()[-1])["violations"]) == (1, 1)
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


def test_a_spread_names_the_middle_and_the_end() -> None:
    assert spread([3.0, 1.0, 2.0]) == {"p50": 2.0, "p95": 3.0, "max": 3.0}
    assert spread([]) == {"p50": 0.0, "p95": 0.0, "max": 0.0}
