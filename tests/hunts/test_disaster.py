from __future__ import annotations

import json

import pytest

from tests.hunts.disaster import BOUND_S, main
from tests.runs.processes import TINY

SMALL = [text for text in TINY if not text.startswith(("run.seconds", "data.cache"))]


@pytest.mark.parametrize(
    "way", [pytest.param("backup", marks=pytest.mark.slow), pytest.param("site", marks=pytest.mark.hunt)]
)
def test_a_run_whose_syncer_lost_its_folder_is_restored_as_it_says(
    way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A smaller model than the hunt's."""
    code = main(["--ways", way, "--versions", "6", "--settings", " ".join(SMALL)])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0, found
    seconds = found[way]["seconds_from_loss"]
    assert 0 < seconds["told"] < seconds["restored"] < seconds["serving"] < seconds["all_merged"] < BOUND_S
    assert found[way]["tokens"]["merged"] > 0
    assert found["violations"] == 0


def test_a_way_that_there_is_not_is_named() -> None:
    with pytest.raises(SystemExit, match="--ways is 'luck': some of backup, site"):
        main(["--ways", "luck"])
