"""Realistic pseudo-gradients for admission: a small model trained at several sites, to which faults happen.

One process and no network; the mathematics is the product's own.  A site trains a byte-level transformer with AdamW
under warm-up and decay, sends its pseudo-gradient after a number of steps, and adopts the version that contains its
update (``rebase``).  Below that, whole runs of real training for the hunt for poison.
"""

from __future__ import annotations

import sysconfig
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
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
from diloco.outer.fragments import gather, named_parameters_once, plan_layout, scatter
from diloco.outer.merge import merge_mean
from diloco.outer.optimizer import NOTHING, OuterOptimizerOptions, outer_step
from diloco.outer.pseudo_gradient import pseudo_gradient, rebase
from diloco.sync.events import Ending
from diloco.syncer.server import Syncer
from diloco.wan.process import RelayProcess
from diloco.wire.client import SyncClient
from tests.hunts.lives import merged_by_site

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
            sites = self.syncer.core.ask(lambda machine: machine.state.sites)
            fates = [fate for line in sites[site].lines for fate in line.fates] if site in sites else []
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
        self.merged_of = self.syncer.core.ask(lambda machine: merged_by_site(machine.state))
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


def loss_of(config: RunConfig, model: Path) -> float:
    """Return the loss of a file of parameters on the whole validation text, in nats per token."""
    evaluator, built = Evaluator(config, build.corpus(config)), build.build_model(config)
    load_values(str(model), built)
    with torch.no_grad():
        return evaluator.score(built, whole=True).val_loss
