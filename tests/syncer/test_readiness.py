"""What a probe is told: ready only while updates are taken in, and alive all the while."""

from __future__ import annotations

from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from diloco.syncer.core import Readiness, Unready, Want
from diloco.wire.channel import SYNC_SERVICE
from tests.syncer.building import NO_WAIT, RUN, Events, eventually, join, new_syncer, serving

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def test_it_is_ready_only_when_no_reason_is_left() -> None:
    readiness, told = Readiness(), list[bool]()
    readiness.told_to(told.append)
    assert readiness.reasons() == ["starting"]
    readiness.begins(Unready.DISK_FULL)
    readiness.ends(Unready.STARTING)
    readiness.begins(Unready.DRAINING)
    assert readiness.reasons() == ["draining", "disk_full"]
    readiness.ends(Unready.DISK_FULL)
    readiness.ends(Unready.DISK_FULL)
    readiness.ends(Unready.DRAINING)
    assert readiness.reasons() == []
    assert told == [False, False, False, False, False, False, True]


def probe(address: str, name: str) -> int:
    with grpc.insecure_channel(address) as channel:
        status: int = (
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name), timeout=20).status
        )
        return status


def test_a_full_disk_and_a_drain_are_told_by_the_run_s_name_and_the_server_lives(tmp_path: Path) -> None:
    with serving(tmp_path, outer={**NO_WAIT, "quorum": 2, "quorum_min": 2}) as syncer:
        assert syncer._server is not None
        address = syncer._server.address
        assert [probe(address, name) for name in ("", SYNC_SERVICE, RUN)] == [SERVING] * 3
        syncer._room_changed(Want(Unready.DISK_FULL, "2 MB are left"))
        assert [probe(address, name) for name in ("", SYNC_SERVICE, RUN)] == [SERVING, NOT_SERVING, NOT_SERVING]
        assert syncer.api.status()["not_ready"] == ["disk_full"]
        syncer._room_changed(None)
        assert probe(address, RUN) == SERVING
        join(syncer)
        syncer.drain()
        eventually(lambda: probe(address, RUN) == NOT_SERVING, "a run that drains")
        assert probe(address, "") == SERVING
        assert syncer.api.status()["not_ready"] == ["draining"]


def test_the_past_goes_for_a_full_disk_alone_and_one_reason_takes_another_s_place(tmp_path: Path) -> None:
    with serving(tmp_path) as syncer:
        let_go = list[list[str]]()
        syncer.store.let_go_of_the_past = lambda: let_go.append(syncer.readiness.reasons())  # type: ignore[method-assign]
        for kind in (Unready.STANDBY_AWAY, Unready.LEASE_LOST, Unready.DISK_FULL, Unready.STANDBY_AWAY):
            syncer._room_changed(Want(kind, "words that nobody looks into"))
            assert syncer.readiness.reasons() == [kind.value]
        syncer._room_changed(None)
        assert syncer.readiness.reasons() == []
        assert let_go == [["disk_full"]]


def test_a_run_that_drained_is_ready_when_it_goes_on(tmp_path: Path) -> None:
    with serving(tmp_path) as syncer:
        syncer.drain()
        eventually(lambda: syncer.wait(0.1), "the end of this part")
    with serving(tmp_path) as syncer:
        assert syncer.api.status()["not_ready"] == []


def test_what_happens_before_it_serves_is_not_forgotten(tmp_path: Path) -> None:
    syncer = new_syncer(tmp_path, Events().emit)
    syncer.readiness.begins(Unready.DISK_FULL)
    address = syncer.start()
    try:
        assert probe(address, RUN) == NOT_SERVING
        assert syncer.readiness.reasons() == ["disk_full"]
    finally:
        syncer.stop(0.1)
