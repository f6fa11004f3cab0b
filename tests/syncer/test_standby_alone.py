"""What only an operator can put right: a syncer that was replaced or restored, a standby that nobody lets in."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest

from diloco.durable import Disk, LockedError, Step, locked
from diloco.syncer.restoring import Known, begin_lineage
from diloco.syncer.standby import PAUSE_S, StandbyError, StandingBy
from diloco.syncer.store import Store, verify
from diloco.wire.client import AdminClient
from diloco.wire.messages import FollowStart, Refused
from diloco.wire.options import SecurityOptions
from tests.loopback.cluster import Log, SiteThread, eventually, free_port, serving
from tests.loopback.toy import Toy
from tests.sooner import sooner
from tests.syncer.building import serves
from tests.syncer.test_standby import BOUND_S, STEP_S, TIMES, a_toy, following


def test_an_old_syncer_that_is_started_again_is_older_than_the_one_that_was_promoted(tmp_path: Path) -> None:
    """Whoever restarts it knows nothing of the promotion, and its own next epoch must not be taken for the new one."""
    toy, log = a_toy(tmp_path, mode="async"), Log()
    other = replace(toy, port=free_port())
    with following(other, f"127.0.0.1:{toy.port}") as (standby, _):
        with serving(toy):
            eventually(lambda: standby.state() is not None, BOUND_S, "it has a state")
        promoted = other.syncer(log.emit, folder="standby")
        promoted.start(standby.promote())
        try:
            newer = promoted.core.ask(lambda machine: machine.state.epoch)
            for _ in range(2):
                with serving(toy) as (old, _address, _log):
                    assert old.core.ask(lambda machine: machine.state.epoch) < newer
        finally:
            promoted.stop()


def restored(toy: Toy, lineage: int) -> None:
    """The syncer's folder goes on from its own values, in a new lineage."""
    store = Store(Path(toy.options().folder), toy.plan().card)
    found = store.recover(toy.plan().rules(toy.options()))
    begin_lineage(store, found.machine, found.holdings.values, None, "poison", Known(lineage))
    store.journal.close()


@pytest.mark.slow
@pytest.mark.parametrize("kept", [True, False])
def test_a_standby_from_before_a_restore_gets_the_values_that_the_lineage_began_with_or_asks_for_them(
    tmp_path: Path, kept: bool
) -> None:
    """They are in no journal; and it takes over in that lineage."""
    toy = a_toy(tmp_path, snapshot_every=1000, retain_steps=1000)
    with following(toy, f"127.0.0.1:{toy.port}") as (standby, _):
        with serving(toy) as (_, address, log), SiteThread(toy, "a", address, step_s=STEP_S):
            log.wait_for("published", 6, BOUND_S)
            eventually(lambda: standby.state() is not None, BOUND_S, "it has a state")
        restored(toy, 5)
        if not kept:
            shutil.rmtree(tmp_path / "syncer" / "lineages" / "5")
            with serving(toy):
                eventually(lambda: standby.failed is not None, BOUND_S, "it ends")
            gone = "lineage 5 began with values that were deleted: give the standby an empty folder"
            assert gone in str(standby.failed)
            assert f"move {standby.folder} away and run the same `diloco standby follow` again" in str(standby.failed)
            return
        with serving(toy) as (syncer, address, log):
            log.wait_for("note", 1, BOUND_S, where=lambda note: note["note"] == "goes_on")
            with SiteThread(toy, "a", address, step_s=STEP_S):
                log.wait_for("published", 4, BOUND_S)
            held = syncer.core.ask(lambda machine: [fragment.digest for fragment in machine.state.fragments])
        assert standby.failed is None
        warm = standby.promote()
        with warm.taken:
            assert warm.machine.state.lineage == 5
            eventually(lambda: [each.digest for each in warm.holdings.values] == held, BOUND_S, "the same values")
    again = Store(Path(toy.options("standby").folder), toy.plan().card)
    assert again.recover(toy.plan().rules(toy.options("standby"))).machine.state.lineage == 5
    again.journal.close()


def test_it_does_not_end_with_a_run_whose_syncer_has_not_said_that_it_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was killed may have had the last versions still to write: the standby would do that."""
    toy = a_toy(tmp_path)
    toy.outer["token_budget"] = 400
    monkeypatch.setattr("diloco.syncer.standby.STOPS", "a word that nobody says")
    with following(toy, f"127.0.0.1:{toy.port}") as (standby, log):

        def ended() -> bool:
            return StandingBy(standby, "x", toy.network(0), SecurityOptions()).ended

        with serving(toy) as (_, address, _log), SiteThread(toy, "a", address, step_s=STEP_S) as site:
            assert site.join(BOUND_S).ending == "finished"
            assert not ended()
        log.wait_for("disconnected", 1, BOUND_S)
        eventually(lambda: standby._orders.empty(), BOUND_S, "everything is carried out")
        assert not ended()
        assert standby.state() is not None


def test_a_syncer_that_replicates_to_nobody_is_said_to(tmp_path: Path) -> None:
    toy = a_toy(tmp_path, mode="off")
    with serving(toy) as (_, address, _log), following(toy, address) as (standby, log):
        log.wait_for("note", 1, BOUND_S)
        told = str(standby.status()["trouble"])
        assert (
            told
            == f"{address} replicates to no standby: start that syncer with cluster.replication.mode=sync, or async"
        )


def test_a_syncer_of_an_earlier_release_is_followed_by_the_digest_that_it_knows_and_of_another_run_by_none(
    tmp_path: Path,
) -> None:
    """It counts in what may change; where that is not why it refuses, it is said once, and nobody takes over."""
    toy = a_toy(tmp_path)
    with serving(toy) as (_, address, _log):
        for earlier in ("other", "shared"):
            log = Log()
            standby = toy.standby(earlier, address, log.emit)
            standby.plan = replace(standby.plan, shared_digest="later", earlier_digest=earlier)
            standby.start()
            try:
                if earlier == "shared":
                    eventually(lambda: standby.state() is not None, BOUND_S, "it has a state")  # noqa: B023
                    assert log.of("note") == []
                else:
                    log.wait_for("note", 1, BOUND_S)
                    time.sleep(3 * PAUSE_S)
                    (note,) = log.of("note")
                    assert note["note"] == "not_following"
                    assert "shared_digest is other at the standby" in str(note["why"])
                    assert note["why"] == standby.status()["trouble"]
                    assert not standby.connected
                    with pytest.raises(StandbyError, match="no state to continue from"):
                        standby.promote()
            finally:
                standby.close()


def test_a_second_standby_ends_in_words_and_the_first_follows_on_but_one_from_the_same_folder_takes_its_place(
    tmp_path: Path,
) -> None:
    """They cut each other off every half second."""
    toy = a_toy(tmp_path)
    with serving(toy) as (syncer, address, log), following(toy, address) as (standby, told):
        eventually(lambda: standby.state() is not None, BOUND_S, "it has a state")
        with following(toy, address, "second") as (second, _):
            eventually(lambda: second.failed is not None, BOUND_S, "it ends")
            assert f"standby {standby.identity} follows already: stop that first" in str(second.failed)
        assert standby.connected
        assert told.of("disconnected") == []
        syncer.replicator.follow(
            FollowStart(**syncer.store.card.facts(), standby=standby.identity, segment=0, chain="")
        )
        assert len(log.of("standby_follows")) == 2


# --- A standby on the network, from its first word to the syncer that takes its place at the same address ------------


def standing_by(toy: Toy, primary: str, port: int) -> StandingBy:
    standby = toy.standby("standby", primary, Log().emit)
    return StandingBy(standby, primary, toy.network(port), SecurityOptions())


def test_it_says_how_it_stands_and_makes_room_for_the_syncer_at_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy, port = a_toy(tmp_path), free_port()
    with serving(toy) as (_, first, _log):
        standing = standing_by(toy, first, port)
        address = standing.start()
        assert address == f"127.0.0.1:{port}"
        promote = standing.promote

        def answered_late(*, lossy: bool) -> None:
            """The answer is on its way when the address is given up."""
            promote(lossy=lossy)
            time.sleep(0.2)

        monkeypatch.setattr(standing, "promote", answered_late)
        with ThreadPoolExecutor(1) as operators, AdminClient(address) as operator:
            status = operator.status()
            assert (status["primary"], status["identity_complaints"]) == (first, [])
            assert not serves(address, toy.run_id)
            eventually(lambda: standing.standby.state() is not None, BOUND_S, "it has a state")
            assert standing.wait(0.0) is None
            said = operators.submit(operator.promote, lossy=True)
            warm = standing.wait(BOUND_S)
            said.result(BOUND_S)
        promoted = toy.syncer(Log().emit, folder="standby", port=port)
        assert promoted.start(warm) == address
        standing.stop()
        assert serves(address, toy.run_id)
        promoted.stop()


def promoted_by(operator: AdminClient, words: str, stale: str) -> None:
    """A standby that may be ``stale`` is promoted only with --lossy, and says so in these words."""
    if stale:
        with pytest.raises(Refused, match=words):
            operator.promote()
    operator.promote(lossy=bool(stale))


@pytest.mark.parametrize("stale", ["", "async", "detached", "restarted"])
def test_without_a_lease_an_operator_hears_why_it_is_not_promoted_or_gives_up_what_it_may_lack(
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
            eventually(lambda: standing.standby.state() is not None, BOUND_S, "it has a state")
            with pytest.raises(Refused, match="still hears the syncer that it follows: stop that first"):
                operator.promote()
            if stale == "detached":
                eventually(lambda: bool(standing.standby.may_lack()), BOUND_S, "it has heard of it")
            ending.close()
            eventually(lambda: not standing.standby.connected, BOUND_S, "it has stopped")
            if stale != "restarted":
                promoted_by(operator, r"may lack what was told: start that one again; or promote .* --lossy", stale)
        if stale == "restarted":  # By its own settings it knows nothing of how the syncer replicates.
            standing.stop()
            standing = standing_by(replace(toy, replication={"mode": "off", **TIMES}), first, 0)
            with AdminClient(standing.start()) as operator:
                promoted_by(operator, r"has not heard the syncer in the \d+ s since its own start, .* --lossy", stale)
        warm = standing.wait(BOUND_S)
        with warm.taken:
            assert (warm.machine.state.lineage > 1) is bool(stale)


def test_one_that_has_not_followed_is_not_promoted_and_what_cannot_be_served_is_not_followed(tmp_path: Path) -> None:
    toy = a_toy(tmp_path)
    standing = standing_by(toy, f"127.0.0.1:{free_port()}", 0)
    with AdminClient(standing.start()) as operator, pytest.raises(Refused, match="no state to continue from"):
        operator.promote()
    standing.standby.failed = StandbyError("give the standby an empty folder")
    with pytest.raises(StandbyError, match="empty folder"):
        standing.wait(0.0)
    standing.stop()
    with serving(toy) as (_, first, _log):
        standing = standing_by(toy, first, int(first.rpartition(":")[2]))
        with pytest.raises(ValueError, match="cannot be bound"):
            standing.start()
        standing.stop()
        with locked(tmp_path / "standby"), pytest.raises(LockedError):
            standing_by(toy, first, 0).start()


# --- Its disk is full: it says so, acknowledges nothing, ends nothing, and goes on when there is room ----------------


class FullAt(Disk):
    """Has no room for what ``step`` writes while it is ``full``."""

    def __init__(self, step: Step) -> None:
        self.step, self.full, self.met = step, False, 0

    def _check(self, step: Step) -> None:
        if self.full and step is self.step:
            self.met += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(self, file: BinaryIO, data: bytes | memoryview, step: Step) -> None:
        self._check(step)
        super().write(file, data, step)

    def make(self, path: Path, write: Callable[[Path], object], step: Step) -> None:
        self._check(step)
        super().make(path, write, step)


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.syncer.standby.LOOK_EVERY_S", 0.05)


@pytest.mark.usefixtures("looks_often")
def test_one_whose_folder_is_gone_ends_in_words_and_acknowledges_nothing_more(tmp_path: Path) -> None:
    toy = a_toy(tmp_path)
    with serving(toy) as (syncer, address, _), following(toy, address) as (standby, _):
        eventually(lambda: syncer.replicator.status()["following"] is True, BOUND_S, "it follows")
        standby.folder.rename(tmp_path / "moved")
        eventually(lambda: standby.failed is not None, BOUND_S, "it ends")
        assert isinstance(standby.failed, StandbyError)
        assert f"{standby.folder} was removed or emptied" in str(standby.failed)
        eventually(lambda: syncer.replicator.status()["following"] is False, BOUND_S, "the syncer waits for it")


@pytest.mark.usefixtures("looks_often")
@pytest.mark.parametrize(
    "step",
    sooner([Step.STANDBY_FILE, Step.JOURNAL_WRITE, Step.JOURNAL_MARK, Step.JOURNAL_BEGIN], Step.JOURNAL_WRITE),
)
def test_a_full_disk_stops_acknowledgements_and_heals(tmp_path: Path, step: Step) -> None:
    toy, disk = a_toy(tmp_path), FullAt(step)
    toy.replication["timeout_s"] = 0.5
    with (
        serving(toy) as (_, address, said),
        SiteThread(toy, "a", address, step_s=STEP_S) as site,
        following(toy, address, disk=disk) as (standby, log),
    ):
        site.log.wait_for("pushed", 3, BOUND_S)
        disk.full = True
        (note,) = log.wait_for("note", 1, BOUND_S, where=lambda note: note["note"] == "disk_full")
        assert "disk full: No space left on device; the standby does not follow" in str(note["why"])
        before = len(said.events)
        said.wait_for("note", 1, BOUND_S, before, lambda note: note["note"] == "held")
        pushed, steps = len(site.log.of("pushed")), site.toy_site.trained
        eventually(lambda: site.toy_site.trained > steps + 20, BOUND_S, "the site trains on")
        assert len(site.log.of("pushed")) <= pushed + 2
        disk.full = False
        site.log.wait_for("pushed", pushed + 6, BOUND_S)
        assert standby.failed is None
        assert not list((tmp_path / "standby" / "spool").glob("*/.*.tmp"))
        site.toy_site.halt.set()
        acknowledged = {(int(str(e["fragment"])), int(str(e["sequence"]))) for e in site.log.of("pushed")}
        with (warm := standby.promote()).taken:
            lines = warm.machine.state.sites["a"].lines
            assert all(lines[fragment].watermark >= sequence for fragment, sequence in acknowledged)
    verify(tmp_path / "standby")


@pytest.mark.slow
@pytest.mark.usefixtures("looks_often")
def test_a_snapshot_that_finds_no_room_is_put_off_and_the_standby_follows_on(tmp_path: Path) -> None:
    toy, disk = a_toy(tmp_path), FullAt(Step.SNAPSHOT_FILE)
    with (
        serving(toy) as (_, address, _said),
        SiteThread(toy, "a", address, step_s=STEP_S) as site,
        following(toy, address, disk=disk) as (standby, log),
    ):
        site.log.wait_for("pushed", 3, BOUND_S)
        disk.full = True
        (note,) = log.wait_for("note", 1, BOUND_S, where=lambda note: note["note"] == "snapshot_put_off")
        assert "disk full" in str(note["why"])
        site.log.wait_for("pushed", len(site.log.of("pushed")) + 4, BOUND_S)
        snapshots, disk.full = len(log.of("snapshot")), False
        log.wait_for("snapshot", snapshots + 1, BOUND_S)
        assert standby.failed is None
    verify(tmp_path / "standby")


@pytest.mark.usefixtures("looks_often")
def test_one_that_begins_on_a_full_disk_begins_when_there_is_room(tmp_path: Path) -> None:
    toy, disk = a_toy(tmp_path), FullAt(Step.STANDBY_FILE)
    disk.full = True
    with serving(toy) as (_, address, _said), following(toy, address, disk=disk) as (standby, _):
        eventually(lambda: disk.met > 2, BOUND_S, "it tries again and again")
        assert "disk full" in str(standby.status()["trouble"]) or standby.connected
        assert standby.state() is None
        disk.full = False
        eventually(lambda: standby.state() is not None, BOUND_S, "it has a state")
