"""What a site says about itself: the heartbeat, and the meter's event."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from diloco.sync.progress import site_ledger
from diloco.wire.messages import ReportInfo

if TYPE_CHECKING:
    from diloco.learner.meter import Reading
    from diloco.sync.progress import LearnerState
    from diloco.sync.site_units import UnitAsk
    from diloco.wire.messages import LinkInfo


class Traffic(Protocol):
    """Who counts the bytes of a site's updates and versions."""

    @property
    def bytes_up(self) -> int:
        """Sent."""

    @property
    def bytes_down(self) -> int:
        """Received."""


def report_info(
    run_id: str,
    site_id: str,
    state: LearnerState,
    reading: Reading,
    traffic: Traffic,
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
        bytes_up=traffic.bytes_up,
        bytes_down=traffic.bytes_down,
        versions=versions,
        digests=digests if versions else (),
        link=link,
        units=units,
    )


def meter_fields(state: LearnerState, reading: Reading, traffic: Traffic, link: LinkInfo) -> dict[str, object]:
    """The fields of the event ``meter``: totals of this process, and where the site stands."""
    fields: dict[str, object] = {name: getattr(reading, name) for name in reading.__slots__}
    in_flight = sum(len(part.undecided()) for part in state.fragments)
    staleness = max(part.published - part.base_version for part in state.fragments)
    places = {"incarnation": state.incarnation, "in_flight": in_flight, "staleness": staleness}
    sent = {"bytes_up": traffic.bytes_up, "bytes_down": traffic.bytes_down}
    return {**fields, **places, **sent, **{f"link_{name}": getattr(link, name) for name in link.__slots__}}
