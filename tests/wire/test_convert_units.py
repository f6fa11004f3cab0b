"""What is said of units of the data, on the wire."""

from __future__ import annotations

import pytest

from diloco.sync.data_units import SKIPPED
from diloco.sync.events import UnitsTold
from diloco.wire import messages as m
from diloco.wire.convert import pack_report_reply, spans_in, spans_out, unpack_report_reply
from diloco.wire.v1 import sync_pb2


def test_what_is_said_comes_back() -> None:
    reply = m.ReportReply(1, 2, 3, True, None, units=UnitsTold(9, ((0, 4), (SKIPPED, 2), (7, 1))))
    raw = pack_report_reply(reply)
    assert unpack_report_reply(raw) == reply
    told = sync_pb2.ReportResponse.FromString(raw).units
    assert (told.first, list(told.units), list(told.counts)) == (9, [1, 0, 8], [4, 2, 1])
    assert spans_in(spans_out([(0, 4), (7, 9)])) == ((0, 4), (7, 9))


def test_half_of_a_run_or_a_span_is_refused() -> None:
    half = sync_pb2.ReportResponse(units=sync_pb2.UnitList(units=[1, 2], counts=[1]))
    with pytest.raises(m.MalformedMessage, match="units has 2 runs"):
        unpack_report_reply(half.SerializeToString())
    with pytest.raises(m.MalformedMessage, match="spans has 3 numbers"):
        spans_in([0, 4, 7])
    with pytest.raises(m.MalformedMessage, match="spans has 20000 numbers"):
        spans_in(range(20_000))
