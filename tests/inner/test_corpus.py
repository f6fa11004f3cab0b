"""Text in files, data sets as streams and files of tokens become shards with a manifest, whatever interrupts it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from diloco.inner import corpus
from diloco.inner.corpus import (
    NOTES,
    DataOptions,
    Notes,
    ShardWriter,
    prepare_corpus,
    read_corpus,
    read_text,
    source_files,
)
from diloco.inner.data import CorpusManifest, DataError, Shard, TokenStream, load_manifest, validation_batches
from diloco.inner.tokenizer import ByteTokenizer
from tests.inner.conftest import options, tokens_of, write_text
from tests.sooner import sooner


def write(folder: Path, **files: bytes) -> list[Path]:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return sorted(folder.iterdir())


def refused(words: str, cache: Path, path: Path | str, kind: str = "text", **changes: Any) -> None:
    """What is said of a text that cannot be prepared, in one line."""
    with pytest.raises(DataError, match=words) as raised:
        prepare_corpus(options(path, kind, **changes), cache)
    assert "\n" not in str(raised.value)


def test_duplicates_and_what_is_not_text_are_left_out(tmp_path: Path) -> None:
    files = write(tmp_path / "t", a=b"one", b=b"two", c=b"one", d=b"\xff\xfe", e=b"")
    found = read_corpus("text", files)
    assert sorted(read_text("text", document) for document in found.documents) == ["one", "two"]
    assert (found.num_duplicates, found.num_not_text, found.text_bytes) == (1, 2, 6)
    digests = sorted(hashlib.sha256(content).digest() for content in (b"one", b"two"))
    assert found.digest == hashlib.sha256(b"".join(digests)).hexdigest()
    files[0].write_bytes(b"uno")
    with pytest.raises(DataError, match="a changed while"):
        [read_text("text", document) for document in found.documents]


def test_a_few_documents_still_make_two_splits_and_one_does_not(tmp_path: Path) -> None:
    for number in range(10):
        files = write(tmp_path / str(number), a=f"first {number}".encode(), b=f"second {number}".encode())
        corpus = read_corpus("text", files)
        assert [len(corpus.split(name)) for name in ("train", "validation")] == [1, 1], number
    with pytest.raises(DataError, match="1 distinct document"):
        read_corpus("text", write(tmp_path / "single", a=b"only"))


def test_jsonl_takes_a_field_and_names_a_bad_line(tmp_path: Path) -> None:
    rows = [{"body": text, "text": "no"} for text in ("erste Zeile", "zweite\nZeile ü", "erste Zeile", "")]
    (file,) = write(tmp_path / "ok", data=("\n".join(json.dumps(row) for row in rows) + "\n\n").encode())
    found = read_corpus("jsonl", [file], "body")
    texts = sorted(read_text("jsonl", document, "body") for document in found.documents)
    assert texts == ["erste Zeile", "zweite\nZeile ü"]
    assert (found.num_duplicates, found.num_not_text) == (1, 1)
    made = prepare_corpus(options(file, "jsonl", field="body"), tmp_path / "cache")
    both = bytes(token for split in ("train", "validation") for token in tokens_of(made, split) if token < 256).decode()
    assert both in ("".join(texts), "".join(reversed(texts)))
    refused(
        r'data:1 has no field "body2" that is a string \(data\.field', tmp_path / "cache", file, "jsonl", field="body2"
    )
    (file,) = write(tmp_path / "bad", data=b'{"text": "a"}\nnot json\n')
    refused(":2 is not a line", tmp_path / "cache", file, "jsonl")


def test_the_standard_library_is_read_without_its_tests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = source_files("stdlib", "", "")
    names = {file.name for file in files}
    assert {"argparse.py", "decoder.py"} <= names
    root = Path(sysconfig.get_paths()["stdlib"])
    parts = {part for file in files for part in file.relative_to(root).parts[:-1]}
    assert parts.isdisjoint({"test", "tests", "idlelib", "lib2to3", "site-packages"})
    write(tmp_path, **{"a.py": b"x = 1", "b.py": b"y = 2"})
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match="holds 10 bytes of source, and the built-in corpus needs 2000000"):
        read_corpus("stdlib", source_files("stdlib", "", ""))


def test_a_folder_that_is_not_there_or_holds_nothing_is_named(tmp_path: Path) -> None:
    refused(r"nowhere.*there is no such", tmp_path / "cache", tmp_path / "nowhere")
    write(tmp_path / ".git", head=b"not a text")
    (tmp_path / ".hidden.md").touch()
    refused("no file in it matches", tmp_path / "cache", tmp_path, pattern="*.md")
    refused("no file in it", tmp_path / "cache", tmp_path)
    refused("can only be", tmp_path / "cache", tmp_path, pattern="**.md")
    refused(r"pattern is '/\*': Non-relative", tmp_path / "cache", tmp_path, pattern="/*")


def test_what_runs_write_below_the_text_is_none_of_it(tmp_path: Path) -> None:
    write(tmp_path, **{f"x{number}": f"document {number}".encode() for number in range(40)})
    first = prepare_corpus(options(tmp_path), tmp_path / "runs/.data", runs=tmp_path / "runs")
    write(tmp_path / "runs/otter", events=b"a line")
    assert prepare_corpus(options(tmp_path), tmp_path / "runs/.data", runs=tmp_path / "runs") == first


# --- Prepared once ----------------------------------------------------------------------------------------------------


def as_ids(texts: Sequence[str]) -> list[int]:
    return [token for text in texts for token in (*text.encode(), 256)]


def check_digests(made: CorpusManifest) -> None:
    for shard in (*made.train.shards, *made.validation.shards):
        assert hashlib.sha256((made.folder / shard.file).read_bytes()).hexdigest() == shard.sha256, shard.file


def for_split(texts: Sequence[str], split: str = "train") -> list[int]:
    validation = split == "validation"
    return as_ids([text for text in texts if (hashlib.sha256(text.encode()).digest()[0] < 16) == validation])


def test_shards_hold_every_document_in_hash_order_with_its_end_and_are_split_by_hash(tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(200)]
    write(tmp_path / "text", **{f"x{number}": text.encode() for number, text in enumerate(texts)})
    ordered = sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())
    for changes in ({}, {"shard_tokens": 1024}):
        made = prepare_corpus(options(tmp_path / "text", **changes), tmp_path / "cache")
        assert len(made.train.shards) == (3 if changes else 1)
        for split in ("train", "validation"):
            assert tokens_of(made, split) == for_split(ordered, split)
            assert made.split(split).tokens == len(for_split(ordered, split))
        assert made.bytes_per_token == pytest.approx(1.0, rel=0.1)
        check_digests(made)
        # Whichever shard a sequence lies in.
        joined = bytes(token % 256 for token in tokens_of(made, "train"))
        inputs, _ = TokenStream(made, "train", 16, 128).batch(0)
        assert all(bytes(row) in joined for row in (inputs % 256).tolist())


def test_preparing_again_changes_nothing_and_identity_follows_the_text(tmp_path: Path) -> None:
    text, cache, copied = write_text(tmp_path / "text", num_files=6), tmp_path / "cache", tmp_path / "copied"
    first = prepare_corpus(options(text), cache)
    stamp = (first.directory / "train-00000.bin").stat().st_mtime_ns
    assert prepare_corpus(options(text), cache) == first
    assert (first.directory / "train-00000.bin").stat().st_mtime_ns == stamp
    # The same text elsewhere, under other names, is the same data; other text or another tokenizer is not.
    write(copied, **{f"z{file.name}": file.read_bytes() for file in text.iterdir()})
    assert prepare_corpus(options(copied), tmp_path / "other").identity == first.identity
    (copied / "more.txt").write_text("more text\n" * 50)
    assert prepare_corpus(options(copied), tmp_path / "other").identity != first.identity
    assert prepare_corpus(options(text, tokenizer="bpe1024"), cache).identity != first.identity


def test_of_two_at_once_one_prepares_and_what_a_dead_one_of_an_earlier_release_left_is_removed(tmp_path: Path) -> None:
    """Two threads, since the lock is an open file's and not a process's."""
    wanted, cache = options(write_text(tmp_path / "text", num_files=6)), tmp_path / "cache"
    with ThreadPoolExecutor(2) as both:
        first, second = both.map(prepare_corpus, [wanted] * 2, [cache] * 2)
    assert first == second
    left = first.directory.rename(cache / f"{first.directory.name}.tmp-1")
    (left / "manifest.json").unlink()
    assert prepare_corpus(wanted, cache) == first
    assert not left.exists()


def test_another_process_is_waited_for_as_long_as_it_writes_something_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock of its own: half of the bound goes by at each look, and at each of the first ten there is more."""
    now, looks, cache = [0.0], [0], tmp_path / "cache"
    wanted = options(write_text(tmp_path / "text", num_files=6), lock_wait_s=1.0)
    made = prepare_corpus(wanted, cache)
    notes = made.directory.rename(made.directory.with_name(f"{made.directory.name}.tmp")) / NOTES

    def sleep(seconds: float) -> None:
        now[0] += 0.5
        looks[0] += 1
        if looks[0] <= 10:
            notes.write_bytes(b"x" * looks[0])

    monkeypatch.setattr(corpus, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    with (cache / f"{made.directory.name}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=r"another process has been preparing .* over 1 s"):
            prepare_corpus(wanted, cache)
    assert looks[0] == 12
    assert prepare_corpus(wanted, cache).identity == made.identity


class Counting(ByteTokenizer):
    """Ends the process, as it were, at its ``last`` batch; ``texts`` are all that were handed in."""

    def __init__(self, patch: pytest.MonkeyPatch, last: int = sys.maxsize) -> None:
        super().__init__(True)
        self.texts, self.batches, self._last = list[str](), 0, last
        patch.setattr(corpus, "make_tokenizer", lambda name, end: self)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray[Any, np.dtype[np.uint16]]]:
        self.batches += 1
        if self.batches == self._last:
            raise KeyboardInterrupt
        self.texts += texts
        return super().encode_batch(texts)


def begun(patch: pytest.MonkeyPatch, wanted: DataOptions, cache: Path, last: int) -> Counting:
    """What a process that died at its ``last`` batch has read."""
    died = Counting(patch, last)
    with pytest.raises(KeyboardInterrupt):
        prepare_corpus(wanted, cache)
    return died


def test_after_a_process_that_died_only_the_rest_is_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "BATCH_BYTES", 1000)
    wanted, cache = options(write_text(tmp_path / "text"), shard_tokens=1024), tmp_path / "cache"
    whole, heard = prepare_corpus(wanted, tmp_path / "whole"), list[tuple[str, int, int]]()
    before = len(begun(monkeypatch, wanted, cache, 12).texts)
    after = Counting(monkeypatch)
    again = prepare_corpus(wanted, cache, lambda *told: heard.append(told))
    assert (again.identity, again.train) == (whole.identity, whole.train)
    documents = whole.train.documents + whole.validation.documents
    assert before > 4
    assert len(after.texts) < documents - before + 3, "what was written is not encoded again"
    assert not list(cache.glob("*.tmp"))
    train = [(done, total) for split, done, total in heard if split == "train"]
    assert train[0][0] > 0, "it goes on where the other was"
    assert train == sorted(train)
    assert train[-1] == (whole.train.text_bytes, whole.train.text_bytes)


def test_a_text_that_changed_under_the_same_size_and_time_is_prepared_from_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "BATCH_BYTES", 1000)
    text = write_text(tmp_path / "text")
    wanted = options(text, shard_tokens=1024)
    begun(monkeypatch, wanted, tmp_path / "cache", 12)
    file = text / "000.txt"
    before = file.stat()
    file.write_bytes(file.read_bytes()[::-1])
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = Counting(monkeypatch)
    made = prepare_corpus(wanted, tmp_path / "cache")
    assert len(after.texts) == made.train.documents + made.validation.documents


# --- Shards that are written in several goes --------------------------------------------------------------------------


DOCUMENTS = [np.arange(first, first + 3 + first % 9, dtype=np.uint16) for first in range(40)]
SHARD = 16


def written(folder: Path, upto: int | None = None) -> tuple[list[Shard], int]:
    """The shards after the documents before ``upto``, and with how many of them there were already."""
    folder.mkdir(exist_ok=True)
    writer = ShardWriter(Notes(folder, "this", 2), "train", SHARD, ByteTokenizer(False))
    begun = writer.documents
    for ids in DOCUMENTS[begun:upto]:
        writer.write(ids)
    return (writer.close() if upto is None else []), begun


def content(folder: Path) -> list[int]:
    files = sorted(folder.glob("*.bin"))
    return [int(number) for file in files for number in np.fromfile(file, dtype="<u2")]


def test_wherever_it_is_broken_off_it_goes_on_and_ends_in_the_same(tmp_path: Path) -> None:
    wanted, begun = written(tmp_path / "whole")
    assert begun == 0
    assert content(tmp_path / "whole") == [int(number) for ids in DOCUMENTS for number in ids]
    assert {shard.tokens for shard in wanted[:-1]} == {SHARD}
    for upto in range(0, len(DOCUMENTS), 3):
        folder = tmp_path / str(upto)
        written(folder, upto)
        (folder / "train-00099.bin").write_bytes(b"a shard without a note")
        with (folder / NOTES).open("ab") as notes:
            notes.write(b'{"split": "tra')
        found, begun = written(folder)
        assert found == wanted
        assert begun >= min(1, upto // 8), "not from the beginning"
        assert content(folder) == content(tmp_path / "whole")
        assert written(folder) == (wanted, len(DOCUMENTS)), "a line that was torn hides none of the later ones"


def test_a_shard_that_is_cut_and_a_note_with_a_flipped_bit_are_written_again(
    tmp_path: Path,
) -> None:
    """The text went on with another document, and nothing said so."""
    wanted, _ = written(tmp_path)
    (tmp_path / "train-00003.bin").write_bytes(b"cut")
    found, begun = written(tmp_path)
    assert found == wanted
    assert 0 < begun < len(DOCUMENTS)
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
    writer = ShardWriter(notes, "train", 1000, ByteTokenizer(False))
    for number, ids in enumerate(DOCUMENTS[:9]):
        writer.write(ids)
        if number in (3, 6):
            assert writer.held > 0
            writer.close()
            notes.append({"mark": {"place": number}})
    writer.close()  # Durable, and nothing says of what.
    for _ in range(2):
        again = Notes(tmp_path, "this", 2, marked=True)
        assert again.mark == {"place": 6}
        assert [note.documents for note in again.of("train")] == [4, 7]
        assert sorted(file.name for file in tmp_path.glob("*.bin")) == ["train-00000.bin", "train-00001.bin"]
    (tmp_path / "train-00000.bin").unlink()
    assert Notes(tmp_path, "this", 2, marked=True).mark is None, "a mark says of all that is before it"


# --- Data sets of Hugging Face's, from local files --------------------------------------------------------------------


TEXTS = [f"document {number}: " + "a word or two, " * (number % 7) for number in range(120)]


def as_jsonl(path: Path, texts: Sequence[object]) -> None:
    rows = ({"number": number, "text": text} for number, text in enumerate(texts))
    path.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def as_parquet(path: Path, texts: Sequence[object]) -> None:
    pq.write_table(
        pa.table({"number": range(len(texts)), "text": texts}), path.with_suffix(".parquet"), row_group_size=7
    )


Write = Callable[[Path, Sequence[object]], None]


def streamed(root: Path, write: Write = as_jsonl, texts: Sequence[object] = TEXTS) -> Path:
    """A folder of several files, which are read in the order of their names."""
    root.mkdir(parents=True)
    third = -(-len(texts) // 3)
    for number in range(3):
        write(root / f"part-{number}", texts[number * third : (number + 1) * third])
    return root


@pytest.mark.parametrize("write", sooner([as_jsonl, as_parquet], as_parquet))
def test_a_folder_of_files_becomes_the_same_tokens_whatever_their_form(tmp_path: Path, write: Write) -> None:
    heard: list[tuple[str, int, int]] = []
    root = streamed(tmp_path / "set", write, [None, "", *TEXTS, None])
    made = prepare_corpus(options(root, "hf"), tmp_path / "cache", lambda *told: heard.append(told))
    assert tokens_of(made, "train") == for_split(TEXTS)
    assert tokens_of(made, "validation") == for_split(TEXTS, "validation")
    assert (made.train.documents + made.validation.documents, made.num_not_text) == (len(TEXTS), 3)
    assert made.train.text_bytes + made.validation.text_bytes == len("".join(TEXTS))
    assert heard[-1] == ("the stream", len("".join(TEXTS)), len("".join(TEXTS)))
    check_digests(made)
    as_lines = streamed(tmp_path / "as-jsonl", texts=[None, "", *TEXTS, None])
    assert made.identity == prepare_corpus(options(as_lines, "hf"), tmp_path / "other").identity
    left = {"manifest.json", "train-00000.bin", "validation-00000.bin"}
    assert {file.name for file in made.directory.iterdir()} == left, "and nothing else"


def test_one_file_or_some_of_a_folder_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, cache = streamed(tmp_path / "set"), tmp_path / "cache"
    one = prepare_corpus(options(root / "part-1.jsonl", "hf"), cache)
    assert tokens_of(one, "train") == for_split(TEXTS[40:80])
    assert prepare_corpus(options(root, "hf", pattern="part-1.*"), cache).identity == one.identity
    front = prepare_corpus(options(root, "hf", documents_max=75), cache)
    assert front.train.documents + front.validation.documents == 75
    assert tokens_of(front, "train") == for_split(TEXTS[:75])
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert prepare_corpus(options(root, "hf", documents_max=75), cache) == front
    as_jsonl(root / "part-2", ["changed"])
    refused(r"kind 'hf' needs the library datasets .*: pip install 'diloco\[datasets\]'", cache, root, "hf")


def test_a_split_of_its_own_is_validation(tmp_path: Path) -> None:
    root = tmp_path / "set"
    root.mkdir()
    as_jsonl(root / "train", TEXTS[:100])
    as_jsonl(root / "test", TEXTS[100:])
    made = prepare_corpus(options(root, "hf", validation_split="test", documents_max=15), tmp_path / "cache")
    assert tokens_of(made, "train") == as_ids(TEXTS[:15])
    assert tokens_of(made, "validation") == as_ids(TEXTS[100:115])
    cache, there = tmp_path / "cache", ".*set has train, test"
    refused(f"validation_split is 'dev': {there}", cache, root, "hf", validation_split="dev")
    refused(f"^split is 'trains': {there}", cache, root, "hf", split="trains")


@pytest.mark.parametrize("write", sooner([as_jsonl, as_parquet], as_jsonl))
def test_after_a_process_that_died_it_is_read_behind_its_last_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Write
) -> None:
    monkeypatch.setattr(corpus, "BATCH_BYTES", 150)
    wanted = options(streamed(tmp_path / "set", write), "hf", shard_tokens=1024)
    whole = prepare_corpus(wanted, tmp_path / "whole")
    assert len(whole.train.shards) >= 5
    assert len(whole.validation.shards) >= 2
    most = 0
    for last in (2, 16, 30):
        cache = tmp_path / str(last)
        died, after = begun(monkeypatch, wanted, cache, last), Counting(monkeypatch)
        again = prepare_corpus(wanted, cache)
        assert (again.identity, again.train, again.validation) == (whole.identity, whole.train, whole.validation)
        assert after.texts == TEXTS[len(TEXTS) - len(after.texts) :], "from one place to the end, each once"
        assert len(died.texts) + len(after.texts) < len(TEXTS) + 40, "what was marked is not read again"
        most = max(most, len(TEXTS) - len(after.texts))
    assert most > 60


def test_what_another_state_of_the_data_or_release_of_the_library_left_is_thrown_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "BATCH_BYTES", 150)
    wanted, opened = options(streamed(tmp_path / "set"), "hf", shard_tokens=1024), corpus._opened
    changes: dict[str, tuple[str, object]] = {
        # A branch on the hub has moved: the settings are the same, and what they name is not.
        "branch": ("diloco.inner.corpus._opened", lambda *given: ("another commit", opened(*given)[1])),
        # It may not understand where the other one says that the stream stood.
        "release": ("datasets.__version__", "99.0.0"),
    }
    for cache, change in changes.items():
        begun(monkeypatch, wanted, tmp_path / cache, 30)
        with monkeypatch.context() as patch:
            patch.setattr(*change)
            after = Counting(patch)
            prepare_corpus(wanted, tmp_path / cache)
            assert after.texts == TEXTS, cache


def test_what_cannot_be_streamed_is_said_in_one_line(tmp_path: Path) -> None:
    root, cache = streamed(tmp_path / "set"), tmp_path / "cache"
    columns = streamed(tmp_path / "columns", as_parquet)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"field": "body"}, r"^field is 'body': the documents of .*set have number, text$"),
        ({"field": "body", "path": columns}, r"^field is 'body': the documents of .*columns have number, text$"),
        ({"field": "number"}, r"^field is 'number': in document 0 it is not text but int$"),
        ({"name": "small"}, r"^path is .*set': .*'small' not found"),
        ({"pattern": "*.csv"}, r"no file in it matches pattern='\*\.csv'"),
        ({"documents_max": 1}, r"has no document for validation: give more documents, or set validation_split if"),
        ({"path": str(root / "nowhere")}, r"nowhere': there is no such file or folder$"),
        ({"path": "nobody/nothing"}, r"^path is 'nobody/nothing': there is no such file or folder here, and of the"),
    ]
    for changes, words in cases:
        refused(words, cache, **{"kind": "hf", "path": root, **changes})
    (root / "part-1.jsonl").write_text('{"text": "a"}\nnot json\n')
    refused(r"broke off after 40 documents: .*JSON.*; the next start resumes", cache, root, "hf")


# --- Token ids that lie in files already ------------------------------------------------------------------------------


def laid_out(folder: Path, manifest: CorpusManifest, dtype: str = "uint16") -> Path:
    """The tokens of ``manifest`` as other programs leave them: two files of training, one of validation."""
    folder.mkdir(parents=True)
    train, validation = tokens_of(manifest, "train"), tokens_of(manifest, "validation")
    half = len(train) // 2
    for name, values in (("a.bin", train[:half]), ("train-b.bin", train[half:]), ("val.bin", validation)):
        np.array(values, dtype=np.dtype(dtype).newbyteorder("<")).tofile(folder / name)
    return folder


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_files_are_looked_at_once_and_read_where_they_lie(
    dtype: str, tmp_path: Path, manifest: CorpusManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = laid_out(tmp_path / "there", manifest, dtype)
    found = prepare_corpus(options(folder, "tokens", dtype=dtype), tmp_path / "cache")
    assert found.folder == folder
    assert [shard.file for shard in found.train.shards] == ["a.bin", "train-b.bin"]
    assert (found.train.tokens, found.validation.tokens) == (manifest.train.tokens, manifest.validation.tokens)
    assert found.bytes_per_token == pytest.approx(manifest.bytes_per_token, rel=0.02)
    check_digests(found)
    for ours, theirs in zip(validation_batches(found, 16, 8), validation_batches(manifest, 16, 8), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    monkeypatch.setattr(corpus, "_describe_files", None)
    assert prepare_corpus(options(folder, "tokens", dtype=dtype), tmp_path / "cache") == found


def test_the_identity_is_that_of_the_tokens_and_of_no_place(tmp_path: Path, manifest: CorpusManifest) -> None:
    folder, linked, cache = laid_out(tmp_path / "here", manifest), tmp_path / "linked", tmp_path / "cache"
    here = prepare_corpus(options(folder, "tokens"), cache)
    linked.mkdir()
    for file in folder.iterdir():
        (linked / file.name).symlink_to(file)
    (tmp_path / "whole").symlink_to(folder)
    for other in (laid_out(tmp_path / "there", manifest), linked, tmp_path / "whole"):
        found = prepare_corpus(options(other, "tokens"), cache)
        assert found.identity == here.identity
        assert [shard.file for shard in found.train.shards] == ["a.bin", "train-b.bin"]
    (tmp_path / "there" / "a.bin").write_bytes((tmp_path / "there" / "val.bin").read_bytes())
    wide = laid_out(tmp_path / "wide", manifest, "uint32")
    for other, dtype in ((wide, "uint32"), (tmp_path / "there", "uint16")):
        assert prepare_corpus(options(other, "tokens", dtype=dtype), cache).identity != here.identity
    copy = tmp_path / "copy"
    shutil.copytree(manifest.directory, copy)
    assert prepare_corpus(options(copy, "tokens"), cache).identity == manifest.identity, "as we have prepared it"
    made = r"was made by the tokenizer bytes, and data\.tokenizer is bpe1024"
    refused(made, cache, copy, "tokens", tokenizer="bpe1024")
    refused(r"end_of_file is False, and .* was made with True", cache, copy, "tokens", end_of_file=False)
    (copy / "manifest.json").write_text('{"of": "another program"}')
    refused(r"copy .* again, or remove its manifest\.json", cache, copy, "tokens")


def test_what_cannot_be_read_is_said_by_file_and_setting(tmp_path: Path, manifest: CorpusManifest) -> None:
    folder, cache = laid_out(tmp_path / "there", manifest), tmp_path / "cache"
    refuses = partial(refused, cache=cache, path=folder, kind="tokens")
    refuses(r"a\.bin has the id \d+, and the tokenizer bytes has 257 ids: set data", dtype="uint32")
    refuses("no file in it matches", pattern="*.npy")
    found = prepare_corpus(options(folder, "tokens"), cache)
    (folder / "c.bin").write_bytes(b"abc")
    refuses(r"c\.bin has 3 bytes: data\.dtype=uint16 needs a multiple of 2")
    (folder / "c.bin").write_bytes(b"")
    refuses(r"c\.bin has 0 bytes: data\.dtype=uint16 needs a multiple of 2, more than 0")
    (folder / "c.bin").unlink()
    (folder / "val.bin").unlink()
    refuses('it has no file for validation: add one whose name begins with "val"')
    (folder / "a.bin").write_bytes(b"\0\0")
    with pytest.raises(DataError, match=r"a\.bin has 2 bytes and the manifest says"):
        load_manifest(found.directory)
