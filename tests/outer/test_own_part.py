"""A site's own part of the outer step, against the paper's rule in fp64 and by torch's own optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diloco.outer.optimizer import NOTHING, OuterOptimizerOptions, outer_step
from diloco.outer.pseudo_gradient import ADDITIVE, OwnPart

NUMEL = 257
NESTEROV = OuterOptimizerOptions(kind="nesterov", lr=0.7, momentum=0.9)


def drawn(seed: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def options_of(kind: str) -> OuterOptimizerOptions:
    return OuterOptimizerOptions(kind=kind, lr=0.7, momentum=0.0 if kind == "sgd" else 0.9)


def papers_replicas(d: Tensor, lr: float, momentum: float) -> list[Tensor]:
    """The replicas after each round, from updates d of shape (rounds, sites, numel), in fp64 and by torch.optim.SGD."""
    rounds, sites, numel = d.shape
    values = torch.zeros(sites, numel, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([values], lr=lr, momentum=momentum, nesterov=momentum > 0)
    found, before = [], torch.zeros(sites, numel, dtype=torch.float64)
    for now in d.double():
        values.grad = before.mean(0) + (now - before) / sites
        optimizer.step()
        found.append(values.detach().clone())
        before = now
    assert len(found) == rounds
    return found


@pytest.mark.parametrize("sites", [2, 3, 4])
@pytest.mark.parametrize("kind", ["sgd", "nesterov"])
def test_ten_rounds_are_the_papers_within_1e_6(kind: str, sites: int) -> None:
    options = options_of(kind)
    d = torch.stack([torch.stack([drawn(100 * number + site) for site in range(sites)]) for number in range(10)]) * 0.01
    wanted = papers_replicas(d, options.lr, options.momentum)
    own = [OwnPart(options) for _ in range(sites)]
    version, state = torch.zeros(NUMEL), NOTHING
    for number, updates in enumerate(d):
        for site in range(sites):
            found = own[site].ahead(version, [updates[site]], sites)
            assert (found - wanted[number][site]).abs().max().item() < 1e-6, (number, site)
        version, state = outer_step(version, updates.mean(0), state, options)
        for site in range(sites):
            own[site].merged([updates[site]], 1, sites)


def test_the_share_of_the_first_update_is_lr_1_plus_momentum_over_the_sites() -> None:
    ahead = OwnPart(NESTEROV).ahead(torch.zeros(NUMEL), [torch.ones(NUMEL)], 3)
    assert torch.allclose(ahead, torch.full((NUMEL,), -0.7 * 1.9 / 3))
    assert round(-ahead[0].item(), 4) == 0.4433


@pytest.mark.parametrize("kind", ADDITIVE)
def test_of_a_single_site_it_is_the_version_that_comes(kind: str) -> None:
    """However many updates there are for a step: one each, two in one, and none."""
    options, one, other = options_of(kind), drawn(1), drawn(2)
    own, version, state = OwnPart(options), drawn(0), NOTHING
    for means, updates in (([one, other], [one, other]), ([one + other], [one, other]), ([0 * one, one], [one])):
        assert torch.equal(own.ahead(version, [one], 1), outer_step(version, one, state, options)[0])
        for mean in means:
            version, state = outer_step(version, mean, state, options)
        own.merged(updates, len(means), 1)
    assert (own.momentum is None) == (kind == "sgd")
    assert torch.allclose(own.ahead(version, [one], 1), outer_step(version, one, state, options)[0], rtol=0, atol=1e-6)


def test_nothing_is_ahead_of_a_version_that_has_all_or_that_is_of_nobody_knows_how_many() -> None:
    own, version = OwnPart(NESTEROV), drawn(0)
    assert torch.equal(own.ahead(version, [], 3), version)
    assert own.ahead(version, [], 3) is not version
    own.merged([drawn(1)], 1, 0)
    assert own.momentum is None
    assert torch.equal(own.ahead(version, [drawn(1)], 0), version)


def test_a_checkpoint_holds_the_momentum() -> None:
    own, again = OwnPart(NESTEROV), OwnPart(NESTEROV)
    own.merged([drawn(1), drawn(2)], 4, 3)
    momentum = own.momentum
    assert momentum is not None
    again.restore(momentum.clone())
    found, wanted = (each.ahead(drawn(0), [drawn(3)], 3) for each in (again, own))
    assert torch.equal(found, wanted)
    own.forget()
    assert own.momentum is None
    assert not torch.equal(own.ahead(drawn(0), [drawn(3)], 3), wanted)


def test_over_rounds_that_hold_nothing_of_the_site_its_momentum_fades_as_the_syncers_does() -> None:
    first, version, state = drawn(1), torch.zeros(NUMEL), NOTHING
    own = OwnPart(NESTEROV)
    for update in (first, torch.zeros(NUMEL), torch.zeros(NUMEL), torch.zeros(NUMEL)):
        version, state = outer_step(version, update / 3, state, NESTEROV)
    own.merged([first], 1, 3)
    own.merged([], 3, 3)
    assert own.momentum is not None
    assert torch.allclose(own.momentum, state.tensors["momentum"], rtol=1e-5)
