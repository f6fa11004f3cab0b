"""A syncer that is a site of another: the link between its decision loop and its client to the syncer above.

``sync/region.py`` says which of the two shells does what; neither imports the other.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from diloco.sync.effects import LetGo, Seal, StopTraining, TakeVersion
from diloco.sync.events import VersionPublished
from diloco.sync.region import standing
from diloco.sync.state import Part
from diloco.syncer.store import StoreError
from diloco.wire.messages import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from diloco.sync.effects import RegionEffect
    from diloco.sync.events import RegionEvent, UpstreamStarted
    from diloco.sync.progress import Standing
    from diloco.sync.region import Above
    from diloco.sync.state import OuterState
    from diloco.sync.syncer import OuterSync
    from diloco.syncer.core import Core
    from diloco.syncer.publish import Holdings
    from diloco.syncer.store import Store


class UpstreamRefusedError(Exception):
    """The syncer above has refused this region for good; the text says why."""


class Region:
    """Connects the decision loop with ``above``, where up to ``updates_max`` of its updates may be in flight."""

    def __init__(
        self,
        above: Above[Tensor],
        core: Core,
        store: Store,
        holdings: Holdings,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._above, self._core, self._store, self._holdings, self._fail = above, core, store, holdings, fail
        self._published: dict[int, VersionPublished] = {}
        self._published_lock = threading.Lock()
        self.updates_max = 0  # Set by ``begin``.

    def begin(self, machine: OuterSync) -> UpstreamStarted:
        """Return the machine's first event; ``StoreError`` if its state is that of another site, or of no region."""
        state = machine.state
        known = [Part() for _ in state.fragments] if state.upstream is None else state.upstream.parts
        found = self._above.begin(self, known)
        check_site(state, found.site)
        self.updates_max = found.in_flight_max
        return found

    # --- called by the client to the syncer above; any thread --------------------------------------------------------

    def tell(self, event: RegionEvent) -> None:
        """Pass an event to the machine.

        While the loop waits for disk space, versions go on being published above. So unprocessed ones take one place in
        the queue for each fragment, and the newest replaces the others.
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
        """Store the values of a version above durably; return their payload reference."""
        return self._store.spool.put_above(fragment, values, digest)

    def standing(self) -> Standing | None:
        """Return the region's state; None while the loop gives no answer."""
        try:
            return self._core.ask(lambda machine: standing(machine.state), early=True)
        except Refusal:
            return None

    def give_up(self, why: str) -> None:
        """End the process with ``why``."""
        self._fail(UpstreamRefusedError(why))

    # --- effects, in the decision loop's thread ----------------------------------------------------------------------

    def carry_out(self, effect: RegionEffect) -> None:
        """Carry out the machine's effect towards the syncer above."""
        assert not isinstance(effect, TakeVersion), "an outer step like any other"
        match effect:
            case LetGo():
                self._store.release(effect.payload)
            case StopTraining():
                self.give_up(effect.why)
            case Seal():
                values = self._holdings.values[effect.fragment]
                assert values.reference is not None, "an update is made, and there is nothing to measure it from"
                self._above.seal(effect, values.reference, values.theta)
            case _:
                self._above.order(effect)


def check_site(state: OuterState, site: str) -> None:
    """Raise ``StoreError`` if a run would become a region, cease to be one (``site`` is empty) or change its site."""
    if state.upstream is None:
        if site and any(fragment.version for fragment in state.fragments):
            raise StoreError(
                f"upstream.site_id is {site!r}, and this run has begun without a syncer above, whose values would take "
                "the place of its own: take another run.name"
            )
    elif state.upstream.site and state.upstream.site != site:
        now = f"upstream.site_id is {site!r}" if site else "upstream.endpoint is null"
        raise StoreError(f"{now}, and this run is the region {state.upstream.site!r} of a run above: it stays that")
