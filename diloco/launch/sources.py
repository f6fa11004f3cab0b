"""What the verbs that take a model out have in common on the command line: where it lies, and as of which version."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.launch import config as configs
from diloco.launch.arguments import limit_threads
from diloco.launch.errors import ConfigError
from diloco.launch.past import is_data
from diloco.launch.run_dir import existing_run

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from diloco.launch.taken import Taken


class Kind(Enum):
    """What a model may be taken out of."""

    FOLDER = "a folder of Hugging Face's form"
    TRAINED = "a checkpoint, a folder of them, or a .safetensors file"
    DATA = "a syncer's data folder"
    RUN = "a run's folder"


def kind_of(source: str) -> tuple[Kind, Path]:
    """What lies at ``source``, and where: of a run of `diloco train` the checkpoints.  ConfigError for nothing."""
    path = Path(source)
    if (path / "config.json").is_file():
        return Kind.FOLDER, path
    if path.is_file() or (path / "manifest.json").is_file() or any(path.glob("*/manifest.json")):
        return Kind.TRAINED, path
    if (path / "checkpoints").is_dir():
        return Kind.TRAINED, path
    if is_data(path):
        return Kind.DATA, path
    run_dir = existing_run(source)
    if run_dir.train.is_dir() and not run_dir.syncer.is_dir():
        return Kind.TRAINED, run_dir.train
    return Kind.RUN, run_dir.root


def add_source(parser: argparse.ArgumentParser) -> None:
    """Let ``parser`` take ``--syncer`` and ``--version``."""
    parser.add_argument("--syncer", metavar="HOST:PORT", help="ask this syncer for what it publishes now")
    parser.add_argument("--version", metavar="N", default="newest", help="of every fragment; default: the newest")


def version_of(text: str) -> int | None:
    """The version that ``--version`` asks for, None for the newest; ConfigError for anything else."""
    if text == "newest":
        return None
    if not text.isascii() or not text.isdecimal():
        raise ConfigError(f"--version is {text!r}: a number from 0 on, or newest")
    return int(text)


def taken_from(given: argparse.Namespace, sources: Sequence[str], settings: Sequence[str], threads: int) -> Taken:
    """The model at the one of ``sources``, or at ``--syncer``; for everything after it this process has ``threads``."""
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
