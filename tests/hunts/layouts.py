"""``make layouts``: sites of every layout train one model, and the layout changes no bit of the exchanged data.

Real processes over real gRPC, ranks over gloo.  In each run the same sites make the same steps, in lock-step and
without a codec, so that every payload, version and adopted value is determined; only the layout of the model
over a site's ranks differs.  First one site alone, as one process and then under each layout; then four sites of four
layouts together, compared with four sites of one process each.  Compared are the payloads and versions in the syncer's
journal, and the values on each rank after each boundary, as torch gathers them.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from diloco.codec.base import digest
from diloco.inner.holding import Holding
from diloco.inner.parallel import SiteGroup
from diloco.inner.trainer import StepInfo
from diloco.learner.agent import Agent
from diloco.learner.exchange import Follower, Owner
from diloco.learner.ranks import deal
from diloco.outer.fragments import named_parameters_once
from tests.hunts.reporting import Counts, Hunt, Namespace, hunting
from tests.layouts import LAYOUTS, SHAPES, Odd, fill, part_of, ranks, whole
from tests.loopback.audit import audit, history
from tests.loopback.cluster import Log, serving
from tests.loopback.toy import TOKENS_PER_STEP, Toy, generator

BOUND_S = 90.0
RANKS = 4
INNER_STEPS = 3
ALONE = ("ddp", "fsdp", "hsdp", "tp", "tp_fsdp")
MIXED = {"a": ("plain", 1), "b": ("ddp", 2), "c": ("fsdp", 4), "d": ("tp", 2)}
Sites = Mapping[str, tuple[str, int]]
"""For each site its layout and the number of its ranks."""


Found = dict[str, dict[Any, str]]
"""The digests of a run: "payloads" by (site, fragment, sequence), "versions" by (fragment, version), and the sites'
values, "held" by (site, step)."""


def differing(one: Found, other: Found) -> list[str]:
    """Return each entry that only one of the two has, or that differs."""
    pairs = [(name, one[name], other[name]) for name in one]
    return [f"{name} {key}" for name, a, b in pairs for key in sorted({*a, *b}) if a.get(key) != b.get(key)]


@torch.no_grad()
def train(parameters: Mapping[str, Tensor], site: str, step: int) -> None:
    """Make one inner step of a site, the same for every layout."""
    for name, parameter in parameters.items():
        mine = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        noise = torch.randn(SHAPES[name], generator=generator(7, f"{site}/{name}", step))
        mine.mul_(0.98).add_(part_of(parameter, noise).mul(0.01))


def site_rank(group: SiteGroup, tell: Callable[[Any], None], toy: Toy, site: str, address: str, layout: str) -> None:
    """Run one rank of ``site``."""
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # It warns of tensors sharded twice.
    parameters = named_parameters_once(LAYOUTS[layout](Odd(), group.world))
    fill(parameters, {name: torch.full(shape, float("nan")) for name, shape in SHAPES.items()})
    holding, fragments = Holding(parameters, group), toy.layout()
    dealt = deal(fragments, holding)
    outer: Agent | Follower
    if group.is_first:
        emit = lambda what, fields: tell({"what": what, **fields})  # noqa: E731
        outer = toy.agent(site, address, {}, emit, None, group, holding=holding, dealt=dealt)
    else:
        options, client = toy.agent_options(site), toy.sync_client(site, address)
        mine = (options, toy.adopt, fragments, holding, dealt, client)
        outer = Follower([fragments], holding, toy.adopt, {0: Owner(*mine)} if dealt.channels else {})
    outer.start() if isinstance(outer, Agent) else outer.follow()
    steps, stop = 0, False
    while not stop:
        steps += 1
        train(parameters, site, steps)
        info = StepInfo(steps, 1.0, TOKENS_PER_STEP, 0, 1_000_000, steps, 1.0, 0.1, applied=True)
        stop = outer.after_step(info).stop
        values = whole(parameters)
        tell({"what": "holds", "step": steps, "digest": digest(torch.cat([values[name].view(-1) for name in SHAPES]))})
    finished = outer.finish()
    tell({"what": "finished", **(asdict(finished) if finished is not None else {})})


def heard(ends: Mapping[Connection, Log]) -> None:
    """Receive from all ranks until the last one has ended; raise any error."""
    left = dict(ends)
    while left:
        ready = wait(list(left), BOUND_S)
        assert ready, f"no rank sends anything for {BOUND_S:g} s"
        for end in ready:
            assert isinstance(end, Connection)
            try:
                said = end.recv()
            except EOFError:
                del left[end]
                continue
            assert "error" not in said, said["error"]
            left[end].emit(said.pop("what"), said)


def run_of(folder: Path, sites: Sites, rounds: int, adopt: str) -> Found:
    """Make a whole run and audit it."""
    toy = Toy(
        folder=str(folder),
        shapes=tuple(SHAPES.items()),
        adopt=adopt,
        inner_steps=INNER_STEPS,
        lock_step=True,
        optimizer={"kind": "nesterov", "lr": 0.7, "momentum": 0.9},
        outer={
            "num_fragments": 3,
            "quorum": len(sites),
            "quorum_min": len(sites),
            "grace": "fixed",
            "grace_ns": 0,
            "token_budget": rounds * INNER_STEPS * TOKENS_PER_STEP * len(sites),
        },
        snapshot_every=10_000,
    )
    logs: dict[str, list[Log]] = {}
    with serving(toy) as (_, address, syncer_log), ExitStack() as stack:
        ends: dict[Connection, Log] = {}
        for site, (layout, world) in sites.items():
            logs[site] = [Log() for _ in range(world)]
            here = stack.enter_context(ranks(site_rank, world, toy, site, address, layout))
            ends |= dict(zip(here, logs[site], strict=True))
        heard(ends)
    audit(toy, [syncer_log], {site: [mine[0]] for site, mine in logs.items()}, {})
    told, held = history(toy), dict[Any, str]()
    for site, mine in logs.items():
        for rank, log in enumerate(mine):
            for event in log.of("holds"):
                key = (site, int(str(event["step"])))
                assert held.setdefault(key, str(event["digest"])) == event["digest"], (
                    f"rank {rank} has other values at {key}"
                )
    # Depending on the network, the end of the run arrives before or after one more step.
    return {
        "payloads": {key: payload for key, payload in told.accepted.items() if key[2] <= rounds},
        "versions": {key: version for key, version in told.published.items() if key[1] <= rounds},
        "held": {key: values for key, values in held.items() if key[1] <= rounds * INNER_STEPS},
    }


@hunting(
    rounds=(6, "rounds of each fragment"),
    adopt=("rebase", "adopt rule"),
    mixed=(False, "only the run of four layouts"),
)
def main(hunt: Hunt, asked: Namespace) -> Counts:
    alone: list[Sites] = [] if asked.mixed else [{"a": (layout, RANKS)} for layout in ALONE]
    mismatches, compared, found = 0, 0, dict[str, Found]()

    def made(sites: Sites) -> Found:
        name = "+".join(f"{layout}x{world}" for layout, world in sites.values())
        if name not in found:
            found[name] = run_of(hunt.folder / name, sites, asked.rounds, asked.adopt)
            shutil.rmtree(hunt.folder / name)
        return found[name]

    for sites in [*alone, MIXED]:
        with hunt.judging(str(sites)):
            mine, plain = made(sites), made(dict.fromkeys(sites, ("plain", 1)))
            wrong = differing(mine, plain)
            mismatches += len(wrong)
            compared += sum(map(len, mine.values()))
            assert not wrong, ", ".join(wrong[:5])
    return {"runs": len(found), "compared": compared, "mismatches": mismatches}
