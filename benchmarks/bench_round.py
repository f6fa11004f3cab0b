"""What does one outer round cost end to end on loopback, beside torch's own way on the same machine in the same run?

Ours: a syncer process and M site processes in lock-step.  A round is: copy the values out, pseudo-gradient, encode,
outbox, push, spool, fsync, merge, outer Nesterov step, encode the down-link, pull, decode, adopt; measured at the sites
as the time inside ``after_step``.  Bytes are a site's, the whole fragment at its join included.  Beside it: M processes
that average the same number of fp32 values with gloo ``all_reduce`` and take the same outer step (``bare``: the average
alone).  Nothing trains; every round adds seeded noise to the values.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.record import add_arguments, finish, percentile, record
from diloco.inner.parallel import SiteGroup
from diloco.inner.trainer import StepInfo
from diloco.learner.agent import Agent
from diloco.learner.options import AgentOptions
from diloco.outer.fragments import plan_layout
from diloco.outer.optimizer import OuterOptimizerOptions, outer_step
from diloco.sync.agreement import PROTOCOL, Agreement
from diloco.sync.options import LearnerOptions, OuterOptions
from diloco.syncer.options import RunPlan, SyncerOptions
from diloco.syncer.server import Syncer
from diloco.wire.client import SyncClient
from diloco.wire.options import ServerOptions
from diloco.wire.security import SecurityOptions

NUM_TENSORS = 20
WARM_UP = 2
OPTIMIZER = {"kind": "nesterov", "lr": 0.7, "momentum": 0.9}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One cell of the table."""

    numel: int
    sites: int
    codec: str
    rounds: int
    seed: int

    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """The parameters, equal in size."""
        each = self.numel // NUM_TENSORS
        return [(f"w{index:02d}", (each,)) for index in range(NUM_TENSORS)]


def quiet(what: str, fields: dict[str, object]) -> None:
    """Nobody reads the events of a benchmark."""


def agreement(case: Case) -> Agreement:
    return Agreement(PROTOCOL, "bench", 1, plan_layout(case.shapes(), 1).fingerprint, {"codec": case.codec})


def run_syncer(case: Case, folder: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    layout = plan_layout(case.shapes(), 1)
    outer = OuterOptions(quorum="all", quorum_min=case.sites, grace="fixed", grace_ns=0, weights="uniform")
    plan = RunPlan(agreement(case), layout, "bench", outer, OuterOptimizerOptions(**OPTIMIZER))  # type: ignore[arg-type]
    options = SyncerOptions(
        folder=folder, up_codecs=[case.codec], down_codec=case.codec, snapshot_every=1 << 30, linger_s=0.0
    )
    network = ServerOptions(run_id="bench", chunk_bytes=1 << 20)
    syncer = Syncer(options, plan, lambda: [torch.zeros(case.numel)], network, SecurityOptions(), quiet)
    pipe.send(syncer.start())
    pipe.recv()
    # The last snapshot is no part of a round, and nobody wants this state: end without it.
    pipe.close()


def run_site(case: Case, folder: str, address: str, name: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    layout = plan_layout(case.shapes(), 1)
    parameters = {parameter: torch.zeros(shape) for parameter, shape in case.shapes()}
    client = SyncClient(address, name, "bench")
    agent = Agent(
        AgentOptions(folder=folder, up_codec=case.codec, finish_timeout_s=1.0),
        LearnerOptions(inner_steps=1, lock_step=True),
        layout,
        parameters,
        agreement(case),
        client,
        name,
        quiet,
        SiteGroup(),
    )
    agent.start()
    seconds = []
    for step in range(1, case.rounds + WARM_UP + 1):
        disturb(list(parameters.values()), case.seed + step)
        began = time.perf_counter()
        agent.after_step(StepInfo(step, 1.0, 1, step, 1_000_000, step, 1.0, 1.0, applied=True))
        seconds.append(time.perf_counter() - began)
    pipe.send({"seconds": seconds[WARM_UP:], "bytes_up": client.bytes_up, "bytes_down": client.bytes_down})
    pipe.recv()


def disturb(values: list[torch.Tensor], seed: int) -> None:
    dice = torch.Generator().manual_seed(seed)
    for tensor in values:
        tensor.add_(torch.randn(1, generator=dice) * 1e-3)
        tensor[: min(4096, len(tensor))].add_(torch.randn(min(4096, len(tensor)), generator=dice), alpha=1e-3)


def run_gloo(case: Case, rank: int, port: int, step_too: bool, pipe: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=case.sites,
        timeout=timedelta(seconds=120),
    )
    theta = [torch.zeros(shape) for _, shape in case.shapes()]
    momenta: list[torch.Tensor | None] = [None] * len(theta)
    optimizer = OuterOptimizerOptions(**OPTIMIZER)  # type: ignore[arg-type]
    local = [values.clone() for values in theta]
    seconds = []
    for step in range(case.rounds + WARM_UP):
        disturb(local, case.seed + step)
        dist.barrier()
        began = time.perf_counter()
        for index in range(len(theta)):
            d = torch.sub(theta[index], local[index]) if step_too else local[index]
            dist.all_reduce(d)
            d.div_(case.sites)
            if step_too:
                theta[index], momenta[index] = outer_step(theta[index], d, momenta[index], optimizer)
                local[index].copy_(theta[index])
        seconds.append(time.perf_counter() - began)
    pipe.send({"seconds": seconds[WARM_UP:]})
    pipe.recv()
    dist.destroy_process_group()


def in_processes(jobs: list[tuple[Any, tuple[Any, ...]]], bound_s: float) -> list[dict[str, Any]]:
    """Run ``jobs`` in processes of their own and return what each sends; they end when all have."""
    context = multiprocessing.get_context("spawn")
    started = []
    for target, arguments in jobs:
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(*arguments, theirs), daemon=True)
        process.start()
        started.append((process, ours))
    answers = []
    for process, pipe in started:
        if not pipe.poll(bound_s):
            raise TimeoutError(f"no answer from {process.name} in {bound_s} s")
        answers.append(pipe.recv())
    for process, pipe in started:
        pipe.send("end")
        process.join(30.0)
        process.kill()
    return answers


def measure_ours(case: Case, bound_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        syncer = context.Process(target=run_syncer, args=(case, str(Path(folder) / "syncer"), theirs), daemon=True)
        syncer.start()
        try:
            if not ours.poll(bound_s):
                raise TimeoutError(f"the syncer did not start in {bound_s} s")
            address = ours.recv()
            jobs = [
                (run_site, (case, str(Path(folder) / name), address, name))
                for name in (f"site-{index}" for index in range(case.sites))
            ]
            answers = in_processes(jobs, bound_s)
        finally:
            syncer.kill()
            syncer.join(30.0)
    return {
        "bytes_up_per_round": answers[0]["bytes_up"] // (case.rounds + WARM_UP),
        "bytes_down_per_round": answers[0]["bytes_down"] // (case.rounds + WARM_UP),
        **spread([answer["seconds"] for answer in answers]),
    }


def measure_gloo(case: Case, step_too: bool, bound_s: float) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    jobs = [(run_gloo, (case, rank, port, step_too)) for rank in range(case.sites)]
    return spread([answer["seconds"] for answer in in_processes(jobs, bound_s)])


def spread(by_site: list[list[float]]) -> dict[str, float]:
    """A round lasts until its slowest site is done."""
    rounds = [max(seconds) for seconds in zip(*by_site, strict=True)]
    return {"round_s_p50": percentile(rounds, 50), "round_s_p95": percentile(rounds, 95)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--codecs", nargs="+", default=["int4:32", "int8", "fp32"], help="of both directions")
    parser.add_argument("--bound-s", type=float, default=300.0, help="longest wait for one case")
    options = parser.parse_args()
    sizes = [200_000] if options.quick else [10_000_000, 100_000_000]
    rounds = 3 if options.quick else options.rounds
    rows: list[dict[str, Any]] = []
    for numel in sizes:
        for sites in (2,) if options.quick else (2, 4):
            base = Case(numel=numel, sites=sites, codec="fp32", rounds=rounds, seed=options.seed)
            beside = measure_gloo(base, True, options.bound_s)
            facts = {"numel": numel, "sites": sites}
            rows.append({**facts, "system": "gloo all_reduce, bare", **measure_gloo(base, False, options.bound_s)})
            rows.append({**facts, "system": "gloo all_reduce + outer step", **beside})
            for codec in options.codecs:
                case = Case(**{**asdict(base), "codec": codec})
                row = {**facts, "system": f"diloco {codec}", **measure_ours(case, options.bound_s)}
                row["ratio_to_gloo_and_step"] = row["round_s_p50"] / beside["round_s_p50"]
                rows.append(row)
                print(json.dumps(row), flush=True)
    config = {"tensors": NUM_TENSORS, "rounds": rounds, "warm_up": WARM_UP, "optimizer": OPTIMIZER}
    finish(record("round", config, rows, options.seed, repeats=rounds), save=options.save)


if __name__ == "__main__":
    main()
