"""Whatever is damaged in a data folder is named, also what a start would not look at; and nothing is touched."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from diloco.sync.journal import JournalError
from diloco.syncer.snapshots import SnapshotError
from diloco.syncer.spool import SpoolError
from diloco.syncer.store import verify
from tests.syncer.building import files
from tests.syncer.test_store import told


def test_a_whole_folder_is_whole_and_is_left_as_it_is(tmp_path: Path) -> None:
    told(tmp_path)
    (tmp_path / "snapshots" / ".00000009.tmp").mkdir()  # Beside a syncer that is writing one.
    before = files(tmp_path)
    found = verify(tmp_path)
    assert files(tmp_path) == before
    assert (tmp_path / "snapshots" / ".00000009.tmp").is_dir()
    assert found.segments == len(list((tmp_path / "journal").glob("journal-*.log")))
    assert (found.snapshots, found.torn_bytes) == (2, 0)
    assert found.payloads > 5
    assert found.records > 20


def test_a_flipped_bit_anywhere_is_named_with_its_file(tmp_path: Path) -> None:
    told(tmp_path)
    seed = random.randrange(1 << 30)
    dice = random.Random(seed)
    last = max((tmp_path / "journal").glob("journal-*.log"))
    for path in sorted(tmp_path.rglob("*")):
        if not path.is_file() or path.name in ("run.json", "lock", "journal.end"):
            continue
        whole = path.read_bytes()
        for _ in range(1):
            at = dice.randrange(len(whole) - 44 if path == last else len(whole))
            path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << dice.randrange(8))]) + whole[at + 1 :])
            with pytest.raises((JournalError, SnapshotError, SpoolError), match=path.name) as raised:
                verify(tmp_path)
            assert str(path) in str(raised.value), (seed, at)
        path.write_bytes(whole)
    assert verify(tmp_path).torn_bytes == 0


@pytest.mark.parametrize("what", ["journal/journal-*.log", "snapshots/*/fragment-0.safetensors", "spool/*/*.update"])
def test_a_missing_file_is_named(tmp_path: Path, what: str) -> None:
    told(tmp_path)
    for path in sorted(tmp_path.glob(what)):
        kept = path.read_bytes()
        path.unlink()
        with pytest.raises((JournalError, SnapshotError, SpoolError), match=path.name):
            verify(tmp_path)
        path.write_bytes(kept)


def test_a_snapshot_of_another_chain_is_named(tmp_path: Path) -> None:
    told(tmp_path / "run")
    told(tmp_path / "other", seed=9)
    for path in (tmp_path / "run" / "journal").glob("journal-*.log"):
        path.write_bytes((tmp_path / "other" / "journal" / path.name).read_bytes())
    (tmp_path / "run" / "journal" / "journal.end").unlink()
    with pytest.raises(JournalError, match="is of another chain: snapshot"):
        verify(tmp_path / "run")


def test_a_folder_without_a_journal_is_said(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="holds no journal"):
        verify(tmp_path)
    assert list(tmp_path.iterdir()) == []
