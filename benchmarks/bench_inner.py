"""How much slower is our trainer, without an agent and under one, than a bare torch loop of the same model?

Each rank holds the model twice and trains both in alternating blocks of steps: one with ``Trainer``, one with the loop
that users write by hand (batch, forward, backward, clip, step), with the same text, optimizer, precision and, for two
ranks, DDP.  The order changes with every pair of blocks.  ``overhead`` is 1 - (the loop's time) / (the trainer's), the
median over neighbouring blocks; ``cpu_overhead`` is the same for the training thread's CPU time, which other load on
the machine disturbs less.  The loop omits what the trainer does in addition: it exchanges no loss with other ranks,
checks for no NaN, measures no step, and has no schedule.

``optimizer_share`` is the share of clipping and the optimizers in the loop's CPU time, which is plain torch's; it may
be at most ``OPTIMIZER_SHARE_MAX`` on any kind of machine.

In the cases that end in ``under-agent``, rank 0 has an agent, with a syncer in its own process (int4, four fragments,
overlap 2), and the agent is idle before the loop's turn.  No thread is pinned and no time is deducted: where two ranks
have two cores, all work of agent and syncer takes time from the ranks.  ``syncer_cpu_share`` is the syncer's share of a
core in that time, which with real sites another machine bears: ``speed_kept_p50_syncer_elsewhere`` deducts its CPU
time.

The processes never return memory to the system (glibc's thresholds): otherwise either loop may return its memory after
a step and allocate it again, by chance, which costs 4 % of a step.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.bench_trainer import BATCH, CODEC, MODEL, NUM_FRAGMENTS, layout_of, rest, run_syncer, started_agent
from benchmarks.record import finish, parser_of, percentile, record
from benchmarks.rounds import answer, free_port, quiet, started
from diloco.inner.corpus import DataOptions, prepare_corpus
from diloco.inner.data import TokenStream
from diloco.inner.holding import Holding, Spread
from diloco.inner.model import Transformer, flops_per_token, next_token_loss
from diloco.inner.optimizer import InnerOptimizers, InnerOptions, build_optimizers
from diloco.inner.parallel import SiteGroup
from diloco.inner.precision import autocast_dtype, resolve_precision
from diloco.inner.trainer import StepInfo, Trainer, TrainerOptions, Verdict
from diloco.learner.agent import Agent
from diloco.learner.exchange import Follower
from diloco.outer.fragments import named_parameters_once

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

WARM_PAIRS = 1
ANSWER_S_MAX = 600.0
OPTIMIZER_SHARE_MAX = 0.25
KEPT_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(1 << 30)}


class Loop:
    """The loop that a user writes without us."""

    def __init__(self, model: Transformer, wrapped: torch.nn.Module, stream: TokenStream, precision: str) -> None:
        self._model, self._wrapped, self._stream = model, wrapped, stream
        # Our own optimizers, without the code around them.
        ours: InnerOptimizers = build_optimizers(model, InnerOptions(optimizer="muon"), precision)
        self._optimizers = list(ours._parts.values())
        self._dtype = autocast_dtype(precision, torch.device("cpu"))
        self._cursor = 0
        self.optimizer_cpu_s = 0.0
        """CPU seconds of the optimizers in all steps so far."""

    def run(self, steps: int) -> None:
        """Train on the next ``steps`` batches."""
        for _ in range(steps):
            inputs, targets = self._stream.batch(self._cursor)
            self._cursor += self._stream.sequences_per_batch
            with torch.autocast("cpu", dtype=self._dtype, enabled=self._dtype is not None):
                # In one line, so that the logits are freed before the backward pass allocates.
                loss = next_token_loss(self._wrapped(inputs), targets)
            loss.backward()
            began_s = time.thread_time()
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            for optimizer in self._optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            self.optimizer_cpu_s += time.thread_time() - began_s


@dataclass(frozen=True, slots=True)
class Facts:
    """The arguments of every rank.  An empty ``syncer`` address: no agent."""

    world: int
    port: int
    data: str
    syncer: str
    syncer_pid: int
    inner_steps: int
    seed: int
    steps: int
    pairs: int


class NoAgent:
    """The hook after each step of a trainer without an agent."""

    def after_step(self, info: StepInfo) -> Verdict:
        """Continue training."""
        del info
        return Verdict()


def line_of(model: torch.nn.Module, group: SiteGroup, facts: Facts) -> NoAgent | Agent | Follower:
    """Return the started counterpart of this rank's trainer: an agent, a follower or none."""
    if not facts.syncer:
        return NoAgent()
    if group.rank:
        follower = Follower([layout_of(model)], Holding(named_parameters_once(model), group), "rebase", {})
        follower.follow()
        return follower
    folder = str(Path(facts.data) / "site")
    return started_agent(folder, facts.syncer, "site", facts.inner_steps, model, group, quiet)


def cpu_s_of(pid: int) -> float:
    """Return the user and system CPU seconds of a process."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def run_rank(rank: int, facts: Facts, pipe: Any) -> None:
    """Run both loops in turns; rank 0 sends the times of each pair."""
    torch.set_num_threads(1)
    told = (rank, rank, facts.world, "127.0.0.1", facts.port)
    group = SiteGroup(*told, device="cpu") if facts.world > 1 else SiteGroup(device="cpu")
    manifest = prepare_corpus(DataOptions(), Path(facts.data))

    def stream() -> TokenStream:
        return TokenStream(manifest, "train", MODEL.context, BATCH, rank=rank, world=facts.world, seed=facts.seed)

    ours, theirs = Transformer(MODEL, facts.seed), Transformer(MODEL, facts.seed)
    precision = resolve_precision("auto", group.device, group)
    optimizers = build_optimizers(ours, InnerOptions(optimizer="muon"), precision)
    options = TrainerOptions(precision=precision, seed=facts.seed)
    trainer = Trainer(ours, optimizers, stream(), options, Spread(ours, group))
    loop, line = Loop(theirs, group.wrap(theirs), stream(), precision), line_of(ours, group, facts)
    trainer.may_act = line.may_act if isinstance(line, Agent) else lambda: False

    both: list[tuple[str, Callable[[], object]]] = [
        ("ours", lambda: trainer.run(until_step=trainer.step + facts.steps, after_step=line.after_step)),
        ("bare", lambda: loop.run(facts.steps)),
    ]
    found = []
    for pair in range(facts.pairs + WARM_PAIRS):
        row: dict[str, float] = {}
        for name, block in both if pair % 2 else both[::-1]:
            group.all_reduce_sum([0.0])  # All ranks begin together.
            began_s, began_cpu_s = time.perf_counter(), time.thread_time()
            syncer_s, optimizer_s = cpu_s_of(facts.syncer_pid) if facts.syncer else 0.0, loop.optimizer_cpu_s
            block()
            row[f"{name}_s"] = time.perf_counter() - began_s
            row[f"{name}_cpu_s"] = time.thread_time() - began_cpu_s
            row[f"{name}_optimizer_cpu_s"] = loop.optimizer_cpu_s - optimizer_s
            if facts.syncer:
                row[f"{name}_syncer_cpu_s"] = cpu_s_of(facts.syncer_pid) - syncer_s
                rest()
        found.append(row)
    if rank == 0:
        pipe.send(found[WARM_PAIRS:])


def measure(world: int, agent: bool, arguments: argparse.Namespace, data: str) -> dict[str, Any]:
    """Return the row of a site with ``world`` ranks."""
    port = free_port()
    with ExitStack() as stack:
        syncer, pid = "", 0
        if agent:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            last_core = max(os.sched_getaffinity(0))
            syncer, pid = answer(started(stack, run_syncer, folder, arguments.seed, last_core), ANSWER_S_MAX)
        told = (syncer, pid, arguments.inner_steps, arguments.seed, arguments.steps, arguments.pairs)
        pipes = [started(stack, run_rank, rank, Facts(world, port, data, *told)) for rank in range(world)]
        return row_of(world, agent, arguments.steps, answer(pipes[0], ANSWER_S_MAX))


def row_of(world: int, agent: bool, steps: int, pairs: list[dict[str, float]]) -> dict[str, Any]:
    """Return the row of these pairs of blocks."""
    kept = [pair["bare_s"] / pair["ours_s"] for pair in pairs]
    cpu_kept = [pair["bare_cpu_s"] / pair["ours_cpu_s"] for pair in pairs]
    alone = [pair["bare_s"] / (pair["ours_s"] - pair.get("ours_syncer_cpu_s", 0.0)) for pair in pairs]
    step_s = percentile([pair["ours_s"] / steps for pair in pairs], 50)
    optimizer = [pair["bare_optimizer_cpu_s"] / pair["bare_cpu_s"] for pair in pairs]
    tokens_per_s = world * BATCH * MODEL.context / step_s
    return {
        "case": ("ddp-2" if world > 1 else "single") + ("-under-agent" if agent else ""),
        "overhead": 1 - percentile(kept, 50),
        "speed_kept_p50": percentile(kept, 50),
        "speed_kept_p5": percentile(kept, 5),
        "speed_kept_p95": percentile(kept, 95),
        "speed_kept_p50_syncer_elsewhere": percentile(alone, 50),
        "cpu_overhead": 1 - percentile(cpu_kept, 50),
        "optimizer_share_p50": percentile(optimizer, 50),
        "optimizer_share_p95": percentile(optimizer, 95),
        "step_ms_p50_ours": 1e3 * step_s,
        "step_ms_p50_bare": 1e3 * percentile([pair["bare_s"] / steps for pair in pairs], 50),
        "tokens_per_s": tokens_per_s,
        "model_gflops_per_s": tokens_per_s * flops_per_token(MODEL) / 1e9,
        "pairs": len(pairs),
        "syncer_cpu_share": sum(p.get("ours_syncer_cpu_s", 0.0) for p in pairs) / sum(p["ours_s"] for p in pairs),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=8, help="steps in a block")
    parser.add_argument("--pairs", type=int, default=24, help="pairs of blocks in each case")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks")
    parser.add_argument("--inner-steps", type=int, default=20, help="inner steps between two updates of one fragment")
    parser.add_argument("--agent", nargs="+", choices=("off", "on"), default=["off", "on"], help="with an agent or not")
    arguments = parser.parse_args()
    os.environ.update(KEPT_MEMORY)  # The ranks inherit it.
    if arguments.quick:
        arguments.steps, arguments.pairs, arguments.inner_steps = 2, 2, 4
    with tempfile.TemporaryDirectory() as data:
        prepare_corpus(DataOptions(), Path(data))
        rows = []
        for agent, world in product(arguments.agent, arguments.ranks):
            rows.append(measure(world, agent == "on", arguments, data))
            print(json.dumps(rows[-1]), flush=True)
    config = {
        "steps": arguments.steps,
        "batch": BATCH,
        "model": f"{MODEL.layers}x{MODEL.dim}",
        "optimizer": "muon",
        "threads": 1,
    }
    config |= {"products": resolve_precision("auto", torch.device("cpu"))}
    config |= {"inner_steps": arguments.inner_steps, "codec": CODEC, "fragments": NUM_FRAGMENTS}
    top = {f"overhead_{found['case'].replace('-', '_')}": found["overhead"] for found in rows}
    top |= {"optimizer_share": rows[0]["optimizer_share_p50"], "optimizer_share_max": OPTIMIZER_SHARE_MAX}
    finish({**record("inner", config, rows, arguments.seed, repeats=arguments.pairs), **top}, save=arguments.save)


if __name__ == "__main__":
    main()
