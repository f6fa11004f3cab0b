"""Realistic pseudo-gradients for admission: a small model trained at several sites, to which faults happen.

One process and no network; the mathematics is the product's own.  A site trains a byte-level transformer with AdamW
under warm-up and decay, sends its pseudo-gradient after a number of steps, and adopts the version that contains its
update (``rebase``).  ``poisoning`` makes a site of a real run send poison.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from diloco.inner.model import ModelOptions, Transformer, next_token_loss
from diloco.inner.optimizer import InnerOptimizers, InnerOptions, build_optimizers, lr_factor
from diloco.learner.seal import SealJob
from diloco.learner.tensors import SealInputs
from diloco.learner.transfer import Sealer
from diloco.outer.fragments import gather, plan_layout, scatter
from diloco.outer.merge import merge_mean
from diloco.outer.optimizer import NOTHING, OuterOptimizerOptions, outer_step
from diloco.outer.pseudo_gradient import pseudo_gradient, rebase

MODEL = ModelOptions(vocab_size=256, layers=2, dim=32, heads=2, context=32)
SITES = ("a", "b", "c", "d")
FRAGMENTS, INNER_STEPS, BATCH = 2, 2, 8


@dataclass(frozen=True, slots=True)
class Sent:
    """One update as the syncer receives it: ``gradient`` is decoded, ``momentum`` is the fragment's at that time."""

    site: str
    fragment: int
    gradient: Tensor
    momentum: Tensor | None
    version: int


@dataclass(slots=True)
class Place:
    """A site: its model, its optimizer and its base versions."""

    name: str
    model: Transformer
    inner: InnerOptimizers
    base: list[Tensor]
    steps: int = 0


class Training:
    """A run in which every site has an update in each of the ``rounds``."""

    def __init__(self, rounds: int, seed: int) -> None:
        torch.set_num_threads(1)
        self.rounds = rounds
        self.text = _text()
        self.generator = torch.Generator().manual_seed(seed)
        self.options = InnerOptions(lr=0.003, warmup_steps=20)
        first = dict(Transformer(MODEL, seed).named_parameters())
        self.layout = plan_layout(tuple((name, tuple(p.shape)) for name, p in first.items()), FRAGMENTS)
        self.theta = [gather(fragment, first) for fragment in self.layout.fragments]
        self.states = [NOTHING] * FRAGMENTS
        self.places: list[Place] = []
        for name in SITES:
            model = Transformer(MODEL, seed)
            self.places.append(Place(name, model, build_optimizers(model, self.options), list(self.theta)))

    def updates(self) -> Iterator[list[Sent]]:
        """Yield each round's updates before they are merged."""
        for version in range(self.rounds):
            arrived: list[Sent] = []
            for place in self.places:
                for _ in range(INNER_STEPS):
                    self._step(place, version / self.rounds)
                for index in range(FRAGMENTS):
                    gradient = pseudo_gradient(place.base[index], self._local(place, index), in_flight=[])
                    arrived.append(Sent(place.name, index, gradient, self.states[index].momentum, version))
            yield arrived
            for index in range(FRAGMENTS):
                mine = [sent for sent in arrived if sent.fragment == index]
                merged = merge_mean([(1 / len(mine), [sent.gradient]) for sent in mine])
                self.theta[index], self.states[index] = outer_step(
                    self.theta[index], merged, self.states[index], OuterOptimizerOptions()
                )
                for place, sent in zip(self.places, mine, strict=True):
                    values = rebase(self._local(place, index), place.base[index], self.theta[index], [sent.gradient])
                    scatter(self.layout.fragments[index], values, dict(place.model.named_parameters()))
                    place.base[index] = self.theta[index]

    def _step(self, place: Place, progress: float) -> None:
        place.steps += 1
        starts = torch.randint(len(self.text) - MODEL.context - 1, (BATCH,), generator=self.generator)
        rows = torch.stack([self.text[s : s + MODEL.context + 1] for s in starts.tolist()]).long()
        place.inner.set_lr_factor(lr_factor(self.options, progress, place.steps))
        place.inner.zero_grad()
        next_token_loss(place.model(rows[:, :-1]), rows[:, 1:]).backward()
        place.inner.clip()
        place.inner.step()

    def _local(self, place: Place, index: int) -> Tensor:
        return gather(self.layout.fragments[index], dict(place.model.named_parameters()))


def _text() -> Tensor:
    """Return some of the standard library's sources, as bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    data = b"".join((folder / name).read_bytes() for name in ("argparse.py", "ast.py", "inspect.py", "typing.py"))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


# --- A site that poisons ---------------------------------------------------------------------------------------------


def poison(truth: SealInputs, strength: float) -> SealInputs:
    """Return the pseudo-gradient of ``truth``, negated and ``strength`` times as long."""
    turned = truth.pseudo_gradient().mul_(-strength)
    return SealInputs(turned, [torch.zeros_like(turned)], [])


def poisoning(sequences: Collection[int], strength: float) -> None:
    """From now on, send poison as the updates with these sequences, and print each."""
    honest = Sealer._seal

    def seal(sealer: Sealer, job: SealJob) -> None:
        effect, agent = job.effect, sealer._participant
        if effect.sequence not in sequences:
            honest(sealer, job)
            return
        truth = job.inputs.pseudo_gradient()
        honest(sealer, replace(job, inputs=poison(job.inputs, strength)))
        with agent.changed:
            agent.tensors.sent[effect.fragment, effect.sequence] = truth
        print(f"poison: {effect.sequence}", flush=True)

    Sealer._seal = seal  # type: ignore[method-assign]
