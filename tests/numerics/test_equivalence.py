"""Invariants of the mathematics, by their numbers, as far as the floors below the network can show them.

1 one site is plain training; 2 one inner step is data parallel; 5 equal in, equal out; 6 no weight, no influence;
7 neither order nor threads; 8 the partition; 12 codecs and what they round off.
"""

from __future__ import annotations

import random
from itertools import permutations, product
from math import prod

import pytest
import torch
from torch import Tensor

from diloco.codec.registry import make_codec
from diloco.outer.fragments import plan_layout
from diloco.outer.merge import merge_mean
from diloco.outer.optimizer import NOTHING, OuterOptimizerOptions, outer_step
from diloco.outer.pseudo_gradient import pseudo_gradient, rebase
from diloco.outer.reference import reference_diloco
from diloco.sync import effects as fx
from tests.codec.values import error_bound, same
from tests.sync.driving import Syncer, of

PLAIN_OUTER = OuterOptimizerOptions(kind="sgd", lr=1.0, momentum=0.0)
CODECS = ["fp32", "bf16", "int8", "int4", "int4:32+zstd1", "e3m0"]
ROUGH = ["int2", "sign:32", "topk", "topk:256x64+zstd1"]
"""What they make of x may be far from it, or something else than 0 where x is 0."""


class PlainTraining:
    """A small nonlinear regression on one flat parameter: AdamW or SGD, a new batch from the seed at each step."""

    def __init__(self, theta: Tensor, seed: int, inner: str = "adamw", lr: float = 1e-3) -> None:
        self.parameter = torch.nn.Parameter(theta.clone())
        self.seed = seed
        self.steps = 0
        self.optimizer = (torch.optim.AdamW if inner == "adamw" else torch.optim.SGD)([self.parameter], lr=lr)

    @property
    def theta(self) -> Tensor:
        return self.parameter.detach().clone()

    def gradient(self) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + self.steps)
        x, y = torch.randn(2, 8, self.parameter.numel(), generator=generator)
        loss = (torch.tanh(x * self.parameter) - y).square().mean()
        (gradient,) = torch.autograd.grad(loss, self.parameter)
        return gradient

    def train(self, inner_steps: int) -> None:
        for _ in range(inner_steps):
            self.parameter.grad = self.gradient()
            self.optimizer.step()
            self.steps += 1

    def adopt(self, theta: Tensor) -> None:
        with torch.no_grad():
            self.parameter.copy_(theta)

    def one_step(self, local: Tensor, round_index: int) -> Tensor:
        self.adopt(local)
        self.train(1)
        return self.theta


def wide(seed: int, numel: int) -> Tensor:
    """Both signs, zeros of both signs, subnormals, and magnitudes from 2**-149 to 2**120."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-149, 121, (numel,), generator=generator).double()
    values = (torch.randn(numel, generator=generator).clamp(-4, 4) * torch.exp2(exponents)).float()
    values[::11], values[::13] = 0.0, -0.0
    return values


def ulp(values: Tensor) -> Tensor:
    """The distance from |value| to the next fp32 above, in double."""
    magnitudes = values.abs()
    return torch.nextafter(magnitudes, torch.tensor(float("inf"))).double() - magnitudes.double()


def test_invariant_01_one_site_is_plain_training_also_while_its_update_travels() -> None:
    """Bit for bit on values in [1, 2): base - local and base - (base - local) are then exact (Sterbenz's lemma)."""
    theta0 = 1.25 + 0.5 * torch.rand(257, generator=torch.Generator().manual_seed(2))
    plain, site = PlainTraining(theta0, seed=2), PlainTraining(theta0, seed=2)
    base = theta0
    for _ in range(6):
        site.train(4)
        sent = pseudo_gradient(base, site.theta, [])
        site.train(3)
        version, _ = outer_step(base, merge_mean([(7.0, [sent])]), NOTHING, PLAIN_OUTER)
        site.adopt(rebase(site.theta, base, version, [sent]))
        base = version
        plain.train(7)
        assert bool(((plain.theta >= 1) & (plain.theta < 2)).all())
        assert same(site.theta, plain.theta)


def test_invariant_01_two_ulp_of_the_larger_at_each_adopt_at_any_distance() -> None:
    """Elsewhere one adopt moves a value by at most 2 ulp of the larger of base and local.

    base - local rounds once, by at most one such ulp (half an ulp of a number at most twice as large), and the outer
    step's subtraction once more, by at most one.
    """
    for seed in range(50):
        base, local = wide(seed, 5000), wide(seed + 1000, 5000)
        if seed % 2:  # neighbours rather than strangers
            local = base * (1 + torch.randn(5000, generator=torch.Generator().manual_seed(seed)))
        sent = pseudo_gradient(base, local, [])
        version, _ = outer_step(base, merge_mean([(3.0, [sent])]), NOTHING, PLAIN_OUTER)
        adopted = rebase(local, base, version, [sent])
        assert same(adopted, version), f"seed {seed}"
        off = (adopted.double() - local.double()).abs() / ulp(torch.maximum(base.abs(), local.abs()))
        assert float(off.max()) <= 2, f"seed {seed}: {float(off.max())} ulp"


def test_invariant_02_one_inner_step_is_data_parallel_sgd() -> None:
    """To fp32 rounding, for 2 to 5 sites over 10 rounds of a nonlinear model."""
    for num_sites in range(2, 6):
        theta0 = torch.randn(200, generator=torch.Generator().manual_seed(num_sites))
        sites = [PlainTraining(theta0, seed=i, inner="sgd", lr=0.3) for i in range(num_sites)]
        versions = reference_diloco(theta0, [site.one_step for site in sites], [2.5] * num_sites, 10, PLAIN_OUTER)
        replicas = [PlainTraining(theta0, seed=i) for i in range(num_sites)]
        theta = theta0.double()
        for round_index in range(10):
            for replica in replicas:
                replica.adopt(theta.float())
            gradient = torch.stack([replica.gradient() for replica in replicas]).double().mean(dim=0)
            theta = theta - 0.3 * gradient
            for replica in replicas:
                replica.steps += 1
            error = (versions[round_index + 1].double() - theta).norm() / theta.norm()
            assert float(error) <= 1e-6, f"{num_sites} sites, round {round_index}: {float(error)}"


def test_invariant_05_equal_pseudo_gradients_come_back_bit_for_bit() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        d = wide(seed, 2000)
        weights = [
            rng.choice([rng.random(), rng.random() * 1e30, rng.random() * 1e-30]) for _ in range(rng.randint(1, 9))
        ]
        assert same(merge_mean([(w, [d.clone()]) for w in weights]), d), f"seed {seed}, weights {weights}"
        parts = [d / 3, wide(seed + 500, 2000), d]
        together = (parts[0] + parts[1]) + parts[2]
        merged = merge_mean([(w, [part.clone() for part in parts]) for w in weights])
        assert same(merged, together), f"seed {seed}, weights {weights}"


def test_invariant_06_a_site_of_weight_0_or_absent_has_no_influence_not_even_by_nan() -> None:
    deltas = [torch.randn(999, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    alone = merge_mean([(float(i + 1), [d]) for i, d in enumerate(deltas)])
    bad = torch.full((999,), float("nan"))
    for place in range(4):
        for nobody in ((0.0, [bad]), (0.0, [bad, bad]), (-0.0, [bad]), (5.0, [])):
            contributions: list[tuple[float, list[Tensor]]] = [(float(i + 1), [d]) for i, d in enumerate(deltas)]
            contributions.insert(place, nobody)
            assert same(merge_mean(contributions), alone), f"{nobody[0]} at {place}"


def test_invariant_07_the_merge_does_not_depend_on_the_order_of_arrival() -> None:
    deltas = {f"site-{i}": torch.randn(5000, generator=torch.Generator().manual_seed(i)) for i in range(4)}
    tokens = {site: 100 + 37 * i for i, site in enumerate(deltas)}

    def step_of(order: tuple[str, ...]) -> fx.StartOuterStep:
        syncer = Syncer(weights="tokens", quorum=len(order))
        for site in order:
            syncer.join(site)
        answers = [syncer.push(site, tokens=tokens[site]) for site in order]
        (step,) = of(fx.StartOuterStep, answers[-1])
        return step

    def merged(parts: list[fx.Contribution]) -> Tensor:
        return merge_mean([(part.weight, [deltas[part.site]]) for part in parts])

    steps = [step_of(order) for order in permutations(deltas)]
    assert all(step == steps[0] for step in steps)
    # Were the merge to run in order of arrival, the bits would tell.
    parts = list(steps[0].contributions)
    assert any(not same(merged(list(order)), merged(parts)) for order in permutations(parts))


def test_invariant_07_nor_on_threads_nor_on_chunks() -> None:
    numel = 300_007
    deltas = [torch.randn(numel, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    contributions = [(1.0 + 0.3 * i, [d, 0.1 * d] if i % 2 else [d]) for i, d in enumerate(deltas)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = merge_mean(contributions)
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert same(merge_mean(contributions), expected), f"{threads} threads"
    finally:
        torch.set_num_threads(before)
    for chunk in (1000, 65_537):
        parts = [
            merge_mean([(w, [u[start : start + chunk] for u in updates]) for w, updates in contributions])
            for start in range(0, numel, chunk)
        ]
        assert same(torch.cat(parts), expected), f"chunks of {chunk}"


def test_invariant_08_every_value_is_in_exactly_one_fragment_in_whatever_order_the_names_come() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        shapes = [tuple(rng.randint(1, 9) for _ in range(rng.randint(0, 3))) for _ in range(rng.randint(1, 30))]
        parameters, count = [(f"layer{i}.w", shape) for i, shape in enumerate(shapes)], rng.randint(1, len(shapes))
        layout = plan_layout(parameters, count)
        marks = {name: torch.zeros(prod(shape), dtype=torch.int64) for name, shape in parameters}
        for fragment in layout.fragments:
            for piece in fragment.pieces:
                marks[piece.name][piece.start : piece.stop] += 1
            assert fragment.numel == sum(piece.stop - piece.start for piece in fragment.pieces)
        assert all(bool((mark == 1).all()) for mark in marks.values()), f"seed {seed}"
        assert layout.numel == sum(prod(shape) for _, shape in parameters), f"seed {seed}"
        assert plan_layout(rng.sample(parameters, len(parameters)), count) == layout, f"seed {seed}, in another order"


def test_invariant_08_the_largest_fragment_is_at_most_four_thirds_of_the_best() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        sizes = [rng.randint(1, 40) for _ in range(rng.randint(3, 8))]
        bins = rng.randint(2, 3)
        best = min(
            max(sum(s for s, b in zip(sizes, deal, strict=True) if b == i) for i in range(bins))
            for deal in product(range(bins), repeat=len(sizes))
        )
        layout = plan_layout([(f"p{i}", (size,)) for i, size in enumerate(sizes)], bins)
        largest = max(fragment.numel for fragment in layout.fragments)
        assert 3 * largest <= 4 * best, f"seed {seed}: sizes {sizes} into {bins}: {largest}, best {best}"


# The literal pins the format: another value means that old snapshots and old learners no longer match.
FINGERPRINT = "839e78d3eec1e1e7c6367b315abbeedbc55fccba97f8f8ab8f9ee3d5570989d0"


def test_invariant_08_the_fingerprint_is_the_same_under_any_hash_seed() -> None:
    """Python draws one for this process, another in each run of the tests."""
    assert plan_layout([(f"p{i}", (i % 5 + 1, 3)) for i in range(12)], 3).fingerprint == FINGERPRINT


@pytest.mark.parametrize("name", CODECS + ROUGH)
def test_invariant_12_zero_is_zero_and_residual_and_sent_are_what_was_to_be_sent(name: str) -> None:
    """Exactly: what a codec makes of x is within a factor of two of it, or 0, so that x - sent has no rounding.

    Of a rough codec x - sent may round once.  r under rebase is that residual, and it goes out with the next update.
    """
    codec = make_codec(name)
    for zero in (0.0, -0.0):
        assert bool((codec.decode(codec.encode(torch.full((1001,), zero)), 1001) == 0).all())
    for seed in range(30):
        base = wide(seed, 3001)
        local = wide(seed + 77, 3001) if seed % 2 else base * 0.99
        to_send = pseudo_gradient(base, local, [])
        sent = codec.decode(codec.encode(to_send), 3001)
        residual = pseudo_gradient(base, local, [sent])
        lost = (residual.double() + sent.double() - to_send.double()).abs()
        rounding = 2.0**-24 * residual.double().abs() if name in ROUGH else torch.zeros(3001, dtype=torch.float64)
        assert bool((lost <= rounding).all()), f"{name}, seed {seed}"
        assert bool((residual.abs() <= error_bound(codec, to_send)).all()), f"{name}, seed {seed}"
        nowhere = torch.zeros(3001)
        adopted = rebase(local, base, nowhere, [sent])
        assert torch.equal(pseudo_gradient(nowhere, adopted, []), residual), f"{name}, seed {seed}"


@pytest.mark.parametrize("name", CODECS + ROUGH)
def test_invariant_17_progress_is_conserved_whatever_the_codec_rounds_off(name: str) -> None:
    """Rebase, outer lr 1, no momentum, one update a round: the versions and what the sites still hold add up to all
    progress ever made, under delays and refusals."""
    codec, numel = make_codec(name), 1500
    for seed in range(3):
        dice, draw = random.Random(seed), torch.Generator().manual_seed(seed)
        theta = torch.randn(numel, generator=draw)
        progress = theta.double()
        base, local = [theta] * 3, [theta.clone() for _ in range(3)]
        in_flight: list[list[torch.Tensor]] = [[], [], []]
        for _ in range(60):
            site = dice.randrange(3)
            step = torch.randn(numel, generator=draw) * 0.01
            local[site], progress = local[site] + step, progress + step.double()
            if len(in_flight[site]) < 2 and dice.random() < 0.6:
                measured = pseudo_gradient(base[site], local[site], in_flight[site])
                in_flight[site].append(codec.decode(codec.encode(measured), numel))
            if in_flight[site] and dice.random() < 0.3:
                in_flight[site].pop(dice.randrange(len(in_flight[site])))  # Refused, keep: it goes out again.
            if in_flight[site] and dice.random() < 0.6:
                merged = in_flight[site].pop(0)
                theta = theta - merged
                local[site], base[site] = rebase(local[site], base[site], theta, [merged]), theta
        held = theta.double() - sum(base[i].double() - local[i].double() for i in range(3))
        assert (held - progress).abs().max() < 1e-5, f"{name}, seed {seed}"
