"""The command-line parsing shared by the verbs that take settings."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from diloco.config import compose as configs
from diloco.config.compose import choices
from diloco.config.errors import ExitCode, VerbError
from diloco.config.keys import default_text, leaves, meanings
from diloco.config.schema import RunConfig

if TYPE_CHECKING:
    from collections.abc import Iterator


SYNCER = "site.syncer="


class OneLineParser(argparse.ArgumentParser):
    """A parser that reports a usage error in one line, as all verbs do."""

    def error(self, message: str) -> NoReturn:
        """End the verb with ``message``."""
        raise VerbError(ExitCode.USAGE, message)


class _WithSettings(OneLineParser):
    """A parser whose ``--help`` lists all settings, looked up only then; settings may come before and after options."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        return self.parse_intermixed_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """End the verb with ``message``; of an option that is the name of a setting it says how that is set."""
        found = re.match(r"unrecognized arguments: --?([\w.-]+)(?:=(\S+))?", message)
        name = found[1].replace("-", "_") if found else ""
        keys = [key for key, _, _ in leaves() if name in (key, key.rpartition(".")[2])]
        value = (found and found[2]) or "..."
        likely = f"; settings are key=value: {' or '.join(f'{key}={value}' for key in keys[:3])}" if keys else ""
        super().error(message + likely)

    def format_help(self) -> str:
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
    return printed_if_asked(composed(given), given)


def composed(given: argparse.Namespace) -> RunConfig:
    """Return the configuration of the command line."""
    file: Path | None = given.config
    return configs.read(file, given.settings) if file is not None else configs.compose(given.settings)


def printed_if_asked(config: RunConfig, given: argparse.Namespace) -> RunConfig:
    """Return ``config``; ``--print-config`` prints it and ends the verb."""
    if given.print_config:
        print(configs.to_yaml(config), end="")
        raise SystemExit(ExitCode.OK)
    return config


def words_and_settings(given: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return the arguments that are no settings, and the settings.  A syncer's ``site.syncer=HOST:PORT`` is the first
    of the former: what names a site's syncer names that of any verb."""
    words = [text for text in given.settings if "=" not in text]
    named = [text.removeprefix(SYNCER) for text in given.settings if text.startswith(SYNCER)]
    return [*named, *words], [text for text in given.settings if "=" in text and not text.startswith(SYNCER)]


def is_address(text: str) -> bool:
    """Return whether ``text`` names a syncer by ``HOST:PORT``, or several, and no file or folder."""
    host, colon, port = text.rpartition(":")
    return bool(colon and host) and port.isdecimal() and not Path(text).exists()


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


# --- The text that a verb's ``--help`` adds below its own lines ------------------------------------------------------

KEY_COLUMN = 46


def settings_help() -> str:
    """Return all settings, one line a key: its name, its default and its meaning."""
    lines = [
        "What can be set: group=choice, then single keys as key=value (in brackets: the value that no group sets)."
    ]
    lines += [f"  {group + '=':<13}{' | '.join(names)}" for group, names in choices().items()]
    lines += _keys()
    return "\n".join(lines)


def _keys() -> Iterator[str]:
    told = meanings()
    last: type = RunConfig
    for key, section, item in leaves():
        if section is not last:
            yield ""
            yield f"{key.rpartition('.')[0]}: {_one_line(told.get((section.__name__, ''), ''))}"
            last = section
        name = f"  {key} [{default_text(item)}]"
        meaning = _one_line(told.get((section.__name__, item.name), ""))
        yield f"{name:<{KEY_COLUMN}} {meaning}".rstrip()


def _one_line(text: str) -> str:
    return " ".join(text.split())
