"""Which sequences of a manifest a site and a rank draw, and what they read of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diloco.inner.corpus import prepare_corpus
from diloco.inner.data import (
    PIECES_MAX,
    CorpusManifest,
    DataError,
    TokenStream,
    UnitPlaces,
    load_manifest,
    permuted,
    validation_batches,
)
from diloco.inner.parallel import SiteGroup
from tests.inner.conftest import damage, options, write_text


def drawn(manifest: CorpusManifest, batches: int, start: int = 0, **place: int) -> list[int]:
    stream = TokenStream(manifest, "train", 16, 4, **place)
    cursors = (start + number * stream.sequences_per_batch for number in range(batches))
    return [int(index) for cursor in cursors for index in stream.window_indices(cursor)]


def test_damage_is_told_by_file(tmp_path: Path) -> None:
    wanted = options(write_text(tmp_path / "text", 6))
    made = prepare_corpus(wanted, tmp_path / "cache")
    shard, manifest = made.directory / "train-00000.bin", made.directory / "manifest.json"
    damage(shard, "cut")
    with pytest.raises(DataError, match=r"train-00000\.bin has \d+ bytes and the manifest says"):
        prepare_corpus(wanted, tmp_path / "cache")
    told = json.dumps({**json.loads(manifest.read_text()), "corpus_sha256": "0" * 64})
    for text, words in ((told, "its identity does not match"), ("{", r"manifest\.json is damaged")):
        manifest.write_text(text)
        with pytest.raises(DataError, match=words):
            load_manifest(made.directory)


@pytest.mark.parametrize("epoch", [0, 5])
@pytest.mark.parametrize("num_sites", [1, 3])
def test_sites_and_ranks_draw_disjoint_sequences_that_cover_the_split(
    manifest: CorpusManifest, num_sites: int, epoch: int
) -> None:
    """Two ranks of 4 draw what one rank of 8 would: rank 0 the first half of each batch, rank 1 the second."""
    seen: list[int] = []
    for site in range(num_sites):
        place: dict[str, Any] = {"site_index": site, "num_sites": num_sites, "seed": 9}
        share = TokenStream(manifest, "train", 16, 4, **place).sequences_per_epoch
        batches, start = -(-share // 8), epoch * share
        first, second = (drawn(manifest, batches, start, rank=rank, world=2, **place) for rank in range(2))
        merged: list[int] = []
        for at in range(0, len(first), 4):
            merged += first[at : at + 4] + second[at : at + 4]
        assert merged == drawn(manifest, len(merged) // 4, start, **place)
        assert merged != drawn(manifest, len(merged) // 4, (5 - epoch) * share, **place), "epochs differ"
        seen += merged[:share]
    assert sorted(seen) == list(range((manifest.train.tokens - 1) // 16)), "seed 9"


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
    for field, value in (("num_sites", 10**6), ("sequence_length", 10**7)):
        place: dict[str, Any] = {"split": "train", "sequence_length": 16, "batch_sequences": 4, field: value}
        with pytest.raises(ValueError, match=f"{field} is {value!r}: "):
            TokenStream(manifest, **place)


def test_validation_batches_are_fixed_spread_and_complete(manifest: CorpusManifest) -> None:
    windows = (manifest.validation.tokens - 1) // 16
    everything = list(validation_batches(manifest, 16, 5))
    assert sum(len(inputs) for inputs, _ in everything) == windows
    some = list(validation_batches(manifest, 16, 4, num_batches=3))
    assert [tuple(inputs.shape) for inputs, _ in some] == [(4, 16)] * 3
    rows = [tuple(row.tolist()) for inputs, _ in everything for row in inputs]
    places = [rows.index(tuple(row.tolist())) for inputs, _ in some for row in inputs]
    assert places == [number * windows // 12 for number in range(12)]
    again = validation_batches(manifest, 16, 4, num_batches=3)
    assert all(torch.equal(a[1], b[1]) for a, b in zip(some, again, strict=True))
    taken = validation_batches(manifest, 16, 4, 10**6)
    assert iter(taken) is taken, "a batch is read when it is taken: a large split does not fit in memory"
    assert sum(len(inputs) for inputs, _ in taken) == windows
    assert [len(inputs) for inputs, _ in validation_batches(manifest, 16, 1)] == windows * [1]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 100, 1000, 4097])
def test_every_place_comes_once_and_a_single_one_can_be_asked_for(size: int) -> None:
    for key in ("a", "b"):
        whole = permuted(np.arange(size), size, key)
        assert sorted(whole.tolist()) == list(range(size)), (size, key)
        assert all(int(permuted(np.array([at]), size, key)[0]) == whole[at] for at in range(0, size, 37))
    large = 10**15 + 1  # Needs no memory.
    placed = permuted(np.array([0, 1, large - 1]), large, "big")
    assert len(set(placed.tolist())) == 3
    assert ((placed >= 0) & (placed < large)).all()


def test_neighbours_are_torn_apart_and_the_key_decides() -> None:
    size = 4000
    order = permuted(np.arange(size), size, "seed 7")
    assert not np.array_equal(order, permuted(np.arange(size), size, "seed 8"))
    assert abs(float(np.corrcoef(np.arange(size), order)[0, 1])) < 0.06
    assert np.mean(np.abs(np.diff(order)) == 1) < 0.01
    # Neighbours of a shuffled list lie a third of the list apart on average.
    assert float(np.mean(np.abs(np.diff(order)))) == pytest.approx(size / 3, rel=0.05)


# --- Batches of leased units ------------------------------------------------------------------------------------------


UNIT = 8


class Source:
    """A list of units, and what was asked of it."""

    def __init__(self, *units: int) -> None:
        self.units, self.asked = list(units), list[int]()

    def __call__(self, place: int, count: int) -> list[tuple[int, int]]:
        self.asked.append(place)
        return [(unit, 1) for unit in self.units[place : place + count]]


def stream(manifest: CorpusManifest, source: Source, batch: int = 4) -> TokenStream:
    return TokenStream(manifest, "train", 16, batch, seed=3, units=UnitPlaces(UNIT, source, SiteGroup(device="cpu")))


def test_a_unit_is_the_same_sequences_at_every_site_and_all_of_them_are_an_epoch(manifest: CorpusManifest) -> None:
    whole = TokenStream(manifest, "train", 16, 4, seed=3)
    epoch = whole.sequences_per_epoch
    units = -(-epoch // UNIT)
    here = stream(manifest, Source(*reversed(range(units))))
    found = {}
    for cursor in range(0, units * UNIT, 4):
        unit = units - 1 - cursor // UNIT
        found[unit, cursor % UNIT] = [int(index) for index in here.window_indices(cursor)]
    windows = [index for at in sorted(found) for index in found[at]]
    assert sorted(windows[:epoch]) == list(range(epoch)), "one epoch, each window once"
    assert windows[:8] == [int(i) for cursor in (0, 4) for i in whole.window_indices(cursor)]


def test_a_batch_begins_anywhere_goes_over_the_end_of_a_unit_and_remembers_no_unit(manifest: CorpusManifest) -> None:
    source = Source(5, 2, 9)
    here = stream(manifest, source, batch=6)
    plain = stream(manifest, Source(*range(10)), batch=1)
    places = [5 * UNIT + 6, 5 * UNIT + 7, *range(2 * UNIT, 2 * UNIT + 4)]
    wanted = [plain.window_indices(place)[0] for place in places]
    assert here.window_indices(6).tolist() == wanted
    assert source.asked == [0]
    source.units[1] = 7
    assert not np.array_equal(here.window_indices(6), wanted), "the run was restored, and the list is another"


def test_a_batch_of_many_small_units_is_told_in_several_goes(manifest: CorpusManifest) -> None:
    source = Source(*range(0, 200, 2))
    here = TokenStream(
        manifest, "train", 16, PIECES_MAX + 5, seed=3, units=UnitPlaces(1, source, SiteGroup(device="cpu"))
    )
    plain = TokenStream(manifest, "train", 16, 1, seed=3)
    wanted = [plain.window_indices(2 * place)[0] for place in range(PIECES_MAX + 5)]
    assert here.window_indices(0).tolist() == wanted
    assert source.asked == [0, PIECES_MAX]
