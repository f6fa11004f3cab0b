"""What only an operator can put right: a syncer that was replaced or restored, a standby that nobody lets in."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from diloco.syncer.restoring import begin_lineage
from diloco.syncer.standby import PAUSE_S
from diloco.syncer.store import Store
from tests.loopback.cluster import Log, SiteThread, eventually, free_port, serving
from tests.loopback.toy import Toy
from tests.sooner import sooner
from tests.syncer.test_standby import BOUND_S, STEP_S, a_toy, following


def test_an_old_syncer_that_is_started_again_is_older_than_the_one_that_was_promoted(tmp_path: Path) -> None:
    """Whoever restarts it knows nothing of the promotion, and its own next epoch must not be taken for the new one."""
    toy = a_toy(tmp_path, mode="async")
    with following(toy, f"127.0.0.1:{toy.port}") as (standby, _):
        with serving(toy):
            eventually(lambda: standby.ready, BOUND_S, "it has a state")
        promoted = toy.syncer(Log().emit, folder="standby", port=free_port())
        promoted.start(standby.promote())
        try:
            for _ in range(2):
                with serving(toy) as (old, _address, _log):
                    epoch = old.core.ask(lambda machine: machine.state.epoch)
                    assert epoch < promoted.core.ask(lambda machine: machine.state.epoch)
        finally:
            promoted.stop()


def restored(toy: Toy, lineage: int) -> None:
    """The syncer's folder goes on from its own values, in a new lineage."""
    store = Store(Path(toy.options().folder), toy.plan().card)
    found = store.recover(toy.plan().rules(toy.options()))
    begin_lineage(store, found.machine, found.holdings.values, None, "poison", lineage)
    store.journal.close()


@pytest.mark.slow
def test_a_standby_from_before_a_restore_gets_the_values_that_the_lineage_began_with(tmp_path: Path) -> None:
    """They are in no journal; and it takes over in that lineage."""
    toy = a_toy(tmp_path, snapshot_every=1000, retain_steps=1000)
    with following(toy, f"127.0.0.1:{toy.port}") as (standby, _):
        with serving(toy) as (_, address, log), SiteThread(toy, "a", address, step_s=STEP_S):
            log.wait_for("published", 6, BOUND_S)
        restored(toy, 5)
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


@pytest.mark.slow
def test_values_of_a_lineages_beginning_that_are_gone_are_asked_for_in_words(tmp_path: Path) -> None:
    toy = a_toy(tmp_path, snapshot_every=1000, retain_steps=1000)
    with following(toy, f"127.0.0.1:{toy.port}") as (standby, _):
        with serving(toy):
            eventually(lambda: standby.ready, BOUND_S, "it has a state")
        restored(toy, 5)
        shutil.rmtree(tmp_path / "syncer" / "lineages" / "5")
        with serving(toy):
            eventually(lambda: standby.failed is not None, BOUND_S, "it ends")
        assert "lineage 5 began with values that are not kept any more: give the standby an empty folder" in str(
            standby.failed
        )


@pytest.mark.parametrize("in_order", sooner([True, False], False))
def test_it_ends_with_the_run_once_the_syncer_has_said_that_it_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_order: bool
) -> None:
    """One that was killed may have had the last versions still to write: the standby would do that."""
    toy = a_toy(tmp_path)
    toy.outer["token_budget"] = 400
    if not in_order:
        monkeypatch.setattr("diloco.syncer.standby.STOPS", "a word that nobody says")
    with following(toy, f"127.0.0.1:{toy.port}") as (standby, log):
        with serving(toy) as (_, address, _log), SiteThread(toy, "a", address, step_s=STEP_S) as site:
            assert site.join(BOUND_S).ending == "finished"
            assert not standby.ended
        log.wait_for("disconnected", 1, BOUND_S)
        eventually(lambda: standby._orders.empty(), BOUND_S, "everything is carried out")
        if in_order:
            eventually(lambda: standby.ended, BOUND_S, "it knows")
        assert standby.ended is in_order
        assert standby.ready


def test_why_a_standby_is_not_let_in_is_said_once(tmp_path: Path) -> None:
    toy = a_toy(tmp_path)
    other = a_toy(tmp_path / "other", shapes=(("w", (40, 30)), ("v", (7,))))
    with serving(toy) as (_, address, _log), following(other, address) as (standby, log):
        (note,) = log.wait_for("note", 1, BOUND_S)
        assert (note["note"], "another run" in str(note["why"])) == ("not_following", True)
        assert "another run" in str(standby.status()["trouble"])


def test_a_syncer_of_an_earlier_release_is_followed_by_the_digest_that_it_knows(tmp_path: Path) -> None:
    """It counts in what may change; where that is not why it refuses, it is asked as before, and said once."""
    toy = a_toy(tmp_path)
    with serving(toy) as (_, address, _log):
        for earlier in ("other", "shared"):
            log = Log()
            standby = toy.standby(earlier, address, log.emit)
            standby.plan = replace(standby.plan, shared_digest="later", earlier_digest=earlier)
            standby.start()
            try:
                if earlier == "shared":
                    eventually(lambda: standby.ready, BOUND_S, "it has a state")  # noqa: B023
                    assert log.of("note") == []
                else:
                    log.wait_for("note", 1, BOUND_S)
                    time.sleep(3 * PAUSE_S)
                    (note,) = log.of("note")
                    assert "shared_digest is other at the standby" in str(note["why"])
            finally:
                standby.close()
