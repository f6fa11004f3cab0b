from __future__ import annotations

import fcntl
import json
import shutil
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from diloco.inner import corpus
from diloco.inner.corpus import DataOptions, prepare_corpus, read_corpus, read_text, source_files
from diloco.inner.data import CorpusManifest, DataError, TokenStream, load_manifest, permuted, validation_batches
from diloco.inner.tokenizer import ByteTokenizer
from tests.forked import forkserver
from tests.inner.conftest import write_text


def prepare(text: Path, cache: Path, told: Connection) -> None:
    told.send(prepare_corpus(DataOptions(kind="text", path=str(text), tokenizer="bytes"), cache).identity)


def all_tokens(manifest: CorpusManifest, split: str) -> list[int]:
    parts = [np.fromfile(manifest.directory / shard.file, dtype="<u2") for shard in manifest.split(split).shards]
    return [int(token) for token in np.concatenate(parts)]


def drawn(manifest: CorpusManifest, batches: int, start: int = 0, **place: int) -> list[int]:
    stream = TokenStream(manifest, "train", 16, 4, **place)
    cursors = (start + number * stream.sequences_per_batch for number in range(batches))
    return [int(index) for cursor in cursors for index in stream.window_indices(cursor)]


def test_shards_hold_every_document_in_hash_order_with_its_end(manifest: CorpusManifest) -> None:
    files = source_files("text", str(manifest.directory.parent.parent / "text"), "**/*")
    corpus = read_corpus("text", files)
    for split in ("train", "validation"):
        wanted: list[int] = []
        for document in corpus.split(split):
            wanted += [*read_text("text", document).encode(), 256]
        assert all_tokens(manifest, split) == wanted
        assert manifest.split(split).tokens == len(wanted)
    assert manifest.corpus_sha256 == corpus.digest
    assert manifest.bytes_per_token == pytest.approx(1.0, rel=0.01)
    manifest.verify()


def test_small_shards_hold_the_same_tokens(tmp_path: Path, manifest: CorpusManifest) -> None:
    text = manifest.directory.parent.parent / "text"
    many = prepare_corpus(
        DataOptions(kind="text", path=str(text), tokenizer="bytes", shard_tokens=1024), tmp_path / "cache"
    )
    assert len(many.train.shards) > 5
    assert all_tokens(many, "train") == all_tokens(manifest, "train")
    inputs, targets = TokenStream(many, "train", 16, 64).batch(0)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    joined = bytes(token % 256 for token in all_tokens(many, "train"))
    rows = [bytes(int(token) % 256 for token in row) for row in inputs]
    assert all(row in joined for row in rows)


def test_preparing_again_changes_nothing_and_identity_follows_the_text(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text", num_files=6)
    options = DataOptions(kind="text", path=str(text), tokenizer="bytes")
    first = prepare_corpus(options, tmp_path / "cache")
    stamp = (first.directory / "train-00000.bin").stat().st_mtime_ns
    again = prepare_corpus(options, tmp_path / "cache")
    assert again == first
    assert (first.directory / "train-00000.bin").stat().st_mtime_ns == stamp
    # The same text elsewhere, under other names, is the same data; other text or another tokenizer is not.
    copied = tmp_path / "copied"
    copied.mkdir()
    for file in text.iterdir():
        shutil.copyfile(file, copied / f"z{file.name}")
    elsewhere = DataOptions(kind="text", path=str(copied), tokenizer="bytes")
    assert prepare_corpus(elsewhere, tmp_path / "other").identity == first.identity
    (copied / "more.txt").write_text("more text\n" * 50)
    assert prepare_corpus(elsewhere, tmp_path / "other").identity != first.identity
    bpe = DataOptions(kind="text", path=str(text), tokenizer="bpe1024")
    assert prepare_corpus(bpe, tmp_path / "cache").identity != first.identity


def test_what_a_dead_process_left_is_removed_and_a_second_process_finds_the_same(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text", num_files=6)
    cache = tmp_path / "cache"
    context = forkserver()
    here, there = context.Pipe(duplex=False)
    both = [context.Process(target=prepare, args=(text, cache, there)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60.0)
    assert [process.exitcode for process in both] == [0, 0]
    identities = {here.recv() for _ in both}
    assert len(identities) == 1
    (directory,) = (entry for entry in cache.iterdir() if entry.is_dir())
    left = cache / f"{directory.name}.tmp-1"
    shutil.move(directory, left)
    (left / "manifest.json").unlink()
    made = prepare_corpus(DataOptions(kind="text", path=str(text), tokenizer="bytes"), cache)
    assert made.identity in identities
    assert not left.exists()


def test_waiting_for_another_process_has_a_bound(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text", num_files=6)
    cache = tmp_path / "cache"
    options = DataOptions(kind="text", path=str(text), tokenizer="bytes", lock_wait_s=0.3)
    made = prepare_corpus(options, cache)
    shutil.rmtree(made.directory)
    with (cache / f"{made.directory.name}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        began = time.monotonic()
        with pytest.raises(DataError, match=r"another process has been preparing .* over 0\.3 s"):
            prepare_corpus(options, cache)
        assert 0.3 <= time.monotonic() - began < 10
    assert prepare_corpus(options, cache).identity == made.identity


def test_who_waits_is_patient_as_long_as_something_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of its own: half of the bound goes by at each look, and at each of the first ten there is more."""
    now, looks = [0.0], [0]
    notes = tmp_path / "notes"

    def sleep(seconds: float) -> None:
        now[0] += 0.5
        looks[0] += 1
        if looks[0] <= 10:
            notes.write_bytes(b"x" * looks[0])

    monkeypatch.setattr(corpus, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    with (tmp_path / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="over 1 s"), corpus._lock(tmp_path / "lock", 1.0, notes):
            raise AssertionError("it is held")
    assert looks[0] == 12


def test_the_field_of_jsonl_may_have_another_name(tmp_path: Path) -> None:
    rows = [{"body": f"text {number}", "text": "no"} for number in range(40)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    here = {"kind": "jsonl", "path": str(file), "tokenizer": "bytes"}
    made = prepare_corpus(DataOptions(**here, field="body"), tmp_path / "cache")
    assert made.train.documents + made.validation.documents == 40
    text = bytes(token % 256 for split in ("train", "validation") for token in all_tokens(made, split) if token < 256)
    assert sorted(text.decode().replace("text", " text").split(" text ")[1:]) == sorted(str(n) for n in range(40))
    with pytest.raises(DataError, match=r'rows.jsonl:1 has no field "body2" that is a string \(data\.field'):
        prepare_corpus(DataOptions(**here, field="body2"), tmp_path / "cache")


def test_damage_is_told_by_file(tmp_path: Path) -> None:
    options = DataOptions(kind="text", path=str(write_text(tmp_path / "text", 6)), tokenizer="bytes")
    made = prepare_corpus(options, tmp_path / "cache")
    shard = made.directory / "train-00000.bin"
    content = bytearray(shard.read_bytes())
    content[10] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DataError, match=r"train-00000\.bin is damaged"):
        made.verify()
    shard.write_bytes(content[:-2])
    with pytest.raises(DataError, match=r"train-00000\.bin has \d+ bytes and the manifest says"):
        prepare_corpus(options, tmp_path / "cache")
    shard.write_bytes(content)
    told = json.loads((made.directory / "manifest.json").read_text())
    told["corpus_sha256"] = "0" * 64
    (made.directory / "manifest.json").write_text(json.dumps(told))
    with pytest.raises(DataError, match="its identity does not match"):
        load_manifest(made.directory)
    (made.directory / "manifest.json").write_text("{")
    with pytest.raises(DataError, match=r"manifest\.json is damaged"):
        load_manifest(made.directory)


@pytest.mark.parametrize("num_sites", [1, 3])
def test_sites_and_ranks_draw_disjoint_sequences_that_cover_the_split(manifest: CorpusManifest, num_sites: int) -> None:
    count = (manifest.train.tokens - 1) // 16
    seen: list[int] = []
    for site in range(num_sites):
        share = TokenStream(manifest, "train", 16, 4, site, num_sites).sequences_per_epoch
        by_rank = [
            drawn(manifest, -(-share // 8), site_index=site, num_sites=num_sites, rank=rank, world=2, seed=9)
            for rank in range(2)
        ]
        # Two ranks of 4 draw what one rank of 8 would: rank 0 the first half of each batch, rank 1 the second.
        merged = [
            index
            for batch in range(len(by_rank[0]) // 4)
            for rank in by_rank
            for index in rank[batch * 4 : batch * 4 + 4]
        ]
        assert merged == drawn(manifest, len(merged) // 4, site_index=site, num_sites=num_sites, seed=9)
        assert len(set(merged[:share])) == share
        seen += merged[:share]
    assert sorted(seen) == list(range(count)), "seed 9"


def test_shares_stay_disjoint_in_later_epochs_and_epochs_differ(manifest: CorpusManifest) -> None:
    epochs = []
    for site in range(2):
        share = TokenStream(manifest, "train", 16, 4, site, 2).sequences_per_epoch
        epochs.append([drawn(manifest, share // 4, epoch * share, site_index=site, num_sites=2) for epoch in (0, 5)])
    first, later = epochs[0]
    assert first != later
    assert set(first).isdisjoint(epochs[1][1])
    assert set(later).isdisjoint(epochs[1][0])


def test_a_batch_is_a_pure_function_of_seed_place_and_cursor(manifest: CorpusManifest) -> None:
    one, two = (TokenStream(manifest, "train", 16, 4, seed=3) for _ in range(2))
    late = one.batch(1000)
    for cursor in (0, 4, 999):
        two.batch(cursor)
    assert torch.equal(two.batch(1000)[0], late[0])
    assert late[0].dtype == torch.int64
    assert late[0].shape == (4, 16)
    assert torch.equal(late[0][:, 1:], late[1][:, :-1])
    assert not torch.equal(TokenStream(manifest, "train", 16, 4, seed=4).batch(1000)[0], late[0])
    # A cursor counts sequences, so overlapping batches overlap.
    assert torch.equal(one.batch(1002)[0][:2], late[0][2:])
    assert one.tokens_per_batch == 64


def test_validation_batches_are_fixed_spread_and_complete(manifest: CorpusManifest) -> None:
    windows = (manifest.validation.tokens - 1) // 16
    everything = validation_batches(manifest, 16, 5)
    assert sum(len(inputs) for inputs, _ in everything) == windows
    some = validation_batches(manifest, 16, 4, num_batches=3)
    assert [tuple(inputs.shape) for inputs, _ in some] == [(4, 16)] * 3
    rows = [tuple(row.tolist()) for inputs, _ in everything for row in inputs]
    places = [rows.index(tuple(row.tolist())) for inputs, _ in some for row in inputs]
    assert places == [number * windows // 12 for number in range(12)]
    again = validation_batches(manifest, 16, 4, num_batches=3)
    assert all(torch.equal(a[1], b[1]) for a, b in zip(some, again, strict=True))
    assert sum(len(inputs) for inputs, _ in validation_batches(manifest, 16, 4, 10**6)) == windows


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("site_index", {"site_index": 2, "num_sites": 2}),
        ("rank", {"rank": 1}),
        ("num_sites", {"num_sites": 10**6}),
        ("sequence_length", {"sequence_length": 10**7}),
        ("split", {"split": "test"}),
        ("world", {"world": 0}),
    ],
)
def test_a_wrong_place_is_named(manifest: CorpusManifest, field: str, changes: dict[str, object]) -> None:
    place: dict[str, object] = {"split": "train", "sequence_length": 16, "batch_sequences": 4, **changes}
    with pytest.raises(ValueError, match=f"{field} is "):
        TokenStream(manifest, **place)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cursor is -1"):
        TokenStream(manifest, "train", 16, 4).batch(-1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "csv"),
        ("tokenizer", "gpt2"),
        ("shard_tokens", 1),
        ("lock_wait_s", 0.0),
        ("path", ""),
        ("field", ""),
        ("split", ""),
        ("validation_split", "train"),
        ("documents_max", -1),
    ],
)
def test_a_wrong_option_is_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value!r}"):
        DataOptions(**{"kind": "text", "path": "somewhere", field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["path", "pattern"])
def test_files_that_the_built_in_text_would_not_read_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=rf"{field} is 'mine\.txt': kind=stdlib reads.*kind=text\|jsonl"):
        DataOptions(**{field: "mine.txt"})


def test_who_goes_on_after_a_process_that_died_encodes_only_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "ENCODE_BYTES", 1000)
    options = DataOptions(kind="text", path=str(write_text(tmp_path / "text")), tokenizer="bytes", shard_tokens=1024)
    whole, heard, encoded = prepare_corpus(options, tmp_path / "whole"), list[tuple[str, int, int]](), list[int]()
    right = ByteTokenizer.encode_batch

    def encode_batch(self: ByteTokenizer, texts: Sequence[str]) -> list[np.ndarray[Any, np.dtype[np.uint16]]]:
        encoded.append(len(texts))
        if len(encoded) == 12:
            raise KeyboardInterrupt
        return right(self, texts)

    monkeypatch.setattr(ByteTokenizer, "encode_batch", encode_batch)
    with pytest.raises(KeyboardInterrupt):
        prepare_corpus(options, tmp_path / "cache")
    before = sum(encoded[:-1])
    again = prepare_corpus(options, tmp_path / "cache", lambda *told: heard.append(told))
    assert (again.identity, again.train) == (whole.identity, whole.train)
    documents = whole.train.documents + whole.validation.documents
    assert before > 4
    assert sum(encoded[12:]) < documents - before + 3, "what was written is not encoded again"
    assert not list((tmp_path / "cache").glob("*.tmp"))
    train = [(done, total) for split, done, total in heard if split == "train"]
    assert train[0][0] > 0, "it goes on where the other was"
    assert train == sorted(train)
    assert train[-1] == (whole.train.text_bytes, whole.train.text_bytes)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 100, 1000, 4097])
def test_every_place_comes_once(size: int) -> None:
    for key in ("a", "b"):
        assert sorted(permuted(np.arange(size), size, key).tolist()) == list(range(size)), (size, key)


def test_the_key_decides_and_a_single_place_can_be_asked_for() -> None:
    whole = permuted(np.arange(500), 500, "a")
    assert not np.array_equal(whole, permuted(np.arange(500), 500, "b"))
    assert all(int(permuted(np.array([at]), 500, "a")[0]) == whole[at] for at in range(0, 500, 37))


def test_neighbours_are_torn_apart() -> None:
    size = 4000
    order = permuted(np.arange(size), size, "seed 7")
    assert abs(float(np.corrcoef(np.arange(size), order)[0, 1])) < 0.06
    assert np.mean(np.abs(np.diff(order)) == 1) < 0.01
    # Neighbours of a shuffled list lie a third of the list apart on average.
    assert float(np.mean(np.abs(np.diff(order)))) == pytest.approx(size / 3, rel=0.05)


def test_large_sizes_need_no_memory() -> None:
    size = 10**15 + 1
    placed = permuted(np.array([0, 1, size - 1]), size, "big")
    assert len(set(placed.tolist())) == 3
    assert ((placed >= 0) & (placed < size)).all()
