"""``diloco readmit``: let an evicted site join again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.launch.operating import operate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.launch.errors import ExitCode
    from diloco.wire.client import AdminClient

DOES = """Let a site that was put out join again.

  diloco readmit runs/nimble-otter site-b"""


def main(arguments: Sequence[str]) -> ExitCode:
    """Run the verb."""
    return operate("readmit", DOES, arguments, ("SITE",), _say)


def _say(client: AdminClient, words: list[str]) -> str:
    (site,) = words
    client.readmit(site)
    return f"{site} may join; start it again"
