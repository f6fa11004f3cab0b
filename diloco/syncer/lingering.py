"""The end of a syncer's process: it stays until its sites know what became of their work."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from diloco.sync.state import Status
from diloco.syncer.core import CoreHeld

if TYPE_CHECKING:
    from collections.abc import Callable

    from diloco.sync.state import OuterState
    from diloco.sync.syncer import OuterSync
    from diloco.syncer.core import Core
    from diloco.syncer.feeds import Feeds

LOOK_S = 0.05


def linger(core: Core, feeds: Feeds, linger_s: float) -> None:
    """Wait until every live site has said goodbye, and every one that has said so has heard its fates and gone."""

    def wanted(machine: OuterSync) -> bool:
        streams, unheard = feeds.standing()
        waited_for = (
            site.status is Status.LIVE or (site.status is Status.LEFT and name in unheard)
            for name, site in machine.state.sites.items()
        )
        return streams > 0 or any(waited_for)

    until = time.monotonic() + linger_s
    while time.monotonic() < until and _asked(core, wanted):
        time.sleep(LOOK_S)


def _asked(core: Core, wanted: Callable[[OuterSync], bool]) -> bool:
    try:
        return core.ask(wanted)
    except CoreHeld:
        return True  # Nobody can say goodbye while nothing is decided.


def not_told(state: OuterState, *, crashed: bool) -> list[str]:
    """The sites that may be on their way back for fates which the process before had decided.

    One that was stopped in order had lingered for them.  And where the run goes on, they have all the time they need.
    """
    over = crashed and state.ending is not None
    return [name for name, site in state.sites.items() if over and site.status is Status.LEFT]
