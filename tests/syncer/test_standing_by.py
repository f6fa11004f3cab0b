"""A standby on the network, from its first word to the syncer that takes its place at the same address."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from diloco.durable import LockedError, locked
from diloco.syncer.standby import StandbyError, StandingBy
from diloco.wire.client import AdminClient
from diloco.wire.messages import Refused
from diloco.wire.options import SecurityOptions
from tests.loopback.cluster import Log, SiteThread, eventually, free_port, serving
from tests.loopback.toy import Toy
from tests.syncer.test_standby import BOUND_S, STEP_S, a_toy


def standing_by(toy: Toy, primary: str, port: int) -> StandingBy:
    standby = toy.standby("standby", primary, Log().emit)
    return StandingBy(standby, primary, toy.network(port), SecurityOptions())


def test_it_says_how_it_stands_and_makes_room_for_the_syncer_at_its_address(tmp_path: Path) -> None:
    toy, port = a_toy(tmp_path), free_port()
    with serving(toy) as (_, first, _log):
        standing = standing_by(toy, first, port)
        address = standing.start()
        assert address == f"127.0.0.1:{port}"
        with AdminClient(address) as operator, grpc.insecure_channel(address) as channel:
            assert operator.status()["primary"] == first
            assert operator.status()["identity_complaints"] == []
            health = health_pb2_grpc.HealthStub(channel)
            answer = health.Check(health_pb2.HealthCheckRequest(service=toy.run_id))
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
            eventually(lambda: standing.standby.ready, BOUND_S, "it has a state")
            assert standing.wait(0.0) is None
            operator.promote(lossy=True)
        began = time.monotonic()
        warm = standing.wait(1.0)
        assert warm is not None
        promoted = toy.syncer(Log().emit, folder="standby", port=port)
        assert promoted.start(warm) == address
        assert time.monotonic() - began < 10.0, "two seconds on a machine that has nothing else to do"
        standing.stop()
        try:
            with SiteThread(toy, "a", f"{first},{address}", step_s=STEP_S) as site, AdminClient(address) as operator:
                site.log.wait_for("joined", 1, BOUND_S, where=lambda event: event["syncer"] == address)
                site.log.wait_for("adopted", 2, BOUND_S, where=lambda event: event["merged"])
                operator.drain()
                assert site.join(BOUND_S).ending == "drained"
        finally:
            promoted.stop()


def test_whoever_promotes_it_hears_that_it_was_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is on its way when the address is given up."""
    toy = a_toy(tmp_path)
    with serving(toy) as (_, first, _log):
        standing = standing_by(toy, first, 0)
        promote = standing.promote

        def answered_late(*, lossy: bool) -> None:
            promote(lossy=lossy)
            time.sleep(0.2)

        monkeypatch.setattr(standing, "promote", answered_late)
        with ThreadPoolExecutor(1) as operators, AdminClient(standing.start()) as operator:
            eventually(lambda: standing.standby.ready, BOUND_S, "it has a state")
            said = operators.submit(operator.promote, lossy=True)
            warm = standing.wait(BOUND_S)
            assert warm is not None
            warm.taken.close()
            said.result(BOUND_S)


def test_without_a_lease_it_is_not_promoted_beside_a_syncer_that_is_heard(tmp_path: Path) -> None:
    toy = a_toy(tmp_path)
    with ExitStack() as ending:
        _, first, _log = ending.enter_context(serving(toy))
        standing = standing_by(toy, first, 0)
        with AdminClient(standing.start()) as operator:
            eventually(lambda: standing.standby.ready, BOUND_S, "it has a state")
            with pytest.raises(Refused, match="still heard: stop that first"):
                operator.promote()
            assert standing.wait(0.0) is None
            ending.close()
            eventually(lambda: not standing.standby.connected, BOUND_S, "it has stopped")
            operator.promote()
        warm = standing.wait(BOUND_S)
        assert warm is not None
        with warm.taken:
            assert warm.machine.state.lineage == 1


@pytest.mark.parametrize("stale", ["async", "detached"])
def test_without_a_lease_one_that_may_lack_something_begins_a_new_lineage_or_nothing(
    tmp_path: Path, stale: str
) -> None:
    toy = a_toy(tmp_path, mode="async" if stale == "async" else "sync", snapshot_every=1000)
    with ExitStack() as ending:
        syncer, first, log = ending.enter_context(serving(toy))
        if stale == "detached":
            with AdminClient(first) as operator:
                operator.detach()
            log.wait_for("standby_detached", 1, BOUND_S)
            syncer.core.post = lambda event: None  # type: ignore[method-assign]  # It never catches up.
        standing = standing_by(toy, first, 0)
        with AdminClient(standing.start()) as operator:
            eventually(lambda: standing.standby.ready, BOUND_S, "it has a state")
            if stale == "detached":
                eventually(lambda: bool(standing.standby.may_lack()), BOUND_S, "it has heard of it")
            ending.close()
            eventually(lambda: not standing.standby.connected, BOUND_S, "it has stopped")
            with pytest.raises(Refused, match=r"may lack what was told: start that one again; or promote .* --lossy"):
                operator.promote()
            operator.promote(lossy=True)
        warm = standing.wait(BOUND_S)
        assert warm is not None
        with warm.taken:
            assert warm.machine.state.lineage > 1


def test_it_is_not_promoted_before_it_has_followed(tmp_path: Path) -> None:
    toy = a_toy(tmp_path)
    standing = standing_by(toy, f"127.0.0.1:{free_port()}", 0)
    try:
        with AdminClient(standing.start()) as operator, pytest.raises(Refused, match="no state to go on from"):
            operator.promote()
        standing.standby.failed = StandbyError("give the standby an empty folder")
        with pytest.raises(StandbyError, match="empty folder"):
            standing.wait(0.0)
    finally:
        standing.stop()
    with locked(tmp_path / "standby"):
        pass


def test_what_cannot_be_served_is_not_followed_either(tmp_path: Path) -> None:
    toy = a_toy(tmp_path)
    with serving(toy) as (_, first, _log):
        standing = standing_by(toy, first, int(first.rpartition(":")[2]))
        with pytest.raises(ValueError, match="cannot be bound"):
            standing.start()
        standing.stop()
        with locked(tmp_path / "standby"), pytest.raises(LockedError):
            standing_by(toy, first, 0).start()
