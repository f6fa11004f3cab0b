"""Data sets of Hugging Face's, from local files."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from diloco.inner import corpus
from diloco.inner.corpus import DataOptions, prepare_corpus
from diloco.inner.data import CorpusManifest, DataError, TokenStream, validation_batches
from diloco.inner.tokenizer import ByteTokenizer
from tests.sooner import sooner

TEXTS = [f"document {number}: " + "a word or two, " * (number % 7) for number in range(120)]


def as_jsonl(path: Path, texts: Sequence[object], name: str = "text") -> None:
    rows = ({"number": number, name: text} for number, text in enumerate(texts))
    path.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def as_parquet(path: Path, texts: Sequence[object], name: str = "text") -> None:
    pq.write_table(pa.table({"number": range(len(texts)), name: texts}), path.with_suffix(".parquet"), row_group_size=7)


def as_arrow(path: Path, texts: Sequence[object], name: str = "text") -> None:
    table = pa.table({"number": range(len(texts)), name: texts})
    with pa.OSFile(str(path.with_suffix(".arrow")), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=9)


Write = Callable[[Path, Sequence[object]], None]


def folder(root: Path, write: Write = as_jsonl, texts: Sequence[object] = TEXTS) -> Path:
    """Several files, which are read in the order of their names."""
    root.mkdir(parents=True)
    third = -(-len(texts) // 3)
    for number in range(3):
        write(root / f"part-{number}", texts[number * third : (number + 1) * third])
    return root


def options(path: Path | str, **changes: Any) -> DataOptions:
    return DataOptions(**{"kind": "hf", "path": str(path), "tokenizer": "bytes", **changes})


def ids(manifest: CorpusManifest, split: str) -> list[int]:
    parts = [np.fromfile(manifest.folder / shard.file, dtype="<u2") for shard in manifest.split(split).shards]
    return [int(token) for token in np.concatenate(parts)]


def as_ids(texts: Sequence[str]) -> list[int]:
    return [token for text in texts for token in (*text.encode(), 256)]


def is_validation(text: str) -> bool:
    return hashlib.sha256(text.encode()).digest()[0] < 16


@pytest.mark.parametrize("write", sooner([as_jsonl, as_parquet, as_arrow], as_parquet))
def test_a_folder_of_files_becomes_the_same_tokens_whatever_their_form(tmp_path: Path, write: Write) -> None:
    heard: list[tuple[str, int, int]] = []
    made = prepare_corpus(
        options(folder(tmp_path / "set", write)), tmp_path / "cache", lambda *told: heard.append(told)
    )
    assert ids(made, "train") == as_ids([text for text in TEXTS if not is_validation(text)])
    assert ids(made, "validation") == as_ids([text for text in TEXTS if is_validation(text)])
    assert made.train.documents + made.validation.documents == len(TEXTS)
    assert made.train.text_bytes + made.validation.text_bytes == len("".join(TEXTS))
    assert heard[-1] == ("the stream", len("".join(TEXTS)), len("".join(TEXTS)))
    made.verify()
    assert made.identity == prepare_corpus(options(folder(tmp_path / "as-jsonl")), tmp_path / "other").identity
    assert TokenStream(made, "train", 16, 4).batch(0)[0].shape == (4, 16)
    assert validation_batches(made, 16, 4)
    assert sorted(file.name for file in made.directory.iterdir()) == [
        "manifest.json",
        "train-00000.bin",
        "validation-00000.bin",
    ]


def test_one_file_or_some_of_a_folder(tmp_path: Path) -> None:
    root, cache = folder(tmp_path / "set"), tmp_path / "cache"
    one = prepare_corpus(options(root / "part-1.jsonl"), cache)
    assert ids(one, "train") == as_ids([text for text in TEXTS[40:80] if not is_validation(text)])
    assert prepare_corpus(options(root, pattern="part-1.*"), cache).identity == one.identity
    front = prepare_corpus(options(root, documents_max=75), cache)
    assert front.train.documents + front.validation.documents == 75
    assert ids(front, "train") == as_ids([text for text in TEXTS[:75] if not is_validation(text)])


def test_a_split_of_its_own_is_validation(tmp_path: Path) -> None:
    root = tmp_path / "set"
    root.mkdir()
    as_jsonl(root / "train", TEXTS[:100])
    as_jsonl(root / "test", TEXTS[100:])
    made = prepare_corpus(options(root, validation_split="test", documents_max=15), tmp_path / "cache")
    assert ids(made, "train") == as_ids(TEXTS[:15])
    assert ids(made, "validation") == as_ids(TEXTS[100:115])
    with pytest.raises(DataError, match=r"validation_split is 'dev': .*set has train, test"):
        prepare_corpus(options(root, validation_split="dev"), tmp_path / "cache")
    with pytest.raises(DataError, match=r"^split is 'trains': .*set has train, test"):
        prepare_corpus(options(root, split="trains"), tmp_path / "cache")


def test_what_holds_no_text_is_left_out(tmp_path: Path) -> None:
    root = folder(tmp_path / "set", texts=[None, "", *TEXTS, None])
    made = prepare_corpus(options(root), tmp_path / "cache")
    assert made.num_not_text == 3
    assert ids(made, "train") == as_ids([text for text in TEXTS if not is_validation(text)])


def test_it_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, cache = folder(tmp_path / "set"), tmp_path / "cache"
    first = prepare_corpus(options(root), cache)
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert prepare_corpus(options(root), cache) == first
    as_jsonl(root / "part-2", ["changed"])
    with pytest.raises(DataError, match=r"kind 'hf' needs the library datasets .*: pip install 'diloco\[datasets\]'"):
        prepare_corpus(options(root), cache)


class Counting(ByteTokenizer):
    """Ends the process, as it were, at its ``last`` batch; ``texts`` are all that were handed in."""

    def __init__(self, last: int = sys.maxsize) -> None:
        super().__init__(True)
        self.texts, self.batches, self._last = list[str](), 0, last

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray[Any, np.dtype[np.uint16]]]:
        self.batches += 1
        if self.batches == self._last:
            raise KeyboardInterrupt
        self.texts += texts
        return super().encode_batch(texts)


@pytest.mark.parametrize("write", sooner([as_jsonl, as_parquet, as_arrow], as_jsonl))
def test_who_goes_on_after_a_process_that_died_reads_behind_its_last_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Write
) -> None:
    monkeypatch.setattr(corpus, "BATCH_BYTES", 150)
    root = folder(tmp_path / "set", write)
    wanted = options(root, shard_tokens=1024)
    whole = prepare_corpus(wanted, tmp_path / "whole")
    assert len(whole.train.shards) >= 5
    assert len(whole.validation.shards) >= 2
    most = 0
    for last in (2, 16, 30):
        cache, died, after = tmp_path / str(last), Counting(last), Counting()
        monkeypatch.setattr(corpus, "make_tokenizer", lambda name, end, mine=died: mine)
        with pytest.raises(KeyboardInterrupt):
            prepare_corpus(wanted, cache)
        monkeypatch.setattr(corpus, "make_tokenizer", lambda name, end, mine=after: mine)
        again = prepare_corpus(wanted, cache)
        assert (again.identity, again.train, again.validation) == (whole.identity, whole.train, whole.validation)
        assert after.texts == TEXTS[len(TEXTS) - len(after.texts) :], "from one place to the end, each once"
        assert len(died.texts) + len(after.texts) < len(TEXTS) + 40, "what was marked is not read again"
        most = max(most, len(TEXTS) - len(after.texts))
    assert most > 60


def test_what_another_state_of_the_data_left_is_thrown_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a branch on the hub has moved: the settings are the same, and what they name is not."""
    monkeypatch.setattr(corpus, "BATCH_BYTES", 150)
    root, cache, died, after = folder(tmp_path / "set"), tmp_path / "cache", Counting(30), Counting()
    wanted, opened = options(root, shard_tokens=1024), corpus._opened
    monkeypatch.setattr(corpus, "make_tokenizer", lambda name, end: died)
    with pytest.raises(KeyboardInterrupt):
        prepare_corpus(wanted, cache)

    def elsewhere(*given: Any) -> corpus._Opened:
        return corpus._Opened("another commit", opened(*given).streams)

    monkeypatch.setattr(corpus, "_opened", elsewhere)
    monkeypatch.setattr(corpus, "make_tokenizer", lambda name, end: after)
    prepare_corpus(wanted, cache)
    assert after.texts == TEXTS


def test_what_another_release_of_the_library_left_is_thrown_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may not understand where the other one says that the stream stood."""
    import datasets

    monkeypatch.setattr(corpus, "BATCH_BYTES", 150)
    wanted, died, after = options(folder(tmp_path / "set"), shard_tokens=1024), Counting(30), Counting()
    monkeypatch.setattr(corpus, "make_tokenizer", lambda name, end: died)
    with pytest.raises(KeyboardInterrupt):
        prepare_corpus(wanted, tmp_path / "cache")
    monkeypatch.setattr(datasets, "__version__", "99.0.0")
    monkeypatch.setattr(corpus, "make_tokenizer", lambda name, end: after)
    prepare_corpus(wanted, tmp_path / "cache")
    assert after.texts == TEXTS


def test_a_stream_that_breaks_off_says_where_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "BATCH_BYTES", 150)
    root, cache = folder(tmp_path / "set"), tmp_path / "cache"
    wanted, mended = options(root, shard_tokens=1024), tmp_path / "mended"
    shutil.copytree(root, mended)
    whole = prepare_corpus(options(mended, shard_tokens=1024), tmp_path / "whole")
    import datasets

    right, left = datasets.IterableDataset.__iter__, 70

    def breaking(self: Any) -> Any:
        for number, row in enumerate(right(self)):
            if number == left:
                raise ConnectionError("the hub\nis gone")
            yield row

    monkeypatch.setattr(datasets.IterableDataset, "__iter__", breaking)
    with pytest.raises(DataError, match=r"broke off behind 70 documents: the hub is gone; the next start"):
        prepare_corpus(wanted, cache)
    monkeypatch.setattr(datasets.IterableDataset, "__iter__", right)
    after = Counting()
    monkeypatch.setattr(corpus, "make_tokenizer", lambda name, end: after)
    assert prepare_corpus(wanted, cache).identity == whole.identity
    assert len(after.texts) < 100


def test_what_cannot_be_read_is_said_in_one_line(tmp_path: Path) -> None:
    root, cache = folder(tmp_path / "set"), tmp_path / "cache"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"field": "body"}, r"^field is 'body': the documents of .*set have number, text$"),
        ({"field": "number"}, r"^field is 'number': in document 0 it is no text, but int$"),
        ({"name": "small"}, r"^path is .*set': .*'small' not found"),
        ({"pattern": "*.csv"}, r"no file in it matches pattern='\*\.csv'"),
        ({"documents_max": 1}, r"has no document for validation: give documents, or validation_split where"),
        ({"path": str(root / "nowhere")}, r"nowhere': there is no such file or folder$"),
        ({"path": "nobody/nothing"}, r"^path is 'nobody/nothing': there is no such file or folder here, and of the"),
    ]
    for changes, words in cases:
        with pytest.raises(DataError, match=words) as raised:
            prepare_corpus(options(**{"path": root, **changes}), cache)
        assert "\n" not in str(raised.value)
    (root / "part-1.jsonl").write_text('{"text": "a"}\nnot json\n')
    with pytest.raises(DataError, match=r"broke off behind 40 documents: .*JSON"):
        prepare_corpus(options(root), cache)
