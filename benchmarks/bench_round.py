"""What does one outer round cost end to end on loopback, beside torch's own way on the same machine in the same run?

Ours: a syncer process and M site processes in lock-step, as ``rounds`` describes.  Bytes are a site's, without what its
join brought.  Beside it: M processes that average the same number of fp32 values with gloo ``all_reduce`` and take the
same outer step (``bare``: the average alone).  The values that both end with are held against what they should be.
"""

from __future__ import annotations

import argparse
import json
import socket
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.peers.task import NUM_TENSORS, Task
from benchmarks.record import add_arguments, finish, record
from benchmarks.rounds import OPTIMIZER, Case, error_max, in_processes, measure_ours, spread
from diloco.outer.optimizer import OuterOptimizerOptions, outer_step


def run_gloo(task: Task, rank: int, port: int, step_too: bool, pipe: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=task.sites,
        timeout=timedelta(seconds=120),
    )
    theta = [torch.zeros(shape) for _, shape in task.shapes()]
    momenta: list[torch.Tensor | None] = [None] * len(theta)
    optimizer = OuterOptimizerOptions(**OPTIMIZER)  # type: ignore[arg-type]
    local = [values.clone() for values in theta]
    values = [tensor.numpy() for tensor in local]
    spans = []
    for step in range(task.rounds_in_all):
        task.disturb(values, rank, step)
        dist.barrier()
        began = time.monotonic()
        for index in range(len(theta)):
            d = torch.sub(theta[index], local[index]) if step_too else local[index]
            dist.all_reduce(d)
            d.div_(task.sites)
            if step_too:
                theta[index], momenta[index] = outer_step(theta[index], d, momenta[index], optimizer)
                local[index].copy_(theta[index])
        spans.append((began, time.monotonic()))
    rule = "nesterov" if step_too else "mean"
    pipe.send({"spans": spans[task.warm_up :], "error": task.error(values, rule)})
    pipe.recv()
    dist.destroy_process_group()


def measure_gloo(task: Task, step_too: bool, bound_s: float) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return checked(in_processes([(run_gloo, (task, rank, port, step_too)) for rank in range(task.sites)], bound_s), "")


def checked(sites: list[dict[str, Any]], codec: str) -> dict[str, Any]:
    """The row of these sites, once they are known to have ended with the right values."""
    worst = max(site["error"] for site in sites)
    allowed = error_max(codec)
    if not worst <= allowed:
        raise ValueError(f"a site's values are {worst:g} of the way from what they should be: {allowed:g} is allowed")
    return {**spread(sites), "error": worst}


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
            task = Task(numel=numel, sites=sites, rounds=rounds, seed=options.seed)
            beside = measure_gloo(task, True, options.bound_s)
            facts = {"numel": numel, "sites": sites}
            rows.append({**facts, "system": "gloo all_reduce, bare", **measure_gloo(task, False, options.bound_s)})
            rows.append({**facts, "system": "gloo all_reduce + outer step", **beside})
            for codec in options.codecs:
                found = measure_ours(Case(task=task, codec=codec), options.bound_s)["sites"]
                row = {**facts, "system": f"diloco {codec}", **checked(found, codec)}
                row |= {f"{way}_per_round": found[0][way] // task.rounds_in_all for way in ("bytes_up", "bytes_down")}
                row["ratio_to_gloo_and_step"] = row["round_s_p50"] / beside["round_s_p50"]
                rows.append(row)
                print(json.dumps(row), flush=True)
    config = {"tensors": NUM_TENSORS, "rounds": rounds, "warm_up": task.warm_up, "optimizer": OPTIMIZER}
    finish(record("round", config, rows, options.seed, repeats=rounds), save=options.save)


if __name__ == "__main__":
    main()
