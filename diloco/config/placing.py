"""A run of several syncers: which fragments each one holds, where it keeps its data, and its address.

Each syncer is built from a configuration with its own ``cluster.syncer.index``; ``towards`` gives a site the
configurations of all syncers.  With one syncer, everything here has no effect.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from diloco.config.errors import ConfigError, refusing, require
from diloco.config.run_dir import RunDir, run_dir_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.config.schema import RunConfig
    from diloco.outer.fragments import Layout

BETWEEN = "/"
"""Separates the addresses of two syncers in ``site.syncer`` and ``upstream.endpoint``; a comma separates those of a
syncer and its standby."""
SYNCERS = "syncers"
BY_PART = frozenset({"cluster.syncer.index", "placement"})
"""What a site and one of several syncers must also agree on: ``build.agreement`` adds it to the shared settings."""


def has_several(config: RunConfig) -> bool:
    """Return whether the run has more than one syncer; ConfigError for inconsistent settings."""
    outer, index = config.outer, config.cluster.syncer.index
    number, rates = outer.num_syncers, outer.syncer_mbps
    require(number >= 1, "outer.num_syncers", number, "at least 1")
    wanted = f"at most outer.num_fragments={outer.num_fragments}, since each syncer holds whole fragments"
    require(number <= outer.num_fragments, "outer.num_syncers", number, wanted)
    require(len(rates) in (0, number), "outer.syncer_mbps", rates, f"one for each of num_syncers={number}")
    wanted = f"from 0 to {number - 1}, with outer.num_syncers={number}"
    require(0 <= index < number, "cluster.syncer.index", index, wanted)
    processes, left = config.cluster.syncer.processes, number - index
    wanted = f"1 to {left}, with outer.num_syncers={number} and cluster.syncer.index={index}"
    require(1 <= processes <= left, "cluster.syncer.processes", processes, wanted)
    return number > 1


def number_of(config: RunConfig) -> int | None:
    """Return the index of the configured syncer; None where there is only one syncer."""
    return config.cluster.syncer.index if has_several(config) else None


def placement_of(config: RunConfig, whole: Layout) -> tuple[tuple[int, ...], ...]:
    """Return, for each syncer, the indices of the fragments of ``whole`` that it holds."""
    from diloco.outer.fragments import place  # Not above: --help must not import torch.

    if not has_several(config):
        return (tuple(range(len(whole.fragments))),)
    numels, rates = [fragment.numel for fragment in whole.fragments], config.outer.syncer_mbps
    with refusing(ValueError, begin=f"outer.syncer_mbps is {rates}: "):
        return place(numels, rates or [1.0] * config.outer.num_syncers)


def at(config: RunConfig, index: int, **more: str) -> RunConfig:
    """Return ``config`` for the syncer with number ``index`` alone; ``more`` are other settings of cluster.syncer."""
    own = replace(config.cluster.syncer, index=index, processes=1, **more)  # type: ignore[arg-type]
    return replace(config, cluster=replace(config.cluster, syncer=own))


def syncer_configs(config: RunConfig) -> list[RunConfig]:
    """Return ``config`` for each of the syncers."""
    return [at(config, index) for index in range(config.outer.num_syncers)] if has_several(config) else [config]


def on_this_machine(config: RunConfig) -> list[RunConfig]:
    """Return ``config`` for each syncer that one ``diloco syncer`` starts, whose ports follow each other.

    ConfigError for settings that several cannot share.
    """
    own = config.cluster.syncer
    if has_several(config) and own.processes > 1:
        listen, page = _port_of(own.listen), _port_of(own.metrics)
        wanted = "host:port, with a port that a syncer takes again when it has died"
        require(listen > 0, "cluster.syncer.listen", own.listen, wanted)
        wanted = f"{own.processes} ports in a row, none of them one of cluster.syncer.listen={own.listen}"
        require(not page or abs(page - listen) >= own.processes, "cluster.syncer.metrics", own.metrics, wanted)
        wanted = "each of cluster.syncer.processes has its own; leave it out"
        require(own.folder is None, "cluster.syncer.folder", own.folder, wanted)
        check_lease(config)
    return [
        at(config, own.index + more, listen=port_after(own.listen, more), metrics=port_after(own.metrics, more))
        for more in range(own.processes)
    ]


def check_lease(config: RunConfig) -> None:
    """Raise ConfigError for a lease that several syncers of one command would share."""
    by_hand = "several syncers need a file each; start them by hand"
    require(config.cluster.lease.kind != "file", "cluster.lease.path", config.cluster.lease.path, by_hand)


def _port_of(address: str) -> int:
    """Return the port of host:port, or of a port alone; 0 where there is none, or any."""
    port = address.rpartition(":")[2]
    return int(port) if port.isascii() and port.isdigit() else 0


def port_after(address: str, more: int) -> str:
    """Return ``address`` with a port higher by ``more``, unless ``_port_of`` is 0."""
    host, colon, _ = address.rpartition(":")
    return f"{host}{colon}{port + more}" if (port := _port_of(address)) else address


def towards(config: RunConfig) -> list[RunConfig]:
    """Return a site's ``config`` for each syncer, with that syncer's index, and its address in ``site.syncer``."""
    addresses = address_of_each(config, "site.syncer", config.site.syncer)
    return [
        replace(part, site=replace(config.site, syncer=address))
        for part, address in zip(syncer_configs(config), addresses, strict=True)
    ]


def address_of_each(config: RunConfig, name: str, text: str) -> list[str]:
    """Split ``text``, the value of the setting ``name``, into one address per syncer; ConfigError for a wrong count."""
    found, count = [address.strip() for address in text.split(BETWEEN)], len(syncer_configs(config))
    if len(found) != count:
        wanted = f"one address, since outer.num_syncers={count}"
        if count > 1:
            wanted = f"{count} addresses with {BETWEEN} between, one for each of outer.num_syncers"
        raise ConfigError(f"{name} is {text!r}: {wanted}")
    return found


def syncer_name(index: int) -> str:
    """Return a syncer's name among the processes of a run."""
    return f"syncer-{index}" if index else "syncer"


def is_syncer(name: str) -> bool:
    """Return whether a process of that name is one of the run's syncers."""
    return name == syncer_name(0) or name.startswith(f"{syncer_name(0)}-")


def syncer_dir(config: RunConfig) -> RunDir:
    """Return the configured syncer's run folder: the run's own or, with several syncers, one below it."""
    return syncer_dirs(config, run_dir_of(config))[config.cluster.syncer.index]


def syncer_dirs(config: RunConfig, run_dir: RunDir) -> list[RunDir]:
    """Return the run folders of all syncers of the run in ``run_dir``."""
    if not has_several(config):
        return [run_dir]
    return [RunDir(run_dir.root / SYNCERS / str(index)) for index in range(config.outer.num_syncers)]


def backup_of(config: RunConfig) -> str:
    """Return the URL of the syncer's backups, with one subfolder for each of several syncers; "": no backups."""
    url = config.cluster.syncer.backup
    return f"{url.rstrip('/')}/syncer-{config.cluster.syncer.index}" if url and has_several(config) else url


def in_whole_order(placement: Sequence[Sequence[int]], told: Sequence[Sequence[int]]) -> list[int]:
    """Merge the values ``told`` by each syncer, one for each fragment it holds, into the order of the whole model."""
    pairs = (pair for mine, values in zip(placement, told, strict=True) for pair in zip(mine, values, strict=True))
    return [value for _, value in sorted(pairs)]
