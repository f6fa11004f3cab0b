"""A syncer dies before its standby has everything: the sites go over by themselves and send it again."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from diloco.sync.events import UpdateArrived
from diloco.sync.journal import FRAME, decode_records, units
from diloco.syncer.standby import Standby
from diloco.wire.messages import Item, Unreachable
from tests.loopback.cluster import Log, Process, SiteThread, drain, eventually, free_port
from tests.syncer.test_standby import BOUND_S, STEP_S, a_toy, following


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
                drain(second)
                done = site.join(BOUND_S)
                assert done.ending == "drained"
                assert (done.ledger["lost"], done.ledger["refused"]) == (0, 0)
            finally:
                promoted.stop()
