"""``run.json``: what is wrong in it is named, and what can be known without it is written anew."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from diloco.syncer.restoring import begin_lineage
from diloco.syncer.store import Store, StoreError
from tests.syncer.desk import CARD, Desk


@pytest.mark.parametrize("wrong", [None, 1, "7", 10**12])
def test_a_run_card_that_is_missing_or_of_another_lineage_is_named_and_written_anew(
    tmp_path: Path, wrong: object
) -> None:
    """A card that said lineage 1 for a restored run had been made in silence."""
    desk = Desk(tmp_path)
    desk.begin()
    began = begin_lineage(desk.store, desk.machine, desk.values, None, "a test", 7)
    desk.close()
    path = tmp_path / "run.json"
    whole = json.loads(path.read_text())
    assert whole["lineage"] == began.lineage == 7
    path.write_text(json.dumps({**whole, "lineage": wrong}))
    if wrong is None:
        path.unlink()
    again = Desk(tmp_path)
    assert again.recovered is not None
    said = "was missing: it is written anew" if wrong is None else f"said lineage {wrong!r}: the journal's is 7"
    assert [note for note in again.notes if f"{path} {said}" in note]
    assert json.loads(path.read_text()) == whole
    again.close()


def test_a_bit_that_flips_in_any_byte_of_the_run_card_is_named(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.begin()
    desk.close()
    path = tmp_path / "run.json"
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), 5):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        assert path.name in what_a_start_says(tmp_path), bytes(flipped)


def test_a_run_card_of_an_earlier_release_is_accepted_and_written_anew(tmp_path: Path) -> None:
    """It has another digest where a setting that may change was not at its default."""
    Desk(tmp_path).close()
    path = tmp_path / "run.json"
    whole = json.loads(path.read_text())
    path.write_text(json.dumps({**whole, "shared_digest": "earlier"}))
    with pytest.raises(StoreError, match=r"run\.json has shared_digest 'earlier' and this run has 'shared'"):
        Store(tmp_path, replace(CARD, earlier_digest="another"))
    Store(tmp_path, replace(CARD, earlier_digest="earlier")).journal.close()
    assert json.loads(path.read_text()) == whole
    Desk(tmp_path).close()


@pytest.mark.parametrize("field", ["run_id", "layout_fingerprint", "shared_digest"])
def test_a_card_of_another_run_is_known_by_a_field(field: str) -> None:
    card = replace(CARD, earlier_digest="earlier")
    assert card.difference(card.facts()) is None
    assert (card.difference({**card.facts(), field: "earlier"}) is None) == (field == "shared_digest")
    for wrong in ("other", None, 7, ["earlier"]):
        assert card.difference({**card.facts(), field: wrong}) == field


def what_a_start_says(folder: Path) -> str:
    try:
        desk = Desk(folder)
    except StoreError as error:
        return str(error)
    desk.close()
    assert desk.recovered is not None
    return " ".join(desk.notes)
