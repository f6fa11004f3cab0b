"""A standby beside a syncer, over real sockets: it has what is acknowledged, waits are in words, and it takes over."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco.durable import PLAIN_DISK, Disk, DiskFullError
from diloco.outer.optimizer import OuterOptimizerOptions, OuterRule
from diloco.sync.options import HealthOptions, OuterOptions
from diloco.syncer.options import RunPlan
from diloco.syncer.standby import Incoming, Standby, StandbyError, StandingBy
from diloco.wire.chunks import cut
from diloco.wire.client import AdminClient
from diloco.wire.messages import Chunk, Item, ProbeAsk, Refusal, Refused, Status, Unreachable
from tests.loopback.cluster import Log, SiteThread, eventually, free_port, serving
from tests.loopback.toy import Toy
from tests.syncer.building import LAYOUT, RUN, agreement

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


# --- What comes of the syncer's files is whole under its name, or not there ------------------------------------------

DATA = bytes(range(200))
NAME = "spool/a/0-1-d.update"


def an_item(name: str, digest: str = hashlib.sha256(DATA).hexdigest()) -> Item:
    return Item(name, 0, 0, len(DATA), digest)


def incoming(folder: Path, item: Item, disk: Disk = PLAIN_DISK) -> Incoming:
    rooms = ("spool", "snapshots", "lineages")
    store = SimpleNamespace(folder=folder, **{name: SimpleNamespace(folder=folder / name) for name in rooms})
    return Incoming(store, item, disk)  # type: ignore[arg-type]


def bring(found: Incoming) -> None:
    for piece in cut([DATA], 0, len(DATA), lambda: 64):
        found.accept(Chunk.of(*piece))


def bring_whole(found: Incoming) -> None:
    bring(found)
    found.finish()


@pytest.mark.parametrize(
    ("name", "path"),
    [
        (NAME, NAME),
        ("snapshots/00000007/state.json", "snapshots/.incoming-00000007/state.json"),
        ("lineages/1795000000/manifest.json", "lineages/1795000000/manifest.json"),
        ("spool/.above/0-1-d.update", "spool/.above/0-1-d.update"),
        ("above/outbox/0-7.update", "above/outbox/0-7.update"),
    ],
)
def test_a_file_has_its_name_when_it_is_whole(tmp_path: Path, name: str, path: str) -> None:
    found = incoming(tmp_path, an_item(name))
    assert not found.complete
    bring(found)
    assert found.complete
    assert not (tmp_path / path).exists()
    assert found.finish() == b""
    assert (tmp_path / path).read_bytes() == DATA
    assert [each.name for each in (tmp_path / path).parent.iterdir()] == [(tmp_path / path).name]


def test_a_unit_is_handed_over(tmp_path: Path) -> None:
    found = incoming(tmp_path, an_item(""))
    bring(found)
    assert found.finish() == DATA
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_what_was_declared_gets_no_name(tmp_path: Path) -> None:
    found = incoming(tmp_path, an_item(NAME, "0" * 64))
    bring(found)
    with pytest.raises(Unreachable, match="is not what was declared"):
        found.finish()
    found.discard()
    assert list((tmp_path / "spool" / "a").iterdir()) == []
    damaged = incoming(tmp_path, an_item(NAME))
    with pytest.raises(Unreachable, match="Follow: "):
        damaged.accept(Chunk(0, memoryview(DATA), 1))
    damaged.discard()


class Failing(Disk):
    """One operation fails."""

    def __init__(self, operation: str) -> None:
        def fails(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        setattr(self, operation, fails)


@pytest.mark.parametrize("operation", ["make_folder", "open"])
def test_it_may_find_no_room_to_begin(tmp_path: Path, operation: str) -> None:
    (tmp_path / "spool" / "a").mkdir(parents=True)
    with pytest.raises(DiskFullError):
        incoming(tmp_path, an_item(NAME), Failing(operation))


@pytest.mark.parametrize("operation", ["write", "rename"])
def test_where_there_is_no_room_nothing_is_left(tmp_path: Path, operation: str) -> None:
    found = incoming(tmp_path, an_item(NAME), Failing(operation))
    with pytest.raises(DiskFullError):
        bring_whole(found)
    found.discard()
    assert list((tmp_path / "spool" / "a").iterdir()) == []


def test_a_sync_that_fails_is_final_whatever_it_fails_for(tmp_path: Path) -> None:
    found = incoming(tmp_path, an_item(NAME), Failing("sync"))
    bring(found)
    with pytest.raises(OSError, match="No space left") as failed:
        found.finish()
    assert not isinstance(failed.value, DiskFullError)
    found.discard()


# --- Whoever asks a standby for what only a syncer gives is sent there -----------------------------------------------

ASK: dict[str, Callable[[StandingBy], object]] = {
    "join": lambda api: api.join(None),  # type: ignore[arg-type,func-returns-value]
    "open_push": lambda api: api.open_push(None),  # type: ignore[arg-type,func-returns-value]
    "watch": lambda api: api.watch("a", 1),  # type: ignore[arg-type,func-returns-value]
    "pull": lambda api: api.pull(None, None),  # type: ignore[arg-type,func-returns-value]
    "report": lambda api: api.report(None),  # type: ignore[arg-type,func-returns-value]
    "leave": lambda api: api.leave("a", 1),  # type: ignore[arg-type,func-returns-value]
    "drain": lambda api: api.drain(),  # type: ignore[func-returns-value]
    "evict": lambda api: api.evict("a"),  # type: ignore[func-returns-value]
    "readmit": lambda api: api.readmit("a"),  # type: ignore[func-returns-value]
    "admit": lambda api: api.admit("a", 0, 1),  # type: ignore[func-returns-value]
    "refuse": lambda api: api.refuse("a", 0, 1),  # type: ignore[func-returns-value]
    "snapshot": lambda api: api.snapshot(),  # type: ignore[func-returns-value]
    "detach": lambda api: api.detach(),  # type: ignore[func-returns-value]
}


def an_api(why_not: str | None = None, **standby: Any) -> StandingBy:
    succession = SimpleNamespace(refusal=lambda lossy: why_not, status=lambda: None)
    api = StandingBy(SimpleNamespace(**standby), "host:7077", None, None)  # type: ignore[arg-type]
    api._succession = succession  # type: ignore[assignment]
    return api


@pytest.mark.parametrize("method", ASK)
def test_it_says_where_to_ask(method: str) -> None:
    with pytest.raises(Refusal, match="this is the standby of host:7077: ask there") as refused:
        ASK[method](an_api())
    assert refused.value.status is Status.UNAVAILABLE, "a site tries the next address after that"


def test_it_takes_over_when_it_has_something_to_go_on_from() -> None:
    api = an_api(ready=False)
    with pytest.raises(Refusal, match="no state to go on from"):
        api.promote(lossy=False)
    assert not api.promoted.is_set()
    api = an_api("it is not the heir", ready=True)
    with pytest.raises(Refusal, match="it is not the heir"):
        api.promote(lossy=False)
    assert not api.promoted.is_set()
    api = an_api(ready=True)
    api.promote(lossy=True)
    assert api.promoted.is_set()
    assert api.lossy


def test_its_status_says_whose_standby_it_is() -> None:
    api = an_api(status=lambda: {"role": "standby"})
    assert api.status() == {"role": "standby", "primary": "host:7077", "lease": None, "identity_complaints": []}


def test_a_probe_is_answered_here_and_told_where_the_syncer_is() -> None:
    api = an_api(
        plan=RunPlan(agreement(), LAYOUT, "shared", OuterOptions(), OuterRule(OuterOptimizerOptions()), HealthOptions())
    )
    told = api.probe(ProbeAsk(2, RUN, shared_config={"outer.lr": "9"}))
    assert (told.standby_of, told.run_id) == ("host:7077", RUN)
    assert told.difference
