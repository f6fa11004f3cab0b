"""Backups of a run that goes on: what a recovery needs, and a failure that ends nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.syncer.backups import BackupOptions, Backups, back_up, name_now
from diloco.syncer.vault import Vault
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
