"""``diloco sim`` from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from diloco.cli.main import main
from diloco.plan import studies
from tests.runs.processes import TINY


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.slow
def test_the_tables_of_goodput_and_of_bandwidths(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(studies, "HOURS", 1.0)
    assert main(["sim", "+scenario=goodput_decoupled", "--json"]) == 0
    found = told(capsys)
    assert found["max_error_points"] <= 5
    assert len(found["cells"]) == 18
    assert main(["sim", "+scenario=bandwidth_streaming"]) == 0
    said = capsys.readouterr().out
    assert "streaming               1B 50%" in said
    assert "steps of the grid off" in said


def test_a_run_of_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    faults = ["--interruptions-per-day", "800"]
    assert main(["sim", *TINY, "cluster=local3", "network=wan", "--json", "--hours", "0.15", *faults]) == 0
    found = told(capsys)
    sites = found["sites"]
    assert len(sites) == 3
    for site in sites.values():
        assert site["trained_share"] + site["waited_share"] + site["away_share"] == pytest.approx(1.0, abs=1e-4)
        assert site["away_share"] > 0
        assert site["bytes_up"] > 0
    assert main(["sim", *TINY, "cluster=local3"]) == 0
    assert "goodput" in capsys.readouterr().out


def test_hours_are_how_long_the_run_lasts_and_without_them_it_ends_by_itself(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It once ended after run.seconds whatever --hours said, and everybody was said to wait for the rest."""
    assert main(["sim", *TINY, "cluster=local3", "network=wan", "--hours", "0.5", "--json"]) == 0
    found = told(capsys)
    assert found["simulated_s"] == 1800
    assert found["goodput"] > 0.95
    assert main(["sim", *TINY, "cluster=local3", "network=wan", "--json"]) == 0
    found = told(capsys)
    assert 100 < found["simulated_s"] < 110
    assert found["goodput"] > 0.95


def test_what_makes_no_difference_to_the_fleet_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    told_it = ["outer.num_fragments=2", "outer.num_syncers=2", "network.emulate=true", "network.jitter_ms=3"]
    assert main(["sim", *TINY, "cluster=local3", *told_it, "--hours", "0.02"]) == 0
    assert "not simulated: outer.num_syncers=2, network.jitter_ms=3" in capsys.readouterr().out
    assert main(["sim", *TINY, "cluster=local3", "network=loopback", "--hours", "0.02"]) == 0
    assert "not simulated" not in capsys.readouterr().out


def test_who_made_no_step_is_told_what_it_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    link = ["network.emulate=true", "network.mbps=0.1", "network.rtt_ms=100"]
    assert main(["sim", *TINY, "cluster=local3", *link, "--hours", "0.001", "--json"]) == 0
    found = told(capsys)
    sites = found["sites"]
    assert found["goodput"] == 0
    took = sites["site-a"]["version_0_s"]
    assert took > 3.6
    assert main(["sim", *TINY, "cluster=local3", *link, "--hours", "0.001"]) == 0
    assert f"site-a made no step: version 0 takes {took:,.0f} s to arrive\n" in capsys.readouterr().out
    assert main(["sim", *TINY, "cluster=local3", "--step-s", "60", "--hours", "0.001"]) == 0
    assert "made no step" not in capsys.readouterr().out, "it had the version and no time for a step"
    assert main(["sim", *TINY, "cluster=local3", *link, "--hours", str(2 * took / 3600), "--json"]) == 0
    assert told(capsys)["sites"]["site-a"]["steps"] > 0


@pytest.mark.slow
def test_each_seed_has_its_goodput_and_the_first_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["sim", *TINY, "cluster=local3", "network=wan", "--hours", "0.08", "--away-s", "120", "run.seed=4"]
    asked += ["--chips", "1000", "--interruptions-per-chip-year", "50", "--step-jitter", "0.1"]
    asked += ["--maintenance-every-h", "0.05", "--maintenance-s", "60"]
    assert main([*asked, "--seeds", "3", "--json"]) == 0
    found = told(capsys)
    by_seed = found["goodput_by_seed"]
    assert list(by_seed) == ["4", "5", "6"]
    assert len(set(by_seed.values())) == 3
    assert found["goodput"] == by_seed["4"]
    assert main([*asked, "--json"]) == 0
    alone = told(capsys)
    assert (alone["goodput_by_seed"], alone["sites"]) == ({"4": by_seed["4"]}, found["sites"])
    assert main([*asked, "--seeds", "3"]) == 0
    said = capsys.readouterr().out
    mean, least, most = sum(by_seed.values()) / 3, min(by_seed.values()), max(by_seed.values())
    assert f"goodput of seeds 4 5 6: {mean:.1%} on average, {least:.1%} to {most:.1%}" in said


@pytest.mark.slow
def test_two_levels(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["sim", *TINY, "experiment=halos", "cluster=local3", "network=wan", "upstream.updates=4"]
    asked += ["upstream.counted_from=start", "--hours", "0.06"]
    asked += ["--above", "outer=halos_global", "--above", "codec=int4", "--above", "network=transatlantic"]
    assert main([*asked, "--regions", "2", "--json"]) == 0
    found = told(capsys)
    sites, regions = found["sites"], found["regions"]
    assert list(regions) == ["site-a", "site-b"]
    assert list(sites) == [f"{region}/site-{site}" for region in regions for site in "abc"]
    for region, above in regions.items():
        merged = sum(site["updates_merged"] for name, site in sites.items() if name.startswith(f"{region}/"))
        assert 0 < above["updates_merged"] == pytest.approx(merged / 4, abs=3)
        assert 0 < above["bytes_up"] < min(site["bytes_up"] for site in sites.values())
    assert main([*asked, "--regions", "2"]) == 0
    said = capsys.readouterr().out
    row = next(line for line in said.splitlines() if line.startswith("site-b "))
    assert f"{regions['site-b']['updates_merged']:,}" in row
    assert "above: network.jitter_ms=5" in said
    assert "regions each" in said
    far = ["--above", "network.mbps=0.001"]
    assert main([*asked, *far, "--json"]) == 0
    took = told(capsys)["regions"]["site-c"]["version_0_s"]
    assert main([*asked, *far]) == 0
    assert f"site-c merged nothing: version 0 takes {took:,.0f} s to arrive from above\n" in capsys.readouterr().out


def test_two_levels_end_as_a_run_does(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a region whose updates take a day it was once said that the run does not end."""
    asked = ["sim", *TINY, "experiment=halos", "cluster=local3", "run.seconds=null", "run.tokens=1000000"]
    asked += ["outer.inner_steps=500", "--step-s", "30", "--above", "outer=halos_global", "--above", "codec=fp32"]
    assert main([*asked, "--json"]) == 0
    found = told(capsys)
    assert found["simulated_s"] > 24 * 3600
    assert min(region["updates_merged"] for region in found["regions"].values()) > 0


NO_QUORUM = ["cluster=local3", "outer.quorum=4", "run.seconds=null", "run.tokens=1000"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["+scenario=goodput_decouple"], "+scenario is 'goodput_decouple': did you mean goodput_decoupled?"),
        (
            ["+scenario=bandwidth_streaming", "outer.lr=1"],
            "outer.lr=1: +scenario=bandwidth_streaming is a published table",
        ),
        (["+scenario=bandwidth_streaming", "--hours", "3"], "--hours and +scenario=bandwidth_streaming: "),
        (["+scenario=bandwidth_streaming", "+scenario=goodput_decoupled"], "one at a time"),
        (["--step-s", "1e-12"], "--step-s is 1e-12: must be from 1e-06 to 1e+09"),
        (["--hours", "inf"], "--hours is inf: must be from"),
        (["--merge-s", "inf"], "--merge-s is inf: must be from 0 to 86400"),
        (["--interruptions-per-day", "-1"], "--interruptions-per-day is -1: must be from 0 to 86400"),
        (["--region-interruptions-per-day", "nan"], "--region-interruptions-per-day is nan"),
        (["--region-interruptions-per-day", "2"], "--region-interruptions-per-day is 2: name the sites with --region"),
        (["--region", "site-a,site-b"], "--region is site-a,site-b: --region-interruptions-per-day is 0"),
        (["--chips", "8"], "--chips is 8: --interruptions-per-chip-year is 0, so they never fail"),
        (
            ["--chips", "400", "--interruptions-per-chip-year", "80000"],
            "--chips is 400: that is 87611.2 interruptions of a site in a day, above 86400",
        ),
        (["--chips", "-1"], "--chips is -1: must be from 0"),
        (["--interruptions-per-chip-year", "nan"], "--interruptions-per-chip-year is nan: must be from 0 to 86400"),
        (["--interruptions-per-chip-year", "1"], "--interruptions-per-chip-year is 1: give a site's chips"),
        (["--maintenance-s", "60"], "--maintenance-every-h is 0: must be from 0.001"),
        (["--maintenance-every-h", "1"], "--maintenance-s is 0: must be above 0 and below --maintenance-every-h"),
        (["--maintenance-every-h", "1", "--maintenance-s", "3600", "--hours", "9"], "--maintenance-s is 3600: must be"),
        (["--maintenance-every-h", "1", "--maintenance-s", "60"], "is 1: give the simulated time with --hours"),
        (["--step-jitter", "1"], "--step-jitter is 1: must be from 0 to below 1"),
        (["--seeds", "0"], "--seeds is 0: must be from 1 to 1000"),
        (["--seeds", "2", "--like", "runs/none"], "--seeds and --like: the seed is that of the run"),
        (["--region", "site-a,site-a", "--region-interruptions-per-day", "2"], "has a site twice"),
        (["cluster.sites.site-a.slowdown=nan"], "cluster.sites.site-a.slowdown is nan: from 1 (full speed)"),
        (["cluster.sites.site-a.nproc=0"], "cluster.sites.site-a.nproc is 0: at least 1"),
        (["outer.correction=heloco", "outer.kind=sgd"], "outer.correction"),
        (["outer.num_syncers=99"], "outer.num_syncers is 99"),
        (["inner.batch_sequences=0"], "inner.batch_sequences is 0"),
        (["outer.lrr=1"], "outer.lrr"),
        (["--above", "outer.lrr=1"], "--above: unknown key outer.lrr"),
        (["--above", "outer=diloco"], "--above: outer.lock_step is True: not built for regions"),
        (["--above", "codec=topk"], "--above: codec.up is 'topk:4096x64': not built for regions"),
        (["--above", "codec.up=int3"], "--above: codec.up is 'int3'"),
        (
            ["--above", "outer.num_fragments=4"],
            "--above: outer.num_fragments=4: the region decides this; --above takes",
        ),
        (["--above", "outer.num_syncers=2"], "--above: outer.num_syncers=2: the region decides this"),
        (["--above", "upstream.updates=8"], "--above: upstream.updates=8: the region decides this"),
        (["--above", "model=small"], "--above: model=small: the region decides this"),
        (["outer.lock_step=true", "--regions", "2"], "outer.lock_step is True: not built for a region"),
        (["--regions", "0"], "--above: --regions is 0: at least 1"),
        (["upstream.endpoint=a:1", "upstream.site_id=b"], "upstream.endpoint is 'a:1': leave it out (null)"),
        (["upstream.endpoint=a:1", "upstream.site_id=b", "--regions", "2"], "upstream.endpoint is 'a:1': leave it out"),
        (["scenario=demo", "--regions", "2"], "--above simulates no scenario"),
        (
            ["--like", "runs/none", "--regions", "2"],
            "--above, --regions and --like: only a run without regions can be compared",
        ),
        ([*TINY, *NO_QUORUM, "--step-s", "30"], "--hours"),
        ([*TINY, *NO_QUORUM, "--step-s", "30"], "0 of 1000 tokens are merged"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], words: str, refused: Callable[..., None]) -> None:
    refused(2, words, "sim", *arguments)
