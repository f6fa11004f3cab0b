"""The messages as plain records: every field has a bound, which is kept and named."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from diloco.sync.events import Fate, FragmentStanding, UnitsTold
from diloco.sync.options import FATES_KEPT_LIMIT
from diloco.sync.progress import SPANS_MAX, UnitAsk
from diloco.wire import messages as m
from diloco.wire.messages import (
    bounds_of,
    check,
)
from tests.wire.fake_syncer import DIGEST, join_ask, push_header, report_info
from tests.wire.samples import FATE, HEX, PULL, SETTINGS, STANDING, everything

PARTS = {m.LearnerSettings, m.LinkInfo}
"""They travel inside of others, which have samples with and without them."""


def test_every_message_is_frozen_has_a_sample_and_states_a_bound_for_each_field() -> None:
    kinds = {value for value in vars(m).values() if dataclasses.is_dataclass(value) and value.__module__ == m.__name__}
    assert all(kind.__dataclass_params__.frozen for kind in kinds)
    carried = {type(message) for message, _, _ in everything()}
    assert kinds - PARTS <= carried
    for kind in (carried - {m.Frame, dict}) | {Fate, FragmentStanding, UnitAsk, UnitsTold} | PARTS:
        assert set(bounds_of(kind)) == {field.name for field in dataclasses.fields(kind)}, kind.__name__
    with pytest.raises(TypeError, match="sequence has no bound"):
        bounds_of(SiteWithoutBounds)


@dataclasses.dataclass
class SiteWithoutBounds:
    site_id: m.Id
    final: m.Flag
    sequence: int


BAD_NAMES = ["", "a" * 65, "x" * 100_000, "a/b", "-a", "a b", "a\n", "ä", 5, None]
BAD_NUMBERS = [-1, m.NUMBER_MAX + 1, 1.0, "1", None, True]
BAD_DIGESTS = ["", DIGEST[1:], DIGEST + "0", DIGEST.upper(), "g" * 64, b"0" * 64]
LARGEST = m.PAYLOAD_BYTES_MAX
WHOLE = m.PullHeader(0, 0, 9, True, "fp32", 2, 8, (8,), DIGEST, 0, ())
START = m.FollowStart("r", "s", HEX, HEX, 3, HEX)
NO_FILES = [
    "spool/../../etc/passwd",
    "/etc/passwd",
    "lineages/x/manifest.json",
    "run.json",
    "spool/.partial/x",
    "above/run.json",
    "above/outbox/.0-7.update.tmp",
    "journal/a/b",
    "x" * 400,
]
CASES: list[tuple[Any, str, list[Any]]] = [
    (join_ask(), "run_id", BAD_NAMES),
    (join_ask(), "site_id", BAD_NAMES),
    (join_ask(), "protocol", [-1, 1 << 31]),
    (join_ask(), "process", ["0123456", "0" * 65, "ABCDEF01"]),
    (join_ask(), "layout_fingerprint", BAD_DIGESTS),
    (join_ask(), "layout_json", [b"x" * (m.LAYOUT_BYTES_MAX + 1), "text"]),
    (join_ask(), "shared_config", [{"": "x"}, {"k" * 201: "x"}, {"k": "v" * 4097}, {1: "x"}, [("a", "b")]]),
    (join_ask(), "shared_config", [{f"k{index}": "v" for index in range(m.SHARED_CONFIG_MAX + 1)}]),
    (push_header(b"abc"), "incarnation", BAD_NUMBERS),
    (push_header(b"abc"), "fragment", [-1, m.FRAGMENTS_MAX]),
    (push_header(b"abc"), "payload_bytes", [0, m.PAYLOAD_BYTES_MAX + 1]),
    (push_header(b"abc"), "numel", [0, m.NUMEL_MAX + 1]),
    (push_header(b"abc"), "final", [0, "yes"]),
    (push_header(b"abc"), "encoding", ["", "INT4", "a" * 65, "int4;rm"]),
    (push_header(b"abc"), "digest", BAD_DIGESTS),
    (push_header(b"abc"), "values_digest", BAD_DIGESTS[1:]),
    (push_header(b"abc"), "spans", [((3, 3),), ((-1, 3),), ((3,),), ((0, 1),) * (SPANS_MAX + 1), [(0, 1)], (3,)]),
    (push_header(b"abc"), "lineage", [-1, m.NUMBER_MAX + 1, True]),
    (m.PushResult(m.Outcome.ACCEPTED, 1), "text", ["x" * (m.TEXT_CHARS_MAX + 1)]),
    (m.PushResult(m.Outcome.ACCEPTED, 1), "outcome", ["accepted", None]),
    (m.PushResult(m.Outcome.ACCEPTED, 1), "fate", [dataclasses.replace(FATE, digest="x")]),
    (m.PullAsk("r", "s", 0, 0), "have_version", [-2, m.NUMBER_MAX + 1]),
    (SETTINGS, "keep_until_decided", [1, "yes"]),
    (SETTINGS, "chunk_bytes", [m.CHUNK_BYTES_MIN - 1, m.CHUNK_BYTES_MAX + 1]),
    (m.Published(2, 3, 4, DIGEST, 5, 6), "lineage", BAD_NUMBERS),
    (m.JoinReply(2, 5, 7, (), 1, 1, None, SETTINGS), "protocol", [-1, 1 << 31]),
    (STANDING, "undecided", [((1,),), ((1, -1),), [(1, 1)], ((1, 1),) * (m.UNDECIDED_MAX + 1)]),
    (STANDING, "fates", [(FATE,) * (FATES_KEPT_LIMIT + 1), (STANDING,)]),
    (report_info(), "tokens_per_s", [float("nan"), float("inf"), -1.0, "1"]),
    (report_info(), "loss", ["2.5", True]),
    (report_info(), "versions", [(-1,), (0,) * (m.FRAGMENTS_MAX + 1), [0]]),
    (report_info(), "link", [m.LinkInfo(rtt_ns=-1), m.LinkInfo(up_codec="INT4"), m.LinkInfo(why="x" * 1025), 1]),
    (report_info(), "units", [UnitAsk(-1, 0, 0, 0, 0), UnitAsk(0, 0, m.NUMBER_MAX + 1, 0, 0), 1]),
    (
        m.ReportReply(2, 3, 4, True, None),
        "units",
        [UnitsTold(-1, ()), UnitsTold(0, ((0, 0),)), UnitsTold(0, ((-2, 1),)), UnitsTold(0, (1,)), 3],
    ),
    (report_info(), "digests", [(-1, 0), (1 << 64, 0), (1,), (1, 2, 3), [1, 2]]),
    (m.ReportReply(2, 3, 4, True, None), "retake", [(-1,), (m.FRAGMENTS_MAX,), (0,) * (m.FRAGMENTS_MAX + 1), 3]),
    (m.ProbeAsk(3), "bytes_up", [-1, m.PROBE_BYTES_MAX + 1]),
    (m.ProbeAsk(3), "bytes_down", [-1, m.PROBE_BYTES_MAX + 1]),
    (m.ProbeAsk(3), "limit_ns", [0, m.PROBE_NS_MAX + 1]),
    (m.ProbeAsk(3), "run_id", BAD_NAMES[1:]),
    (m.ProbeAnswer(3, 2, "r"), "difference", ["x" * (m.TEXT_CHARS_MAX + 1)]),
    (m.ProbeAnswer(3, 2, "r"), "shared_config", [None, {"a": 1}, {"": "x"}]),
    (m.ProbeTaken(0, 0, 0), "bytes", [-1, m.PROBE_BYTES_MAX + 1]),
    (m.Filler(b""), "data", [b"x" * (m.CHUNK_BYTES_MAX + 1), "text"]),
    (PULL, "from_version", [10, 8, 6]),
    (PULL, "part_bytes", [(10,), (0, 30), (10, 21), (10, 10, 10)]),
    (PULL, "payload_bytes", [29, 31]),
    (dataclasses.replace(PULL, part_bytes=(LARGEST - 1, 1), payload_bytes=LARGEST), "payload_bytes", [LARGEST + 1]),
    (PULL, "payload_crc32", [-1, 1 << 32]),
    (PULL, "whole", [True]),
    (WHOLE, "numel", [3]),
    (m.Item("snapshots/00000012/state.json", 0, 0, 1, HEX), "name", NO_FILES),
    (m.Item("", 4, 1234, 99, HEX), "item_bytes", [0]),
    (START, "run_id", [""]),
    (START, "standby", ["a b"]),
    (START, "layout_fingerprint", ["x"]),
    (START, "shared_digest", [""]),
    (START, "chain", ["", "no"]),
    (dataclasses.replace(START, segment=0, chain=""), "segment", [-1]),
    (dataclasses.replace(START, segment=0, chain=""), "chain", [HEX]),
]


@pytest.mark.parametrize(("good", "field", "bad"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_each_bound_is_kept_and_named(good: Any, field: str, bad: list[Any]) -> None:
    check(good)
    for value in bad:
        # Changing one side of a relation may be reported at the other side: any name of that relation will do.
        related = {"from_version": "|part_bytes", "part_bytes": "|payload_bytes", "whole": "|part", "chain": "|segment"}
        with pytest.raises(m.MalformedMessage, match=field + related.get(field, "")) as caught:
            check(dataclasses.replace(good, **{field: value}))
        assert len(str(caught.value)) < 250, "a long value is not repeated in full"
