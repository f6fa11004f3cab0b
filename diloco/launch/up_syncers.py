"""The syncers of ``diloco up``: one, or several that hold a part of the model each."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco.launch.errors import ConfigError
from diloco.launch.placing import backup_of, each, has_several, syncer_dir, syncer_name
from diloco.launch.run_dir import RunDir, run_dir_of
from diloco.launch.schema import SyncerSection

if TYPE_CHECKING:
    from diloco.launch.schema import RunConfig

AT = "@"
"""Separates the site from the syncer's number in the name of a link to a syncer that is not the first."""


@dataclass(frozen=True, slots=True)
class OneSyncer:
    """One syncer process: its name, listen address and run folder, and the command to show when the folder is lost."""

    name: str
    address: str
    run_dir: RunDir
    restore: str


def syncers_of(config: RunConfig) -> list[OneSyncer]:
    """Return all syncers of the run, ordered by number."""
    return [
        OneSyncer(syncer_name(index), syncer_address(part), syncer_dir(part), restore_line(part))
        for index, part in enumerate(each(config))
    ]


def syncer_address(config: RunConfig) -> str:
    """Return the syncer's listen address: as configured, or on any free port where nothing was configured."""
    if config.cluster.syncer.listen != SyncerSection().listen:
        return config.cluster.syncer.listen
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def restore_line(config: RunConfig) -> str:
    """Return the command that restores a lost syncer folder: from backups if the run makes any, or from a site."""
    backup = backup_of(config)
    site = run_dir_of(config).site(next(iter(config.cluster.sites))).root
    return f"diloco restore {syncer_dir(config).root} " + (f"--from {backup}" if backup else f"--from-site {site}")


def check(config: RunConfig) -> None:
    """Raise ConfigError for settings that several syncers on one machine cannot share."""
    if not has_several(config):
        return
    usual = SyncerSection()
    for name in ("index", "listen", "metrics"):
        value = getattr(config.cluster.syncer, name)
        if value != getattr(usual, name):
            raise ConfigError(
                f"cluster.syncer.{name} is {value!r}: diloco up gives each of outer.num_syncers its own; leave it out"
            )
    if config.cluster.lease.kind == "file":
        path = config.cluster.lease.path
        raise ConfigError(f"cluster.lease.path is {path!r}: several syncers need a file each; start them by hand")


def link_name(site: str, index: int) -> str:
    """Return the name of the site's link to syncer ``index``."""
    return f"{site}{AT}{index}" if index else site


def site_of(link: str) -> str:
    """Return the site of ``link``."""
    return link.partition(AT)[0]
