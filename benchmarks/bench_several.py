"""What does a round cost with two syncers that hold half of the model each, compared with one that holds all of it?

The programs of ``rounds``, without lock-step: two sites, each with one agent or with one per syncer.  In every round
all fragments are due at the same step, and the site waits for their exchange.  Once on the loopback, where both syncers
share this machine, and once over emulated links, one between each site and each syncer, so that two syncers have twice
the bandwidth.  Both variants in one run and in both orders; the sites' values are compared with the exact ones, and
those with two syncers with those with one, bit for bit.
"""

from __future__ import annotations

import json
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.task import Task
from benchmarks.record import finish, parser_of, record
from benchmarks.rounds import (
    CHUNK_BYTES,
    UnsyncedDisk,
    agreement_of,
    answer,
    error_max,
    in_processes,
    options_of,
    plan_of,
    quiet,
    settle,
    spread,
    started,
    values_digest,
)
from diloco.codec import kernel_library
from diloco.inner.holding import Holding
from diloco.inner.parallel import SiteGroup
from diloco.inner.trainer import StepInfo
from diloco.learner.agent import Agent
from diloco.learner.exchange import AgentOptions
from diloco.learner.ranks import Orders
from diloco.learner.several_syncers import Agents, OneVoice
from diloco.outer.fragments import Layout, part_of, place, plan_layout
from diloco.sync.link import AdaptOptions, Way
from diloco.sync.options import LearnerOptions
from diloco.syncer.server import Syncer
from diloco.wan.link import LinkOptions
from diloco.wan.process import RelayProcess
from diloco.wire.client import SyncClient
from diloco.wire.options import ClientOptions, SecurityOptions, ServerOptions

FRAGMENTS = 4
PERIOD = 1 << 20
"""Inner steps between two rounds: more than a site can wait through, so that rounds never overlap."""
WAIT_S = 0.0005
SITES = 2
RTT_MS, MBPS = 20.0, 100.0


@dataclass(frozen=True, kw_only=True)
class Several:
    """The task, with ``syncers`` syncers."""

    task: Task
    codec: str
    syncers: int
    link: LinkOptions | None = None
    """The link between each site and each syncer; None: a direct connection."""
    bound_s: float = 300.0

    @property
    def placement(self) -> tuple[tuple[int, ...], ...]:
        """The fragments of each syncer."""
        whole = plan_layout(self.task.shapes(), FRAGMENTS)
        return place([fragment.numel for fragment in whole.fragments], [1.0] * self.syncers)

    def layout(self, syncer: int) -> Layout:
        """Return the layout of ``syncer``'s part."""
        return part_of(plan_layout(self.task.shapes(), FRAGMENTS), self.placement[syncer])


def run_syncer(case: Several, syncer: int, folder: str, pipe: Any) -> None:
    """Run one syncer's process, and send its address."""
    settle()
    layout = case.layout(syncer)
    plan, options = plan_of(case.task, layout, case.codec), options_of(folder, case.codec)
    network = ServerOptions(run_id="bench", address="127.0.0.1:0", chunk_bytes=CHUNK_BYTES)
    zeros = lambda: [torch.zeros(fragment.numel) for fragment in layout.fragments]  # noqa: E731
    process = Syncer(options, plan, zeros, network, SecurityOptions(), quiet, UnsyncedDisk())
    pipe.send(process.start())
    pipe.recv()


@dataclass
class Adopted:
    """The version of each fragment that a site has, from its events."""

    versions: dict[int, int] = field(default_factory=dict)

    def emit(self, what: str, fields: dict[str, object]) -> None:
        """Take an event."""
        if what == "adopted":
            self.versions[int(str(fields["fragment"]))] = int(str(fields["version"]))

    def all_at(self, version: int) -> bool:
        """Return whether every fragment has at least ``version``."""
        return all(self.versions.get(index, 0) >= version for index in range(FRAGMENTS))


def outer_of(case: Several, folder: str, addresses: list[str], site: str, seen: Adopted, parameters: Any) -> Any:
    """Return a site's agent, or its agents for several syncers."""
    voice, group = OneVoice(case.placement, seen.emit), SiteGroup()
    orders, agents = Orders(group), []
    for syncer, address in enumerate(addresses):
        layout = case.layout(syncer)
        count = len(layout.fragments)
        agents.append(
            Agent(
                AgentOptions(
                    folder=f"{folder}/{syncer}", adapt=AdaptOptions(ways=(Way(case.codec, 0),)), finish_timeout_s=1.0
                ),
                LearnerOptions(num_fragments=count, inner_steps=PERIOD, offsets=(0,) * count),
                layout,
                Holding(parameters, group),
                agreement_of(layout, case.codec),
                SyncClient(address, site, "bench", options=ClientOptions()),
                voice.of(syncer) if case.syncers > 1 else seen.emit,
                orders.of(syncer) if case.syncers > 1 else orders,
                disk=UnsyncedDisk(),
            )
        )
    return agents[0] if case.syncers == 1 else Agents(agents, voice, orders, 60.0)


def run_site(case: Several, folder: str, addresses: list[str], index: int, pipe: Any) -> None:
    """Run a site's process: make all rounds, then send the measurements."""
    settle()
    task, seen = case.task, Adopted()
    parameters = {name: torch.zeros(shape) for name, shape in task.shapes()}
    values = [tensor.numpy() for tensor in parameters.values()]
    outer = outer_of(case, folder, addresses, f"site-{index}", seen, parameters)
    outer.start()
    spans = []
    for number in range(task.rounds_in_all):
        task.disturb(values, index, number)
        began, step = time.monotonic(), (number + 1) * PERIOD
        outer.after_step(StepInfo(step, 1.0, 1, 0, 1_000_000, step, 1.0, 1.0, applied=True))
        while not seen.all_at(number + 1):
            if time.monotonic() > began + case.bound_s:
                raise TimeoutError(f"round {number} is not over in {case.bound_s} s: {seen.versions}")
            time.sleep(WAIT_S)
            step += 1
            outer.after_step(StepInfo(step, 1.0, 0, 0, 1_000_000, step, 1.0, 1.0, applied=True))
        spans.append((began, time.monotonic()))
    error = task.error(values, "nesterov")
    pipe.send({"spans": spans[task.warm_up :], "error": error, "digest": values_digest(values)})
    pipe.recv()


def measure(case: Several) -> list[dict[str, Any]]:
    """Run ``case`` and return the sites' measurements."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        syncers = [
            started(stack, run_syncer, case, syncer, str(folder / f"syncer-{syncer}")) for syncer in range(case.syncers)
        ]
        addresses = [answer(syncer, case.bound_s) for syncer in syncers]
        relay = stack.enter_context(RelayProcess()) if case.link is not None else None
        jobs = []
        for index in range(case.task.sites):
            there = addresses
            if relay is not None and case.link is not None:
                there = [relay.add(f"{index}-{at}", case.link, address) for at, address in enumerate(addresses)]
            jobs.append((run_site, (case, str(folder / f"site-{index}"), there, index)))
        return in_processes(jobs, case.bound_s)


def rows_of(task: Task, codec: str, links: str, link: LinkOptions | None, *, both: bool) -> list[dict[str, Any]]:
    """Return the rows of one and two syncers, after a check that their values are right and the same."""
    found: dict[int, list[dict[str, Any]]] = {}
    for order in ((1, 2), (2, 1)) if both else ((1, 2),):
        for syncers in order:
            sites = measure(Several(task=task, codec=codec, syncers=syncers, link=link))
            worst = max(site["error"] for site in sites)
            if not worst <= error_max(codec):
                raise ValueError(f"the relative error of a site's values is {worst:g}")
            before = found.setdefault(syncers, sites)
            if before is not sites:
                for mine, more in zip(before, sites, strict=True):
                    mine["spans"] = [*mine["spans"], *more["spans"]]
                    assert mine["digest"] == more["digest"], "two runs of one seed differ"
    digests = [[site["digest"] for site in found[syncers]] for syncers in (1, 2)]
    assert digests[0] == digests[1], "two syncers give other values than one"
    rows: list[dict[str, Any]] = [
        {"links": links, "numel": task.numel, "sites": task.sites, "syncers": syncers, **spread(sites)}
        for syncers, sites in found.items()
    ]
    rows[-1]["ratio_to_one_syncer"] = rows[-1]["round_s_p50"] / rows[0]["round_s_p50"]
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each order, after the warm-up (default 7)")
    parser.add_argument("--codec", default="int4:32", help="codec of both directions")
    parser.add_argument("--numel", type=int, default=10_000_000)
    options = parser.parse_args()
    numel, rounds = (200_000, 2) if options.quick else (options.numel, options.rounds)
    task = Task(numel=numel, sites=SITES, rounds=rounds, seed=options.seed)
    rows: list[dict[str, Any]] = []
    ratio: dict[str, float] = {}
    for links, link in (("loopback", None), (f"{MBPS:g} Mbit/s", LinkOptions(rtt_ms=RTT_MS, mbps=MBPS))):
        found = rows_of(task, options.codec, links, link, both=not options.quick)
        for row in found:
            print(json.dumps(row), flush=True)
        rows += found
        ratio[links] = found[-1]["ratio_to_one_syncer"]
    config = {"fragments": FRAGMENTS, "rounds_of_each_order": rounds, "codec": options.codec, "rtt_ms": RTT_MS}
    config["kernels"] = kernel_library.description()
    result = record("several", config, rows, options.seed, repeats=rounds)
    finish({**result, "two_syncers_to_one": ratio}, save=options.save)


if __name__ == "__main__":
    main()
