"""One or more valid messages of every kind, each with the pair of functions that carries it."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from typing import Any

from diloco.sync.events import Ending, Fate, FateTold, FinalAnnounced, FragmentStanding, Outcome, Reason, UnitsTold
from diloco.wire import convert
from diloco.wire import messages as m
from tests.wire.fake_syncer import DIGEST, RUN, join_ask, push_header, report_info

Sample = tuple[object, Callable[[Any], bytes], Callable[[bytes], object]]

FATE = Fate(3, 9, 11, 4096, DIGEST, None)
REFUSED = Fate(0, m.NUMBER_MAX, 0, 0, DIGEST, Reason.NON_FINITE)
SETTINGS = m.LearnerSettings(2_000_000_000, 256 * 1024, 2, 15_000_000_000)
KEEPING = m.LearnerSettings(1, 256 * 1024, 2, 1, keep_until_decided=True)
STANDING = FragmentStanding(3, 11, DIGEST, 10, 150, 8192, 4096, ((9, 4096), (10, 0)), (FATE, REFUSED))
EMPTY_STANDING = FragmentStanding(0, 0, DIGEST, 0, 0, 0, 0, (), ())
HEX = "0123456789abcdef" * 4
WHOLES: tuple[tuple[Any, ...], ...] = ((), (4,), (4, True), (4, True, 3))
PULL = m.PullHeader(3, 7, 9, False, "int4:32", 96, 30, (10, 20), DIGEST, 0xFFFFFFFF, (FATE,))

SEED = 33
PAYLOAD = random.Random(SEED).randbytes(6 * m.MIB + 123)
"""Long enough for several streams."""
MARK = b"nothing else in the payload looks like this"
MARKS = 3 * MARK  # One of them is whole in a read, wherever the stream is cut.
MARKED = b"".join((PAYLOAD[: 2 * m.MIB], MARKS, PAYLOAD[2 * m.MIB : 4 * m.MIB], MARKS, PAYLOAD[4 * m.MIB :], MARKS))


def everything() -> list[Sample]:
    def of(name: str, *messages: object) -> list[Sample]:
        pack, unpack = getattr(convert, f"pack_{name}"), getattr(convert, f"unpack_{name}")
        return [(message, pack, unpack) for message in messages]

    return [
        *of("join", join_ask(ticket=9), join_ask(protocol=0, lineage=0, layout_json=b"", shared_config={})),
        *of(
            "join_reply",
            m.JoinReply(2, 5, 7, (EMPTY_STANDING, STANDING), 10**12, 1_000_000, Ending.DRAINED, SETTINGS),
            m.JoinReply(2, 5, 7, (), 1, 1, None, KEEPING, 2),
            m.JoinReply(2, 0, 7, (), 1, 1, None, KEEPING, 2, 6),
            m.JoinReply(0, 0, 0, (), 0, 0, None, SETTINGS),
        ),
        *of(
            "push",
            push_header(b"abc", spans=((0, 3), (5, m.NUMBER_MAX)), lineage=m.NUMBER_MAX),
            push_header(b"abc", values_digest="", final=True, sequence=m.NUMBER_MAX, base_version=0),
            m.Chunk(0, b"a", zlib.crc32(b"a")),
            m.Chunk(300, b"\x00" * 70_000, 0),
            m.Chunk(m.PAYLOAD_BYTES_MAX, b"z", 0xFFFFFFFF),
            m.Chunk(1, b"z", 0, 0xFFFFFFFFFFFFFFFF),
            push_header(b"abc", frames=True, beside=True, progress=True, others=m.STREAMS_MAX - 1),
            m.Frame(0, memoryview(b"a")),
            m.Frame(m.PAYLOAD_BYTES_MAX, memoryview(bytes(70_000))),
            m.PushCommit(3, DIGEST),
        ),
        *of(
            "push_reply",
            m.PushAdmitted(0),
            m.PushAdmitted(m.PAYLOAD_BYTES_MAX, True),
            m.PushAgain(m.PAYLOAD_BYTES_MAX, m.CHUNK_BYTES_MAX),
            m.PushResult(Outcome.ACCEPTED, 3, epoch=4),
            *(m.PushResult(outcome, 0, reason, REFUSED, "words") for outcome in Outcome for reason in Reason),
        ),
        *of(
            "pull",
            m.PullAsk(RUN, "site-a", 3, 7, 9, 12),
            m.PullAsk(
                RUN, "site-a", 3, 7, 9, 12, 3, m.PAYLOAD_BYTES_MAX, m.NUMBER_MAX, 125_000_000, m.PULL_WAIT_NS_MAX
            ),
            m.PullAsk(RUN, "", 0, -1),
            m.PullAsk(RUN, "a", 0, 1, protocol=2),
        ),
        *of(
            "pull_part",
            PULL,
            *(m.PullHeader(0, 0, 9, True, "fp32", 2, 8, (8,), DIGEST, 0, (), *rest) for rest in WHOLES),
            m.PullHeader(0, 9, 9, False, "fp32", 2, 0, (), DIGEST, 0, (REFUSED,)),
            m.Chunk(5, b"data", 1),
            m.Frame(5, memoryview(b"data")),
        ),
        *of("watch_event", m.Published(2, 3, 4, DIGEST, 5, 6), m.Published(2, 3, 4, DIGEST, 5, 6, 7), m.Alive()),
        *of("watch_event", FateTold(FATE), FateTold(REFUSED), *map(FinalAnnounced, Ending), *map(m.Dropped, Reason)),
        *of("watch_event", FinalAnnounced(Ending.FINISHED, (3, 0, m.NUMBER_MAX))),
        *of(
            "report",
            report_info(),
            report_info(loss=None, versions=(), digests=(), link=None, units=None),
            report_info(loss=0.0, tokens_per_s=0.0, digests=(), link=m.LinkInfo()),
        ),
        *of(
            "report_reply",
            m.ReportReply(2, 3, 4, True, None, (0, 5)),
            m.ReportReply(0, 0, 0, False, Ending.FINISHED),
            m.ReportReply(2, 3, 4, True, None, units=UnitsTold(7, ((0, 3), (-1, 2), (m.NUMBER_MAX, 1)))),
            m.ReportReply(2, 3, 4, True, None, units=UnitsTold(0, ())),
        ),
        *of("member", m.MemberAsk(RUN, "site-a", 4)),
        *of("evict", m.EvictAsk("site-a")),
        *of("update", m.UpdateAsk("site-a", 3, 7)),
        *of("promote", m.PromoteAsk(True)),
        *of("empty", m.Nothing()),
        *of("status", {"sites": {"a": 1.5}}),
        *of(
            "probe",
            m.ProbeAsk(3),
            m.ProbeAsk(3, RUN, DIGEST, b"{}", {"outer.lr": "0.7"}, m.PROBE_BYTES_MAX, 1, 5),
            m.Filler(b"filler" * 100),
        ),
        *of(
            "probe_reply",
            m.ProbeAnswer(3, 2, RUN),
            m.ProbeAnswer(3, 2, RUN, "site/a", 1_700_000_000_000_000_000, "lr is 1", "10.0.0.1:7077", {"a.b": "1"}),
            m.ProbeTaken(1 << 20, 10**9, 10**6),
            m.Filler(b"x"),
        ),
        *of("follow", m.FollowStart("run-1", "standby-1", HEX, HEX, 3, HEX), m.FollowStart("r", "s", HEX, HEX, 0, "")),
        *of("follow", m.FollowAck(4, 1 << 40)),
        *of(
            "follow_part",
            m.Follows(True, 3, HEX, 2),
            m.Follows(False, 0, "", 1, waits=True),
            m.Item("spool/.above/0-1795000000000000000-abc.update", 0, 0, 17, HEX),
            m.Item("above/outbox/0-7.update", 0, 0, 17, HEX),
            m.Item("lineages/1795000000/manifest.json", 0, 0, 9, HEX),
            m.Item("", 4, 1234, 99, HEX),
            m.Chunk(0, b"bytes", 7),
            m.Chunk.of(0, b"bytes"),
            m.Alive(),
        ),
    ]
