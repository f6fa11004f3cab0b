"""What does one outer round cost end to end on loopback, compared with torch's all-reduce and with no runtime at all?

Ours: a syncer process and M site processes in lock-step, as ``rounds`` describes, with everything on; four times, with
and without TLS and with and without fsync; ``core_ms`` is the CPU time of the one without.  In the same run and in both
orders: M processes that average the same number of fp32 values with gloo ``all_reduce`` and take the same outer step
(``bare``: only the average), and a loop of our own kernels over raw sockets (``bare_round``).  Bytes are those of a
site, without its join.

The results are checked: every system's values against the exact ones; ours and the loop's against each other, bit for
bit; and, where that does not take too long, against the plain definitions, also bit for bit.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.bare_round import measure_bare
from benchmarks.peers.task import NUM_TENSORS, Task
from benchmarks.record import finish, parser_of, record
from benchmarks.rounds import (
    OPTIMIZER,
    OUTER,
    Case,
    error_max,
    free_port,
    in_processes,
    measure_ours,
    settle,
    spread,
    tls_files,
    values_digest,
)
from diloco.codec import kernel_library
from diloco.codec.registry import make_codec
from diloco.codec.site_pass import publish
from diloco.outer.merge import merge_mean
from diloco.outer.optimizer import NOTHING, outer_step
from diloco.outer.pseudo_gradient import pseudo_gradient, rebase

GLOO, OURS, BARE = "gloo all_reduce + outer step", "diloco", "our kernels over raw sockets"
DEFINED_NUMEL_MAX = 10_000_000
"""The most values for which the plain definitions are computed too: for more they take longer than the benchmark."""


def run_gloo(task: Task, rank: int, port: int, step_too: bool, pipe: Any) -> None:
    settle()
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=task.sites,
        timeout=timedelta(seconds=120),
    )
    theta = [torch.zeros(shape) for _, shape in task.shapes()]
    states = [NOTHING] * len(theta)
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
                theta[index], states[index] = outer_step(theta[index], d, states[index], OUTER)
                local[index].copy_(theta[index])
        spans.append((began, time.monotonic()))
    rule = "nesterov" if step_too else "mean"
    pipe.send({"spans": spans[task.warm_up :], "error": task.error(values, rule)})
    pipe.recv()
    dist.destroy_process_group()


def measure_gloo(task: Task, step_too: bool, bound_s: float) -> list[dict[str, Any]]:
    port = free_port()
    return in_processes([(run_gloo, (task, rank, port, step_too)) for rank in range(task.sites)], bound_s)


def checked(sites: list[dict[str, Any]], codec: str) -> dict[str, Any]:
    """Return the row of these sites, after a check that they ended with the right values."""
    worst = max(site["error"] for site in sites)
    allowed = error_max(codec)
    if not worst <= allowed:
        raise ValueError(f"the relative error of a site's values is {worst:g}: {allowed:g} is allowed")
    return {**spread(sites), "error": worst}


def expected_digest(task: Task, codec: str) -> str:
    """Return the digests of the sites' final values, computed one by one with the definitions in plain torch."""
    coder, numel = make_codec(codec), task.numel
    theta, published, state = torch.zeros(numel), torch.zeros(numel), NOTHING
    models = [task.zeros() for _ in range(task.sites)]
    for step in range(task.rounds_in_all):
        sent = []
        for site, model in enumerate(models):
            task.disturb(model, site, step)
            local = torch.cat([torch.from_numpy(each) for each in model])
            sent.append(coder.decode(coder.encode(pseudo_gradient(published, local, [])), numel))
        merged = merge_mean([(1.0 / task.sites, [each]) for each in sent])
        theta, state = outer_step(theta, merged, state, OUTER)
        before, published = published, publish(theta, published, coder)[1]
        for model, own in zip(models, sent, strict=True):
            local = torch.cat([torch.from_numpy(each) for each in model])
            parts = rebase(local, before, published, [own]).split([each.size for each in model])
            for each, part in zip(model, parts, strict=True):
                each[:] = part.numpy()
    return " ".join(values_digest(model) for model in models)


@dataclass
class Cell:
    """One size and number of sites: the measurements of every system, from both orders."""

    task: Task
    codec: str
    bound_s: float
    tls: Mapping[str, str]
    sites: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    core_ms: dict[str, Any] = field(default_factory=dict)
    """CPU milliseconds of a round of ours: of all processes, and of the syncer and one site by thread."""

    def measure(self, *, backwards: bool) -> None:
        """Measure every system once, one after the other; those with TLS and fsync only in the forward order."""
        jobs: list[tuple[str, Callable[[], list[dict[str, Any]]]]] = [
            ("gloo all_reduce, bare", lambda: measure_gloo(self.task, False, self.bound_s)),
            (GLOO, lambda: measure_gloo(self.task, True, self.bound_s)),
            (OURS, lambda: self._ours(tls=False, synced=False)),
            (BARE, lambda: measure_bare(Case(task=self.task, codec=self.codec), self.bound_s)),
        ]
        dearer: list[tuple[str, Callable[[], list[dict[str, Any]]]]] = [
            ("diloco, fsync", lambda: self._ours(tls=False, synced=True)),
            ("diloco, TLS", lambda: self._ours(tls=True, synced=False)),
            ("diloco, TLS and fsync", lambda: self._ours(tls=True, synced=True)),
        ]
        for name, job in reversed(jobs) if backwards else [*jobs, *dearer]:
            found = job()
            checked(found, "" if name.startswith("gloo") else self.codec)
            before = self.sites.setdefault(name, found)
            if before is not found:
                for mine, more in zip(before, found, strict=True):
                    mine["spans"] = [*mine["spans"], *more["spans"]]
                    assert mine.get("digest") == more.get("digest"), f"{name}: two runs of one seed differ"

    def _ours(self, *, tls: bool, synced: bool) -> list[dict[str, Any]]:
        case = Case(task=self.task, codec=self.codec, synced=synced, tls=self.tls if tls else {})
        found = measure_ours(case, self.bound_s)
        sites = [site.pop("core_ms") for site in found["sites"]]
        if not tls and not synced:
            whole = found["core_ms"]["all"] + sum(site["all"] for site in sites)
            self.core_ms = {"all": round(whole, 1), "syncer": found["core_ms"], "site": sites[0]}
        return list(found["sites"])

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each system, after a comparison of their values."""
        wanted = expected_digest(self.task, self.codec) if self.task.numel <= DEFINED_NUMEL_MAX else None
        rows = []
        for name, sites in self.sites.items():
            row: dict[str, Any] = {"numel": self.task.numel, "sites": self.task.sites, "system": name, **spread(sites)}
            row["error"] = max(site["error"] for site in sites)
            if not name.startswith("gloo"):
                digests = " ".join(site["digest"] for site in sites)
                beside = " ".join(site["digest"] for site in self.sites[BARE])
                assert digests == beside, f"{name}: the values differ from those of {BARE}"
                assert wanted in (None, digests), f"{name}: the values differ from the definitions'"
                row["ratio_to_gloo_and_step"] = row["round_s_p50"] / self.median_s(GLOO)
                row["ratio_to_bare_loop"] = row["round_s_p50"] / self.median_s(BARE)
            if "bytes_up" in sites[0]:
                ways = ("bytes_up", "bytes_down")
                row |= {f"{way}_per_round": sites[0][way] // self.task.rounds_in_all for way in ways}
            rows.append(row)
        return rows

    def median_s(self, name: str) -> float:
        """Return the median of all rounds of a system, from both orders."""
        return spread(self.sites[name])["round_s_p50"]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each order, after the warm-up (default 7)")
    parser.add_argument("--codec", default="int4:32", help="codec of both directions")
    parser.add_argument("--numels", type=int, nargs="+", default=[10_000_000, 100_000_000])
    parser.add_argument("--bound-s", type=float, default=600.0, help="longest wait for one case")
    options = parser.parse_args()
    sizes = [200_000] if options.quick else options.numels
    rounds = 2 if options.quick else options.rounds
    rows: list[dict[str, Any]] = []
    speedup: dict[str, float] = {}
    ratio: dict[str, float] = {}
    core_ms: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        tls = tls_files(Path(folder))
        for numel in sizes:
            for sites in (2,) if options.quick else (2, 4):
                task = Task(numel=numel, sites=sites, rounds=rounds, seed=options.seed)
                cell = Cell(task, options.codec, options.bound_s, tls)
                for backwards in (False,) if options.quick else (False, True):
                    cell.measure(backwards=backwards)
                rows += cell.rows()
                name = f"{sites}x{numel // 1_000_000}M"
                speedup[name] = cell.median_s(GLOO) / cell.median_s(OURS)
                ratio[name] = cell.median_s(OURS) / cell.median_s(BARE)
                core_ms[name] = cell.core_ms
                for row in rows[-len(cell.sites) :]:
                    print(json.dumps(row), flush=True)
    config = {"tensors": NUM_TENSORS, "rounds_of_each_order": rounds, "codec": options.codec, "optimizer": OPTIMIZER}
    config["kernels"] = kernel_library.description()
    result = record("round", config, rows, options.seed, repeats=rounds)
    top = {"speedup_vs_gloo_outer": speedup, "ratio_to_bare_loop": ratio, "core_ms": core_ms}
    finish({**result, **top}, save=options.save)


if __name__ == "__main__":
    main()
