"""Whole runs over real gRPC on loopback: the identities of DESIGN section 6 that need every floor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from diloco.outer.fragments import gather, scatter
from diloco.outer.optimizer import OuterOptimizerOptions
from diloco.outer.reference import reference_diloco
from tests.loopback.cluster import Log, SiteThread, serving
from tests.loopback.toy import TOKENS_PER_STEP, Toy, empty_parameters, train

BOUND_S = 40.0


def lock_step(folder: Path, sites: int, rounds: int, **changes: object) -> Toy:
    settings: dict[str, object] = {
        "quorum": "all",
        "quorum_min": sites,
        "grace": "fixed",
        "grace_ns": 0,
        "weights": "uniform",
        "token_budget": rounds * sites * 5 * TOKENS_PER_STEP,
    }
    return Toy(folder=str(folder), lock_step=True, outer=settings, **changes)  # type: ignore[arg-type]


def versions_of(log: Log) -> list[str]:
    return [str(event["digest"]) for event in log.of("published")]


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


@pytest.mark.parametrize("kind", ["sgd", "nesterov"])
def test_invariant_03_lock_step_over_grpc_is_the_reference_bit_for_bit(tmp_path: Path, kind: str) -> None:
    optimizer = {"kind": kind, "lr": 0.7, "momentum": 0.9 if kind == "nesterov" else 0.0}
    rounds, sites = 6, ["a", "b", "c"]
    toy = lock_step(tmp_path, 3, rounds, seed=3, optimizer=optimizer)
    with serving(toy) as (syncer, address, log):
        threads = [SiteThread(toy, site, address) for site in sites]
        assert syncer.wait(BOUND_S) is not None, "the run did not end"
        for thread in threads:
            thread.join(BOUND_S)
        final = syncer.holdings.values[0]
    wanted = reference_versions(toy, sites, rounds)
    assert final.version == rounds
    assert torch.equal(final.published, wanted[-1]), (final.published - wanted[-1]).abs().max()
    assert len(set(versions_of(log))) == rounds
    for thread in threads:
        (fragment,) = toy.layout().fragments
        assert torch.equal(gather(fragment, thread.toy_site.parameters), wanted[-1]), "a site ends elsewhere"


def test_invariant_01_one_site_alone_is_plain_training(tmp_path: Path) -> None:
    """Outer lr 1, no momentum, no codec, one site that never waits: the same values to 2 ulp per adopt.

    fl(Θ − fl(Θ − θ)) may differ from θ in the last place, and each adopt passes through it once up and once down.
    """
    toy = Toy(folder=str(tmp_path), outer={"grace": "fixed", "grace_ns": 0, "token_budget": 900}, seed=1)
    with serving(toy) as (syncer, address, log):
        site = SiteThread(toy, "a", address, step_s=0.002)
        assert syncer.wait(BOUND_S) is not None
        site.join(BOUND_S)
    (fragment,) = toy.layout().fragments
    plain = empty_parameters()
    scatter(fragment, toy.version_zero()[0], plain)
    for step in range(1, site.toy_site.steps + 1):
        train(plain, toy.seed, "a", step)
    adopts = len(log.of("published"))
    assert adopts >= 5
    found, wanted = gather(fragment, site.toy_site.parameters), gather(fragment, plain)
    ulp = torch.finfo(torch.float32).eps * wanted.abs().clamp_min(1.0)
    assert bool(((found - wanted).abs() <= 2 * (adopts + 1) * ulp).all()), (found - wanted).abs().max()


@pytest.mark.parametrize(
    ("codec", "fragments"),
    [("fp32", 1), ("fp32", 3), ("int4:32+zstd1", 1), ("int4:32+zstd1", 3), ("topk:256x4", 3), ("sign:8", 1)],
)
def test_invariant_17_and_10_progress_and_tokens_are_conserved(tmp_path: Path, codec: str, fragments: int) -> None:
    """Rebase, outer lr 1, no momentum: what the sites hold beyond Θ̂ is only what was trained and not merged."""
    outer = {
        "num_fragments": fragments,
        "quorum": 1,
        "grace": "fixed",
        "grace_ns": 5_000_000,
        "token_budget": 3000,
    }
    toy = Toy(folder=str(tmp_path), codec=codec, outer=outer, seed=7)
    with serving(toy) as (syncer, address, log):
        sites = [SiteThread(toy, name, address, step_s=pause) for name, pause in (("a", 0.004), ("b", 0.007))]
        assert syncer.wait(BOUND_S) is not None
        done = [site.join(BOUND_S) for site in sites]
        state = syncer.core.ask(lambda machine: machine.state)
        for name, end in zip("ab", done, strict=True):
            ledger = end.ledger
            assert ledger["processed"] == sum(ledger[part] for part in ledger if part != "processed"), ledger
            assert ledger["lost"] == ledger["refused"] == ledger["overwritten"] == 0, ledger
            lines = state.sites[name].lines
            assert sum(line.tokens_merged for line in lines) // fragments == ledger["merged"]
    assert not [event for site in sites for event in site.log.of("note") if event["note"] == "digest_differs"]
    assert all(event["versions"] for event in log.of("final"))
