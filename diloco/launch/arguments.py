"""The command-line parsing shared by the verbs that take settings."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from diloco.launch import config as configs
from diloco.launch.errors import ExitCode, VerbError

if TYPE_CHECKING:
    from diloco.launch.schema import RunConfig


class OneLineParser(argparse.ArgumentParser):
    """A parser that reports a usage error in one line, as all verbs do."""

    def error(self, message: str) -> NoReturn:
        """End the verb with ``message``."""
        raise VerbError(ExitCode.USAGE, message)


class _WithSettings(OneLineParser):
    """A parser whose ``--help`` lists all settings, looked up only then; settings may come before and after options."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        return self.parse_intermixed_args(args, namespace)

    def format_help(self) -> str:
        from diloco.launch.settings_help import settings_help

        return f"{super().format_help()}\n{settings_help()}\n"


def settings_parser(verb: str, does: str, *, file: bool = True, shown: bool = True) -> argparse.ArgumentParser:
    """Return a parser for ``diloco VERB [--config FILE] [--print-config] [key=value ...]``.

    ``file`` False leaves out ``--config``; ``shown`` False, for a verb without a configuration of its own, leaves out
    ``--print-config``.
    """
    parser = _WithSettings(
        prog=f"diloco {verb}", description=does, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings, listed below")
    if file:
        parser.add_argument("--config", type=Path, metavar="FILE", help="begin with this resolved config.yaml")
    if shown:
        told = "print the resolved configuration, and do nothing"
        parser.add_argument("--print-config", action="store_true", help=told)
    return parser


def load_config(given: argparse.Namespace) -> RunConfig:
    """Return the configuration of the command line.  ``--print-config`` prints it and ends the verb."""
    file: Path | None = given.config
    config = configs.read(file, given.settings) if file is not None else configs.compose(given.settings)
    if given.print_config:
        print(configs.to_yaml(config), end="")
        raise SystemExit(ExitCode.OK)
    return config


def named_keys(given: argparse.Namespace) -> frozenset[str] | None:
    """Return the settings that the command line names directly, not by a group; None where it gives ``--config``."""
    return (
        None if given.config is not None else frozenset(text.partition("=")[0].lstrip("+") for text in given.settings)
    )


def goes_on(config: RunConfig, path: Path, given: argparse.Namespace) -> RunConfig:
    """Adapt ``config`` to the run whose file is ``path``, if it exists: see ``configs.keep_run_settings``.

    The kept settings are printed, and added to ``given.settings`` so that commands printed by this verb include them.
    """
    named = named_keys(given)
    if named is None or not path.is_file():
        return config
    config, kept = configs.keep_run_settings(config, path, named)
    if kept:
        print(f"note: {' '.join(kept)}, as the run has it", flush=True)
    given.settings = [*given.settings, *kept]
    return config


def limit_threads(threads: int, *, deterministic: bool = False) -> None:
    """Set the environment for torch's import: ``threads`` per process (0: torch's choice), ``deterministic`` mode."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if threads < 0:
        raise VerbError(ExitCode.USAGE, f"threads is {threads}: 0 (torch's own choice) or more")
    if threads:
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
