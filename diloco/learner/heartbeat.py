"""Heartbeats, the meter's events and goodbye, in one thread beside training (``Touch``).

Digests.  ``Echo`` says what a site really holds: digests of its bases, computed from the tensors now and then, never
copied.  A base is verified when it is fetched, and then lies in memory for as long as its version lasts.  A bit that
flips there shows in the next heartbeat's digest, which the syncer compares with what it published.

Report.  ``report_info`` is what a site says about itself in a heartbeat, ``meter_fields`` what it says in the event
``meter``.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Protocol
from weakref import ReferenceType, ref

from diloco.codec.base import digest
from diloco.learner.transfer import Joining
from diloco.sync.events import BaseDiffers, LeaveAsked
from diloco.sync.progress import site_ledger
from diloco.sync.site_units import ask_of, wants_soon
from diloco.wire.messages import Refused, ReportInfo, Unreachable, short_digest

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from diloco.learner.meter import Meter, Reading
    from diloco.learner.tensors import SiteTensors
    from diloco.learner.transfer import LinkUse
    from diloco.sync.learner import LearnerSync
    from diloco.sync.progress import LearnerState
    from diloco.sync.site_units import UnitAsk
    from diloco.wire.client import SyncClient
    from diloco.wire.messages import LinkInfo

IDLE_SHARE = 50
"""Time left to others for each unit of time that hashing takes: at most 2 % of one core, however large the model."""


class Echo:
    """One fragment at a time, in turn, in one thread beside training."""

    def __init__(self, num_fragments: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._known: list[tuple[ReferenceType[Tensor], int] | None] = [None] * num_fragments
        self._turn = 0
        self._not_before_s = 0.0

    def next_fragment(self) -> int | None:
        """The fragment whose turn it is, or None while it is too early."""
        return self._turn if self._clock_s() >= self._not_before_s else None

    def compute(self, base: Tensor | None, told: str) -> None:
        """Hash the ``base`` of the fragment whose turn it is, and pass the turn on.

        ``told`` is the digest that came with it, of which only the form is looked at; without one nothing can be
        compared, and nothing is said.
        """
        began_s = self._clock_s()
        if base is not None and told:
            self._known[self._turn] = (ref(base), short_digest(digest(base, told)))
        ended_s = self._clock_s()
        self._not_before_s = ended_s + IDLE_SHARE * (ended_s - began_s)
        self._turn = (self._turn + 1) % len(self._known)

    def digests(self, bases: Sequence[Tensor | None]) -> tuple[int, ...]:
        """What a heartbeat says of the ``bases`` that are held now: 0 for one that was not hashed yet."""
        return tuple(
            known[1] if known is not None and known[0]() is base else 0
            for base, known in zip(bases, self._known, strict=True)
        )


class Ranks(Protocol):
    """All ranks of a site."""

    @property
    def bytes_up(self) -> int:
        """Of the site's updates that were sent."""

    @property
    def bytes_down(self) -> int:
        """Of the versions that came."""

    def digests(self, own: tuple[int, ...], state: LearnerState) -> tuple[int, ...]:
        """Of the bases, ``own`` being those that lie at rank 0."""


def report_info(
    run_id: str,
    site_id: str,
    state: LearnerState,
    reading: Reading,
    ranks: Ranks,
    digests: tuple[int, ...],
    link: LinkInfo,
    units: UnitAsk | None = None,
) -> ReportInfo:
    """The heartbeat, with the bases' ``digests``.  A site that has not got every first version yet names none."""
    ledger = site_ledger(state)
    versions = tuple(part.base_version for part in state.fragments)
    versions = versions if min(versions) >= 0 else ()
    return ReportInfo(
        run_id=run_id,
        site_id=site_id,
        incarnation=state.incarnation,
        step=state.step,
        tokens_processed=ledger.processed,
        tokens_unsent=ledger.unsent,
        tokens_in_flight=ledger.in_flight,
        tokens_overwritten=ledger.overwritten,
        tokens_lost=ledger.lost,
        loss=reading.loss,
        tokens_per_s=reading.tokens_per_s,
        step_ns=state.step_ns,
        train_ns=int(reading.train_s * 1e9),
        stall_ns=int(reading.stall_s * 1e9),
        bytes_up=ranks.bytes_up,
        bytes_down=ranks.bytes_down,
        versions=versions,
        digests=digests if versions else (),
        link=link,
        units=units,
    )


def meter_fields(state: LearnerState, reading: Reading, ranks: Ranks, link: LinkInfo) -> dict[str, object]:
    """The fields of the event ``meter``: totals of this process, and where the site stands."""
    fields: dict[str, object] = {name: getattr(reading, name) for name in reading.__slots__}
    in_flight = sum(len(part.undecided()) for part in state.fragments)
    staleness = max(part.published - part.base_version for part in state.fragments)
    places = {"incarnation": state.incarnation, "in_flight": in_flight, "staleness": staleness}
    sent = {"bytes_up": ranks.bytes_up, "bytes_down": ranks.bytes_down}
    return {**fields, **places, **sent, **{f"link_{name}": getattr(link, name) for name in link.__slots__}}


TURN_S = 0.1
UNHEARD_MAX = 3
"""Heartbeats in a row without an answer after which a site looks for another syncer, where it knows of one."""


class Site(Joining, Protocol):
    """Rank 0 of a site, as this thread knows it.  ``changed`` is its lock, held here for copies only."""

    client: SyncClient
    use: LinkUse
    machine: LearnerSync
    tensors: SiteTensors
    meter: Meter
    changed: threading.Condition

    @property
    def owners(self) -> Ranks:
        """Of what is counted and held by all of them."""


class Touch:
    """The thread, and what the agent tells it."""

    def __init__(self, site: Site, meter_every_s: float) -> None:
        self._site, self._meter_every_s = site, meter_every_s
        self._echo = Echo(len(site.machine.state.fragments))
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
        while not self._site.stopping.wait(TURN_S):
            now = time.monotonic()
            if self.leave_asked:
                self.leave_asked = False
                self._site.tell(LeaveAsked())
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
            self._site.client.leave(self._site.machine.state.incarnation)
        except Unreachable:
            return  # Asked again at the next turn, as long as the end of the site waits for it.
        except Refused as error:
            self._site.emit("note", {"note": "leave_refused", "why": error.text})
        with self._site.changed:
            self.left = True
            self._site.changed.notify_all()

    def _has_settled(self) -> bool:
        return self.left and not self.over and self._site.machine.settled()

    def _say_what_is_missing(self) -> None:
        """After goodbye: a syncer that is about to leave waits as long as something is in flight, and no longer."""
        settled = self._site.machine.settled()
        with contextlib.suppress(Unreachable, Refused):
            self._site.client.report(self._info())
        with self._site.changed:
            self.over = settled
            self._site.changed.notify_all()

    def _wants_units(self) -> bool:
        """Whether the next heartbeat comes early, because there is little left to draw and the syncer answers."""
        machine = self._site.machine
        if not machine.options.unit_sequences or self._unheard or self._in_vain or self.left:
            return False
        with self._site.changed:
            return wants_soon(machine.options, machine.state)

    def _look_at_a_base(self) -> None:
        fragment = self._echo.next_fragment()
        if fragment is None:
            return
        with self._site.changed:
            base, told = self._site.tensors.base[fragment], self._site.tensors.told_base[fragment]
        self._echo.compute(base, told)  # A pass over all its bytes; a tensor that is stored is not written to.

    def _info(self) -> ReportInfo:
        site, reading = self._site, self._site.meter.read()
        with site.changed:
            state = site.machine.state
            digests = site.owners.digests(self._echo.digests(site.tensors.base), state)
            wants = site.machine.options.unit_sequences and not self.left
            units = ask_of(site.machine.options, state) if wants else None
            link = site.use.info(state.step_ns)
            return report_info(site.run_id, site.site_id, state, reading, site.owners, digests, link, units)

    def _report(self) -> None:
        if self.left or self._site.machine.state.incarnation == 0:
            return
        info = self._info()
        try:
            with self._site.use.link.control():
                reply = self._site.client.report(info)
        except (Unreachable, Refused):
            # The Watch stream notices as well, and joins again when the syncer is back.  But one that waits for its
            # standby keeps that stream alive, also when the standby has taken its place.
            self._unheard += 1
            if self._unheard == UNHEARD_MAX and self._site.client.has_choice:
                self._site.rejoin("the syncer does not answer heartbeats")
            return
        self._unheard = 0
        before = self._site.machine.state.units.end
        if reply.units is not None:
            self._site.tell(reply.units)
        self._in_vain = self._site.machine.state.units.end <= before
        if not reply.known:
            self._site.rejoin("the syncer does not know this process")
        for fragment in reply.retake:
            if fragment < len(info.versions) and info.digests[fragment]:
                self._site.tell(BaseDiffers(fragment, info.versions[fragment]))

    def emit_meter(self) -> None:
        """Emit the totals of this process as an event."""
        reading = self._site.meter.read()
        with self._site.changed:
            state = self._site.machine.state
            fields = meter_fields(state, reading, self._site.owners, self._site.use.info(state.step_ns))
        self._site.emit("meter", fields)
