"""``diloco VERB ...``: run the verb's module and turn its errors into an exit code and one line.

Heavy imports wait until a verb needs them, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import errno
import io
import logging
import os
import sys
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn

from diloco.codec import kernel_library
from diloco.config.errors import ConfigError, ExitCode, VerbError
from diloco.open_files import leave_no_core
from diloco.runs.process import LINUX_ONLY, PARENT_VARIABLE, die_with_parent, end_process, refusal
from diloco.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Verb:
    """``call`` is ``MODULE:FUNCTION``, a function of the arguments that returns an ``ExitCode``."""

    name: str
    call: str
    does: str


GROUPS: Mapping[str, tuple[Verb, ...]] = MappingProxyType(
    {
        "begin here": (
            Verb(
                "up",
                "diloco.cli.up:main",
                "the whole thing on this machine: syncer, sites, links between them, a live view",
            ),
            Verb("syncer", "diloco.cli.syncer:main", "the program that holds the model between the sites"),
            Verb("site", "diloco.cli.site:main", "one site: trains, sends what it learned, takes what others learned"),
            Verb("status", "diloco.cli.status:main", "how a running syncer stands: sites, versions, tokens, bytes"),
            Verb(
                "doctor",
                "diloco.cli.doctor:main",
                "what is wrong between this machine and a syncer, and what to change",
            ),
        ),
        "models": (
            Verb("train", "diloco.cli.train:main", "the inner trainer alone, on all the text: the baseline"),
            Verb(
                "eval",
                "diloco.cli.model:main",
                "loss of a model on the validation text, in nats per token and in bits per byte",
            ),
            Verb("export", "diloco.cli.model:export", "a model as a folder that Hugging Face's transformers loads"),
            Verb("generate", "diloco.cli.model:generate", "go on with a text, for a look at a model"),
        ),
        "look into a run": (
            Verb("runs", "diloco.cli.status:runs", "the runs here: how each stands, and when it was last heard of"),
            Verb("logs", "diloco.cli.status:logs", "what a run's processes say, as it happens"),
            Verb("report", "diloco.cli.status:report", "report.html and the closing table of a run, finished or not"),
            Verb(
                "journal", "diloco.cli.recover:journal", "the syncer's journal as lines; a check of everything it keeps"
            ),
            Verb(
                "canary",
                "diloco.cli.doctor:canary",
                "does this machine give the same bits when it repeats a site's steps?",
            ),
        ),
        "operate a run": (
            Verb(
                "launch",
                "diloco.cli.launch:main",
                "the files for docker, Slurm, Kubernetes or SkyPilot, from the same settings",
            ),
            Verb(
                "certs",
                "diloco.cli.certs:main",
                "certificates for mutual TLS: an authority, one for each site, revocation",
            ),
            Verb("admit", "diloco.cli.admin:admit", "let a held update be merged"),
            Verb("refuse", "diloco.cli.admin:refuse", "never merge an update that is held or waits"),
            Verb("evict", "diloco.cli.admin:evict", "put a site out of a running run"),
            Verb("readmit", "diloco.cli.admin:readmit", "let a site that was put out join again"),
            Verb(
                "drain",
                "diloco.cli.admin:drain",
                "one last round, then every site stops; the run can be taken up again",
            ),
        ),
        "outlive a syncer": (
            Verb("standby", "diloco.cli.standby:main", "a second syncer that follows the first and takes its place"),
            Verb(
                "restore",
                "diloco.cli.recover:restore",
                "a stopped run taken up again: from a replay, a backup or a warm site",
            ),
            Verb(
                "replay",
                "diloco.cli.recover:replay",
                "the outer steps of a run once more, as they were or without some updates",
            ),
        ),
        "plan and compare": (
            Verb("config", "diloco.config.arguments:config", "all settings, or those about a word"),
            Verb("completion", "diloco.cli.main:completion", "verbs and settings for the Tab key of bash and zsh"),
            Verb(
                "plan", "diloco.cli.plan:main", "what a run takes of links, memory, money and time, before there is one"
            ),
            Verb("sim", "diloco.cli.sim:main", "a run without tensors under virtual time: who trains, waits, is away"),
            Verb(
                "lab", "diloco.cli.lab:main", "rules beside each other: a small model trained by each, at equal tokens"
            ),
        ),
    }
)
VERBS = tuple(verb for group in GROUPS.values() for verb in group)
OF_OTHERS = (
    ("run start", "diloco up runs everything on this machine; diloco syncer and diloco site run a part each"),
    ("resume continue restart", "a run goes on by the command that began it, diloco up or diloco site"),
    ("stop end cancel down", "diloco drain ends a run so that it can go on later"),
    ("serve server master", "did you mean syncer?"),
    ("join client worker", "did you mean site?"),
    ("ps ls list top watch", "diloco runs lists the runs here; diloco status shows one"),
    ("kill remove ban", "did you mean evict?"),
    ("log tail", "did you mean logs?"),
)
"""Verbs of other programs, and what to use here."""
HELP = frozenset({"-h", "--help"})


COMPLETION = """\
# eval "$(diloco completion)"
if [ -n "$ZSH_VERSION" ]; then autoload -U +X bashcompinit && bashcompinit; fi
_diloco() {
  local word="${COMP_WORDS[COMP_CWORD]}"
  if [ "$COMP_CWORD" = 1 ]; then
    COMPREPLY=($(compgen -W "$verbs" -- "$word"))
  else
    COMPREPLY=($(compgen -W "$keys" -- "$word") $(compgen -f -- "$word"))
  fi
}
complete -o nospace -F _diloco diloco
"""


def completion(arguments: Sequence[str]) -> ExitCode:
    """Print what the shell needs to complete verbs, groups and settings; nothing is asked of this program later."""
    from diloco.config.compose import GROUPS as CHOICES
    from diloco.config.keys import leaves

    parser = argparse.ArgumentParser(
        prog="diloco completion", description='For your shell: eval "$(diloco completion)"'
    )
    parser.parse_args(arguments)
    keys = [f"{name}=" for name in (*CHOICES, *(key for key, _, _ in leaves()))]
    words = {"$verbs": " ".join(verb.name for verb in VERBS), "$keys": " ".join(keys)}
    text = COMPLETION
    for name, value in words.items():
        text = text.replace(name, value)
    print(text, end="")
    return ExitCode.OK


def command() -> NoReturn:
    """Run ``main`` and end the process: the entry point for the shell."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # A terminal that has no Greek letter gets a question mark.
            stream.reconfigure(errors="replace")
    leave_no_core()
    end_process(main())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code; a user's mistake prints one line on stderr, never a traceback."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    verb = _verb(given)
    if verb is None:
        return ExitCode.USAGE
    if verb.name in LINUX_ONLY and not HELP & set(given) and (line := refusal(sys.platform)):
        return _said(verb, line, ExitCode.USAGE)
    # gRPC logs a line for every handshake and message that it refuses, from any sender: a stranger could fill a
    # syncer's disk.  Our own messages tell callers and operators what they need to know.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    if PARENT_VARIABLE in os.environ:
        die_with_parent(int(os.environ[PARENT_VARIABLE]))
    if line := kernel_library.force(os.environ.get(kernel_library.VARIABLE, "")):
        print(f"diloco {verb.name}: {line}", file=sys.stderr)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        module, _, function = verb.call.partition(":")
        return int(getattr(import_module(module), function)(given[1:]))
    except VerbError as error:
        return _said(verb, str(error), error.code)
    except ConfigError as error:
        return _said(verb, str(error), ExitCode.USAGE)
    except KeyboardInterrupt:
        return ExitCode.FAILED
    except BrokenPipeError:
        # The reader of our output has exited (`| head`); without this, the interpreter's final flush would fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FAILED
    except OSError as error:
        # A full disk, a folder or file without permission: a problem of the machine, not a defect here.
        logging.getLogger(__name__).debug("ended by", exc_info=True)
        return _said(verb, _in_words(error), ExitCode.FAILED)


def _verb(given: list[str]) -> Verb | None:
    """Return the verb, or None after printing a usage error.

    ``--help``, ``--version`` and an empty command line end the process.
    """
    parser = argparse.ArgumentParser(
        prog="diloco",
        description="Train one model across data centres joined by slow, failing links.",
        epilog="\n\n".join(
            "\n".join([f"{name}:", *(f"  {verb.name:<8} {verb.does}" for verb in group)])
            for name, group in GROUPS.items()
        )
        + "\n\ndiloco VERB --help lists what it decides.  Exit codes: 0 ok, 1 failed, 2 usage, 3 syncer unreachable,\n"
        "4 not the same run, 75 drained: the same command goes on.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="diloco VERB [settings]",
    )
    parser.add_argument("--version", action="version", version=f"diloco {__version__}")
    parser.add_argument("verb", metavar="VERB", help="what to do")
    known = parser.parse_args(given[:1] or ["--help"])
    for verb in VERBS:
        if verb.name == known.verb:
            return verb
    from diloco.config.keys import nearest

    near = nearest(known.verb, [verb.name for verb in VERBS])
    hint = f"did you mean {near}?" if near else f"one of {', '.join(verb.name for verb in VERBS)}"
    hint = next((here for words, here in OF_OTHERS if known.verb in words.split()), hint)
    print(f"diloco: unknown verb {known.verb}: {hint}", file=sys.stderr)
    return None


def _in_words(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}the disk is full: make room there, and the same command goes on"
    if error.strerror is None or error.filename is None:
        return str(error)
    return f"{error.filename}: {error.strerror}"


def _said(verb: Verb, text: str, code: ExitCode) -> int:
    print(f"diloco {verb.name}: {' '.join(text.split())}", file=sys.stderr)
    return code
