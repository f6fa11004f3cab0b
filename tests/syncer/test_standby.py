"""A standby beside a syncer, over real sockets: it has what is acknowledged, waits are in words, and it takes over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from diloco.syncer.standby import Standby, StandbyError
from diloco.wire.client import AdminClient
from diloco.wire.messages import Refused
from tests.loopback.cluster import Log, SiteThread, eventually, free_port, serving
from tests.loopback.toy import Toy

BOUND_S = 40.0
STEP_S = 0.005
TIMES: dict[str, object] = {"timeout_s": 2.0, "alive_s": 0.2}


def a_toy(folder: Path, mode: str = "sync", **changes: object) -> Toy:
    outer = {"grace": "fixed", "grace_ns": 5_000_000, "num_fragments": 2}
    return Toy(
        folder=str(folder),
        codec="int8",
        inner_steps=4,
        outer=outer,
        port=free_port(),
        replication={"mode": mode, **TIMES},
        **changes,  # type: ignore[arg-type]
    )


@contextmanager
def following(toy: Toy, address: str, folder: str = "standby") -> Iterator[tuple[Standby, Log]]:
    log = Log()
    standby = toy.standby(folder, address, log.emit)
    standby.start()
    try:
        yield standby, log
    finally:
        standby.close()


def files(folder: Path, pattern: str) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.glob(pattern))}


def test_the_standby_has_the_journal_byte_for_byte_and_the_same_versions(tmp_path: Path) -> None:
    toy = a_toy(tmp_path, snapshot_every=8)
    with serving(toy) as (syncer, address, log), following(toy, address) as (standby, _):
        with SiteThread(toy, "a", address, step_s=STEP_S):
            log.wait_for("published", 12, BOUND_S)

        def alike() -> bool:  # Asked again: a last version may still be on its way when the site has gone.
            held = syncer.core.ask(lambda machine: [fragment.digest for fragment in machine.state.fragments])
            return standby._replayer is not None and [v.digest for v in standby._replayer.values] == held

        eventually(alike, BOUND_S, "the same versions")
        ours, theirs = (files(tmp_path / name, "journal/*.log") for name in ("syncer", "standby"))
        common = sorted(ours.keys() & theirs.keys())
        assert common, (sorted(ours), sorted(theirs))
        for name in common:
            shorter = min(len(ours[name]), len(theirs[name]))
            assert ours[name][:shorter] == theirs[name][:shorter], name
            assert shorter > 100 or name == common[-1], "a header, a frame"
        assert files(tmp_path / "standby", "snapshots/*/manifest.json"), "it keeps snapshots of its own"


def test_nothing_is_acknowledged_before_there_is_a_standby_and_it_is_said(tmp_path: Path) -> None:
    toy = a_toy(tmp_path)
    with serving(toy) as (_, address, log), AdminClient(address) as operator:
        (held,) = log.wait_for("note", 1, BOUND_S, where=lambda note: note["note"] == "held")
        assert "no standby has followed" in str(held["why"])
        assert "diloco standby detach" in str(operator.status()["wanting"])
        with SiteThread(toy, "a", address, step_s=STEP_S) as site:
            with following(toy, address):
                site.log.wait_for("pushed", 3, BOUND_S)
            pushed = len(site.log.of("pushed"))
            log.wait_for("note", 2, BOUND_S, where=lambda note: note["note"] == "held")
            steps = site.toy_site.trained
            eventually(lambda: site.toy_site.trained > steps + 20, BOUND_S, "the site trains on")
            assert len(site.log.of("pushed")) <= pushed + 2
            operator.detach()
            site.log.wait_for("pushed", pushed + 4, BOUND_S)
            assert operator.status()["replication"]["detached"] is True  # type: ignore[index]


@pytest.mark.slow
def test_one_that_has_caught_up_is_waited_for_again_also_after_a_restart(tmp_path: Path) -> None:
    toy = a_toy(tmp_path, snapshot_every=1000)  # So that the journal which the standby goes on from is still kept.
    with serving(toy) as (_, address, log), AdminClient(address) as operator:
        log.wait_for("note", 1, BOUND_S, where=lambda note: note["note"] == "held")
        operator.detach()
        with SiteThread(toy, "a", address, step_s=STEP_S) as site:
            site.log.wait_for("pushed", 3, BOUND_S)
            with following(toy, address):
                log.wait_for("standby_attached", 1, BOUND_S)
                site.log.wait_for("pushed", 8, BOUND_S)
    with serving(toy) as (_, address, log):
        (held,) = log.wait_for("note", 1, BOUND_S, where=lambda note: note["note"] == "held")
        assert "no standby has followed" in str(held["why"])
        with following(toy, address):
            log.wait_for("note", 1, BOUND_S, where=lambda note: note["note"] == "goes_on")


def test_a_promoted_standby_goes_on_with_everything_that_was_acknowledged(tmp_path: Path) -> None:
    toy = a_toy(tmp_path)
    second = free_port()
    with following(toy, f"127.0.0.1:{toy.port}") as (standby, _):
        with serving(toy) as (syncer, address, first_log):
            with SiteThread(toy, "a", address, step_s=STEP_S) as site:
                first_log.wait_for("published", 12, BOUND_S)
            acknowledged = {(e["fragment"], e["sequence"]) for e in site.log.of("pushed")}
            epoch = syncer.core.machine.state.epoch
        warm = standby.promote()
        log = Log()
        promoted = toy.syncer(log.emit, folder="standby", port=second)
        address = promoted.start(warm)
        try:
            assert promoted.core.machine.state.epoch > epoch
            lines = promoted.core.ask(lambda machine: machine.state.sites["a"].lines)
            for fragment, sequence in acknowledged:
                assert lines[int(str(fragment))].watermark >= int(str(sequence))
            with SiteThread(toy, "a", address, step_s=STEP_S) as site:
                site.log.wait_for("adopted", 6, BOUND_S, where=lambda event: event["merged"])
                with AdminClient(address) as operator:
                    operator.drain()
                done = site.join(BOUND_S)
        finally:
            promoted.stop()
    assert done.ending == "drained"


def test_who_asks_a_standby_is_sent_elsewhere_and_a_syncer_is_not_promoted(tmp_path: Path) -> None:
    toy = a_toy(tmp_path)
    with (
        serving(toy) as (_, address, _log),
        AdminClient(address) as operator,
        pytest.raises(Refused, match="no standby"),
    ):
        operator.promote()


def test_a_standby_of_another_run_is_refused_in_words(tmp_path: Path) -> None:
    toy = a_toy(tmp_path)
    other = a_toy(tmp_path / "other", shapes=(("w", (40, 30)), ("v", (7,))))
    with serving(toy) as (_, address, _log):
        standby = other.standby("standby", address, Log().emit)
        standby.start()
        eventually(lambda: not standby.connected, BOUND_S, "it does not follow")
        with pytest.raises(StandbyError, match="no state to go on from"):
            standby.promote()


def test_a_standby_may_have_room_for_more_sites_than_the_syncer_before_it(tmp_path: Path) -> None:
    toy = a_toy(tmp_path)
    toy.outer["sites_max"] = 1
    other = replace(toy, outer={**toy.outer, "sites_max": 2}, port=free_port())
    with serving(toy) as (_, address, _log), following(other, address) as (standby, _):
        with SiteThread(toy, "a", address, step_s=STEP_S) as site:
            site.log.wait_for("pushed", 1, BOUND_S)
        log = Log()
        promoted = other.syncer(log.emit, folder="standby")
        promoted.start(standby.promote())
        try:
            assert promoted.core.ask(lambda machine: machine.state.sites_max) == 2
        finally:
            promoted.stop()
        (changed,) = log.of("settings_changed")
        assert changed["why"] == "outer.sites_max is 2 and was 1"
