"""The command-line parsing shared by the verbs that take settings."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import textwrap
from inspect import cleandoc
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from diloco.config import compose as configs
from diloco.config.compose import choices
from diloco.config.errors import ConfigError, ExitCode, require
from diloco.config.keys import default_text, leaves, meanings
from diloco.config.schema import RunConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


SYNCER = "site.syncer="
ACCESS = ("site.token_file", "site.tls_", "site.insecure_non_loopback")
A_MODEL = ("data.", "inner.precision", "site.device", "site.threads", *ACCESS)
OWN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "up": ("run.", "network.", "cluster.sites.", "scenario", *(f"{group}=" for group in configs.GROUPS)),
        "syncer": (
            "run.",
            "outer.",
            "codec.",
            "cluster.syncer.",
            "cluster.admission.",
            "cluster.replication.",
            "upstream.",
        ),
        "site": ("run.dir", "run.resume", "run.log_every", "site.", "data.", "inner."),
        "status": ACCESS,
        "dashboard": ACCESS,
        "doctor": ("site.id", "site.syncer", "site.device", *ACCESS),
        "train": ("run.", "model.", "data.", "inner.", "site.device", "site.threads"),
        "eval": A_MODEL,
        "export": A_MODEL,
        "generate": A_MODEL,
        "launch": ("launch.", "cluster.", "site."),
        **dict.fromkeys(("admit", "refuse", "evict", "readmit", "drain"), ACCESS),
        "standby": (
            "run.name",
            "run.dir",
            "cluster.syncer.",
            "cluster.standby.",
            "cluster.replication.",
            "cluster.lease.",
        ),
        "sim": ("run.", "outer.", "codec.", "network.", "cluster.sites."),
        "lab": ("run.", "model.", "inner.", "outer.", "codec."),
    }
)
"""Prefixes of the settings that ``diloco VERB --help`` lists: those that the verb decides, of all that it accepts.

For ``model=`` it lists only the choices of that group.
"""


class OneLineParser(argparse.ArgumentParser):
    """A parser for ``diloco VERB``; it reports a usage error in one line, as all verbs do."""

    def __init__(self, verb: str, does: str | None) -> None:
        """``does`` is the text of ``--help``, printed line by line: the docstring of the verb's function."""
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=f"diloco {verb}", description=cleandoc(does or ""), formatter_class=raw)

    def error(self, message: str) -> NoReturn:
        """End the verb with ``message``."""
        raise ConfigError(message)


class _WithSettings(OneLineParser):
    """A parser whose ``--help`` lists the verb's own settings; settings may come before and after options."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        return self.parse_intermixed_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """End the verb with ``message``; for an option with a setting's name, say how to give the setting."""
        found = re.match(r"unrecognized arguments: --?([\w.-]+)(?:=(\S+))?", message)
        name = found[1].replace("-", "_") if found else ""
        keys = [key for key, _, _ in leaves() if name in (key, key.rpartition(".")[2])]
        value = (found and found[2]) or "..."
        likely = f"; settings are key=value: {' or '.join(f'{key}={value}' for key in keys[:3])}" if keys else ""
        super().error(message + likely)

    def format_help(self) -> str:
        # Paragraphs become as wide as the terminal; examples, whose lines begin with two spaces, stay as they are.
        blocks = (self.description or "").split("\n\n")
        self.description = "\n\n".join(
            block if "\n  " in f"\n{block}" else "\n".join(_hanging("", block, 0)) for block in blocks
        )
        return f"{super().format_help()}\n{settings_help(OWN[self.prog.removeprefix('diloco ')])}\n"


def settings_parser(verb: str, does: str | None, *, file: bool = True, shown: bool = True) -> argparse.ArgumentParser:
    """Return a parser for ``diloco VERB [--config FILE] [--print-config] [key=value ...]``.

    ``file`` False leaves out ``--config``; ``shown`` False, for a verb without a configuration of its own, leaves out
    ``--print-config``.
    """
    parser = _WithSettings(verb, does)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings, as below")
    if file:
        parser.add_argument("--config", type=Path, metavar="FILE", help="begin with this resolved config.yaml")
    if shown:
        told = "print the resolved configuration, and do nothing"
        parser.add_argument("--print-config", action="store_true", help=told)
    return parser


def load_config(given: argparse.Namespace, *, prints: bool = True) -> RunConfig:
    """Return the configuration of the command line.  Where it ``prints``, see ``print_if_asked``."""
    file: Path | None = given.config
    config = configs.read(file, given.settings) if file is not None else configs.compose(given.settings)
    if prints:
        print_if_asked(config, given)
    return config


def print_if_asked(config: RunConfig, given: argparse.Namespace) -> None:
    """Print ``config`` and end the verb, where ``--print-config`` asks for it."""
    if given.print_config:
        print(configs.to_yaml(config), end="")
        raise SystemExit(ExitCode.OK)


def parted(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments that are not settings, and the settings."""
    return [text for text in texts if "=" not in text], [text for text in texts if "=" in text]


def words_and_settings(given: argparse.Namespace) -> tuple[list[str], list[str]]:
    """As ``parted``, but ``site.syncer=HOST:PORT`` becomes the first of the words: the syncer's address."""
    words, settings = parted(given.settings)
    named = [text.removeprefix(SYNCER) for text in settings if text.startswith(SYNCER)]
    return [*named, *words], [text for text in settings if not text.startswith(SYNCER)]


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
        print(f"note: {' '.join(kept)}, as in the run's configuration", flush=True)
    given.settings = [*given.settings, *kept]
    return config


def limit_threads(threads: int, *, deterministic: bool = False) -> None:
    """Set the environment for torch's import: ``threads`` per process (0: torch's choice), ``deterministic`` mode."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    require(threads >= 0, "threads", threads, "0 (torch's own choice) or more")
    if threads:
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)


# --- The text that a verb's ``--help`` adds below its own lines ------------------------------------------------------

KEY_COLUMN = 46
NARROW = 100
"""Columns of a terminal below which a meaning stands under its setting."""


def settings_help(own: Sequence[str] = ("",), about: str = "") -> str:
    """Return the settings whose names begin like one of ``own``: each name, its default and its meaning.

    With ``about``, return those that have it in name, choices or meaning; "" where none has.
    """
    groups = {name: names for name, names in choices().items() if {"", f"{name}.", f"{name}="} & set(own)}
    if groups:
        groups["experiment"] = choices()["experiment"]
    lines = [f"Settings are {'group=choice, and ' if groups else ''}key=value (in brackets: the default):"]
    if about:
        groups = {name: names for name, names in groups.items() if any(about in each for each in (name, *names))}
        lines = []
    for group, names in groups.items():
        lines += _hanging(f"  {group + '=':<13}", " | ".join(names), 15)
    lines += _keys(tuple(own), about)
    if "" not in own:
        lines += [
            "",
            f"diloco config lists all {len(list(leaves()))} settings, and diloco config WORD those about WORD.",
        ]
    return "\n".join(lines)


def _keys(own: tuple[str, ...], about: str) -> Iterator[str]:
    """Yield the lines of the settings that begin like one of ``own`` and have ``about`` in name or meaning.

    A section's text, which may have the word too, comes before its settings.
    """
    told = meanings()
    last: type = RunConfig
    for key, section, item in leaves():
        meaning = " ".join(told.get((section.__name__, item.name), "").split())
        if not key.startswith(own):
            continue
        about_it = told.get((section.__name__, ""), "").replace("``", "")
        if section is not last and about in about_it.lower():
            yield from () if about else ("",)
            yield from _hanging("", f"{key.rpartition('.')[0]}: {about_it}".removeprefix(": "), 0)
        last = section
        if about not in f"{key} {meaning}".lower():
            continue
        name = f"  {key} [{default_text(item)}]"
        if _columns() < NARROW:
            yield name
            yield from _hanging(" " * 6, meaning, 6) if meaning else ()
        else:
            yield from _hanging(f"{name:<{KEY_COLUMN}} ", meaning, KEY_COLUMN + 1)


def _hanging(begin: str, text: str, indent: int) -> list[str]:
    """Return ``text`` in lines as wide as the terminal: the first after ``begin``, others after ``indent`` spaces."""
    lines = textwrap.wrap(text, _columns(), initial_indent=begin, subsequent_indent=" " * indent)
    return lines or [begin.rstrip()]


def _columns() -> int:
    return min(120, shutil.get_terminal_size((120, 24)).columns)


# --- ``diloco config`` -----------------------------------------------------------------------------------------------

CONFIG = """List all settings with default and meaning; with a word, as in `diloco config grace`, only those that have
it in name, choices or text."""


def config(arguments: Sequence[str]) -> ExitCode:
    """Run the verb."""
    parser = OneLineParser("config", CONFIG)
    parser.add_argument("word", nargs="?", default="", metavar="WORD", help="what to look for")
    word = str(parser.parse_args(arguments).word).lower()
    if not (found := settings_help(about=word)):
        raise ConfigError(f"no setting has {word!r} in its name, its choices or its meaning")
    print(found)
    return ExitCode.OK
