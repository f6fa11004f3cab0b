"""A run's folder, read by somebody who comes later."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.config.compose import compose, write
from diloco.config.errors import ConfigError
from diloco.config.placing import at
from diloco.config.run_dir import RunDir
from diloco.models.sources import CARD, data_of, past_of
from tests.models.pasts import configured


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
