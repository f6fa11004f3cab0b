"""A run's folder, read by somebody who comes later."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diloco.codec.base import digest
from diloco.config.compose import compose, write
from diloco.config.errors import ConfigError
from diloco.config.placing import at
from diloco.config.run_dir import RunDir
from diloco.models.read import read_evidence
from diloco.models.sources import CARD, data_of, past_of
from tests.models.pasts import configured, with_a_past
from tests.models.test_read_warm_site import BASES, checkpointed, state


def test_the_configuration_says_what_the_run_was_and_where_its_data_lies(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no run folder"):
        past_of(str(tmp_path))
    configured(tmp_path)
    past = past_of(str(tmp_path / "past"))
    assert past.data == tmp_path / "past" / "syncer"
    assert (past.rules().down_codec, past.rules().outer.num_fragments) == ("int8", 2)
    configured(tmp_path, f"cluster.syncer.folder={tmp_path}/elsewhere")
    assert past_of(str(tmp_path / "past")).data == tmp_path / "elsewhere"


def test_after_a_move_the_data_lies_where_the_run_went_on(tmp_path: Path) -> None:
    configured(tmp_path, f"cluster.syncer.folder={tmp_path}/elsewhere")
    run = RunDir(tmp_path / "past")
    for folder, told in ((run.root / "standby", "standby"), (tmp_path / "far", str(tmp_path / "far"))):
        run.move_to(folder)
        assert run.moved.read_text() == told
        assert past_of(str(run.root)).data == data_of(run) == run.syncer == folder
    run.moved.write_text("")
    with pytest.raises(ConfigError, match=r"syncer\.folder is empty"):
        past_of(str(run.root))


def test_a_data_folder_names_its_run_and_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configured(tmp_path)
    for folder in (tmp_path / "past" / "standby", tmp_path / "far"):
        (folder / "journal").mkdir(parents=True)
        (folder / CARD).write_text('{"run_id": "past"}')
    beside = past_of(str(tmp_path / "past" / "standby"))
    assert (beside.run_dir.root, beside.data) == (tmp_path / "past", tmp_path / "past" / "standby")
    monkeypatch.chdir(tmp_path / "far")
    with pytest.raises(ConfigError, match="'past' is no run folder"):
        past_of(str(tmp_path / "far"))
    Path("runs").symlink_to(tmp_path)
    assert past_of(str(tmp_path / "far")).run_dir.root == Path("runs/past")
    (tmp_path / "far" / CARD).write_text("[]")
    with pytest.raises(ConfigError, match="does not say of which run"):
        past_of(str(tmp_path / "far"))


def test_a_run_of_several_syncers_has_a_past_for_each(tmp_path: Path) -> None:
    config = compose(["run.name=x", f"run.dir={tmp_path}", "outer.num_fragments=2", "outer.num_syncers=2"])
    write(config, tmp_path / "x" / "config.yaml")
    one = tmp_path / "x" / "syncers" / "1"
    write(at(config, 1), one / "config.yaml")
    with pytest.raises(ConfigError, match=r"is a run of 2 syncers, each with its own data: .*syncers/0 or .*syncers/1"):
        past_of(str(tmp_path / "x"))
    past = past_of(str(one))
    assert past.config.cluster.syncer.index == 1
    assert past.data == one / "syncer"


# --- What different witnesses remember of one run --------------------------------------------------------------------


def events(path: Path, *lines: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps({"at": 0, "who": "syncer", **line}) + "\n" for line in lines))
    return path


def published(version: int, digest: str, **more: object) -> dict[str, object]:
    return {"what": "published", "fragment": 0, "version": version, "digest": digest, **more}


def test_events_say_digests_tokens_and_numbers(tmp_path: Path) -> None:
    path = events(
        tmp_path / "events.jsonl",
        published(1, "of a run", merged={"a": [9, 9]}),
        published(3, "that was begun again", merged={"a": [9, 9]}),
        {"what": "syncer_started", "epoch": 4, "versions": [0]},
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
