"""A run's folder, read by somebody who comes later."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.launch.errors import ConfigError
from diloco.launch.past import past_of
from tests.launch.pasts import configured


def test_the_configuration_says_what_the_run_was_and_where_its_data_lies(tmp_path: Path) -> None:
    configured(tmp_path)
    past = past_of(str(tmp_path / "past"))
    assert past.data == tmp_path / "past" / "syncer"
    assert (past.rules().down_codec, past.rules().outer.num_fragments) == ("int8", 2)
    configured(tmp_path, f"cluster.syncer.folder={tmp_path}/elsewhere")
    assert past_of(str(tmp_path / "past")).data == tmp_path / "elsewhere"


def test_without_it_there_is_no_past(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no run folder"):
        past_of(str(tmp_path))
