"""Plans: bytes are the codecs', and formulas and simulations give what was worked out by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from diloco.codec.registry import CODEC_NAMES, make_codec
from diloco.plan.bandwidth import Load, Star, star_utilisation
from diloco.plan.estimate import (
    CODECS,
    GRID_GBPS,
    INNER_STEPS_ADVISED,
    PRESETS,
    SHARES,
    Found,
    Question,
    advised,
    data_parallel_gbps,
    formula_gbps,
    formula_utilisation,
    gbps_needed,
    inner_steps_needed,
    loads,
    merging_share,
    scaled,
    simulated_gbps,
    sizes,
    star_of,
    utilisation_found,
)

STEP = 1 + 2 * (GRID_GBPS[1] / GRID_GBPS[0] - 1)
"""Two steps of the grid in which the simulation looks."""


def question(**told: Any) -> Question:
    """A second and a Gbit: one way of the link takes as many seconds as there are Gbits in the model."""
    plain = {
        "parameters": 31.25e6,  # 10^9 bits in fp32
        "step_s": 1.0,
        "sites": 2,
        "up_gbps": (1.0,),
        "rtt_ms": 0.0,
        "inner_steps": 10,
        "fragments": 1,
        "overlap_steps": 0,
        "codec_up": "fp32",
        "codec_down": "fp32",
        "syncer": "apart",
        "merge_values_per_s": 1e21,
    }
    return Question(**{**plain, **told})


@pytest.mark.parametrize("name", [*CODEC_NAMES, *sorted({name for pair in CODECS for name in pair}), "int4:64+zstd1"])
def test_bytes_are_those_that_the_codec_makes(name: str) -> None:
    values = torch.randn(100_003, generator=torch.Generator().manual_seed(0))
    asked = question(parameters=100_003, fragments=3, codec_up=name, codec_down=name)
    assert sum(asked.numels) == 100_003
    made = [len(make_codec(name).encode(part)) for part in values.split(list(asked.numels))]
    found = sizes(asked)
    assert found.update_bytes == found.version_bytes
    if "+" in name:
        assert all(each <= most for each, most in zip(made, found.update_bytes, strict=True))
    else:
        assert tuple(made) == found.update_bytes


def test_rates_of_100t_parameters_that_nobody_waits_for() -> None:
    """A copy of every parameter each way in 3000 s, and 1.9 copies where each of 20 sites has a part of the syncer."""
    star = Star(inner_steps=100, step_s=30.0, fragments=100, overlap_steps=90)
    (alone,) = loads(20, 0, 4 * 100e12, 4 * 100e12)
    (held,) = loads(20, 20, 4 * 100e12, 4 * 100e12)
    for load, wanted in ((alone, 133.3), (held, 253.3)):
        share = 1 - 1e-9
        assert formula_gbps(star, load, share) == pytest.approx(wanted, rel=1e-3)
        assert simulated_gbps(star, load, share) == pytest.approx(wanted, rel=STEP - 1)


def test_the_blocking_exchange_of_100b_parameters() -> None:
    """One copy of 16 bits after every hundred steps of 4.9 s: V / (H t (1/x - 1))."""
    star, load = Star(inner_steps=100, step_s=4.9), Load(updates_up=16 * 100e9, versions_down=0)
    found = [formula_gbps(star, load, share) for share in SHARES]
    assert found == pytest.approx([3.27, 13.06, 29.4, 62.0, 323.3], rel=2e-3)
    for share, wanted in zip(SHARES, found, strict=True):
        simulated = simulated_gbps(star, load, share)
        assert wanted is not None
        assert simulated is not None
        assert wanted <= simulated * (1 + 1e-6) <= wanted * STEP


def test_who_carries_what() -> None:
    held, other = loads(5, 1, 8.0, 2.0)
    assert held == Load(updates_up=0.0, updates_down=32.0, versions_up=8.0, versions_down=0.0)
    assert other == Load(updates_up=8.0, versions_down=2.0)
    assert loads(5, 0, 8.0, 2.0) == [other]
    for sites in (2, 20, 2000):
        (part,) = loads(sites, sites, 8.0, 2.0)
        assert part.up == part.down == pytest.approx((sites - 1) / sites * 10)


@pytest.mark.parametrize(
    ("syncer", "fragments", "overlap"), [("apart", 8, 1), ("central", 4, 0), ("central", 16, 3), ("sharded", 16, 3)]
)
def test_formula_and_simulation_agree(syncer: str, fragments: int, overlap: int) -> None:
    asked = question(sites=16, inner_steps=64, fragments=fragments, overlap_steps=overlap, rtt_ms=150.0, syncer=syncer)
    star = star_of(asked)
    for load in loads(asked.sites, asked.shards, 8e9, 16e9):
        # A fragment is due every 64/F steps: where it takes longer than that waits are shared, and less is needed.
        formula, found = formula_utilisation(star, load, 2.0, 5.0), star_utilisation(star, load, 2.0, 5.0)
        assert found >= formula * 0.99
        if overlap == 0:
            assert found == pytest.approx(formula)
        for share in (0.5, 0.9):
            assert (simulated_gbps(star, load, share) or 0) <= (formula_gbps(star, load, share) or 0) * STEP


def test_a_round_trip_or_a_syncer_that_takes_too_long_is_what_everybody_waits_for() -> None:
    """Two updates of 31.25M values in a round of 10 s: 62.5M values, at 5M a second."""
    asked = question(rtt_ms=5000.0)
    assert gbps_needed(asked, 0.5).simulated is not None
    assert gbps_needed(asked, 0.7) == Found(None, None), "no link is fast enough"
    asked = question(overlap_steps=9, fragments=10, up_gbps=(1000.0,), merge_values_per_s=5e6)
    assert merging_share(asked) == pytest.approx(1.25)
    assert utilisation_found(asked).simulated == utilisation_found(asked).formula == pytest.approx(0.8)
    assert gbps_needed(asked, 0.81) == Found(None, None)
    assert merging_share(replace(asked, syncer="sharded")) == pytest.approx(0.625)


def test_the_inner_steps_that_a_link_asks_for() -> None:
    """A second up and one down: .95 of the time is 38 steps of a second to 2 of waiting."""
    asked = question(step_s=0.0, tokens_per_step=1e3, flops=6 * 31.25e6 * 1e3)
    assert asked.inner_step_s == pytest.approx(1.0), "a step follows from the arithmetic"
    assert replace(asked, active_parameters=31.25e5).inner_step_s == pytest.approx(0.1)
    assert utilisation_found(asked).simulated == pytest.approx(10 / 12)
    found = inner_steps_needed(asked)
    assert (found.formula, found.simulated) == (38, 38)
    assert inner_steps_needed(replace(asked, rtt_ms=1e8)).simulated is None


def test_advice_keeps_what_does_then_takes_fewer_bits_then_more_steps() -> None:
    def both_ways(asked: Question) -> int:
        return sizes(asked).up + sizes(asked).down

    def told(**asked: Any) -> Question:
        found = advised(question(**asked))
        assert found is not None
        return found

    does = question(inner_steps=40)
    assert advised(does) is does
    late = told(overlap_steps=1, inner_steps=20, fragments=4, up_gbps=(0.2,))
    assert (late.inner_steps, late.codec_up) == (20, "fp32"), "another rhythm is enough"
    assert (late.fragments, late.overlap_steps) > (4, 1)
    coded = told(up_gbps=(0.05,))
    assert coded.inner_steps == 10
    assert both_ways(coded) < both_ways(question())
    assert (utilisation_found(coded).simulated or 0) >= 0.95
    assert 10 < told(up_gbps=(0.0015,)).inner_steps <= INNER_STEPS_ADVISED
    assert advised(question(up_gbps=(1e-5,))) is None
    few = {"codec_up": "int4:32", "codec_down": "int4:32"}
    assert both_ways(told(**few, up_gbps=(0.03,))) <= both_ways(question(**few)) * 1.00001, "never more bits"


def test_data_parallel_of_100t_parameters() -> None:
    """bf16 round a ring of 20 in the time of one step of 10 s: 304 Tbit/s.  Two thirds of a step lie beside the
    backward pass, so that a third more, which is three quarters of the time spent training, makes it a whole one."""
    asked = question(parameters=100e12, sites=20, step_s=10.0, layers=100)
    found = data_parallel_gbps(asked, 0.75)
    assert found.formula == pytest.approx(304_000)
    assert found.simulated == pytest.approx(304_000, rel=0.03)


def test_linear_in_both_only_at_a_single_syncer() -> None:
    asked = PRESETS["100t_20dc"]
    small, large = scaled(asked, (1e12, 100e12), (20,))
    assert (large.site, large.central, large.sharded) == pytest.approx(
        (100 * small.site, 100 * small.central, 100 * small.sharded), rel=1e-6
    )
    few, many = scaled(asked, (100e12,), (2, 200))
    assert few.site == many.site
    assert many.central == 100 * few.central
    assert all(each.sharded < 2 * each.site for each in (few, many))


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"parameters": 0}, "parameters is 0: positive and finite"),
        ({"step_s": 0.0}, "step_s is 0.0: above 0, or flops and tokens_per_step"),
        ({"sites": 0}, "sites is 0: at least 1"),
        ({"sites": 1001}, "sites is 1001: at most 1000"),
        ({"layers": 1001}, "layers is 1001: at most 1000"),
        ({"fragments": 11}, "fragments is 11: from 1 to inner_steps=10"),
        ({"overlap_steps": 10}, "overlap_steps is 10: below inner_steps=10"),
        ({"syncer": "everywhere"}, "syncer is 'everywhere': one of central, sharded, apart"),
        ({"syncer": "sharded"}, "fragments is 1: at least sites=2"),
        ({"up_gbps": (1.0, 2.0, 3.0)}, "one value, or one for each of 2 sites"),
        ({"down_gbps": (0.0,)}, "down_gbps is (0.0,): above 0"),
        ({"away_s": float("nan")}, "away_s is nan: not negative"),
        ({"parameters": 0.5}, "parameters is 0.5: at least fragments=1"),
        ({"step_s": 1e-300}, "step_s is 1e-300: the seconds of an inner step, from 1e-06 to 1e+06"),
        ({"interruptions_per_chip_year": 1e300}, "interruptions_per_chip_year is 1e+300: at most 10000"),
        ({"away_s": 1e300}, "away_s is 1e+300: at most 1e+08"),
        ({"merge_values_per_s": 1e-300}, "merge_values_per_s is 1e-300: at least 1"),
        ({"inner_steps": 5000, "fragments": 5000}, "fragments is 5000: at most 1000"),
    ],
)
def test_what_cannot_be_is_said(told: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        sizes(question(**told))
