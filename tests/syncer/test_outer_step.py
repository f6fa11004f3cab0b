"""The outer step: the definition applied to what lies in the spool, or nothing at all; its costs, and its events."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.codec import merging
from diloco.codec.base import Buffers, digest, digest_of
from diloco.codec.merging import sum_of_products
from diloco.codec.registry import make_codec
from diloco.codec.site_pass import follow
from diloco.outer.fragments import plan_layout
from diloco.outer.merge import MEAN, Correction, Gate, MergeOptions, corrected, merge_mean
from diloco.outer.optimizer import NOTHING, OuterOptimizerOptions, OuterRule, OuterState, outer_rule, outer_step
from diloco.sync.effects import Contribution, StartOuterStep, UpdateRef
from diloco.sync.events import Fate, Reason
from diloco.sync.state import FragmentState, Line, Site
from diloco.sync.state import OuterState as RunState
from diloco.sync.state import Status as SiteStatus
from diloco.syncer import status
from diloco.syncer.outer_step import (
    OuterResult,
    merged_into,
    outer_step_facts,
    run_outer_step,
)
from diloco.syncer.snapshots import FragmentValues
from diloco.syncer.spool import Spool
from diloco.syncer.status import Tally
from tests.sync.driving import only, running
from tests.syncer.building import LAYOUT, Events, dice, eventually, push, serving, update

NESTEROV = OuterRule(OuterOptimizerOptions())
SGD = OuterRule(OuterOptimizerOptions(kind="sgd", lr=1.0, momentum=0.0))


def stored(spool: Spool, site: str, sequence: int, values: Tensor, encoding: str = "fp32") -> UpdateRef:
    header, payload = update(site, sequence, values=values, encoding=encoding)
    partial = spool.open_partial(header)
    partial.write(memoryview(payload))
    reference = spool.keep(partial)
    partial.close()
    return UpdateRef(sequence, reference, encoding, header.digest)


def step(
    spool: Spool,
    parts: list[Contribution],
    values: FragmentValues,
    codec: str = "fp32",
    rule: OuterRule = SGD,
    **how: Any,
) -> OuterResult | None:
    command = StartOuterStep(0, values.version + 1, tuple(parts))
    return run_outer_step(command, values, spool, rule, codec, **how)


def sent_by(spool: Spool, values: Tensor, encoding: str = "fp32", sites: str = "a") -> list[Contribution]:
    return [Contribution(site, 1.0, 4, (stored(spool, site, 1, values, encoding),)) for site in sites]


def holding(theta: Tensor, published: Tensor | None = None, momentum: Tensor | None = None) -> FragmentValues:
    published = theta.clone() if published is None else published
    remembered = NOTHING if momentum is None else OuterState(4, {"momentum": momentum})
    return FragmentValues(4, theta, published, remembered, digest(published))


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int4:32+zstd1"])
def test_it_is_the_definition_bit_for_bit_and_says_what_its_stages_took(tmp_path: Path, codec: str) -> None:
    spool, d = Spool(tmp_path), [dice(("d", n), 0) for n in range(3)]
    parts = [
        Contribution("a", 0.25, 3, (stored(spool, "a", 1, d[0]), stored(spool, "a", 2, d[1], "int8"))),
        Contribution("b", 0.75, 4, (stored(spool, "b", 7, d[2]),)),
    ]
    old = holding(dice("theta", 0), dice("published", 0), dice("momentum", 0))
    result = step(spool, parts, old, codec, NESTEROV)
    second = make_codec("int8").decode(make_codec("int8").encode(d[1]), d[1].numel())
    merged = merge_mean([(0.25, [d[0], second]), (0.75, [d[2]])])
    theta, following = outer_step(old.theta, merged, old.optimizer, NESTEROV.optimizer)
    assert torch.equal(result.values.theta, theta)
    assert result.values.optimizer.steps == following.steps == 5
    assert torch.equal(result.values.optimizer.tensors["momentum"], following.tensors["momentum"])
    assert torch.equal(result.values.published, follow(old.published, result.downlink, make_codec(codec)))
    assert result.values.version == 5
    assert result.values.digest == digest(result.values.published)
    assert result.downlink_digest == digest_of(result.downlink)
    costs = (result.read_s, result.fused_s, result.digest_s)
    assert min(costs) > 0
    assert sum(costs) == pytest.approx(result.seconds)


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_a_version_of_buffers_lies_between_the_sites_values_whatever_the_rule_and_the_codec(
    tmp_path: Path, share: float
) -> None:
    spool, (first, second, other) = Spool(tmp_path), (dice(n, 0).abs() for n in range(3))
    parts = [
        Contribution("a", 0.25, 1, (stored(spool, "a", 1, -first), stored(spool, "a", 2, -second))),
        Contribution("b", 0.75, 4, (stored(spool, "b", 7, -other),)),
    ]
    old = holding(dice("theta", 0))
    command = StartOuterStep(0, 5, tuple(parts), share)
    gated = replace(NESTEROV, gate=Gate(alpha=1.0), averaged=frozenset({0}))
    result = run_outer_step(command, old, spool, gated, "int4:32")
    mean = 0.25 * second + 0.75 * other  # The first update of site a is the older of two readings.
    assert torch.allclose(result.values.theta, share * mean + (1 - share) * old.theta, atol=1e-6)
    assert result.values.published is result.values.theta
    assert torch.equal(follow(old.published, result.downlink, make_codec("fp32")), result.values.theta)
    assert not result.values.optimizer.tensors


def test_two_threads_work_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool, values = Spool(tmp_path), dice("theta", 0)
    parts = sent_by(spool, values, sites="ab")
    opened, both = spool.opened, threading.Barrier(2, timeout=10.0)

    def together(*given: Any) -> Any:
        both.wait()
        return opened(*given)

    monkeypatch.setattr(spool, "opened", together)
    assert step(spool, parts, holding(values), threads=2).values.version == 5


def test_invariant_7_gate_and_correction_are_those_of_the_whole(
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
    parts = [*sent_by(spool, d[0]), Contribution("b", 1.0, 2, (stored(spool, "b", 1, d[1]),))]
    found = [step(spool, parts, old, "fp32", rule, threads=threads).values.theta for threads in (1, 4)]
    changed = []
    for part in (slice(0, 3000), slice(3000, 5000)):
        sent, ahead = d[1][part], momentum[part]
        products = [sum_of_products(a, b) for a, b in ((sent, sent), (sent, ahead), (ahead, ahead))]
        changed.append(corrected(sent, ahead, heloco.change(*products)))
    assert not torch.equal(changed[1], d[1][3000:])
    wanted, _ = outer_step(theta, merge_mean([(1.0, [d[0]]), (1.0, [torch.cat(changed) * 0.5])]), old.optimizer, ema)
    assert torch.equal(found[0], found[1])
    assert torch.allclose(found[0], wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("senders", ["abc", "aaa", "cbcaab"])
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
            effects = machine.push(site, sent[site], base_version=base, payload=kept.payload, digest=kept.digest)
            theta -= 0.7 / size * (1 + version - base) ** -0.5 * d.double()
        result = run_outer_step(only(StartOuterStep, effects), held, spool, rule, "fp32")
        held = result.values
        machine.done()
    torch.testing.assert_close(held.theta.double(), theta, rtol=0, atol=1e-6)


def test_what_overflows_is_no_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Θ and Θ̂ are finite and their difference is not, the codec refuses it: the syncer must not die of that."""
    monkeypatch.setattr(merging, "RANGE_VALUES", 1024)
    two = torch.full((dice("x", 0).numel(),), 2e38)
    long = torch.where(torch.arange(50_000) == 30_000, 3e38, 0.0)
    for number, (sent, held, codec, threads) in enumerate(
        (
            (1.5 * two, holding(-1.5 * two), "fp32", 1),
            (long, holding(-long), "fp32", 1),
            (long, holding(-long), "fp32", 3),
            (-two, holding(0 * two, -two), "bf16", 1),
            (-two, holding(0 * two, -two), "int8", 1),
        )
    ):
        spool = Spool(tmp_path / str(number))
        assert step(spool, sent_by(spool, sent), held, codec, threads=threads) is None, number


def test_a_version_is_made_in_the_memory_of_one_that_nobody_reads_any_more(tmp_path: Path) -> None:
    spool, buffers = Spool(tmp_path), Buffers(4)
    parts = sent_by(spool, dice("d", 0), "int8")
    held = holding(dice("theta", 0), dice("published", 0), dice("momentum", 0))
    seen, wanted = [], []
    for _ in range(7):
        alone = step(spool, parts, held, "int8", NESTEROV)
        result = step(spool, parts, held, "int8", NESTEROV, buffers=buffers)
        assert (result.values.digest, result.downlink_digest) == (alone.values.digest, alone.downlink_digest)
        seen.append(result.values.theta.data_ptr())
        wanted.append((result.values.published[3:], result.values.published[3:].clone()))
        wanted = wanted[-2:]
        assert all(torch.equal(reader, then) for reader, then in wanted), "the one before is still read"
        held = result.values
        del result, alone
    assert len(set(seen)) < len(seen)


# --- Events in plain values, which JSON can carry --------------------------------------------------------------------


def test_an_outer_step_says_who_was_in_it_and_how_stale() -> None:
    update = UpdateRef(4, "payload", "fp32", "digest")
    command = StartOuterStep(0, 6, (Contribution("a", 0.25, 5, (update,)), Contribution("b", 0.75, 3, (update,))))
    result = OuterResult(None, b"", "", 1.5, 0.125)  # type: ignore[arg-type]
    facts = outer_step_facts(command, result, {"read_s": 0.5})
    assert facts == json.loads(json.dumps(facts))
    assert (facts["sites"], facts["staleness"]) == ({"a": 0.25, "b": 0.75}, {"a": 0, "b": 2})
    assert facts["read_s"] == 0.5
    again = (*command.contributions, Contribution("b", 0.125, 4, (update,)))
    of_three = outer_step_facts(StartOuterStep(0, 6, again), result, {})
    assert (of_three["sites"], of_three["staleness"]) == ({"a": 0.25, "b": 0.875}, {"a": 0, "b": 2})
    assert (facts["version"], facts["norm"], facts["seconds"]) == (6, pytest.approx(1.5), 0.125)


def test_a_version_is_of_the_sites_whose_updates_it_holds() -> None:
    """By their number a site knows how much of a version is its own."""
    fates = {
        "a": [Fate(0, 1, 2, 10, ""), Fate(0, 2, 3, 20, ""), Fate(0, 3, 3, 30, "")],
        "b": [Fate(0, 1, 3, 40, "", Reason.STALE)],
        "c": [],
        "d": [Fate(0, 1, 3, 50, "")],
    }
    state = RunState([FragmentState()])
    for name, decided in fates.items():
        state.sites[name] = Site(1, name, SiteStatus.LIVE, [Line(fates=decided)])
    assert merged_into(state, 0, 3) == {"a": (50, 2), "d": (50, 1)}
    assert merged_into(state, 0, 2) == {"a": (10, 1)}
    assert merged_into(state, 0, 4) == {}


# --- What a round costs: added up over its updates, from the first byte to what everybody is told --------------------


def test_a_round_costs_what_its_own_updates_took_and_what_is_never_merged_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tally, result = Tally(), OuterResult(holding(torch.zeros(1)), b"", "d", 1.0, 0.6, 0.1, 0.2, 0.3)

    def stepped(*payloads: str) -> dict[str, Any]:
        parts = [Contribution(name, 1.0, 0, (UpdateRef(1, name, "fp32", "d"),)) for name in payloads]
        return tally.stepped(StartOuterStep(2, 7, tuple(parts)), result)

    for name, seconds in (("a", 1.0), ("a", 0.5), ("b", 2.0), ("other", 40.0)):
        tally.received(name, seconds, 2 * seconds)
    made = stepped("a", "b", "of an earlier process")
    received = [(site, sequence, whole_s) for site, sequence, _, whole_s in made.pop("received")]
    assert received == [("a", 1, 1.0), ("b", 1, 4.0)]
    assert made == {"receive_s": 3.5, "read_s": 0.1, "fused_s": 0.2, "digest_s": 0.3}
    assert stepped("a")["receive_s"] == 0.0, "an update is in one round"
    monkeypatch.setattr(status, "UPDATES_MAX", 2)
    for name in ("a", "b", "c"):
        tally.received(name, 1.0, 1.0)
    assert stepped("a", "b", "c")["receive_s"] == 2.0


def test_the_stages_of_a_round_are_in_events_and_status(tmp_path: Path, events: Events) -> None:
    began_s = time.perf_counter()
    with serving(tmp_path, events, sites="a") as syncer:
        push(syncer, *update())
        (told,) = events.wait_for("published")
        (made,) = events.of("outer_step")
        eventually(lambda: "publish_s" in (syncer.api.tally.costs(0) or {}), "it is told")
        told_status: dict[str, Any] = syncer.api.status()
    found, none = (each["costs"] for each in told_status["fragments"])
    assert none is None
    assert min(found.values()) > 0
    assert sum(found.values()) < time.perf_counter() - began_s
    stages = {name: made[name] for name in ("receive_s", "read_s", "fused_s", "digest_s")}
    assert found == {**stages, "publish_s": told["publish_s"]}
