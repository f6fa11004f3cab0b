"""Links in a process of their own, so that a program using them cannot delay them by holding the interpreter's lock."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from diloco.wan.child import Child, ChildDiedError

if TYPE_CHECKING:
    from diloco.wan.link import LinkOptions

ANY_PORT = "127.0.0.1:0"

Stats = dict[str, int | float]


class RelayDiedError(ChildDiedError):
    """The relay process has ended, or does not answer."""


class RelayProcess(Child):
    """Starts ``python -m diloco.wan.relay`` and controls its links by name."""

    module = "diloco.wan.relay"
    noun = "relay process"
    died = RelayDiedError

    def add(
        self, name: str, options: LinkOptions, target: str, *, listen: str = ANY_PORT, allow_remote: bool = False
    ) -> str:
        """Make a link to ``target`` (``host:port``); return the ``host:port`` to connect to instead."""
        return str(
            self._do(
                "add",
                name=name,
                options=dataclasses.asdict(options),
                target=target,
                listen=listen,
                allow_remote=allow_remote,
            )
        )

    def remove(self, name: str) -> None:
        """Close a link for good."""
        self._do("remove", name=name)

    def set(self, name: str, **changes: object) -> None:
        """Change options of a running link."""
        self._do("set", name=name, **changes)

    def partition(self, name: str, direction: str = "both") -> None:
        """Stop delivery in ``direction`` ("both", "up" or "down") until ``heal``."""
        self._do("partition", name=name, direction=direction)

    def heal(self, name: str) -> None:
        """End a partition."""
        self._do("heal", name=name)

    def reset(self, name: str) -> None:
        """Reset all open connections of a link at both sides."""
        self._do("reset", name=name)

    def refuse(self, name: str) -> None:
        """Refuse new connections."""
        self._do("refuse", name=name)

    def accept(self, name: str) -> None:
        """Accept new connections again."""
        self._do("accept", name=name)

    def stats(self) -> dict[str, Stats]:
        """Return the counts of each link, by name (see ``Relay.stats``)."""
        value = self._do("stats")
        assert isinstance(value, dict)
        return value
