"""What is said of units of the data, to protobuf and back; the messages that hold it check it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.sync.events import UnitsTold
from diloco.sync.site_units import UnitAsk
from diloco.sync.units import SKIPPED
from diloco.wire import messages as m
from diloco.wire.v1 import sync_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.sync.spans import Span


def unit_ask_out(ask: UnitAsk) -> sync_pb2.UnitAsk:
    """``UnitAsk``."""
    return sync_pb2.UnitAsk(**{name: getattr(ask, name) for name in UnitAsk.__slots__})


def unit_ask_in(ask: sync_pb2.UnitAsk) -> UnitAsk:
    """``UnitAsk``."""
    return UnitAsk(**{name: getattr(ask, name) for name in UnitAsk.__slots__})


def unit_list_out(told: UnitsTold) -> sync_pb2.UnitList:
    """``UnitList``."""
    units = [0 if start == SKIPPED else start + 1 for start, _ in told.pieces]
    return sync_pb2.UnitList(first=told.first, units=units, counts=[count for _, count in told.pieces])


def unit_list_in(told: sync_pb2.UnitList) -> UnitsTold:
    """``UnitList``."""
    if len(told.units) != len(told.counts):
        raise m.MalformedMessage(f"units has {len(told.units)} runs: {len(told.counts)} wanted, as counts has")
    starts = [unit - 1 if unit else SKIPPED for unit in told.units]
    return UnitsTold(told.first, tuple(zip(starts, told.counts, strict=True)))


def spans_out(spans: Sequence[Span]) -> list[int]:
    """As first, end, first, end..."""
    return [number for span in spans for number in span]


def spans_in(numbers: Sequence[int]) -> tuple[Span, ...]:
    """The spans; MalformedMessage where one has no end."""
    if len(numbers) % 2:
        raise m.MalformedMessage(f"spans has {len(numbers)} numbers: a first and an end of each wanted")
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))
