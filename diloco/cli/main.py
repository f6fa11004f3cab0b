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
from typing import TYPE_CHECKING, NoReturn

from diloco.codec import kernel_library
from diloco.config.errors import ConfigError, ExitCode, VerbError
from diloco.open_files import leave_no_core
from diloco.runs.process import LINUX_ONLY, PARENT_VARIABLE, Lasting, die_with_parent, end_process, refusal
from diloco.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb.  ``call`` is ``MODULE:FUNCTION`` below ``diloco``; it takes the arguments and returns an ``ExitCode``."""

    name: str
    call: str
    does: str


GROUPS: Mapping[str, tuple[Verb, ...]] = {
    "start here": (
        Verb("up", "cli.up:main", "run everything on this machine: syncer, sites, emulated links, a live view"),
        Verb("syncer", "cli.syncer:main", "start the service that merges updates and publishes versions"),
        Verb("site", "cli.site:main", "train at one site, and exchange updates with the syncer"),
        Verb("status", "cli.status:main", "show how a running syncer and its sites stand"),
        Verb("doctor", "cli.doctor:main", "check this machine and the path to a syncer; --watch: alerts of a run"),
    ),
    "models": (
        Verb("train", "cli.train:main", "train on all the text without a syncer: the baseline"),
        Verb("eval", "cli.model:main", "evaluate a model on the validation text, or in benchmark tasks"),
        Verb("export", "cli.model:export", "write a model as a Hugging Face folder or a DCP checkpoint"),
        Verb("generate", "cli.model:generate", "continue a text with a model"),
    ),
    "look at a run": (
        Verb("runs", "cli.status:runs", "list the runs in runs/ or another folder"),
        Verb("logs", "cli.status:logs", "follow the logs of a run"),
        Verb("dashboard", "cli.status:dashboard", "serve a page that follows a run in the browser"),
        Verb("track", "cli.status:track", "send the curves of a run to an experiment tracker"),
        Verb("report", "cli.status:report", "write report.html of a run, and print its summary"),
        Verb("journal", "cli.recover:journal", "print the syncer's journal, or verify everything that it keeps"),
        Verb("canary", "cli.doctor:canary", "check a machine for silent data corruption, by repeating a site's steps"),
    ),
    "operate a run": (
        Verb(
            "launch",
            "cli.launch:main",
            "write the files for Docker, Slurm, Kubernetes or SkyPilot, and submit them",
        ),
        Verb("certs", "cli.certs:main", "make certificates for mutual TLS, and revoke them"),
        Verb("admit", "cli.admin:admit", "let a held update be merged"),
        Verb("refuse", "cli.admin:refuse", "refuse an update that is held or waits"),
        Verb("evict", "cli.admin:evict", "remove a site from a running run"),
        Verb("readmit", "cli.admin:readmit", "let an evicted site join again"),
        Verb("drain", "cli.admin:drain", "end a run in order after one last round; it can be resumed"),
    ),
    "recover": (
        Verb("standby", "cli.standby:main", "follow a syncer, and take over from it"),
        Verb("restore", "cli.recover:restore", "restore a stopped run from a replay, a backup or a warm site"),
        Verb("replay", "cli.recover:replay", "compute a run's versions again, with or without some updates"),
    ),
    "plan and compare": (
        Verb("config", "config.arguments:config", "list all settings, or those that match a word"),
        Verb("completion", "cli.main:completion", "print the shell code for Tab completion"),
        Verb("plan", "cli.plan:main", "estimate links, memory, money and time of a run before it exists"),
        Verb("sim", "cli.sim:main", "simulate a run without tensors: which site trains, waits or is away"),
        Verb("lab", "cli.lab:main", "compare outer rules on a small model, at equal tokens"),
    ),
}
VERBS = tuple(verb for group in GROUPS.values() for verb in group)
OF_OTHERS = (
    ("run start", "diloco up runs everything on this machine; diloco syncer and diloco site run a part each"),
    ("resume continue restart", "the command that began a run resumes it, such as diloco up or diloco site"),
    ("stop end cancel down", "diloco drain ends a run so that it can be resumed later"),
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
    """Print the shell code that completes verbs, groups and settings; it does not call this program later."""
    from diloco.config.compose import GROUPS as CHOICES
    from diloco.config.keys import leaves

    parser = argparse.ArgumentParser(
        prog="diloco completion", description='For your shell: eval "$(diloco completion)"'
    )
    parser.parse_args(arguments)
    verbs = " ".join(verb.name for verb in VERBS)
    keys = " ".join(f"{name}=" for name in (*CHOICES, *(key for key, _, _ in leaves())))
    print(COMPLETION.replace("$verbs", verbs).replace("$keys", keys), end="")
    return ExitCode.OK


OUTLIVES = frozenset({"up", "syncer", "site", "train", "standby"})
"""The verbs that go on to an orderly end where the reader of their lines is gone: Ctrl-C also ends ``| tee``."""


def command() -> NoReturn:
    """Run ``main`` and end the process: the entry point for the shell."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):  # A terminal that has no Greek letter gets a question mark.
            stream.reconfigure(errors="replace")
            if OUTLIVES & {*sys.argv[1:2]}:
                setattr(sys, name, Lasting(stream))
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
        return int(getattr(import_module(f"diloco.{module}"), function)(given[1:]))
    except (VerbError, ConfigError) as error:
        return _said(verb, str(error), error.code)
    except KeyboardInterrupt:
        return ExitCode.FAILED
    except BrokenPipeError:
        # The reader of our output has exited (`| head`); without this, the interpreter's final flush would fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FAILED
    except OSError as error:
        # A full disk, a folder or file without permission: a problem of the machine, not a defect here.
        logging.getLogger(__name__).debug("ended by", exc_info=True)
        text = f"{error.filename}: {error.strerror}" if error.strerror and error.filename else str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            where = f"{error.filename}: " if error.filename else ""
            text = f"{where}the disk is full: free space there, and repeat the same command"
        return _said(verb, text, ExitCode.FAILED)


def _verb(given: list[str]) -> Verb | None:
    """Return the verb, or None after printing a usage error.

    ``--help``, ``--version`` and an empty command line end the process.
    """
    parser = argparse.ArgumentParser(
        prog="diloco",
        description="Train one model across data centres joined by slow, failing links.",
        epilog="\n\n".join(
            "\n".join([f"{name}:", *(f"  {verb.name:<10} {verb.does}" for verb in group)])
            for name, group in GROUPS.items()
        )
        + "\n\ndiloco VERB --help lists its options.  Exit codes: 0 ok, 1 failed, 2 usage, 3 syncer unreachable,\n"
        "4 not the same run, 75 drained: the same command resumes.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="diloco VERB [settings]",
    )
    parser.add_argument("--version", action="version", version=f"diloco {__version__}")
    parser.add_argument("verb", metavar="VERB", help="what to do")
    known = parser.parse_args(given[:1] or ["--help"])
    for verb in VERBS:
        if verb.name == known.verb:
            return verb
    from diloco.config.keys import hint

    here = [here for words, here in OF_OTHERS if known.verb in words.split()]
    use = here[0] if here else hint(known.verb, [verb.name for verb in VERBS])
    print(f"diloco: unknown verb {known.verb}: {use}", file=sys.stderr)
    return None


def _said(verb: Verb, text: str, code: ExitCode) -> int:
    print(f"diloco {verb.name}: {' '.join(text.split())}", file=sys.stderr)
    return code
