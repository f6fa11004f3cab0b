"""Find a run: its folder, its configuration and its data; and the options of verbs that read a model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.config import compose as configs
from diloco.config.errors import ConfigError
from diloco.config.placing import SYNCERS, has_several, syncer_dirs
from diloco.config.run_dir import RunDir, existing_run
from diloco.config.schema import RunConfig

if TYPE_CHECKING:
    from diloco.syncer.replaying import Rules


CARD = "run.json"
"""The file in a data folder that names its run."""


@dataclass(frozen=True, slots=True)
class Past:
    """An existing run.  ``data`` is the syncer's own folder, which may be lost."""

    run_dir: RunDir
    config: RunConfig
    data: Path

    def rules(self) -> Rules:
        """Return the rules by which the run's outer steps were made."""
        from diloco.config import build
        from diloco.syncer.replaying import Rules

        rule = build.rule(self.config, build.layout_of(self.config))
        return Rules(build.outer_options(self.config), rule, self.config.codec.down)

    def others(self) -> list[Path]:
        """Return the other known data folders of the run: those of standbys, or the one before a failover."""
        root, setting = self.run_dir.root, self.config.cluster.syncer.folder
        known = [
            self.run_dir.syncer,
            *([Path(setting)] if setting else []),
            *(path.parent for path in root.glob(f"*/{CARD}")),
        ]
        found = {path.resolve(): path for path in known if (path / CARD).is_file()}
        found.pop(self.data.resolve(), None)
        return list(found.values())


def past_of(target: str) -> Past:
    """Return the run of the folder that a user named: a run's, or its syncer's data folder.

    ConfigError where there is none, it has no configuration, or it has several syncers.
    """
    data = Path(target) if is_data(Path(target)) else None
    run_dir = existing_run(target) if data is None else RunDir(data.absolute().parent)
    if data is not None and not run_dir.config.is_file():  # It is outside the run's folder, but names its run.
        try:
            run_id = str(json.loads((data / CARD).read_bytes())["run_id"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            says = f"{data} is a data folder whose {CARD} does not say of which run"
            raise ConfigError(f"{says}: name the run's folder") from error
        run_dir = existing_run(run_id)
    if not run_dir.config.is_file():
        raise ConfigError(f"{run_dir.root} has no {run_dir.config.name}: the run's settings are missing")
    config = configs.read(run_dir.config)
    if has_several(config) and run_dir.root.parent.name != SYNCERS:
        which = " or ".join(str(each.root) for each in syncer_dirs(config, run_dir))
        raise ConfigError(f"{target!r} is a run of {config.outer.num_syncers} syncers, each with its own data: {which}")
    return Past(run_dir, config, data or data_of(run_dir))


def data_of(run_dir: RunDir) -> Path:
    """Return where the syncer's data is, which may be lost."""
    if (moved := run_dir.moved_to()) is not None:
        return moved
    setting = configs.read(run_dir.config).cluster.syncer.folder if run_dir.config.is_file() else ""
    return Path(setting) if setting else run_dir.syncer


def is_data(folder: Path) -> bool:
    """Return whether ``folder`` is a syncer's data folder itself."""
    return (folder / "journal").is_dir()


class Kind(Enum):
    """What a model may be read from."""

    FOLDER = "a folder of Hugging Face's form, or a distributed checkpoint of torch"
    TRAINED = "a checkpoint, a folder of them, or a .safetensors file"
    DATA = "a syncer's data folder"
    RUN = "a run's folder"


def kind_of(source: str) -> tuple[Kind, Path]:
    """Return what ``source`` is, and its path (of a `diloco train` run, that of its checkpoints); else ConfigError."""
    path = Path(source)
    if any((path / name).is_file() for name in ("config.json", ".metadata")):
        return Kind.FOLDER, path
    a_checkpoint = path.is_file() or (path / "manifest.json").is_file()
    if a_checkpoint or any(path.glob("*/manifest.json")) or (path / "checkpoints").is_dir():
        return Kind.TRAINED, path
    if is_data(path):
        return Kind.DATA, path
    run_dir = existing_run(source)
    if run_dir.train.is_dir() and not run_dir.syncer.is_dir():
        return Kind.TRAINED, run_dir.train
    return Kind.RUN, run_dir.root
