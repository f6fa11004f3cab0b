"""Token ids that lie in files already."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diloco.inner import corpus
from diloco.inner.corpus import DataOptions, prepare_corpus
from diloco.inner.data import CorpusManifest, DataError, TokenStream, load_manifest, validation_batches


def ids(manifest: CorpusManifest, split: str) -> np.ndarray[Any, np.dtype[np.uint16]]:
    parts = [np.fromfile(manifest.directory / shard.file, dtype="<u2") for shard in manifest.split(split).shards]
    return np.concatenate(parts)


def write(folder: Path, manifest: CorpusManifest, dtype: str = "uint16") -> Path:
    """The tokens of ``manifest`` as other programs leave them: two files of training, one of validation."""
    folder.mkdir(parents=True)
    train, validation = ids(manifest, "train"), ids(manifest, "validation")
    half = len(train) // 2
    for name, values in (("a.bin", train[:half]), ("train-b.bin", train[half:]), ("val.bin", validation)):
        values.astype(np.dtype(dtype).newbyteorder("<")).tofile(folder / name)
    return folder


def options(path: Path, **changes: Any) -> DataOptions:
    return DataOptions(**{"kind": "tokens", "path": str(path), "tokenizer": "bytes", **changes})


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_files_are_read_where_they_lie_and_give_the_same_tokens(
    dtype: str, tmp_path: Path, manifest: CorpusManifest
) -> None:
    folder = write(tmp_path / "there", manifest, dtype)
    found = prepare_corpus(options(folder, dtype=dtype), tmp_path / "cache")
    assert found.folder == folder
    assert [shard.file for shard in found.train.shards] == ["a.bin", "train-b.bin"]
    assert (found.train.tokens, found.validation.tokens) == (manifest.train.tokens, manifest.validation.tokens)
    assert found.bytes_per_token == pytest.approx(manifest.bytes_per_token, rel=0.02)
    found.verify()
    for ours, theirs in zip(validation_batches(found, 16, 8), validation_batches(manifest, 16, 8), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    inputs, targets = TokenStream(found, "train", 16, 4).batch(0)
    assert inputs.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_they_are_looked_at_once(tmp_path: Path, manifest: CorpusManifest, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "there", manifest)
    first = prepare_corpus(options(folder), tmp_path / "cache")
    monkeypatch.setattr(corpus, "_describe_files", None)
    assert prepare_corpus(options(folder), tmp_path / "cache") == first


def test_the_identity_is_that_of_the_tokens_and_of_no_place(tmp_path: Path, manifest: CorpusManifest) -> None:
    here = prepare_corpus(options(write(tmp_path / "here", manifest)), tmp_path / "cache-here")
    there = prepare_corpus(options(write(tmp_path / "there", manifest)), tmp_path / "cache-there")
    assert here.identity == there.identity
    wide = prepare_corpus(
        options(write(tmp_path / "wide", manifest, "uint32"), dtype="uint32"), tmp_path / "cache-wide"
    )
    assert wide.identity != here.identity
    values = np.fromfile(tmp_path / "there" / "a.bin", dtype="<u2")
    values[7] ^= 1
    values.tofile(tmp_path / "there" / "a.bin")
    assert prepare_corpus(options(tmp_path / "there"), tmp_path / "cache-there").identity != here.identity


def test_files_may_be_links_to_where_they_lie(tmp_path: Path, manifest: CorpusManifest) -> None:
    folder, linked = write(tmp_path / "there", manifest), tmp_path / "linked"
    linked.mkdir()
    for file in folder.iterdir():
        (linked / file.name).symlink_to(file)
    found = prepare_corpus(options(linked), tmp_path / "cache")
    assert [shard.file for shard in found.train.shards] == ["a.bin", "train-b.bin"]
    assert found.identity == prepare_corpus(options(folder), tmp_path / "cache").identity
    (tmp_path / "whole").symlink_to(folder)
    assert prepare_corpus(options(tmp_path / "whole"), tmp_path / "cache").identity == found.identity


def test_a_folder_that_we_have_prepared_is_taken_as_it_is(tmp_path: Path, manifest: CorpusManifest) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(manifest.directory, folder)
    assert prepare_corpus(options(folder), tmp_path / "cache").identity == manifest.identity
    with pytest.raises(DataError, match=r"was made by the tokenizer bytes, and data\.tokenizer is bpe1024"):
        prepare_corpus(options(folder, tokenizer="bpe1024"), tmp_path / "cache")


def test_what_cannot_be_read_is_said_by_file_and_setting(tmp_path: Path, manifest: CorpusManifest) -> None:
    folder, cache = write(tmp_path / "there", manifest), tmp_path / "cache"
    with pytest.raises(DataError, match=r"a\.bin has the id \d+, and the tokenizer bytes has 257: give the tokenizer"):
        prepare_corpus(options(folder, dtype="uint32"), cache)
    (folder / "c.bin").write_bytes(b"abc")
    with pytest.raises(DataError, match=r"c\.bin has 3 bytes: a multiple of 2"):
        prepare_corpus(options(folder), cache)
    (folder / "c.bin").unlink()
    (folder / "val.bin").unlink()
    with pytest.raises(DataError, match='no file of it is for validation: one whose name begins with "val"'):
        prepare_corpus(options(folder), cache)
    with pytest.raises(DataError, match="no file in it matches"):
        prepare_corpus(options(folder, pattern="*.npy"), cache)
    with pytest.raises(ValueError, match="dtype is 'float32'"):
        options(folder, dtype="float32")


def test_files_that_are_gone_are_missed(tmp_path: Path, manifest: CorpusManifest) -> None:
    folder, cache = write(tmp_path / "there", manifest), tmp_path / "cache"
    found = prepare_corpus(options(folder), cache)
    (folder / "a.bin").write_bytes(b"\0\0")
    with pytest.raises(DataError, match=r"a\.bin has 2 bytes and the manifest says"):
        load_manifest(found.directory)
