"""A real syncer in this process, from settings as a user gives them, and a small model for loops of all kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import diloco
from diloco.config.compose import compose
from diloco.config.model_files import save_version0
from diloco.config.run_dir import RunDir
from diloco.learner.agent import Agent
from diloco.syncer.server import Syncer
from tests.models.pasts import syncer_of
from tests.runs.processes import wait_for

QUICK = ["outer.inner_steps=5", "codec.up=fp32", "codec.down=fp32", "outer.final_wait_s=2", "outer.site_timeout_s=60"]
PATIENT = "outer.final_wait_s=60"
"""For sites that are processes or have libraries beside them: what they send last comes when the machine lets them."""
TOKENS = 10
"""Of one step."""


@dataclass(frozen=True)
class Served:
    """The syncer, and where it is."""

    syncer: Syncer
    address: str


@contextmanager
def serving(folder: Path, *settings: str, model: nn.Module | None = None) -> Iterator[Served]:
    """A syncer of run ``mine`` whose version 0 is what ``model`` holds."""
    with serving_file(folder, save_version0(model or small_model(1), folder / "v0.safetensors"), *settings) as served:
        yield served


@contextmanager
def serving_file(folder: Path, first: Path, *settings: str) -> Iterator[Served]:
    """A syncer of run ``mine`` whose version 0 is in the file ``first``."""
    mine = ["run.name=mine", "model.kind=file", f"run.init_from={first}", "cluster.syncer.listen=127.0.0.1:0"]
    config = compose([*mine, *QUICK, *settings])
    syncer = syncer_of(config, RunDir(folder / "served"))
    try:
        yield Served(syncer, syncer.start())
    finally:
        syncer.stop(0.1)


def small_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def cold_model() -> nn.Sequential:
    """What a site that has not joined holds: were anything made of it, it would be seen."""
    model = small_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    return model


def batch_loss(model: nn.Module, step: int) -> Tensor:
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
    return (model(inputs) - inputs.sum(1, keepdim=True).sin()).square().mean()


def backward(model: nn.Module, step: int) -> float:
    """The gradient of one batch; its loss."""
    loss = batch_loss(model, step)
    loss.backward()
    return float(loss.detach())


def mean_loss(model: nn.Module) -> float:
    """The loss over 64 batches that no step sees: over one batch of 16 examples it is mostly noise."""
    with torch.no_grad():
        return float(torch.stack([batch_loss(model, 100_000 + number) for number in range(64)]).mean())


def until_stop(step: Callable[[int], bool]) -> int:
    """Call ``step`` with 0, 1, ... until it says that it should stop; how often it was called."""
    for number in range(20_000):
        if step(number):
            return number + 1
    raise AssertionError("the run had not ended after 20,000 steps")


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def balanced(ledger: dict[str, int]) -> bool:
    return ledger["processed"] == sum(count for name, count in ledger.items() if name != "processed")


def supplied(outer: diloco.Outer, unit: int) -> None:
    """Wait until 40 samples lie ahead of the loop, as far as it is to go on: it is faster than any real one, and
    where its list ends it would draw its own over again."""
    agent = outer._agent
    if isinstance(agent, Agent):
        state = agent.machine.state
        enough = lambda: state.units.end * unit >= state.cursor + 40  # noqa: E731
        wait_for(lambda: enough() or state.stopping or state.left, "units of the data")
