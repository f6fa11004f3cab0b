from __future__ import annotations

from dataclasses import replace

import pytest

from diloco.config import build, build_syncer, placing
from diloco.config.compose import compose
from diloco.plan import answer as plan_answer
from diloco.plan import studies
from diloco.plan.answer import answer, memory
from diloco.plan.estimate import PRESETS, Question

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


def test_where_failures_are_not_simulated_goodput_is_the_formula() -> None:
    found = answer(replace(ASKED, overlap_steps=0, chips=1000))
    assert found["goodput"] == found["goodput_formula"]
    assert found["goodputs"][-1]["goodput"] is None
