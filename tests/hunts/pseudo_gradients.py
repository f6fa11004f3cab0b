"""Realistic pseudo-gradients for admission: a small model trained at several sites, to which faults happen.

One process and no network: the order of arrivals is random, the mathematics is the product's own.  A site trains a
byte-level transformer with AdamW under warm-up and decay, sends its pseudo-gradient after a number of steps, and adopts
the version that contains its update (``rebase``).  As in a real run, a site may be slow, join late, restart with an
empty optimizer, or return from a partition with many steps in one update.
"""

from __future__ import annotations

import sysconfig
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from diloco.config import build, build_syncer, connecting
from diloco.config.model_files import load_values
from diloco.config.run_dir import run_dir_of
from diloco.config.schema import RunConfig
from diloco.inner.holding import Holding
from diloco.inner.model import ModelOptions, Transformer, next_token_loss
from diloco.inner.optimizer import InnerOptimizers, InnerOptions, build_optimizers, lr_factor
from diloco.inner.parallel import SiteGroup
from diloco.learner.agent import Agent, Finished
from diloco.learner.ranks import Orders
from diloco.learner.seal import SealJob
from diloco.learner.tensors import SealInputs
from diloco.models.evaluate import Evaluator
from diloco.observe.eventlog import EventLog
from diloco.outer.fragments import Layout, gather, named_parameters_once, plan_layout, scatter
from diloco.outer.merge import merge_mean
from diloco.outer.optimizer import NOTHING, OuterOptimizerOptions, outer_step
from diloco.outer.pseudo_gradient import pseudo_gradient, rebase
from diloco.sync.events import Ending, Fate
from diloco.sync.syncer import OuterSync
from diloco.syncer.server import Syncer
from diloco.wan.process import RelayProcess
from diloco.wire.client import SyncClient

MODEL = ModelOptions(vocab_size=256, layers=2, dim=32, heads=2, context=32)
SITES = ("a", "b", "c", "d")


@dataclass(frozen=True, slots=True)
class Scene:
    """The settings of a run.  ``speeds`` are shares of turns; a fault with the value n occurs in one of n turns of a
    site on average, and 0 means never."""

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
    """One update as the syncer receives it: ``gradient`` is decoded, ``momentum`` is the fragment's at that time."""

    site: str
    fragment: int
    steps: int
    gradient: Tensor
    momentum: Tensor | None
    version: int


@dataclass(slots=True)
class Place:
    """A site: its model, its optimizer and its base versions."""

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
        """Yield each round's updates before they are merged.  To refuse one, the caller removes it from the list."""
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
    """Return some of the standard library's sources, as bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    data = b"".join((folder / name).read_bytes() for name in ("argparse.py", "ast.py", "inspect.py", "typing.py"))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


# --- A whole run of real training ------------------------------------------------------------------------------------

BOUND_S = 600.0


def poison(truth: SealInputs, strength: float) -> SealInputs:
    """Return the pseudo-gradient of ``truth``, negated and ``strength`` times as long."""
    turned = truth.pseudo_gradient().mul_(-strength)
    return SealInputs(turned, [torch.zeros_like(turned)], [])


class Poisoner(Agent):
    """A site that sends poison as its updates with the sequences ``poisoned``."""

    poisoned: Collection[int] = ()
    strength = 0.0
    sent: set[int]
    """The poisoned sequences that it has sent."""

    def __init__(self, *ways: Any, **named: Any) -> None:
        super().__init__(*ways, **named)
        self.sent = set()
        honest = self.sealer._seal

        def seal(job: SealJob) -> None:
            effect = job.effect
            if effect.sequence not in self.poisoned:
                honest(job)
                return
            truth = job.inputs.pseudo_gradient()
            honest(replace(job, inputs=poison(job.inputs, self.strength)))
            with self.changed:
                self.tensors.sent[effect.fragment, effect.sequence] = truth
                self.sent.add(effect.sequence)

        self.sealer._seal = seal  # type: ignore[method-assign]


class SiteThread(threading.Thread):
    """One site of ``config``, resumed from its newest checkpoint."""

    def __init__(self, config: RunConfig, site: str, address: str, poisoned: Collection[int], strength: float) -> None:
        super().__init__(name=site, daemon=True)
        self.config, self.site, self.address = config, site, address
        self.poisoned, self.strength = poisoned, strength
        self.finished: Finished | None = None
        self.sent: set[int] = set()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.finished = self._train()
        except BaseException as error:
            self.error = error

    def _train(self) -> Finished:
        sites = self.config.cluster.sites
        config = replace(self.config, site=replace(self.config.site, slowdown=sites[self.site].slowdown))
        folder, index = run_dir_of(config).site(self.site), list(sites).index(self.site)
        group, layout = SiteGroup(), build.layout_of(config)
        log = EventLog(run_dir_of(config).events, self.site)
        agents: list[Agent] = []
        trainer, model = build.build_trainer(
            config, group, (index, len(sites)), folder.checkpoints, log.emit, lambda: agents[0].progress()
        )
        resumed = trainer.resume()
        agent = Poisoner(
            build.agent_options(config, folder.agent),
            build.learner_options(config),
            layout,
            Holding(named_parameters_once(model), group),
            build.agreement(config, layout),
            SyncClient(self.address, self.site, config.run.name or "", connecting.site_security(config)),
            self.site,
            log.emit,
            Orders(group),
            restored=(resumed.tensors, resumed.meta) if resumed is not None else None,
            redo=resumed.redo if resumed is not None else None,
        )
        agent.poisoned, agent.strength, self.sent = self.poisoned, self.strength, agent.sent
        agents.append(agent)
        try:
            trainer.skip_data(agent.start())
            trainer.run(after_step=agent.after_step, extra_state=agent.state)
            return agent.finish()
        finally:
            agent.close()
            log.close()


class Part:
    """A part of a run: the syncer and all sites, from the run's present state until it is drained or finished."""

    def __init__(
        self, config: RunConfig, poisoner: str = "", poisoned: Collection[int] = (), strength: float = 0.0
    ) -> None:
        self.config = config
        run_dir = run_dir_of(config)
        self.merged_of: dict[str, int] = {}
        self.merged_tokens = 0
        self._log = EventLog(run_dir.events, "syncer")
        layout = build.layout_of(config)
        self.syncer = Syncer(
            build_syncer.syncer_options(config, run_dir),
            build_syncer.plan(config, layout),
            lambda: build.version_zero(config, layout),
            connecting.server_options(config),
            connecting.syncer_security(config),
            self._log.emit,
        )
        address = self.syncer.start()
        self._relay = RelayProcess() if config.network.emulate else None
        dial = {
            site: self._relay.add(site, connecting.link_options(config, site), address) if self._relay else address
            for site in config.cluster.sites
        }
        self.sites = [
            SiteThread(config, site, dial[site], poisoned if site == poisoner else (), strength)
            for site in config.cluster.sites
        ]
        for site in self.sites:
            site.start()

    def wait_for_poison(self, site: str, poisoned: Collection[int], later: int) -> None:
        """Wait until all poison is merged, and each fragment has ``later`` more versions."""
        merged_in: list[int] = []
        while not merged_in or min(self.versions()) < max(merged_in) + later:
            assert self.syncer.wait(0.05) is None, f"the run ended at versions {self.versions()}"
            self._look()
            fates = self.syncer.core.ask(lambda machine: fates_of(machine, site))
            refused = [fate for fate in fates if fate.sequence in poisoned and not fate.merged]
            assert not refused, f"not merged: {refused}"
            found = [fate.version for fate in fates if fate.sequence in poisoned]
            merged_in = found if len(found) == len(poisoned) * len(self.versions()) else []

    def versions(self) -> list[int]:
        return self.syncer.core.ask(lambda machine: [fragment.version for fragment in machine.state.fragments])

    def end(self) -> Ending | None:
        """Wait until the run has reached its bound or is drained, and every site has ended."""
        left_s = BOUND_S
        while (ending := self.syncer.wait(0.5)) is None and left_s > 0:
            self._look()
            left_s -= 0.5
        self.syncer.linger()
        for site in self.sites:
            site.join(60.0)
        self._look()
        self.merged_of = self.syncer.core.ask(merged_by_site)
        self.merged_tokens = self.syncer.core.ask(lambda machine: machine.state.run_tokens())
        self.syncer.stop()
        if self._relay is not None:
            self._relay.close()
        self._log.close()
        return ending

    def _look(self) -> None:
        for site in self.sites:
            if site.error is not None:
                raise AssertionError(f"{site.site} failed: {site.error!r}") from site.error


def merged_by_site(machine: OuterSync) -> dict[str, int]:
    """Return the merged tokens of each site, as its ledger counts them."""
    sites = machine.state.sites
    return {name: sum(line.tokens_merged for line in site.lines) // len(site.lines) for name, site in sites.items()}


def fates_of(machine: OuterSync, site: str) -> list[Fate]:
    """Return the latest fates of a site's updates, of all fragments."""
    return (
        [fate for line in machine.state.sites[site].lines for fate in line.fates] if site in machine.state.sites else []
    )


def loss_of(config: RunConfig, model: Path) -> float:
    """Return the loss of a file of parameters on the whole validation text, in nats per token."""
    evaluator, built = Evaluator(config, build.corpus(config)), build.build_model(config)
    load_values(str(model), built)
    with torch.no_grad():
        return evaluator.score(built, whole=True).val_loss
