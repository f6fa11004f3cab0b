"""Backups of a run that goes on: what a recovery needs, and a failure that ends nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.syncer.backups import BackupOptions, Backups, back_up, name_now
from diloco.syncer.vault import BackupError, Vault
from diloco.syncer.verifying import payloads_in
from tests.syncer.building import RUN, Events, eventually, files
from tests.syncer.desk import Desk
from tests.syncer.test_kept import run, versions
from tests.syncer.test_store import Story, assert_same


def test_a_copy_of_a_live_folder_recovers_to_the_same_bits_and_leaves_it_untouched(tmp_path: Path) -> None:
    desk = run(tmp_path / "run", seed=6)
    story = Story(desk, 11)
    while not desk.under_way:
        story.tell()
    before = files(tmp_path / "run")
    vault = Vault(str(tmp_path / "vault"))
    facts, (snapshot, journal_bytes) = back_up(tmp_path / "run", vault, name_now())
    assert files(tmp_path / "run") == before
    (name,) = vault.names(RUN)
    assert snapshot == desk.store.snapshots.numbers()[-1]
    assert journal_bytes > 0
    assert list(facts.versions) <= versions(desk)
    vault.fetch(RUN, name, tmp_path / "back")
    assert set(files(tmp_path / "back")) < set(before), "only what a recovery needs"
    back = Desk(tmp_path / "back")
    assert_same(back, desk, "recovered from the backup")
    story.tell()  # The run goes on; what was copied stays as it is.
    vault.fetch(RUN, name, tmp_path / "again")
    assert files(tmp_path / "again").keys() == files(tmp_path / "back").keys() - {"lock"}
    back.close()
    desk.close()


def flip(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])


@pytest.mark.parametrize("name", ["fragment-0.safetensors", "state.json"])
def test_of_a_damaged_snapshot_no_copy_is_made_but_of_the_one_before_it(tmp_path: Path, name: str) -> None:
    """The copy was called good, and whole ones went for it."""
    desk = run(tmp_path / "run")
    numbers = desk.store.snapshots.numbers()
    damaged = tmp_path / "run" / "snapshots" / f"{numbers[-1]:08d}" / name
    flip(damaged)
    vault, notes = Vault(str(tmp_path / "vault")), list[str]()
    _, (snapshot, _) = back_up(tmp_path / "run", vault, "one", notes.append)
    assert snapshot == numbers[-2]
    (note,) = notes
    assert f"{damaged} is damaged" in note
    vault.fetch(RUN, "one", tmp_path / "back")
    back = Desk(tmp_path / "back")
    assert_same(back, desk, "recovered from the backup")
    back.close()
    desk.close()


def test_without_a_whole_snapshot_there_is_no_backup(tmp_path: Path) -> None:
    desk = run(tmp_path / "run", snapshots=1)
    desk.close()
    for path in (tmp_path / "run").glob("snapshots/*/fragment-1.safetensors"):
        flip(path)
    vault = Vault(str(tmp_path / "vault"))
    with pytest.raises(BackupError, match="has no whole snapshot"):
        back_up(tmp_path / "run", vault, "one")
    assert vault.names(RUN) + vault.leftovers(RUN) == []


def test_a_damaged_payload_is_no_backup_and_the_last_good_one_stays(tmp_path: Path) -> None:
    desk, events = run(tmp_path / "run"), Events()
    backups = Backups(BackupOptions(url=str(tmp_path / "vault"), keep=1), tmp_path / "run", RUN, events.emit)
    backups._once()
    good = backups._good_s
    story, length = Story(desk, 11), desk.store.journal.size(desk.store.journal.index)
    while not desk.under_way or desk.store.journal.size(desk.store.journal.index) == length:
        story.tell()
    payload = next(iter(payloads_in(desk.machine.snapshot())))
    flip(tmp_path / "run" / "spool" / payload)
    for _ in range(2):
        with pytest.raises(BackupError, match=f"{payload} is damaged: its digest is not the one"):
            backups._once()
    vault = Vault(str(tmp_path / "vault"))
    assert vault.names(RUN) == [backups.status()["last"]] == [events.of("backup")[0]["name"]]
    assert vault.leftovers(RUN) == []
    assert backups._good_s == good, "what failed is not as good as new"
    desk.close()


def test_they_are_made_kept_and_dropped(tmp_path: Path) -> None:
    desk = run(tmp_path / "run")
    events = Events()
    options = BackupOptions(url=str(tmp_path / "vault"), every_s=0.02, keep=2)
    backups = Backups(options, tmp_path / "run", RUN, events.emit)
    (tmp_path / "vault" / RUN / "00-died").mkdir(parents=True)
    assert backups.status()["age_s"] is None
    backups.start()
    story = Story(desk, 12)
    for number in range(1, 4):
        events.wait_for("backup", number)
        for _ in range(5):
            story.tell()
    events.wait_for("backup", 4)
    vault = Vault(options.url)
    eventually(lambda: len(vault.names(RUN)) == 2 and not vault.leftovers(RUN), "only the newest two are kept")
    age_s = backups.status()["age_s"]
    assert isinstance(age_s, float)
    backups.stop()
    made = len(events.of("backup"))
    assert vault.names(RUN)[-1] == events.of("backup")[-1]["name"] == backups.status()["last"]
    assert 4 <= made <= 5, "a run that stands still is not copied again"
    desk.close()


def test_a_failure_is_told_and_tried_again(tmp_path: Path) -> None:
    desk = run(tmp_path / "run")
    events = Events()
    (tmp_path / "vault").write_text("a file, where a folder is to be")
    backups = Backups(BackupOptions(url=str(tmp_path / "vault"), every_s=0.02), tmp_path / "run", RUN, events.emit)
    backups.start()
    notes = events.wait_for("note", 2)
    assert {note["note"] for note in notes} == {"backup_failed"}
    assert "vault" in str(backups.status()["failing"])
    (tmp_path / "vault").unlink()
    events.wait_for("backup")
    eventually(lambda: backups.status()["failing"] == "", "what failed has worked since")
    backups.stop()
    desk.close()


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"every_s": 0.0}, "backup_every_s is 0.0"), ({"keep": 0}, "backup_keep is 0"), ({"url": "zz://x"}, "zz://x")],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        BackupOptions(**settings)  # type: ignore[arg-type]
