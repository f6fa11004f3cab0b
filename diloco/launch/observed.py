"""Observe a run's syncers from outside: one, or several with a part of the model each."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from diloco.launch import build, connecting
from diloco.launch.errors import ConfigError, ExitCode, VerbError
from diloco.launch.evaluation import Observer
from diloco.launch.placing import in_whole_order, placement_of, towards
from diloco.wire.client import AdminClient, SyncClient
from diloco.wire.messages import Refused, Unreachable

if TYPE_CHECKING:
    from collections.abc import Callable

    from diloco.inner.model import Transformer
    from diloco.launch.schema import RunConfig


class Observed:
    """``address`` has one or several syncers, as in ``site.syncer``; ``at_end`` registers functions that disconnect."""

    def __init__(self, config: RunConfig, address: str, at_end: Callable[[Callable[[], None]], object]) -> None:
        parts = towards(replace(config, site=replace(config.site, syncer=address)))
        self._placement = placement_of(config, build.whole_layout(config))
        self._parts = [_Part(part, at_end) for part in parts]

    @property
    def versions(self) -> list[int]:
        """The held version of each fragment of the model, -1 for none."""
        return in_whole_order(self._placement, [part.observer.versions for part in self._parts])

    @property
    def run_tokens(self) -> int:
        """Tokens merged: the mean over all fragments, since each fragment counts every token once."""
        weighted = sum(part.run_tokens * len(mine) for part, mine in zip(self._parts, self._placement, strict=True))
        return weighted // sum(map(len, self._placement))

    @property
    def ended(self) -> bool:
        """Whether every syncer has its final versions."""
        return all(part.ended for part in self._parts)

    @property
    def drained(self) -> bool:
        """Whether the run has ended before it was finished, and can be resumed."""
        return self.ended and any(part.drained for part in self._parts)

    def refresh(self) -> bool | None:
        """Fetch new versions and return whether there were any; None without an answer or with fragments missing."""
        before = self.versions
        answers = [part.refresh() for part in self._parts]
        if not any(answers) or min(self.versions) < 0:
            return None
        return self.versions != before

    def write_into(self, model: Transformer) -> None:
        """Copy the held values into ``model``; every fragment must have been fetched."""
        for part in self._parts:
            part.observer.write_into(model)


class _Part:
    """The connection to one syncer."""

    def __init__(self, config: RunConfig, at_end: Callable[[Callable[[], None]], object]) -> None:
        security, name, address = connecting.site_security(config), config.run.name or "", config.site.syncer
        try:
            client = SyncClient(address, "", name, security)
            self._admin = AdminClient(address, security)
        except (ValueError, OSError) as error:
            raise ConfigError(f"syncer {address}: {error}") from error
        at_end(client.close)
        at_end(self._admin.close)
        self.observer = Observer(client, name, build.layout_of(config))
        self.run_tokens = 0
        self.ended = self.drained = False

    def refresh(self) -> bool:
        """Fetch new versions and return whether the syncer answered."""
        try:
            status = self._admin.status()
            self.observer.refresh()
        except Unreachable:
            return False
        except Refused as error:
            raise VerbError(ExitCode.MISMATCH, error.text) from error
        tokens = status.get("run_tokens")
        self.run_tokens = int(tokens) if isinstance(tokens, int) else 0
        self.ended = status.get("phase") == "ended"
        self.drained = self.ended and status.get("ending") != "finished"
        return True
