"""Build the objects of the lower layers from a ``RunConfig``, with plain constructors.

The errors name the section of the value: "inner.lr is -1.0: positive and finite".
"""

from __future__ import annotations

import math
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from diloco.codec.registry import make_codec, usual_feedback
from diloco.config import connecting
from diloco.config.compose import quorum, shared_config
from diloco.config.errors import ConfigError, options_of, require, section
from diloco.config.model_files import file_fragments, file_shapes, is_of_file, load_values
from diloco.config.placing import has_several, placement_of
from diloco.config.regional import is_region
from diloco.durable import PLAIN_DISK
from diloco.inner.corpus import DataOptions, prepare_corpus
from diloco.inner.data import CorpusManifest, TokenStream, UnitPlaces
from diloco.inner.holding import ParallelOptions, Spread, check_cut
from diloco.inner.model import (
    ComputeOptions,
    ModelOptions,
    Transformer,
    kernels_of,
    prepare,
)
from diloco.inner.optimizer import InnerOptions, build_optimizers
from diloco.inner.parallel import device_of
from diloco.inner.precision import resolve_precision
from diloco.inner.trainer import Trainer, TrainerOptions
from diloco.learner.exchange import AgentOptions
from diloco.outer.fragments import gather, named_parameters_once, part_of, plan_layout
from diloco.outer.merge import CORRECTION_NUMBERS, Correction, Gate, MergeOptions
from diloco.outer.optimizer import OuterOptimizerOptions, OuterRule, outer_rule
from diloco.outer.pseudo_gradient import ADDITIVE, MEASURE_FROM
from diloco.sync.link import AdaptOptions, Way
from diloco.sync.options import (
    ADOPT_KEEPS_UNSENT,
    CORPUS,
    FATES_KEPT,
    FATES_KEPT_LIMIT,
    PROTOCOL,
    UNITS_AHEAD_MAX,
    Agreement,
    HealthOptions,
    LearnerOptions,
    OuterOptions,
)
from diloco.wire.messages import STREAMS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from rich.console import Console
    from rich.progress import Progress, TaskID
    from torch import Tensor

    from diloco.config.schema import ClusterSite, RunConfig, SiteSection
    from diloco.durable import Disk
    from diloco.inner.data import UnitSource
    from diloco.inner.parallel import SiteGroup
    from diloco.inner.trainer import Log
    from diloco.outer.fragments import Layout


UNIT_SEQUENCES_MAX = 1 << 20
SLOWDOWN_MAX = 1e6


def check(config: RunConfig) -> None:
    """Build every set of options once, to raise ConfigError for a bad value before anything starts.

    ``build_syncer.check`` checks the options of the syncer's process as well.
    """
    is_region(config)
    layout = layout_of(config)
    agreement(config, layout)
    outer_options(config)
    health_options(config)
    rule(config, layout)
    if not is_of_file(config):
        check_spreading(config)
    up_codecs(config)
    options_of(ComputeOptions, config.inner, "inner")
    inner_options(config)
    trainer_options(config)
    learner_options(config)
    connecting.client_options(config)
    agent_options(config, Path())
    connecting.server_options(config)
    connecting.syncer_security(config)
    options_of(DataOptions, config.data, "data")
    connecting.link_options(config, "")
    for name, site in config.cluster.sites.items():
        connecting.link_options(config, name)
        wanted = f"from 1 (full speed) to {SLOWDOWN_MAX:g}"
        require(1 <= site.slowdown <= SLOWDOWN_MAX, f"cluster.sites.{name}.slowdown", site.slowdown, wanted)
        require(site.nproc >= 1, f"cluster.sites.{name}.nproc", site.nproc, "at least 1")
    every_s, steps, sequences = config.site.canary_every_s, config.site.canary_steps, config.data.validation_sequences
    require(every_s >= 0, "site.canary_every_s", every_s, "0 (never) or more")
    require(steps >= 1, "site.canary_steps", steps, "at least 1")
    require(sequences >= 1, "data.validation_sequences", sequences, "at least 1")


# --- options of the lower layers ----------------------------------------------------------------------------------


def model_options(config: RunConfig) -> ModelOptions:
    """Return the size and shape of the model; ConfigError for a model of kind "file"."""
    model = config.model
    if is_of_file(config):
        raise ConfigError(
            "model.kind is 'file': only the training loops that call diloco.join know the model in run.init_from; this "
            "command knows only its values"
        )
    length = config.inner.sequence_length
    assert length is not None
    assert model.context is not None, "config.settle fills in what is null"
    require(1 <= length <= model.context, "inner.sequence_length", length, f"from 1 to model.context={model.context}")
    return options_of(ModelOptions, model, "model")


def inner_options(config: RunConfig) -> InnerOptions:
    """Return the options of one inner step."""
    return options_of(InnerOptions, config.inner, "inner")


def trainer_options(config: RunConfig) -> TrainerOptions:
    """Return the options of the training loop."""
    inner, peak, slowdown = config.inner, config.site.peak_tflops, config.site.slowdown
    every = inner.checkpoint_every_steps
    require(every >= 0, "inner.checkpoint_every_steps", every, "0 (none) or more")
    require(slowdown >= 1, "site.slowdown", slowdown, "1 (full speed) or more")
    if peak is not None and not 0 < peak < math.inf:
        raise ConfigError(f"site.peak_tflops is {peak}: positive and finite, or null where it is unknown")
    return options_of(
        TrainerOptions,
        inner,
        "inner",
        seed=config.run.seed,
        checkpoint_steps=every,
        peak_tflops=peak or 0.0,
        slowdown=slowdown,
    )


def outer_options(config: RunConfig) -> OuterOptions:
    """Return the options of the syncer's state machine.  A region has no limit of its own: the run above ends it."""
    outer, ends_itself = config.outer, not is_region(config)
    num_fragments = len(held_of(config)) if has_several(config) else outer.num_fragments + bool(outer.publish)
    all_train_on = outer.adopt in ADOPT_KEEPS_UNSENT and not outer.lock_step
    least = quorum(outer.quorum)
    wanted = f"at most outer.sites_max={outer.sites_max}, since no more sites are in the run at once"
    require(isinstance(least, str) or least <= outer.sites_max, "outer.quorum", least, wanted)
    fates = outer.updates_in_flight_max * (outer.staleness_max + 2)
    wanted = f"(outer.staleness_max + 2) x outer.updates_in_flight_max={outer.updates_in_flight_max} may be at most"
    require(fates <= FATES_KEPT_LIMIT, "outer.staleness_max", outer.staleness_max, f"{wanted} {FATES_KEPT_LIMIT}")
    return options_of(
        OuterOptions,
        outer,
        "outer",
        num_fragments=num_fragments,
        quorum=least,
        grace_ns=to_ns("outer.grace_s", outer.grace_s),
        grace_period_percent=outer.grace_period_percent if all_train_on else 0,
        share_weighted=outer.share_weighted and outer.kind != "delayed_nesterov",
        site_timeout_ns=to_ns("outer.site_timeout_s", outer.site_timeout_s, least_s=0.001),
        fates_kept_max=max(FATES_KEPT, fates),
        final_wait_ns=to_ns("outer.final_wait_s", outer.final_wait_s, least_s=0.001),
        token_budget=(config.run.tokens or 0) * ends_itself,
        run_ns=to_ns("run.seconds", (config.run.seconds or 0.0) * ends_itself),
        unit_sequences=unit_sequences(config),
        lease_ns=to_ns("data.unit_lease_s", config.data.unit_lease_s, least_s=0.001),
    )


def unit_sequences(config: RunConfig) -> int:
    """Return the sequences in each unit of text that the syncer leases, or 0 where it leases none.

    Of several syncers, only the first leases text.
    """
    data = config.data
    unit, ahead = data.unit_sequences, data.units_ahead
    require(1 <= unit <= UNIT_SEQUENCES_MAX, "data.unit_sequences", unit, f"1 to {UNIT_SEQUENCES_MAX}")
    require(1 <= ahead <= UNITS_AHEAD_MAX, "data.units_ahead", ahead, f"1 to {UNITS_AHEAD_MAX}")
    leases = data.leased and (not has_several(config) or config.cluster.syncer.index == 0)
    return unit if leases else 0


def health_options(config: RunConfig) -> HealthOptions:
    """Return the options for admitting, holding or refusing an outlier update."""
    admission = config.cluster.admission
    return options_of(
        HealthOptions,
        admission,
        "cluster.admission",
        policies={name: site.admission for name, site in config.cluster.sites.items() if site.admission},
        hold_ns=to_ns("cluster.admission.hold_s", admission.hold_s, least_s=0.001),
    )


def ahead(config: RunConfig) -> OuterOptimizerOptions | None:
    """Return the outer step that an ``eager`` site applies ahead to its own updates.

    None where ``adopt_alpha`` fixes the share that it applies, or where it applies none.
    """
    outer = config.outer
    if outer.adopt != "eager" or outer.adopt_alpha is not None:
        return None
    why = ""
    if outer.kind not in ADDITIVE:
        kinds = ", ".join(ADDITIVE)
        why = f"outer.kind={outer.kind}, whose steps are not sums of the sites' parts, unlike those of {kinds}"
    elif outer.merge_by != "site":
        told = "because the syncer tells a site how many sites a version holds, not how many updates"
        why = f"outer.merge_by={outer.merge_by}, {told}"
    elif outer.share_weighted:
        why = "outer.share_weighted=true, because the syncer does not tell a site a version's share of a step"
    if why:
        raise ConfigError(f"outer.adopt_alpha is null: from 0 to 1, with {why}")
    return options_of(OuterOptimizerOptions, outer, "outer")


def rule(config: RunConfig, layout: Layout) -> OuterRule:
    """Return the rule that merges updates and takes the outer step."""
    outer = config.outer
    optimizer = options_of(OuterOptimizerOptions, outer, "outer")
    merge = options_of(MergeOptions, outer, "outer", kind=outer.merge)
    with section("outer"):
        gate = Gate(alpha=outer.gate_alpha, cutoff=outer.gate_cutoff, power=outer.gate_power)
        wanted = f"above outer.staleness_max={outer.staleness_max}: nothing of older ones would be left to merge"
        require(not 0 < gate.cutoff <= outer.staleness_max, "outer.gate_cutoff", gate.cutoff, wanted)
        numbers = {name: getattr(outer, f"correction_{name}") for name in CORRECTION_NUMBERS}
        correction = Correction(kind=outer.correction, **numbers)
        return outer_rule(optimizer, merge, layout, outer.merge_plain, gate, correction)


def learner_options(config: RunConfig, whole: Layout | None = None) -> LearnerOptions:
    """Return the options of a site's state machine; ``whole`` as in ``layout_of``."""
    outer = config.outer
    rules = options_of(
        LearnerOptions,
        outer,
        "outer",
        unit_sequences=unit_sequences(config),
        sequence_tokens=config.inner.sequence_length or 0,
        units_ahead=units_ahead(config),
    )
    due_at = (*rules.due_at, *[outer.inner_steps - 1] * bool(outer.publish))  # Buffers: a step before it.
    held = held_of(config, whole) if has_several(config) else range(len(due_at))
    with section("outer"):
        return replace(rules, num_fragments=len(held), offsets=tuple(due_at[index] for index in held))


def agent_options(config: RunConfig, folder: Path, whole: Layout | None = None) -> AgentOptions:
    """Return the options of a site's agent, which keeps its files in ``folder``; ``whole`` as in ``layout_of``."""
    for way in ("up", "down"):
        with section("codec", codec=way):
            make_codec(getattr(config.codec, way))
    alpha = config.outer.adopt_alpha
    require(alpha is None or 0 <= alpha <= 1, "outer.adopt_alpha", alpha, "from 0 to 1")
    if alpha is None and config.outer.adopt == "blend":
        raise ConfigError("outer.adopt_alpha is null: from 0 to 1, with outer.adopt=blend")
    measure_from = config.outer.measure_from
    require(measure_from in MEASURE_FROM, "outer.measure_from", measure_from, f"one of {', '.join(MEASURE_FROM)}")
    with section("site", channels="data_channels"):
        adapt = adapt_options(config, layout_of(config, whole))
    return options_of(
        AgentOptions,
        config.site,
        "site",
        folder=str(folder),
        feedback=feedback(config),
        adapt=adapt,
        adopt_alpha=0.0 if alpha is None else alpha,
        ahead=ahead(config),
        measure_from=measure_from,
    )


# --- objects --------------------------------------------------------------------------------------------------------


def build_model(config: RunConfig) -> Transformer:
    """Build the model with initial values from the seed; they are the same on every machine."""
    return Transformer(model_options(config), seed=config.run.seed)


def device(config: RunConfig) -> torch.device:
    """Return the device of a single process, ``site.device``; ConfigError where this machine lacks it."""
    with section("site"):
        return device_of(config.site.device)


def layout_of(config: RunConfig, whole: Layout | None = None) -> Layout:
    """Return the fragments that the configured syncer holds: all of them where there is one syncer.

    ``whole`` is the layout of the whole model, for a caller whose model the configuration does not describe.
    """
    whole = whole or whole_layout(config)
    return part_of(whole, held_of(config, whole)) if has_several(config) else whole


def held_of(config: RunConfig, whole: Layout | None = None) -> tuple[int, ...]:
    """Return the indices of the configured syncer's fragments among those of the whole model."""
    return placement_of(config, whole or whole_layout(config))[config.cluster.syncer.index]


def whole_layout(config: RunConfig) -> Layout:
    """Return all fragments, computed without allocating the model."""
    if is_of_file(config):
        return layout_over(config, *file_shapes(config))
    wanted = "only with model.kind=file: the model of this command has no buffers to exchange"
    require(not config.outer.publish, "outer.publish", config.outer.publish, wanted)
    with torch.device("meta"):
        model = Transformer(model_options(config))
    return layout_over(config, {name: tuple(value.shape) for name, value in named_parameters_once(model).items()})


def layout_over(
    config: RunConfig, shapes: Mapping[str, tuple[int, ...]], frozen: str = "", buffers: Collection[str] = ()
) -> Layout:
    """Return all fragments of a model whose exchanged parameters have these names and ``shapes``.

    ``frozen`` is the digest of its frozen ones; ``buffers`` names those of ``shapes`` that are buffers.
    """
    with section("outer"):
        return plan_layout(list(shapes.items()), config.outer.num_fragments, frozen, buffers)


def agreement(config: RunConfig, layout: Layout, whole: Layout | None = None) -> Agreement:
    """Return this process's description of the run, for the join.

    The lineage (0 here) does not come from the configuration: each end sends the lineage that it remembers.
    """
    shared = shared_config(config)
    if has_several(config):
        whole = whole or whole_layout(config)
        held = " / ".join(" ".join(map(str, indices)) for indices in placement_of(config, whole))  # As in "0 2 / 1 3".
        placed = f"{held} of layout {whole.fingerprint[:12]}"
        shared |= {"cluster.syncer.index": str(config.cluster.syncer.index), "placement": placed}
    return Agreement(PROTOCOL, config.run.name or "", 0, layout.fingerprint, shared)


def site_agreement(config: RunConfig, layout: Layout, whole: Layout | None = None, data: str = "") -> Agreement:
    """Return ``agreement`` for a site; where the text is leased, it includes the text's identity.

    ``data`` is the identity of a data source that replaces the configured corpus.
    """
    found = agreement(config, layout, whole)
    if not config.data.leased:
        return found
    return replace(found, shared={**found.shared, CORPUS: data or corpus(config).identity})


def check_version_zero(config: RunConfig) -> None:
    """Refuse a ``run.init_from`` that cannot give version 0; this reads only shapes, no values."""
    if config.run.init_from is not None and not is_of_file(config):
        with torch.device("meta"):
            model = Transformer(model_options(config))
        load_values(config.run.init_from, model, shapes_only=True)


def version_zero(config: RunConfig, layout: Layout) -> list[Tensor]:
    """Return the fragments of version 0: from ``run.init_from`` if given, otherwise from the seed."""
    if is_of_file(config):
        return file_fragments(config, layout)
    model = build_model(config)
    if config.run.init_from is not None:
        load_values(config.run.init_from, model)
    parameters = named_parameters_once(model)
    return [gather(fragment, parameters) for fragment in layout.fragments]


def corpus(config: RunConfig) -> CorpusManifest:
    """Return the tokenised text; the first call on a machine creates it."""
    options = options_of(DataOptions, config.data, "data")
    with preparing() as told:
        return prepare_corpus(options, Path(config.data.cache), told, Path(config.run.dir))


def site_share(config: RunConfig) -> tuple[int, int]:
    """Return this site's share of the text as (index, number of shares); (0, 1), all of it, where sites share none.

    ConfigError where the settings contradict each other.
    """
    site, names = config.site, list(config.cluster.sites)
    if config.data.leased or has_own_order(config):
        return 0, 1
    index = names.index(site.id) if site.index is None else site.index
    num_sites = len(names) if site.num_sites is None else site.num_sites
    if not 0 <= index < num_sites:
        raise ConfigError(f"site.index is {index}: from 0 to {num_sites - 1}, with site.num_sites={num_sites}")
    return index, num_sites


def has_own_order(config: RunConfig) -> bool:
    """Return whether the site draws from all of the text in its own order: it has no ``site.index``, and no place in
    ``cluster.sites``.  ConfigError for ``site.num_sites`` alone."""
    site = config.site
    if site.index is not None or site.id in config.cluster.sites:
        return False
    if site.num_sites is not None:
        raise ConfigError(f"site.index is null, with site.num_sites={site.num_sites}: give both, or neither")
    return True


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
    """Build a trainer on a ``share`` of the text, or on leased ``units`` of it, and its model, which this site's ranks
    hold according to ``site.parallel``."""
    length, sequences, seed = config.inner.sequence_length, config.inner.batch_sequences, config.run.seed
    assert length is not None
    options = inner_options(config)
    with section("site"):
        copies, _, _ = _parallel_options(config.site).sizes(group.world)
    # Ranks that will each hold only a part build the model without memory, and ``spread`` gives it its values.
    with torch.device("meta") if copies < group.world else nullcontext():
        model = build_model(config)
    held = spread(config, model, group)
    text = corpus(config)  # Outside the section: its errors do not concern inner.
    own_order = f"{seed}/{config.site.id}" if has_own_order(config) else seed
    place = (held.data_rank, held.data_world)
    with section("inner"):
        if config.data.leased and units is not None:
            leased = UnitPlaces(config.data.unit_sequences, units, held.group)
            stream = TokenStream(text, "train", length, sequences, 0, 1, *place, seed, leased)
        else:
            stream = TokenStream(text, "train", length, sequences, *share, *place, own_order)
        precision = resolve_precision(config.inner.precision, group.device, group)
    trainer = Trainer(
        model,
        build_optimizers(model, options, precision),
        stream,
        replace(trainer_options(config), precision=precision),
        held,
        progress=progress,
        checkpoint_dir=checkpoints,
        memory_dir=memory,
        log=log,
        disk=disk,
    )
    return trainer, model


def to_ns(name: str, seconds: float, least_s: float = 0.0) -> int:
    """Convert ``seconds`` to nanoseconds; ConfigError naming ``name`` unless ``least_s`` <= ``seconds`` < 1e9."""
    if not least_s <= seconds < 1e9:
        raise ConfigError(f"{name} is {seconds!r}: seconds, at least {least_s:g} and below 1e9")
    return round(seconds * 1e9)


def units_ahead(config: RunConfig) -> int:
    """Return how many units a site leases ahead: at least those of two steps, or it would run out in every step."""
    inner, unit = config.inner, config.data.unit_sequences
    two = 2 * -(-inner.batch_sequences * inner.accumulation * config.site.nproc * config.site.nodes // unit)
    wanted = f"two steps of this site draw {two} units, more than {UNITS_AHEAD_MAX}: choose larger units"
    require(not config.data.leased or two <= UNITS_AHEAD_MAX, "data.unit_sequences", unit, wanted)
    return max(config.data.units_ahead, two)


# --- what a site may choose by the measured link (site.adapt) ---------------------------------------------------------


WINDOW_BYTES = 4 << 20
"""Linux's default, for machines without ``TCP_WMEM``."""
DEFAULT_PART = 10
"""``site.overlap_steps_max`` defaults to ``outer.inner_steps`` over this.  An overlap of ten steps costs Streaming
DiLoCo (arXiv 2501.18512) less than 0.2 % of its loss."""
TCP_WMEM = Path("/proc/sys/net/ipv4/tcp_wmem")


def up_codecs(config: RunConfig) -> list[str]:
    """Return every codec that an update may use, ``codec.up`` first; ConfigError for a bad ``codec.up_allowed``."""
    codec = config.codec
    found = [codec.up, *codec.up_allowed]
    for name in codec.up_allowed:
        try:
            make_codec(name)
        except ValueError as error:
            raise ConfigError(str(error).replace("codec is", "codec.up_allowed has", 1)) from error
        if found.count(name) > 1:
            raise ConfigError(f"codec.up_allowed has {name!r} twice, or repeats codec.up")
    return found


def adapt_options(config: RunConfig, layout: Layout, window: Path = TCP_WMEM) -> AdaptOptions:
    """Return the codecs, numbers of connections and overlap steps that a site may choose from.

    Without ``site.adapt`` these are only the configured ones.  ``config.site.data_channels`` must be checked before.
    """
    site, outer = config.site, config.outer
    if site.adapt and outer.lock_step:
        raise ConfigError("site.adapt is True: under outer.lock_step a run's bits must not depend on measured links")
    if site.adapt and outer.adopt not in ADOPT_KEEPS_UNSENT:
        raise ConfigError(
            f"site.adapt is True: with outer.adopt={outer.adopt} what a coarser codec rounds off is lost; "
            "under rebase and eager it goes out with the next update"
        )
    overlap_steps, overlap_steps_max = _overlap(config)
    try:
        window_bytes = max(1, int(window.read_text("ascii").split()[-1]))  # What one socket may have in flight.
    except (OSError, ValueError, IndexError):
        window_bytes = WINDOW_BYTES
    numels = [fragment.numel for fragment in layout.fragments]
    names = up_codecs(config) if site.adapt else [config.codec.up]
    sizes = {name: sum(map(make_codec(name).payload_bytes_max, numels)) for name in (*names, config.codec.down)}
    return AdaptOptions(
        ways=tuple(Way(name, sizes[name]) for name in names),
        version_bytes=sizes[config.codec.down],
        num_fragments=len(numels),
        inner_steps=outer.inner_steps,
        channels=site.data_channels,
        channels_max=STREAMS_MAX if site.adapt else site.data_channels,
        window_bytes=window_bytes,
        overlap_steps=overlap_steps,
        overlap_steps_max=overlap_steps_max,
    )


def _overlap(config: RunConfig) -> tuple[int, int]:
    """Return the fewest and the most inner steps that may pass until a version is adopted."""
    least, most, period = config.site.overlap_steps, config.site.overlap_steps_max, config.outer.inner_steps
    require(0 <= least < period, "site.overlap_steps", least, f"from 0 to less than outer.inner_steps={period}")
    wanted = "under outer.lock_step no step passes before a version is here"
    require(not (least and config.outer.lock_step), "site.overlap_steps", least, wanted)
    wanted = "only under site.adapt=true; without it overlap_steps counts"
    require(most is None or config.site.adapt, "site.overlap_steps_max", most, wanted)
    if most is None:
        most = max(least, period // DEFAULT_PART)
    wanted = f"from site.overlap_steps={least} to less than outer.inner_steps={period}"
    require(least <= most < period, "site.overlap_steps_max", most, wanted)
    return least, most if config.site.adapt else least


# --- codecs -----------------------------------------------------------------------------------------------------------


def feedback(config: RunConfig) -> float:
    """Return the share, 0 to 1, of ``codec.up``'s rounding error that goes out with the next update."""
    told, up = config.codec.feedback, config.codec.up
    if told is None:
        return 0.0 if config.outer.adopt in ADOPT_KEEPS_UNSENT else usual_feedback(up)
    require(0 <= told <= 1, "codec.feedback", told, "from 0 to 1")
    if told and config.outer.adopt in ADOPT_KEEPS_UNSENT:
        raise ConfigError(
            f"codec.feedback is {told!r}: with outer.adopt={config.outer.adopt} what codec.up rounds off stays in the "
            "site's values and goes out with the next update; leave it null, or adopt by overwrite or blend"
        )
    require(not told or not make_codec(up).lossless, "codec.feedback", told, f"codec.up={up} rounds nothing off")
    return told


# --- how the ranks of a site hold the model, and how they compute it --------------------------------------------------


def check_spreading(config: RunConfig) -> None:
    """Refuse parallel sizes that do not divide the model or the ranks of this site or of one in ``cluster.sites``."""
    model = model_options(config)
    sites: dict[str, SiteSection | ClusterSite] = {"site": config.site}
    sites |= {f"cluster.sites.{name}": site for name, site in config.cluster.sites.items()}
    for where, site in sites.items():
        with section(where):
            _, _, tensor = _parallel_options(site).sizes(max(1, site.nproc) * max(1, site.nodes))
            check_cut(model, tensor)
        if site.nodes > 1 and site.nproc % tensor:
            raise ConfigError(
                f"{where}.tensor_ranks is {tensor}: a divisor of the {site.nproc} rank(s) of one machine, because "
                "ranks that multiply together wait for each other several times in every block"
            )
        if tensor > 1 and config.inner.compile:
            raise ConfigError(
                f"inner.compile is true: not with {where}.parallel={site.parallel}, because torch.compile does not "
                "take matrices that ranks multiply together"
            )
        if tensor > 1 and config.inner.kernels != "torch":
            raise ConfigError(
                f"inner.kernels is {config.inner.kernels!r}: torch with {where}.parallel={site.parallel}, because such "
                "kernels do not take values that ranks hold in parts"
            )


def check_kernels(config: RunConfig) -> None:
    """Refuse kernels that this machine cannot run; sites on other machines are not checked."""
    if config.inner.kernels == "torch":
        return
    where = device(config)
    with section("inner"):
        kernels_of(config.inner.kernels, where)


def spread(config: RunConfig, model: Transformer, group: SiteGroup) -> Spread:
    """Distribute ``model``, in place, over the ranks of this site, to be computed with the settings of ``inner``."""
    with section("inner"):
        prepare(model, options_of(ComputeOptions, config.inner, "inner"), group.device)
    with section("site"):
        return Spread(model, group, _parallel_options(config.site))


def _parallel_options(site: SiteSection | ClusterSite) -> ParallelOptions:
    """Under hsdp on several machines, ``shard_ranks`` defaults to one copy of the model per machine: the all-gathers
    of blocks then stay within a machine."""
    shard = site.shard_ranks or (site.nproc if site.parallel == "hsdp" and site.nodes > 1 else 0)
    return ParallelOptions(parallel=site.parallel, tensor_ranks=site.tensor_ranks, shard_ranks=shard)


@contextmanager
def preparing(console: Console | None = None) -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that reports the bytes of a split that are processed, of how many (0: unknown).

    It draws a progress bar for each split on ``console`` (None: standard error), from the first report on; none
    without a terminal.
    """
    bars: Progress | None = None
    tasks: dict[str, TaskID] = {}

    def told(split: str, done: int, total: int) -> None:
        nonlocal bars
        if bars is None:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

            where = console or Console(stderr=True)
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
            bars = stack.enter_context(Progress(*columns, console=where, disable=not where.is_terminal))
        if split not in tasks:
            tasks[split] = bars.add_task(f"tokens of {split}", total=None)
        bars.update(tasks[split], completed=done, total=total or None)

    with ExitStack() as stack:
        yield told
