"""What a site has learned and not yet sent, how it takes a version, and its own part of the outer step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diloco.outer.optimizer import NOTHING, OuterOptimizerOptions, OuterState, outer_step
from diloco.outer.pseudo_gradient import ADDITIVE, ahead, blend, eager, is_finite, own_part, pseudo_gradient, rebase


def test_is_finite() -> None:
    assert is_finite(torch.zeros(0))
    assert is_finite(torch.full((1000,), torch.finfo(torch.float32).max))  # whose sum is not finite
    for bad in (float("nan"), float("inf"), float("-inf")):
        for at in (0, 17, 999):
            values = torch.zeros(1000)
            values[at] = bad
            assert not is_finite(values), f"{bad} at {at}"


# --- Taking a version into a site ------------------------------------------------------------------------------------


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32)


def wide(seed: int, numel: int = 20_000) -> torch.Tensor:
    """Values of many magnitudes and both signs, zeros of both signs among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * torch.exp2(
        torch.randint(-40, 30, (numel,), generator=generator).float()
    )
    values[::17] = 0.0
    values[::19] = -0.0
    return values


def test_nothing_trained_since_its_updates_gives_the_version_bit_for_bit() -> None:
    for seed in range(20):
        old_base, middle, local, new_base = wide(seed), wide(seed + 100), wide(seed + 200), wide(seed + 300)
        first = pseudo_gradient(old_base, middle, [])
        assert torch.equal(bits(rebase(middle, old_base, new_base, [first])), bits(new_base)), f"seed {seed}"
        second = pseudo_gradient(old_base, local, [first])
        adopted = rebase(local, old_base, new_base, [first, second])
        assert torch.equal(bits(adopted), bits(new_base)), f"seed {seed}"


def test_updates_are_taken_off_in_sequence_order() -> None:
    zero, one, small = torch.zeros(1), torch.tensor([1.0]), torch.tensor([2.0**-24])
    # 2**-24 is lost beside 1 and not beside what is left after the 1 has gone: the order can be seen in the bits.
    assert pseudo_gradient(one, zero, [one, -small]).item() == 2.0**-24
    assert pseudo_gradient(one, zero, [-small, one]).item() == 0.0
    assert rebase(-one, zero, zero, [one, small]).item() == 2.0**-24
    assert rebase(-one, zero, zero, [small / 2, one]).item() == 0.0


def test_the_arguments_stay_as_they_are() -> None:
    arguments = [torch.full((4,), float(i)) for i in range(4)]
    for result in (
        rebase(arguments[0], arguments[1], arguments[2], [arguments[3]]),
        blend(arguments[0], arguments[2], 0.5),
        blend(arguments[0], arguments[2], 0.0),
        blend(arguments[0], arguments[2], 1.0),
    ):
        result.fill_(99.0)
    assert [a.tolist() for a in arguments] == [[float(i)] * 4 for i in range(4)]


def test_blend_ends_and_middle() -> None:
    local, new_base = wide(2), wide(3)
    assert torch.equal(bits(blend(local, new_base, 0.0)), bits(new_base))
    assert torch.equal(bits(blend(local, new_base, 1.0)), bits(local))
    assert torch.equal(bits(blend(local, local, 0.3)), bits(local))
    middle = blend(torch.tensor([4.0]), torch.tensor([8.0]), 0.25)
    assert middle.tolist() == [7.0]


def test_eager_with_a_share_of_1_is_rebase_to_rounding_and_with_0_it_waits_for_the_version() -> None:
    generator = torch.Generator().manual_seed(4)
    old_base, local, new_base, merged, waiting = (torch.randn(999, generator=generator) for _ in range(5))
    unsent = pseudo_gradient(old_base, local, [merged, waiting])
    whole, _ = eager(new_base, unsent, [waiting], 1.0)
    assert torch.allclose(whole, rebase(local, old_base, new_base, [merged]), rtol=0, atol=1e-5)
    none, reference = eager(new_base, unsent, [waiting], 0.0)
    assert torch.equal(none, new_base - unsent)
    assert torch.equal(reference, new_base)


# --- A site's own part of the outer step, against the paper's rule in fp64 and by torch's own optimizer ---------------

NUMEL = 257
SGD = OuterOptimizerOptions(kind="sgd", lr=0.7, momentum=0.0)
NESTEROV = OuterOptimizerOptions(kind="nesterov", lr=0.7, momentum=0.9)


def drawn(seed: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def papers_replicas(d: Tensor, options: OuterOptimizerOptions) -> list[Tensor]:
    """The replicas after each round, from updates d of shape (rounds, sites, numel), in fp64 and by torch.optim.SGD."""
    values = torch.zeros(d.shape[1:], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([values], options.lr, options.momentum, nesterov=options.momentum > 0)
    found, before = [], torch.zeros_like(values)
    for now in d.double():
        values.grad = before.mean(0) + (now - before) / d.shape[1]
        optimizer.step()
        found.append(values.detach().clone())
        before = now
    return found


@pytest.mark.parametrize(("options", "sites"), [(SGD, 2), (NESTEROV, 2), (NESTEROV, 3)])
def test_ten_rounds_are_the_papers_within_1e_6(options: OuterOptimizerOptions, sites: int) -> None:
    """At each site the version is ahead by its own part; of a plain outer step that is what ``eager`` adds."""
    d = torch.stack([torch.stack([drawn(100 * number + site) for site in range(sites)]) for number in range(10)]) * 0.01
    own = [NOTHING] * sites
    version, state = torch.zeros(NUMEL), NOTHING
    for updates, wanted in zip(d, papers_replicas(d, options), strict=True):
        for site in range(sites):
            found = [ahead(version, [updates[site]], sites, own[site], options)]
            if options is SGD:
                found.append(eager(version, torch.zeros(NUMEL), [updates[site]], options.lr / sites)[0])
            assert all((each - wanted[site]).abs().max().item() < 1e-6 for each in found)
        version, state = outer_step(version, updates.mean(0), state, options)
        for site in range(sites):
            own[site] = own_part(own[site], [updates[site]], 1, sites, options)


@pytest.mark.parametrize("kind", ADDITIVE)
def test_of_a_single_site_it_is_the_version_that_comes(kind: str) -> None:
    """However many updates there are for a step: one each, two in one, and none."""
    options = OuterOptimizerOptions(kind=kind, lr=0.7, momentum=0.0 if kind == "sgd" else 0.9)
    one, other = drawn(1), drawn(2)
    own, version, state = NOTHING, drawn(0), NOTHING
    for means, updates in (([one, other], [one, other]), ([one + other], [one, other]), ([0 * one, one], [one])):
        assert torch.equal(ahead(version, [one], 1, own, options), outer_step(version, one, state, options)[0])
        for mean in means:
            version, state = outer_step(version, mean, state, options)
        own = own_part(own, updates, len(means), 1, options)
    assert (own.momentum is None) == (kind == "sgd")
    wanted, _ = outer_step(version, one, state, options)
    assert torch.allclose(ahead(version, [one], 1, own, options), wanted, rtol=0, atol=1e-6)


def test_nothing_is_ahead_of_a_version_that_has_all_or_that_is_of_nobody_knows_how_many() -> None:
    version = drawn(0)
    assert own_part(NOTHING, [drawn(1)], 1, 0, NESTEROV) is NOTHING
    for under_way, sites in (([], 3), ([drawn(1)], 0)):
        found = ahead(version, under_way, sites, NOTHING, NESTEROV)
        assert torch.equal(found, version)
        assert found is not version


def test_a_checkpoint_holds_the_momentum_alone() -> None:
    own = own_part(NOTHING, [drawn(1), drawn(2)], 4, 3, NESTEROV)
    assert own.momentum is not None
    again = OuterState(1, {"momentum": own.momentum.clone()})
    found, wanted, without = (ahead(drawn(0), [drawn(3)], 3, each, NESTEROV) for each in (again, own, NOTHING))
    assert torch.equal(found, wanted)
    assert not torch.equal(without, wanted)


def test_over_rounds_that_hold_nothing_of_the_site_its_momentum_fades_as_the_syncers_does() -> None:
    first, version, state = drawn(1), torch.zeros(NUMEL), NOTHING
    for update in (first, torch.zeros(NUMEL), torch.zeros(NUMEL), torch.zeros(NUMEL)):
        version, state = outer_step(version, update / 3, state, NESTEROV)
    own = own_part(own_part(NOTHING, [first], 1, 3, NESTEROV), [], 3, 3, NESTEROV)
    assert own.momentum is not None
    assert torch.allclose(own.momentum, state.tensors["momentum"], rtol=1e-5)
