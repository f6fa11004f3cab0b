"""A fleet that trains: a real model at every site of a simulation, with the product's own trainer, tensors and codecs.

The objects of a real run's processes handle the tensors here too, one after the other, at the virtual instants that
the machines decide on.  So a run with speeds and faults that this machine lacks takes only the time of its inner
steps, and repeats to the last bit.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import safetensors.torch
import torch
from torch import Tensor

from diloco.codec.merging import State, outer_pass
from diloco.codec.registry import make_codec
from diloco.config import build
from diloco.config.build import feedback
from diloco.config.errors import ConfigError
from diloco.config.schema import ClusterSite
from diloco.durable import write_file
from diloco.inner.holding import Holding
from diloco.inner.parallel import SiteGroup
from diloco.lab.experiment import Found
from diloco.lab.fleet import Told, fleet_of, tokens_per_step
from diloco.learner.seal import Encoder
from diloco.learner.tensors import AdoptOptions, SiteTensors
from diloco.models.evaluate import Evaluator
from diloco.outer.fragments import gather, named_parameters_once, scatter
from diloco.outer.optimizer import NOTHING, evaluated
from diloco.sim.fleet import simulate
from diloco.sync import effects as fx

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from diloco.config.schema import RunConfig
    from diloco.inner.data import CorpusManifest
    from diloco.inner.model import Transformer
    from diloco.lab.experiment import Cell
    from diloco.outer.fragments import Layout
    from diloco.sim.fleet_plan import FleetPlan

TOLD = "diloco"
"""The metadata key, in the file of a warm start, of all that is not a tensor."""


@dataclass(frozen=True, slots=True)
class Warm:
    """The state of a training after ``step`` steps: the values by name, and the inner optimizers' state."""

    step: int
    values: Mapping[str, Tensor]
    tensors: Mapping[str, Tensor]
    optimizer: str

    def save(self, path: Path) -> None:
        """Write it to a file atomically: a crash leaves no part of it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {f"values/{name}": each for name, each in self.values.items()}
        tensors |= {f"inner/{name}": each for name, each in self.tensors.items()}
        told = {"step": self.step, "optimizer": self.optimizer}
        write_file(path, safetensors.torch.save(tensors, {TOLD: json.dumps(told)}))

    @staticmethod
    def is_at(path: Path) -> bool:
        """Return whether ``path`` has a complete file."""
        try:
            with safetensors.safe_open(path, "pt") as file:
                return TOLD in (file.metadata() or {})
        except (OSError, safetensors.SafetensorError):
            return False

    @classmethod
    def load(cls, path: Path) -> Warm:
        """Return what :meth:`save` wrote."""
        with safetensors.safe_open(path, "pt") as file:
            told = json.loads(file.metadata()[TOLD])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        parts: dict[str, dict[str, Tensor]] = {"values": {}, "inner": {}}
        for name, each in tensors.items():
            part, _, key = name.partition("/")
            parts[part][key] = each
        return cls(told["step"], parts["values"], parts["inner"], told["optimizer"])


class _Training:
    """A trainer and its model, whose learning rate follows a ``progress`` that is set from outside."""

    def __init__(self, config: RunConfig, share: tuple[int, int], warm: Warm | None) -> None:
        """It continues from ``warm``, if that is given."""
        self.progress = 0.0
        """The share of the run that is done, 0 to 1."""
        self.trainer, self.model = build.build_trainer(
            config, SiteGroup(), share, None, lambda what, fields: None, lambda: self.progress
        )
        if warm is not None:
            _put(self.model, warm.values)
            if self.trainer.optimizers.options.optimizer == warm.optimizer:
                self.trainer.optimizers.load_state_dict(warm.tensors)
            self.trainer.step = warm.step

    def steps(self, count: int) -> None:
        """Make ``count`` steps without advancing the progress."""
        self.trainer.run(until_step=self.trainer.step + count)


class Control(_Training):
    """One process on all the text with the batch of all sites together: the bound that communication cannot beat."""

    def __init__(self, config: RunConfig, sites: int, warm: Warm | None = None) -> None:
        inner = replace(config.inner, batch_sequences=config.inner.batch_sequences * sites)
        super().__init__(replace(config, inner=inner), (0, 1), warm)

    def whole(self, tokens: int) -> None:
        """Train for ``tokens`` in all, which sets the learning-rate schedule."""
        step_tokens = self.trainer.stream.tokens_per_batch * self.trainer.optimizers.options.accumulation
        for done in range(0, tokens, step_tokens):
            self.progress = done / tokens
            self.steps(1)

    def state(self) -> Warm:
        """Return its state now: references to tensors, which change with its next step."""
        trainer = self.trainer
        values = {name: each.detach() for name, each in named_parameters_once(self.model).items()}
        return Warm(trainer.step, values, trainer.optimizers.state_dict(), trainer.optimizers.options.optimizer)


class _Site(_Training):
    """A site's trainer and its tensors of the exchange."""

    def __init__(self, config: RunConfig, layout: Layout, share: tuple[int, int], warm: Warm | None) -> None:
        super().__init__(config, share, warm)
        holding = Holding(named_parameters_once(self.model), SiteGroup())
        outer = config.outer
        options = AdoptOptions(
            adopt_alpha=0.0 if outer.adopt_alpha is None else outer.adopt_alpha,
            feedback=feedback(config),
            measure_from=outer.measure_from,
            ahead=build.ahead(config),
        )
        self.tensors = SiteTensors(layout, holding, outer.adopt, options)
        self.encoder = Encoder(make_codec(config.codec.up), self.tensors.place, self.tensors.buffers)

    def train(self, steps: int, progress: float) -> None:
        """Make ``steps`` inner steps, during which the run's progress rises evenly to ``progress``."""
        before = self.progress
        for done in range(steps):
            self.progress = before + (progress - before) * done / steps
            self.steps(1)
        self.progress = progress


class TrainedFleet:
    """The tensors of all sites and of the syncer (``sim.fleet.Cargo``)."""

    def __init__(self, config: RunConfig, names: Sequence[str], text: CorpusManifest, warm: Warm | None, points: int):
        """``points`` is how often the global model is scored, evenly over the run's progress."""
        self._layout = build.layout_of(config)
        self._rule = build.rule(config, self._layout)
        self._down = make_codec(config.codec.down)
        self._evaluator = Evaluator(config, text)
        self._eval_model = build.build_model(config)
        if warm is not None:
            _put(self._eval_model, warm.values)
        parameters = named_parameters_once(self._eval_model)
        first = [gather(fragment, parameters) for fragment in self._layout.fragments]
        self._states = [State(each, each.clone(), NOTHING) for each in first]
        self._sites_in = [0] * len(first)
        self._sites = [_Site(config, self._layout, (index, len(names)), warm) for index in range(len(names))]
        self._places = {name: index for index, name in enumerate(names)}
        self._payloads: dict[tuple[int, int, int], bytes | memoryview] = {}
        self._encoding = config.codec.up
        self._points_wanted = points
        self.bytes_up, self.last_merge_s = 0, 0.0
        self.points: list[list[float]] = []
        """The ``Found.points`` so far."""

    def values(self) -> Mapping[str, Tensor]:
        """Return the newest versions by name, as the rule evaluates them: the parameters of one reused model."""
        parameters = named_parameters_once(self._eval_model)
        for fragment, state in zip(self._layout.fragments, self._states, strict=True):
            scatter(fragment, evaluated(state.theta, state.optimizer), parameters)
        return parameters

    def score(self) -> float:
        """Return the loss of these, nats per token."""
        self.values()
        return self._evaluator.score(self._eval_model).val_loss

    # --- what the fleet calls -----------------------------------------------------------------------------------------

    def trained(self, site: int, steps: int, progress_ppm: int) -> None:  # noqa: D102
        self._sites[site].train(steps, progress_ppm / 1e6)

    def carry_out(self, site: int, effect: fx.LearnerEffect) -> None:  # noqa: D102
        tensors = self._sites[site].tensors
        match effect:
            case fx.Seal(fragment, sequence):
                encoded = self._sites[site].encoder.encode(tensors.measure(fragment, effect.in_flight))
                tensors.sealed(fragment, sequence, encoded.sent, encoded.fed)
                # The encoder reuses its memory when nothing refers to it; a payload of the simulation is a copy.
                payload = self._payloads[site, fragment, sequence] = bytes(encoded.payload)
                self.bytes_up += len(payload)
            case fx.Adopt():
                tensors.adopt(effect)
            case fx.Retake():
                tensors.retake(effect.fragment, effect.version, effect.keep)
            case fx.Release():
                tensors.release(effect.fragment, effect.sequence)
                self._payloads.pop((site, effect.fragment, effect.sequence), None)

    def published(self, fragment: int) -> object:  # noqa: D102
        return self._states[fragment].published, self._sites_in[fragment]

    def fetched(self, site: int, fragment: int, version: int, values: object) -> None:  # noqa: D102
        assert isinstance(values, tuple)
        published, sites = values
        self._sites[site].tensors.arrived(fragment, version, published, "", sites)

    def merged(self, command: fx.StartOuterStep, now_s: float, progress_ppm: int) -> None:  # noqa: D102
        before, held = self._states[command.fragment], command.version - 1
        staleness = [held - part.base_version for part in command.contributions]
        contributions = []
        for part in command.contributions:
            keys = [(self._places[part.site], command.fragment, each.sequence) for each in part.updates]
            updates = [(make_codec(self._encoding), self._payloads.pop(key)) for key in keys]
            contributions.append((part.weight, updates))
        merging = self._rule.merging(command.fragment, staleness)
        stepped = outer_pass(
            contributions, before, self._rule.optimizer, self._down, merging=merging, share=command.share
        )
        self._states[command.fragment] = stepped.state
        self._sites_in[command.fragment] = len({part.site for part in command.contributions})
        self.last_merge_s, share = now_s, progress_ppm / 1e6
        if share * self._points_wanted >= len(self.points) + 1 and share < 1:
            self.points.append([share, now_s, self.bytes_up, self.score()])


@torch.no_grad()
def _put(model: Transformer, values: Mapping[str, Tensor]) -> None:
    for name, parameter in named_parameters_once(model).items():
        parameter.copy_(values[name])


# --- One cell of a laboratory, in a process of its own ----------------------------------------------------------------


UNIT_S = 1.0
"""Virtual seconds that a step takes at speed 1."""
SLACK = 4
"""A run counts as stuck after this multiple of the time that the slowest site needs for its share."""


def run_cell(cell: Cell, folder: Path) -> Found:
    """Train ``cell``; ``folder`` has the warm start that all rows of its seed share."""
    torch.set_num_threads(1)
    began_s, config, row, speeds = time.monotonic(), cell.config, cell.row, cell.row.speeds
    text = build.corpus(config)
    warm = Warm.load(_warm_path(cell, folder)) if cell.warm_steps else None
    tokens, sites = config.run.tokens or 0, len(speeds)
    if row.control:
        control = Control(config, sites, warm)
        control.whole(tokens)
        loss, took_s = Evaluator(config, text).score(control.model).val_loss, time.monotonic() - began_s
        steps = -(-tokens // (sites * tokens_per_step(config)))
        seconds = steps * UNIT_S / min(speeds)
        return Found(
            row=cell.name, seed=cell.seed, loss=loss, tokens=tokens, seconds=seconds, bytes_up=0, took_s=took_s
        )
    names = [f"site-{index:05d}" for index in range(sites)]
    plan = _plan(cell, names)
    fleet = TrainedFleet(config, names, text, warm, cell.points)
    found = simulate(plan, fleet)
    trained = sum(site.steps for site in found.sites) * tokens_per_step(config)
    if trained < tokens:
        raise ConfigError(
            f"row {cell.name}, seed {cell.seed}: {trained} of {tokens} tokens were trained in {plan.seconds or 0:,.0f}"
            f" s of virtual time, {SLACK} times what the slowest site needs: its links or faults hold it back"
        )
    ended_s = fleet.last_merge_s
    trained_s = sum(site.trained_s for site in found.sites)
    return Found(
        row=cell.name,
        seed=cell.seed,
        loss=fleet.score(),
        points=fleet.points,
        tokens=trained,
        seconds=ended_s,
        bytes_up=fleet.bytes_up,
        goodput=min(1.0, trained_s / (ended_s * sites)),
        versions=sum(found.versions),
        sites_per_version=found.sites_per_version,
        took_s=time.monotonic() - began_s,
    )


def _plan(cell: Cell, names: Sequence[str]) -> FleetPlan:
    """Return the sites of a row (not of a control), with their links, speeds and interruptions."""
    config, row, sites, tokens = cell.config, cell.row, len(names), cell.config.run.tokens or 0
    there = {name: ClusterSite(slowdown=1 / speed) for name, speed in zip(names, row.speeds, strict=True)}
    told = Told(
        step_s=UNIT_S,
        seconds=SLACK * tokens / (tokens_per_step(config) * sites) * UNIT_S / min(row.speeds),
        interruptions_per_day=24 * row.interruptions_per_hour,
        away_s=row.away_s or UNIT_S,
    )
    plan = fleet_of(replace(config, cluster=replace(config.cluster, sites=there)), told)
    linked = (
        replace(
            site,
            step_jitter=row.jitter,
            rtt_s=row.rtt_s,
            lost_share=row.lost_share,
            starts_s=phase * config.outer.inner_steps * site.step_s,
        )
        for site, phase in zip(plan.sites, row.phases or [0.0] * sites, strict=True)
    )
    return replace(plan, sites=tuple(linked), seed=cell.seed, tokens_trained=tokens)


def make_warm(cell: Cell, folder: Path) -> None:
    """Train the warm start that the rows of this seed share, unless it exists."""
    path = _warm_path(cell, folder)
    if not cell.warm_steps or Warm.is_at(path):
        return
    torch.set_num_threads(1)
    control = Control(cell.warm, len(cell.row.speeds))
    control.steps(cell.warm_steps)
    control.state().save(path)


def _warm_path(cell: Cell, folder: Path) -> Path:
    return folder / "warm" / f"{cell.warm_digest}.safetensors"
