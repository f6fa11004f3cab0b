"""A small real model trained at several sites, with what happens to sites: the pseudo-gradients that admission meets.

One process and no network: the order of arrivals is drawn, the mathematics is the product's own.  A site trains a
byte-level transformer with AdamW under warm-up and decay, sends the difference after a number of steps, and takes the
version that its update is in (``rebase``).  What may happen to a site is what happens in a run: it is slow, it joins
late, it starts again with an empty optimizer, it comes back from a partition with many steps in one update.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from diloco.inner.model import ModelOptions, Transformer, next_token_loss
from diloco.inner.optimizer import InnerOptimizers, InnerOptions, build_optimizers, lr_factor
from diloco.outer.fragments import Layout, gather, plan_layout, scatter
from diloco.outer.merge import merge_mean
from diloco.outer.optimizer import NOTHING, OuterOptimizerOptions, outer_step
from diloco.outer.pseudo_gradient import pseudo_gradient, rebase

MODEL = ModelOptions(vocab_size=256, layers=2, dim=32, heads=2, context=32)
SITES = ("a", "b", "c", "d")


@dataclass(frozen=True, slots=True)
class Scene:
    """How a run goes.  ``speeds`` are shares of turns; events come once in so many turns of a site, 0 for never."""

    rounds: int = 120
    fragments: int = 2
    inner_steps: int = 8
    speeds: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)
    batches: tuple[int, ...] = (8, 8, 8, 8)
    everybody: bool = True
    """A round waits for all sites (DiLoCo); otherwise each update is merged as it comes (asynchronous)."""
    late: int = 0
    """Rounds after which the last site joins."""
    restart: int = 0
    partition: int = 0
    partition_factor: int = 8
    own_texts: bool = False
    warmup_steps: int = 20
    lr: float = 0.003


@dataclass(frozen=True, slots=True)
class Sent:
    """One update as the syncer meets it: ``gradient`` is decoded, ``momentum`` the fragment's own at that instant."""

    site: str
    fragment: int
    steps: int
    gradient: Tensor
    momentum: Tensor | None
    version: int


@dataclass(slots=True)
class Place:
    """A site: its model, its optimizer, the versions it stands on."""

    name: str
    model: Transformer
    inner: InnerOptimizers
    text: Tensor
    batch: int
    base: list[Tensor]
    steps: int = 0
    unsent: int = 0


class Training:
    """A run of ``scene`` under ``seed``."""

    def __init__(self, scene: Scene, seed: int) -> None:
        torch.set_num_threads(1)
        self.scene, self.seed = scene, seed
        self.places: list[Place] = []
        self.losses: list[float] = []
        self.random = Random(self.seed)
        self.generator = torch.Generator().manual_seed(self.seed)
        self.options = InnerOptions(lr=self.scene.lr, warmup_steps=self.scene.warmup_steps)
        self.outer = OuterOptimizerOptions()
        first = Transformer(MODEL, self.seed)
        shapes = tuple((name, tuple(p.shape)) for name, p in first.named_parameters())
        self.layout: Layout = plan_layout(shapes, self.scene.fragments)
        parameters = dict(first.named_parameters())
        self.theta = [gather(fragment, parameters) for fragment in self.layout.fragments]
        self.states = [NOTHING] * len(self.theta)
        self.versions = [0] * len(self.theta)
        text = _text()
        for index, name in enumerate(SITES[: len(self.scene.speeds)]):
            share = len(text) // len(self.scene.speeds)
            own = text[index * share : (index + 1) * share] if self.scene.own_texts else text
            model = Transformer(MODEL, self.seed)
            self.places.append(
                Place(
                    name,
                    model,
                    build_optimizers(model, self.options),
                    own,
                    self.scene.batches[index],
                    [theta.clone() for theta in self.theta],
                )
            )

    def updates(self) -> Iterator[list[Sent]]:
        """Round by round: what arrives, before it is merged.  Who takes an update out of the list has refused it."""
        scene = self.scene
        for round_index in range(scene.rounds):
            progress = round_index / scene.rounds
            places = self.places[:-1] if round_index < scene.late else self.places
            if not scene.everybody:
                places = self.random.choices(places, scene.speeds[: len(places)])
            arrived: list[Sent] = []
            for place in places:
                if scene.restart and self.random.random() < 1 / scene.restart:
                    place.inner = build_optimizers(place.model, self.options)
                    for index in range(len(self.theta)):
                        self._take(place, index)
                        place.base[index] = self.theta[index]
                factor = scene.partition_factor if scene.partition and self.random.random() < 1 / scene.partition else 1
                for _ in range(scene.inner_steps * factor):
                    self._step(place, progress)
                for index in range(len(self.theta)):
                    gradient = pseudo_gradient(place.base[index], self._local(place, index), in_flight=[])
                    arrived.append(
                        Sent(
                            place.name, index, place.unsent, gradient, self.states[index].momentum, self.versions[index]
                        )
                    )
                place.unsent = 0
            yield arrived
            for index in range(len(self.theta)):
                mine = [sent for sent in arrived if sent.fragment == index]
                if not mine:
                    continue
                merged = merge_mean([(1 / len(mine), [sent.gradient]) for sent in mine])
                self.theta[index], self.states[index] = outer_step(
                    self.theta[index], merged, self.states[index], self.outer
                )
                self.versions[index] += 1
            for place in places:
                for index in range(len(self.theta)):
                    own = [sent for sent in arrived if sent.site == place.name and sent.fragment == index]
                    if own:
                        local, base = self._local(place, index), place.base[index]
                        self._write(place, index, rebase(local, base, self.theta[index], [own[0].gradient]))
                    else:
                        self._take(place, index)
                    place.base[index] = self.theta[index]

    def _step(self, place: Place, progress: float) -> None:
        place.steps += 1
        place.unsent += 1
        starts = torch.randint(len(place.text) - MODEL.context - 1, (place.batch,), generator=self.generator)
        rows = torch.stack([place.text[s : s + MODEL.context + 1] for s in starts.tolist()]).long()
        place.inner.set_lr_factor(lr_factor(self.options, progress, place.steps))
        place.inner.zero_grad()
        loss = next_token_loss(place.model(rows[:, :-1]), rows[:, 1:])
        loss.backward()
        place.inner.clip()
        place.inner.step()
        self.losses.append(float(loss.detach()))

    def _local(self, place: Place, index: int) -> Tensor:
        return gather(self.layout.fragments[index], dict(place.model.named_parameters()))

    def _write(self, place: Place, index: int, values: Tensor) -> None:
        scatter(self.layout.fragments[index], values, dict(place.model.named_parameters()))

    def _take(self, place: Place, index: int) -> None:
        self._write(place, index, self.theta[index])


def _text() -> Tensor:
    """Some of the standard library's sources, as bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    data = b"".join((folder / name).read_bytes() for name in ("argparse.py", "ast.py", "inspect.py", "typing.py"))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
