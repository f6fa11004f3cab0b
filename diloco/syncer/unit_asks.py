"""Asks for units of the data, which come with the heartbeat: most change nothing, and are answered without a record."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from diloco.sync.effects import AnswerUnits
from diloco.sync.events import UnitsAsked, UnitsTold
from diloco.sync.unit_leases import known_already

if TYPE_CHECKING:
    from diloco.sync.syncer import OuterSync
    from diloco.syncer.core import Core
    from diloco.wire.messages import ReportInfo


def answered(core: Core, report: ReportInfo) -> UnitsTold | None:
    """The list of the site, as far as it did not know it; None where it asks for none, or none is leased to it."""
    ask = report.units
    if ask is None:
        return None
    event = UnitsAsked(0, report.site_id, report.incarnation, ask.known, ask.begin, ask.upto, ask.floor, ask.again)

    def look(machine: OuterSync) -> AnswerUnits | None:
        return known_already(machine.options, machine.state, event)

    told = core.ask(look) or core.call(lambda call: replace(event, call=call))
    assert isinstance(told, AnswerUnits), told
    return UnitsTold(told.first, told.pieces) if told.reason is None else None
