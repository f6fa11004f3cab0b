"""A whole run of real training: syncer, agents, trainers and text are those of ``diloco up``, and so are the links.

All but the links is in one process, each site a thread, so that a site can be made to misbehave: at some of its updates
what it sends points away from what it learned, while it goes on believing that it sent the truth, as a site with a
broken machine would.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from diloco.config import build, build_syncer, connecting
from diloco.config.run_dir import run_dir_of
from diloco.config.schema import RunConfig
from diloco.inner.holding import Holding
from diloco.inner.parallel import SiteGroup
from diloco.learner.agent import Agent, Finished
from diloco.learner.ranks import Orders
from diloco.learner.seal import SealJob
from diloco.learner.tensors import SealInputs
from diloco.models.evaluate import Evaluator, model_of
from diloco.observe.eventlog import EventLog
from diloco.outer.fragments import named_parameters_once
from diloco.sync.events import Ending, Fate
from diloco.sync.syncer import OuterSync
from diloco.syncer.server import Syncer
from diloco.wan.process import RelayProcess
from diloco.wire.client import SyncClient

BOUND_S = 600.0


def poison(truth: SealInputs, strength: float) -> SealInputs:
    """The pseudo-gradient of ``truth``, turned around and ``strength`` times as long."""
    turned = truth.pseudo_gradient().mul_(-strength)
    return SealInputs(turned, [torch.zeros_like(turned)], [])


class Poisoner(Agent):
    """A site that sends poison as its updates of these sequences."""

    poisoned: Collection[int] = ()
    strength = 0.0
    sent: set[int]
    """What it has sent of them."""

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
    """One site of ``config``, from its newest checkpoint on."""

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
    """A part of a run: the syncer and all sites, from where the run stands until it is drained or finished."""

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
        """Until all of it is merged, and each fragment has so many versions more."""
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
        """Wait until the run's bound is reached (or what ``drain`` has begun is over) and every site has ended."""
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
    """Tokens of each site in the run's versions, as its ledger counts them."""
    sites = machine.state.sites
    return {name: sum(line.tokens_merged for line in site.lines) // len(site.lines) for name, site in sites.items()}


def fates_of(machine: OuterSync, site: str) -> list[Fate]:
    """The latest fates of a site's updates, of all fragments."""
    return (
        [fate for line in machine.state.sites[site].lines for fate in line.fates] if site in machine.state.sites else []
    )


def loss_of(config: RunConfig, model: Path) -> float:
    """Loss of a file of parameters on the whole validation text, in nats per token."""
    evaluator = Evaluator(config, build.corpus(config))
    with torch.no_grad():
        return evaluator.score(model_of(config, str(model)), whole=True).val_loss
