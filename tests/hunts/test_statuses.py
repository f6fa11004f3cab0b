"""Every row of the table of bad input, tried at a real syncer; the test's id is the row's name."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import socket
import ssl
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from diloco.wire import convert
from diloco.wire.channel import PUSHBACK_KEY
from diloco.wire.convert import pack_push
from diloco.wire.messages import MemberAsk
from tests.hunts import flooding, statuses
from tests.hunts.asking import ADMIN, HEALTH, SYNC, Access, Call, due, good, pushed
from tests.hunts.attacks import strict
from tests.hunts.crowd import memory_of, reset_peak
from tests.hunts.flooding import FLOODS, KINDS, Due, Flood, flood
from tests.hunts.fuzz import Siege
from tests.hunts.hostile import FLOOD_BYTES_MAX, ORDER
from tests.hunts.target import Target, _kept, guarded, running
from tests.loopback.toy import RUN, Toy
from tests.sooner import sooner

SITES = ["site-a", "site-b", "site-c"]
BOUND_S = 30.0
ELSEWHERE = {statuses.TLS_FAILS, statuses.AWAY, statuses.DISK_FULL, statuses.OVERLOAD}
"""Rows that have a test of their own below; no input is drawn for them."""


def besieged(variant: str, folder: Path) -> Iterator[Siege]:
    fortress, shown = guarded(variant, folder, SITES)
    with running(fortress) as target:
        siege = Siege(target, fortress, shown, SITES, seed=5)
        before = siege.quiet()
        yield siege
        if target.process.is_alive():
            assert siege.quiet(before).state == before.state, "a refused message has changed the run"
        siege.close()


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Siege]:
    yield from besieged("tokens", tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def mtls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Siege]:
    yield from besieged("mtls", tmp_path_factory.mktemp("mtls"))


@pytest.mark.parametrize("row", sorted(set(statuses.ROWS) - ELSEWHERE))
def test_bad_input_has_the_status_of_its_row(tokens: Siege, row: str) -> None:
    worker, count = tokens.workers[0], 1 if row == statuses.TOO_LARGE else 5
    drawn = strict(worker.world, random.Random(row))
    calls = itertools.islice((call for call in drawn if call.row == row and worker.access.can_show(call.who)), count)
    for call in calls:
        answer, details = worker.access.make(call)
        wrong = statuses.complaint(f"{row} at {call.path}", due(call, worker.access), answer, details)
        assert wrong is None, wrong


def test_a_stranger_to_tls_reaches_no_handler(mtls: Siege) -> None:
    """Without a client certificate, with one of another authority, and in plaintext."""
    access, before = mtls.workers[0].access, mtls.target.look()
    for path, (_, raw) in good(mtls.workers[0].world, random.Random(1)).items():
        for who in ("nobody", "unknown"):
            assert access.make(Call(statuses.TLS_FAILS, path, [raw], who))[0] == "UNAVAILABLE", (path, who)
    with grpc.insecure_channel(mtls.target.address) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"{ADMIN}Status")(b"", timeout=BOUND_S)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    after = mtls.target.look()
    assert (after.counters, after.decoded, after.state) == (before.counters, before.decoded, before.state)


@pytest.mark.parametrize(("version", "refused"), [("TLSv1_1", 0), ("TLSv1_2", 1), ("TLSv1_3", 0)])
def test_tls_older_than_1_3_is_unauthenticated_or_no_connection_at_all(mtls: Siege, version: str, refused: int) -> None:
    counted = mtls.target.look().counters.get("refused_unauthenticated", 0)
    connection = tls(mtls, getattr(ssl.TLSVersion, version))
    if connection is None:
        assert version == "TLSv1_1", "a version older than 1.2 gets no handshake"
    else:
        with connection:
            assert connection.version() == version.replace("_", ".")
            connection.sendall(flooding.PREFACE + flooding.frame(flooding.SETTINGS, 0, 0, b""))
            connection.sendall(flooding.asking(f"{ADMIN}Status", body=b""))
            assert flooding.heard(connection, 1, BOUND_S) == flooding.DATA
    assert mtls.target.look().counters.get("refused_unauthenticated", 0) == counted + refused


def tls(siege: Siege, version: ssl.TLSVersion) -> ssl.SSLSocket | None:
    """Return an admin's connection that speaks only this version of TLS; None where that is impossible."""
    shown: dict[str, Any] = siege.workers[0].access.shown
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(shown["ca"])
    context.load_cert_chain(*shown["admin"]["certificate"])
    context.set_alpn_protocols(["h2"])
    context.set_ciphers("ALL:@SECLEVEL=0")
    if version is ssl.TLSVersion.TLSv1_1:
        context.options &= ~ssl.OP_NO_TLSv1_1
    context.maximum_version = ssl.TLSVersion.TLSv1_3
    try:
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # Warns of old versions.
            context.minimum_version = version
            context.maximum_version = version
        return context.wrap_socket(flooding.dial(siege.target.address, BOUND_S), server_hostname="localhost")
    except OSError:
        return None


def test_overload_is_resource_exhausted_with_a_time_to_come_back(tokens: Siege) -> None:
    worker, over = tokens.workers[1], threading.Event()
    worker.stand()
    channel, metadata = worker.access.channel(worker.world.site), worker.access.metadata(worker.world.site)
    headers = [worker.world.update(random.Random(3), fragment=number)[0] for number in (0, 1)]

    def held(raw: bytes) -> Iterator[bytes]:
        yield raw
        over.wait()

    options: dict[str, Any] = {"metadata": metadata, "timeout": BOUND_S}
    streams = [channel.stream_stream(f"{SYNC}Push")(held(pack_push(header)), **options) for header in headers]
    try:
        for stream in streams:
            next(stream)  # Both are admitted, which is the limit of one site.
        header, payload = worker.world.update(random.Random(4), sequence=headers[0].sequence + 1, fragment=0)
        with pytest.raises(grpc.RpcError) as caught:
            list(channel.stream_stream(f"{SYNC}Push")(iter(pushed(header, payload)), **options))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert int(dict(caught.value.trailing_metadata())[PUSHBACK_KEY]) > 0
    finally:
        over.set()
        for stream in streams:
            stream.cancel()


def test_a_syncer_that_stops_is_unavailable(tmp_path: Path) -> None:
    for siege in besieged("tokens", tmp_path):
        worker = siege.workers[0]
        ask = convert.pack_member(MemberAsk(RUN, worker.world.site, worker.world.incarnation))
        options: dict[str, Any] = {"metadata": worker.access.metadata(worker.world.site), "timeout": BOUND_S}
        stream = worker.access.channel(worker.world.site).unary_stream(f"{SYNC}Watch")(ask, **options)
        next(stream)
        siege.target.stop()
        with pytest.raises(grpc.RpcError) as caught:
            list(stream)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert worker.access.make(Call(statuses.AWAY, f"{SYNC}Watch", [ask], worker.world.site))[0] == "UNAVAILABLE"


def test_a_full_disk_is_unavailable_and_changes_nothing_and_heals(tmp_path: Path) -> None:
    for siege in besieged("tokens", tmp_path):
        worker, full = siege.workers[0], tmp_path / "full"
        header, payload = worker.world.update(random.Random(6))
        push = Call(statuses.DISK_FULL, f"{SYNC}Push", pushed(header, payload), worker.world.site)
        joining = siege.workers[1].world
        ask = convert.pack_join(joining.join(process="00000000000abcde", ticket=joining.incarnation + 1))
        join = Call(statuses.DISK_FULL, f"{SYNC}Join", [ask], joining.site)
        snapshot = Call(statuses.DISK_FULL, f"{ADMIN}Snapshot", [b""], "admin")
        before = siege.quiet()
        full.touch()
        said = ("UNAVAILABLE", "disk full: No space left on device")
        assert worker.access.make(push) == said, "there is no room for its payload"
        assert siege.quiet().state == before.state
        for call in (join, push, snapshot):
            assert worker.access.make(call) == said, call.path
        check = good(worker.world, random.Random(1))[f"{HEALTH}Check"][1]
        assert serving(worker.access, check) is False
        full.unlink()
        until_s = time.monotonic() + BOUND_S
        while not serving(worker.access, check):
            assert time.monotonic() < until_s, "there is room again, but it does not serve"
            time.sleep(0.1)
        assert worker.access.make(push)[0] == "accepted"
        siege.target.stop()


def serving(access: Access, check: bytes) -> bool:
    answer = access.channel("").unary_unary(f"{HEALTH}Check")(check, timeout=BOUND_S)
    return bool(health_pb2.HealthCheckResponse.FromString(answer).status == health_pb2.HealthCheckResponse.SERVING)


# --- Short floods of frames ------------------------------------------------------------------------------------------

SITE = "site-b"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    fortress, _ = guarded("tokens", tmp_path_factory.mktemp("floods"), [SITE])
    with running(fortress) as found:
        yield found


@pytest.mark.parametrize("name", sooner(FLOODS, "rapid_resets"))
def test_a_flood_of_frames_is_dealt_with_and_changes_nothing(target: Target, name: str) -> None:
    pieces, due = FLOODS[name]
    before = target.look()
    reset_peak(target.pid)
    found = flood(target.address, pieces(f"token-of-site-{SITE}-0123456789"), 0.5)
    assert ORDER.index(found.due) >= ORDER.index(due), found
    assert memory_of(target.pid)["VmHWM"] - before.rss_bytes < FLOOD_BYTES_MAX
    after = target.look()
    assert (after.state, after.counters.get("internal", 0)) == (before.state, 0)


@pytest.mark.parametrize(
    ("answer", "due"), [(b"", Due.ENDED), (flooding.frame(flooding.RST, 0, 1, bytes(4)), Due.REFUSED)]
)
def test_what_is_done_about_a_flood_is_seen(answer: bytes, due: Due) -> None:
    """The peer closes the connection at once, or sends a frame in two parts and continues to read."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            taken, _ = server.accept()
            with taken:
                for part in (answer[:5], answer[5:]):
                    taken.sendall(part)
                while answer and taken.recv(1 << 16):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        found = flood(f"127.0.0.1:{server.getsockname()[1]}", itertools.repeat(bytes(1000)), 0.3)
        thread.join(30)
    assert found.due is due


def test_a_folder_that_vanishes_while_the_target_is_looked_at_has_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The running syncer removes a snapshot between the listing of its parent folder and its own."""
    (tmp_path / "snapshots" / ".00000012.tmp").mkdir(parents=True)
    (tmp_path / "run.json").write_text("{}")
    scandir = os.scandir

    def vanishing(place: Any) -> Any:
        if str(place).endswith(".tmp"):
            shutil.rmtree(place)
        return scandir(place)

    monkeypatch.setattr(os, "scandir", vanishing)
    assert _kept(tmp_path) == [("run.json", 2)]


class Silent:
    """A channel on which every call gets an empty answer."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def stream_stream(self, path: str) -> Any:
        def call(messages: Iterator[bytes], **_: object) -> Iterator[bytes]:
            self.asked.append(path.rpartition("/")[2])
            assert all(isinstance(message, bytes) for message in messages)
            return iter(())

        return call


def test_every_kind_of_flood_asks_the_syncer_something() -> None:
    wanted = {"reports": "Report", "pulls": "Pull", "watches": "Watch", "status": "Status", "noise": "Push"}
    for kind in KINDS:
        channel = Silent()
        with contextlib.suppress(StopIteration, IndexError):
            getattr(Flood(Toy(folder="nowhere"), "token", channel), kind)()  # type: ignore[arg-type]
        assert channel.asked == [wanted.get(kind, "Join")], kind  # A push joins first.
