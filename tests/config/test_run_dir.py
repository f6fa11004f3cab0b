from __future__ import annotations

from pathlib import Path

import pytest

from diloco.config.compose import compose, is_name
from diloco.config.errors import ConfigError
from diloco.config.run_dir import HOW, WHO, RunDir, name_run, new_name, run_dir_of


def test_a_run_has_one_folder_by_its_name() -> None:
    config = compose(["run.name=nimble-otter", "run.dir=somewhere"])
    assert run_dir_of(config).root == Path("somewhere/nimble-otter")
    assert run_dir_of(config).site("site-a").checkpoints == Path("somewhere/nimble-otter/sites/site-a/checkpoints")
    with pytest.raises(ConfigError, match=r"run\.name is null"):
        run_dir_of(compose([]))
    unnamed = compose([])
    name_run(unnamed)
    first = unnamed.run.name
    assert first
    name_run(unnamed)
    assert unnamed.run.name == first


def test_a_run_has_lost_its_data_when_it_published_and_no_snapshot_is_left(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert not run_dir.has_lost(run_dir.syncer), "nothing has happened in it"
    (run_dir.syncer / "snapshots" / "00000001").mkdir(parents=True)
    run_dir.events.write_text('{"at": 1, "who": "syncer", "what": "syncer_started"}\n')
    assert not run_dir.has_lost(tmp_path / "elsewhere"), "no site has anything that a new run would not know"
    with run_dir.events.open("a") as events:
        events.write('{"at": 1, "who": "syncer", "what": "published", "version": 1}\n')
    assert not run_dir.has_lost(run_dir.syncer)
    (run_dir.syncer / "snapshots" / "00000001").rename(run_dir.syncer / "snapshots" / "damaged-00000001")
    assert run_dir.has_lost(run_dir.syncer)
    assert run_dir.has_lost(tmp_path / "elsewhere")


def test_a_name_is_two_words_fit_for_a_folder_and_not_given_again() -> None:
    how, _, who = new_name(lambda name: False).partition("-")
    assert how in HOW.split()
    assert who in WHO.split()
    taken: set[str] = set()
    for _ in range(200):
        name = new_name(taken.__contains__)
        assert is_name(name)
        assert name not in taken
        taken.add(name)
    assert is_name(new_name(lambda name: True)), "there is always one"
    assert not any(is_name(name) for name in ("", "-a", "a/b", "a b", "é", "x" * 65, ".."))
