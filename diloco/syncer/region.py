"""A syncer that is a site of another: what the one who speaks for it there asks of it, and what it orders of that one.

Which of the two shells does what is in ``sync/region.py``; neither imports the other.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from diloco.sync.effects import LetGo, Seal, StopTraining, TakeVersion
from diloco.sync.events import VersionPublished
from diloco.sync.region import Standing, standing
from diloco.sync.state import Part
from diloco.syncer.store import StoreError
from diloco.wire.messages import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from diloco.sync.effects import RegionEffect
    from diloco.sync.events import RegionEvent, UpstreamStarted
    from diloco.sync.region import Above
    from diloco.sync.state import OuterState
    from diloco.sync.syncer import OuterSync
    from diloco.syncer.core import Core
    from diloco.syncer.holdings import Holdings
    from diloco.syncer.store import Store


class UpstreamRefusedError(Exception):
    """The syncer above will have no more of this region; the text says why."""


class Region:
    """Between the decision loop and ``above``.  ``updates_max`` of its updates may be in flight there."""

    def __init__(
        self,
        above: Above[Tensor],
        core: Core,
        store: Store,
        holdings: Callable[[], Holdings],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._above, self._core, self._store, self._holdings, self._fail = above, core, store, holdings, fail
        self._published: dict[int, VersionPublished] = {}
        self._published_lock = threading.Lock()
        self.updates_max = 0  # Until it has begun.

    def begin(self, machine: OuterSync) -> UpstreamStarted:
        """What the machine hears first; ``StoreError`` where its memory is that of another site, or of no region."""
        state = machine.state
        known = [Part() for _ in state.fragments] if state.upstream is None else state.upstream.parts
        found = self._above.begin(self, known)
        check_site(state, found.site)
        self.updates_max = found.in_flight_max
        return found

    # --- as the one who speaks for the region knows it; any thread ---------------------------------------------------

    def tell(self, event: RegionEvent) -> None:
        """Hand an event to the machine.

        While the loop waits for room on the disk, versions go on being published above.  So those that it has not heard
        of take one place for each fragment, which the newest has.
        """
        if not isinstance(event, VersionPublished):
            self._core.post(event)
            return
        with self._published_lock:
            waits = event.fragment in self._published
            self._published[event.fragment] = event
        if not waits:
            self._core.do_soon(lambda machine: self._post_newest(event.fragment))

    def _post_newest(self, fragment: int) -> None:
        with self._published_lock:
            newest = self._published.pop(fragment)
        self._core.post(newest)

    def keep(self, fragment: int, values: memoryview, digest: str) -> str:
        """Make the values of a version above durable."""
        return self._store.spool.put_above(fragment, values, digest)

    def standing(self) -> Standing | None:
        """How the region stands; None while nobody can say."""
        try:
            return self._core.ask(lambda machine: standing(machine.state), early=True)
        except Refusal:
            return None

    def give_up(self, why: str) -> None:
        """End the process, in words."""
        self._fail(UpstreamRefusedError(why))

    # --- effects, in the decision loop's thread ----------------------------------------------------------------------

    def carry_out(self, effect: RegionEffect) -> None:
        """Do what the machine orders towards the one above."""
        assert not isinstance(effect, TakeVersion), "an outer step like any other"
        match effect:
            case LetGo():
                self._store.release(effect.payload)
            case StopTraining():
                self.give_up(effect.why)
            case Seal():
                values = self._holdings().values[effect.fragment]
                assert values.reference is not None, "an update is made, and there is nothing to measure it from"
                self._above.seal(effect, values.reference, values.theta)
            case _:
                self._above.order(effect)


def check_site(state: OuterState, site: str) -> None:
    """``StoreError`` where a run would become a region, cease to be one (``site`` is empty), or another site's."""
    if state.upstream is None:
        if site and any(fragment.version for fragment in state.fragments):
            raise StoreError(
                f"upstream.site_id is {site!r}, and this run has begun without a syncer above, whose values would take "
                "the place of its own: take another run.name"
            )
    elif state.upstream.site and state.upstream.site != site:
        now = f"upstream.site_id is {site!r}" if site else "upstream.endpoint is null"
        raise StoreError(f"{now}, and this run is the region {state.upstream.site!r} of a run above: it stays that")
