"""``diloco eval --tasks``: select the tasks and print their scores.  The tasks are lm-evaluation-harness's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.launch.errors import ConfigError, ExitCode, VerbError
from diloco.launch.sources import taken_from

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Asked:
    """The ``tasks`` to score, also those in the folder ``include``; ``fewshot`` examples in a prompt where a task
    leaves that open, None: the task's default; the first ``limit`` documents of each, None: all."""

    tasks: tuple[str, ...]
    include: Path | None = None
    fewshot: int | None = None
    limit: int | None = None


def add_tasks(parser: argparse.ArgumentParser) -> None:
    """Add ``--tasks`` and its options to ``parser``."""
    parser.add_argument("--tasks", metavar="NAME,...", help="score it in these tasks instead")
    parser.add_argument("--include-path", type=Path, metavar="FOLDER", help="with --tasks: where others are described")
    parser.add_argument("--fewshot", type=int, metavar="N", help="with --tasks: examples before each question")
    parser.add_argument("--limit", type=int, metavar="N", help="with --tasks: the first N questions of each")


def asked_of(given: argparse.Namespace) -> Asked | None:
    """Return the tasks that are asked for; None without ``--tasks``."""
    if given.tasks is None:
        for option in ("include_path", "fewshot", "limit"):
            if (value := getattr(given, option)) is not None:
                raise VerbError(ExitCode.USAGE, f"--{option.replace('_', '-')} is {value}: it is for --tasks")
        return None
    if given.follow:
        raise VerbError(ExitCode.USAGE, "--tasks are scored once: no --follow")
    names = tuple(name.strip() for name in given.tasks.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise ConfigError(f"--tasks is {given.tasks!r}: names of different tasks, with commas between them")
    if given.include_path is not None and not given.include_path.is_dir():
        raise ConfigError(f"--include-path is {str(given.include_path)!r}: a folder that is there")
    for option, least in (("fewshot", 0), ("limit", 1)):
        if (value := getattr(given, option)) is not None and value < least:
            raise ConfigError(f"--{option} is {value}: at least {least}")
    return Asked(names, given.include_path, given.fewshot, given.limit)


def score_tasks(given: argparse.Namespace, asked: Asked, folders: Sequence[str], settings: Sequence[str]) -> None:
    """Score the models in ``folders``, or what a syncer publishes, and print the scores."""
    if folders and given.syncer:
        raise VerbError(ExitCode.USAGE, f"--tasks are scored of {folders[0]} or of what --syncer publishes: give one")
    try:
        from diloco.launch import harness
    except ImportError as error:
        text = f"--tasks needs lm-evaluation-harness ({error}): pip install 'diloco[harness]'"
        raise VerbError(ExitCode.FAILED, text) from error
    taken = taken_from(given, folders, settings, threads=0)
    found = harness.score(taken, asked.tasks, asked.include, asked.fewshot, asked.limit)
    if given.json:
        print(json.dumps({"of": taken.called, "versions": list(taken.versions), **found}), flush=True)
        return
    for line in harness.lines(found):
        print(f"{taken.called}: {line}", flush=True)
