"""Every row of the table of bad input, tried at a real syncer; the test's id is the row's name."""

from __future__ import annotations

import itertools
import random
import socket
import ssl
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import pytest

from tests.hunts import flood as calls
from tests.hunts import flooding, statuses
from tests.hunts.asking import ADMIN
from tests.hunts.attacks import strict
from tests.hunts.crowd import memory_of, reset_peak
from tests.hunts.flooding import FLOODS, Due, flood
from tests.hunts.fuzz import Siege
from tests.hunts.hostile import FLOOD_BYTES_MAX, ORDER
from tests.hunts.target import Target, guarded, running
from tests.runs.processes import wait_for
from tests.sooner import sooner

SITES = ["site-a", "site-b", "site-c"]
BOUND_S = 30.0
ELSEWHERE = {statuses.TLS_FAILS, statuses.AWAY, statuses.DISK_FULL, statuses.OVERLOAD}
"""Rows that are tried in tests/wire and tests/syncer; no input is drawn for them."""


@pytest.fixture(scope="module", params=["tokens"])
def siege(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Siege]:
    fortress, shown = guarded(request.param, tmp_path_factory.mktemp(request.param), SITES)
    with running(fortress) as target:
        found = Siege(target, fortress, shown, SITES, seed=5)
        before = found.quiet()
        yield found
        assert found.quiet(before).state == before.state, "a refused message has changed the run"
        found.close()


@pytest.mark.parametrize("row", sorted(set(statuses.ROWS) - ELSEWHERE))
def test_bad_input_has_the_status_of_its_row(siege: Siege, row: str) -> None:
    worker, count = siege.workers[0], 1 if row == statuses.TOO_LARGE else 5
    drawn = strict(worker.world, random.Random(row))
    found = worker.attack((call for call in drawn if call.row == row), count)
    assert (found.complaints, found.calls) == ([], count)


@pytest.mark.parametrize("siege", ["mtls"], indirect=True)
@pytest.mark.parametrize(("version", "refused"), [("TLSv1_1", 0), ("TLSv1_2", 1), ("TLSv1_3", 0)])
def test_tls_older_than_1_3_is_unauthenticated_or_no_connection(siege: Siege, version: str, refused: int) -> None:
    counted = siege.target.look().counters.get("refused_unauthenticated", 0)
    connection = tls(siege, getattr(ssl.TLSVersion, version))
    if connection is None:
        assert version == "TLSv1_1", "a version older than 1.2 gets no handshake"
    else:
        with connection:
            assert connection.version() == version.replace("_", ".")
            connection.sendall(flooding.PREFACE + flooding.frame(flooding.SETTINGS, 0, 0, b""))
            connection.sendall(flooding.asking(f"{ADMIN}Status", body=b""))
            assert flooding.heard(connection, 1, BOUND_S) == flooding.DATA
    assert siege.target.look().counters.get("refused_unauthenticated", 0) == counted + refused


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


@pytest.mark.slow
def test_the_hunt_has_rounds_of_both_periods_and_calls_of_every_kind(hunted: Callable[..., Any]) -> None:
    found, _ = hunted(calls, "--seconds", "5", "--turns", "1")
    assert min(found["rounds_quiet"], found["rounds_flooded"]) > 0
    assert {name.partition("_")[0] for name in found["calls"]} == {*calls.KINDS}


@pytest.fixture(scope="module")
def flooded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[calls.Run]:
    with ExitStack() as alive:
        yield calls.Run(tmp_path_factory.mktemp("calls"), 1, alive)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "answer"), calls.KINDS.items())
def test_every_kind_of_flood_reaches_the_syncer(flooded: calls.Run, kind: str, answer: str) -> None:
    """One call at a time: where all compete for the syncer and the CPU, some may not get this answer for long."""
    with grpc.insecure_channel(flooded.address) as channel:
        flood = calls.Flood(flooded.toy, channel)
        wait_for(lambda: f"{kind}_{answer}" in flood.attack(kind, until_s=0.0), f"{kind} to be answered")
