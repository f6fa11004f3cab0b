"""Backups where they lie: whole or not there, and every byte what it was."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest

from diloco.codec.base import Hasher, digest_of
from diloco.durable import Disk, Step
from diloco.syncer.backups import MARKER, BackupError, BackupFacts, Vault
from tests.syncer.building import files

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
