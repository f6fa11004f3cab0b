"""``diloco sim`` from the command line."""

from __future__ import annotations

import pytest

from diloco.plan import studies
from tests.cli.conftest import Cli
from tests.runs.processes import TINY


def test_hours_are_how_long_a_run_lasts_and_without_them_it_ends_by_itself(cli: Cli) -> None:
    """It once ended after run.seconds whatever --hours said, and everybody was said to wait for the rest."""
    asked = ["sim", *TINY, "cluster=local3", "network=wan"]
    found = cli.json(*asked, "--hours", "0.15", "--interruptions-per-day", "800")
    assert found["simulated_s"] == 540
    assert len(found["sites"]) == 3
    for site in found["sites"].values():
        assert site["trained_share"] + site["waited_share"] + site["away_share"] == pytest.approx(1.0, abs=1e-4)
        assert site["away_share"] > 0
        assert site["bytes_up"] > 0
    found = cli.json(*asked, "--hours", "0.5")
    assert found["simulated_s"] == 1800
    assert found["goodput"] > 0.95
    found = cli.json(*asked)
    assert 100 < found["simulated_s"] < 110
    assert found["goodput"] > 0.95


def test_what_makes_no_difference_to_the_fleet_is_said(cli: Cli) -> None:
    told_it = ["outer.num_fragments=2", "outer.num_syncers=2", "network.emulate=true", "network.jitter_ms=3"]
    said = cli.out("sim", *TINY, "cluster=local3", *told_it, "--hours", "0.02")
    assert "not simulated: outer.num_syncers=2, network.jitter_ms=3" in said
    assert "not simulated" not in cli.out("sim", *TINY, "cluster=local3", "network=loopback", "--hours", "0.02")


def test_who_made_no_step_is_told_what_it_waited_for(cli: Cli) -> None:
    asked = ["sim", *TINY, "cluster=local3"]
    slow = [*asked, "network.emulate=true", "network.mbps=0.1", "network.rtt_ms=100", "--hours"]
    found = cli.json(*slow, "0.001")
    assert found["goodput"] == 0
    took = found["sites"]["site-a"]["version_0_s"]
    assert took > 3.6
    assert f"site-a made no step: version 0 takes {took:,.0f} s to arrive\n" in cli.out(*slow, "0.001")
    assert "made no step" not in cli.out(*asked, "--step-s", "60", "--hours", "0.001"), "it had no time for one"
    assert cli.json(*slow, str(2 * took / 3600))["sites"]["site-a"]["steps"] > 0


def test_each_seed_has_its_goodput_and_the_first_its_table(cli: Cli) -> None:
    asked = ["sim", *TINY, "cluster=local3", "network=wan", "--hours", "0.08", "--away-s", "120", "run.seed=4"]
    asked += ["--chips", "1000", "--interruptions-per-chip-year", "50", "--step-jitter", "0.1"]
    asked += ["--maintenance-every-h", "0.05", "--maintenance-s", "60"]
    found = cli.json(*asked, "--seeds", "2")
    first, second = (found["goodput_by_seed"][seed] for seed in ("4", "5"))
    assert found["goodput"] == first != second
    alone = cli.json(*asked)
    assert (alone["goodput_by_seed"], alone["sites"]) == ({"4": first}, found["sites"])
    spread = f"{(first + second) / 2:.1%} on average, {min(first, second):.1%} to {max(first, second):.1%}"
    assert f"goodput of seeds 4 5: {spread}" in cli.out(*asked, "--seeds", "2")


@pytest.mark.slow
def test_two_levels(cli: Cli) -> None:
    asked = ["sim", *TINY, "experiment=halos", "cluster=local3", "network=wan", "upstream.updates=4"]
    asked += ["upstream.counted_from=start", "--hours", "0.06", "--regions", "2"]
    asked += ["--above", "outer=halos_global", "--above", "codec=int4", "--above", "network=transatlantic"]
    found = cli.json(*asked)
    sites, regions = found["sites"], found["regions"]
    assert list(regions) == ["site-a", "site-b"]
    assert list(sites) == [f"{region}/site-{site}" for region in regions for site in "abc"]
    for region, above in regions.items():
        merged = sum(site["updates_merged"] for name, site in sites.items() if name.startswith(f"{region}/"))
        assert 0 < above["updates_merged"] == pytest.approx(merged / 4, abs=3)
        assert 0 < above["bytes_up"] < min(site["bytes_up"] for site in sites.values())
    said = cli.out(*asked)
    row = next(line for line in said.splitlines() if line.startswith("site-b "))
    assert f"{regions['site-b']['updates_merged']:,}" in row
    assert "above: network.jitter_ms=5" in said
    assert "site-b merged nothing: version 0 takes" in cli.out(*asked, "--above", "network.mbps=0.001")


def test_two_levels_end_as_a_run_does(cli: Cli) -> None:
    """Of a region whose updates take a day it was once said that the run does not end."""
    asked = ["sim", *TINY, "experiment=halos", "cluster=local3", "run.seconds=null", "run.tokens=1000000"]
    asked += ["outer.inner_steps=500", "--step-s", "30", "--above", "outer=halos_global", "--above", "codec=fp32"]
    found = cli.json(*asked)
    assert found["simulated_s"] > 24 * 3600
    assert min(region["updates_merged"] for region in found["regions"].values()) > 0


@pytest.mark.slow
def test_the_tables_of_goodput_and_of_bandwidths(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.setattr(studies, "HOURS", 1.0)
    found = cli.json("sim", "+scenario=goodput_decoupled")
    assert found["max_error_points"] <= 5
    assert len(found["cells"]) == 18
    said = cli.out("sim", "+scenario=bandwidth_streaming")
    assert "streaming               1B 50%" in said
    assert "steps of the grid off" in said
