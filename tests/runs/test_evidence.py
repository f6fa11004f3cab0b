"""What different witnesses remember of one run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diloco.codec.base import digest
from diloco.config.errors import ConfigError
from diloco.models.read import read_evidence
from tests.models.pasts import with_a_past
from tests.models.test_read_warm_site import BASES, checkpointed, state


def events(path: Path, *lines: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps({"at": 0, "who": "syncer", **line}) + "\n" for line in lines))
    return path


def published(version: int, digest: str, **more: object) -> dict[str, object]:
    return {"what": "published", "fragment": 0, "version": version, "digest": digest, **more}


def test_events_say_digests_tokens_and_numbers(tmp_path: Path) -> None:
    path = events(
        tmp_path / "events.jsonl",
        {"what": "syncer_started", "epoch": 4},
        published(1, "one", merged={"a": [100, 1], "b": [50, 2]}),
        published(2, "two", merged={"a": [30, 1]}),
        {"what": "published", "fragment": "no number"},
        {"what": "restored", "lineage": 9, "versions": [3], "held": [["a", 0, 130, 2]]},
        published(4, "four", lineage=9, merged={"b": [7, 1]}),
    )
    found = read_evidence([path])
    assert (found.lineage, found.epoch) == (9, 4)
    assert found.digests[1, 0, 2] == [("two", str(path))]
    assert found.held(1, [2]) == {("a", 0): (130, 2), ("b", 0): (50, 2)}
    assert found.held(1, [3]) is None, "version 3 of that lineage is not known"
    assert found.held(9, [4]) == {("a", 0): (130, 2), ("b", 0): (7, 1)}
    assert found.held(5, [1]) is None
    assert found.contradictions == []


def test_sites_and_journals_are_witnesses_too(tmp_path: Path) -> None:
    site = checkpointed(tmp_path / "site", state())
    run = with_a_past(tmp_path, 2)
    found = read_evidence([site, run / "syncer"])
    assert (found.lineage, found.epoch) == (3, 8)
    assert found.digests[3, 0, 5] == [(digest(BASES[0]), str(site))]
    assert [who for _, who in found.digests[1, 1, 4]] == [str(run / "syncer")]
    liar = events(tmp_path / "events.jsonl", published(4, "xxh3:another", fragment=1))
    contradicted = read_evidence([run / "syncer", liar])
    assert len(contradicted.contradictions) == 1
    assert "version 4 of fragment 1 in lineage 1 is xxh3:another in" in contradicted.contradictions[0]


def test_a_cold_site_says_nothing_and_what_is_no_evidence_is_named(tmp_path: Path) -> None:
    assert read_evidence([checkpointed(tmp_path / "site", state((-1, -1)))]).digests == {}
    with pytest.raises(ConfigError, match="is no evidence: an events"):
        read_evidence([tmp_path])


def test_digests_of_two_forms_say_nothing_of_each_other(tmp_path: Path) -> None:
    """A site of protocol 2 was told the SHA-256 of what the syncer's events know by another digest."""
    both = [published(2, "xxh3:" + "1" * 32), published(2, "a" * 64), published(2, "xxh3:" + "1" * 32)]
    found = read_evidence([events(tmp_path / "both.jsonl", *both)])
    assert found.contradictions == []
    assert [told for told, _ in found.digests[1, 0, 2]] == ["xxh3:" + "1" * 32, "a" * 64]
    liar = events(tmp_path / "liar.jsonl", published(2, "b" * 64))
    assert len(read_evidence([tmp_path / "both.jsonl", liar]).contradictions) == 1
