"""The outer step: the definition applied to what lies in the spool, or nothing at all."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from math import log
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diloco.codec import merging
from diloco.codec.base import Buffers, bytes_of, digest, digest_of
from diloco.codec.merging import sum_of_products
from diloco.codec.registry import make_codec
from diloco.codec.site_pass import follow
from diloco.outer.fragments import plan_layout
from diloco.outer.merge import MEAN, Correction, Gate, MergeOptions, Segment, corrected, merge_mean
from diloco.outer.optimizer import NOTHING, OuterOptimizerOptions, OuterRule, OuterState, outer_rule, outer_step
from diloco.sync.effects import Contribution, StartOuterStep, UpdateRef
from diloco.syncer.outer_step import OuterResult, run_outer_step
from diloco.syncer.snapshots import FragmentValues
from diloco.syncer.spool import Spool, SpoolError
from tests.sync.driving import only, running
from tests.syncer.building import LAYOUT, dice, update

NESTEROV = OuterOptimizerOptions()
SGD = OuterOptimizerOptions(kind="sgd", lr=1.0, momentum=0.0)


def stored(spool: Spool, site: str, sequence: int, values: Tensor, encoding: str = "fp32") -> UpdateRef:
    header, payload = update(site, sequence, values=values, encoding=encoding)
    partial = spool.open_partial(header)
    partial.write(memoryview(payload))
    partial.digest()
    reference = spool.keep(partial)
    partial.close()
    return UpdateRef(sequence, reference, encoding, header.digest)


def step(
    spool: Spool, parts: list[Contribution], values: FragmentValues, codec: str, optimizer: OuterOptimizerOptions
) -> OuterResult | None:
    return run_outer_step(
        StartOuterStep(0, values.version + 1, tuple(parts)), values, spool, OuterRule(optimizer), codec
    )


def holding(theta: Tensor, published: Tensor | None = None, momentum: Tensor | None = None) -> FragmentValues:
    published = theta.clone() if published is None else published
    remembered = NOTHING if momentum is None else OuterState(4, {"momentum": momentum})
    return FragmentValues(4, theta, published, remembered, digest(published))


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int4:32+zstd1"])
def test_it_is_the_definition_bit_for_bit(tmp_path: Path, codec: str) -> None:
    spool, d = Spool(tmp_path), [dice(("d", n), 0) for n in range(3)]
    parts = [
        Contribution("a", 0.25, 3, (stored(spool, "a", 1, d[0]), stored(spool, "a", 2, d[1], "int8"))),
        Contribution("b", 0.75, 4, (stored(spool, "b", 7, d[2]),)),
    ]
    old = holding(dice("theta", 0), dice("published", 0), dice("momentum", 0))
    result = step(spool, parts, old, codec, NESTEROV)
    second = make_codec("int8").decode(make_codec("int8").encode(d[1]), d[1].numel())
    merged = merge_mean([(0.25, [d[0], second]), (0.75, [d[2]])])
    theta, following = outer_step(old.theta, merged, old.optimizer, NESTEROV)
    assert isinstance(result, OuterResult)
    assert torch.equal(result.values.theta, theta)
    assert result.values.optimizer.steps == following.steps == 5
    assert torch.equal(result.values.optimizer.tensors["momentum"], following.tensors["momentum"])
    assert torch.equal(result.values.published, follow(old.published, result.downlink, make_codec(codec)))
    assert result.values.version == 5
    assert result.values.digest == digest(result.values.published)
    assert result.downlink_digest == digest_of(result.downlink)


@pytest.mark.parametrize(("base_version", "left"), [(4, 1.0), (3, 0.5), (2, 0.25)])
def test_a_gate_makes_an_update_smaller_by_the_versions_that_it_did_not_know(
    tmp_path: Path, base_version: int, left: float
) -> None:
    theta, d = dice("theta", 0), dice("d", 0)
    part = Contribution("a", 1.0, base_version, (stored(Spool(tmp_path), "a", 1, d),))
    rule = OuterRule(SGD, ((Segment(0, d.numel(), MEAN),),), Gate(alpha=log(2)))
    result = run_outer_step(StartOuterStep(0, 5, (part,)), holding(theta), Spool(tmp_path), rule, "fp32")
    assert isinstance(result, OuterResult)
    torch.testing.assert_close(result.values.theta, theta - left * d, rtol=0, atol=1e-6)


@pytest.mark.parametrize("codec", ["fp32", "int4:32", "int8+zstd"])
def test_invariant_7_neither_ranges_nor_threads_change_a_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    spool, rng = Spool(tmp_path), torch.Generator().manual_seed(3)
    d = [torch.randn(9001, generator=rng) for _ in range(3)]
    parts = (
        Contribution("a", 0.3, 4, (stored(spool, "a", 1, d[0], "int4:64"), stored(spool, "a", 2, d[1], "bf16"))),
        Contribution("b", 0.7, 4, (stored(spool, "b", 1, d[2], "int8+zstd"),)),
    )
    old = holding(torch.randn(9001, generator=rng), torch.randn(9001, generator=rng), torch.randn(9001, generator=rng))
    found = []
    for values, threads in ((1024, 1), (2048, 3), (1 << 17, 1), (1 << 17, 4)):
        monkeypatch.setattr(merging, "RANGE_VALUES", values)
        result = run_outer_step(StartOuterStep(0, 5, parts), old, spool, OuterRule(NESTEROV), codec, threads=threads)
        assert isinstance(result, OuterResult)
        momentum = result.values.optimizer.tensors["momentum"]
        bits = [bytes_of(each) for each in (result.values.theta, result.values.published, momentum)]
        found.append((bits, bytes(result.downlink), result.values.digest, result.downlink_digest, result.norm))
    assert all(each == found[0] for each in found)


def test_invariant_7_a_rule_s_gate_and_correction_are_those_of_the_whole_on_any_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tensor of two goes against the momentum; a site's update is two versions old, and half of it is left."""
    monkeypatch.setattr(merging, "RANGE_VALUES", 1024)
    spool, layout = Spool(tmp_path), plan_layout([("a", (60, 50)), ("b", (2000,))], 1)
    gate, heloco = Gate(cutoff=4), Correction(kind="heloco", doubt=0.0)
    ema = OuterOptimizerOptions(kind="nesterov_ema", lr=0.5, momentum=0.5)
    rule = outer_rule(ema, MergeOptions(kind="trimmed_mean"), layout, gate=gate, correction=heloco)
    theta, momentum, *d = torch.randn(4, 5000, generator=torch.Generator().manual_seed(5)).unbind()
    old, d[0] = holding(theta, None, momentum), momentum + 0.1 * d[0]
    d[1][3000:].sub_(2 * momentum[3000:])
    parts = (
        Contribution("a", 1.0, 4, (stored(spool, "a", 1, d[0]),)),
        Contribution("b", 1.0, 2, (stored(spool, "b", 1, d[1]),)),
    )
    found = []
    for threads in (1, 4):
        result = run_outer_step(StartOuterStep(0, 5, parts), old, spool, rule, "fp32", threads=threads)
        assert isinstance(result, OuterResult)
        found.append(result.values.theta)
    changed = []
    for part in (slice(0, 3000), slice(3000, 5000)):
        one, ahead = d[1][part], momentum[part]
        products = [sum_of_products(a, b) for a, b in ((one, one), (one, ahead), (ahead, ahead))]
        changed.append(corrected(one, ahead, heloco.change(*products)))
    assert not torch.equal(changed[1], d[1][3000:])
    wanted, _ = outer_step(theta, merge_mean([(1.0, [d[0]]), (1.0, [torch.cat(changed) * 0.5])]), old.optimizer, ema)
    assert torch.equal(found[0], found[1])
    assert torch.allclose(found[0], wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("senders", ["abc", "aab", "aaa", "cbcaab"])
def test_19_a_buffer_update_by_update_is_fedbuff_s_sum_over_its_size(tmp_path: Path, senders: str) -> None:
    """theta <- theta - lr/K sum of (1 + staleness)^-1/2 d, whoever sent which of the K: twelve versions of a run with
    dice for updates and their bases."""
    size, draw, spool = len(senders), random.Random(senders), Spool(tmp_path)
    options = {"merge_by": "update", "weights": "uniform", "updates_in_flight_max": 3, "fates_kept_max": 64}
    machine = running("a", "b", "c", round_updates=size, **options)
    sgd = OuterOptimizerOptions(kind="sgd", lr=0.7, momentum=0.0)
    rule = outer_rule(sgd, MEAN, LAYOUT, gate=Gate(power=0.5))
    held, theta, sent = replace(holding(dice("theta", 0)), version=0), dice("theta", 0).double(), Counter[str]()
    for version in range(12):
        for site in senders:
            sent[site] += 1
            base = max(0, version - draw.randrange(8))
            d = dice((site, sent[site]), 0)
            kept = stored(spool, site, sent[site], d)
            where = {"payload": kept.payload, "digest": kept.digest}
            effects = machine.push(site, sent[site], base_version=base, **where)
            theta -= 0.7 / size * (1 + version - base) ** -0.5 * d.double()
        result = run_outer_step(only(StartOuterStep, effects), held, spool, rule, "fp32")
        assert result is not None
        held = result.values
        machine.done()
    torch.testing.assert_close(held.theta.double(), theta, rtol=0, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_range_that_is_not_finite_ends_the_step_whatever_the_others_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(merging, "RANGE_VALUES", 1024)
    spool, huge = Spool(tmp_path), torch.zeros(50_000)
    huge[30_000] = 3e38
    parts = (Contribution("a", 1.0, 4, (stored(spool, "a", 1, huge),)),)
    command = StartOuterStep(0, 5, parts)
    assert run_outer_step(command, holding(-huge), spool, OuterRule(SGD), "fp32", threads=threads) is None


def test_without_momentum_a_version_that_is_sent_whole_is_one_tensor(tmp_path: Path) -> None:
    spool, rule = Spool(tmp_path), OuterOptimizerOptions(kind="sgd", lr=1.0, momentum=0.0)
    part = Contribution("a", 1.0, 4, (stored(spool, "a", 1, dice("d", 0)),))
    result = step(spool, [part], holding(dice("theta", 0)), "fp32", rule)
    assert isinstance(result, OuterResult)
    values = result.values
    assert values.published.data_ptr() == values.theta.data_ptr()
    assert not values.optimizer.tensors
    assert bytes(result.downlink) == bytes(bytes_of(values.theta))


def test_a_step_says_what_its_stages_took(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    part = Contribution("a", 1.0, 4, (stored(spool, "a", 1, dice("d", 0)),))
    result = step(spool, [part], holding(dice("theta", 0)), "fp32", SGD)
    assert isinstance(result, OuterResult)
    costs = result.costs
    assert min(costs.read_s, costs.fused_s, costs.digest_s) > 0
    assert costs.read_s + costs.fused_s + costs.digest_s == pytest.approx(result.seconds)


def test_a_version_is_made_in_the_memory_of_one_that_nobody_reads_any_more(tmp_path: Path) -> None:
    spool, buffers = Spool(tmp_path), Buffers(4)
    parts = [Contribution("a", 1.0, 3, (stored(spool, "a", 1, dice("d", 0), "int8"),))]
    held = holding(dice("theta", 0), dice("published", 0), dice("momentum", 0))
    seen, wanted = [], []
    for version in range(5, 12):
        command = StartOuterStep(0, version, tuple(parts))
        alone = run_outer_step(command, held, spool, OuterRule(NESTEROV), "int8")
        result = run_outer_step(command, held, spool, OuterRule(NESTEROV), "int8", buffers=buffers)
        assert alone is not None
        assert result is not None
        assert (result.values.digest, result.downlink_digest) == (alone.values.digest, alone.downlink_digest)
        seen.append(result.values.theta.data_ptr())
        wanted.append((result.values.published[3:], result.values.published[3:].clone()))
        wanted = wanted[-2:]
        assert all(torch.equal(reader, then) for reader, then in wanted), "somebody still reads the one before"
        held = result.values
        del result, alone
    assert len(set(seen)) < len(seen)


def test_what_overflows_is_no_version(tmp_path: Path) -> None:
    spool, huge = Spool(tmp_path), torch.full_like(dice("x", 0), 3e38)
    part = Contribution("a", 1.0, 4, (stored(spool, "a", 1, huge),))
    assert step(spool, [part], holding(torch.full_like(huge, -3e38)), "fp32", SGD) is None


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_values_too_far_from_what_was_published_are_no_version(tmp_path: Path, codec: str) -> None:
    """Θ and Θ̂ are finite and their difference is not: the codec refuses it, and the syncer must not die of that."""
    spool, huge = Spool(tmp_path), torch.full_like(dice("x", 0), 2e38)
    part = Contribution("a", 1.0, 4, (stored(spool, "a", 1, -huge),))
    assert step(spool, [part], holding(torch.zeros_like(huge), published=-huge), codec, SGD) is None


@pytest.mark.parametrize("threads", [1, 3])
def test_a_payload_that_changed_is_named(tmp_path: Path, threads: int) -> None:
    spool = Spool(tmp_path)
    parts = [Contribution(site, 0.5, 3, (stored(spool, site, 1, dice("d", 0)),)) for site in ("a", "b", "c")]
    path = tmp_path / parts[1].updates[0].payload
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    command = StartOuterStep(0, 5, tuple(parts))
    with pytest.raises(SpoolError, match=str(path)):
        run_outer_step(command, holding(dice("theta", 0)), spool, OuterRule(SGD), "fp32", threads=threads)
