"""What a site's link is, and what the site sends by: measured and chosen in one place, and told from there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.learner.link_meter import LinkMeter
from diloco.sync.adapting import Adapter
from diloco.wire.messages import LinkInfo

if TYPE_CHECKING:
    from collections.abc import Callable

    from diloco.sync.adapting import AdaptOptions
    from diloco.wire.client import SyncClient


class LinkUse:
    """``codec`` is asked by whoever seals, one at a time; ``info`` by anybody."""

    def __init__(
        self, client: SyncClient, options: AdaptOptions, emit: Callable[[str, dict[str, object]], None]
    ) -> None:
        self.link = LinkMeter(client)
        self._client = client
        self.codecs = tuple(way.codec for way in options.ways)
        """All that may be chosen, the configured one first."""
        self._emit = emit
        self._adapter = Adapter(options)

    def codec(self, step_ns: int) -> str:
        """Of an update that is sealed now, where an inner step takes ``step_ns``; a change is told once.

        A change of connections counts from the next transfer on; what is under way goes on as it began.
        """
        before = self._adapter.choice
        choice = self._adapter.choose(self.link.read(), step_ns)
        if choice != before:
            self._client.use_channels(choice.channels)
            self._emit("adapted", {"codec": choice.codec, "channels": choice.channels, "why": choice.why})
        return choice.codec

    def info(self, step_ns: int) -> LinkInfo:
        """For a heartbeat."""
        found, choice = self.link.read(), self._adapter.choice
        return LinkInfo(
            found.rtt_ns,
            found.up_bytes_per_s,
            found.down_bytes_per_s,
            choice.codec,
            choice.channels,
            self._adapter.exchange_steps(found, step_ns),
            choice.why,
        )
