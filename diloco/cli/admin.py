"""The verbs that send one command to a running syncer and print the result."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from diloco.cli.status import commanded, serving
from diloco.config.arguments import settings_parser, words_and_settings
from diloco.config.errors import ConfigError, ExitCode, require

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


WHERE = """

Name the syncer by HOST:PORT or by a run folder; of several syncers, each gets the command, one after the other.  Where
it authenticates callers: site.token_file=... site.tls_ca=...  The journal records the command; repeating it changes
nothing."""
NUMBERS = ("FRAGMENT", "SEQUENCE")


@dataclass(frozen=True, slots=True)
class Command:
    """A verb: what it ``does``, the arguments that are ``wanted`` after the syncer, and what it prints once ``done``.

    ``AdminClient`` has a method of the verb's name, which takes these arguments.
    """

    does: str
    wanted: tuple[str, ...]
    done: str


COMMANDS: Mapping[str, Command] = {
    "admit": Command(
        "Let a held update be merged; `diloco status` shows which are held, and why.\n\n"
        "  diloco admit runs/nimble-otter site-b 0 17",
        ("SITE", *NUMBERS),
        "update {sequence} of fragment {fragment} of {site} is admitted",
    ),
    "refuse": Command(
        "Refuse an accepted update that is held or waits for its round; its site discards the progress.\n\n"
        "  diloco refuse runs/nimble-otter site-b 0 17",
        ("SITE", *NUMBERS),
        "update {sequence} of fragment {fragment} of {site} is refused: withdrawn",
    ),
    "evict": Command(
        "Remove a site from the run: its updates that are not being merged yet are refused.\n\n"
        "  diloco evict runs/nimble-otter site-b",
        ("SITE",),
        "{site} is evicted; `diloco readmit` lets it in again",
    ),
    "readmit": Command(
        "Let an evicted site join again.\n\n  diloco readmit runs/nimble-otter site-b",
        ("SITE",),
        "{site} may join; start it again",
    ),
    "drain": Command(
        "Begin the last round: every site sends what it has and leaves.  The run can be resumed.\n\n"
        "  diloco drain runs/nimble-otter",
        (),
        "the last round has begun; the run can be resumed",
    ),
}


def operate(verb: str, arguments: Sequence[str]) -> ExitCode:
    """Run the verb.  Exit 1 with the syncer's reason when it refuses, 3 when it does not answer."""
    command = COMMANDS[verb]
    wanted = command.wanted
    parser = settings_parser(verb, command.does + WHERE, file=False, shown=False)
    parser.add_argument("--json", action="store_true", help="print what was done as one JSON object")
    given = parser.parse_args(arguments)
    named, settings = words_and_settings(given)
    target, *words = named or [""]
    if not target or len(words) != len(wanted):
        raise ConfigError(f"give the syncer's HOST:PORT or run folder{''.join(f', {w}' for w in wanted)}")
    addresses = serving(target, settings)
    if len(addresses) > 1 and "FRAGMENT" in wanted:
        raise ConfigError(f"name one syncer of {', '.join(addresses)}: each counts its own fragments from 0")
    told: list[str | int] = []
    for name, text in zip(wanted, words, strict=True):
        require(name not in NUMBERS or text.isdecimal(), name, text, "a number")
        told.append(int(text) if name in NUMBERS else text)
    facts = dict(zip((name.lower() for name in wanted), words, strict=True))
    done = command.done.format(**facts)
    for address in commanded(verb, told, addresses, settings):
        line = done if len(addresses) == 1 else f"{address}: {done}"
        print(json.dumps({"verb": verb, "syncer": address, **facts, "done": done}) if given.json else line, flush=True)
    return ExitCode.OK


admit = partial(operate, "admit")
refuse = partial(operate, "refuse")
evict = partial(operate, "evict")
readmit = partial(operate, "readmit")
drain = partial(operate, "drain")
