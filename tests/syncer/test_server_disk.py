"""A disk that is really full: acknowledgements stop, the process does not, and it heals when there is room."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from diloco.sync.events import Outcome
from diloco.syncer import server as server_module
from diloco.syncer.server import Syncer
from diloco.syncer.store import verify
from diloco.wire.messages import Refusal, Status
from tests.syncer.building import RUN, Events, eventually, join, new_syncer, push, serving, update
from tests.syncer.test_server import merged

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = os.geteuid() == 0 and (
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=False).returncode == 0
    )
    if not mounted:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(ballast: Path) -> None:
    """Take what room there is, to the last byte."""
    with ballast.open("ab", buffering=0) as file:
        for size in (65536, 4096, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue


def health(address: str) -> int:
    with grpc.insecure_channel(address) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=RUN), timeout=10)
        return int(answer.status)


def join_until_refused(syncer: Syncer) -> tuple[int, Refusal]:
    """Sites join until the journal has no room: the last ones of its page still fit."""
    for number in range(200):
        try:
            join(syncer, f"more-{number}")
        except Refusal as refusal:
            return number, refusal
    raise AssertionError("200 sites joined on a full disk")


def test_a_full_disk_stops_acknowledgements_and_not_the_process_and_heals(small_disk: Path) -> None:
    events, ballast = Events(), small_disk / "ballast"
    with serving(small_disk / "run", events, disk_reserve_mb=0, snapshot_every=1000) as syncer:
        assert syncer._server is not None
        address = syncer._server.address
        join(syncer)
        merged(syncer, 3)
        assert health(address) == SERVING
        fill(ballast)
        joined, refusal = join_until_refused(syncer)
        assert (refusal.status, refusal.text) == (Status.UNAVAILABLE, "disk full: No space left on device")
        status = syncer.api.status()
        assert status["wanting"] == "disk full: No space left on device"
        assert health(address) == NOT_SERVING
        with pytest.raises(Refusal, match="disk full") as raised:
            push(syncer, *update(sequence=4, base_version=3))
        assert raised.value.status is Status.UNAVAILABLE
        with pytest.raises(Refusal, match="disk full"):
            syncer.api.snapshot()
        assert syncer.drain() is False, "it can be asked again"
        (note,) = [each for each in events.of("note") if each["note"] == "disk_full"]
        assert note["why"] == "disk full: No space left on device"
        ballast.unlink()
        eventually(lambda: syncer.core.held is None, "the loop goes on")
        eventually(lambda: health(address) == SERVING, "it says so")
        assert [each["note"] for each in events.of("note") if "disk" in each["note"]] == ["disk_full", "disk_has_room"]
        result = push(syncer, *update(sequence=4, base_version=3))
        assert result.outcome is Outcome.ACCEPTED
        eventually(lambda: syncer.holdings.values[0].version == 4, "it is merged")
        state = syncer.core.ask(lambda machine: machine.snapshot())
        assert isinstance(state, dict)
        assert len(state["sites"]) >= joined + 1
        digest = syncer.holdings.values[0].digest
    assert verify(small_disk / "run").torn_bytes == 0
    with serving(small_disk / "run", disk_reserve_mb=0) as again:
        assert again.holdings.values[0].digest == digest
        known = again.core.ask(lambda machine: set(machine.state.sites))
        assert known == set(state["sites"])


def test_a_payload_that_finds_no_room_is_refused_and_comes_again(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    with serving(small_disk / "run", disk_reserve_mb=0) as syncer:
        join(syncer)
        fill(ballast)
        with pytest.raises(Refusal, match="disk full: No space left on device") as raised:
            push(syncer, *update())
        assert raised.value.status is Status.UNAVAILABLE
        ballast.unlink()
        assert push(syncer, *update()).outcome is Outcome.ACCEPTED
        assert syncer.failed is None


def test_below_the_reserve_nothing_is_taken_in_before_its_first_byte(tmp_path: Path) -> None:
    events = Events()
    with serving(tmp_path, events) as syncer:
        join(syncer)
        syncer.room._reserve_bytes = 1 << 60
        with pytest.raises(Refusal, match="MB in reserve are wanted") as raised:
            push(syncer, *update())
        assert raised.value.status is Status.UNAVAILABLE
        assert list((tmp_path / "spool" / ".partial").iterdir()) == []
        events.wait_for("note")
        assert syncer._server is not None
        eventually(lambda: health(str(syncer._server and syncer._server.address)) == NOT_SERVING, "it says so")
        join(syncer, "b")
        syncer.room._reserve_bytes = 64_000_000
        eventually(lambda: health(str(syncer._server and syncer._server.address)) == SERVING, "it says so")
        assert push(syncer, *update()).outcome is Outcome.ACCEPTED


def test_a_start_on_a_full_disk_ends_in_words_and_goes_on_when_there_is_room(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "START_WAIT_S", 0.5)
    ballast, folder = small_disk / "ballast", small_disk / "run"
    with serving(folder, disk_reserve_mb=0) as syncer:
        join(syncer)
        merged(syncer, 2)
    for path in (folder / "journal").glob("journal-*.log"):
        assert path.stat().st_size > 0
    fill(ballast)
    for _ in range(40):  # What is left of the journal's last page may do for some starts.
        again = new_syncer(folder, Events().emit, disk_reserve_mb=0)
        try:
            again.start()
        except OSError as error:
            full = error
            break
        again.stop(0.1)
    assert full.errno == errno.ENOSPC, full
    ballast.unlink()
    with serving(folder, disk_reserve_mb=0) as healed:
        assert healed.holdings.values[0].version == 2
