"""Batches of leased units."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from diloco.inner.corpus import DataOptions, prepare_corpus
from diloco.inner.data import PIECES_MAX, CorpusManifest, LeasedStream, TokenStream
from diloco.inner.parallel import SiteGroup

UNIT = 8


class Source:
    """A list of units, and what was asked of it."""

    def __init__(self, *units: int) -> None:
        self.units, self.asked = list(units), list[int]()

    def __call__(self, place: int, count: int) -> list[tuple[int, int]]:
        self.asked.append(place)
        return [(unit, 1) for unit in self.units[place : place + count]]


def alone() -> SiteGroup:
    return SiteGroup(0, 0, 1, "127.0.0.1", 0, "cpu", 10.0)


def stream(manifest: CorpusManifest, source: Source, batch: int = 4) -> LeasedStream:
    return LeasedStream(manifest, "train", 16, batch, UNIT, source, alone(), seed=3)


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


def of_kind(kind: str, root: Path, text: Path) -> CorpusManifest:
    """The same text as each kind of data that a site can have."""
    cache, rows = root / "cache", root / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": file.read_text()}) + "\n" for file in sorted(text.iterdir())))
    if kind == "hf":
        return prepare_corpus(DataOptions(kind=kind, path=str(rows), tokenizer="bytes"), cache)
    path = rows if kind == "jsonl" else text
    made = prepare_corpus(
        DataOptions(kind="text" if kind == "tokens" else kind, path=str(path), tokenizer="bytes"), cache
    )
    if kind != "tokens":
        return made
    for split in ("train", "validation"):
        (file,) = made.split(split).shards
        shutil.copy(made.directory / file.file, root / f"{split[:5]}.bin")
    return prepare_corpus(DataOptions(kind=kind, path=str(root), pattern="*.bin", tokenizer="bytes"), cache)


@pytest.mark.parametrize("kind", ["text", "jsonl", "tokens", "hf"])
def test_units_of_every_kind_of_data_are_each_sequence_once(
    kind: str, tmp_path: Path, manifest: CorpusManifest
) -> None:
    made = of_kind(kind, tmp_path, manifest.directory.parent.parent / "text")
    epoch = TokenStream(made, "train", 16, 4).sequences_per_epoch
    units = -(-epoch // UNIT)
    sources = [Source(*range(0, units, 2)), Source(*range(1, units, 2))]
    sites = [(stream(made, source, UNIT), len(source.units)) for source in sources]
    drawn = [site.batch(place * UNIT)[0] for site, count in sites for place in range(count)]
    rows = sorted(tuple(row) for batch in drawn for row in batch.tolist())
    plain = TokenStream(made, "train", 16, UNIT, seed=3)
    wanted = [plain.batch(unit * UNIT)[0] for unit in range(units)]
    assert rows == sorted(tuple(row) for batch in wanted for row in batch.tolist())


def test_a_batch_may_go_over_the_end_of_a_unit_and_begin_anywhere(manifest: CorpusManifest) -> None:
    here = stream(manifest, Source(5, 2, 9), batch=6)
    plain = stream(manifest, Source(*range(10)), batch=1)
    places = [5 * UNIT + 6, 5 * UNIT + 7, *range(2 * UNIT, 2 * UNIT + 4)]
    wanted = [plain.window_indices(place)[0] for place in places]
    assert here.window_indices(6).tolist() == wanted
    assert np.array_equal(here.window_indices(14), here.window_indices(14))


def test_it_asks_for_the_units_of_a_batch_and_remembers_none(manifest: CorpusManifest) -> None:
    source = Source(*range(0, 200, 2))
    here = stream(manifest, source)
    before = here.window_indices(2 * UNIT)
    assert source.asked == [2]
    source.units[2] = 77
    assert not np.array_equal(here.window_indices(2 * UNIT), before), "the run was restored, and the list is another"


def test_a_batch_of_many_small_units_is_told_in_several_goes(manifest: CorpusManifest) -> None:
    source = Source(*range(0, 200, 2))
    here = LeasedStream(manifest, "train", 16, PIECES_MAX + 5, 1, source, alone(), seed=3)
    plain = TokenStream(manifest, "train", 16, 1, seed=3)
    wanted = [plain.window_indices(2 * place)[0] for place in range(PIECES_MAX + 5)]
    assert here.window_indices(0).tolist() == wanted
    assert source.asked == [0, PIECES_MAX]


def test_all_ranks_draw_what_rank_0_is_told(manifest: CorpusManifest) -> None:
    source, told, barrier = Source(7, 3, 8), list[list[int]](), threading.Barrier(2)

    class Ranks:
        world = 2

        def __init__(self, rank: int) -> None:
            self.rank, self.is_first, self.heard = rank, rank == 0, 0

        def broadcast_small(self, values: list[int]) -> list[int]:
            if self.is_first:
                told.append(values)
            barrier.wait(10)
            self.heard += 1
            return told[self.heard - 1]  # The last one may be the next one already.

    found: dict[int, list[int]] = {}

    def draw(rank: int) -> None:
        mine = LeasedStream(manifest, "train", 16, 4, UNIT, source, Ranks(rank), seed=3)  # type: ignore[arg-type]
        found[rank] = [int(index) for cursor in (0, 8, 16) for index in mine.window_indices(cursor)]

    threads = [threading.Thread(target=draw, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    plain = stream(manifest, Source(7, 3, 8), batch=8)
    wanted = [plain.window_indices(cursor).tolist() for cursor in (0, 8, 16)]
    assert [*found[0][:4], *found[1][:4]] == wanted[0]
    assert [*found[0][8:], *found[1][8:]] == wanted[2]
    assert source.asked == [0, 1, 2]


def test_what_cannot_be_is_refused(manifest: CorpusManifest) -> None:
    with pytest.raises(ValueError, match="unit_sequences is 0"):
        LeasedStream(manifest, "train", 16, 4, 0, Source(1), alone())
    with pytest.raises(ValueError, match="cursor is -1"):
        stream(manifest, Source(1)).batch(-1)
