"""The verbs that send one command to a running syncer and print the result."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from diloco.cli.status import syncer_addresses
from diloco.config.arguments import settings_parser, words_and_settings
from diloco.config.errors import ConfigError, ExitCode, VerbError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from diloco.wire.client import AdminClient


WHERE = """

Name the syncer by HOST:PORT or by a run folder; with several syncers, all are told, one after the other.  Where it
authenticates callers: site.token_file=... site.tls_ca=...  The journal records the command; repeating it changes
nothing."""


def operate(
    verb: str,
    does: str,
    arguments: Sequence[str],
    wanted: Sequence[str],
    say: Callable[[AdminClient, list[str]], str],
) -> ExitCode:
    """Run the verb: ``wanted`` names the arguments after the syncer, ``say`` sends them and returns the result's text.

    Exit 1 with the syncer's reason when it refuses, 3 when it does not answer.
    """
    parser = settings_parser(verb, does + WHERE, file=False, shown=False)
    parser.add_argument("--json", action="store_true", help="print what was done as one JSON object")
    given = parser.parse_args(arguments)
    named, settings = words_and_settings(given)
    target, *words = named or [""]
    if not target or len(words) != len(wanted):
        raise VerbError(ExitCode.USAGE, f"give the syncer's HOST:PORT or run folder{''.join(f', {w}' for w in wanted)}")
    addresses = syncer_addresses(target)
    if len(addresses) > 1 and "FRAGMENT" in wanted:
        raise VerbError(
            ExitCode.USAGE, f"name one syncer of {', '.join(addresses)}: each counts its own fragments from 0"
        )
    facts = dict(zip((name.lower() for name in wanted), words, strict=True))
    failed: VerbError | None = None
    for address in addresses:
        try:
            done = _ask(address, settings, words, say)
        except VerbError as error:
            failed = error  # The other syncers must still get the command.
            continue
        told = done if len(addresses) == 1 else f"{address}: {done}"
        print(json.dumps({"verb": verb, "syncer": address, **facts, "done": done}) if given.json else told, flush=True)
    if failed is not None:
        raise failed
    return ExitCode.OK


def number(name: str, text: str) -> int:
    """Parse the argument ``name`` as a number."""
    if not text.isdecimal():
        raise VerbError(ExitCode.USAGE, f"{name} is {text!r}: a number")
    return int(text)


def _ask(address: str, settings: list[str], words: list[str], say: Callable[[AdminClient, list[str]], str]) -> str:
    from diloco.config import compose as configs
    from diloco.config import connecting
    from diloco.config.connecting import unanswered
    from diloco.wire.client import AdminClient
    from diloco.wire.messages import MalformedMessage, Refused, Unreachable
    from diloco.wire.options import SecurityOptions

    security = connecting.site_security(configs.compose(settings)) if settings else SecurityOptions()
    try:
        with AdminClient(address, security) as client:
            return say(client, words)
    except Unreachable as error:
        why = unanswered(address, security, error.why)
        raise VerbError(ExitCode.UNREACHABLE, f"the syncer at {address} does not answer: {why}") from error
    except Refused as error:
        raise VerbError(ExitCode.FAILED, f"the syncer at {address} refuses: {error.text}") from error
    except MalformedMessage as error:
        raise VerbError(ExitCode.USAGE, str(error)) from error
    except (ValueError, OSError) as error:
        raise ConfigError(f"syncer {address}: {error}") from error


# --- ``diloco admit`` ------------------------------------------------------------------------------------------------

ADMIT = """Let a held update be merged; `diloco status` shows which are held, and why.

  diloco admit runs/nimble-otter site-b 0 17"""


def admit(arguments: Sequence[str]) -> ExitCode:
    """Run the verb."""
    return operate("admit", ADMIT, arguments, ("SITE", "FRAGMENT", "SEQUENCE"), _admit)


def _admit(client: AdminClient, words: list[str]) -> str:
    site, fragment, sequence = words
    client.admit(site, number("FRAGMENT", fragment), number("SEQUENCE", sequence))
    return f"update {sequence} of fragment {fragment} of {site} is admitted"


# --- ``diloco drain`` ------------------------------------------------------------------------------------------------

DRAIN = """Begin the last round: every site sends what it has and leaves.  The run can be resumed.

  diloco drain runs/nimble-otter"""


def drain(arguments: Sequence[str]) -> ExitCode:
    """Run the verb."""
    return operate("drain", DRAIN, arguments, (), _drain)


def _drain(client: AdminClient, words: list[str]) -> str:
    del words
    client.drain()
    return "the last round has begun; the run can be resumed"


# --- ``diloco evict`` ------------------------------------------------------------------------------------------------

EVICT = """Remove a site from the run: its updates that are not being merged yet are refused.

  diloco evict runs/nimble-otter site-b"""


def evict(arguments: Sequence[str]) -> ExitCode:
    """Run the verb."""
    return operate("evict", EVICT, arguments, ("SITE",), _evict)


def _evict(client: AdminClient, words: list[str]) -> str:
    (site,) = words
    client.evict(site)
    return f"{site} is evicted; `diloco readmit` lets it in again"


# --- ``diloco readmit`` ----------------------------------------------------------------------------------------------

READMIT = """Let an evicted site join again.

  diloco readmit runs/nimble-otter site-b"""


def readmit(arguments: Sequence[str]) -> ExitCode:
    """Run the verb."""
    return operate("readmit", READMIT, arguments, ("SITE",), _readmit)


def _readmit(client: AdminClient, words: list[str]) -> str:
    (site,) = words
    client.readmit(site)
    return f"{site} may join; start it again"


# --- ``diloco refuse`` -----------------------------------------------------------------------------------------------

REFUSE = """Refuse an accepted update that is held or waits; its site discards the progress.

  diloco refuse runs/nimble-otter site-b 0 17"""


def refuse(arguments: Sequence[str]) -> ExitCode:
    """Run the verb."""
    return operate("refuse", REFUSE, arguments, ("SITE", "FRAGMENT", "SEQUENCE"), _refuse)


def _refuse(client: AdminClient, words: list[str]) -> str:
    site, fragment, sequence = words
    client.refuse(site, number("FRAGMENT", fragment), number("SEQUENCE", sequence))
    return f"update {sequence} of fragment {fragment} of {site} is refused: withdrawn"
