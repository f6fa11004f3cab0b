from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco.cli.main import main
from diloco.config import build, build_syncer, placing
from diloco.config.compose import compose
from diloco.plan import answer as plan_answer
from diloco.plan import studies
from diloco.plan.answer import advice_line, answer, first_line, memory, picture, round_lines, show, values
from diloco.plan.estimate import PRESETS, Question
from diloco.plan.studies import JOB, LAYOUTS
from diloco.wire.options import ServerOptions
from tests.runs.processes import TINY
from tests.wire.fake_syncer import RUN, FakeSyncer, serve

ASKED = Question(parameters=8e9, step_s=2.0, fragments=8, syncer="sharded", codec_down="fp32", up_gbps=(20.0,))


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studies, "SITE_ROUNDS", 100)
    monkeypatch.setattr(studies, "INTERRUPTIONS", 20)
    monkeypatch.setattr(studies, "INTERRUPTIONS_OF_JOB", 20)


def test_memory_is_the_state_and_two_new_versions_of_a_fragment() -> None:
    """fp32 down-links are the state itself: eight bytes a value, of two fragments at each of four sites."""
    found = memory(ASKED)
    part = 8 * 2e9 + 2 * 8 * 1e9
    assert found == {
        "syncer_bytes": 4 * part,
        "syncer_parts": 4,
        "syncer_bytes_per_part": part,
        "syncers_needed": 4,
    }
    assert memory(replace(ASKED, host_gb=part / 1e9))["syncers_needed"] == 4
    assert memory(replace(ASKED, host_gb=part / 1e9 - 1))["syncers_needed"] == 8
    assert memory(replace(ASKED, host_gb=23))["syncers_needed"] is None
    assert memory(replace(ASKED, syncer="central"))["syncer_bytes"] == 8 * 8e9 + 2 * 8 * 1e9
    assert memory(replace(ASKED, outer_kind="sgd"))["syncer_bytes"] == 2 * part


def test_money_is_what_crosses_times_its_price() -> None:
    """10B parameters at 4.5 bits, each way, at eight sites with the syncer apart: 90 GB in 80 s, at two cents."""
    found = answer(replace(PRESETS["10b_8dc"], syncer="apart"))
    assert found["bytes_wan_per_round"] == 90e9
    assert found["dollars_per_round"] == pytest.approx(1.8)
    assert found["dollars_per_day"] == pytest.approx(1.8 * 86_400 / 80)
    assert found["syncer_parts"] == 1


def test_advice_is_in_the_names_of_a_run() -> None:
    found = answer(ASKED)
    assert found["advice"] == {
        "outer": "decoupled",
        "outer.adopt": "rebase",
        "outer.inner_steps": 100,
        "outer.num_fragments": 8,
        "outer.num_syncers": 4,
        "site.overlap_steps": 2,
        "codec.up": "int4:32",
        "codec.down": "fp32",
    }
    waits = answer(replace(ASKED, overlap_steps=0, syncer="central", up_gbps=(1000.0,)))
    assert waits["advice"]["outer.lock_step"] is True
    assert waits["advice"]["outer"] == "diloco"
    plain = answer(replace(ASKED, outer_kind="sgd", sites=20, fragments=40, downlinks_kept=2, up_gbps=(100.0,)))[
        "advice"
    ]
    assert (plain["outer.kind"], plain["outer.momentum"]) == ("sgd", 0.0)
    assert (plain["outer.sites_max"], plain["cluster.syncer.downlinks_kept"]) == (20, 2)
    assert answer(replace(ASKED, up_gbps=(1e-4,)))["advice"] is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt3_4dc", "10b_8dc"])
def test_advice_makes_a_run(name: str) -> None:
    """Of a model with parameters enough for the fragments."""
    advice = answer(PRESETS[name])["advice"]
    config = compose(["model.layers=24", *(f"{key}={value}" for key, value in advice.items())])
    held = [build.layout_of(each) for each in placing.syncer_configs(config)]
    assert sum(len(layout.fragments) for layout in held) == advice["outer.num_fragments"]
    assert build.learner_options(config).inner_steps == advice["outer.inner_steps"]
    assert len(held) == advice["outer.num_syncers"]
    build_syncer.check(config)


def test_both_ways_of_finding_a_figure_stand_side_by_side() -> None:
    found = answer(replace(ASKED, chips=100_000))
    for name in ("gbps_for_utilisation", "utilisation_on_links", "inner_steps_needed", "goodput"):
        assert {name, f"{name}_formula"} <= set(found)
    assert {each["way"] for each in found["gbps"]} == {"as asked", "data parallel"}
    assert [each["share"] for each in found["gbps"][:5]] == [0.5, 0.8, 0.9, 0.95, 0.99]
    assert {(each["parameters"], each["sites"]) for each in found["scaling"]} == {
        (parameters, sites) for parameters in plan_answer.PARAMETERS for sites in plan_answer.SITES
    }
    found = answer(replace(ASKED, overlap_steps=0, chips=1000))
    assert found["goodput"] == found["goodput_formula"], "where failures are not simulated"
    assert found["goodputs"][-1]["goodput"] is None


# --- In words and as a picture ----------------------------------------------------------------------------------------

PLAIN = Question(parameters=1e9, step_s=1.0, chips=0, fragments=8)
ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "benchmarks" / "results" / "plan.svg"


def test_the_picture_in_the_page_is_what_the_verb_draws() -> None:
    assert COMMITTED.read_text("utf-8") == picture(PRESETS["100t_20dc"])


def test_the_page_shows_what_the_verb_says(capsys: pytest.CaptureFixture[str]) -> None:
    """But for what fleets were found to do, which is another figure in each test that makes them short."""
    show(answer(PRESETS["100t_20dc"]))
    fleets = (JOB, *LAYOUTS.values())
    page = (ROOT / "docs/tutorials/choose-for-a-link.md").read_text("utf-8").splitlines()
    said = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in said if not line.strip().startswith(fleets) and line not in page] == []


def test_the_answer_stands_first(capsys: pytest.CaptureFixture[str]) -> None:
    told = answer(PLAIN)
    show(told)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == first_line(told)
    assert max(map(len, said)) <= 160


def test_what_cannot_be_had_or_is_a_bound_is_said_in_words() -> None:
    told = answer(replace(PLAIN, overlap_steps=0, rtt_ms=60_000.0, host_gb=1.0))
    assert "no link is fast enough" in first_line(told)
    assert any("no number of them is enough" in line or "these links need" in line for line in round_lines(told))
    assert any("a fragment alone does not fit into 1.00 GB" in line for line in round_lines(told))
    assert "no settings that learn well" in advice_line(told)
    lines = [round_lines(answer(replace(PLAIN, codec_up=name)))[0] for name in ("int4:32", "int4:32+zstd1")]
    assert ["at most" in line for line in lines] == [False, True], "what an entropy stage makes smaller"
    assert [values(each) for each in (7e6, 175e9, 100e12)] == ["7.00M", "175B", "100T"]


# --- On links that were measured --------------------------------------------------------------------------------------

SMALL = ["parameters=1e9", "step_s=2", "fragments=4"]


def check(name: str, address: str = "a:1", **figures: float) -> dict[str, Any]:
    return {"check": name, "address": address, "level": "ok", "says": "", "remedy": "", "figures": figures}


def rates(up: float, down: float, address: str = "a:1") -> dict[str, Any]:
    return check("bandwidth", address, up_bytes_per_s=up, down_bytes_per_s=down)


def rtt(median_ms: float, address: str = "a:1") -> dict[str, Any]:
    return check("rtt", address, median_ms=median_ms, p95_ms=2 * median_ms)


def written(place: Path, name: str, *checks: dict[str, Any]) -> str:
    file = place / f"{name}.json"
    file.write_text(json.dumps({"checks": [check("software", ""), *checks], "counts": {}, "exit": 0}))
    return str(file)


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


@pytest.mark.slow
def test_a_link_is_what_doctor_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = serve(FakeSyncer(), ServerOptions(run_id=RUN))
    try:
        assert main(["doctor", f"server={server.address}", "--json", *TINY, f"run.dir={tmp_path}"]) == 0
    finally:
        server.stop(0.2)
    said = capsys.readouterr().out
    (file := tmp_path / "fra.json").write_text(said)
    checks = {each["check"]: each["figures"] for each in json.loads(said)["checks"]}
    found = told(capsys, *SMALL, "sites=3", "--link", str(file))
    up, down = (checks["bandwidth"][f"{way}_bytes_per_s"] * 8e-9 for way in ("up", "down"))
    [link] = found["measured"]
    assert link["file"] == str(file)
    assert (link["up_gbps"], link["down_gbps"]) == pytest.approx((up, down), rel=1e-3)
    assert link["rtt_ms"] == pytest.approx(checks["rtt"]["median_ms"], rel=1e-3)
    asked = found["asked"]
    assert (asked["sites"], asked["up_gbps"], asked["down_gbps"]) == (3, [link["up_gbps"]], [link["down_gbps"]])
    assert asked["rtt_ms"] == link["rtt_ms"]


def test_a_link_of_each_site(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    near = written(tmp_path, "near", rates(1.25e9, 2.5e8), rtt(12.0))
    far = written(tmp_path, "far", rates(0.0, 1e8, "b:1"), rates(1.25e7, 2.5e8), rtt(3.0, "b:1"), rtt(140.0))
    links = ["--link", near, "--link", far]
    found = told(capsys, *SMALL, *links)
    asked = found["asked"]
    assert (asked["sites"], asked["up_gbps"], asked["down_gbps"]) == (2, [10, 0.1], [2, 2])
    assert asked["rtt_ms"] == 140, "of the farthest, and of the syncer of which the rate is"
    stated = told(capsys, *SMALL, "sites=2", "up_gbps=10,.1", "down_gbps=2,2", "rtt_ms=140")
    assert stated.pop("measured") == []
    measured = found.pop("measured")
    assert [link["file"] for link in measured] == [near, far]
    assert {**stated, "took_s": 0} == {**found, "took_s": 0}
    assert main(["plan", *SMALL, *links]) == 0
    assert f"measured   0.1 Gbit/s up, 2 down, 140 ms ({far})\n" in capsys.readouterr().out


def test_a_preset_is_planned_on_the_links_that_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [written(tmp_path, f"site-{index}", rates(1e9, 1e9), rtt(10.0 + index)) for index in range(3)]
    links = [word for file in files for word in ("--link", file)]
    asked = told(capsys, "+experiment=10b_8dc", *links)["asked"]
    assert (asked["sites"], asked["up_gbps"], asked["rtt_ms"]) == (3, [8, 8, 8], 12)


@pytest.mark.parametrize(
    ("arguments", "checks", "words"),
    [
        (["up_gbps=1"], [rates(1e9, 1e9), rtt(1)], "up_gbps is set, and --link measures it: give one"),
        (["rtt_ms=1"], [rates(1e9, 1e9), rtt(1)], "rtt_ms is set, and --link measures it: give one"),
        (
            ["sites=3"],
            [rates(1e9, 1e9), rtt(1)],
            "sites is 3, and 2 links are given: give one for all, or one for each",
        ),
        ([], [rtt(1)], "link.json: no rate was measured both ways: run diloco doctor HOST:PORT --json > FILE"),
        ([], [rates(1e9, 0.0), rtt(1)], "link.json: no rate was measured both ways"),
        ([], [rates(1e9, 1e9)], "link.json: not what diloco doctor prints"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], checks: list[dict[str, Any]], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, "link", *checks)
    assert main(["plan", *SMALL, "--link", file, "--link", file, *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.strip().splitlines()) == 1


@pytest.mark.parametrize("content", [b"", b"[]", b'{"checks": [{}]}', b'{"checks": 3}', b"\xff"])
def test_a_file_of_something_else_is_one_line(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "link.json").write_bytes(content)
    assert main(["plan", *SMALL, "--link", str(file)]) == 2
    assert "link.json: not what diloco doctor prints" in capsys.readouterr().err
    assert main(["plan", *SMALL, "--link", str(tmp_path / "none.json")]) == 2
    assert "none.json: No such file or directory" in capsys.readouterr().err
