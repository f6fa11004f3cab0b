"""A syncer dies, or is cut off: sites that know of a standby go over to it by themselves, and stay."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from diloco.sync.events import UpdateArrived
from diloco.sync.journal import FRAME, decode_records, units
from diloco.syncer.standby import Standby
from diloco.wire.client import AdminClient
from diloco.wire.messages import Item, JoinAsk, JoinReply, Unreachable
from tests.loopback.cluster import Log, Process, SiteThread, eventually, free_port, serving
from tests.syncer.test_standby import BOUND_S, STEP_S, a_toy, following


def test_sites_go_over_to_the_standby_and_the_old_syncer_does_not_win_them_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old one is not dead: it waits for its standby, and is told at last to go on alone."""
    toy = a_toy(tmp_path)
    second = f"127.0.0.1:{free_port()}"
    asked: list[str] = []
    with (
        serving(toy) as (old, first, _),
        AdminClient(first) as operator,
        following(toy, first) as (standby, _),
        SiteThread(toy, "a", f"{first},{second}", step_s=STEP_S) as site,
    ):
        site.log.wait_for("adopted", 4, BOUND_S, where=lambda event: event["merged"])
        log = Log()
        promoted = toy.syncer(log.emit, folder="standby", port=int(second.rpartition(":")[2]))
        promoted.start(standby.promote())
        (moved,) = site.log.wait_for("joined", 1, BOUND_S, where=lambda event: event["epoch"] > 1)
        assert moved["syncer"] == second
        log.wait_for("published", 4, BOUND_S)
        had, answer = old.core.machine.state.sites["a"].lines[0].watermark, old.api.join

        def overheard(request: JoinAsk) -> JoinReply:
            asked.append(request.site_id)
            return answer(request)

        monkeypatch.setattr(old.api, "join", overheard)
        operator.detach()
        promoted.stop()
        eventually(lambda: len(asked) >= 3, BOUND_S, "it asks the old one as well")
        again, steps = len(site.log), site.toy_site.trained
        eventually(lambda: site.toy_site.trained > steps + 50, BOUND_S, "it trains on")
        promoted = toy.syncer(log.emit, folder="standby", port=int(second.rpartition(":")[2]))
        promoted.start()
        try:
            with AdminClient(second) as later:
                later.detach()
                (back,) = site.log.wait_for("joined", 1, BOUND_S, since=again)
                assert (back["epoch"], back["syncer"]) == (moved["epoch"] + 1, second)
                later.drain()
                assert site.join(BOUND_S).ending == "drained"
        finally:
            promoted.stop()
        assert old.core.ask(lambda machine: machine.state.sites["a"].lines[0].watermark) == had
        assert {event["epoch"] for event in site.log.of("joined")} == {1, moved["epoch"], back["epoch"]}


def brings_an_update(data: bytes) -> bool:
    """Whether a unit of the journal has an update in it."""
    records = [record for each in units(data) if each.kind == FRAME for record in decode_records(each.body, 0)]
    return any(isinstance(record.event, UpdateArrived) for record in records)


def test_what_was_acknowledged_and_not_replicated_is_sent_again_by_the_site_that_kept_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``async``: the standby has stopped listening for a moment when the syncer dies."""
    toy = a_toy(tmp_path, mode="async")
    toy.replication["timeout_s"] = 30.0  # One that is away is not waited for, and then the site would know more.
    second, asleep, deaf = f"127.0.0.1:{free_port()}", threading.Event(), threading.Event()
    unit = Standby._unit

    def lays_down(standby: Standby, item: Item, data: bytes) -> None:
        if asleep.is_set() and brings_an_update(data):
            deaf.set()
        while deaf.is_set():
            if standby._stopping.wait(0.02):
                raise Unreachable("it takes over")
        unit(standby, item, data)

    monkeypatch.setattr(Standby, "_unit", lays_down)
    first = f"127.0.0.1:{toy.port}"
    with Process("syncer", toy) as syncer, following(toy, first) as (standby, _):
        syncer.log.wait_for("standby_follows", 1, BOUND_S)
        with SiteThread(toy, "a", f"{first},{second}", step_s=STEP_S) as site:
            site.log.wait_for("adopted", 4, BOUND_S, where=lambda event: event["merged"])
            asleep.set()

            def lacking() -> set[tuple[int, int]]:
                """What was acknowledged and the standby has not."""
                assert standby._replayer is not None
                lines = standby._replayer.machine.state.sites["a"].lines
                pushed = [(int(str(e["fragment"])), int(str(e["sequence"]))) for e in site.log.of("pushed")]
                return {(fragment, sequence) for fragment, sequence in pushed if sequence > lines[fragment].watermark}

            eventually(lambda: deaf.is_set() and bool(lacking()), BOUND_S, "an acknowledgement that ran ahead")
            syncer.kill()
            warm = standby.promote()
            lacks = lacking()
            assert lacks
            log = Log()
            promoted = toy.syncer(log.emit, folder="standby", port=int(second.rpartition(":")[2]))
            promoted.start(warm)
            try:
                site.log.wait_for("joined", 1, BOUND_S, where=lambda event: event["epoch"] > 1)
                told = site.log.wait_for("note", len(lacks), BOUND_S, where=lambda note: note["note"] == "sent_again")
                assert len(told) == len(lacks)
                for fragment, sequence in lacks:
                    again = {"fragment": fragment, "sequence": sequence, "outcome": "accepted"}
                    site.log.wait_for("pushed", 2, BOUND_S, where=lambda e, again=again: again.items() <= e.items())
                with AdminClient(second) as operator:
                    operator.drain()
                done = site.join(BOUND_S)
                assert done.ending == "drained"
                assert (done.ledger["lost"], done.ledger["refused"]) == (0, 0)
            finally:
                promoted.stop()
