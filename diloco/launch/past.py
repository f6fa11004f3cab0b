"""A run's folder for those who look back at it or take it up again: its configuration, and where its data lies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.launch import config as configs
from diloco.launch.errors import ConfigError
from diloco.launch.run_dir import RunDir, existing_run
from diloco.launch.schema import RunConfig

if TYPE_CHECKING:
    from diloco.syncer.kept import Rules


@dataclass(frozen=True, slots=True)
class Past:
    """``data`` is the syncer's own folder, there or lost."""

    run_dir: RunDir
    config: RunConfig
    data: Path

    def rules(self) -> Rules:
        """What the outer steps of the run were made by."""
        from diloco.launch import build
        from diloco.syncer.kept import Rules

        optimizer = build.outer_optimizer_options(self.config)
        return Rules(build.outer_options(self.config), optimizer, self.config.codec.down)


def past_of(target: str) -> Past:
    """The run whose folder a user named; ConfigError where there is none, or it does not say what the run was."""
    run_dir = existing_run(target)
    if not run_dir.config.is_file():
        raise ConfigError(f"{run_dir.root} has no {run_dir.config.name}: nothing there says what the run was")
    config = configs.read(run_dir.config)
    folder = config.cluster.syncer.folder
    return Past(run_dir, config, Path(folder) if folder else run_dir.syncer)
