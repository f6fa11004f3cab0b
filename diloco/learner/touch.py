"""Keeping in touch: heartbeats, the meter's events and goodbye, in one thread beside training."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from diloco.learner.echo import Echo
from diloco.learner.reporting import meter_fields, report_info
from diloco.sync.events import BaseDiffers, LeaveAsked
from diloco.sync.site_units import ask_of, wants_soon
from diloco.wire.messages import Refused, Unreachable

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from diloco.learner.exchanges import Exchanges
    from diloco.learner.link_use import LinkUse
    from diloco.learner.meter import Meter
    from diloco.learner.site_tensors import SiteTensors
    from diloco.sync.events import LearnerEvent
    from diloco.sync.learner import LearnerSync
    from diloco.wire.client import SyncClient
    from diloco.wire.messages import ReportInfo

TURN_S = 0.1
UNHEARD_MAX = 3
"""Heartbeats in a row without an answer after which a site looks for another syncer, where it knows of one."""


class Touch:
    """The thread, and what the agent tells it.  ``changed`` is the agent's lock, held for copies only."""

    def __init__(
        self,
        client: SyncClient,
        use: LinkUse,
        run_id: str,
        site_id: str,
        machine: LearnerSync,
        site_tensors: SiteTensors,
        exchanges: Exchanges,
        meter: Meter,
        changed: threading.Condition,
        tell: Callable[[LearnerEvent], None],
        rejoin: Callable[[str], None],
        emit: Callable[[str, dict[str, object]], None],
        stopping: threading.Event,
        meter_every_s: float,
    ) -> None:
        self._client = client
        self._use = use
        self._run_id = run_id
        self._site_id = site_id
        self._machine = machine
        self._tensors = site_tensors
        self._exchanges = exchanges
        self._meter = meter
        self._changed = changed
        self._tell = tell
        self._rejoin = rejoin
        self._emit = emit
        self._stopping = stopping
        self._meter_every_s = meter_every_s
        self._echo = Echo(len(machine.state.fragments))
        self._unheard = 0
        self._in_vain = False  # Whether the last ask for units brought none.
        self.heartbeat_s = 1.0
        self.leave_asked = False  # Set by a signal handler, so a plain store.
        self.leaving = False
        self.left = False
        self.over = False  # Goodbye is said, every fate is heard, and the syncer was told that too.

    def run(self) -> None:
        """The thread."""
        next_meter = next_report = time.monotonic()
        while not self._stopping.wait(TURN_S):
            now = time.monotonic()
            if self.leave_asked:
                self.leave_asked = False
                self._tell(LeaveAsked())
            if self.leaving and not self.left:
                self._say_goodbye()
                next_report = now if self.left else next_report
            if now >= next_meter:
                next_meter = now + self._meter_every_s
                self.emit_meter()
            if now >= next_report or self._wants_units() or self._has_settled():
                next_report = now + self.heartbeat_s
                if self.left:
                    self._say_what_is_missing()
                    continue
                self._look_at_a_base()
                self._report()

    def _say_goodbye(self) -> None:
        self._report()
        try:
            self._client.leave(self._machine.state.incarnation)
        except Unreachable:
            return  # Asked again at the next turn, as long as the end of the site waits for it.
        except Refused as error:
            self._emit("note", {"note": "leave_refused", "why": error.text})
        with self._changed:
            self.left = True
            self._changed.notify_all()

    def _has_settled(self) -> bool:
        return self.left and not self.over and self._machine.settled()

    def _say_what_is_missing(self) -> None:
        """After goodbye: a syncer that is about to leave waits as long as something is in flight, and no longer."""
        settled = self._machine.settled()
        with contextlib.suppress(Unreachable, Refused):
            self._client.report(self._info())
        with self._changed:
            self.over = settled
            self._changed.notify_all()

    def _wants_units(self) -> bool:
        """Whether the next heartbeat comes early, because there is little left to draw and the syncer answers."""
        machine = self._machine
        if not machine.options.unit_sequences or self._unheard or self._in_vain or self.left:
            return False
        with self._changed:
            return wants_soon(machine.options, machine.state)

    def _look_at_a_base(self) -> None:
        fragment = self._echo.next_fragment()
        if fragment is None:
            return
        with self._changed:
            base, told = self._tensors.base[fragment], self._tensors.told_base[fragment]
        self._echo.compute(base, told)  # A pass over all its bytes; a tensor that is stored is not written to.

    def _info(self) -> ReportInfo:
        reading = self._meter.read()
        with self._changed:
            digests = self._exchanges.digests(self._echo.digests(self._tensors.base), self._machine.state)
            state, link = self._machine.state, self._use.info(self._machine.state.step_ns)
            wants = self._machine.options.unit_sequences and not self.left
            units = ask_of(self._machine.options, state) if wants else None
            return report_info(self._run_id, self._site_id, state, reading, self._exchanges, digests, link, units)

    def _report(self) -> None:
        if self.left or self._machine.state.incarnation == 0:
            return
        info = self._info()
        try:
            with self._use.link.control():
                reply = self._client.report(info)
        except (Unreachable, Refused):
            # The Watch stream notices as well, and joins again when the syncer is back.  But one that waits for its
            # standby keeps that stream alive, also when the standby has taken its place.
            self._unheard += 1
            if self._unheard == UNHEARD_MAX and self._client.has_choice:
                self._rejoin("the syncer does not answer heartbeats")
            return
        self._unheard = 0
        before = self._machine.state.units.end
        if reply.units is not None:
            self._tell(reply.units)
        self._in_vain = self._machine.state.units.end <= before
        if not reply.known:
            self._rejoin("the syncer does not know this process")
        for fragment in reply.retake:
            if fragment < len(info.versions) and info.digests[fragment]:
                self._tell(BaseDiffers(fragment, info.versions[fragment]))

    def emit_meter(self) -> None:
        """Emit the totals of this process as an event."""
        reading = self._meter.read()
        with self._changed:
            state = self._machine.state
            fields = meter_fields(state, reading, self._exchanges, self._use.info(state.step_ns))
        self._emit("meter", fields)
