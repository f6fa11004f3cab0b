"""Whole runs over real gRPC on loopback: the identities of DESIGN section 6 that need every floor."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.codec.base import digest
from diloco.learner.agent import Finished
from diloco.outer.fragments import gather, scatter
from diloco.outer.merge import merge_mean
from diloco.outer.optimizer import OuterOptimizerOptions
from diloco.outer.reference import reference_diloco
from diloco.syncer.server import Syncer
from diloco.wire.client import SyncClient
from tests.loopback.audit import audit
from tests.loopback.cluster import Log, SiteThread, serving
from tests.loopback.toy import EVERYBODY, TOKENS_PER_STEP, Toy, empty_parameters, train
from tests.sooner import sooner

BOUND_S = 40.0
NESTEROV = {"lr": 0.7, "momentum": 0.9}


def lock_step(folder: Path, sites: int, rounds: int, **changes: object) -> Toy:
    outer = {**EVERYBODY, "quorum_min": sites, "token_budget": rounds * sites * 5 * TOKENS_PER_STEP}
    return Toy(folder=str(folder), lock_step=True, outer=outer, **changes)  # type: ignore[arg-type]


def whole_run(toy: Toy, sites: list[str], *pauses: float) -> tuple[Syncer, Log, list[SiteThread], list[Finished]]:
    """The run to its end; ``pauses`` are what a step of each site takes."""
    with serving(toy) as (syncer, address, log):
        pauses = pauses or (0.0,) * len(sites)
        threads = [SiteThread(toy, site, address, step_s=each) for site, each in zip(sites, pauses, strict=True)]
        assert syncer.wait(BOUND_S) is not None, "the run did not end"
        return syncer, log, threads, [thread.join(BOUND_S) for thread in threads]


def trained(thread: SiteThread) -> Tensor:
    """What a site of one fragment ends with."""
    (fragment,) = thread.toy_site.toy.layout().fragments
    return gather(fragment, thread.toy_site.parameters)


def reference_versions(toy: Toy, sites: list[str], rounds: int) -> list[Tensor]:
    """The same toy sites, trained in this thread by the definition."""
    (fragment,) = toy.layout().fragments

    def trainer(site: str) -> object:
        def run(local: Tensor, round_index: int) -> Tensor:
            parameters = empty_parameters()
            scatter(fragment, local, parameters)
            for step in range(round_index * toy.inner_steps + 1, (round_index + 1) * toy.inner_steps + 1):
                train(parameters, toy.seed, site, step)
            return gather(fragment, parameters)

        return run

    (theta0,) = toy.version_zero()
    optimizer = OuterOptimizerOptions(**toy.optimizer)  # type: ignore[arg-type]
    trainers = [trainer(site) for site in sites]
    return reference_diloco(theta0, trainers, [1 / len(sites)] * len(sites), rounds, optimizer)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "optimizer",
    [
        {"kind": "sgd", "momentum": 0.0},
        {"kind": "heavy_ball", "lr": 0.3},
        {"kind": "nesterov"},
        {"kind": "delayed_nesterov", "window": 2},
        {"kind": "adamw", "lr": 0.3, "weight_decay": 0.1},
        {"kind": "schedule_free", "lr": 1.0},
        {"kind": "gpa", "lr": 1.0},
    ],
    ids=lambda each: each["kind"],
)
def test_invariant_03_lock_step_over_grpc_is_the_reference_bit_for_bit(
    tmp_path: Path, optimizer: dict[str, object]
) -> None:
    rounds, sites = 4, ["a", "b", "c"]
    toy = lock_step(tmp_path, 3, rounds, seed=3, optimizer=optimizer)
    syncer, log, threads, _ = whole_run(toy, sites)
    final = syncer.holdings.values[0]
    wanted = reference_versions(toy, sites, rounds)
    assert final.version == rounds
    assert torch.equal(final.published, wanted[-1]), (final.published - wanted[-1]).abs().max()
    assert len({event["digest"] for event in log.of("published")}) == rounds
    for thread in threads:
        assert torch.equal(trained(thread), wanted[-1]), "a site ends elsewhere"


def test_a_lock_step_site_ends_with_the_last_version_though_its_download_outlasts_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The syncer tells the fates and the end over the Watch stream at once; the version comes by a download.
    pull = SyncClient.pull

    def slow_pull(self: SyncClient, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.5)
        return pull(self, *args, **kwargs)

    monkeypatch.setattr(SyncClient, "pull", slow_pull)
    toy = lock_step(tmp_path, 2, 1, seed=5)
    syncer, _, threads, _ = whole_run(toy, ["a", "b"])
    for thread in threads:
        assert torch.equal(trained(thread), syncer.holdings.values[0].published), "a site ends elsewhere"


class InFragments:
    """A lock-step run in one loop: no machine, no wire, every fragment with a torch optimizer of its own."""

    def __init__(self, toy: Toy, sites: list[str]) -> None:
        self.toy, self.sites, self.parts = toy, sites, toy.layout().fragments
        self.theta = toy.version_zero()
        self.steppers = [torch.optim.SGD([each], nesterov=True, **NESTEROV) for each in self.theta]
        self.local = {site: empty_parameters() for site in sites}
        self.began = [dict.fromkeys(sites, each.clone()) for each in self.theta]
        self.merged_to = [0] * len(self.parts)
        """The inner step up to which each fragment is merged."""
        self.published: list[tuple[int, int, str]] = []
        for part, values in zip(self.parts, self.theta, strict=True):
            for site in sites:
                scatter(part, values, self.local[site])

    def run(self, step_budget: int) -> None:
        """Until as many steps of every site are merged, taken as the mean over the fragments; then the last round."""
        steps, count, step = self.toy.inner_steps, len(self.parts), 0
        due = [(index + 1) * steps // count % steps for index in range(count)]
        while sum(self.merged_to) < step_budget * count:
            step += 1
            for site in self.sites:
                train(self.local[site], self.toy.seed, site, step)
            if step % steps in due:
                self.exchange(due.index(step % steps), step)
        for index in range(count):
            if self.merged_to[index] < step:
                self.exchange(index, step)

    def exchange(self, index: int, step: int) -> None:
        """The outer step of one fragment, which every site has back before its next inner step."""
        part, theta = self.parts[index], self.theta[index]
        ends = {site: gather(part, self.local[site]) for site in self.sites}
        theta.grad = merge_mean([(1.0, [self.began[index][site] - ends[site]]) for site in self.sites])
        self.steppers[index].step()
        self.merged_to[index] = step
        self.published.append((index, 1 + sum(each[0] == index for each in self.published), digest(theta)))
        for site, end in ends.items():
            # Halves are exact: the one rounding of this difference and of this sum are all that there are.
            back = theta - (theta - end) / 2 if self.toy.adopt == "blend" else theta.clone()
            self.began[index][site] = back
            scatter(part, back, self.local[site])


@pytest.mark.parametrize(
    ("adopt", "inner_steps"),
    sooner([("overwrite", 6), ("rebase", 5), ("blend", 5)], ("blend", 5)),
)
def test_invariant_03_fragments_in_lock_step_are_each_outer_stepped_alone_in_its_turn(
    tmp_path: Path, adopt: str, inner_steps: int
) -> None:
    """Every version, bit for bit: under rebase too, where what a site has not sent is exactly 0 as it stands still.

    What the sites hold shows in the next versions; those of the last round none of them has to adopt.
    """
    rounds, sites = 4, ["a", "b", "c"]
    toy = lock_step(
        tmp_path, 3, rounds, seed=3, optimizer={"kind": "nesterov", **NESTEROV}, adopt=adopt, inner_steps=inner_steps
    )
    toy.outer["num_fragments"] = 3
    _, log, _, _ = whole_run(toy, sites)
    wanted = InFragments(toy, sites)
    wanted.run(rounds * 5)
    found = [(int(str(e["fragment"])), int(str(e["version"])), str(e["digest"])) for e in log.of("published")]
    assert len(found) >= 3 * (rounds - 1)
    assert sorted(found) == sorted(wanted.published)


def test_invariant_01_one_site_alone_is_plain_training(tmp_path: Path) -> None:
    """Outer lr 1, no momentum, no codec, one site that never waits: the same values to 2 ulp per adopt.

    fl(Θ − fl(Θ − θ)) may differ from θ in the last place, and each adopt passes through it once up and once down.
    """
    toy = Toy(folder=str(tmp_path), outer={"grace": "fixed", "grace_ns": 0, "token_budget": 900}, seed=1)
    _, log, (site,), _ = whole_run(toy, ["a"], 0.002)
    (fragment,) = toy.layout().fragments
    plain = empty_parameters()
    scatter(fragment, toy.version_zero()[0], plain)
    for step in range(1, site.toy_site.steps + 1):
        train(plain, toy.seed, "a", step)
    adopts = len(log.of("published"))
    assert adopts >= 5
    found, wanted = trained(site), gather(fragment, plain)
    ulp = torch.finfo(torch.float32).eps * wanted.abs().clamp_min(1.0)
    assert bool(((found - wanted).abs() <= 2 * (adopts + 1) * ulp).all()), (found - wanted).abs().max()


@pytest.mark.slow
@pytest.mark.parametrize(("codec", "fragments"), [("int4:32+zstd1", 3), ("topk:256x4", 3), ("sign:8", 1)])
def test_invariant_17_and_10_progress_and_tokens_are_conserved(tmp_path: Path, codec: str, fragments: int) -> None:
    """Rebase, outer lr 1, no momentum: what the sites hold beyond Θ̂ is only what was trained and not merged."""
    outer = {"num_fragments": fragments, "grace": "fixed", "grace_ns": 5_000_000, "token_budget": 1200}
    toy = Toy(folder=str(tmp_path), codec=codec, outer=outer, seed=7, snapshot_every=1_000_000)
    _, log, sites, done = whole_run(toy, ["a", "b"], 0.004, 0.007)
    finished = {site.site: end for site, end in zip(sites, done, strict=True)}
    audit(toy, [log], {site.site: [site.log] for site in sites}, finished)
    for ledger in (end.ledger for end in done):
        assert ledger["lost"] == ledger["refused"] == ledger["overwritten"] == 0, ledger
    assert all(event["versions"] for event in log.of("final"))
