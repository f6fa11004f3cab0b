"""Shards that are written in several goes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from diloco.inner.corpus import NOTES, Notes, ShardWriter
from diloco.inner.data import Shard
from diloco.inner.tokenizer import ByteTokenizer

DOCUMENTS = [np.arange(first, first + 3 + first % 9, dtype=np.uint16) for first in range(40)]
SHARD = 16


def written(folder: Path, upto: int | None = None, text: str = "this") -> tuple[list[Shard], int]:
    """The shards after the documents before ``upto``, and with how many of them there were already."""
    writer = ShardWriter(folder, "train", SHARD, ByteTokenizer(False), Notes(folder, text, 2))
    begun = writer.documents
    for ids in DOCUMENTS[begun:upto]:
        writer.write(ids)
    return (writer.close() if upto is None else []), begun


def content(folder: Path) -> list[int]:
    files = sorted(folder.glob("*.bin"))
    return [int(number) for file in files for number in np.fromfile(file, dtype="<u2")]


def test_shards_are_full_and_hold_every_document_in_order(tmp_path: Path) -> None:
    shards, begun = written(tmp_path)
    assert begun == 0
    assert content(tmp_path) == [int(number) for ids in DOCUMENTS for number in ids]
    assert {shard.tokens for shard in shards[:-1]} == {SHARD}


def test_wherever_it_is_broken_off_it_goes_on_and_ends_in_the_same(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    wanted, _ = written(tmp_path / "whole")
    for upto in range(0, len(DOCUMENTS), 3):
        folder = tmp_path / str(upto)
        folder.mkdir()
        written(folder, upto)
        (folder / "train-00099.bin").write_bytes(b"a shard without a note")
        with (folder / NOTES).open("ab") as notes:
            notes.write(b'{"split": "tra')
        found, begun = written(folder)
        assert found == wanted
        assert begun >= min(1, upto // 8), "not from the beginning"
        assert content(folder) == content(tmp_path / "whole")


def test_a_shard_that_is_gone_or_cut_is_written_again_and_all_after_it(tmp_path: Path) -> None:
    wanted, _ = written(tmp_path)
    (tmp_path / "train-00003.bin").write_bytes(b"cut")
    found, begun = written(tmp_path)
    assert found == wanted
    assert 0 < begun < len(DOCUMENTS)


def test_a_note_with_a_flipped_bit_is_not_believed(tmp_path: Path) -> None:
    """The text went on with another document, and nothing said so."""
    wanted, _ = written(tmp_path)
    first, second, *rest = (tmp_path / NOTES).read_text().splitlines(keepends=True)
    for flipped in (second.replace('"documents": 3', '"documents": 2'), second.replace('"crc32": ', '"crc32": 1')):
        assert flipped != second
        (tmp_path / NOTES).write_text("".join([first, flipped, *rest]))
        assert written(tmp_path) == (wanted, 0)
    plain = [{key: value for key, value in json.loads(line).items() if key != "crc32"} for line in (first, second)]
    (tmp_path / NOTES).write_text("".join(json.dumps(each) + "\n" for each in plain))
    assert written(tmp_path)[1] > 0, "those of the release before are read"


def test_what_is_behind_the_last_mark_is_written_again(tmp_path: Path) -> None:
    notes = Notes(tmp_path, "this", 2, marked=True)
    assert notes.mark is None
    writer = ShardWriter(tmp_path, "train", 1000, ByteTokenizer(False), notes)
    for number, ids in enumerate(DOCUMENTS[:9]):
        writer.write(ids)
        if number in (3, 6):
            assert writer.held > 0
            writer.close()
            notes.put({"place": number})
    writer.close()  # Durable, and nobody knows of what.
    for _ in range(2):
        again = Notes(tmp_path, "this", 2, marked=True)
        assert again.mark == {"place": 6}
        assert [note.documents for note in again.of("train")] == [4, 7]
        assert sorted(file.name for file in tmp_path.glob("*.bin")) == ["train-00000.bin", "train-00001.bin"]
    (tmp_path / "train-00000.bin").unlink()
    assert Notes(tmp_path, "this", 2, marked=True).mark is None, "a mark says of all that is before it"
    assert Notes(tmp_path, "that", 2, marked=True).mark is None


def test_what_was_written_of_another_text_is_thrown_away(tmp_path: Path) -> None:
    written(tmp_path, 20)
    assert written(tmp_path, 20, "another")[1] == 0
    assert written(tmp_path, 20, "another")[1] > 0
