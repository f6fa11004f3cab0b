"""How much slower does a site train with the agent on, beside the same trainer alone?

One process trains the demo's model on the standard library's text.  It runs in blocks of steps, by turns without an
agent and with one that seals, sends, fetches and adopts against a syncer in another process on this machine, so that
the machine's moods fall on both alike.  The ratio is that of the medians; ``after_step`` is the time that the training
thread spends for the outer world.  The agent's threads and the syncer share the cores: with as few as two the ratio
holds their work as well.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.record import add_arguments, finish, percentile, record
from diloco.inner.data import DataOptions, TokenStream, prepare_corpus
from diloco.inner.model import ModelOptions, Transformer
from diloco.inner.optimizer import InnerOptions, build_optimizers
from diloco.inner.parallel import SiteGroup
from diloco.inner.trainer import StepInfo, Trainer, TrainerOptions, Verdict
from diloco.learner.agent import Agent
from diloco.learner.options import AgentOptions
from diloco.outer.fragments import Layout, named_parameters_once, plan_layout
from diloco.outer.optimizer import OuterOptimizerOptions
from diloco.sync.agreement import PROTOCOL, Agreement
from diloco.sync.options import LearnerOptions, OuterOptions
from diloco.syncer.options import RunPlan, SyncerOptions
from diloco.syncer.server import Syncer
from diloco.wire.client import SyncClient
from diloco.wire.options import ServerOptions
from diloco.wire.security import SecurityOptions

if TYPE_CHECKING:
    from collections.abc import Callable

CODEC = "int4:32+zstd1"
MODEL = ModelOptions(vocab_size=1025, layers=4, dim=128, heads=4, context=128)


def quiet(what: str, fields: dict[str, object]) -> None:
    """Nobody reads the events of a benchmark."""


def layout_of(model: torch.nn.Module) -> Layout:
    parameters = named_parameters_once(model)
    return plan_layout([(name, tuple(values.shape)) for name, values in parameters.items()], 1)


def agreement_of(layout: Layout) -> Agreement:
    return Agreement(PROTOCOL, "bench", 1, layout.fingerprint, {"codec": CODEC})


def run_syncer(folder: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    layout = layout_of(Transformer(MODEL))
    outer = OuterOptions(quorum=1, grace="fixed", grace_ns=0)
    plan = RunPlan(
        agreement_of(layout), layout, "bench", outer, OuterOptimizerOptions(kind="sgd", lr=1.0, momentum=0.0)
    )
    options = SyncerOptions(folder=folder, up_codecs=[CODEC], down_codec=CODEC, linger_s=0.0)
    zero = [torch.zeros(fragment.numel) for fragment in layout.fragments]
    syncer = Syncer(options, plan, lambda: zero, ServerOptions(run_id="bench"), SecurityOptions(), quiet)
    pipe.send(syncer.start())
    pipe.recv()


class Blocks:
    """The line after each step: the agent's in its own blocks, nothing in the others."""

    def __init__(self, agent: Agent, steps: int) -> None:
        self._agent, self._steps = agent, steps
        self.step_s: dict[bool, list[float]] = {True: [], False: []}
        self.after_step_s: list[float] = []
        self._own_step = 0

    def after_step(self, info: StepInfo) -> Verdict:
        """Hand the step to the agent in every other block."""
        with_agent = (info.step - 1) // self._steps % 2 == 1
        if info.step > self._steps:  # The first block is the warm-up of both.
            self.step_s[with_agent].append(info.step_ns / 1e9)
        if with_agent:
            self._own_step += 1
            began = time.perf_counter()
            mine = StepInfo(
                self._own_step,
                info.loss,
                info.tokens,
                info.tokens_total,
                info.step_ns,
                info.cursor,
                info.grad_norm,
                info.lr,
                info.applied,
            )
            self._agent.after_step(mine)
            self.after_step_s.append(time.perf_counter() - began)
        return Verdict()


def measure(steps: int, blocks: int, inner_steps: int, seed: int, folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    manifest = prepare_corpus(DataOptions(), Path(folder) / "data")
    stream = TokenStream(manifest, "train", MODEL.context, 16, seed=seed)
    group, model = SiteGroup(device="cpu"), Transformer(MODEL)
    trainer = Trainer(
        model, build_optimizers(model, InnerOptions(optimizer="muon")), stream, TrainerOptions(seed=seed), group
    )
    layout = layout_of(model)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    syncer = context.Process(target=run_syncer, args=(str(folder / "syncer"), theirs), daemon=True)
    syncer.start()
    try:
        if not ours.poll(60.0):
            raise TimeoutError("the syncer did not start in 60 s")
        agent = Agent(
            AgentOptions(folder=str(folder / "site"), up_codec=CODEC, finish_timeout_s=5.0),
            LearnerOptions(inner_steps=inner_steps),
            layout,
            named_parameters_once(model),
            agreement_of(layout),
            SyncClient(ours.recv(), "site", "bench"),
            "site",
            quiet,
            group,
        )
        start: Callable[[], int] = agent.start
        start()
        # The syncer's version 0 is zeros, from which nothing learns: go on from a model's own first values.
        fresh = named_parameters_once(Transformer(MODEL))
        with torch.no_grad():
            for name, values in named_parameters_once(model).items():
                values.copy_(fresh[name])
        counting = Blocks(agent, steps)
        trainer.run(until_step=steps * blocks, after_step=counting.after_step)
        agent.finish()
    finally:
        syncer.kill()
        syncer.join(30.0)
    return row(counting)


def row(counting: Blocks) -> dict[str, Any]:
    alone, beside = counting.step_s[False], counting.step_s[True]
    return {
        "step_s_p50_alone": percentile(alone, 50),
        "step_s_p95_alone": percentile(alone, 95),
        "step_s_p50_agent": percentile(beside, 50),
        "step_s_p95_agent": percentile(beside, 95),
        "after_step_s_p50": percentile(counting.after_step_s, 50),
        "after_step_s_p95": percentile(counting.after_step_s, 95),
        "after_step_s_max": max(counting.after_step_s),
        "stall_share": sum(counting.after_step_s) / (sum(beside) + sum(counting.after_step_s)),
        "ratio_of_step_p50": percentile(beside, 50) / percentile(alone, 50),
        "steps_each": len(beside),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add_arguments(parser)
    parser.add_argument("--steps", type=int, default=30, help="inner steps in a block")
    parser.add_argument("--blocks", type=int, default=13, help="blocks, the first of which is warm-up")
    parser.add_argument("--inner-steps", type=int, default=15, help="inner steps between two updates")
    options = parser.parse_args()
    steps, blocks = (4, 4) if options.quick else (options.steps, options.blocks)
    inner_steps = 2 if options.quick else options.inner_steps
    with tempfile.TemporaryDirectory() as folder:
        found = measure(steps, blocks, inner_steps, options.seed, Path(folder))
    config = {"steps": steps, "blocks": blocks, "inner_steps": inner_steps, "codec": CODEC, "model": "4x128"}
    finish(record("agent", config, [found], options.seed, repeats=blocks), save=options.save)


if __name__ == "__main__":
    main()
