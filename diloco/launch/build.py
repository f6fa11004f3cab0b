"""The wiring: a ``RunConfig`` turned into the objects of the floors below, by constructors that can be read.

Every function names the section whose values it uses in the errors it raises: "inner.lr is -1.0: positive and finite".
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from diloco.durable import PLAIN_DISK
from diloco.inner.data import CorpusManifest, DataOptions, TokenStream, prepare_corpus
from diloco.inner.model import ModelOptions, Transformer
from diloco.inner.optimizer import InnerOptions, build_optimizers
from diloco.inner.trainer import Trainer, TrainerOptions
from diloco.launch.adapting import adapt_options, up_codecs
from diloco.launch.coding import check_codec, feedback
from diloco.launch.config import shared_config, shared_digest
from diloco.launch.errors import ConfigError
from diloco.launch.placing import backup_of, has_several, placement_of, shared_by_part
from diloco.launch.replicating import lease, replication_options
from diloco.launch.run_dir import RunDir
from diloco.launch.values import load_values
from diloco.learner.options import AgentOptions
from diloco.outer.fragments import Layout, gather, named_parameters_once, plan_layout
from diloco.outer.optimizer import OuterOptimizerOptions
from diloco.outer.placement import part_of
from diloco.sync.agreement import PROTOCOL, Agreement
from diloco.sync.options import HealthOptions, LearnerOptions, OuterOptions
from diloco.syncer.backups import BackupOptions
from diloco.syncer.options import RunPlan, SyncerOptions
from diloco.wan.link import LinkOptions
from diloco.wire.options import ClientOptions, ServerOptions
from diloco.wire.security import SecurityOptions, check_own_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from diloco.durable import Disk
    from diloco.inner.parallel import SiteGroup
    from diloco.inner.trainer import Log
    from diloco.launch.schema import RunConfig

SECOND_NS = 1_000_000_000
SITE_FILES = ("token_file", "tls_cert", "tls_key", "tls_ca")


def check(config: RunConfig) -> None:
    """Build every set of options once, so that a value that cannot work is refused before anything starts."""
    plan(config, layout_of(config))
    inner_options(config)
    trainer_options(config)
    learner_options(config)
    client_options(config)
    agent_options(config, Path())
    syncer_options(config, RunDir(Path()))
    lease(config)
    server_options(config)
    syncer_security(config)
    data_options(config)
    link_options(config, "")
    for site in config.cluster.sites:
        link_options(config, site)
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
    assert model.vocab_size is not None, "config.settle fills it in"
    assert config.inner.sequence_length is not None
    if not 1 <= config.inner.sequence_length <= model.context:
        length = config.inner.sequence_length
        raise ConfigError(f"inner.sequence_length is {length}: from 1 to model.context={model.context}")
    with _section("model"):
        return ModelOptions(
            vocab_size=model.vocab_size,
            layers=model.layers,
            dim=model.dim,
            heads=model.heads,
            kv_heads=model.kv_heads,
            ffn_dim=model.ffn_dim,
            context=model.context,
            tied=model.tied,
            rope_theta=model.rope_theta,
            norm_eps=model.norm_eps,
        )


def data_options(config: RunConfig) -> DataOptions:
    """Where the text comes from."""
    data = config.data
    with _section("data"):
        return DataOptions(
            kind=data.kind,
            path=data.path,
            pattern=data.pattern,
            tokenizer=data.tokenizer,
            end_of_file=data.end_of_file,
        )


def inner_options(config: RunConfig) -> InnerOptions:
    """What one inner step does."""
    inner = config.inner
    with _section("inner"):
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
    with _section("inner"):
        return TrainerOptions(
            precision=inner.precision,
            deterministic=inner.deterministic,
            seed=config.run.seed,
            checkpoint_steps=inner.checkpoint_every_steps,
            checkpoints_kept=inner.checkpoints_kept,
            nonfinite_max=inner.nonfinite_max,
            slowdown=config.site.slowdown,
        )


def outer_options(config: RunConfig) -> OuterOptions:
    """Rules of the syncer's machine."""
    outer = config.outer
    num_fragments = len(held_of(config)) if has_several(config) else outer.num_fragments
    with _section("outer"):
        return OuterOptions(
            num_fragments=num_fragments,
            quorum=_quorum(outer.quorum),
            quorum_min=outer.quorum_min,
            grace=outer.grace,
            grace_ns=_ns("outer.grace_s", outer.grace_s),
            grace_share_percent=outer.grace_share_percent,
            overlap_steps=outer.overlap_steps,
            weights=outer.weights,
            staleness_max=outer.staleness_max,
            updates_in_flight_max=outer.updates_in_flight_max,
            site_timeout_ns=_ns("outer.site_timeout_s", outer.site_timeout_s, least_s=0.001),
            final_wait_ns=_ns("outer.final_wait_s", outer.final_wait_s, least_s=0.001),
            token_budget=config.run.tokens or 0,
            run_ns=_ns("run.seconds", config.run.seconds or 0.0),
            sites_max=outer.sites_max,
        )


def health_options(config: RunConfig) -> HealthOptions:
    """What becomes of an update that looks like no other."""
    admission = config.cluster.admission
    with _section("cluster.admission"):
        return HealthOptions(
            policy=admission.policy,
            policies={name: site.admission for name, site in config.cluster.sites.items() if site.admission},
            norm_ratio_max=admission.norm_ratio_max,
            cosine_z_max=admission.cosine_z_max,
            history=admission.history,
            hold_ns=_ns("cluster.admission.hold_s", admission.hold_s, least_s=0.001),
        )


def outer_optimizer_options(config: RunConfig) -> OuterOptimizerOptions:
    """The outer step."""
    with _section("outer"):
        return OuterOptimizerOptions(kind=config.outer.kind, lr=config.outer.lr, momentum=config.outer.momentum)


def learner_options(config: RunConfig) -> LearnerOptions:
    """Rules of a site's machine."""
    outer = config.outer
    with _section("outer"):
        whole = LearnerOptions(
            num_fragments=outer.num_fragments,
            inner_steps=outer.inner_steps,
            adopt=outer.adopt,
            updates_in_flight_max=outer.updates_in_flight_max,
            discards_max=outer.discards_max,
            lock_step=outer.lock_step,
        )
    held = held_of(config) if has_several(config) else range(whole.num_fragments)
    return replace(whole, num_fragments=len(held), offsets=tuple(whole.offset(index) for index in held))


def agent_options(config: RunConfig, folder: Path) -> AgentOptions:
    """A site's agent, with ``folder`` for its own."""
    site = config.site
    check_codec("codec.up", config.codec.up)
    check_codec("codec.down", config.codec.down)
    if not 0 <= config.outer.adopt_alpha <= 1:
        raise ConfigError(f"outer.adopt_alpha is {config.outer.adopt_alpha}: from 0 to 1")
    with _section("site"):
        return AgentOptions(
            folder=str(folder),
            up_codec=config.codec.up,
            feedback=feedback(config),
            adapt=adapt_options(config, layout_of(config)),
            adopt_alpha=config.outer.adopt_alpha,
            join_timeout_s=site.join_timeout_s,
            finish_timeout_s=site.finish_timeout_s,
        )


def syncer_options(config: RunConfig, run_dir: RunDir) -> SyncerOptions:
    """The syncer's process."""
    syncer = config.cluster.syncer
    check_codec("codec.up", config.codec.up)
    check_codec("codec.down", config.codec.down)
    with _section("cluster.syncer"):
        return SyncerOptions(
            folder=syncer.folder or str(run_dir.syncer),
            up_codecs=up_codecs(config),
            down_codec=config.codec.down,
            snapshot_every=syncer.snapshot_every,
            downlinks_kept=syncer.downlinks_kept,
            heartbeat_s=syncer.heartbeat_s,
            linger_s=syncer.linger_s,
            threads=syncer.threads,
            memory_check_s=syncer.memory_check_s,
            backup=BackupOptions(url=backup_of(config), every_s=syncer.backup_every_s, keep=syncer.backup_keep),
            replication=replication_options(config),
        )


def server_options(config: RunConfig) -> ServerOptions:
    """The syncer's end of the wire."""
    with _section("cluster.syncer"):
        return ServerOptions(
            run_id=config.run.name or "",
            address=config.cluster.syncer.listen,
            sites_max=config.outer.sites_max,
            calls_per_s=config.cluster.syncer.calls_per_s,
        )


def client_options(config: RunConfig) -> ClientOptions:
    """A site's end of the wire."""
    site = config.site
    with _section("site"):
        return ClientOptions(
            data_channels=site.data_channels, up_mbps=site.up_mbps or 0.0, down_mbps=site.down_mbps or 0.0
        )


def syncer_security(config: RunConfig) -> SecurityOptions:
    """Who may speak to the syncer."""
    syncer = config.cluster.syncer
    with _section("cluster.syncer"):
        return SecurityOptions(
            tls_cert=syncer.tls_cert,
            tls_key=syncer.tls_key,
            tls_ca=syncer.tls_ca,
            require_client_cert=syncer.require_client_cert,
            tokens_file=syncer.tokens_file,
            permissions=syncer.permissions,
            revoked_file=syncer.revoked_file,
            trust_domain=syncer.trust_domain,
            insecure_non_loopback=syncer.insecure_non_loopback,
        )


def site_security(config: RunConfig) -> SecurityOptions:
    """How a site, or an operator, speaks to the syncer; what lies in its files is read once, to see that it is good."""
    site = config.site
    with _section("site"):
        security = SecurityOptions(
            tls_cert=site.tls_cert,
            tls_key=site.tls_key,
            tls_ca=site.tls_ca,
            token_file=site.token_file,
            insecure_non_loopback=site.insecure_non_loopback,
        )
        try:
            check_own_files(security)
        except OSError as error:
            name = next(each for each in SITE_FILES if getattr(site, each) == error.filename)
            raise ConfigError(f"site.{name} is {error.filename!r}: {error.strerror}") from error
    return security


def link_options(config: RunConfig, site: str) -> LinkOptions:
    """The emulated link of ``site`` ("" for one without wishes of its own)."""
    network = config.network
    names = ("rtt_ms", "jitter_ms", "mbps", "queue_kib", "stall_percent", "stall_ms")
    values: dict[str, float] = {name: getattr(network, name) for name in names}
    if site:
        own = config.cluster.sites[site].link
        values |= {name: getattr(own, name) for name in names if getattr(own, name) is not None}
    with _section(f"cluster.sites.{site}.link" if site else "network"):
        place = list(config.cluster.sites).index(site) if site else 0
        return LinkOptions(**values, seed=config.run.seed * 1000 + place)


# --- objects --------------------------------------------------------------------------------------------------------


def build_model(config: RunConfig) -> Transformer:
    """The model with the values of the seed; the same on every machine."""
    return Transformer(model_options(config), seed=config.run.seed)


def layout_of(config: RunConfig) -> Layout:
    """The fragments that the syncer holds which the configuration is about: all of them where there is one."""
    return part_of(whole_layout(config), held_of(config)) if has_several(config) else whole_layout(config)


def held_of(config: RunConfig) -> tuple[int, ...]:
    """The places of these fragments among those of the whole model."""
    return placement_of(config, whole_layout(config))[config.cluster.syncer.index]


def whole_layout(config: RunConfig) -> Layout:
    """All fragments, computed without allocating the model."""
    with torch.device("meta"):
        model = Transformer(model_options(config))
    parameters = [(name, tuple(value.shape)) for name, value in named_parameters_once(model).items()]
    with _section("outer"):
        return plan_layout(parameters, config.outer.num_fragments)


def agreement(config: RunConfig, layout: Layout) -> Agreement:
    """What this end says the run is.  The lineage is no matter of configuration: both ends say what they remember."""
    shared = shared_config(config) | shared_by_part(config, whole_layout(config))
    return Agreement(PROTOCOL, config.run.name or "", 0, layout.fingerprint, shared)


def plan(config: RunConfig, layout: Layout) -> RunPlan:
    """The run as the syncer knows it."""
    return RunPlan(
        agreement=agreement(config, layout),
        layout=layout,
        shared_digest=shared_digest(config),
        outer=outer_options(config),
        health=health_options(config),
        optimizer=outer_optimizer_options(config),
        held=held_of(config),
    )


def version_zero(config: RunConfig, layout: Layout) -> list[Tensor]:
    """The fragments of version 0: from ``run.init_from`` where it is given, from the seed otherwise."""
    model = build_model(config)
    if config.run.init_from is not None:
        load_values(config.run.init_from, model)
    parameters = named_parameters_once(model)
    return [gather(fragment, parameters) for fragment in layout.fragments]


def corpus(config: RunConfig) -> CorpusManifest:
    """The tokenised text; made at the first call on a machine."""
    return prepare_corpus(data_options(config), Path(config.data.cache))


def site_share(config: RunConfig) -> tuple[int, int]:
    """Which share of the text this site draws, and of how many; ConfigError where nothing says so."""
    site, names = config.site, list(config.cluster.sites)
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
) -> tuple[Trainer, Transformer]:
    """A trainer on ``share`` of the text, and its plain model."""
    assert config.inner.sequence_length is not None
    options = inner_options(config)
    model = build_model(config)
    with _section("inner"):
        stream = TokenStream(
            corpus(config),
            "train",
            config.inner.sequence_length,
            config.inner.batch_sequences,
            site_index=share[0],
            num_sites=share[1],
            rank=group.rank,
            world=group.world,
            seed=config.run.seed,
        )
    trainer = Trainer(
        model,
        build_optimizers(model, options),
        stream,
        trainer_options(config),
        group,
        progress=progress,
        checkpoint_dir=checkpoints,
        log=log,
        disk=disk,
    )
    return trainer, model


# --- small things ---------------------------------------------------------------------------------------------------


@contextmanager
def _section(name: str) -> Iterator[None]:
    """Put the section in front of what an options class says about one of its fields."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{name}.{error}") from error


def _quorum(text: str) -> int | str:
    if text == "all":
        return text
    if not text.isdecimal():
        raise ConfigError(f"outer.quorum is {text!r}: a number of sites, or all")
    return int(text)


def _ns(name: str, seconds: float, least_s: float = 0.0) -> int:
    if not least_s <= seconds < 1e9:
        raise ConfigError(f"{name} is {seconds!r}: seconds, {f'at least {least_s:g}' if least_s else 'not negative'}")
    return round(seconds * SECOND_NS)
