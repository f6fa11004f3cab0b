"""How the ranks of a site hold the model, as ``site.parallel`` says it, whether that comes out even, and how they
compute it."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from diloco.inner.model import CompileError, ComputeOptions, KernelsError, kernels_of, prepare
from diloco.inner.parallel import device_of
from diloco.inner.sharding import ParallelOptions, Spread, check_cut
from diloco.launch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from diloco.inner.model import ModelOptions, Transformer
    from diloco.inner.parallel import SiteGroup
    from diloco.launch.schema import ClusterSite, RunConfig, SiteSection


def check_spreading(config: RunConfig, model: ModelOptions) -> None:
    """Refuse sizes that this site's ranks, one of ``cluster.sites`` or the model do not divide into."""
    sites: dict[str, SiteSection | ClusterSite] = {"site": config.site}
    sites |= {f"cluster.sites.{name}": site for name, site in config.cluster.sites.items()}
    for where, site in sites.items():
        try:
            _, _, tensor = _options(site).sizes(max(1, site.nproc) * max(1, site.nodes))
            check_cut(model, tensor)
        except ValueError as error:
            raise ConfigError(f"{where}.{error}") from error
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
    """Refuse kernels that the ranks of a site on this machine could not have; nothing is asked of another's."""
    if config.inner.kernels == "torch":
        return
    try:
        device = device_of(config.site.device)
    except ValueError as error:
        raise ConfigError(f"site.{error}") from error
    with _kernels_in_words(config):
        kernels_of(config.inner.kernels, device)


@contextmanager
def _kernels_in_words(config: RunConfig) -> Iterator[None]:
    try:
        yield
    except KernelsError as error:
        raise ConfigError(f"inner.kernels is {config.inner.kernels!r}: {error}") from error


def without_memory(config: RunConfig, group: SiteGroup) -> AbstractContextManager[object]:
    """Inside, a model is made without memory if each rank of this site is to hold a part of it: see ``spread``."""
    try:
        copies, _, _ = _options(config.site).sizes(group.world)
    except ValueError as error:
        raise ConfigError(f"site.{error}") from error
    return torch.device("meta") if copies < group.world else nullcontext()


def spread(config: RunConfig, model: Transformer, group: SiteGroup) -> Spread:
    """``model`` held by the ranks of this site, in place, and computed as ``inner`` says."""
    with _kernels_in_words(config):
        try:
            prepare(model, compute_options(config), group.device)
        except CompileError as error:
            raise ConfigError(f"inner.compile is true: {error}") from error
    try:
        return Spread(model, group, _options(config.site))
    except ValueError as error:
        raise ConfigError(f"site.{error}") from error


def compute_options(config: RunConfig) -> ComputeOptions:
    """How the model is computed."""
    inner = config.inner
    try:
        return ComputeOptions(
            activation_checkpoint=inner.activation_checkpoint,
            compile=inner.compile,
            loss_chunk=inner.loss_chunk,
            kernels=inner.kernels,
        )
    except ValueError as error:
        raise ConfigError(f"inner.{error}") from error


def peak_tflops(config: RunConfig) -> float:
    """What one rank's device can do at most; 0 where nobody has said it."""
    peak = config.site.peak_tflops
    if peak is not None and not 0 < peak < math.inf:
        raise ConfigError(f"site.peak_tflops is {peak}: positive and finite, or null where it is not known")
    return peak or 0.0


def _options(site: SiteSection | ClusterSite) -> ParallelOptions:
    """Of several machines each has a copy under hsdp, unless it is said otherwise: what is gathered block by block
    then stays within one."""
    shard = site.shard_ranks or (site.nproc if site.parallel == "hsdp" and site.nodes > 1 else 0)
    return ParallelOptions(parallel=site.parallel, tensor_ranks=site.tensor_ranks, shard_ranks=shard)
