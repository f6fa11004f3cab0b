"""The options of verbs that read a model: where it is, and as of which version."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.launch import config as configs
from diloco.launch.arguments import limit_threads
from diloco.launch.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from diloco.launch.taken import Taken


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add ``--syncer`` and ``--version`` to ``parser``."""
    parser.add_argument("--syncer", metavar="HOST:PORT", help="ask this syncer for what it publishes now")
    parser.add_argument("--version", metavar="N", default="newest", help="of every fragment; default: the newest")


def version_of(text: str) -> int | None:
    """Return the version that ``--version`` names, None for the newest; ConfigError for anything else."""
    if text == "newest":
        return None
    if not text.isascii() or not text.isdecimal():
        raise ConfigError(f"--version is {text!r}: a number from 0 on, or newest")
    return int(text)


def taken_from(given: argparse.Namespace, sources: Sequence[str], settings: Sequence[str], threads: int) -> Taken:
    """Return the model at ``sources[0]``, or at ``--syncer``; limits this process to ``threads`` from here on."""
    version = version_of(given.version)
    limit_threads(threads)
    if not given.syncer:
        from diloco.launch.taken import take

        return take(sources[0], settings, given.config, version)
    if version is not None:
        raise ConfigError(f"--version is {version}: a syncer hands out its newest alone; a run's folder has others")
    from diloco.launch.taken import take_from_syncer
    from diloco.launch.told import told_by

    config = configs.read(given.config, settings) if given.config else told_by(given.syncer, settings)
    return take_from_syncer(given.syncer, config)
