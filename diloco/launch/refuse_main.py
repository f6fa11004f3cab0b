"""``diloco refuse``: refuse an accepted update that is held or waits, so that it is never merged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.launch.operating import number, operate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.launch.errors import ExitCode
    from diloco.wire.client import AdminClient

DOES = """Never merge an update that was accepted and is held or waits; its site throws the progress away.

  diloco refuse runs/nimble-otter site-b 0 17"""


def main(arguments: Sequence[str]) -> ExitCode:
    """Run the verb."""
    return operate("refuse", DOES, arguments, ("SITE", "FRAGMENT", "SEQUENCE"), _say)


def _say(client: AdminClient, words: list[str]) -> str:
    site, fragment, sequence = words
    client.refuse(site, number("FRAGMENT", fragment), number("SEQUENCE", sequence))
    return f"update {sequence} of fragment {fragment} of {site} is refused: withdrawn"
