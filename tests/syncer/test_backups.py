"""Backups of a run that goes on: what a recovery needs, and a failure that ends nothing."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime, tzinfo
from pathlib import Path

import pytest

from diloco.codec.base import Hasher, digest_of
from diloco.durable import Disk, Step
from diloco.syncer import backups as backups_module
from diloco.syncer.backups import MARKER, BackupError, BackupFacts, BackupOptions, Backups, Vault, back_up
from diloco.syncer.store import payloads_in
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
    name, facts = back_up(tmp_path / "run", vault)
    assert files(tmp_path / "run") == before
    assert vault.names(RUN) == [name]
    assert f"snapshots/{desk.store.snapshots.numbers()[-1]:08d}/state.json" in facts.files
    assert back_up(tmp_path / "run", vault) == (name, facts), "nothing has happened since"
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
    made, facts = back_up(tmp_path / "run", vault, notes.append)
    assert {file.split("/")[1] for file in facts.files if file.startswith("snapshots/")} == {f"{numbers[-2]:08d}"}
    (note,) = notes
    assert f"{damaged} is damaged" in note
    vault.fetch(RUN, made, tmp_path / "back")
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
        back_up(tmp_path / "run", vault)
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


def set_clock(monkeypatch: pytest.MonkeyPatch, year: int, second: int) -> None:
    """Wall time is that from now on."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Clock:
            return cls(year, 11, 21, 0, 0, second, tzinfo=tz)

    monkeypatch.setattr(backups_module, "datetime", Clock)
    monkeypatch.setattr("time.time", Clock.now(UTC).timestamp)


def told_for(story: Story, desk: Desk) -> None:
    """So long until something has happened that the journal has."""
    before = desk.store.journal.size(desk.store.journal.index)
    while desk.store.journal.size(desk.store.journal.index) == before:
        story.tell()


def test_the_newest_survives_and_is_taken_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With names of wall time each was dropped as soon as it was made once the clock had been ahead for three."""
    desk, events = run(tmp_path / "run"), Events()
    options = BackupOptions(url=str(tmp_path / "vault"), keep=3)
    backups, vault, story = Backups(options, tmp_path / "run", RUN, events.emit), Vault(options.url), Story(desk, 12)
    made: list[object] = []
    for second, year in enumerate((2031, 2031, 2031, 2026, 2026, 1999, 2044)):
        set_clock(monkeypatch, year, second)
        told_for(story, desk)
        backups._once()
        made.append(backups.status()["last"])
        assert vault.names(RUN) == made[-3:]
        age_s = backups.status()["age_s"]
        assert isinstance(age_s, float)
        assert 0 <= age_s < 60
    newest = vault.backups(RUN)[vault.names(RUN)[-1]]
    assert isinstance(newest, BackupFacts)
    assert newest.at.startswith("2044-11-21"), "wall time is in it for display"
    vault.fetch(RUN, vault.names(RUN)[-1], tmp_path / "back")
    back = Desk(tmp_path / "back")
    assert_same(back, desk, "recovered from the newest")
    back.close()
    desk.close()


def test_the_last_one_is_made_again_when_it_is_gone(tmp_path: Path) -> None:
    desk, events = run(tmp_path / "run"), Events()
    backups = Backups(BackupOptions(url=str(tmp_path / "vault")), tmp_path / "run", RUN, events.emit)
    for made in (1, 1, 2, 2):
        if made > len(events.of("backup")) > 0:
            backups._vault.drop(RUN, str(backups.status()["last"]))
        backups._once()
        assert len(events.of("backup")) == made
        assert backups._vault.names(RUN) == [backups.status()["last"]]
    desk.close()


def as_before(vault: Path, name: str, at: str) -> None:
    """What the release before would have left: named by wall time, without a digest of its marker."""
    marker = vault / RUN / name / "backup.json"
    plain = json.loads(marker.read_text())
    del plain["sha256"]
    marker.write_text(json.dumps(plain))
    marker.parent.rename(vault / RUN / at)


def test_those_of_the_release_before_are_ordered_by_how_far_they_go(tmp_path: Path) -> None:
    desk, events = run(tmp_path / "run"), Events()
    options = BackupOptions(url=str(tmp_path / "vault"), keep=2)
    backups, vault, story = Backups(options, tmp_path / "run", RUN, events.emit), Vault(options.url), Story(desk, 12)
    named = ["20310101T000000.000000Z", "20260101T000000.000000Z", "20280101T000000.000000Z"]
    for at in named:
        told_for(story, desk)
        as_before(tmp_path / "vault", back_up(tmp_path / "run", vault)[0], at)
    assert vault.names(RUN) == named
    told_for(story, desk)
    backups._once()
    assert vault.names(RUN) == [named[-1], backups.status()["last"]]
    desk.close()


def test_one_made_of_less_than_what_is_there_stays_and_is_said_to_be_behind(tmp_path: Path) -> None:
    """As by a syncer that an operator starts again in its old folder after a standby has taken over."""
    desk, events = run(tmp_path / "run"), Events()
    vault = Vault(str(tmp_path / "vault"))
    newer = BackupFacts(1, RUN, 1, 9, (4, 5), 1000, "", {})
    vault.put(RUN, "further", {"run.json": b"{}"}, newer)
    backups = Backups(BackupOptions(url=vault.url, keep=1), tmp_path / "run", RUN, events.emit)
    backups._once()
    made = str(backups.status()["last"])
    assert vault.names(RUN) == [made, "further"]
    (note,) = events.of("note")
    assert note["note"] == "backup_behind"
    assert f"{made} is made, and further there goes further" in str(note["why"])
    desk.close()


def test_one_that_cannot_be_read_is_said_and_neither_taken_nor_dropped(tmp_path: Path) -> None:
    desk, events = run(tmp_path / "run"), Events()
    vault, story = Vault(str(tmp_path / "vault")), Story(desk, 12)
    damaged, _ = back_up(tmp_path / "run", vault)
    marker = tmp_path / "vault" / RUN / damaged / "backup.json"
    marker.write_text(marker.read_text().replace('"lineage": 1', '"lineage": 9'))
    told_for(story, desk)
    backups = Backups(BackupOptions(url=vault.url, keep=1), tmp_path / "run", RUN, events.emit)
    backups._once()
    assert vault.names(RUN) == [damaged, backups.status()["last"]]
    (note,) = events.of("note")
    assert note["note"] == "backup_damaged"
    assert f"{damaged}/backup.json is damaged: its own digest does not match" in str(note["why"])
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


# --- Backups where they lie ------------------------------------------------------------------------------------------

FACTS = BackupFacts(1, "run", 3, 7, (4, 5), 1000, "2026-11-21T04:00:00+00:00", {})


def content(folder: Path) -> dict[str, Path | bytes]:
    (folder / "large").write_bytes(bytes(range(256)) * 40_000)
    return {"run.json": b"{}", "snapshots/00000001/large": folder / "large"}


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_what_is_put_there_comes_back(tmp_path: Path, kind: str) -> None:
    vault = Vault(str(tmp_path / "vault") if kind == "folder" else f"memory://{uuid.uuid4()}")
    assert vault.names("run") == []
    told = vault.put("run", "first", content(tmp_path), FACTS)
    vault.put("run", "second", {"run.json": b"2"}, FACTS)
    assert vault.names("run") == ["first", "second"]
    assert vault.names("another") == []
    assert vault.facts("run", "first") == told
    assert (told.versions, told.files["run.json"].bytes) == ((4, 5), 2)
    assert vault.fetch("run", "first", tmp_path / "back") == told
    assert set(files(tmp_path / "back")) == {"run.json", "snapshots/00000001/large"}
    assert (tmp_path / "back/snapshots/00000001/large").read_bytes() == (tmp_path / "large").read_bytes()
    vault.drop("run", "first")
    assert vault.names("run") == ["second"]
    assert vault.leftovers("run") == []


@pytest.mark.parametrize("like", ["0" * 64, "xxh3:"])
def test_what_is_put_there_is_compared_in_the_form_in_which_its_digest_is_known(tmp_path: Path, like: str) -> None:
    vault = Vault(str(tmp_path / "vault"))
    known = {"spool/a": digest_of(b"an update", like)}
    vault.put("run", "1", {"spool/a": b"an update"}, FACTS, known)
    with pytest.raises(BackupError, match="not the one that it was written with"):
        vault.put("run", "2", {"spool/a": b"an updatE"}, FACTS, known)


def test_without_its_marker_it_is_none(tmp_path: Path) -> None:
    vault = Vault(str(tmp_path / "vault"))
    vault.put("run", "first", content(tmp_path), FACTS)
    (tmp_path / "vault/run/first/backup.json").unlink()
    assert vault.names("run") == []
    assert vault.leftovers("run") == ["first"]
    with pytest.raises(BackupError, match=r"run/first/backup\.json is missing"):
        vault.fetch("run", "first", tmp_path / "back")
    vault.drop("run", "first")
    assert vault.leftovers("run") == []


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
        (marker.replace("run.json", "../out.json"), "names '../out.json': outside of it"),
        (marker.replace("run.json", "/out.json"), "names '/out.json': outside of it"),
        (marker[:-9], "is damaged"),
        (whole.replace('"epoch": 7', '"epoch": 5'), "is damaged: its own digest does not match"),
    ):
        (there / "backup.json").write_text(changed)
        with pytest.raises(BackupError, match=said):
            vault.fetch("run", "first", tmp_path / "back")
    assert not (tmp_path / "out.json").exists()


def test_a_place_that_changes_what_is_written_gets_no_backup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vault = Vault(str(tmp_path / "vault"))
    copy = Vault._copy

    def rots(self: Vault, content: Path | bytes, path: str, step: Step, seen: Hasher) -> object:
        told = copy(self, content, path, step, seen)
        Path(path).write_bytes(Path(path).read_bytes()[:-1] + b"?")
        return told

    monkeypatch.setattr(Vault, "_copy", rots)
    with pytest.raises(BackupError, match="is not what was written there a moment ago"):
        vault.put("run", "first", content(tmp_path), FACTS)
    assert vault.names("run") == []


@pytest.mark.parametrize(("url", "said"), [("zz://place", "Protocol not known: zz"), ("s3://bucket/x", "s3fs")])
def test_a_place_that_cannot_be_reached_from_here_is_said(url: str, said: str) -> None:
    with pytest.raises(BackupError, match=said):
        Vault(url)


@pytest.mark.parametrize("above", ["", "simplecache::"])
def test_a_place_whose_url_has_a_password_is_refused_without_saying_it(above: str) -> None:
    with pytest.raises(BackupError, match="FSSPEC_FTP_PASSWORD") as caught:
        Vault(f"{above}ftp://diloco:marked-secret@host/x")
    assert "marked-secret" not in str(caught.value)


class WatchingDisk(Disk):
    """Ends before the last rename, if it should, and notes which folders' names were made durable until then."""

    def __init__(self, *, dies: bool = False) -> None:
        self.dies = dies
        self.synced: set[Path] = set()

    def rename(self, path: Path, target: Path, step: Step) -> None:
        if self.dies and target.name == MARKER:
            raise RuntimeError("as by a death")
        super().rename(path, target, step)

    def sync_folder(self, folder: Path, step: Step) -> None:
        super().sync_folder(folder, step)
        self.synced.add(folder)


def test_a_backup_whose_last_file_is_cut_short_is_none(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="as by a death"):
        Vault(str(tmp_path / "vault"), WatchingDisk(dies=True)).put("run", "first", content(tmp_path), FACTS)
    vault = Vault(str(tmp_path / "vault"))
    assert vault.names("run") == []
    assert vault.leftovers("run") == ["first"]
    vault.drop("run", "first")
    assert vault.leftovers("run") == []


def test_every_name_of_a_backup_and_of_what_is_fetched_is_durable(tmp_path: Path) -> None:
    disk = WatchingDisk()
    vault = Vault(str(tmp_path / "vault"), disk)
    vault.put("run", "first", content(tmp_path), FACTS)
    vault.fetch("run", "first", tmp_path / "back", disk)
    for place in (tmp_path / "vault", tmp_path / "back"):
        made = {path.parent for path in [place, *place.rglob("*")]}
        assert made <= disk.synced, made - disk.synced
