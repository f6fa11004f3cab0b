"""Sealed updates: there when they were put, the same bytes after a death, and any damage is noticed."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from diloco.learner.seal import FRESH_MAX, SPARE_MAX, Outbox, OutboxError
from tests.syncer.building import update


def test_the_same_bytes_are_sent_by_a_new_process(tmp_path: Path) -> None:
    header, payload = update(sequence=3, fragment=1, tokens=77)
    Outbox(tmp_path).put(header, payload)
    again = Outbox(tmp_path)
    assert again.digests() == {(1, 3): header.digest}
    found, view = again.get(1, 3, incarnation=9)
    assert found == replace(header, incarnation=9)
    assert bytes(view) == payload
    again.drop(1, 3)
    again.drop(1, 3)
    assert again.digests() == {}
    with pytest.raises(FileNotFoundError):
        again.get(1, 3, 9)


def test_its_folder_is_durable_before_anything_is_put_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site sends what is durable here; in a folder without a durable name nothing is."""
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}")))
    Outbox(tmp_path / "site-a" / "outbox")
    assert synced[:2] == [str(tmp_path / "site-a"), str(tmp_path)]


def test_it_is_durable_when_put_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    outbox = Outbox(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}")))
    outbox.put(*update())
    assert len(synced) == 2
    assert synced[1] == str(tmp_path)


def test_a_later_one_takes_the_place_of_an_earlier_of_the_same_number(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    outbox.put(*update(values=None))
    second, payload = update(site="a", values=None, encoding="int8")
    outbox.put(second, payload)
    assert outbox.get(0, 1, 1)[0] == second
    assert len(list(tmp_path.iterdir())) == 1


def test_every_damaged_byte_is_noticed_in_header_and_payload(tmp_path: Path) -> None:
    """A flipped digit of ``tokens`` or ``base_version`` is as bad as one of the payload."""
    header, payload = update()
    outbox = Outbox(tmp_path)
    outbox.put(header, payload)
    path = tmp_path / "0-1.update"
    whole = path.read_bytes()
    seed = random.randrange(1 << 30)
    dice = random.Random(seed)
    for at in range(0, len(whole), 5):
        bit = dice.randrange(8)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << bit)]) + whole[at + 1 :])
        with pytest.raises(OutboxError, match=f"{path} is damaged"):
            outbox.get(0, 1, 1)
        assert outbox.digests() == {}, (seed, at, bit)
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        assert outbox.digests() == {}, length
    path.write_bytes(whole)
    assert outbox.digests() == {(0, 1): header.digest}


def test_what_was_just_put_here_is_had_from_memory_once(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    header, payload = update()
    outbox.put(header, payload)
    found = outbox.fresh(0, 1, 9)
    assert found is not None
    assert (found[0], bytes(found[1])) == (replace(header, incarnation=9), payload)
    assert outbox.fresh(0, 1, 9) is None
    assert (outbox.get(0, 1, 9)[0], bytes(outbox.get(0, 1, 9)[1])) == (found[0], payload)


def test_what_is_dropped_cleared_or_of_long_ago_is_not_in_memory(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    for sequence in range(1, FRESH_MAX + 2):
        outbox.put(*update(sequence=sequence))
    assert outbox.fresh(0, 1, 1) is None
    outbox.drop(0, 2)
    assert outbox.fresh(0, 2, 1) is None
    outbox.clear({(0, 3)})
    assert outbox.fresh(0, 3, 1) is None
    assert outbox.get(0, 3, 1) is not None


def test_what_is_not_kept_is_cleared_and_leftovers_too(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    for sequence in (1, 2, 3):
        outbox.put(*update(sequence=sequence))
    (tmp_path / ".0-4.update.77.tmp").write_bytes(b"half")
    again = Outbox(tmp_path)
    again.clear({(0, 2), (1, 3)})
    assert [path.name for path in tmp_path.iterdir()] == ["0-2.update"]


def test_another_rank_clears_nothing_and_has_the_same_files(tmp_path: Path) -> None:
    Outbox(tmp_path).put(*update(sequence=1))
    half = tmp_path / ".0-4.update.77.tmp"
    half.write_bytes(b"half")
    other = Outbox(tmp_path, settled=True)
    assert half.exists(), "it may be one that is being written at this moment"
    assert list(other.digests()) == [(0, 1)]
    other.put(*update(sequence=2))
    assert list(Outbox(tmp_path).digests()) == [(0, 1), (0, 2)]


def test_a_file_that_is_needed_no_more_is_written_over(tmp_path: Path) -> None:
    outbox, room = Outbox(tmp_path), set()
    for sequence, kind in enumerate(("fp32", "int8", "fp32", "bf16"), 1):
        header, payload = update(sequence=sequence, encoding=kind)
        outbox.put(header, payload)
        room.add((tmp_path / f"0-{sequence}.update").stat().st_ino)
        found, view = outbox.get(0, sequence, header.incarnation)
        assert (found, bytes(view)) == (header, payload), "shorter or longer than what was there"
        outbox.drop(0, sequence)
        assert outbox.digests() == {}
        with pytest.raises(FileNotFoundError):
            outbox.get(0, sequence, 1)
    assert len(room) == 1
    assert len(list(tmp_path.iterdir())) == 1
    Outbox(tmp_path)
    assert not list(tmp_path.iterdir()), "another process starts without"


def test_a_name_that_a_power_cut_brought_back_has_nothing_behind_it(tmp_path: Path) -> None:
    Outbox(tmp_path).put(*update(sequence=2))
    (tmp_path / "0-2.update").rename(tmp_path / "0-1.update")
    again = Outbox(tmp_path)
    assert again.digests() == {}
    with pytest.raises(OutboxError, match="another name"):
        again.get(0, 1, 1)


def test_no_more_than_a_few_are_kept_for_that(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    for sequence in range(SPARE_MAX + 2):
        outbox.put(*update(sequence=sequence + 1))
    for sequence in range(SPARE_MAX + 2):
        outbox.drop(0, sequence + 1)
    assert len(list(tmp_path.iterdir())) == SPARE_MAX
    for path in tmp_path.iterdir():
        path.unlink()  # Somebody tidied up.
    outbox.put(*update(sequence=9))
    assert outbox.get(0, 9, 1) is not None


def test_a_full_disk_takes_the_spare_file_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outbox = Outbox(tmp_path)
    outbox.put(*update(sequence=1))
    outbox.drop(0, 1)

    def full(handle: int) -> None:
        raise OSError(28, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="full"):
            outbox.put(*update(sequence=2))
    assert not list(tmp_path.iterdir()), "what it took is free for others"
    outbox.put(*update(sequence=2))
    assert outbox.get(0, 2, 1) is not None
