"""A standby's page of metrics, until it is promoted and the syncer's page replaces it at the same address.

No metric here is on the syncer's page, so that an alerting rule for the one never matches the other.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from diloco.launch.metrics import about, gauge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.metrics_core import Metric

    from diloco.launch.schema import RunConfig


class StandbyMetrics:
    """Makes the page from the standby's status."""

    def __init__(self, config: RunConfig, status: Callable[[], dict[str, Any]]) -> None:
        self._config = config
        self._status = status

    def families(self) -> Iterator[Metric]:
        """Yield all metrics as of now."""
        yield from about(self._config)
        status = self._status()
        following, failed = float(status["following"]), float(status["failed"] is not None)
        yield gauge("standby_following", "1 while this standby follows the syncer.", {(): following})
        yield gauge("standby_failed", "1 when it cannot follow any more; diloco status says why.", {(): failed})
        heard = time.time() - status["heard_seconds_ago"]
        yield gauge("standby_heard_timestamp_seconds", "When it last heard the syncer, or was started.", {(): heard})
        behind = status["turns_behind"]
        yield gauge("standby_turns_behind", "Turns that are durable here and to be carried out.", {(): behind})
        versions = sum(status["versions"])
        yield gauge("standby_outer_version", "Outer steps carried out here, over all fragments.", {(): versions})
        if (lease := status["lease"]) is not None:
            heir, read = float(lease["is_heir"]), float(lease["trouble"] is None)
            yield gauge("standby_is_heir", "1 while it takes over by itself if the lease runs out.", {(): heir})
            yield gauge("standby_lease_readable", "1 while it sees what the lease says.", {(): read})
