from __future__ import annotations

import json
import re
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
from diloco.plan.estimate import LAYOUTS, PRESETS, Question
from diloco.plan.studies import JOB

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
    assert answer(ASKED)["advice"] == {
        "outer": "decoupled",
        "outer.adopt": "rebase",
        "outer.inner_steps": 100,
        "outer.num_fragments": 8,
        "outer.num_syncers": 4,
        "site.overlap_steps": 2,
        "codec.up": "int4:32",
        "codec.down": "fp32",
    }
    waits = answer(replace(ASKED, overlap_steps=0, syncer="central", up_gbps=(1000.0,)))["advice"]
    assert waits.items() >= {"outer.lock_step": True, "outer": "diloco"}.items()
    sgd = replace(ASKED, outer_kind="sgd", sites=20, fragments=40, downlinks_kept=2, up_gbps=(100.0,))
    plain = {"outer.kind": "sgd", "outer.momentum": 0.0, "outer.sites_max": 20, "cluster.syncer.downlinks_kept": 2}
    assert answer(sgd)["advice"].items() >= plain.items()
    assert answer(replace(ASKED, up_gbps=(1e-4,)))["advice"] is None


def test_the_page_shows_what_the_verb_says_and_draws(capsys: pytest.CaptureFixture[str]) -> None:
    """But for what fleets were found to do, which is another figure in each test that makes them short."""
    asked = PRESETS["100t_20dc"]
    assert COMMITTED.read_text("utf-8") == picture(asked)
    show(found := answer(asked))
    fleets = (JOB, *LAYOUTS.values())
    page = (ROOT / "docs/tutorials/choose-for-a-link.md").read_text("utf-8").splitlines()
    said = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in said if not line.strip().startswith(fleets) and line not in page] == []
    assert said[0] == first_line(found)


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

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "benchmarks" / "results" / "plan.svg"


def test_what_cannot_be_had_or_is_a_bound_is_said_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    plain = Question(parameters=1e9, step_s=1.0, chips=0, fragments=8)
    found = answer(replace(plain, overlap_steps=0, rtt_ms=60_000.0, host_gb=1.0))
    assert "no link is fast enough" in first_line(found)
    lines = "\n".join(round_lines(found))
    assert re.search("no number of them is enough|these links need", lines)
    assert "a fragment alone does not fit into 1.00 GB" in lines
    assert "no settings that learn well" in advice_line(found)
    show(answer(plain))
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 160
    lines = [round_lines(answer(replace(plain, codec_up=name)))[0] for name in ("int4:32", "int4:32+zstd1")]
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


def report(*checks: dict[str, Any]) -> bytes:
    return json.dumps({"checks": [check("software", ""), *checks], "counts": {}, "exit": 0}).encode()


def written(place: Path, name: str, *checks: dict[str, Any]) -> str:
    file = place / f"{name}.json"
    file.write_bytes(report(*checks))
    return str(file)


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


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
    assert [link["file"] for link in found.pop("measured")] == [near, far]
    assert {**stated, "took_s": 0} == {**found, "took_s": 0}
    asked = told(capsys, "+experiment=10b_8dc", *links)["asked"]
    assert (asked["sites"], asked["up_gbps"], asked["rtt_ms"]) == (2, [10, 0.1], 140), "the links that there are"
    assert main(["plan", *SMALL, *links]) == 0
    assert f"measured   0.1 Gbit/s up, 2 down, 140 ms ({far})\n" in capsys.readouterr().out


GOOD = report(rates(1e9, 1e9), rtt(1))
NOT_OURS = b"", b"[]", b'{"checks": [{}]}', b'{"checks": 3}', b"\xff", report(rates(1e9, 1e9))


@pytest.mark.parametrize(
    ("setting", "content", "words"),
    [
        ("up_gbps=1", GOOD, "up_gbps is set, and --link measures it: give one"),
        ("rtt_ms=1", GOOD, "rtt_ms is set, and --link measures it: give one"),
        ("sites=3", GOOD, "sites is 3, and 2 links are given: give one for all, or one for each"),
        ("", report(rtt(1)), "link.json: no rate was measured both ways: run diloco doctor HOST:PORT --json > FILE"),
        ("", report(rates(1e9, 0.0), rtt(1)), "link.json: no rate was measured both ways"),
        *(("", content, "link.json: not what diloco doctor prints") for content in NOT_OURS),
        ("", None, "link.json: No such file or directory"),
    ],
)
def test_a_mistake_is_one_line(
    setting: str, content: bytes | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "link.json"
    if content is not None:
        file.write_bytes(content)
    assert main(["plan", *SMALL, "--link", str(file), "--link", str(file), *setting.split()]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.strip().splitlines()) == 1
