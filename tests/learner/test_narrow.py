"""Sites whose parameters are narrower than fp32: what a write rounds off is no progress, under every rule."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from diloco.learner.tensors import SiteTensors
from diloco.outer.fragments import plan_layout
from diloco.outer.optimizer import NOTHING, OuterOptimizerOptions, outer_step
from tests.learner.participant import held

NUMEL, ULP = 300, 2.0**-7
"""Of bf16 between 1 and 2."""
LAYOUT = plan_layout([("a", (100,)), ("b", (NUMEL - 100,))], 1)
EAGER = OuterOptimizerOptions(kind="sgd", lr=0.5, momentum=0.0)
RULES: dict[str, dict[str, object]] = {
    "rebase": {"adopt": "rebase", "adopt_alpha": 0.5},
    "overwrite": {"adopt": "overwrite", "adopt_alpha": 0.5},
    "blend": {"adopt": "blend", "adopt_alpha": 0.5},
    "blend, published": {"adopt": "blend", "adopt_alpha": 0.5, "measure_from": "published"},
    "eager": {"adopt": "eager", "adopt_alpha": 0.25},
    "eager, by the outer step": {"adopt": "eager", "adopt_alpha": 0.0, "ahead": EAGER},
}


class Sites:
    """Two, in lock-step; outer SGD of rate .5.  ``train`` is given the site, its parameters and the round."""

    def __init__(self, rule: str, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.theta = 1 + torch.rand(NUMEL, generator=generator)
        self.parameters = [
            {name: torch.zeros(shape, dtype=dtype) for name, shape in LAYOUT.parameters} for _ in range(2)
        ]
        self.sites = [SiteTensors(LAYOUT, held(each), **RULES[rule]) for each in self.parameters]  # type: ignore[arg-type]
        self.state = NOTHING
        for site in self.sites:
            site.arrived(0, 0, self.theta, "")
            site.retake(0, 0, [])

    def run(self, rounds: int, train: Callable[[int, dict[str, Tensor]], None]) -> Tensor:
        for number in range(1, rounds + 1):
            updates = []
            for index, site in enumerate(self.sites):
                train(index, self.parameters[index])
                updates.append(site.measure(0, []).pseudo_gradient())
                site.sealed(0, number, updates[-1], None)
            mean = (updates[0] + updates[1]) / 2
            self.theta, self.state = outer_step(self.theta, mean, self.state, EAGER)
            for site in self.sites:
                site.arrived(0, number, self.theta, "", 2)
                site.adopt(0, number, [number], fresh=[number])
        return self.theta


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", RULES)
def test_where_nothing_is_trained_nothing_moves(rule: str, dtype: torch.dtype) -> None:
    sites = Sites(rule, dtype)
    began = sites.theta
    assert not torch.equal(began, began.to(dtype).float())
    moved = sites.run(4, lambda site, parameters: None) - began
    # What is left is the rounding of fp32 itself.
    assert moved.abs().max().item() <= 2.0**-22
    assert torch.equal(sites.sites[0].local(0), sites.theta.to(dtype).float())


@pytest.mark.parametrize("rule", RULES)
def test_an_ulp_a_round_at_one_site_moves_the_version_as_it_would_in_fp32(rule: str) -> None:
    """Twenty rounds of an ulp at one of two sites and a rate of .5 are five ulp, wherever a value lies on the grid.

    What a blend left of the site's own way is sent again where it is measured from the version.
    """

    def train(site: int, parameters: dict[str, Tensor]) -> None:
        if site == 0:
            for values in parameters.values():
                values += ULP

    found = []
    for dtype in (torch.float32, torch.bfloat16):
        sites = Sites(rule, dtype)
        sites.theta.mul_(0.4).add_(0.6)  # From 1 to 1.4, so that none leaves the range of this ulp.
        for site in sites.sites:
            site.retake(0, 0, [])
        began = sites.theta.clone()
        found.append((sites.run(20, train) - began) / ULP)
    assert torch.allclose(found[0], found[1], rtol=0, atol=1e-3)
    assert (found[1].mean().item() == pytest.approx(5.0, abs=1e-3)) == (rule != "blend, published")


def test_a_checkpoint_holds_what_was_written_and_an_fp32_model_has_nothing_more_in_it() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        sites = Sites("rebase", dtype)
        site = sites.sites[0]
        assert ("reference.0" in site.tensors()) == (dtype == torch.bfloat16)
        again = SiteTensors(LAYOUT, held(sites.parameters[0]), "rebase", 0.5)
        again.restore(site.tensors(), [0])
        assert not again.measure(0, []).pseudo_gradient().any()
