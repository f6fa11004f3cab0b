"""``diloco evict``: exclude a site from the run; its updates that are not yet being merged are never merged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.launch.operating import operate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.launch.errors import ExitCode
    from diloco.wire.client import AdminClient

DOES = """Put a site out of the run: nothing of it that is not being merged yet is merged any more.

  diloco evict runs/nimble-otter site-b"""


def main(arguments: Sequence[str]) -> ExitCode:
    """Run the verb."""
    return operate("evict", DOES, arguments, ("SITE",), _say)


def _say(client: AdminClient, words: list[str]) -> str:
    (site,) = words
    client.evict(site)
    return f"{site} is put out; `diloco readmit` lets it in again"
