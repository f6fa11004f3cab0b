"""What a site's link is, and what the site sends by: measured and chosen in one place, and told from there."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from diloco.learner.link_meter import LinkMeter
from diloco.sync.adapting import Adapter
from diloco.sync.events import OverlapChosen
from diloco.sync.overlap import RoundTimes
from diloco.wire.messages import LinkInfo

if TYPE_CHECKING:
    from collections.abc import Callable

    from diloco.sync.adapting import AdaptOptions
    from diloco.sync.events import LearnerEvent
    from diloco.wire.client import SyncClient


class LinkUse:
    """``codec`` is asked by whoever seals, one at a time; ``info`` by anybody."""

    def __init__(
        self,
        client: SyncClient,
        options: AdaptOptions,
        emit: Callable[[str, dict[str, object]], None],
        tell: Callable[[LearnerEvent], None],
    ) -> None:
        """``tell`` takes what the machine is to know of a choice."""
        self.link = LinkMeter(client)
        self._rounds = RoundTimes()
        self._tell = tell
        self._client = client
        self.codecs = tuple(way.codec for way in options.ways)
        """All that may be chosen, the configured one first."""
        self._emit = emit
        self._adapter = Adapter(options)

    def begin(self) -> None:
        """The machine is there to be told what one begins with."""
        self._tell(OverlapChosen(self._adapter.choice.overlap_steps))

    def heard(self, event: LearnerEvent) -> None:
        """One of the site's events; they come one at a time."""
        self._rounds.heard(event, time.monotonic_ns())

    def codec(self, step_ns: int) -> str:
        """Of an update that is sealed now, where an inner step takes ``step_ns``; a change is told once.

        A change of connections counts from the next transfer on, one of the overlap from the next seal on; what is
        under way goes on as it began.
        """
        before = self._adapter.choice
        choice = self._adapter.choose(self.link.read(), step_ns, self._rounds.usual_ns())
        if choice != before:
            self._client.use_channels(choice.channels)
            self._tell(OverlapChosen(choice.overlap_steps))
            self._emit("adapted", asdict(choice))
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
            self._adapter.exchange_steps(found, step_ns, self._rounds.usual_ns()),
            choice.why,
            self._rounds.usual_ns(),
            choice.overlap_steps,
        )
