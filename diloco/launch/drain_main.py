"""``diloco drain``: begin the last round, in which every site sends its progress and leaves; the run can resume."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.launch.operating import operate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.launch.errors import ExitCode
    from diloco.wire.client import AdminClient

DOES = """Begin the last round: every site sends what it has, leaves and can come back.

  diloco drain runs/nimble-otter"""


def main(arguments: Sequence[str]) -> ExitCode:
    """Run the verb."""
    return operate("drain", DOES, arguments, (), _say)


def _say(client: AdminClient, words: list[str]) -> str:
    del words
    client.drain()
    return "the last round has begun; the run can be taken up again"
