"""A syncer is frozen for longer than its lease: the heir takes over, and the thawed one tells nobody anything."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from diloco.syncer.replaying import Rules
from diloco.syncer.store import RunCard, Store
from diloco.wire.client import AdminClient
from tests.loopback.cluster import Log, Process, SiteThread, drain, free_port
from tests.loopback.toy import RUN, Toy
from tests.syncer.leases import running_etcd
from tests.syncer.test_standby import a_toy

BOUND_S = 60.0
STEP_S = 0.01
FAR = 1_000_000
TELLS = {"refused", "standby_attached", "final"}


pytestmark = pytest.mark.slow  # Its clocks are those of a lease.


Pair = tuple[Toy, Process, Process, tuple[str, str]]
"""A syncer, the standby that is its heir, and their addresses."""


def is_heir(log: Log) -> None:
    """Wait until the syncer of ``log`` has named the standby its heir."""
    log.wait_for("note", 1, BOUND_S, where=lambda note: note["note"] == "heir" and "standby-" in str(note["why"]))


@pytest.fixture(params=[("file", "sync"), ("file", "async"), ("etcd", "sync")], ids="-".join)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    keeper, mode = request.param
    with ExitStack() as stack:
        lease = str(tmp_path / "lease.json")
        if keeper == "etcd":
            lease = stack.enter_context(running_etcd(tmp_path, (free_port(), free_port()))).endpoint
        # A standby that is away for as long as a process takes to start must not be too far behind.
        toy = a_toy(tmp_path, mode, lease=lease, retain_steps=10_000)
        ports = toy.port, free_port()
        addresses = f"127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1]}"
        first = stack.enter_context(Process("syncer", toy))
        standby = {"data": "standby", "primary": addresses[0], "port": ports[1]}
        second = stack.enter_context(Process("standby", toy, **standby))
        is_heir(first.log)
        yield toy, first, second, addresses


def test_the_heir_takes_over_from_a_frozen_syncer_which_tells_nothing_when_it_thaws(pair: Pair, tmp_path: Path) -> None:
    toy, first, second, addresses = pair
    with (
        SiteThread(toy, "a", ",".join(addresses), step_s=STEP_S) as site,
        SiteThread(toy, "b", addresses[0], step_s=STEP_S) as faithful,
    ):
        first.log.wait_for("published", 6, BOUND_S)
        first.send(signal.SIGSTOP)
        (taken,) = second.log.wait_for("lease_taken", 1, BOUND_S)
        assert taken["epoch"] == 2
        (moved,) = site.log.wait_for("joined", 1, BOUND_S, where=lambda event: event["epoch"] == 2)
        assert moved["syncer"] == addresses[1]
        second.log.wait_for("published", 3, BOUND_S)
        told, published, heard = len(first.log), len(first.log.of("published")), len(faithful.log)
        first.send(signal.SIGCONT)
        assert first.wait(BOUND_S) == 1
        assert "the lease of epoch 1 is lost" in first.errors
        assert "publishes nothing more" in first.errors
        since = first.log.events[told:]
        assert not {str(event["what"]) for event in since} & TELLS, since
        # It may have been frozen between the question and the telling; what it told then is older than what is new.
        new = {event["fragment"]: int(str(event["version"])) for event in reversed(second.log.of("published"))}
        for event in first.log.of("published")[published:]:
            assert int(str(event["version"])) < new.get(event["fragment"], FAR), since
        # What its only site heard of it after it had thawed was on its way before: the new one has it.
        adopted = [event for event in faithful.log.events[heard:] if event["what"] == "adopted"]
        acknowledged = faithful.log.of("pushed")
        assert not [event for event in adopted if event["merged"]]
        second.log.wait_for("published", len(second.log.of("published")) + 3, BOUND_S)
        with AdminClient(addresses[1]) as operator:
            status = operator.status()
            assert status["epoch"] == 2
            assert status["lease"]["epoch"] == 2  # type: ignore[index]
            operator.drain()
        assert site.join(BOUND_S).ending == "drained"
    assert second.wait(BOUND_S) == 0, second.errors
    if toy.replication["mode"] == "sync":
        store = Store(tmp_path / "standby", RunCard(RUN, toy.layout().fingerprint, "shared"))
        lines = store.recover(Rules(*toy.rules(), toy.codec)).machine.state.sites["b"].lines
        store.journal.close()
        for event in acknowledged:
            assert lines[int(str(event["fragment"]))].watermark >= int(str(event["sequence"]))


def test_a_syncer_that_is_killed_is_replaced_by_its_heir_and_does_not_come_back(pair: Pair) -> None:
    toy, first, second, addresses = pair
    with SiteThread(toy, "a", ",".join(addresses), step_s=STEP_S) as site:
        first.log.wait_for("published", 4, BOUND_S)
        first.kill()
        second.log.wait_for("lease_taken", 1, BOUND_S)
        site.log.wait_for("joined", 1, BOUND_S, where=lambda event: event["epoch"] == 2)
        with Process("syncer", toy) as again:
            assert again.wait(BOUND_S) == 1
            assert "may lack what was acknowledged there" in again.errors
        drain(addresses[1])
        assert site.join(BOUND_S).ending == "drained"
    assert second.wait(BOUND_S) == 0, second.errors


@pytest.mark.parametrize("pair", [("file", "sync")], ids=["file-sync"], indirect=True)
def test_a_syncer_that_starts_again_at_once_leads_on_and_its_heir_stays_one(pair: Pair) -> None:
    toy, first, second, addresses = pair
    with SiteThread(toy, "a", addresses[0], step_s=STEP_S) as site:
        first.log.wait_for("published", 4, BOUND_S)
        first.kill()
        with Process("syncer", toy, port=int(addresses[0].rpartition(":")[2])) as again:
            (taken,) = again.log.wait_for("lease_taken", 1, BOUND_S)
            assert taken["epoch"] == 2
            is_heir(again.log)
            assert not second.log.of("failed"), second.log.of("failed")
            again.log.wait_for("published", 4, BOUND_S)
            drain(addresses[0])
            assert site.join(BOUND_S).ending == "drained"
            assert again.wait(BOUND_S) == 0, again.errors
            assert second.log.of("lease_taken") == []
