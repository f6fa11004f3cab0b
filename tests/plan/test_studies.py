"""Published tables are found again within what is promised, and fleets of the real machines give what formulas say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco.plan import studies
from diloco.plan.estimate import PRESETS, Question
from diloco.plan.studies import GBPS, JOB, LAYOUTS, MODELS, SHARES, STUDIES, Expected, bandwidths, expected

ASKED = Question(
    parameters=1e9,
    step_s=2.0,
    sites=4,
    chips=1_000_000,
    up_gbps=(1.0,),
    rtt_ms=50.0,
    inner_steps=50,
    fragments=8,
    overlap_steps=4,
    syncer="sharded",
)


@pytest.fixture(autouse=True)
def _less_than_for_a_person(monkeypatch: pytest.MonkeyPatch) -> None:
    """The formulas are found again in a part of what is simulated for a question."""
    for name, share in (("SITE_ROUNDS", 4), ("INTERRUPTIONS", 2), ("INTERRUPTIONS_OF_JOB", 2)):
        monkeypatch.setattr(studies, name, getattr(studies, name) // share)


def by_syncer(question: Question) -> dict[str, Expected]:
    return {each.syncer: each for each in expected(question)}


def test_failures_cost_a_fleet_what_the_formula_says() -> None:
    found = by_syncer(ASKED)
    assert list(found) == ["", "central", "sharded"]
    alone = by_syncer(replace(ASKED, sites=1, chips=0, syncer="central"))
    assert list(alone) == ["", "central"], "one site has no parts"
    assert alone["central"].goodput == pytest.approx(1.0, abs=1e-3)
    assert [each.layout for each in found.values()] == [JOB, LAYOUTS["central"], LAYOUTS["sharded"]]
    away = 1e6 / (365.25 * 86_400) * 23.0
    assert found[""].goodput_formula == pytest.approx(1 / (1 + 4 * away))
    assert found["sharded"].goodput_formula == pytest.approx(1 / (1 + away))
    for each in found.values():
        assert each.interruptions > 100
        assert each.goodput == pytest.approx(each.goodput_formula, abs=0.05)
    assert (found["sharded"].goodput or 0) > 1.5 * (found[""].goodput or 1)


def test_a_single_syncer_merges_what_its_link_carries_and_a_sharded_one_all() -> None:
    """8 Gbit/s would have to come in and go out at one site with 20 of them in 100 s, and it has one."""
    found = by_syncer(replace(ASKED, sites=20, chips=0, fragments=20, parameters=10e9))
    assert found["sharded"].merged_formula == found["sharded"].merged == 1.0
    central = found["central"]
    assert central.merged_formula == pytest.approx(100 * 1e9 / (19 * 4.5 * 10e9))
    assert central.merged == pytest.approx(central.merged_formula, abs=0.08)
    assert central.goodput == pytest.approx(1.0, abs=1e-3), "nobody waits for it"
    assert central.interruptions == 0


def test_a_syncer_that_adds_up_too_slowly_merges_what_it_can() -> None:
    """Four updates of 10^9 values in a round of 100 s, at 2 x 10^7 a second."""
    asked = replace(ASKED, chips=0, syncer="apart", up_gbps=(1000.0,), merge_values_per_s=2e7)
    found = by_syncer(asked)["apart"]
    assert found.merged_formula == pytest.approx(0.5)
    assert found.merged == pytest.approx(0.5, abs=0.1)
    assert found.goodput == pytest.approx(1.0, abs=1e-3)


def test_where_sites_wait_for_each_other_links_cost_time() -> None:
    """One fragment of 1.125 Gbit up and as much down at 1 Gbit/s, behind every 100 s of training."""
    waits = replace(ASKED, sites=2, chips=0, fragments=1, overlap_steps=0, syncer="apart", parameters=0.25e9)
    found = by_syncer(waits)["apart"]
    assert found.goodput_formula == pytest.approx(100 / (100 + 2.25 + 0.05 + 0.05), abs=1e-3)
    assert found.goodput == pytest.approx(found.goodput_formula, abs=0.01)
    assert found.merged == 1.0
    failing = by_syncer(replace(waits, chips=1000))["apart"]
    assert failing.goodput is None
    assert failing.goodput_formula < found.goodput_formula


def test_the_same_seed_gives_the_same_and_another_nearly() -> None:
    asked = replace(PRESETS["gpt3_4dc"], fragments=4, inner_steps=4, overlap_steps=1)
    found, other = expected(asked), expected(replace(asked, seed=1))
    assert found == expected(asked)
    assert found != other
    for here, there in zip(found, other, strict=True):
        assert here.goodput == pytest.approx(there.goodput, abs=0.02)


@pytest.mark.slow
def test_the_published_bandwidths_within_two_steps_of_the_grid() -> None:
    cells = list(bandwidths(0))
    assert all(study.name == name for name, study in STUDIES.items())
    assert len(cells) == len(GBPS) * len(MODELS) * len(SHARES)
    assert [cell for cell in cells if cell.off > 2] == []
