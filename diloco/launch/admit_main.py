"""``diloco admit``: let a held update be merged; `diloco status` shows which updates are held, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.launch.operating import number, operate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.launch.errors import ExitCode
    from diloco.wire.client import AdminClient

DOES = """Let a held update be merged; `diloco status` shows which are held, and why.

  diloco admit runs/nimble-otter site-b 0 17"""


def main(arguments: Sequence[str]) -> ExitCode:
    """Run the verb."""
    return operate("admit", DOES, arguments, ("SITE", "FRAGMENT", "SEQUENCE"), _say)


def _say(client: AdminClient, words: list[str]) -> str:
    site, fragment, sequence = words
    client.admit(site, number("FRAGMENT", fragment), number("SEQUENCE", sequence))
    return f"update {sequence} of fragment {fragment} of {site} is admitted"
