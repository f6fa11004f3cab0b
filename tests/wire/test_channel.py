"""A channel and what its end keeps to: delays, rates, stalls, and what a failed call means."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import pytest

from diloco.sync.events import Reason
from diloco.wire.channel import (
    ADMIN_SERVICE,
    PUSHBACK_KEY,
    REASON_KEY,
    Backoff,
    Deal,
    Guard,
    Line,
    Pacer,
    Rates,
    StallWatch,
    Stream,
    wire_error,
)
from diloco.wire.messages import CHUNK_BYTES_MIN, MIB, Refused, Status, Unreachable
from diloco.wire.options import ClientOptions, SecurityOptions
from tests.wire.certificates import A, Authority, written
from tests.wire.conftest import answering
from tests.wire.relay import wait_until


def test_delays_grow_to_the_cap_with_a_jitter_and_what_the_other_end_asks_for_is_kept_and_spread() -> None:
    backoff = Backoff(base_s=0.5, cap_s=4.0)
    assert [backoff.next_s(0.0) for _ in range(5)] == [0.25, 0.5, 1.0, 2.0, 2.0]
    assert 3.9 < backoff.next_s(0.999) <= 4.0
    assert Backoff(base_s=0.2, cap_s=5.0, failures=100_000).next_s(0.999) <= 5.0
    # The other end asks all whom it refuses for the same: without chance they would all come back at one instant.
    delays = [Backoff(0.2, 3.0).next_s(chance / 10, at_least_s=4.0) for chance in range(10)]
    assert (min(delays), len(set(delays)), max(delays) < 6.0) == (4.0, 10, True)


def line(address: str = "127.0.0.1:1", **security: Any) -> Line:
    return Line(address, SecurityOptions(**security), ClientOptions(), ADMIN_SERVICE)


RETRYABLE = {"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "DATA_LOSS", "INTERNAL", "UNKNOWN", "ABORTED"}
FULL, DENIED = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.PERMISSION_DENIED


def failed(code: grpc.StatusCode, told: dict[str, str] | None = None, details: str = "words") -> Mock:
    """A failed call."""
    told_beside = tuple((told or {}).items())
    return Mock(code=lambda: code, details=lambda: details, trailing_metadata=lambda: told_beside)


def test_every_status_is_definite_or_to_be_tried_again_and_so_is_what_is_told_beside_it() -> None:
    for code in set(grpc.StatusCode) - {grpc.StatusCode.OK}:
        error = wire_error("Join", failed(code))
        if code.name in RETRYABLE:
            assert isinstance(error, Unreachable)
            assert code.name in error.why
        else:
            assert isinstance(error, Refused)
            assert (error.status, error.text) == (Status(code.name), "words")
    # What is told beside a status counts where it is known.
    for pushback, after_s in (("1500", 1.5), ("0", 0.0)):
        error = wire_error("Push", failed(FULL, {PUSHBACK_KEY: pushback}))
        assert isinstance(error, Unreachable)
        assert error.retry_after_s == after_s
    for pushback in ("-1", "soon", "9" * 30, ""):
        assert isinstance(wire_error("Push", failed(FULL, {PUSHBACK_KEY: pushback})), Refused)
    for told, reason in (("evicted", Reason.EVICTED), ("of-a-later-release", None), ("", None)):
        error = wire_error("Join", failed(DENIED, {REASON_KEY: told}))
        assert isinstance(error, Refused)
        assert (error.reason, error.final) == (reason, reason is Reason.EVICTED)


def test_why_there_is_no_connection_is_said_without_grpcs_own_words() -> None:
    for said, why in (
        ("UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote host: Connection refused", "Connection refused"),
        ("UNAVAILABLE: ipv6:%5B::1%5D:1: Ssl handshake failed: CERTIFICATE_VER", "Ssl handshake failed: CERT"),
    ):
        details = f"failed to connect to all addresses; last error: {said}"
        error = wire_error("Join", failed(grpc.StatusCode.UNAVAILABLE, details=details))
        assert isinstance(error, Unreachable)
        assert error.why.startswith(f"Join: {why}")
    with pytest.raises(Unreachable, match=r"^Status: Connection refused$"):
        line().unary("Status", b"", bytes, 5.0)


def statuses(answer: Callable[[bytes, Any], bytes]) -> grpc.GenericRpcHandler:
    return grpc.method_handlers_generic_handler(ADMIN_SERVICE, {"Status": grpc.unary_unary_rpc_method_handler(answer)})


def test_a_server_that_has_no_room_for_one_more_call_is_come_back_to() -> None:
    """gRPC says so itself, before any of our code is asked, and without a time: its words are all there is."""
    over, began = threading.Event(), threading.Event()

    def held(request: bytes, context: object) -> bytes:
        began.set()
        over.wait(30)
        return request

    with answering(statuses(held), calls_max=1) as address:
        there = line(address)
        first = Stream(there, "Status", b"", bytes)
        try:
            assert began.wait(30)
            with pytest.raises(Unreachable, match="RESOURCE_EXHAUSTED") as caught:
                there.unary("Status", b"", bytes, 30.0)
            assert caught.value.retry_after_s is None
        finally:
            over.set()
            list(first)
            there.close()


def test_a_defect_in_what_takes_an_answer_is_no_unreachable_syncer() -> None:
    """Else a thread would ask again without end, and say nothing."""

    def defective(raw: bytes) -> bytes:
        raise ValueError("operation forbidden on released memoryview object")

    with answering(statuses(lambda request, context: request)) as address:
        there = line(address)
        with pytest.raises(ValueError, match="released memoryview"):
            there.unary("Status", b"", defective, 30.0)
        with pytest.raises(ValueError, match="released memoryview"), Stream(there, "Status", b"", defective) as stream:
            next(stream)
        there.close()


def test_a_channel_is_made_anew_when_its_files_or_its_address_have_changed_and_the_old_one_ends(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.site("site/a")
    there = line(tls_ca=authority.ca, tls_cert=cert, tls_key=key)
    channels = [there.channel]

    def stays(address: str) -> None:
        there.lost()
        there.lead_to(address)
        assert there.channel is channels[-1]

    stays("127.0.0.1:1")
    authority.site("site/a")
    for change in (there.lost, lambda: there.lead_to(None), lambda: there.lead_to("127.0.0.1:2")):
        change()
        channels.append(there.channel)
    stays("127.0.0.1:2")
    (tmp_path / "authority.pem").write_text("nothing")
    stays("127.0.0.1:2")  # What cannot be used changes nothing.
    there.close()
    there.lost()
    there.lead_to("127.0.0.1:3")
    assert len({id(channel) for channel in channels}) == 4
    for channel in channels:
        with pytest.raises(ValueError, match="closed"):
            channel.unary_unary("/any")(b"", timeout=1.0)


def test_files_that_cannot_work_and_ports_that_are_none_are_refused_in_words(tmp_path: Path) -> None:
    authority, empty = Authority(tmp_path), written(tmp_path / "empty", "")
    cert, _ = authority.site("site/a")
    for address, security, words in (
        ("127.0.0.1:1", {"tls_ca": empty}, "tls_ca .*empty holds no certificate"),
        ("127.0.0.1:1", {"tls_ca": authority.ca, "tls_cert": cert, "tls_key": empty}, "are not a pair"),
        ("127.0.0.1:1", {"tls_ca": authority.ca, "tls_cert": cert, "tls_key": cert}, "chmod 600"),
        ("127.0.0.1:1", {"token_file": empty}, "token_file .* is empty"),
        ("[::1]:65536", {}, "a port of 1 to 65535"),  # gRPC would take it modulo what there is.
    ):
        with pytest.raises(ValueError, match=words):
            line(address, **security)


def test_a_token_goes_to_no_address_in_the_clear_however_it_is_given(tmp_path: Path) -> None:
    for security in ({"token": A}, {"token_file": written(tmp_path / "token", A)}):
        for reach in (partial(line, **security), line(**security).lead_to):
            with pytest.raises(ValueError, match="unencrypted"):
                reach("example.org:7000")
    line("example.org:7000", token=A, insecure_non_loopback=True).close()


def test_a_stream_that_waits_is_not_taken_for_stuck_and_its_chunks_are_short_where_the_rate_is_low() -> None:
    guard, pacer = Guard(StallWatch("never started"), 1.0), Pacer(1000)
    pacer.wait(2000, guard)
    thread = threading.Thread(target=pacer.wait, args=(1000, guard))
    thread.start()
    began_s = guard.moved_at_s
    thread.join(1.2)
    assert thread.is_alive()
    assert guard.moved_at_s > began_s
    pacer.close()
    thread.join(10)
    assert not thread.is_alive()
    assert Pacer(100_000).chunk_bytes(MIB) == CHUNK_BYTES_MIN
    assert CHUNK_BYTES_MIN < Pacer(10_000_000).chunk_bytes(MIB) < MIB
    assert Pacer(1_000_000_000).chunk_bytes(MIB) == MIB


def test_a_full_bucket_passes_a_burst_and_then_its_rate_whatever_that_is_and_so_many_callers_have_one() -> None:
    rates = Rates(burst_s=2.0)
    assert [rates.take("a", 1.0, 5.0, 100.0) for _ in range(10)] == [0.0] * 10
    wait_s = rates.take("a", 1.0, 5.0, 100.0)
    assert wait_s == pytest.approx(0.2, abs=0.01)
    passed = sum(rates.take("a", 1.0, 5.0, 100.0 + tick / 100) == 0.0 for tick in range(1, 1001))
    assert 49 <= passed <= 51, "ten seconds at five a second"
    rates = Rates(burst_s=1.0)  # A rate below one passes one, and no second counts twice.
    assert rates.take("a", 2.0, 0.1, 50.0) == 0.0
    assert rates.take("a", 1.0, 0.1, 40.0) == pytest.approx(20.0, abs=0.1)
    assert rates.take("a", 1.0, 0.1, 69.9) > 0
    assert rates.take("a", 1.0, 0.1, 70.1) == 0.0
    assert [rates.take("b", 0.5, 0.1, 0.0) for _ in range(3)] == [0.0, 0.0, pytest.approx(5.0)]
    rates = Rates(burst_s=1.0, callers_max=3)
    for number in range(100):
        rates.take(f"caller {number}", 100.0, 1.0, 0.0)
    assert rates.take("caller 97", 1.0, 1.0, 0.0) > 0
    assert rates.take("caller 96", 1.0, 1.0, 0.0) == 0.0, "so many callers are remembered"


def test_what_is_reserved_comes_due_one_after_the_other_up_to_a_bound() -> None:
    rates = Rates(burst_s=1.0)
    waits = [rates.take("a", 1.0, 2.0, 7.0, 1.0) for _ in range(6)]
    assert waits[:4] == [0.0, 0.0, pytest.approx(0.5), pytest.approx(1.0)]
    assert waits[4:] == [pytest.approx(1.5)] * 2
    assert rates.take("a", 1.0, 2.0, 7.5, 1.0) == pytest.approx(1.0), "what was not taken is not owed"


def test_a_stream_that_does_not_move_is_cancelled_once_and_no_other() -> None:
    """Not one that moves, nor one whose own end is at work, nor one that was left."""
    stalls = StallWatch("test")
    stuck, moves, works, over = (list[float]() for _ in range(4))
    cancel = lambda cancelled: lambda: cancelled.append(time.monotonic())  # noqa: E731
    begun_s = time.monotonic()
    with Guard(stalls, 0.2, cancel(over)):
        pass
    with (
        Guard(stalls, 0.3, cancel(stuck)) as one,
        Guard(stalls, 1.0, cancel(moves)) as other,
        Guard(stalls, 0.1) as working,
    ):
        working.limit(None)
        working.cancel = cancel(works)
        for _ in range(15):
            time.sleep(0.1)
            other.touch()
        assert (len(stuck), moves, works, over) == (1, [], [], [])
        assert (one.stalled, other.stalled) == (True, False)
        assert stuck[0] - begun_s >= 0.3
        working.limit(0.1)
        assert wait_until(lambda: works)
    stalls.close()
    StallWatch("unused").close()
    assert "test" not in {thread.name for thread in threading.enumerate()}


def test_near_the_end_streams_share_what_is_left_in_shorter_and_shorter_chunks() -> None:
    for left, streams, length in (
        (5, 1, 5),
        (100 * MIB, 4, MIB),
        (4 * MIB, 4, MIB // 2),
        (100_000, 4, CHUNK_BYTES_MIN),
    ):
        deal = Deal(7, 7 + left, Pacer(0), streams)
        assert deal.next(MIB) == (7, 7 + length)
    spans = list(iter(lambda: deal.next(MIB), None))
    assert spans == [(7 + CHUNK_BYTES_MIN, 100_007)], "each byte once, and the last chunk is what is left"
