"""The life of a syncer's process: taken over, served, failed, stopped; and what is on its disk each time."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from diloco.codec.entropy import UNPACK_BYTES_MAX
from diloco.codec.kernel_library import description
from diloco.codec.merging import RANGE_VALUES
from diloco.durable import LockedError
from diloco.outer.merge import MergeOptions
from diloco.outer.optimizer import outer_rule
from diloco.sync.admission import AWAY_UNKNOWN_NS
from diloco.sync.events import Ending, Outcome, OuterStepDone, Reason
from diloco.syncer import backups, server
from diloco.syncer.backups import BackupOptions, Vault
from diloco.syncer.options import PAGES_BYTES, RANGES, TAKING, VERSIONS_MAX, SyncerOptions, memory_bytes_max
from diloco.syncer.replicator import ReplicationOptions
from diloco.syncer.server import Syncer
from diloco.syncer.snapshots import Snapshots, full_parameters
from diloco.syncer.store import StoreError, verify
from diloco.wire.messages import LinkInfo, Refusal, Status
from diloco.wire.options import ServerOptions
from tests.hunts import crowd
from tests.hunts.reporting import Hunt
from tests.syncer.building import (
    LAYOUT,
    RUN,
    Events,
    eventually,
    join,
    new_syncer,
    no_room,
    push,
    refused,
    report,
    serves,
    serving,
    update,
    version_zero,
)


def versions(syncer: Syncer) -> list[int]:
    return syncer.core.ask(lambda machine: [fragment.version for fragment in machine.state.fragments])


def reach(syncer: Syncer, fragment: int, version: int) -> None:
    eventually(lambda: versions(syncer)[fragment] >= version, f"version {version} of fragment {fragment}")


def merged(syncer: Syncer, count: int, fragment: int = 0, begin: int = 1) -> None:
    for sequence in range(begin, begin + count):
        base = versions(syncer)[fragment]
        header, payload = update(sequence=sequence, fragment=fragment, base_version=base)
        assert push(syncer, header, payload).outcome is Outcome.ACCEPTED
        reach(syncer, fragment, base + 1)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    """Whatever becomes of a syncer, its threads end with it."""
    names, before = ("syncer-", "outer-step", "snapshot", "stalls-"), set(threading.enumerate())
    yield
    assert [each for each in threading.enumerate() if each.name.startswith(names) and each not in before] == []


@contextmanager
def failing(folder: Path, **settings: Any) -> Iterator[Syncer]:
    """One with a site, that ends in the block; a second stop changes nothing."""
    syncer = new_syncer(folder, Events().emit, **settings)
    syncer.start()
    join(syncer)
    yield syncer
    syncer.stop(0.1)
    syncer.stop(0.1)


# --- start -----------------------------------------------------------------------------------------------------------


def test_no_more_versions_are_made_than_there_is_room_for(tmp_path: Path, events: Events) -> None:
    with serving(tmp_path, events, sites="a") as syncer:
        for _ in range(VERSIONS_MAX):  # As if so many waited to be written down.
            assert syncer._versions.acquire(blocking=False)
        push(syncer, *update())
        events.wait_for("outer_step_started")
        time.sleep(0.3)
        assert events.of("outer_step") == []
        syncer._versions.release()
        events.wait_for("published")
        assert syncer._versions.acquire(timeout=10.0), "what was published has given its room back"
        push(syncer, *update(sequence=2, base_version=1))
        events.wait_for("outer_step_started", 2)
    assert len(events.of("outer_step")) == 1, "the stop does not wait for room"


def test_the_epoch_is_larger_with_every_start_and_version_0_is_made_once(tmp_path: Path) -> None:
    made: list[int] = []

    def zero() -> list[Tensor]:
        made.append(1)
        return version_zero()

    for epoch in (1, 2, 3):
        events = Events()
        with serving(tmp_path, events, zero=zero) as syncer:
            (started,) = events.of("syncer_started")
            assert (started["epoch"], started["versions"]) == (epoch, [epoch - 1] * 2)
            assert started["tokens_merged"] == ({"a": 200 * (epoch - 1)} if epoch > 1 else {}), "over all fragments"
            assert started["kernels"] == description() == syncer.status()["kernels"]
            bound = memory_bytes_max(syncer.options, syncer.plan, syncer.network)
            assert started["memory_bytes_max"] == bound == syncer.status()["memory_bytes_max"]
            removed = Path(syncer.options.folder) / "journal" / "journal-0.log"  # Just now, by the process that has it.
            removed.symlink_to("nowhere")
            with pytest.raises(LockedError, match=f"in use by process {os.getpid()}"):
                new_syncer(tmp_path, Events().emit).start()
            removed.unlink()
            join(syncer)
            for fragment in (0, 1):
                merged(syncer, 1, fragment, begin=epoch)
    assert made == [1]


@pytest.mark.parametrize(("moved_s", "away_s"), [(-3600, 3600), (3600, AWAY_UNKNOWN_NS / 1e9)])
def test_the_time_without_a_syncer_is_time_in_which_the_sites_train(
    tmp_path: Path, moved_s: int, away_s: float
) -> None:
    """As far as the wall clock tells it; where that went back it tells nothing."""
    with serving(tmp_path) as syncer:
        before_ns = syncer.core.ask(lambda machine: machine.state.away_ns)
    written_s = time.time() + moved_s
    for path in tmp_path.rglob("journal-*.log"):
        os.utime(path, (written_s, written_s))
    with serving(tmp_path) as syncer:
        away_ns = syncer.core.ask(lambda machine: machine.state.away_ns) - before_ns
    assert away_ns / 1e9 == pytest.approx(away_s, abs=60)


def test_a_start_that_fails_gives_everything_back(tmp_path: Path) -> None:
    """Also the lock: the same process may try again once the cause is mended."""

    def zero() -> list[Tensor]:
        values = version_zero()
        values[1][3] = float("nan")
        return values

    with pytest.raises(StoreError, match="version 0 of fragment 1 holds a NaN"):
        new_syncer(tmp_path / "run", Events().emit, zero=zero).start()
    with serving(tmp_path / "other") as other:
        for _ in range(2):
            with pytest.raises(ValueError, match="cannot be bound"):
                new_syncer(tmp_path / "run", Events().emit, address=other._server.address).start()
    with serving(tmp_path / "run", sites="a") as syncer:
        merged(syncer, 1)


# --- going on --------------------------------------------------------------------------------------------------------


def test_a_snapshot_that_is_due_in_the_middle_of_a_turn_holds_values_and_memory_of_one_instant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two versions done in one turn of the loop: the machine knows both before the first one is published."""
    with serving(tmp_path, sites="a", snapshot_every=1) as syncer:
        done: list[OuterStepDone] = []
        post, release = syncer.core.post, threading.Event()

        def hold(event: Any) -> None:
            done.append(event) if isinstance(event, OuterStepDone) else post(event)

        monkeypatch.setattr(syncer.core, "post", hold)
        for fragment in (0, 1):
            push(syncer, *update(fragment=fragment))
        eventually(lambda: len(done) == 2, "both outer steps are computed")
        busy = syncer.core.do_soon(lambda machine: release.wait(10.0))
        for event in done:
            post(event)
        release.set()
        assert busy.result(10.0)
        eventually(lambda: len(syncer.store.snapshots.numbers()) >= 2, "a snapshot is written")
        monkeypatch.undo()
    snapshots = Snapshots(tmp_path / "snapshots")
    for number in snapshots.numbers():
        found = snapshots.load(number)
        told = [fragment["version"] for fragment in found.state["fragments"]]
        assert [values.version for values in found.fragments] == told, number


# --- failing ---------------------------------------------------------------------------------------------------------


def test_what_could_not_be_synced_ends_the_process_and_is_not_answered_as_if_it_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with failing(tmp_path) as syncer, monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", Mock(side_effect=OSError("it broke")))
        for call in (syncer.api.snapshot, lambda: syncer.wait(600.0)):
            with pytest.raises(OSError, match="it broke"):
                call()
        with refused(Status.UNAVAILABLE):
            syncer.api.status()
    with serving(tmp_path) as again:  # And the next process has the folder.
        assert push(again, *update()).outcome is Outcome.ACCEPTED


def test_a_payload_that_changed_on_disk_ends_the_process_in_words(tmp_path: Path) -> None:
    with failing(tmp_path, outer={"quorum": 2}) as syncer:
        join(syncer, "b")
        push(syncer, *update("a"))
        (path,) = (tmp_path / "spool").glob("a/*.update")
        path.write_bytes(b"other" + path.read_bytes()[5:])
        push(syncer, *update("b"))
        with pytest.raises(ValueError, match=f"{path} is damaged: its digest is not the one that was acknowledged"):
            syncer.wait(20.0)


def test_a_snapshot_is_written_every_so_many_outer_steps_when_one_is_asked_for_and_by_a_stop(
    tmp_path: Path, events: Events
) -> None:
    snapshots = Snapshots(tmp_path / "snapshots")

    def kept() -> list[int]:
        return [snapshots.load(number).fragments[0].version for number in snapshots.numbers()]

    with serving(tmp_path, events, sites="a", snapshot_every=2) as syncer:
        merged(syncer, 2)
        events.wait_for("snapshot")
        assert kept() == [0, 2]
        merged(syncer, 1, begin=3)
        syncer.api.snapshot()
        assert kept() == [2, 3], "durable when it is answered"
        merged(syncer, 1, begin=4)
    with serving(tmp_path, events) as again:
        assert events.of("syncer_started")[1]["recovered"] == 0, "nothing had to be replayed"
        assert [each.digest for each in again.holdings.values] == [each.digest for each in syncer.holdings.values]
        merged(again, 1, begin=5)


def test_rounds_without_a_finite_result_do_not_end_the_run(tmp_path: Path) -> None:
    """Each gives up the memory of its version, of which there is a bounded number."""
    with serving(tmp_path, sites="a", optimizer={"kind": "sgd", "momentum": 0.0, "lr": 1e38}) as syncer:

        def given_up() -> int:
            lines = syncer.core.ask(lambda machine: machine.state.sites["a"].lines)
            return lines[0].updates_refused.get(Reason.NON_FINITE, 0)

        for sequence in range(1, VERSIONS_MAX + 2):
            header = update(sequence=sequence, values=torch.full((24,), 10.0))
            assert push(syncer, *header).outcome is Outcome.ACCEPTED
            eventually(lambda was=sequence: given_up() == was, "the round is given up")
        push(syncer, *update(sequence=VERSIONS_MAX + 2, values=torch.full((24,), 0.1)))
        reach(syncer, 0, 1)


# --- stopping --------------------------------------------------------------------------------------------------------


def test_a_stop_finds_no_snapshot_that_has_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def slow(thread: threading.Thread) -> None:
        if thread.name == "snapshot":
            time.sleep(0.2)
        start(thread)

    with serving(tmp_path) as syncer:
        monkeypatch.setattr(threading.Thread, "start", slow)
        syncer.core.do_soon(syncer.keeper.begin)
        time.sleep(0.05)


def test_a_snapshot_that_is_asked_for_while_another_is_written_comes_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: Events
) -> None:
    gate = threading.Event()
    with serving(tmp_path, events) as syncer, ThreadPoolExecutor(1) as operators:
        write = syncer.store.snapshots.write
        monkeypatch.setattr(syncer.store.snapshots, "write", lambda *given: (gate.wait(10.0), write(*given))[1])
        assert syncer.core.do(syncer.keeper.begin)
        assert not syncer.core.do(syncer.keeper.begin)
        asked = operators.submit(syncer.api.snapshot)
        time.sleep(0.1)
        assert not asked.done()
        gate.set()
        asked.result(20.0)
        assert len(events.of("snapshot")) == 2


def test_a_stop_in_the_middle_of_pushes_and_merges_loses_nothing(tmp_path: Path) -> None:
    accepted: list[tuple[str, int]] = []
    sites = ("a", "b", "c")

    def pushing(site: str) -> None:
        sequence = 1
        while True:
            try:
                outcome = push(syncer, *update(site, sequence, base_version=versions(syncer)[0])).outcome
            except Refusal:
                return
            if outcome is Outcome.ACCEPTED:
                accepted.append((site, sequence))
                sequence += 1

    with ThreadPoolExecutor(3) as pushes:
        with serving(tmp_path, snapshot_every=2) as syncer:
            for site in sites:
                join(syncer, site)
            ended = [pushes.submit(pushing, site) for site in sites]
            eventually(lambda: len(accepted) > 30, "pushes are under way")
        for each in ended:
            each.result(10.0)
    with serving(tmp_path) as again:
        standing = again.core.ask(lambda machine: {s: machine.state.sites[s].lines[0].watermark for s in sites})
    for site in sites:
        assert standing[site] >= max(n for name, n in accepted if name == site)


# --- the end ---------------------------------------------------------------------------------------------------------


def test_the_final_version_is_exported_whole_and_again_after_a_death_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: Events
) -> None:
    last_round = {"token_budget": 100, "final_wait_ns": 100000000}
    with serving(tmp_path, events, sites="a", outer=last_round) as syncer:
        for fragment in (0, 1):
            push(syncer, *update(fragment=fragment, final=True))
        assert syncer.wait(20.0) is Ending.FINISHED
        (final,) = events.wait_for("final")
        assert final["versions"] == [1, 1]
        wanted = full_parameters(syncer.plan.layout, [values.published for values in syncer.holdings.values])
        digests = [values.digest for values in syncer.holdings.values]
    folder = tmp_path / "final"

    def assert_exported() -> None:
        assert sorted(path.name for path in folder.iterdir()) == ["final.json", "model.safetensors"]
        found = load_file(folder / "model.safetensors")
        assert found.keys() == wanted.keys() == {"a", "b", "c"}
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert json.loads((folder / "final.json").read_bytes()) == {"versions": [1, 1], "digests": digests}

    assert_exported()
    (folder / "model.safetensors").write_bytes(b"half")
    (folder / "final.json").unlink()
    events = Events()
    with monkeypatch.context() as patch:
        patch.setattr(server, "export", no_room)
        with serving(tmp_path, outer=last_round) as again:
            assert again.wait(0.5) is None, "it is not said to be there before it is"
    with serving(tmp_path, events, outer=last_round) as again:
        assert again.wait(5.0) is Ending.FINISHED
        assert events.of("syncer_started")[0]["ending"] == "finished", "whoever counts from its start knows of the end"
    assert_exported()


def test_a_drained_run_goes_on_with_the_next_process(tmp_path: Path) -> None:
    with serving(tmp_path, sites="a", outer={"final_wait_ns": 50_000_000}) as syncer:
        merged(syncer, 1)
        syncer.drain()
        assert syncer.wait(20.0) is Ending.DRAINED
        assert not (tmp_path / "final").exists()
    events = Events()
    with serving(tmp_path, events) as again:
        assert again.wait(0.05) is None
        assert "ending" not in events.of("syncer_started")[0]
        merged(again, 1, begin=2)


@pytest.mark.parametrize("archive", ["serves", "serves a hand-over", "never answers"])
def test_a_run_that_ends_has_a_last_backup_unless_the_archive_fails_for_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, archive: str
) -> None:
    vault = Vault(str(tmp_path / "vault"))
    with serving(tmp_path / "run", sites="a", backup=BackupOptions(url=vault.url)) as syncer:
        merged(syncer, 2)
        if archive == "never answers":
            monkeypatch.setattr(backups, "LAST_S", 0.1)
            monkeypatch.setattr(syncer.backups._vault, "put", lambda *given: time.sleep(1.0))
        if archive != "serves a hand-over":
            syncer.drain()
            syncer.api.leave("a", 1)
            assert syncer.wait(10.0) is Ending.DRAINED
    assert not (tmp_path / "run" / "final").exists(), "the next process goes on"
    told = syncer.backups.status()
    if archive == "serves":
        ((name, facts),) = vault.backups(RUN).items()
        assert facts.versions == (2, 0), "of the last snapshot"
        assert (told["last"], told["failing"]) == (name, "")
    else:
        words = "the last backup was not complete after 0.1 s" if archive == "never answers" else ""
        assert (told["last"], told["failing"]) == ("", words)


def test_that_no_version_is_made_although_updates_wait_is_said_once_and_in_the_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: Events
) -> None:
    monkeypatch.setattr("diloco.syncer.server.LOOK_EVERY_S", 0.02)
    with serving(tmp_path, events, sites="a", outer={"quorum": 3, "site_timeout_ns": 300_000_000}) as syncer:
        push(syncer, *update())
        (said,) = events.wait_for("standstill")
        assert said["seconds"] >= 0.3
        assert (said["fragment"], said["why"]) == (0, "1 of quorum=3 sites arrived; no other site is live")
        told = syncer.status()["standstill"]
        assert {**said, "seconds": told["seconds"]} == {"what": "standstill", **told}  # type: ignore[index, dict-item]
        time.sleep(0.1)
        assert len(events.of("standstill")) == 1


def test_a_start_with_less_room_serves_the_sites_that_are_there(tmp_path: Path) -> None:
    with serving(tmp_path, outer={"sites_max": 3}) as syncer:
        for site in "abc":
            join(syncer, site)
    events = Events()
    with serving(tmp_path, events, outer={"sites_max": 1}) as syncer:
        assert syncer.network.sites_max == 3, "each has its streams"
        (changed,) = events.of("settings_changed")
        assert changed["why"] == "outer.sites_max is 1 and was 3"
        assert push(syncer, *update("c")).outcome is Outcome.ACCEPTED
        with refused(Status.RESOURCE_EXHAUSTED, "no room for site d: .* a site leaves or .* starts again", Reason.FULL):
            join(syncer, "d")


# --- A disk that is really full: acknowledgements stop, the process does not, and it heals when there is room ------


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


def test_a_full_disk_stops_acknowledgements_and_not_the_process_ends_a_start_in_words_and_heals(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, events: Events
) -> None:
    monkeypatch.setattr(server, "START_WAIT_S", 0.5)
    ballast, folder = small_disk / "ballast", small_disk / "run"
    said = "disk full: No space left on device"
    with serving(folder, events, disk_reserve_mb=0, snapshot_every=1000) as syncer:
        address = syncer._server.address
        join(syncer)
        merged(syncer, 3)
        assert serves(address)
        fill(ballast)
        with refused(Status.UNAVAILABLE, said):
            push(syncer, *update(fragment=1))
        with refused(Status.UNAVAILABLE, said):  # The last ones of the journal's page still fit.
            for number in range(200):
                join(syncer, f"more-{number}")
        assert syncer.api.status()["wanting"] == said
        assert not serves(address)
        with refused(Status.UNAVAILABLE, said):
            push(syncer, *update(sequence=4, base_version=3))
        with pytest.raises(Refusal, match="disk full"):
            syncer.api.snapshot()
        assert syncer.drain() is False, "it can be asked again"
        ballast.unlink()
        eventually(lambda: syncer.core.held is None, "the loop goes on")
        eventually(lambda: serves(address), "it says so")
        notes = [(each["note"], each.get("why")) for each in events.of("note") if "disk" in each["note"]]
        assert notes == [("disk_full", said), ("disk_has_room", None)]
        for header in (update(sequence=4, base_version=3), update(fragment=1)):
            assert push(syncer, *header).outcome is Outcome.ACCEPTED
        eventually(lambda: syncer.holdings.values[0].version == 4, "it is merged")
        known = syncer.core.ask(lambda machine: set(machine.state.sites))
        digest = syncer.holdings.values[0].digest
    assert verify(folder).torn_bytes == 0
    fill(ballast)

    def start_often() -> None:
        for _ in range(40):  # What is left of the journal's last page may do for some starts.
            with serving(folder, disk_reserve_mb=0):
                pass

    with pytest.raises(OSError, match="No space left on device") as full:
        start_often()
    assert full.value.errno == errno.ENOSPC
    ballast.unlink()
    with serving(folder, disk_reserve_mb=0) as again:
        assert again.holdings.values[0].digest == digest
        assert again.core.ask(lambda machine: set(machine.state.sites)) == known


def test_below_the_reserve_nothing_is_taken_in_before_its_first_byte(tmp_path: Path, events: Events) -> None:
    with serving(tmp_path, events, sites="a") as syncer:
        syncer.room._reserve_bytes = 1 << 60
        with refused(Status.UNAVAILABLE, "MB in reserve are wanted"):
            push(syncer, *update())
        assert list((tmp_path / "spool" / ".partial").iterdir()) == []
        events.wait_for("note")
        join(syncer, "b")
        syncer.room._reserve_bytes = 64_000_000
        assert push(syncer, *update()).outcome is Outcome.ACCEPTED


def test_the_status_is_complete_before_and_after_a_site_has_reported_and_left(tmp_path: Path) -> None:
    with serving(tmp_path, sites="ab", outer={"quorum": 2, "quorum_min": 2, "token_budget": 1000}) as syncer:
        push(syncer, *update("a"))
        figures = {"train_ns": 200, "stall_ns": 50, "tokens_processed": 900, "tokens_in_flight": 700}
        syncer.api.report(report("b", step=12, loss=None, versions=(), link=LINK, **figures))
        status = syncer.api.status()
        syncer.api.report(report("a", tokens_processed=900, tokens_in_flight=700))
        in_flight = []
        for site in ("", "a", "b"):
            if site:
                syncer.api.leave(site, 1)
            sites: Any = syncer.api.status()["sites"]
            in_flight.append([sites[name]["tokens_in_flight"] for name in "ab"])
        assert in_flight == [[700, 700], [50, 700], [50, 0]], "of one that left: the mean of what is undecided here"
        assert json.loads(json.dumps(status, allow_nan=False)) == status
    found: Any = status
    assert set(found) == set(TOP.split())
    assert [set(site) for site in found["sites"].values()] == [set(SITE.split())] * 2
    a, b = found["sites"].values()
    assert (a["heard_seconds_ago"], a["step"], a["undecided"], a["link"]) == (None, None, 1, None)
    assert (b["step"], b["stall_share"], b["link"]["rtt_ns"]) == (12, 0.25, 80_000_000)
    fragment = found["fragments"][0]
    assert (fragment["arrived"], fragment["members"], fragment["awaited"]) == (["a"], ["a", "b"], ["b"])
    assert fragment["grace_seconds_left"] is None
    assert 0 <= fragment["open_seconds"] < 60
    assert 0 < found["memory_bytes"] != found["memory_bytes_max"]
    assert min(found["journal"]["bytes"], found["disk_free_bytes"]) > 0
    assert found["held"] == [], "this syncer has the whole model"
    assert (found["phase"], found["epoch"], found["ending"], found["progress"]) == ("running", 1, None, 0.0)


# --- The status is complete, and made of what JSON can carry ---------------------------------------------------------

TOP = """kernels run_id held units upstream lineage up_seconds refused_at_the_door not_ready backup behind calls
payloads_decoded memory_bytes memory_bytes_max disk_free_bytes journal identity_complaints wanting standstill
staleness_max replication lease epoch phase ending run_tokens progress fragments sites"""
SITE = """status incarnation tokens_merged updates_merged updates_refused undecided held heard_seconds_ago step loss
tokens_per_s tokens_processed tokens_in_flight tokens_unsent base_versions staleness bytes_up bytes_down stall_share
payload_bytes_up payload_bytes_down updates_corrupt bases_differed link"""
LINK = LinkInfo(80_000_000, 12_500_000, 25_000_000, "int4:32")


# --- What a syncer is told before it starts --------------------------------------------------------------------------


def test_an_option_that_cannot_work_is_refused_with_its_value() -> None:
    of_a_syncer = partial(SyncerOptions, folder="x")
    for kind, field, value, words in (
        (of_a_syncer, "up_codecs", ["int5"], "'int5'"),
        (of_a_syncer, "down_codec", "int5", "'int5'"),
        (of_a_syncer, "downlinks_kept", 0, "0"),
        (of_a_syncer, "downlinks_kept", 1025, "1025"),
        (of_a_syncer, "heartbeat_s", 0.0, r"0\.0"),
        (of_a_syncer, "linger_s", -1.0, r"-1\.0"),
        (of_a_syncer, "threads", -1, "-1"),
        (ReplicationOptions, "timeout_s", 0.5, "timeout_s is 0.5: longer than"),
        (BackupOptions, "every_s", 0.0, "backup_every_s is 0.0"),
        (BackupOptions, "keep", 0, "backup_keep is 0"),
        (BackupOptions, "url", "zz://x", "zz://x"),
    ):
        with pytest.raises(ValueError, match=words):
            kind(**{field: value})


# --- The bound of a syncer's memory ----------------------------------------------------------------------------------

NUMEL = LAYOUT.numel
NETWORK = ServerOptions(run_id=RUN, sites_max=3)
FOLD = RANGES * 4 * RANGE_VALUES + 3 * PAGES_BYTES


def bound(folder: Path, momentum: float = 0.9, kind: str = "", merge: str = "mean", **options: Any) -> int:
    optimizer = {"kind": kind or ("nesterov" if momentum else "sgd"), "momentum": momentum}
    given = {"threads": 1, "up_codecs": ["fp32"], **options}
    syncer = new_syncer(folder, Events().emit, optimizer=optimizer, **given)
    rule = outer_rule(syncer.plan.rule.optimizer, MergeOptions(kind=merge), LAYOUT)
    return memory_bytes_max(syncer.options, replace(syncer.plan, rule=rule), NETWORK)


def test_the_memory_bound_is_the_state_two_versions_the_fold_and_what_arrives(tmp_path: Path) -> None:
    largest = max(fragment.numel for fragment in LAYOUT.fragments)
    arriving = NETWORK.memory_bytes_max(4 * largest, NETWORK.push_credits)
    plain, momentum = bound(tmp_path, 0.0), bound(tmp_path)
    assert plain == 4 * NUMEL + 2 * 4 * largest + FOLD + arriving
    assert momentum == 8 * NUMEL + 2 * 8 * largest + FOLD + arriving
    links = 2 * 2 * NUMEL
    small = {"down_codec": "bf16", "downlinks_kept": 2}
    assert bound(tmp_path, **small) == 12 * NUMEL + links + 2 * (12 + 2) * largest + FOLD + arriving
    assert bound(tmp_path, **{**small, "downlinks_kept": 9}) == bound(tmp_path, **small) + 8 * NUMEL - links
    # An optimizer and a merge cost what they keep, threads and an entropy stage what they hold.
    assert bound(tmp_path, kind="adamw") - plain == 2 * 4 * NUMEL + 2 * 2 * 4 * largest
    assert bound(tmp_path, merge="clip") - momentum == 4 * largest + 3 * 4 * RANGE_VALUES
    assert bound(tmp_path, threads=3) - momentum == 2 * FOLD
    packed = bound(tmp_path, up_codecs=["fp32+zstd"])
    unpacking = (1 + NETWORK.checks_max) * UNPACK_BYTES_MAX
    assert unpacking <= packed - momentum < unpacking + 1000
    assert bound(tmp_path, threads=3, up_codecs=["fp32+zstd"]) - packed == 2 * (FOLD + UNPACK_BYTES_MAX)
    # A region has room for the one above.
    syncer = new_syncer(tmp_path, Events().emit)
    alone, two, five = (memory_bytes_max(syncer.options, syncer.plan, syncer.network, each) for each in (0, 2, 5))
    assert two - alone == 20 * NUMEL + 4 * TAKING * largest
    assert five - two == 12 * NUMEL
    assert alone < memory_bytes_max(syncer.options, syncer.plan, replace(syncer.network, sites_max=999))


@pytest.mark.slow
def test_a_syncer_that_merges_what_16_sites_push_at_once_stays_under_it(tmp_path: Path) -> None:
    hunt = Hunt("crowd", None)
    found = crowd.merged(hunt, tmp_path, 16, 32)
    assert hunt.violations == [], found
    assert found["versions"] == 2
    state = 7 * 32  # Momentum, what is published, a new version of all three, and two down-links of 8 MiB.
    assert int(str(found["taken_mib"])) < state + int(str(found["decoded_mib"])) // 2, found
