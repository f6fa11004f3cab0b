"""The wiring: a ``RunConfig`` turned into the objects of the floors below, by constructors that can be read.

Every function names the section whose values it uses in the errors it raises: "inner.lr is -1.0: positive and finite".
"""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from diloco.durable import PLAIN_DISK
from diloco.inner.data import CorpusManifest, DataOptions, LeasedStream, TokenStream, prepare_corpus
from diloco.inner.model import ModelOptions, Transformer
from diloco.inner.optimizer import InnerOptions, build_optimizers
from diloco.inner.precision import resolve_precision
from diloco.inner.streamed import prepare_stream, prepare_tokens
from diloco.inner.trainer import Trainer, TrainerOptions
from diloco.launch import connecting, model_file
from diloco.launch.adapting import adapt_options, up_codecs
from diloco.launch.coding import check_codec, feedback
from diloco.launch.config import shared_config
from diloco.launch.errors import ConfigError
from diloco.launch.placing import has_several, placement_of, shared_by_part
from diloco.launch.preparing import Preparing
from diloco.launch.regional import is_region
from diloco.launch.sections import quorum, section, to_ns, units_ahead
from diloco.launch.spreading import check_spreading, compute_options, peak_tflops, spread, without_memory
from diloco.launch.values import load_values
from diloco.learner.options import AgentOptions
from diloco.outer.fragments import Layout, gather, named_parameters_once, part_of, plan_layout
from diloco.outer.merge import CORRECTION_NUMBERS, Correction, Gate, MergeOptions
from diloco.outer.optimizer import OuterOptimizerOptions
from diloco.outer.pseudo_gradient import ADDITIVE, MEASURE_FROM
from diloco.outer.rule import OuterRule, outer_rule
from diloco.sync.agreement import CORPUS, PROTOCOL, Agreement
from diloco.sync.options import ADOPT_KEEPS_UNSENT, UNITS_AHEAD_MAX, HealthOptions, LearnerOptions, OuterOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from diloco.durable import Disk
    from diloco.inner.data import UnitSource
    from diloco.inner.parallel import SiteGroup
    from diloco.inner.saving import Log
    from diloco.inner.sharding import Spread
    from diloco.launch.schema import RunConfig

UNIT_SEQUENCES_MAX = 1 << 20
SLOWDOWN_MAX = 1e6


def check(config: RunConfig) -> None:
    """Build every set of options once, so that a value that cannot work is refused before anything starts.

    Those of the syncer's process are checked by ``build_syncer.check``, as well.
    """
    is_region(config)
    layout = layout_of(config)
    agreement(config, layout)
    outer_options(config)
    health_options(config)
    rule(config, layout)
    if not model_file.is_meant(config):
        check_spreading(config, model_options(config))
    up_codecs(config)
    compute_options(config)
    inner_options(config)
    trainer_options(config)
    learner_options(config)
    connecting.client_options(config)
    agent_options(config, Path())
    connecting.server_options(config)
    connecting.syncer_security(config)
    data_options(config)
    connecting.link_options(config, "")
    for name, site in config.cluster.sites.items():
        connecting.link_options(config, name)
        if not 1 <= site.slowdown <= SLOWDOWN_MAX:
            wanted = f"from 1 (full speed) to {SLOWDOWN_MAX:g}"
            raise ConfigError(f"cluster.sites.{name}.slowdown is {site.slowdown}: {wanted}")
        if site.nproc < 1:
            raise ConfigError(f"cluster.sites.{name}.nproc is {site.nproc}: at least 1")
    if not config.site.canary_every_s >= 0:
        raise ConfigError(f"site.canary_every_s is {config.site.canary_every_s!r}: 0 (never) or more")
    if config.site.canary_steps < 1:
        raise ConfigError(f"site.canary_steps is {config.site.canary_steps!r}: at least 1")
    if config.data.validation_sequences < 1:
        raise ConfigError(f"data.validation_sequences is {config.data.validation_sequences!r}: at least 1")


# --- what the floors are told -------------------------------------------------------------------------------------


def model_options(config: RunConfig) -> ModelOptions:
    """Size and shape of the model."""
    model = config.model
    if model_file.is_meant(config):
        raise ConfigError(
            "model.kind is 'file': what is in run.init_from is trained by the loops that join by diloco.join, and this "
            "command knows its values only"
        )
    assert config.inner.sequence_length is not None
    assert model.context is not None, "config.settle fills in what is null"
    if not 1 <= config.inner.sequence_length <= model.context:
        length = config.inner.sequence_length
        raise ConfigError(f"inner.sequence_length is {length}: from 1 to model.context={model.context}")
    with section("model"):
        return ModelOptions(**{name: value for name, value in asdict(model).items() if name != "kind"})


def data_options(config: RunConfig) -> DataOptions:
    """Where the text comes from."""
    known = {each.name for each in fields(DataOptions)}
    with section("data"):
        return DataOptions(**{name: value for name, value in asdict(config.data).items() if name in known})


def inner_options(config: RunConfig) -> InnerOptions:
    """What one inner step does."""
    inner = config.inner
    with section("inner"):
        return InnerOptions(
            optimizer=inner.optimizer,
            lr=inner.lr,
            muon_lr=inner.muon_lr,
            muon_momentum=inner.muon_momentum,
            muon_weight_decay=inner.muon_weight_decay,
            betas=list(inner.betas),
            eps=inner.eps,
            weight_decay=inner.weight_decay,
            clip=inner.clip,
            batch_sequences=inner.batch_sequences,
            accumulation=inner.accumulation,
            warmup_steps=inner.warmup_steps,
            schedule=inner.schedule,
            decay_share=inner.decay_share,
            lr_floor=inner.lr_floor,
        )


def trainer_options(config: RunConfig) -> TrainerOptions:
    """How the loop runs."""
    inner = config.inner
    if inner.checkpoint_every_steps < 0:
        raise ConfigError(f"inner.checkpoint_every_steps is {inner.checkpoint_every_steps}: 0 (none) or more")
    if config.site.slowdown < 1:
        raise ConfigError(f"site.slowdown is {config.site.slowdown}: 1 (full speed) or more")
    with section("inner"):
        return TrainerOptions(
            precision=inner.precision,
            deterministic=inner.deterministic,
            seed=config.run.seed,
            checkpoint_steps=inner.checkpoint_every_steps,
            checkpoints_kept=inner.checkpoints_kept,
            memory_checkpoint_every_steps=inner.memory_checkpoint_every_steps,
            nonfinite_max=inner.nonfinite_max,
            peak_tflops=peak_tflops(config),
            slowdown=config.site.slowdown,
        )


def outer_options(config: RunConfig) -> OuterOptions:
    """Rules of the syncer's machine.  When a region's run is over the run above says."""
    outer, ends_itself = config.outer, not is_region(config)
    num_fragments = len(held_of(config)) if has_several(config) else outer.num_fragments
    all_train_on = outer.adopt in ADOPT_KEEPS_UNSENT and not outer.lock_step
    with section("outer"):
        return OuterOptions(
            num_fragments=num_fragments,
            quorum=quorum(outer.quorum),
            quorum_min=outer.quorum_min,
            round_updates=outer.round_updates,
            grace=outer.grace,
            grace_ns=to_ns("outer.grace_s", outer.grace_s),
            grace_share_percent=outer.grace_share_percent,
            grace_period_percent=outer.grace_period_percent if all_train_on else 0,
            overlap_steps=outer.overlap_steps,
            weights=outer.weights,
            merge_by=outer.merge_by,
            share_weighted=outer.share_weighted and outer.kind != "delayed_nesterov",
            staleness_max=outer.staleness_max,
            staleness_power=outer.staleness_power,
            updates_in_flight_max=outer.updates_in_flight_max,
            site_timeout_ns=to_ns("outer.site_timeout_s", outer.site_timeout_s, least_s=0.001),
            final_wait_ns=to_ns("outer.final_wait_s", outer.final_wait_s, least_s=0.001),
            token_budget=(config.run.tokens or 0) * ends_itself,
            run_ns=to_ns("run.seconds", (config.run.seconds or 0.0) * ends_itself),
            sites_max=outer.sites_max,
            unit_sequences=unit_sequences(config),
            lease_ns=to_ns("data.unit_lease_s", config.data.unit_lease_s, least_s=0.001),
        )


def unit_sequences(config: RunConfig) -> int:
    """Sequences in a unit of the text that the syncer leases; 0 where it leases none: of several the first one does."""
    data = config.data
    if not 1 <= data.unit_sequences <= UNIT_SEQUENCES_MAX:
        raise ConfigError(f"data.unit_sequences is {data.unit_sequences}: 1 to {UNIT_SEQUENCES_MAX}")
    if not 1 <= data.units_ahead <= UNITS_AHEAD_MAX:
        raise ConfigError(f"data.units_ahead is {data.units_ahead}: 1 to {UNITS_AHEAD_MAX}")
    leases = data.leased and (not has_several(config) or config.cluster.syncer.index == 0)
    return data.unit_sequences if leases else 0


def health_options(config: RunConfig) -> HealthOptions:
    """What becomes of an update that looks like no other."""
    admission = config.cluster.admission
    with section("cluster.admission"):
        return HealthOptions(
            policy=admission.policy,
            policies={name: site.admission for name, site in config.cluster.sites.items() if site.admission},
            norm_ratio_max=admission.norm_ratio_max,
            cosine_z_max=admission.cosine_z_max,
            history=admission.history,
            hold_ns=to_ns("cluster.admission.hold_s", admission.hold_s, least_s=0.001),
        )


def outer_optimizer(config: RunConfig) -> OuterOptimizerOptions:
    """The outer step."""
    with section("outer"):
        return OuterOptimizerOptions(
            **{each.name: getattr(config.outer, each.name) for each in fields(OuterOptimizerOptions)}
        )


def ahead(config: RunConfig) -> OuterOptimizerOptions | None:
    """The outer step that a site takes ahead on its own updates; None where it has a given share of them, or none."""
    outer = config.outer
    if outer.adopt != "eager" or outer.adopt_alpha is not None:
        return None
    if outer.kind not in ADDITIVE:
        raise ConfigError(
            f"outer.adopt_alpha is null: from 0 to 1, with outer.kind={outer.kind}, whose steps are no sum of the "
            f"sites' parts as those of {', '.join(ADDITIVE)} are"
        )
    if outer.merge_by != "site":
        raise ConfigError(
            f"outer.adopt_alpha is null: from 0 to 1, with outer.merge_by={outer.merge_by}, because a site is told how "
            "many sites a version holds, and not how many updates"
        )
    if outer.share_weighted:
        raise ConfigError(
            "outer.adopt_alpha is null: from 0 to 1, with outer.share_weighted=true, because a site is not told which "
            "share of a step a version is"
        )
    return outer_optimizer(config)


def rule(config: RunConfig, layout: Layout) -> OuterRule:
    """The merge and the outer step."""
    outer = config.outer
    optimizer = outer_optimizer(config)
    with section("outer"):
        gate = Gate(alpha=outer.gate_alpha, cutoff=outer.gate_cutoff, power=outer.gate_power)
        if 0 < gate.cutoff <= outer.staleness_max:
            wanted = f"above outer.staleness_max={outer.staleness_max}: nothing of older ones would be left to merge"
            raise ConfigError(f"outer.gate_cutoff is {gate.cutoff}: {wanted}")
        merge = MergeOptions(kind=outer.merge, norm_ratio_max=outer.norm_ratio_max, trim_share=outer.trim_share)
        numbers = {name: getattr(outer, f"correction_{name}") for name in CORRECTION_NUMBERS}
        correction = Correction(kind=outer.correction, **numbers)
        return outer_rule(optimizer, merge, layout, outer.merge_plain, gate, correction)


def learner_options(config: RunConfig, whole: Layout | None = None) -> LearnerOptions:
    """Rules of a site's machine; ``whole`` as in ``layout_of``."""
    outer = config.outer
    with section("outer"):
        rules = LearnerOptions(
            num_fragments=outer.num_fragments,
            inner_steps=outer.inner_steps,
            dynamic_steps=outer.dynamic_steps,
            dynamic_rounding=outer.dynamic_rounding,
            adopt=outer.adopt,
            updates_in_flight_max=outer.updates_in_flight_max,
            discards_max=outer.discards_max,
            lock_step=outer.lock_step,
            unit_sequences=unit_sequences(config),
            sequence_tokens=config.inner.sequence_length or 0,
            units_ahead=units_ahead(config),
        )
    held = held_of(config, whole) if has_several(config) else range(rules.num_fragments)
    return replace(rules, num_fragments=len(held), offsets=tuple(rules.due_at[index] for index in held))


def agent_options(config: RunConfig, folder: Path, whole: Layout | None = None) -> AgentOptions:
    """A site's agent, with ``folder`` for its own; ``whole`` as in ``layout_of``."""
    site = config.site
    check_codec("codec.up", config.codec.up)
    check_codec("codec.down", config.codec.down)
    alpha = config.outer.adopt_alpha
    if alpha is not None and not 0 <= alpha <= 1:
        raise ConfigError(f"outer.adopt_alpha is {alpha}: from 0 to 1")
    if alpha is None and config.outer.adopt == "blend":
        raise ConfigError("outer.adopt_alpha is null: from 0 to 1, with outer.adopt=blend")
    if config.outer.measure_from not in MEASURE_FROM:
        raise ConfigError(f"outer.measure_from is {config.outer.measure_from!r}: one of {', '.join(MEASURE_FROM)}")
    with section("site"):
        return AgentOptions(
            folder=str(folder),
            up_codec=config.codec.up,
            feedback=feedback(config),
            adapt=adapt_options(config, layout_of(config, whole)),
            adopt_alpha=0.0 if alpha is None else alpha,
            ahead=ahead(config),
            measure_from=config.outer.measure_from,
            join_timeout_s=site.join_timeout_s,
            finish_timeout_s=site.finish_timeout_s,
        )


# --- objects --------------------------------------------------------------------------------------------------------


def build_model(config: RunConfig) -> Transformer:
    """The model with the values of the seed; the same on every machine."""
    return Transformer(model_options(config), seed=config.run.seed)


def layout_of(config: RunConfig, whole: Layout | None = None) -> Layout:
    """The fragments that the syncer holds which the configuration is about: all of them where there is one.

    ``whole`` is the layout of the whole model, where somebody has the model that the configuration does not describe.
    """
    whole = whole or whole_layout(config)
    return part_of(whole, held_of(config, whole)) if has_several(config) else whole


def held_of(config: RunConfig, whole: Layout | None = None) -> tuple[int, ...]:
    """The places of these fragments among those of the whole model."""
    return placement_of(config, whole or whole_layout(config))[config.cluster.syncer.index]


def whole_layout(config: RunConfig) -> Layout:
    """All fragments, computed without allocating the model."""
    if model_file.is_meant(config):
        return layout_over(config, model_file.shapes(config))
    with torch.device("meta"):
        model = Transformer(model_options(config))
    return layout_over(config, {name: tuple(value.shape) for name, value in named_parameters_once(model).items()})


def layout_over(config: RunConfig, shapes: Mapping[str, tuple[int, ...]]) -> Layout:
    """All fragments of a model whose parameters have these names and ``shapes``."""
    with section("outer"):
        return plan_layout(list(shapes.items()), config.outer.num_fragments)


def agreement(config: RunConfig, layout: Layout, whole: Layout | None = None) -> Agreement:
    """What this end says the run is.  The lineage is no matter of configuration: both ends say what they remember."""
    shared = shared_config(config) | shared_by_part(config, whole or whole_layout(config))
    return Agreement(PROTOCOL, config.run.name or "", 0, layout.fingerprint, shared)


def site_agreement(config: RunConfig, layout: Layout, whole: Layout | None = None, data: str = "") -> Agreement:
    """The same at a site, which knows its text as well; ``data`` is the identity of what it draws from instead."""
    found = agreement(config, layout, whole)
    if not config.data.leased:
        return found
    return replace(found, shared={**found.shared, CORPUS: data or corpus(config).identity})


def check_version_zero(config: RunConfig) -> None:
    """Refuse a ``run.init_from`` of which version 0 could not be made, without reading a value."""
    if config.run.init_from is not None and not model_file.is_meant(config):
        with torch.device("meta"):
            model = Transformer(model_options(config))
        load_values(config.run.init_from, model, shapes_only=True)


def version_zero(config: RunConfig, layout: Layout) -> list[Tensor]:
    """The fragments of version 0: from ``run.init_from`` where it is given, from the seed otherwise."""
    if model_file.is_meant(config):
        return model_file.fragments(config, layout)
    model = build_model(config)
    if config.run.init_from is not None:
        load_values(config.run.init_from, model)
    parameters = named_parameters_once(model)
    return [gather(fragment, parameters) for fragment in layout.fragments]


def corpus(config: RunConfig) -> CorpusManifest:
    """The tokenised text; made at the first call on a machine."""
    if config.data.kind == "tokens":
        return prepare_tokens(data_options(config), Path(config.data.cache))
    prepare = prepare_stream if config.data.kind == "hf" else prepare_corpus
    with Preparing() as preparing:
        return prepare(data_options(config), Path(config.data.cache), preparing.told)


def site_share(config: RunConfig) -> tuple[int, int]:
    """Which share of the text this site draws, and of how many; ConfigError where nothing says so."""
    site, names = config.site, list(config.cluster.sites)
    if config.data.leased:
        return 0, 1  # All of it, as far as it is leased.
    if site.index is None and site.id not in names:
        raise ConfigError(
            f"site.index is null and cluster.sites has no {site.id!r} (it has {', '.join(names) or 'none'}): give "
            "site.index and site.num_sites, equal num_sites everywhere, so that no two sites draw the same text"
        )
    index = names.index(site.id) if site.index is None else site.index
    num_sites = len(names) if site.num_sites is None else site.num_sites
    if not 0 <= index < num_sites:
        raise ConfigError(f"site.index is {index}: from 0 to {num_sites - 1}, with site.num_sites={num_sites}")
    return index, num_sites


def build_trainer(
    config: RunConfig,
    group: SiteGroup,
    share: tuple[int, int],
    checkpoints: Path | None,
    log: Log,
    progress: Callable[[], float] | None,
    disk: Disk = PLAIN_DISK,
    units: UnitSource | None = None,
    memory: Path | None = None,
) -> tuple[Trainer, Transformer]:
    """A trainer on ``share`` of the text, or on the ``units`` that are leased of it, and its model, which this site's
    ranks hold as ``site.parallel`` says."""
    assert config.inner.sequence_length is not None
    options = inner_options(config)
    with without_memory(config, group):
        model = build_model(config)
    held = spread(config, model, group)
    text = corpus(config)  # Outside of the section: what is wrong with it is nothing of inner.
    with section("inner"):
        stream = _stream(config, text, held, share, units)
        precision = resolve_precision(config.inner.precision, group.device, group)
    trainer = Trainer(
        model,
        build_optimizers(model, options, precision),
        stream,
        replace(trainer_options(config), precision=precision),
        group,
        progress=progress,
        checkpoint_dir=checkpoints,
        memory_dir=memory,
        log=log,
        disk=disk,
        spread=held,
    )
    return trainer, model


def _stream(
    config: RunConfig, text: CorpusManifest, held: Spread, share: tuple[int, int], units: UnitSource | None
) -> TokenStream:
    length, sequences, seed = config.inner.sequence_length, config.inner.batch_sequences, config.run.seed
    assert length is not None
    place = (held.data_rank, held.data_world)
    if config.data.leased and units is not None:
        unit = config.data.unit_sequences
        return LeasedStream(text, "train", length, sequences, unit, units, held.group, seed, place)
    return TokenStream(text, "train", length, sequences, *share, *place, seed)
