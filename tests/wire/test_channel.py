from __future__ import annotations

import contextlib
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from diloco.wire.channel import (
    ADMIN_SERVICE,
    CONTROL_SHARE,
    SYNC_SERVICE,
    Backoff,
    Guard,
    Line,
    Pacer,
    Rates,
    StallWatch,
    bulk_bytes_per_s,
    split_addresses,
)
from diloco.wire.convert import pack_report
from diloco.wire.messages import CHUNK_BYTES_MIN, MIB
from diloco.wire.options import STANDARD_STREAMS_MAX, SecurityOptions, ServerOptions
from tests.hunts import http2
from tests.sooner import sooner
from tests.wire.certificates import Authority
from tests.wire.fake_syncer import RUN, report_info

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.wire.conftest import Wired


def test_delays_grow_to_the_cap_and_start_anew_after_reset() -> None:
    backoff = Backoff(base_s=0.5, cap_s=4.0)
    assert [backoff.next_s(0.0) for _ in range(5)] == [0.25, 0.5, 1.0, 2.0, 2.0]
    backoff.reset()
    assert backoff.next_s(0.0) == 0.25


def test_jitter_spreads_over_the_upper_half() -> None:
    seed = 5
    chance = random.Random(seed)
    delays = [Backoff(base_s=1.0, cap_s=1.0).next_s(chance.random()) for _ in range(1000)]
    assert 0.5 <= min(delays) < 0.52, f"seed {seed}"
    assert 0.98 < max(delays) < 1.0, f"seed {seed}"


def test_pushback_is_respected_and_failures_never_overflow() -> None:
    backoff = Backoff(base_s=0.2, cap_s=5.0, failures=100_000)
    assert backoff.next_s(0.999) <= 5.0
    assert backoff.next_s(0.0, at_least_s=9.0) == 9.0


def test_what_the_other_end_asks_for_is_kept_and_spread() -> None:
    """It asks all whom it refuses for the same: without chance they would all come back at one instant."""
    delays = [Backoff(0.2, 3.0).next_s(chance / 10, at_least_s=4.0) for chance in range(10)]
    assert min(delays) == 4.0
    assert len(set(delays)) == 10
    assert max(delays) < 6.0


# --- A call that sends nothing costs its caller's own room and nobody else's, whatever the method is -----------------

WAIT_S = 20.0
HEALTH = "grpc.health.v1.Health"
REFLECTION = "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
METHODS = [
    *(f"/{SYNC_SERVICE}/{name}" for name in ("Join", "Report", "Leave", "Push", "Watch", "Pull")),
    *(f"/{ADMIN_SERVICE}/{name}" for name in ("Status", "Drain", "Evict", "Snapshot")),
    *(f"/{HEALTH}/{name}" for name in ("Check", "List", "Watch")),
    f"/{REFLECTION}",
]


class Silent:
    """Calls that were opened and say nothing."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._over = threading.Event()
        self._channels: list[Any] = []
        self.calls: list[Any] = []

    def open(self, method: str, count: int, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        for _ in range(count):
            if len(self.calls) % 8 == 0:  # Under the limit of streams in one connection.
                private = [("grpc.use_local_subchannel_pool", 1)]
                self._channels.append(grpc.insecure_channel(self._address, private))
            call = self._channels[-1].stream_stream(method)(self._nothing(), timeout=120, metadata=metadata)
            self.calls.append(call)

    def _nothing(self) -> Iterator[bytes]:
        self._over.wait()
        return
        yield b""

    def close(self) -> None:
        self._over.set()
        for channel in self._channels:
            channel.close()


@pytest.fixture
def silent() -> Iterator[Callable[[str], Silent]]:
    opened: list[Silent] = []
    yield lambda address: opened.append(Silent(address)) or opened[-1]  # type: ignore[func-returns-value]
    for each in opened:
        each.close()


@pytest.mark.parametrize("method", METHODS)
def test_a_call_without_its_message_is_ended(
    start: Callable[..., Wired], silent: Callable[[str], Silent], method: str
) -> None:
    wired = start(header_timeout_s=0.3, stall_s=0.3)
    calls = silent(wired.server.address)
    began_s = time.monotonic()
    calls.open(method, 1)
    with pytest.raises(grpc.RpcError) as caught:
        list(calls.calls[0])
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    assert time.monotonic() - began_s < WAIT_S
    assert wired.syncer.calls == []
    while not wired.server.counters():  # The status reaches us before the call is counted there.
        assert time.monotonic() - began_s < WAIT_S
        time.sleep(0.01)
    assert sum(wired.server.counters().values()) == 1


@pytest.mark.parametrize(
    "method", sooner([f"/{SYNC_SERVICE}/Join", f"/{HEALTH}/Check", f"/{REFLECTION}"], f"/{SYNC_SERVICE}/Join")
)
def test_silent_calls_leave_room_for_those_that_speak(
    start: Callable[..., Wired], silent: Callable[[str], Silent], method: str
) -> None:
    wired = start(sites_max=1)
    threads = ServerOptions(run_id=RUN, sites_max=1).calls_max
    calls = silent(wired.server.address)
    calls.open(method, 2 * threads)
    until_s = time.monotonic() + WAIT_S
    while sum(call.done() for call in calls.calls) < threads:  # Those for whom there is no room are sent away.
        assert time.monotonic() < until_s
        time.sleep(0.02)
    codes = {call.code() for call in calls.calls if call.done()}
    assert codes <= {grpc.StatusCode.CANCELLED, grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert wired.client().report(report_info()).known


@pytest.mark.parametrize(
    ("method", "raw"),
    [
        (f"/{HEALTH}/Check", b""),
        (f"/{HEALTH}/List", b""),
        (f"/{SYNC_SERVICE}/Report", pack_report(report_info())),
        (f"/{ADMIN_SERVICE}/Status", b""),
    ],
)
def test_callers_that_take_no_answer_leave_room_for_those_that_do(
    start: Callable[..., Wired], method: str, raw: bytes
) -> None:
    wired = start(sites_max=1)
    calls_max = ServerOptions(run_id=RUN, sites_max=1).calls_max
    with contextlib.ExitStack() as opened:
        for _ in range(calls_max // 8):
            rude = opened.enter_context(http2.hello(wired.server.address, http2.TAKES_NOTHING))
            for stream in range(1, 16, 2):  # Under the limit of streams in one connection.
                rude.sendall(http2.frame(http2.HEADERS, http2.END_HEADERS, stream, http2.headers(method)))
                rude.sendall(http2.frame(http2.DATA, http2.END_STREAM, stream, http2.message(raw)))
        time.sleep(0.5)  # All of them have come in; nothing of theirs is waited for.
        assert wired.client().report(report_info()).known


def test_an_ended_call_says_nothing_and_is_the_callers_fault(wired: Wired) -> None:
    call = wired.channel().stream_unary(f"/{SYNC_SERVICE}/Report")
    with pytest.raises(grpc.RpcError) as caught:
        call(iter(()), timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "before its message" in caught.value.details()


def test_streams_of_the_standard_services_are_bounded(wired: Wired) -> None:
    stubs = [
        health_pb2_grpc.HealthStub(grpc.insecure_channel(wired.server.address, [("grpc.use_local_subchannel_pool", 1)]))
        for _ in range(STANDARD_STREAMS_MAX + 1)
    ]
    with contextlib.ExitStack() as ended:
        for number, stub in enumerate(stubs):
            stream = stub.Watch(health_pb2.HealthCheckRequest(service=""), timeout=WAIT_S)
            ended.callback(stream.cancel)
            if number < STANDARD_STREAMS_MAX:
                next(stream)
        with pytest.raises(grpc.RpcError) as caught:
            next(stream)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_name_that_nobody_serves_is_not_watched(wired: Wired) -> None:
    stub = health_pb2_grpc.HealthStub(wired.channel())
    with pytest.raises(grpc.RpcError) as caught:
        next(stub.Watch(health_pb2.HealthCheckRequest(service="other"), timeout=WAIT_S))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


TOKEN = "token-of-site-a-1"


def test_a_token_is_that_of_its_file_now(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o600)
    line = Line("127.0.0.1:1", SecurityOptions(token_file=str(file)), [], SYNC_SERVICE)
    assert line.metadata() == (("authorization", f"Bearer {TOKEN}"),)
    file.write_text("next-token-of-site-a")
    assert line.metadata() == (("authorization", "Bearer next-token-of-site-a"),)
    file.write_text("two words")
    assert line.metadata() == (("authorization", "Bearer next-token-of-site-a"),)
    line.close()
    assert Line("127.0.0.1:1", SecurityOptions(), [], SYNC_SERVICE).metadata() == ()


def test_a_token_in_a_file_does_not_travel_unencrypted_either(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    with pytest.raises(ValueError, match="unencrypted"):
        Line("example.org:7000", SecurityOptions(token_file=str(file)), [], SYNC_SERVICE)


def test_a_channel_is_made_anew_only_when_the_files_have_changed(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.site("site/a")
    line = Line("127.0.0.1:1", SecurityOptions(tls_ca=authority.ca, tls_cert=cert, tls_key=key), [], SYNC_SERVICE)
    first = line.channel
    line.lost()
    assert line.channel is first
    authority.site("site/a")
    line.lost()
    assert line.channel is not first
    (tmp_path / "authority.pem").write_text("nothing")
    second = line.channel
    line.lost()
    assert line.channel is second, "what cannot be used changes nothing"
    line.close()
    line.lost()


def test_a_channel_ends_when_another_one_takes_its_place(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.site("site/a")
    line = Line("127.0.0.1:1", SecurityOptions(tls_ca=authority.ca, tls_cert=cert, tls_key=key), [], SYNC_SERVICE)
    channels = [line.channel]
    authority.site("site/a")
    for change in (line.lost, line.renew, lambda: line.lead_to("127.0.0.1:2")):
        change()
        channels.append(line.channel)
    line.close()
    assert len({id(channel) for channel in channels}) == 4
    for channel in channels:
        with pytest.raises(ValueError, match="closed"):
            channel.unary_unary("/any")(b"", timeout=1.0)


def test_files_that_cannot_work_are_refused_in_words(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.site("site/a")
    (tmp_path / "empty").touch(mode=0o600)
    empty = str(tmp_path / "empty")
    for options, words in (
        (SecurityOptions(tls_ca=empty), "tls_ca .*empty holds no certificate"),
        (SecurityOptions(tls_ca=authority.ca, tls_cert=cert, tls_key=empty), "no certificate and its key"),
        (SecurityOptions(tls_ca=authority.ca, tls_cert=cert, tls_key=cert), "chmod 600"),
        (SecurityOptions(token_file=empty), "token_file .* is empty"),
    ):
        with pytest.raises(ValueError, match=words):
            Line("127.0.0.1:1", options, [], SYNC_SERVICE)
    assert key


def test_a_line_leads_to_one_address_at_a_time(tmp_path: Path) -> None:
    line = Line("127.0.0.1:1", SecurityOptions(token="token-of-site-a-1"), [], SYNC_SERVICE)
    first = line.channel
    line.lead_to("127.0.0.1:1")
    assert line.channel is first
    line.lead_to("127.0.0.1:2")
    assert line.channel is not first
    with pytest.raises(ValueError, match="unencrypted"):
        line.lead_to("example.org:7000")
    line.close()
    line.lead_to("127.0.0.1:1")


@pytest.mark.parametrize("address", ["127.0.0.1:65536", "127.0.0.1:99999", "127.0.0.1:0", "[::1]:70000"])
def test_a_port_that_is_none_is_not_taken_modulo_what_there_is(address: str) -> None:
    with pytest.raises(ValueError, match="a port of 1 to 65535"):
        Line(address, SecurityOptions(), [], SYNC_SERVICE)
    with pytest.raises(ValueError, match="a port of 1 to 65535"):
        split_addresses(address)


def test_addresses_are_host_and_port() -> None:
    assert split_addresses("127.0.0.1:65535,127.0.0.1:1") == ("127.0.0.1:65535", "127.0.0.1:1")
    assert split_addresses("fra.example:7077, [::1]:7078,unix:/run/x") == (
        "fra.example:7077",
        "[::1]:7078",
        "unix:/run/x",
    )


GUARD = Guard(StallWatch("never started"), 1.0)


def test_bulk_gets_what_control_leaves() -> None:
    assert bulk_bytes_per_s(0.0) == 0
    assert bulk_bytes_per_s(80.0) == int(1e7 * (1 - CONTROL_SHARE))


def test_no_bound_holds_nothing_back() -> None:
    pacer = Pacer(0)
    began_s = time.monotonic()
    for _ in range(1000):
        pacer.wait(MIB, GUARD)
    assert time.monotonic() - began_s < 10.0
    assert pacer.chunk_bytes(MIB) == MIB


def test_many_threads_together_keep_to_the_rate() -> None:
    pacer = Pacer(2_000_000)
    began_s = time.monotonic()
    threads = [threading.Thread(target=lambda: [pacer.wait(50_000, GUARD) for _ in range(5)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    # A million bytes, of which the first burst is free.
    assert 0.4 < time.monotonic() - began_s < 5.0


def test_chunks_are_short_where_the_rate_is_low() -> None:
    assert Pacer(100_000).chunk_bytes(MIB) == CHUNK_BYTES_MIN
    assert CHUNK_BYTES_MIN < Pacer(10_000_000).chunk_bytes(MIB) < MIB
    assert Pacer(1_000_000_000).chunk_bytes(MIB) == MIB


def test_who_waits_is_not_taken_for_stuck_and_goes_on_when_it_ends() -> None:
    class Touched:
        count = 0

        def touch(self) -> None:
            self.count += 1

    touched, pacer = Touched(), Pacer(1000)
    pacer.wait(2000, touched)  # type: ignore[arg-type]
    thread = threading.Thread(target=pacer.wait, args=(1000, touched))
    thread.start()
    thread.join(1.2)
    assert thread.is_alive()
    assert touched.count >= 1
    pacer.close()
    thread.join(10)
    assert not thread.is_alive()


def test_a_full_bucket_passes_a_burst_and_then_its_rate() -> None:
    rates = Rates(burst_s=2.0)
    assert [rates.take("a", 1.0, 5.0, 100.0) for _ in range(10)] == [0.0] * 10
    wait_s = rates.take("a", 1.0, 5.0, 100.0)
    assert wait_s == pytest.approx(0.2, abs=0.01)
    passed = sum(rates.take("a", 1.0, 5.0, 100.0 + tick / 100) == 0.0 for tick in range(1, 1001))
    assert 49 <= passed <= 51, "ten seconds at five a second"


def test_what_is_larger_than_the_bucket_passes_and_its_debt_is_paid_off_first() -> None:
    rates = Rates(burst_s=1.0)
    assert rates.take("a", 1000.0, 10.0, 0.0) == 0.0
    assert rates.take("a", 1.0, 10.0, 0.0) == pytest.approx(99.1, abs=0.01)
    assert rates.take("a", 1.0, 10.0, 99.0) > 0
    assert rates.take("a", 1.0, 10.0, 99.2) == 0.0


def test_asking_costs_nothing_and_a_charge_is_always_taken() -> None:
    rates = Rates(burst_s=1.0)
    assert [rates.take("a", 0.0, 10.0, 0.0) for _ in range(5)] == [0.0] * 5
    for _ in range(3):
        rates.take("a", 10.0, 10.0, 0.0, math.inf)
    assert rates.take("a", 0.0, 10.0, 0.0) == pytest.approx(2.0, abs=0.01)
    assert rates.take("b", 0.0, 10.0, 0.0) == 0.0


def test_a_rate_below_one_passes_one_and_no_second_counts_twice() -> None:
    rates = Rates(burst_s=1.0)
    assert rates.take("a", 2.0, 0.1, 50.0) == 0.0
    assert rates.take("a", 1.0, 0.1, 40.0) == pytest.approx(20.0, abs=0.1)
    assert rates.take("a", 1.0, 0.1, 69.9) > 0
    assert rates.take("a", 1.0, 0.1, 70.1) == 0.0


def test_callers_are_remembered_up_to_a_bound() -> None:
    rates = Rates(burst_s=1.0, callers_max=3)
    for number in range(100):
        rates.take(f"caller {number}", 100.0, 1.0, 0.0)
    assert rates.take("caller 99", 1.0, 1.0, 0.0) > 0
    assert rates.take("caller 0", 1.0, 1.0, 0.0) == 0.0
    assert len(rates._buckets) == 3


def test_what_is_reserved_comes_due_one_after_the_other_up_to_a_bound() -> None:
    rates = Rates(burst_s=1.0)
    waits = [rates.take("a", 1.0, 2.0, 7.0, 1.0) for _ in range(6)]
    assert waits[:4] == [0.0, 0.0, pytest.approx(0.5), pytest.approx(1.0)]
    assert waits[4:] == [pytest.approx(1.5)] * 2
    assert rates.take("a", 1.0, 2.0, 7.5, 1.0) == pytest.approx(1.0), "what was not taken is not owed"


@pytest.fixture
def stalls() -> Iterator[StallWatch]:
    watch = StallWatch("test")
    yield watch
    watch.close()


def test_a_stream_that_does_not_move_is_cancelled_once(stalls: StallWatch) -> None:
    cancelled: list[float] = []
    done = threading.Event()

    def cancel() -> None:
        cancelled.append(time.monotonic())
        done.set()

    begun_s = time.monotonic()
    with Guard(stalls, 0.3, cancel) as guard:
        assert done.wait(5)
        time.sleep(0.6)
        assert guard.stalled
    assert len(cancelled) == 1
    assert cancelled[0] - begun_s >= 0.3


def test_one_that_moves_is_left_alone(stalls: StallWatch) -> None:
    cancelled = threading.Event()
    with Guard(stalls, 1.0, cancelled.set) as guard:
        for _ in range(15):
            time.sleep(0.1)
            guard.touch()
    assert not cancelled.is_set()
    assert not guard.stalled


def test_no_limit_while_this_end_works_itself(stalls: StallWatch) -> None:
    cancelled = threading.Event()
    with Guard(stalls, 0.1) as guard:
        guard.limit(None)
        guard.cancel = cancelled.set
        assert not cancelled.wait(0.8)
        guard.limit(0.1)
        assert cancelled.wait(5)


def test_nothing_is_cancelled_after_the_guard_was_left(stalls: StallWatch) -> None:
    cancelled = threading.Event()
    with Guard(stalls, 0.2, cancelled.set):
        pass
    assert not cancelled.wait(0.8)


def test_close_ends_the_thread_and_needs_none() -> None:
    StallWatch("unused").close()
    watch = StallWatch("used")
    with Guard(watch, 9.0):
        pass
    watch.close()
    assert "used" not in {thread.name for thread in threading.enumerate()}


SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("name", ["", SYNC_SERVICE, ADMIN_SERVICE, RUN])
def test_health_answers_for_the_server_its_services_and_its_run(wired: Wired, name: str) -> None:
    stub = health_pb2_grpc.HealthStub(wired.channel())
    assert stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10).status == SERVING


def test_health_lists_every_name(wired: Wired) -> None:
    found = health_pb2_grpc.HealthStub(wired.channel()).List(health_pb2.HealthListRequest(), timeout=10).statuses
    assert {name: answer.status for name, answer in found.items()} == dict.fromkeys(
        ("", SYNC_SERVICE, ADMIN_SERVICE, RUN), SERVING
    )


def test_health_knows_no_other_run(wired: Wired) -> None:
    stub = health_pb2_grpc.HealthStub(wired.channel())
    with pytest.raises(grpc.RpcError) as caught:
        stub.Check(health_pb2.HealthCheckRequest(service="run-2"), timeout=10)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_health_says_when_the_syncer_stops(start: Callable[..., Wired]) -> None:
    wired = start()
    stub = health_pb2_grpc.HealthStub(wired.channel())
    seen = []
    stream = stub.Watch(health_pb2.HealthCheckRequest(service=RUN), timeout=20)
    seen.append(next(stream).status)
    wired.server.stop(1.0)
    with pytest.raises(grpc.RpcError):
        seen.extend(answer.status for answer in stream)
    assert seen == [SERVING, health_pb2.HealthCheckResponse.NOT_SERVING]


def test_reflection_lists_our_services(wired: Wired) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(wired.channel())
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = stub.ServerReflectionInfo(iter([ask]), timeout=10)
    names = {service.name for service in answer.list_services_response.service}
    assert {SYNC_SERVICE, ADMIN_SERVICE, "grpc.health.v1.Health"} <= names
    ask = reflection_pb2.ServerReflectionRequest(file_containing_symbol=SYNC_SERVICE)
    (answer,) = stub.ServerReflectionInfo(iter([ask]), timeout=10)
    assert b"PushHeader" in answer.file_descriptor_response.file_descriptor_proto[0]


def test_noise_at_the_standard_services_is_the_senders_fault(wired: Wired) -> None:
    channel = wired.channel()
    calls = [
        lambda: channel.unary_unary("/grpc.health.v1.Health/Check")(b"\xff", timeout=10),
        lambda: list(channel.unary_stream("/grpc.health.v1.Health/Watch")(b"\xff", timeout=10)),
        lambda: list(
            channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")(
                iter([b"\xff"]), timeout=10
            )
        ),
    ]
    for call in calls:
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
