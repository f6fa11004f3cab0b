"""A simulation that trains is what the same objects make of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diloco.config import build
from diloco.config import compose as configs
from diloco.config.errors import ConfigError
from diloco.config.schema import ClusterSite, RunConfig
from diloco.inner.data import CorpusManifest
from diloco.lab import experiment as labs
from diloco.lab.experiment import OWN
from diloco.lab.fleet import Told, fleet_of, tokens_per_step
from diloco.lab.training import Control, TrainedFleet, Warm, make_warm, run_cell
from diloco.sim.fleet import simulate
from diloco.sim.fleet_plan import FleetResult
from tests.lab.laboratories import SMALL, rows, written
from tests.sooner import sooner

STEP_TOKENS = 2 * 16


def configured(*settings: str) -> RunConfig:
    return configs.compose([*SMALL, *OWN, *settings])


@pytest.fixture(scope="module")
def text() -> CorpusManifest:
    return build.corpus(configured())


def trained(
    config: RunConfig, text: CorpusManifest, speeds: tuple[float, ...], warm: Warm | None = None
) -> tuple[TrainedFleet, FleetResult]:
    names = [f"site-{index:05d}" for index in range(len(speeds))]
    sites = {name: ClusterSite(slowdown=1 / speed) for name, speed in zip(names, speeds, strict=True)}
    there = replace(config, cluster=replace(config.cluster, sites=sites))
    plan = fleet_of(there, Told(step_s=1.0, seconds=10_000))
    fleet = TrainedFleet(config, names, text, warm, 4)
    return fleet, simulate(replace(plan, tokens_trained=config.run.tokens or 0), fleet)


@pytest.mark.parametrize(
    ("fragments", "inner_steps"),
    sooner([(1, 3), (2, 5), (4, 5)], (1, 3)),
)
def test_one_site_is_plain_training(fragments: int, inner_steps: int, text: CorpusManifest) -> None:
    """Invariant 1, to rounding: ``base - (base - x)`` is x only where the two are near each other."""
    plain = ("inner.optimizer=sgd", "inner.lr=0.1", "outer.kind=sgd", "outer.lr=1", "outer.momentum=0")
    parts = (f"outer.num_fragments={fragments}", f"outer.inner_steps={inner_steps}")
    config = configured("outer=merge", *plain, *parts, f"run.tokens={12 * STEP_TOKENS}")
    assert len(build.layout_of(config).fragments) == fragments
    assert tokens_per_step(config) == STEP_TOKENS
    fleet, result = trained(config, text, (1.0,))
    steps = result.sites[0].steps
    assert steps > 12, "the steps that are under way when the tokens are used up are made and sent"
    control = Control(config, 1)
    control.steps(steps)
    for name, values in control.state().values.items():
        torch.testing.assert_close(fleet.values()[name], values.cpu(), rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("lock_step", [False, True])
def test_at_equal_speed_one_and_its_grace_make_what_everybody_makes(lock_step: bool, text: CorpusManifest) -> None:
    """Invariant 20: the same sets are merged, so it is the same to the last bit; without grace they are not.

    Both are in lock-step or both are not: without it a site makes a step while a version comes, which DiLoCo's do not.
    """
    rounds, equal = 2, (1.0,) * 4
    ends = f"run.tokens={rounds * 3 * 4 * STEP_TOKENS}"
    everybody = ("outer=diloco", "inner.optimizer=sgd", "inner.lr=0.1", f"outer.lock_step={lock_step}", ends)
    one = (*everybody, "outer.quorum=1", "outer.grace=fixed")
    first, whole = trained(configured(*everybody), text, equal)
    again, graced = trained(configured(*one, "outer.grace_s=1"), text, equal)
    other, hasty = trained(configured(*one, "outer.grace_s=0"), text, equal)
    assert whole.versions == graced.versions == (rounds,)
    assert whole.sites_per_version == graced.sites_per_version == 4 > hasty.sites_per_version
    values = first.values()
    assert all(torch.equal(values[name], each) for name, each in again.values().items())
    assert not all(torch.allclose(values[name], each, atol=1e-5) for name, each in other.values().items())


@pytest.mark.slow
def test_a_warm_start_is_where_the_control_stood(text: CorpusManifest, tmp_path: Path) -> None:
    config = configured("outer=diloco", f"run.tokens={6 * STEP_TOKENS}")
    control = Control(config, 2)
    control.steps(4)
    path = tmp_path / "warm" / "one.safetensors"
    control.state().save(path)
    warm, stood = Warm.load(path), control.state()
    assert warm.step == 4
    for found, wanted in ((warm.values, stood.values), (warm.tensors, stood.tensors)):
        for name, values in wanted.items():
            assert torch.equal(found[name], values)
    short = replace(config, run=replace(config.run, tokens=STEP_TOKENS))
    began, cold = (trained(short, text, (1.0, 1.0), start)[0] for start in (warm, None))
    assert began.score() < cold.score()


# --- Cells of a laboratory --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_cell_is_trained_from_the_warm_start_of_its_seed(tmp_path: Path) -> None:
    lab = labs.read(written(tmp_path, rows("alone", "together")))
    both = {"alone": replace(lab.rows["alone"], control=True), "together": lab.rows["together"]}
    lab = replace(lab, rows=both, speeds=(1.0, 0.5), warm_steps=8)
    alone, together = labs.cells(lab, ("run.tokens=768",), (3,), ())
    assert alone.warm_digest == together.warm_digest
    make_warm(alone, tmp_path)
    (warm,) = (tmp_path / "warm").iterdir()
    before = warm.stat().st_mtime_ns
    make_warm(together, tmp_path)
    assert warm.stat().st_mtime_ns == before, "it is made once"
    whole = warm.read_bytes()
    warm.write_bytes(whole[:-1])
    make_warm(alone, tmp_path)
    assert warm.read_bytes() == whole, "a damaged one is made again"
    found = [run_cell(cell, tmp_path) for cell in (alone, together)]
    assert [each.row for each in found] == ["alone", "together"]
    assert found[0].tokens == 768
    assert 768 <= found[1].tokens < 768 + 4 * 32, "at most the steps that were under way more"
    assert found[1].versions > 3
    assert 0.9 < found[1].goodput <= 1
    assert found[1].seconds < found[0].seconds, "the control waits for its slowest part"
    assert all(each.loss < 5.6 for each in found)


def test_a_run_that_does_not_come_to_its_tokens_is_no_result(tmp_path: Path) -> None:
    lab = replace(labs.read(written(tmp_path, rows("a"))), speeds=(1.0,))
    (cell,) = labs.cells(lab, ("run.tokens=1536", "outer=diloco", "outer.inner_steps=3"), (0,), ())
    far = replace(cell, row=replace(cell.row, rtt_s=25.0))
    with pytest.raises(ConfigError, match=r"row a, seed 0: \d+ of 1536 tokens were trained in 192 s of virtual time"):
        run_cell(far, tmp_path)


@pytest.mark.slow
def test_trouble_costs_time_and_is_drawn_by_the_seed(tmp_path: Path) -> None:
    lab = replace(labs.read(written(tmp_path, rows("a"))), speeds=(1.0, 0.7))
    settings = ("run.tokens=1536", "outer=decoupled", "outer.num_fragments=2", "codec=int4")
    calm, other = labs.cells(lab, settings, (0, 1), ())
    row = replace(calm.row, jitter=0.3, interruptions_per_hour=360.0, away_s=5.0, lost_share=0.3)
    rough = [replace(cell, row=row) for cell in (calm, calm, other)]
    quiet, found, again, elsewise = (run_cell(cell, tmp_path) for cell in (calm, *rough))
    assert found.seconds > quiet.seconds
    assert found.goodput < quiet.goodput
    assert (found.loss, found.seconds, found.points) == (again.loss, again.seconds, again.points)
    assert found.loss != elsewise.loss
    sent = [point[2] for point in found.points]
    assert 0 < sent[0] < sent[-1]
