from __future__ import annotations

import hashlib
import json
import sysconfig
from pathlib import Path

import pytest

from diloco.inner.corpus import read_corpus, read_text, source_files
from diloco.inner.data import DataError


def write(folder: Path, **files: bytes) -> list[Path]:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return sorted(folder.iterdir())


def test_duplicates_and_what_is_not_text_are_left_out(tmp_path: Path) -> None:
    files = write(tmp_path / "t", a=b"one", b=b"two", c=b"one", d=b"\xff\xfe", e=b"")
    corpus = read_corpus("text", files)
    assert sorted(read_text("text", document) for document in corpus.documents) == ["one", "two"]
    assert (corpus.num_duplicates, corpus.num_not_text, corpus.text_bytes) == (1, 2, 6)
    digests = sorted(hashlib.sha256(content).digest() for content in (b"one", b"two"))
    assert corpus.digest == hashlib.sha256(b"".join(digests)).hexdigest()


def test_the_split_is_by_hash_whatever_the_names(tmp_path: Path) -> None:
    contents = [f"document {number}".encode() for number in range(200)]
    here = read_corpus("text", write(tmp_path / "a", **{f"x{n}": text for n, text in enumerate(contents)}))
    there = read_corpus("text", write(tmp_path / "b", **{f"y{200 - n}": text for n, text in enumerate(contents)}))
    assert here.digest == there.digest
    for name in ("train", "validation"):
        split = here.split(name)
        assert [document.digest for document in split] == [document.digest for document in there.split(name)]
        assert split
        assert all((document.digest[0] < 16) == (name == "validation") for document in split)
    assert len(here.split("train")) + len(here.split("validation")) == 200


def test_a_few_documents_still_make_two_splits_and_one_does_not(tmp_path: Path) -> None:
    for number in range(20):
        files = write(tmp_path / str(number), a=f"first {number}".encode(), b=f"second {number}".encode())
        corpus = read_corpus("text", files)
        assert [len(corpus.split(name)) for name in ("train", "validation")] == [1, 1], number
    with pytest.raises(DataError, match="1 distinct document"):
        read_corpus("text", write(tmp_path / "single", a=b"only"))


def test_jsonl_takes_the_field_text_and_names_a_bad_line(tmp_path: Path) -> None:
    rows = [{"text": "erste Zeile"}, {"text": "zweite\nZeile ü"}, {"text": "erste Zeile"}, {"text": ""}]
    lines = "\n".join(json.dumps(row) for row in rows) + "\n\n"
    (file,) = write(tmp_path / "ok", data=lines.encode())
    corpus = read_corpus("jsonl", [file])
    assert sorted(read_text("jsonl", document) for document in corpus.documents) == ["erste Zeile", "zweite\nZeile ü"]
    assert (corpus.num_duplicates, corpus.num_not_text) == (1, 1)
    for bad, words in (
        (b'{"text": "a"}\nnot json\n', ":2 is not a line"),
        (b'{"body": "a"}\n', ':1 has no field "text"'),
    ):
        (file,) = write(tmp_path / "bad", data=bad)
        with pytest.raises(DataError, match=words):
            read_corpus("jsonl", [file])


def test_a_file_that_changes_under_way_is_noticed(tmp_path: Path) -> None:
    files = write(tmp_path / "t", a=b"one", b=b"two")
    corpus = read_corpus("text", files)
    files[0].write_bytes(b"uno")
    with pytest.raises(DataError, match="a changed while"):
        [read_text("text", document) for document in corpus.documents]


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
    with pytest.raises(DataError, match=r"nowhere.*there is no such"):
        source_files("text", str(tmp_path / "nowhere"), "**/*")
    with pytest.raises(DataError, match=r"no file in it matches pattern='\*\.md'"):
        source_files("text", str(tmp_path), "*.md")
