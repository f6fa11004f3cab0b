"""What is said of units of the data, on the wire."""

from __future__ import annotations

import pytest

from diloco.sync.events import UnitsTold
from diloco.sync.site_units import UnitAsk
from diloco.sync.units import SKIPPED
from diloco.wire.convert_units import (
    spans_in,
    spans_out,
    unit_ask_in,
    unit_ask_out,
    unit_list_in,
    unit_list_out,
)
from diloco.wire.messages import MalformedMessage
from diloco.wire.v1 import sync_pb2


def test_what_is_said_comes_back() -> None:
    ask = UnitAsk(1, 2, 3, 4, 5)
    assert unit_ask_in(unit_ask_out(ask)) == ask
    told = UnitsTold(9, ((0, 4), (SKIPPED, 2), (7, 1)))
    assert unit_list_in(unit_list_out(told)) == told
    assert spans_in(spans_out([(0, 4), (7, 9)])) == ((0, 4), (7, 9))


def test_half_of_a_run_or_a_span_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="units has 2 runs"):
        unit_list_in(sync_pb2.UnitList(units=[1, 2], counts=[1]))
    with pytest.raises(MalformedMessage, match="spans has 3 numbers"):
        spans_in([0, 4, 7])
