"""Backups of a run that goes on: what a recovery needs, and a failure that ends nothing."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, tzinfo
from pathlib import Path

import pytest

from diloco.codec.base import Hasher, digest_of
from diloco.durable import Disk, Step
from diloco.syncer import backups as backups_module
from diloco.syncer.backups import NAME, BackupError, BackupFacts, BackupOptions, Backups, Vault, back_up
from diloco.syncer.store import payloads_in
from tests.syncer.building import RUN, Crash, CrashingDisk, Events, eventually, files
from tests.syncer.desk import Desk
from tests.syncer.test_kept import run, versions
from tests.syncer.test_store import Story, assert_same, harm


class Backed:
    """A run in ``run``, its vault in ``vault``, and what backs it up."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.source = folder, folder / "run"
        self.desk = run(self.source)
        self.events, self.story = Events(), Story(self.desk, 12)
        self.desk.store.emit = self.events.emit
        self.vault = Vault(str(folder / "vault"))
        self.configure()

    def configure(self, keep: int = 1, every_s: float = 0.02) -> None:
        """What backs it up from now on has these options."""
        options = BackupOptions(url=self.vault.url, keep=keep, every_s=every_s)
        self.backups = Backups(options, self.desk.store, 1, 1)

    @property
    def last(self) -> str:
        return str(self.backups.status()["last"])

    def names(self) -> list[str]:
        return list(self.vault.backups(RUN))

    def place(self, name: str) -> Path:
        return self.folder / "vault" / RUN / name

    def notes(self) -> list[tuple[object, str]]:
        return [(note["note"], str(note["why"])) for note in self.events.of("note")]

    def go_on(self) -> None:
        """So long until something has happened that the journal has."""
        journal = self.desk.store.journal
        before = journal.path(journal.index).stat().st_size
        while journal.path(journal.index).stat().st_size == before:
            self.story.tell()

    def make(self) -> str:
        """One more, of a run that has gone on."""
        self.go_on()
        self.backups._once()
        return self.last

    def check(self, name: str) -> None:
        """That backup recovers to the run as it is now, to the bit."""
        self.vault.fetch(RUN, name, self.folder / "back")
        back = Desk(self.folder / "back")
        assert_same(back, self.desk, "recovered from the backup")
        back.close()


@pytest.fixture
def backed(tmp_path: Path) -> Iterator[Backed]:
    found = Backed(tmp_path)
    yield found
    found.desk.close()


def test_a_copy_of_a_live_folder_recovers_to_the_same_bits_and_leaves_it_untouched(backed: Backed) -> None:
    while not backed.desk.under_way:
        backed.story.tell()
    before = files(backed.source)
    name, facts = back_up(backed.source, backed.vault)
    assert files(backed.source) == before
    assert backed.names() == [name]
    assert f"snapshots/{backed.desk.store.snapshots.numbers()[-1]:08d}/state.json" in facts.files
    assert back_up(backed.source, backed.vault) == (name, facts), "nothing has happened since"
    assert list(facts.versions) <= versions(backed.desk)
    backed.check(name)
    assert set(files(backed.folder / "back")) - {"lock"} < set(before), "only what a recovery needs"


@pytest.mark.parametrize("name", ["fragment-0.safetensors", "state.json"])
def test_of_a_damaged_snapshot_no_copy_is_made_but_of_the_one_before_it(backed: Backed, name: str) -> None:
    """The copy was called good, and whole ones went for it."""
    numbers = backed.desk.store.snapshots.numbers()
    damaged, notes = backed.source / "snapshots" / f"{numbers[-1]:08d}" / name, list[str]()
    harm(damaged, "flipped")
    made, facts = back_up(backed.source, backed.vault, notes.append)
    assert {file.split("/")[1] for file in facts.files if file.startswith("snapshots/")} == {f"{numbers[-2]:08d}"}
    (note,) = notes
    assert f"{damaged} is damaged" in note
    backed.check(made)
    backed.vault.drop(RUN, made)
    for path in backed.source.glob("snapshots/*/fragment-1.safetensors"):
        harm(path, "flipped")
    with pytest.raises(BackupError, match="has no whole snapshot"):
        back_up(backed.source, backed.vault)
    assert backed.names() + backed.vault.leftovers(RUN) == []


def test_a_damaged_payload_is_no_backup_and_the_last_good_one_stays(backed: Backed) -> None:
    good = backed.make()
    good_s = backed.backups._good_s
    backed.go_on()
    while not backed.desk.under_way:
        backed.story.tell()
    payload = next(iter(payloads_in(backed.desk.machine.snapshot())))
    harm(backed.source / "spool" / payload, "flipped")
    for _ in range(2):
        with pytest.raises(BackupError, match=f"{payload} is damaged: its digest is not the one"):
            backed.backups._once()
    assert backed.names() == [backed.last] == [good]
    assert backed.vault.leftovers(RUN) == []
    assert backed.backups._good_s == good_s, "what failed is not as good as new"


def test_they_are_made_kept_and_dropped(backed: Backed) -> None:
    backed.configure(keep=2)
    events, backups = backed.events, backed.backups
    backed.place(NAME.format(1, 1, 0, 0)).mkdir(parents=True)
    backed.place("syncer").mkdir()  # Not the syncer's to remove: as in a place that is a folder of something else.
    backups._began_s -= 7200
    status = backups.status()
    assert status["age_s"] is None
    assert 7200 <= float(str(status["without_s"])) < 7260, "so that it is seen that none is ever made"
    backups.start()
    for number in range(1, 5):
        events.wait_for("backup", number)
        if number < 4:
            backed.go_on()
    eventually(
        lambda: (len(backed.names()), backed.vault.leftovers(RUN)) == (2, ["syncer"]), "only the newest two are kept"
    )
    status = backups.status()
    assert status["without_s"] == status["age_s"] is not None
    backups.stop(last=False)
    assert backed.names()[-1] == events.of("backup")[-1]["name"] == backed.last
    assert 4 <= len(events.of("backup")) <= 5, "a run that stands still is not copied again"


def set_clock(monkeypatch: pytest.MonkeyPatch, year: int, second: int) -> None:
    """Wall time is that from now on."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Clock:
            return cls(year, 11, 21, 0, 0, second, tzinfo=tz)

    monkeypatch.setattr(backups_module, "datetime", Clock)
    monkeypatch.setattr("time.time", Clock.now(UTC).timestamp)


def test_the_newest_survives_whatever_the_clock_says(backed: Backed, monkeypatch: pytest.MonkeyPatch) -> None:
    """With names of wall time each was dropped as soon as it was made once the clock had been ahead for three."""
    backed.configure(keep=3)
    made: list[str] = []
    for second, year in enumerate((2031, 2031, 2031, 2026, 1999, 2044)):
        set_clock(monkeypatch, year, second)
        made.append(backed.make())
        assert backed.names() == made[-3:]
        assert 0 <= float(str(backed.backups.status()["age_s"])) < 60
    newest = backed.vault.backups(RUN)[made[-1]]
    assert newest.at.startswith("2044-11-21"), "wall time is in it for display"
    backed.check(made[-1])


def test_the_last_one_is_made_again_when_it_is_gone(backed: Backed) -> None:
    for made in (1, 1, 2, 2):
        if made > len(backed.events.of("backup")) > 0:
            backed.vault.drop(RUN, backed.last)
        backed.backups._once()
        assert len(backed.events.of("backup")) == made
        assert backed.names() == [backed.last]


def test_those_of_the_release_before_are_ordered_by_how_far_they_go(backed: Backed) -> None:
    """They are named by wall time, and have no digest of their marker."""
    backed.configure(keep=2)
    named = ["20310101T000000.000000Z", "20260101T000000.000000Z", "20280101T000000.000000Z"]
    for at in named:
        backed.go_on()
        name, _ = back_up(backed.source, backed.vault)
        marker = backed.place(name) / "backup.json"
        plain = json.loads(marker.read_text())
        del plain["sha256"]
        marker.write_text(json.dumps(plain))
        marker.parent.rename(backed.place(at))
    assert backed.names() == named
    backed.make()
    assert backed.names() == [named[-1], backed.last]


def test_a_syncer_that_is_started_again_after_a_standby_has_taken_over_learns_it_from_the_backups(
    backed: Backed,
) -> None:
    backed.backups._own = (1, 2)
    under_way = NAME.format(1, 9, 1, 0)
    for name in (under_way, NAME.format(1, 2, 1, 0), "20260101T000000.000000Z"):
        backed.place(name).mkdir(parents=True)
    backed.backups._once()
    assert backed.vault.leftovers(RUN) == [under_way], "a later syncer has made no backup yet, and is writing one"
    backed.vault.drop(RUN, backed.last)
    backed.vault.put(RUN, "further", {"run.json": (b"{}", "")}, BackupFacts(1, RUN, 1, 9, (4, 5), 1000, "", {}))
    backed.configure(every_s=600.0)
    backed.backups._own = (1, 2)
    backed.backups.start()
    ((kind, why),) = [(note["note"], note["why"]) for note in backed.events.wait_for("note")]
    backed.backups.stop(last=False)
    assert (kind, why) == ("backup_behind", backed.backups.behind)
    assert "is of lineage 1, epoch 9, and this syncer is of lineage 1, epoch 2: if another syncer" in str(why)
    for _ in range(2):
        backed.make()
    assert backed.names() == [backed.last, "further"]
    assert backed.vault.leftovers(RUN) == [under_way]
    assert len(backed.notes()) == 2, "once for each epoch here"


def test_one_made_of_less_than_what_is_there_stays_and_is_said_to_be_behind(backed: Backed) -> None:
    """As by a syncer whose folder was set back."""
    name, facts = back_up(backed.source, backed.vault)
    backed.vault.drop(RUN, name)
    content = {f"journal/journal-{segment:06d}.log": (b"", "") for segment in (1, 999)}
    backed.vault.put(RUN, "further", content, facts)
    backed.backups._once()
    assert backed.names() == [backed.last, "further"]
    ((kind, why),) = backed.notes()
    assert kind == "backup_behind"
    assert f"{backed.last} is made, and further there goes further" in why


def test_one_that_cannot_be_read_is_said_and_neither_taken_nor_dropped(backed: Backed) -> None:
    damaged, _ = back_up(backed.source, backed.vault)
    marker = backed.place(damaged) / "backup.json"
    marker.write_text(marker.read_text().replace('"lineage": 1', '"lineage": 9'))
    backed.make()
    assert backed.names() == [damaged, backed.last]
    ((kind, why),) = backed.notes()
    assert kind == "backup_damaged"
    assert f"{damaged}/backup.json is damaged: its own digest does not match" in why


def test_a_failure_is_told_and_tried_again(backed: Backed) -> None:
    place = backed.folder / "vault"
    place.write_text("a file, where a folder is to be")
    backed.backups.start()
    assert {note["note"] for note in backed.events.wait_for("note", 2)} == {"backup_failed"}
    assert "vault" in str(backed.backups.status()["failing"])
    place.unlink()
    backed.events.wait_for("backup")
    eventually(lambda: backed.backups.status()["failing"] == "", "what failed has worked since")
    backed.backups.stop(last=False)


def test_places_that_cannot_work_are_refused_without_saying_a_password() -> None:
    for url, said in (
        ("zz://place", "Protocol not known: zz"),
        ("s3://bucket/x", "s3fs"),
        ("ftp://diloco:marked-secret@host/x", "FSSPEC_FTP_PASSWORD"),
        ("simplecache::ftp://diloco:marked-secret@host/x", "FSSPEC_FTP_PASSWORD"),
    ):
        with pytest.raises(BackupError, match=said) as caught:
            Vault(url)
        assert "marked-secret" not in str(caught.value)


# --- Backups where they lie ------------------------------------------------------------------------------------------

FACTS = BackupFacts(1, "run", 3, 7, (4, 5), 1000, "2026-11-21T04:00:00+00:00", {})


def content(folder: Path) -> dict[str, tuple[Path | bytes, str]]:
    (folder / "large").write_bytes(bytes(range(256)) * 40_000)
    return {"run.json": (b"{}", ""), "snapshots/00000001/large": (folder / "large", "")}


class WatchingDisk(Disk):
    """Notes which folders' names were made durable."""

    def __init__(self) -> None:
        self.synced: set[Path] = set()

    def sync_folder(self, folder: Path, step: Step) -> None:
        super().sync_folder(folder, step)
        self.synced.add(folder)


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_what_is_put_there_comes_back_and_in_a_folder_every_name_is_durable(tmp_path: Path, kind: str) -> None:
    """``tests/hunts/test_disks.py`` ends it before its last file."""
    disk, url = WatchingDisk(), str(tmp_path / "vault") if kind == "folder" else f"memory://{uuid.uuid4()}"
    vault = Vault(url, disk)
    assert list(vault.backups("run")) == []
    told = vault.put("run", "first", content(tmp_path), FACTS)
    vault.put("run", "second", {"run.json": (b"2", "")}, FACTS)
    assert (list(vault.backups("run")), list(vault.backups("another"))) == (["first", "second"], [])
    assert vault.facts("run", "first") == told
    assert (told.versions, told.files["run.json"].bytes) == ((4, 5), 2)
    assert vault.fetch("run", "first", tmp_path / "back", disk) == told
    large = (tmp_path / "large").read_bytes()
    assert files(tmp_path / "back") == {"run.json": b"{}", "snapshots/00000001/large": large}
    for place in (tmp_path / "vault", tmp_path / "back") if kind == "folder" else ():
        made = {path.parent for path in [place, *place.rglob("*")]}
        assert made <= disk.synced, made - disk.synced
    vault.drop("run", "first")
    assert (list(vault.backups("run")), vault.leftovers("run")) == (["second"], [])


def test_in_a_folder_a_marker_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    vault = Vault(str(tmp_path / "vault"), CrashingDisk(3, Step.BACKUP_WHOLE))
    with pytest.raises(Crash):
        vault.put("run", "first", content(tmp_path), FACTS)
    assert (list(vault.backups("run")), vault.leftovers("run")) == ([], ["first"])


def test_what_is_put_there_is_what_its_digest_says_and_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vault = Vault(str(tmp_path / "vault"))
    for like in ("0" * 64, "xxh3:"):  # In each form in which it may be known.
        known = digest_of(b"an update", like)
        vault.put("run", "1", {"spool/a": (b"an update", known)}, FACTS)
        with pytest.raises(BackupError, match="not the one that it was written with"):
            vault.put("run", "2", {"spool/a": (b"an updatE", known)}, FACTS)
    copy = Vault._copy

    def rots(self: Vault, content: Path | bytes, path: str, step: Step, seen: Hasher) -> object:
        told = copy(self, content, path, step, seen)
        Path(path).write_bytes(Path(path).read_bytes()[:-1] + b"?")
        return told

    monkeypatch.setattr(Vault, "_copy", rots)
    with pytest.raises(BackupError, match="is not what was written there a moment ago"):
        vault.put("run", "3", content(tmp_path), FACTS)
    assert list(vault.backups("run")) == ["1"]


def test_damage_is_named_and_nothing_is_written_outside(tmp_path: Path) -> None:
    vault = Vault(str(tmp_path / "vault"))
    vault.put("run", "first", content(tmp_path), FACTS)
    there = tmp_path / "vault/run/first"
    whole = (there / "backup.json").read_text()
    plain = json.loads(whole)
    del plain["sha256"]
    marker = json.dumps(plain, indent=1)  # As an earlier release wrote it.
    (there / "run.json").write_bytes(b"[]")
    with pytest.raises(BackupError, match=r"first/run\.json is damaged: 2 bytes with SHA-256"):
        vault.fetch("run", "first", tmp_path / "back")
    (there / "run.json").unlink()
    with pytest.raises(BackupError, match=r"first/run\.json is missing"):
        vault.fetch("run", "first", tmp_path / "back")
    for changed, said in (
        (marker.replace('"format": 1', '"format": 9'), "has format 9"),
        (marker.replace("run.json", "../out.json"), "names '../out.json', outside of the backup"),
        (marker.replace("run.json", "/out.json"), "names '/out.json', outside of the backup"),
        (marker[:-9], "is damaged"),
        (whole.replace('"epoch": 7', '"epoch": 5'), "is damaged: its own digest does not match"),
    ):
        (there / "backup.json").write_text(changed)
        with pytest.raises(BackupError, match=said):
            vault.fetch("run", "first", tmp_path / "back")
    assert not (tmp_path / "out.json").exists()
    (there / "backup.json").unlink()
    assert (list(vault.backups("run")), vault.leftovers("run")) == ([], ["first"])
    with pytest.raises(BackupError, match=r"run/first/backup\.json is missing"):
        vault.fetch("run", "first", tmp_path / "back")
