from __future__ import annotations

import dataclasses
import gc
import itertools
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from diloco.sync.events import Fate, FragmentStanding, Outcome, Reason, UnitsTold
from diloco.sync.options import FATES_KEPT_LIMIT
from diloco.sync.progress import SPANS_MAX, UnitAsk
from diloco.wire import messages
from diloco.wire import messages as m
from diloco.wire import messages as p
from diloco.wire.channel import (
    ADMIN_SERVICE,
    PUSHBACK_KEY,
    REASON_KEY,
    SYNC_SERVICE,
    Line,
    StallWatch,
    Stream,
    wire_error,
)
from diloco.wire.chunks import TAIL_BYTES_MIN, ChunkError, DamagedChunk
from diloco.wire.client import AdminClient
from diloco.wire.convert import pack_leave, pack_pull, pack_push, pack_watch
from diloco.wire.door import Connections, Counters, Door, abort
from diloco.wire.handlers import DEALS_KEPT, Deals
from diloco.wire.identity import Authenticator
from diloco.wire.messages import (
    CHUNK_BYTES_MAX,
    KIB,
    MIB,
    LeaveAsk,
    MalformedMessage,
    PullAsk,
    PushResult,
    Refusal,
    Refused,
    Status,
    Unreachable,
    WatchAsk,
    bounds_of,
    check,
)
from diloco.wire.options import SecurityOptions, ServerOptions
from tests.sooner import sooner
from tests.wire.fake_syncer import DIGEST, RUN, join_ask, push_header, report_info
from tests.wire.relay import Relay, wait_until
from tests.wire.samples import FATE, PULL, SETTINGS, STANDING, everything

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from diloco.wire.chunks import Span
    from tests.wire.conftest import Wired


PARTS = {m.LearnerSettings, m.LinkInfo}
"""They travel inside of others, which have samples with and without them."""


def test_status_names_are_grpcs() -> None:
    assert {status.value for status in m.Status} == {code.name for code in grpc.StatusCode} - {"OK"}


def test_messages_are_frozen_and_all_have_a_sample() -> None:
    kinds = {
        value for value in vars(m).values() if dataclasses.is_dataclass(value) and value.__module__ == m.__name__
    } - PARTS
    assert all(kind.__dataclass_params__.frozen for kind in kinds)
    assert kinds <= {type(message) for message, _, _ in everything()}


def test_errors_carry_their_words() -> None:
    refusal = m.Refusal(m.Status.NOT_FOUND, "no such run", 5)
    assert (refusal.status, refusal.text, refusal.retry_ms) == (m.Status.NOT_FOUND, "no such run", 5)
    assert str(refusal) == "NOT_FOUND: no such run"
    assert str(m.Unreachable("away", 1.5)) == "away"
    assert str(m.Refused(m.Status.ABORTED, "no")) == "no"


def test_what_an_operator_says_of_sites_and_updates(wired: Wired) -> None:
    with AdminClient(wired.server.address) as admin:
        admin.readmit("site-b")
        admin.admit("site-b", 3, 7)
        admin.refuse("site-c", 0, 9)
    assert wired.syncer.calls == ["readmit site-b", "admit site-b 3 7", "refuse site-c 0 9"]


def test_an_operators_four_calls(wired: Wired) -> None:
    with AdminClient(wired.server.address) as admin:
        assert admin.status() == wired.syncer.status()
        admin.drain()
        admin.evict("site-b")
        admin.snapshot()
    assert wired.syncer.calls == ["status", "status", "drain", "evict site-b", "snapshot"]


def test_what_json_cannot_carry_is_our_own_defect(wired: Wired, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wired.syncer, "status", lambda: {"loss": float("nan")})
    with AdminClient(wired.server.address) as admin, pytest.raises(Exception, match="INTERNAL"):
        admin.status()
    assert wired.server.counters()["internal"] == 1


def test_a_refusal_comes_back_in_words(wired: Wired, monkeypatch: pytest.MonkeyPatch) -> None:
    from diloco.wire.messages import Refusal

    def evict(site: str) -> None:
        raise Refusal(Status.NOT_FOUND, f"there is no site {site}")

    monkeypatch.setattr(wired.syncer, "evict", evict)
    with AdminClient(wired.server.address) as admin, pytest.raises(Refused, match="there is no site site-b") as caught:
        admin.evict("site-b")
    assert caught.value.status is Status.NOT_FOUND


class Ended(Exception):
    """What ``abort`` raises here."""


class Context:
    def __init__(self) -> None:
        self.ended: tuple[grpc.StatusCode, str] | None = None
        self.trailing: object = None

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    def peer(self) -> str:
        return "here"

    def cancel(self) -> None:
        return

    def set_trailing_metadata(self, metadata: object) -> None:
        self.trailing = metadata

    def abort(self, status: grpc.StatusCode, text: str) -> None:
        self.ended = status, text
        raise Ended


def a_door() -> Door:
    counters = Counters()
    return Door(
        Authenticator(SecurityOptions()),
        ServerOptions(run_id=RUN),
        counters,
        Connections(8, counters, str),
        StallWatch("never started"),
    )


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Refusal(Status.ABORTED, "x"), Status.ABORTED),
        (MalformedMessage("x"), Status.INVALID_ARGUMENT),
        (ChunkError("x"), Status.INVALID_ARGUMENT),
        (DamagedChunk("x"), Status.DATA_LOSS),
    ],
)
def test_errors_have_a_status_and_are_counted(error: Exception, status: Status) -> None:
    door = a_door()
    assert door.refusal_of(error, "Push").status is status
    assert door.counters.totals() == {f"refused_{status.lower()}": 1}


def test_a_defect_is_logged_and_says_nothing_of_the_inside(logged: list[str]) -> None:
    door = a_door()
    refusal = door.refusal_of(OSError("/var/lib/secret"), "Push")
    assert refusal.status is Status.INTERNAL
    assert "secret" not in refusal.text
    assert "secret" in "".join(logged)
    assert door.counters.totals() == {"internal": 1}


def test_words_are_one_short_line_and_pushback_comes_along() -> None:
    context = Context()
    with pytest.raises(Ended):
        abort(context, Refusal(Status.RESOURCE_EXHAUSTED, "a\r\nb " + "x" * 5000, 250))
    assert context.ended is not None
    assert context.ended[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert context.ended[1].startswith("a b x")
    assert len(context.ended[1]) == 1024
    assert context.trailing == (("grpc-retry-pushback-ms", "250"),)


def test_a_reason_comes_along() -> None:
    context = Context()
    refusal = Refusal(Status.PERMISSION_DENIED, "put out of the run", reason=Reason.EVICTED)
    with pytest.raises(Ended):
        abort(context, a_door().refusal_of(refusal, "Join"))
    assert context.trailing == (("diloco-reason", "evicted"),)


def test_good_answers_are_passed_on_and_a_client_that_is_gone_ends_them_silently() -> None:
    door = a_door()

    def work(requests: Iterator[bytes], context: object, identity: object) -> Iterator[bytes]:
        yield from requests
        raise grpc.RpcError

    answers = door.handler("Push", work).stream_stream(iter([b"a", b"b"]), Context())
    assert list(answers) == [b"a", b"b"]
    assert door.counters.totals() == {"broken_off": 1}
    one = door.unary("Join", lambda raw, identity: raw * 2).stream_unary(iter([b"a"]), Context())
    assert one == b"aa"


def refusals() -> list[tuple[str, bytes, dict[str, Any]]]:
    """Method, message, and what else: each is refused at another place."""
    other_run = pack_push(replace(push_header(b"abc"), run_id="other"))
    watch, pull = pack_watch(WatchAsk("other", "site-a", 1)), pack_pull(PullAsk("other", "site-a", 0, -1))
    return [
        (f"/{SYNC_SERVICE}/Push", other_run, {}),
        (f"/{SYNC_SERVICE}/Watch", watch, {}),
        (f"/{SYNC_SERVICE}/Pull", pull, {}),
        (f"/{SYNC_SERVICE}/Watch", watch, {"compression": grpc.Compression.Gzip}),
        (f"/{SYNC_SERVICE}/Leave", pack_leave(LeaveAsk("other", "site-a", 1)), {}),
        ("/grpc.health.v1.Health/Watch", b"\x0a\x05other", {}),
    ]


@pytest.mark.parametrize("number", sooner(range(6), 0, 3))
def test_a_call_that_was_refused_takes_up_no_place_in_its_connection(wired: Wired, number: int) -> None:
    """Seen: after sixteen refusals a connection was of no more use until the syncer next collected garbage."""
    method, message, options = refusals()[number]
    call = wired.channel().unary_stream(method)
    gc.collect()
    gc.disable()
    try:
        for _ in range(30):
            assert refused(lambda: list(call(message, timeout=20, **options)))
    finally:
        gc.enable()


def refused(ask: Callable[[], object], bound_s: float = 10.0) -> bool:
    """Whether it is refused by the syncer.  A connection may be full until the calls before have been put away, on a
    loaded machine for a moment; with the defect it stays so."""
    until = time.monotonic() + bound_s
    while time.monotonic() < until:
        with pytest.raises(grpc.RpcError) as caught:
            ask()
        if caught.value.code() is not grpc.StatusCode.UNAVAILABLE:
            return True
        time.sleep(0.02)
    return False


BAD_NAMES = ["", "a" * 65, "a/b", "-a", "a b", "a\n", "ä", 5, None]
BAD_NUMBERS = [-1, m.NUMBER_MAX + 1, 1.0, "1", None, True]
BAD_DIGESTS = ["", DIGEST[1:], DIGEST + "0", DIGEST.upper(), "g" * 64, b"0" * 64]

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
    (p.ProbeAsk(3), "bytes_up", [-1, p.PROBE_BYTES_MAX + 1]),
    (p.ProbeAsk(3), "bytes_down", [-1, p.PROBE_BYTES_MAX + 1]),
    (p.ProbeAsk(3), "limit_ns", [0, p.PROBE_NS_MAX + 1]),
    (p.ProbeAsk(3), "run_id", BAD_NAMES[1:]),
    (p.ProbeAnswer(3, 2, "r"), "difference", ["x" * (m.TEXT_CHARS_MAX + 1)]),
    (p.ProbeAnswer(3, 2, "r"), "shared_config", [None, {"a": 1}, {"": "x"}]),
    (p.ProbeTaken(0, 0, 0), "bytes", [-1, p.PROBE_BYTES_MAX + 1]),
    (p.Filler(b""), "data", [b"x" * (m.CHUNK_BYTES_MAX + 1), "text"]),
    (PULL, "from_version", [10, 8, 6]),
    (PULL, "part_bytes", [(10,), (0, 30), (10, 21), (10, 10, 10)]),
    (PULL, "payload_bytes", [29, 31]),
    (PULL, "payload_crc32", [-1, 1 << 32]),
    (PULL, "whole", [True]),
]


@pytest.mark.parametrize(("good", "field", "bad"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_each_bound_is_kept_and_named(good: Any, field: str, bad: list[Any]) -> None:
    check(good)
    for value in bad:
        # Changing one side of a relation may be reported at the other side: any name of that relation will do.
        related = {"from_version": "part_bytes|from_version", "part_bytes": "part_bytes|payload_bytes", "whole": "part"}
        with pytest.raises(m.MalformedMessage, match=related.get(field, field)):
            check(dataclasses.replace(good, **{field: value}))


def test_every_field_of_every_message_has_a_bound() -> None:
    carried = {type(message) for message, _, _ in everything()} - {m.Frame, dict}
    for kind in carried | {Fate, FragmentStanding, UnitAsk, UnitsTold, m.LearnerSettings, m.LinkInfo}:
        assert set(bounds_of(kind)) == {field.name for field in dataclasses.fields(kind)}, kind.__name__


def test_a_field_without_a_bound_is_refused() -> None:
    with pytest.raises(TypeError, match="sequence has no bound"):
        bounds_of(SiteWithoutBounds)


@dataclasses.dataclass
class SiteWithoutBounds:
    site_id: m.Id
    final: m.Flag
    sequence: int


def test_a_long_value_is_not_repeated_in_full() -> None:
    with pytest.raises(m.MalformedMessage) as caught:
        check(join_ask(run_id="x" * 100_000))
    assert len(str(caught.value)) < 250


def test_a_whole_fragment_is_fp32() -> None:
    whole = m.PullHeader(0, 0, 9, True, "fp32", 2, 8, (8,), DIGEST, 0, ())
    check(whole)
    with pytest.raises(m.MalformedMessage, match="4 \\* numel"):
        check(dataclasses.replace(whole, numel=3))


def test_the_parts_of_a_pull_may_not_come_to_more_than_a_payload_may_have() -> None:
    largest = m.PAYLOAD_BYTES_MAX
    check(dataclasses.replace(PULL, part_bytes=(largest - 1, 1), payload_bytes=largest))
    with pytest.raises(m.MalformedMessage, match=rf"payload_bytes .*{largest + 1}"):
        check(dataclasses.replace(PULL, part_bytes=(largest, 1), payload_bytes=largest + 1))


RETRYABLE = {"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "DATA_LOSS", "INTERNAL", "UNKNOWN", "ABORTED"}


class Failed:
    """As much of a failed call as is looked at."""

    def __init__(self, code: grpc.StatusCode, pushback: str | None = None, reason: str | None = None) -> None:
        self._code = code
        told = ((PUSHBACK_KEY, pushback), (REASON_KEY, reason))
        self._metadata = tuple((key, value) for key, value in told if value is not None)

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "words"

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_every_status_is_either_definite_or_to_be_tried_again(code: grpc.StatusCode) -> None:
    error = wire_error("Join", Failed(code))
    if code.name in RETRYABLE:
        assert isinstance(error, Unreachable)
        assert code.name in error.why
    else:
        assert isinstance(error, Refused)
        assert (error.status, error.text) == (Status(code.name), "words")


@pytest.mark.parametrize(("pushback", "after_s"), [("1500", 1.5), ("0", 0.0)])
def test_pushback_makes_a_refusal_one_to_come_back_after(pushback: str, after_s: float) -> None:
    error = wire_error("Push", Failed(grpc.StatusCode.RESOURCE_EXHAUSTED, pushback))
    assert isinstance(error, Unreachable)
    assert error.retry_after_s == after_s


@pytest.mark.parametrize("pushback", ["-1", "soon", "9" * 30, ""])
def test_pushback_that_is_no_number_is_ignored(pushback: str) -> None:
    assert isinstance(wire_error("Push", Failed(grpc.StatusCode.RESOURCE_EXHAUSTED, pushback)), Refused)


@pytest.mark.parametrize(("told", "reason"), [("evicted", Reason.EVICTED), ("of-a-later-release", None), ("", None)])
def test_a_reason_that_is_known_comes_with_a_refusal(told: str, reason: Reason | None) -> None:
    failed = Failed(grpc.StatusCode.PERMISSION_DENIED, reason=told)
    error = wire_error("Join", failed)
    assert isinstance(error, Refused)
    assert (error.reason, error.final) == (reason, reason is Reason.EVICTED)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote host: Connection refused", "Connection refused"),
        (
            "UNAVAILABLE: ipv6:%5B::1%5D:1: Ssl handshake failed: CERTIFICATE_VERIFY_FAILED",
            "Ssl handshake failed: CERT",
        ),
    ],
)
def test_why_there_is_no_connection_is_said_without_grpcs_own_words(
    said: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = Failed(grpc.StatusCode.UNAVAILABLE)
    monkeypatch.setattr(failed, "details", lambda: f"failed to connect to all addresses; last error: {said}")
    error = wire_error("Join", failed)
    assert isinstance(error, Unreachable)
    assert error.why.startswith(f"Join: {why}")


def test_a_closed_channel_is_unreachable() -> None:
    line = Line("127.0.0.1:1", SecurityOptions(), [], SYNC_SERVICE)
    line.close()
    with pytest.raises(Unreachable, match="closed"):
        line.unary("Join", b"", bytes, 1.0)
    with pytest.raises(Unreachable, match="closed"):
        Stream(line, "Watch", b"", bytes)
    with pytest.raises(Unreachable, match="closed"):
        Stream(line, "Push", iter(()), bytes)


def test_a_server_that_has_no_room_for_one_more_call_is_come_back_to() -> None:
    """gRPC says so itself, before any of our code is asked, and without a time: its words are all there is."""
    over, began = threading.Event(), threading.Event()

    def held(request: bytes, context: object) -> bytes:
        began.set()
        over.wait(30)
        return request

    handlers = {"Status": grpc.unary_unary_rpc_method_handler(held)}
    server = grpc.server(ThreadPoolExecutor(1), maximum_concurrent_rpcs=1)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(ADMIN_SERVICE, handlers),))
    line = Line(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", SecurityOptions(), [], ADMIN_SERVICE)
    server.start()
    first = Stream(line, "Status", b"", bytes)
    try:
        assert began.wait(30)
        with pytest.raises(Unreachable, match="RESOURCE_EXHAUSTED") as caught:
            line.unary("Status", b"", bytes, 30.0)
        assert caught.value.retry_after_s is None
    finally:
        over.set()
        list(first)
        line.close()
        server.stop(None)


def test_nobody_there_is_unreachable_at_once() -> None:
    line = Line("127.0.0.1:1", SecurityOptions(), [], ADMIN_SERVICE)
    with pytest.raises(Unreachable, match=r"^Status: Connection refused$"):
        line.unary("Status", b"", bytes, 5.0)
    line.close()


def test_a_defect_in_what_takes_an_answer_is_no_unreachable_syncer() -> None:
    """Else a thread would ask again without end, and say nothing."""

    def defective(raw: bytes) -> bytes:
        raise ValueError("operation forbidden on released memoryview object")

    handlers = {"Status": grpc.unary_unary_rpc_method_handler(lambda request, context: request)}
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(ADMIN_SERVICE, handlers),))
    line = Line(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", SecurityOptions(), [], ADMIN_SERVICE)
    server.start()
    try:
        with pytest.raises(ValueError, match="released memoryview"):
            line.unary("Status", b"", defective, 30.0)
        with pytest.raises(ValueError, match="released memoryview"), Stream(line, "Status", b"", defective) as stream:
            next(stream)
    finally:
        line.close()
        server.stop(None)


ASK = PullAsk(RUN, "site-a", 3, 7, deal=5)
LONG = replace(PULL, payload_bytes=20 * MIB + 7)


def test_streams_bring_each_byte_once_and_end_together() -> None:
    deals = Deals()
    joined = [deals.join("site-a", ASK, LONG) for _ in range(3)]

    def bring(index: int) -> list[Span]:
        return list(iter(lambda: joined[index].next(256 * KIB), None))

    with ThreadPoolExecutor(3) as pool:
        spans = sorted(span for brought in pool.map(bring, range(3)) for span in brought)
    assert spans[0][0] == 0
    assert spans[-1][1] == LONG.payload_bytes
    assert all(before[1] == after[0] for before, after in pairwise(spans))
    assert max(end - begin for begin, end in spans) == 256 * KIB
    assert spans[-1][1] - spans[-1][0] <= TAIL_BYTES_MIN
    assert deals.join("site-a", ASK, LONG).next(MIB) is None, "whoever comes late brings nothing twice"


def test_another_asker_another_number_and_another_version_are_other_deals() -> None:
    deals = Deals()
    whole = (0, LONG.payload_bytes)
    assert deals.join("site-a", ASK, LONG).next(LONG.payload_bytes) == whole
    for asker, ask, header in (
        ("site-b", ASK, LONG),
        ("site-a", replace(ASK, deal=6), LONG),
        ("site-a", ASK, replace(LONG, version=10)),
    ):
        assert deals.join(asker, ask, header).next(LONG.payload_bytes) == whole


def test_so_many_of_an_asker_are_remembered() -> None:
    deals = Deals()
    for number in range(1, DEALS_KEPT + 2):
        deals.join("site-a", replace(ASK, deal=number), LONG).next(LONG.payload_bytes)
    assert deals.join("site-a", replace(ASK, deal=2), LONG).next(MIB) is None
    assert deals.join("site-a", replace(ASK, deal=1), LONG).next(MIB) is not None


def test_all_streams_of_a_deal_keep_to_its_rate_together() -> None:
    deals = Deals()
    first, second = (deals.join("site-a", replace(ASK, bytes_per_s=1 << 20), LONG) for _ in range(2))
    assert first.pacer is second.pacer
    assert first.pacer.chunk_bytes(MIB) < MIB


def test_all_probes_at_once_hold_little() -> None:
    """What filler takes in memory is a message of each that is under way; in time, both ways of each."""
    assert messages.PROBES_MAX * CHUNK_BYTES_MAX <= 8 << 20
    assert messages.PROBE_NS_MAX <= 10 * 10**9
    assert messages.PROBES_BURST_S * messages.PROBES_PER_S * messages.PROBE_BYTES_MAX <= 200 << 20


def test_a_probe_of_nobody_compares_and_carries_nothing() -> None:
    ask = messages.ProbeAsk(3)
    assert (ask.run_id, ask.layout_fingerprint, ask.bytes_up, ask.bytes_down) == ("", "", 0, 0)


# --- One push over several streams, and through a path that damages bytes --------------------------------------------

SEED = 33
MARK = b"nothing else in the payload looks like this"
MARKS = 3 * MARK  # One of them is whole in a read, wherever the stream is cut.
PAYLOAD = random.Random(SEED).randbytes(6 * MIB + 123)
MARKED = b"".join((PAYLOAD[: 2 * MIB], MARKS, PAYLOAD[2 * MIB : 4 * MIB], MARKS, PAYLOAD[4 * MIB :], MARKS))


@pytest.fixture
def relay(wired: Wired) -> Iterator[Relay]:
    relay = Relay(wired.server.address)
    yield relay
    relay.close()


@pytest.mark.parametrize("channels", [2, 6])
def test_one_push_goes_over_several_streams_and_arrives_once(wired: Wired, relay: Relay, channels: int) -> None:
    client = wired.client(address=relay.address, data_channels=channels)
    for sequence in (1, 2):
        header = push_header(PAYLOAD, sequence=sequence)
        assert client.push(header, PAYLOAD) == PushResult(Outcome.ACCEPTED, 3)
        assert wired.syncer.accepted["site-a", 0, sequence] == PAYLOAD
    assert relay.connections == channels
    carried = wired.server.counters()["payload_bytes_in"]
    assert carried == 2 * len(PAYLOAD), "something was sent twice"
    assert wired.syncer.calls.count("open_push") == 2


def test_a_short_push_takes_one_stream(wired: Wired, relay: Relay) -> None:
    client = wired.client(address=relay.address, data_channels=6)
    client.push(push_header(b"short"), b"short")
    assert relay.connections == 1


@pytest.mark.parametrize("channels", [1, 3])
def test_a_damaged_chunk_is_sent_again_by_itself(wired: Wired, relay: Relay, channels: int) -> None:
    client = wired.client(address=relay.address, data_channels=channels)
    relay.damage(MARK, 3)
    assert client.push(push_header(MARKED), MARKED) == PushResult(Outcome.ACCEPTED, 3)
    assert relay.damaged == 3
    assert wired.syncer.accepted["site-a", 0, 1] == MARKED
    counters = wired.server.counters()
    assert 1 <= counters["chunks_again"] <= 3
    assert counters["payload_bytes_in"] <= len(MARKED) + 3 * 64 * KIB
    assert wired.syncer.commits == 1


def test_a_path_that_damages_everything_is_given_up(wired: Wired, relay: Relay) -> None:
    client = wired.client(address=relay.address)
    relay.damage(MARK, 1_000_000)
    with pytest.raises(Unreachable, match="damaged on the way, as 64 before it"):
        client.push(push_header(MARKED), MARKED)
    assert not wired.syncer.accepted


def test_streams_that_break_off_end_the_push_and_the_next_goes_on(wired: Wired, relay: Relay) -> None:
    client = wired.client(address=relay.address, data_channels=3)
    relay.hold(1 * MIB)
    pool = ThreadPoolExecutor(1)
    pushed = pool.submit(client.push, push_header(PAYLOAD), PAYLOAD)
    assert wired.syncer.wrote.wait(20)
    relay.cut()
    with pytest.raises(Unreachable):
        pushed.result(20)
    assert wired.syncer.ended.wait(20)
    held = len(wired.syncer.spool["site-a", 0, 1])
    assert 0 < held < len(PAYLOAD)
    before = client.bytes_up
    for _ in range(100):
        try:
            assert client.push(push_header(PAYLOAD), PAYLOAD).outcome is Outcome.ACCEPTED
            break
        except Unreachable:
            wired.syncer.ended.wait(0.1)
    assert wired.syncer.accepted["site-a", 0, 1] == PAYLOAD
    assert client.bytes_up - before < 2 * len(PAYLOAD)
    pool.shutdown()


def test_a_stream_that_finds_nobody_is_done_without(wired: Wired) -> None:
    client = wired.client(data_channels=3)
    client._lines[2].lead_to("127.0.0.1:1")
    for sequence in range(1, 7):
        client._turn = itertools.count()  # The first stream is always one that works.
        assert client.push(push_header(PAYLOAD, sequence=sequence), PAYLOAD).outcome is Outcome.ACCEPTED
        assert wired.syncer.accepted["site-a", 0, sequence] == PAYLOAD


def test_more_connections_are_used_when_that_is_said(wired: Wired, relay: Relay) -> None:
    client = wired.client(address=relay.address)
    for sequence, (count, connections) in enumerate(((1, 1), (3, 3), (99, 6), (0, 6)), 1):
        client.use_channels(count)
        client.push(push_header(PAYLOAD, sequence=sequence), PAYLOAD)
        assert relay.connections == connections
        assert wired.syncer.accepted["site-a", 0, sequence] == PAYLOAD


@pytest.mark.parametrize("channels", [1, 3])
def test_after_one_that_was_welcome_a_push_does_not_wait_to_be_admitted(
    wired: Wired, relay: Relay, channels: int
) -> None:
    wired.syncer.protocol = 3
    client = wired.client(address=relay.address, data_channels=channels)
    client.join(join_ask())
    client.push(push_header(PAYLOAD), PAYLOAD)
    small = PAYLOAD[: 800 * KIB]  # More than the first window, less than what finds room on the way.
    wired.syncer.admits.clear()
    before = client.bytes_up
    with ThreadPoolExecutor(1) as pool:
        pushed = pool.submit(client.push, push_header(small, sequence=2), small)
        assert wait_until(lambda: client.bytes_up - before > 256 * KIB), "nothing goes before the admission"
        assert not wired.syncer.spool.get(("site-a", 0, 2)), "a byte was read before the admission"
        wired.syncer.admits.set()
        assert pushed.result(20).outcome is Outcome.ACCEPTED
    assert wired.syncer.accepted["site-a", 0, 2] == small
    assert wired.server.counters()["payload_bytes_in"] == len(PAYLOAD) + len(small), "something was sent twice"


def test_a_push_that_was_not_welcome_lets_the_next_one_wait(wired: Wired) -> None:
    wired.syncer.protocol = 3
    client = wired.client()
    client.join(join_ask())
    client.push(push_header(PAYLOAD), PAYLOAD)
    assert client.push(push_header(PAYLOAD), PAYLOAD).outcome is Outcome.DUPLICATE
    before = client.bytes_up
    assert client.push(push_header(PAYLOAD), PAYLOAD).outcome is Outcome.DUPLICATE
    assert client.bytes_up - before < KIB


def test_what_is_held_already_is_left_out_as_soon_as_that_is_known(wired: Wired, relay: Relay) -> None:
    """As after a restart of the site, which does not know how far the last process came."""
    wired.syncer.protocol = 3
    client = wired.client(address=relay.address)
    client.join(join_ask())
    client.push(push_header(PAYLOAD), PAYLOAD)
    wired.syncer.spool["site-a", 0, 2] = bytearray(PAYLOAD[: 5 * MIB])
    before = wired.server.counters()["payload_bytes_in"]
    assert client.push(push_header(PAYLOAD, sequence=2), PAYLOAD).outcome is Outcome.ACCEPTED
    assert wired.syncer.accepted["site-a", 0, 2] == PAYLOAD
    assert wired.server.counters()["payload_bytes_in"] - before < len(PAYLOAD)


def test_attempts_that_found_nobody_are_no_breaks(wired: Wired) -> None:
    """Nothing was lost on the way, so what goes on after them need not be careful."""
    client, header = wired.client(), push_header(PAYLOAD)
    client._lines[1].lead_to("127.0.0.1:1")
    for _ in range(3):
        with pytest.raises(Unreachable):
            client.push(header, PAYLOAD)
    assert client._breaks == {header.digest: 0}
    client._lines[1].lead_to(wired.server.address)
    assert client.push(header, PAYLOAD).outcome is Outcome.ACCEPTED


def test_a_push_that_breaks_again_and_again_puts_less_and_less_at_risk(wired: Wired, relay: Relay) -> None:
    client = wired.client(address=relay.address)
    payload = bytes(24 * MIB)
    breaks = 0
    relay.cut_after(2 * MIB)
    for _ in range(200):
        try:
            assert client.push(push_header(payload), payload).outcome is Outcome.ACCEPTED
            break
        except Unreachable:
            if not relay.waits_to_cut and breaks < 8:
                breaks += 1
                relay.cut_after(2 * MIB)
            wired.syncer.ended.wait(0.1)
    assert wired.syncer.accepted["site-a", 0, 1] == payload
    assert breaks >= 6
    assert relay.carried_up < len(payload) + 12 * MIB
